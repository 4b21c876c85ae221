"""The adapters of a decoder: the weights of those that are loaded, and which tokens of a step get which.

Created by the loader if adapters may be active; the backend passes batches on. It has a second decoder of the same
weights whose linear layers are wrapped, see `lora.py`: a step without adapters runs on the first, as if there were
none. It chooses no places, and checks no more of an adapter than this model needs.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
import torch

from neuron_runtime.adapters.peft import WEIGHTS_FILE
from neuron_runtime.adapters.tensors import pairs
from neuron_runtime.backend.slots import IntArray
from neuron_runtime.backend.torch.architecture import DecoderConfig, projections
from neuron_runtime.backend.torch.decoder import Decoder, Layer
from neuron_runtime.backend.torch.linear import Linear
from neuron_runtime.backend.torch.lora import AdaptedLinear, Pair, Route
from neuron_runtime.backend.torch.parts import parts_of
from neuron_runtime.backend_protocol import IllegalBatch
from neuron_runtime.core import BackendLimits, Batch
from neuron_runtime.errors import ExitCode, FatalError

LAYERS: Mapping[str, tuple[str, ...]] = {
    "qkv": ("q_proj", "k_proj", "v_proj"),
    "output": ("o_proj",),
    "mlp.gate_up": ("gate_proj", "up_proj"),
    "mlp.down": ("down_proj",),
}
"""By field of `decoder.Layer`, or of its MLP, the projections whose outputs it has side by side."""

AdapterWeights = Mapping[tuple[int, str], Pair]
"""By layer and projection, this rank's part of what an adapter adds. One that is missing adds nothing."""


class Adapters:
    """model: of the whole model. decoder: of this rank's part of it."""

    def __init__(self, decoder: Decoder, model: DecoderConfig, limits: BackendLimits, rank: int, size: int) -> None:
        self._limits = limits
        self._shapes = projections(model)
        self._parts = parts_of(model, rank, size)
        self._dtype = decoder.weights.embedding.dtype
        self._loaded: dict[str, AdapterWeights] = {}
        self._placed = {0: ""}
        """The adapter of each place that has one."""
        self._place_of_slot: IntArray = np.zeros(limits.max_rows, dtype=np.int64)
        self._routed: bytes = b""
        self._route, self._layers = Route(self._dtype), []
        part = projections(decoder.config)

        def wrap(base: Linear, names: tuple[str, ...]) -> AdaptedLinear:
            sizes = [part[name].outputs for name in names]
            places, rank = limits.max_adapters, limits.max_adapter_rank
            num_inputs = part[names[0]].inputs
            return AdaptedLinear(base, num_inputs, sizes, self._dtype, num_places=places, rank=rank, route=self._route)

        fields = [field for field, names in LAYERS.items() if not set(names).isdisjoint(limits.adapter_targets)]
        for layer in decoder.weights.layers:
            self._layers.append({field: wrap(attrgetter(field)(layer), LAYERS[field]) for field in fields})
        wrapped = zip(decoder.weights.layers, self._layers, strict=True)
        layers = tuple(_replaced(layer, changed) for layer, changed in wrapped)
        self._decoder = copy(decoder)
        self._decoder.weights = decoder.weights._replace(layers=layers)

    def read(self, folder: Path) -> AdapterWeights:
        """See `AdapterBackend.read_adapter`."""
        weights: dict[tuple[int, str], Pair] = {}
        with torch.inference_mode():
            for one in pairs(folder):
                what = f"{folder / WEIGHTS_FILE}: {one.module} of layer {one.layer}"
                if one.layer >= len(self._layers) or one.module not in self._limits.adapter_targets:
                    raise FatalError(ExitCode.ADAPTER_MISMATCH, f"{what}: this model has no such projection to change")
                shape = self._shapes[one.module]
                if (one.a.shape[1], one.b.shape[0]) != shape or len(one.a) > self._limits.max_adapter_rank:
                    expected = f"of {shape.inputs} to {shape.outputs} numbers, rank {self._limits.max_adapter_rank}"
                    raise FatalError(ExitCode.ADAPTER_MISMATCH, f"{what} has another shape than here: {expected}")
                weights[one.layer, one.module] = self._part_of(one.module, one.a, one.b, one.scaling)
        return weights

    def zeros(self) -> AdapterWeights:
        """An adapter that changes nothing, though all products are computed."""
        weights: dict[tuple[int, str], Pair] = {}
        for number, layer in enumerate(self._layers):
            for name in (name for field in layer for name in LAYERS[field]):
                shape = self._shapes[name]
                weights[number, name] = self._part_of(
                    name, torch.zeros(1, shape.inputs), torch.zeros(shape.outputs, 1), 1.0
                )
        return weights

    def add(self, digest: str, weights: AdapterWeights) -> None:
        self._loaded[digest] = weights

    def remove(self, digest: str) -> None:
        """No sequence has it, and none gets the place that it had."""
        del self._loaded[digest]
        self._placed = {place: placed for place, placed in self._placed.items() if placed != digest}

    def apply(self, batch: Batch) -> None:
        """What the batch changes, before its rows run. Raises IllegalBatch for what was not added."""
        for place, digest in batch.adapters:
            if digest not in self._loaded or not 0 < place <= self._limits.max_adapters:
                raise IllegalBatch(f"step {batch.step} gives place {place} an adapter {digest}, which is not there")
            self._placed[place] = digest
            weights = self._loaded[digest]
            for number, layer in enumerate(self._layers):
                for field, linear in layer.items():
                    linear.put(place, [weights.get((number, name)) for name in LAYERS[field]])
        for added in batch.added:
            if added.adapter not in self._placed:
                raise IllegalBatch(f"step {batch.step} adds a sequence for place {added.adapter}, which has no adapter")
            self._place_of_slot[added.slot] = added.adapter

    def decoder_for(self, slots: IntArray, num_tokens: IntArray) -> Decoder | None:
        """The decoder for these rows; None if no row has an adapter."""
        places = self._place_of_slot[slots]
        if not places.any():
            return None
        # Most steps have the rows of the step before.
        if (rows := places.tobytes() + num_tokens.tobytes()) != self._routed:
            self._route.set(places, num_tokens)
            self._routed = rows
        return self._decoder

    def _part_of(self, module: str, a: torch.Tensor, b: torch.Tensor, scaling: float) -> Pair:
        """This rank's part of a pair, in the layout of `Pair`."""
        part = self._parts.get(f"{module}.weight")
        if part is not None:
            span = part.span((b.shape[0], a.shape[1])[part.dimension])
            a, b = (a, b[span.start : span.stop]) if part.dimension == 0 else (a[:, span.start : span.stop], b)
        pair = Pair(torch.empty(a.shape, dtype=self._dtype).t(), torch.empty(b.shape[::-1], dtype=self._dtype))
        for number, (row, column) in enumerate(zip(a, b.t(), strict=True)):
            pair.a[:, number] = row
            pair.b[number] = column.float() * scaling
        return pair


def _replaced(layer: Layer, linears: Mapping[str, AdaptedLinear]) -> Layer:
    """A layer with other linear layers in these fields."""
    own: dict[str, Any] = {field: linear for field, linear in linears.items() if field in layer._fields}
    of_mlp: dict[str, Any] = {field.removeprefix("mlp."): linears[field] for field in linears.keys() - own.keys()}
    return layer._replace(**own, mlp=layer.mlp._replace(**of_mlp))
