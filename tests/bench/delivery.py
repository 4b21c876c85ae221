"""Reports of the benchmarks: tables for the terminal, JSON and plots, with the versions and the machine that matter.

Called by the modules of `bench`, each of which measures one thing.
"""

from __future__ import annotations

import argparse
import platform
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from bench.report import Table, machine
from neuron_runtime.errors import InvalidConfig

if TYPE_CHECKING:
    from matplotlib.figure import Figure

REPORT_VERSION = 1

VERSIONS_OF = ("neuron-serving", "torch", "transformers", "uvicorn", "uvloop", "pyzmq", "msgspec")
"""Packages whose versions affect results."""

PLOT_DPI = 150

Draw = Callable[["Figure"], None]


@dataclass(frozen=True, slots=True)
class Report:
    """The results of one benchmark run."""

    command: str
    options: Mapping[str, Any]
    """Options of the run, including defaults; plain values."""
    tables: tuple[Table, ...]
    data: Mapping[str, Any] = field(default_factory=dict)
    """More data for the JSON, such as curves and samples; plain values."""
    draw: Draw | None = None
    """Draws into an empty figure, with a title, without grids; None: no plot."""
    size_inches: tuple[float, float] = (11.0, 7.0)


def add_output_arguments(parser: argparse.ArgumentParser) -> None:
    outputs = parser.add_argument_group("outputs in addition to the table")
    outputs.add_argument("--json", type=Path, metavar="FILE", help="write figures, versions and machine as JSON")
    outputs.add_argument("--plot", type=Path, metavar="FILE", help="draw a plot: .png, .svg or .pdf")


def check_outputs(options: argparse.Namespace) -> None:
    """Check `--json` and `--plot` before a long run. Raises InvalidConfig."""
    for flag, path in (("--json", options.json), ("--plot", options.plot)):
        if path is not None and not path.absolute().parent.is_dir():
            raise InvalidConfig(flag, f"folder {path.parent} does not exist: create it first")
    if options.plot is None:
        return
    if options.plot.suffix not in (".png", ".svg", ".pdf"):
        raise InvalidConfig("--plot", f"{options.plot.name} must end in .png, .svg or .pdf")
    if find_spec("matplotlib") is None:
        raise InvalidConfig("--plot", "plots need matplotlib: pip install matplotlib")


def deliver(report: Report, options: argparse.Namespace) -> None:
    """Print the tables and write the files of `--json` and `--plot`. Raises InvalidConfig with the flag."""
    print("\n\n".join(table.text() for table in report.tables))
    if options.json is not None:
        with _writing("--json", options.json):
            options.json.write_bytes(msgspec.json.format(msgspec.json.encode(document(report)), indent=2) + b"\n")
    if options.plot is not None and report.draw is not None:
        from matplotlib.figure import Figure

        figure = Figure(figsize=report.size_inches, layout="constrained")
        report.draw(figure)
        for axes in figure.axes:
            axes.grid(alpha=0.3)
            axes.set_axisbelow(True)
        with _writing("--plot", options.plot):
            figure.savefig(options.plot, dpi=PLOT_DPI)


def document(report: Report) -> dict[str, Any]:
    """The report as plain values, for JSON."""
    return {
        "version": REPORT_VERSION,
        "command": report.command,
        "options": dict(report.options),
        "versions": versions(),
        "machine": machine(),
        "tables": [table.plain() for table in report.tables],
        "data": dict(report.data),
    }


def versions() -> dict[str, str]:
    """Versions of Python and of the installed packages in `VERSIONS_OF`."""
    by_name = {"python": platform.python_version()}
    for name in VERSIONS_OF:
        try:
            by_name[name] = version(name)
        except PackageNotFoundError:
            continue
    return by_name


@contextmanager
def _writing(flag: str, path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise InvalidConfig(flag, f"cannot write {path}: {error.strerror}") from error
