"""Faults under a user's model, on the real cluster with the real images: refusing hubs, failing processes, pods,
devices and nodes, wrong images and names. Each shows a reason of docs/neuronmodel.md and clears when undone."""

from __future__ import annotations

import base64
import contextlib
import json
import re
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from cluster.rig.faults import devices_unhealthy, frozen, kill_processes, power_off
from cluster.rig.rig import WAITING, Rig
from cluster.servers import Hub, hub_in_pod
from cluster.stories import (
    ANSWERS,
    CHILD_KINDS,
    OPERATOR_NAMESPACE,
    OPERATOR_SELECTOR,
    OPERATOR_USER,
    OURS,
    TORCH,
    Story,
    install,
    load_images,
    model_of,
    uninstall,
)
from helpers.failures import check_says

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(1800, func_only=True)]

QUESTION = "How do I resolve a model again?"
TOKEN, WRONG_TOKEN = "hf_Aright0000000000000000000000000000", "hf_Wrong0000000000000000000000000000"
API_KEY = "sk-Cluster00000000000000000000000000"
CPU_NODE, NEURON_NODE = "n3", "n1"
ENGINE_MODULE = "neuron_runtime.processes.engine"
PAUSED = "neuron-serving.dev/paused"
NUM_TOKENS = 700
"""Tokens of a long answer: it takes many times as long as ending a pod."""

CHAT = """
import json, sys, urllib.request
question, url = sys.argv[1:]
body = {"model": "chat", "messages": [{"role": "user", "content": question}], "temperature": 0}
request = urllib.request.Request(
    url + "/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
)
answer = json.load(opened(request))
print(answer["choices"][0]["message"]["content"])
"""

ASK_LOCKED = """
import json, sys, urllib.error, urllib.request
url, key = sys.argv[1:]
def status(**headers):
    try:
        return opened(urllib.request.Request(url + "/v1/models", headers=headers)).status
    except urllib.error.HTTPError as refused:
        return refused.code
print(status(), status(Authorization="Bearer other"), status(Authorization="Bearer " + key))
"""

LONG_ANSWER = """
import json, sys, time, urllib.request
num_tokens, url = int(sys.argv[1]), sys.argv[2]
body = {"model": "chat", "prompt": "kubectl", "temperature": 0, "stream": True, "ignore_eos": True}
body |= {"max_tokens": num_tokens, "stream_options": {"include_usage": True}}
request = urllib.request.Request(
    url + "/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
)
pieces, usage, error, ended = 0, None, None, False
for line in opened(request):
    if line.startswith(b"data: {"):
        event = json.loads(line[6:])
        usage, error = event.get("usage") or usage, event.get("error") or error
        pieces += bool(event.get("choices"))
        if pieces == 1:
            print("streaming", flush=True)
    ended = ended or line.strip() == b"data: [DONE]"
print(json.dumps({"usage": usage, "error": error, "done": ended, "unix_seconds": time.time()}))
"""


@dataclass(frozen=True)
class Installation:
    rig: Rig
    runtime_image: str
    audit_begins: int
    """Number of requests that the API server had answered before."""
    hub: Hub
    commit: str
    """The commit of the demo model on the hub."""


@pytest.fixture(scope="module")
def installation(rig: Rig) -> Iterator[Installation]:
    """The operator, configured with a hub in the cluster that has the demo model open, gated, and once more."""
    images = load_images(rig)
    audit_begins = len(rig.audit_events())
    models = {"demo/demo": 0, "demo/gated": 0, "demo/patient": 0}
    with contextlib.ExitStack() as undo:
        namespace = f"hub-{uuid.uuid4().hex[:8]}"
        hub = undo.enter_context(
            hub_in_pod(rig, namespace, images.runtime, node=CPU_NODE, models=models, gated={"demo/gated": TOKEN})
        )
        values = {
            # Not on a node that a test turns off: other tests cover the loss of the operator's node.
            "nodeSelector": {"kubernetes.io/hostname": CPU_NODE},
            "jobs": {"env": [{"name": "HF_ENDPOINT", "value": hub.endpoint}]},
        }
        undo.callback(uninstall, rig)
        install(rig, images, *(f"--set-json={key}={json.dumps(value)}" for key, value in values.items()))
        yield Installation(rig, images.runtime, audit_begins, hub, hub.commit("demo/demo"))


