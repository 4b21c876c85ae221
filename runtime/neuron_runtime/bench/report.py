"""Reports of benchmarks: tables for the terminal, JSON, and plots.

Called by the modules of `bench`. Tables are frozen data. A timed figure includes the load of the machine during the
measurement, so that a reader can tell a slow program from a busy machine.
"""

from __future__ import annotations

import argparse
import math
import os
import platform
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from neuron_runtime.errors import InvalidConfig

if TYPE_CHECKING:
    from matplotlib.figure import Figure

REPORT_VERSION = 1

VERSIONS_OF = ("neuron-serving", "torch", "transformers", "uvicorn", "uvloop", "pyzmq", "msgspec")
"""Packages whose versions affect results."""

PLOT_DPI = 150


@dataclass(frozen=True, slots=True)
class Target:
    """The bound that a figure must meet."""

    sign: Literal[">=", "<="]
    bound: float

    def met_by(self, value: float) -> bool:
        return value >= self.bound if self.sign == ">=" else value <= self.bound


def at_least(bound: float) -> Target:
    return Target(">=", bound)


def at_most(bound: float) -> Target:
    return Target("<=", bound)


@dataclass(frozen=True, slots=True)
class Load:
    """Load of the machine during a measurement."""

    wall_seconds: float
    own_cpu_seconds: float
    """CPU time of this process and all its descendants."""
    foreign_cpu_share: float | None
    """CPU time of all other processes, as a share of all CPUs of the machine, 0 to 1; None if unknown."""

    @classmethod
    def together(cls, loads: Sequence[Load]) -> Load:
        """The sum of several measurements."""
        wall = sum(load.wall_seconds for load in loads)
        known = [load.foreign_cpu_share * load.wall_seconds for load in loads if load.foreign_cpu_share is not None]
        share = sum(known) / wall if len(known) == len(loads) and wall > 0 else None
        return cls(wall, sum(load.own_cpu_seconds for load in loads), share)


def percentile(values: Sequence[float], share: float) -> float | None:
    """The smallest value that at most `1 - share` (0 to 1) of the values exceed; None without values."""
    return sorted(values)[max(math.ceil(share * len(values)), 1) - 1] if values else None


@dataclass(frozen=True, slots=True)
class Row:
    """One figure, with a value for each column of its table, or None."""

    name: str
    values: tuple[float | str | None, ...]
    unit: str = ""
    target: Target | None = None
    """For the value in the first column."""
    note: str = ""
    load: Load | None = None

    @property
    def met(self) -> bool | None:
        """Whether the first value meets the target; None without target or value."""
        first = self.values[0]
        return None if self.target is None or not isinstance(first, int | float) else self.target.met_by(first)


@dataclass(frozen=True, slots=True)
class Table:
    """Related figures. `columns` name the values of each row.

    Raises:
        ValueError: a row does not have one value per column.
    """

    title: str
    rows: tuple[Row, ...]
    columns: tuple[str, ...] = ("value",)

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(row.values) != len(self.columns):
                raise ValueError(f"{self.title}: {row.name} has {len(row.values)} values for {len(self.columns)}")

    def text(self) -> str:
        """Aligned columns; omits unit, target, foreign CPU and note if no row has one."""
        head = ["", *(self.columns if len(self.columns) > 1 else [""]), "unit", "target", "foreign CPU", "note"]
        lines = [head, *(cells(row) for row in self.rows)]
        # Empty columns are omitted.
        used = [at for at in range(len(head)) if at <= len(self.columns) or any(line[at] for line in lines[1:])]
        widths = [max(len(line[at]) for line in lines) for at in used]
        numbers = range(1, 1 + len(self.columns))
        printed = (
            "  ".join(
                line[at].rjust(width) if at in numbers else line[at].ljust(width)
                for at, width in zip(used, widths, strict=True)
            ).rstrip()
            for line in lines
        )
        return "\n".join([self.title, "-" * len(self.title), *(line for line in printed if line)])


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
        "tables": [_plain(table) for table in report.tables],
        "data": dict(report.data),
    }


