"""`RuntimeConfig`: the JSON document that the operator passes to the runtime, or `arguments.py` builds from flags.

It configures what to serve; local settings (weights folder, port, record file) are flags of the command. The parser,
the flags of `serve`, the arguments of `LLM` and the tables of the docs (`make generate`) are derived from its fields.
"""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from neuron_runtime.adapters.peft import Target
from neuron_runtime.cache_event_config import cache_events
from neuron_runtime.core import Task
from neuron_runtime.dtypes import ComputedDtype, cache_dtype_name, dtype_name
from neuron_runtime.errors import ConfigProblems, InvalidConfig
from neuron_runtime.flags import Flag, images_per_prompt, json_or_pairs, json_or_text, numbers, template, word_or_folder
from neuron_runtime.quantization import Quantizing
from neuron_runtime.speculative_config import speculation
from neuron_runtime.uris import parse_uri
from neuron_runtime.validation import explain, problems

CONFIG_VERSION = 1

TRACES_ENDPOINT = "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"
"""OpenTelemetry's variable, used if the document sets no endpoint."""

BackendName = Literal["nxdi", "optimum", "transformers-neuronx", "vllm", "torch", "simulated"]

Switch = Literal["auto", "enabled", "disabled"]

Limit = Annotated[int, Meta(ge=0)]
Count = Annotated[int, Meta(ge=1)]
Seconds = Annotated[float, Meta(ge=0)]
MatchLength = Annotated[int, Meta(ge=0, le=32)]

TASK_WORDS = {"auto": "generate", "embedding": "embed", "score": "rerank", "classify": "rerank"}
"""vLLM's words for tasks."""


def task_of(word: str) -> str:
    return TASK_WORDS.get(word, word)


MAX_BUCKETS = 32
LEAST_MATCH, MOST_MATCH = 2, 8
"""By default. vLLM has 5 for both, which finds less: where files of this project are edited, quoted or go on, a step
yields up to a quarter more tokens with these."""
_MATCH = "last tokens that must be found earlier in the request,"
METHODS_WITH_MODEL = ("Draft", "Eagle")
QueueFlag = partial(Flag, default="chosen at startup")
LimitFlag = partial(QueueFlag, llm=True)
DeviceFlag = partial(Flag, default="chosen by the backend")
SizesFlag = partial(DeviceFlag, llm=True, metavar="N,N,...", read=numbers)

COMPILED = object()
"""Marks a field that compiled graphs may depend on; a backend's `compiler` sees no other. See `artifacts/key.py`."""


ON_DEVICE = object()
"""Marks a field that only backends with a compiled device have; the others refuse it. See `backend/fields.py`."""

Sizes = Annotated[tuple[Count, ...], Meta(max_length=MAX_BUCKETS), COMPILED, ON_DEVICE]
"""Compiled sizes, ascending; empty: chosen by the backend."""


class Document(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, rename="camel"):
    """A part of the configuration: camelCase in JSON, unknown keys refused."""


class ModelSource(Document, frozen=True, kw_only=True):
    uri: Annotated[
        str,
        "Model to serve: `hf://org/name[@revision]`, `s3://bucket/prefix`, `pvc://claim/path`, "
        "`oci://image[@digest][#path]` or `file:///absolute/path`",
        COMPILED,
    ]
    digest: Annotated[
        str,
        "Expected commit (`hf://`) or hash (others), as found by `inspect`; others fail with `ChecksumMismatch`",
        COMPILED,
    ] = ""
    converted: Annotated[
        str,
        "Digest of the model with converted weights, which `convert` left in the store: they are read in the place of "
        "those at `uri`",
        Flag(metavar="DIGEST", llm=True),
        COMPILED,
    ] = ""

    @property
    def served_digest(self) -> str:
        """Of the weights that are read; empty: not pinned."""
        return self.converted or self.digest


