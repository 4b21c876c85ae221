"""What can be said of Dockerfile.neuron without building it; `tests/cluster/test_images.py` builds it."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from cluster.rig.images import ROOT, context_files

DOCKERFILE = ROOT / "Dockerfile.neuron"
HADOLINT = Path(sys.executable).with_name("hadolint")


def lines() -> list[str]:
    return DOCKERFILE.read_text().splitlines()


def hadolint(path: Path) -> str:
    return subprocess.run([HADOLINT, path], capture_output=True, text=True, check=False).stdout


def test_hadolint_has_nothing_to_say() -> None:
    assert hadolint(DOCKERFILE) == ""


def test_hadolint_does_say_something_about_an_unpinned_package(tmp_path: Path) -> None:
    bad = tmp_path / "Dockerfile"
    bad.write_text(DOCKERFILE.read_text().replace("uv==", "uv #"))
    assert "DL3013" in hadolint(bad)


def test_the_default_version_of_the_images_is_the_projects() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert {line for line in lines() if line.startswith("ARG VERSION")} == {f"ARG VERSION={project['version']}"}


def test_the_file_builds_without_pulling_a_frontend() -> None:
    assert not [line for line in lines() if line.lower().startswith("# syntax")]


@pytest.mark.parametrize("target", ["operator", "runtime-cpu", "runtime-neuron"])
def test_every_target_ends_as_an_unprivileged_user_and_is_labelled(target: str) -> None:
    text = DOCKERFILE.read_text().partition(f" AS {target}\n")[2].partition("\nFROM ")[0]
    assert [line for line in text.splitlines() if line.startswith("USER")][-1] == "USER 65532:65532"
    for label in ("title", "description", "licenses", "version", "revision"):
        assert f"org.opencontainers.image.{label}=" in text


def test_only_what_an_image_is_made_of_reaches_the_build() -> None:
    names = {str(path.relative_to(ROOT)) for path in context_files(ROOT)}
    assert {"pyproject.toml", "constraints.txt", "examples/demo-model/model.safetensors"} <= names
    assert {name.split("/")[0] for name in names} == {
        "LICENSE",
        "README.md",
        "constraints.txt",
        "examples",
        "operator",
        "pyproject.toml",
        "runtime",
    }
    assert not [name for name in names if "__pycache__" in name or "corpus" in name or name.endswith("train.py")]


def test_a_context_that_is_not_understood_is_refused(tmp_path: Path) -> None:
    (tmp_path / ".dockerignore").write_text("*.pyc\n")
    with pytest.raises(ValueError, match=r"expected `\*`"):
        list(context_files(tmp_path))
