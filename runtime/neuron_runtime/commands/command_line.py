"""The command `neuron-runtime`: parses arguments, runs one command, and turns errors into exit codes and records."""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from importlib.metadata import version
from typing import Any, NoReturn

from neuron_runtime import record
from neuron_runtime.bench import simulate
from neuron_runtime.commands import compile_model, convert, fetch, follow, inspect, plan_buckets, serve, weights
from neuron_runtime.console import say
from neuron_runtime.errors import ServingError

COMMANDS: dict[str, tuple[Callable[[argparse.ArgumentParser], None], str]] = {
    "serve": (serve.add_arguments, "serve a model over HTTP"),
    "follow": (follow.add_arguments, "run the ranks of one node of a group that another node leads"),
    "inspect": (inspect.add_arguments, "show facts about a model from its config and the headers of its weights"),
    "fetch": (fetch.add_arguments, "fetch a model into a store, from where it can be served"),
    "convert": (convert.add_arguments, "convert the weights of a model, quantized or not, for a backend"),
    "compile": (compile_model.add_arguments, "compile a model into a store, from where it can be served"),
    "plan-buckets": (plan_buckets.add_arguments, "list the graphs that a model would be compiled to, with estimates"),
    "weights": (weights.add_commands, "list, verify or prune the models of a store"),
    "artifacts": (partial(weights.add_commands, contents=weights.ARTIFACTS), "list, verify or prune compiled models"),
    "bench": (simulate.add_commands, "simulate a deployment"),
}
"""By name: the function that adds its arguments, and a line of help."""


class Parser(argparse.ArgumentParser):
    """Reports errors in one line; argparse prints the usage first."""

    def parse_known_args(  # type: ignore[override]  # overloaded there, by the type of the namespace
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        """Each command refuses its own unknown arguments; argparse leaves them to the outermost parser. As in vLLM, a
        flag may have underscores in the place of dashes."""
        written = sys.argv[1:] if args is None else args
        options, unknown = super().parse_known_args([_with_dashes(one) for one in written], namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return options, unknown

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} (see {self.prog} --help)\n")


def main(arguments: Sequence[str] | None = None) -> int:
    options = build_parser().parse_args(arguments)
    began = time.monotonic()
    run: Callable[[argparse.Namespace], record.Result | None] = options.run
    try:
        result = run(options)
        command = "check" if getattr(options, "check", False) else options.command
        outcome = record.success(command, result, time.monotonic() - began)
    except ServingError as error:
        outcome = record.failure(options.command, error, time.monotonic() - began)
        say(f"{outcome.reason}: {outcome.message}" if outcome.reason else outcome.message)
    if options.record is not None and (outcome.command != "serve" or not outcome.ok):
        try:
            record.write(outcome, options.record)
        except OSError as error:
            say(f"cannot write the record to {options.record}: {error.strerror}")
    return outcome.exit_code


def build_parser() -> argparse.ArgumentParser:
    parser = Parser(prog="neuron-runtime", description="Serve language models: continuous batching, OpenAI's API.")
    parser.add_argument("--version", action="version", version=f"neuron-runtime {version('neuron-serving')}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (add_arguments, meaning) in COMMANDS.items():
        add_arguments(commands.add_parser(name, help=meaning, description=f"{meaning[0].upper()}{meaning[1:]}."))
    return parser


def _with_dashes(argument: str) -> str:
    name, equals, value = argument.partition("=")
    return name.replace("_", "-") + equals + value if _FLAG.fullmatch(name) else argument


_FLAG = re.compile(r"--[a-z_-]+")
