"""NeuronModel as a frozen value: every field of its spec, declared once.

`make generate` writes the CRD and the tables of docs/neuronmodel.md from these declarations; `manifest.py` parses with
them. A field that this version does not support declares it with `Supported`, and is refused, never ignored.
"""

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, wraps
from operator import is_not
from typing import Annotated, Any, Literal, TypeVar, TypeVarTuple, get_args

import msgspec
from msgspec import Meta, field

from neuron_operator.api import engines, names
from neuron_operator.api.engines.engine import START_SECONDS
from neuron_operator.api.field_types import (
    SWITCH_WORDS,
    WITHOUT_OUR_PREFIX,
    AutoToggle,
    Buckets,
    ClaimName,
    Int64,
    LabelValue,
    Length,
    MediaHost,
    Name,
    ParsedUri,
    Quantities,
    Quantity,
    ServedName,
    ShortText,
    StoreUri,
    SubPath,
    Toggle,
    TopologyKey,
    Uri,
)
from neuron_operator.api.fields import (
    ConfigKey,
    Json,
    NotPinned,
    OpenPart,
    Rule,
    Shape,
    SpecPart,
    Supported,
    exactly_one,
    unique,
)

WantedWeights = Literal["Auto", "None", "Int8", "Fp8"]


class SecretName(SpecPart, frozen=True):
    name: Name


class SecretKey(SpecPart, frozen=True):
    name: Name
    key: Name
    optional: bool | None = None


class ApiKeySecret(SpecPart, frozen=True):
    """Clients must send one of the keys in this Secret, one per line, as a bearer token. By default no key is needed.
    See [Credentials](#credentials)."""

    name: Name
    key: Name


class CredentialsSecret(SpecPart, frozen=True):
    name: Name
    key: Name | None = None


class ModelSource(SpecPart, frozen=True):
    """Where the model comes from and what clients call it."""

    uri: Annotated[
        Uri,
        "Where the model comes from. `hf://org/name[@revision]`: a Hugging Face hub; a branch or tag is pinned to its "
        "commit when the model is resolved. `file:///path`: a folder in the runtime image. `file:./path`, relative to "
        "the manifest, works with `neuron-operator local` only. `s3://bucket/prefix`: a folder of a bucket. "
        "`pvc://claim/path`: a folder of a PersistentVolumeClaim in the same namespace, read in place. "
        "`oci://image[@digest][#path]`: a folder of an image, which the kubelet mounts, if the chart's "
        "`storage.imageVolumes` allows it. Path segments `..` are refused. See "
        "[where models come from](storage.md#where-models-come-from).",
        ConfigKey("model.uri", compiled=True),
    ]
    served_names: Annotated[
        tuple[ServedName, ...],
        Meta(max_length=16),
        "Model names that clients may use, without white space. Answers and the metrics' label `model_name` have the "
        "first one. By default the name of the object.",
        unique(),
        ConfigKey("servedNames", {(): None}),
    ] = ()
    credentials_secret_ref: Annotated[
        CredentialsSecret | None,
        "Secret in the same namespace; its keys are given only to pods that download. `key` names the one with the "
        "hub's token, which then must exist; by default `HF_TOKEN`, which may be missing. See "
        "[Credentials](#credentials).",
    ] = None


class Accelerator(SpecPart, frozen=True):
    """The devices of one replica on one node."""

    RULES = (
        Rule(
            "set devices or cores, not both",
            lambda self: self.devices is None or self.cores is None,
            "!(has(self.devices) && has(self.cores))",
        ),
        Rule(
            "devices and cores require type Neuron",
            lambda self: self.type != "CPU" or (self.devices is None and self.cores is None),
            "self.type != 'CPU' || !(has(self.devices) || has(self.cores))",
        ),
    )

    type: Annotated[
        Literal["Neuron", "CPU"],
        "`Neuron`: each replica holds devices or cores. `CPU`: it holds neither.",
    ] = "Neuron"
    instance_types: Annotated[
        tuple[ShortText, ...],
        Meta(max_length=16),
        "Allowed instance types, best first.",
        Supported("choose nodes with podTemplate.spec.nodeSelector"),
    ] = ()
    devices: Annotated[
        Annotated[int, Meta(ge=1, le=64)] | None,
        "Neuron devices of one replica, in [legal sizes](#devices-and-cores). By default as many as the model needs, "
        "see [sizing](sizing.md); 1 if it is computed on the host. Excludes `cores`; not with `CPU`.",
    ] = None
    cores: Annotated[
        Annotated[int, Meta(ge=1, le=512)] | None,
        "NeuronCores instead of devices; only on nodes labelled "
        f"`{names.ALLOCATION_LABEL}={names.ALLOCATION_CORES}`. Excludes `devices`; not with `CPU`.",
        Supported("set devices: this backend takes whole ones"),
    ] = None
    logical_neuron_core: Annotated[
        Literal[1, 2] | None,
        "Physical cores per logical core; by default the instance type's. The nodes must be set up alike.",
        ConfigKey("accelerator.logicalNeuronCore", compiled=True),
        Supported("remove it: this backend computes on the host"),
    ] = None


