"""CPU and memory of pods: what a pod is expected to need, and how chart and manifest replace it.

Called by `revision.pin` (so the requests of a revision never change) and by `pods`. Only requests are estimated, no
limits: one would slow steps down, or end a pod whose need was underestimated. Devices are chosen by `placement`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from neuron_operator.api.engines.engine import MIB, TORCH_BYTES, HostBytes
from neuron_operator.api.model import NeuronModel
from neuron_operator.place.planner import adapter_room, as_held
from neuron_operator.place.sizing import (
    DTYPE_BYTES,
    Widths,
    adapter_bytes,
    cached_numbers,
    host_bytes,
    vector_bytes,
    width_of,
)
from neuron_operator.read.objects import number_of
from neuron_operator.read.records import Facts
from neuron_operator.read.world import Object, Place
from neuron_operator.render.config_document import ranks_of
from neuron_operator.render.objects import without_empty

Requests = Mapping[str, str]

JOB_REQUESTS: Requests = {"cpu": "100m", "memory": "128Mi"}
"""`inspect` reads headers only: 40 MiB and half a second of CPU. Of an adapter with a chat template it
reads the model's tokenizer, too; more is not requested, because that would give all these Jobs new names."""

CHECK_REQUESTS: Requests = {"cpu": "100m", "memory": "256Mi"}
"""`serve --check` reads the tokenizer: 100 MiB with the demo model."""

FETCH_REQUESTS: Requests = {"cpu": "500m", "memory": "256Mi"}
"""`fetch` holds a few MB of each parallel read, and hashes what it reads."""

CONVERTER_MILLICORES = 1000
MAX_MEASURED = 20 * 10**9
"""Parameters. Of a larger model `convert` computes no perplexity, and a few rows of weights are in memory."""
MEASURED_COPIES, MEASURED_TOKENS = 3, 256
"""What it has in memory at once: so many copies of embedding, layer and logits."""

SMALL_FILES_BYTES = 64 * MIB
"""Files of a model beside its weights: tokenizer and configuration."""
DEFAULT_SEQUENCES = 8
DEFAULT_LENGTH = 4096
"""If the manifest sets no length, the engine takes what is free, up to the model's length; this much is requested."""
MAX_ELASTIC_TOKENS = 4 * DEFAULT_SEQUENCES * DEFAULT_LENGTH
"""Where the engine makes the cache smaller to fit, no more is requested: the pod would find no node but would run."""


def fetch_requests(weights: Place, facts: Facts) -> Requests:
    """What the Job that fetches weights needs: on the way to an object store, they are on its node's disk."""
    if weights.object_store is None:
        return FETCH_REQUESTS
    return {**FETCH_REQUESTS, "ephemeral-storage": f"{_up(facts.weights_bytes + SMALL_FILES_BYTES, MIB) // MIB}Mi"}


def convert_requests(place: Place, facts: Facts) -> Requests:
    """What the Job that converts weights needs: most of it to measure what that changed, a layer at a time."""
    memory = TORCH_BYTES + (measuring_bytes(facts) if facts.parameters <= MAX_MEASURED else 0)
    requests = {"cpu": f"{CONVERTER_MILLICORES}m", "memory": mebibytes(_up(memory, 64 * MIB))}
    if place.object_store is None:
        return requests
    num_bytes = facts.weights_bytes + facts.read_bytes + SMALL_FILES_BYTES
    return {**requests, "ephemeral-storage": mebibytes(_up(num_bytes, MIB))}


def measuring_bytes(facts: Facts) -> int:
    """What the runtime takes to compute a perplexity: `memory_of` in its `conversion/measuring.py`."""
    vocabulary = facts.vocabulary_size * facts.hidden_size
    layer = (facts.parameters - vocabulary * (1 if facts.tied_embeddings else 2)) // max(facts.num_layers, 1)
    logits = MEASURED_TOKENS * facts.vocabulary_size * DTYPE_BYTES["float32"]
    return MEASURED_COPIES * (width_of(facts.dtype) * (vocabulary + layer) + logits)


def serving_requests(model: NeuronModel, facts: Facts, nodes: int = 1) -> Requests:
    """What a pod of a replica needs to load the model and to answer at about a token per second."""
    millicores = model.spec.runs.millicores(in_host_memory(model, facts, nodes))
    return {"cpu": f"{_up(millicores, 100)}m", "memory": mebibytes(serving_memory(model, facts, nodes))}


def serving_memory(model: NeuronModel, facts: Facts, nodes: int = 1) -> int:
    """Bytes. The cache has room for the manifest's sequences and length (or blocks)."""
    return _up(model.spec.runs.memory(in_host_memory(model, facts, nodes)), 64 * MIB)


def mebibytes(number: int) -> str:
    """As a quantity."""
    return f"{number // MIB}Mi"


COMPILER_MILLICORES = 1000


def compile_requests(model: NeuronModel, facts: Facts, times: int = 1) -> Requests:
    """What the Job requests that compiles a model: `times` as much memory as estimated."""
    needs = model.spec.runs.compiler
    layers, weights = (sum(getattr(one, name) for one in facts.loaded) for name in ("num_layers", "weights_bytes"))
    memory = needs.bytes + needs.per_layer * layers + int(needs.per_weight_byte * weights)
    return {"cpu": f"{COMPILER_MILLICORES}m", "memory": f"{times * _up(memory, 64 * MIB) // MIB}Mi"}


