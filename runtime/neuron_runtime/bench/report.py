"""The report of a run: tables for the terminal, JSON, and plots.

Called by `bench simulate`. Tables are frozen data. It measures nothing.
"""

from __future__ import annotations

import argparse
import math
import os
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from neuron_runtime.errors import InvalidConfig

if TYPE_CHECKING:
    from matplotlib.figure import Figure

REPORT_VERSION = 1

VERSIONS_OF = ("neuron-serving", "torch", "transformers", "uvicorn", "uvloop", "pyzmq", "msgspec")
"""Packages whose versions affect results."""

PLOT_DPI = 150


def percentile(values: Sequence[float], share: float) -> float | None:
    """The smallest value that at most `1 - share` (0 to 1) of the values exceed; None without values."""
    return sorted(values)[max(math.ceil(share * len(values)), 1) - 1] if values else None


@dataclass(frozen=True, slots=True)
class Line:
    """One figure, with a value for each column of its table, or None."""

    name: str
    values: tuple[float | str | None, ...]
    unit: str = ""
    note: str = ""


class Printed(Protocol):
    """What a report prints and writes."""

    def text(self) -> str:
        """For the terminal."""

    def plain(self) -> dict[str, Any]:
        """Plain values, for JSON."""


@dataclass(frozen=True, slots=True)
class Table:
    """Related figures. `columns` name the values of each row."""

    title: str
    rows: tuple[Line, ...]
    columns: tuple[str, ...]

    def text(self) -> str:
        """Aligned columns; omits unit and note if no row has one."""
        head = ["", *self.columns, "unit", "note"]
        lines = [[row.name, *map(shown, row.values), row.unit, row.note] for row in self.rows]
        return aligned(self.title, head, lines, len(self.columns))

    def plain(self) -> dict[str, Any]:
        rows = [
            {
                "name": row.name,
                "values": dict(zip(self.columns, row.values, strict=True)),
                "unit": row.unit,
                "note": row.note,
            }
            for row in self.rows
        ]
        return {"title": self.title, "rows": rows}


def aligned(title: str, head: Sequence[str], lines: Sequence[Sequence[str]], num_values: int) -> str:
    """A table as text: a column of names, `num_values` columns of numbers, and others, which are omitted if empty."""
    used = [at for at in range(len(head)) if at <= num_values or any(line[at] for line in lines)]
    widths = [max(len(line[at]) for line in (head, *lines)) for at in used]
    numbers = range(1, 1 + num_values)
    printed = (
        "  ".join(
            line[at].rjust(width) if at in numbers else line[at].ljust(width)
            for at, width in zip(used, widths, strict=True)
        ).rstrip()
        for line in (head, *lines)
    )
    return "\n".join([title, "-" * len(title), *(line for line in printed if line)])


Draw = Callable[["Figure"], None]


@dataclass(frozen=True, slots=True)
class Report:
    """The results of one benchmark run."""

    command: str
    options: Mapping[str, Any]
    """Options of the run, including defaults; plain values."""
    tables: tuple[Printed, ...]
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
        from matplotlib.figure import Figure  # noqa: PLC0415 - heavy, and an extra

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


def machine() -> dict[str, Any]:
    """CPUs that this process may use and all CPUs of the machine, CPU model, memory."""
    facts = Path("/proc/cpuinfo")
    lines = facts.read_text().splitlines() if facts.exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    pages, page_bytes = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    return {
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": models[0] if models else platform.processor(),
        "num_cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "num_cpus_of_machine": os.cpu_count(),
        "memory_bytes": pages * page_bytes,
    }


def shown(value: float | str | None) -> str:
    """Three significant digits, never an exponent."""
    if value is None:
        return "-"
    if isinstance(value, str | int):
        return str(value)
    if value == 0:
        return "0"
    digits = next((digits for bound, digits in ((100, 0), (10, 1), (1, 2), (0.1, 3)) if abs(value) >= bound), 4)
    return f"{value:.{digits}f}"


@contextmanager
def _writing(flag: str, path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise InvalidConfig(flag, f"cannot write {path}: {error.strerror}") from error
