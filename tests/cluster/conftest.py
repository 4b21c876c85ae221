"""The cluster as a fixture. A missing requirement skips the tests that use it and names the remedy; in CI, where a skip
would go unnoticed, it fails them."""

from __future__ import annotations

import os
import signal
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

import pytest

from cluster.rig.binaries import ensure
from cluster.rig.images import NEURON_TARGET, TARGETS, VLLM_TARGET, build_image
from cluster.rig.needs import NotPossibleHere
from cluster.rig.node_images import write_program_archive
from cluster.rig.rig import WAITING, Rig, tests_lock
from helpers.apiserver import ApiServer

HERE = Path(__file__).parent
PROBE_IMAGE = "localhost/probe:1"
LOADED_BY = {NEURON_TARGET: {"test_story_neuron", "test_story_claims"}, VLLM_TARGET: {"test_story_vllm"}}
"""Images that only these stories load."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        # Building programs and images takes minutes, once, and must not count towards the limit of a test.
        if item.path.parent == HERE and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(900, func_only=True))


def not_possible(reason: str) -> NoReturn:
    if os.environ.get("CI") == "true":
        pytest.fail(reason, pytrace=False)
    pytest.skip(reason)


@pytest.fixture(scope="session")
def api_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    """A real API server with the CRDs and the operator's rights, whose log has what the operator writes."""
    from helpers.operators import OPERATOR_USER, served

    with served(tmp_path_factory.mktemp("api-server"), bodies_of=(OPERATOR_USER,)) as server:
        yield server


@pytest.fixture(scope="module")
def server(api_server: ApiServer) -> Iterator[ApiServer]:
    """The API server, which is after each file of tests what it was before."""
    from helpers.operators import until_served

    api_server.pause(signal.SIGCONT)
    before = api_server.stored()
    yield api_server
    api_server.put_back(before)
    until_served(api_server)
    api_server.pause()


@pytest.fixture(scope="session")
def rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    """The running cluster. One that was started manually is used as it is and stays up; one left by a killed test run,
    perhaps with a fault in effect, is recreated."""
    try:
        rig = Rig.prepare()
    except NotPossibleHere as error:
        not_possible(str(error))
    with tests_lock(lambda: print("waiting: another test run uses the cluster", flush=True)):
        of_tests = rig.cache.folder("locks") / "cluster-of-tests"
        if of_tests.exists():
            rig.down()
        was_up = rig.is_up
        try:
            if not was_up:
                of_tests.touch()
            rig.up(() if was_up else images_for(request.session.items))
            yield rig
        finally:
            rig.disconnect()
            if not was_up:
                rig.down()
                of_tests.unlink()


def images_for(tests: Sequence[pytest.Item]) -> list[Path]:
    """Archives of the images that stories load. Nodes that have them from the start share what is unpacked, also with
    those of an earlier run."""
    stories = {test.path.stem for test in tests if test.path.name.startswith("test_story")}
    if not stories:
        return []
    targets = (*TARGETS, *(target for target, users in LOADED_BY.items() if stories & users))
    try:
        return [build_image(target).archive for target in targets]
    except NotPossibleHere as error:
        not_possible(str(error))


@pytest.fixture(scope="session")
def probe(rig: Rig, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An archive of an image with the program `probe` (tests/cluster/build/probe)."""
    program = ensure("probe")["probe"] / "probe"
    archive = tmp_path_factory.mktemp("probe") / "probe.tar"
    write_program_archive(archive, PROBE_IMAGE, program)
    return archive


@pytest.fixture
def namespace(rig: Rig) -> Iterator[str]:
    """A namespace for one test, deleted after it."""
    name = f"test-{uuid.uuid4().hex[:8]}"
    rig.create_namespace(name)
    yield name
    rig.kubectl("delete", "namespace", name, "--wait=false")


class Pods:
    """Pods of the probe in one namespace."""

    def __init__(self, rig: Rig, namespace: str, image: str) -> None:
        self.rig = rig
        self.namespace = namespace
        self.image = image

    def manifest(
        self, name: str, *, node: str | None = None, resources: dict[str, int] | None = None
    ) -> dict[str, Any]:
        container = {
            "name": "probe",
            "image": self.image,
            "imagePullPolicy": "Never",
            "args": ["serve", ":8080"],
            "resources": {"limits": {key: str(value) for key, value in (resources or {}).items()}},
            "readinessProbe": {"httpGet": {"path": "/", "port": 8080}, "periodSeconds": 1},
        }
        return {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": name, "namespace": self.namespace, "labels": {"app": "probe"}},
            "spec": {
                "containers": [container],
                "terminationGracePeriodSeconds": 0,
                "nodeSelector": {} if node is None else {"kubernetes.io/hostname": node},
            },
        }

    def start(self, name: str, **options: Any) -> None:
        """Starts a pod that serves on 8080 and waits until it is ready."""
        self.rig.apply(self.manifest(name, **options))
        self.wait(name, "condition=Ready")

    def wait(self, name: str, condition: str) -> None:
        self.rig.kubectl("-n", self.namespace, "wait", f"--for={condition}", f"pod/{name}", WAITING)

    def run(self, name: str, *arguments: str) -> str:
        """Output of `probe ARGUMENTS` in a pod."""
        return self.rig.kubectl("-n", self.namespace, "exec", name, "--", "/probe", *arguments).strip()

    def get(self, name: str) -> dict[str, Any]:
        pod: dict[str, Any] = self.rig.get("pod", name, "--namespace", self.namespace)
        return pod

    def is_gone(self, name: str) -> bool:
        return not self.rig.kubectl(
            "-n", self.namespace, "get", "pod", name, "--ignore-not-found", "-o", "name"
        ).strip()

    def delete(self, *names: str) -> None:
        self.rig.kubectl("-n", self.namespace, "delete", "pod", *names, "--grace-period=0", "--force")


@pytest.fixture
def pods(rig: Rig, namespace: str, probe: Path) -> Pods:
    return Pods(rig, namespace, rig.load_image(probe).name)
