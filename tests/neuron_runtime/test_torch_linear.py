"""A linear layer in half precision gives the rounded product of float32, with or without instructions for it."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from neuron_runtime.backend.torch import linear
from neuron_runtime.backend.torch.linear import MAX_NARROW_ROWS, Widened

ROWS = (1, MAX_NARROW_ROWS, MAX_NARROW_ROWS + 1, 70)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("max_part_elements", [1, 7 * 48, 2**20])
def test_few_rows_and_many_are_the_rounded_product_of_float32(
    dtype: torch.dtype, has_bias: bool, max_part_elements: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In parts of one line of the weight, of seven, and whole."""
    monkeypatch.setattr(linear, "MAX_PART_ELEMENTS", max_part_elements)
    torch.manual_seed(0)
    weight = torch.randn(37, 48, dtype=dtype)
    bias = torch.randn(37, dtype=dtype) if has_bias else None
    for rows in ROWS:
        x = torch.randn(rows, 48, dtype=dtype)
        exact = functional.linear(x.float(), weight.float(), bias if bias is None else bias.float())
        for layer in (Widened(weight, bias), linear.linear(weight, bias)):
            out = layer(x)
            assert (out.dtype, out.shape) == (dtype, exact.shape)
            torch.testing.assert_close(out.float(), exact.to(dtype).float(), rtol=2 * torch.finfo(dtype).eps, atol=1e-2)
