"""`neuron-runtime serve MODEL` or `serve --config FILE`: serves a model over HTTP.

Most flags are derived from the fields of `RuntimeConfig`; those declared here are local settings of this machine. Runs
the supervisor. Does not import torch, which only the engine process uses.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from neuron_runtime import not_built, record
from neuron_runtime.arguments import BY_ARGUMENT, FLAG_NAMES, RUNNERS, config_of, naming, on_this_machine
from neuron_runtime.artifacts.loading import find_model
from neuron_runtime.config import RuntimeConfig, load_config
from neuron_runtime.console import StageLines, say
from neuron_runtime.distributed.layout import layout_for
from neuron_runtime.engine.backends import backend_package, check_backend
from neuron_runtime.errors import ConfigProblems, InvalidConfig
from neuron_runtime.flags import Field, add_flags, as_flag, json_or_text, model_uri, spellings, whole_number
from neuron_runtime.local_settings import AdapterSettings, LocalSettings, add_adapter_flags, add_local_flags
from neuron_runtime.not_built import Surface
from neuron_runtime.processes.run_dir import made_run_dir
from neuron_runtime.processes.supervisor import Signals, Supervisor, listen, url_of
from neuron_runtime.server.adapter_list import Wanted, keep, modules
from neuron_runtime.server.auth import api_key_file, check_keys
from neuron_runtime.speculative_config import OLDER_MODEL, OLDER_NAMES, OLDER_NUMBERS
from neuron_runtime.uris import FORMS

DEFAULT_PORT = 8000

DRAIN_ON_THE_COMMAND_LINE = {"delaySeconds": 0.0, "seconds": 30.0}
"""Without a platform that must notice first, the command admits no requests after SIGTERM."""

API_KEY_VARIABLE = "VLLM_API_KEY"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    parser.add_argument(
        "--host",
        default="127.0.0.1",
        help="Address to listen on; 0.0.0.0 or ::: all, of IPv4 and IPv6 (default: %(default)s)",
    )
    parser.add_argument(
        "--port", type=int, metavar="N", default=DEFAULT_PORT, help="Port; 0: any free one (default: %(default)s)"
    )
    add_local_flags(parser)
    add_adapter_flags(parser)
    parser.add_argument(
        "--lora-modules",
        action="extend",
        nargs="+",
        default=[],
        metavar="NAME=PATH",
        help="Adapters: NAME is what clients ask for, PATH a folder, org/name of the hub, or a URI as of models; or "
        'JSON as {"name": ..., "path": ...}',
    )
    record.add_flag(parser)
    parser.add_argument(
        "--check",
        action="store_true",
        help="Only check whether this configuration could serve this model: settings, tokenizer and chat template, "
        "without weights and devices",
    )
    parser.add_argument(
        "--api-key-file", type=Path, metavar="FILE", help="File with API keys, one per line; clients must send one"
    )
    parser.add_argument(
        "--api-key",
        action="append",
        metavar="KEY",
        help="API key that clients must send. Other users of this machine can see it in the process list: prefer "
        f"--api-key-file or ${API_KEY_VARIABLE}",
    )
    add_model_flags(parser, lambda field: not field.path.startswith("server."))
    server = parser.add_argument_group("server flags (not together with --config)")
    add_flags(server, (field for field in BY_ARGUMENT.values() if field.path.startswith("server.")))
    server.add_argument(
        "--disable-uvicorn-access-log", dest="access_log", action="store_false", default=None, help=argparse.SUPPRESS
    )
    parser.set_defaults(run=run)


def add_model(parser: argparse.ArgumentParser) -> None:
    """The ways to name a model and its configuration."""
    parser.set_defaults(model=None)
    model = parser.add_mutually_exclusive_group()
    # A default of one would replace the value of the other.
    unset: dict[str, Any] = {"metavar": "MODEL", "default": argparse.SUPPRESS}
    model.add_argument("model", nargs="?", help=f"{FORMS}, org/name (a hub model), or the path of a folder", **unset)
    model.add_argument("--model", help="As MODEL", **unset)
    parser.add_argument(
        "--config", type=Path, metavar="FILE", help="Configuration document, instead of MODEL and the flags for it"
    )


def add_model_flags(parser: argparse.ArgumentParser, wanted: Callable[[Field], bool]) -> None:
    model = parser.add_argument_group("model flags (not together with --config)")
    add_flags(model, filter(wanted, BY_ARGUMENT.values()))
    model.add_argument(
        "--device", metavar="cpu|neuron", help="As --backend torch, or the backend for Neuron devices (default: auto)"
    )
    model.add_argument(
        "--additional-config",
        type=json_or_text,
        metavar="JSON",
        help='{"override_neuron_config": {...}}, as newer versions of vLLM write --override-neuron-config',
    )
    model.add_argument(
        "--enable-lora",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="Serve adapters, as many at a time as --max-loras says (default: if that is set; 1)",
    )
    model.add_argument(as_flag(OLDER_MODEL), help=argparse.SUPPRESS)
    for name in OLDER_NUMBERS:
        model.add_argument(as_flag(name), type=whole_number, help=argparse.SUPPRESS)
    for name, words in RUNNERS.items():
        model.add_argument(as_flag(name), choices=("auto", *words), help=argparse.SUPPRESS)
    for row in not_built.rows(Surface.FLAG):
        form: dict[str, Any] = {"action": argparse.BooleanOptionalAction} if row.is_switch else {"type": json_or_text}
        model.add_argument(*spellings(row.name), help=argparse.SUPPRESS, **form)


def run(options: argparse.Namespace) -> None:
    """Serve until a signal, or only check. Raises ServingError if serving is impossible."""
    began = time.monotonic()
    config = configuration(options)
    settings = LocalSettings.of(options)
    adapters = lora_modules(options.lora_modules, config)
    names = FLAG_NAMES if options.config is None else {}
    if options.check:
        with naming(names):
            check(config, settings)
        say(f"{config.model.uri} can be served with this configuration")
        return
    layout = layout_for(config, leads=True)
    # Removed from the environment, so that children do not inherit it.
    variable = os.environ.pop(API_KEY_VARIABLE, None)
    keys = tuple(options.api_key or ([variable] if variable and options.api_key_file is None else ()))
    check_keys(options.api_key_file, keys)
    with (
        naming(names),
        listen(options.host, options.port, config.server.client_stall_seconds) as listener,
        made_run_dir() as run_dir,
    ):
        keep(adapters, run_dir)
        say(f"serving {config.model.uri} at {url_of(listener)}")
        supervisor = Supervisor(
            config,
            listener,
            Signals(),
            run_dir=run_dir,
            settings=settings,
            layout=layout,
            began=began,
            api_key_file=api_key_file(options.api_key_file, keys, run_dir),
            adapters=AdapterSettings.of(options),
        )
        supervisor.run()


def lora_modules(given: Sequence[str], config: RuntimeConfig) -> dict[str, Wanted]:
    """Raises InvalidConfig."""
    if given and not config.adapters.max_active:
        raise InvalidConfig("--lora-modules", "needs --enable-lora, and --max-loras for more than one at a time")
    return modules(given, config.served_names)


def check(config: RuntimeConfig, settings: LocalSettings) -> None:
    """What `serve` does before it reads weights. Raises ServingError as it would.

    Whether the model fits into memory is not checked: the machine that serves has another amount.
    """
    from neuron_runtime.requests.texts import load_text  # noqa: PLC0415 - brings libraries of text

    folder = find_model(config, settings, StageLines(), with_weights=False)
    backend_package(config).check_model(folder, config)
    load_text(folder, config.text, config.task)


def configuration(
    options: argparse.Namespace, check: Callable[[RuntimeConfig], object] = check_backend
) -> RuntimeConfig:
    """The document from `--config` or from flags. Raises InvalidConfig with the flags.

    Args:
        check: raises what is wrong; by default that this machine can run the backend, which accepts the document.
    """
    problems = ConfigProblems()
    for row in not_built.rows(Surface.FLAG):
        value, flag = getattr(options, row.name), as_flag(row.name)
        with problems.collecting():
            not_built.refuse(Surface.FLAG, row.name, value, at=flag)
        if value is not None and not row.has_effect:
            say(f"{flag} has no effect here: leave it out")
    # A command may have only some of the flags.
    names = (*BY_ARGUMENT, *OLDER_NAMES, *RUNNERS)
    arguments = {name: value for name in names if (value := getattr(options, name, None)) is not None}
    vllm = {name: getattr(options, name) for name in ("device", "additional_config", "enable_lora")}
    with problems.collecting():
        if options.config is not None:
            if options.model is not None or arguments or vllm != dict.fromkeys(vllm):
                raise InvalidConfig(
                    "--config", "cannot be combined with MODEL, model flags or server flags: leave them out"
                )
            config = load_config(options.config)
            check(config)
        elif options.model is None:
            command = options.command
            message = f"is missing: use `neuron-runtime {command} MODEL` or `{command} --config FILE`"
            raise InvalidConfig("MODEL", message)
        else:
            with naming(FLAG_NAMES):
                arguments = on_this_machine(arguments, **vllm)
                config = config_of(model_uri(options.model), arguments, drain=DRAIN_ON_THE_COMMAND_LINE)
                check(config)
    problems.check()
    return config
