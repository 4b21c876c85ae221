"""Compiles the decode step of a model ahead of time into shared libraries, with torch's inductor and a C++ compiler.

Called by `graphs.py` in a process of its own. A library holds code alone: `compiled.py` loads it and hands it the
weights. It runs on every processor of the level `PROCESSOR`, whatever machine compiled it.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import torch
from torch.export import Dim, export

from neuron_runtime.backend.torch.architecture import DecoderConfig
from neuron_runtime.backend.torch.cache import lazy_zeros
from neuron_runtime.backend.torch.compiled import load_library
from neuron_runtime.backend.torch.graphs import PROCESSOR, StepGraph, cxx
from neuron_runtime.backend.torch.step_module import DecodeStep, SeenInputs, StepInputs, distinct
from neuron_runtime.checkpoint import InvalidModel

# Sizes to trace with, all different, so that torch does not take one for another.
ROWS, LINES, LENGTH, COLUMNS, LINES_PER_ROW = 5, 7, 96, 64, 3


def compile_step(step: StepGraph, model: DecoderConfig, dtype: torch.dtype, block_size: int, folder: Path) -> None:
    """Write the library of one step. block_size: 0 for the slot layout."""
    module = DecodeStep(model, dtype, blocks=block_size > 0)
    inputs = _example(model, dtype, step.num_rows or ROWS, block_size)
    with tempfile.TemporaryDirectory() as scratch, torch.no_grad():
        # Otherwise below a folder named after the user, who may have no name in a container.
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(Path(scratch, "cache"))
        program = export(
            module, tuple(inputs.tensors()), dynamic_shapes={"tensors": _free(inputs, block_size)}, strict=False
        )
        package = Path(scratch, "step.pt2")
        torch._inductor.aoti_compile_and_package(
            program, package_path=str(package), inductor_configs=_settings(_compiler_for_target(Path(scratch)))
        )
        # Loading a package unpacks it below /tmp; a library is loaded from where it is.
        with zipfile.ZipFile(package) as archive:
            (name,) = (name for name in archive.namelist() if name.endswith(".so"))
            with archive.open(name) as source, (folder / step.file).open("wb") as target:
                shutil.copyfileobj(source, target)
    names = set(load_library(folder / step.file).get_constant_names_to_original_fqns().values())
    if not module.free_constants <= names:
        # inductor writes vectors of up to eight numbers into the code.
        raise InvalidModel("the model is too small to be compiled: no vector of weights may have less than 9 numbers")


def _settings(compiler: Path) -> dict[str, Any]:
    return {
        "aot_inductor.package_constants_in_so": False,
        "aot_inductor.precompile_headers": False,  # pays only with many kernels
        "cpp_cache_precompile_headers": False,
        "compile_threads": 1,
        "cpp.cxx": (None, str(compiler)),
        "cpp.dynamic_threads": True,  # as many as torch uses where the library is loaded
        "cpp.simdlen": 256,  # the vectors of `PROCESSOR`
        "cpp.vec_isa_ok": True,  # without a test program
        "realize_opcount_threshold": 6,  # masks and cosines are computed once, not again in every layer
    }


def _compiler_for_target(folder: Path) -> Path:
    """A compiler for `PROCESSOR`. inductor asks for this machine's; of two -march the last one counts."""
    path = folder / "c++"
    path.write_text(f'#!/bin/sh\nexec {cxx()} "$@" -march={PROCESSOR}\n')
    path.chmod(0o755)
    return path


def _example(model: DecoderConfig, dtype: torch.dtype, rows: int, block_size: int) -> StepInputs:
    length, columns, lines_per_row = (block_size, block_size, LINES_PER_ROW) if block_size else (LENGTH, COLUMNS, 1)

    def per_row(*more: int) -> torch.Tensor:
        return torch.zeros((rows, *more), dtype=torch.int64)

    def caches() -> tuple[torch.Tensor, ...]:
        shape = (LINES, model.num_kv_heads, length, model.head_dim)
        return tuple(lazy_zeros(shape, dtype) for _ in model.windows)

    seen = tuple(
        SeenInputs(per_row(lines_per_row), torch.arange(columns), per_row(), per_row()) for _ in distinct(model.windows)
    )
    return StepInputs(per_row(), per_row(), per_row(), per_row(), seen, caches(), caches())


def _free(inputs: StepInputs, block_size: int) -> tuple[Any, ...]:
    """The dimensions of each input that are free, in the form of `torch.export`."""
    several = {0: Dim("rows")} if len(inputs.token_ids) > 1 else {}
    cache = {0: Dim("lines")} | ({} if block_size else {2: Dim("length")})
    seen: list[dict[int, Any]] = []
    for number in range(len(inputs.seen)):  # each window sees its own number of positions
        positions = {} if block_size else {0: Dim(f"columns_{number}")}
        lines = several | ({1: Dim(f"lines_per_row_{number}")} if block_size else {})
        seen += [lines, positions, several, several]
    return (*[several] * 4, *seen, *[cache] * (2 * len(inputs.keys)))
