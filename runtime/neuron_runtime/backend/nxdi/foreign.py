"""Graphs that somebody else compiled with NxD Inference: a folder with its `model.pt` and `neuron_config.json`.

Called where an artifact is looked for, and where one is loaded. What the folder was compiled with decides everything
that the configuration leaves open; what the configuration says must agree. Pure but for reading that one file.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from neuron_runtime.artifacts.store import DOCUMENT
from neuron_runtime.backend.nxdi.models import text_config
from neuron_runtime.backend.nxdi.neuron_config import (
    BY_NAME,
    CACHE_FLAG,
    CACHE_TYPE,
    OF_EAGLE,
    SAMPLING,
    SAMPLING_FIELDS,
    SHARDED,
    spelled,
)
from neuron_runtime.backend.nxdi.quantized import CHECKPOINT, EXCLUDED, OF_WEIGHTS
from neuron_runtime.backend.nxdi.settings import Settings
from neuron_runtime.checkpoint import GRAPHS_CONFIG_FILE, GRAPHS_FILE
from neuron_runtime.config import RuntimeConfig
from neuron_runtime.errors import ExitCode, FatalError

TEXT_PROGRAM, VISION_PROGRAM = "text_model", "vision_model"
"""With an encoder of pictures there are two programs, each in a folder of its own."""
FOLDERS = "neuron-compiled-artifacts/*"
"""Where the vLLM plugin puts them, within a model's folder."""

ARCHITECTURE = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "rope_theta", "rope_scaling", "rms_norm_eps", "tie_word_embeddings"),
    *("sliding_window", "num_local_experts", "num_experts", "num_experts_per_tok"),
)
"""Keys of config.json that decide the graphs; NxD Inference writes them beside those of NeuronConfig."""

NOT_NEUTRAL_BY_DEFAULT = frozenset({"quantization_type", "quantization_dtype", "quantization_scale_dtype"})
NOT_NEUTRAL_BY_DEFAULT |= {"quantize_clamp_bound", "spec_batch_size"}
"""Fields of features that have a value although the feature is off."""

OF_DRAFTS = {"speculation_length": 0, **dict.fromkeys(("enable_fused_speculation", *OF_EAGLE), False)}
"""Graphs with drafts lack those for single tokens, so they are others than those of settings that name none. So are
those of an EAGLE head of another version, or of a draft model, which may have the same config.json."""

OF_NUMBERS = {OF_WEIGHTS[0]: False, CACHE_FLAG: False, CACHE_TYPE: None}
"""So are graphs of quantized weights, or with a quantized cache."""

OF_BLOCKS = ("pa_num_blocks", "pa_block_size")
"""They have a value without blocks too."""


def is_foreign(folder: Path) -> bool:
    """Whether a folder has graphs that NxD Inference wrote, without a document of ours."""
    return (
        all((folder / name).is_file() for name in (GRAPHS_FILE, GRAPHS_CONFIG_FILE))
        and not (folder / DOCUMENT).exists()
    )


def has_encoder(folder: Path) -> bool:
    """Whether a folder has such graphs of an application that sees pictures: two programs, which are not loaded."""
    files = (GRAPHS_CONFIG_FILE, *(f"{part}/{GRAPHS_FILE}" for part in (TEXT_PROGRAM, VISION_PROGRAM)))
    return all((folder / name).is_file() for name in files) and not (folder / DOCUMENT).exists()


def holds_weights(folder: Path) -> bool:
    """Whether such a folder has the weights too, so that it is loaded without the checkpoint."""
    if not is_foreign(folder) or not (folder / "weights").is_dir():
        return False
    return bool(_read(folder)["neuron_config"].get(SHARDED))


def within(model_dir: Path) -> list[Path]:
    """Such folders in a model's folder."""
    return [folder for folder in around(model_dir) if is_foreign(folder)]


def around(model_dir: Path) -> list[Path]:
    """Where they are looked for."""
    return [model_dir, *sorted(model_dir.glob(FOLDERS))]


