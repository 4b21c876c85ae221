"""Parameters of tests that have two of them, each with many values. All pairs would take long and find little more than
pairs that name each value of both: these run by default, and `make test-long` runs the others."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import pytest


def covering(many: Iterable[Any], few: Sequence[Any], names: Sequence[str] = ()) -> list[Any]:
    """All pairs; only those that take the second values in turn run by default.

    names: those of the second values, if they do not name themselves.
    """
    return [
        pytest.param(
            one,
            other,
            marks=() if number % len(few) == at else pytest.mark.long,
            id=f"{one}-{names[at] if names else other}",
        )
        for number, one in enumerate(many)
        for at, other in enumerate(few)
    ]