class Parallelism(SpecPart, frozen=True):
    """How one replica is distributed."""

    tensor: Annotated[
        Annotated[int, Meta(ge=1, le=1024)] | None,
        "Tensor-parallel degree of the whole replica: the NeuronCores that the model runs on. By default the largest "
        "that is documented for the devices and divides attention heads and feed-forward layers; with `torch` one "
        "rank on each node. A multiple of `nodes`.",
        ConfigKey("parallelism.tensor", compiled=True),
        Supported("remove it: this backend does not compute", values=(1,)),
    ] = None
    nodes: Annotated[
        Annotated[int, Meta(ge=1, le=64)] | None,
        "Nodes of one replica, which then is a [group](groups.md) of as many pods. By default one; more where one does "
        "not hold the model and the chart value `groups.maxNodes` allows it.",
        Supported("remove it: with this backend a replica is one pod", values=(1,)),
    ] = None


Target = Literal["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


TARGETS: tuple[Target, ...] = get_args(Target)
DEFAULT_MAX_RANK = 16
"""As the runtime's."""


class Adapters(SpecPart, frozen=True):
    """What the model can hold of [adapters](adapters.md). Without `maxActive` it serves none."""

    RULES = (
        Rule(
            "maxRank, targets and maxLoaded require maxActive",
            lambda self: self.max_active is not None or self == Adapters(),
            "has(self.maxActive) || !(has(self.maxRank) || has(self.maxLoaded) || "
            "(has(self.targets) && self.targets.size() > 0))",
        ),
        Rule(
            "maxLoaded must be at least maxActive",
            lambda self: self.max_loaded is None or (self.max_active or 0) <= self.max_loaded,
            "!has(self.maxLoaded) || !has(self.maxActive) || self.maxActive <= self.maxLoaded",
        ),
    )

    max_active: Annotated[
        Annotated[int, Meta(ge=1, le=1024)] | None,
        "Adapters that running requests may use at the same time. Each takes memory, whether it is used or not.",
        ConfigKey("adapters.maxActive", compiled=True),
    ] = None
    max_rank: Annotated[
        Annotated[int, Meta(ge=1, le=1024)] | None,
        "The largest rank of an adapter; by default 16.",
        ConfigKey("adapters.maxRank", compiled=True),
    ] = None
    targets: Annotated[
        tuple[Target, ...],
        Meta(max_length=7),
        "The projections that adapters may change; by default all of these: `q_proj`, `k_proj`, `v_proj`, `o_proj`, "
        "`gate_proj`, `up_proj`, `down_proj`.",
        unique(),
        ConfigKey("adapters.targets", {(): None}, compiled=True),
    ] = ()
    max_loaded: Annotated[
        Annotated[int, Meta(ge=1, le=65_536)] | None,
        "Adapters whose weights a replica keeps in memory, at least `maxActive`; by default as many as may be active. "
        "Others are read again when they are needed.",
        ConfigKey("adapters.maxLoaded"),
    ] = None


class DraftModel(SpecPart, frozen=True):
    """The model that makes drafts. It is resolved and fetched as the model is."""

    uri: Annotated[
        Uri,
        "A smaller model with the tokens of the model, from any source that `model.uri` may have; in an image only if "
        "that is the model's.",
        ConfigKey("speculation.model.uri", compiled=True),
    ]
    credentials_secret_ref: Annotated[
        CredentialsSecret | None,
        "As that of `model`, which is the default. Another one needs a place of weights that pods share "
        "(`storage.weights`), because each pod has one Secret.",
    ] = None


METHODS_WITH_MODEL = ("Draft", "Eagle")


class Speculation(SpecPart, frozen=True):
    """[Speculative decoding](speculation.md): a step verifies guesses of an answer's next tokens (drafts). Answers stay
    the same. Without `method` there are no drafts."""

    RULES = (
        Rule(
            "numTokens, minMatch, maxMatch and model require method",
            lambda self: self.method is not None or self == Speculation(),
            "has(self.method) || !(has(self.numTokens) || has(self.minMatch) || has(self.maxMatch) || has(self.model))",
        ),
        Rule(
            "model is required with Draft and Eagle, and only allowed with them",
            lambda self: self.method is None or (self.method in METHODS_WITH_MODEL) == (self.model is not None),
            f"!has(self.method) || (self.method in {[*METHODS_WITH_MODEL]}) == has(self.model)",
        ),
        Rule(
            "minMatch and maxMatch are for the method NGram",
            lambda self: self.method not in METHODS_WITH_MODEL or self.min_match is self.max_match is None,
            f"!has(self.method) || !(self.method in {[*METHODS_WITH_MODEL]}) || "
            "!(has(self.minMatch) || has(self.maxMatch))",
        ),
        Rule(
            "minMatch must be at most maxMatch",
            lambda self: self.min_match is None or self.max_match is None or self.min_match <= self.max_match,
            "!has(self.minMatch) || !has(self.maxMatch) || self.minMatch <= self.maxMatch",
        ),
    )

    method: Annotated[
        Literal["NGram", "Draft", "Eagle"] | None,
        "Where drafts come from. `NGram`: what followed the last tokens where the request had them before; this needs "
        "no memory and no second model. `Draft`: a smaller model, which runs on the devices of the replica, too "
        f"(backends: {engines.with_drafts('Draft')}). `Eagle`: an EAGLE head of the model (backends: "
        f"{engines.with_drafts('Eagle')}).",
        ConfigKey("speculation.method", compiled=True),
        Supported(
            "set NGram, or a backend that has the method, see docs/speculation.md",
            values=(None,),
            of=lambda spec: spec.drafts_not_honoured,
        ),
    ] = None
    num_tokens: Annotated[
        Annotated[int, Meta(ge=1, le=16)] | None,
        "Drafts of a request per step, at most; by default 4.",
        ConfigKey("speculation.numTokens", compiled=True),
    ] = None
    min_match: Annotated[
        Annotated[int, Meta(ge=1, le=32)] | None,
        "Last tokens that must be found earlier in the request, at least; by default as `maxMatch`, or 2.",
        ConfigKey("speculation.minMatch"),
    ] = None
    max_match: Annotated[
        Annotated[int, Meta(ge=1, le=32)] | None,
        "The same, at most; by default as `minMatch`, or 8.",
        ConfigKey("speculation.maxMatch"),
    ] = None
    model: DraftModel | None = None


_NO_PICTURES = "remove it: with this backend a model sees no pictures"


class Media(SpecPart, frozen=True):
    """Limits of the [pictures](images.md) in requests, for models that see them."""

    max_images: Annotated[
        Annotated[int, Meta(ge=0, le=1024)] | None,
        "Pictures of a request at most; 0: none. By default 8.",
        ConfigKey("media.maxImages", compiled=True),
        Supported(_NO_PICTURES),
    ] = None
    max_image_bytes: Annotated[
        Annotated[int, Meta(ge=1, le=1 << 30)] | None,
        "Bytes of a picture at most, as the client stores it. By default 20971520, 20 MiB.",
        ConfigKey("media.maxImageBytes"),
        Supported("remove it: this backend has no such limit of pictures"),
    ] = None
    max_pixels: Annotated[
        Annotated[int, Meta(ge=1, le=1 << 30)] | None,
        "Pixels of a picture at most, width times height. By default 33554432.",
        ConfigKey("media.maxPixels"),
        Supported("remove it: this backend has no such limit of pictures"),
    ] = None
    allowed_hosts: Annotated[
        Annotated[tuple[MediaHost, ...], Meta(max_length=64), unique()],
        "Hosts from which replicas fetch pictures that a request names by an `https:` URL; each with `:PORT` if it is "
        "not 443. By default none: a picture must be in the request.",
        ConfigKey("media.allowedHosts", {(): None}),
        Supported(_NO_PICTURES),
    ] = ()


class Serving(SpecPart, frozen=True):
    """Limits and modes of the engine, and how the model is served over HTTP."""

    task: Annotated[
        Literal["Generate", "Embed", "Rerank"],
        "What the model answers. `Generate`: text. `Embed`: a [vector](vectors.md) for each text. `Rerank`: how well "
        "texts answer a question.",
        ConfigKey("task", {"Generate": None, "Embed": "embed", "Rerank": "rerank"}),
        Supported(f"set engine.backend: {engines.honouring('serving.task')}, or leave it out to generate text"),
    ] = "Generate"
    max_model_length: Annotated[
        Length | None,
        "Maximum tokens of a prompt and its answer together. A value above the model's maximum is `InvalidSpec` once "
        "the model is resolved. On devices by default 4096, or the model's; less if that does not fit.",
        ConfigKey("limits.maxModelLength", compiled=True),
    ] = None
    max_sequences: Annotated[
        Annotated[int, Meta(ge=1, le=4096)] | None,
        "Maximum requests computed at the same time. On devices by default as many as fit, at most 16.",
        ConfigKey("limits.maxSequences", compiled=True),
    ] = None
    block_size: Annotated[
        Annotated[int, Meta(ge=1, le=4096)] | None,
        "Tokens of one block of the KV cache. Setting it or `numBlocks` selects the block layout.",
        ConfigKey("limits.blockSize", compiled=True),
        Supported("remove it: with this backend each request has one line of the cache"),
    ] = None
    num_blocks: Annotated[
        Annotated[int, Meta(ge=1, le=16_777_216)] | None,
        "Blocks of the KV cache.",
        ConfigKey("limits.numBlocks", compiled=True),
        Supported("remove it: with this backend each request has one line of the cache"),
    ] = None
    max_queued_requests: Annotated[
        Annotated[int, Meta(ge=1, le=1_000_000)] | None,
        "Maximum waiting requests; further requests get 429.",
        ConfigKey("limits.maxQueuedRequests"),
    ] = None
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"] | None,
        "Number type of weights and activations; by default the model's.",
        ConfigKey("dtype", compiled=True),
    ] = None
    quantization: Annotated[
        WantedWeights,
        "How weights are [quantized](models.md#quantize-a-model). `Auto`: as the model stores them. `None`: not at "
        "all, even if the model stores them so. `Int8`, `Fp8`: each with 8 bits, and a scale for each output of a "
        "layer; a Job converts them once for all models of the namespace. A model that is stored quantized accepts "
        "only its own format.",
        ConfigKey("quantization", {"Auto": None, "None": "none", "Int8": "int8", "Fp8": "fp8"}, compiled=True),
        Supported(
            "remove it: this backend computes weights as the model stores them; vllm takes --quantization in "
            "engine.args, or engine.overrideNeuronConfig.quantization"
        ),
    ] = "Auto"
    kv_cache_dtype: Annotated[
        Literal["Auto", "Fp8"],
        "Number type of the [KV cache](neuron.md#quantized-cache): that of the model, or with `Fp8` 8 bits for each "
        "number.",
        ConfigKey("kvCacheDtype", {"Auto": None, "Fp8": "fp8"}, compiled=True),
        Supported("remove it: the cache has serving.dtype; vllm takes --kv-cache-dtype in engine.args"),
    ] = "Auto"
    context_buckets: Annotated[
        Buckets,
        "Prompt lengths to compile for, ascending; by default chosen by the backend.",
        ConfigKey("buckets.context", {(): None}, compiled=True),
        Supported("remove it: this backend computes any length"),
    ] = ()
    token_generation_buckets: Annotated[
        Buckets,
        "Context lengths to compile token generation for, ascending; by default chosen by the backend.",
        ConfigKey("buckets.tokenGeneration", {(): None}, compiled=True),
        Supported("remove it: this backend computes any length"),
    ] = ()
    prefix_caching: Annotated[
        AutoToggle,
        "Whether [common prefixes of prompts are computed once](runtime.md#prefix-caching). `Enabled` selects the "
        "block layout; `Auto`: enabled with the block layout.",
        ConfigKey("prefixCaching", SWITCH_WORDS, compiled=True),
        Supported("remove it: this backend computes each prompt as a whole", values=("Disabled",)),
    ] = "Auto"
    cache_events: Annotated[
        Toggle,
        "Whether each replica tells gateways [what its prefix cache has](autoscaling.md#inference-gateways), on port "
        f"{names.CACHE_EVENTS_PORT} without a key. It needs the prefix cache.",
        ConfigKey("cacheEvents.endpoint", {"Enabled": f"tcp://*:{names.CACHE_EVENTS_PORT}", "Disabled": None}),
        Supported("remove it: this backend publishes no events; vllm takes --kv-events-config in engine.args"),
    ] = "Disabled"
    chunked_prefill: Annotated[
        AutoToggle,
        "Whether long prompts are computed in chunks while other answers continue. `Disabled`: a prompt longer than "
        "one step is refused; `Auto`: enabled if the backend supports it.",
        ConfigKey("chunkedPrefill", SWITCH_WORDS, compiled=True),
        Supported("remove it: this backend computes each prompt as a whole", values=("Disabled",)),
    ] = "Auto"
    sampling: Annotated[
        Literal["Device", "DeviceWithLogits", "Host"] | None,
        "Where tokens are sampled, see [modes](sampling.md#modes); by default `Device` on a device, also on a "
        "simulated one.",
        ConfigKey("sampling", compiled=True),
        Supported("remove it or set Host", values=("Host",)),
    ] = None
    generation_config: Annotated[
        Toggle,
        "Whether the model's `generation_config.json` sets the sampling defaults. `Disabled`: OpenAI's defaults "
        "(temperature 1, no cut-off). The model's end tokens apply in both cases.",
        ConfigKey("text.generationConfig", {"Enabled": None, "Disabled": "vllm"}),
    ] = "Enabled"
    # The bound keeps the manifest, however escaped, within the 256 KiB that `kubectl apply` can annotate.
    chat_template: Annotated[
        Annotated[str, Meta(min_length=1, max_length=32_768)] | None,
        "A Jinja template; by default the model's own. A syntax error is `InvalidEngineConfig`, with the line.",
        ConfigKey("text.chatTemplate"),
    ] = None
    reasoning_parser: Annotated[
        Literal["deepseek_r1", "qwen3"] | None,
        "The format of the model's reasoning, which is then [separated from the answer]"
        "(api.md#reasoning-models). By default it stays in the answer.",
        ConfigKey("text.reasoningParser"),
    ] = None
    tool_call_parser: Annotated[
        Literal["deepseek_v3", "deepseek_v31", "hermes", "llama3_json", "mistral", "pythonic"] | None,
        "The format in which the model [calls tools](tools.md). By default it follows from the chat template.",
        ConfigKey("text.toolCallParser"),
    ] = None
    access_log: Annotated[
        Toggle,
        "Whether each request is logged as [a line of JSON](server.md#access-log), without its content.",
        ConfigKey("server.accessLog", {"Enabled": None, "Disabled": False}),
    ] = "Enabled"
    api_key_secret_ref: ApiKeySecret | None = None
    media: Media = Media()
    adapters: Annotated[Adapters, Supported("remove it: with this backend a model serves no adapters")] = Adapters()
    speculation: Annotated[
        Speculation,
        Supported("remove it: this backend verifies no drafts; vllm takes --speculative-config in engine.args"),
    ] = Speculation()


