"""vLLM under our life cycle, on the real cluster: the real one for CPUs, from apply to the tokens of our own engine,
edits under traffic, and each way in which it fails."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import Any

import pytest

from cluster.rig.faults import kill_containers, kill_processes
from cluster.rig.images import VLLM_TARGET, build_image
from cluster.rig.rig import WAITING, Rig
from cluster.rig.shared_storage import shared_volume
from cluster.servers import hub_in_pod
from cluster.stories import (
    CLAIMS_OF_THE_CHART,
    WEIGHTS_CLAIM,
    Story,
    install,
    load_images,
    model_of,
    uninstall,
)
from helpers.vllm_cpu import ENVIRONMENT
from neuron_operator.api import names

# Long, because a start takes 50 s of processor time.
pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(1800, func_only=True)]

HUB_NODE = "n3"
ENGINE_PROCESS = "VLLM::EngineCore"
FOLLOWING = "neuron-serving.dev/role=follower"
PROMPTS = ("What is a pod?", "A replica of a model", "kubectl")
COMPLETE = """
import json, sys, urllib.request
url, *prompts = sys.argv[1:]
def completion(prompt):
    body = {"model": "chat", "prompt": prompt, "max_tokens": 24, "temperature": 0, "ignore_eos": True}
    headers = {"Content-Type": "application/json"}
    answer = json.load(opened(urllib.request.Request(url + "/v1/completions", json.dumps(body).encode(), headers)))
    return answer["choices"][0]["text"], answer["usage"]["completion_tokens"]
print(json.dumps([completion(prompt) for prompt in prompts]))
"""

HOLD_THE_PORT = "import socket, time; held = socket.create_server(('', 8000)); time.sleep(3600)"
REQUESTS = {"cpu": "200m", "memory": "512Mi"}


@dataclass(frozen=True)
class Told:
    story: Story
    client: str
    """The image of clients."""

    def url(self, model: str = "chat") -> str:
        return f"http://{model}.{self.story.namespace}.svc.cluster.local:8000"

    def traffic(self, *, is_kept: bool = True) -> AbstractContextManager[None]:
        return self.story.traffic(self.client, clients=4, num_tokens=60, least=24, is_kept=is_kept)

    def answers(self) -> Any:
        """Greedy answers with their number of tokens."""
        return json.loads(self.story.run_client(self.client, "asks", COMPLETE, self.url(), *PROMPTS))


@pytest.fixture
def told(rig: Rig, namespace: str) -> Iterator[Told]:
    """The operator that knows vLLM's image, a hub that has the demo model, and a volume for weights."""
    images = load_images(rig)
    vllm = build_image(VLLM_TARGET)
    rig.load_image(vllm.archive)
    with ExitStack() as undo:
        where = {"node": HUB_NODE, "models": {"demo/demo": 0}}
        hub = undo.enter_context(hub_in_pod(rig, f"hub-{uuid.uuid4().hex[:8]}", images.runtime, **where))
        undo.callback(uninstall, rig)
        values = {
            "engines": {"vllm-cpu": {"image": vllm.name}},
            "groups": {"restartSeconds": 0},
            "jobs": {"env": [{"name": "HF_ENDPOINT", "value": hub.endpoint}]},
            "storage": {"weights": CLAIMS_OF_THE_CHART["weights"]},
        }
        install(rig, images, values=values)
        undo.enter_context(shared_volume(rig, namespace, WEIGHTS_CLAIM))
        story = Story(rig, namespace)
        yield Told(story, images.runtime)
        print(json.dumps({name: round(seconds, 1) for name, seconds in story.seconds.items()}))


def served(name: str, backend: str, *args: str, limits: Any = None, **serving: Any) -> dict[str, Any]:
    """The demo model. What serves it is decided by `backend` alone."""
    engine: dict[str, Any] = {"backend": backend}
    if backend == "vllm":
        engine["args"] = ["--enforce-eager", *args]
        engine["env"] = [{"name": key, "value": value} for key, value in ENVIRONMENT.items()]
    return model_of(
        name,
        "hf://demo/demo",
        engine=engine,
        serving={"dtype": "float32", "maxModelLength": 512, "maxSequences": 8, **serving},
        rollout={"strategy": "Surge", "drainSeconds": 120},
        podTemplate={"spec": {"resources": {"requests": REQUESTS, "limits": limits or {}}}},
    )


