"""The images built from Dockerfile.neuron: their content, their user, and what a change rebuilds."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import textwrap
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from cluster.rig.binaries import ensure
from cluster.rig.cache import Cache
from cluster.rig.cgroups import ROOT_GROUP, Group
from cluster.rig.image_base import base_image, read_layout
from cluster.rig.image_builder import BuildFailed, running_builder
from cluster.rig.image_neuron import NEURON_FOLDER
from cluster.rig.image_torch import LOCAL_VERSION, Wheel
from cluster.rig.images import (
    COMPILE_TARGET,
    NEURON_TARGET,
    PYTHON_IMAGE,
    ROOT,
    TARGETS,
    BuildInputs,
    Image,
    build_image,
    context_files,
    describe,
    lint,
    neuron_image,
)
from cluster.rig.machine import wait_until
from cluster.rig.needs import NotPossibleHere, require_machine, search_path
from cluster.rig.node_images import ensure_store, link_store, read_archive

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(1800, func_only=True)]

GROUP = Group(f"{ROOT_GROUP}-test-images")
CONTAINERD = """\
version = 3
root = "{root}"
state = "{folder}/state"
disabled_plugins = ["io.containerd.grpc.v1.cri", "io.containerd.cri.v1.images",
  "io.containerd.cri.v1.runtime", "io.containerd.nri.v1.nri"]
[grpc]
  address = "{folder}/s"
