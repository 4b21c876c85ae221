"""How long a replica has been idle, by its metrics. Called by `decide`, and by `on_demand` for the line that is kept.
It is not trusted."""

from __future__ import annotations

import math
import re

_IDLE = re.compile(r"^neuron_serving_idle_seconds[{ ].{0,400}$", re.MULTILINE)


def idle_line_in(exposition: str) -> str:
    """The line with the seconds; empty: there is none. A replica has many more."""
    found = _IDLE.search(exposition)
    return found[0] if found else ""


def idle_seconds(exposition: str) -> float | None:
    """None: it does not say."""
    try:
        seconds = float(idle_line_in(exposition).rpartition(" ")[2])
    except ValueError:
        return None
    return seconds if math.isfinite(seconds) and seconds >= 0 else None