@pytest.fixture(scope="module")
def story(installation: Installation) -> Iterator[Story]:
    """A user's namespace with one replica of the open model, `chat`."""
    namespace = f"test-{uuid.uuid4().hex[:8]}"
    rig = installation.rig
    rig.create_namespace(namespace)
    story = Story(rig, namespace)
    story.apply(model_of("chat", "hf://demo/demo", engine=TORCH, serving={"maxModelLength": 2048}))
    yield story
    rig.kubectl("delete", "namespace", namespace, "--wait=false")


def test_a_model_is_downloaded_from_a_hub_and_its_token_does_not_leak(installation: Installation, story: Story) -> None:
    credentials = {"credentialsSecretRef": {"name": "hub-token"}}
    with story.stage("hub: a Job shows what it waits for"):
        story.until_ready(1)
        installation.hub.order(store_failure=503)
        story.apply(model_of("patient", "hf://demo/patient"))
        expected = r"reading the model's configuration: http://hub\S+ failed \(.*503.*\); retrying in \d+ s"
        story.until("a retry", lambda: re.match(expected, story.condition("patient", "Ready")["message"]))
        print(f"    {story.condition('patient', 'Ready')['message']}")
        installation.hub.order(store_failure=0)
        story.until("resolved", lambda: story.condition("patient", "ModelResolved")["status"] == "True")
        story.kubectl("delete", "nm", "patient")
    with story.stage("hub: refusals are reported before a serving pod is created"):
        _give_token(story, WRONG_TOKEN)
        story.apply(model_of("ghost", "hf://demo/ghost"))
        story.apply(model_of("nobody", "hf://demo/gated"))
        story.apply(model_of("gated", "hf://demo/gated", model=credentials))
        for name, reason in (
            ("ghost", "ModelNotFound"),
            ("nobody", "WeightsUnauthorized"),
            ("gated", "WeightsUnauthorized"),
        ):
            story.until_reason(name, reason)
            assert story.condition(name, "ModelResolved")["reason"] == reason
            assert (
                story.items("pods,deployments", f"neuron-serving.dev/role=leader,neuron-serving.dev/model={name}") == []
            )
    with story.stage("hub: the right token, and a refresh"):
        _give_token(story, TOKEN)
        story.kubectl("annotate", "nm", "gated", "neuron-serving.dev/refresh=1")
        story.until_ready(1, "gated")
        story.until_ready(1)
    for name in ("chat", "gated"):
        fetched = story.condition(name, "WeightsReady")
        assert (fetched["status"], fetched["reason"]) == ("True", "FetchedByPods")
        digest = story.kubectl("get", "nm", name, "-o", "jsonpath={.status.model.digest}")
        assert digest == installation.commit
    with story.stage("hub: an answer"):
        assert _ask(installation, story) == ANSWERS[QUESTION]

    (pod,) = story.serving_pods("gated")
    env = {variable["name"]: variable for variable in pod["spec"]["containers"][0]["env"]}
    reference = {"name": "hub-token", "key": "HF_TOKEN", "optional": True}
    assert env["HF_TOKEN"] == {"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": reference}}
    output = _everything_written(story)
    assert "demo/gated" in output
    assert "neuron-runtime: ready after" in output
    for token in (TOKEN, WRONG_TOKEN):
        assert token not in output
        assert base64.b64encode(token.encode()).decode() not in output
    story.kubectl("delete", "nm", "ghost", "nobody", "gated")


def test_a_killed_engine_is_replaced_in_its_pod_and_its_streams_end_with_an_error(
    installation: Installation, story: Story
) -> None:
    story.until_ready(1)
    (before,) = story.ready_pods()
    name = before["metadata"]["name"]
    with story.stage("kill: the stream gets an error"):
        _begin_stream(installation, story, "cut")
        kill_processes(story.rig, before, ENGINE_MODULE)
        cut = json.loads(story.end_client("cut").splitlines()[-1])
        assert not cut["done"]
        assert cut["usage"] is None
        assert "engine process was killed by SIGKILL" in cut["error"]["message"]
    with story.stage("kill: ready again"):
        story.until("a second engine", lambda: story.kubectl("logs", name).count("ready after") == 2)
        story.until_ready(1)
        assert _ask(installation, story) == ANSWERS[QUESTION]
    (after,) = story.serving_pods()
    assert after["metadata"]["uid"] == before["metadata"]["uid"]
    assert [status["restartCount"] for status in after["status"]["containerStatuses"]] == [0]


