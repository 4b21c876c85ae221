"""Which weights the torch backend holds as int8 numbers, and which it quantizes while it reads them.

Called by the loader, which reads, and by the memory arithmetic, which counts. Pure, and without torch: it sees names,
shapes and how weights are stored.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Mapping
from typing import NamedTuple

from neuron_runtime.checkpoint import Checkpoint, stored_as
from neuron_runtime.quantization import Kind, Quantization, Quantizing, quantizable, wanted_format


class Held(NamedTuple):
    """Names of weights. int8: those that stay int8 numbers with a scale for each row. made: what others of the
    checkpoint are quantized to while they are read, where they are not quantized."""

    int8: frozenset[str] = frozenset()
    made: Mapping[str, Kind] = {}


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
) -> Held:
    """How the weights of a checkpoint are held. shapes: of its tensors. stored: how it is quantized, if so. wanted: of
    the configuration. compiled: whether decode steps are.

    FP8 is multiplied out: no product of torch reads such numbers faster than those of the model's dtype. So are all
    weights of compiled steps.
    Raises InvalidConfig if the checkpoint is quantized in another way than the configuration wants.
    """
    to = wanted_format(checkpoint.config, wanted)
    made: dict[str, Kind] = {}
    if stored is None and to in ("int8", "fp8"):
        made = dict.fromkeys(quantizable(shapes), to)
    if to == "none" or compiled:
        return Held(made=made)
    int8 = {name for name, kind in made.items() if kind == "int8"}
    if stored is not None and stored.kind == "int8" and stored.scales_rows:
        int8 = {name for name, shape in shapes.items() if len(stored_as(checkpoint, name, shape, stored)) > 1}
    return Held(_whole_layers(int8, shapes), made)


def _whole_layers(names: set[str], shapes: Mapping[str, tuple[int, ...]]) -> frozenset[str]:
    """Without those of layers that compute another projection beside them, which is not one of these."""
    layers: defaultdict[str, list[str]] = defaultdict(list)
    for name in shapes:
        layers[_SIDE_BY_SIDE.sub(lambda match: "qkv" if match[1] else "gate_up", name)].append(name)
    return frozenset(name for layer in layers.values() if names.issuperset(layer) for name in layer)


def weight_bytes(shapes: Mapping[str, tuple[int, ...]], dtype_bytes: int, int8: frozenset[str]) -> int:
    """Memory of tensors with these shapes. int8: those of `Held`."""
    return sum(
        math.prod(shape) + shape[0] * dtype_bytes if name in int8 else math.prod(shape) * dtype_bytes
        for name, shape in shapes.items()
    )
