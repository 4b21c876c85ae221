"""Figures of the benchmarks: their bounds, and the load of the machine while they were measured.

Called by the modules of `bench`. A timed figure includes the load, so that a reader can tell a slow program from a busy
machine. `bench.delivery` prints and writes them.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec

from neuron_runtime.bench.report import aligned, shown


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
        return aligned(self.title, head, [cells(row) for row in self.rows], len(self.columns))

    def plain(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        rows = [
            {
                "name": row.name,
                "values": dict(zip(self.columns, row.values, strict=True)),
                "unit": row.unit,
                "target": None if row.target is None else f"{row.target.sign} {row.target.bound}",
                "met": row.met,
                "note": row.note,
                "load": None if row.load is None else msgspec.to_builtins(row.load),
            }
            for row in self.rows
        ]
        return {"title": self.title, "rows": rows}


MATRIX_FLAGS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16")
"""Instructions that decide how fast a processor multiplies matrices, from the kernel's list, the best one last."""


def machine(facts: Path = Path("/proc/cpuinfo")) -> dict[str, Any]:
    """CPUs that this process may use and all CPUs of the machine, their model and best instructions, memory."""
    lines = facts.read_text().splitlines() if facts.exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    flags = next((line.split() for line in lines if line.startswith("flags")), [])
    pages, page_bytes = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    return {
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": models[0] if models else platform.processor(),
        "matrix_instructions": next((flag for flag in reversed(MATRIX_FLAGS) if flag in flags), None),
        "num_cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "num_cpus_of_machine": os.cpu_count(),
        "memory_bytes": pages * page_bytes,
    }


def machine_line() -> str:
    """The machine in one line, for the title of a table."""
    facts = machine()
    processor = ", ".join(filter(None, (facts["cpu"], facts["matrix_instructions"])))
    return f"{facts['num_cpus']} CPUs ({processor}), {facts['memory_bytes'] / 2**30:.0f} GiB"


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
    return [row.name, *map(shown, row.values), row.unit, target, foreign, row.note]
