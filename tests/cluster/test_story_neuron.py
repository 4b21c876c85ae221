"""A manifest of six lines is compiled by a Job without devices and served on devices: by the default backend, with the
cores that the kubelet granted, and by vLLM on the devices of Trn2. The image is made by the recipe of `runtime-neuron`,
on the fake NxD Inference; its `vllm` is the stand-in."""

from __future__ import annotations

import json
import shutil
import uuid
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import pytest
import yaml

from cluster.rig.faults import cores_withheld
from cluster.rig.images import NEURON_TARGET
from cluster.rig.rig import Rig
from cluster.rig.shared_storage import Volume, shared_volume
from cluster.servers import hub_in_pod
from cluster.stories import (
    ANSWERS,
    ARTIFACTS_CLAIM,
    ASK,
    CLAIMS_OF_THE_CHART,
    COMPILE,
    WEIGHTS_CLAIM,
    Story,
    check_order,
    install,
    labelled,
    load_images,
    requests_devices,
    uninstall,
)
from helpers.failures import check_says
from neuron_operator.api import names

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(1800, func_only=True)]

DEVICES_NODE, CORES_NODE, JOBS_NODE = "n1", "n2", "n3"
QUESTION = "What is a NeuronModel?"
SIX_LINES = """\
apiVersion: neuron-serving.dev/v1alpha1
kind: NeuronModel
metadata:
  name: chat
spec:
  model: {uri: "hf://demo/small"}
"""
CORES_TAKEN = """
import json, pathlib
print(json.dumps({path.name: json.loads(path.read_text()) for path in pathlib.Path("/tmp/neuron-cores").iterdir()}))
"""
"""The variables with which the (fake) Neuron runtime took each core; it has them from the kubelet and from ours."""


@dataclass(frozen=True)
class Installation:
    rig: Rig
    image: str


@pytest.fixture(scope="module")
def installation(rig: Rig) -> Iterator[Installation]:
    """The operator, for which vLLM is the engine of Trn2, and a hub on the node that compiles."""
    images = load_images(rig, NEURON_TARGET)
    with ExitStack() as undo:
        edits = {"demo/small": "sed -i 's/: 2048/: 512/' config.json"}  # few graphs, quickly tried
        where = {"node": JOBS_NODE, "models": {"demo/small": 0, "demo/demo": 0}, "edits": edits}
        hub = undo.enter_context(hub_in_pod(rig, f"hub-{uuid.uuid4().hex[:8]}", images.runtime, **where))
        undo.callback(uninstall, rig)
        jobs = {
            "env": [{"name": "HF_ENDPOINT", "value": hub.endpoint}],
            "resources": {"requests": {"cpu": "100m"}},  # so that several compilers fit on their node
        }
        engines = {"vllm": {"image": images.runtime, "version": "0.24"}, "defaults": {"trn2": "vllm"}}
        install(rig, images, values={"engines": engines, "jobs": jobs, "storage": CLAIMS_OF_THE_CHART})
        yield Installation(rig, images.runtime)


@pytest.fixture
def artifacts(installation: Installation, namespace: str) -> Iterator[Volume]:
    with (
        shared_volume(installation.rig, namespace, WEIGHTS_CLAIM),
        shared_volume(installation.rig, namespace, ARTIFACTS_CLAIM) as volume,
    ):
        yield volume


@pytest.fixture
def story(installation: Installation, namespace: str, artifacts: Volume) -> Iterator[Story]:
    story = Story(installation.rig, namespace)
    yield story
    print(json.dumps({name: round(seconds, 1) for name, seconds in story.seconds.items()}))


@pytest.fixture
def cores(rig: Rig) -> Iterator[None]:
    """A node gives out cores, the other one devices."""
    with labelled(rig, CORES_NODE, names.ALLOCATION_LABEL, names.ALLOCATION_CORES):
        yield


@pytest.fixture
def trn2(rig: Rig) -> Iterator[None]:
    """Both nodes are of Trn2."""
    with ExitStack() as undo:
        for node in (DEVICES_NODE, CORES_NODE):
            undo.enter_context(labelled(rig, node, names.INSTANCE_TYPE_LABEL, "trn2.48xlarge"))
        yield


