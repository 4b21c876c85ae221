"""Replicas on several nodes of the real cluster, with the real images, under steady traffic through their Service: a
group answers as one node does, comes back by itself whatever breaks, and nobody gets a wrong answer or none."""

from __future__ import annotations

import contextlib
import json
import os
import random
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import pytest

from cluster.rig.faults import drained, frozen, kill_containers, kubelet_killed, link_slow, packets_lost
from cluster.rig.rig import WAITING, Rig
from cluster.stories import ANSWERS, ASK, SERVING, TORCH, Images, Story, install, load_images, model_of, uninstall

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(1800, func_only=True), pytest.mark.long]

NUM_RANDOM_FAULTS = int(os.environ.get("NEURON_SERVING_GROUP_FAULTS", "50"))
QUESTION = "What is a NeuronModel?"
MODEL = "neuron-serving.dev/model=chat"
FOLLOWING = "neuron-serving.dev/role=follower"
OF_GROUPS = "pods,statefulsets,services,secrets,networkpolicies,poddisruptionbudgets"
SPARE = "n3"
"""A node without devices: for the client and the operator, and for the groups on CPUs that must leave another node."""
NEURON, CPU = {"type": "Neuron", "devices": 6}, {"type": "CPU"}
ENGINE, RANK = "neuron_runtime.processes.engine", "neuron_runtime.processes.rank"

TRAFFIC = """
import http.client, json, os, sys, threading, time
url, answers, num_tokens, num_clients = sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
questions = sorted(answers)
def pieces(question, stream):
    body = {"model": "chat", "messages": [{"role": "user", "content": question}], "temperature": 0}
    body |= {"max_tokens": num_tokens, "stream": stream}
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=5)
    try:
        connection.connect()
    except TimeoutError:
        # Nobody has taken the request: without endpoints nodes refuse only some connections each second.
        raise OSError("cannot connect")
    connection.sock.settimeout(240)
    headers = {"Content-Type": "application/json"}
    connection.request("POST", "/v1/chat/completions", json.dumps(body).encode(), headers)
    response = connection.getresponse()
    if response.status != 200:
        raise OSError(f"{response.status}: {response.read().decode()[:300]}")
    if not stream:
        choice = json.load(response)["choices"][0]
        yield choice["message"]["content"], choice["finish_reason"]
        return
    for line in response:
        if line.startswith(b"data: {"):
            event = json.loads(line[6:])
            if "error" in event:
                raise OSError("in the stream: " + event["error"]["message"])
            for choice in event["choices"]:
                yield choice["delta"].get("content") or "", choice["finish_reason"]
        elif line.strip() == b"data: [DONE]":
            return
    raise OSError("the stream ended early")
def ask(question, stream):
    expected, text, reason = answers[question], "", None
    try:
        for piece, ended in pieces(question, stream):
            text, reason = text + piece, ended or reason
    except TimeoutError:
        return "hung", text
    except (OSError, http.client.HTTPException) as error:
        return ("failed" if expected.startswith(text) else "wrong"), f"{error!r} after {text!r}"
    right = text == expected if reason == "stop" else reason == "length" and text and expected.startswith(text)
    return ("right", "") if right else ("wrong", f"{text!r}, {reason}")
def client(number):
    asked = number
    while not os.path.exists("/tmp/stop"):
        began = time.time()
        outcome, detail = ask(questions[asked % len(questions)], bool(asked % 2))
        asked += 1
        said = {"outcome": outcome, "began": began, "ended": time.time(), "detail": detail}
        sys.stdout.write(json.dumps(said) + "\\n")
        sys.stdout.flush()
        time.sleep(0.5 if outcome == "failed" else 0.1)
clients = [threading.Thread(target=client, args=(number,)) for number in range(num_clients)]
for one in clients:
    one.start()
for one in clients:
    one.join()
"""


@dataclass(frozen=True)
class Outcome:
    """The outcome of one request. Times are Unix times."""

    outcome: str
    began: float
    ended: float
    detail: str


