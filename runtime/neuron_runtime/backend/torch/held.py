"""Which weights the torch backend holds as numbers of 8 bits, and which it quantizes while it reads them.

Called by the loader, which reads, and by the memory arithmetic, which counts. Pure, and without torch: it sees names,
shapes and how weights are stored.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Collection, Mapping
from typing import NamedTuple

from neuron_runtime.checkpoint import Checkpoint, stored_as
from neuron_runtime.quantization import (
    CONVERTED,
    LARGEST,
    WHOLE,
    Kind,
    Quantization,
    Quantizing,
    quantizable,
    wanted_format,
)


class Held(NamedTuple):
    """Names of weights. kept: those that stay numbers of 8 bits. made: what others of the checkpoint are quantized to
    while they are read, where they are not quantized.

    tiled: whether those that stay are in the form of `eight_bits`; then they are of type `kind`, and `span` columns
    share a scale. Otherwise they are int8, with a scale for each row.
    """

    kept: frozenset[str] = frozenset()
    made: Mapping[str, Kind] = {}
    tiled: bool = False
    kind: Kind = "int8"
    span: int = WHOLE


TILE_COLUMNS = 64
"""Of the kernel of `eight_bits`: it fills rows up to multiples of these, and as many may share a scale."""

MULTIPLIED_OUT = Held()
"""All weights are held in the dtype that is computed."""

_SIDE_BY_SIDE = re.compile(r"\.(?:([qkv])_proj|(gate_proj|up_proj|w1|w3))\.weight$")


def held_as(
    checkpoint: Checkpoint,
    shapes: Mapping[str, tuple[int, ...]],
    stored: Quantization | None,
    wanted: Quantizing,
    *,
    compiled: bool = False,
    own: Collection[Kind] = (),
    num_ranks: int = 1,
) -> Held:
    """How the weights of a checkpoint are held. shapes: of its tensors. stored: how it is quantized, if so. wanted: of
    the configuration. compiled: whether decode steps are. own: what the kernel of `eight_bits` multiplies here.

    torch itself multiplies int8 numbers with a scale for each row. What neither has is multiplied out, and so are all
    weights of compiled steps.
    Raises InvalidConfig if the checkpoint is quantized in another way than the configuration wants.
    """
    to = wanted_format(checkpoint.config, wanted)
    made: dict[str, Kind] = {}
    if stored is None and to in ("int8", "fp8"):
        made = dict.fromkeys(quantizable(shapes), to)
    how = CONVERTED[to] if stored is None and (to in ("int8", "fp8")) else stored
    if to == "none" or compiled or how is None or how.kind not in LARGEST or how.zero:
        return Held(made=made)
    names = set(made)
    if stored is not None:
        names = {name for name, shape in shapes.items() if len(stored_as(checkpoint, name, shape, stored)) > 1}
    span = how.block[1]
    kind = next((one for one in own if one == how.kind), None)
    if kind is not None and span % TILE_COLUMNS == 0:
        # A rank that begins within a block has other blocks.
        names = {name for name in names if span == WHOLE or shapes[name][1] // num_ranks % span == 0}
        return Held(_whole_layers(names, shapes), made, tiled=True, kind=kind, span=span)
    return Held(_whole_layers(names, shapes) if how.kind == "int8" and how.scales_rows else frozenset(), made)


def _whole_layers(names: set[str], shapes: Mapping[str, tuple[int, ...]]) -> frozenset[str]:
    """Without those of layers that compute another projection beside them, which is not one of these."""
    layers: defaultdict[str, list[str]] = defaultdict(list)
    for name in shapes:
        layers[_SIDE_BY_SIDE.sub(lambda match: "qkv" if match[1] else "gate_up", name)].append(name)
    return frozenset(name for layer in layers.values() if names.issuperset(layer) for name in layer)


def weight_bytes(shapes: Mapping[str, tuple[int, ...]], dtype_bytes: int, held: Held = MULTIPLIED_OUT) -> int:
    """Memory of tensors with these shapes."""
    scale_bytes = 4 if held.tiled else dtype_bytes

    def eight_bits(rows: int, columns: int) -> int:
        return rows * (columns + scale_bytes * num_scales(columns, held.span))

    return sum(
        eight_bits(*shape) if name in held.kept else math.prod(shape) * dtype_bytes for name, shape in shapes.items()
    )


def num_scales(columns: int, span: int) -> int:
    """Of a row."""
    return 1 if span == WHOLE else -(-columns // span)
