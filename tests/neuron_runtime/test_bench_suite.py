"""The table of figures: results of its sections on a small model, and its output."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from bench import loading, suite
from bench.model import SHAPES
from bench.report import Load, Row, Table, at_least
from bench.suite import main
from helpers.torch_models import random_model as small_model
from neuron_runtime.errors import InvalidConfig

pytestmark = pytest.mark.long


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every section measures a model of some megabytes and recreates it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    shape = {"hidden_size": 64, "num_layers": 2, "vocabulary_size": 1000, "max_position_embeddings": 2048}
    monkeypatch.setitem(SHAPES, "139M", shape)
    monkeypatch.setitem(SHAPES, "4M", shape)


def row(name: str, value: float | None, bound: float | None = None, foreign: float | None = 0.0) -> Row:
    return Row(name, (value,), "ratio", None if bound is None else at_least(bound), "why", Load(1.0, 1.0, foreign))


def test_sections_run_in_process_fill_every_declared_row(
    small: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, page = tmp_path / "out", tmp_path / "README.md"
    page.write_text(f"before\n{suite.BEGIN}\nold\n{suite.END}\nafter\n")
    wanted = ["engine", "quantized", "adapters", "drafts", "prefix", "loading"]
    assert main(["--quick", "--only", *wanted, "--folder", str(folder), "--markdown", str(page)]) == 0
    found = json.loads((folder / "figures.json").read_bytes())
    values = {one["name"]: one for table in found["tables"] for one in table["rows"]}
    assert values["decode : bare step, 1 sequences"]["target"] == ">= 0.9"
    assert values["decode : bare step, 8 sequences"]["values"]["value"] > 0
    assert values["rows of 8 adapters : base, 32 rows"]["target"] == "<= 1.25"
    assert values["int8 : bfloat16, step of 1 row"]["target"] == ">= 1.6"
    assert values["int8 in memory : on disk"]["values"]["value"] == pytest.approx(1.0, abs=0.05)
    assert values["no row with an adapter : base, 32 rows"]["values"]["value"] > 0
    assert values["with drafts : without, 1 sequences, edited prompts"]["target"] == ">= 1.8"
    assert values["with drafts : without, 32 sequences, noise"]["values"]["value"] > 0
    assert values["with a draft model : without, 8 sequences, demo model"]["values"]["value"] > 0
    assert values["memory read by all cores"]["values"]["value"] > 0
    assert "912 of 1024 tokens cached" in values["first token sooner by a hit"]["note"]
    assert values["loading : plain read"]["load"]["wall_seconds"] > 0
    assert (folder / "figures.png").read_bytes().startswith(b"\x89PNG")
    text = (folder / "figures.md").read_text()
    assert page.read_text() == f"before\n{suite.BEGIN}\n\n{text}\n{suite.END}\nafter\n"
    assert all(name in capsys.readouterr().out or name in text for name in values)


def test_fetching_is_compared_with_curl_and_the_disk() -> None:
    found = suite.fetching_section(replace(suite.QUICK, fetch_bytes=2 * 10**7))
    stream, disk = found.rows
    if stream.values[0] is None:
        pytest.skip(stream.note)
    assert (stream.name, disk.name) == ("fetch : one curl stream", "fetch : disk write")
    assert all(isinstance(row.values[0], float) and row.values[0] > 0 for row in found.rows)
    assert "CPU per GB" in disk.note


def test_sections_with_a_server_fill_every_declared_row(small: None, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    assert main(["--quick", "--only", "http", "ready", "--folder", str(folder)]) == 0
    found = json.loads((folder / "figures.json").read_bytes())
    values = {one["name"]: one["values"]["value"] for table in found["tables"] for one in table["rows"]}
    assert set(values) == {"HTTP : in process, 8 streams", "ready to serve, random:4M", "ready to serve, random:139M"}
    assert all(value > 0 for value in values.values())
    parts = found["data"]["serve, from the command to /health"]["139M"]["parts"]
    assert {"loading weights", "warming up"} <= set(parts)


def test_the_markdown_contains_every_row_with_its_bound_and_misses() -> None:
    rows = (row("good", 0.95, 0.9), row("bad", 0.5, 0.9), row("free", 3.0), row("none", None, 0.9))
    text = suite.markdown([Table("things", rows)])
    lines = {line.split("|")[1].strip(): line for line in text.splitlines() if line.startswith("|")}
    assert "| >= 0.9 | yes |" in lines["good"]
    assert "| >= 0.9 | **no** |" in lines["bad"]
    assert "| 3.00 ratio |  |  | 0% | why |" in lines["free"]
    assert "| - ratio |" in lines["none"]
    assert "**things**" in text


def test_a_busy_machine_is_reported_once_with_the_affected_figures() -> None:
    tables = [Table("things", (row("quiet", 1.0, foreign=0.04), row("loud", 1.0, foreign=0.3)))]
    (line,) = suite.warnings(tables)
    assert "loud (30%)" in line
    assert "quiet" not in line
    assert suite.warnings([Table("things", (row("unknown", 1.0, foreign=None),))]) == []


@pytest.mark.parametrize("text", ["nothing", f"{suite.BEGIN}", f"{suite.END}"])
def test_a_page_without_markers_is_refused_before_measuring(tmp_path: Path, text: str) -> None:
    page = tmp_path / "page.md"
    page.write_text(text)
    with pytest.raises(InvalidConfig, match="the table goes between them"):
        suite.replaced(page, "")
    assert main(["--markdown", str(page)]) == 2
    assert main(["--markdown", str(tmp_path / "none.md")]) == 2


def test_stages_are_parsed_from_the_output_of_serve() -> None:
    lines = [
        "neuron-runtime: serving file:///m at http://127.0.0.1:1",
        "neuron-runtime: loading weights: 1.5 s",
        "neuron-runtime: loading weights: 40% after 5 s",
        "neuron-runtime: warming up: 0.1 s",
        "neuron-runtime: ready after 2.0 s: http://127.0.0.1:1/v1 serves m (1 tokens, 8 sequences)",
    ]
    assert suite.stages(iter(lines)) == {"loading weights": 1.5, "warming up": 0.1}


def test_a_file_is_evicted_from_the_page_cache_and_cached_when_read(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"x" * 4_000_000)
    left = loading.drop_from_cache([path])  # not on an in-memory file system
    assert (loading.cached_share(path) == 0.0) is left
    assert loading.read_through([path]) == 4_000_000
    assert loading.cached_share(path) == 1.0


def test_loading_is_measured_cold_and_warm(tmp_path: Path) -> None:
    found = loading.measure(small_model(tmp_path / "model"), num_iters=1)
    assert found.num_bytes == (tmp_path / "model" / "model.safetensors").stat().st_size
    assert min(found.read_warm, found.load_warm) > 0
    if found.read_cold and found.load_cold:
        assert found.ratio_cold == pytest.approx(found.load_cold / found.read_cold)
