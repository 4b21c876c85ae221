"""Shared by the stories on the cluster: the chart installed with the project's images, and a user's namespace with
helpers to act in it and observe it. Used by `test_story*.py`; it only asserts that clients succeed."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from cluster.rig.faults import kill_containers
from cluster.rig.images import build_image
from cluster.rig.machine import WAIT_SECONDS
from cluster.rig.rig import WAITING, Rig
from cluster.rig.shared_storage import STORAGE_CLASS, Volume

ROOT = Path(__file__).parents[2]
CHART = ROOT / "charts" / "neuron-serving"
ANSWERS: dict[str, str] = json.loads((ROOT / "examples" / "demo-model" / "expected.json").read_text())

OPERATOR_NAMESPACE = "neuron-serving"
OPERATOR_SELECTOR = "app.kubernetes.io/name=neuron-operator"
OPERATOR_USER = f"system:serviceaccount:{OPERATOR_NAMESPACE}:neuron-operator"
SERVING = "neuron-serving.dev/role=leader"
FETCH, COMPILE = "neuron-serving.dev/role=fetch", "neuron-serving.dev/role=compile"
OURS = "app.kubernetes.io/managed-by=neuron-operator,app.kubernetes.io/component!=operator"
"""Objects of models. The ConfigMap that names the operator stays without them."""
CHILD_KINDS = (
    "deployments,services,configmaps,serviceaccounts,poddisruptionbudgets,networkpolicies,controllerrevisions,jobs,pods"
)

WEIGHTS_CLAIM, ARTIFACTS_CLAIM = "neuron-serving-weights", "neuron-serving-artifacts"
_TEMPLATE = {"pvcTemplate": {"storageClassName": STORAGE_CLASS, "size": "1Gi"}}
CLAIMS_OF_THE_CHART = {"weights": _TEMPLATE, "artifacts": _TEMPLATE}

RESOURCES = {
    "configmaps": ("/api/v1", "ConfigMap"),
    "persistentvolumeclaims": ("/api/v1", "PersistentVolumeClaim"),
    "pods": ("/api/v1", "Pod"),
    "secrets": ("/api/v1", "Secret"),
    "serviceaccounts": ("/api/v1", "ServiceAccount"),
    "services": ("/api/v1", "Service"),
    "controllerrevisions": ("/apis/apps/v1", "ControllerRevision"),
    "deployments": ("/apis/apps/v1", "Deployment"),
    "replicasets": ("/apis/apps/v1", "ReplicaSet"),
    "statefulsets": ("/apis/apps/v1", "StatefulSet"),
    "cronjobs": ("/apis/batch/v1", "CronJob"),
    "jobs": ("/apis/batch/v1", "Job"),
    "endpointslices": ("/apis/discovery.k8s.io/v1", "EndpointSlice"),
    "networkpolicies": ("/apis/networking.k8s.io/v1", "NetworkPolicy"),
    "poddisruptionbudgets": ("/apis/policy/v1", "PodDisruptionBudget"),
    "neuronmodels": ("/apis/neuron-serving.dev/v1alpha1", "NeuronModel"),
}
"""Where the API server has the resources that stories look at, and their kinds."""

TORCH = {"backend": "torch"}
"""The engine of a model whose answers are known."""

DEVICES_SEEN = "import glob, os; print(*sorted(os.minor(os.stat(d).st_rdev) for d in glob.glob('/dev/neuron*')))"

OPENED = f"""
import time, urllib.error, urllib.request
def opened(request, patience_seconds={WAIT_SECONDS}):
    # A node knows the pods of a Service a moment after the API server does.
    end = time.monotonic() + patience_seconds
    while True:
        try:
            return urllib.request.urlopen(request, timeout=patience_seconds)
        except urllib.error.URLError as error:
            if isinstance(error, urllib.error.HTTPError) or time.monotonic() > end:
                raise
            time.sleep(0.1)