FOR_TEXT: Mapping[str, tuple[object, ...]] = {
    **dict.fromkeys((f"serving.{name}" for name in ("blockSize", "numBlocks", "kvCacheDtype", "sampling")), ()),
    **dict.fromkeys((f"serving.{name}" for name in ("contextBuckets", "tokenGenerationBuckets", "adapters")), ()),
    **dict.fromkeys((f"serving.{name}" for name in ("generationConfig", "chatTemplate", "reasoningParser")), ()),
    **dict.fromkeys(("serving.toolCallParser", "serving.media", "serving.speculation"), ()),
    **dict.fromkeys(("serving.prefixCaching", "serving.chunkedPrefill", "engine.compile"), ("Disabled",)),
    "serving.quantization": ("None",),
    **dict.fromkeys(("parallelism.tensor", "parallelism.nodes"), (1,)),
}
"""Fields that only models which generate text have, and the values that others accept besides the default: a text is
computed whole in one step by one process, there is no cache, and nothing is sampled."""


class PodField(SpecPart, frozen=True):
    field_path: Annotated[str, Meta(min_length=1, max_length=512)]


class EnvSource(SpecPart, frozen=True):
    RULES = (exactly_one("secretKeyRef", "configMapKeyRef", "fieldRef"),)

    secret_key_ref: SecretKey | None = None
    config_map_key_ref: SecretKey | None = None
    field_ref: PodField | None = None


