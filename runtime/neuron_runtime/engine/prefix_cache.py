"""The prefix cache: finds computed blocks by their content, so that a common prefix of sequences is computed once.

The block manager looks up the keys of a waiting sequence and reports which blocks are being computed and which are
done. The key of a block is a cryptographic hash over all tokens and pictures up to its end, so equal keys imply equal
KV contents.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from neuron_runtime.core import Picture
from neuron_runtime.engine.pool import Pool

Order = tuple[int, int]
"""Order of service; see `Sequence.order`."""


class BlockKeys:
    """Keys of the full blocks of a growing sequence, computed lazily and cached."""

    __slots__ = ("_block_size", "_keys", "_like", "_num_like", "_pictures", "_tokens")

    def __init__(
        self,
        tokens: Sequence[int],
        block_size: int,
        *,
        adapter: str,
        cache_salt: str,
        pictures: Sequence[Picture] = (),
        like: BlockKeys | None = None,
    ) -> None:
        """Keep a reference to `tokens`, to which more may be appended.

        pictures: those of the tokens. A block depends on those that it has tokens of.
        like: those of an earlier sequence that starts with the same tokens and pictures; what it knows by then is not
            hashed again.
        adapter, cache_salt: sequences that differ in one of them share no blocks. (A salt may be any JSON string,
        including lone surrogates.)
        """
        extra = f"{adapter} {cache_salt}".encode("utf-8", "surrogatepass")
        self._keys = [hashlib.sha256(extra).digest()]
        self._tokens = tokens
        self._block_size = block_size
        self._pictures = pictures
        self._like, self._num_like = like, len(tokens) // block_size

    def first(self, count: int) -> list[bytes]:
        """Keys of the first `count` blocks, all of whose tokens must be known."""
        keys, size = self._keys, self._block_size
        if self._like is not None:
            keys += self._like._keys[1 : self._num_like + 1]
            self._like = None
        for end in range(len(keys) * size, (count + 1) * size, size):
            tokens = array("q", self._tokens[end - size : end]).tobytes()
            key = hashlib.sha256(keys[-1] + tokens)
            if self._pictures:
                for digest, place in pictures_within(self._pictures, end - size, end):
                    key.update(f"{digest} {place} ".encode())
            keys.append(key.digest())
        return keys[1 : count + 1]


def pictures_within(pictures: Iterable[Picture], begin: int, end: int) -> list[tuple[str, int]]:
    """Digests of the pictures with tokens within these positions, each with its first one, counted from `begin`."""
    return [(one.digest, one.start - begin) for one in pictures if one.start < end and begin < one.end]


class Prefix(NamedTuple):
    """The cached prefix of a sequence."""

    blocks: list[int]
    """Computed blocks of its first tokens."""
    num_coming: int
    """Further blocks that a sequence earlier in order is computing now."""
    num_idle: int
    """How many of `blocks` have no holder; sharing them reduces the number of free blocks."""


class PrefixCache(Pool):
    """A pool of blocks in which a computed block can be found by its key until it is allocated again.

    Blocks without cached content are allocated first, then the least recently used ones.
    """

    def __init__(self, size: int, removed: Callable[[bytes], None] | None = None) -> None:
        """removed: called with the key of each block that can no longer be found."""
        super().__init__(size)
        self._removed = removed
        self._block_of: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}
        self._coming: dict[int, Order] = {}
        """Blocks that are being computed, with the order of the sequence that computes them."""
        self._idle: OrderedDict[int, None] = OrderedDict()
        """Computed blocks without a holder, least recently used first."""

    @property
    def num_free(self) -> int:
        return len(self._free) + len(self._idle)

    def find(self, keys: Iterable[bytes], order: Order) -> Prefix:
        """The longest run of cached blocks for a sequence with this order.

        Ignores blocks that a later sequence is computing, because that sequence may itself have to wait.
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
        """Add a holder to each, which must be in use or idle."""
        for number in numbers:
            if not self._holders[number] and number not in self._idle:
                raise ValueError(f"{number} is free and cannot be shared")
            self._idle.pop(number, None)
            self._holders[number] += 1

    def expect(self, keys: Iterable[bytes], blocks: Iterable[int], order: Order) -> None:
        """The sequence with this order is about to compute these blocks."""
        for key, block in zip(keys, blocks, strict=True):
            if key not in self._block_of:
                self._remember(key, block)
                self._coming[block] = order

    def computed(self, keys: Iterable[bytes], blocks: Iterable[int]) -> list[int]:
        """These blocks are full and computed. Of blocks with equal content, the first computed one can be found.

        Returns the places in the lists of those that can be found from now on.
        """
        found = []
        for place, (key, block) in enumerate(zip(keys, blocks, strict=True)):
            known = self._block_of.get(key)
            if known is not None and known not in self._coming:
                continue
            if known is None:
                self._remember(key, block)
            elif known == block:
                del self._coming[block]
            else:
                self._forget(known)
                self._remember(key, block)
            found.append(place)
        return found

    def _remember(self, key: bytes, block: int) -> None:
        self._block_of[key] = block
        self._key_of[block] = key

    def _forget(self, block: int) -> None:
        key = self._key_of.pop(block)
        del self._block_of[key]
        if self._coming.pop(block, None) is None and self._removed is not None:
            self._removed(key)

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
