"""What one pass sees and what it decides: the types between the rim (reconcile, local) and the pure middle (decide).

The rim fills a World from its caches, calls `decide` and executes the Decision: again with the facts that it `needs`
and with the refusals of its writes, until it learns nothing new. It writes the status last, so that this never reports
a step that did not happen, and then posts the Events.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from enum import Enum
from typing import Annotated, Any, Literal, NamedTuple, get_args

from msgspec import Meta, Struct

from neuron_operator.api.model import Claim, EmptyDir, ObjectStore
from neuron_operator.api.names import INSTANCE_TYPE_LABEL, ZONE_LABEL
from neuron_operator.api.reasons import TROUBLESHOOTING, Asked, Exists, Needed, Trial

Object = dict[str, Any]
"""A Kubernetes object as JSON, as the API server sends it. Never changed in place."""
DeviceMode = Literal["Plugin", "PluginWithExtension", "DRA", "Auto"]
"""How nodes give devices to pods; Auto: as each node does, by a DRA driver or else by the device plugin."""
DEVICE_MODES: tuple[DeviceMode, ...] = get_args(DeviceMode)
Granting = Literal["Plugin", "PluginWithExtension", "DRA"]
"""The same for one node."""
BY_PLUGIN: tuple[Granting, ...] = ("Plugin", "PluginWithExtension")
GroupController = Literal["StatefulSet", "LeaderWorkerSet"]
"""Kind of the object that makes the pods of a group."""
RuntimeUpgrade = Literal["OnEdit", "Rolling"]
RUNTIME_UPGRADES: tuple[RuntimeUpgrade, ...] = get_args(RuntimeUpgrade)


Upgrade = Literal["Waiting", "Running", "Failed"]
"""How far a model is: it answers with an older image, changes to the newer one, or has returned to the older one."""
UPGRADES: tuple[Upgrade, ...] = get_args(Upgrade)
JobTurn = Literal["Waiting", "Running", "Refused"]
"""Whether an adapter waits until it may start a Job, has one that runs, or could not start it in its turn."""


class _MaxAdapterJobs(NamedTuple):
    of_namespace: int
    of_model: int


MAX_ADAPTER_JOBS = _MaxAdapterJobs(of_namespace=16, of_model=8)
"""How many adapters may have a Job that runs, at a time."""


@dataclass(frozen=True)
class Taint:
    """What keeps pods off a node that do not tolerate it."""

    key: str
    value: str
    effect: str

    @property
    def words(self) -> str:
        """`key=value:effect`, as kubectl writes it."""
        return f"{self.key}{f'={self.value}' if self.value else ''}:{self.effect}"


@dataclass(frozen=True)
class NodeDevices:
    """Neuron devices (or cores) of one node: allocatable, and not requested by any pod."""

    name: str
    devices: int
    free_devices: int
    cores: int
    """Allocatable `aws.amazon.com/neuroncore`, which the kubelet counts separately from devices."""
    free_cores: int
    labels: Mapping[str, str] = field(default_factory=dict)
    connected: Mapping[int, int] | None = None
    """By number of devices, how many sets of connected ones are free. None: its devices come from the device plugin,
    which does not tell; otherwise pods claim them (DRA)."""
    schedulable: bool = True
    """It is ready and not about to leave: neither cordoned nor with a taint of Kubernetes' own controllers."""
    taints: tuple[Taint, ...] = ()
    """Those that people and node pools give it for as long as it lives."""

    @property
    def instance_type(self) -> str:
        """Empty if the node has no such label."""
        return self.labels.get(INSTANCE_TYPE_LABEL, "")

    @property
    def by_claim(self) -> bool:
        return self.connected is not None

    def room(self, *, in_cores: bool) -> Room:
        return Room(self.free_cores, None) if in_cores else Room(self.free_devices, self.connected)


@dataclass(frozen=True)
class Room:
    """What is free on one node."""

    free: int
    """Devices, or cores."""
    connected: Mapping[int, int] | None
    """As `NodeDevices.connected`."""

    def holds(self, size: int) -> bool:
        return self.free >= size and (self.connected is None or size == 1 or self.connected.get(size, 0) > 0)


