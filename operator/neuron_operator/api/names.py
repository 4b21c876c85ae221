"""Every string that a cluster sees: API group, kinds, labels, annotations, resource names, names of children.

A model's name is a DNS label, because its Service has the same name and labels have it as value. Derived names are
functions and are DNS labels, too: the model's name is shortened where it leaves no room.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping

GROUP = "neuron-serving.dev"
VERSION = "v1alpha1"
API_VERSION = f"{GROUP}/{VERSION}"
KIND = "NeuronModel"
PLURAL = "neuronmodels"
SHORT = "nm"
ADAPTER_KIND = "NeuronAdapter"
ADAPTER_PLURAL = "neuronadapters"
ADAPTER_SHORT = "na"
KINDS = (KIND, ADAPTER_KIND)
"""Those that the operator reconciles."""

FIELD_MANAGER = "neuron-operator"
STATUS_FIELD_MANAGER = "neuron-operator-status"

# Labels and annotations of Kubernetes.
NAME_LABEL = "app.kubernetes.io/name"
INSTANCE_LABEL = "app.kubernetes.io/instance"
COMPONENT_LABEL = "app.kubernetes.io/component"
PART_OF_LABEL = "app.kubernetes.io/part-of"
MANAGED_BY_LABEL = "app.kubernetes.io/managed-by"
INSTANCE_TYPE_LABEL = "node.kubernetes.io/instance-type"
ARCHITECTURE_LABEL = "kubernetes.io/arch"
AMD64 = {ARCHITECTURE_LABEL: "amd64"}
"""What Neuron nodes are, and so the images."""
HOSTNAME_LABEL = "kubernetes.io/hostname"
POD_INDEX_LABEL = "apps.kubernetes.io/pod-index"
WORKER_INDEX_LABEL = "leaderworkerset.sigs.k8s.io/worker-index"
LEADER_WORKER_SET = "LeaderWorkerSet"
LEADER_WORKER_SET_API = "leaderworkerset.x-k8s.io/v1"
ZONE_LABEL = "topology.kubernetes.io/zone"

# In a pod's affinity.
REQUIRED_AFFINITY = "requiredDuringSchedulingIgnoredDuringExecution"
PREFERRED_AFFINITY = "preferredDuringSchedulingIgnoredDuringExecution"

APP = "neuron-serving"
MANAGER = "neuron-operator"

# Our labels and annotations.
MODEL_LABEL = f"{GROUP}/model"
ROLE_LABEL = f"{GROUP}/role"
REVISION_LABEL = f"{GROUP}/revision"
ALLOCATION_LABEL = f"{GROUP}/allocation"
GROUP_LABEL = f"{GROUP}/group"
REPLICA_LABEL = f"{GROUP}/replica"
ATTEMPT_LABEL = f"{GROUP}/attempt"
GROUP_SIZE_LABEL = f"{GROUP}/group-size"
PAUSED_ANNOTATION = f"{GROUP}/paused"
CONFIG_ANNOTATION = f"{GROUP}/config"
PINNED_ANNOTATION = f"{GROUP}/pinned"
RENDERED_ANNOTATION = f"{GROUP}/rendered"
SHARED_ANNOTATION = f"{GROUP}/shared"
REFRESH_ANNOTATION = f"{GROUP}/refresh"
RETRY_ANNOTATION = f"{GROUP}/retry"
TRIED_ANNOTATION = f"{GROUP}/tried"
ROLLBACK_ANNOTATION = f"{GROUP}/rollback-to"
MODEL_ANNOTATIONS = frozenset({PAUSED_ANNOTATION, REFRESH_ANNOTATION, RETRY_ANNOTATION, ROLLBACK_ANNOTATION})
"""Those of a NeuronModel that the operator reads."""

ROLE_LEADER = "leader"
ROLE_FOLLOWER = "follower"
SERVING_ROLES = (ROLE_LEADER, ROLE_FOLLOWER)
ROLE_RESOLVE = "resolve"
ROLE_FETCH = "fetch"
ROLE_CONVERT = "convert"
ROLE_COMPILE = "compile"
ROLE_CHECK = "check"
ROLE_CLEAN = "clean"
ALLOCATION_DEVICES = "devices"
ALLOCATION_CORES = "cores"

# Selects all our children and pods, for watches.
OWNED_SELECTOR = f"{MANAGED_BY_LABEL}={MANAGER},{PART_OF_LABEL}={APP}"

# Extended resources of the Neuron device plugin.
DEVICE_RESOURCE = "aws.amazon.com/neuron"
CORE_RESOURCE = "aws.amazon.com/neuroncore"
NEURON_RESOURCE_PREFIX = "aws.amazon.com/"
EFA_RESOURCE = "vpc.amazonaws.com/efa"
HUGE_PAGES_RESOURCE = "hugepages-2Mi"
NEURON_TAINT = DEVICE_RESOURCE

# Of the Gateway API Inference Extension.
POOL_API = "inference.networking.k8s.io/v1"
POOL_KIND = "InferencePool"

# Dynamic resource allocation: the Neuron driver and that of the network between nodes.
CLAIM_API = "resource.k8s.io/v1"
CLAIM_TEMPLATE = "ResourceClaimTemplate"
DEVICE_DRIVER = "neuron.aws.com"
"""Name of the driver and of its DeviceClass."""
EFA_CLASS = "efa.networking.k8s.aws"
CLAIM = "neuron"
"""In a serving pod: the claim with the replica's devices."""
NEURON_PRESENT_LABEL = "neuron.amazonaws.com/present"