@pytest.mark.usefixtures("cores")
def test_six_lines_are_compiled_without_devices_and_served_on_them(story: Story) -> None:
    with story.watching("pods") as pods, story.watching("nm") as statuses:
        audit = len(story.rig.audit_events())
        with story.stage("six lines: resolved, fetched, compiled, served"):
            story.kubectl("apply", "-f", "-", stdin=SIX_LINES)
            story.until_ready(1)
        assert _kinds_of(story.created_jobs(audit)) == ["artifact", "facts", "weights"]
        (compiler,) = story.items("pods", COMPILE)
        assert (compiler["spec"]["nodeName"], requests_devices(compiler)) == (JOBS_NODE, False)
        print(f"    {story.condition('chat', 'Compiled')['message']}")
        _check_answer(story, "chat")
        (pod,) = story.ready_pods("chat")
        assert len(story.minors_seen(pod)) == 1
        # One device of Inf2.
        _check_cores(story, pod, {0, 1}, NEURON_RT_NUM_CORES="2")

        audit = len(story.rig.audit_events())
        with story.stage("a model of the same key, and one on a core"):
            env = [{"name": "FAKE_NXDI_COMPILER", "value": "missing"}]
            story.apply(_model("same", engine={"env": env}, serving={"maxQueuedRequests": 7}))
            story.apply(_model("core", accelerator={"cores": 1}))
            for model in ("same", "core"):
                story.until_ready(1, model)
        assert _kinds_of(story.created_jobs(audit)) == ["artifact"], "for the other tensor-parallel degree"
        assert story.artifact("same") == story.artifact("chat") != story.artifact("core")
        (pod,) = story.ready_pods("core")
        core = _core_of(story, pod)
        _check_cores(story, pod, {core}, NEURON_RT_VISIBLE_CORES=str(core))
        for model in ("same", "core"):
            _check_answer(story, model)

        audit = len(story.rig.audit_events())
        with story.stage("other buckets: the old pod serves until they are compiled"):
            (before,) = story.ready_pods("chat")
            story.apply(_model("chat", serving={"contextBuckets": [256, 512]}))
            story.until_reason("chat", "Compiling", "UpToDate")
            assert [pod["metadata"]["uid"] for pod in story.ready_pods("chat")] == [before["metadata"]["uid"]]
            story.until("up to date", lambda: story.condition("chat", "UpToDate")["status"] == "True")
            story.until_ready(1)
        assert _kinds_of(story.created_jobs(audit)) == ["artifact", "check"]
        _check_answer(story, "chat")
        check_order(pods(), statuses())


@pytest.mark.usefixtures("cores")
def test_what_does_not_fit_is_refused_with_both_numbers(story: Story) -> None:
    """A node that is not set up as planned, one that grants fewer cores, an artifact for other devices, a device
    without enough memory, and one whose cores another process holds."""
    rig = story.rig
    trn2 = {"podTemplate": {"spec": {"nodeSelector": {names.INSTANCE_TYPE_LABEL: "trn2.48xlarge"}}}}
    inf2 = {"podTemplate": {"spec": {"nodeSelector": {names.INSTANCE_TYPE_LABEL: "inf2.24xlarge"}}}}
    with (
        labelled(rig, CORES_NODE, names.INSTANCE_TYPE_LABEL, "trn2.48xlarge"),
        cores_withheld(rig, DEVICES_NODE, "0"),
    ):
        story.apply(_model("logical", accelerator={"cores": 1}, engine={"backend": "nxdi"}, **trn2))
        story.apply(_model("withheld", **inf2))
        check_says("fewer-cores", story.until_reason("withheld", "DeviceHeld"))
        message = story.until_reason("logical", "TopologyImpossible")["message"]
        assert "is 2, but NEURON_LOGICAL_NC_CONFIG is 1" in message
    # Waits for its cores meanwhile, in vain.
    story.apply(_model("held", engine={"env": [{"name": "FAKE_NXDI_HELD_LOADS", "value": "1000"}]}))
    other = f"{names.ARTIFACTS_DIR}/{story.artifact('logical')}"
    audit = len(rig.audit_events())
    story.apply(_model("shipped", engine={"env": [{"name": "NEURON_COMPILED_ARTIFACTS", "value": other}]}, **inf2))
    little = {"env": [{"name": "FAKE_NXDI_MEMORY_BYTES", "value": "1000"}]}
    story.apply(_model("full", engine=little, **inf2))
    message = story.until_reason("shipped", "ArtifactMissing")["message"]
    for difference in ("target.logicalCore: 2 instead of 1", "target.tensor: 1 instead of 2"):
        assert difference in message, message
    check_says("device-memory", story.until_reason("full", "DeviceOutOfMemory"))
    story.apply(_model("full", **inf2))
    story.until_gone("full", "DeviceOutOfMemory")
    check_says("device-held", story.until_reason("held", "DeviceHeld"))
    story.apply(_model("held", **inf2))
    story.until_gone("held", "DeviceHeld")
    assert story.created_jobs(audit) == [], "the store has the artifacts that they should load"


