"""What one pass sees and what it decides: the types between the rim (reconcile, local) and the pure middle (decide).

The rim fills a World from its caches, calls `decide.decide(world, settings)` and carries the Decision out. Nothing here
does I/O, and nothing here knows a field of a NeuronModel's spec.

How the rim runs a pass:

1. `decide`; where it `needs` facts that were not read in this pass, read them and decide again.
2. Apply `desired` in order, each only where it is not contained in the live object. A create that meets an object of
   another owner goes into `taken`, a 403 into `forbidden`, a 422 into `rejected`: stop applying and decide again.
   A new pass starts with these three empty, so that it notices what others have repaired.
3. Delete `delete` (propagation in the background), with the UIDs of the objects given as preconditions. 404 and 409 are
   fine.
4. Write `status` where it differs from `body["status"]`; last, so that it never reports a step that was not made.
5. Emit `announcements` where the status was written; come back after `requeue_after_seconds` at the latest.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from enum import Enum
from typing import Any, Literal

Object = dict[str, Any]
"""A Kubernetes object as JSON, as the API server sends it. Never changed in place."""


@dataclass(frozen=True)
class NodeDevices:
    """Neuron devices (or cores) of one node: what the kubelet offers and what no pod requests."""

    name: str
    instance_type: str
    """Label node.kubernetes.io/instance-type; empty when the node has none."""
    devices: int
    free_devices: int
    cores: int
    """Allocatable `aws.amazon.com/neuroncore`; counted apart from devices, as the kubelet does."""
    free_cores: int
    allocation: str = ""
    """Label neuron-serving.dev/allocation; `cores` where pods may request cores."""
    schedulable: bool = True


@dataclass(frozen=True)
class FreeDevices:
    """Free devices of the cluster; `nodes` is None where the operator may not list nodes and pods: free is unknown."""

    nodes: tuple[NodeDevices, ...] | None


class Need(Enum):
    """Facts that are read on demand only, because reading them is expensive."""

    FREE_DEVICES = "free devices"
    EVENTS = "events"
    """Events of this model's Jobs, ReplicaSets and pods."""


@dataclass(frozen=True)
class World:
    """Everything one pass over one NeuronModel may look at."""

    body: Object
    """The NeuronModel as read, status included."""
    children: tuple[Object, ...]
    """What carries our labels for this model: Deployment, Service, ConfigMap, ServiceAccount, PodDisruptionBudget,
    NetworkPolicy, ControllerRevision, Job. Each with its `kind` and `apiVersion` (lists of the API leave them out)."""
    pods: tuple[Object, ...]
    """Serving pods and Job pods of this model."""
    now: datetime
    """UTC, with time zone."""
    taken: frozenset[tuple[str, str]] = frozenset()
    """(kind, name) that exist and are not ours by owner UID."""
    forbidden: frozenset[tuple[str, str]] = frozenset()
    """(kind, message) that the API server refused with 403."""
    rejected: frozenset[tuple[str, str]] = frozenset()
    """(kind, message) that the API server refused with 422: our object is not valid, mostly because of an overlay."""
    free: FreeDevices | None = None
    """None: not read in this pass."""
    events: tuple[Object, ...] | None = None
    """Warnings as `events.k8s.io/v1` has them, oldest first. None: not read in this pass; empty also where the
    operator may not read them."""


@dataclass(frozen=True)
class Announcement:
    """An Event on the NeuronModel."""

    type: Literal["Normal", "Warning"]
    reason: str
    message: str


@dataclass(frozen=True)
class Decision:
    """The next single step of one NeuronModel."""

    desired: tuple[Object, ...] = ()
    """In apply order, complete with owner references; empty where nothing may be changed now."""
    delete: tuple[Object, ...] = ()
    """Live objects to prune."""
    status: Object | None = None
    """The whole status; None: leave it as it is (the model is being deleted, or is not one)."""
    requeue_after_seconds: float | None = None
    needs: frozenset[Need] = frozenset()
    announcements: tuple[Announcement, ...] = ()


@dataclass(frozen=True)
class JobSettings:
    """Chart values `jobs.*`: where and how the one-shot steps run."""

    node_selector: dict[str, str] = field(default_factory=dict)
    tolerations: tuple[Object, ...] = ()
    resources: Object = field(default_factory=dict)
    env: tuple[Object, ...] = ()
    """EnvVars for all pods that fetch something (mirrors, proxies, CA): Jobs, and serving pods that load from a hub."""


@dataclass(frozen=True)
class Settings:
    """What an installation decides for all models; loaded by the rim from flags and environment."""

    runtime_image: str
    image_pull_policy: str = ""
    """Empty: Kubernetes' own default (by tag)."""
    image_pull_secrets: tuple[str, ...] = ()
    jobs: JobSettings = field(default_factory=JobSettings)
    device_mode: Literal["Plugin", "PluginWithExtension"] = "Plugin"
    device_scheduler_name: str = ""
    """The scheduler that knows the extension; only with PluginWithExtension."""
    network_policy_ingress_from: tuple[Object, ...] = ()
    """NetworkPolicyPeers that may call port 8000; empty: everyone in the cluster."""