class EngineLimits(Document, frozen=True, kw_only=True):
    """Zero: chosen at startup from the model and the free memory."""

    max_model_length: Annotated[Limit, "Maximum tokens of prompt plus output", LimitFlag("max_model_len"), COMPILED] = 0
    max_sequences: Annotated[Limit, "Maximum number of running requests", LimitFlag("max_num_seqs"), COMPILED] = 0
    max_step_tokens: Annotated[Limit, "Maximum tokens per step", LimitFlag("max_num_batched_tokens"), COMPILED] = 0
    block_size: Annotated[Limit, "Tokens per block of the KV cache", LimitFlag(), COMPILED] = 0
    num_blocks: Annotated[Limit, "Number of blocks of the KV cache", LimitFlag("num_gpu_blocks_override"), COMPILED] = 0
    max_queued_requests: Annotated[Limit, "Maximum number of waiting requests; more get 429", QueueFlag()] = 0
    max_queued_tokens: Annotated[Limit, "Maximum prompt tokens of waiting requests; more get 429", QueueFlag()] = 0


class Parallelism(Document, frozen=True, kw_only=True):
    tensor: Annotated[
        Limit, "Tensor-parallel degree of the model", DeviceFlag("tensor_parallel_size", llm=True), COMPILED
    ] = 0


class Accelerator(Document, frozen=True, kw_only=True):
    """The part of a device that a process uses."""

    cores: Annotated[
        Limit,
        "NeuronCores of this process",
        Flag("num_cores", default="as `NEURON_RT_VISIBLE_CORES` or `NEURON_RT_NUM_CORES` say"),
        COMPILED,
        ON_DEVICE,
    ] = 0
    logical_neuron_core: Annotated[
        int, Meta(ge=0, le=2), "Physical cores per logical NeuronCore: 1 or 2", DeviceFlag(), COMPILED, ON_DEVICE
    ] = 0


class Buckets(Document, frozen=True, kw_only=True):
    """Compiled sizes of a backend with fixed shapes, each list in ascending order."""

    context: Annotated[Sizes, "Prompt lengths to compile", SizesFlag("context_buckets")] = ()
    token_generation: Annotated[
        Sizes, "Context lengths to compile token generation for", SizesFlag("token_generation_buckets")
    ] = ()
    prefix: Annotated[
        Sizes, "Lengths of cached prefixes to compile, with layout `blocks`", SizesFlag("prefix_buckets")
    ] = ()
    sequences: Annotated[
        Sizes, "Numbers of running requests to compile token generation for", SizesFlag("sequence_buckets")
    ] = ()


class AdapterOptions(Document, frozen=True, kw_only=True):
    """What the model's graphs can hold of adapters (LoRA)."""

    max_active: Annotated[
        Limit,
        "Adapters that running requests may use at the same time; 0: none are served",
        Flag("max_loras", llm=True),
        COMPILED,
    ] = 0
    max_rank: Annotated[Count, "Largest rank of an adapter", Flag("max_lora_rank", llm=True), COMPILED] = 16
    targets: Annotated[
        tuple[Target, ...],
        "Projections that adapters may change",
        Flag("lora_target_modules", default="all", metavar="JSON", read=json_or_text),
        COMPILED,
    ] = ()
    max_loaded: Annotated[
        Limit,
        "Adapters that are kept in memory; the least recently used ones beyond it are read again when they are needed",
        Flag("max_cpu_loras", llm=True, default="as many as may be active"),
    ] = 0


class DraftSource(Document, frozen=True, kw_only=True):
    # Compiled graphs do not depend on it, but a document with the method is not valid without.
    uri: Annotated[
        str, "`Draft`: a smaller model with the same tokens; `Eagle`: a head for this model; as `model.uri`", COMPILED
    ] = ""
    digest: Annotated[str, "As `model.digest`", COMPILED] = ""


