"""`neuron-runtime bench COMMAND`: the benchmarks, one module each.

Called by `__main__`. A module has `add_arguments(parser)` and `run(options)`. It must be cheap to import, because every
start of `neuron-runtime` reads its arguments. All output goes through `report`.
"""

from __future__ import annotations

import argparse
import importlib
import time
from typing import Protocol, cast

from neuron_runtime import record
from neuron_runtime.bench.report import add_output_arguments

MODULES: dict[str, tuple[str, str]] = {
    "offline": ("neuron_runtime.bench.offline", "throughput and latency of a model in this process, without HTTP"),
    "serve": ("neuron_runtime.bench.serve", "throughput and latency of an OpenAI server under load"),
    "simulate": ("neuron_runtime.bench.simulate", "capacity of a deployment, in virtual time, without a device"),
}
"""By command: its module, and a line of help."""


class Bench(Protocol):
    """Interface of the modules in `MODULES`."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Add the flags of the benchmark; `--json` and `--plot` are added for all."""

    def run(self, options: argparse.Namespace) -> None:
        """Measure, and pass a `Report` to `report.deliver`. Raises ServingError."""


def add_commands(bench: argparse.ArgumentParser) -> None:
    """Add the parsers of all `bench` commands."""
    commands = bench.add_subparsers(dest="bench", required=True, metavar="COMMAND")
    for name, (module_name, meaning) in MODULES.items():
        module = cast(Bench, importlib.import_module(module_name))
        parser = commands.add_parser(name, help=meaning, description=f"{meaning[0].upper()}{meaning[1:]}.")
        module.add_arguments(parser)
        add_output_arguments(parser)
        parser.set_defaults(measure=module.run)
    bench.set_defaults(run=_run, record=None)


def _run(options: argparse.Namespace, began: float) -> record.Record:
    options.measure(options)
    return record.success("bench", seconds=time.monotonic() - began)
