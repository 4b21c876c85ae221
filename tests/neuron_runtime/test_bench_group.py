"""What a group adds to a step, with followers as processes."""

from __future__ import annotations

import pytest

from bench import group
from bench.report import at_most

pytestmark = pytest.mark.long


def test_a_group_is_measured_with_real_followers() -> None:
    costs = [group.measure(num_ranks, 10) for num_ranks in (1, 2)]
    rows = group.figures(costs)
    assert [row.name for row in rows] == ["the same, one rank", "time a group of 2 ranks adds per step"]
    assert rows[1].target == at_most(0.3)
    assert costs[1].worst_seconds >= costs[1].seconds > 0