# The serving pod, as the runtime's command line expects it.
RUNTIME_CONTAINER = "runtime"
FETCH_CONTAINER = "fetch-weights"
"""The init container that brings the weights for an engine that fetches nothing itself."""
PORT = 8000
PORT_NAME = "http"
CACHE_EVENTS_PORT = 5557
CACHE_EVENTS_PORT_NAME = "cache-events"
CONFIG_DIR = "/etc/neuron-serving"
CONFIG_KEY = "config.json"
RECORD_KEY = "record.json"
CONFIG_VOLUME = "config"
API_KEY_VOLUME = "api-key"
API_KEY_DIR = "/etc/neuron-serving-api-key"
API_KEY_FILE = "keys"
ADAPTERS_VOLUME = "adapters"
ADAPTERS_DIR = "/etc/neuron-serving-adapters"
ADAPTERS_KEY = "adapters.json"
ADAPTERS_PATH = "/adapters"
METRICS_PATH = "/metrics"
"""Where a replica tells about its adapters."""
CA_VOLUME = "ca-bundle"
CA_DIR = "/etc/neuron-serving-ca"
CA_FILE = "ca.crt"
WEIGHTS_DIR = "/var/lib/neuron-serving/weights"
ARTIFACTS_DIR = "/var/lib/neuron-serving/artifacts"
IMAGE_DIR = "/mnt/images/model"
MODEL_VOLUME = "model"
DRAFT_VOLUME = "draft-model"
WEIGHTS_VOLUME = "weights"
ARTIFACTS_VOLUME = "artifacts"
CLAIMS_DIR = "/mnt/claims"
CLAIMS_DIR_VARIABLE = "NEURON_SERVING_CLAIMS_DIR"
"""Where the runtime finds the claims of pvc:// models, if not there."""
TMP_DIR = "/tmp"  # noqa: S108 - an emptyDir in the pod
TERMINATION_LOG = "/dev/termination-log"
LOG_PREFIX = "neuron-runtime: "
"""Begins each line of the runtime about its progress; other lines of a log are libraries'."""
HUB_TOKEN_KEY = "HF_TOKEN"
CREDENTIALS = {
    "hf": (HUB_TOKEN_KEY,),
    "s3": (
        *("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"),
        *("AWS_REGION", "AWS_ENDPOINT_URL"),
    ),
}
"""Keys of a credentials Secret, and the variables they become, by the scheme of the URI that they open."""
RANK_VARIABLE = "NEURON_SERVING_RANK"
GROUP_SIZE_VARIABLE = "NEURON_SERVING_GROUP_SIZE"
LEADER_VARIABLE = "NEURON_SERVING_LEADER"
GROUP_SECRET_VARIABLE = "NEURON_SERVING_GROUP_SECRET_FILE"
GROUP_VARIABLES = (RANK_VARIABLE, GROUP_SIZE_VARIABLE, LEADER_VARIABLE, GROUP_SECRET_VARIABLE)
GROUP_SECRET_VOLUME = "group-secret"
GROUP_SECRET_DIR = "/etc/neuron-serving-group"
GROUP_SECRET_KEY = "secret"
GROUP_PORT = 8010
"""The first of two on the leader's pod, for the ranks of its group."""
GROUP_PORT_VARIABLE = "NEURON_SERVING_GROUP_PORT"
"""Another first port, where several groups share one network."""
SHM_VOLUME = "shm"
SHM_DIR = "/dev/shm"  # noqa: S108 - an emptyDir in the pod
PLATFORM_VARIABLE = "NEURON_PLATFORM_TARGET_OVERRIDE"
"""The Neuron libraries read here the family of devices to compile for."""
ARTIFACT_VARIABLE = "NEURON_COMPILED_ARTIFACTS"
"""Names the artifact that a pod loads instead of one of the store."""

# Variables of the operator or the device plugin, which a manifest may not set.
RESERVED_ENV_PREFIX = "NEURON_SERVING_"
RESERVED_ENV = frozenset(
    {
        "HOME",
        "HF_TOKEN",
        "NEURON_RT_VISIBLE_CORES",
        "NEURON_RT_NUM_CORES",
        "NEURON_LOGICAL_NC_CONFIG",
        PLATFORM_VARIABLE,
        "AWS_NEURON_VISIBLE_DEVICES",
    }
)

