"""The rows of the engines that are backends of our own runtime. They share its commands and differ in data."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial

from neuron_operator.api import names
from neuron_operator.api.engines.engine import (
    MIB,
    TORCH_BYTES,
    CompilerMemory,
    DeviceRules,
    Engine,
    HostBytes,
    Launch,
    Probe,
    Probes,
    Served,
)

SERVE = (
    *("neuron-runtime", "serve", "--config", f"{names.CONFIG_DIR}/{names.CONFIG_KEY}"),
    *("--host", "0.0.0.0", "--port", str(names.PORT)),
    *("--record", names.TERMINATION_LOG),
)
API_KEYS = ("--api-key-file", f"{names.API_KEY_DIR}/{names.API_KEY_FILE}")
OF_SERVING_ONLY = ("--host", "--port", "--api-key-file", "--adapters-file")
"""Flags of `neuron-runtime serve`, each with a value, that `follow` lacks."""

PROCESS_BYTES = 64 * MIB
"""Memory of the supervisor, of the front end and of a simulated engine, each: 30 to 65 MiB measured."""
PROCESS_MILLICORES = 100
"""A loop that mostly waits. More is used if the node has it."""
FORMS_BYTES = 64 * MIB
"""Memory for the compiled forms of structured output that an engine keeps."""
GUIDE_BYTES = 8 * MIB
GUIDES_BYTES = 256 * MIB
"""Memory at most for what one answer with a form keeps of its grammar, and for all of them."""
SCRATCH_SHARE = 0.1
"""Activations and copies while weights are packed, as a share of weights and cache."""
READ_BYTES_PER_CORE = 8 * 10**9
"""What one core reads from memory in a second. The torch backend reads all weights for each token."""


def serve(launch: Launch) -> Served:
    alone = {names.RANK_VARIABLE: "0", names.GROUP_SIZE_VARIABLE: "1", names.LEADER_VARIABLE: "localhost"}
    return Served((*SERVE, *launch.arguments, *(API_KEYS if launch.has_api_keys else ())), alone)


def check(arguments: Sequence[str]) -> list[str]:
    return [*SERVE, *arguments, "--check"]


def follow(serving: Iterable[str]) -> Served:
    """`neuron-runtime follow` with the local flags of a `serve`."""
    words = iter(serving)
    command: list[str] = []
    for word in words:
        if word in OF_SERVING_ONLY:
            next(words)
        else:
            command.append("follow" if word == "serve" and len(command) == 1 else word)
    return Served(tuple(command))


def grammar_bytes(max_rows: int) -> int:
    """What forms of answers take in an engine at most."""
    return FORMS_BYTES + min(max_rows * GUIDE_BYTES, GUIDES_BYTES)


def _beside(model: HostBytes) -> int:
    """Memory of the two processes that are no engine, and of forms of answers."""
    return 2 * PROCESS_BYTES + grammar_bytes(model.sequences)


def packed(model: HostBytes) -> int:
    """The weights, with the copies of the embedding that the torch backend makes."""
    return model.weights + 2 * model.embedding


_row = partial(
    Engine,
    serve=serve,
    follow=follow,
    check=check,
    probes=Probes(
        startup=Probe("/health", 2),
        readiness=Probe("/health", 2, 3),
        liveness=Probe("/live", 10, 6),
    ),
)
EVERY = frozenset({"accelerator.cores"})
IN_PARALLEL = EVERY | {"parallelism.tensor", "parallelism.nodes"}
COMPILED_IF_ASKED = EVERY | {"engine.compile", "engine.compile=Disabled"}
IN_BLOCKS = frozenset(f"serving.{name}" for name in ("blockSize", "numBlocks", "prefixCaching", "chunkedPrefill"))
SHARING = IN_BLOCKS | {"serving.cacheEvents"}
"""Of a prefix cache that tells what it has."""
PICTURES = frozenset(f"serving.media.{name}" for name in ("maxImages", "maxImageBytes", "maxPixels", "allowedHosts"))

NXDI = _row(
    does="computes on it",
    architectures=frozenset(
        {
            *(f"{name}ForCausalLM" for name in ("Dbrx", "Gemma3", "GptOss", "Llama", "Mistral", "Mixtral", "Qwen2")),
            *("Qwen3ForCausalLM", "Qwen3MoeForCausalLM"),
            *("Gemma3ForConditionalGeneration", "Llama4ForConditionalGeneration"),
            *("LlavaForConditionalGeneration", "Qwen3VLForConditionalGeneration"),
        }
    ),
    fields=IN_PARALLEL
    | SHARING
    | PICTURES
    | {
        "accelerator.logicalNeuronCore",
        "serving.adapters",
        "serving.contextBuckets",
        "serving.tokenGenerationBuckets",
        "serving.quantization",
        "serving.kvCacheDtype",
        "serving.sampling",
        "serving.speculation",
        "engine.compile",
        "engine.applicationClass",
        "engine.overrideNeuronConfig",
    },
    drafts=("NGram", "Draft", "Eagle"),
    on_device=True,
    compiles="always",
    # neuronx-cc: 20 to 40 GB reported with 7B, and out of memory with 8B on a host of 32 GB.
    compiler=CompilerMemory(bytes=4096 * MIB, per_weight_byte=2.5),
    sampling="Device",
    sampling_of_drafts={"NGram": "Host"},
    millicores=lambda _: 3 * PROCESS_MILLICORES,
    # Of an adapter it keeps the shards of all cores, and reads the whole.
    memory=lambda model: (
        _beside(model) + model.pictures + model.loading + (2 * model.num_adapters_loaded + 1) * model.adapter
    ),
)
OPTIMUM = _row(
    does="computes on it with optimum-neuron",
    architectures=frozenset(
        f"{name}ForCausalLM"
        for name in ("Granite", "Llama", "Mixtral", "Phi3", "Qwen2", "Qwen3", "Qwen3Moe", "SmolLM3")
    ),
    fields=frozenset(
        {
            "parallelism.tensor",
            "serving.chunkedPrefill",
            "serving.sampling",
            "engine.compile",
            "engine.overrideNeuronConfig",
        }
    ),
    on_device=True,
    devices=lambda *_: DeviceRules(families=("inf2", "trn1", "trn2"), max_nodes=1),
    asks_cache=True,
    compiles="always",
    # As nxdi, which runs the same compiler.
    compiler=CompilerMemory(bytes=4096 * MIB, per_weight_byte=2.5),
    sampling="",
    millicores=lambda _: 3 * PROCESS_MILLICORES,
    memory=lambda model: _beside(model) + model.loading,
)
TRANSFORMERS_NEURONX = _row(
    does="computes on it, with a library whose support has ended",
    architectures=frozenset({"LlamaForCausalLM", "MistralForCausalLM"}),
    fields=EVERY
    | {
        "parallelism.tensor",
        "serving.contextBuckets",
        "serving.tokenGenerationBuckets",
        "serving.sampling",
        "engine.compile",
        "engine.overrideNeuronConfig",
    },
    on_device=True,
    devices=lambda *_: DeviceRules(families=("inf2", "trn1"), max_nodes=1),
    is_narrow=True,
    compiles="always",
    # As nxdi, which runs the same compiler; this one also reads the weights into memory.
    compiler=CompilerMemory(bytes=4096 * MIB, per_weight_byte=3.5),
    sampling="Device",
    millicores=lambda _: 3 * PROCESS_MILLICORES,
    memory=lambda model: _beside(model) + model.loading,
)
TORCH = _row(
    does="computes on the host",
    fields=IN_PARALLEL
    | SHARING
    | PICTURES
    | COMPILED_IF_ASKED
    | {"serving.adapters", "serving.quantization", "serving.speculation", "serving.task"},
    drafts=("NGram", "Draft", "Eagle"),
    held=("int8",),
    quantizes_itself=True,
    compiles="on request",
    # AOTInductor and g++, one graph at a time: 1.2 GB measured with 4 layers, 2.3 GB with 12.
    compiler=CompilerMemory(bytes=2048 * MIB, per_layer=96 * MIB),
    millicores=lambda model: 2 * PROCESS_MILLICORES + 1000 * packed(model) // READ_BYTES_PER_CORE,
    memory=lambda model: (
        _beside(model)
        + TORCH_BYTES
        + int((packed(model) + model.widened + model.cache) * (1 + SCRATCH_SHARE))
        + model.activations
        + model.pictures
        + (model.num_adapter_places + model.num_adapters_loaded + 1) * model.adapter
    ),
)
SIMULATED = _row(
    does="simulates a device",
    fields=SHARING
    | COMPILED_IF_ASKED
    | {"serving.adapters", "serving.speculation", "serving.sampling", "engine.overrideNeuronConfig"},
    drafts=("NGram",),
    compiles="on request",
    compiler=CompilerMemory(bytes=256 * MIB),
    sampling="Device",
    millicores=lambda _: 2 * PROCESS_MILLICORES,
    memory=lambda model: _beside(model) + PROCESS_BYTES,
)
