"""Each failure of docs/troubleshooting.md without a cluster: what Kubernetes reports, and what the runtime says, leads
to its reason and its message. The long stories of tests/cluster induce the same failures on kubelets."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from helpers.failures import FAILURES, check_says
from helpers.file_faults import FileFaults
from helpers.hub import Shelf, serving
from helpers.operator_worlds import (
    REFUSED,
    SETTINGS,
    SPEC,
    ended,
    find,
    fresh,
    job_pod,
    resolved_world,
    serving_pod,
    settle,
    successful_pod,
    unscheduled_pod,
)
from helpers.tiny_model import write_tiny_model
from neuron_operator.api import names
from neuron_operator.decide.course import decide
from neuron_operator.read.world import Decision, FreeDevices, NodeDevices, Object, Refusal, RefusalCause
from neuron_runtime import record
from neuron_runtime.backend.neuron.devices import PLATFORMS, Target, check_cores
from neuron_runtime.backend.neuron.failures import classified
from neuron_runtime.backend.simulated.options import read_options
from neuron_runtime.backend.torch import graphs
from neuron_runtime.backend.torch.architecture import decoder_config
from neuron_runtime.checkpoint import read_checkpoint
from neuron_runtime.config import ModelSource
from neuron_runtime.errors import FatalError
from neuron_runtime.uris import HubModel
from neuron_runtime.weights.fetching import materialize
from neuron_runtime.weights.hub import HubSource
from neuron_runtime.weights.transfer import Tools

TESTS = Path(__file__).parents[1]
DEMO_MODEL = TESTS.parent / "examples" / "demo-model"
INF2 = {"node.kubernetes.io/instance-type": "inf2.24xlarge"}
CREATING = {"waiting": {"reason": "ContainerCreating"}}
BACK_OFF = {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off 10s restarting failed container"}}
UNREADY = {"type": "Ready", "status": "False", "lastTransitionTime": "2026-03-01T11:55:00Z"}


def nodes(num_free: int) -> FreeDevices:
    return FreeDevices((NodeDevices("n1", 6, num_free, 12, 2 * num_free, labels=INF2),))


def seen(
    *, unscheduled: str = "", event: tuple[str, str] | None = None, spec: Any = None, **seen_of_pod: Any
) -> Decision:
    """The decision about a model of which one pod is like this, with free devices of one node, or with an event."""
    world, _ = resolved_world(spec={**SPEC, "replicas": 1, **(spec or {})})
    deployment, free = find(world.children, "Deployment"), seen_of_pod.pop("free", None)
    pod = unscheduled_pod(deployment, unscheduled) if unscheduled else serving_pod(deployment, **seen_of_pod)
    events = ()
    if event is not None:
        events = ({"regarding": {"kind": "Pod", "name": "chat-1"}, "reason": event[0], "note": event[1]},)
    return decide(replace(world, pods=(pod,), free=free, events=events), SETTINGS)


def denied(message: str) -> Decision:
    """The decision about a model whose pods the API server refuses."""
    world, _ = resolved_world()
    failed = {"type": "ReplicaFailure", "status": "True", "reason": "FailedCreate", "message": message}
    failure = {"conditions": [failed]}
    children = tuple({**c, "status": failure} if c["kind"] == "Deployment" else c for c in world.children)
    return decide(replace(world, children=children), SETTINGS)


def refused(cause: RefusalCause, name: str, message: str = "") -> Decision:
    world, _ = resolved_world()
    return decide(replace(world, refusals=(Refusal(cause, "Service", name, message),)), SETTINGS)


def manifest(**spec: Any) -> Decision:
    """The decision about a manifest once the model is resolved."""
    return resolved_world(spec={**SPEC, **spec})[1]


def waiting(image: str, reason: str) -> Decision:
    said = f'Back-off pulling image "{image}": ErrImagePull: {reason}'
    state = {"waiting": {"reason": "ImagePullBackOff", "message": said}}
    container = {"name": "runtime", "image": image, "ready": False, "restartCount": 0, "state": state}
    return seen(containerStatuses=[container])


def without_config(text: str) -> Decision:
    return seen(state={"waiting": {"reason": "CreateContainerConfigError", "message": text}})


def paused() -> Decision:
    world, _ = resolved_world(spec={**SPEC, "replicas": 0})
    metadata = {**world.body["metadata"], "generation": 2, "annotations": {"neuron-serving.dev/paused": "true"}}
    return decide(replace(world, body={**world.body, "metadata": metadata, "spec": {**SPEC, "replicas": 1}}), SETTINGS)


def lost() -> Decision:
    said = {"type": "Ready", "status": "Unknown", "reason": "NodeStatusUnknown", "message": "Kubelet stopped posting."}
    node = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": "n1"}, "status": {"conditions": [said]}}
    world, _ = resolved_world(spec={**SPEC, "replicas": 1})
    pod = serving_pod(find(world.children, "Deployment"), conditions=[UNREADY])
    return decide(replace(world, pods=(pod,), nodes=(node,)), SETTINGS)


def unmounted(volume: str, text: str, **spec: Any) -> Decision:
    return seen(
        state=CREATING, event=("FailedMount", f'MountVolume.SetUp failed for volume "{volume}" : {text}'), spec=spec
    )


def unscheduled_job(role: str, verdict: str, *events: Object, **spec: Any) -> Decision:
    """The decision about a model whose Job of this role cannot start; those before it have succeeded."""
    world, decision = settle(fresh(spec={**SPEC, **spec}))
    while (job := find(decision.desired, "Job"))["metadata"]["labels"][names.ROLE_LABEL] != role:
        world, decision = settle(replace(world, pods=(*world.pods, successful_pod(job))))
    conditions = [{"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": NO_NODE % verdict}]
    pod = {**job_pod(job, {}, phase="Pending", conditions=conditions), "spec": job["spec"]["template"]["spec"]}
    return decide(replace(world, pods=(*world.pods, pod), claim_events=events), SETTINGS)


def claim_not_bound() -> Decision:
    claim = {"kind": "PersistentVolumeClaim", "name": "neuron-serving-weights"}
    event = {"regarding": claim, "reason": "ProvisioningFailed", "note": 'storageclass "efs" not found'}
    storage = {"weights": {"persistentVolumeClaim": {"claimName": claim["name"]}}}
    return unscheduled_job("fetch", "pod has unbound immediate PersistentVolumeClaims", event, storage=storage)


FORBIDDEN = 'pods "chat-x" is forbidden: '
NO_NODE = "0/3 nodes are available: %s. preemption: 0/3 nodes are available: 3 Preemption is not helpful."
NO_DEVICES = NO_NODE % "3 Insufficient aws.amazon.com/neuron"
UNMATCHED = "3 node(s) didn't match Pod's node affinity/selector"
PULLING = "localhost:5005/private/runtime:1"
LIMIT = {"spec": {"resources": {"limits": {"memory": "24Mi"}}}}

REPORTED: dict[str, Callable[[], Decision]] = {
    "no-devices": lambda: seen(unscheduled=NO_DEVICES, free=nodes(3)),
    "wrong-size": lambda: manifest(accelerator={"devices": 5}),
    "taint": lambda: seen(unscheduled=NO_NODE % "3 node(s) had untolerated taint {team: other}"),
    "no-node": lambda: seen(unscheduled=NO_NODE % UNMATCHED),
    "unhealthy-device": lambda: seen(unscheduled=NO_DEVICES, free=nodes(5)),
    "quota": lambda: denied(FORBIDDEN + "exceeded quota: few, requested: pods=1, used: pods=0, limited: pods=0"),
    "limit-range": lambda: denied(FORBIDDEN + "maximum memory usage per Container is 64Mi, but limit is 1Gi"),
    "pod-security": lambda: denied(FORBIDDEN + 'violates PodSecurity "restricted:latest": runAsNonRoot != true'),
    "policy": lambda: denied(
        FORBIDDEN + "ValidatingAdmissionPolicy 'p' with binding 'p' denied request: pods need a ticket"
    ),
    "webhook": lambda: denied(
        'Internal error occurred: failed calling webhook "tickets.example.com": connection refused'
    ),
    "name-taken": lambda: refused(RefusalCause.TAKEN, "name-taken"),
    "forbidden": lambda: refused(
        RefusalCause.FORBIDDEN, "forbidden", 'services is forbidden: User "x" cannot create resource "services"'
    ),
    "not-supported": lambda: manifest(accelerator={"instanceTypes": ["inf2.xlarge"]}),
    "too-long": lambda: manifest(serving={"maxModelLength": 999_999}),
    "paused": paused,
    "image-missing": lambda: waiting("registry.invalid/runtime:1", "dial tcp: lookup registry.invalid: no such host"),
    "pull-secret": lambda: waiting(PULLING, "failed to authorize: unexpected status: 401 Unauthorized"),
    "secret-missing": lambda: unmounted(
        "api-key", 'secret "keys" not found', serving={"apiKeySecretRef": {"name": "keys", "key": "api"}}
    ),
    "variable-missing": lambda: without_config('secret "words" not found'),
    "config-map-missing": lambda: without_config('configmap "words" not found'),
    "claim-missing": lambda: unscheduled_job(
        "resolve", 'persistentvolumeclaim "absent" not found', model={"uri": "pvc://absent/model"}
    ),
    "claim-not-bound": claim_not_bound,
    "memory-limit": lambda: seen(
        state=BACK_OFF, last=ended(137, reason="OOMKilled"), restarts=1, spec={"podTemplate": LIMIT}
    ),
    "probe-failing": lambda: seen(started=True, conditions=[UNREADY]),
    "node-lost": lost,
    "refused-by-the-node": lambda: seen(**REFUSED),
    "slow-load": seen,
}
"""What Kubernetes reports of each."""


@pytest.mark.parametrize("name", REPORTED)
def test_what_kubernetes_reports_has_the_reason_and_the_message_of_the_docs(name: str) -> None:
    check_one_says(name, REPORTED[name]())


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Shelf:
    root = tmp_path_factory.mktemp("hub")
    for repository in ("demo/demo", "demo/gated"):
        write_tiny_model(root / repository / "main")
    return Shelf(root, gated={"demo/gated": "hf_right"})


def fetched(hub: Shelf, folder: Path, repository: str, token: str | None = None, **tools: Any) -> None:
    with serving(hub) as endpoint:
        source = HubSource(HubModel(repository), endpoint, token)
        materialize(ModelSource(uri=source.uri), folder, lambda *_: None, source, tools=Tools(**tools))


def damaged(hub: Shelf, folder: Path) -> None:
    broken = Shelf(hub.root, body=FileFaults(flipped={"model.safetensors": 1000}).body)
    fetched(broken, folder, "demo/demo")


def truncated(folder: Path) -> None:
    for name in ("config.json", "model.safetensors"):
        shutil.copy(DEMO_MODEL / name, folder)
    os.truncate(folder / "model.safetensors", 1_000_000)
    read_checkpoint(folder)


def no_compiler(patch: pytest.MonkeyPatch) -> None:
    patch.delenv("CXX", raising=False)
    patch.setenv("PATH", "/nowhere")
    graphs._version_of(graphs.cxx())


def raised(text: str) -> None:
    raise classified(RuntimeError(text))


SAID: dict[str, Callable[[Shelf, Path, pytest.MonkeyPatch], object]] = {
    "not-found": lambda hub, folder, _: fetched(hub, folder, "demo/ghost"),
    "unauthorized": lambda hub, folder, _: fetched(hub, folder, "demo/gated", "hf_wrong"),
    "changed-weights": lambda hub, folder, _: damaged(hub, folder),
    "disk-full": lambda hub, folder, _: fetched(hub, folder, "demo/demo", free_bytes=lambda _: 10),
    "architecture": lambda *_: decoder_config({"architectures": ["StrangeForCausalLM"], "model_type": "strange"}),
    "truncated": lambda _, folder, __: truncated(folder),
    "override": lambda *_: read_options({"speed": 5}),
    "compiler": lambda _, __, patch: no_compiler(patch),
    "device-memory": lambda *_: raised("failed to allocate 32768 bytes of device memory"),
    "device-held": lambda *_: raised("nrt_load status=4"),
    "fewer-cores": lambda *_: check_cores(Target(PLATFORMS["inf2"], 1, 1), 2),
}
"""What makes the runtime say each."""
BEFORE_REPLICAS = {"not-found", "unauthorized", "architecture", "truncated"}


@pytest.mark.parametrize("name", SAID)
def test_what_the_runtime_says_has_the_reason_and_the_message_of_the_docs(
    name: str, hub: Shelf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends with an exit code and a record, which the operator reads from its pod."""
    with pytest.raises(FatalError) as failure:
        SAID[name](hub, tmp_path, monkeypatch)
    left = record.encode(record.failure("inspect" if name in BEFORE_REPLICAS else "serve", failure.value)).decode()
    state = ended(failure.value.exit_code, left)
    if name in BEFORE_REPLICAS:
        world, decision = settle(fresh())
        decision = decide(replace(world, pods=(job_pod(find(decision.desired, "Job"), state),)), SETTINGS)
    else:
        decision = seen(state=BACK_OFF, last=state, restarts=2)
    check_one_says(name, decision)


def check_one_says(name: str, decision: Decision) -> None:
    """One of the conditions does."""
    assert decision.status is not None
    found: list[Object] = [one for one in decision.status["conditions"] if one["status"] == "False"]
    said = [one for one in found if one["reason"] == FAILURES[name].reason]
    assert said, found
    check_says(name, said[-1])


def test_every_failure_is_shown_without_the_cluster() -> None:
    """Here, or in a test that calls `check_says` and is not left to `make test-long`."""
    files = [*TESTS.glob("neuron_operator/test_*.py"), TESTS / "cluster" / "test_operator_api_server.py"]
    elsewhere = {name for file in files for name in re.findall(r'check_says\("([a-z-]+)"', file.read_text())}
    assert {*REPORTED, *SAID} | elsewhere == {*FAILURES}
    assert not {*REPORTED} & {*SAID}
