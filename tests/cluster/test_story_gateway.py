"""One URL for all models on real kubelets: the chart's gateways, keys of a Secret, a model that goes to zero and is
woken by a request that waits, and gateways and replicas that are killed or replaced at work."""

from __future__ import annotations

import json
import re
import time
import uuid
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest

from cluster.rig.faults import kill_containers
from cluster.rig.rig import WAITING, Rig
from cluster.stories import (
    ANSWERS,
    OPERATOR_NAMESPACE,
    OPERATOR_USER,
    TORCH,
    Images,
    Story,
    install,
    load_images,
    model_of,
    uninstall,
)
from neuron_operator.api import names

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(1800, func_only=True)]

GATEWAY = "app.kubernetes.io/name=neuron-gateway"
GATEWAY_USER = f"system:serviceaccount:{OPERATOR_NAMESPACE}:neuron-gateway"
SERVICE = f"neuron-gateway.{OPERATOR_NAMESPACE}.svc.cluster.local:80"
QUESTION = "What is a NeuronModel?"
ALICE, GUEST = "alice-has-a-long-secret-key", "guest-has-a-long-secret-key"
KEYS = [{"name": "alice", "key": ALICE}, {"name": "guest", "key": GUEST, "models": ["chat"]}]
IDLE_SECONDS = 60
NUM_TOKENS = 250
NUM_STREAMS = 4
"""Of each gateway."""
NUM_HELD = 20
NUM_SHORT, SHORT_TOKENS, LONG_TOKENS = 46, 20, 1900
"""Of streams while gateways are replaced; with `NUM_STREAMS` long ones they are 50."""
STEP_MILLISECONDS = 200
DRAIN_SECONDS = 20
"""A short stream takes 4 s, a long one 380 s."""
GATEWAYS = {
    "enabled": True,
    "keysSecret": "gateway-keys",
    "resources": {"requests": {"cpu": "50m", "memory": "64Mi"}},
    "timeouts": {"drainSeconds": DRAIN_SECONDS},
}
ON_A_DEVICE = {"accelerator": {"type": "Neuron", "devices": 1}}

LOOK = """
import json, sys, urllib.error, urllib.request
url, models, question, keys = "http://" + sys.argv[1], sys.argv[2].split(), sys.argv[3], sys.argv[4:]
told = []
for key in keys:
    headers = {"Content-Type": "application/json", **({"Authorization": "Bearer " + key} if key else {})}
    def ask(path, body=None):
        try:
            data = body and json.dumps(body).encode()
            return 200, json.load(opened(urllib.request.Request(url + path, data, headers)))
        except urllib.error.HTTPError as error:
            return error.code, json.load(error)["error"]["code"]
    status, listed = ask("/v1/models")
    found = {"models": status == 200 and [one["id"] for one in listed["data"]]}
    for model in models:
        body = {"model": model, "messages": [{"role": "user", "content": question}], "temperature": 0}
        status, said = ask("/v1/chat/completions", body)
        found[model] = [status, said["choices"][0]["message"]["content"] if status == 200 else said]
    told.append(found)
print(json.dumps(told))
"""
"""What it gets with each key; an empty one is none."""

ASK_AT_ONCE = """
import http.client, json, sys, threading
key, request, hosts = sys.argv[1], json.loads(sys.argv[2]), sys.argv[3:]
path, body = request
headers = {"Content-Type": "application/json", "Authorization": "Bearer " + key}
told = [None] * len(hosts)
def client(number):
    connection, got, fault = http.client.HTTPConnection(hosts[number], timeout=300), b"", ""
    answer = None
    try:
        # Each begins in its own way, so that not all go to one replica.
        varied = {**body, "prompt": f"{body['prompt']} {number}"} if "prompt" in body else body
        connection.request("POST", path, json.dumps(varied), headers)
        answer = connection.getresponse()
        got = answer.readline()
        print("steady", flush=True)
        got += answer.read()
    except Exception as error:
        fault = repr(error)
    said = {"status": answer and answer.status, "fault": fault, "end": got.decode()[-4000:]}
    told[number] = {"host": hosts[number], **said}
clients = [threading.Thread(target=client, args=(number,)) for number in range(len(hosts))]
for one in clients:
    one.start()
for one in clients:
    one.join()
print(json.dumps(told))
"""
"""One request to each host, all at once. It prints `steady` for each answer that has begun."""


