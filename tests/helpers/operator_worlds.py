"""Inputs for tests of the operator's pure functions: bodies, pods as a kubelet reports them, a miniature API server.

Pods have the shapes that a real API server returns in each state; `settle` runs passes until nothing changes.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import msgspec
from hypothesis import strategies as st

from neuron_operator.api.reasons import TROUBLESHOOTING
from neuron_operator.decide.course import decide
from neuron_operator.decide.steps import STEPS, Step
from neuron_operator.read.objects import is_shared, owners_of
from neuron_operator.read.world import (
    Decision,
    EngineSettings,
    InferencePools,
    JobSettings,
    Object,
    Settings,
    StorageSettings,
    World,
)

NOW = datetime(2026, 3, 1, 12, 0, tzinfo=UTC)
SETTINGS = Settings(runtime_image="registry.example/neuron-serving-runtime:1")
ADAPTER_FACTS: dict[str, Any] = {
    "digest": "d1" * 32,
    "rank": 8,
    "targets": ["q_proj"],
    "numBytes": 3 * 2**20,
    "baseModel": "acme/tiny",
}
FACTS: dict[str, Any] = {
    "architecture": "LlamaForCausalLM",
    "modelType": "llama",
    "parameters": 3_000_000,
    "weightsBytes": 6_000_000,
    "dtype": "bfloat16",
    "numLayers": 4,
    "hiddenSize": 192,
    "numHeads": 6,
    "numKvHeads": 2,
    "headDim": 32,
    "vocabularySize": 2048,
    "maxPositionEmbeddings": 1024,
    "intermediateSize": 576,
    "numExperts": 0,
    "tiedEmbeddings": True,
    "graphs": "",
    "digest": "sha256:0123456789abcdef",
}
SPEC: dict[str, Any] = {
    "model": {"uri": "hf://acme/tiny"},
    "accelerator": {"devices": 6},
    "engine": {"backend": "torch"},
    "replicas": 2,
}

JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=12,
)


def body(spec: Mapping[str, Any] | None = None, **metadata: Any) -> Object:
    """A NeuronModel as read; `spec` replaces the default spec."""
    return {
        "apiVersion": "neuron-serving.dev/v1alpha1",
        "kind": "NeuronModel",
        "metadata": {"name": "chat", "namespace": "team", "uid": "uid-chat", "generation": 1, **metadata},
        "spec": copy.deepcopy(dict(SPEC if spec is None else spec)),
    }


def fresh(**changes: Any) -> World:
    """The state right after `kubectl apply`."""
    return World(body=body(**changes), children=(), pods=(), now=NOW)


def settings(values: Mapping[str, Any]) -> Settings:
    """Settings from a case file; omitted ones are as in SETTINGS."""
    given = dict(values)
    jobs = JobSettings(**given.pop("jobs", {}))
    storage = msgspec.convert(given.pop("storage", {}), StorageSettings)
    engines = msgspec.convert(given.pop("engines", {}), dict[str, EngineSettings])
    given["inference_pools"] = msgspec.convert(given.pop("inference_pools", {}), InferencePools)
    return replace(SETTINGS, jobs=jobs, storage=storage, engines=engines, **given)


def success_record(facts: Mapping[str, Any] = FACTS) -> str:
    return json.dumps({"version": 1, "command": "inspect", "ok": True, "facts": facts, "seconds": 0.4})


STORED = {"digest": FACTS["digest"], "bytes": 6_000_000, "readBytes": 6_000_000}
CONVERSION = {"digest": "c0" * 32, "format": "int8", "bytes": 3_400_000}
FIGURES = {"format": "int8", "layerError": 0.0081, "perplexity": 12.125, "convertedPerplexity": 12.131}
COMPILED = {"key": "ab" * 32, "bytes": 5_000, "seconds": 31.5, "reused": False, "peakBytes": 2**31}
RESULTS: dict[str, dict[str, Any]] = {
    "resolve": {"facts": FACTS},
    "fetch": {"weights": STORED},
    "convert": {
        "weights": {"digest": CONVERSION["digest"], "bytes": 3_400_000, "readBytes": 6_000_000},
        "conversion": FIGURES,
    },
    "compile": {"artifact": COMPILED},
    "check": {},
}
"""What the Job of a step reports, by its role."""


def failure_record(code: int, reason: str, message: str, command: str = "inspect") -> str:
    return json.dumps(
        {"version": 1, "command": command, "ok": False, "exitCode": code, "reason": reason, "message": message}
    )


def ended(code: int, message: str = "", reason: str = "Error") -> Object:
    return {"terminated": {"exitCode": code, "reason": "Completed" if code == 0 else reason, "message": message}}


def uid_of_job(name: str) -> str:
    """That `carried_out` gives the Job or StatefulSet."""
    return f"uid-{name}"


def job_pod(job: Object, state: Object, name: str = "resolve-x", phase: str = "Failed", **fields: Any) -> Object:
    """A pod of a Job, with its only container in `state`."""
    uid = job["metadata"].get("uid") or uid_of_job(job["metadata"]["name"])
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": name,
            "creationTimestamp": "2026-03-01T11:59:00Z",
            "labels": job["spec"]["template"]["metadata"]["labels"],
            "ownerReferences": [{"apiVersion": "batch/v1", "kind": "Job", "name": job["metadata"]["name"], "uid": uid}],
        },
        "status": {
            "phase": phase,
            "containerStatuses": [{"name": "runtime", "state": state, "ready": False}],
            **fields,
        },
    }


def resolved_pod(job: Object, facts: Mapping[str, Any] = FACTS) -> Object:
    return job_pod(job, ended(0, success_record(facts)), phase="Succeeded")


def successful_pod(job: Object) -> Object:
    """A pod of a Job that left the record of its step."""
    role = job["metadata"]["labels"]["neuron-serving.dev/role"]
    record = {"version": 1, "command": role, "ok": True, **RESULTS[role]}
    return job_pod(job, ended(0, json.dumps(record)), f"{role}-x", phase="Succeeded")


def serving_pod(
    deployment: Object,
    name: str = "chat-1",
    *,
    ready: bool = False,
    state: Object | None = None,
    last: Object | None = None,
    restarts: int = 0,
    started: bool = False,
    phase: str = "Running",
    conditions: Iterable[Object] = (),
    created: str = "2026-03-01T11:50:00Z",
    **status: Any,
) -> Object:
    """A pod of the Deployment, by default running and loading."""
    container = {
        "name": "runtime",
        "image": "registry.example/neuron-serving-runtime:1",
        "ready": ready,
        "started": started or ready,
        "restartCount": restarts,
        "state": state if state is not None else {"running": {"startedAt": "2026-03-01T11:51:00Z"}},
        "lastState": last or {},
    }
    all_conditions = [
        {"type": "PodScheduled", "status": "True"},
        {"type": "ContainersReady", "status": str(ready)},
        {"type": "Ready", "status": str(ready)},
    ]
    for condition in conditions:
        all_conditions = [*(c for c in all_conditions if c["type"] != condition["type"]), condition]
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": name,
            "creationTimestamp": created,
            "labels": deployment["spec"]["template"]["metadata"]["labels"],
        },
        "spec": {**deployment["spec"]["template"]["spec"], "nodeName": "n1"},
        "status": {"phase": phase, "conditions": all_conditions, "containerStatuses": [container], **status},
    }


def unscheduled_pod(deployment: Object, message: str, name: str = "chat-1") -> Object:
    """A pod without a suitable node."""
    pod = serving_pod(
        deployment,
        name,
        phase="Pending",
        conditions=[{"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}],
    )
    spec = deployment["spec"]["template"]["spec"]
    return {**pod, "spec": spec, "status": {**pod["status"], "containerStatuses": []}}


REFUSED = {
    "phase": "Failed",
    "reason": "UnexpectedAdmissionError",
    "message": "Pod was rejected: Allocate failed due to rpc error: code = Unknown desc = The requested Neuron "
    "resources are invalid without the k8s-neuron-scheduler, which is unexpected",
    "containerStatuses": [],
}
"""The status of a pod that its kubelet refused."""


def find(objects: Iterable[Object], kind: str) -> Object:
    return next(found for found in objects if found["kind"] == kind)


def condition(status: Object | None, kind: str) -> Object:
    assert status is not None
    return next(c for c in status["conditions"] if c["type"] == kind)


def said(found: Object) -> str:
    """The message of a condition, without the section of its reason."""
    message, _, _ = str(found["message"]).partition(f"; see {TROUBLESHOOTING}#")
    return message


def stored(objects: Iterable[Object]) -> tuple[Object, ...]:
    """The objects as an API server returns them: JSON, sharing nothing with the originals."""
    return tuple(json.loads(json.dumps(found)) for found in objects)


def patched(live: Object, patch: Object) -> Object:
    """After a strategic merge patch of the API server: owners are merged one by one, by their UID."""
    parts = {part: {**live.get(part, {}), **changed} for part, changed in patch.items()}
    if noted := patch.get("metadata", {}).get("annotations"):
        parts["metadata"]["annotations"] = {**live["metadata"].get("annotations", {}), **noted}
    if changed := patch.get("metadata", {}).get("ownerReferences"):
        owners = {owner["uid"]: owner for owner in (*owners_of(live), *changed)}
        parts["metadata"]["ownerReferences"] = [owner for owner in owners.values() if "$patch" not in owner]
    return {**live, **parts}


def carried_out(world: World, decision: Decision) -> World:
    """The state after a decision was carried out, under the API server's rules that the operator relies on."""
    live = {(child["kind"], child["metadata"]["name"]): child for child in (*world.children, *world.shared)}
    for wanted in stored(decision.desired):
        desired = wanted
        key = (desired["kind"], desired["metadata"]["name"])
        before = live.get(key)
        if before is not None:
            if desired["kind"] == "ConfigMap":
                assert before["data"] == desired["data"], "an immutable ConfigMap cannot change"
            if desired["kind"] == "ControllerRevision":
                assert before["data"] == desired["data"], "the data of a ControllerRevision cannot change"
            if desired["kind"] == "Job":
                assert before["spec"]["template"] == desired["spec"]["template"], "a Job's pod template cannot change"
            assert desired["kind"] not in ("StatefulSet", "LeaderWorkerSet", "Secret"), "a group is never edited"
            if desired["kind"] == "Deployment":
                assert before["spec"]["selector"] == desired["spec"]["selector"], "a selector cannot change"
            is_applied = not is_shared(before) or desired["kind"] == "CronJob"
            desired = {**before, **wanted} if is_applied else before
        elif desired["kind"] in ("Job", "StatefulSet", "LeaderWorkerSet"):
            desired = {**wanted, "metadata": {**wanted["metadata"], "uid": uid_of_job(key[1])}}
        live[key] = desired
    for change in decision.changes:
        found = live[change.live["kind"], change.live["metadata"]["name"]]
        live[found["kind"], found["metadata"]["name"]] = patched(found, change.patch)
    deleted = {(gone["kind"], gone["metadata"]["name"]) for gone in decision.delete}
    pods = tuple(pod for pod in world.pods if ("Pod", pod["metadata"]["name"]) not in deleted)
    for kind, name in deleted:
        if kind != "Pod":
            del live[kind, name]
    after = {**world.body, "status": decision.status} if decision.status is not None else world.body
    return replace(
        world,
        body=after,
        children=tuple(found for found in live.values() if not is_shared(found)),
        shared=tuple(filter(is_shared, live.values())),
        pods=pods,
    )


