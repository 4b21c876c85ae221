"""What the metrics of replicas say about drafts (speculative decoding). Called by `decide`, and by `on_demand` for the
lines that are kept. It is not trusted."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from itertools import islice

DRAFTED, ACCEPTED = "vllm:spec_decode_num_drafts_total", "vllm:spec_decode_num_accepted_tokens_total"
MAX_LENGTH = 100.0
"""More is no mean of a few drafts."""
MAX_LINES = 64
_COUNTED = re.compile(rf"^(?:{DRAFTED}|{ACCEPTED})[{{ ].{{0,400}}$", re.MULTILINE)


def counters_in(exposition: str) -> str:
    """The lines that `accepted_length` reads. A replica has many more, and one that somebody else wrote may have a
    megabyte of them."""
    return "\n".join(match[0] for match in islice(_COUNTED.finditer(exposition), MAX_LINES))


def accepted_length(expositions: Iterable[str]) -> str | None:
    """Mean tokens that a row of a step with drafts yields, its own one included, over replicas since they started;
    None: no row had drafts, or they do not say."""
    texts = tuple(expositions)
    drafted, accepted = (sum(_total(text, name) for text in texts) for name in (DRAFTED, ACCEPTED))
    mean = 1 + accepted / drafted if drafted > 0 else 0.0
    return f"{mean:.1f}" if 1 <= mean < MAX_LENGTH else None


def _total(exposition: str, name: str) -> float:
    """Of a counter, over all label values. What is no number counts as 0."""
    total = 0.0
    for line in exposition.splitlines():
        if line.startswith((name + "{", name + " ")):
            try:
                value = float(line.rpartition(" ")[2])
            except ValueError:
                continue
            total += value if math.isfinite(value) else 0.0
    return total