"""

ASK = """
import json, sys, urllib.request
url, model, question = sys.argv[1:]
body = {"model": model, "messages": [{"role": "user", "content": question}], "temperature": 0}
headers = {"Content-Type": "application/json"}
request = urllib.request.Request(url + "/v1/chat/completions", json.dumps(body).encode(), headers)
print(json.load(opened(request))["choices"][0]["message"]["content"], end="")
"""


TRAFFIC = """
import http.client, json, os, select, sys, threading, time, urllib.request
url, num_clients, num_tokens, least = sys.argv[1], *map(int, sys.argv[2:5])
model, key = sys.argv[5:]
done, broken, lock = 0, [], threading.Lock()
pool, num_reused = [], 0
def lines_of(body, is_pooled):
    # With a connection of its own, or one of a pool: as httpx does, one that the server has closed is not used again.
    global num_reused
    path, headers = "/v1/completions", {"Content-Type": "application/json", "Authorization": "Bearer " + key}
    if not is_pooled:
        yield from urllib.request.urlopen(urllib.request.Request(url + path, body, headers), timeout=300)
        return
    with lock:
        kept = pool.pop(0) if pool else http.client.HTTPConnection(url.removeprefix("http://"), timeout=300)
    if kept.sock and select.select([kept.sock], [], [], 0)[0]:
        kept.close()
    num_reused += kept.sock is not None
    kept.request("POST", path, body, headers)
    yield from kept.getresponse()
    with lock:
        pool.append(kept)
def stream(is_pooled):
    body = {"model": model, "prompt": "kubectl", "temperature": 0, "stream": True, "ignore_eos": True}
    body |= {"max_tokens": num_tokens, "stream_options": {"include_usage": True}}
    usage, last = {}, b""
    for line in lines_of(json.dumps(body).encode(), is_pooled):
        line = line.strip()
        if line.startswith(b"data: {"):
            event = json.loads(line[6:])
            usage = event.get("usage") or usage
            if event.get("error"):
                return str(event["error"])
        last = line or last
    whole = last == b"data: [DONE]" and usage.get("completion_tokens") == num_tokens
    return None if whole else f"cut after {last!r} with {usage}"
def client(number):
    global done
    while done < least or not os.path.exists("/tmp/stop"):
        began = time.time()
        try:
            fault = stream(is_pooled=number % 2 == 0)
        except Exception as error:
            fault = repr(error)
        fault = fault and f"client {number}, {time.time() - began:.1f} s until {time.strftime('%T')}: {fault}"
        with lock:
            done += 1
            if fault:
                broken.append(fault)
            elif done == num_clients:
                print("steady", flush=True)
opened(urllib.request.Request(url + "/v1/models", headers={"Authorization": "Bearer " + key})).read()
clients = [threading.Thread(target=client, args=(number,)) for number in range(num_clients)]
for one in clients:
    one.start()
for one in clients:
    one.join()
print(json.dumps({"done": done, "broken": broken, "reused": num_reused}))
"""
"""Streams until /tmp/stop exists. Arguments: the URL, the number of clients, tokens of each answer, the fewest answers,
the model, and an API key. It prints `steady`, and at last how many ended, what was wrong with some, and how many reused
a connection."""


@dataclass(frozen=True)
class Images:
    """Names of the project's images, loaded into every node."""

    operator: str
    runtime: str


def load_images(rig: Rig, runtime_target: str = "runtime-cpu") -> Images:
    operator, runtime = build_image("operator"), build_image(runtime_target)
    for image in (operator, runtime):
        rig.load_image(image.archive)
    return Images(operator.name, runtime.name)


def install(rig: Rig, images: Images, *options: str, values: Mapping[str, object] | None = None) -> None:
    """`helm install --wait` with further options and values."""
    own = f"image.operator={images.operator},image.runtime={images.runtime},image.pullPolicy=Never"
    where = ("-n", OPERATOR_NAMESPACE, "--create-namespace", "--wait", WAITING)
    as_json = (f"--set-json={key}={json.dumps(value)}" for key, value in (values or {}).items())
    rig.helm("install", "neuron-serving", str(CHART), *where, "--set", own, *as_json, *options)


def upgrade(rig: Rig, *options: str) -> None:
    """`helm upgrade --wait` with further options; all others stay."""
    where = ("-n", OPERATOR_NAMESPACE, "--wait", WAITING, "--reuse-values")
    rig.helm("upgrade", "neuron-serving", str(CHART), *where, *options)


