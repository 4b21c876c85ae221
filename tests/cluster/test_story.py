"""The whole line as a user walks it: install the chart, apply a NeuronModel, get tokens, change it, delete it.

One test, because its stages are one story on one cluster; it prints the seconds of each. The operator is killed with
SIGKILL after every step that gives it work.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from cluster.rig.commands import CommandFailed
from cluster.rig.faults import kill_containers
from cluster.rig.images import build_image
from cluster.rig.rig import Rig

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(1500, func_only=True)]

ROOT = Path(__file__).parents[2]
CHART = ROOT / "charts" / "neuron-serving"
QUESTION = "What is a NeuronModel?"
ANSWERS: dict[str, str] = json.loads((ROOT / "examples" / "demo-model" / "expected.json").read_text())

OPERATOR_NAMESPACE = "neuron-serving"
OPERATOR_SELECTOR = "app.kubernetes.io/name=neuron-operator"
OPERATOR_USER = f"system:serviceaccount:{OPERATOR_NAMESPACE}:neuron-operator"
SERVING = "neuron-serving.dev/role=leader"
OURS = "app.kubernetes.io/managed-by=neuron-operator"
RIGHTS_FOR_FAULTS = {
    ("", "configmaps", "delete"),
    ("apps", "controllerrevisions", "delete"),
    ("batch", "jobs", "delete"),
    ("batch", "jobs", "get"),
    ("batch", "jobs", "patch"),
    ("coordination.k8s.io", "leases", "get"),
    ("events.k8s.io", "events", "list"),
}
"""What a story without faults and with few edits may leave unused; tests/cluster/test_operator_api_server.py shows, for
these too, that each is used."""
CHILD_KINDS = (
    "deployments,services,configmaps,serviceaccounts,poddisruptionbudgets,networkpolicies,controllerrevisions,jobs,pods"
)

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
for line in urllib.request.urlopen(request, timeout=60):
    if line.startswith(b"data: {"):
        piece = json.loads(line[6:])["choices"][0]["delta"].get("content") or ""
        num_events += bool(piece)
        first = first or (piece and time.monotonic() - began)
        text += piece
print(json.dumps({"text": text, "events": num_events, "first_token_seconds": first}))
"""

SCRAPE = """
import sys, urllib.request
for url in sys.argv[1:]:
    print(urllib.request.urlopen(url, timeout=10).read().decode())
"""

DEVICES_SEEN = "import glob, os; print(*sorted(os.minor(os.stat(d).st_rdev) for d in glob.glob('/dev/neuron*')))"