@pytest.mark.usefixtures("trn2")
def test_six_lines_are_compiled_by_vllm_without_devices_and_served_from_these_graphs(
    installation: Installation, story: Story, artifacts: Volume
) -> None:
    with story.watching("pods") as pods, story.watching("nm") as statuses:
        audit = len(story.rig.audit_events())
        with story.stage("six lines, and a model whose replicas fetch and compile themselves"):
            chat = _model("chat", model={"uri": "hf://demo/demo"})
            alone = {"engine": {"compile": "Disabled"}, "storage": {"weights": {"emptyDir": {}}}}
            story.apply_all([chat, {**chat, "metadata": {"name": "alone"}, "spec": chat["spec"] | alone}])
            for model in ("chat", "alone"):
                story.until_ready(1, model)
        kinds = sorted(job.partition("-")[0] for job in story.created_jobs(audit))
        assert kinds == ["artifact", "facts", "weights"]
        check_order(pods(), statuses())
    for model in ("chat", "alone"):
        assert "with backend vllm, the default for trn2" in story.condition(model, "Placed")["message"]
        assert _answer(story, installation.image, model, "What is a pod?").startswith(" w"), "as the stand-in answers"
        (pod,) = story.ready_pods(model)
        assert len(story.minors_seen(pod)) == 1
    compiling = "each replica compiles on the device as it starts, about"
    assert compiling in story.condition("alone", "Compiled")["message"]
    (fetched,) = pod["status"]["initContainerStatuses"]
    assert (fetched["name"], fetched["state"]["terminated"]["exitCode"]) == (names.FETCH_CONTAINER, 0)
    (compiler,) = story.items("pods", COMPILE)
    assert (compiler["spec"]["nodeName"], requests_devices(compiler)) == (JOBS_NODE, False)
    assert "compiled in" in story.condition("chat", "Compiled")["message"]

    audit = len(story.rig.audit_events())
    with story.stage("a graph is lost: compiled again"):
        store = artifacts.folder / "vllm" / story.artifact("chat")
        graph = next(store.glob("*/graph.neff")).parent
        shutil.rmtree(graph)
        (pod,) = story.ready_pods()
        story.kubectl("delete", "pod", pod["metadata"]["name"], "--wait=false")
        said = story.until_reason("chat", "ArtifactMissing")["message"]
        assert f"NEURON_LIBTORCH_ASSERT_CACHE_HIT: remote compile cache miss for key {graph.name}" in said
        story.until_ready(1)
    assert [job.partition("-")[0] for job in story.created_jobs(audit)] == ["artifact"]
    assert (graph / "graph.neff").is_file()


def _model(name: str, **spec: object) -> dict[str, Any]:
    model: dict[str, Any] = yaml.safe_load(SIX_LINES)
    return {**model, "metadata": {"name": name}, "spec": {**model["spec"], **spec}}


def _kinds_of(jobs: list[str]) -> list[str]:
    """What Jobs are for, which their names begin with: facts, weights, artifact or check."""
    return sorted(job.partition("-")[0] for job in jobs)


def _check_answer(story: Story, model: str) -> None:
    (pod,) = story.ready_pods(model)
    assert _answer(story, pod["spec"]["containers"][0]["image"], model, QUESTION) == ANSWERS[QUESTION]


def _answer(story: Story, image: str, model: str, question: str) -> str:
    url = f"http://{model}.{story.namespace}.svc.cluster.local:8000"
    return story.run_client(image, f"asks-{model}", ASK, url, model, question)


def _core_of(story: Story, pod: Any) -> int:
    """The one core of a pod, as its container numbers it: every device of Inf2 has two."""
    (core,) = story.devices_held(pod)
    return core % 2


def _check_cores(story: Story, pod: Any, cores: set[int], **granted: str) -> None:
    """The Neuron runtime took these cores, by these variables."""
    taken = json.loads(story.kubectl("exec", pod["metadata"]["name"], "--", "python3", "-c", CORES_TAKEN))
    logical = {"NEURON_LOGICAL_NC_CONFIG": "1", "NEURON_RT_VIRTUAL_CORE_SIZE": "1"}
    assert taken == {f"core-{core}": logical | granted for core in cores}