@dataclass(frozen=True)
class FreeDevices:
    """Free devices of the cluster; `nodes` is None (unknown) if the operator may not list nodes and pods."""

    nodes: tuple[NodeDevices, ...] | None
    pods: frozenset[str] | None = None
    """UIDs of the pods on these nodes, whose devices are not free. None: all that have a node."""


class RefusalCause(Enum):
    """Why an object was not written."""

    TAKEN = "taken"
    """An object with this name exists and is not ours."""
    HEAVY = "heavy"
    """The live object has too many bytes to be compared."""
    FORBIDDEN = "forbidden"
    """The API server answered 403."""
    REJECTED = "rejected"
    """The API server answered 400 or 422: the object is invalid, or a policy denies it."""
    TERMINATING = "terminating"
    """The namespace is being deleted: nothing can be created in it, Events included."""
    FAILED = "failed"
    """The write failed for another reason, as for some time before: it is tried again with back-off."""
    UNDONE = "undone"
    """Somebody else undid it again and again: it is made ever more rarely."""


@dataclass(frozen=True)
class Refusal:
    """A write that did not happen."""

    why: RefusalCause
    kind: str
    name: str
    message: str = ""


@dataclass(frozen=True)
class Told:
    """What a replica answered."""

    text: str = ""
    fault: str = ""
    """Why there is no answer."""


@dataclass(frozen=True)
class Waker:
    """A model that wakes from zero replicas."""

    body: Object
    pods: tuple[Object, ...] = ()
    """Its serving pods."""


@dataclass(frozen=True)
class World:
    """Everything one pass over one NeuronModel or NeuronAdapter may look at."""

    body: Object
    """The NeuronModel or NeuronAdapter as read, status included."""
    children: tuple[Object, ...]
    """Objects with our labels for this model, of the kinds in `client.CHILDREN`, each with `kind` and `apiVersion`."""
    pods: tuple[Object, ...]
    """Serving pods of this model, and pods of the shared Jobs."""
    now: datetime
    """UTC, with time zone."""
    shared: tuple[Object, ...] = ()
    """What the models of the namespace share: Jobs of steps, and ConfigMaps with their records."""
    used_by_others: frozenset[str] = frozenset()
    """Names of those that other models need, as far as it is known: a new leader learns it with its first passes."""
    refusals: tuple[Refusal, ...] = ()
    """Writes that did not happen in this pass."""
    free: FreeDevices | None = None
    """None: not read in this pass."""
    nodes: tuple[Object, ...] = ()
    """The nodes of this model's pods (`reflector.trimmed_node`); none if they may not be watched."""
    has_turn: bool = False
    """Whether the model may begin to move to a newer runtime image, or the adapter may start a Job."""
    events: tuple[Object, ...] = ()
    """Warnings (`events.k8s.io/v1`), oldest first. Empty if they were not read in this pass, or may not be."""
    claim_events: tuple[Object, ...] = ()
    """Likewise."""
    logs: Mapping[str, str] = field(default_factory=dict)
    """By pod, the end of the logs read in this pass; empty if one cannot be read."""
    existing: frozenset[Exists] = frozenset()
    """Those of the needed objects that exist."""
    denials: Mapping[Trial, str] = field(default_factory=dict)
    """What the API server says against the pods that were tried in this pass; empty: nothing."""
    adapters: tuple[Object, ...] = ()
    """The NeuronAdapters that name this NeuronModel."""
    base: Object | None = None
    """The NeuronModel that a NeuronAdapter names; `pods` are its pods, then."""
    of_base: tuple[Object, ...] = ()
    """The children of that NeuronModel."""
    told: Mapping[Asked, Told] = field(default_factory=dict)
    """By replica."""
    wakers: tuple[Waker, ...] | None = None
    """The other models that wake, of the namespaces that are watched. None: not read in this pass."""


@dataclass(frozen=True)
class Announcement:
    """An Event on the NeuronModel."""

    type: Literal["Normal", "Warning"]
    reason: str
    message: str


@dataclass(frozen=True)
class Change:
    """A small change of an object that several models share, which no single one of them may apply as a whole."""

    live: Object
    patch: Object
    """A strategic merge patch."""
    unchanged: bool = True
    """Whether it holds only as long as nobody else changes the object. Joining and leaving hold always, so that many
    models can do so at once."""


