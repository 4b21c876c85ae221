"""The optimum backend: drives Hugging Face's optimum-neuron on Neuron devices. Its entry points are `check_config`,
`compiler` and `load_backend`.

Importing this package is cheap: the Neuron libraries are imported only by `library`, when a model is compiled or
loaded.
"""

from __future__ import annotations

from pathlib import Path

from neuron_runtime.artifacts.loading import given_folder
from neuron_runtime.backend.fields import check_fields
from neuron_runtime.backend.neuron.devices import find_target, known_platform
from neuron_runtime.backend.optimum import library
from neuron_runtime.backend.optimum.foreign import holds_weights, is_foreign
from neuron_runtime.backend.optimum.graphs import OptimumCompiler
from neuron_runtime.backend.optimum.settings import check_override, settings_of
from neuron_runtime.backend_protocol import ONE_RANK, Backend, Compiler, ProgressCallback, Rank
from neuron_runtime.checkpoint import read_config
from neuron_runtime.config import RuntimeConfig, uses_blocks
from neuron_runtime.core import Task
from neuron_runtime.errors import ConfigProblems, InvalidConfig
from neuron_runtime.quantization import QuantizedWeights

FREED_BY_EXIT = True
ALWAYS_COMPILES = True
PROCESS_PER_RANK = False
TASKS: tuple[Task, ...] = ("generate",)
DRAFT_METHODS = ()
QUANTIZED_WEIGHTS = QuantizedWeights()
MIN_ADAPTER_RANK = 0


def needs_weights(config: RuntimeConfig) -> bool:
    folder = given_folder()
    return folder is None or not holds_weights(folder)


def compiler_reads_weights(config: RuntimeConfig) -> bool:
    return False


def check_config(config: RuntimeConfig) -> None:
    """Raises InvalidConfig for settings that this backend does not support with any model, or a missing library."""
    library.check_installed()
    problems = ConfigProblems()
    with problems.collecting():
        check_fields(
            config,
            {
                "sampling": ("Device", "Host"),
                "accelerator.cores": (config.accelerator.cores,),
                "accelerator.logicalNeuronCore": (1, 2),
            },
        )
    with problems.collecting():
        check_override(config.override_neuron_config)
    if uses_blocks(config):
        message = "the optimum backend has no blocks: leave out layout, prefixCaching, blockSize and numBlocks"
        problems.add("$.layout", message)
    problems.check()


def check_model(model_dir: Path, config: RuntimeConfig) -> None:
    """Raises what `settings_of` does, if this machine says for which platform. Graphs that others exported may decide
    what the configuration leaves open, so they are compared with it only when they are loaded."""
    if given_folder() is not None or is_foreign(model_dir):
        return
    if known_platform() is not None:
        settings_of(config, read_config(model_dir), find_target(config), has_chunks=library.has_chunks())


def versions() -> dict[str, str]:
    return library.versions()


def compiler(config: RuntimeConfig, model_dir: Path) -> Compiler:
    """See `BackendPackage.compiler`."""
    return OptimumCompiler(config, model_dir)


def load_backend(
    model_dir: Path,
    config: RuntimeConfig,
    progress: ProgressCallback,
    artifact: Path | None = None,
    *,
    rank: Rank = ONE_RANK,
) -> Backend:
    """Load an exported model.

    Raises:
        FatalError: a library is missing, the artifact does not fit, DEVICE_HELD after waiting, or what the device
            raised.
        InvalidConfig: names the field.
    """
    if artifact is None:
        raise ValueError("a backend that always compiles is loaded with an artifact")
    if rank.size > 1:
        raise InvalidConfig("$.backend", "the optimum backend runs on one node only")
    from neuron_runtime.backend.optimum.loader import load  # noqa: PLC0415  (torch takes seconds to import)

    return load(model_dir, config, progress, artifact)