"""
MISSING_PIECES = {
    "neuronx_distributed_inference": (2, "nxdi needs neuronx-distributed-inference, which is not installed"),
    "neuronx_distributed": (2, "nxdi needs neuronx-distributed, which is not installed"),
    "torch_neuronx": (2, "nxdi needs torch-neuronx, which is not installed"),
    "torch_xla": (2, "nxdi needs torch_xla, which is not installed"),
    "neuronxcc": (21, "the Neuron compiler neuronx-cc is not installed"),
}
"""Modules of the Neuron SDK: the exit code without each, and what is said."""
COMPILERS = ("as", "c++", "cc", "clang", "cmake", "g++", "gcc", "go", "ld", "make", "rustc", "uv")


class Containers:
    """A separate containerd that runs images as a kubelet would: read-only, with a writable /tmp."""

    def __init__(self, ctr: list[str]) -> None:
        self._ctr = ctr

    def load(self, image: Image) -> None:
        self._run("images", "import", "--local", str(image.archive))

    def run(self, image: Image, *command: str) -> str:
        tmpfs = "type=tmpfs,src=tmpfs,dst=/tmp,options=mode=1777:size=67108864"
        container = f"test-{uuid.uuid4().hex}"
        options = ("--rm", "--read-only", "--mount", tmpfs, "--cgroup", f"/{GROUP.path}/{container}")
        return self._run("run", *options, image.name, container, *command)

    def python(self, image: Image, program: str) -> object:
        """Runs a program that prints JSON with the image's Python."""
        return json.loads(self.run(image, "python3", "-c", textwrap.dedent(program)))

    def _run(self, *arguments: str) -> str:
        done = subprocess.run([*self._ctr, *arguments], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()


@pytest.fixture(scope="module")
def cache() -> Cache:
    try:
        require_machine()
        ensure("buildkit", "containerd")
    except NotPossibleHere as error:
        pytest.skip(str(error))
    return Cache.default()


@pytest.fixture(scope="module")
def images(cache: Cache) -> dict[str, Image]:
    return {target: build_image(target, cache=cache) for target in TARGETS}


@pytest.fixture(scope="module")
def containers(cache: Cache, images: dict[str, Image]) -> Iterator[Containers]:
    """With what is unpacked for the cluster's nodes: to unpack torch again would take ten seconds."""
    programs = ensure("containerd", cache=cache)["containerd"]
    environment = {**os.environ, "PATH": f"{programs}:{search_path()}"}
    built = [*images.values(), build_image(NEURON_TARGET, cache=cache)]
    root = cache.folder("image-store", "image-tests") / "root"
    with cache.lock("image-tests"), tempfile.TemporaryDirectory(prefix="neuron-serving-images-") as name:
        store = ensure_store(cache, [read_archive(image.archive) for image in built], programs, only=False)
        link_store(store, root)
        folder = Path(name)
        (folder / "config.toml").write_text(CONTAINERD.format(root=root, folder=folder))
        # In its own mount namespace: its mounts are removed however this ends.
        launch = ["setpriv", "--pdeathsig", "TERM", "unshare", "--mount"]
        launch += [str(programs / "containerd"), f"--config={folder}/config.toml"]
        with (
            (folder / "log").open("wb") as log,
            subprocess.Popen(launch, env=environment, stdout=log, stderr=log) as daemon,
        ):
            ctr = ["nsenter", f"--target={daemon.pid}", "--mount", str(programs / "ctr"), f"--address={folder}/s"]
            ctr += ["--namespace", "k8s.io"]

            def answers() -> bool:
                return subprocess.run([*ctr, "version"], capture_output=True, check=False).returncode == 0

            try:
                wait_until("containerd answers", answers)
                yield Containers(ctr)
            finally:
                GROUP.kill()
                daemon.terminate()
                daemon.wait()
                GROUP.remove()
                subprocess.run(["rm", "-rf", str(root)], check=True)  # very many files


@pytest.mark.parametrize("target", TARGETS)
def test_an_image_runs_as_an_unprivileged_user_on_a_read_only_root(
    target: str, images: dict[str, Image], containers: Containers
) -> None:
    seen = containers.python(
        images[target],
        """
        import errno, getpass, json, os, tempfile
        try:
            open("/written", "w")
            refused = 0
        except OSError as error:
            refused = error.errno
        with tempfile.NamedTemporaryFile() as file:
            temporary = os.path.dirname(file.name)
        print(json.dumps([os.getuid(), os.getgid(), getpass.getuser(), os.environ["HOME"], temporary,
                          errno.errorcode[refused]]))
        """,
    )
    assert seen == [65532, 65532, "neuron-serving", "/tmp", "/tmp", "EROFS"]


@pytest.mark.parametrize("target", TARGETS)
def test_an_image_contains_no_compiler_and_no_build_installer(
    target: str, images: dict[str, Image], containers: Containers
) -> None:
    program = f"import json, shutil; print(json.dumps([n for n in {COMPILERS!r} if shutil.which(n)]))"
    assert containers.python(images[target], program) == []


@pytest.mark.parametrize(("target", "command"), [("operator", "neuron-operator"), ("runtime-cpu", "neuron-runtime")])
def test_the_command_of_each_pod_runs_in_its_image(
    target: str, command: str, images: dict[str, Image], containers: Containers
) -> None:
    assert f"usage: {command}" in containers.run(images[target], command, "--help")


def test_the_operator_image_contains_neither_torch_nor_transformers(
    images: dict[str, Image], containers: Containers
) -> None:
    program = """
        import importlib.util, json
        print(json.dumps([n for n in ("torch", "transformers", "kopf", "kubernetes") if importlib.util.find_spec(n)]))
        """
    assert containers.python(images["operator"], program) == ["kopf", "kubernetes"]


def test_the_runtime_image_contains_the_pinned_torch(images: dict[str, Image], containers: Containers) -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = dict(line.split("==") for line in lines if not line.startswith("#"))
    program = """
        import importlib.metadata, json, torch
        halves = torch.full((2, 2), 0.5)
        print(json.dumps([*map(importlib.metadata.version, ("torch", "transformers")), (halves @ halves).tolist()]))
        """
    seen = containers.python(images["runtime-cpu"], program)
    assert seen == [f"{pinned['torch']}+{LOCAL_VERSION}", pinned["transformers"], [[0.5, 0.5], [0.5, 0.5]]]


def test_the_runtime_image_contains_the_demo_model_without_its_training_files(
    images: dict[str, Image], containers: Containers
) -> None:
    program = "import json, os; print(json.dumps(sorted(os.listdir('/models/demo'))))"
    names = containers.python(images["runtime-cpu"], program)
    assert isinstance(names, list)
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= set(names)
    assert not [name for name in names if name.endswith((".py", ".txt", ".md")) or name in ("corpus", "expected.json")]


def test_modules_imported_at_start_have_bytecode(images: dict[str, Image], containers: Containers) -> None:
    program = """
        import asyncio, json, sys, neuron_operator, kopf
        sources = [m.__cached__ for m in list(sys.modules.values()) if getattr(m, "__cached__", None)]
        print(json.dumps([path for path in sources if not __import__("os").path.exists(path)]))
        """
    assert containers.python(images["operator"], program) == []


def test_an_edited_source_file_rebuilds_only_the_package_layer(cache: Cache, tmp_path: Path) -> None:
    for path in context_files(ROOT):
        copy = tmp_path / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, copy)
    for name in ("Dockerfile.neuron", ".dockerignore"):
        shutil.copyfile(ROOT / name, tmp_path / name)
    inputs = BuildInputs.of("operator", cache, tmp_path)
    with running_builder(cache) as builder:
        builder.build(inputs.arguments())
        before = inputs.key
        with (tmp_path / "operator" / "neuron_operator" / "__init__.py").open("a") as file:
            file.write(f"\n# {uuid.uuid4()}\n")
        again = {step.name: step.cached for step in builder.build(inputs.arguments())}
    assert inputs.key != before
    worked = {name for name, cached in again.items() if not cached}
    stages = {name.split()[0].removeprefix("[") for name in worked}
    assert stages <= {"package", "application", "operator"}, worked
    assert sum(again.values()) >= 5, again


