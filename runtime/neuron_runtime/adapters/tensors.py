"""The tensors of an adapter, for the backends that compute with them. Called on any thread, while steps run.

The file may change or end while it is read, and its numbers may be anything: that is a FatalError, never a crash.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import TYPE_CHECKING

from neuron_runtime.adapters.peft import WEIGHTS_FILE, open_adapter
from neuron_runtime.checkpoint import TensorInfo
from neuron_runtime.dtypes import BY_STORED
from neuron_runtime.errors import ExitCode, FatalError

if TYPE_CHECKING:
    import torch

PART_NUMBERS = 2**14
MAX_NORM = 1e4
"""Of what an adapter adds to a projection: a hundred times that of the projection itself. With more, hidden states
could become infinite, which would end the process and with it the requests of others."""


@dataclass(frozen=True, slots=True)
class LoraPair:
    """What an adapter adds to the projection `module` of a layer: `scaling * b @ a`, of shapes (rank, in), (out, rank).

    The tensors are on the host, in the type of the file.
    """

    layer: int
    module: str
    a: torch.Tensor
    b: torch.Tensor
    scaling: float


def pairs(folder: Path) -> Iterator[LoraPair]:
    """The pairs of an adapter in the order of layers, one at a time. Raises as `peft.read_adapter`, except what needs
    the model."""
    adapter, path = open_adapter(folder), folder / WEIGHTS_FILE
    try:
        with path.open("rb") as file:
            for pair in adapter.pairs:
                a, b = _read(file, pair.a, path), _read(file, pair.b, path)
                _check_norms(a, b, pair.scaling, f"{path}: {pair.target} of layer {pair.layer}")
                yield LoraPair(pair.layer, pair.target, a, b, pair.scaling)
    except OSError as error:
        raise FatalError(ExitCode.INVALID_ADAPTER, f"{path}: cannot be read: {error.strerror}") from error


def _read(file: BufferedReader, info: TensorInfo, path: Path) -> torch.Tensor:
    import torch  # noqa: PLC0415  (those who only check adapters do without)

    raw = bytearray(info.num_bytes)
    file.seek(info.begin)
    # Not mapped: a mapped file that is cut off meanwhile would end the process.
    if file.readinto(raw) < info.num_bytes:
        raise FatalError(ExitCode.INVALID_ADAPTER, f"{path}: ended while it was read; save the adapter again")
    tensor = torch.frombuffer(raw, dtype=getattr(torch, BY_STORED[info.dtype].name)).reshape(info.shape)
    # In parts that torch does not spread over threads: these would slow down the steps that run meanwhile.
    if not all(bool(torch.isfinite(part).all()) for part in torch.split(tensor.view(-1), PART_NUMBERS)):
        raise FatalError(
            ExitCode.INVALID_ADAPTER,
            f"{path}: {info.name} has numbers that are infinite or none (NaN); train the adapter again",
        )
    return tensor


def _check_norms(a: torch.Tensor, b: torch.Tensor, scaling: float, what: str) -> None:
    of_a, of_b, factor = _norm(a), _norm(b), abs(scaling)
    # Backends scale one of both, in the type of the model or of the file.
    if not max(of_a, of_a * factor, of_b, of_b * factor, of_a * of_b * factor) <= MAX_NORM:
        found = f"norms {of_a:.3g} of A and {of_b:.3g} of B, scaling {scaling:.3g}"
        rule = f"each norm, also scaled, and the product of all must be at most {MAX_NORM:.0f}"
        raise FatalError(ExitCode.INVALID_ADAPTER, f"{what}: {found}: {rule}")


def _norm(tensor: torch.Tensor) -> float:
    import torch  # noqa: PLC0415

    return float(torch.tensor([torch.linalg.vector_norm(row.float()) for row in tensor]).norm())
