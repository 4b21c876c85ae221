"""CPU and memory of pods: what a pod is expected to need, and how chart and manifest replace it.

Called by `revision.pin` (so the requests of a revision never change) and by `pods`. Only requests are estimated, no
limits: one would slow steps down, or end a pod whose need was underestimated. Devices are chosen by `placement`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from neuron_operator.api.model import BACKENDS, NeuronModel
from neuron_operator.place.sizing import DTYPE_BYTES, TORCH_BYTES, Widths, cached_numbers, host_bytes, width_of
from neuron_operator.read.records import Facts
from neuron_operator.read.world import Object, Place
from neuron_operator.render.objects import without_empty

Requests = Mapping[str, str]

JOB_REQUESTS: Requests = {"cpu": "100m", "memory": "128Mi"}
"""`inspect` reads headers only: 40 MiB and half a second of CPU."""

CHECK_REQUESTS: Requests = {"cpu": "100m", "memory": "256Mi"}
"""`serve --check` reads the tokenizer: 100 MiB with the demo model."""

FETCH_REQUESTS: Requests = {"cpu": "500m", "memory": "256Mi"}
"""`fetch` holds a few MB of each parallel read, and hashes what it reads."""

MIB = 2**20
SMALL_FILES_BYTES = 64 * MIB
"""Files of a model beside its weights: tokenizer and configuration."""
PROCESS_BYTES = 64 * MIB
"""Memory of the supervisor, of the front end and of a simulated engine, each: 30 to 65 MiB measured."""
SCRATCH_SHARE = 0.1
"""Activations and copies while weights are packed, as a share of weights and cache."""
FORMS_BYTES = 64 * MIB
"""Memory for the compiled forms of structured output that an engine keeps."""
GUIDE_BYTES = 8 * MIB
GUIDES_BYTES = 256 * MIB
"""Memory at most for what one answer with a form keeps of its grammar, and for all of them."""
DEFAULT_SEQUENCES = 8
DEFAULT_LENGTH = 4096
"""If the manifest sets no length, the engine takes what is free, up to the model's length; this much is requested."""
MAX_ELASTIC_TOKENS = 4 * DEFAULT_SEQUENCES * DEFAULT_LENGTH
"""Where the engine makes the cache smaller to fit, no more is requested: the pod would find no node but would run."""
MILLICORES_PER_PROCESS = 100
"""A loop that mostly waits. More is used if the node has it."""
READ_BYTES_PER_CORE = 8 * 10**9
"""What one core reads from memory in a second. The torch backend reads all weights for each token."""


def fetch_requests(weights: Place, facts: Facts) -> Requests:
    """What the Job that fetches weights needs: on the way to an object store, they are on its node's disk."""
    if weights.object_store is None:
        return FETCH_REQUESTS
    return {**FETCH_REQUESTS, "ephemeral-storage": f"{_up(facts.weights_bytes + SMALL_FILES_BYTES, MIB) // MIB}Mi"}


def serving_requests(model: NeuronModel, facts: Facts, nodes: int = 1) -> Requests:
    """What a pod of a replica needs to load the model and to answer at about a token per second. CPU: a share for each
    process, and with torch some for reading weights."""
    millicores = 2 * MILLICORES_PER_PROCESS
    if model.spec.backend == "torch":
        millicores += 1000 * _weights_bytes(model, facts) // READ_BYTES_PER_CORE
    elif BACKENDS[model.spec.backend].on_device:
        millicores += MILLICORES_PER_PROCESS
    return {"cpu": f"{_up(millicores, 100)}m", "memory": mebibytes(serving_memory(model, facts, nodes))}


def serving_memory(model: NeuronModel, facts: Facts, nodes: int = 1) -> int:
    """Bytes of the processes and of forms of answers, and with the torch backend weights, cache and scratch; with
    devices, weights on their way to them. The cache has room for the manifest's sequences and length (or blocks)."""
    memory = 2 * PROCESS_BYTES + grammar_bytes(model.spec.serving.max_sequences or DEFAULT_SEQUENCES)
    if model.spec.backend == "torch":
        weights, cache = _weights_bytes(model, facts), _cache_bytes(model, facts)
        memory += TORCH_BYTES + int((weights + cache) * (1 + SCRATCH_SHARE))
    elif BACKENDS[model.spec.backend].on_device:
        memory += host_bytes(facts, Widths(weights=width_of(_dtype(model, facts))), nodes)
    else:
        memory += PROCESS_BYTES
    return _up(memory, 64 * MIB)


def grammar_bytes(max_rows: int) -> int:
    """What forms of answers take in an engine at most."""
    return FORMS_BYTES + min(max_rows * GUIDE_BYTES, GUIDES_BYTES)


def mebibytes(number: int) -> str:
    """As a quantity."""
    return f"{number // MIB}Mi"


@dataclass(frozen=True)
class CompilerMemory:
    """What compiling with a backend takes. Only a guess to start with: a compiler that runs out of memory gets twice
    as much."""

    bytes: int
    per_layer: int = 0
    per_weight_byte: float = 0.0


COMPILER_MEMORY = {
    # neuronx-cc: 20 to 40 GB reported with 7B, and out of memory with 8B on a host of 32 GB.
    "nxdi": CompilerMemory(bytes=4096 * MIB, per_weight_byte=2.5),
    # AOTInductor and g++, one graph at a time: 1.2 GB measured with 4 layers, 2.3 GB with 12.
    "torch": CompilerMemory(bytes=2048 * MIB, per_layer=96 * MIB),
    "simulated": CompilerMemory(bytes=256 * MIB),
}
COMPILER_MILLICORES = 1000


def compile_requests(model: NeuronModel, facts: Facts, times: int = 1) -> Requests:
    """What the Job requests that compiles a model: `times` as much memory as estimated."""
    needs = COMPILER_MEMORY[model.spec.backend]
    memory = needs.bytes + needs.per_layer * facts.num_layers + int(needs.per_weight_byte * facts.weights_bytes)
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


def _weights_bytes(model: NeuronModel, facts: Facts) -> int:
    """As stored, or in `serving.dtype`; with the packed copies of the embedding that the torch backend makes."""
    width = DTYPE_BYTES.get(model.spec.serving.dtype or "")
    weights = facts.parameters * width if width else facts.weights_bytes
    return weights + 2 * facts.vocabulary_size * facts.hidden_size * _width(model, facts)


def _cache_bytes(model: NeuronModel, facts: Facts) -> int:
    serving = model.spec.serving
    length = serving.max_model_length or min(DEFAULT_LENGTH, facts.max_position_embeddings or DEFAULT_LENGTH)
    tokens = (serving.max_sequences or DEFAULT_SEQUENCES) * length
    if serving.num_blocks:
        tokens = serving.num_blocks * (serving.block_size or 16)
    elif serving.max_model_length is None or serving.block_size or serving.prefix_caching == "Enabled":
        tokens = min(tokens, max(length, MAX_ELASTIC_TOKENS))
    return tokens * cached_numbers(facts) * _width(model, facts)


def _width(model: NeuronModel, facts: Facts) -> int:
    return DTYPE_BYTES.get(_dtype(model, facts), 4)


def _dtype(model: NeuronModel, facts: Facts) -> str:
    chosen = model.spec.serving.dtype
    return chosen if chosen and chosen != "auto" else facts.dtype


def _up(number: int, step: int) -> int:
    return math.ceil(number / step) * step
