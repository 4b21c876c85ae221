"""A pool of numbers for KV blocks and slots; allocates the lowest free number first.

The running set has a pool of slots, the block manager a pool of blocks. `prefix_cache` extends it with the cached
content of blocks.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable


class Pool:
    """Numbers 0 to size - 1, each with a reference count.

    Lowest first keeps live slots compact (for batch buckets) and makes the slot and the block of a sequence equal if
    it takes exactly one of each (slot layout).
    """

    def __init__(self, size: int) -> None:
        self._free = list(range(size))
        self._holders = [0] * size

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return len(self._holders) - self.num_free

    def take(self, count: int) -> list[int]:
        """Allocate the `count` lowest free numbers, with one holder each. Raises ValueError if fewer are free."""
        if count > self.num_free:
            raise ValueError(f"cannot take {count} numbers: {self.num_free} are free")
        numbers = [self._next() for _ in range(count)]
        for number in numbers:
            self._holders[number] = 1
        return numbers

    def give_back(self, numbers: Iterable[int]) -> None:
        """Remove a holder from each; a number without holders is free. Raises ValueError for a free number."""
        for number in numbers:
            if not self._holders[number]:
                raise ValueError(f"{number} is free already")
            self._holders[number] -= 1
            if not self._holders[number]:
                self._return(number)

    def _next(self) -> int:
        return heapq.heappop(self._free)

    def _return(self, number: int) -> None:
        heapq.heappush(self._free, number)
