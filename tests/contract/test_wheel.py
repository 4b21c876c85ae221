"""The content of the wheel: it is built and installed, and its commands run without the repository."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import zipfile
from collections.abc import Callable
from email import message_from_string
from pathlib import Path

import msgspec
import pytest

from helpers.ports import free_ports

ROOT = Path(__file__).parents[2]
MODEL_FILES = ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (built,) = folder.iterdir()
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("installed")
    flags = ("-q", "--no-deps", "--no-index", "--no-compile", "--target", str(folder))
    subprocess.run([sys.executable, "-m", "pip", "install", *flags, str(wheel)], check=True, capture_output=True)
    return folder


Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def run(installed: Path, tmp_path: Path) -> Run:
    """Runs Python outside the repository, with the installed packages before those of the repository."""

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, *arguments],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(installed)},
            capture_output=True,
            text=True,
            check=False,
        )

    return run


def test_the_wheel_is_typed_and_has_complete_metadata(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (path,) = (name for name in names if name.endswith(".dist-info/METADATA"))
        metadata = message_from_string(archive.read(path).decode())
    assert {"neuron_operator/py.typed", "neuron_runtime/py.typed"} <= set(names)
    assert {"Author", "Project-URL", "Keywords", "License-Expression"} <= set(metadata.keys())
    assert "Typing :: Typed" in metadata.get_all("Classifier", [])


def test_the_wheel_contains_the_packages_without_tests_and_training_files(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    folders = {name.split("/")[0] for name in names if ".dist-info" not in name}
    assert folders == {"neuron_operator", "neuron_runtime"}
    assert not [name for name in names if "corpus" in name or "train" in name or "bench/suite" in name]


def test_the_crd_command_prints_the_definition_of_the_repository(run: Run) -> None:
    printed = run("-m", "neuron_operator", "crd")
    files = (ROOT / "crds" / f"{plural}.yaml" for plural in ("neuronmodels", "neuronadapters"))
    assert printed.stdout == "---\n".join(file.read_text() for file in files)
    assert (printed.returncode, printed.stderr) == (0, "")


def test_the_demo_manifest_names_the_model_beside_it(run: Run, installed: Path) -> None:
    program = """
        import json
        from neuron_operator.local.command import DEMO, read_manifest
        print(json.dumps(read_manifest(DEMO)["spec"]["model"]["uri"]))
    """
    uri = msgspec.json.decode(run("-c", "if True:" + program).stdout, type=str)
    folder = installed / "neuron_operator" / "data" / "demo-model"
    assert uri == folder.as_uri()
    for name in MODEL_FILES:
        assert (folder / name).read_bytes() == (ROOT / "examples" / "demo-model" / name).read_bytes()


@pytest.mark.slow
def test_local_demo_serves_and_answers(run: Run, tmp_path: Path) -> None:
    with free_ports() as port:
        flags = ["--port", str(port), "--cache-dir", str(tmp_path / "cache"), "--exit"]
        ended = run("-m", "neuron_operator", "local", "--demo", "--ask", "What is neuron-serving?", *flags)
    assert ended.returncode == 0, ended.stderr
    printed = shape(ended.stdout + ended.stderr)
    assert not [line for line in sample_output() if shape(line) not in printed]


def sample_output() -> list[str]:
    """The lines of `make demo` in the README, an answer that is wrapped there as one."""
    (block,) = re.findall(r"^```console\n\$ make demo\n( .*?)^```", (ROOT / "README.md").read_text(), re.M | re.S)
    start, question, rest = block.partition("  > What is neuron-serving?\n")
    answer, end, last = rest.partition("\n\n")
    lines = [*start.splitlines(), question, answer, *last.splitlines()]
    assert question
    assert end
    return [line for line in lines if line.strip() not in ("", "...")]


def shape(text: str) -> str:
    """Text with one space between words, and without the numbers and hashes that differ between runs."""
    text = re.sub(r"\d{4}-\d\d-\d\dT[\d:]+Z", "TIME", text)
    text = re.sub(r"\bnf-\w+-", "facts-HASH-", text)
    return " ".join(re.sub(r"\b\d+(\.\d+)?\b", "N", text).split())


def test_local_takes_either_a_manifest_or_demo(run: Run) -> None:
    both = run("-m", "neuron_operator", "local", "--demo", "-f", "x.yaml")
    assert both.returncode == 2
    assert "not allowed with argument" in both.stderr
    neither = run("-m", "neuron_operator", "local")
    assert neither.returncode == 2
    assert "one of the arguments -f/--file --demo is required" in neither.stderr
