"""Numbers handed out and taken back: KV blocks and slots alike, lowest free number first.

The running set holds one pool of slots, the block manager one of blocks. What a number means on the device is the
backend's business; what a block still holds when nobody holds it is `prefix_cache`'s.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable


class Pool:
    """Numbers 0 to size - 1 with a count of holders each.

    Lowest first keeps live slots compact (batch buckets) and, where a sequence takes one slot and one block
    together, makes the two numbers equal (slot layout).
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
        """The `count` lowest free numbers, each with one holder. Raises ValueError when fewer are free."""
        if count > self.num_free:
            raise ValueError(f"{count} numbers wanted, {self.num_free} free")
        numbers = [self._next() for _ in range(count)]
        for number in numbers:
            self._holders[number] = 1
        return numbers

    def share(self, numbers: Iterable[int]) -> None:
        """One more holder for each of these numbers, which must be in use."""
        for number in numbers:
            if not self._holders[number]:
                raise ValueError(f"{number} is free and cannot be shared")
            self._holders[number] += 1

    def give_back(self, numbers: Iterable[int]) -> None:
        """One holder less for each; a number without holders is free. Raises ValueError for a free one."""
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