class EnvVar(SpecPart, frozen=True):
    RULES = (exactly_one("value", "valueFrom"),)

    name: Annotated[
        str,
        Meta(min_length=1, max_length=128, pattern=r"^[A-Za-z_][A-Za-z0-9_]*$"),
        Rule(
            "is reserved for the operator; set HF_TOKEN with model.credentialsSecretRef",
            lambda name: not name.startswith(names.RESERVED_ENV_PREFIX) and name not in names.RESERVED_ENV,
            f"!self.startsWith('{names.RESERVED_ENV_PREFIX}') && !(self in {sorted(names.RESERVED_ENV)})",
        ),
    ]
    value: Annotated[str, Meta(max_length=4096)] | None = None
    value_from: EnvSource | None = None


class Engine(SpecPart, frozen=True):
    """The backend and the runtime image."""

    backend: Annotated[
        Literal["nxdi", "optimum", "transformers-neuronx", "vllm", "torch", "simulated"] | None,
        "By default `nxdi` on Neuron, unless [the chart](engines.md#the-default-engine) names another, and `torch` on "
        "CPU. `vllm` runs [vLLM's own image](engines.md), on both. `torch` "
        "computes on the host. `simulated` "
        "computes nothing: steps [take as long as on a device]"
        "(benchmarks.md#a-served-model-without-a-device), for load tests of everything except the model.",
        ConfigKey("backend", compiled=True),
        Supported(
            "set engine.backend: nxdi (the default on Neuron), vllm or torch (computes on the host)",
            values=tuple(engines.ENGINES),
            of=lambda spec: spec.backend,
        ),
    ] = None
    compile: Annotated[
        AutoToggle,
        "Whether the model is [compiled](compiling.md#in-a-cluster) before it is served. `Enabled`: a Job compiles it, "
        "and replicas start with the artifact. `Auto`: only for a backend that cannot serve without, today `nxdi`.",
        ConfigKey("compile", {"Auto": None, "Enabled": True, "Disabled": None}, compiled=True),
        Supported("remove it: for this backend a Job compiles wherever its version can", values=("Disabled",)),
        Supported("remove it: this backend serves compiled models only", values=("Enabled",), about="Disabled"),
    ] = "Auto"
    application_class: Annotated[
        Annotated[
            str, Meta(min_length=1, max_length=256, pattern=r"^[A-Za-z_][A-Za-z0-9_.]*(:[A-Za-z_][A-Za-z0-9_]*)?$")
        ]
        | None,
        "The implementation of the model on the device: a name that the backend knows, or `module:Class` of "
        "`engine.image`; by default by the model's architecture.",
        ConfigKey("applicationClass", compiled=True),
        Supported("remove it: this backend has no other implementation"),
    ] = None
    override_neuron_config: Annotated[
        Json,
        Meta(max_length=256),
        "Settings of the backend: fields of NxD Inference's NeuronConfig for `nxdi`, or those [of a simulated device]"
        "(benchmarks.md#a-served-model-without-a-device); an unknown setting is `InvalidEngineConfig`.",
        ConfigKey("overrideNeuronConfig", compiled=True),
        Supported("remove it: this backend has no settings"),
    ] = field(default_factory=dict)
    env: Annotated[
        tuple[EnvVar, ...],
        Meta(max_length=64),
        "Environment variables of the serving pods, with unique names; exactly one of `value` and `valueFrom`, "
        "and of `secretKeyRef`, `configMapKeyRef` and `fieldRef`. Names that begin with "
        f"`{names.RESERVED_ENV_PREFIX}` and {', '.join(f'`{name}`' for name in sorted(names.RESERVED_ENV))} are "
        "refused. Jobs do not get these variables: set mirrors and proxies in the chart's `jobs.env`.",
        unique(by="name"),
    ] = ()
    args: Annotated[
        tuple[Annotated[str, Meta(min_length=1, max_length=4096)], ...],
        Meta(max_length=64),
        "Further flags of the command of `vllm`. Those that contradict a field are refused, with the field.",
        Supported("remove it: this backend has fields for all its settings"),
    ] = ()
    image: Annotated[
        Annotated[str, Meta(min_length=1, max_length=512, pattern=r"^\S+$")] | None,
        "Runtime image for this model and its Jobs, with a compiler if it is compiled; by default the chart's "
        "`image.runtime` and `image.compile`. With `vllm` the image of the replicas alone; by default the chart's "
        "`engines`.",
    ] = None
    image_pull_policy: Annotated[
        Literal["Always", "IfNotPresent", "Never"] | None,
        "When a node pulls the image; by default the chart's `image.pullPolicy`.",
    ] = None

    @property
    def variables(self) -> dict[str, str]:
        """Values of `env` by name; of one that comes from elsewhere, an empty text."""
        return {one.name: one.value or "" for one in self.env}