class Speculation(Document, frozen=True, kw_only=True):
    """Guesses of the next tokens (drafts), several of which one step verifies."""

    method: Annotated[
        Literal["", "NGram", "Draft", "Eagle"],
        "Where drafts come from. `NGram`: what followed the last tokens where the request had them before; `Draft`: a "
        "second model; `Eagle`: an EAGLE head, which reads the model's hidden states",
        COMPILED,
    ] = ""
    num_tokens: Annotated[int, Meta(ge=1, le=16), "Drafts of a request per step, at most", COMPILED] = 4
    min_match: Annotated[MatchLength, f"`NGram`: {_MATCH} at least; 0: as `maxMatch`, or {LEAST_MATCH}"] = 0
    max_match: Annotated[MatchLength, f"`NGram`: {_MATCH} at most; 0: as `minMatch`, or {MOST_MATCH}"] = 0

    model: DraftSource = DraftSource()

    @property
    def max_drafts(self) -> int:
        """Drafts of a row at most; 0: none are made."""
        return self.num_tokens if self.method else 0

    @property
    def match(self) -> tuple[int, int]:
        """The fewest and the most tokens that are looked for; if one is set, the other is the same, as in vLLM."""
        least, most = self.min_match or self.max_match, self.max_match or self.min_match
        return least or LEAST_MATCH, most or MOST_MATCH


class CacheEventOptions(Document, frozen=True, kw_only=True):
    """Events of the prefix cache, for gateways that send a request where its prefix is."""

    endpoint: Annotated[str, "ZMQ address to publish at, such as `tcp://*:5557`; empty: nothing is published"] = ""
    replay_endpoint: Annotated[str, "ZMQ address where readers ask for what they missed; empty: none"] = ""
    topic: Annotated[str, "Topic of the messages; empty: `kv@HOST@MODEL`, with the host's name"] = ""
    num_kept: Annotated[int, Meta(ge=0, le=1_000_000), "Batches of events that can be asked for again"] = 10_000


class MediaOptions(Document, frozen=True, kw_only=True):
    """Pictures in requests, for models that see them."""

    max_images: Annotated[
        Limit,
        'Pictures of a request at most; 0: none. The flag has vLLM\'s form, `{"image": 4}`',
        Flag("limit_mm_per_prompt", llm=True, metavar="JSON", read=images_per_prompt),
        COMPILED,
    ] = 8
    max_image_bytes: Annotated[Count, "Bytes of a picture at most, as the client stores it", Flag(llm=True)] = 20 << 20
    max_pixels: Annotated[
        Count, "Pixels of a picture at most, width times height", Flag("max_image_pixels", llm=True)
    ] = 32 << 20
    allowed_hosts: Annotated[
        tuple[str, ...],
        "Hosts from which pictures are fetched, by https and from public addresses only; each with `:PORT` if it is "
        "not 443. By default, a picture must be in the request",
        Flag("allowed_media_domains", llm=True, metavar="HOST"),
    ] = ()


class DrainOptions(Document, frozen=True, kw_only=True):
    delay_seconds: Annotated[
        Seconds, "Keep admitting requests for this long after SIGTERM, while `/health` returns 503"
    ] = 10.0
    seconds: Annotated[Seconds, "After that, let running requests finish within this time"] = 300.0


class TextOptions(Document, frozen=True, kw_only=True):
    """Settings that override the model's own files."""

    generation_config: Annotated[
        str,
        "Source of sampling defaults: `auto`, the model's `generation_config.json`; `vllm`, none; or a folder with "
        "such a file. The model's end tokens always apply",
        Flag(llm=True, metavar="auto|vllm|DIR", read=word_or_folder),
    ] = "auto"
    chat_template: Annotated[
        str,
        "Jinja chat template; the flag also accepts a file",
        Flag(metavar="FILE", default="the model's own", read=template),
    ] = ""
    reasoning_parser: Annotated[
        Literal["", "deepseek_r1", "qwen3"],
        "Return reasoning separately from the answer, in this model's format",
        Flag(),
    ] = ""
    tool_call_parser: Annotated[
        Literal["", "deepseek_v3", "deepseek_v31", "hermes", "llama3_json", "mistral", "pythonic"],
        "Read calls of tools in this model's format",
        Flag(default="by the chat template"),
    ] = ""