def versions() -> dict[str, str]:
    """Versions of Python and of the installed packages in `VERSIONS_OF`."""
    found = {"python": platform.python_version()}
    for name in VERSIONS_OF:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


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


def machine_line() -> str:
    """The machine in one line, for the title of a table."""
    facts = machine()
    return f"{facts['num_cpus']} CPUs ({facts['cpu']}), {facts['memory_bytes'] / 2**30:.0f} GiB"


class Meter:
    """Measures the load since it was created."""

    def __init__(self, proc: Path = Path("/proc")) -> None:
        self._proc = proc
        self._began = time.monotonic()
        self._own = _tree_seconds(proc)
        self._busy = _busy_seconds(proc)

    def read(self) -> Load:
        wall = time.monotonic() - self._began
        own = max(_tree_seconds(self._proc) - self._own, 0.0)
        share = None
        now = _busy_seconds(self._proc)
        if now is not None and self._busy is not None and wall > 0:
            (busy, num_cpus), (before, _) = now, self._busy
            # The kernel counts in hundredths of a second, so short measurements may be slightly negative.
            share = min(max((busy - before - own) / (wall * num_cpus), 0.0), 1.0)
        return Load(wall, own, share)


def _busy_seconds(proc: Path) -> tuple[float, int] | None:
    """Busy CPU time of the whole machine, and the number of its CPUs; None without /proc/stat."""
    try:
        lines = (proc / "stat").read_text().splitlines()
    except OSError:
        return None
    user, nice, system, _idle, _iowait, irq, softirq, *_ = map(int, lines[0].split()[1:])
    num_cpus = sum(line.startswith("cpu") for line in lines) - 1
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK"), num_cpus


def _tree_seconds(proc: Path) -> float:
    """CPU time of this process and its descendants, including those that exited and were waited for."""
    if not (proc / "self").exists():
        times = os.times()
        return times.user + times.system + times.children_user + times.children_system
    spent: dict[int, float] = {}
    children: dict[int, list[int]] = {}
    for folder in proc.iterdir():
        if not folder.name.isdecimal():
            continue
        try:
            # The name, in parentheses, may contain any character.
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it has exited
        pid = int(folder.name)
        spent[pid] = sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
        children.setdefault(int(fields[1]), []).append(pid)
    tree, seconds = [os.getpid()], 0.0
    while tree:
        pid = tree.pop()
        seconds += spent.get(pid, 0.0)
        tree += children.get(pid, [])
    return seconds


def cells(row: Row) -> list[str]:
    """Name, values, unit, target, foreign CPU and note of a row, formatted."""
    target = "" if row.target is None else f"{row.target.sign} {row.target.bound:g}"
    if row.met is not None:
        target += ", met" if row.met else ", missed"
    share = row.load.foreign_cpu_share if row.load else None
    foreign = "" if row.load is None else "unknown" if share is None else f"{share:.0%}"
    return [row.name, *map(_number, row.values), row.unit, target, foreign, row.note]


def _number(value: float | str | None) -> str:
    """Three significant digits, never an exponent."""
    if value is None:
        return "-"
    if isinstance(value, str | int):
        return str(value)
    if value == 0:
        return "0"
    digits = next((digits for bound, digits in ((100, 0), (10, 1), (1, 2), (0.1, 3)) if abs(value) >= bound), 4)
    return f"{value:.{digits}f}"


def _plain(table: Table) -> dict[str, Any]:
    return {
        "title": table.title,
        "rows": [
            {
                "name": row.name,
                "values": dict(zip(table.columns, row.values, strict=True)),
                "unit": row.unit,
                "target": None if row.target is None else f"{row.target.sign} {row.target.bound}",
                "met": row.met,
                "note": row.note,
                "load": None if row.load is None else msgspec.to_builtins(row.load),
            }
            for row in table.rows
        ],
    }


@contextmanager
def _writing(flag: str, path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise InvalidConfig(flag, f"cannot write {path}: {error.strerror}") from error
