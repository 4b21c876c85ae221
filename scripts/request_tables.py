"""Tables of the docs about what a request may contain, read from the runtime's declarations."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Callable
from typing import Any

from markdown_table import table
from neuron_runtime.not_built import LEAVE_OUT, Row, Surface, rows


def as_json(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))


def refused(where: Surface, title: str, spelled: Callable[[Any], str]) -> str:
    """The names of one surface that are refused, with their neutral values."""
    return table(
        (title, "Accepted values"),
        (
            (f"`{row.name}`{_cure(row)}", ", ".join(f"`{spelled(value)}`" for value in row.neutral))
            for row in rows(where)
            if row.has_effect
        ),
    )


def names(where: Surface, *, has_effect: bool) -> str:
    """The names of one surface in one paragraph."""
    found = ", ".join(f"`{row.name}`" for row in rows(where) if row.has_effect is has_effect)
    return textwrap.fill(found, 120, break_long_words=False, break_on_hyphens=False)


def _cure(row: Row) -> str:
    return "" if row.cure == LEAVE_OUT else f" ({row.cure})"
