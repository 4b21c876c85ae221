"""NeuronModel as a frozen value: parse a body or refuse it with the field.

Called by `decide` for every pass, and so by `neuron-operator local` and `plan`, where no API server has checked the
manifest: what the CRD's schema and CEL rules refuse is refused here too, with the same field. Fields that this version
does not act on are refused, never ignored. Nothing here renders or does I/O.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from operator import attrgetter
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct, field

from neuron_operator import names
from neuron_operator.errors import FieldNotSupported, InvalidSpec

NAME_PATTERN = r"^[a-z]([-a-z0-9]*[a-z0-9])?$"
ENV_NAME_PATTERN = r"^[A-Za-z_][A-Za-z0-9_]*$"
URI_PATTERNS = {
    "hf": r"^hf://[A-Za-z0-9][A-Za-z0-9._-]{0,95}/[A-Za-z0-9][A-Za-z0-9._-]{0,95}(@[A-Za-z0-9][A-Za-z0-9._/-]{0,127})?$",
    "s3": r"^s3://[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]/[^\s]+$",
    "pvc": r"^pvc://[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?(/[^\s]*)?$",
    "oci": r"^oci://[^\s#]+(#[^\s#]+)?$",
    "file": r"^file:///[^\s]+$",
}
RELATIVE_FILE_PREFIX = "file:./"

Name = Annotated[str, Meta(min_length=1, max_length=253)]
ShortText = Annotated[str, Meta(min_length=1, max_length=64)]
Length = Annotated[int, Meta(ge=1, le=16_777_216)]
Bucket = Annotated[int, Meta(ge=1, le=16_777_216)]
Buckets = Annotated[tuple[Bucket, ...], Meta(max_length=32)]
LabelMap = Annotated[dict[str, Annotated[str, Meta(max_length=63)]], Meta(max_length=32)]
AnnotationMap = Annotated[dict[str, Annotated[str, Meta(max_length=4096)]], Meta(max_length=32)]
Quantities = Annotated[dict[str, int | Annotated[str, Meta(max_length=32)]], Meta(max_length=16)]
Json = dict[str, Any]


class Part(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, rename="camel", omit_defaults=True):
    """A part of the spec: camelCase in JSON, unknown keys refused."""


class SecretName(Part, frozen=True):
    name: Name


class SecretKey(Part, frozen=True):
    name: Name
    key: Name
    optional: bool | None = None


class ApiKeySecret(Part, frozen=True):
    name: Name
    key: Name


class ModelSource(Part, frozen=True):
    uri: Annotated[str, Meta(min_length=1, max_length=1024)]
    served_names: Annotated[
        tuple[Annotated[str, Meta(min_length=1, max_length=256, pattern=r"^\S+$")], ...], Meta(max_length=16)
    ] = ()
    credentials_secret_ref: SecretName | None = None


class Accelerator(Part, frozen=True):
    type: Literal["Neuron", "CPU"] = "Neuron"
    instance_types: Annotated[tuple[ShortText, ...], Meta(max_length=16)] = ()
    devices: Annotated[int, Meta(ge=1, le=64)] | None = None
    cores: Annotated[int, Meta(ge=1, le=512)] | None = None
    logical_neuron_core: Literal[1, 2] | None = None


class Parallelism(Part, frozen=True):
    tensor: Annotated[int, Meta(ge=1, le=1024)] | None = None
    nodes: Annotated[int, Meta(ge=1, le=64)] | None = None


class Serving(Part, frozen=True):
    max_model_length: Length | None = None
    max_sequences: Annotated[int, Meta(ge=1, le=4096)] | None = None
    block_size: Annotated[int, Meta(ge=1, le=4096)] | None = None
    num_blocks: Annotated[int, Meta(ge=1, le=16_777_216)] | None = None
    max_queued_requests: Annotated[int, Meta(ge=1, le=1_000_000)] | None = None
    dtype: Literal["auto", "float32", "bfloat16", "float16"] | None = None
    quantization: ShortText | None = None
    kv_cache_dtype: ShortText | None = None
    context_buckets: Buckets = ()
    token_generation_buckets: Buckets = ()
    prefix_caching: Literal["Auto", "Enabled", "Disabled"] = "Auto"
    chunked_prefill: Literal["Auto", "Enabled", "Disabled"] = "Auto"
    sampling: Literal["Device", "DeviceWithLogits", "Host"] | None = None
    generation_config: Literal["Enabled", "Disabled"] = "Enabled"
    chat_template: Annotated[str, Meta(min_length=1, max_length=32_768)] | None = None
    """The bound keeps the manifest, however escaped, within the 256 KiB that `kubectl apply` can annotate."""
    reasoning_parser: Literal["deepseek_r1", "qwen3"] | None = None
    access_log: Literal["Enabled", "Disabled"] = "Enabled"
    num_front_ends: Annotated[int, Meta(ge=1, le=64)] | None = None
    api_key_secret_ref: ApiKeySecret | None = None


class EnvSource(Part, frozen=True):
    secret_key_ref: SecretKey | None = None
    config_map_key_ref: SecretKey | None = None


class EnvVar(Part, frozen=True):
    name: Annotated[str, Meta(min_length=1, max_length=128, pattern=ENV_NAME_PATTERN)]
    value: Annotated[str, Meta(max_length=4096)] | None = None
    value_from: EnvSource | None = None


class Engine(Part, frozen=True):
    backend: Literal["nxdi", "optimum", "transformers-neuronx", "vllm", "torch", "simulated"] | None = None
    override_neuron_config: Json = field(default_factory=dict)
    env: Annotated[tuple[EnvVar, ...], Meta(max_length=64)] = ()
    image: Annotated[str, Meta(min_length=1, max_length=512, pattern=r"^\S+$")] | None = None
    image_pull_policy: Literal["Always", "IfNotPresent", "Never"] | None = None


class Claim(Part, frozen=True):
    claim_name: Name
    sub_path: Annotated[str, Meta(max_length=512)] | None = None


class EmptyDir(Part, frozen=True):
    size_limit: int | Annotated[str, Meta(max_length=32)] | None = None


class ObjectStore(Part, frozen=True):
    uri: Annotated[str, Meta(min_length=1, max_length=1024)]


class WeightsStorage(Part, frozen=True):
    persistent_volume_claim: Claim | None = None
    empty_dir: EmptyDir | None = None
    object_store: ObjectStore | None = None


class ArtifactsStorage(Part, frozen=True):
    persistent_volume_claim: Claim | None = None
    object_store: ObjectStore | None = None


class Storage(Part, frozen=True):
    weights: WeightsStorage | None = None
    artifacts: ArtifactsStorage | None = None


class Rollout(Part, frozen=True):
    strategy: Literal["Auto", "Surge", "Replace"] = "Auto"
    progress_deadline_seconds: Annotated[int, Meta(ge=60, le=86_400)] = 3600
    drain_delay_seconds: Annotated[int, Meta(ge=0, le=600)] = 10
    drain_seconds: Annotated[int, Meta(ge=0, le=7200)] = 300
    revision_history_limit: Annotated[int, Meta(ge=0, le=50)] = 5


class PodMetadata(Part, frozen=True):
    labels: LabelMap = field(default_factory=dict)
    annotations: AnnotationMap = field(default_factory=dict)


class PodSecurity(Part, frozen=True):
    fs_group: Annotated[int, Meta(ge=1, le=2_147_483_647)] | None = None


class Resources(Part, frozen=True):
    limits: Quantities = field(default_factory=dict)
    requests: Quantities = field(default_factory=dict)


class PodSpec(Part, frozen=True):
    node_selector: LabelMap = field(default_factory=dict)
    tolerations: Annotated[tuple[Json, ...], Meta(max_length=32)] = ()
    affinity: Annotated[Json, Meta(max_length=3)] = field(default_factory=dict)
    topology_spread_constraints: Annotated[tuple[Json, ...], Meta(max_length=8)] = ()
    priority_class_name: Name | None = None
    scheduler_name: Name | None = None
    runtime_class_name: Name | None = None
    service_account_name: Name | None = None
    image_pull_secrets: Annotated[tuple[SecretName, ...], Meta(max_length=8)] = ()
    security_context: PodSecurity = PodSecurity()
    resources: Resources = field(default_factory=Resources)


class PodTemplate(Part, frozen=True):
    metadata: PodMetadata = field(default_factory=PodMetadata)
    spec: PodSpec = field(default_factory=PodSpec)


class Spec(Part, frozen=True):
    """`spec` of a NeuronModel, as API.md has it; None and empty mean: planned or defaulted."""

    model: ModelSource
    replicas: Annotated[int, Meta(ge=0, le=1000)] = 1
    accelerator: Accelerator = Accelerator()
    parallelism: Parallelism = Parallelism()
    serving: Serving = Serving()
    engine: Engine = field(default_factory=Engine)
    storage: Storage = Storage()
    rollout: Rollout = Rollout()
    pod_template: PodTemplate = field(default_factory=PodTemplate)


@dataclass(frozen=True)
class NeuronModel:
    """One NeuronModel that this version can act on."""

    name: str
    namespace: str
    uid: str
    refresh: str
    """Value of the refresh annotation; another token means: decide anew. Empty: none."""
    spec: Spec

    @property
    def backend(self) -> str:
        return self.spec.engine.backend or default_backend(self.spec)

    @property
    def served_names(self) -> tuple[str, ...]:
        return self.spec.model.served_names or (self.name,)

    @property
    def uri_scheme(self) -> str:
        return self.spec.model.uri.partition(":")[0]

    @property
    def fetched_by_pods(self) -> bool:
        """Whether serving pods load the weights over the network themselves."""
        return self.uri_scheme == "hf"


@dataclass(frozen=True)
class Later:
    """A field that a later version acts on: `accepted` are the values that ask for nothing."""

    path: str
    accepted: tuple[object, ...]
    cure: str
    but_with: tuple[str, ...] = ()
    """Backends that act on it already."""


LATER = (
    Later("accelerator.instance_types", ((),), "choose nodes with podTemplate.spec.nodeSelector"),
    Later("accelerator.logical_neuron_core", (None,), "remove it: the node's own setting is used"),
    Later("parallelism.tensor", (None, 1), "remove it: one process serves a replica"),
    Later("parallelism.nodes", (None, 1), "remove it: a replica is one pod"),
    Later("serving.quantization", (None,), "remove it: the model is served in serving.dtype"),
    Later("serving.kv_cache_dtype", (None,), "remove it: the cache has serving.dtype"),
    Later("serving.context_buckets", ((),), "remove it: nothing is compiled"),
    Later("serving.token_generation_buckets", ((),), "remove it: nothing is compiled"),
    Later("serving.sampling", (None, "Host"), "remove it or set Host", but_with=("simulated",)),
    Later("engine.override_neuron_config", ({},), "remove it: no Neuron backend reads it yet", but_with=("simulated",)),
    Later(
        "storage.weights", (None, WeightsStorage(empty_dir=EmptyDir())), "remove it: weights lie in the pod's emptyDir"
    ),
    Later("storage.artifacts", (None,), "remove it: nothing is compiled"),
    Later("rollout.strategy", ("Auto",), "remove it: replicas are replaced one at a time"),
    Later("rollout.progress_deadline_seconds", (3600,), "remove it: no rollout is given up yet"),
    Later("rollout.revision_history_limit", (5,), "remove it: five earlier revisions are kept"),
)

LATER_SCHEMES = ("s3", "pvc", "oci")

BACKENDS = {"torch": "computes on the host", "simulated": "simulates a device"}
"""Backends of this version, and what they do."""


def default_backend(spec: Spec) -> str:
    return "nxdi" if spec.accelerator.type == "Neuron" else "torch"


def parse(body: Mapping[str, Any]) -> NeuronModel:
    """Read a NeuronModel as the API server (or a YAML file) has it.

    Raises:
        InvalidSpec: naming the field, e.g. `spec.serving.maxModelLength`, and what was expected there.
        FieldNotSupported: a valid field that this version does not act on, with the cure.
    """
    metadata = body.get("metadata")
    metadata = metadata if isinstance(metadata, Mapping) else {}
    name = metadata.get("name")
    if not isinstance(name, str) or len(name) > names.MAX_MODEL_NAME or not re.fullmatch(NAME_PATTERN, name):
        raise InvalidSpec(
            "metadata.name",
            f"must be a DNS label of at most {names.MAX_MODEL_NAME} characters that begins with a letter",
        )
    spec = _convert(body.get("spec"))
    for path, message in _broken_rules(spec):
        raise InvalidSpec(path, message)
    _refuse_later(spec)
    annotations = metadata.get("annotations")
    annotations = annotations if isinstance(annotations, Mapping) else {}
    return NeuronModel(
        name=name,
        namespace=str(metadata.get("namespace") or "default"),
        uid=str(metadata.get("uid") or ""),
        refresh=str(annotations.get(names.REFRESH_ANNOTATION) or ""),
        spec=spec,
    )


def is_paused(body: Mapping[str, Any]) -> bool:
    """Whether the model's owner asked the operator to change nothing; known for invalid specs too."""
    metadata = body.get("metadata")
    annotations = metadata.get("annotations") if isinstance(metadata, Mapping) else None
    return isinstance(annotations, Mapping) and annotations.get(names.PAUSED_ANNOTATION) == "true"


