"""The library transformers-neuronx: versions, and models made of its classes.

The only module that imports `transformers_neuronx`. Called by `graphs` and by `loader`, in a process whose environment
is set (`neuron.devices.environment_of`).
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from neuron_runtime.backend.neuron.installed import driver_version, missing, version_of
from neuron_runtime.backend.neuron.model_config import ROPE, completed
from neuron_runtime.backend.neuron.override import PATH
from neuron_runtime.backend.transformers_neuronx.settings import AMP, Settings
from neuron_runtime.checkpoint import read_config
from neuron_runtime.errors import ExitCode, FatalError, InvalidConfig

LIBRARY = "transformers-neuronx"
PACKAGES = {LIBRARY: "transformers_neuronx", "torch-neuronx": "torch_neuronx"}
"""The name to import of each distribution without which nothing runs. Graphs run only with the versions that compiled
them."""
COMPILER = "neuronx-cc"
OTHERS = (COMPILER, "libneuronxla", "torch", "transformers")

END_OF_SUPPORT = "2.26"
"""The last Neuron SDK that supports the library."""
SUCCESSORS = "nxdi or optimum"


def check_installed() -> None:
    """Raises InvalidConfig naming the packages that are missing."""
    if absent := missing(PACKAGES):
        message = (
            f"transformers-neuronx needs {', '.join(absent)}, which is not installed: use an image with Neuron SDK "
            f"{END_OF_SUPPORT} or older, or the backend {SUCCESSORS}"
        )
        raise InvalidConfig("$.backend", message)


def required_versions() -> dict[str, str]:
    """Versions that must be the same where graphs are compiled and where they run."""
    return {name: version_of(name) or "unknown" for name in (*PACKAGES, "torch")}


def versions() -> dict[str, str]:
    """All versions that a report of a problem should have; imports nothing."""
    named = {name: version_of(name) for name in (*PACKAGES, *OTHERS)} | {"driver": driver_version()}
    return {name: value for name, value in named.items() if value}


def compiler_version() -> str:
    """The version of the compiler. Raises FatalError with COMPILE_FAILED if it is missing."""
    try:
        return version_of(COMPILER) or str(importlib.import_module("neuronxcc").__version__)
    except (ImportError, AttributeError) as error:
        message = f"the Neuron compiler {COMPILER} is not installed: pip install {COMPILER}"
        raise FatalError(ExitCode.COMPILE_FAILED, message) from error


def model_of(settings: Settings, model_dir: Path) -> Any:
    """A model of the library, neither compiled nor loaded.

    It does what `PretrainedModel.from_pretrained` does (`module.py`), with what transformers leaves out of config.json.
    Raises InvalidConfig if a package is missing, or if the library refuses the configuration.
    """
    check_installed()
    try:
        library = _module()
        from transformers import AutoConfig  # noqa: PLC0415  (takes seconds)
    except ImportError as error:
        message = f"transformers-neuronx cannot be imported ({error}): use an image with Neuron SDK {END_OF_SUPPORT}"
        raise InvalidConfig("$.backend", message) from error
    try:
        config, given = AutoConfig.from_pretrained(str(model_dir)), read_config(model_dir)
        for name, value in completed(given).items():
            # transformers has a default for some fields, but not for what it does not know to be in the file.
            if getattr(config, name, None) is None or (name in ROPE and given.get(name) is None):
                setattr(config, name, value)
        made = getattr(library, settings.model_class)(
            config,
            n_positions=list(settings.token_buckets),
            context_length_estimate=list(settings.context_buckets),
            batch_size=settings.max_rows,
            amp=AMP[settings.dtype],
            tp_degree=settings.tensor,
            neuron_config=neuron_config(settings),
        )
    except Exception as error:
        raise InvalidConfig(PATH, f"transformers-neuronx refuses it: {error} ({type(error).__name__})") from error
    made.load_state_dict_dir(str(model_dir))
    return made


def _module(name: str = "") -> Any:
    return importlib.import_module(PACKAGES[LIBRARY] + name)


def neuron_config(settings: Settings) -> Any:
    """NeuronConfig with continuous batching, which makes sequences begin at position 0 (`lhs_aligned`)."""
    library = _module()
    arguments = dict(settings.neuron_config)
    for name, kind in {"quant": "QuantizationConfig", "kv_cache_quant": "KVCacheQuantizationConfig"}.items():
        if name in arguments:
            arguments[name] = getattr(_module(".config"), kind)(**arguments[name])
    for name, kind in {"attention_layout": "Layout", "collectives_layout": "Layout"}.items():
        arguments[name] = getattr(library, kind)(arguments[name])
    if settings.sampling == "Device":
        arguments["on_device_generation"] = generation_config(settings, [(1.0, 1.0, 1.0)] * settings.max_rows)
    batching = library.ContinuousBatchingConfig(batch_size_for_shared_caches=settings.max_rows)
    return library.NeuronConfig(**arguments, continuous_batching=batching)


def generation_config(settings: Settings, parameters: Sequence[Sequence[float]]) -> Any:
    """How lines of the cache are sampled: top_k, top_p and temperature of each.

    Lines have parameters of their own only with all three of dynamic, per_batch_line and do_sample (`generation.py`).
    Their number is that of the lines (`validate_generation_configs`).
    """
    top_k, top_p, temperature = map(list, zip(*parameters, strict=True))
    return _module().GenerationConfig(
        max_length=settings.max_model_length,
        do_sample=True,
        dynamic=True,
        per_batch_line=True,
        global_top_k=settings.global_top_k,
        top_k=list(map(int, top_k)),
        top_p=top_p,
        temperature=temperature,
    )


def compile_into(settings: Settings, model_dir: Path, folder: Path) -> None:
    """Compile all graphs and save them as `<hash of the graph>.neff`.

    `cpu_compile` needs no device (v0.13, `NeuronModelBase.cpu_compile`): it reads the weights, whose shapes the graphs
    take, keeps them on the host and runs the compiler in one process per graph.
    """
    model = model_of(settings, model_dir)
    config = model.neuron_config
    if config.compilation_worker_count is None:
        config.compilation_worker_count = os.cpu_count() or 1
    model.cpu_compile()
    model.save(str(folder))


def load_from(settings: Settings, model_dir: Path, folder: Path) -> Any:
    """A model with the saved graphs and its weights on the device.

    Raises FatalError with ARTIFACT_MISSING if a graph of these settings is not in the folder: the library looks for
    each by the hash of what it would compile (`base.hash_hlo`).
    """
    model = model_of(settings, model_dir)
    model.load(str(folder))
    try:
        model.to_neuron()
    except FileNotFoundError as error:
        message = f"{folder} lacks a graph of these settings: compile the model again ({error})"
        raise FatalError(ExitCode.ARTIFACT_MISSING, message) from error
    return model


def check_saved(folder: Path, num_graphs: int) -> None:
    """Loading graphs takes a device, so this looks for the files that loading will read."""
    found = [path for path in saved(folder) if path.stat().st_size]
    if len(found) < num_graphs:
        message = f"transformers-neuronx saved {len(found)} of {num_graphs} graphs"
        raise FatalError(ExitCode.COMPILE_FAILED, message)


def saved(folder: Path) -> list[Path]:
    """The graphs that `save` wrote into a folder."""
    return sorted(folder.glob("*.neff"))
