"""A linear layer in half precision gives the rounded product of float32, with or without instructions for it."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from neuron_runtime.backend.torch import linear
from neuron_runtime.backend.torch.linear import BASE, MAX_DIGIT_ROWS, MAX_NARROW_ROWS, Int8Weight, Widened, digits_of

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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("outputs", "inputs"), [(64, 128), (37, 48)])
@pytest.mark.parametrize("has_int8", [True, False])
def test_an_int8_layer_computes_with_the_weights_that_its_numbers_stand_for(
    dtype: torch.dtype, outputs: int, inputs: int, has_int8: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At a few rows, at more and at many, in parts of three lines; of all sizes, and where a processor multiplies no
    int8 numbers. A row of zeros is one."""
    monkeypatch.setattr(linear, "MAX_INT8_PART_ELEMENTS", 3 * inputs)
    monkeypatch.setattr(linear, "multiplies_int8", lambda: has_int8)
    torch.manual_seed(0)
    numbers = torch.randint(-128, 128, (outputs, inputs), dtype=torch.int8)
    scale, bias = (torch.rand(outputs) / 128).to(dtype), torch.randn(outputs).to(dtype)
    for rows in (1, MAX_NARROW_ROWS, MAX_NARROW_ROWS + 1, MAX_DIGIT_ROWS, MAX_DIGIT_ROWS + 1):
        x, added = torch.randn(rows, inputs).to(dtype), torch.randn(rows, outputs).to(dtype)
        x[rows // 2] *= rows % 2
        exact = functional.linear(x.double(), numbers * scale.double().unsqueeze(1))
        tolerance = {"rtol": 4 * torch.finfo(dtype).eps, "atol": max(1e-5, 8 * torch.finfo(dtype).eps)}
        layer = linear.linear(Int8Weight(numbers, scale), bias)
        torch.testing.assert_close(layer(x).double(), exact + bias, **tolerance)
        torch.testing.assert_close(layer.plus(x, added).double(), exact + bias + added, **tolerance)
        torch.testing.assert_close(linear.linear(Int8Weight(numbers, scale))(x).double(), exact, **tolerance)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_an_int8_layer_has_outputs_wherever_its_dtype_has_room_for_them(dtype: torch.dtype) -> None:
    """Before they are scaled, they are a thousand times as large."""
    numbers, scale = torch.full((64, 128), 100, dtype=torch.int8), torch.full((64,), 1e-3, dtype=dtype)
    for rows in (1, MAX_DIGIT_ROWS, MAX_DIGIT_ROWS + 1):
        out = linear.linear(Int8Weight(numbers, scale))(torch.full((rows, 128), 200.0, dtype=dtype))
        torch.testing.assert_close(out.float(), torch.full((rows, 64), 2560.0), rtol=0.02, atol=0)


@pytest.mark.parametrize("count", [2, 3])
def test_digits_of_inputs_are_int8_numbers_that_add_up_to_them(count: int) -> None:
    x = torch.cat((torch.randn(40, 64) * torch.logspace(-3, 3, 40).unsqueeze(1), torch.zeros(1, 64)))
    x[0, :2] = torch.tensor([1.0, 1.0 - 1 / BASE / 2])  # between two of the highest digits
    digits, step = digits_of(x, count)
    assert (digits.dtype, int(digits.min()) >= -127) == (torch.int8, True)
    total = sum(digit.double() * BASE ** (count - 1 - place) for place, digit in enumerate(digits)) * step
    error = (total - x).abs() / x.abs().amax(dim=1, keepdim=True).clamp_min(1e-30)
    assert error.max() <= {2: 1.01 / 64516, 3: 2**-22}[count]