def test_a_deleted_pod_finishes_its_running_answers(installation: Installation, story: Story) -> None:
    story.until_ready(1)
    (before,) = story.ready_pods()
    with story.stage("drain: the stream runs to its end"):
        _begin_stream(installation, story, "long")
        with frozen(story.rig, before, ENGINE_MODULE):  # so that the answer cannot end before it is observed
            story.kubectl("delete", "pod", before["metadata"]["name"], "--wait=false")
            story.until_reason("chat", "Draining")
            seen = time.time()
        output = json.loads(story.end_client("long").splitlines()[-1])
        assert output["error"] is None
        assert output["done"]
        assert output["usage"]["completion_tokens"] == NUM_TOKENS
        assert output["unix_seconds"] > seen, "the answer was too short to be drained"
    with story.stage("drain: ready again"):
        story.until_ready(1)
    (after,) = story.ready_pods()
    assert after["metadata"]["uid"] != before["metadata"]["uid"]


def test_failed_devices_and_lost_nodes_are_reported_and_recover(story: Story) -> None:
    on_node = {"spec": {"nodeSelector": {"kubernetes.io/hostname": NEURON_NODE}}}
    neuron = {"type": "Neuron", "devices": 6}
    model = model_of("devices", "file:///models/demo", accelerator=neuron, podTemplate=on_node)
    with story.stage("devices: one is not healthy"), devices_unhealthy(story.rig, NEURON_NODE, [4]):
        story.apply(model)
        check_says("unhealthy-device", story.until_reason("devices", "InsufficientNeuron"))
    with story.stage("devices: healthy again"):
        story.until_ready(1, "devices")
    with story.stage("node: without power"), power_off(story.rig, NEURON_NODE):
        check_says("node-lost", story.until_reason("devices", "NodeLost"))
    with story.stage("node: with power again"):
        story.until_ready(1, "devices")
    story.kubectl("delete", "nm", "devices")


def test_pods_that_a_node_would_refuse_are_not_started_or_started_ever_more_rarely(story: Story) -> None:
    """Two cores of an inf2.24xlarge, whose device plugin grants one or all. Then with a type that the operator does not
    know, so that the kubelet has to refuse the pods."""
    rig = story.rig
    type_label = "node.kubernetes.io/instance-type"
    known = rig.get("node", NEURON_NODE)["metadata"]["labels"][type_label]
    assert known == "inf2.24xlarge"
    cores = {"accelerator": {"type": "Neuron", "cores": 2}}

    def created() -> int:
        return sum(pod.startswith("cores-") for pod in _created_pods(story))

    try:
        with story.stage("sizes: known to be refused"):
            rig.kubectl("label", "node", NEURON_NODE, "neuron-serving.dev/allocation=cores")
            story.apply(model_of("cores", "file:///models/demo", **cores))
            message = story.until_reason("cores", "TopologyImpossible")["message"]
            assert f"({NEURON_NODE}) grant to one pod; choose one of 1, 12; " in message
            (pending,) = story.serving_pods("cores")
            assert pending["status"]["phase"] == "Pending"
            assert created() == 1
        with story.stage("sizes: refused by the kubelet"):
            rig.kubectl("label", "node", NEURON_NODE, "--overwrite", f"{type_label}=unknown.large")
            check_says("refused-by-the-node", story.until_reason("cores", "AllocationRejected"))
            before = created()
            time.sleep(12)  # there would be dozens of pods; the next attempt is after ten seconds
            print(f"    {before} pods created, then {created() - before}")
            assert created() - before <= 8
            pods = story.serving_pods("cores")
            assert len([pod for pod in pods if pod["status"]["phase"] == "Failed"]) <= 2
            assert story.until_reason("cores", "AllocationRejected")
        with story.stage("sizes: corrected"):
            story.apply(model_of("cores", "file:///models/demo", accelerator={"type": "Neuron", "cores": 1}))
            story.until_ready(1, "cores")
            story.until("no failed pod", lambda: len(story.serving_pods("cores")) == 1)
    finally:
        rig.kubectl("label", "node", NEURON_NODE, "--overwrite", f"{type_label}={known}")
        rig.kubectl("label", "node", NEURON_NODE, "neuron-serving.dev/allocation-")
    story.kubectl("delete", "nm", "cores")