class Traffic:
    """Clients that ask one question after another, each compared with the answer of one node."""

    def __init__(self, story: Story) -> None:
        self.name = f"traffic-{uuid.uuid4().hex[:8]}"
        self._story = story

    def outcomes(self) -> list[Outcome]:
        lines = self._story.kubectl("logs", self.name).splitlines()
        return [Outcome(**json.loads(line)) for line in lines if line.startswith("{") and line.endswith("}")]

    def until_right(self, began: float, count: int = 1) -> list[Outcome]:
        """So many right answers to requests that began after this time."""

        def right() -> list[Outcome]:
            found = [one for one in self.outcomes() if one.outcome == "right" and one.began >= began]
            return found if len(found) >= count else []

        found: list[Outcome] = self._story.until("right answers", right)
        return found

    def check(self) -> list[Outcome]:
        """No request got a wrong answer or none at all. Returns all."""
        found = self.outcomes()
        assert [one for one in found if one.outcome not in ("right", "failed")] == []
        return found


@contextlib.contextmanager
def traffic(story: Story, images: Images, *, num_tokens: int = 8, clients: int = 4) -> Iterator[Traffic]:
    """Entering returns when answers come, leaving when all clients have ended; no answer may be wrong or missing."""
    url = f"http://chat.{story.namespace}.svc:8000"
    asked = {question: ANSWERS[question] for question in sorted(ANSWERS)[:12]}
    arguments = (url, json.dumps(asked), str(num_tokens), str(clients))
    made = Traffic(story)
    story.start_client(images.runtime, made.name, TRAFFIC, *arguments, node=SPARE)
    pod = f"pod/{made.name}"
    story.kubectl("wait", "--for=jsonpath={.status.containerStatuses[0].started}=true", pod, WAITING)
    made.until_right(0.0, count=clients)
    yield made
    story.kubectl("exec", made.name, "--", "touch", "/tmp/stop")
    story.kubectl("wait", "--for=jsonpath={.status.phase}=Succeeded", pod, WAITING)
    print(f"    {Counter(one.outcome for one in made.check())}")
    story.kubectl("delete", pod, "--wait=false")


@pytest.fixture(scope="module")
def images(rig: Rig) -> Iterator[Images]:
    images = load_images(rig)
    try:
        values = {
            "groups": {"restartSeconds": 0, "maxRestarts": NUM_RANDOM_FAULTS},
            "nodeSelector": {"kubernetes.io/hostname": SPARE},
        }
        install(rig, images, values=values)
        yield images
    finally:
        uninstall(rig)


@pytest.fixture
def story(rig: Rig, images: Images) -> Iterator[Story]:
    namespace = f"test-{uuid.uuid4().hex[:8]}"
    rig.create_namespace(namespace)
    yield Story(rig, namespace)
    rig.kubectl("delete", "namespace", namespace, "--wait=false")


def grouped(accelerator: Mapping[str, object], *, tensor: int = 2, **spec: Any) -> dict[str, Any]:
    parallelism = {"nodes": 2, "tensor": tensor}
    # Unready for as long as by default before it ends: other stories have a second replica for clients to go to.
    spec = {"accelerator": dict(accelerator), "parallelism": parallelism, "rollout": {}, **spec}
    return model_of("chat", "file:///models/demo", **{"engine": TORCH, **spec})


def members(story: Story) -> list[Any]:
    return [*story.items("pods", SERVING), *story.items("pods", FOLLOWING)]


def groups(story: Story) -> list[Any]:
    status = json.loads(story.kubectl("get", "nm", "chat", "-o", "json")).get("status", {})
    return list(status.get("groups", ()))


def attempt(story: Story) -> int:
    (group,) = groups(story)
    return int(group["attempt"])


def until_one_group(story: Story, after: int = 0) -> None:
    """Until one group serves, of a later attempt than this."""

    def serves() -> bool:
        return [(g["state"], g["attempt"] > after, g.get("readyMembers")) for g in groups(story)] == [
            ("Serving", True, 2)
        ]

    story.until("a group of two serves", serves)
    story.until_ready(1)