def test_it_answers_as_torch_does_and_no_stream_is_cut_as_it_comes_and_goes(told: Told) -> None:
    story = told.story
    with story.stage("torch: apply to tokens"):
        story.apply(served("chat", "torch"))
        story.until_ready(1)
        expected = told.answers()
    with told.traffic(), story.stage("torch to vllm, under traffic"):
        replace(story, served("chat", "vllm"))
    assert told.answers() == expected
    with story.stage("its engine process is killed"):
        (pod,) = story.ready_pods()
        kill_processes(story.rig, pod, ENGINE_PROCESS)
        assert "engine's process ended" in story.until_reason("chat", "CrashLoop")["message"]
        story.until_ready(1)
        (same,) = story.ready_pods()
        assert same["metadata"]["uid"] == pod["metadata"]["uid"]
        assert same["status"]["containerStatuses"][0]["restartCount"] == 1
        assert told.answers() == expected
    # It ends the connection with each answer.
    with told.traffic(is_kept=False), story.stage("vllm to vllm, which fetches the weights itself, under traffic"):
        edited = served("chat", "vllm")
        edited["spec"]["storage"] = {"weights": {"emptyDir": {}}}
        replace(story, edited)
    (pod,) = story.ready_pods()
    assert [one["name"] for one in pod["status"]["initContainerStatuses"]] == [names.FETCH_CONTAINER]
    assert not any("persistentVolumeClaim" in volume for volume in pod["spec"]["volumes"])
    assert told.answers() == expected
    with told.traffic(), story.stage("vllm to torch, under traffic"):
        replace(story, served("chat", "torch"))


def test_a_group_on_two_nodes_comes_back_and_no_stream_is_cut_as_it_is_replaced(told: Told) -> None:
    story = told.story
    story.apply(served("chat", "torch"))
    story.until_ready(1)
    expected = told.answers()
    group = served("chat", "vllm")
    group["spec"]["parallelism"] = {"nodes": 2, "tensor": 2}
    group["spec"]["engine"]["env"] += [{"name": "TORCHDYNAMO_DISABLE", "value": "1"}]  # several ranks need a compiler
    with told.traffic(), story.stage("torch to vllm on two nodes, under traffic"):
        replace(story, group)
    assert len({pod["spec"]["nodeName"] for pod in members(story)}) == 2
    assert told.answers() == expected
    with story.stage("the follower is killed"):
        before = {pod["metadata"]["uid"] for pod in members(story)}
        kill_containers(story.rig, story.namespace, FOLLOWING)
        story.until("other members", lambda: before.isdisjoint(pod["metadata"]["uid"] for pod in members(story)))
        story.until_ready(1)
        assert told.answers() == expected
    with told.traffic(is_kept=False), story.stage("vllm to vllm on two nodes, under traffic"):
        group["spec"]["serving"]["maxModelLength"] = 448
        replace(story, group)
        story.until("two members", lambda: len(members(story)) == 2)
    assert told.answers() == expected
    assert story.kubectl("get", "events", "--field-selector=reason=FailedPreStopHook", "-o", "name") == ""


def members(story: Story) -> list[Any]:
    return [*story.ready_pods(), *story.items("pods", FOLLOWING)]


def replace(story: Story, edited: Any) -> None:
    before = {pod["metadata"]["name"] for pod in story.ready_pods()}
    story.apply(edited)
    story.until_replaced(before, 1)


def test_each_way_in_which_it_fails_says_why(told: Told) -> None:
    story = told.story
    with story.stage("failures"):
        story.apply(served("port", "vllm"))
        story.kubectl("wait", "--for=create", "deployment/port", WAITING)
        holder = {"name": "holder", "image": told.client, "command": ["python", "-c", HOLD_THE_PORT]}
        patch = {"spec": {"template": {"spec": {"containers": [{**holder, "imagePullPolicy": "Never"}]}}}}
        story.kubectl("patch", "deployment", "port", "--type=strategic", "-p", json.dumps(patch))
        # Soon: the pod of before the patch will answer.
        assert "Address already in use" in story.until_reason("port", "CrashLoop")["message"]
        story.kubectl("delete", "neuronmodel", "port")
        story.apply(served("flag", "vllm", "--no-such-flag"))
        story.apply(served("blocks", "vllm", numBlocks=4_000_000))
        story.apply(served("limit", "vllm", limits={"memory": "1Gi"}))
        assert "unrecognized arguments: --no-such-flag" in story.until_reason("flag", "InvalidEngineConfig")["message"]
        assert "than requested memory for kv" in story.until_reason("blocks", "DeviceOutOfMemory")["message"]
        assert "its memory limit is 1Gi" in story.until_reason("limit", "DeviceOutOfMemory")["message"]
    with story.stage("a slow load"):
        for name in ("flag", "blocks", "limit"):
            story.kubectl("delete", "neuronmodel", name)
        # A start takes 50 s of CPU.
        story.apply(served("chat", "vllm", limits={"cpu": "400m"}))
        is_loading = "has been loading the model since"
        story.until("loading", lambda: is_loading in story.condition("chat", "Ready")["message"])
        story.until_ready(1)
        (pod,) = story.ready_pods()
        assert pod["status"]["containerStatuses"][0]["restartCount"] == 0
