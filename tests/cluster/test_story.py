"""The whole path of a user: install the chart, apply a NeuronModel, get tokens, change it, delete it; one on two nodes.

One test, because its stages build on each other; it prints the seconds of each. The operator is killed with SIGKILL
when a model begins and when it ends; test_operator_crash_points.py kills it at every kind of request.
"""

from __future__ import annotations

import json
import re
import time
from typing import Any

import pytest

from cluster.rig.commands import CommandFailed
from cluster.rig.rig import WAITING, Rig
from cluster.stories import (
    ANSWERS,
    CHILD_KINDS,
    OPERATOR_NAMESPACE,
    OPERATOR_USER,
    OURS,
    TORCH,
    Images,
    Story,
    install,
    is_ready,
    load_images,
    model_of,
    uninstall,
)

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(3600, func_only=True)]

QUESTION = "What is a NeuronModel?"
RIGHTS_FOR_FAULTS = {
    ("", "configmaps", "delete"),
    *(("", "persistentvolumeclaims", verb) for verb in ("get", "create")),
    ("", "pods", "delete"),
    ("", "pods/log", "get"),
    ("apps", "controllerrevisions", "delete"),
    *(("apps", "statefulsets", verb) for verb in ("get", "create", "delete")),
    ("", "secrets", "create"),
    *(("batch", "cronjobs", verb) for verb in ("get", "create", "patch", "delete")),
    ("batch", "jobs", "delete"),
    ("batch", "jobs", "get"),
    ("batch", "jobs", "patch"),
    ("coordination.k8s.io", "leases", "get"),
    ("events.k8s.io", "events", "list"),
    ("neuron-serving.dev", "neuronadapters/status", "patch"),
    ("neuron-serving.dev", "neuronmodels/scale", "patch"),
}
"""Rights that a story without faults and stored weights, and with few edits, may leave unused;
tests/cluster/test_operator_api_server.py shows that they are used."""

MODEL: dict[str, Any] = {
    "apiVersion": "neuron-serving.dev/v1alpha1",
    "kind": "NeuronModel",
    "metadata": {"name": "chat"},
    "spec": {
        "model": {"uri": "file:///models/demo"},
        "replicas": 2,
        "accelerator": {"type": "Neuron", "devices": 6},
        "engine": {"backend": "torch"},
        "serving": {"maxModelLength": 1024},
        "rollout": {"drainDelaySeconds": 1},
    },
}

CLIENT = """
import json, sys, time, urllib.request
question, url = sys.argv[1:3]
body = {"model": "chat", "messages": [{"role": "user", "content": question}], "temperature": 0, "stream": True}
headers = {"Content-Type": "application/json"}
request = urllib.request.Request(url + "/v1/chat/completions", json.dumps(body).encode(), headers)
began, first, text, num_events = time.monotonic(), None, "", 0
for line in opened(request):
    if line.startswith(b"data: {"):
        piece = json.loads(line[6:])["choices"][0]["delta"].get("content") or ""
        num_events += bool(piece)
        first = first or (piece and time.monotonic() - began)
        text += piece
print(json.dumps({"text": text, "events": num_events, "first_token_seconds": first}))
"""

AGENT = """
import json, sys, urllib.request
question, result, url = sys.argv[1:4]
tools = [{"type": "function", "function": {"name": name}} for name in ("list_models", "describe_model")]
messages = [{"role": "user", "content": question}]
def answer():
    body = {"model": "chat", "messages": messages, "tools": tools, "temperature": 0}
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(url + "/v1/chat/completions", json.dumps(body).encode(), headers)
    messages.append(json.load(opened(request))["choices"][0]["message"])
    return messages[-1]
(call,) = answer()["tool_calls"]
messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
print(json.dumps({"call": call["function"], "text": answer()["content"]}))
"""

SCRAPE = """
import sys, urllib.request
for url in sys.argv[1:]:
    print(opened(url).read().decode())
"""


def test_from_install_to_tokens_and_back(rig: Rig, namespace: str, capsys: pytest.CaptureFixture[str]) -> None:
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