def until_nothing_is_left(story: Story) -> None:
    story.kubectl("delete", "neuronmodel", "chat")
    story.until("nothing is left", lambda: not story.items(OF_GROUPS, MODEL))
    story.until("no device is held", lambda: story.namespace not in namespaces_with_devices(story.rig))


def namespaces_with_devices(rig: Rig) -> set[str]:
    return {held.namespace for node in ("n1", "n2") for held in rig.device_holdings(node) if held.ids}


# What breaks


@dataclass(frozen=True)
class Fault:
    """strike: as a context, which undoes what does not heal by itself.
    ends: whether the group ends. within: whether it must serve again before that is undone."""

    strike: Callable[[Story], AbstractContextManager[Any]]
    ends: bool = True
    within: bool = True


def pod_of(story: Story, role: str) -> Any:
    (pod,) = (pod for pod in story.items("pods", f"{MODEL},{role}") if "deletionTimestamp" not in pod["metadata"])
    return pod


def node_of(story: Story, role: str) -> str:
    return str(pod_of(story, role)["spec"]["nodeName"])


def killed(role: str) -> Callable[[Story], AbstractContextManager[Any]]:
    @contextlib.contextmanager
    def strike(story: Story) -> Iterator[None]:
        kill_containers(story.rig, story.namespace, f"{MODEL},{role}")
        yield

    return strike


@contextlib.contextmanager
def deleted(story: Story) -> Iterator[None]:
    story.kubectl("delete", "pod", pod_of(story, FOLLOWING)["metadata"]["name"], "--wait=false")
    yield


def link(story: Story) -> tuple[str, str]:
    return node_of(story, SERVING), node_of(story, FOLLOWING)


ENDED = {
    "the follower is killed": Fault(killed(FOLLOWING)),
    "the leader is killed": Fault(killed(SERVING)),
    "the follower's pod is deleted": Fault(deleted),
}
SILENT = {
    "a rank is frozen": Fault(lambda story: frozen(story.rig, pod_of(story, FOLLOWING), RANK)),
    "the leader's engine is frozen": Fault(lambda story: frozen(story.rig, pod_of(story, SERVING), ENGINE)),
    "packets on the link are lost": Fault(lambda story: packets_lost(story.rig, *link(story)), within=False),
}
MOVED = {
    "a member's kubelet is killed": Fault(lambda story: kubelet_killed(story.rig, node_without_clients(story))),
    "the follower's node is drained": Fault(lambda story: drained(story.rig, node_of(story, FOLLOWING), MODEL)),
    "the leader's node is drained": Fault(lambda story: drained(story.rig, node_of(story, SERVING), MODEL)),
}
SLOW = {
    "the link has 200 ms and 2 % loss": Fault(
        lambda story: link_slow(story.rig, *link(story), delay_seconds=0.1, loss=0.02), ends=False
    )
}
FAULTS = ENDED | SILENT | MOVED | SLOW


def node_without_clients(story: Story) -> str:
    """The follower's if possible."""
    return next(node for node in (node_of(story, FOLLOWING), node_of(story, SERVING)) if node != SPARE)


def suffer(story: Story, traffic: Traffic, name: str) -> None:
    """The fault, and how long it was until requests were answered again."""
    fault, before, began = FAULTS[name], attempt(story), time.time()
    with contextlib.ExitStack() as undo:
        with story.stage(name):
            undo.enter_context(fault.strike(story))
            if fault.ends:
                story.until("the group ends", lambda: attempt(story) > before or has_ended(story))
                if not fault.within:
                    undo.close()
                    print(f"    undone after {time.time() - began:.1f} s")
                until_one_group(story, after=before)
            traffic.until_right(time.time(), count=4)
            assert (attempt(story) > before) == fault.ends
        with story.stage("undone"):
            undo.close()
            until_one_group(story)
            story.until("one attempt is left", lambda: (len(members(story)), num_stateful_sets(story)) == (2, 2))
    since = [one for one in traffic.check() if one.ended >= began]
    failed = [one for one in since if one.outcome == "failed"]
    if failed:
        first, last = (moment(one.ended for one in failed) for moment in (min, max))
        answered = min(one.ended for one in since if one.outcome == "right" and one.began >= last)
        longest = max(one.ended - one.began for one in failed)
        print(
            f"    {len(failed)} requests failed, after {longest:.1f} s at most; the first {first - began:.1f} s after"
        )
        print(f"    the fault; {answered - began:.1f} s after it they were answered again. They were told:")
        for detail, times in Counter(one.detail[:150] for one in failed).most_common(8):
            print(f"      {times} times {detail}")


