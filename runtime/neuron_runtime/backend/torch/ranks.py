"""How the ranks of the torch backend exchange tensors. `parts.py` says which part of the model each has.

`Gloo` is torch.distributed's transport for CPUs, used as an object of its own, without a process-wide group. `ALONE`
does nothing: one rank computes as if there were no ranks.
"""

from __future__ import annotations

import re
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

import torch

from neuron_runtime.backend_protocol import Rank
from neuron_runtime.errors import ExitCode, FatalError

MEETING = timedelta(minutes=10)
"""Time for all ranks to reach the first collective. Later ones may take long: those who watch the ranks end them."""
LONGEST = timedelta(days=1)


class Ranks:
    """What the decoder needs of the other ranks; here there are none. Every rank makes the same calls in the same
    order."""

    rank = 0
    size = 1

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """The sum over all ranks, the same bits on each."""
        return x

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """`[rows, columns]` of all ranks side by side, in the order of ranks."""
        return x

    def least(self, value: int) -> int:
        """The smallest of all ranks' values."""
        return value

    def first(self, x: torch.Tensor) -> torch.Tensor:
        """What rank 0 has, where all have a tensor of the same shape."""
        return x


ALONE = Ranks()


class Gloo(Ranks):
    """Half precision is added up in float32, once, so that ranks do not add rounding errors of their own."""

    def __init__(self, place: Rank) -> None:
        """Raises FatalError if the others cannot be reached."""
        self.rank, self.size = place.rank, place.size
        try:
            self._group = _joined(place)
        except RuntimeError as error:
            raise _lost(error) from error

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        total = x.to(torch.float32, copy=x.dtype is torch.float32).contiguous()
        self._do("allreduce", [total])
        return total.to(x.dtype)

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(self.size)]
        self._do("allgather", [parts], [x.contiguous()])
        return torch.cat(parts, dim=-1)

    def least(self, value: int) -> int:
        values = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        self._do("allgather", [values], [torch.tensor([value])])
        return min(int(one) for one in values)

    def first(self, x: torch.Tensor) -> torch.Tensor:
        parts = [torch.empty_like(x) for _ in range(self.size)]
        self._do("allgather", [parts], [x.contiguous()])
        return parts[0]

    def _do(self, name: str, *tensors: Any) -> None:
        try:
            getattr(self._group, name)(*tensors).wait()
        except RuntimeError as error:
            raise _lost(error) from error


def _joined(place: Rank) -> Any:
    from torch._C._distributed_c10d import FileStore, ProcessGroupGloo, TCPStore  # noqa: PLC0415 - only with ranks

    at = urlsplit(place.rendezvous)
    store = (
        FileStore(at.path, place.size)
        if at.scheme == "file"
        else TCPStore(at.hostname or "", at.port or 0, place.size, place.rank == 0, MEETING)
    )
    store.set_timeout(MEETING)
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [ProcessGroupGloo.create_device(hostname=place.address)]
    options._timeout = LONGEST
    return ProcessGroupGloo(store, place.rank, place.size, options)


def _lost(error: RuntimeError) -> FatalError:
    # Clients see it: without the line of gloo's source, and without its advice.
    reason = re.sub(r"^\[[^]]*\] ", "", str(error).partition("\n")[0].partition(". ")[0])
    return FatalError(ExitCode.GROUP_MEMBER_LOST, f"the other ranks cannot be reached any more: {reason}")