def overlaid(requests: Requests, *overlays: Mapping[str, Any]) -> Object:
    """`resources` of a container: the requests, overlaid by the `requests` and `limits` of chart or manifest.

    An overlay replaces what it names completely: its limit would otherwise meet a request that exceeds it.
    """
    resources: dict[str, dict[str, Any]] = {"limits": {}, "requests": dict(requests)}
    for overlay in overlays:
        parts = {kind: overlay.get(kind) or {} for kind in resources}
        named = {name for part in parts.values() for name in part}
        for kind, part in parts.items():
            kept = {name: value for name, value in resources[kind].items() if name not in named}
            resources[kind] = {**kept, **part}
    return without_empty(resources)


def within(overlay: Mapping[str, Any], resources: Mapping[str, Any]) -> Object:
    """An overlay for what runs before a container with these resources, in the same pod: at most as much, so that the
    pod requests no more."""
    kinds = {
        "requests": (_requested(overlay), _requested(resources)),
        "limits": (overlay.get("limits") or {}, resources.get("limits") or {}),
    }
    return {
        kind: {name: min(value, most.get(name, value), key=number_of) for name, value in named.items()}
        for kind, (named, most) in kinds.items()
    }


def _requested(resources: Mapping[str, Any]) -> Mapping[str, Any]:
    """With the limits of what is not requested, as Kubernetes reads it."""
    return {**(resources.get("limits") or {}), **(resources.get("requests") or {})}


READER_BYTES = 800 << 20
"""transformers in the process that reads pictures: 796 MiB measured."""
PICTURES_AT_ONCE = 2
"""As in the runtime, as those that follow."""
READ_BYTES = 512 << 20
"""Of the pixels of pictures that are read, until the engine has them."""
DEFAULT_MAX_PIXELS = 33554432
BYTES_PER_PIXEL = 46
"""Of a picture that is decoded and made smaller: for 33,554,432 pixels, 1,467 MiB measured with the processor of
Qwen-VL, which keeps half of them, and 496 MiB with Pixtral's."""


def picture_bytes(max_pixels: int | None) -> int:
    """What a pod takes where its model sees pictures, whatever clients send."""
    return READER_BYTES + PICTURES_AT_ONCE * BYTES_PER_PIXEL * (max_pixels or DEFAULT_MAX_PIXELS) + READ_BYTES


def in_host_memory(model: NeuronModel, facts: Facts, nodes: int = 1) -> HostBytes:
    """The weights are as stored, or in `serving.dtype`, or as they are quantized."""
    facts = as_held(model, facts) if model.spec.runs.on_device else facts
    width, computed = DTYPE_BYTES.get(model.spec.serving.dtype or ""), _width(model, facts)
    # A draft model is computed in the model's type, and has a cache as long.
    loaded = facts.loaded
    cached = sum(cached_numbers(one, ranks_of(model)) for one in loaded) * computed
    held = () if model.spec.is_compiled else model.spec.runs.held
    widened = (
        max(0, one.parameters * (width or DTYPE_BYTES["bfloat16"]) - one.read_bytes)
        for one in loaded
        if (one.conversion and one.conversion.format not in held)
        or (one.conversion is None and not width and (one.quantization or one.dtype not in DTYPE_BYTES))
    )
    embedding = sum(one.vocabulary_size * one.hidden_size for one in loaded) * computed
    generates, media = model.spec.generates, model.spec.serving.media
    return HostBytes(
        weights=sum(one.read_bytes if one.conversion or not width else one.parameters * width for one in loaded),
        widened=sum(widened),
        embedding=embedding if generates else 0,
        cache=_cached_tokens(model, facts) * cached if generates else 0,
        block=_block_size(model) * cached if generates else 0,
        # The largest weight exists twice while it is laid out.
        pictures=picture_bytes(media.max_pixels) if facts.sees_pictures and media.max_images != 0 else 0,
        activations=0 if generates else embedding + vector_bytes(facts, model.spec.serving.max_model_length or 0),
        loading=host_bytes(facts, Widths(weights=width_of(_dtype(model, facts))), nodes),
        sequences=model.spec.serving.max_sequences or DEFAULT_SEQUENCES,
        **_adapters(model, facts),
    )


def _adapters(model: NeuronModel, facts: Facts) -> dict[str, int]:
    room = adapter_room(model)
    if room is None:
        return {}
    return {
        "adapter": adapter_bytes(facts, room, _width(model, facts)),
        "num_adapter_places": room.num_places,
        "num_adapters_loaded": room.num_loaded,
    }


def _block_size(model: NeuronModel) -> int:
    return model.spec.serving.block_size or model.spec.runs.block_size


def _cached_tokens(model: NeuronModel, facts: Facts) -> int:
    serving = model.spec.serving
    length = serving.max_model_length or min(DEFAULT_LENGTH, facts.max_position_embeddings or DEFAULT_LENGTH)
    tokens = (serving.max_sequences or DEFAULT_SEQUENCES) * length
    if serving.num_blocks:
        tokens = serving.num_blocks * _block_size(model)
    elif serving.max_model_length is None or serving.block_size or serving.prefix_caching == "Enabled":
        tokens = min(tokens, max(length, MAX_ELASTIC_TOKENS))
    return tokens


def _width(model: NeuronModel, facts: Facts) -> int:
    return DTYPE_BYTES.get(_dtype(model, facts), 4)


def _dtype(model: NeuronModel, facts: Facts) -> str:
    chosen = model.spec.serving.dtype
    return chosen if chosen and chosen != "auto" else facts.dtype


def _up(number: int, step: int) -> int:
    return math.ceil(number / step) * step
