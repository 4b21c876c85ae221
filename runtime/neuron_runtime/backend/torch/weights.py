"""Reads the tensors of a checkpoint, memory-mapped and one at a time, into the decoder's layout.

Called by `load_backend`, which has checked names and shapes. Reports progress in bytes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from neuron_runtime.backend.torch.dequantizing import Made, Quantized, dequantize, read_numbers, zeros_of
from neuron_runtime.backend.torch.eight_bits import TILE_ROWS, in_tiles
from neuron_runtime.backend.torch.held import MULTIPLIED_OUT, TILE_COLUMNS, Held, num_scales
from neuron_runtime.backend.torch.linear import Int8Weight, TiledWeight, Weight
from neuron_runtime.backend.torch.parts import ELSEWHERE, WHOLE, TensorPart
from neuron_runtime.backend.torch.quantizing import STORED
from neuron_runtime.backend.torch.read_ahead import LOADING
from neuron_runtime.backend_protocol import ProgressCallback
from neuron_runtime.checkpoint import Checkpoint, InvalidModel, TensorInfo, stored_as
from neuron_runtime.quantization import Quantization


class WeightReader:
    """Returns tensors of a checkpoint by name, converted to one dtype. Keeps the files open as long as it lives."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        shapes: Mapping[str, tuple[int, ...]],
        dtype: torch.dtype,
        progress: ProgressCallback,
        parts: Mapping[str, TensorPart | None],
        *,
        quantization: Quantization | None = None,
        held: Held = MULTIPLIED_OUT,
    ) -> None:
        """shapes: of all tensors that are taken. parts: what of a tensor is read, by its last words; see
        `parts.parts_of`. quantization: how weights are stored, where they are quantized. held: which ones stay so."""
        self._checkpoint, self._quantization, self._held = checkpoint, quantization, held
        self._shapes = shapes
        self._stored = {name: stored_as(checkpoint, name, shape, quantization) for name, shape in shapes.items()}
        self._parts = parts
        self._dtype = dtype
        self._progress = progress
        self._files = {file: _open(checkpoint.folder / file) for file in checkpoint.files}
        self._num_bytes_done = 0
        self._room: torch.Tensor | None = None

    def take(self, *names: str) -> torch.Tensor:
        """The named tensors, or their parts, concatenated along the first dimension as a new contiguous tensor."""
        shapes = [self._shape(name) for name in names]
        out = torch.empty((sum(shape[0] for shape in shapes), *shapes[0][1:]), dtype=self._dtype)
        for name, part in zip(names, torch.split(out, [shape[0] for shape in shapes]), strict=True):
            self._read(name, part)
            self._report(name)
        return out

    def take_weight(self, *names: str) -> Weight:
        """As `take`, in the form in which linear layers hold these weights."""
        held = self._held
        if not held.kept.issuperset(names):
            return self.take(*names)
        shapes = [self._shape(name) for name in names]
        sizes, num_columns = [shape[0] for shape in shapes], shapes[0][1]
        numbers = self._numbers(sum(sizes), num_columns)
        dtype = torch.float32 if held.tiled else self._dtype
        scale = torch.ones(sum(sizes), num_scales(num_columns, held.span), dtype=dtype)
        own = numbers[: len(scale), :num_columns]
        for name, *parts in zip(names, torch.split(own, sizes), torch.split(scale, sizes), strict=True):
            weight = self._quantized(name)
            assert weight is not None
            rows, columns = self._spans(name)
            read_numbers(weight, rows, columns, *parts)
            parts[0][rows.stop - rows.start :] = 0
            self._report(name)
        if held.tiled:
            tiles = in_tiles(numbers).view(STORED[held.kind])
            return TiledWeight(tiles, scale.t().contiguous(), held.span or num_columns)
        return Int8Weight(numbers, scale.view(-1))

    def _numbers(self, rows: int, columns: int) -> torch.Tensor:
        """Room for the numbers of a layer, filled up as the kernel wants it; in one allocation for all: it has huge
        pages, for which many layers alone are too small. A step of one row took 1.08 times as long without them."""
        if self._room is None:
            room = sum(math.prod(_filled_up(*self._shape(name))) for name in self._held.kept)
            self._room = torch.empty(room, dtype=torch.int8)
        shape = _filled_up(rows, columns) if self._held.tiled else (rows, columns)
        size = math.prod(shape)
        numbers, self._room = self._room[:size].view(shape), self._room[_aligned(size) :]
        return numbers if shape == (rows, columns) else numbers.zero_()

    def take_whole(self, name: str) -> torch.Tensor:
        """The named tensor as it is stored."""
        return self._whole(name)

    def take_if_any(self, present: bool, *names: str) -> torch.Tensor | None:
        """None also where another rank has them."""
        return self.take(*names) if present and self._part(names[0]) is not ELSEWHERE else None

    def _part(self, name: str) -> TensorPart | None:
        return self._parts.get(".".join(name.rsplit(".", 2)[-2:]))

    def _shape(self, name: str) -> tuple[int, ...]:
        part, shape = self._part(name), self._shapes[name]
        if part is WHOLE:
            return shape
        return (*shape[: part.dimension], len(part.span(shape[part.dimension])), *shape[part.dimension + 1 :])

    def _spans(self, name: str) -> list[slice]:
        """The part of a tensor that exists."""
        part, shape = self._part(name), self._shapes[name]
        spans = [slice(0, size) for size in shape]
        if part is not WHOLE:
            span, size = part.span(shape[part.dimension]), shape[part.dimension]
            spans[part.dimension] = slice(min(span.start, size), min(span.stop, size))
        return spans

    def _read(self, name: str, out: torch.Tensor) -> None:
        """The part of a tensor; rows beyond its end are zeros."""
        spans = self._spans(name)
        num_rows = spans[0].stop - spans[0].start
        if weight := self._quantized(name):
            dequantize(weight, spans[0], spans[1], out[:num_rows])
        elif self._part(name) is WHOLE:
            out.copy_(self._whole(name))
        elif num_rows:
            out[:num_rows] = self._slice(name)[tuple(spans)]
        out[num_rows:] = 0

    def _quantized(self, name: str) -> Quantized | Made | None:
        """None: this tensor is read as it is stored."""
        weight, *others = self._stored[name]
        if (how := self._quantization) is not None and others:
            self._check_bias(name, how)
            stored = {one.name.rpartition(".")[2]: self._whole(one.name).view(one.shape) for one in others}
            scale, *zeros = (stored[one].t() if how.transposed else stored[one] for one in (how.scale, how.zero) if one)
            zero = zeros_of(how, zeros[0], len(scale)) if zeros else None
            group = self._group(name, stored[how.group], scale.shape[1]) if how.group else None
            return Quantized(how, self._slice(weight.name), scale, zero, group)
        kind = self._held.made.get(name)
        return None if kind is None else Made(kind, self._slice(name))

    def _check_bias(self, name: str, how: Quantization) -> None:
        bias = f"{name.removesuffix('weight')}bias"
        spare = how.spare_bias and bias not in self._shapes and bias in self._checkpoint.tensors
        if spare and bool(self._whole(bias).any()):
            raise InvalidModel(f"{self._where(bias)} is not 0, but by config.json the layer has no bias")

    def _group(self, name: str, group: torch.Tensor, num_groups: int) -> torch.Tensor:
        assert self._quantization is not None
        if int(group.min()) < 0 or int(group.max()) >= num_groups:
            where = self._where(f"{name.removesuffix('weight')}{self._quantization.group}")
            raise InvalidModel(f"{where} has groups beyond 0 to {num_groups - 1} ({self._quantization.in_words()})")
        return group

    def _where(self, name: str) -> str:
        return f"{self._checkpoint.folder / self._checkpoint.tensors[name].file}: tensor {name}"

    def _report(self, name: str) -> None:
        self._num_bytes_done += sum(self._checkpoint.tensors[one.name].num_bytes for one in self._stored[name])
        self._progress(LOADING, min(1.0, self._num_bytes_done / self._checkpoint.num_bytes))

    def _whole(self, name: str) -> torch.Tensor:
        info = self._checkpoint.tensors[name]
        whole = self._files[info.file].get_tensor(info.name)  # type: ignore[no-untyped-call]
        return slice_of(whole, info)

    def _slice(self, name: str) -> Any:
        """Of which parts can be read."""
        info = self._checkpoint.tensors[name]
        if info.slice is not None:
            return self._whole(name)  # a view: nothing is read yet
        return self._files[info.file].get_slice(info.name)  # type: ignore[no-untyped-call]


def _filled_up(rows: int, columns: int) -> tuple[int, int]:
    return -(-rows // TILE_ROWS) * TILE_ROWS, -(-columns // TILE_COLUMNS) * TILE_COLUMNS


def _aligned(size: int) -> int:
    """A multiple of 64: torch's kernel for int8 weights ends the process where these begin elsewhere."""
    return -(-size // 64) * 64


def slice_of(whole: torch.Tensor, info: TensorInfo) -> torch.Tensor:
    """A tensor of one in the file, as a view. See `checkpoint.Slice`."""
    if info.slice is None:
        return whole
    number, transposed, begin, step = info.slice
    found = whole[number].transpose(0, 1) if transposed else whole[number]
    found = found[begin : begin + info.shape[0] * step : step]
    return found.flatten(1) if found.dim() > 2 else found


def _open(path: Path) -> safe_open:
    try:
        return safe_open(path, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise InvalidModel(f"{path}: cannot read the weights: {error}") from error
