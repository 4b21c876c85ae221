"""What the strict fake knows of each place of the cache: whose token it holds, and by which write it came there.

A place holds the token of a sequence if the places before it hold the tokens before: each keeps a number of its whole
prefix. A row that attends places which do not form one sequence gets a wrong answer on a device without an error;
here it is refused, with the rule by which the places were spoiled. Places that nothing ever filled may be attended:
a warm-up does that.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

ROOT = 1
NEVER, GOOD, WARM, TAIL, COPY = range(5)
_WORD = (1 << 63) - 1

RULES = {
    GOOD: ("21-2", "attends another sequence's tokens"),
    TAIL: ("8.1", "attends the padding of a prompt: the positions between were never decoded"),
    COPY: ("20-2", "attends what padded rows wrote: its line was absent from a decode call"),
}

Array = np.ndarray[tuple[int, ...], np.dtype[np.int64]]


def follow(prefix: int, token: int) -> int:
    """The number of the prefix that `token` makes longer."""
    return ((prefix * 6364136223846793005 + token + 1442695040888963407) ^ (prefix >> 29)) & _WORD or 2


def numbers(tokens: Sequence[int]) -> Array:
    found = np.empty(len(tokens), np.int64)
    last = ROOT
    for index, token in enumerate(tokens):
        last = found[index] = follow(last, int(token))
    return found


class Ledger:
    def __init__(self, num_places: int) -> None:
        self.number = np.zeros(num_places, np.int64)
        self.before = np.zeros(num_places, np.int64)
        self.why = np.zeros(num_places, np.int8)
        self._strange = -1

    def broken_at(self, places: Array) -> int:
        """Index of the first place that does not continue the ones before it; -1: all are one sequence."""
        if not len(places):
            return -1
        expected = np.concatenate(([ROOT], self.number[places[:-1]]))
        broken = np.flatnonzero((self.before[places] != expected) | (self.why[places] != GOOD))
        return int(broken[0]) if len(broken) else -1

    def differs_at(self, places: Array, expected: Array) -> int:
        """Index of the first place that does not hold the given prefix."""
        broken = np.flatnonzero((self.number[places] != expected) | (self.why[places] != GOOD))
        return int(broken[0]) if len(broken) else -1

    def write(self, places: Array, tokens: Sequence[int], prefix: int) -> None:
        """Tokens that continue the sequence with number `prefix`."""
        for place, token in zip(places, tokens, strict=True):
            self.before[place] = prefix
            prefix = self.number[place] = follow(int(prefix), int(token))
            self.why[place] = GOOD

    def spoil(self, places: Array, why: int) -> None:
        """Something that no sequence can use."""
        self._strange -= 2
        self.why[places] = why
        self.before[places] = self._strange
        self.number[places] = self._strange - 1
