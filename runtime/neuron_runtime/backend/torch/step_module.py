"""The decode step as a module that torch can export: `Decoder.forward` over rows of one token each.

`artifact.py` compiles it; `compiled.py` feeds what it compiled with the same inputs and constants. Weights and caches
are no part of a graph, and lines, lengths and (above one) rows are free, so one graph fits every size of the cache.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Self

import torch
from torch import nn
from torch.utils import _pytree as trees

from neuron_runtime.backend.torch.architecture import DecoderConfig, Window, tensor_shapes
from neuron_runtime.backend.torch.cache import DecodePart, KVCache, Reads, StepPlan, TracedPlan, additive, lazy_zeros
from neuron_runtime.backend.torch.decoder import Decoder, read_weights
from neuron_runtime.backend.torch.linear import Packed, Weight


class SeenInputs(NamedTuple):
    """`cache.SeenColumns` as tensors; columns: `[columns]`, the positions of each line that are read."""

    lines: torch.Tensor
    columns: torch.Tensor
    seen_from: torch.Tensor
    seen_to: torch.Tensor


class StepInputs(NamedTuple):
    """The inputs of a graph; it is called with `tensors`.

    seen: for each window of the model, see `distinct`. keys, values: the cache of each layer, written in place.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    write_line: torch.Tensor
    write_offset: torch.Tensor
    seen: tuple[SeenInputs, ...]
    keys: tuple[torch.Tensor, ...]
    values: tuple[torch.Tensor, ...]

    def tensors(self) -> list[torch.Tensor]:
        return [*self[:4], *(tensor for one in self.seen for tensor in one), *self.keys, *self.values]

    @classmethod
    def of(cls, tensors: Sequence[torch.Tensor], windows: Sequence[Window | None]) -> Self:
        """From `tensors` for a model with these windows per layer."""
        begin, end = 4, 4 + 4 * len(distinct(windows))
        seen = tuple(SeenInputs(*tensors[i : i + 4]) for i in range(begin, end, 4))
        keys, values = tensors[end : end + len(windows)], tensors[end + len(windows) :]
        token_ids, positions, write_line, write_offset = tensors[:4]
        return cls(token_ids, positions, write_line, write_offset, seen, tuple(keys), tuple(values))


def distinct(windows: Sequence[Window | None]) -> list[Window | None]:
    """The different windows of a model's layers, in the order of the layers."""
    return list(dict.fromkeys(windows))


def step_inputs(token_ids: torch.Tensor, plan: StepPlan, *, blocks: bool) -> StepInputs:
    """The inputs for a step whose rows all feed one token. blocks: the layout for which the graph was compiled."""
    cache, rows = plan.cache, plan.rows
    seen = []
    for window in distinct(cache.windows):
        # A graph of the block layout has at least two lines per row. The second may be any: no row sees it.
        lines = rows.lines.repeat(2, axis=1) if blocks and rows.lines.shape[1] == 1 else rows.lines
        one = cache.seen(rows.start, lines, window)
        lines = one.lines.repeat(2, axis=1) if blocks and one.lines.shape[1] == 1 else one.lines
        seen.append(
            SeenInputs(
                lines=torch.from_numpy(lines).contiguous(),
                columns=torch.arange(one.begin, one.end),
                seen_from=torch.from_numpy(one.seen_from),
                seen_to=torch.from_numpy(one.seen_to),
            )
        )
    places = (plan.positions, plan.write_line, plan.write_offset)
    return StepInputs(token_ids, *places, tuple(seen), tuple(cache.keys), tuple(cache.values))


def constants(weights: tuple[Any, ...]) -> dict[str, torch.Tensor]:
    """The tensors of `decoder.Weights`, or of its first fields, by their names in graphs."""
    leaves = trees.tree_leaves(weights)
    return {f"weight_{i}": leaf for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)}


