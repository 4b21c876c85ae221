"""The table of what converting does to weights is what its command computes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from bench.conversion_errors import HEAD, SHAPES, Shape, lines

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
SMALL = Shape("a small one", 256, 512, 4, 2, 64)


def documented() -> list[list[str]]:
    _, table = PAGE.read_text().split(f"| {' | '.join(HEAD)} |\n")
    rows = table.partition("\n\n")[0].splitlines()[1:]
    return [re.split(r" *\| *", row.strip("| ")) for row in rows]


def test_the_table_has_what_its_command_computes() -> None:
    found = list(lines([SMALL]))
    rows = documented()
    for line, row in zip(found, rows[:2], strict=False):
        assert row[:3] == [line.model, line.stored, line.kind]
        assert float(row[3].rstrip("%")) == pytest.approx(100 * line.figures.layer_error, abs=0.02)
        assert float(row[4].rstrip("%")) == pytest.approx(float(line.cells[4].rstrip("%")), abs=1)
    of_small = [line.cells[1:3] for line in found[2:]]
    assert [tuple(row[:3]) for row in rows[2:]] == [
        (f"a layer as of {shape.name}", *cells) for shape in SHAPES for cells in of_small
    ]
    assert all(0 < line.figures.layer_error < 0.05 for line in found)
