"""A linear layer whose weight is packed once for this machine's matrix kernels.

Created at load time, called by the decoder. Prepacked oneDNN weights are 1.3 to 2.2 times as fast as plain `F.linear`
at 1 to 32 rows. Where oneDNN does not support the dtype, `F.linear` computes a few rows, and float32 more of them.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.nn import functional


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


Linear = Packed | Widened

MAX_NARROW_ROWS = 4
MAX_PART_ELEMENTS = 2**20

POINTWISE = torch.ops.mkldnn._linear_pointwise.default
POINTWISE_PLUS = torch.ops.mkldnn._linear_pointwise.binary


def linear(weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
    """Layer of `weight` `[out_features, in_features]`; a packed layer does not keep the caller's tensor."""
    if not _packs(weight.dtype):
        return Widened(weight, bias)
    # Without a batch size oneDNN chooses a layout that is good from 1 row to hundreds; hints for one size are up to
    # twice as slow at others.
    return Packed(torch.ops.mkldnn._reorder_linear_weight(weight), bias)


def _packs(dtype: torch.dtype) -> bool:
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
