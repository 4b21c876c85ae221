"""Output of `bench simulate`: tables, JSON and plot."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from neuron_runtime.bench import plot
from neuron_runtime.bench.report import Line, Table
from neuron_runtime.commands.command_line import main

TABLE = Table("Speed", (Line("gap", (12.34, None), "ms", "64 rows"), Line("rows", (4, 123456.7))), ("ours", "other"))
SHORT = ("bench", "simulate", "--seconds", "1", "--rate", "20", "--warm-up-seconds", "0")


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
    monkeypatch.setattr(plot, "find_spec", lambda name: None)
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
