"""`RuntimeConfig`: the one JSON document that crosses the border from operator to runtime.

Rendered by the operator into an immutable ConfigMap, read by `neuron-runtime serve --config FILE`, and built from
flags by `neuron-runtime serve MODEL`. It says what to serve; where things lie on this machine (weights folder, port,
record file) are flags of the command. Unknown keys are refused. Nothing here reads weights or opens ports.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Literal

import msgspec

from neuron_runtime.errors import InvalidConfig
from neuron_runtime.uris import parse_uri

CONFIG_VERSION = 1

MAX_BODY_BYTES = 32 * 1024 * 1024
"""Default of the largest body."""

MAX_FRONT_ENDS = 64

BackendName = Literal["nxdi", "optimum", "transformers-neuronx", "vllm", "torch", "simulated"]


Switch = Literal["auto", "enabled", "disabled"]


class Document(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, rename="camel"):
    """A part of the configuration: camelCase in JSON, unknown keys refused."""


class ModelSource(Document, frozen=True, kw_only=True):
    uri: str
    """`hf://org/name[@revision]` or `file:///absolute/path`."""
    digest: str = ""
    """What `inspect` found behind the URI (a commit, or a hash over config and index); empty: not pinned."""


class EngineLimits(Document, frozen=True, kw_only=True):
    """Zero means: the backend's documented default, checked against memory."""

    max_model_length: int = 0
    max_sequences: int = 0
    max_step_tokens: int = 0
    block_size: int = 0
    num_blocks: int = 0
    max_queued_requests: int = 0
    max_queued_tokens: int = 0


class Drain(Document, frozen=True, kw_only=True):
    delay_seconds: float = 10.0
    """After SIGTERM `/health` is 503 at once, but requests are still admitted for this long."""
    seconds: float = 300.0
    """Running streams may go on for this long after that."""


class TextOptions(Document, frozen=True, kw_only=True):
    """How text is read and written, where the model's own files do not say it as it is wanted."""

    generation_config: str = "auto"
    """Where sampling defaults come from: `auto`, the model's folder; `vllm`, nowhere; or the path of a folder."""
    chat_template: str = ""
    """A Jinja template, word for word; empty: the model's own."""
    reasoning_parser: Literal["", "deepseek_r1", "qwen3"] = ""
    """How the model writes its thoughts; empty: they stay in the text."""


class ServerOptions(Document, frozen=True, kw_only=True):
    """What the HTTP server does besides answering, and the most that one request may ask for."""

    access_log: bool = True
    """A line of JSON on stdout for each request; health checks and metrics excepted."""
    log_prompts: bool = False
    max_logged_characters: int = 1000
    """Of each prompt, where prompts are logged."""
    otlp_traces_endpoint: str = ""
    """Full URL of an OpenTelemetry collector (OTLP over HTTP); empty: $OTEL_EXPORTER_OTLP_TRACES_ENDPOINT, or none."""
    allowed_origins: tuple[str, ...] = ()
    """Origins of web pages that may call from a browser; `*`: all."""
    client_stall_seconds: int = 60
    """A client that takes nothing of what is sent for so long is taken for gone."""
    num_front_ends: int = 1
    """Processes that speak HTTP and text, beside the one with the engine."""
    max_body_bytes: int = MAX_BODY_BYTES
    """Largest body of a request."""
    max_output_tokens: int = 0
    """Largest `max_tokens`; 0: what fits behind the prompt."""
    max_prompts: int = 128
    """Prompts in one request."""
    max_choices: int = 128
    """Answers to one request: prompts times `n`."""


class RuntimeConfig(Document, frozen=True, kw_only=True):
    version: int
    model: ModelSource
    served_names: tuple[str, ...]
    """Names a client may ask for; the first one is reported in answers and metrics."""
    backend: BackendName = "torch"
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    layout: Literal["auto", "slots", "blocks"] = "auto"
    prefix_caching: Switch = "auto"
    """Equal beginnings of prompts are computed once. Enabled: chooses blocks; auto: wherever the layout is blocks."""
    chunked_prefill: Switch = "auto"
    """Long prompts are computed in parts; auto: where the backend can."""
    limits: EngineLimits = msgspec.field(default_factory=EngineLimits)
    drain: Drain = msgspec.field(default_factory=Drain)
    text: TextOptions = msgspec.field(default_factory=TextOptions)
    server: ServerOptions = msgspec.field(default_factory=ServerOptions)
    override_neuron_config: dict[str, Any] = {}


def parse_config(raw: bytes, source: str = "configuration") -> RuntimeConfig:
    """Read a document or refuse it.

    Raises:
        InvalidConfig: naming the JSON path, e.g. `$.limits.maxSequences`, and what was expected there.
    """
    try:
        config = msgspec.json.decode(raw, type=RuntimeConfig)
    except msgspec.ValidationError as error:
        message, _, path = str(error).partition(" - at `")
        raise InvalidConfig(path.rstrip("`") or "$", f"{message} (in {source})") from error
    except msgspec.DecodeError as error:
        raise InvalidConfig("$", f"{source} is not JSON: {error}") from error
    check_config(config)
    return config


def check_config(config: RuntimeConfig) -> None:
    """Rules that types do not say. Raises InvalidConfig with the field."""
    if config.version != CONFIG_VERSION:
        raise InvalidConfig("$.version", f"this runtime reads version {CONFIG_VERSION}, got {config.version}")
    parse_uri(config.model.uri)
    if not config.served_names:
        raise InvalidConfig("$.servedNames", "at least one name is needed")
    for name, value in msgspec.to_builtins(config.limits).items():
        if value < 0:
            raise InvalidConfig(f"$.limits.{name}", f"must not be negative, got {value}")
    for name, value in msgspec.to_builtins(config.drain).items():
        if value < 0:
            raise InvalidConfig(f"$.drain.{name}", f"must not be negative, got {value}")
    _check_server(config.server)


def _check_server(server: ServerOptions) -> None:
    positive = ("maxLoggedCharacters", "maxBodyBytes", "numFrontEnds", "clientStallSeconds", "maxPrompts", "maxChoices")
    lowest = {"maxOutputTokens": 0, **dict.fromkeys(positive, 1)}
    options = msgspec.to_builtins(server)
    for name, least in lowest.items():
        if options[name] < least:
            raise InvalidConfig(f"$.server.{name}", f"must be at least {least}, got {options[name]}")
    if server.otlp_traces_endpoint:
        check_url(server.otlp_traces_endpoint, "$.server.otlpTracesEndpoint")
    if server.num_front_ends > MAX_FRONT_ENDS:
        message = f"at most {MAX_FRONT_ENDS} can be started, got {server.num_front_ends}"
        raise InvalidConfig("$.server.numFrontEnds", message)
    for origin in server.allowed_origins:
        if origin != "*" and not re.fullmatch(r"https?://[^/\s?#]+", origin):
            message = f"{origin!r} is no origin: give `https://host` or `http://host:port` without a path, or `*`"
            raise InvalidConfig("$.server.allowedOrigins", message)


def check_url(url: str, name: str) -> None:
    """Raises InvalidConfig, in the name of whatever said it, unless this is the full URL of something on HTTP."""
    if not re.fullmatch(r"https?://[^/\s?#@]+(/\S*)?", url):
        raise InvalidConfig(name, "must be a URL such as http://collector:4318/v1/traces, without a user's name in it")


def load_config(path: Path) -> RuntimeConfig:
    """Read a document from a file. Raises InvalidConfig, also when the file cannot be read."""
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise InvalidConfig("--config", f"cannot read {path}: {error.strerror}") from error
    return parse_config(raw, str(path))
