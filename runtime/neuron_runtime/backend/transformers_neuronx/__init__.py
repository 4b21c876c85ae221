"""The transformers-neuronx backend: drives the library of that name (v0.13) on Inf2 and Trn1. Its entry points are
`check_config`, `compiler` and `load_backend`.

For manifests that were written for it; AWS's support of the library has ended. Importing this package is cheap: the
Neuron libraries are imported only by `library`, when a model is compiled or loaded.
"""

from __future__ import annotations

from pathlib import Path

from neuron_runtime.backend.neuron.devices import find_target, known_platform
from neuron_runtime.backend.transformers_neuronx import library
from neuron_runtime.backend.transformers_neuronx.graphs import NeuronxCompiler
from neuron_runtime.backend.transformers_neuronx.settings import check_document, settings_of
from neuron_runtime.backend_protocol import ONE_RANK, Backend, Compiler, ProgressCallback, Rank
from neuron_runtime.checkpoint import read_config
from neuron_runtime.config import RuntimeConfig
from neuron_runtime.core import Task
from neuron_runtime.errors import InvalidConfig
from neuron_runtime.flags import plain
from neuron_runtime.quantization import QuantizedWeights

FREED_BY_EXIT = True
ALWAYS_COMPILES = True
PROCESS_PER_RANK = False
TASKS: tuple[Task, ...] = ("generate",)
DRAFT_METHODS = ()
QUANTIZED_WEIGHTS = QuantizedWeights()
MIN_ADAPTER_RANK = 0


def needs_weights(config: RuntimeConfig) -> bool:
    return True


def compiler_reads_weights(config: RuntimeConfig) -> bool:
    """Graphs take the shapes of weights, and of their scales, which weights without numbers would not have
    (`quantize.maybe_quantize_weights`)."""
    return any(plain(key) == "quant" and value is not None for key, value in config.override_neuron_config.items())


def check_config(config: RuntimeConfig) -> None:
    """Raises InvalidConfig for settings that this backend does not support with any model, or a missing library."""
    check_document(config)
    library.check_installed()


def check_model(model_dir: Path, config: RuntimeConfig) -> None:
    """Raises what `settings_of` does, if this machine says for which platform."""
    if known_platform() is not None:
        settings_of(config, read_config(model_dir), find_target(config))


def versions() -> dict[str, str]:
    return library.versions()


def compiler(config: RuntimeConfig, model_dir: Path) -> Compiler:
    """See `BackendPackage.compiler`."""
    return NeuronxCompiler(config, model_dir)


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
    if rank.size > 1:
        raise InvalidConfig("$.parallelism.tensor", "the transformers-neuronx backend runs on one node: use nxdi")
    from neuron_runtime.backend.transformers_neuronx.loader import load  # noqa: PLC0415  (imports torch)

    return load(model_dir, config, progress, artifact)
