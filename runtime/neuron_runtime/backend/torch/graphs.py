"""What the torch backend compiles of a model: its decode step, once for one row and once for any larger number.

`TorchCompiler` is the `Compiler` of `backend_protocol`; whoever loads reads the names of files here. Describing needs
no torch; it is imported to compile and to check. Prompts are not compiled: eager torch computes long steps as fast.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path

from neuron_runtime.backend.torch.architecture import decoder_config
from neuron_runtime.backend.torch.choices import block_size_of, dtype_of
from neuron_runtime.backend.torch.naming import as_named
from neuron_runtime.backend_protocol import Compiler, CompileUnit, Needs
from neuron_runtime.checkpoint import read_whole_checkpoint
from neuron_runtime.config import RuntimeConfig
from neuron_runtime.errors import ExitCode, FatalError, InvalidConfig

PROCESSOR = "x86-64-v3"
"""The level of processors that graphs are compiled for (x86-64 psABI): those with AVX2. It is not that of the compiling
machine, so graphs run on all nodes, and the key does not depend on which one compiled them."""

COMPILED_DTYPES = ("float32", "bfloat16")
"""oneDNN, whose products the graphs call, has float16 on few processors."""
SOURCES = ("graphs", "step_module", "artifact", "decoder", "attention", "rotary", "linear", "mlp", "cache")
"""The modules that make a graph."""


@dataclass(frozen=True, slots=True)
class StepGraph:
    """A step that is compiled. num_rows: None for every number above one."""

    name: str
    file: str
    num_rows: int | None


ONE_ROW = StepGraph("decode of one row", "decode-one.so", 1)
SEVERAL_ROWS = StepGraph("decode of several rows", "decode-several.so", None)
STEPS = (ONE_ROW, SEVERAL_ROWS)


def cxx() -> str:
    """The C++ compiler's command."""
    return os.environ.get("CXX", "g++")


class TorchCompiler(Compiler):
    """See `backend_protocol.Compiler`."""

    def __init__(self, config: RuntimeConfig, model_dir: Path) -> None:
        """Raises as `BackendPackage.compiler`."""
        if platform.machine() != "x86_64":
            message = f"is for processors of {PROCESSOR}, not {platform.machine()}: leave it out"
            raise InvalidConfig("$.compile", message)
        checkpoint = read_whole_checkpoint(model_dir)
        self._model = decoder_config(checkpoint.config)
        checkpoint = as_named(checkpoint, self._model)
        if self._model.experts is not None:
            raise InvalidConfig(
                "$.compile", "is for models without experts, whose steps depend on tokens: leave it out"
            )
        self._dtype, self._block_size = dtype_of(config, checkpoint), block_size_of(config)
        if self._dtype not in COMPILED_DTYPES:
            supported = " or ".join(COMPILED_DTYPES)
            raise InvalidConfig("$.dtype", f"must be {supported} if `compile` is true, got {self._dtype}")

    @property
    def needs(self) -> Needs:
        layout = {"layout": "blocks", "blockSize": self._block_size} if self._block_size else {"layout": "slots"}
        return Needs(
            shapes={"rows": [step.num_rows or "several" for step in STEPS]},
            settings={"dtype": self._dtype, **layout, "source": _hash_of_sources()},
            libraries={"torch": version("torch")},
            target={"processor": PROCESSOR},
        )

    def tools(self) -> Mapping[str, str]:
        return {"c++": _version_of(cxx())}

    def graphs(self) -> Sequence[CompileUnit]:
        return [CompileUnit(step.name, partial(self._compile, step)) for step in STEPS]

    def check(self, folder: Path) -> None:
        from neuron_runtime.backend.torch.compiled import load_library  # noqa: PLC0415 - imports torch

        for step in STEPS:
            load_library(folder / step.file)

    def _compile(self, step: StepGraph, folder: Path) -> None:
        import torch  # noqa: PLC0415 - takes seconds

        from neuron_runtime.backend.torch.artifact import compile_step  # noqa: PLC0415 - imports torch

        compile_step(step, self._model, getattr(torch, self._dtype), self._block_size, folder)


def _version_of(command: str) -> str:
    if shutil.which(command) is None:
        raise FatalError(
            ExitCode.COMPILE_FAILED,
            f"the C++ compiler {command} is not installed: use the image `runtime-cpu-compile`, or install g++",
        )
    return subprocess.run([command, "--version"], capture_output=True, text=True, check=True).stdout.partition("\n")[0]


def _hash_of_sources() -> str:
    here = Path(__file__).parent
    parts = (here.joinpath(f"{name}.py").read_bytes() for name in SOURCES)
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]
