"""`RuntimeConfig`: the one JSON document that crosses the border from operator to runtime.

Rendered by the operator into an immutable ConfigMap, read by `neuron-runtime serve --config FILE`, and built from
flags or arguments by `arguments.py`. It says what to serve; where things lie on this machine (weights folder, port,
record file) are flags of the command. Unknown keys are refused. Nothing here reads weights or opens ports.

A field is declared here and nowhere else: type, bounds, description, default and flag. The parser, the flags of
`serve`, the arguments of `LLM` and the tables of the docs (`make generate`) follow from it.
"""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from neuron_runtime.errors import InvalidConfig
from neuron_runtime.flags import Flag, dtype_word, json_or_text, json_value, template, word_or_folder
from neuron_runtime.uris import parse_uri

CONFIG_VERSION = 1

TRACES_ENDPOINT = "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"
"""OpenTelemetry's own variable, used where the document names no endpoint."""

BackendName = Literal["nxdi", "optimum", "transformers-neuronx", "vllm", "torch", "simulated"]

Switch = Literal["auto", "enabled", "disabled"]

Limit = Annotated[int, Meta(ge=0)]
Count = Annotated[int, Meta(ge=1)]
Seconds = Annotated[float, Meta(ge=0)]

LimitFlag = partial(Flag, default="chosen at the start")


class Document(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, rename="camel"):
    """A part of the configuration: camelCase in JSON, unknown keys refused."""


class ModelSource(Document, frozen=True, kw_only=True):
    uri: Annotated[str, "What to serve: `hf://org/name[@revision]` or `file:///absolute/path`"]
    digest: Annotated[
        str, "Commit (`hf://`) or hash (folder) that `inspect` found; another one ends with `ChecksumMismatch`"
    ] = ""


class EngineLimits(Document, frozen=True, kw_only=True):
    """Zero: chosen at the start, from the model and the memory that is free."""

    max_model_length: Annotated[Limit, "Most tokens of prompt and answer", LimitFlag("max_model_len", llm=True)] = 0
    max_sequences: Annotated[Limit, "Most requests that run at a time", LimitFlag("max_num_seqs", llm=True)] = 0
    max_step_tokens: Annotated[Limit, "Most tokens of a step", LimitFlag("max_num_batched_tokens", llm=True)] = 0
    block_size: Annotated[Limit, "Tokens of a block of the KV cache", LimitFlag(llm=True)] = 0
    num_blocks: Annotated[Limit, "Blocks of the KV cache", LimitFlag("num_gpu_blocks_override", llm=True)] = 0
    max_queued_requests: Annotated[Limit, "Most requests that wait; one more is answered with 429", LimitFlag()] = 0
    max_queued_tokens: Annotated[Limit, "Most prompt tokens that wait; more are answered with 429", LimitFlag()] = 0


class DrainOptions(Document, frozen=True, kw_only=True):
    delay_seconds: Annotated[
        Seconds, "After SIGTERM `/health` is 503 at once; requests are still admitted for this long"
    ] = 10.0
    seconds: Annotated[Seconds, "After that, running answers may go on for this long"] = 300.0


class TextOptions(Document, frozen=True, kw_only=True):
    """How text is read and written, where the model's own files are not to decide it."""

    generation_config: Annotated[
        str,
        "Where sampling defaults come from: `auto`, the model's `generation_config.json`; `vllm`, nowhere; or a "
        "folder that has such a file. The model's end tokens always hold",
        Flag(llm=True, metavar="auto|vllm|DIR", read=word_or_folder),
    ] = "auto"
    chat_template: Annotated[
        str,
        "A Jinja template; the flag also takes a file",
        Flag(metavar="FILE", default="the model's own", read=template),
    ] = ""
    reasoning_parser: Annotated[
        Literal["", "deepseek_r1", "qwen3"], "Return reasoning apart from the answer, for models of this kind", Flag()
    ] = ""


class ServerOptions(Document, frozen=True, kw_only=True):
    """What the HTTP server does besides answering, and the most that one request may ask for."""

    access_log: Annotated[bool, "Log each request as a line of JSON on stdout", Flag()] = True
    log_prompts: Annotated[bool, "Log the beginning of each prompt in that line", Flag()] = False
    max_logged_characters: Annotated[Count, "Characters logged of each prompt", Flag("max_log_len")] = 1000
    otlp_traces_endpoint: Annotated[
        str,
        "Send OpenTelemetry traces there (OTLP/HTTP)",
        Flag(metavar="URL", default=f"`${TRACES_ENDPOINT}`, or none"),
    ] = ""
    allowed_origins: Annotated[
        tuple[str, ...],
        "Origins of web pages that may call from a browser; `*`: all",
        Flag(metavar="JSON", read=json_or_text),
    ] = ()
    client_stall_seconds: Annotated[Count, "Disconnect a client that has read nothing for this long", Flag()] = 60
    num_front_ends: Annotated[
        int, Meta(ge=1, le=64), "Front-end processes, which do HTTP and text", Flag("api_server_count")
    ] = 1
    max_body_bytes: Annotated[Count, "Largest body of a request", Flag()] = 32 * 1024 * 1024
    max_output_tokens: Annotated[
        int, Meta(ge=0), "Largest `max_tokens` of a request; 0: what fits behind the prompt", Flag()
    ] = 0
    max_prompts: Annotated[Count, "Most prompts in one request", Flag()] = 128
    max_choices: Annotated[Count, "Most answers to one request: prompts times `n`", Flag()] = 128


