"""Figures of the benchmarks: bounds, tables, and the load of the machine during measurements."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from bench import report
from bench.report import Load, Meter, Row, Table, at_least, at_most

pytestmark = pytest.mark.long

QUIET = Load(wall_seconds=2.0, own_cpu_seconds=1.5, foreign_cpu_share=0.03)
TABLE = Table(
    "Speed",
    (
        Row("ratio", (0.5,), target=at_least(0.9), load=QUIET),
        Row("step", (1.25,), "ms", at_most(1.5), "64 rows"),
        Row("kernel", ("fast",)),
    ),
)


def test_a_table_is_aligned_and_marks_missed_targets() -> None:
    assert TABLE.text().splitlines() == [
        "Speed",
        "-----",
        "               unit  target          foreign CPU  note",
        "ratio   0.500        >= 0.9, missed  3%",
        "step     1.25  ms    <= 1.5, met                  64 rows",
        "kernel   fast",
    ]
    with pytest.raises(ValueError, match="gap has 1 values for 2"):
        Table("T", (Row("gap", (1.0,)),), columns=("ours", "other"))


def test_the_plain_values_of_a_table_contain_targets_and_load() -> None:
    ratio, step, _ = TABLE.plain()["rows"]
    assert (ratio["values"], ratio["target"], ratio["met"]) == ({"value": 0.5}, ">= 0.9", False)
    assert ratio["load"] == {"wall_seconds": 2.0, "own_cpu_seconds": 1.5, "foreign_cpu_share": 0.03}
    assert (step["note"], step["load"]) == ("64 rows", None)


def test_a_target_is_met_at_its_bound() -> None:
    assert at_least(0.9).met_by(0.9)
    assert not at_least(0.9).met_by(0.89)
    assert at_most(2).met_by(2)
    assert not at_most(2).met_by(2.1)
    assert Row("no figure", (None,), target=at_least(1)).met is None


def write_proc(folder: Path, *, busy: int, own: int, child: int, foreign: int) -> Path:
    """A /proc of two CPUs, in hundredths of a second, with this process, its child, and a foreign process."""
    pid = os.getpid()
    folder.mkdir(exist_ok=True)
    (folder / "self").mkdir(exist_ok=True)
    (folder / "stat").write_text(f"cpu {busy} 0 0 900 50 0 0 7 0 0\ncpu0 0 0\ncpu1 0 0\nintr 5\n")
    for number, parent, spent in ((pid, 1, own), (pid + 1, pid, child), (1, 0, foreign)):
        (folder / str(number)).mkdir(exist_ok=True)
        behind = " ".join(["S", str(parent), *["0"] * 9, str(spent), "0", "0", "0", *["0"] * 20])
        (folder / str(number) / "stat").write_text(f"{number} (a ) b) {behind}\n")
    return folder


def test_foreign_cpu_is_machine_cpu_minus_own_and_child_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([100.0, 110.0])
    monkeypatch.setattr(report, "time", SimpleNamespace(monotonic=lambda: next(clock)))  # only this module's clock
    meter = Meter(write_proc(tmp_path / "proc", busy=1000, own=10, child=20, foreign=970))
    write_proc(tmp_path / "proc", busy=2000, own=310, child=220, foreign=1470)
    load = meter.read()
    # Of 20 seconds of CPU (two for ten seconds) 10 were busy: 5 ours, 5 foreign.
    assert load.wall_seconds == 10.0
    assert load.own_cpu_seconds == pytest.approx(5.0)
    assert load.foreign_cpu_share == pytest.approx(0.25)


@pytest.mark.parametrize(
    ("flags", "best"), [("fpu avx2 avx512f avx512_bf16", "avx512_bf16"), ("fpu avx2", "avx2"), ("fpu", None)]
)
def test_the_processor_is_named_with_its_best_matrix_instructions(flags: str, best: str | None, tmp_path: Path) -> None:
    (facts := tmp_path / "cpuinfo").write_text(f"model name\t: AMD EPYC\nflags\t\t: {flags}\n")
    found = report.machine(facts)
    assert (found["cpu"], found["matrix_instructions"]) == ("AMD EPYC", best)


def test_without_proc_the_load_is_unknown(tmp_path: Path) -> None:
    load = Meter(tmp_path / "none").read()
    assert load.foreign_cpu_share is None
    assert load.own_cpu_seconds >= 0
    assert "unknown" in Table("T", (Row("r", (1.0,), load=load),)).text()


def test_cpu_time_of_a_child_is_not_foreign() -> None:
    meter = Meter()
    subprocess.run([sys.executable, "-c", "sum(i * i for i in range(3_000_000))"], check=True)
    assert meter.read().own_cpu_seconds >= 0.03


def test_loads_are_weighted_by_duration_and_one_unknown_makes_the_sum_unknown() -> None:
    long = Load(wall_seconds=6.0, own_cpu_seconds=3.0, foreign_cpu_share=0.07)
    together = Load.together([QUIET, long])
    assert (together.wall_seconds, together.own_cpu_seconds) == (8.0, 4.5)
    assert together.foreign_cpu_share == pytest.approx(0.06)
    assert Load.together([QUIET, Load(1.0, 1.0, None)]).foreign_cpu_share is None
