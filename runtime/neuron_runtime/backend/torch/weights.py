"""Reads the tensors of a checkpoint, memory-mapped and one at a time, into the decoder's layout.

Called by `load_backend`, which has checked names and shapes. Reports progress in bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from neuron_runtime.backend.torch.parts import ELSEWHERE, WHOLE, TensorPart
from neuron_runtime.backend.torch.read_ahead import LOADING
from neuron_runtime.backend_protocol import ProgressCallback
from neuron_runtime.checkpoint import Checkpoint, InvalidModel, TensorInfo


class WeightReader:
    """Returns tensors of a checkpoint by name, converted to one dtype. Keeps the files open as long as it lives."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        dtype: torch.dtype,
        progress: ProgressCallback,
        parts: Mapping[str, TensorPart | None],
    ) -> None:
        """parts: by the last words of a tensor's name, what of it is read; see `parts.parts_of`."""
        self._checkpoint = checkpoint
        self._parts = parts
        self._dtype = dtype
        self._progress = progress
        self._files = {file: _open(checkpoint.folder / file) for file in checkpoint.files}
        self._num_bytes_done = 0

    def take(self, *names: str) -> torch.Tensor:
        """The named tensors, or their parts, concatenated along the first dimension as a new contiguous tensor."""
        infos = [self._checkpoint.tensors[name] for name in names]
        shapes = [self._shape(info) for info in infos]
        out = torch.empty((sum(shape[0] for shape in shapes), *shapes[0][1:]), dtype=self._dtype)
        begin = 0
        for info, shape in zip(infos, shapes, strict=True):
            self._read(info, out[begin : begin + shape[0]])
            begin += shape[0]
            self._num_bytes_done += info.num_bytes
        self._progress(LOADING, min(1.0, self._num_bytes_done / self._checkpoint.num_bytes))
        return out

    def take_if_any(self, present: bool, *names: str) -> torch.Tensor | None:
        """None also where another rank has them."""
        return self.take(*names) if present and self._part(names[0]) is not ELSEWHERE else None

    def _part(self, name: str) -> TensorPart | None:
        return self._parts.get(".".join(name.rsplit(".", 2)[-2:]))

    def _shape(self, info: TensorInfo) -> tuple[int, ...]:
        part = self._part(info.name)
        if part is WHOLE:
            return info.shape
        return (*info.shape[: part.dimension], part.end - part.begin, *info.shape[part.dimension + 1 :])

    def _read(self, info: TensorInfo, out: torch.Tensor) -> None:
        file, part = self._files[info.file], self._part(info.name)
        if part is WHOLE:
            out.copy_(file.get_tensor(info.name))  # type: ignore[no-untyped-call]
        elif part.dimension == 1:
            out.copy_(file.get_slice(info.name)[:, part.begin : part.end])  # type: ignore[no-untyped-call]
        else:
            begin, end = min(part.begin, info.shape[0]), min(part.end, info.shape[0])
            if begin < end:
                out[: end - begin] = file.get_slice(info.name)[begin:end]  # type: ignore[no-untyped-call]
            out[end - begin :] = 0


def _open(path: Path) -> safe_open:
    try:
        return safe_open(path, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise InvalidModel(f"{path}: cannot read the weights: {error}") from error