@dataclass
class Story:
    """The cluster, the story's namespace, and how long each stage took."""

    rig: Rig
    namespace: str
    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        began = time.monotonic()
        print(f"\n--- {name}", flush=True)
        yield
        self.seconds[name] = time.monotonic() - began
        print(f"    {self.seconds[name]:.1f} s", flush=True)

    def kubectl(self, *arguments: str, **options: Any) -> str:
        return self.rig.kubectl("-n", self.namespace, *arguments, **options)

    def items(self, kind: str, selector: str) -> list[Any]:
        return list(json.loads(self.kubectl("get", kind, "-l", selector, "-o", "json"))["items"])

    def apply(self, body: Any) -> None:
        self.kubectl("apply", "-f", "-", stdin=json.dumps(body))

    def condition(self, model: str, kind: str) -> dict[str, Any]:
        body = json.loads(self.kubectl("get", "nm", model, "-o", "json"))
        found = [c for c in body.get("status", {}).get("conditions", []) if c["type"] == kind]
        current = [c for c in found if c["observedGeneration"] == body["metadata"]["generation"]]
        return current[0] if current else {"status": "Unknown", "reason": "", "message": ""}

    def until(self, what: str, holds: Callable[[], Any], seconds: float = 120) -> Any:
        deadline = time.monotonic() + seconds
        while not (result := holds()):
            if time.monotonic() > deadline:
                raise AssertionError(f"not within {seconds} s: {what}\n{self.kubectl('describe', 'nm')}")
            time.sleep(0.25)
        return result

    def until_ready(self, replicas: int) -> None:
        self.until(
            f"{replicas} replicas ready",
            lambda: self.condition("chat", "Ready")["status"] == "True" and len(self.ready_pods()) == replicas,
            240,
        )

    def ready_pods(self) -> list[Any]:
        return [
            pod
            for pod in self.items("pods", SERVING)
            if "deletionTimestamp" not in pod["metadata"]
            and any(c["type"] == "Ready" and c["status"] == "True" for c in pod["status"].get("conditions", []))
        ]

    def kill_operator(self) -> None:
        """SIGKILL to every replica; the pods are deleted too, so that no kubelet's back-off is waited for."""
        kill_containers(self.rig, OPERATOR_NAMESPACE, OPERATOR_SELECTOR)
        self.rig.kubectl("-n", OPERATOR_NAMESPACE, "delete", "pods", "-l", OPERATOR_SELECTOR, "--wait=false")

    def run_client(self, image: str, name: str, code: str, *arguments: str) -> str:
        """Runs Python in a pod of its own and returns what it printed."""
        container = {
            "name": "client",
            "image": image,
            "imagePullPolicy": "Never",
            "command": ["python", "-c", code, *arguments],
        }
        self.apply(
            {
                "apiVersion": "v1",
                "kind": "Pod",
                "metadata": {"name": name},
                "spec": {"restartPolicy": "Never", "containers": [container]},
            }
        )
        phase = self.until(
            f"pod {name} to end",
            lambda: next(
                (
                    p
                    for p in ["Succeeded", "Failed"]
                    if self.kubectl("get", "pod", name, "-o", "jsonpath={.status.phase}") == p
                ),
                None,
            ),
        )
        output = self.kubectl("logs", name)
        assert phase == "Succeeded", output
        self.kubectl("delete", "pod", name, "--wait=false")
        return output

    def minors_seen(self, pod: Any) -> set[int]:
        """Minor numbers of the device files inside the container."""
        return set(map(int, self.kubectl("exec", pod["metadata"]["name"], "--", "python", "-c", DEVICES_SEEN).split()))

    def devices_held(self, pod: Any) -> set[int]:
        """Devices of the pod, as its kubelet says."""
        held = self.rig.device_holdings(pod["spec"]["nodeName"])
        ids = [i for h in held if (h.namespace, h.pod) == (self.namespace, pod["metadata"]["name"]) for i in h.ids]
        return {int(re.sub(r"\D", "", device)) for device in ids}


def test_from_install_to_tokens_and_back(rig: Rig, namespace: str) -> None:
    story = Story(rig, namespace)
    operator, runtime = build_image("operator"), build_image("runtime-cpu")
    for image in (operator, runtime):
        rig.load_image(image.archive)
    audit_begins = len(rig.audit_events())
    try:
        _tell(story, operator.name, runtime.name)
        _check_rights(story, audit_begins)
    finally:
        print("\nstage                                     seconds")
        for name, seconds in story.seconds.items():
            print(f"{name:<40} {seconds:>8.1f}")
        rig.helm("uninstall", "neuron-serving", "-n", OPERATOR_NAMESPACE, "--wait", "--ignore-not-found")