class Claim(SpecPart, frozen=True):
    """A PersistentVolumeClaim in the same namespace, which the pods of several nodes can mount."""

    claim_name: ClaimName
    sub_path: Annotated[SubPath | None, "Folder of the volume; by default all of it."] = None


class EmptyDir(SpecPart, frozen=True):
    """Each serving pod downloads the weights to its node's disk."""

    size_limit: Quantity | None = None


class ObjectStore(SpecPart, frozen=True):
    """A prefix in S3, which pods read with the keys of `model.credentialsSecretRef` or a service account."""

    uri: Annotated[StoreUri, "`s3://bucket/prefix`"]


class WeightsStorage(SpecPart, frozen=True):
    """Where the weights of an `hf://` or `s3://` model are kept: exactly one of the following; by default as set in the
    chart. See [storage](storage.md#in-a-cluster)."""

    RULES = (exactly_one("persistentVolumeClaim", "emptyDir", "objectStore"),)

    persistent_volume_claim: Claim | None = None
    empty_dir: EmptyDir | None = None
    object_store: ObjectStore | None = None


class ArtifactsStorage(SpecPart, frozen=True):
    """Where compiled artifacts are kept, likewise."""

    RULES = (exactly_one("persistentVolumeClaim", "objectStore"),)

    persistent_volume_claim: Claim | None = None
    object_store: ObjectStore | None = None