# The operator's own claims, one of each per namespace.
WEIGHTS_CLAIM = "neuron-serving-weights"
ARTIFACTS_CLAIM = "neuron-serving-artifacts"

HOLDING = "neuron-serving-operator"
"""The ConfigMap of each namespace that says which installation acts there."""

MAX_LABEL = 63
"""Characters of a DNS label and of a label's value. What controllers derive from our names needs no room: ReplicaSets'
names may be longer, and the API server cuts the generated names of pods."""
MAX_MODEL_NAME = MAX_LABEL
MAX_STATEFUL_SET = MAX_LABEL - 11
"""The StatefulSet controller makes a label's value of its name and a hash of ten characters."""
HASH_LENGTH = 10
SHARED_HASH_LENGTH = 20
"""Hashes are longer in names that models share: whoever has another's name has its result."""


def digest(value: object, length: int = HASH_LENGTH) -> str:
    """The first hexadecimal digits of a hash over the canonical JSON of `value`; for names only."""
    return hashlib.sha256(_canonical(value).encode()).hexdigest()[:length]


_canonical = json.JSONEncoder(sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode


def service_account_name(model: str) -> str:
    """With a suffix because every namespace has a ServiceAccount `default`."""
    return _derived(model, "-serving")


def revision_name(model: str, revision: str) -> str:
    return _derived(model, f"-{revision}")


def config_name(model: str, document: object, files: Mapping[str, str]) -> str:
    """files: what is mounted beside the document."""
    return _derived(model, f"-config-{digest([document, files] if files else document)}")


def claim_name(model: str, spec: object) -> str:
    """The template of the claims of a model's pods. It is named by its content, which cannot be changed."""
    return _derived(model, f"-devices-{digest(spec)}")


def routed_name(model: str) -> str:
    """The ConfigMap with the names of a model's adapters, for gateways."""
    return _derived(model, "-routed")


def adapters_name(model: str) -> str:
    """The ConfigMap with the list of a model's adapters."""
    return _derived(model, "-adapters")


def group_name(model: str, replica: int, revision: str, attempt: int) -> str:
    """The name of a group's objects. Each attempt has its own, so that nothing of an earlier one is mistaken for it."""
    return _derived(model, f"-{replica}-{revision}-{attempt}", MAX_STATEFUL_SET - len(FOLLOWERS_SUFFIX))


FOLLOWERS_SUFFIX = "-f"


def followers_name(group: str) -> str:
    return f"{group}{FOLLOWERS_SUFFIX}"


def shared_name(prefix: str, value: object) -> str:
    """The name of an object that all models with the same `value` share."""
    return f"{prefix}-{digest(value, SHARED_HASH_LENGTH)}"


def _derived(model: str, suffix: str, most: int = MAX_LABEL) -> str:
    """A DNS label. A name without room for the suffix is cut and gets its own hash, so that it stays distinct."""
    room = most - len(suffix)
    if len(model) > room:
        model = f"{model[: room - HASH_LENGTH - 1].rstrip('-')}-{digest(model)}"
    return f"{model}{suffix}"


def shared_labels(component: str) -> dict[str, str]:
    """Labels of every object that the models of a namespace share; they name no model."""
    return {NAME_LABEL: APP, COMPONENT_LABEL: component, PART_OF_LABEL: APP, MANAGED_BY_LABEL: MANAGER}


def labels(model: str) -> dict[str, str]:
    """Labels of every child."""
    return {**shared_labels("server"), INSTANCE_LABEL: model, MODEL_LABEL: model}


OWN_LABELS = frozenset({*labels(""), ROLE_LABEL, REVISION_LABEL, GROUP_LABEL})
"""Labels that the operator reads of its objects."""


def owner_labels(model: str) -> dict[str, str]:
    """The labels by which an object without an owner is recognised as this model's."""
    return {MANAGED_BY_LABEL: MANAGER, MODEL_LABEL: model}


def serving_selector(model: str) -> dict[str, str]:
    """Selects the leaders of all replicas, whatever their revision; immutable in the Deployment."""
    return {MODEL_LABEL: model, ROLE_LABEL: ROLE_LEADER}


def members_selector(model: str) -> dict[str, object]:
    """Selects the pods of all replicas, followers too, as a LabelSelector."""
    roles = {"key": ROLE_LABEL, "operator": "In", "values": list(SERVING_ROLES)}
    return {"matchLabels": {MODEL_LABEL: model}, "matchExpressions": [roles]}


def selector_string(selector: Mapping[str, str]) -> str:
    """The format of the scale subresource."""
    return ",".join(f"{key}={value}" for key, value in sorted(selector.items()))