def test_the_neuron_image_keeps_the_packages_of_its_base_and_adds_missing_ones(
    cache: Cache, containers: Containers, tmp_path: Path
) -> None:
    """Uses a replacement of AWS's container with older versions of torch and transformers than this project pins."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    _write_empty_wheel(wheels, "torch", "2.9.0+standin")
    (tmp_path / "Dockerfile").write_text(
        "FROM scratch AS wheels\nFROM python:3.11-slim\n"
        "RUN --mount=type=bind,from=wheels,target=/wheels --mount=type=cache,target=/root/.cache/pip"
        " pip install --find-links /wheels torch==2.9.0+standin transformers==4.57.1 click==8.1.8\n"
    )
    archive = tmp_path / "image.tar"
    name = "neuron-serving.test/runtime-neuron:test"
    with running_builder(cache) as builder:
        stand_in = tmp_path / "stand-in"
        base = base_image(cache)
        builder.build(
            [
                f"--local=context={tmp_path}",
                f"--local=dockerfile={tmp_path}",
                f"--local=wheels={wheels}",
                "--opt=context:wheels=local:wheels",
                f"--oci-layout=base={base.path}",
                f"--opt=context:python:3.11-slim=oci-layout://base@{base.digest}",
                f"--output=type=oci,dest={stand_in},tar=false",
            ]
        )
        inputs = BuildInputs(NEURON_TARGET, ROOT, {PYTHON_IMAGE: base, neuron_image(): read_layout(stand_in)})
        builder.build([*inputs.arguments(), f"--output=type=oci,name={name},dest={archive}"])
    image = describe(archive)
    containers.load(image)
    program = """
        import importlib.metadata as m, json
        print(json.dumps({n: m.version(n) for n in ("torch", "transformers", "click", "starlette", "neuron-serving")}))
        """
    versions = containers.python(image, program)
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = dict(line.split("==") for line in lines if not line.startswith("#"))
    assert versions == {
        "torch": "2.9.0+standin",
        "transformers": "4.57.1",
        "click": "8.1.8",
        "starlette": pinned["starlette"],
        "neuron-serving": "0.1.0",
    }
    assert "usage: neuron-runtime" in containers.run(image, "neuron-runtime", "--help")


def test_the_neuron_image_names_the_piece_of_the_sdk_that_it_lacks(cache: Cache, containers: Containers) -> None:
    image = build_image(NEURON_TARGET, cache=cache)
    program = f"""
        import json, os, pathlib, subprocess
        command = ["neuron-runtime", "compile", "file:///models/demo", "--backend", "nxdi", "--max-model-len", "256"]
        command += ["--artifacts-dir", "/tmp/artifacts"]
        said = {{}}
        for missing in {list(MISSING_PIECES)!r}:
            folder = pathlib.Path("/tmp", missing)
            folder.mkdir()
            for piece in pathlib.Path("{NEURON_FOLDER}").iterdir():
                if piece.name != missing:
                    (folder / piece.name).symlink_to(piece)
            environment = {{**os.environ, "PYTHONPATH": str(folder), "NEURON_PLATFORM_TARGET_OVERRIDE": "inf2"}}
            ended = subprocess.run(command, env=environment, capture_output=True, text=True)
            said[missing] = [ended.returncode, ended.stderr.splitlines()[-1]]
        print(json.dumps(said))
        """
    said = containers.python(image, program)
    assert isinstance(said, dict)
    for missing, (code, words) in MISSING_PIECES.items():
        ended_with, line = said[missing]
        print(line)
        assert (ended_with, words in line, "use the image runtime-neuron" in line) == (code, True, True), line


@pytest.mark.long
def test_only_torch_comes_from_the_index_of_the_build_argument(cache: Cache, tmp_path: Path) -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = dict(line.split("==") for line in lines if not line.startswith("#"))
    for name, version in (("torch", f"{pinned['torch']}+index"), ("transformers", f"{pinned['transformers']}+index")):
        (tmp_path / "index" / name).mkdir(parents=True)
        _write_empty_wheel(tmp_path / "index" / name, name, version)
    check = """
        from importlib.metadata import version
        assert version("torch").endswith("+index") and not version("transformers").endswith("+index")
        """
    command = ["/opt/venv/bin/python", "-c", "; ".join(textwrap.dedent(check).strip().splitlines())]
    dockerfile = (
        ROOT / "Dockerfile.neuron"
    ).read_text() + f"FROM runtime-dependencies AS check\nRUN {json.dumps(command)}\n"
    (tmp_path / "Dockerfile").write_text(dockerfile)
    inputs = BuildInputs("check", ROOT, {PYTHON_IMAGE: base_image(cache)}).arguments()
    replaced = ("--local=dockerfile", "--opt=filename")
    arguments = [argument for argument in inputs if not argument.startswith(replaced)]
    with serving(tmp_path / "index") as address, running_builder(cache) as builder:
        builder.build([*arguments, f"--local=dockerfile={tmp_path}", f"--opt=build-arg:TORCH_INDEX={address}"])


@contextmanager
def serving(folder: Path) -> Iterator[str]:
    """A package index of files; a folder listing satisfies the protocol."""

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            """Logs nothing: the test reports failures."""

    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder))) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/"
        finally:
            server.shutdown()
            thread.join()


def _write_empty_wheel(folder: Path, name: str, version: str) -> None:
    with Wheel(folder, name, version, "py3-none-any") as wheel:
        wheel.add_metadata("METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n".encode())
        wheel.add_metadata("WHEEL", b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")


@pytest.mark.parametrize("target", [*TARGETS, COMPILE_TARGET, NEURON_TARGET])
def test_buildkit_lint_passes_for_each_target(target: str, cache: Cache) -> None:
    with running_builder(cache) as builder:
        assert lint(target, builder, cache) == ""


@pytest.mark.long
def test_buildkit_lint_reports_a_bad_dockerfile(cache: Cache, tmp_path: Path) -> None:
    shutil.copyfile(ROOT / ".dockerignore", tmp_path / ".dockerignore")
    text = (ROOT / "Dockerfile.neuron").read_text()
    bad = text.replace("FROM base AS operator", "FROM base as operator").replace("# check=error=true\n", "")
    assert bad != text
    (tmp_path / "Dockerfile.neuron").write_text(bad)
    with running_builder(cache) as builder:
        assert "FromAsCasing" in lint("operator", builder, cache, root=tmp_path)


@pytest.mark.long
def test_a_failed_build_step_is_reported_with_its_output(cache: Cache, tmp_path: Path) -> None:
    shutil.copyfile(ROOT / ".dockerignore", tmp_path / ".dockerignore")
    (tmp_path / "Dockerfile.neuron").write_text("FROM python:3.11-slim AS operator\nRUN echo no luck today; exit 3\n")
    with (
        running_builder(cache) as builder,
        pytest.raises(BuildFailed, match=r"(?s)RUN echo.*no luck today.*exit code: 3"),
    ):
        builder.build(BuildInputs.of("operator", cache, tmp_path).arguments())
    assert not list(Path("/sys/fs/cgroup").glob("*/neuron-serving-build"))
    assert str(cache.folder("buildkit")) not in Path("/proc/self/mounts").read_text()


@pytest.mark.long
def test_a_build_cleans_up_after_a_killed_build(cache: Cache, tmp_path: Path) -> None:
    shutil.copyfile(ROOT / ".dockerignore", tmp_path / ".dockerignore")
    (tmp_path / "Dockerfile.neuron").write_text("FROM python:3.11-slim AS operator\nRUN sleep 1000\n")
    program = """
        import sys
        from pathlib import Path
        from cluster.rig.cache import Cache
        from cluster.rig.image_builder import running_builder
        from cluster.rig.images import BuildInputs
        with running_builder(Cache(Path(sys.argv[1]))) as builder:
            builder.build(BuildInputs.of("operator", Cache(Path(sys.argv[1])), Path(sys.argv[2])).arguments())
        """
    arguments = [sys.executable, "-c", textwrap.dedent(program), str(cache.root), str(tmp_path)]
    group = Group(f"{ROOT_GROUP}-build")

    def sleepers() -> list[tuple[str, ...]]:
        return [process.command for process in group.processes() if process.command[0] == "sleep"]

    with subprocess.Popen(arguments, env={**os.environ, "PYTHONPATH": str(ROOT / "tests")}) as run:
        wait_until("the step runs", lambda: sleepers() == [("sleep", "1000")])
        run.kill()
    with running_builder(cache):
        assert not sleepers()
    assert not group.processes()
    assert str(cache.folder("buildkit")) not in Path("/proc/self/mounts").read_text()