def num_stateful_sets(story: Story) -> int:
    return len(story.items("statefulsets", MODEL))


def has_ended(story: Story) -> bool:
    return groups(story)[0]["state"] not in ("Serving", "Starting")


@contextlib.contextmanager
def only_where_devices_are(rig: Rig) -> Iterator[None]:
    """New pods are not started on the spare node."""
    rig.kubectl("cordon", SPARE)
    try:
        yield
    finally:
        rig.kubectl("uncordon", SPARE)


@dataclass(frozen=True)
class Case:
    accelerator: Mapping[str, object]
    faults: Mapping[str, Fault]
    tensor: int = 2


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(Case(NEURON, ENDED), id="ended members"),
        pytest.param(Case(NEURON, SILENT), id="silent members"),
        pytest.param(Case(CPU, MOVED), id="lost nodes"),
        pytest.param(Case(NEURON, SLOW), id="slow link"),
        pytest.param(Case(NEURON, ENDED, tensor=4), id="two ranks on each node"),
    ],
)
def test_a_group_under_traffic_comes_back_by_itself_without_wrong_or_missing_answers(
    rig: Rig, story: Story, images: Images, case: Case
) -> None:
    with story.stage("from apply to ready"), only_where_devices_are(rig):
        story.apply(grouped(case.accelerator, tensor=case.tensor))
        until_one_group(story)
    pods = members(story)
    assert {pod["spec"]["nodeName"] for pod in pods} == {"n1", "n2"}
    assert all(len(story.devices_held(pod)) == case.accelerator.get("devices", 0) for pod in pods)
    slices = story.items("endpointslices", "kubernetes.io/service-name=chat")
    behind = [address for found in slices for endpoint in found["endpoints"] for address in endpoint["addresses"]]
    assert behind == [pod_of(story, SERVING)["status"]["podIP"]]
    url = f"http://chat.{story.namespace}.svc:8000"
    assert story.run_client(images.runtime, "asks", ASK, url, "chat", QUESTION) == ANSWERS[QUESTION]
    with traffic(story, images) as asked:
        for name in case.faults:
            suffer(story, asked, name)
    until_nothing_is_left(story)


@pytest.mark.timeout(7200, func_only=True)
def test_a_group_under_traffic_survives_random_faults(rig: Rig, story: Story, images: Images) -> None:
    with only_where_devices_are(rig):
        story.apply(grouped(CPU))
        until_one_group(story)
    seed = int(os.environ.get("NEURON_SERVING_GROUP_SEED", str(int(time.time()))))
    print(f"    seed {seed}")
    chosen = random.Random(seed).choices([name for name, fault in FAULTS.items() if fault.ends], k=NUM_RANDOM_FAULTS)
    for name in chosen:
        with traffic(story, images) as asked:  # anew: the logs of clients are limited
            suffer(story, asked, name)
    until_nothing_is_left(story)


# Several groups


def holder(name: str, node: str, num_devices: int, image: str) -> dict[str, Any]:
    """A pod that holds devices one by one."""
    one = {"image": image, "imagePullPolicy": "Never", "command": ["sleep", "100000"]}
    limits = {"resources": {"limits": {"aws.amazon.com/neuron": "1"}}}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name},
        "spec": {
            "nodeSelector": {"kubernetes.io/hostname": node},
            "terminationGracePeriodSeconds": 0,
            "containers": [{"name": f"c{number}", **one, **limits} for number in range(num_devices)],
        },
    }


