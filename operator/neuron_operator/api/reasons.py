"""Conditions in their order, the closed set of reasons, and the Finding that carries one, with what could change it.

Used by whoever explains a condition, and by `make generate` for the tables in the docs. It reads no objects.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum, StrEnum
from typing import Literal, Self, get_args

Normal = Literal["Accepted", "ModelResolved", "Placed", "WeightsReady", "Compiled", "Available", "UpToDate"]
Abnormal = Literal["Reconciling", "Stalled", "Contested"]
OfAdapter = Literal["Accepted", "Resolved", "Fetched"]
Condition = Literal[Normal, "Ready", Abnormal, OfAdapter]

CONDITIONS: tuple[Condition, ...] = get_args(Normal)
"""In the order in which a model becomes ready. `Ready` repeats the first one that is not true."""

ABNORMAL: tuple[Condition, ...] = get_args(Abnormal)
"""Present only while true: of the first two at most one, as kstatus (Flux, kpt, Argo CD's rules for it) expects."""

ADAPTER_CONDITIONS: tuple[Condition, ...] = get_args(OfAdapter)
"""Those of a NeuronAdapter, likewise; then its `Ready`."""

_ALIKE: Mapping[Condition, Condition] = {"Accepted": "Accepted", "Resolved": "ModelResolved", "Fetched": "WeightsReady"}
"""Conditions of an adapter can have the reasons of these conditions of a model."""

SHOWN: tuple[Condition, ...] = (*CONDITIONS, "Ready", *ABNORMAL)
"""Every condition that the operator writes."""

TROUBLESHOOTING = "docs/troubleshooting.md"
"""The page with a section for each reason, as messages name it: its path in the repository, or its address."""


@dataclass(frozen=True)
class Row:
    """One reason why a condition is not true."""

    name: str
    means: str = ""
    """For the documentation, in Markdown. Empty: reserved, no code gives this reason yet."""
    do: str = ""
    """The cure, in Markdown, with a link to more details."""
    conditions: tuple[Condition, ...] = ("Available",)
    """In the order of CONDITIONS."""
    passing: bool = False
    """Progress or an intended state: its Event is Normal. All others are Warnings."""
    exit_codes: tuple[int, ...] = ()
    """Exit codes of the runtime that mean this reason (`neuron_runtime/errors.py`)."""
    final: bool = False
    """A retry with the same input would fail the same way, so the model is `Stalled`."""
    of_adapters: bool = False
    """Only a NeuronAdapter has it."""
    of_models: bool = False
    """None has it."""
    pods: Condition | None = None
    """The condition that is false if a serving pod ends for this reason; None: see `of_pods`."""

    def is_of(self, condition: Condition) -> bool:
        """Whether the condition can have this reason."""
        return condition in self.conditions or (_ALIKE.get(condition) in self.conditions and not self.of_models)

    @property
    def of_pods(self) -> Condition:
        """The condition that is false if a serving pod ends for this reason: the last one before Compiled, if any."""
        if self.pods is not None:
            return self.pods
        before = [kind for kind in self.conditions if kind not in ("Compiled", "Available", "UpToDate")]
        return (before or self.conditions[:1])[-1]


class Reason(StrEnum):
    """Every reason, the one least likely to resolve by waiting first: if replicas differ, the first one is shown."""

    row: Row
    weight: int
    """Position in this list; 0 is the heaviest."""

    def __new__(cls, row: Row) -> Self:
        reason = str.__new__(cls, row.name)
        reason._value_ = row.name
        reason.row = row
        reason.weight = len(cls.__members__)
        return reason

    # The spec or the cluster has to change.
    INVALID_SPEC = Row(
        "InvalidSpec",
        "A field is wrong; the message starts with its path. Also: `maxModelLength` exceeds the model's maximum, or "
        "the API server rejects an object, which the message names",
        "Edit the field; of a rejected object, what the message quotes, or delete an object that was edited by hand. "
        "The operator tries again, at most 30 s apart",
        conditions=("Accepted",),
        final=True,
    )
    FIELD_NOT_SUPPORTED = Row(
        "FieldNotSupported",
        "The field is valid, but this version does not support it",
        "Follow the message, see [unsupported fields](#unsupported-fields)",
        conditions=("Accepted",),
        final=True,
    )
    NAME_CONFLICT = Row(
        "NameConflict",
        "A Service (or another child object) with this name exists and belongs to another owner. The operator does not "
        "change it",
        "Rename the model, or delete the other object. The operator tries again, at most 30 s apart. For an object of "
        "a deleted model, wait: garbage collection removes it",
        conditions=("Accepted",),
        final=True,
    )
    ADMISSION_DENIED = Row(
        "AdmissionDenied",
        "An admission policy, a webhook, a LimitRange or a missing class refuses an object (`Accepted`) or the pods "
        "(`Available`); the message quotes the API server. As `UpToDate`: it would refuse the pods of an edit, so no "
        "replica ends",
        "Follow the message; see [troubleshooting](troubleshooting.md#a-refused-object). The operator tries again, "
        "at most 30 s apart",
        conditions=("Accepted", "Available", "UpToDate"),
        final=True,
    )
    OPERATOR_FORBIDDEN = Row(
        "OperatorForbidden",
        "The operator lacks a permission (403)",
        "Run `helm upgrade`, which grants the permissions, or add the namespace to `watchNamespaces`. The operator "
        "tries again, at most 30 s apart; no restart is needed",
        conditions=("Accepted",),
        final=True,
    )
    WRITE_FAILED = Row(
        "WriteFailed",
        "A write of the operator has failed for more than five seconds: an admission webhook does not answer, the API "
        "server reports an internal error or has too much to do (429), or objects of a deleted model still exist",
        "Repair what the message quotes. The operator retries, at most a minute apart",
        conditions=("Accepted",),
    )
    CONTESTED = Row(
        "Contested",
        "Somebody else undoes what the operator writes: a policy that changes images or tolerations, an autoscaler of "
        "the Deployment. The message has object, field, wanted and found. Replicas serve on: `Ready` is false only if "
        "something else is not true, and has this reason if that would otherwise be progress. As `Available`: the "
        "object is the Service, so requests may not reach the replicas",
        "Set the field in the manifest or in the chart's values to what the policy makes it, exempt the object, or "
        "scale the NeuronModel instead of its Deployment. After five writes the operator writes again after half a "
        "minute, at last every ten minutes, also after a restart of its own",
        conditions=("Available", "Contested"),
    )
    STORAGE_NOT_CONFIGURED = Row(
        "StorageNotConfigured",
        "The model is to be compiled, but neither manifest nor chart says where its artifact is kept",
        "Set `storage.artifacts` in the manifest or in the chart's values, see [storage](storage.md)",
        conditions=("Accepted",),
        final=True,
    )
    MODEL_TOO_LARGE = Row(
        "ModelTooLarge",
        "By [the estimate](sizing.md#the-arithmetic), no allowed number of devices holds the model; the message says "
        "what is missing, and what would hold it",
        "Allow such nodes, or list their type in the chart value `provisionable.instanceTypes`. Or allow "
        "[several nodes](groups.md) for one replica: `parallelism.nodes`, or the chart value `groups.maxNodes`. Or set "
        "a shorter `serving.maxModelLength` or fewer `serving.maxSequences`. If devices, length and sequences are all "
        "set, they are tried",
        conditions=("Placed",),
        final=True,
    )
    TOPOLOGY_IMPOSSIBLE = Row(
        "TopologyImpossible",
        "No known instance type, or no node that the model may use, grants this number of devices or cores to one pod; "
        "the message lists the legal sizes. Or the model is compiled for its devices, and none are known: the cluster "
        "has no node with them. Or a node is set up with logical cores of another size than the model is compiled for; "
        "the message has both numbers",
        "Choose a [legal size](#devices-and-cores), or add a node of a type that grants it. Or name the instance type "
        "in `podTemplate.spec.nodeSelector`, or in the chart value `provisionable.instanceTypes`. For logical cores, "
        "see [troubleshooting](troubleshooting.md#devices-that-do-not-fit)",
        conditions=("Placed",),
        exit_codes=(36,),
        final=True,
    )

    # Of a NeuronAdapter: its model serves on without it.
    NO_SUCH_MODEL = Row(
        "NoSuchModel",
        "The namespace of the NeuronAdapter has no NeuronModel with the name in `spec.model`",
        "Correct the name, or create the model; both are in one namespace",
        conditions=("Accepted",),
        final=True,
        of_adapters=True,
    )
    ADAPTERS_NOT_SERVED = Row(
        "AdaptersNotServed",
        "The model serves no adapters, because its `serving.adapters.maxActive` is not set",
        "Set it; the replicas are then replaced once. See [adapters](adapters.md)",
        conditions=("Accepted",),
        final=True,
        of_adapters=True,
    )
    NAME_TAKEN = Row(
        "NameTaken",
        "The model is served under the name of the NeuronAdapter: clients could not ask for the adapter",
        "Give the NeuronAdapter another name, or edit `model.servedNames` of the model",
        conditions=("Accepted",),
        final=True,
        of_adapters=True,
    )
    TOO_MANY_ADAPTERS = Row(
        "TooManyAdapters",
        "The list of the model's adapters is full with older ones; the message has their number",
        "Delete NeuronAdapters of the model that nobody needs, or serve some on another NeuronModel. See "
        "[limits](adapters.md#limits)",
        conditions=("Ready",),
        final=True,
        of_adapters=True,
    )
    ADAPTER_NOT_LOADED = Row(
        "AdapterNotLoaded",
        "A replica could not load the adapter; the message names the replicas that lack it, each with the cause",
        "Follow the message. The replica tries again by itself, ever more rarely",
        conditions=("Ready",),
        of_adapters=True,
    )

    # Pods cannot be created, or do not get their resources.
    POD_SECURITY_DENIED = Row(
        "PodSecurityDenied",
        "The namespace's Pod Security level refuses the pods; as `UpToDate`, those of an edit, so no replica ends",
        "The operator's pods pass `restricted`; check `podTemplate`",
        conditions=("Available", "UpToDate"),
    )
    QUOTA_EXCEEDED = Row(
        "QuotaExceeded",
        "A ResourceQuota refuses an object, such as the Service (`Accepted`), or the pods (`Available`). As "
        "`UpToDate`: it refuses the next pod of an edit, and the end of one earlier pod would not make room for it, or "
        "the end of all not for all, so no replica ends",
        "Raise the quota, or request less. A quota of memory or CPU demands `podTemplate.spec.resources`",
        conditions=("Accepted", "Available", "UpToDate"),
    )
    ALLOCATION_REJECTED = Row(
        "AllocationRejected",
        "The kubelet refused the pod after scheduling (`UnexpectedAdmissionError`), usually because the device plugin "
        "cannot allocate these devices together. The operator tries again after 10 s, then ever more rarely. Or the "
        "DRA driver cannot prepare the devices of the pod's claim: the kubelet tries again",
        "Choose a size that the node grants, or restart the pod of the device plugin, or of the DRA driver, there; see "
        "[troubleshooting](troubleshooting.md#unexpectedadmissionerror)",
    )
    DEVICES_NOT_ADJACENT = Row("DevicesNotAdjacent", exit_codes=(35,))
    DRIVER_INCOMPATIBLE = Row(
        "DriverIncompatible",
        "The Neuron driver or runtime of the node does not fit the image, or the compiled graphs",
        "Update the driver of the nodes, or use the image of their Neuron SDK",
        exit_codes=(34,),
    )
    DEVICE_FAILED = Row(
        "DeviceFailed",
        "The device or the computation failed again after the engine was restarted in place",
        "Read the log; check the node's events for a faulty device",
        exit_codes=(32, 33),
    )
    DEVICE_OUT_OF_MEMORY = Row(
        "DeviceOutOfMemory",
        "Not enough memory for this model; the message has the arithmetic",
        "Give the pod more memory (with torch: `podTemplate.spec.resources`) or lower the limits; see "
        "[troubleshooting](troubleshooting.md#not-enough-memory)",
        exit_codes=(31,),
    )
    DEVICE_HELD = Row(
        "DeviceHeld",
        "The NeuronCores of the pod stayed taken by another process for two minutes; or the pod was granted fewer than "
        "the model is compiled for (the message has both numbers)",
        "Find what else uses the devices of the node (`neuron-ls`): a process outside of Kubernetes, or a pod that has "
        "devices without requesting them. Or see [troubleshooting](troubleshooting.md#devices-that-do-not-fit)",
        exit_codes=(30,),
    )
    RESTART_BUDGET_EXHAUSTED = Row(
        "RestartBudgetExhausted",
        "The engine ended again after three restarts within ten minutes. Or a group of pods failed more often in a row "
        "than the chart value `groups.maxRestarts` allows; it is not started again by itself",
        "See the last cause in the message; for a group, then edit the spec or set the `refresh` annotation, see "
        "[groups](groups.md#attempts)",
        exit_codes=(50,),
    )
    ARTIFACT_MISSING = Row(
        "ArtifactMissing",
        "A pod finds no compiled artifact of its configuration in the store, or a damaged one; the message names the "
        "fields that differ from the nearest artifact, or the damaged file",
        "Wait: the operator has the model compiled again. If it recurs, see that pods and Jobs use the same store, "
        "and that `image.compile` has the same libraries as `image.runtime`. If `engine.env` names the artifact "
        "(`NEURON_COMPILED_ARTIFACTS`), remove that or name one that fits",
        exit_codes=(20,),
    )
    GROUP_INCOMPLETE = Row(
        "GroupIncomplete",
        "A process of a replica that has several ended or was silent for too long, or it runs something else than the "
        "others, so that the whole replica ended. A group on several nodes is started again",
        "Read the message: it names the process, its node and the cause; if it recurs, check that node and the network "
        "between the nodes, see [groups](groups.md#when-something-fails)",
        exit_codes=(40, 41),
    )
    IMAGE_PULL = Row(
        "ImagePull",
        "The image of a replica or of a step's Job cannot be pulled; the message quotes the registry",
        "Check address, tag and `imagePullSecrets`. The kubelet tries again, at most five minutes apart",
        conditions=("ModelResolved", "WeightsReady", "Compiled", "Available", "UpToDate"),
    )
    SECRET_NOT_FOUND = Row(
        "SecretNotFound",
        "A Secret, or a key in it, does not exist: of `engine.env` (`WeightsReady`), of `serving.apiKeySecretRef` "
        "(`Available`), or of the chart values `jobs.env` and `caBundle` (the condition of the Job that needs it)",
        "Run `kubectl create secret generic NAME --from-file=KEY`; the pods then start by themselves. Or set "
        "`optional: true` in `engine.env`",
        conditions=("ModelResolved", "WeightsReady", "Compiled", "Available"),
    )

    CONFIG_MAP_NOT_FOUND = Row(
        "ConfigMapNotFound",
        "A ConfigMap, or a key in it, does not exist: of `engine.env`, of the chart values `jobs.env` and `caBundle`, "
        "or of something that others added to the pod",
        "Create it; the pods then start by themselves. Or set `optional: true` in `engine.env`",
        conditions=("ModelResolved", "WeightsReady", "Compiled", "Available"),
    )

    # The runtime ended with a named reason.
    MODEL_NOT_FOUND = Row(
        "ModelNotFound",
        "The repository, revision or folder does not exist, or is private and no token was given",
        "Check spelling and revision; give a token. The operator retries every ten minutes and after each edit. See "
        "[troubleshooting](troubleshooting.md#the-model-cannot-be-read)",
        conditions=("ModelResolved",),
        exit_codes=(10,),
        final=True,
    )
    WEIGHTS_UNAUTHORIZED = Row(
        "WeightsUnauthorized",
        "The hub or store refused the credentials, or the model is gated. As `WeightsReady`: a pod that fetches the "
        "weights was refused; as `Compiled`: the Job that compiles, by the model's source or by the store of artifacts",
        "Accept the model's terms on its page; put a token or keys with read access into the Secret",
        conditions=("ModelResolved", "WeightsReady", "Compiled"),
        exit_codes=(11,),
        final=True,
    )
    UNSUPPORTED_ARCHITECTURE = Row(
        "UnsupportedArchitecture",
        "This version does not support the model's architecture or a feature of it; the message lists what is "
        "supported",
        "Choose another model or a newer version, or set the `serving.task` that the message names",
        conditions=("ModelResolved",),
        exit_codes=(12,),
        final=True,
    )
    DRAFT_MISMATCH = Row(
        "DraftMismatch",
        "The draft model has not the tokens of the model, or is no model of the kind that `serving.speculation.method` "
        "needs, or is quantized where the engine makes drafts with others alone; the message has both sizes, or names "
        "what it is",
        "Choose a draft model of the same family, for the backend `nxdi` an unquantized one. Or set `method: NGram`, "
        "which needs none",
        conditions=("ModelResolved",),
        final=True,
        of_models=True,
    )
    INVALID_MODEL = Row(
        "InvalidModel",
        "Files are missing, malformed, truncated or inconsistent; the message names the file",
        "Repair the repository or folder",
        conditions=("ModelResolved",),
        exit_codes=(13,),
        final=True,
    )
    CHECKSUM_MISMATCH = Row(
        "ChecksumMismatch",
        "The files at the source differ from the pinned ones, or a file of the stored weights is damaged; the message "
        "names it",
        "Set the `refresh` annotation to pin the current files. The operator fetches stored weights again",
        conditions=("ModelResolved", "WeightsReady"),
        exit_codes=(14,),
    )
    STORAGE_FULL = Row(
        "StorageFull",
        "The weights, or the compiled artifact (`Compiled`), do not fit on the volume or the node's disk; the message "
        "has the bytes needed and free. As `Available` alone: the kubelet evicted a pod because of its disk; the "
        "message quotes it",
        "Make the volume larger or delete what is not needed. Without a volume, use nodes with more ephemeral storage, "
        "or request `ephemeral-storage` in `podTemplate.spec.resources`; see "
        "[troubleshooting](troubleshooting.md#full-disk)",
        conditions=("WeightsReady", "Compiled", "Available"),
        exit_codes=(15,),
    )
    WEIGHTS_MISSING = Row(
        "WeightsMissing",
        "The store of weights lacks the model, or does not exist; the message has the store and the digest",
        "Somebody deleted the model: the operator fetches it again. If the message names a bucket, correct the address "
        "of the store",
        conditions=("WeightsReady",),
        exit_codes=(16,),
    )
    CONVERSION_FAILED = Row(
        "ConversionFailed",
        "The weights cannot be converted (`serving.quantization`): a tensor has numbers that are none, its format is "
        "not converted, or the Job had too little memory; the message has the tensor, or the limit",
        "Follow the message: repair the checkpoint, set `serving.quantization: None`, or set "
        "`jobs.resources.limits.memory` to more. The operator tries again, at most ten minutes apart",
        conditions=("WeightsReady",),
        exit_codes=(17,),
        final=True,
        of_models=True,
    )
    INVALID_ENGINE_CONFIG = Row(
        "InvalidEngineConfig",
        "The runtime refused its configuration; the message names the field. Often limits exceed the memory; the "
        "message then has the arithmetic. As `ModelResolved`: the model, or the backend, cannot have what "
        "`serving.quantization` asks for. As `UpToDate`: it was asked before a replica ended, and the earlier revision "
        "serves on",
        "Correct the field that the message names, or lower `serving.maxModelLength`, `maxSequences` or `numBlocks`, "
        "or give the pod more memory",
        conditions=("ModelResolved", "Compiled", "UpToDate"),
        exit_codes=(2,),
        final=True,
        of_models=True,
        pods="Compiled",
    )
    COMPILE_FAILED = Row(
        "CompileFailed",
        "The compiler failed; the message has its last lines",
        "Follow the message. Set `engine.compile: Disabled` to serve the model meanwhile",
        conditions=("Compiled",),
        exit_codes=(21,),
        final=True,
    )
    ARTIFACT_UNUSABLE = Row(
        "ArtifactUnusable",
        "A Job found the compiled artifact whole in its store, twice, and a pod still misses a part: what it loads "
        "is not what was compiled. The operator does not ask the Job again. Pods that do not start are restarted ever "
        "more rarely, and hold their devices",
        "Follow the message. Set `replicas: 0` to release the devices meanwhile",
        conditions=("Compiled",),
        final=True,
    )
    COMPILE_OUT_OF_MEMORY = Row(
        "CompileOutOfMemory",
        "The compiler ran out of memory with four times the estimate, or with the limit that manifest or chart set; "
        "the message has the number",
        "Set `jobs.resources.limits.memory` to more",
        conditions=("Compiled",),
        exit_codes=(22,),
        final=True,
    )
    # Of an adapter that does not fit: its model serves on without it.
    RANK_TOO_HIGH = Row(
        "RankTooHigh",
        "The adapter's rank, or one in its `rank_pattern`, is above the one that the model's graphs can hold; the "
        "message has both numbers",
        "Train the adapter with a smaller `r`. Or raise `serving.adapters.maxRank` of the model, which is then "
        "compiled again",
        conditions=("Resolved",),
        exit_codes=(60,),
        final=True,
        of_adapters=True,
    )
    TARGETS_NOT_SERVED = Row(
        "TargetsNotServed",
        "The adapter changes projections that the model's graphs do not have adapters for; the message names them and "
        "those that it may change",
        "Add them to `serving.adapters.targets` of the model, which is then compiled again. Embeddings, the head, "
        "experts and fused projections cannot be added: train the adapter without them",
        conditions=("Resolved",),
        exit_codes=(61,),
        final=True,
        of_adapters=True,
    )
    ADAPTER_MISMATCH = Row(
        "AdapterMismatch",
        "The adapter was trained for another base model: a layer or a shape of its tensors is not that of the model; "
        "the message has both, and the name of the model that the adapter was trained for",
        "Correct the model or the URI",
        conditions=("Resolved",),
        exit_codes=(62,),
        final=True,
        of_adapters=True,
    )
    ADAPTER_NOT_SUPPORTED = Row(
        "AdapterNotSupported",
        "The adapter is more than plain LoRA (DoRA, biases, `modules_to_save`, `alpha_pattern`, ...); the message "
        "names the field or the tensor",
        "Train it without that. Or merge it into its base model (PEFT's `merge_and_unload`) and serve the result as a "
        "model",
        conditions=("Resolved",),
        exit_codes=(63,),
        final=True,
        of_adapters=True,
    )
    INVALID_ADAPTER = Row(
        "InvalidAdapter",
        "The files are not those of a PEFT adapter, or they are missing, malformed, truncated or inconsistent; the "
        "message names the file",
        "Save it again with PEFT's `save_pretrained`, which writes `adapter_config.json` and "
        "`adapter_model.safetensors`",
        conditions=("Resolved",),
        exit_codes=(64,),
        final=True,
        of_adapters=True,
    )
    EVICTED = Row(
        "Evicted",
        "The kubelet ended a pod because its node ran out of memory or process ids; the message quotes it",
        "Request what the pods need in `podTemplate.spec.resources`",
    )
    CRASH_LOOP = Row(
        "CrashLoop",
        "A container ended without a named reason, or cannot start; the message has the exit code, the last log line "
        "and the number of restarts. If others added the container, the message says so",
        "Run `kubectl logs --previous`",
    )

    # Time or a cluster administrator may resolve these.
    VOLUME_NOT_BOUND = Row(
        "VolumeNotBound",
        "A volume of a Job's pod (`ModelResolved`, `WeightsReady`, `Compiled`) or of a serving pod (`Available`) "
        "cannot be mounted or bound, or its claim does not exist",
        "Read the event in the message, or `kubectl describe pvc` of the claim in it. See "
        "[in a cluster](storage.md#in-a-cluster)",
        conditions=("ModelResolved", "WeightsReady", "Compiled", "Available"),
    )
    NODE_LOST = Row(
        "NodeLost",
        "The pod's node does not answer, or is shutting down. Kubernetes makes a new pod elsewhere 30 s after it has "
        "noticed",
        "Delete the Node if the machine no longer exists; see [troubleshooting](troubleshooting.md#failed-nodes)",
    )
    DEVICE_UNHEALTHY = Row(
        "DeviceUnhealthy",
        "The pod's node reports a fault of its Neuron devices (`NeuronHealth`, `AcceleratedHardwareReady`, or fewer "
        "allocatable devices than the pod holds); the message quotes it",
        "Drain the node, then replace or reboot it; see [troubleshooting](troubleshooting.md#failed-nodes)",
    )
    INSUFFICIENT_NEURON = Row(
        "InsufficientNeuron",
        "The scheduler finds no node with enough free devices; the message has the number needed, the number free and "
        "the nodes. Or the model wakes from zero replicas, and others that woke `before it` get theirs first",
        "Add nodes, or request fewer replicas or `devices`: all devices of a replica come from one node. Scale models "
        "to zero that nobody asks. See [troubleshooting](troubleshooting.md#pending-pods) and "
        "[zero and back](autoscaling.md#waking-together)",
    )
    NO_MATCHING_NODE = Row(
        "NoMatchingNode",
        "The scheduler finds no node for another reason (selector, taint, CPU, memory); the message quotes it",
        "Follow the quoted message; see [troubleshooting](troubleshooting.md#pending-pods)",
    )
    PROBE_FAILING = Row(
        "ProbeFailing",
        "The pod was ready and no longer answers `/health`",
        "Read its log with `kubectl logs`",
    )
    PROGRESS_DEADLINE_EXCEEDED = Row("ProgressDeadlineExceeded", conditions=("UpToDate",), final=True)
    ROLLED_BACK = Row(
        "RolledBack",
        "The new revision did not become ready within `rollout.progressDeadlineSeconds`, or its pods ended twice for a "
        "reason that no restart changes: the last one that worked serves until the spec changes. Or nodes refused its "
        "pods: the previous one serves until the next attempt. Or the annotation `neuron-serving.dev/rollback-to` "
        "holds an earlier one",
        "Follow the quoted message and edit the spec; see [rollouts](neuronmodel.md#a-rollout-that-fails) and "
        "[troubleshooting](troubleshooting.md#unexpectedadmissionerror)",
        conditions=("UpToDate",),
    )
    WAITING_FOR_CAPACITY = Row("WaitingForCapacity", conditions=("UpToDate",))

    # Progress.
    NAMESPACE_TERMINATING = Row(
        "NamespaceTerminating",
        "The namespace is being deleted, and the model with it",
        "Wait; a finalizer of an object in it may delay this",
        conditions=("Accepted",),
        passing=True,
    )
    NODE_PROVISIONING = Row("NodeProvisioning", passing=True)
    DRAINING = Row(
        "Draining",
        "A pod finishes its running answers before it ends",
        "Wait, at most for the drain times",
        passing=True,
    )
    RESOLVING = Row(
        "Resolving",
        "The Job is running (the message ends with the last line of its log), is waiting (the message says for what: "
        "image, node, quota, admission), or had a temporary failure such as an unreachable hub",
        "Read the message. For an unreachable hub, check chart value `jobs.env` (`HF_ENDPOINT`, `HTTPS_PROXY`) and "
        "network policies. See [troubleshooting](troubleshooting.md#resolving-does-not-end)",
        conditions=("ModelResolved",),
        passing=True,
    )
    FETCHING = Row(
        "Fetching",
        "The Job that fetches the weights is running (the message shows how far), is waiting (the message says for "
        "what), or had a temporary failure such as an unreachable hub",
        "Read the message; see [storage](storage.md#in-a-cluster) and "
        "[troubleshooting](troubleshooting.md#resolving-does-not-end)",
        conditions=("WeightsReady",),
        passing=True,
    )
    CONVERTING = Row(
        "Converting",
        "The Job that converts the weights (`serving.quantization`) is running (the message shows how far), is waiting "
        "(the message says for what), or had a temporary failure",
        "Wait: models of the namespace share the result. See [quantize a model](models.md#quantize-a-model)",
        conditions=("WeightsReady",),
        passing=True,
        of_models=True,
    )
    COMPILING = Row(
        "Compiling",
        "The Job compiles the model, is waiting (the message says for what: image, node, quota, volume), or is "
        "repeated with more memory. As `UpToDate`: the earlier revision serves until the artifact of an edit is there",
        "Wait; the Job's log tells the graph that is being compiled",
        conditions=("Compiled", "UpToDate"),
        passing=True,
    )
    CHECKING = Row(
        "Checking",
        "A Job asks the runtime whether it accepts the configuration of an edit, before a replica ends, or is waiting "
        "(the message says for what), or ended without an answer",
        "Wait; the earlier revision serves meanwhile",
        conditions=("UpToDate",),
        passing=True,
    )
    LOADING = Row(
        "Loading",
        "Pods are being created, are starting or are loading the model",
        "Wait; for slow starts see [troubleshooting](troubleshooting.md#slow-start)",
        passing=True,
    )
    ROLLING_OUT = Row(
        "RollingOut",
        "Replicas are being replaced; the message says whether nobody answers meanwhile",
        "Wait; if it does not finish, the message of `Available` says why the new replica is not ready",
        conditions=("UpToDate",),
        passing=True,
    )
    PAUSED = Row(
        "Paused",
        "The annotation `neuron-serving.dev/paused` holds an edit back",
        "Remove the annotation",
        conditions=("UpToDate",),
        passing=True,
    )

    @classmethod
    def named(cls, name: object) -> Reason | None:
        """The reason with this name, as a status shows it."""
        return _BY_NAME.get(name)

    @classmethod
    def of_exit_code(cls, code: int) -> Reason | None:
        return next((reason for reason in cls if code in reason.row.exit_codes), None)


_BY_NAME: Mapping[object, Reason] = {str(reason): reason for reason in Reason}


class Need(Enum):
    """Facts that are expensive and therefore read on demand only."""

    FREE_DEVICES = "free devices"
    EVENTS = "events"
    """Warnings about this model's Jobs, ReplicaSets and pods."""
    CLAIM_EVENTS = "events of claims"
    """All events of the namespace's PersistentVolumeClaims: why one is not bound is no warning in some cases."""
    WAKERS = "wakers"
    """The other models that wake from zero replicas."""


@dataclass(frozen=True)
class LogOf:
    """A need like the others: the end of the log of a Job's pod. Serving pods have none: theirs may quote requests."""

    pod: str


@dataclass(frozen=True)
class Exists:
    """A need like the others: whether an object that a pod waits for exists by now. Of a Secret no more is learned."""

    kind: Literal["Secret", "ConfigMap"]
    name: str


@dataclass(frozen=True)
class AdaptersOf:
    """A need like the others: what a replica tells about its adapters."""

    pod: str
    address: str


@dataclass(frozen=True)
class MetricsOf:
    """A need like the others: the metrics of a replica."""

    pod: str
    address: str


@dataclass(frozen=True)
class IdleOf:
    """A need like the others: how long a replica has been idle."""

    pod: str
    address: str


@dataclass(frozen=True)
class Trial:
    """A need like the others: why the API server would refuse a pod, which is only tried."""

    pod: str
    """As JSON."""


Asked = AdaptersOf | MetricsOf | IdleOf
"""What replicas answer over HTTP."""
Needed = Need | LogOf | Exists | Asked | Trial


@dataclass(frozen=True)
class Finding:
    """One condition as this pass sees it."""

    condition: Condition
    status: Literal["True", "False", "Unknown"]
    reason: str
    message: str
    needs: frozenset[Needed] = frozenset()
    """Facts that would make the message better."""

    @property
    def row(self) -> Row:
        """The row of its reason. A condition that is true may have a reason without one."""
        reason = Reason.named(self.reason)
        return reason.row if reason else Row(self.reason, conditions=())


def met(condition: Condition, message: str, reason: str = "") -> Finding:
    """The condition is true; its reason is its own name unless another says more."""
    return Finding(condition, "True", reason or condition, message)


def unmet(condition: Condition, reason: Reason, message: str, needs: Iterable[Needed] = ()) -> Finding:
    return Finding(condition, "False", reason, message, frozenset(needs))
