"""Reports of `make bench`: tables, JSON with versions and machine, and plots."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

from bench import delivery
from bench.delivery import Report
from bench.report import Row, Table
from neuron_runtime.errors import InvalidConfig

TABLE = Table("Speed", (Row("gap", (12.34, None), "ms"),), ("ours", "other"))


def options(**given: Any) -> argparse.Namespace:
    return argparse.Namespace(**{"json": None, "plot": None} | given)


def test_the_json_report_contains_figures_versions_and_machine(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "out.json"
    delivery.deliver(Report("bench x", {"rate": 2.0}, (TABLE,), {"curve": [1, 2]}), options(json=path))
    written = json.loads(path.read_text())
    assert set(written) == {"version", "command", "options", "versions", "machine", "tables", "data"}
    assert (written["command"], written["options"], written["data"]) == ("bench x", {"rate": 2.0}, {"curve": [1, 2]})
    assert {"python", "neuron-serving", "msgspec"} <= set(written["versions"])
    assert written["machine"]["num_cpus"] >= 1
    assert written["machine"]["memory_bytes"] > 2**20
    assert written["tables"][0]["rows"][0]["values"] == {"ours": 12.34, "other": None}
    assert capsys.readouterr().out == TABLE.text() + "\n"


@pytest.mark.parametrize("suffix", [".png", ".svg", ".pdf"])
def test_a_plot_uses_the_format_of_its_file_name_and_has_a_grid(suffix: str, tmp_path: Path) -> None:
    panels = []

    def draw(figure: Any) -> None:
        panels.append(figure.subplots())
        panels[0].plot([1, 2, 3])

    path = tmp_path / f"plot{suffix}"
    delivery.check_outputs(options(plot=path))
    delivery.deliver(Report("bench x", {}, (TABLE,), draw=draw), options(plot=path))
    begins = {".png": b"\x89PNG", ".svg": b"<?xml", ".pdf": b"%PDF"}[suffix]
    assert path.read_bytes().startswith(begins)
    assert all(line.get_visible() for line in (*panels[0].get_xgridlines(), *panels[0].get_ygridlines()))


@pytest.mark.parametrize(("name", "says"), [("gone/x.png", "does not exist"), ("x.gif", "must end in .png")])
def test_an_impossible_plot_is_refused_before_the_measurement(name: str, says: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match=says):
        delivery.check_outputs(options(plot=tmp_path / name))


def test_a_plot_without_matplotlib_names_the_package_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delivery, "find_spec", lambda name: None)
    with pytest.raises(InvalidConfig, match="pip install matplotlib"):
        delivery.check_outputs(options(plot=Path("x.png")))