def uninstall(rig: Rig) -> None:
    rig.helm("uninstall", "neuron-serving", "-n", OPERATOR_NAMESPACE, "--wait", "--ignore-not-found")


def model_of(name: str, uri: str, **spec: Any) -> dict[str, Any]:
    """A NeuronModel on CPUs, unless `spec` says otherwise. It computes nothing, which starts in half of the CPU time,
    unless `spec` says `engine=TORCH`."""
    model = {"uri": uri, **spec.pop("model", {})}
    defaults = {
        "accelerator": {"type": "CPU"},
        "rollout": {"drainDelaySeconds": 1},
        "serving": {"maxModelLength": 256},
    }
    return {
        "apiVersion": "neuron-serving.dev/v1alpha1",
        "kind": "NeuronModel",
        "metadata": {"name": name},
        "spec": {"model": model, **defaults, **spec, "engine": {"backend": "simulated", **spec.get("engine", {})}},
    }


@contextmanager
def labelled(rig: Rig, node: str, label: str, value: str) -> Iterator[None]:
    before = rig.get("node", node)["metadata"]["labels"].get(label)
    rig.kubectl("label", "--overwrite", "node", node, f"{label}={value}")
    try:
        yield
    finally:
        rig.kubectl("label", "--overwrite", "node", node, f"{label}={before}" if before else f"{label}-")


def listed(rig: Rig, resources: str, *, namespace: str = "", selector: str = "") -> list[Any]:
    """The objects of resources, separated by commas, in a namespace or in all."""
    found: list[Any] = []
    for resource in resources.split(","):
        api, kind = RESOURCES[resource]
        place = f"{api}/namespaces/{namespace}" if namespace else api
        answer = rig.read(f"{place}/{resource}?{urlencode({'labelSelector': selector})}")
        found += [{"kind": kind, **item} for item in answer["items"]]
    return found


@dataclass(frozen=True)
class WatchEvent:
    """A change of an object. Versions grow with every change of any object in the cluster."""

    type: str
    object: Any

    @property
    def version(self) -> int:
        return int(self.object["metadata"]["resourceVersion"])

    @property
    def name(self) -> str:
        return str(self.object["metadata"]["name"])


