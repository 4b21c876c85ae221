"""Output of `bench simulate`: tables, JSON and plot."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from neuron_runtime.bench import report
from neuron_runtime.bench.report import Line, Report, Table
from neuron_runtime.commands.command_line import main

TABLE = Table("Speed", (Line("gap", (12.34, None), "ms", "64 rows"), Line("rows", (4, 123456.7))), ("ours", "other"))
SHORT = ("bench", "simulate", "--seconds", "1", "--rate", "20", "--warm-up-seconds", "0")


def options(**given: Any) -> argparse.Namespace:
    return argparse.Namespace(**{"json": None, "plot": None} | given)


def test_a_table_is_aligned_and_missing_values_are_dashes() -> None:
    assert TABLE.text().splitlines() == [
        "Speed",
        "-----",
        "      ours   other  unit  note",
        "gap   12.3       -  ms    64 rows",
        "rows     4  123457",
    ]


def test_empty_columns_are_omitted() -> None:
    table = Table("T", (Line("device", ("busy",)),), ("ours",))
    assert table.text().splitlines() == ["T", "-", "        ours", "device  busy"]


def test_the_json_report_contains_figures_versions_and_machine(
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
    gap, _ = written["tables"][0]["rows"]
    assert gap == {"name": "gap", "values": {"ours": 12.34, "other": None}, "unit": "ms", "note": "64 rows"}
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


@pytest.mark.parametrize(
    ("flag", "name", "says"),
    [
        ("--json", "gone/x.json", "does not exist"),
        ("--plot", "gone/x.png", "does not exist"),
        ("--plot", "x.gif", "x.gif must end in .png, .svg or .pdf"),
        ("--json", "", "cannot write"),
    ],
)
def test_an_impossible_output_is_refused_in_one_line(
    flag: str, name: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*SHORT, flag, str(tmp_path / name)]) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert f"{flag}: " in last
    assert says in last


def test_a_plot_without_matplotlib_names_the_package_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(report, "find_spec", lambda name: None)
    assert main([*SHORT, "--plot", "x.png"]) == 2
    stderr = capsys.readouterr().err
    assert "pip install matplotlib" in stderr
    assert stderr.count("\n") == 1  # refused before the simulation


def test_parsing_the_commands_imports_nothing_heavy() -> None:
    code = (
        "import sys; from neuron_runtime.commands.command_line import build_parser; build_parser(); "
        "sys.exit(bool({'torch', 'matplotlib', 'numpy', 'zmq', 'asyncio', 'starlette'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