def test_one_url_from_keys_to_zero_and_back(rig: Rig, namespace: str, capsys: pytest.CaptureFixture[str]) -> None:
    story = Story(rig, namespace)
    images = load_images(rig)
    audit_begins = len(rig.audit_events())
    try:
        _tell(story, images)
        _check_rights(story, audit_begins)
    finally:
        with capsys.disabled():  # printed in every run, also after success
            print("\nstage                                     seconds")
            for name, seconds in story.seconds.items():
                print(f"{name:<40} {seconds:>8.2f}")
        uninstall(rig)
        rig.kubectl("-n", OPERATOR_NAMESPACE, "delete", "secret", "gateway-keys", "--ignore-not-found")


def _tell(story: Story, images: Images) -> None:
    rig = story.rig
    with story.stage("install with gateways and their keys"):
        secret = {"metadata": {"name": "gateway-keys", "namespace": OPERATOR_NAMESPACE}}
        rig.apply(
            {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": OPERATOR_NAMESPACE}},
            {"apiVersion": "v1", "kind": "Secret", **secret, "stringData": {"keys.yaml": json.dumps(KEYS)}},
        )
        # In one namespace: models of an earlier test may still be ending.
        install(rig, images, values={"gateway": {**GATEWAYS, "namespaces": [story.namespace]}})
    gateways = _gateways(rig)
    assert len({pod["spec"]["nodeName"] for pod in gateways}) == 2, "one of each node"

    with story.stage("two models, one of which sleeps when idle"):
        serving = {"maxModelLength": 1024}
        story.apply_all(
            [
                model_of("chat", "file:///models/demo", engine=TORCH, serving=serving, replicas=2, **ON_A_DEVICE),
                model_of(
                    "sleepy", "file:///models/demo", engine=TORCH, idle={"afterSeconds": IDLE_SECONDS}, **ON_A_DEVICE
                ),
            ]
        )
        story.until_ready(2)
        story.until_ready(1, "sleepy")

    with story.stage("by model through the one Service, and by key"):
        told = json.loads(
            story.run_client(images.runtime, "look", LOOK, SERVICE, "chat sleepy", QUESTION, "", ALICE, GUEST)
        )
        nobody, alice, guest = told
        assert (nobody["models"], nobody["chat"][0], nobody["sleepy"][0]) == (False, 401, 401)
        assert sorted(alice["models"]) == ["chat", "sleepy"]
        assert alice["chat"] == alice["sleepy"] == [200, ANSWERS[QUESTION]]
        assert guest["models"] == ["chat"]
        assert (guest["chat"], guest["sleepy"]) == ([200, ANSWERS[QUESTION]], [403, "model_not_allowed"])

    with story.stage("a gateway is killed: only its streams break"):
        _kill_a_gateway(story, images, gateways)
    with story.stage("a replica is killed: its streams are told, the rest is answered by the other"):
        _kill_a_replica(story, images)

    with story.stage("both gateways are replaced under 50 streams: short ones are whole, long ones are told"):
        _replace_the_gateways(story, images)

    with story.stage("nobody asks: zero"):
        told = story.until_reason("sleepy", "ScaledToZero", "Available")
        assert re.search(r"; wakes in about \d+ s, where devices are free$", told["message"]), told
        assert "by spec.idle: no request since" in told["message"]
        assert story.condition("sleepy", "Ready")["status"] == "True"
        story.until("its pod is gone", lambda: not story.serving_pods("sleepy"))
        assert story.kubectl("get", "nm", "chat", "-o", "jsonpath={.spec.replicas}") == "2", "it has no such rule"
    with story.stage("requests wait, wake it, and are answered"):
        _wake(story, images)


def _kill_a_gateway(story: Story, images: Images, gateways: Sequence[Any]) -> None:
    addresses = [f"{pod['status']['podIP']}:8000" for pod in gateways]
    _start(story, images, "streams", _completion(stream=True), [one for one in addresses for _ in range(NUM_STREAMS)])
    _until_steady(story, "streams", len(addresses) * NUM_STREAMS)
    killed = gateways[0]
    kill_containers(story.rig, OPERATOR_NAMESPACE, f"{GATEWAY},test/killed={_label(story.rig, killed)}")
    told = _end(story, "streams")
    whole = Counter(one["host"] for one in told if _is_whole(one))
    assert whole == {addresses[1]: NUM_STREAMS}, told
    assert all(one["fault"] for one in told if one["host"] == addresses[0]), told
    answer = story.run_client(images.runtime, "still", LOOK, SERVICE, "chat", QUESTION, ALICE)
    assert json.loads(answer)[0]["chat"] == [200, ANSWERS[QUESTION]]

    def is_back() -> bool:
        ready = _gateways(story.rig)
        return len(ready) == 2 and any(pod["status"]["containerStatuses"][0]["restartCount"] for pod in ready)

    story.until("the gateway is back", is_back)


def _kill_a_replica(story: Story, images: Images) -> None:
    victim = story.ready_pods()[0]["metadata"]["name"]
    story.kubectl("label", "pod", victim, "test/killed=replica")
    hosts = [SERVICE] * (2 * NUM_STREAMS)
    _start(story, images, "streams", _completion(stream=True), hosts)
    _start(story, images, "wholes", _completion(stream=False), hosts)
    _until_steady(story, "streams", len(hosts))
    story.until("all are at replicas", lambda: _total(story, "in_flight", "chat") >= 2 * len(hosts))
    kill_containers(story.rig, story.namespace, "test/killed=replica")
    streams, wholes = _end(story, "streams"), _end(story, "wholes")
    assert [one["status"] for one in wholes] == [200] * len(hosts), wholes
    assert _total(story, "retries_total", "chat") > 0
    cut = [one for one in streams if not _is_whole(one)]
    print(f"    {len(cut)} of {len(streams)} streams were cut")
    assert 0 < len(cut) < len(streams), "those of the other replica go on"
    assert all("replica_lost" in one["end"] and not one["fault"] for one in cut), cut
    story.until_ready(2)


def _replace_the_gateways(story: Story, images: Images) -> None:
    slow = {"overrideNeuronConfig": {"stepMilliseconds": STEP_MILLISECONDS}}
    serving = {"maxModelLength": 2048, "maxSequences": 64}
    story.apply(model_of("steady", "file:///models/demo", engine=slow, serving=serving))
    story.until_ready(1, "steady")
    before = {pod["metadata"]["name"]: f"{pod['status']['podIP']}:8000" for pod in _gateways(story.rig)}
    options: Any = {"model": "steady", "service": SERVICE, "key": ALICE}
    with story.traffic(images.runtime, clients=NUM_SHORT, num_tokens=SHORT_TOKENS, least=2 * NUM_SHORT, **options):
        hosts = [*before.values()] * (NUM_STREAMS // len(before))
        _start(story, images, "long", _completion(stream=True, model="steady", max_tokens=LONG_TOKENS), hosts)
        _until_steady(story, "long", len(hosts))
        rollout = ("-n", OPERATOR_NAMESPACE, "rollout")
        story.rig.kubectl(*rollout, "restart", "deployment/neuron-gateway")
        story.rig.kubectl(*rollout, "status", "deployment/neuron-gateway", WAITING)
        told = _end(story, "long")
    assert before.keys().isdisjoint(pod["metadata"]["name"] for pod in _gateways(story.rig))
    assert [(one["status"], one["fault"]) for one in told] == [(200, "")] * len(hosts), told
    assert all('"code":"gateway_stopped"' in one["end"] for one in told), told
    story.kubectl("delete", "nm", "steady")


def _wake(story: Story, images: Images) -> None:
    body = {"model": "sleepy", "messages": [{"role": "user", "content": QUESTION}], "temperature": 0}
    began = time.monotonic()
    _start(story, images, "held", ("/v1/chat/completions", body), [SERVICE] * NUM_HELD)
    story.until("they wait", lambda: _total(story, "held_requests", "sleepy") > 0)
    assert story.kubectl("get", "nm", "sleepy", "-o", "jsonpath={.spec.replicas}") == "1"
    told = _end(story, "held")
    print(f"    {NUM_HELD} answers after {time.monotonic() - began:.1f} s")
    assert [one["status"] for one in told] == [200] * NUM_HELD, told
    assert all(ANSWERS[QUESTION] in json.loads(one["end"])["choices"][0]["message"]["content"] for one in told)
    logged = [json.loads(line) for pod in _gateways(story.rig) for line in _log(story, pod) if line.startswith("{")]
    held = [line for line in logged if line.get("model") == "sleepy" and line.get("held_seconds", 0) > 0]
    assert len(held) == NUM_HELD
    assert {line["api_key"] for line in held} == {"alice"}
    assert not [line for line in logged if ALICE in json.dumps(line)]
    assert _total(story, "wake_ups_total", "sleepy", 'outcome="woken"') == 1


def _completion(*, stream: bool, model: str = "chat", max_tokens: int = NUM_TOKENS) -> tuple[str, dict[str, Any]]:
    body = {"model": model, "prompt": "kubectl", "temperature": 0, "ignore_eos": True, "max_tokens": max_tokens}
    return "/v1/completions", {**body, "stream": stream}


def _is_whole(told: Any) -> bool:
    return bool(told["status"] == 200 and told["end"].endswith("data: [DONE]\n\n") and not told["fault"])


def _start(story: Story, images: Images, name: str, request: Any, hosts: Sequence[str]) -> None:
    story.start_client(images.runtime, name, ASK_AT_ONCE, ALICE, json.dumps(request), *hosts)


def _until_steady(story: Story, name: str, number: int) -> None:
    story.kubectl("wait", "--for=jsonpath={.status.containerStatuses[0].started}=true", f"pod/{name}", WAITING)
    story.until("all answers have begun", lambda: story.kubectl("logs", name).count("steady") == number)


def _end(story: Story, name: str) -> Any:
    return json.loads(story.end_client(name).splitlines()[-1])


def _gateways(rig: Rig) -> list[Any]:
    """Those that are ready."""
    found = rig.get("pods", "-n", OPERATOR_NAMESPACE, "-l", GATEWAY)["items"]
    return [
        pod
        for pod in found
        if any((c["type"], c["status"]) == ("Ready", "True") for c in pod["status"].get("conditions", ()))
    ]


def _label(rig: Rig, pod: Any) -> str:
    mark = uuid.uuid4().hex[:8]
    rig.kubectl("-n", OPERATOR_NAMESPACE, "label", "pod", pod["metadata"]["name"], f"test/killed={mark}")
    return mark


def _log(story: Story, pod: Any) -> list[str]:
    return story.rig.kubectl("-n", OPERATOR_NAMESPACE, "logs", pod["metadata"]["name"]).splitlines()


def _total(story: Story, metric: str, model: str, label: str = "") -> float:
    """Of all gateways."""
    total, of_model = 0.0, f'model="{story.namespace}/{model}"'
    for pod in _gateways(story.rig):
        path = f"/api/v1/namespaces/{OPERATOR_NAMESPACE}/pods/{pod['metadata']['name']}:8080/proxy/metrics"
        for line in story.rig.kubectl("get", "--raw", path).splitlines():
            if line.startswith(f"neuron_serving_gateway_{metric}{{") and of_model in line and label in line:
                total += float(line.rpartition(" ")[2])
    return total


def _check_rights(story: Story, audit_begins: int) -> None:
    """The gateways used all of their rights and were refused nothing; operator and gateway wrote /scale once each."""
    rig = story.rig
    events = [e for e in rig.audit_events()[audit_begins:] if e.user == GATEWAY_USER and e.resource]
    assert [e for e in events if e.code == 403] == []
    granted = {
        (group, resource, verb)
        for rule in rig.get("role", "neuron-gateway", "-n", story.namespace)["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }
    assert {(e.group, f"{e.resource}/{e.subresource}".rstrip("/"), e.verb) for e in events} == granted
    scaled = [
        (e.user, e.name)
        for e in rig.audit_events()[audit_begins:]
        if (e.group, e.subresource, e.verb, e.code) == (names.GROUP, "scale", "patch", 200)
        and e.namespace == story.namespace
    ]
    assert sorted(scaled) == sorted([(OPERATOR_USER, "sleepy"), (GATEWAY_USER, "sleepy")])