def _watch_events(text: str) -> list[WatchEvent]:
    """The complete documents of a stream of JSON."""
    events, decoder, position = [], json.JSONDecoder(), 0
    while (position := text.find("{", position)) >= 0:
        try:
            event, position = decoder.raw_decode(text, position)
        except json.JSONDecodeError:  # not written to its end yet
            break
        events.append(WatchEvent(event["type"], event["object"]))
    return events


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

    def plugin(self, command: str, model: str, *arguments: str) -> str:
        """Output of `kubectl neuron COMMAND MODEL`."""
        program = str(Path(sys.executable).parent / "kubectl-neuron")
        return self.rig.command(program, command, model, "-n", self.namespace, *arguments)

    def items(self, resources: str, selector: str) -> list[Any]:
        return listed(self.rig, resources, namespace=self.namespace, selector=selector)

    def apply(self, body: Any) -> None:
        self.kubectl("apply", "-f", "-", stdin=json.dumps(body))

    def apply_all(self, bodies: Sequence[Any]) -> None:
        """In one request of kubectl, one after the other."""
        self.apply({"apiVersion": "v1", "kind": "List", "items": list(bodies)})

    def condition(self, model: str, kind: str) -> dict[str, Any]:
        body = self.rig.read(f"{RESOURCES['neuronmodels'][0]}/namespaces/{self.namespace}/neuronmodels/{model}")
        found = [c for c in body.get("status", {}).get("conditions", []) if c["type"] == kind]
        current = [c for c in found if c["observedGeneration"] == body["metadata"]["generation"]]
        return current[0] if current else {"status": "Unknown", "reason": "", "message": ""}

    def until(self, what: str, holds: Callable[[], Any]) -> Any:
        deadline = time.monotonic() + WAIT_SECONDS
        while not (result := holds()):
            if time.monotonic() > deadline:
                raise AssertionError(f"timed out after {WAIT_SECONDS} s: {what}\n{self.kubectl('describe', 'nm')}")
            time.sleep(0.25)
        return result

    def until_reason(self, model: str, reason: str, condition: str = "Ready") -> dict[str, Any]:
        """Waits until the condition has the reason and returns it."""

        def has_it() -> dict[str, Any] | None:
            found = self.condition(model, condition)
            return found if found["reason"] == reason else None

        found: dict[str, Any] = self.until(f"{model}: {reason}", has_it)
        print(f"    {model}: {reason}: {found['message']}")
        return found

    def until_gone(self, model: str, reason: str, condition: str = "Ready") -> None:
        """Waits until the condition has another reason, and prints how long that took."""
        began = time.monotonic()
        self.until(f"{model}: no longer {reason}", lambda: self.condition(model, condition)["reason"] != reason)
        print(f"    {model}: {reason} is gone after {time.monotonic() - began:.1f} s")

    def until_ready(self, replicas: int, model: str = "chat") -> None:
        self.until(
            f"{replicas} replicas ready",
            lambda: self.condition(model, "Ready")["status"] == "True" and len(self.ready_pods(model)) == replicas,
        )

    def until_replaced(self, before: Collection[str], replicas: int) -> None:
        """Waits until other pods are ready and those of `before` have ended."""
        self.until("an observed edit", lambda: self.condition("chat", "UpToDate")["reason"] != "")
        self.until_ready(replicas)
        self.until("old pods gone", lambda: {p["metadata"]["name"] for p in self.serving_pods()}.isdisjoint(before))

    def created_jobs(self, since: int) -> list[str]:
        """Names of the Jobs that were created in the namespace, from request `since` of the audit log on."""
        events = self.rig.audit_events()[since:]
        ours = [e for e in events if e.namespace == self.namespace and (e.verb, e.resource) == ("create", "jobs")]
        return [event.name for event in ours if event.code == 201]

    @contextmanager
    def watching(self, kind: str) -> Iterator[Callable[[], list[WatchEvent]]]:
        """Records every change of the objects of a kind; the function returns those so far."""
        command = ("kubectl", "-n", self.namespace, "get", kind, "--watch", "--output-watch-events", "-o", "json")
        environment = {**os.environ, **self.rig.environment}
        with (
            tempfile.TemporaryFile("w+") as output,
            subprocess.Popen(command, env=environment, stdout=output) as process,
        ):

            def events() -> list[WatchEvent]:
                output.seek(0)
                return _watch_events(output.read())

            try:
                yield events
            finally:
                process.terminate()

    def serving_pods(self, model: str = "chat") -> list[Any]:
        return self.items("pods", f"{SERVING},neuron-serving.dev/model={model}")

    def ready_pods(self, model: str = "chat") -> list[Any]:
        return [pod for pod in self.serving_pods(model) if is_ready(pod)]

    def kill_operator(self) -> None:
        """Kills every replica with SIGKILL and deletes the pods, to avoid the kubelet's back-off."""
        kill_containers(self.rig, OPERATOR_NAMESPACE, OPERATOR_SELECTOR)
        self.rig.kubectl("-n", OPERATOR_NAMESPACE, "delete", "pods", "-l", OPERATOR_SELECTOR, "--wait=false")

    def run_client(self, image: str, name: str, code: str, *arguments: str) -> str:
        """Runs Python in a new pod, with `OPENED` for requests, and returns its output."""
        self.start_client(image, name, code, *arguments)
        return self.end_client(name)

    def start_client(self, image: str, name: str, code: str, *arguments: str, node: str = "") -> None:
        container = {
            "name": "client",
            "image": image,
            "imagePullPolicy": "Never",
            "command": ["python", "-c", OPENED + code, *arguments],
        }
        self.apply(
            {
                "apiVersion": "v1",
                "kind": "Pod",
                "metadata": {"name": name},
                "spec": {
                    "restartPolicy": "Never",
                    "containers": [container],
                    "nodeSelector": {"kubernetes.io/hostname": node} if node else {},
                },
            }
        )

    def end_client(self, name: str) -> str:
        """Output of a finished client."""
        path = f"/api/v1/namespaces/{self.namespace}/pods/{name}"

        def ended() -> str | None:
            phase: str = self.rig.read(path)["status"]["phase"]
            return phase if phase in ("Succeeded", "Failed") else None

        phase = self.until(f"pod {name} to end", ended)
        output = self.kubectl("logs", name)
        assert phase == "Succeeded", output
        self.kubectl("delete", "pod", name, "--wait=false")
        return output

    @contextmanager
    def traffic(
        self,
        image: str,
        *,
        clients: int,
        num_tokens: int,
        least: int,
        is_kept: bool = True,
        model: str = "chat",
        service: str = "",
        key: str = "none",
    ) -> Iterator[None]:
        """Clients stream from the model all the time, at least so many answers: each must be whole.

        is_kept: whether an engine serves meanwhile that lets clients keep their connections.
        service: the address to ask; by default the model's own.
        """
        name, own = f"traffic-{uuid.uuid4().hex[:4]}", f"{model}.{self.namespace}.svc.cluster.local:8000"
        numbers = (str(clients), str(num_tokens), str(least))
        self.start_client(image, name, TRAFFIC, f"http://{service or own}", *numbers, model, key)
        self.kubectl("wait", "--for=jsonpath={.status.containerStatuses[0].started}=true", f"pod/{name}", WAITING)
        self.until("steady traffic", lambda: "steady" in self.kubectl("logs", name))
        yield
        self.kubectl("exec", name, "--", "touch", "/tmp/stop")
        result = json.loads(self.end_client(name).splitlines()[-1])
        print(f"    {result['done']} streams, {len(result['broken'])} broken, {result['reused']} on kept connections")
        assert not result["broken"], result["broken"]
        assert bool(result["reused"]) == is_kept
        assert result["done"] >= least

    def artifact(self, model: str) -> str:
        """The key of the artifact that a model uses."""
        (found,) = json.loads(self.kubectl("get", "nm", model, "-o", "jsonpath={.status.artifacts}"))
        return str(found["key"])

    def minors_seen(self, pod: Any) -> set[int]:
        """Minor numbers of the device files in the container."""
        return set(map(int, self.kubectl("exec", pod["metadata"]["name"], "--", "python", "-c", DEVICES_SEEN).split()))

    def devices_held(self, pod: Any) -> set[int]:
        """Devices, or cores, of the pod, according to its kubelet."""
        held = self.rig.device_holdings(pod["spec"]["nodeName"])
        ids = [i for h in held if (h.namespace, h.pod) == (self.namespace, pod["metadata"]["name"]) for i in h.ids]
        return {int(re.sub(r"\D", "", device)) for device in ids}