def _convert(raw: object) -> Spec:
    if not isinstance(raw, Mapping):
        raise InvalidSpec("spec", "is required" if raw is None else "must be an object")
    try:
        return msgspec.convert(raw, Spec)
    except msgspec.ValidationError as error:
        message, _, place = str(error).partition(" - at ")
        path = place.removeprefix("`key` in ").strip("`").removeprefix("$")
        raise InvalidSpec(f"spec{path}", message.replace("`", "")) from error


def _broken_rules(spec: Spec) -> Iterator[tuple[str, str]]:
    """Rules between fields: the CEL rules of the CRD, in its order."""
    yield from _uri_rules(spec.model.uri)
    accelerator = spec.accelerator
    if accelerator.devices is not None and accelerator.cores is not None:
        yield "spec.accelerator", "devices and cores exclude one another"
    if accelerator.type == "CPU" and (accelerator.devices is not None or accelerator.cores is not None):
        yield "spec.accelerator", "devices and cores are for type Neuron"
    for path, buckets in (
        ("spec.serving.contextBuckets", spec.serving.context_buckets),
        ("spec.serving.tokenGenerationBuckets", spec.serving.token_generation_buckets),
    ):
        if any(low >= high for low, high in pairwise(buckets)):
            yield path, "must be ascending"
    if len(set(spec.model.served_names)) < len(spec.model.served_names):
        yield "spec.model.servedNames", "must be unique"
    yield from _env_rules(spec.engine.env)
    yield from _storage_rules(spec.storage)
    yield from _pod_rules(spec.pod_template)