def _tell(story: Story, images: Images) -> None:
    with story.stage("install: helm install --wait"):
        install(story.rig, images)
        story.rig.helm("test", "neuron-serving", "-n", OPERATOR_NAMESPACE, WAITING)

    with story.stage("apply to Ready: 2 replicas of 6 devices"):
        story.apply(MODEL)
        story.kill_operator()
        story.kubectl("wait", "--for=condition=Ready", "nm/chat", WAITING)
    pods = story.ready_pods()
    assert {pod["spec"]["nodeName"] for pod in pods} == {"n1", "n2"}
    assert [story.minors_seen(pod) for pod in pods] == [set(range(6))] * 2
    assert [story.devices_held(pod) for pod in pods] == [set(range(6))] * 2

    with story.stage("first answer through the Service"):
        url = f"http://chat.{story.namespace}.svc.cluster.local:8000"
        answer = json.loads(story.run_client(images.runtime, "client", CLIENT, QUESTION, url))
        assert answer["text"] == ANSWERS[QUESTION]
        assert answer["events"] > 1
    story.seconds["  of that: first token"] = answer["first_token_seconds"]

    with story.stage("metrics, get, describe"):
        _check_metrics(story, images.runtime, pods)
        _check_reading(story)

    with story.stage("kubectl neuron: why, logs, chat"):
        _check_plugin(story)

    with story.stage("a tool called through the Service, and its result"):
        result = json.dumps({"name": "chat", "state": "Ready"})
        told = json.loads(story.run_client(images.runtime, "agent", AGENT, "Is chat ready?", result, url))
        assert told["call"] == {"name": "describe_model", "arguments": '{"name": "chat"}'}
        assert told["text"] == "The model chat is ready."

    with story.stage("edit: 1 device each, on one node"):
        # From here on nobody asks for an answer.
        engine = {"backend": "simulated"}
        spec: dict[str, Any] = {**MODEL["spec"], "accelerator": {"type": "Neuron", "devices": 1}, "engine": engine}
        story.apply({**MODEL, "spec": spec})
        story.until_ready(2)
        on_n1 = {"spec": {"nodeSelector": {"kubernetes.io/hostname": "n1"}}}
        story.apply({**MODEL, "spec": {**spec, "podTemplate": on_n1}})
        story.until_ready(2)
        story.kubectl("scale", "nm", "chat", "--replicas=4")
        story.until_ready(4)
    pods = story.ready_pods()
    assert {pod["spec"]["nodeName"] for pod in pods} == {"n1"}
    for devices in (story.minors_seen, story.devices_held):
        each = [devices(pod) for pod in pods]
        assert [len(held) for held in each] == [1] * 4
        assert len(set().union(*each)) == 4

    with story.stage("scale beyond the devices"):
        story.kubectl("scale", "nm", "chat", "--replicas=8")
        story.until("InsufficientNeuron", lambda: story.condition("chat", "Ready")["reason"] == "InsufficientNeuron")
        message = story.condition("chat", "Ready")["message"]
        print(f"    {message}")
        assert re.search(r"\b1 Neuron device", message), message
        assert re.search(r"\b0\b[^.;]*free|free[^.;]*\b0\b", message), message
        told = story.plugin("why", "chat")
        print(told)
        assert "InsufficientNeuron" in told.splitlines()[0]
        assert re.search(r"server +unschedulable", told)
        assert "\n  $ kubectl get nodes -L " in told
    with story.stage("and back"):
        story.kubectl("scale", "nm", "chat", "--replicas=2")
        story.until_ready(2)

    with story.stage("a replica on two nodes"):
        story.apply(model_of("pair", "file:///models/demo", engine=TORCH, parallelism={"nodes": 2, "tensor": 2}))
        story.until_ready(1, "pair")
        members = [pod for pod in story.items("pods", "neuron-serving.dev/model=pair") if is_ready(pod)]
        assert len({pod["spec"]["nodeName"] for pod in members}) == len(members) == 2
        assert story.plugin("chat", "pair", QUESTION, "--temperature", "0").startswith(ANSWERS[QUESTION])
        story.kubectl("delete", "nm", "pair", "--wait=false")

    with story.stage("a wrong field, a model that is not there"):
        wrong = json.dumps({**MODEL, "spec": {**MODEL["spec"], "replica": 1}})
        with pytest.raises(CommandFailed, match=r'unknown field "spec\.replica"'):
            story.kubectl("apply", "--validate=strict", "-f", "-", stdin=wrong)
        ghost = {
            **MODEL,
            "metadata": {"name": "ghost"},
            "spec": {**MODEL["spec"], "model": {"uri": "file:///models/ghost"}},
        }
        story.apply(ghost)
        story.until("ModelNotFound", lambda: story.condition("ghost", "Ready")["reason"] == "ModelNotFound")
        print(f"    {story.condition('ghost', 'Ready')['message']}")
        assert story.serving_pods("ghost") == []
        story.kubectl("delete", "nm", "ghost")

    with story.stage("children edited and deleted by hand"):
        _edit_every_child(story)
        story.until_ready(2)

    with story.stage("delete: nothing is left"):
        story.kubectl("delete", "nm", "chat")
        story.kill_operator()
        story.until("no child left", lambda: not story.items(CHILD_KINDS, OURS))


