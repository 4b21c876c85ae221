"""optimum-neuron itself: what is installed, and a model exported or loaded by its own classes.

Its modules are imported here alone, in a process whose environment is set (`graphs.prepare_environment`). What a
version can is found out by looking at it, never by comparing version numbers.
"""

from __future__ import annotations

import importlib
import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from neuron_runtime.backend.neuron.installed import driver_version, missing, version_of
from neuron_runtime.backend.neuron.model_config import ROPE, completed
from neuron_runtime.backend.neuron.override import PATH
from neuron_runtime.backend.optimum.settings import Settings
from neuron_runtime.checkpoint import CONFIG_FILE, GRAPHS_CONFIG_FILE, GRAPHS_FILE, read_config
from neuron_runtime.errors import ExitCode, FatalError, InvalidConfig

IMAGE = "runtime-optimum"
"""Target of our Dockerfile whose image has all of them."""

OPTIMUM, COMPILER = "optimum-neuron", "neuronx-cc"
PACKAGES = {
    OPTIMUM: "optimum.neuron",
    "neuronx-distributed": "neuronx_distributed",
    "torch-neuronx": "torch_neuronx",
    COMPILER: "neuronxcc",
}
"""The name to import of each distribution without which nothing runs: it asks the compiler for its version even to load
a model. Graphs run only with the versions that compiled them."""
OTHERS = ("libneuronxla", "torch-xla", "torch", "transformers")

CHUNKS = "prefill_chunk_size"
"""The field of NxDNeuronConfig that came with chunks."""
CONFIG_MODULE = "models/inference/backend/config.py"
"""Where the library has that class. It is read, because importing it takes seconds."""

SHARDS_FOLDER = "checkpoint"
"""In a folder of compiled graphs, the library looks for weights here first."""
WEIGHTS = ("*.safetensors", "*.safetensors.index.json")


def check_installed() -> None:
    """Raises InvalidConfig naming the packages that are missing."""
    if lacks := missing(PACKAGES):
        message = f"optimum needs {', '.join(lacks)}, which is not installed: use the image {IMAGE}, or another backend"
        raise InvalidConfig("$.backend", message)


def required_versions() -> dict[str, str]:
    """Versions that must be the same where graphs are compiled and where they run."""
    return {name: version_of(name) or "unknown" for name in (*PACKAGES, "torch")}


def versions() -> dict[str, str]:
    """All versions that a report of a problem should have; imports nothing."""
    named = {name: version_of(name) for name in (*PACKAGES, *OTHERS)}
    return {name: value for name, value in {**named, "driver": driver_version()}.items() if value}


def has_chunks() -> bool:
    """Whether the installed library computes prompts in chunks."""
    spec = find_spec(PACKAGES[OPTIMUM])
    folders = spec.submodule_search_locations if spec else None
    return any(
        CHUNKS in path.read_text() for folder in folders or () if (path := Path(folder, CONFIG_MODULE)).is_file()
    )


def export(settings: Settings, model_dir: Path, folder: Path) -> None:
    """Compile a model into a folder, without its weights.

    Raises:
        FatalError: UNSUPPORTED_ARCHITECTURE.
        InvalidConfig: the library does not have a setting.
    """
    with _view(model_dir, settings.dtype) as view:
        config = _neuron_config(settings, view)
        # `save_pretrained` would add the weights of a local model, sharded.
        _auto_class().export(str(view), neuron_config=config, load_weights=False).save(str(folder))


def load(model_dir: Path, graphs: Path) -> Any:
    """The model with its graphs and weights on the device."""
    with _view(model_dir, graphs=graphs) as view:
        return _auto_class().from_pretrained(str(view))


@contextmanager
def _view(model_dir: Path, dtype: str = "", graphs: Path | None = None) -> Iterator[Path]:
    """A folder as the library wants one: with config.json, and for loading with graphs and weights beside it.

    dtype: of a model that is exported.
    """
    with tempfile.TemporaryDirectory(prefix="optimum-") as scratch:
        view = Path(scratch)
        if graphs is None:
            model = read_config(model_dir)
            # As transformers 5 writes them; the versions that the library runs with do not read that. The library takes
            # no configuration without a dtype.
            missing = {name: value for name, value in completed(model).items() if name in ROPE and not model.get(name)}
            (view / CONFIG_FILE).write_text(json.dumps({**model, **missing, "torch_dtype": dtype}))
        else:
            linked = [graphs / name for name in (CONFIG_FILE, GRAPHS_CONFIG_FILE, GRAPHS_FILE)]
            shards = graphs / SHARDS_FOLDER
            linked += [shards] if shards.is_dir() else [path for kind in WEIGHTS for path in model_dir.glob(kind)]
            for path in linked:
                (view / path.name).symlink_to(path.resolve())
        yield view


def _auto_class() -> Any:
    try:
        return importlib.import_module(PACKAGES[OPTIMUM]).NeuronModelForCausalLM
    except ImportError as error:
        lacks = getattr(error, "name", None) or str(error)
        message = f"optimum needs {lacks}, which is not installed or does not match ({error}): use the image {IMAGE}"
        raise InvalidConfig("$.backend", message) from error


def _neuron_config(settings: Settings, view: Path) -> Any:
    """The library's own choice for the model's class, but for what we decide."""
    import torch  # noqa: PLC0415  (takes seconds)

    chunks = {CHUNKS: settings.chunk_tokens} if has_chunks() else {}
    try:
        config = _auto_class().get_neuron_config(
            str(view),
            instance_type=settings.target,
            batch_size=settings.max_rows,
            sequence_length=settings.max_model_length,
            tensor_parallel_size=settings.tensor,
            **chunks,
        )
    except ValueError as error:
        if "is not supported for task" not in str(error):
            raise
        cure = "use an image with a newer one"
        message = f"optimum-neuron {version_of(OPTIMUM)} has no {settings.model_type}: {cure}"
        raise FatalError(ExitCode.UNSUPPORTED_ARCHITECTURE, message) from error
    values = {
        "torch_dtype": getattr(torch, settings.dtype),
        "on_device_sampling": settings.sampling == "Device",
        # Some classes leave it off, and would compute the prompts of all rows at once.
        "continuous_batching": settings.max_rows > 1,
        **chunks,
        **({"max_topk": settings.max_topk} if settings.max_topk else {}),
        **settings.override,
    }
    for name, value in values.items():
        if not hasattr(config, name):
            message = f"optimum-neuron {version_of(OPTIMUM)} does not have `{name}`: leave it out"
            raise InvalidConfig(f"{PATH}.{name}", message)
        setattr(config, name, value)
    return config


class Output(NamedTuple):
    """What a call returned: one of the two."""

    tokens: Any = None
    logits: Any = None


class Application:
    """A loaded model as `neuron.device.Application`."""

    def __init__(self, model: Any, settings: Settings) -> None:
        self._model = model
        self._samples = settings.sampling == "Device"
        self._chunks = settings.chunk_tokens > 0

    def __call__(self, *, input_ids: Any, position_ids: Any, seq_ids: Any, sampling_params: Any) -> Output:
        arguments = (input_ids, position_ids, seq_ids, sampling_params)
        if self._chunks and input_ids.shape[1] > 1:
            return Output(logits=self._model.prefill_chunk(*arguments))
        returned = self._model(*arguments)
        return Output(tokens=returned) if self._samples else Output(logits=returned)
