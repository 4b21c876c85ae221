"""The command `neuron-runtime`: `serve` a model over HTTP, `inspect` one without loading it, `bench` the runtime.

Reads flags, builds what a command needs, and turns errors into exit codes and records. The flags of `serve` are
vLLM's where the meaning is the same. Imports stay light: torch belongs to the engine process.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from importlib.metadata import version
from pathlib import Path
from typing import Any, NoReturn

from neuron_runtime import not_built, record
from neuron_runtime.arguments import PATHS, config_of, default_weights_dir, model_uri, naming
from neuron_runtime.bench import command as bench_command
from neuron_runtime.config import RuntimeConfig, load_config
from neuron_runtime.console import say
from neuron_runtime.errors import InvalidConfig, ServingError
from neuron_runtime.not_built import Surface

DEFAULT_PORT = 8000
INTERRUPTED = 130

DRAIN_ON_THE_COMMAND_LINE = {"delaySeconds": 0.0, "seconds": 30.0}
"""Without a platform that must notice first, a command that is told to end closes at once."""

FLAG_OF_PATH = {"model.uri": "MODEL"} | {path: f"--{name.replace('_', '-')}" for name, path in PATHS.items()}
"""What says the value that stands at a path of the configuration document."""

API_KEY_VARIABLE = "VLLM_API_KEY"


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line; argparse's own way repeats the usage first."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} (see {self.prog} --help)\n")


def main(arguments: Sequence[str] | None = None) -> int:
    options = build_parser().parse_args(arguments)
    began = time.monotonic()
    command: Callable[[argparse.Namespace, float], record.Record] = options.run
    try:
        outcome = command(options, began)
    except ServingError as error:
        outcome = record.failure(options.command, error, time.monotonic() - began)
    except KeyboardInterrupt:
        return INTERRUPTED
    if not outcome.ok:
        say(f"{outcome.reason}: {outcome.message}" if outcome.reason else outcome.message)
    if options.record is not None and (options.command != "serve" or not outcome.ok):
        _write(outcome, options.record)
    return outcome.exit_code


def build_parser() -> argparse.ArgumentParser:
    parser = Parser(prog="neuron-runtime", description="Serve language models: continuous batching, OpenAI's API.")
    parser.add_argument("--version", action="version", version=f"neuron-runtime {version('neuron-serving')}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_serve(commands.add_parser("serve", help="serve a model over HTTP", description="Serve a model over HTTP."))
    inspect = commands.add_parser(
        "inspect",
        help="say what a model is, without loading it",
        description="Read a model's config and the headers of its weights, and say what it is.",
    )
    inspect.add_argument("uri", metavar="URI", help="hf://org/name[@revision] or file:///absolute/path")
    inspect.add_argument("--json", action="store_true", help="print the facts as JSON")
    _add_record(inspect)
    inspect.set_defaults(run=_inspect)
    meaning = "measure what the runtime costs and what a deployment carries"
    bench_command.add_commands(commands.add_parser("bench", help=meaning, description=f"{meaning.capitalize()}."))
    return parser


def _add_serve(serve: argparse.ArgumentParser) -> None:
    serve.add_argument(
        "model",
        nargs="?",
        metavar="MODEL",
        help="hf://org/name[@revision], org/name, file:///path, or the path of a model's folder",
    )
    serve.add_argument("--config", type=Path, help="a configuration document (JSON) instead of MODEL and model flags")
    serve.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    serve.add_argument("--port", type=int, default=DEFAULT_PORT, help="port, 0 for any free one (default: %(default)s)")
    serve.add_argument(
        "--weights-dir", type=Path, default=default_weights_dir(), help="where weights go (default: %(default)s)"
    )
    _add_record(serve)
    serve.add_argument(
        "--api-key-file", type=Path, metavar="FILE", help="clients must send one of the keys in it, one per line"
    )
    serve.add_argument(
        "--api-key",
        action="append",
        metavar="KEY",
        help=f"clients must send this key; others on this machine can see it: rather a file, or ${API_KEY_VARIABLE}",
    )
    _add_server_flags(serve.add_argument_group("server flags (not together with --config)"))
    model = serve.add_argument_group("model flags (not together with --config)")
    model.add_argument("--served-model-name", nargs="+", help="names clients may ask for (default: from MODEL)")
    model.add_argument("--backend", help="torch (default) or simulated; others as they are built")
    model.add_argument("--dtype", help="auto (default), bfloat16, float16 or float32")
    model.add_argument("--layout", help="KV cache: auto (default), slots or blocks")
    for flag, meaning in (
        ("--max-model-len", "tokens of prompt and answer together"),
        ("--max-num-seqs", "requests that run at a time"),
        ("--max-num-batched-tokens", "tokens of one step"),
        ("--block-size", "tokens of a KV block"),
        ("--num-gpu-blocks-override", "KV blocks"),
        ("--max-queued-requests", "requests that may wait for a row, beyond it: 429"),
        ("--max-queued-tokens", "prompt tokens that may wait, beyond it: 429"),
    ):
        model.add_argument(flag, type=int, metavar="N", help=f"{meaning} (default: the backend's)")
    model.add_argument(
        "--override-neuron-config", type=_object, metavar="JSON", help="settings of the backend, as a JSON object"
    )
    for flag, meaning in (
        ("--enable-prefix-caching", "compute equal beginnings of prompts once (default: with layout blocks)"),
        ("--enable-chunked-prefill", "compute long prompts in parts (default: where the backend can)"),
    ):
        model.add_argument(flag, action=argparse.BooleanOptionalAction, help=meaning)
    model.add_argument(
        "--generation-config",
        type=_word_or_folder,
        metavar="auto|vllm|DIR",
        help="where sampling defaults come from: the model (auto, default), nowhere (vllm), another folder",
    )
    model.add_argument(
        "--chat-template", type=_template, metavar="FILE", help="a Jinja template instead of the model's own"
    )
    model.add_argument(
        "--reasoning-parser", metavar="NAME", help="the model thinks before it answers, as qwen3 or deepseek_r1 do"
    )
    for row in not_built.rows(Surface.FLAG):
        model.add_argument(f"--{row.name.replace('_', '-')}", action=_NotBuilt, help=argparse.SUPPRESS)
    serve.set_defaults(run=_serve)


def _add_server_flags(server: argparse._ArgumentGroup) -> None:
    server.add_argument(
        "--access-log",
        action=argparse.BooleanOptionalAction,
        help="a line of JSON on stdout for each request (default: on)",
    )
    server.add_argument("--disable-uvicorn-access-log", dest="access_log", action="store_false", help=argparse.SUPPRESS)
    server.add_argument("--log-prompts", action="store_true", default=None, help="with the beginning of its prompts")
    server.add_argument(
        "--otlp-traces-endpoint", metavar="URL", help="send OpenTelemetry traces there (OTLP over HTTP)"
    )
    server.add_argument(
        "--allowed-origins",
        type=_origins,
        metavar="JSON",
        help="web pages that may call, as a JSON list (default: none)",
    )
    for flag, meaning in (
        ("--max-log-len", "characters of a logged prompt"),
        ("--max-body-bytes", "largest body of a request"),
        ("--max-output-tokens", "largest max_tokens of a request"),
        ("--max-prompts", "prompts in a request"),
        ("--max-choices", "answers to a request: prompts times n"),
        ("--api-server-count", "processes that speak HTTP and text (default: 1)"),
        ("--client-stall-seconds", "a client that takes nothing for so long is gone (default: 60)"),
    ):
        server.add_argument(flag, type=int, metavar="N", help=meaning)
    server.set_defaults(access_log=None)


def _word_or_folder(value: str) -> str:
    return value if value in ("auto", "vllm") else str(Path(value).expanduser().resolve())


def _template(value: str) -> str:
    """The template in a file, or, as in vLLM, the template itself."""
    if any(character in value for character in "{}\n"):
        return value
    try:
        return Path(value).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise argparse.ArgumentTypeError(f"{value} cannot be read: {error}") from error


def _origins(value: str) -> list[str]:
    """vLLM's form, a JSON list, or one origin as it is."""
    try:
        return json.loads(value) if value.startswith("[") else [value]
    except json.JSONDecodeError as error:
        raise argparse.ArgumentTypeError(f"is no JSON list such as '[\"https://chat.example\"]': {error}") from error