def test_what_breaks_a_pod_from_outside_is_named(story: Story) -> None:
    """A missing ConfigMap, a variable, a sidecar."""
    words = {"name": "WORDS", "valueFrom": {"configMapKeyRef": {"name": "words", "key": "all"}}}
    home = {"name": "PYTHONHOME", "value": "/nowhere"}
    with story.stage("outside: models that work"):
        for name in ("mapped", "homeless", "joined"):
            story.apply(model_of(name, "file:///models/demo", replicas=0))
        for name in ("mapped", "homeless", "joined"):
            story.until_reason(name, "ScaledToZero")
    with story.stage("outside: reported"):
        story.apply(model_of("mapped", "file:///models/demo", engine={"env": [words]}))
        story.apply(model_of("homeless", "file:///models/demo", engine={"env": [home]}))
        story.apply(model_of("joined", "file:///models/demo"))
        image = story.items("deployments", "neuron-serving.dev/model=joined")[0]["spec"]["template"]["spec"]
        sidecar = {
            "name": "proxy",
            "image": image["containers"][0]["image"],
            "command": ["sh", "-c", "echo busy; exit 3"],
        }
        patch = {"spec": {"template": {"spec": {"containers": [{**sidecar, "imagePullPolicy": "Never"}]}}}}
        story.kubectl("patch", "deployment", "joined", "--type=strategic", "-p", json.dumps(patch))
        assert 'configmap "words" not found' in story.until_reason("mapped", "ConfigMapNotFound")["message"]
        crashed = story.until_reason("homeless", "CrashLoop")["message"]
        assert "check the variables in engine.env: Python did not start" in crashed
        assert "no Python frame" not in crashed
        joined = story.until_reason("joined", "CrashLoop")["message"]
        assert re.search(r"container proxy ended with exit code 3 .* -c proxy; container proxy is not the", joined)
    with story.stage("outside: corrected"):
        story.kubectl("create", "configmap", "words", "--from-literal=all=yes")
        story.until_ready(1, "mapped")
        events = json.loads(story.kubectl("get", "events", "-o", "json"))["items"]
        assert not [e for e in events if e["type"] == "Warning" and "None" in e["message"]]
    story.kubectl("delete", "nm", "mapped", "homeless", "joined")