def settle(
    world: World, using: Settings = SETTINGS, max_passes: int = 8, steps: Sequence[Step] = STEPS
) -> tuple[World, Decision]:
    """Runs passes until nothing changes; fails if they do not converge."""
    for _ in range(max_passes):
        decision = decide(world, using, steps)
        after = carried_out(world, decision)
        if after == world:
            return world, decision
        if replace(after, body=world.body) == world and not decision.follows:
            following = carried_out(after, decide(after, using, steps))
            assert following == after, "the pass after this status does something, so it has to follow"
        world = after
    raise AssertionError(f"not at rest after {max_passes} passes")


def resolved_world(using: Settings = SETTINGS, **changes: Any) -> tuple[World, Decision]:
    """A state in which the model is resolved, pinned and rendered, without serving pods."""
    return stepped(*settle(fresh(**changes), using), using)


def having_served(world: World) -> World:
    """The state once all replicas have served."""
    status = world.body["status"]
    return replace(world, body={**world.body, "status": {**status, "currentRevision": status["updateRevision"]}})


def stepped(world: World, decision: Decision, using: Settings = SETTINGS) -> tuple[World, Decision]:
    """The state after the Jobs of all steps succeeded, one after another."""
    while jobs := [made for made in decision.desired if made["kind"] == "Job"]:
        world, _ = settle(replace(world, pods=(*world.pods, successful_pod(jobs[0]))), using)
        world, decision = settle(finished(world), using)
    return world, decision


def checked(world: World, using: Settings = SETTINGS) -> World:
    """The state in which the runtime has accepted the configuration of an edit, which no status shows yet. An edit that
    the operator refuses is not checked."""
    world, decision = settle(world, using)
    jobs = [made for made in decision.desired if made["kind"] == "Job"]
    world = replace(world, pods=(*world.pods, *map(successful_pod, jobs)))
    return finished(carried_out(world, decide(world, using)))


def finished(world: World, kind: str = "Complete") -> World:
    """The state after the Jobs ended."""
    status = {"conditions": [{"type": kind, "status": "True"}]}
    ended = tuple({**obj, "status": status} if obj["kind"] == "Job" else obj for obj in world.shared)
    return replace(world, shared=ended)