def entries(volume: Volume) -> list[str]:
    """The complete models of a store."""
    return sorted(path.name for path in volume.folder.iterdir() if not path.name.startswith("."))


def is_ready(pod: Any) -> bool:
    """Whether it is ready, and nobody has deleted it."""
    conditions = pod["status"].get("conditions", [])
    return "deletionTimestamp" not in pod["metadata"] and ("Ready", "True") in [
        (one["type"], one["status"]) for one in conditions
    ]


def requests_devices(pod: Any) -> bool:
    return any("aws.amazon.com/neuron" in c["resources"].get("requests", {}) for c in pod["spec"]["containers"])


def check_order(pods: list[WatchEvent], models: list[WatchEvent]) -> None:
    """No pod that requests devices was created before the status of its model said that its revision is compiled."""
    told: dict[tuple[str, str], int] = {}
    for event in models:
        status = event.object.get("status", {})
        if any((c["type"], c["status"]) == ("Compiled", "True") for c in status.get("conditions", ())):
            told.setdefault((event.name, status["updateRevision"]), event.version)
    holding = [event for event in pods if event.type == "ADDED" and requests_devices(event.object)]
    assert holding
    for event in holding:
        labels = event.object["metadata"]["labels"]
        assert told[labels["neuron-serving.dev/model"], labels["neuron-serving.dev/revision"]] < event.version
