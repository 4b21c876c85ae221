"""The sampling benchmark: every case runs on a small vocabulary."""

from __future__ import annotations

import pytest

from bench import sampling
from bench.report import Table

pytestmark = pytest.mark.long


def test_every_sampling_case_gives_a_figure_and_one_has_a_bound() -> None:
    rows = sampling.measure(num_iters=1, vocabulary_size=9000, num_rows=3)
    assert len(rows) == len(sampling.CASES) + len(sampling.SPREADS)
    held = [row for row in rows if row.target is not None]
    assert [row.name for row in held] == ["temperature 0.7, top_p 0.9, 3 rows"]
    assert held[0].target is not None
    assert held[0].target.bound == sampling.TARGET_MILLISECONDS == 8.0
    for row in rows:
        (milliseconds,) = row.values
        assert isinstance(milliseconds, float)
        assert milliseconds > 0
        assert row.note.endswith("ms of CPU")
        assert row.load is not None
    text = Table("sampling", rows).text()
    assert "top_p 0.9, all penalties" in text
    assert "top_p 0.9, normal logits, sigma 2, 3 rows" in text
