"""What `test_story_reasons` breaks and mends on the cluster: a `Fault` for each line of tests/cases/failures.yaml that
it induces. It applies objects and asserts nothing."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from cluster.rig.commands import CommandFailed
from cluster.rig.faults import frozen
from cluster.rig.rig import Rig
from cluster.rig.shared_storage import STORAGE_CLASS, shared_volume
from cluster.servers import REGISTRY, Hub
from cluster.stories import Story, model_of

DEMO = "file:///models/demo"
REQUESTS = {"requests": {"cpu": "20m", "memory": "64Mi"}}
STORAGE = {"requests": {"storage": "1Gi"}}
CPU_NODE, TAINTED_NODE, NEURON_NODE = "n3", "n2", "n1"
TOKEN, WRONG_TOKEN = "hf_Aright0000000000000000000000000000", "hf_Wrong0000000000000000000000000000"
TAINT = "team=other:NoSchedule"
NO_IMAGE = "registry.invalid/runtime:1"
PRIVATE_IMAGE, PULLER = f"{REGISTRY}/private/runtime:1", "puller:right"
CLUSTER_ROLE = "neuron-operator"


@dataclass(frozen=True)
class Fault:
    """One failure of one model, which has its name."""

    name: str
    broken: Mapping[str, Any]
    """The spec that shows the failure, as keywords of `spec_of`."""
    mended: Mapping[str, Any] | None = None
    """The spec that ends it; None: something else does."""
    before: Mapping[str, Any] | None = None
    """The spec with which the model works first; None: it does not exist before."""
    apart: bool = False
    """It has a namespace of its own."""
    start: Callable[[Scene], object] = field(default=lambda scene: None)
    """What else is broken, before the spec is."""
    end: Callable[[Scene], object] = field(default=lambda scene: None)
    """What else is mended."""


@dataclass(frozen=True)
class Scene:
    """Where a fault takes place."""

    rig: Rig
    story: Story
    hub: Hub
    image: str
    undo: ExitStack
    """Ends with the test, whatever happens in it."""
    held: dict[str, ExitStack] = field(default_factory=dict)

    def apply(self, *objects: Any) -> None:
        self.story.apply_all(objects)


def model(name: str, *, uri: str = DEMO, pod: Mapping[str, Any] | None = None, **spec: Any) -> dict[str, Any]:
    """A model on a simulated device, which needs little to start."""
    engine = {"backend": "simulated", **spec.pop("engine", {})}
    template = {"spec": {"resources": REQUESTS, **(pod or {})}}
    return model_of(name, uri, engine=engine, podTemplate=template, **spec)


def _object(kind: str, name: str, api: str = "v1", **fields: Any) -> dict[str, Any]:
    return {"apiVersion": api, "kind": kind, "metadata": {"name": name}, **fields}


def _env(kind: str, name: str) -> list[dict[str, Any]]:
    return [{"name": "WORDS", "valueFrom": {kind: {"name": name, "key": "all"}}}]


def _hold_a_device(scene: Scene) -> None:
    limits = {"limits": {"aws.amazon.com/neuron": "1"}}
    container = {"name": "c", "image": scene.image, "command": ["sleep", "3600"], "resources": limits}
    spec = {"nodeName": NEURON_NODE, "containers": [container], "terminationGracePeriodSeconds": 0}
    scene.apply(_object("Pod", "holder", spec=spec))


def _taint(scene: Scene) -> None:
    scene.undo.callback(_untaint, scene)
    scene.rig.kubectl("taint", "node", TAINTED_NODE, TAINT)


def _untaint(scene: Scene) -> None:
    if scene.rig.get("node", TAINTED_NODE)["spec"].get("taints"):
        scene.rig.kubectl("taint", "node", TAINTED_NODE, "team-")


def _label(scene: Scene) -> None:
    scene.undo.callback(scene.rig.kubectl, "label", "node", CPU_NODE, "disk-")
    scene.rig.kubectl("label", "node", CPU_NODE, "disk=ssd")


def _freeze(scene: Scene) -> None:
    (pod,) = scene.story.ready_pods("probe-failing")
    scene.held["probe"] = scene.undo.enter_context(ExitStack())
    scene.held["probe"].enter_context(frozen(scene.rig, pod, "neuron_runtime.processes.front_end"))


def _give_volume(scene: Scene) -> None:
    spec = {"accessModes": ["ReadWriteMany"], "storageClassName": STORAGE_CLASS, "resources": STORAGE}
    scene.apply(_object("PersistentVolumeClaim", "absent", spec=spec))
    scene.undo.enter_context(shared_volume(scene.rig, scene.story.namespace, "absent"))


def _give_artifacts(scene: Scene) -> None:
    spec = {"accessModes": ["ReadWriteMany"], "storageClassName": STORAGE_CLASS, "resources": STORAGE}
    scene.apply(_object("PersistentVolumeClaim", "artifacts", spec=spec))
    scene.undo.enter_context(shared_volume(scene.rig, scene.story.namespace, "artifacts"))


def _log_in(login: str) -> Callable[[Scene], object]:
    def put(scene: Scene) -> None:
        auth = base64.b64encode(login.encode()).decode()
        data = {".dockerconfigjson": json.dumps({"auths": {REGISTRY: {"auth": auth}}})}
        scene.apply(_object("Secret", "registry", type="kubernetes.io/dockerconfigjson", stringData=data))

    return put


def _set_quota(scene: Scene) -> None:
    scene.apply(_object("ResourceQuota", "few", spec={"hard": {"pods": "0"}}))
    where = ("get", "quota", "few", "-o", "jsonpath={.status.hard.pods}")
    scene.story.until("the quota counts", lambda: scene.story.kubectl(*where) == "0")


def _add_sidecar(scene: Scene) -> None:
    scene.story.kubectl("label", "namespace", scene.story.namespace, "pod-security.kubernetes.io/enforce=restricted")
    sidecar = {"name": "proxy", "image": scene.image, "command": ["sleep", "3600"], "imagePullPolicy": "Never"}
    patch = {"spec": {"template": {"spec": {"containers": [sidecar]}}}}
    scene.story.kubectl("patch", "deployment", "pod-security", "--type=strategic", "-p", json.dumps(patch))


def _remove_sidecar(scene: Scene) -> None:
    patch = {"spec": {"template": {"spec": {"containers": [{"name": "proxy", "$patch": "delete"}]}}}}
    scene.story.kubectl("patch", "deployment", "pod-security", "--type=strategic", "-p", json.dumps(patch))


_PODS = {"apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": ["pods"]}


def _in(scene: Scene) -> dict[str, Any]:
    return {"matchLabels": {"kubernetes.io/metadata.name": scene.story.namespace}}


def _wait_until_refused(scene: Scene) -> None:
    pod = json.dumps(_object("Pod", "any", spec={"containers": [{"name": "c", "image": "i"}]}))

    def is_refused() -> bool:
        try:
            scene.story.kubectl("create", "--dry-run=server", "-f", "-", stdin=pod)
        except CommandFailed:
            return True
        return False

    scene.story.until("pods are refused", is_refused)


def _set_policy(scene: Scene) -> None:
    api, name = "admissionregistration.k8s.io/v1", scene.story.namespace
    rules = {"validations": [{"expression": "false", "message": "pods need a ticket"}]}
    policy = {"matchConstraints": {"namespaceSelector": _in(scene), "resourceRules": [_PODS]}, **rules}
    scene.undo.callback(_remove_policy, scene)
    scene.apply(
        _object("ValidatingAdmissionPolicy", name, api, spec=policy),
        _object(
            "ValidatingAdmissionPolicyBinding", name, api, spec={"policyName": name, "validationActions": ["Deny"]}
        ),
    )
    _wait_until_refused(scene)


def _remove_policy(scene: Scene) -> None:
    kinds = "validatingadmissionpolicy,validatingadmissionpolicybinding"
    scene.rig.kubectl("delete", kinds, scene.story.namespace, "--ignore-not-found")


def _set_webhook(scene: Scene) -> None:
    """Nothing listens at its address."""
    hook = {"name": "tickets.example.com", "clientConfig": {"url": "https://127.0.0.1:9/"}, "timeoutSeconds": 1}
    hook |= {"rules": [_PODS], "namespaceSelector": _in(scene), "sideEffects": "None"}
    hook |= {"admissionReviewVersions": ["v1"], "failurePolicy": "Fail"}
    scene.undo.callback(_remove_webhook, scene)
    kind, api = "ValidatingWebhookConfiguration", "admissionregistration.k8s.io/v1"
    scene.apply(_object(kind, scene.story.namespace, api, webhooks=[hook]))
    _wait_until_refused(scene)


def _remove_webhook(scene: Scene) -> None:
    scene.rig.kubectl("delete", "validatingwebhookconfiguration", scene.story.namespace, "--ignore-not-found")


def _pause(scene: Scene) -> None:
    scene.story.kubectl("annotate", "nm", "paused", "neuron-serving.dev/paused=true")


def _forbid(scene: Scene) -> None:
    """The operator may create no Services any more."""
    role = scene.rig.get("clusterrole", CLUSTER_ROLE)
    scene.undo.callback(_allow, scene)
    rules = [
        {**rule, "verbs": [verb for verb in rule["verbs"] if verb != "create"]}
        if "services" in rule["resources"]
        else rule
        for rule in role["rules"]
    ]
    scene.held["rules"] = role["rules"]
    _set_rules(scene, rules)


def _allow(scene: Scene) -> None:
    _set_rules(scene, scene.held["rules"])


def _set_rules(scene: Scene, rules: Any) -> None:
    scene.rig.kubectl("patch", "clusterrole", CLUSTER_ROLE, "--type=merge", "-p", json.dumps({"rules": rules}))


def _thaw(scene: Scene) -> None:
    scene.held["probe"].close()


def _delete(kind: str, name: str) -> Callable[[Scene], object]:
    return lambda scene: scene.story.kubectl("delete", kind, name, "--wait=false")


def _create(*objects: Any) -> Callable[[Scene], object]:
    return lambda scene: scene.apply(*objects)


def _order(**faults: object) -> Callable[[Scene], object]:
    return lambda scene: scene.hub.order(**faults)


IDLE = {"replicas": 0}
FAULTS = (
    # The scheduler.
    Fault(
        "no-devices",
        {"accelerator": {"type": "Neuron", "devices": 6}, "pod": {"nodeSelector": {"kubernetes.io/hostname": "n1"}}},
        start=_hold_a_device,
        end=_delete("pod", "holder"),
    ),
    Fault(
        "wrong-size",
        {"accelerator": {"type": "Neuron", "devices": 5}},
        {"accelerator": {"type": "Neuron", "devices": 1}},
    ),
    Fault(
        "taint",
        {"pod": {"nodeSelector": {"kubernetes.io/hostname": TAINTED_NODE}}},
        start=_taint,
        end=lambda scene: scene.rig.kubectl("taint", "node", TAINTED_NODE, "team-"),
    ),
    Fault("no-node", {"pod": {"nodeSelector": {"disk": "ssd"}}}, end=_label),
    # The API server, when pods are created.
    Fault("quota", {}, before=IDLE, apart=True, start=_set_quota, end=_delete("quota", "few")),
    Fault(
        "limit-range",
        {"pod": {"resources": {"limits": {"memory": "1Gi"}}}},
        before=IDLE,
        apart=True,
        start=_create(
            _object("LimitRange", "small", spec={"limits": [{"type": "Container", "max": {"memory": "64Mi"}}]})
        ),
        end=_delete("limitrange", "small"),
    ),
    Fault("pod-security", {}, before=IDLE, apart=True, start=_add_sidecar, end=_remove_sidecar),
    Fault("policy", {}, before=IDLE, apart=True, start=_set_policy, end=_remove_policy),
    Fault("webhook", {}, before=IDLE, apart=True, start=_set_webhook, end=_remove_webhook),
    # The API server, when objects are written.
    Fault(
        "name-taken",
        IDLE,
        start=_create(_object("Service", "name-taken", spec={"ports": [{"port": 80}]})),
        end=_delete("service", "name-taken"),
    ),
    Fault("forbidden", IDLE, start=_forbid, end=_allow),
    # The spec.
    Fault("not-supported", {"accelerator": {"instanceTypes": ["inf2.xlarge"]}}, IDLE),
    Fault("too-long", {"serving": {"maxModelLength": 999_999}}, IDLE),
    Fault(
        "paused",
        {},
        before=IDLE,
        start=_pause,
        end=lambda scene: scene.story.kubectl("annotate", "nm", "paused", "neuron-serving.dev/paused-"),
    ),
    # The kubelet.
    Fault(
        "image-missing",
        {"uri": "hf://demo/demo", "engine": {"image": NO_IMAGE, "imagePullPolicy": "IfNotPresent"}},
        {"uri": "hf://demo/demo"},
        before={"uri": "hf://demo/demo", **IDLE},
    ),
    Fault(
        "pull-secret",
        {
            "uri": "hf://demo/demo",
            "engine": {"image": PRIVATE_IMAGE, "imagePullPolicy": "IfNotPresent"},
            "pod": {
                "imagePullSecrets": [{"name": "registry"}],
                "nodeSelector": {"kubernetes.io/hostname": CPU_NODE},
            },
        },
        before={"uri": "hf://demo/demo", **IDLE},
        start=_log_in("puller:wrong"),
        end=_log_in(PULLER),
    ),
    Fault(
        "secret-missing",
        {"serving": {"apiKeySecretRef": {"name": "keys", "key": "api"}}},
        end=_create(_object("Secret", "keys", stringData={"api": "sk-Cluster00000000000000000000000000"})),
    ),
    Fault(
        "variable-missing",
        {"engine": {"env": _env("secretKeyRef", "words")}},
        end=_create(_object("Secret", "words", stringData={"all": "yes"})),
    ),
    Fault(
        "config-map-missing",
        {"engine": {"env": _env("configMapKeyRef", "words")}},
        end=_create(_object("ConfigMap", "words", data={"all": "yes"})),
    ),
    Fault("claim-missing", {"uri": "pvc://absent/model", **IDLE}, end=_give_volume),
    Fault("memory-limit", {"pod": {"resources": {"limits": {"memory": "24Mi"}}}}, {}),
    Fault("probe-failing", {}, before={}, start=_freeze, end=_thaw),
    # The runtime.
    Fault("not-found", {"uri": "hf://demo/ghost", **IDLE}, {"uri": "hf://demo/demo", **IDLE}),
    Fault(
        "unauthorized",
        {"model": {"credentialsSecretRef": {"name": "hub-token"}}, "uri": "hf://demo/gated", **IDLE},
        start=_create(_object("Secret", "hub-token", stringData={"HF_TOKEN": WRONG_TOKEN})),
        end=_create(_object("Secret", "hub-token", stringData={"HF_TOKEN": TOKEN})),
    ),
    Fault("architecture", {"uri": "hf://demo/strange", **IDLE}, {"uri": "hf://demo/demo", **IDLE}),
    Fault("truncated", {"uri": "hf://demo/short", **IDLE}, {"uri": "hf://demo/demo", **IDLE}),
    Fault(
        "compiler",
        {
            "engine": {"backend": "torch", "compile": "Enabled"},
            "storage": {"artifacts": {"persistentVolumeClaim": {"claimName": "artifacts"}}},
            **IDLE,
        },
        {"engine": {"backend": "torch"}, **IDLE},
        start=_give_artifacts,
    ),
    Fault("override", {"engine": {"overrideNeuronConfig": {"speed": 5}}}, {}),
    Fault(
        "slow-load",
        {"uri": "hf://demo/demo"},
        start=_order(bytes_per_second=2e5),
        end=_order(bytes_per_second=0),
    ),
)
"""`forbidden` comes last when they begin: it also keeps the operator from creating the Services of others."""