class RuntimeConfig(Document, frozen=True, kw_only=True):
    version: Annotated[int, f"Version of this format: {CONFIG_VERSION}"]
    model: ModelSource
    served_names: Annotated[
        tuple[str, ...],
        Meta(min_length=1),
        "Names clients may ask for; answers have the first",
        Flag("served_model_name", llm=True, default="from MODEL"),
    ]
    backend: Annotated[
        BackendName,
        "What computes: `torch` or `simulated`; the others are not built yet",
        Flag(llm=True, metavar="NAME"),
    ] = "torch"
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        "Type of weights and cache; `auto`: as the weights are stored",
        Flag(llm=True, read=dtype_word),
    ] = "auto"
    layout: Annotated[
        Literal["auto", "slots", "blocks"],
        "KV cache: `slots`, one line per request, or `blocks`, pages taken as a request grows",
        Flag(llm=True),
    ] = "auto"
    prefix_caching: Annotated[
        Switch,
        "Compute equal beginnings of prompts once; enabled chooses layout `blocks`",
        Flag("enable_prefix_caching", llm=True, default="on with layout `blocks`"),
    ] = "auto"
    chunked_prefill: Annotated[
        Switch,
        "Compute long prompts in parts; disabled: a prompt longer than a step is refused with 400",
        Flag("enable_chunked_prefill", llm=True, default="on where the backend can"),
    ] = "auto"
    limits: EngineLimits = EngineLimits()
    drain: DrainOptions = DrainOptions()
    text: TextOptions = TextOptions()
    server: ServerOptions = ServerOptions()
    override_neuron_config: Annotated[
        dict[str, Any], "Settings of the backend", Flag(llm=True, metavar="JSON", read=json_value)
    ] = {}


def parse_config(raw: bytes, source: str = "") -> RuntimeConfig:
    """Read a document or refuse it.

    Args:
        source: where it comes from, for the message; empty where the path says it.

    Raises:
        InvalidConfig: naming the JSON path, e.g. `$.limits.maxSequences`, and what was expected there.
    """
    where = f" (in {source})" if source else ""
    try:
        config = msgspec.json.decode(raw, type=RuntimeConfig)
    except msgspec.ValidationError as error:
        message, _, path = str(error).partition(" - at `")
        path = path.rstrip("`") or "$"
        if ">=" in message or "<=" in message:
            message += f", got {_value_at(raw, path)}"
        raise InvalidConfig(path, message + where) from error
    except msgspec.DecodeError as error:
        raise InvalidConfig("$", f"{source or 'configuration'} is not JSON: {error}") from error
    _check(config)
    return config


def _value_at(raw: bytes, path: str) -> Any:
    value = msgspec.json.decode(raw)
    for key in path.split(".")[1:]:
        value = value[key]
    return value


def _check(config: RuntimeConfig) -> None:
    """Rules that types do not say. Raises InvalidConfig with the field."""
    if config.version != CONFIG_VERSION:
        raise InvalidConfig("$.version", f"this runtime reads version {CONFIG_VERSION}, got {config.version}")
    parse_uri(config.model.uri)
    if config.server.otlp_traces_endpoint:
        check_url(config.server.otlp_traces_endpoint, "$.server.otlpTracesEndpoint")
    for origin in config.server.allowed_origins:
        if origin != "*" and not re.fullmatch(r"https?://[^/\s?#]+", origin):
            message = f"{origin!r} is not an origin: give `https://host` or `http://host:port` without a path, or `*`"
            raise InvalidConfig("$.server.allowedOrigins", message)


def check_url(url: str, name: str) -> None:
    """Raises InvalidConfig, in the name of whatever said it, unless this is a full HTTP URL without a user."""
    if not re.fullmatch(r"https?://[^/\s?#@]+(/\S*)?", url):
        raise InvalidConfig(name, "must be a URL such as http://collector:4318/v1/traces, without a user's name in it")


def load_config(path: Path) -> RuntimeConfig:
    """Read a document from a file. Raises InvalidConfig, also when the file cannot be read."""
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise InvalidConfig("--config", f"cannot read {path}: {error.strerror}") from error
    return parse_config(raw, str(path))