def test_user_errors_are_reported_and_clear_when_corrected(installation: Installation, story: Story) -> None:
    image = {"image": "registry.invalid/runtime:1", "imagePullPolicy": "IfNotPresent"}
    theirs = {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "taken"}, "spec": {"ports": [{"port": 80}]}}
    story.apply(theirs)
    before = _get(story, "service", "taken")
    with story.stage("names and images: reported"):
        keys = {"apiKeySecretRef": {"name": "keys", "key": "api"}}
        story.apply(model_of("locked", "hf://demo/demo", engine=TORCH, serving=keys))
        # Zero replicas, so that only the resolution is waited for, which the next edit needs.
        story.apply(model_of("pulls", "hf://demo/demo", replicas=0))
        story.apply(model_of("taken", "hf://demo/demo", replicas=0))
        story.apply(model_of("never", "hf://demo/demo", engine=image))
        story.until_reason("pulls", "ScaledToZero")
        story.apply(model_of("pulls", "hf://demo/demo", engine=image))
        assert "Service taken" in story.until_reason("taken", "NameConflict")["message"]
        assert image["image"] in story.until_reason("pulls", "ImagePull")["message"]
        never = f"image {image['image']} cannot be pulled"
        story.until("the message names the Job's image", lambda: never in story.condition("never", "Ready")["message"])
        assert story.condition("never", "Ready")["reason"] == "ImagePull"
        assert _get(story, "service", "taken") == before
        missing = story.until_reason("locked", "SecretNotFound")["message"]
        assert "serving.apiKeySecretRef" in missing
        assert 'secret "keys" not found' in missing
    with story.stage("names and images: undone"):
        story.apply(
            {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "keys"}, "stringData": {"api": API_KEY + "\n"}}
        )
        story.kubectl("delete", "service", "taken")
        story.apply(model_of("pulls", "hf://demo/demo", replicas=0))
        story.until_reason("pulls", "ScaledToZero")
        story.until_reason("taken", "ScaledToZero")
        assert (
            _get(story, "service", "taken")["metadata"]["labels"]["app.kubernetes.io/managed-by"] == "neuron-operator"
        )
    with story.stage("keys: asked for"):
        story.until_ready(1, "locked")
        url = _url(story, "locked")
        assert story.run_client(installation.runtime_image, "locked", ASK_LOCKED, url, API_KEY) == "401 401 200\n"
        answer = story.plugin("chat", "locked", QUESTION, "--temperature", "0")
        assert answer.startswith(ANSWERS[QUESTION])
        (pod,) = story.ready_pods("locked")
        output = story.kubectl("get", f"nm,events,{CHILD_KINDS}", "-o", "yaml")
        output += story.kubectl("logs", pod["metadata"]["name"])
        assert "apiKeySecretRef" in output
        assert '"api_key":1' in output
        assert API_KEY not in output
        story.kubectl("delete", "nm", "locked")

    with story.stage("paused: edits wait"):
        story.until_ready(1)
        deployment = _get(story, "deployment", "chat")["spec"]
        story.kubectl("annotate", "nm", "chat", f"{PAUSED}=true")
        story.apply(model_of("chat", "hf://demo/demo", engine=TORCH, replicas=0, serving={"maxModelLength": 512}))
        story.until("Paused", lambda: story.condition("chat", "UpToDate")["reason"] == "Paused")
        assert _get(story, "deployment", "chat")["spec"] == deployment
        assert len(story.ready_pods()) == 1
        story.kubectl("annotate", "nm", "chat", f"{PAUSED}-")
        story.until_reason("chat", "ScaledToZero")
        assert story.ready_pods() == []
    with story.stage("delete: nothing is left"):
        story.kubectl("delete", "nm", "--all")
        story.until("no child left", lambda: not story.items(CHILD_KINDS, OURS))
    asked = [e for e in story.rig.audit_events()[installation.audit_begins :] if e.user == OPERATOR_USER]
    assert asked
    # While it starts, a busy API server may not know of its role yet.
    refused = [e for e in asked if e.code == 403 and e.name != "none"]
    assert refused == [], "the API server refused a request of the operator"


def _give_token(story: Story, token: str) -> None:
    story.apply(
        {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "hub-token"}, "stringData": {"HF_TOKEN": token}}
    )


def _get(story: Story, *arguments: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(story.kubectl("get", *arguments, "-o", "json"))
    return found


def _created_pods(story: Story) -> list[str]:
    """Names of all pods that were created in the story's namespace, deleted ones included."""
    events = json.loads(story.kubectl("get", "events", "-o", "json"))["items"]
    created = {e["message"] for e in events if e["reason"] == "SuccessfulCreate"}
    return [message.removeprefix("Created pod: ") for message in created]


def _url(story: Story, model: str = "chat") -> str:
    return f"http://{model}.{story.namespace}.svc.cluster.local:8000"


def _ask(installation: Installation, story: Story) -> str:
    return story.run_client(installation.runtime_image, "asks", CHAT, QUESTION, _url(story)).strip()


def _begin_stream(installation: Installation, story: Story, name: str) -> None:
    """Starts the client `name` in the cluster and returns when it has the start of a long answer."""
    story.start_client(installation.runtime_image, name, LONG_ANSWER, str(NUM_TOKENS), _url(story))
    story.kubectl("wait", "--for=jsonpath={.status.containerStatuses[0].started}=true", f"pod/{name}", WAITING)
    story.until("the stream's beginning", lambda: "streaming" in story.kubectl("logs", name))


def _everything_written(story: Story) -> str:
    """Everything that the operator wrote to its log and objects, and the logs of its pods, without Secrets."""
    kinds = f"nm,events,{CHILD_KINDS}"
    output = [story.kubectl("get", kinds, "-o", "yaml"), story.kubectl("get", "nm,pods", "-o", "wide")]
    where = ("-n", OPERATOR_NAMESPACE)
    output += [story.rig.kubectl(*where, "get", "pods,configmaps,leases,events", "-o", "yaml")]
    output += [story.rig.kubectl(*where, "logs", "-l", OPERATOR_SELECTOR, "--tail=-1")]
    # Errors are ignored because the pod of a retried Job may not have started, or may be gone.
    output += [story.kubectl("logs", "-l", OURS, "--tail=-1", "--ignore-errors")]
    return "\n".join(output)