class ServerOptions(Document, frozen=True, kw_only=True):
    """Logging, tracing and limits of the HTTP server."""

    access_log: Annotated[bool, "Log each request as a line of JSON on stdout", Flag()] = True
    log_prompts: Annotated[bool, "Include the beginning of each prompt in that line", Flag()] = False
    max_logged_characters: Annotated[Count, "Maximum characters logged per prompt", Flag("max_log_len")] = 1000
    otlp_traces_endpoint: Annotated[
        str,
        "Endpoint for OpenTelemetry traces (OTLP/HTTP)",
        Flag(metavar="URL", default=f"`${TRACES_ENDPOINT}`, or none"),
    ] = ""
    allowed_origins: Annotated[
        tuple[str, ...],
        "Allowed origins of cross-origin requests from browsers (CORS); `*`: all",
        Flag(metavar="JSON", read=json_or_text),
    ] = ()
    client_stall_seconds: Annotated[Count, "Disconnect a client that reads nothing for this long", Flag()] = 60
    max_body_bytes: Annotated[Count, "Maximum size of a request body", Flag()] = 32 * 1024 * 1024
    max_output_tokens: Annotated[
        int, Meta(ge=0), "Maximum `max_tokens` of a request; 0: limited only by the model's length", Flag()
    ] = 0
    max_prompts: Annotated[Count, "Maximum number of prompts per request", Flag()] = 128
    max_inputs: Annotated[Count, "Maximum number of texts per request for vectors or scores", Flag()] = 2048
    max_choices: Annotated[Count, "Maximum number of answers per request: prompts times `n`", Flag()] = 128


