"""The simulated backend: a device that only keeps time. Its entry points are `check_config` and `load_backend`.

As backend `simulated` of a served model it runs in real time and needs no weights, only config.json and tokenizer, so
that everything above the device can be loaded and timed. Benchmarks assemble its parts themselves.
"""

from __future__ import annotations

from pathlib import Path

from neuron_runtime.backend.fields import check_fields
from neuron_runtime.backend.simulated.compiler import SimulatedCompiler
from neuron_runtime.backend.simulated.device import SimulatedBackend, WallClock
from neuron_runtime.backend.simulated.options import DEFAULT_MAX_LENGTH, Options, limits_of, read_options, step_times
from neuron_runtime.backend_protocol import ONE_RANK, Backend, ProgressCallback, Rank
from neuron_runtime.checkpoint import InvalidModel, read_config
from neuron_runtime.config import RuntimeConfig
from neuron_runtime.core import SAMPLING_MODES, BackendLimits, Task
from neuron_runtime.errors import ConfigProblems
from neuron_runtime.quantization import QuantizedWeights

FREED_BY_EXIT = False
ALWAYS_COMPILES = False
PROCESS_PER_RANK = True
TASKS: tuple[Task, ...] = ("generate",)
DRAFT_METHODS = ("NGram",)
QUANTIZED_WEIGHTS = QuantizedWeights()
MIN_ADAPTER_RANK = 1


def needs_weights(config: RuntimeConfig) -> bool:
    return False


def compiler_reads_weights(config: RuntimeConfig) -> bool:
    return False


def check_config(config: RuntimeConfig) -> None:
    """Raises InvalidConfig for settings that are invalid with any model."""
    problems = ConfigProblems()
    with problems.collecting():
        check_fields(config, {"sampling": SAMPLING_MODES})
    with problems.collecting():
        read_options(config.override_neuron_config)
    problems.check()


def check_model(model_dir: Path, config: RuntimeConfig) -> None:
    """Raises as `load_backend`."""
    _limits(config, read_options(config.override_neuron_config), model_dir)


def versions() -> dict[str, str]:
    return {}


def compiler(config: RuntimeConfig, model_dir: Path) -> SimulatedCompiler:
    """See `BackendPackage`. Raises as `load_backend`."""
    options = read_options(config.override_neuron_config)
    return SimulatedCompiler(_limits(config, options, model_dir), options)


def load_backend(
    model_dir: Path,
    config: RuntimeConfig,
    progress: ProgressCallback,
    artifact: Path | None = None,
    *,
    rank: Rank = ONE_RANK,
) -> Backend:
    """A device with the model's vocabulary and length and the configured step times.

    Raises:
        InvalidModel: config.json is missing or has no vocabulary size.
        InvalidConfig: a limit or a setting is invalid; names the field.
    """
    options = read_options(config.override_neuron_config)
    limits = _limits(config, options, model_dir)
    progress("simulating a device", 1.0)
    if artifact is not None:
        SimulatedCompiler(limits, options).check(artifact)
    return SimulatedBackend(limits, step_times(options), WallClock())


def _limits(config: RuntimeConfig, options: Options, model_dir: Path) -> BackendLimits:
    model = read_config(model_dir)
    size, positions = model.get("vocab_size"), model.get("max_position_embeddings", DEFAULT_MAX_LENGTH)
    for name, value, least in (("vocab_size", size, 1), ("max_position_embeddings", positions, 2)):
        if not isinstance(value, int) or value < least:
            raise InvalidModel(f"{model_dir / 'config.json'}: {name} must be an integer >= {least}, got {value!r}")
    assert isinstance(size, int)
    return limits_of(config, options, vocabulary_size=size, longest=positions)
