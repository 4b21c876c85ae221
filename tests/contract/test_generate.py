"""`make generate` writes files and marked parts of pages; `make lint` fails if the committed text differs."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "generate.py"
PAGE = "before\n\n<!-- generated: fields -->\nold\n<!-- end -->\n\n<!-- generated: flags -->\n<!-- end -->\nafter\n"


@pytest.fixture
def generate(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    monkeypatch.setitem(sys.modules, "generate", module)
    spec.loader.exec_module(module)
    return module


def test_generation_replaces_the_marked_parts_of_a_page(generate: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "page.md").write_text(PAGE)
    targets = (
        generate.Target("page.md", lambda: "| field |\n", part="fields"),
        generate.Target("page.md", lambda: "| flag |", part="flags"),
        generate.Target("whole.yaml", lambda: "a: 1\n"),
    )
    assert generate.main([], tmp_path, targets) == 0
    assert (tmp_path / "whole.yaml").read_text() == "a: 1\n"
    assert (tmp_path / "page.md").read_text() == (
        "before\n\n<!-- generated: fields -->\n| field |\n<!-- end -->\n\n"
        "<!-- generated: flags -->\n| flag |\n<!-- end -->\nafter\n"
    )
    assert generate.main(["--check"], tmp_path, targets) == 0


def test_check_names_the_outdated_file_and_writes_nothing(
    generate: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "page.md").write_text(PAGE)
    targets = (generate.Target("page.md", lambda: "new", part="fields"),)
    assert generate.main(["--check"], tmp_path, targets) == 1
    assert capsys.readouterr().err == 'page.md is out of date: run "make generate"\n'
    assert (tmp_path / "page.md").read_text() == PAGE


@pytest.mark.parametrize("page", ["no marker\n", "<!-- generated: fields -->\nno end\n"])
def test_a_page_without_the_marker_is_an_error(generate: ModuleType, tmp_path: Path, page: str) -> None:
    (tmp_path / "page.md").write_text(page)
    with pytest.raises(ValueError, match=r"page\.md: missing <!-- generated: fields -->"):
        generate.main([], tmp_path, (generate.Target("page.md", lambda: "new", part="fields"),))
