"""`status` of a NeuronModel, declared once: its schema in the CRD and its table in docs/neuronmodel.md are generated.

`revision` fills the plan, `status` fills the rest. Fields that nothing fills yet are reserved for later versions.
"""

from typing import Annotated, Literal

from msgspec import Meta

from neuron_operator.api.field_types import Int64
from neuron_operator.api.fields import SpecPart, unique

MAX_WORD = 256
"""Characters of a string that a runtime reports."""
MAX_HISTORY = 10
MAX_GROUPS = 32
MAX_MESSAGE = 1024
"""Characters of a message."""

Word = Annotated[str, Meta(max_length=64)]
Message = Annotated[str, Meta(max_length=MAX_MESSAGE)]
Reported = Annotated[str, Meta(max_length=MAX_WORD)]


class StatusPart(SpecPart, frozen=True, forbid_unknown_fields=False):
    """A part of the status. A plan that another version pinned may have more fields."""


class Condition(StatusPart, frozen=True):
    type: Word
    status: Literal["True", "False", "Unknown"]
    reason: Annotated[str, Meta(min_length=1, max_length=64)]
    message: Message
    last_transition_time: Annotated[str, Meta(extra_json_schema={"format": "date-time"})]
    observed_generation: Annotated[Int64, Meta(ge=0)] | None = None


class ObjectStatus(StatusPart, frozen=True):
    """What the status of every kind has."""

    observed_generation: Annotated[
        Annotated[Int64, Meta(ge=-1)] | None,
        "The generation of the spec that this status describes; -1 before the first one.",
    ] = None
    conditions: Annotated[
        tuple[Condition, ...],
        Meta(max_length=32),
        unique(by="type"),
        "One for each step towards ready, with the generation of the spec that it describes; see "
        "[conditions](#conditions-and-reasons).",
    ] = ()
    retry_key: Annotated[
        Reported | None, "The value of the annotation `neuron-serving.dev/retry` that the operator has acted on."
    ] = None


class ModelFacts(StatusPart, frozen=True):
    """Facts about the model; the digest is the commit (`hf://`) or a hash of configuration and weights headers."""

    architecture: Reported | None = None
    parameters: Int64 | None = None
    layers: Int64 | None = None
    heads: Int64 | None = None
    bytes: Int64 | None = None
    digest: Reported | None = None
    quantization: Annotated[Reported | None, "How its weights are stored that are quantized."] = None


class ConversionStatus(StatusPart, frozen=True):
    """What a Job made of the weights, and what that changes; see [quantize a model](models.md#quantize-a-model)."""

    format: Word
    digest: Annotated[Reported, "Of the converted weights, which replicas read."]
    bytes: Int64 | None = None
    layer_error: Annotated[
        Word | None, "The largest error of a layer's output, as a share of that output: `0.0081`."
    ] = None
    perplexity: Annotated[
        Word | None, "Of the model before, on a text that ships with the runtime; lower is better."
    ] = None
    converted_perplexity: Annotated[Word | None, "The same of the converted model."] = None
    unmeasured: Annotated[Reported | None, "Why they were not computed."] = None


class MemoryPlan(StatusPart, frozen=True):
    """Estimated bytes of each NeuronCore, and how many of them a plan may use; see [sizing.md](sizing.md)."""

    weights_bytes: Int64 | None = None
    cache_bytes: Int64 | None = None
    graphs_bytes: Int64 | None = None
    scratch_bytes: Int64 | None = None
    runtime_bytes: Int64 | None = None
    available_bytes: Int64 | None = None
    adapters_bytes: Int64 | None = None
    draft_bytes: Annotated[Int64 | None, "Weights, cache and graphs of the draft model."] = None


class Plan(StatusPart, frozen=True):
    """Where a replica runs and with which limits. On devices all of them are planned; on the host only those that the
    spec sets are shown here: the engine chooses the others, see the pod's log and `/v1/models`."""

    instance_type: Word | None = None
    devices: int | None = None
    cores: int | None = None
    tensor: int | None = None
    nodes: int | None = None
    max_model_length: int | None = None
    max_sequences: int | None = None
    block_size: int | None = None
    num_blocks: int | None = None
    task: Annotated[Word | None, "The task of the model, if it does not generate text."] = None
    backend: Word | None = None
    default_for: Annotated[Word | None, "The family of devices whose default the backend is, by the chart."] = None
    dtype: Word | None = None
    sampling: Word | None = None
    memory: MemoryPlan | None = None
    host_bytes: Annotated[
        Int64 | None, "Estimated bytes of a node's memory that one pod needs, to load and to serve."
    ] = None
    compile_minutes: Annotated[
        int | None,
        "Estimated minutes that each replica compiles as it starts, if no Job compiled its graphs before "
        "([how](engines.md#compiling)).",
    ] = None
    summary: Message | None = None


