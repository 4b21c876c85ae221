"""The kernel for weights of 8 bits, `eight_bits.cpp`: builds it for this processor, finds it again, and calls it.

Linear layers call it, and say which weights it is for. torch has no product of FP8 weights for
processors, and one of int8 weights that does not use what newer ones have. Without a C++ compiler there is no kernel.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import stat
import subprocess
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from neuron_runtime.arguments import default_weights_dir
from neuron_runtime.backend.torch.graphs import cxx
from neuron_runtime.backend.torch.held import TILE_COLUMNS
from neuron_runtime.console import say

SOURCE = Path(__file__).with_suffix(".cpp")
FLAGS = ("-O3", "-march=native", "-std=c++17", "-fopenmp", "-fno-math-errno", "-fno-trapping-math", "-fwrapv")
BUILD_SECONDS = 300
TILE_ROWS = 32
"""Those of two tiles. Weights are filled up to multiples of them and of `TILE_COLUMNS`."""


@dataclass(frozen=True, slots=True)
class Kernel:
    """way: 2 with AMX, 1 with AVX-512 that multiplies bfloat16: for FP8 alone."""

    library: ctypes.CDLL
    way: int

    def multiply(
        self, x: torch.Tensor, numbers: torch.Tensor, scale: torch.Tensor, span: int, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """`[rows, outputs]` of x `[rows, inputs]`, both bfloat16. numbers: see `in_tiles`. scale: float32
        `[ceil(inputs / span), outputs]`. span: inputs that share a scale. bias: float32."""
        x = x.contiguous()
        (rows, inputs), outputs = x.shape, scale.shape[1]
        out = x.new_empty(rows, outputs)
        self.library.multiply(
            numbers.data_ptr(),
            scale.data_ptr(),
            None if bias is None else bias.data_ptr(),
            outputs,
            inputs,
            span,
            numbers.dtype is torch.float8_e4m3fn,
            x.data_ptr(),
            rows,
            out.data_ptr(),
            torch.get_num_threads(),
            self.way,
        )
        return out


def in_tiles(numbers: torch.Tensor) -> torch.Tensor:
    """The same memory in the kernel's order. numbers: int8 `[rows, columns]`, filled up with zeros."""
    rows, columns = numbers.shape
    words = numbers.view(torch.int32).view(rows // 16, 16, columns // TILE_COLUMNS, 16)  # of four inputs
    tiles = words.permute(0, 2, 3, 1).contiguous()
    return numbers.view(*tiles.shape, 4).copy_(tiles.view(torch.int8).view(*tiles.shape, 4))


@cache
def kernel() -> Kernel | None:
    """None where it cannot be built, or no processor's way is in it, which is said once."""
    try:
        if (found := _found()).way:
            return found
        raise OSError("this processor has no AVX-512 that multiplies bfloat16")
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:  # RuntimeError: there is no home
        said = error.stderr if isinstance(error, subprocess.CalledProcessError) else str(error)
        reason = next((line for line in said.splitlines() if "error" in line), said.partition("\n")[0])
        message = "weights of 8 bits are computed without the kernel for them, more slowly or in more memory"
        say(f"warning: {message}: {reason}")
        return None


def _found() -> Kernel:
    path = default_weights_dir().with_name("kernels") / f"{_key()}.so"
    try:
        _check_owner(path.parent)
        return _load(path)
    except OSError:  # not built yet, damaged, or of somebody else
        with tempfile.TemporaryDirectory() as folder:
            built = Path(folder, path.name)
            _run("-shared", "-fPIC", str(SOURCE), "-o", str(built))
            _keep(built, path)
            return _load(built)


def _key() -> str:
    """By what it is made of. The compiler says what it takes this processor for."""
    said = _run("-###", "-E", str(SOURCE)).stderr
    return hashlib.sha256(b"\0".join((SOURCE.read_bytes(), *(one.encode() for one in (*FLAGS, said))))).hexdigest()[:32]


def _run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [cxx(), *FLAGS, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=BUILD_SECONDS)


def _keep(built: Path, path: Path) -> None:
    """A folder that cannot be written keeps nothing."""
    with contextlib.suppress(OSError):
        path.parent.mkdir(0o755, parents=True, exist_ok=True)
        _check_owner(path.parent)
        # A name of its own: processes of containers that share the folder may have the same number.
        descriptor, scratch = tempfile.mkstemp(dir=path.parent, prefix=f"{path.name}.")
        try:
            with open(descriptor, "wb") as file:
                file.write(built.read_bytes())
                os.fchmod(descriptor, 0o644)
                file.flush()
                os.fsync(descriptor)  # a library that is cut short ends who loads it
            os.replace(scratch, path)
        except OSError:
            os.unlink(scratch)
            raise


def _check_owner(folder: Path) -> None:
    """Raises OSError if somebody else may write there, whose library would be run."""
    found = folder.stat()
    if found.st_uid not in (0, os.geteuid()) or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise PermissionError(f"{folder} can be written by other users")


def _load(path: Path) -> Kernel:
    library = ctypes.CDLL(str(path))
    number, address = ctypes.c_int64, ctypes.c_void_p
    library.multiply.restype = None
    library.multiply.argtypes = [
        *(address, address, address, number, number, number, ctypes.c_int),
        *(address, number, address, ctypes.c_int, ctypes.c_int),
    ]
    return Kernel(library, library.best_way())
