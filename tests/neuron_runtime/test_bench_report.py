"""Output of a benchmark: table, JSON, plot, and the load of the machine during measurements."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from neuron_runtime.bench import command, report
from neuron_runtime.bench.report import Load, Meter, Report, Row, Table, at_least, at_most
from neuron_runtime.commands.command_line import main

QUIET = Load(wall_seconds=2.0, own_cpu_seconds=1.5, foreign_cpu_share=0.03)
TABLE = Table(
    "Speed",
    (
        Row("ratio", (0.5,), target=at_least(0.9), load=QUIET),
        Row("step", (1.25,), "ms", at_most(1.5), "64 rows"),
        Row("kernel", ("fast",)),
    ),
)


def options(**given: Any) -> argparse.Namespace:
    return argparse.Namespace(**{"json": None, "plot": None} | given)


def test_a_table_is_aligned_and_marks_missed_targets() -> None:
    assert TABLE.text().splitlines() == [
        "Speed",
        "-----",
        "               unit  target          foreign CPU  note",
        "ratio   0.500        >= 0.9, missed  3%",
        "step     1.25  ms    <= 1.5, met                  64 rows",
        "kernel   fast",
    ]


def test_empty_columns_are_omitted_and_missing_values_are_dashes() -> None:
    table = Table("T", (Row("gap", (12.34, None), "ms"), Row("rows", (4, 123456.7))), columns=("ours", "other"))
    assert table.text().splitlines() == [
        "T",
        "-",
        "      ours   other  unit",
        "gap   12.3       -  ms",
        "rows     4  123457",
    ]
    with pytest.raises(ValueError, match="gap has 1 values for 2"):
        Table("T", (Row("gap", (1.0,)),), columns=("ours", "other"))


def test_a_target_is_met_at_its_bound() -> None:
    assert at_least(0.9).met_by(0.9)
    assert not at_least(0.9).met_by(0.89)
    assert at_most(2).met_by(2)
    assert not at_most(2).met_by(2.1)
    assert Row("no figure", (None,), target=at_least(1)).met is None


def test_the_json_report_contains_figures_versions_machine_and_load(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "out.json"
    report.deliver(Report("bench x", {"rate": 2.0}, (TABLE,), {"curve": [1, 2]}), options(json=path))
    written = json.loads(path.read_text())
    assert set(written) == {"version", "command", "options", "versions", "machine", "tables", "data"}
    assert (written["command"], written["options"], written["data"]) == ("bench x", {"rate": 2.0}, {"curve": [1, 2]})
    assert {"python", "neuron-serving", "msgspec"} <= set(written["versions"])
    assert written["machine"]["num_cpus"] >= 1
    assert written["machine"]["memory_bytes"] > 2**20
    ratio, step, _ = written["tables"][0]["rows"]
    assert (ratio["values"], ratio["target"], ratio["met"]) == ({"value": 0.5}, ">= 0.9", False)
    assert ratio["load"] == {"wall_seconds": 2.0, "own_cpu_seconds": 1.5, "foreign_cpu_share": 0.03}
    assert (step["note"], step["load"]) == ("64 rows", None)
    assert capsys.readouterr().out == TABLE.text() + "\n"


@pytest.mark.parametrize("suffix", [".png", ".svg", ".pdf"])
def test_a_plot_uses_the_format_of_its_file_name_and_has_a_grid(suffix: str, tmp_path: Path) -> None:
    panels = []

    def draw(figure: Any) -> None:
        panels.append(figure.subplots())
        panels[0].plot([1, 2, 3])

    path = tmp_path / f"plot{suffix}"
    report.check_outputs(options(plot=path))
    report.deliver(Report("bench x", {}, (TABLE,), draw=draw), options(plot=path))
    begins = {".png": b"\x89PNG", ".svg": b"<?xml", ".pdf": b"%PDF"}[suffix]
    assert path.read_bytes().startswith(begins)
    assert all(line.get_visible() for line in (*panels[0].get_xgridlines(), *panels[0].get_ygridlines()))


# The command


@pytest.fixture
def measures(monkeypatch: pytest.MonkeyPatch) -> list[argparse.Namespace]:
    """Adds a benchmark `dummy` to the commands; returns the options of each run."""
    seen: list[argparse.Namespace] = []

    def run(options: argparse.Namespace) -> None:
        report.check_outputs(options)
        seen.append(options)
        report.deliver(Report("bench dummy", {}, (TABLE,)), options)

    module = ModuleType("dummy_bench")
    vars(module).update(add_arguments=lambda parser: parser.add_argument("--size", type=int), run=run)
    monkeypatch.setitem(sys.modules, "dummy_bench", module)
    monkeypatch.setitem(command.MODULES, "dummy", ("dummy_bench", "measure nothing"))
    return seen


def test_a_benchmark_runs_as_a_command(measures: list[argparse.Namespace], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "dummy", "--size", "3"]) == 0
    assert measures[0].size == 3
    assert capsys.readouterr() == (TABLE.text() + "\n", "")


@pytest.mark.parametrize(
    ("flag", "name", "says"),
    [
        ("--json", "gone/x.json", "does not exist"),
        ("--plot", "gone/x.png", "does not exist"),
        ("--plot", "x.gif", "x.gif must end in .png, .svg or .pdf"),
        ("--json", "", "cannot write"),
    ],
)
@pytest.mark.usefixtures("measures")
def test_an_impossible_output_is_refused_in_one_line(
    flag: str, name: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "dummy", flag, str(tmp_path / name)]) == 2
    stderr = capsys.readouterr().err
    assert f"{flag}: " in stderr
    assert says in stderr
    assert stderr.count("\n") == 1


def test_a_plot_without_matplotlib_names_the_package_to_install(
    measures: list[argparse.Namespace], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(report, "find_spec", lambda name: None)
    assert main(["bench", "dummy", "--plot", "x.png"]) == 2
    stderr = capsys.readouterr().err
    assert "pip install matplotlib" in stderr
    assert stderr.count("\n") == 1
    assert not measures


def test_parsing_the_commands_imports_nothing_heavy() -> None:
    code = (
        "import sys; from neuron_runtime.commands.command_line import build_parser; build_parser(); "
        "sys.exit(bool({'torch', 'matplotlib', 'numpy', 'zmq', 'asyncio', 'starlette'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# The load


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
