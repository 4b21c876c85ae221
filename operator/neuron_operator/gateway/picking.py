"""Which replica a request goes to: prefix affinity with bounded load. Pure.

Rendezvous hashing: every gateway gives the same request to the same replica without telling another, and a replica that
comes or goes moves only its own share. A replica that has more than its share of the requests is passed over.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Protocol, TypeVar

_MASK = 2**64 - 1
_MULTIPLIER = 0xD6E8FEB86659FD93
"""Of a bijective mixer, https://mostlymangling.blogspot.com/2018/07/on-mixing-functions-in-fast-splittable.html"""


class Candidate(Protocol):
    @property
    def seed(self) -> int: ...
    @property
    def in_flight(self) -> int: ...


One = TypeVar("One", bound=Candidate)


def rank(affinity: int, seed: int) -> int:
    mixed = ((affinity ^ seed) * _MULTIPLIER) & _MASK
    mixed ^= mixed >> 32
    return (mixed * _MULTIPLIER) & _MASK


def bound(total: int, count: int, load_factor: float, spread_from: int) -> int:
    """The most requests that a replica may have before it is passed over, one more of `total` included."""
    return max(spread_from, math.ceil(load_factor * (total + 1) / count))


def pick(candidates: Iterable[One], affinity: int, most: int) -> One | None:
    """Of those with fewer than `most` requests the one that ranks highest; if there is none, the least busy one."""
    best, best_rank, least = None, -1, None
    for one in candidates:
        if one.in_flight < most:
            if (ranked := rank(affinity, one.seed)) > best_rank:
                best, best_rank = one, ranked
        elif least is None or one.in_flight < least.in_flight:
            least = one
    return best or least
