"""Linear layers, by how their weights are held: packed once for this machine's matrix kernels, plain, or as numbers of
8 bits with scales.

Created at load time, called by the decoder. Prepacked oneDNN weights are 1.3 to 2.2 times as fast as plain `F.linear`
at 1 to 32 rows. Where oneDNN does not support the dtype, `F.linear` computes a few rows, and float32 more of them.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.nn import functional

from neuron_runtime.backend.torch import eight_bits
from neuron_runtime.quantization import Kind


class Packed(NamedTuple):
    """`weight` in the layout of oneDNN; called with `[rows, in_features]`, returns `[rows, out_features]`."""

    weight: torch.Tensor
    bias: torch.Tensor | None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = POINTWISE(x, self.weight, self.bias, "none", [], "")
        return out

    def plus(self, x: torch.Tensor, added: torch.Tensor) -> torch.Tensor:
        """The outputs plus `added` `[rows, out_features]`, which the product adds as it writes them."""
        out: torch.Tensor = POINTWISE_PLUS(x, added, self.weight, self.bias, "add")
        return out


class Widened(NamedTuple):
    """`weight` `[out_features, in_features]` in half precision that this processor has no instructions for; called as
    `Packed` is.

    torch multiplies such numbers one by one. At more than a few rows it is 2 (8 rows) to 8 (512 rows) times as fast to
    convert the weight to float32, in parts that stay in the processor's cache.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] <= MAX_NARROW_ROWS:
            return functional.linear(x, self.weight, self.bias)
        wide = x.float()
        out = x.new_empty(x.shape[0], self.weight.shape[0])
        part = max(1, MAX_PART_ELEMENTS // self.weight.shape[1])
        for begin in range(0, self.weight.shape[0], part):
            span = slice(begin, begin + part)
            bias = None if self.bias is None else self.bias[span].float()
            out[:, span] = functional.linear(wide, self.weight[span].float(), bias)
        return out

    def plus(self, x: torch.Tensor, added: torch.Tensor) -> torch.Tensor:
        """The outputs plus `added` `[rows, out_features]`."""
        return self(x).add_(added)


class Int8Weight(NamedTuple):
    """numbers: int8 `[out_features, in_features]`. scale: `[out_features]`, times which they are the weight, in the
    dtype that is computed."""

    numbers: torch.Tensor
    scale: torch.Tensor


class Scaled(NamedTuple):
    """The weight of an `Int8Weight`, which is never multiplied out whole; called as `Packed` is.

    A few rows wait for weights to be read: torch has a kernel that converts them in registers. It is slow at more rows,
    which int8 products of `digits_of` the inputs serve better. Many rows wait for multiplications: parts of the weight
    are converted to bfloat16, which has room for all int8 numbers, or to float32.
    """

    numbers: torch.Tensor
    scale: torch.Tensor
    bias: torch.Tensor | None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        rows, (outputs, inputs) = x.shape[0], self.numbers.shape
        if rows <= MAX_NARROW_ROWS and outputs % INT8_LANES == inputs % INT8_LANES == 0:
            out = torch._weight_int8pack_mm(x, self.numbers, self.scale)
        elif rows <= MAX_DIGIT_ROWS and multiplies_int8():
            out = self._of_digits(x)
        else:
            out = self._converted(x)
        return out if self.bias is None else out.add_(self.bias)

    def _of_digits(self, x: torch.Tensor) -> torch.Tensor:
        digits, step = digits_of(x, DIGITS[x.dtype])
        products = torch._int_mm(digits.flatten(0, 1), self.numbers.t()).view(len(digits), x.shape[0], -1)
        out = products[0].float()
        for product in products[1:]:
            out = out.mul_(BASE).add_(product)
        return out.mul_(step).mul_(self.scale.float()).to(x.dtype)

    def _converted(self, x: torch.Tensor) -> torch.Tensor:
        # float16 would overflow: before they are scaled, products are up to thousands of times as large as the outputs.
        wide = x if x.dtype == torch.bfloat16 and packs(x.dtype) else x.float()
        out = x.new_empty(x.shape[0], self.numbers.shape[0])
        part = max(1, MAX_INT8_PART_ELEMENTS // self.numbers.shape[1])
        for begin in range(0, self.numbers.shape[0], part):
            span = slice(begin, begin + part)
            product = functional.linear(wide, self.numbers[span].to(wide.dtype))
            torch.mul(product, self.scale[span], out=out[:, span])
        return out

    def plus(self, x: torch.Tensor, added: torch.Tensor) -> torch.Tensor:
        """The outputs plus `added` `[rows, out_features]`."""
        return self(x).add_(added)


def digits_of(x: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """int8 digits to the base `BASE`, `[count, rows, columns]`, the highest ones first; and `[rows, 1]`, what the
    lowest ones count.

    With two of them inputs have errors of up to 1/64516 of the largest one in their row: less than what rounding to
    bfloat16 does to the outputs.
    """
    unit = BASE ** (count - 1)
    rest = x.float()
    step = rest.abs().amax(dim=1, keepdim=True).clamp_min_(TINY).div_(127 * unit)
    rest = rest / step
    digits = torch.empty((count, *x.shape), dtype=torch.int8)
    for digit in digits[:-1]:
        whole = rest.div(unit).round_()
        digit.copy_(whole)
        rest.sub_(whole, alpha=unit)
        unit //= BASE
    digits[-1].copy_(rest.round_())
    return digits, step


class TiledWeight(NamedTuple):
    """numbers: int8 or float8_e4m3fn, see `eight_bits.in_tiles`. scale: float32 `[ceil(in_features / span),
    out_features]`. span: columns that share a scale."""

    numbers: torch.Tensor
    scale: torch.Tensor
    span: int


class Tiled(NamedTuple):
    """The weight of a `TiledWeight` for bfloat16 inputs, which is never multiplied out whole; called as `Packed` is.
    Only where there is the kernel of `eight_bits`. bias: float32.
    """

    numbers: torch.Tensor
    scale: torch.Tensor
    span: int
    bias: torch.Tensor | None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        kernel = eight_bits.kernel()
        assert kernel is not None
        return kernel.multiply(x, *self)

    def plus(self, x: torch.Tensor, added: torch.Tensor) -> torch.Tensor:
        """The outputs plus `added` `[rows, out_features]`."""
        return self(x).add_(added)


Weight = torch.Tensor | Int8Weight | TiledWeight
Linear = Packed | Widened | Scaled | Tiled

MAX_NARROW_ROWS = 4
MAX_PART_ELEMENTS = 2**20
MAX_INT8_PART_ELEMENTS = 2**22
"""Not as small as those of `Widened`: a product lays out its inputs anew for each part."""
INT8_LANES = 64
"""torch's kernel for int8 weights reads whole vectors, beyond the end of other sizes."""
MAX_DIGIT_ROWS = 64
BASE = 254
"""Twice the largest digit, so that digits are within int8 on both sides."""
DIGITS = {torch.float32: 3, torch.bfloat16: 2, torch.float16: 2}
"""Of an input, by its type."""
TINY = 1e-30
"""The largest number of a row is taken for at least this, so that a row of zeros can be divided."""

POINTWISE = torch.ops.mkldnn._linear_pointwise.default
POINTWISE_PLUS = torch.ops.mkldnn._linear_pointwise.binary


def linear(weight: Weight, bias: torch.Tensor | None = None) -> Linear:
    """Layer of `weight` `[out_features, in_features]`; a packed layer does not keep the caller's tensor."""
    if isinstance(weight, Int8Weight):
        return Scaled(weight.numbers, weight.scale, bias)
    if isinstance(weight, TiledWeight):
        return Tiled(*weight, None if bias is None else bias.float())
    if not packs(weight.dtype):
        return Widened(weight, bias)
    # Without a batch size oneDNN chooses a layout that is good from 1 row to hundreds; hints for one size are up to
    # twice as slow at others.
    return Packed(torch.ops.mkldnn._reorder_linear_weight(weight), bias)


def tiled_kinds(dtype: torch.dtype) -> frozenset[Kind]:
    """The weights that are `Tiled` here, because the kernel multiplies them faster than torch. dtype: of the inputs."""
    if dtype is not torch.bfloat16 or (kernel := eight_bits.kernel()) is None:
        return frozenset()
    return frozenset(("int8", "fp8") if kernel.way == 2 else ("fp8",))


def multiplies_int8() -> bool:
    """Whether this processor has instructions that add up products of int8 numbers exactly."""
    return bool(torch.cpu._is_vnni_supported()) and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]


def packs(dtype: torch.dtype) -> bool:
    """Whether oneDNN has products of this type for this processor."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    match dtype:
        case torch.float32:
            return True
        case torch.bfloat16:
            return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
        case torch.float16:
            return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    return False