class Storage(SpecPart, frozen=True):
    """Where weights and compiled artifacts are kept."""

    weights: WeightsStorage | None = None
    artifacts: ArtifactsStorage | None = None


class Rollout(SpecPart, frozen=True):
    """How an edit reaches the replicas, and how a replica ends."""

    strategy: Annotated[
        Literal["Auto", "Surge", "Replace"],
        "Whether a new replica starts before an old one ends (`Surge`) or after (`Replace`). `Auto`: before, where the "
        "devices are free now. See [rollouts](#rollouts).",
        NotPinned(),
    ] = "Auto"
    progress_deadline_seconds: Annotated[
        int,
        Meta(ge=60, le=86_400),
        "A rollout fails when a new replica that has a node is not ready after this long; then the last revision that "
        "worked [comes back](#a-rollout-that-fails). The default leaves a large model [more](engines.md#start).",
        NotPinned(),
    ] = START_SECONDS
    drain_delay_seconds: Annotated[
        int,
        Meta(ge=0, le=600),
        "A replica that shuts down becomes unready at once and admits requests for this long, until every proxy has "
        "noticed.",
        ConfigKey("drain.delaySeconds"),
    ] = 10
    drain_seconds: Annotated[
        int,
        Meta(ge=0, le=7200),
        "After that, its running answers may continue for this long. The pod's grace period is the sum of both plus "
        "30 s.",
        ConfigKey("drain.seconds"),
    ] = 300
    revision_history_limit: Annotated[
        int,
        Meta(ge=0, le=50),
        "Number of earlier revisions to keep, besides the last one that worked.",
        NotPinned(),
    ] = 5


class Idle(SpecPart, frozen=True):
    """Takes replicas away that nobody has asked for some time; see [zero and back](autoscaling.md#zero-and-back). By
    default none is. Something else must scale up again."""

    after_seconds: Annotated[
        int,
        Meta(ge=60, le=604_800),
        "So long no request has run, waited or ended on any replica. A replica that loads or does not answer counts as "
        "asked.",
    ]
    min_replicas: Annotated[int, Meta(ge=0, le=1000), "The number of replicas that stay."] = 0


Labels = Annotated[dict[str, LabelValue], Meta(max_length=32), WITHOUT_OUR_PREFIX]
Annotations = Annotated[dict[str, Annotated[str, Meta(max_length=4096)]], Meta(max_length=32), WITHOUT_OUR_PREFIX]


class PodMetadata(SpecPart, frozen=True):
    """Added to the serving pods; keys below `neuron-serving.dev/` are refused."""

    labels: Labels = field(default_factory=dict)
    annotations: Annotations = field(default_factory=dict)


class Toleration(SpecPart, frozen=True):
    """As in a pod."""

    key: TopologyKey | None = None
    operator: Literal["Exists", "Equal"] | None = None
    value: LabelValue | None = None
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = None
    toleration_seconds: Int64 | None = None


class TopologySpread(SpecPart, frozen=True):
    """As in a pod."""

    max_skew: Annotated[int, Meta(ge=1)]
    topology_key: Annotated[TopologyKey, Meta(min_length=1)]
    when_unsatisfiable: Literal["DoNotSchedule", "ScheduleAnyway"]
    min_domains: Annotated[int, Meta(ge=1)] | None = None
    node_affinity_policy: Literal["Honor", "Ignore"] | None = None
    node_taints_policy: Literal["Honor", "Ignore"] | None = None
    match_label_keys: Annotated[tuple[TopologyKey, ...], Meta(max_length=8)] | None = None
    label_selector: Annotated[Json, Meta(max_length=2)] | None = None


GroupId = Annotated[Int64, Meta(ge=1, le=2_147_483_647)]


class PodSecurity(SpecPart, frozen=True):
    fs_group: GroupId | None = None
    supplemental_groups: Annotated[tuple[GroupId, ...], Meta(max_length=16)] = ()


class Resources(SpecPart, frozen=True):
    """CPU, memory and other resources; request devices with `accelerator`."""

    limits: Quantities = field(default_factory=dict)
    requests: Quantities = field(default_factory=dict)


PassedOn = Annotated[Json, Meta(max_length=16)]


class NodeSelectorTerm(OpenPart, frozen=True):
    match_expressions: Annotated[tuple[PassedOn, ...], Meta(max_length=32)] | None = None


