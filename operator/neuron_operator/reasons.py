"""The words of the conditions: their order, the closed set of reasons, and the Finding that carries one.

Used by everything that explains (`why`, `steps`, `decide`), by `status`, and by `make generate` for the tables of
reasons in docs/neuronmodel.md. It looks at no object.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal, Self

from neuron_operator.world import Need

Condition = Literal["Accepted", "ModelResolved", "Placed", "WeightsReady", "Compiled", "Available", "UpToDate", "Ready"]

CONDITIONS: tuple[Condition, ...] = (
    *("Accepted", "ModelResolved", "Placed", "WeightsReady", "Compiled", "Available", "UpToDate"),
)
"""In the order in which a model becomes ready; `Ready` is the first of them that is not true."""


@dataclass(frozen=True)
class Row:
    """One reason why a condition is not true."""

    name: str
    conditions: tuple[Condition, ...]
    """In the order of CONDITIONS. A serving pod that ends for this reason speaks for the last one."""
    means: str = ""
    """For the documentation, in Markdown. Empty: reserved, nothing gives this reason yet."""
    do: str = ""
    """What to do, in Markdown, with a link to the section that says more."""
    passing: bool = False
    """Goes on by itself, or as a person wants it: its Event is Normal. All others are Warnings."""
    exit_codes: tuple[int, ...] = ()
    """Exit codes of the runtime that mean this reason (`neuron_runtime/errors.py`)."""
    final: bool = False
    """Another try with the same input ends the same way: a Job is not repeated after these exit codes."""


class Reason(StrEnum):
    """Every reason, the one that heals least by waiting first: where replicas differ, the first one is shown."""

    row: Row
    weight: int
    """Position in this list; 0 is the heaviest."""

    def __new__(cls, row: Row) -> Self:
        reason = str.__new__(cls, row.name)
        reason._value_ = row.name
        reason.row = row
        reason.weight = len(cls.__members__)
        return reason

    # The spec has to change, or the cluster around it.
    INVALID_SPEC = Row(
        "InvalidSpec",
        ("Accepted",),
        "A field is wrong; the message begins with its path. Also: `maxModelLength` above what the model was made for, "
        "and objects that the API server refuses because of `podTemplate`",
        "Edit the field",
    )
    FIELD_NOT_SUPPORTED = Row(
        "FieldNotSupported",
        ("Accepted",),
        "The field is valid, but this version does not act on it",
        "Do what the message says, see [above](#fields-refused-by-this-version)",
    )
    NAME_CONFLICT = Row(
        "NameConflict",
        ("Accepted",),
        "A Service (or another child) of this name exists and belongs to something else. The operator leaves it alone",
        "Rename the model, or delete or rename that object. The operator looks again every 30 s. See "
        "[troubleshooting](troubleshooting.md#nameconflict)",
    )
    OPERATOR_FORBIDDEN = Row(
        "OperatorForbidden",
        ("Accepted",),
        "The API server refused the operator a right",
        "`helm upgrade` grants what this version needs; check admission policies. The operator looks again every 30 s. "
        "See [troubleshooting](troubleshooting.md#operatorforbidden)",
    )
    STORAGE_NOT_CONFIGURED = Row("StorageNotConfigured", ("Accepted",))
    MODEL_TOO_LARGE = Row("ModelTooLarge", ("Placed",))
    TOPOLOGY_IMPOSSIBLE = Row(
        "TopologyImpossible",
        ("Placed",),
        "No node grants this number of devices or cores to one pod; the message has the legal sizes",
        "Choose one of [them](#devices-and-cores)",
    )

    # Pods cannot be created, or do not get what they hold.
    POD_SECURITY_DENIED = Row(
        "PodSecurityDenied",
        ("Available",),
        "The namespace's Pod Security level refuses the pods",
        "Our pods pass `restricted`; check `podTemplate`",
    )
    QUOTA_EXCEEDED = Row(
        "QuotaExceeded", ("Available",), "A ResourceQuota refuses the pods", "Raise the quota, or request less"
    )
    ALLOCATION_REJECTED = Row(
        "AllocationRejected",
        ("Available",),
        "The kubelet refused the pod after scheduling (`UnexpectedAdmissionError`): usually the device plugin, which "
        "cannot grant these devices together",
        "Restart the device plugin's pod on that node; see "
        "[troubleshooting](troubleshooting.md#unexpectedadmissionerror)",
    )
    DEVICES_NOT_ADJACENT = Row("DevicesNotAdjacent", ("Available",), exit_codes=(35,))
    DRIVER_INCOMPATIBLE = Row("DriverIncompatible", ("Available",), exit_codes=(34,))
    DEVICE_FAILED = Row(
        "DeviceFailed",
        ("Available",),
        "The device (or the computation on it) failed again after the engine was restarted in place",
        "Read the log; a faulty device shows in the node's events",
        exit_codes=(32, 33),
    )
    DEVICE_OUT_OF_MEMORY = Row(
        "DeviceOutOfMemory",
        ("Available",),
        "Not enough memory for this model; the message has the arithmetic",
        "More memory (with torch: `podTemplate.spec.resources`) or smaller limits; see "
        "[troubleshooting](troubleshooting.md#it-does-not-fit)",
        exit_codes=(31,),
    )
    DEVICE_HELD = Row("DeviceHeld", ("Available",), exit_codes=(30,))
    RESTART_BUDGET_EXHAUSTED = Row(
        "RestartBudgetExhausted",
        ("Available",),
        "The engine ended again after three restarts within ten minutes",
        "The message has the last cause",
        exit_codes=(50,),
    )
    ARTIFACT_MISSING = Row("ArtifactMissing", ("Available",), exit_codes=(20,))
    GROUP_INCOMPLETE = Row("GroupIncomplete", ("Available",), exit_codes=(40, 41))
    IMAGE_PULL = Row(
        "ImagePull",
        ("Available",),
        "The image cannot be pulled; the message quotes the registry",
        "Check address, tag and `imagePullSecrets`",
    )
    SECRET_NOT_FOUND = Row(
        "SecretNotFound",
        ("WeightsReady", "Available"),
        "A Secret, or a key in it, does not exist: of `engine.env` (`WeightsReady`) or of `serving.apiKeySecretRef` "
        "(`Available`)",
        "`kubectl create secret generic NAME --from-file=KEY`: the pods go on by themselves. Or set `optional: true` "
        "in `engine.env`",
    )

    # The runtime ended with a reason.
    MODEL_NOT_FOUND = Row(
        "ModelNotFound",
        ("ModelResolved",),
        "No such repository, revision or folder; or a private one without a token",
        "Check spelling and revision; give a token. The operator tries again every ten minutes and after each edit. "
        "See [troubleshooting](troubleshooting.md#the-model-cannot-be-read)",
        exit_codes=(10,),
        final=True,
    )
    WEIGHTS_UNAUTHORIZED = Row(
        "WeightsUnauthorized",
        ("ModelResolved", "WeightsReady"),
        "The hub refused the token, or the model is gated. `WeightsReady`: it refused a serving pod",
        "Accept the model's terms on its page; put a token that may read it into the Secret",
        exit_codes=(11,),
        final=True,
    )
    UNSUPPORTED_ARCHITECTURE = Row(
        "UnsupportedArchitecture",
        ("ModelResolved",),
        "The message names the architecture (or feature) and what is supported",
        "Choose another model or a newer version",
        exit_codes=(12,),
        final=True,
    )
    INVALID_MODEL = Row(
        "InvalidModel",
        ("ModelResolved",),
        "Files are missing, malformed, truncated, or contradict one another; the message names the file",
        "Repair the repository or folder",
        exit_codes=(13,),
        final=True,
    )
    CHECKSUM_MISMATCH = Row(
        "ChecksumMismatch",
        ("WeightsReady",),
        "The downloaded files, or those in the image, differ from what was pinned",
        "Set the `refresh` annotation to pin what is there now",
        exit_codes=(14,),
    )
    STORAGE_FULL = Row(
        "StorageFull",
        ("WeightsReady",),
        "The node's disk has no room for the weights; the message has the bytes needed and free",
        "Use nodes with more ephemeral storage, or request `ephemeral-storage` in `podTemplate.spec.resources`; see "
        "[troubleshooting](troubleshooting.md#full-disk)",
        exit_codes=(15,),
    )
    INVALID_ENGINE_CONFIG = Row(
        "InvalidEngineConfig",
        ("Compiled",),
        "The runtime refused its configuration and ended; the message names the field: usually sizes that do not fit "
        "into memory, with the arithmetic",
        "Smaller `serving.maxModelLength`, `maxSequences` or `numBlocks`, or more memory",
        exit_codes=(2,),
        final=True,
    )
    COMPILE_FAILED = Row("CompileFailed", ("Compiled",), exit_codes=(21,))
    COMPILE_OUT_OF_MEMORY = Row("CompileOutOfMemory", ("Compiled",), exit_codes=(22,))
    CRASH_LOOP = Row(
        "CrashLoop",
        ("Available",),
        "The container ended without a reason of its own; the message has exit code, last words and the number of "
        "restarts",
        "`kubectl logs --previous`",
    )

    # Time or the cluster's owner may heal these.
    VOLUME_NOT_BOUND = Row(
        "VolumeNotBound",
        ("Available",),
        "A volume of the pod cannot be mounted or bound",
        "Read the event in the message",
    )
    NODE_LOST = Row(
        "NodeLost",
        ("Available",),
        "The pod's node does not answer",
        "Kubernetes replaces the pod after its eviction time; delete a node that is gone",
    )
    INSUFFICIENT_NEURON = Row(
        "InsufficientNeuron",
        ("Available",),
        "The scheduler finds no node with enough free devices; the message has the number needed, the number free, and "
        "the nodes",
        "Add nodes, or ask for fewer replicas or fewer `devices`: all devices of a replica come from one node. See "
        "[troubleshooting](troubleshooting.md#pending-pods)",
    )
    NO_MATCHING_NODE = Row(
        "NoMatchingNode",
        ("Available",),
        "The scheduler finds no node for another reason (selector, taint, CPU, memory); the message quotes it",
        "Change what it names; see [troubleshooting](troubleshooting.md#pending-pods)",
    )
    PROBE_FAILING = Row(
        "ProbeFailing",
        ("Available",),
        "The pod has started and no longer answers `/health`",
        "Read its log: `kubectl logs`",
    )
    PROGRESS_DEADLINE_EXCEEDED = Row("ProgressDeadlineExceeded", ("UpToDate",))
    ROLLED_BACK = Row("RolledBack", ("UpToDate",))
    WAITING_FOR_CAPACITY = Row("WaitingForCapacity", ("UpToDate",))

    # A part of the way.
    NODE_PROVISIONING = Row("NodeProvisioning", ("Available",), passing=True)
    DRAINING = Row(
        "Draining",
        ("Available",),
        "A pod is finishing its answers before it ends",
        "Wait, up to the drain times",
        passing=True,
    )
    RESOLVING = Row(
        "Resolving",
        ("ModelResolved",),
        "The Job runs, waits to run (the message says for what: image, node, quota, admission), or failed in a way "
        "that time may heal, such as an unreachable hub",
        "Read the message. Unreachable hub: chart value `jobs.env` (`HF_ENDPOINT`, `HTTPS_PROXY`) and network "
        "policies. See [troubleshooting](troubleshooting.md#resolving-does-not-end)",
        passing=True,
    )
    FETCHING = Row("Fetching", ("WeightsReady",), passing=True)
    COMPILING = Row("Compiling", ("Compiled",), passing=True)
    LOADING = Row(
        "Loading",
        ("Available",),
        "Pods are being created, are starting, or are loading the model",
        "Wait; for long starts see [troubleshooting](troubleshooting.md#slow-start)",
        passing=True,
    )
    ROLLING_OUT = Row(
        "RollingOut",
        ("UpToDate",),
        "Replicas are being replaced, one at a time",
        "Wait; when it stays, `Available` says why the new one does not answer",
        passing=True,
    )
    PAUSED = Row(
        "Paused",
        ("UpToDate",),
        "The annotation `neuron-serving.dev/paused` holds an edit back",
        "Remove the annotation",
        passing=True,
    )

    @classmethod
    def named(cls, name: object) -> Reason | None:
        """The reason with this name, as a status shows it."""
        return next((reason for reason in cls if reason == name), None)

    @classmethod
    def of_exit_code(cls, code: int) -> Reason | None:
        return next((reason for reason in cls if code in reason.row.exit_codes), None)


FINAL_EXIT_CODES = tuple(sorted(code for reason in Reason if reason.row.final for code in reason.row.exit_codes))


@dataclass(frozen=True)
class Finding:
    """One condition as this pass sees it."""

    condition: Condition
    status: Literal["True", "False", "Unknown"]
    reason: str
    message: str
    needs: frozenset[Need] = frozenset()
    """Facts that would make the message better."""


def met(condition: Condition, message: str, reason: str = "") -> Finding:
    """The condition is true; its reason is its own name unless another says more."""
    return Finding(condition, "True", reason or condition, message)


def unmet(condition: Condition, reason: Reason, message: str, needs: Iterable[Need] = ()) -> Finding:
    return Finding(condition, "False", reason, message, frozenset(needs))
