"""The kernel for weights of 8 bits, `eight_bits.cpp`, and how it is called.

Linear layers call it, and say which weights it is for. torch has no product of FP8 weights for
processors, and one of int8 weights that does not use what newer ones have. Without a C++ compiler there is no kernel.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from neuron_runtime.backend.torch.held import TILE_COLUMNS
from neuron_runtime.backend.torch.kernels import built

SOURCE = Path(__file__).with_suffix(".cpp")
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
    otherwise = "weights of 8 bits are computed without the kernel for them, more slowly or in more memory"
    return built(SOURCE, _kernel_of, otherwise)


def _kernel_of(library: ctypes.CDLL) -> Kernel:
    number, address = ctypes.c_int64, ctypes.c_void_p
    library.multiply.restype = None
    library.multiply.argtypes = [
        *(address, address, address, number, number, number, ctypes.c_int),
        *(address, number, address, ctypes.c_int, ctypes.c_int),
    ]
    if way := library.best_way():
        return Kernel(library, way)
    raise OSError("this processor has no AVX-512 that multiplies bfloat16")
