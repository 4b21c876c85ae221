"""Weights from quantized ones: the stored numbers times their scales, computed in float32.

Called by the reader, for all weights of a layer or for the part of one rank. `quantization.Quantization` says where
numbers lie, and which share a scale.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple, Protocol

import torch

from neuron_runtime.quantization import WHOLE, Quantization

PART_ELEMENTS = 2**20
"""Numbers that are converted at a time, so that what is in between stays in the processor's cache."""


class Numbers(Protocol):
    def __getitem__(self, part: tuple[slice, slice], /) -> torch.Tensor: ...


class Quantized(NamedTuple):
    """A weight as it is stored: all its numbers `[rows, columns]`, several in each where they are packed, of which a
    part can be read, and scales `[blocks of rows, blocks of columns]`."""

    how: Quantization
    numbers: Numbers
    scale: torch.Tensor


def dequantize(weight: Quantized, rows: slice, columns: slice, out: torch.Tensor) -> None:
    """Write a part `[rows, columns]` of a weight to `out`."""
    packed = weight.how.packed
    begin, end, size = columns.start, columns.stop, weight.how.block[1]
    of_row = _block_of(rows.start, rows.stop, weight.how.block[0])
    of_column = _block_of(begin, end, size)
    used = slice(begin // packed, -(-end // packed))
    numbers = NUMBERS[weight.how.stored]
    step = max(1, PART_ELEMENTS // out.shape[1])
    for at in range(0, len(out), step):
        part = slice(rows.start + at, min(rows.start + at + step, rows.stop))
        skipped = begin - used.start * packed
        plain = numbers(weight.numbers[part, used])[:, skipped : skipped + out.shape[1]]
        factors = factors_of(weight.scale.index_select(0, of_row[at : at + step]))
        if factors.shape[1] == 1:
            plain.mul_(factors)
        elif begin % size == 0 and end % size == 0:  # three times as fast as a factor for each number
            plain.view(len(plain), -1, size).mul_(factors[:, begin // size : end // size].unsqueeze(-1))
        else:
            plain.mul_(factors.index_select(1, of_column))
        out[at : at + step] = plain


def factors_of(scale: torch.Tensor) -> torch.Tensor:
    """The scales as float32."""
    return _POWERS[scale.int()] if scale.dtype == torch.uint8 else scale.float()


_POWERS = (2.0 ** torch.arange(-127, 129, dtype=torch.float64)).float()
"""By the exponents that are stored. The last one means not a number, and is infinite here."""


def _block_of(begin: int, end: int, size: int) -> torch.Tensor:
    """The block that each of these rows or columns is in."""
    return torch.zeros(end - begin, dtype=torch.int64) if size == WHOLE else torch.arange(begin, end) // size


def _float8(stored: torch.Tensor) -> torch.Tensor:
    """float8_e4m3fn, by its bits: 6 times as fast as torch's own conversion. What is not a number becomes 480.

    Exponent and fraction have the same places in bfloat16 once they are shifted by 4; the exponent is 120 too small.
    """
    wide = stored.contiguous().view(torch.int8).to(torch.int16)
    return wide.bitwise_left_shift_(4).bitwise_and_(_FLOAT8_BITS).view(torch.bfloat16).float().mul_(2.0**120)


_FLOAT8_BITS = 0x87F0 - 2**16
"""Of bfloat16: the sign, and what float8_e4m3fn has of exponent and fraction."""


def _bytes(stored: torch.Tensor) -> torch.Tensor:
    """Four numbers in each stored one, the first one in the lowest bits, each with 128 added."""
    shifts = torch.arange(0, 32, 8, dtype=torch.int32)
    return ((stored.unsqueeze(-1) >> shifts) & 0xFF).flatten(1).float().sub_(128)


def _float4(stored: torch.Tensor) -> torch.Tensor:
    """Two float4_e2m1 in each byte, the first one in the lower bits: both are looked up at once."""
    pairs = _FLOAT4_PAIRS.index_select(0, stored.flatten().int())
    return pairs.view(torch.float32).view(len(stored), -1)


def _pairs(values: torch.Tensor) -> torch.Tensor:
    """Two float32 in each int64, by the bytes that stand for them."""
    return torch.stack((values.repeat(16), values.repeat_interleave(16)), dim=1).view(torch.int64).flatten()


_FLOAT4_PAIRS = _pairs(torch.tensor([sign * n for sign in (1, -1) for n in (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)]))


NUMBERS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "I8": lambda stored: stored.float(),
    "F8_E4M3": _float8,
    "I32": _bytes,
    "U8": _float4,
}
"""The numbers as float32, by the dtype in which they are stored."""
