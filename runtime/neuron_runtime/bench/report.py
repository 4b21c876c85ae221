"""Tables of figures for the terminal and for JSON. Used by `bench simulate`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any


def percentile(values: Sequence[float], share: float) -> float | None:
    """The smallest value that at most `1 - share` (0 to 1) of the values exceed; None without values."""
    return sorted(values)[max(math.ceil(share * len(values)), 1) - 1] if values else None


@dataclass(frozen=True, slots=True)
class Line:
    """One figure, with a value for each column of its table, or None."""

    name: str
    values: tuple[float | str | None, ...]
    unit: str = ""
    note: str = ""


@dataclass(frozen=True, slots=True)
class Table:
    """Related figures. `columns` name the values of each row."""

    title: str
    rows: tuple[Line, ...]
    columns: tuple[str, ...]

    def text(self) -> str:
        """Aligned columns; omits unit and note if no row has one."""
        head = ["", *self.columns, "unit", "note"]
        lines = [[row.name, *map(shown, row.values), row.unit, row.note] for row in self.rows]
        return aligned(self.title, head, lines, len(self.columns))

    def plain(self) -> dict[str, Any]:
        rows = [asdict(row) | {"values": dict(zip(self.columns, row.values, strict=True))} for row in self.rows]
        return {"title": self.title, "rows": rows}


def aligned(title: str, head: Sequence[str], lines: Sequence[Sequence[str]], num_values: int) -> str:
    """A table as text: a column of names, `num_values` columns of numbers, and others, which are omitted if empty."""
    used = [at for at in range(len(head)) if at <= num_values or any(line[at] for line in lines)]
    widths = [max(len(line[at]) for line in (head, *lines)) for at in used]
    numbers = range(1, 1 + num_values)
    printed = (
        "  ".join(
            line[at].rjust(width) if at in numbers else line[at].ljust(width)
            for at, width in zip(used, widths, strict=True)
        ).rstrip()
        for line in (head, *lines)
    )
    return "\n".join([title, "-" * len(title), *(line for line in printed if line)])


def shown(value: float | str | None) -> str:
    """Three significant digits, never an exponent."""
    if value is None:
        return "-"
    if isinstance(value, str | int):
        return str(value)
    if value == 0:
        return "0"
    digits = next((digits for bound, digits in ((100, 0), (10, 1), (1, 2), (0.1, 3)) if abs(value) >= bound), 4)
    return f"{value:.{digits}f}"
