"""vLLM on devices: a manifest of six lines is compiled by a Job of its image without devices, and served from those
graphs on the devices of Trn2. The image is that of `runtime-neuron` in tests, whose `vllm` is the stand-in."""

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

from cluster.rig.images import NEURON_TARGET
from cluster.rig.rig import Rig
from cluster.rig.shared_storage import Volume, shared_volume
from cluster.servers import hub_in_pod
from cluster.stories import (
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
from neuron_operator.api import names

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(1800, func_only=True)]

DEVICES_NODES, JOBS_NODE = ("n1", "n2"), "n3"
SIX_LINES = """\
apiVersion: neuron-serving.dev/v1alpha1
kind: NeuronModel
metadata:
  name: chat
spec:
  model: {uri: "hf://demo/demo"}
"""


@dataclass(frozen=True)
class Told:
    story: Story
    artifacts: Volume
    image: str

    def answer(self, model: str) -> str:
        url = f"http://{model}.{self.story.namespace}.svc.cluster.local:8000"
        return self.story.run_client(self.image, f"asks-{model}", ASK, url, model, "What is a pod?")


@pytest.fixture
def told(rig: Rig, namespace: str) -> Iterator[Told]:
    """The operator, for which vLLM is the engine of Trn2, a hub, two nodes of Trn2, and one that compiles."""
    images = load_images(rig, NEURON_TARGET)
    with ExitStack() as undo:
        where = {"node": JOBS_NODE, "models": {"demo/demo": 0}}
        hub = undo.enter_context(hub_in_pod(rig, f"hub-{uuid.uuid4().hex[:8]}", images.runtime, **where))
        for node in DEVICES_NODES:
            undo.enter_context(labelled(rig, node, names.INSTANCE_TYPE_LABEL, "trn2.48xlarge"))
        undo.callback(uninstall, rig)
        values = {
            "engines": {"vllm": {"image": images.runtime, "version": "0.24"}, "defaults": {"trn2": "vllm"}},
            "jobs": {"env": [{"name": "HF_ENDPOINT", "value": hub.endpoint}]},
            "storage": CLAIMS_OF_THE_CHART,
        }
        install(rig, images, values=values)
        undo.enter_context(shared_volume(rig, namespace, WEIGHTS_CLAIM))
        artifacts = undo.enter_context(shared_volume(rig, namespace, ARTIFACTS_CLAIM))
        story = Story(rig, namespace)
        yield Told(story, artifacts, images.runtime)
        print(json.dumps({name: round(seconds, 1) for name, seconds in story.seconds.items()}))


def test_six_lines_are_compiled_by_vllm_without_devices_and_served_from_these_graphs(told: Told) -> None:
    story = told.story
    with story.watching("pods") as pods, story.watching("nm") as statuses:
        audit = len(story.rig.audit_events())
        with story.stage("six lines, and a model whose replicas fetch and compile themselves"):
            chat: dict[str, Any] = yaml.safe_load(SIX_LINES)
            alone = {"engine": {"compile": "Disabled"}, "storage": {"weights": {"emptyDir": {}}}}
            story.apply_all([chat, {**chat, "metadata": {"name": "alone"}, "spec": chat["spec"] | alone}])
            for model in ("chat", "alone"):
                story.until_ready(1, model)
        kinds = sorted(job.partition("-")[0] for job in story.created_jobs(audit))
        assert kinds == ["artifact", "facts", "weights"]
        check_order(pods(), statuses())
    for model in ("chat", "alone"):
        assert "with backend vllm, the default for trn2" in story.condition(model, "Placed")["message"]
        assert told.answer(model).startswith(" w"), "as the stand-in answers"
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
        store = told.artifacts.folder / "vllm" / story.artifact("chat")
        graph = next(store.glob("*/graph.neff")).parent
        shutil.rmtree(graph)
        (pod,) = story.ready_pods()
        story.kubectl("delete", "pod", pod["metadata"]["name"], "--wait=false")
        said = story.until_reason("chat", "ArtifactMissing")["message"]
        assert f"NEURON_LIBTORCH_ASSERT_CACHE_HIT: remote compile cache miss for key {graph.name}" in said
        story.until_ready(1)
    assert [job.partition("-")[0] for job in story.created_jobs(audit)] == ["artifact"]
    assert (graph / "graph.neff").is_file()
