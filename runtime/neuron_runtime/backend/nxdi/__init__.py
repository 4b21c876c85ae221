"""The NxD Inference backend: drives `neuronx-distributed-inference` on Neuron devices. Its entry points are
`check_config`, `compiler` and `load_backend`.

Importing this package is cheap: the Neuron libraries are imported only by `library`, when a model is compiled or
loaded.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from neuron_runtime.artifacts.loading import given_folder
from neuron_runtime.backend.neuron.devices import find_target, known_platform
from neuron_runtime.backend.nxdi import library
from neuron_runtime.backend.nxdi.draft_model import draft_files
from neuron_runtime.backend.nxdi.foreign import holds_weights, within
from neuron_runtime.backend.nxdi.graph_plan import GraphPlan, plan_of
from neuron_runtime.backend.nxdi.graphs import NxdiCompiler
from neuron_runtime.backend.nxdi.models import is_private, reads_stored
from neuron_runtime.backend.nxdi.neuron_config import SHARDED, read_override, spelled
from neuron_runtime.backend.nxdi.quantized import LINEAR
from neuron_runtime.backend.nxdi.settings import MIN_ADAPTER_RANK as MIN_ADAPTER_RANK
from neuron_runtime.backend.nxdi.settings import settings_of
from neuron_runtime.backend_protocol import ONE_RANK, Backend, Compiler, ProgressCallback, Rank
from neuron_runtime.checkpoint import read_config
from neuron_runtime.config import RuntimeConfig
from neuron_runtime.core import Task
from neuron_runtime.quantization import QuantizedWeights

FREED_BY_EXIT = True
ALWAYS_COMPILES = True
PROCESS_PER_RANK = False
TASKS: tuple[Task, ...] = ("generate",)
DRAFT_METHODS = ("NGram", "Draft", "Eagle")
QUANTIZED_WEIGHTS = QuantizedWeights(formats=("int8", "fp8"), reads=reads_stored, plain_with_bias=LINEAR)


def needs_weights(config: RuntimeConfig) -> bool:
    """A sharded checkpoint is part of the artifact."""
    folder = given_folder()
    return not compiler_reads_weights(config) and not (folder is not None and holds_weights(folder))


def compiler_reads_weights(config: RuntimeConfig) -> bool:
    return any(spelled(key) == SHARDED and value is True for key, value in config.override_neuron_config.items())


def check_config(config: RuntimeConfig) -> None:
    """Raises InvalidConfig for settings that this backend does not support with any model, or a missing library."""
    library.check_installed()
    # A name is checked with the model, which has the better message for a wrong one.
    application = config.application_class if is_private(config.application_class) else ""
    read_override(config.override_neuron_config, application)


def check_model(model_dir: Path, config: RuntimeConfig) -> None:
    """Raises what `settings_of` does, if this machine says for which platform. Graphs that others compiled may decide
    what the configuration leaves open, so they are compared with it only when they are loaded. So is a draft model,
    which may not have been fetched yet."""
    if given_folder() is not None or within(model_dir):
        return
    if known_platform() is not None:
        settings_of(config, read_config(model_dir), find_target(config), sees_pictures=library.sees_pictures())


def versions() -> dict[str, str]:
    return library.versions()


def compiler(config: RuntimeConfig, model_dir: Path) -> Compiler:
    """See `BackendPackage.compiler`."""
    return NxdiCompiler(config, model_dir)


def plan(config: RuntimeConfig, model_dir: Path, lengths: Sequence[tuple[int, float]]) -> GraphPlan:
    """See `PlanningPackage.plan`."""
    return plan_of(config, read_config(model_dir), find_target(config), tuple(lengths), draft_files(config))


def load_backend(
    model_dir: Path,
    config: RuntimeConfig,
    progress: ProgressCallback,
    artifact: Path | None = None,
    *,
    rank: Rank = ONE_RANK,
) -> Backend:
    """Load a compiled model.

    Raises:
        FatalError: a library is missing, the artifact does not fit, DEVICE_HELD after waiting, or what the device
            raised.
        InvalidConfig: names the field.
    """
    if artifact is None:
        raise ValueError("a backend that always compiles is loaded with an artifact")
    from neuron_runtime.backend.nxdi.loader import load  # noqa: PLC0415  (torch takes seconds to import)

    return load(model_dir, config, progress, artifact, rank)