class RuntimeConfig(Document, frozen=True, kw_only=True):
    version: Annotated[int, f"Version of this format: {CONFIG_VERSION}"]
    model: ModelSource
    served_names: Annotated[
        tuple[str, ...],
        Meta(min_length=1),
        "Model names that clients may use; responses have the first",
        Flag("served_model_name", llm=True, default="from MODEL"),
    ]
    backend: Annotated[
        BackendName,
        "Backend: `nxdi` or `optimum` (Neuron devices), `transformers-neuronx` (their predecessor), `torch` (CPUs) or "
        "`simulated`; `vllm` is no backend of this runtime",
        Flag(llm=True, metavar="NAME", default="`nxdi` on a machine with Neuron devices, else `torch`"),
        COMPILED,
    ] = "torch"
    task: Annotated[
        Task,
        "What the model computes: `generate`, text; `embed`, a vector of each text; `rerank`, a score of each pair of "
        "texts. The flags have vLLM's words too: `score`, or `--runner` with `--convert`",
        Flag(llm=True, read=task_of),
    ] = "generate"
    compile: Annotated[
        bool,
        "Run compiled graphs: the artifact of this model and configuration is loaded, or compiled first",
        Flag(llm=True),
        COMPILED,
    ] = False
    dtype: Annotated[
        Literal["auto", ComputedDtype],
        "Data type of weights and cache; `auto`: that of the stored weights",
        Flag(llm=True, read=dtype_name),
        COMPILED,
    ] = "auto"
    quantization: Annotated[
        Quantizing,
        "Type of the weights of linear layers: `auto`, as the checkpoint has them; `none`, in `dtype`; `int8` or "
        "`fp8`, which an unquantized checkpoint is converted to. vLLM's other words must be what the checkpoint says",
        Flag(llm=True),
        COMPILED,
    ] = "auto"
    kv_cache_dtype: Annotated[
        Literal["auto", "fp8"],
        "Data type of the KV cache: `auto`, that of the model; or `fp8`, with which it takes half the memory of "
        "bfloat16, and answers change a little",
        Flag(llm=True, read=cache_dtype_name),
        COMPILED,
        ON_DEVICE,
    ] = "auto"
    layout: Annotated[
        Literal["auto", "slots", "blocks"],
        "KV cache layout: `slots`, one contiguous line per request, or `blocks`, allocated as a request grows",
        Flag(llm=True),
        COMPILED,
    ] = "auto"
    prefix_caching: Annotated[
        Switch,
        "Reuse the KV cache of common prompt prefixes; enabled implies layout `blocks`",
        Flag("enable_prefix_caching", llm=True, default="on with layout `blocks`"),
        COMPILED,
    ] = "auto"
    chunked_prefill: Annotated[
        Switch,
        "Prefill long prompts in chunks; disabled: a prompt longer than a step gets 400",
        Flag("enable_chunked_prefill", llm=True, default="on if the backend supports it"),
        COMPILED,
    ] = "auto"
    limits: EngineLimits = EngineLimits()
    parallelism: Parallelism = Parallelism()
    accelerator: Accelerator = Accelerator()
    buckets: Buckets = Buckets()
    adapters: AdapterOptions = AdapterOptions()
    speculation: Annotated[
        Speculation,
        "Speculative decoding. The flag has vLLM's keys: `method` (`ngram`, `draft_model`, `eagle` or "
        "`eagle3`), `model`, `num_speculative_tokens`, `prompt_lookup_min`, `prompt_lookup_max`",
        Flag("speculative_config", llm=True, metavar="JSON", default="no drafts", read=speculation),
        COMPILED,
    ] = Speculation()
    cache_events: Annotated[
        CacheEventOptions,
        "Publish what the prefix cache stores and removes. The flag has vLLM's keys: `enable_kv_cache_events`, "
        "`endpoint`, `replay_endpoint`, `buffer_steps`, `topic`",
        Flag("kv_events_config", metavar="JSON", default="no events", read=cache_events),
    ] = CacheEventOptions()
    application_class: Annotated[
        str,
        "Implementation of the model on the device: a name that the backend knows, or `module:Class`",
        Flag(default="by the model's architecture"),
        COMPILED,
        ON_DEVICE,
    ] = ""
    sampling: Annotated[
        Literal["", "Device", "DeviceWithLogits", "Host"],
        "Where tokens are sampled, which decides the accepted parameters: on the `Device`, there and on the host "
        "(`DeviceWithLogits`), or on the `Host`",
        DeviceFlag("sampling_mode", llm=True),
        COMPILED,
        ON_DEVICE,
    ] = ""
    async_mode: Annotated[
        bool, "Let the device run ahead of the host, if the backend can", Flag(llm=True), COMPILED, ON_DEVICE
    ] = False
    media: MediaOptions = MediaOptions()
    drain: DrainOptions = DrainOptions()
    text: TextOptions = TextOptions()
    server: ServerOptions = ServerOptions()
    override_neuron_config: Annotated[
        dict[str, Any], "Settings for the backend", Flag(llm=True, metavar="JSON", read=json_or_pairs), COMPILED
    ] = {}


def parse_config(raw: bytes, source: str = "") -> RuntimeConfig:
    """Parse and validate a document, for error messages of the file `source`.

    Raises InvalidConfig with the JSON path, e.g. `$.limits.maxSequences`, and the expected value.
    """
    where = f" (in {source})" if source else ""
    try:
        config = msgspec.json.decode(raw, type=RuntimeConfig)
    except msgspec.ValidationError as error:
        document = msgspec.json.decode(raw)
        reasons = list(problems(document, RuntimeConfig)) or [explain(error, RuntimeConfig)]
        parts = [(f"${path}", _with_value(message, document, path)) for path, message in reasons]
        parts[-1] = (parts[-1][0], parts[-1][1] + where)
        raise InvalidConfig(*parts[0], *parts[1:]) from error
    except msgspec.DecodeError as error:
        raise InvalidConfig("$", f"{source or 'configuration'} is not JSON: {error}") from error
    _check(config)
    return config


