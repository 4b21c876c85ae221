"""Checks of Dockerfile.neuron without a build; `tests/cluster/test_images.py` builds it."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet

from cluster.rig.images import ROOT, context_files

DOCKERFILE = ROOT / "Dockerfile.neuron"
HADOLINT = Path(sys.executable).with_name("hadolint")


def lines() -> list[str]:
    return DOCKERFILE.read_text().splitlines()


def hadolint(path: Path) -> str:
    return subprocess.run([HADOLINT, path], capture_output=True, text=True, check=False).stdout


def test_hadolint_passes() -> None:
    assert hadolint(DOCKERFILE) == ""


def test_hadolint_reports_an_unpinned_package(tmp_path: Path) -> None:
    bad = tmp_path / "Dockerfile"
    bad.write_text(DOCKERFILE.read_text().replace("uv==", "uv #"))
    assert "DL3013" in hadolint(bad)


def test_the_default_image_version_is_the_project_version() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert {line for line in lines() if line.startswith("ARG VERSION")} == {f"ARG VERSION={project['version']}"}


def test_the_dockerfile_needs_no_external_frontend() -> None:
    assert not [line for line in lines() if line.lower().startswith("# syntax")]


TARGETS = ("operator", "runtime-cpu", "runtime-cpu-compile", "runtime-neuron", "runtime-optimum")


@pytest.mark.parametrize("target", TARGETS)
def test_every_target_runs_as_an_unprivileged_user_and_has_labels(target: str) -> None:
    text = DOCKERFILE.read_text().partition(f" AS {target}\n")[2].partition("\nFROM ")[0]
    assert [line for line in text.splitlines() if line.startswith("USER")][-1] == "USER 65532:65532"
    for label in ("title", "description", "licenses", "version", "revision"):
        assert f"org.opencontainers.image.{label}=" in text


def test_the_image_that_compiles_is_the_runtime_image_with_a_compiler() -> None:
    """So its libraries are those that serve, and the artifacts' keys are equal."""
    stages = {part.split("\n")[0]: part for part in DOCKERFILE.read_text().split("\nFROM ")}
    assert "--no-install-recommends g++ " in stages["base AS compiler"]
    lines = {name: part.splitlines() for name, part in stages.items()}
    copied = {line.split()[-1] for line in lines["base AS runtime-cpu"] if line.startswith("COPY")}
    ours = [line for line in lines["compiler AS runtime-cpu-compile"] if line.startswith("COPY")]
    assert ours == [
        f"COPY --link --from=runtime-cpu {path} {path}"
        for path in ("/opt/venv", "/models/demo", "/models/embedding", "/opt/neuron-serving")
    ]
    assert copied == {line.split()[-1] for line in ours}


def test_what_optimum_neuron_wants_is_in_the_versions_of_neuron_images() -> None:
    """By the metadata of the commit that the image has; its Neuron packages come with the base image."""
    pinned = dict(re.findall(r"^([\w.-]+)==(.+)$", (ROOT / "constraints-neuron.txt").read_text(), re.MULTILINE))
    wanted = {
        "transformers": ">=4.57.1,<4.58",
        "huggingface-hub": ">=0.35.3",
        "torch": "==2.9.1",
        "numpy": ">=1.22.2,<=2.4.6",
        "protobuf": ">=3.20.3",
    }
    assert not [name for name, versions in wanted.items() if pinned[name] not in SpecifierSet(versions)]


def test_the_build_context_contains_only_what_the_images_need() -> None:
    names = {str(path.relative_to(ROOT)) for path in context_files(ROOT)}
    files = ("model.safetensors", "pirate/adapter_model.safetensors", "draft/model.safetensors")
    model = {f"examples/demo-model/{name}" for name in files}
    encoder = {f"examples/embedding-model/{name}" for name in ("model.safetensors", "1_Pooling/config.json")}
    assert {"pyproject.toml", "constraints.txt", *model, *encoder} <= names
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


def test_an_unsupported_dockerignore_is_refused(tmp_path: Path) -> None:
    (tmp_path / ".dockerignore").write_text("*.pyc\n")
    with pytest.raises(ValueError, match=r"expected `\*`"):
        list(context_files(tmp_path))