def _uri_rules(uri: str) -> Iterator[tuple[str, str]]:
    path = "spec.model.uri"
    if uri.startswith(RELATIVE_FILE_PREFIX):
        yield path, "file:./ is relative to the manifest and works with `neuron-operator local` only; use file:///path"
        return
    pattern = URI_PATTERNS.get(uri.partition("://")[0])
    if pattern is None or not re.fullmatch(pattern, uri):
        yield (
            path,
            (
                "must be hf://org/name[@revision], s3://bucket/prefix, pvc://claim/path, oci://image[@digest][#path] "
                "or file:///path"
            ),
        )
    elif ".." in uri.split("/"):
        yield path, "must not contain the path segment '..'"


def _env_rules(env: tuple[EnvVar, ...]) -> Iterator[tuple[str, str]]:
    if len({variable.name for variable in env}) < len(env):
        yield "spec.engine.env", "names must be unique"
    for index, variable in enumerate(env):
        path = f"spec.engine.env[{index}]"
        if names.is_reserved_env(variable.name):
            yield (
                f"{path}.name",
                f"{variable.name} is set by the operator; HF_TOKEN comes from model.credentialsSecretRef",
            )
        if (variable.value is None) == (variable.value_from is None):
            yield path, "exactly one of value and valueFrom is needed"
        source = variable.value_from
        if source is not None and (source.secret_key_ref is None) == (source.config_map_key_ref is None):
            yield f"{path}.valueFrom", "exactly one of secretKeyRef and configMapKeyRef is needed"


