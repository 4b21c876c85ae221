"""What the prefix cache has, as events for whoever routes requests to it: which blocks were stored, which were removed.

The block manager records them, and the engine process publishes them (`processes/cache_publisher.py`). The form is that
of vLLM's KV events as inference gateways read it: arrays in msgpack, fields in this order. A hash is an opaque number:
readers hash the tokens themselves.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from neuron_runtime.core import Picture
from neuron_runtime.engine.prefix_cache import pictures_within

MEDIUM = "GPU"
"""What readers call the memory of a device; they know no other."""


ExtraKeys = tuple[str | tuple[str, int], ...] | None
"""Of a block: the digest of each picture that it has tokens of, with the first of them counted from the block's first
token, which may be negative; then, in the first block of a sequence, the cache salt."""


class BlockStored(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Blocks of one sequence, one behind the other, that later requests can share."""

    block_hashes: tuple[int, ...]
    parent_block_hash: int | None
    """Of the block before them; None: they begin the sequence."""
    token_ids: tuple[int, ...]
    block_size: int
    lora_id: int | None = None
    """Deprecated by its readers, and never set."""
    medium: str = MEDIUM
    lora_name: str | None = None
    """The adapter that computed them, by the name that clients ask for."""
    extra_keys: tuple[ExtraKeys, ...] | None = None
    """For each block what else its hash depends on; None if no block has any."""


class BlockRemoved(msgspec.Struct, frozen=True, array_like=True, tag=True):
    block_hashes: tuple[int, ...]
    medium: str = MEDIUM


class AllBlocksCleared(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Nothing of what an engine before this one stored is left."""


CacheEvent = BlockStored | BlockRemoved | AllBlocksCleared


class EventBatch(msgspec.Struct, frozen=True, array_like=True):
    """What one step changed."""

    ts: float
    """Unix time."""
    events: tuple[CacheEvent, ...]
    data_parallel_rank: int | None = None


class CacheEvents:
    """Events since the last `take`, in the order in which they happened.

    adapter_names: by digest, as far as they are known.
    """

    def __init__(self, block_size: int) -> None:
        self.adapter_names: dict[str, str] = {}
        self._block_size = block_size
        self._events: list[CacheEvent] = [AllBlocksCleared()]
        self._removed: list[int] = []

    def stored(
        self,
        keys: Sequence[bytes],
        places: Iterable[int],
        tokens: Sequence[int],
        adapter: str,
        cache_salt: str,
        *,
        pictures: Sequence[Picture] = (),
    ) -> None:
        """Blocks of a sequence can be found from now on.

        Args:
            keys: of its first blocks.
            places: which of them, ascending.
        """
        self._close()
        for first, last in _runs(places):
            extra: tuple[ExtraKeys, ...] | None = None
            if pictures or (cache_salt and first == 0):
                extra = tuple(self._extra(place, cache_salt, pictures) for place in range(first, last + 1))
            self._events.append(
                BlockStored(
                    tuple(map(_hash, keys[first : last + 1])),
                    _hash(keys[first - 1]) if first else None,
                    tuple(tokens[first * self._block_size : (last + 1) * self._block_size]),
                    self._block_size,
                    lora_name=(self.adapter_names.get(adapter) or adapter) if adapter else None,
                    extra_keys=extra if extra and any(extra) else None,
                )
            )

    def _extra(self, place: int, cache_salt: str, pictures: Sequence[Picture]) -> ExtraKeys:
        begin = place * self._block_size
        salt = (cache_salt.encode(errors="replace").decode(),) if cache_salt and place == 0 else ()
        return (*pictures_within(pictures, begin, begin + self._block_size), *salt) or None

    def removed(self, key: bytes) -> None:
        """A block that could be found has other content from now on."""
        self._removed.append(_hash(key))

    def take(self) -> tuple[CacheEvent, ...]:
        self._close()
        events, self._events = tuple(self._events), []
        return events

    def _close(self) -> None:
        if self._removed:
            self._events.append(BlockRemoved(tuple(self._removed)))
            self._removed.clear()


def _hash(key: bytes) -> int:
    return int.from_bytes(key[:8], "big")


def _runs(places: Iterable[int]) -> Iterable[tuple[int, int]]:
    """The first and the last of each run of consecutive numbers."""
    run: list[int] = []
    for place in places:
        if run and place != run[-1] + 1:
            yield run[0], run[-1]
            run = []
        run.append(place)
    if run:
        yield run[0], run[-1]
