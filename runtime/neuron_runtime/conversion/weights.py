"""The weights of a checkpoint, a few rows at a time: as they are, as they will be stored, and how far both are apart.

Called by `writing`. Memory is that of the rows: never of a whole tensor.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, cast

import torch
from safetensors import SafetensorError, safe_open

from neuron_runtime.backend.torch.dequantizing import NUMBERS, Quantized, dequantize, numbers_of
from neuron_runtime.backend.torch.quantizing import STORED, quantize
from neuron_runtime.backend.torch.weights import slice_of
from neuron_runtime.checkpoint import Checkpoint, InvalidModel, check_tensors
from neuron_runtime.conversion.plan import Conversion, is_quantized
from neuron_runtime.dtypes import BY_STORED
from neuron_runtime.quantization import CONVERTER, Kind, quantization_of

PART_ELEMENTS = 2**19
"""Numbers that are converted at a time, so that what is in between stays in the processor's cache."""
BUFFER_BYTES = 2**20
NUM_ACTIVATIONS = 16
"""Random inputs of a layer, by which errors are measured."""
SEED = 20
_float8 = NUMBERS["F8_E4M3"]
NOT_A_NUMBER = 0x7F
"""Of float8_e4m3fn, without the sign."""


class Part(NamedTuple):
    """Rows of a weight. plain: float32. stored: as they are written; scale: float32 `[rows, 1]`, of quantized ones."""

    plain: torch.Tensor
    stored: torch.Tensor
    scale: torch.Tensor | None