def _tell(story: Story, operator_image: str, runtime_image: str) -> None:
    rig = story.rig
    with story.stage("install: helm install --wait"):
        images = f"image.operator={operator_image},image.runtime={runtime_image},image.pullPolicy=Never"
        where = ("-n", OPERATOR_NAMESPACE, "--create-namespace", "--wait", "--timeout", "3m")
        rig.helm("install", "neuron-serving", str(CHART), *where, "--set", images)
        rig.helm("test", "neuron-serving", "-n", OPERATOR_NAMESPACE)

    with story.stage("apply to Ready: 2 replicas of 6 devices"):
        story.apply(MODEL)
        story.kill_operator()
        story.kubectl("wait", "--for=condition=Ready", "nm/chat", "--timeout=240s", timeout_seconds=250)
    pods = story.ready_pods()
    assert {pod["spec"]["nodeName"] for pod in pods} == {"n1", "n2"}
    assert [story.minors_seen(pod) for pod in pods] == [set(range(6))] * 2
    assert [story.devices_held(pod) for pod in pods] == [set(range(6))] * 2

    with story.stage("first answer through the Service"):
        url = f"http://chat.{story.namespace}.svc.cluster.local:8000"
        answer = json.loads(story.run_client(runtime_image, "client", CLIENT, QUESTION, url))
        assert answer["text"] == ANSWERS[QUESTION]
        assert answer["events"] > 1
    story.seconds["  of that: first token"] = answer["first_token_seconds"]

    with story.stage("metrics, get, describe"):
        _check_metrics(story, runtime_image, pods)
        _check_reading(story)

    with story.stage("edit: 1 device each, on one node"):
        spec: dict[str, Any] = {**MODEL["spec"], "accelerator": {"type": "Neuron", "devices": 1}}
        story.apply({**MODEL, "spec": spec})
        story.kill_operator()
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
        story.kill_operator()
        story.until("InsufficientNeuron", lambda: story.condition("chat", "Ready")["reason"] == "InsufficientNeuron")
        told = story.condition("chat", "Ready")["message"]
        print(f"    {told}")
        assert re.search(r"\b1 Neuron device", told), told
        assert re.search(r"\b0\b[^.;]*free|free[^.;]*\b0\b", told), told
    with story.stage("and back"):
        story.kubectl("scale", "nm", "chat", "--replicas=2")
        story.until_ready(2)

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
        assert story.items("pods", f"{SERVING},neuron-serving.dev/model=ghost") == []
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
    """What a person reads says what is the case."""
    table = story.kubectl("get", "nm", "-o", "wide")
    print(table)
    header, row = table.splitlines()[:2]
    for column in ("MODEL", "READY", "REASON", "REPLICAS", "URL", "DEVICES", "INSTANCE TYPE", "MAX LENGTH", "REVISION"):
        assert column in header, column
    for value in ("chat", "file:///models/demo", "True", f"http://chat.{story.namespace}.svc", "6", "1024"):
        assert value in row, value
    described = story.kubectl("describe", "nm", "chat")
    print(described)
    for word in ("LlamaForCausalLM", "Available", "2 of 2 replicas answer", "ModelResolved"):
        assert word in described, word


def _edit_every_child(story: Story) -> None:
    """Without our label a child is out of our sight: the operator must find it by its name, see that it is ours, and
    put it right. What is deleted comes back."""
    kinds = CHILD_KINDS.removesuffix(",jobs,pods")
    in_use = _names_in_use(story)
    children = {(c["kind"], c["metadata"]["name"]) for c in story.items(kinds, OURS)} & in_use
    assert len(children) == 7
    began = time.monotonic()
    for kind, name in sorted(children):
        story.kubectl("label", kind, name, "app.kubernetes.io/managed-by=somebody", "--overwrite")
    story.kubectl("delete", "service,networkpolicy,poddisruptionbudget", "chat")

    def repaired() -> bool:
        return children <= {(c["kind"], c["metadata"]["name"]) for c in story.items(kinds, OURS)}

    story.until("children repaired", repaired, 30)
    print(f"    repaired within {time.monotonic() - began:.1f} s of the first edit")


def _names_in_use(story: Story) -> set[tuple[str, str]]:
    """Kind and name of the children that the current revision needs; older ones are only kept to go back to."""
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
    """Nothing that the operator asked for was refused, and it was not given more than it may ask for."""
    rig = story.rig
    events = [e for e in rig.audit_events()[audit_begins:] if e.user == OPERATOR_USER]
    assert [e for e in events if e.code == 403] == []
    role = rig.get("clusterrole", "neuron-operator")
    lease = rig.get("role", "neuron-operator-lease", "-n", OPERATOR_NAMESPACE)
    granted = {
        (group, resource, verb)
        for rule in (*role["rules"], *lease["rules"])
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }
    used = {(e.group, f"{e.resource}/{e.subresource}".rstrip("/"), e.verb) for e in events}
    assert used <= granted
    assert granted - used <= RIGHTS_FOR_FAULTS