class NodeSelector(OpenPart, frozen=True):
    node_selector_terms: Annotated[tuple[NodeSelectorTerm, ...], Meta(min_length=1, max_length=32)]


class NodeAffinity(OpenPart, frozen=True):
    required: NodeSelector | None = field(default=None, name=names.REQUIRED_AFFINITY)


class PodAntiAffinity(OpenPart, frozen=True):
    required: Annotated[tuple[PassedOn, ...], Meta(max_length=32)] | None = field(
        default=None, name=names.REQUIRED_AFFINITY
    )


class Affinity(OpenPart, frozen=True):
    """The parts that the operator adds its own terms to. The API server checks the rest with the pods."""

    node_affinity: NodeAffinity | None = None
    pod_anti_affinity: PodAntiAffinity | None = None


class Jobs(SpecPart, frozen=True):
    """The Jobs that run before the replicas."""

    resources: Annotated[
        Resources,
        "Requests and limits of this model's Jobs. A resource that is named here replaces that of the chart's "
        "`jobs.resources`, and the default request: 100m CPU and 128Mi memory, more "
        "[to compile](compiling.md#in-a-cluster).",
    ] = field(default_factory=Resources)
    labels: Annotated[
        Labels,
        "Added to the pods of this model's Jobs, over the chart's `jobs.labels`; keys below `neuron-serving.dev/` are "
        "refused.",
    ] = field(default_factory=dict)
    annotations: Annotated[
        Annotations,
        "Likewise, over the chart's `jobs.annotations`, such as to stay out of a mesh. Jobs that fetch or compile have "
        '`karpenter.sh/do-not-disrupt: "true"` and `cluster-autoscaler.kubernetes.io/safe-to-evict: "false"`.',
    ] = field(default_factory=dict)


class ServiceMetadata(SpecPart, frozen=True):
    annotations: Annotated[
        Annotations,
        "Annotations of the Service, for example for a load balancer; keys below `neuron-serving.dev/` are refused.",
    ] = field(default_factory=dict)


class ServiceSpec(SpecPart, frozen=True):
    RULES = (
        Rule(
            "loadBalancerClass requires type LoadBalancer",
            lambda self: self.load_balancer_class is None or self.type == "LoadBalancer",
            "!has(self.loadBalancerClass) || self.type == 'LoadBalancer'",
        ),
        Rule(
            "externalTrafficPolicy requires type NodePort or LoadBalancer",
            lambda self: self.external_traffic_policy is None or self.type != "ClusterIP",
            "!has(self.externalTrafficPolicy) || self.type != 'ClusterIP'",
        ),
    )

    type: Annotated[
        Literal["ClusterIP", "NodePort", "LoadBalancer"],
        "How the Service is reached. `NodePort` and `LoadBalancer` reach clients outside the cluster: require "
        "[API keys](server.md#api-keys), and let the chart's `networkPolicy.ingressFrom` admit them.",
    ] = "ClusterIP"
    load_balancer_class: Annotated[
        Name | None,
        "Who makes the load balancer, such as `eks.amazonaws.com/nlb`; by default the cluster's own. Kubernetes lets "
        "nobody change it as long as the type is `LoadBalancer`.",
    ] = None
    external_traffic_policy: Annotated[
        Literal["Cluster", "Local"] | None,
        "`Local`: a node sends clients from outside only to its own replicas, which see their addresses; by default "
        "`Cluster`.",
    ] = None


class ServiceTemplate(SpecPart, frozen=True):
    """Overlay for the model's Service."""

    metadata: ServiceMetadata = field(default_factory=ServiceMetadata)
    spec: ServiceSpec = ServiceSpec()


class PodSpec(SpecPart, frozen=True):
    """As in a pod, see [What podTemplate may change](#what-podtemplate-may-change)."""

    node_selector: Annotated[dict[str, LabelValue], Meta(max_length=32)] = field(default_factory=dict)
    tolerations: Annotated[tuple[Toleration, ...], Meta(max_length=32)] = ()
    affinity: Annotated[Json, Meta(max_length=3), Shape(Affinity)] = field(default_factory=dict)
    topology_spread_constraints: Annotated[tuple[TopologySpread, ...], Meta(max_length=8)] = ()
    priority_class_name: Name | None = None
    scheduler_name: Name | None = None
    runtime_class_name: Name | None = None
    service_account_name: Name | None = None
    image_pull_secrets: Annotated[tuple[SecretName, ...], Meta(max_length=8), unique(by="name")] = ()
    security_context: PodSecurity = PodSecurity()
    resources: Resources = field(default_factory=Resources)


class PodTemplate(SpecPart, frozen=True):
    """Overlay for the serving pods; Jobs use only its imagePullSecrets and serviceAccountName, and with a claim its
    securityContext."""

    metadata: PodMetadata = field(default_factory=PodMetadata)
    spec: PodSpec = field(default_factory=PodSpec)