class DecodeStep(nn.Module):
    """Hidden states `[rows, hidden size]` after the tokens of `StepInputs`. Weights have shapes but no values.

    free_constants: names of those whose values a graph must not contain.
    """

    def __init__(self, model: DecoderConfig, dtype: torch.dtype, *, blocks: bool) -> None:
        super().__init__()
        self._model, self._blocks = model, blocks
        weights = read_weights(model, _Shapes(tensor_shapes(model), dtype), _packed)
        leaves, self._structure = trees.tree_flatten(weights)
        self._names = [None if leaf is None else f"weight_{i}" for i, leaf in enumerate(leaves)]
        used = constants(weights[:4])  # the head is no part of a step
        self.free_constants = {name for name, tensor in used.items() if tensor.is_meta}
        for name, tensor in constants(weights).items():
            values = lazy_zeros(tensor.shape, tensor.dtype) if tensor.is_meta else tensor
            self.register_parameter(name, nn.Parameter(values, requires_grad=False))

    def forward(self, *tensors: torch.Tensor) -> torch.Tensor:
        model, windows = self._model, distinct(self._model.windows)
        inputs = StepInputs.of(tensors, model.windows)
        leaves = [None if name is None else getattr(self, name) for name in self._names]
        decoder = Decoder(model, trees.tree_unflatten(leaves, self._structure))
        dtype = inputs.keys[0].dtype
        parts = dict(zip(windows, (_decode_part(seen, dtype) for seen in inputs.seen), strict=True))
        columns = None if self._blocks else [inputs.seen[windows.index(window)].columns for window in model.windows]
        plan = TracedPlan(
            _GraphCache(model.windows, inputs.keys, inputs.values, columns),
            inputs.positions,
            inputs.write_line,
            inputs.write_offset,
            tuple(Reads(parts[window], ()) for window in model.windows),
        )
        return decoder.forward(inputs.token_ids, plan)


def _packed(weight: Weight, bias: torch.Tensor | None) -> Packed:
    assert isinstance(weight, torch.Tensor)  # `held_as`: weights of compiled steps are multiplied out
    return Packed(weight, bias)


class _GraphCache(KVCache):
    """Reads lines by index only, which compiles to one copy. columns: per layer; None: whole lines (blocks)."""

    def __init__(self, windows: Any, keys: Any, values: Any, columns: Sequence[torch.Tensor] | None) -> None:
        super().__init__(windows, keys, values)
        self._columns = columns

    def read_decode(self, layer: int, part: DecodePart) -> tuple[torch.Tensor, torch.Tensor]:
        return self._gather(self.keys[layer], layer, part), self._gather(self.values[layer], layer, part)

    def _gather(self, storage: torch.Tensor, layer: int, part: DecodePart) -> torch.Tensor:
        assert part.gather is not None
        if self._columns is not None:
            return storage[part.gather.view(-1)][:, :, self._columns[layer]]
        rows, num_lines = part.gather.shape
        _, kv_heads, line_length, dim = storage.shape
        return storage[part.gather].transpose(1, 2).reshape(rows, kv_heads, num_lines * line_length, dim)


def _decode_part(seen: SeenInputs, dtype: torch.dtype) -> DecodePart:
    num_positions = seen.lines.shape[1] * seen.columns.shape[0]
    column = torch.arange(num_positions)
    visible = (column < seen.seen_to.view(-1, 1, 1, 1)) & (column >= seen.seen_from.view(-1, 1, 1, 1))
    return DecodePart(
        flat=None,
        range=None,
        gather=seen.lines,
        lanes=None,
        span=slice(0, num_positions),
        mask=additive(visible, dtype),
    )


class _Shapes:
    """A `decoder.Reader` of tensors without data."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype) -> None:
        self._shapes, self._dtype = shapes, dtype

    def take(self, *names: str) -> torch.Tensor:
        shapes = [self._shapes[name] for name in names]
        rows = sum(shape[0] for shape in shapes)
        return torch.empty((rows, *shapes[0][1:]), dtype=self._dtype, device="meta")

    take_weight = take

    def take_if_any(self, present: bool, *names: str) -> torch.Tensor | None:
        return self.take(*names) if present else None