def test_of_two_groups_with_room_for_one_and_a_half_one_serves_and_one_waits_holding_nothing(
    story: Story, images: Images
) -> None:
    story.apply_all([holder("five", "n1", 5, images.runtime), holder("four", "n2", 4, images.runtime)])
    story.kubectl("wait", "--for=condition=Ready", "pod/five", "pod/four", WAITING)
    with story.stage("one serves, one waits"):
        story.apply(grouped({"type": "Neuron", "devices": 1}, replicas=2))
        story.until("one serves", lambda: [g["state"] for g in groups(story)] == ["Serving"])
        found = story.until_reason("chat", "InsufficientNeuron")
        assert "1 of these nodes are free now, so it holds none" in found["message"]
        assert len(members(story)) == num_stateful_sets(story) == 2
    with traffic(story, images) as asked, story.stage("room appears: both serve"):
        story.kubectl("delete", "pod", "five")
        story.until_ready(2)
        assert [g["state"] for g in groups(story)] == ["Serving"] * 2
        assert [one for one in asked.check() if one.outcome == "failed"] == []
    story.kubectl("delete", "pod", "four")
    until_nothing_is_left(story)


def test_two_groups_are_replaced_under_traffic_and_a_bad_image_is_rolled_back_without_a_failed_request(
    story: Story, images: Images
) -> None:
    model = grouped(CPU, replicas=2, rollout={"progressDeadlineSeconds": 60})
    story.apply(model)
    story.until_ready(2)
    with traffic(story, images) as asked:
        with story.stage("rollout: another configuration"):
            before = {pod["metadata"]["uid"] for pod in members(story)}
            model["spec"]["serving"] = {"maxModelLength": 512}
            story.apply(model)
            story.until("new groups", lambda: before.isdisjoint(p["metadata"]["uid"] for p in members(story)))
            story.until_ready(2)
        engine = model["spec"]["engine"]
        with story.stage("a bad image: no group is touched"):
            before = {pod["metadata"]["uid"] for pod in members(story)}
            model["spec"]["engine"] = {**engine, "image": "registry.invalid/runtime:1"}
            story.apply(model)
            story.until_reason("chat", "ImagePull", "UpToDate")
            assert before == {pod["metadata"]["uid"] for pod in members(story)}
        with story.stage("rollout: groups that end at once are rolled back"):
            model["spec"]["engine"] = {**engine, "env": [{"name": "PYTHONHOME", "value": "/nowhere"}]}
            story.apply(model)
            story.until_reason("chat", "RolledBack", "UpToDate")
            story.until("both answer", lambda: "2 of 2" in story.condition("chat", "Available")["message"])
            asked.until_right(time.time(), count=4)
        assert [one for one in asked.check() if one.outcome == "failed"] == []
    until_nothing_is_left(story)


FIRST_TOKEN = """
import json, sys, time, urllib.request
url = sys.argv[1]
body = {"model": "chat", "prompt": "kubectl", "temperature": 0, "stream": True, "max_tokens": 4}
request = urllib.request.Request(
    url + "/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
)
print("asking", flush=True)
for line in opened(request):
    if line.startswith(b"data: {"):
        print(time.time())
        break
"""


def test_one_rank_and_two_on_two_nodes_answer_after_apply(story: Story, images: Images) -> None:
    """Prints the seconds of both."""
    one = model_of("chat", "file:///models/demo", engine=TORCH, accelerator=dict(NEURON))
    for name, model in (("one", one), ("two", grouped(NEURON))):
        url = f"http://chat.{story.namespace}.svc:8000"
        story.start_client(images.runtime, name, FIRST_TOKEN, url, node=SPARE)
        story.kubectl("wait", "--for=condition=Ready", f"pod/{name}", WAITING)
        story.until("the client runs", lambda name=name: "asking" in story.kubectl("logs", name))
        began = time.time()
        story.apply(model)
        seconds = float(story.end_client(name).split()[-1]) - began
        print(f"    {name}: {seconds:.1f} s from apply to the first token")
        assert seconds > 0
        until_nothing_is_left(story)