class Spec(SpecPart, frozen=True):
    """What to serve and how. Only model.uri is required."""

    model: ModelSource
    replicas: Annotated[int, Meta(ge=0, le=1000), "Number of replicas. Also set by `kubectl scale`.", NotPinned()] = 1
    idle: Annotated[
        Idle | None,
        NotPinned(),
        Supported(
            "vLLM does not tell since when it is idle; let KEDA or a HorizontalPodAutoscaler scale it",
            values=(None,),
            of=lambda spec: None if spec.idle is None or spec.runs.is_ours else spec.backend,
        ),
    ] = None
    accelerator: Accelerator = Accelerator()
    parallelism: Parallelism = Parallelism()
    serving: Serving = Serving()
    engine: Engine = field(default_factory=Engine)
    storage: Storage = Storage()
    rollout: Rollout = Rollout()
    pod_template: PodTemplate = field(default_factory=PodTemplate)
    jobs: Annotated[Jobs, NotPinned()] = field(default_factory=Jobs)
    service_template: Annotated[ServiceTemplate, NotPinned()] = field(default_factory=ServiceTemplate)

    @property
    def backend(self) -> str:
        return self.engine.backend or engines.DEFAULTS[self.accelerator.type]

    @property
    def leaves_engine_open(self) -> bool:
        """Whether the installation may choose the engine. A manifest with an image means what runs in that."""
        return self.accelerator.type == "Neuron" and self.engine.backend is None and self.engine.image is None

    @property
    def runs(self) -> engines.Engine:
        """What the operator knows of the backend."""
        row = engines.ENGINES[self.backend]
        return row.on_host if row.on_host and self.accelerator.type == "CPU" else row

    @property
    def engine_setting(self) -> str:
        """Key of the installation's settings for the engine."""
        return self.runs.setting or self.backend

    @property
    def is_compiled(self) -> bool:
        """Whether replicas need a compiled artifact."""
        compiles = self.runs.compiles
        return compiles == "always" or (compiles == "on request" and self.engine.compile == "Enabled")

    @property
    def quantizes(self) -> bool:
        """Whether the engine computes quantized weights as `serving.quantization` says."""
        return self.runs.honours("spec.serving.quantization")

    @property
    def may_convert(self) -> bool:
        """Whether weights may have to be converted before a replica reads them."""
        return self.quantizes and not self.runs.quantizes_itself

    @property
    def generates(self) -> bool:
        """Whether it answers with text."""
        return self.serving.task == "Generate"

    @property
    def serves_adapters(self) -> bool:
        return self.serving.adapters.max_active is not None

    @property
    def is_asked(self) -> bool:
        """Whether the operator asks replicas for something."""
        return self.serves_adapters or self.serving.speculation.method is not None or self.idle is not None

    @property
    def drafts_not_honoured(self) -> str | None:
        """The method of drafts, if the engine has drafts but not this one."""
        method, runs = self.serving.speculation.method, self.runs
        return method if runs.drafts and method not in runs.drafts else None

    @property
    def names_artifact(self) -> bool:
        """Whether replicas load a folder that a variable of the manifest names, or refuse to start."""
        return any(own.name == names.ARTIFACT_VARIABLE and own.value != "" for own in self.engine.env)


@dataclass(frozen=True)
class NeuronModel:
    """One NeuronModel that this version can act on."""

    name: str
    namespace: str
    uid: str
    refresh: str
    """Value of the refresh annotation; a new token starts a new decision. Empty: none."""
    spec: Spec
    kind: str = names.KIND
    """Of the object that owns what is made for it: an adapter is fetched as its model would be, with another source."""
    reads_converted: bool = False
    """Whether its replicas read weights that a Job converts, as its revision decided."""
    default_for: str = ""
    """The family of devices whose default its engine is, by the installation; empty: the manifest decides."""
    rollback_to: str = ""
    """Value of the rollback annotation: the name of a kept revision to serve instead of the wanted one."""
    remembered: dict[Callable[..., Any], Any] = dataclasses.field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    """The last results of the functions that are decorated so."""

    def with_default(self, backend: str, family: str) -> "NeuronModel":
        """The same with the engine that is the default for a family, on devices of which alone it may run."""
        engine = msgspec.structs.replace(self.spec.engine, backend=backend)
        return dataclasses.replace(self, spec=msgspec.structs.replace(self.spec, engine=engine), default_for=family)

    @property
    def backend_words(self) -> str:
        """The engine, and who chose it if not the manifest, for messages."""
        return self.spec.backend + (f", the default for {self.default_for}" if self.default_for else "")

    @cached_property
    def uri(self) -> ParsedUri:
        return ParsedUri.parse(self.spec.model.uri)

    @cached_property
    def draft(self) -> "NeuronModel | None":
        """The manifest with the source of its draft model, which is resolved and fetched as a model; None: none."""
        source = self.spec.serving.speculation.model
        if source is None:
            return None
        secret = source.credentials_secret_ref or self.spec.model.credentials_secret_ref
        change = msgspec.structs.replace
        spec = change(
            self.spec,
            model=ModelSource(uri=source.uri, credentials_secret_ref=secret),
            serving=change(self.spec.serving, speculation=Speculation(), quantization="Auto"),
            engine=change(self.spec.engine, application_class=None),
        )
        return dataclasses.replace(self, spec=spec, reads_converted=False)


Others = TypeVarTuple("Others")
Result = TypeVar("Result")


def remembered(function: Callable[[NeuronModel, *Others], Result]) -> Callable[[NeuronModel, *Others], Result]:
    """Keeps the results of a pure function with the manifest: passes ask for the same again and again.

    It is computed again only if another argument is not the object that it was last time. A result is shared: nobody
    changes it.
    """

    @wraps(function)
    def recall(model: NeuronModel, *others: *Others) -> Result:
        last = model.remembered.get(function)
        if last is None or any(map(is_not, last[0], others)):
            last = model.remembered[function] = others, function(model, *others)
        result: Result = last[1]
        return result

    return recall