@dataclass(frozen=True)
class Decision:
    """The next single step of one NeuronModel."""

    desired: tuple[Object, ...] = ()
    """In apply order, with owner references; empty if nothing may be changed now."""
    changes: tuple[Change, ...] = ()
    """Changes of shared objects, made before anything is deleted."""
    delete: tuple[Object, ...] = ()
    """Live objects to prune."""
    status: Object | None = None
    """The whole status; None: leave it unchanged, because the model is being deleted."""
    follows: bool = True
    """Whether more may be decided once the status is written."""
    requeue_after_seconds: float | None = None
    needs: frozenset[Needed] = frozenset()
    announcements: tuple[Announcement, ...] = ()
    scale_to: int | None = None
    """Replicas to ask for through `/scale`, unless somebody asks for other ones now; None: nothing changes."""
    uses: frozenset[str] | None = None
    """Names of the shared objects that the model needs; None: as before."""
    upgrade: Upgrade | None = None
    """How far the model's move to a newer runtime image is; None: it has none to make now."""
    job: JobTurn | None = None
    """Of an adapter; None: it waits for no Job."""


class JobSettings(Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """Chart values `jobs.*`: where and how Jobs run."""

    node_selector: dict[str, str] = {}
    tolerations: tuple[Object, ...] = ()
    resources: Object = {}
    env: tuple[Object, ...] = ()
    """EnvVars (mirrors, proxies) of all pods that download: Jobs, and serving pods that load from a hub."""
    labels: dict[str, str] = {}
    annotations: dict[str, str] = {}
    """Annotations of the Jobs' pods; `labels` are theirs too."""


class KeyRef(Struct, frozen=True, forbid_unknown_fields=True):
    """A key of a ConfigMap or Secret in the model's namespace."""

    name: str
    key: str


class CaBundle(Struct, frozen=True, forbid_unknown_fields=True, rename="camel", omit_defaults=True):
    """Chart value `caBundle`: the certificate authorities that everything that downloads trusts; at most one is set."""

    config_map: KeyRef | None = None
    secret: KeyRef | None = None

    def __post_init__(self) -> None:
        if self.config_map is not None and self.secret is not None:
            raise ValueError("set configMap or secret, not both")


class ClaimTemplate(Struct, frozen=True, forbid_unknown_fields=True, rename="camel", kw_only=True, omit_defaults=True):
    """A claim that the operator makes in each namespace that needs it."""

    storage_class_name: str = ""
    """Empty: the cluster's default class."""
    size: str | int


class Place(Struct, frozen=True, forbid_unknown_fields=True, rename="camel", kw_only=True, omit_defaults=True):
    """Where weights or compiled artifacts are kept: at most one is set. Without any, weights are in each pod."""

    empty_dir: EmptyDir | None = None
    pvc_template: ClaimTemplate | None = None
    persistent_volume_claim: Claim | None = None
    object_store: ObjectStore | None = None

    def __post_init__(self) -> None:
        if sum(getattr(self, name) is not None for name in self.__struct_fields__) > 1:
            raise ValueError(f"set one of {', '.join(self.__struct_encode_fields__)}")

    @property
    def is_shared(self) -> bool:
        """Whether pods read what a Job put there."""
        return (self.persistent_volume_claim or self.object_store) is not None


class StorageSettings(Struct, frozen=True, forbid_unknown_fields=True, rename="camel", omit_defaults=True):
    """Chart values `storage.*`, for models that choose no place of their own."""

    weights: Place = Place()
    artifacts: Place = Place()
    image_volumes: bool = False
    """Whether the cluster can mount images, for oci:// models."""
    keep_days: Annotated[int, Meta(ge=0, le=36_500)] = 30
    """Days for which a claim keeps what no model of its namespace needs; 0: for ever."""

    def __post_init__(self) -> None:
        if self.artifacts.empty_dir is not None:
            raise ValueError("artifacts.emptyDir: a Job makes the artifacts, so pods must share the place")


class Provisionable(Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """Chart values `provisionable.*`: nodes that the cluster can get, but may not have now."""

    instance_types: tuple[str, ...] = ()


class GroupSettings(Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """Chart values `groups.*`: replicas on several nodes."""

    restart_seconds: Annotated[int, Meta(ge=0, le=3600)] = 60
    """From the end of a group to its next attempt, twice as long each time in a row: devices are free some time after
    their process ended."""
    max_restarts: Annotated[int, Meta(ge=0, le=100)] = 5
    """In a row; a group that has served for ten minutes begins again."""
    place_seconds: Annotated[int, Meta(ge=10, le=3600)] = 120
    """How long a group may hold some of its nodes while it waits for the others."""
    topology_key: Annotated[str, Meta(max_length=253)] = ZONE_LABEL
    """Label of nodes whose value the nodes of a group share; empty: none."""
    host_network: bool = False
    controller: GroupController = "StatefulSet"
    max_nodes: Annotated[int, Meta(ge=1, le=64)] = 1
    """Nodes of a replica whose manifest does not say how many: more only where the model does not fit on fewer."""


class InferencePools(Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """Chart values `gateway.inferencePools.*`: for gateways of others that pick the replica of each request."""

    enabled: bool = False
    picker: Annotated[str, Meta(max_length=63, pattern=r"^([-a-z0-9]|NAME)*$")] = ""
    """Service of a model's endpoint picker, with NAME for the model's name; empty: the gateway needs none."""
    picker_port: Annotated[int, Meta(ge=1, le=65_535)] = 9002


class EngineSettings(Struct, frozen=True, forbid_unknown_fields=True):
    """Chart values `engines.*`: the image of one engine."""

    image: str = ""
    version: str = ""
    """Of an engine that has several; empty: the newest."""

    def version_of(self, versions: Sequence[str]) -> str:
        """Its own, or the newest of those that there are; empty: there are none."""
        return self.version or next(reversed(versions), "")


@dataclass(frozen=True)
class Settings:
    """Settings of the installation for all models; the rim loads them from flags and environment."""

    runtime_image: str
    compile_image: str = ""
    """Has a compiler; empty: the runtime image has one."""
    engines: Mapping[str, EngineSettings] = field(default_factory=dict)
    """By `engines.SETTINGS`: images of engines for which `runtime_image` is not right."""
    engine_defaults: Mapping[str, str] = field(default_factory=dict)
    """By family of devices: the engine of models that name none."""
    image_pull_policy: str = ""
    """Empty: Kubernetes' own default (by tag)."""
    image_pull_secrets: tuple[str, ...] = ()
    jobs: JobSettings = field(default_factory=JobSettings)
    ca_bundle: CaBundle = field(default_factory=CaBundle)
    storage: StorageSettings = field(default_factory=StorageSettings)
    provisionable: Provisionable = field(default_factory=Provisionable)
    runtime_upgrade: RuntimeUpgrade = "OnEdit"
    """Whether running models move to another `runtime_image` by themselves, or with their next edit."""
    groups: GroupSettings = field(default_factory=GroupSettings)
    inference_pools: InferencePools = field(default_factory=InferencePools)
    device_mode: DeviceMode = "Plugin"
    device_families: Mapping[str, str] = field(default_factory=dict)
    """Families of devices by instance type, for types whose name does not tell."""
    device_scheduler_name: str = ""
    """The scheduler with the extension; only with PluginWithExtension."""
    troubleshooting_url: str = TROUBLESHOOTING
    """The page with a section for each reason, as messages name it."""
    network_policy_ingress_from: tuple[Object, ...] = ()
    """NetworkPolicyPeers that may call port 8000; empty: the whole cluster."""
    network_policy_operator: tuple[Object, ...] = ()
    """NetworkPolicyPeers of the operator, which asks replicas about their adapters."""

    def engine(self, setting: str) -> EngineSettings:
        """Of `engines`, or what holds without a choice."""
        return self.engines.get(setting, EngineSettings())

    @property
    def claims_devices(self) -> bool:
        """Whether pods may get their devices by claims (DRA)."""
        return self.device_mode in ("DRA", "Auto")

    @property
    def by_plugin(self) -> Granting:
        """How nodes with the device plugin give devices."""
        return self.device_mode if self.device_mode == "PluginWithExtension" else "Plugin"

    @property
    def grantings(self) -> tuple[Granting, ...]:
        """How the nodes that may be used give devices."""
        if self.device_mode == "Auto":
            return ("DRA", "Plugin")
        return (self.device_mode,)
