"""Where each tensor of a converted model lies: files in the form of safetensors, whose headers are known before any
tensor is converted. Pure.

Called by `writing`. Within a file, tensors with larger numbers come first, so that each begins at a multiple of their
size, as readers want it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from neuron_runtime.checkpoint import WEIGHTS_FILE
from neuron_runtime.conversion.plan import Output
from neuron_runtime.dtypes import BY_STORED

MAX_SHARD_BYTES = 4 * 2**30
"""Of tensors in a file, unless one alone has more."""
ALIGNMENT = 8


@dataclass(frozen=True, slots=True)
class Place:
    """Bytes of a tensor in its file."""

    output: Output
    file: str
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class Shard:
    """A file. header: with its length before it."""

    file: str
    header: bytes
    places: tuple[Place, ...]

    @property
    def num_bytes(self) -> int:
        return self.places[-1].end


def shards_of(outputs: Iterable[Output], max_bytes: int = 0) -> list[Shard]:
    """max_bytes: of the tensors of a file; 0: MAX_SHARD_BYTES."""
    max_bytes = max_bytes or MAX_SHARD_BYTES
    groups: list[list[Output]] = [[]]
    size = 0
    for output in outputs:
        if groups[-1] and size + output.num_bytes > max_bytes:
            groups.append([])
            size = 0
        groups[-1].append(output)
        size += output.num_bytes
    if len(groups) == 1:
        return [_shard(WEIGHTS_FILE, groups[0])]
    return [
        _shard(f"model-{number:05}-of-{len(groups):05}.safetensors", group) for number, group in enumerate(groups, 1)
    ]


def index_of(shards: Sequence[Shard]) -> dict[str, object] | None:
    """The index file of several shards."""
    if len(shards) == 1:
        return None
    places = [place for shard in shards for place in shard.places]
    total = sum(place.output.num_bytes for place in places)
    return {
        "metadata": {"total_size": total},
        "weight_map": {place.output.name: place.file for place in sorted(places, key=lambda one: one.output.name)},
    }


def _shard(file: str, outputs: Sequence[Output]) -> Shard:
    ordered = sorted(outputs, key=lambda output: -BY_STORED[output.dtype].num_bytes)
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offsets, end = [], 0
    for output in ordered:
        begin, end = end, end + output.num_bytes
        offsets.append((begin, end))
        entries[output.name] = {"dtype": output.dtype, "shape": output.shape, "data_offsets": [begin, end]}
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    header = len(text).to_bytes(8, "little") + text
    places = (
        Place(output, file, len(header) + begin, len(header) + end)
        for output, (begin, end) in zip(ordered, offsets, strict=True)
    )
    return Shard(file, header, tuple(places))