def _check_metrics(story: Story, image: str, pods: list[Any]) -> None:
    """The one request is counted by exactly one replica, with its tokens."""
    urls = [f"http://{pod['status']['podIP']}:8000/metrics" for pod in pods]
    text = story.run_client(image, "scrape", SCRAPE, *urls)

    def total(metric: str) -> float:
        return sum(map(float, re.findall(rf"^{metric}\{{[^}}]*\}} (\S+)$", text, re.MULTILINE)))

    assert total("vllm:request_success_total") == 1
    assert total("vllm:generation_tokens_total") > 10
    assert total("vllm:prompt_tokens_total") > 5


def _check_reading(story: Story) -> None:
    """The output for users shows the actual state."""
    table = story.kubectl("get", "nm", "-o", "wide")
    print(table)
    header, row = table.splitlines()[:2]
    for column in ("MODEL", "READY", "REASON", "URL", "DEVICES", "INSTANCE TYPE", "MAX LENGTH", "REVISION"):
        assert column in header, column
    for value in ("chat", "file:///models/demo", "2/2", f"http://chat.{story.namespace}.svc", "6", "1024"):
        assert value in row, value
    described = story.kubectl("describe", "nm", "chat")
    print(described)
    for word in ("LlamaForCausalLM", "Available", "2 of 2 replicas answer", "ModelResolved"):
        assert word in described, word


def _check_plugin(story: Story) -> None:
    """What the plugin prints about a ready model, through the API server's proxy."""
    told = story.plugin("why", "chat")
    print(told)
    assert told.startswith(f"NeuronModel {story.namespace}/chat: ready\n")
    assert re.search(r"n1 +inf2\S+ +6 Neuron devices +ok\n", told)
    assert told.endswith(f"$ kubectl neuron chat chat -n {story.namespace}\n")
    assert "neuron-runtime: ready after" in story.plugin("logs", "chat")
    answer = story.plugin("chat", "chat", QUESTION, "--temperature", "0")
    print(answer)
    assert answer.startswith(ANSWERS[QUESTION])
    assert re.search(r"first token after \d+ ms, \d+ tokens in", answer)


def _edit_every_child(story: Story) -> None:
    """A child without our label is not in the watch: the operator must find it by name, recognise it as its own and
    repair it. Deleted children are recreated."""
    kinds = CHILD_KINDS.removesuffix(",jobs,pods")
    in_use = _names_in_use(story)
    children = {(c["kind"], c["metadata"]["name"]) for c in story.items(kinds, OURS)} & in_use
    assert len(children) == 7
    began = time.monotonic()
    for kind, name in sorted(children):
        story.kubectl("label", kind, name, "app.kubernetes.io/managed-by=somebody", "--overwrite")

    def repaired() -> bool:
        return children <= {(c["kind"], c["metadata"]["name"]) for c in story.items(kinds, OURS)}

    story.until("children repaired", repaired)
    story.kubectl("delete", "service,networkpolicy,poddisruptionbudget", "chat")
    story.until("children recreated", repaired)
    print(f"    repaired within {time.monotonic() - began:.1f} s of the first edit")


def _names_in_use(story: Story) -> set[tuple[str, str]]:
    """Kind and name of the children that the current revision needs; older ones are kept for a rollback only."""
    deployment = json.loads(story.kubectl("get", "deployment", "chat", "-o", "json"))
    volumes = deployment["spec"]["template"]["spec"]["volumes"]
    revision = story.kubectl("get", "nm", "chat", "-o", "jsonpath={.status.currentRevision}")
    same_name = ("Deployment", "Service", "PodDisruptionBudget", "NetworkPolicy")
    return {
        *((kind, "chat") for kind in same_name),
        ("ServiceAccount", deployment["spec"]["template"]["spec"]["serviceAccountName"]),
        ("ControllerRevision", f"chat-{revision}"),
        *(("ConfigMap", v["configMap"]["name"]) for v in volumes if "configMap" in v),
    }


def _check_rights(story: Story, audit_begins: int) -> None:
    """No request of the operator was refused, and it has no unused rights."""
    rig = story.rig
    events = [e for e in rig.audit_events()[audit_begins:] if e.user == OPERATOR_USER]
    assert [e for e in events if e.code == 403 and e.name != "none"] == []
    role = rig.get("clusterrole", "neuron-operator")
    lease = rig.get("role", "neuron-operator-lease", "-n", OPERATOR_NAMESPACE)
    granted = {
        (group, resource, verb)
        for rule in (*role["rules"], *lease["rules"])
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }
    used = {(e.group, f"{e.resource}/{e.subresource}".rstrip("/"), e.verb) for e in events if e.resource}
    assert used <= granted
    assert granted - used <= RIGHTS_FOR_FAULTS