class ArtifactStatus(StatusPart, frozen=True):
    key: Annotated[str, Meta(max_length=128), "Its key in the store; until that is known, the name of the Job."]
    state: Annotated[Word | None, "`Compiling`, `Failed` or `Ready`."] = None
    seconds: Annotated[Int64 | None, "How long compiling took, even if this model found it in the store."] = None


class GroupStatus(StatusPart, frozen=True):
    """A replica on several nodes. It is also the operator's memory of how often the replica ended."""

    name: Annotated[str, Meta(max_length=253)]
    revision: Word | None = None
    replica: Annotated[int | None, "Its number, from 0."] = None
    attempt: Annotated[int | None, "How often it was started."] = None
    state: Annotated[
        Word | None,
        "`Starting`, `Serving`, `Failed` (a member ended), `Left` (a member was evicted or deleted) or `Released` (not "
        "all members found a node).",
    ] = None
    since: Annotated[str | None, Meta(extra_json_schema={"format": "date-time"})] = None
    restarts: Annotated[int | None, "Failures in a row."] = None
    members: int | None = None
    ready_members: Annotated[int | None, "Members whose container runs."] = None
    reason: Word | None = None
    message: Annotated[Reported | None, "Which member ended last, where and why."] = None


class PastRevision(StatusPart, frozen=True):
    revision: Word
    state: Annotated[
        Word,
        "`RollingOut`, `Serving`, `Replaced`, `RolledBack`, or `Skipped`: another was wanted before it had served.",
    ]
    since: Annotated[str, "When it was first wanted.", Meta(extra_json_schema={"format": "date-time"})]
    message: Annotated[Reported | None, "Why it failed."] = None


Time = Annotated[str, Meta(extra_json_schema={"format": "date-time"})]


class Scaling(StatusPart, frozen=True):
    """How the model goes to zero replicas and back; see [zero and back](autoscaling.md#zero-and-back)."""

    load_seconds: Annotated[
        int | None, "From when a replica got its node until it was ready, the last time that one started."
    ] = None
    load_began: Annotated[Time | None, "When that one got its node."] = None
    load_instance_type: Annotated[Word | None, "The type of its node, by the plan."] = None
    waking_since: Annotated[
        Time | None, "When `Available` left `ScaledToZero`; until a replica is ready. Older ones get devices first."
    ] = None
    kept_since: Annotated[
        Time | None, "Since when the model is scaled to zero while a replica loads, which is not broken off."
    ] = None
    active_at: Annotated[
        Time | None, "With `spec.idle`: the last time at which the operator knows of a request, or of a new replica."
    ] = None
    idled_at: Annotated[Time | None, "When the operator took replicas away by `spec.idle`."] = None


class Status(ObjectStatus, frozen=True):
    """What the operator observed and decided."""

    ready: Annotated[Word | None, "Replicas that can serve, of those requested: `1/2`."] = None
    replicas: Annotated[int | None, "Existing pods."] = None
    ready_replicas: Annotated[int | None, "Replicas that can serve."] = None
    updated_replicas: Annotated[int | None, "Replicas of the desired revision."] = None
    selector: Annotated[Message | None, "Label selector of the serving pods, for `/scale`."] = None
    url: Annotated[Message | None, "The Service's address in the cluster."] = None
    current_revision: Annotated[Word | None, "The last revision of which all replicas could serve."] = None
    update_revision: Annotated[Word | None, "The desired revision."] = None
    failed_revision: Annotated[
        Word | None, "The desired revision, if its rollout failed; it is not tried again until the spec changes."
    ] = None
    history: Annotated[
        tuple[PastRevision, ...],
        Meta(max_length=MAX_HISTORY),
        "The revisions that were wanted, the last one first.",
    ] = ()
    model: ModelFacts | None = None
    conversion: ConversionStatus | None = None
    draft: Annotated[ModelFacts | None, "The same of the draft model."] = None
    accepted_length: Annotated[
        Word | None,
        "Mean tokens that a request gets of a step with [drafts](speculation.md), over all replicas since they "
        "started: from `1.0`, no draft was right. Read every few minutes.",
    ] = None
    plan: Plan | None = None
    scaling: Scaling | None = None
    artifacts: Annotated[
        tuple[ArtifactStatus, ...],
        Meta(max_length=2),
        unique(by="key"),
        "The compiled artifact of the desired revision, and of the one that serves until then.",
    ] = ()
    groups: Annotated[
        tuple[GroupStatus, ...],
        Meta(max_length=MAX_GROUPS),
        unique(by="name"),
        "The replicas of a model on several nodes, see [groups](groups.md).",
    ] = ()