def adopted(config: RuntimeConfig, folder: Path) -> RuntimeConfig:
    """The configuration with the folder's values where it is open.

    Raises FatalError (ARTIFACT_MISSING) if the folder's file is no configuration of NxD Inference.
    """
    theirs = _read(folder)["neuron_config"]
    # The first one is of the application's class, the next one of another machine; the last one follows from its flag.
    taken = BY_NAME.keys() - NOT_NEUTRAL_BY_DEFAULT - {"attn_cls", CHECKPOINT, CACHE_TYPE}
    if not theirs.get("is_block_kv_layout"):
        taken -= {*OF_BLOCKS}
    if theirs.get("is_prefix_caching"):
        taken -= {"is_prefix_caching"}  # it comes with blocks; whether prefixes are shared is our choice
    values: dict[str, Any] = {name: value for name, value in theirs.items() if name in taken and value is not None}
    sampling = theirs.get(SAMPLING)
    values[SAMPLING] = None
    if isinstance(sampling, Mapping):
        known = {name: one for name, one in sampling.items() if name in SAMPLING_FIELDS and one is not None}
        values[SAMPLING] = known  # the others are decided by requests
    if theirs.get("enable_fused_speculation"):
        del values[SAMPLING]  # drafts of the device decide it
    if drafts := theirs.get("speculation_length"):
        # Behind the last token there is room for drafts: with blocks, a block of it.
        room = theirs["pa_block_size"] if theirs.get("is_block_kv_layout") else drafts - 1
        values["seq_len"] = theirs["seq_len"] - room
    values |= _default_buckets(theirs)
    if not (folder / "weights").is_dir():
        # They are made from the checkpoint when the graphs are loaded.
        values[SHARDED] = False
    overridden = {spelled(key) for key in config.override_neuron_config}
    override = {name: value for name, value in values.items() if name not in overridden} | config.override_neuron_config
    # Such a folder has the text of a model alone.
    media = msgspec.structs.replace(config.media, max_images=0)
    return msgspec.structs.replace(config, override_neuron_config=override, media=media)


def _default_buckets(theirs: Mapping[str, Any]) -> dict[str, list[int]]:
    """Those that NxD Inference chooses if it is given none."""
    prefixes, several = theirs.get("is_prefix_caching"), theirs.get("enable_bucketing")
    context, length = int(theirs["max_context_length"]), int(theirs["max_length"])
    ranges = {
        "context_encoding_buckets": (512 if prefixes else 128, context),
        "token_generation_buckets": (256 if prefixes else 128, length),
    }
    if prefixes:
        ranges["prefix_buckets"] = (512, context)
    return {
        name: _doubled(least, most) if several else [most]
        for name, (least, most) in ranges.items()
        if theirs.get(name) is None or not several
    }


def _doubled(least: int, most: int) -> list[int]:
    return [most] if least == most else [*(2**at for at in range(int(math.log2(least)), round(math.log2(most)))), most]


def differences(settings: Settings, model: Mapping[str, Any], folder: Path) -> list[str]:
    """What the folder was compiled with, as far as it is not what is wanted: `field: found instead of wanted`.

    model: config.json of the model to serve.
    """
    document = _read(folder)
    theirs, differing = document["neuron_config"] | _default_buckets(document["neuron_config"]), []
    if settings.vision is not None:
        differing.append("pictures: none instead of an encoder for them")
    for name, ours in {**OF_DRAFTS, **OF_NUMBERS, **settings.neuron_config}.items():
        # Without bucketing it compiles one size, which is a list of one. Weights are no part of the graphs.
        agrees = _is_same if name == EXCLUDED else _agrees
        if name in theirs and name not in ("enable_bucketing", SHARDED) and not agrees(ours, theirs[name]):
            differing.append(f"{name}: {_shown(theirs[name])} instead of {_shown(ours)}")
    models = [(model, document, "")]
    if settings.draft is not None:
        fused = document.get("fused_spec_config") or {}
        models.append((settings.draft.config, fused.get("draft_config") or {}, " of the draft model"))
    for wanted, found, whose in models:
        for name in ARCHITECTURE:
            ours, its = text_config(wanted).get(name), text_config(found).get(name)
            if ours is not None and its is not None and not _agrees(ours, its):
                differing.append(f"{name}{whose}: {_shown(its)} instead of {_shown(ours)}")
    return differing


def _agrees(ours: Any, theirs: Any) -> bool:
    if isinstance(ours, Mapping) and isinstance(theirs, Mapping):
        return all(_agrees(ours[key], theirs[key]) for key in ours.keys() & theirs.keys())
    if isinstance(ours, list) and isinstance(theirs, list):
        return set(ours) <= set(theirs)  # graphs of more sizes do no harm
    return bool(ours == theirs) or (not ours and not theirs)


def _is_same(ours: list[str], theirs: Any) -> bool:
    """Of modules: graphs that leave out more are others."""
    return set(ours) == set(theirs or ())


def _shown(value: Any) -> str:
    return json.dumps(value, sort_keys=True)


def _read(folder: Path) -> dict[str, Any]:
    try:
        # It may have Infinity, which strict JSON has not.
        document = json.loads((folder / GRAPHS_CONFIG_FILE).read_bytes())
        if isinstance(document["neuron_config"], dict):
            return dict(document)
    except (OSError, ValueError, TypeError, KeyError):
        pass
    message = f"{folder / GRAPHS_CONFIG_FILE} is no configuration of NxD Inference with a `neuron_config`"
    raise FatalError(ExitCode.ARTIFACT_MISSING, message)