def _with_value(message: str, document: Any, path: str) -> str:
    return f"{message}, got {_value_at(document, path)}" if ">=" in message or "<=" in message else message


def _value_at(value: Any, path: str) -> Any:
    for key, index in re.findall(r"([^.\[\]]+)|\[(\d+)\]", path):
        value = value[key or int(index)]
    return value


NO_PREFIX_CACHE = "there is no prefix cache: set prefixCaching to enabled, or leave the events out"


def _check(config: RuntimeConfig) -> None:
    """Check rules that types cannot express. Raises InvalidConfig with the fields."""
    if config.version != CONFIG_VERSION:
        raise InvalidConfig("$.version", f"this runtime supports version {CONFIG_VERSION}, got {config.version}")
    problems = ConfigProblems()
    with problems.collecting():
        parse_uri(config.model.uri)
    with problems.collecting():
        uses_blocks(config)
    if 0 < config.adapters.max_loaded < config.adapters.max_active:
        most = config.adapters.max_active
        problems.add("$.adapters.maxLoaded", f"must be at least maxActive ({most}), got {config.adapters.max_loaded}")
    least, most = config.speculation.match
    if least > most:
        problems.add("$.speculation.minMatch", f"must be at most maxMatch ({most}), got {least}")
    _check_draft_model(config.speculation, problems)
    if config.cache_events.endpoint and (config.prefix_caching == "disabled" or config.layout == "slots"):
        problems.add("$.cacheEvents.endpoint", NO_PREFIX_CACHE)
    if config.server.otlp_traces_endpoint:
        with problems.collecting():
            check_url(config.server.otlp_traces_endpoint, "$.server.otlpTracesEndpoint")
    for origin in config.server.allowed_origins:
        if origin != "*" and not re.fullmatch(r"https?://[^/\s?#]+", origin):
            message = f"{origin!r} is not an origin: write `https://host` or `http://host:port` without a path, or `*`"
            problems.add("$.server.allowedOrigins", message)
    for field in msgspec.structs.fields(Buckets):
        sizes = getattr(config.buckets, field.name)
        if list(sizes) != sorted({*sizes}):
            problems.add(f"$.buckets.{field.encode_name}", f"must be in ascending order, got {list(sizes)}")
    problems.check()


def _check_draft_model(speculation: Speculation, problems: ConfigProblems) -> None:
    path, uri = "$.speculation.model.uri", speculation.model.uri
    if speculation.method in METHODS_WITH_MODEL:
        with problems.collecting():
            parse_uri(uri, path)
    elif uri:
        problems.add(path, f"is for the methods {' and '.join(METHODS_WITH_MODEL)}: leave it out, or set one of them")


def uses_blocks(config: RuntimeConfig) -> bool | None:
    """The layout of the KV cache: blocks, slots (False), or None if nothing decides it.

    Raises InvalidConfig if the settings contradict each other.
    """
    shares, sized = config.prefix_caching == "enabled", config.limits.block_size or config.limits.num_blocks
    if config.layout != "slots":
        return True if config.layout == "blocks" or sized or shares else None
    if shares:
        message = "layout slots cannot share prefixes; leave out the layout, or use blocks"
        raise InvalidConfig("$.prefixCaching", message)
    if sized:
        raise InvalidConfig("$.layout", "layout slots has no blocks; leave out blockSize and numBlocks, or use blocks")
    return False


def check_url(url: str, name: str) -> None:
    """Raises InvalidConfig for `name` unless this is a full HTTP URL without credentials."""
    if not re.fullmatch(r"https?://[^/\s?#@]+(/\S*)?", url):
        raise InvalidConfig(name, "must be a URL such as http://collector:4318/v1/traces, without credentials")


def load_config(path: Path) -> RuntimeConfig:
    """Read a document from a file. Raises InvalidConfig, also if the file cannot be read."""
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise InvalidConfig("--config", f"cannot read {path}: {error.strerror}") from error
    return parse_config(raw, str(path))