def _add_record(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--record", type=Path, metavar="FILE", help="leave the outcome here, as JSON")


def _object(value: str) -> dict[str, Any]:
    try:
        given = json.loads(value)
    except json.JSONDecodeError:
        given = None
    if not isinstance(given, dict):
        raise argparse.ArgumentTypeError(f"{value!r} is not a JSON object such as '{{\"stepMilliseconds\": 8}}'")
    return given


class _NotBuilt(argparse.Action):
    """A flag that is known and refused."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        try:
            value = json.loads(values)
        except json.JSONDecodeError:
            value = values
        try:
            not_built.refuse(Surface.FLAG, self.dest, value, at=option)
        except InvalidConfig as error:
            parser.error(str(error))


def _serve(options: argparse.Namespace, began: float) -> record.Record:
    from neuron_runtime.engine.backends import check_backend  # noqa: PLC0415
    from neuron_runtime.server.auth import api_key_file, check_keys  # noqa: PLC0415
    from neuron_runtime.server.run_dir import made_run_dir  # noqa: PLC0415
    from neuron_runtime.server.supervisor import Signals, Supervisor, listen, url_of  # noqa: PLC0415

    config = serve_config(options)
    # Out of the environment, so that no child has it in its own.
    variable = os.environ.pop(API_KEY_VARIABLE, None)
    keys = tuple(options.api_key or ([variable] if variable and options.api_key_file is None else ()))
    check_keys(options.api_key_file, keys)
    with naming(FLAG_OF_PATH) if options.config is None else nullcontext():
        check_backend(config)
        with (
            listen(options.host, options.port, config.server.client_stall_seconds) as listener,
            made_run_dir() as run_dir,
        ):
            say(f"serving {config.model.uri} at {url_of(listener)}")
            supervisor = Supervisor(
                config,
                listener,
                Signals(),
                run_dir=run_dir,
                weights_dir=options.weights_dir,
                began=began,
                api_key_file=api_key_file(options.api_key_file, keys, run_dir),
            )
            supervisor.run()
    return record.success("serve", seconds=time.monotonic() - began)


def _inspect(options: argparse.Namespace, began: float) -> record.Record:
    from neuron_runtime.inspection import facts_as_json, facts_as_text, inspect_model  # noqa: PLC0415

    facts = inspect_model(model_uri(options.uri))
    print(facts_as_json(facts) if options.json else facts_as_text(options.uri, facts))
    return record.success("inspect", facts, time.monotonic() - began)


def serve_config(options: argparse.Namespace) -> RuntimeConfig:
    """The configuration document that the flags name or amount to. Raises InvalidConfig, naming the flag."""
    given = {name: value for name in PATHS if (value := getattr(options, name)) is not None}
    if options.config is not None:
        if options.model is not None or given:
            raise InvalidConfig("--config", "says what to serve: leave out MODEL and the model and server flags")
        return load_config(options.config)
    if options.model is None:
        raise InvalidConfig("MODEL", "say what to serve: `neuron-runtime serve MODEL` or `serve --config FILE`")
    with naming(FLAG_OF_PATH):
        return config_of(model_uri(options.model), given, drain=DRAIN_ON_THE_COMMAND_LINE)


def _write(outcome: record.Record, path: Path) -> None:
    try:
        record.write(outcome, path)
    except OSError as error:
        say(f"cannot write the record to {path}: {error.strerror}")


if __name__ == "__main__":
    sys.exit(main())
