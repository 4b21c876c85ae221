"""Weights from quantized ones: the stored numbers times their scales, computed in float32; or numbers and scales as
they are.

Called by the reader, for all weights of a layer or for the part of one rank. `quantization.Quantization` says where
numbers lie, and which share a scale. A weight that is not stored quantized is quantized first, where that is wanted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple, Protocol

import torch

from neuron_runtime.backend.torch.quantizing import quantize
from neuron_runtime.quantization import WHOLE, WORD, Kind, Quantization

PART_ELEMENTS = 2**20
"""Numbers that are converted at a time, so that what is in between stays in the processor's cache."""


class Numbers(Protocol):
    def __getitem__(self, part: tuple[slice, slice], /) -> torch.Tensor: ...


class Quantized(NamedTuple):
    """A weight as it is stored: all its numbers `[rows, columns]`, or transposed, several in each where they are
    packed, of which a part can be read; scales `[blocks of rows, blocks of columns]`, and as many zero points; the
    block of each column, where they are not in order."""

    how: Quantization
    numbers: Numbers
    scale: torch.Tensor
    zero: torch.Tensor | None = None
    group: torch.Tensor | None = None

    @property
    def num_columns(self) -> int:
        """That share a scale."""
        return self.how.block[1]

    def part(self, rows: slice, columns: slice) -> tuple[torch.Tensor, torch.Tensor]:
        """Numbers as float32, less their zero points, and scales `[rows, all blocks of columns]`."""
        numbers, blocks = self._numbers(rows, columns), _block_of(rows, self.how.block[0])
        if self.zero is not None:
            _in_blocks(torch.Tensor.sub_, numbers, self.zero.index_select(0, blocks), self, columns)
        return numbers, factors_of(self.scale.index_select(0, blocks))

    def stored(self, rows: slice, columns: slice) -> tuple[torch.Tensor, torch.Tensor]:
        """As `part`, with the numbers in their type of 8 bits. Only where it has no zero points."""
        if max(self.how.packed) > 1:
            numbers, scale = self.part(rows, columns)
            return numbers.to(torch.int8), scale
        return self.numbers[rows, columns], factors_of(self.scale.index_select(0, _block_of(rows, self.how.block[0])))

    def _numbers(self, rows: slice, columns: slice) -> torch.Tensor:
        (down, across), how = self.how.packed, self.how
        used = (
            slice(rows.start // down, -(-rows.stop // down)),
            slice(columns.start // across, -(-columns.stop // across)),
        )
        stored = self.numbers[used[1], used[0]].t().contiguous() if how.transposed else self.numbers[used]
        above, before = rows.start - used[0].start * down, columns.start - used[1].start * across
        numbers = numbers_of(how, stored)
        return numbers[above : above + rows.stop - rows.start, before : before + columns.stop - columns.start]


class Made(NamedTuple):
    """A weight that is not stored quantized, of which a part can be read; what it is quantized to."""

    kind: Kind
    weight: Numbers
    num_columns: int = WHOLE
    group: None = None

    def part(self, rows: slice, columns: slice) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Quantized.part`. The scale of a row depends on all of its columns."""
        numbers, scale = self.stored(rows, columns)
        return numbers.float(), scale

    def stored(self, rows: slice, columns: slice) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Quantized.stored`."""
        numbers, scale = quantize(self.weight[rows, :].float(), self.kind)
        return numbers[:, columns], scale


def dequantize(weight: Quantized | Made, rows: slice, columns: slice, out: torch.Tensor) -> None:
    """Write a part `[rows, columns]` of a weight to `out`."""
    for part, at in _in_parts(rows, columns):
        numbers, scale = weight.part(part, columns)
        _in_blocks(torch.Tensor.mul_, numbers, scale, weight, columns)
        out[at] = numbers


def _in_blocks(
    change: Callable[[torch.Tensor, torch.Tensor], object],
    numbers: torch.Tensor,
    values: torch.Tensor,
    weight: Quantized | Made,
    columns: slice,
) -> None:
    """Change these columns of a weight, each block by its value."""
    begin, end, size = columns.start, columns.stop, weight.num_columns
    if values.shape[1] == 1:
        change(numbers, values)
    elif weight.group is not None:
        change(numbers, values.index_select(1, weight.group[columns]))
    elif begin % size == 0 and end % size == 0:  # three times as fast as a value for each number
        change(numbers.view(len(numbers), -1, size), values[:, begin // size : end // size].unsqueeze(-1))
    else:
        change(numbers, values.index_select(1, _block_of(columns, size)))


def read_numbers(
    weight: Quantized | Made, rows: slice, columns: slice, numbers: torch.Tensor, scale: torch.Tensor
) -> None:
    """Write a part of a weight as it is stored: int8 or the bits of FP8, `[rows, columns]`, and `[rows, blocks of
    columns]`. The columns are whole blocks."""
    first = columns.start // weight.num_columns if weight.num_columns != WHOLE else 0
    for part, at in _in_parts(rows, columns):
        found, factors = weight.stored(part, columns)
        numbers[at] = found.view(torch.int8)
        scale[at] = factors[:, first : first + scale.shape[1]]


def _in_parts(rows: slice, columns: slice) -> Iterator[tuple[slice, slice]]:
    """Rows of a weight, and where they are in what is read."""
    step = max(1, PART_ELEMENTS // max(1, columns.stop - columns.start))
    for begin in range(rows.start, rows.stop, step):
        part = slice(begin, min(begin + step, rows.stop))
        yield part, slice(part.start - rows.start, part.stop - rows.start)


def factors_of(scale: torch.Tensor) -> torch.Tensor:
    """The scales as float32."""
    return _POWERS[scale.int()] if scale.dtype == torch.uint8 else scale.float()


_POWERS = (2.0 ** torch.arange(-127, 129, dtype=torch.float64)).float()
"""By the exponents that are stored. The last one means not a number, and is infinite here."""


def _block_of(span: slice, size: int) -> torch.Tensor:
    """The block that each of these rows or columns is in."""
    numbers = torch.arange(span.start, span.stop)
    return torch.zeros_like(numbers) if size == WHOLE else numbers // size


def _float8(stored: torch.Tensor) -> torch.Tensor:
    """float8_e4m3fn, by its bits: 6 times as fast as torch's own conversion. What is not a number becomes 480.

    Exponent and fraction have the same places in bfloat16 once they are shifted by 4; the exponent is 120 too small.
    """
    wide = stored.contiguous().view(torch.int8).to(torch.int16)
    return wide.bitwise_left_shift_(4).bitwise_and_(_FLOAT8_BITS).view(torch.bfloat16).float().mul_(2.0**120)


_FLOAT8_BITS = 0x87F0 - 2**16
"""Of bfloat16: the sign, and what float8_e4m3fn has of exponent and fraction."""


def numbers_of(how: Quantization, stored: torch.Tensor) -> torch.Tensor:
    """The numbers `[rows, columns]` as float32."""
    if how.stored != WORD:
        return NUMBERS[how.stored](stored)
    numbers = _unpacked(how, stored, how.packed.index(how.in_each)).float()
    return numbers if how.zero else numbers.sub_(2 ** (how.bits - 1))


def zeros_of(how: Quantization, stored: torch.Tensor, num_rows: int) -> torch.Tensor:
    """The zero points of so many rows as float32. What has no room after the addition begins at 0 again."""
    zeros = _unpacked(how, stored, 0).add_(how.zero_added).bitwise_and_(2**how.bits - 1)
    return zeros[:num_rows].float()


def _unpacked(how: Quantization, stored: torch.Tensor, dimension: int) -> torch.Tensor:
    """The numbers in each stored one, along a dimension."""
    places = torch.tensor(how.places or range(how.in_each), dtype=torch.int32)
    shifts = (places * how.bits).view(-1, *[1] * (1 - dimension))
    numbers: torch.Tensor = (stored.unsqueeze(dimension + 1) >> shifts) & (2**how.bits - 1)
    return numbers.flatten(dimension, dimension + 1)


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
    "U8": _float4,
}
"""The numbers as float32, by the dtype in which they are stored one by one, or two in a byte."""
