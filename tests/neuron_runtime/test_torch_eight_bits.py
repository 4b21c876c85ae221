"""The kernel for weights of 8 bits gives the products of the weights that they stand for, on any processor; without a
compiler there is none."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.nn import functional

from neuron_runtime.backend.torch import eight_bits, kernels
from neuron_runtime.backend.torch.eight_bits import TILE_ROWS, Kernel, in_tiles
from neuron_runtime.backend.torch.held import TILE_COLUMNS
from neuron_runtime.backend.torch.linear import TiledWeight, linear, tiled_kinds
from neuron_runtime.backend.torch.quantizing import STORED
from neuron_runtime.quantization import Kind

KERNEL = eight_bits.kernel()
CASES = [
    pytest.param(replace(KERNEL, way=way), kind, id=f"{kind}, {name}")
    for kind, way, name in (("int8", 2, "AMX"), ("fp8", 2, "AMX"), ("fp8", 1, "AVX-512"))
    if KERNEL is not None and way <= KERNEL.way
]


def here(test: Callable[..., None]) -> Callable[..., None] | None:
    """A test for processors with the kernel."""
    return pytest.mark.parametrize(("way", "kind"), CASES)(test) if CASES else None


ROWS = (1, 4, 15, 17, 33, 150)


def random_weight(kind: Kind, rows: int, columns: int, span: int) -> tuple[TiledWeight, torch.Tensor]:
    """And what it stands for. FP8 has all its numbers, the smallest ones too."""
    bits = torch.randint(-127, 128, (rows, columns), dtype=torch.int8)
    numbers = bits.where((bits & 127 != 127) | (kind == "int8"), 0).view(STORED[kind])
    scale = torch.rand(-(-columns // span), rows) + 0.1
    exact = numbers.double() * scale.t().repeat_interleave(span, dim=1)[:, :columns].double()
    padded = functional.pad(numbers.view(torch.int8), (0, -columns % TILE_COLUMNS, 0, -rows % TILE_ROWS))
    return TiledWeight(in_tiles(padded).view(STORED[kind]), scale, span), exact


@here
@pytest.mark.parametrize("shape", [(64, 192, 192), (37, 300, 300), (70, 300, 128), (32, 704, 64)])
def test_a_layer_computes_with_the_weights_that_its_numbers_stand_for(
    way: Kernel, kind: Kind, shape: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At any number of rows, of any sizes. A row of zeros is one."""
    monkeypatch.setattr(eight_bits, "kernel", lambda: way)
    torch.manual_seed(0)
    (outputs, inputs, _), (weight, exact) = shape, random_weight(kind, *shape)
    bias = torch.randn(outputs).bfloat16()
    for rows in ROWS:
        x, added = torch.randn(rows, inputs).bfloat16(), torch.randn(rows, outputs).bfloat16()
        x[rows // 2] *= rows % 2
        expected, size = x.double() @ exact.t(), x.double().abs() @ exact.abs().t()
        layer = linear(weight, bias)
        for found, right in (
            (linear(weight)(x), expected),
            (layer(x), expected + bias),
            (layer.plus(x, added), expected + bias + added),
        ):
            assert (found.dtype, found.shape) == (torch.bfloat16, right.shape)
            # Rounded once, or twice; the largest input of a row has 16 bits, or weights of blocks have 8.
            error = (found.double() - right).abs()
            assert bool((error <= right.abs() / 128 + size * 2**-9 + 0.02).all()), (rows, error.max())


@here
def test_what_is_no_number_stays_so_and_spoils_its_own_row_alone(way: Kernel, kind: Kind) -> None:
    weight, _ = random_weight(kind, 64, 128, 128)
    x = torch.ones(3, 128).bfloat16()
    x[1, 5] = torch.nan
    for rows in (3, 1):
        found = way.multiply(x[:rows], *weight, None)
        assert found.isnan().all(dim=1).tolist() == [False, True, False][:rows]
        assert found[0].isfinite().all()
    assert way.multiply(x[:0], *weight, None).shape == (0, 64)


@here
def test_a_weight_that_is_no_number_makes_its_output_none(way: Kernel, kind: Kind) -> None:
    """int8 has no such numbers."""
    bits = torch.ones(64, 128, dtype=torch.int8)
    bits[3, 7], bits[40, 100] = 127, -1
    weight = TiledWeight(in_tiles(bits).view(STORED[kind]), torch.ones(1, 64), 128)
    for rows in (1, 20):
        found = way.multiply(torch.ones(rows, 128).bfloat16(), *weight, None)
        assert found[0].isnan().nonzero().flatten().tolist() == ([3, 40] if kind == "fp8" else [])


def test_tiles_have_the_rows_in_another_order() -> None:
    numbers = torch.randint(-128, 128, (64, 192), dtype=torch.int8)
    tiles = in_tiles(numbers.clone())
    assert tiles.shape == (4, 3, 16, 16, 4)
    assert (tiles[1, 2, 3, 5] == numbers[16 + 5, 128 + 12 : 128 + 16]).all()


@pytest.fixture
def builds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Sequence[str]]]:
    """The commands that build, with a cache of their own."""
    commands: list[Sequence[str]] = []

    def run(*arguments: str) -> object:
        if "-shared" in arguments:
            commands.append(arguments)
        return original(*arguments)

    original = kernels._run
    monkeypatch.setattr(kernels, "_run", run)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    eight_bits.kernel.cache_clear()
    yield commands
    eight_bits.kernel.cache_clear()


def test_the_kernel_is_built_once_for_all_processes_and_anew_where_the_file_is_damaged(
    builds: list[Sequence[str]],
) -> None:
    kept = kernels.path_of(eight_bits.SOURCE)
    kept.parent.mkdir(parents=True)
    kept.write_bytes(b"damaged")
    for _ in range(2):
        eight_bits.kernel.cache_clear()
        assert (eight_bits.kernel() is None) == (KERNEL is None)
        assert len(builds) == 1
    assert list(kept.parent.iterdir()) == [kept]


def test_a_folder_that_others_may_write_is_neither_read_nor_written(
    builds: list[Sequence[str]],
) -> None:
    """A library that is found is run."""
    kept = kernels.path_of(eight_bits.SOURCE)
    kept.parent.mkdir(parents=True)
    kept.parent.chmod(0o777)
    kept.write_bytes(b"of somebody else")
    assert (eight_bits.kernel() is None) == (KERNEL is None)
    assert len(builds) == 1
    assert [one.read_bytes() for one in kept.parent.iterdir()] == [b"of somebody else"]


def test_without_a_home_there_is_no_kernel(
    builds: list[Sequence[str]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a user whom the image does not know."""

    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", homeless)
    assert eight_bits.kernel() is None
    assert "Could not determine home directory" in capsys.readouterr().err


def test_without_a_compiler_there_is_no_kernel_which_is_said_once(
    builds: list[Sequence[str]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert tiled_kinds(torch.float32) == set()
    assert capsys.readouterr().err == ""  # nobody needs it
    assert tiled_kinds(torch.bfloat16) == tiled_kinds(torch.bfloat16) == set()
    (said,) = capsys.readouterr().err.splitlines()
    assert "weights of 8 bits are computed without the kernel" in said
    assert "no-such-compiler" in said


def test_a_compiler_that_fails_is_quoted(
    builds: list[Sequence[str]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(kernels, "FLAGS", ("-no-such-flag",))
    assert eight_bits.kernel() is None
    assert "no-such-flag" in capsys.readouterr().err