def _storage_rules(storage: Storage) -> Iterator[tuple[str, str]]:
    for path, store in (("spec.storage.weights", storage.weights), ("spec.storage.artifacts", storage.artifacts)):
        if store is not None and len(msgspec.to_builtins(store)) != 1:
            yield path, f"exactly one of {', '.join(store.__struct_encode_fields__)} is needed"


def _pod_rules(template: PodTemplate) -> Iterator[tuple[str, str]]:
    metadata, spec = template.metadata, template.spec
    for path, keys in (("labels", metadata.labels), ("annotations", metadata.annotations)):
        if any(key.startswith(f"{names.GROUP}/") for key in keys):
            yield f"spec.podTemplate.metadata.{path}", f"{names.GROUP}/ is the operator's own prefix"
    for path, quantities in (("limits", spec.resources.limits), ("requests", spec.resources.requests)):
        if any(names.is_neuron_resource(key) for key in quantities):
            yield f"spec.podTemplate.spec.resources.{path}", "ask for Neuron devices with accelerator.devices or cores"


def _refuse_later(spec: Spec) -> None:
    scheme = spec.model.uri.partition(":")[0]
    if scheme in LATER_SCHEMES:
        raise FieldNotSupported("spec.model.uri", f"{scheme}://", "use hf://org/name or file:///path")
    backend = spec.engine.backend or default_backend(spec)
    if backend not in BACKENDS:
        asked = backend if spec.engine.backend else f"{backend} (the default on Neuron)"
        raise FieldNotSupported("spec.engine.backend", asked, "set engine.backend: torch (computes on the host)")
    for later in LATER:
        value = attrgetter(later.path)(spec)
        if value not in later.accepted and backend not in later.but_with:
            raise FieldNotSupported("spec." + _camel(later.path), _shown(value), later.cure)
    settings = spec.engine.override_neuron_config
    if "sampling" in settings:  # said in one place, so that status.plan shows what the device is told
        path = "spec.engine.overrideNeuronConfig.sampling"
        raise FieldNotSupported(path, _shown(settings["sampling"]), "set serving.sampling")


def _camel(path: str) -> str:
    return re.sub(r"_([a-z])", lambda match: match.group(1).upper(), path)


def _shown(value: object) -> str:
    text = msgspec.json.encode(value).decode()
    return text if len(text) <= 80 else text[:77] + "..."
