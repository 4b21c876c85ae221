"""Graphs that somebody else exported with optimum-neuron: a folder with its `model.pt` and `neuron_config.json`.

Called where an artifact is looked for, and where one is loaded. What the folder was exported with decides everything
that the configuration leaves open; what the configuration says must agree. Pure but for reading that one file.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from neuron_runtime.artifacts.store import DOCUMENT
from neuron_runtime.backend.optimum.library import CHUNKS, SHARDS_FOLDER
from neuron_runtime.backend.optimum.settings import OVERRIDES, Settings
from neuron_runtime.checkpoint import GRAPHS_CONFIG_FILE, GRAPHS_FILE
from neuron_runtime.config import RuntimeConfig
from neuron_runtime.errors import ExitCode, FatalError

CLASS = "NxDNeuronConfig"
VERSIONS = {"optimum_neuron_version": "optimum-neuron", "neuronxcc_version": "neuronx-cc"}
"""Keys of neuron_config.json that must name the installed versions, or the library refuses to load."""


def is_foreign(folder: Path) -> bool:
    """Whether a folder has graphs that optimum-neuron saved, without a document of ours."""
    return (
        all((folder / name).is_file() for name in (GRAPHS_FILE, GRAPHS_CONFIG_FILE))
        and not (folder / DOCUMENT).exists()
    )


def holds_weights(folder: Path) -> bool:
    """Whether such a folder has the weights too, so that it is loaded without the checkpoint."""
    return is_foreign(folder) and (folder / SHARDS_FOLDER).is_dir()


def read(folder: Path) -> dict[str, Any]:
    """Raises FatalError (ARTIFACT_MISSING) if the folder's file is no configuration of a decoder of optimum-neuron."""
    try:
        document = json.loads((folder / GRAPHS_CONFIG_FILE).read_bytes())
        if document["_serialized_key"] == CLASS:
            return dict(document)
    except (OSError, ValueError, TypeError, KeyError):
        pass
    message = f"{folder / GRAPHS_CONFIG_FILE} is no {CLASS} of optimum-neuron"
    raise FatalError(ExitCode.ARTIFACT_MISSING, message)


def adopted(config: RuntimeConfig, folder: Path) -> RuntimeConfig:
    """The configuration with the folder's values where it is open."""
    theirs, limits = read(folder), config.limits
    chunk = theirs.get(CHUNKS) or 0
    override = {name: theirs[name] for name in OVERRIDES if theirs.get(name) is not None}
    return msgspec.structs.replace(
        config,
        dtype=theirs["torch_dtype"] if config.dtype == "auto" else config.dtype,
        sampling=config.sampling or ("Device" if theirs["on_device_sampling"] else "Host"),
        chunked_prefill=config.chunked_prefill if config.chunked_prefill != "auto" else _switch(chunk > 0),
        parallelism=msgspec.structs.replace(
            config.parallelism, tensor=config.parallelism.tensor or theirs["tp_degree"]
        ),
        limits=msgspec.structs.replace(
            limits,
            max_sequences=limits.max_sequences or theirs["batch_size"],
            max_model_length=limits.max_model_length or theirs["sequence_length"],
            max_step_tokens=limits.max_step_tokens or chunk,
        ),
        override_neuron_config=override | config.override_neuron_config,
    )


def _switch(on: bool) -> Any:
    return "enabled" if on else "disabled"


def differences(settings: Settings, folder: Path, versions: Mapping[str, str]) -> list[str]:
    """What the folder was exported with, as far as it is not what is wanted: `field: found instead of wanted`."""
    theirs = read(folder)
    wanted: dict[str, Any] = {
        "target": settings.target,
        "tp_degree": settings.tensor,
        "batch_size": settings.max_rows,
        "sequence_length": settings.max_model_length,
        "torch_dtype": settings.dtype,
        "on_device_sampling": settings.sampling == "Device",
        "continuous_batching": settings.max_rows > 1,
        "speculation_length": 0,
        "output_logits": False,
        CHUNKS: settings.chunk_tokens,
        **settings.override,
        # A compiler's version may have a hash behind it.
        **{key: versions[name] for key, name in VERSIONS.items() if versions[name] != "unknown"},
    }
    differing = []
    for name, ours in wanted.items():
        found = theirs.get(name)
        same = str(found).startswith(str(ours)) if name in VERSIONS else found == ours or (not found and not ours)
        if not same:
            differing.append(f"{name}: {json.dumps(found)} instead of {json.dumps(ours)}")
    return differing
