"""Markdown for the generated parts of the docs."""

from __future__ import annotations

from collections.abc import Iterable


def table(head: Iterable[str], lines: Iterable[Iterable[str]]) -> str:
    first, *others = (f"| {' | '.join(cells)} |".replace("  |", " |") for cells in (head, *lines))
    return "\n".join((first, "|" + "---|" * (first.count("|") - 1), *others))