class Weights:
    """Those of a checkpoint that a conversion changes. Keeps the files open as long as it lives."""

    def __init__(self, checkpoint: Checkpoint, shapes: dict[str, tuple[int, ...]], conversion: Conversion) -> None:
        """Checks names, shapes, dtypes and scales. Raises InvalidModel with the tensor and how it is stored."""
        self._checkpoint, self._shapes, self._conversion = checkpoint, shapes, conversion
        self._stored = quantization_of(checkpoint.config)
        self._dtypes = {output.name: output.dtype for output in conversion.outputs}
        words = f" ({self._stored.in_words()})" if self._stored else ""
        check_tensors(checkpoint, shapes, self._stored)
        self._files = {file: _open(checkpoint, file) for file in checkpoint.files}
        for name in shapes:
            if self._stored is not None and self._is_quantized(name):
                scale = self._scale(name)
                if not bool(torch.isfinite(scale).all() and (scale >= 0).all()):
                    tensor = self._stored.scale_name(name)
                    raise InvalidModel(f"{self._where(tensor)} has scales below 0, or that are no numbers{words}")

    def is_copied(self, name: str) -> bool:
        """Whether a tensor of the model stays as it is stored."""
        return name not in self._conversion.quantized and not self._is_quantized(name)

    def source_bytes(self, name: str) -> int:
        """Of a weight as the checkpoint has it."""
        names = [name]
        if self._stored is not None and self._is_quantized(name):
            names = [one.name for one in self._stored.tensors(name, cast(Any, self._shapes[name]))]
        return sum(self._checkpoint.tensors[one].num_bytes for one in names)

    def copy(self, name: str) -> Iterator[memoryview]:
        """The bytes of a tensor that is copied, through one buffer, or of a part of one."""
        info, buffer = self._checkpoint.tensors[name], memoryview(bytearray(BUFFER_BYTES))
        if info.slice is not None:
            yield self._slice(name).contiguous().view(torch.uint8).numpy().data.cast("B")
            return
        left = info.num_bytes
        with (self._checkpoint.folder / info.file).open("rb", buffering=0) as file:
            file.seek(info.begin)
            while left and (num_read := file.readinto(buffer[:left])):
                yield buffer[:num_read]
                left -= num_read

    def parts(self, name: str) -> Iterator[Part]:
        """All rows of a weight that is not copied. Raises InvalidModel if it has numbers that are not finite."""
        rows, columns = self._shapes[name]
        step = max(1, PART_ELEMENTS // columns)
        for begin in range(0, rows, step):
            part = self._part(name, slice(begin, min(begin + step, rows)), columns)
            if not bool(torch.isfinite(torch.stack(part.plain.aminmax())).all()):
                raise InvalidModel(f"{self._where(name)} has numbers that are not finite, so it cannot be converted")
            yield part

    def _part(self, name: str, rows: slice, columns: int) -> Part:
        kind = cast(Kind, self._conversion.format)
        if name not in self._conversion.quantized:
            plain = self._plain(name, rows, columns)
            return Part(plain, plain.to(getattr(torch, BY_STORED[self._dtypes[name]].name)), None)
        how = self._stored
        if how is None or how.kind != kind or not how.scales_rows:
            plain = self._plain(name, rows, columns)
            return Part(plain, *quantize(plain, kind))
        scale = self._scale(name)
        scale = scale[rows] if how.block[0] == 1 else scale.expand(rows.stop - rows.start, 1)
        numbers = numbers_of(how, self.raw(name, rows))[:, :columns]
        plain = numbers * scale
        if kind == "fp8" and CONVERTER not in self._checkpoint.config:
            # Up to 448. Half of a number is exact, unless it is among the smallest.
            numbers, scale = numbers.mul_(0.5), scale * 2
        return Part(plain, numbers.to(STORED[kind]), scale)

    def _plain(self, name: str, rows: slice, columns: int) -> torch.Tensor:
        if self._stored is None or not self._is_quantized(name):
            plain: torch.Tensor = self._slice(name)[rows].float()
            return plain
        out = torch.empty((rows.stop - rows.start, columns))
        weight = Quantized(self._stored, _Checked(self, name), self._scale(name))
        dequantize(weight, rows, slice(0, columns), out)
        return out

    def raw(self, name: str, part: Any) -> torch.Tensor:
        """Stored numbers of a quantized weight. Raises InvalidModel if some are none."""
        how = self._stored
        assert how is not None
        raw: torch.Tensor = self._slice(how.weight_name(name))[part]
        if how.stored == "F8_E4M3" and bool((raw.view(torch.int8).bitwise_and(NOT_A_NUMBER) == NOT_A_NUMBER).any()):
            raise InvalidModel(f"{self._where(how.weight_name(name))} has numbers that are none ({how.in_words()})")
        return raw

    def _scale(self, name: str) -> torch.Tensor:
        assert self._stored is not None
        info = self._checkpoint.tensors[self._stored.scale_name(name)]
        scale: torch.Tensor = self._files[info.file].get_tensor(info.name)  # type: ignore[no-untyped-call]
        return scale.float().view(self._stored.scale_shape(self._shapes[name]))

    def _slice(self, name: str) -> Any:
        info = self._checkpoint.tensors[name]
        if info.slice is not None:
            return slice_of(self._files[info.file].get_tensor(info.name), info)  # type: ignore[no-untyped-call]
        return self._files[info.file].get_slice(info.name)  # type: ignore[no-untyped-call]

    def _is_quantized(self, name: str) -> bool:
        return self._stored is not None and is_quantized(name, self._checkpoint.tensors, self._stored)

    def _where(self, tensor: str) -> str:
        info = self._checkpoint.tensors.get(tensor)
        return f"{self._checkpoint.folder / info.file if info else self._checkpoint.folder}: tensor {tensor}"


class _Checked:
    """The numbers of a weight, as `dequantize` reads them."""

    def __init__(self, weights: Weights, name: str) -> None:
        self._weights, self._name = weights, name

    def __getitem__(self, part: tuple[slice, slice]) -> torch.Tensor:
        return self._weights.raw(self._name, part)


@contextmanager
def on_one_thread() -> Iterator[None]:
    """Parts are so small that threads would wait for one another longer than they compute."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class LayerError:
    """The error of a layer's output as a share of that output, over random activations of a fixed seed."""

    def __init__(self) -> None:
        self._error = self._output = 0.0
        self._activations = torch.empty(0)

    def add(self, part: Part) -> None:
        columns = part.plain.shape[1]
        if len(self._activations) != columns:
            seeded = torch.Generator().manual_seed(SEED)
            self._activations = torch.randn((columns, NUM_ACTIVATIONS), generator=seeded)
        again = _float8(part.stored) if part.stored.dtype == torch.float8_e4m3fn else part.stored.float()
        if part.scale is not None:
            again.mul_(part.scale)
        error = again.sub_(part.plain)
        self._error += float(error.matmul(self._activations).square().sum(dtype=torch.float64))
        self._output += float(part.plain.matmul(self._activations).square().sum(dtype=torch.float64))

    @property
    def share(self) -> float:
        return float((self._error / self._output) ** 0.5) if self._output else 0.0


def _open(checkpoint: Checkpoint, file: str) -> safe_open:
    try:
        return safe_open(checkpoint.folder / file, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise InvalidModel(f"{checkpoint.folder / file}: cannot read the weights: {error}") from error
