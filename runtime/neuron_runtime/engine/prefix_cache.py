"""Blocks that are found again by what they hold, so that an equal beginning of two sequences is computed once.

The scheduler asks with the keys of a waiting sequence, tells which blocks are being computed and which are done. A key
is a cryptographic hash over everything up to the end of its block, so equal keys mean equal keys and values. Knows no
sequence, no step and no device.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from neuron_runtime.engine.pool import Pool

Order = tuple[int, int]
"""Who is served first; see `Sequence.order`."""


class Keys:
    """The keys of a growing sequence's full blocks; each is computed once, when it is first asked for."""

    __slots__ = ("_block_size", "_keys", "_tokens")

    def __init__(self, tokens: Sequence[int], block_size: int, *, adapter: int, cache_salt: str) -> None:
        """Watch `tokens`, to which more may be appended.

        adapter, cache_salt: sequences that differ in one of them share nothing. (A salt may hold any text that JSON
        can say, lone surrogates too.)
        """
        extra = f"{adapter} {cache_salt}".encode("utf-8", "surrogatepass")
        self._keys = [hashlib.sha256(extra).digest()]
        self._tokens = tokens
        self._block_size = block_size

    def first(self, count: int) -> list[bytes]:
        """Keys of the first `count` blocks, all of whose tokens must be known."""
        keys, size = self._keys, self._block_size
        for end in range(len(keys) * size, (count + 1) * size, size):
            tokens = array("q", self._tokens[end - size : end]).tobytes()
            keys.append(hashlib.sha256(keys[-1] + tokens).digest())
        return keys[1 : count + 1]


class Prefix(NamedTuple):
    """What is known of the beginning of a sequence."""

    blocks: list[int]
    """Hold its first tokens, computed."""
    num_coming: int
    """Further blocks that a sequence served earlier is computing now."""
    num_idle: int
    """How many of `blocks` nobody holds: to share them takes free blocks away."""


class PrefixCache(Pool):
    """A pool of blocks with a memory: a computed block is found by its key until it is handed out again.

    Blocks that hold nothing known are handed out first, then those that nobody has used for longest.
    """

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self._block_of: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}
        self._coming: dict[int, Order] = {}
        """Blocks whose keys are known and that are not computed yet, and who computes them."""
        self._idle: OrderedDict[int, None] = OrderedDict()
        """Computed blocks that nobody holds, least recently used first."""

    @property
    def num_free(self) -> int:
        return len(self._free) + len(self._idle)

    def find(self, keys: Iterable[bytes], order: Order) -> Prefix:
        """The longest run of known blocks for a sequence with this place in the order of service.

        What a later one is computing counts as unknown: nobody waits for a sequence that may have to wait itself.
        """
        blocks: list[int] = []
        num_coming = 0
        for key in keys:
            block = self._block_of.get(key)
            if block is None or self._coming.get(block, order) > order:
                break
            if num_coming or block in self._coming:
                num_coming += 1
            else:
                blocks.append(block)
        return Prefix(blocks, num_coming, sum(block in self._idle for block in blocks))

    def share(self, numbers: Iterable[int]) -> None:
        """One more holder for each; a free block that is known may be shared too."""
        numbers = list(numbers)
        for number in numbers:
            if number in self._idle:
                del self._idle[number]
                self._holders[number] += 1
            else:
                super().share((number,))

    def expect(self, keys: Iterable[bytes], blocks: Iterable[int], order: Order) -> None:
        """The sequence with this place in the order is about to compute these blocks."""
        for key, block in zip(keys, blocks, strict=True):
            if key not in self._block_of:
                self._remember(key, block)
                self._coming[block] = order

    def computed(self, keys: Iterable[bytes], blocks: Iterable[int]) -> None:
        """These blocks are full and computed. Where two blocks hold the same, the first that was computed is found."""
        for key, block in zip(keys, blocks, strict=True):
            found = self._block_of.get(key)
            if found is None:
                self._remember(key, block)
            elif found == block:
                self._coming.pop(block, None)
            elif found in self._coming:
                self._forget(found)
                self._remember(key, block)

    def _remember(self, key: bytes, block: int) -> None:
        self._block_of[key] = block
        self._key_of[block] = key

    def _forget(self, block: int) -> None:
        del self._block_of[self._key_of.pop(block)]
        self._coming.pop(block, None)

    def _next(self) -> int:
        if self._free:
            return super()._next()
        block, _ = self._idle.popitem(last=False)
        self._forget(block)
        return block

    def _return(self, number: int) -> None:
        if number in self._key_of and number not in self._coming:
            self._idle[number] = None
            return
        if number in self._coming:
            self._forget(number)
        super()._return(number)
