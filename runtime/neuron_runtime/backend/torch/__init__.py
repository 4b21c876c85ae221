"""The torch backend: our own decoder on CPUs. Its entry points are `check_config`, `compiler` and `load_backend`;
benchmarks also call `prepare`, the first part of `load_backend`, to time it with the loader.

Importing this package is cheap: torch is imported when a model is loaded, so commands that need no model start fast.
"""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path

from neuron_runtime.backend.fields import check_fields
from neuron_runtime.backend.torch.architecture import decoder_config
from neuron_runtime.backend.torch.before_import import check_room_for_torch, leave_out_triton, set_up_allocation
from neuron_runtime.backend.torch.graphs import TorchCompiler
from neuron_runtime.backend.torch.parts import part_of_model
from neuron_runtime.backend.torch.read_ahead import LOADING, ReadAhead
from neuron_runtime.backend.torch.vector_limits import check_generates, check_settings, vector_limits
from neuron_runtime.backend.torch.vector_models import vector_model
from neuron_runtime.backend_protocol import ONE_RANK, Backend, Compiler, ProgressCallback, Rank
from neuron_runtime.checkpoint import read_config
from neuron_runtime.config import RuntimeConfig
from neuron_runtime.core import Task
from neuron_runtime.errors import ConfigProblems, InvalidConfig
from neuron_runtime.host import FreeMemory
from neuron_runtime.quantization import QuantizedWeights, wanted_format
from neuron_runtime.recipes import read_recipe

FREED_BY_EXIT = False
ALWAYS_COMPILES = False
PROCESS_PER_RANK = True
TASKS: tuple[Task, ...] = ("generate", "embed", "rerank")
DRAFT_METHODS = ("NGram", "Draft", "Eagle")
QUANTIZED_WEIGHTS = QuantizedWeights(formats=("int8", "fp8"), quantizes=True, reads=lambda config: True, experts=True)
MIN_ADAPTER_RANK = 1
UNLIMITED = 2**62
"""Bytes."""


def needs_weights(config: RuntimeConfig) -> bool:
    return True


def compiler_reads_weights(config: RuntimeConfig) -> bool:
    return False


def check_config(config: RuntimeConfig) -> None:
    """Raises InvalidConfig for settings that this backend does not support with any model."""
    problems = ConfigProblems()
    with problems.collecting():
        check_fields(config, {"sampling": ("Host",)})
    with problems.collecting():
        _check_compiled(config, config.parallelism.tensor)
    if config.task != "generate":
        with problems.collecting():
            check_settings(config)
    for key in config.override_neuron_config:
        problems.add(f"$.overrideNeuronConfig.{key}", "the torch backend has no such setting: leave it out")
    problems.check()


def _check_compiled(config: RuntimeConfig, num_ranks: int) -> None:
    if config.compile and num_ranks > 1:
        raise InvalidConfig("$.compile", f"compiled steps run on one rank only, not on {num_ranks}: leave it out")


def check_model(model_dir: Path, config: RuntimeConfig) -> None:
    """Raises InvalidConfig for limits that this model cannot have, however much memory there is, and for weights that
    it is not quantized to."""
    from neuron_runtime.backend.torch.sizing import derive_limits  # noqa: PLC0415 - not needed to serve

    stored = read_config(model_dir)
    if config.task != "generate":
        vector_limits(config, vector_model(stored), read_recipe(model_dir, stored), 1, FreeMemory(UNLIMITED))
        return
    check_generates(stored)
    wanted_format(stored, config.quantization)
    model = decoder_config(stored)
    part = part_of_model(model, config.parallelism.tensor or 1)
    derive_limits(config, part, 1, FreeMemory(UNLIMITED))


def versions() -> dict[str, str]:
    return {"torch": version("torch")}


def prepare(model_dir: Path, num_ranks: int = 1) -> ReadAhead:
    """Set up memory allocation and start reading the weights; must run before torch is imported."""
    leave_out_triton()
    set_up_allocation()  # first: threads that exist already have their own heap
    ahead = ReadAhead(model_dir)
    if num_ranks == 1:  # one of several needs but a part of each tensor
        ahead.start()
    return ahead


def compiler(config: RuntimeConfig, model_dir: Path) -> Compiler:
    """See `BackendPackage.compiler`."""
    return TorchCompiler(config, model_dir)


def load_backend(
    model_dir: Path,
    config: RuntimeConfig,
    progress: ProgressCallback,
    artifact: Path | None = None,
    *,
    rank: Rank = ONE_RANK,
) -> Backend:
    """Check a model folder, derive the limits, read the weights. The caller runs `warm_up`.

    Raises:
        FatalError: MODEL_NOT_FOUND, INVALID_MODEL, UNSUPPORTED_ARCHITECTURE or DEVICE_OUT_OF_MEMORY.
        InvalidConfig: a limit or the dtype in the configuration cannot be served; names the field.
    """
    _check_compiled(config, rank.size)
    check_room_for_torch()
    ahead = prepare(model_dir, rank.size)
    # torch takes seconds to import
    from neuron_runtime.backend.torch import loader, vector_loader  # noqa: PLC0415

    def report(stage: str, share: float) -> None:
        if stage == LOADING:
            ahead.loaded(share)
        progress(stage, share)

    try:
        if config.task != "generate":
            return vector_loader.load(model_dir, config, report)
        return loader.load(model_dir, config, report, artifact=artifact, place=rank)
    finally:
        ahead.stop()
