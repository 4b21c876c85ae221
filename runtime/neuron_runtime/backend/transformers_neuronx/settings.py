"""What a model is compiled with for transformers-neuronx: `Settings`, in a normal form, and the limits that follow.

Derived once from the configuration and config.json by whoever compiles and whoever serves. Pure: it imports neither the
library nor torch. The rules are those of the source of v0.13; the docstrings say where each is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from neuron_runtime.backend.neuron import bucket_plan
from neuron_runtime.backend.neuron.devices import TIMEOUT_SHARE, Platform, Target
from neuron_runtime.backend.neuron.model_config import dtype_of, ignored_by, number_of, quantization_of
from neuron_runtime.backend.neuron.override import PATH, check_kind, near
from neuron_runtime.backend.neuron.step_graphs import Decode, Graph, Prefill, at_least
from neuron_runtime.config import RuntimeConfig
from neuron_runtime.core import MAX_LOGPROBS, BackendLimits, PrefillBucket, SamplingMode
from neuron_runtime.errors import ConfigProblems, ExitCode, FatalError, InvalidConfig
from neuron_runtime.flags import plain
from neuron_runtime.neuronx_fields import BY_NAME
from neuron_runtime.not_built import is_neutral

DEFAULT_MAX_SEQUENCES = 8
DEFAULT_MAX_LENGTH = 2048
SMALLEST_BUCKET = 128
GLOBAL_TOP_K = 256
"""Candidates that the device samples from. It compares ranks in the model's dtype, and bfloat16 holds whole numbers up
to this one (`hlo.topk_masked`)."""
PLATFORMS = ("inf2", "trn1")
"""It compiles for `trn1` alone, whose cores are those of inf2 (`compiler.compile_hlo_module`)."""

AMP = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}
"""The library's names of dtypes (`dtypes.to_torch_dtype`)."""

QUANT_DTYPES = ("s8", "f8e4m3fn")
QUANT_FIELDS = ("quant_dtype", "dequant_dtype", "quantize_method", "quantize_attn", "no_quantize_list")
QUANTIZATIONS = {"quant": (QUANT_FIELDS, "vector_dynamic"), "kv_cache_quant": (QUANT_FIELDS[:3], "direct_cast")}
"""Arguments of `config.QuantizationConfig` and of `KVCacheQuantizationConfig`, and the method that works: weights that
are cast directly end in an error (`quantize.maybe_quantize_weights`)."""

FUSED_NEEDS = "mlp_out_weight_transpose"
"""The other way, `LlamaForSampling.load_weights` calls `add_mlp_output` without a weight."""

DEFAULTS: Mapping[str, Any] = {"attention_layout": "BSH", "collectives_layout": "BSH", "fuse_qkv": True}
"""Of NeuronConfig, as vLLM's Neuron worker set them; an override replaces each."""


@dataclass(frozen=True, slots=True)
class Family:
    """Models that one class runs."""

    name: str
    model_class: str
    """In the library's package."""
    ignores: tuple[str, ...]
    """Fields of config.json that its configuration or its weights do not read, so they must be off."""


_BIASES = ("attention_bias", "mlp_bias", "head_dim")
FAMILIES = {
    # `llama.config` reads the scalings default and llama3, and raises for others; `load_weights` passes no bias.
    "LlamaForCausalLM": Family("llama", "LlamaForSampling", _BIASES),
    "MistralForCausalLM": Family("mistral", "MistralForSampling", (*_BIASES, "rope_scaling")),
}
LLAMA_SCALINGS = (None, "default", "llama3")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Everything that decides the graphs and the limits."""

    model_class: str
    tensor: int
    dtype: str
    max_rows: int
    max_model_length: int
    context_buckets: tuple[int, ...]
    """Ascending. A prompt takes the smallest that holds it (`bucket.find`)."""
    token_buckets: tuple[int, ...]
    """Ascending. A step takes the smallest above its largest position (`DecoderProgram.find_bucket_id`)."""
    sampling: SamplingMode
    vocabulary_size: int
    neuron_config: Mapping[str, Any]
    """Arguments of NeuronConfig as plain JSON, without continuous batching and generation on the device."""

    @property
    def global_top_k(self) -> int:
        """Candidates that the device samples from; 0 if the host samples."""
        return min(GLOBAL_TOP_K, self.vocabulary_size) if self.sampling == "Device" else 0

    @property
    def least_temperature(self) -> float:
        """The device divides logits of the model's dtype by the temperature: those of float16 overflow early."""
        return 1e-2 if self.dtype == "float16" else 1e-5


def prefill_graph(settings: Settings, num_tokens: int) -> Prefill:
    """Several prompts of one call run one after another, each padded to the bucket of the longest
    (`NeuronModelBase._context_dynamic_batching`). Raises ValueError if the prompt is too long."""
    return Prefill(at_least(settings.context_buckets, num_tokens))


def decode_graph(settings: Settings, position: int) -> Decode:
    """position: the largest of a row. Raises ValueError if no graph reaches it."""
    return Decode(settings.max_rows, at_least(settings.token_buckets, position + 1))


def all_graphs(settings: Settings) -> Iterator[tuple[Graph, tuple[int, int]]]:
    """Every graph, with start and end of a row whose call takes it."""
    for tokens in settings.context_buckets:
        yield Prefill(tokens), (0, tokens)
    for length in settings.token_buckets:
        yield Decode(settings.max_rows, length), (length - 1, length)


def limits_of(settings: Settings, exec_timeout_seconds: float) -> BackendLimits:
    """The limits of a model. exec_timeout_seconds: after which the Neuron runtime gives up a step."""
    rows, length, on_device = settings.max_rows, settings.max_model_length, settings.sampling == "Device"
    return BackendLimits(
        max_rows=rows,
        max_model_length=length,
        # Prompts of a step run one after another, so together they take as long as the longest one alone.
        max_step_tokens=max(settings.context_buckets[-1], rows),
        max_prefill_rows=rows,
        prefill_buckets=tuple(PrefillBucket(size, size) for size in settings.context_buckets),
        layout="slots",
        block_size=length,
        num_blocks=rows,
        mixes_phases=False,
        chunks_prefill=False,
        # A decode call writes token 0 to position 0 of every line that is not one of its rows.
        decodes_all_live_rows=True,
        sampling=settings.sampling,
        vocabulary_size=settings.vocabulary_size,
        max_top_k=settings.global_top_k,
        max_logprobs=0 if on_device else MAX_LOGPROBS,
        steps_in_flight=2,
        token_feedback="device",
        max_step_seconds=TIMEOUT_SHARE * exec_timeout_seconds,
    )


def check_document(config: RuntimeConfig) -> None:
    """Raises InvalidConfig for settings that this backend does not support with any model."""
    problems = ConfigProblems()
    limits, buckets = config.limits, config.buckets
    one_line = "each request has one contiguous line of the cache (layout slots)"
    unsupported = (
        ("layout", config.layout == "blocks", f"has no blocks: {one_line}, so leave it out"),
        ("limits.blockSize", bool(limits.block_size), f"has no blocks: {one_line}, so leave it out"),
        ("limits.numBlocks", bool(limits.num_blocks), f"has no blocks: {one_line}, so leave it out"),
        ("prefixCaching", config.prefix_caching == "enabled", "has no prefix caching: leave it out, or use nxdi"),
        ("chunkedPrefill", config.chunked_prefill == "enabled", "computes a prompt in one call: leave it out"),
        ("buckets.prefix", bool(buckets.prefix), "has no prefix caching: leave it out"),
        ("buckets.sequences", bool(buckets.sequences), "decodes all lines in every step: leave it out"),
        ("kvCacheDtype", config.kv_cache_dtype != "auto", "quantizes it by overrideNeuronConfig.kv_cache_quant alone"),
        ("asyncMode", config.async_mode, "has no such mode: leave it out"),
        ("applicationClass", bool(config.application_class), "chooses the class by the architecture: leave it out"),
        (
            "sampling",
            config.sampling == "DeviceWithLogits",
            "has graphs that return tokens or logits, not both: use Device, or Host, which honours every parameter",
        ),
    )
    for path, wrong, message in unsupported:
        if wrong:
            problems.add(f"$.{path}", f"the transformers-neuronx backend {message}")
    with problems.collecting():
        read_override(config.override_neuron_config)
    problems.check()


def read_override(override: Mapping[str, Any]) -> dict[str, Any]:
    """The checked keys by NeuronConfig's own names. Raises InvalidConfig with every wrong one."""
    problems, values = ConfigProblems(), dict[str, Any]()
    given = {plain(key): value for key, value in override.items()}
    for key, value in override.items():
        name, at = plain(key), f"{PATH}.{key}"
        known = BY_NAME.get(name)
        with problems.collecting():
            if known is None:
                raise InvalidConfig(at, f"transformers-neuronx has no setting `{name}`{near(name, BY_NAME)}")
            if is_neutral(value, known.neutral):
                continue
            if known.refused:
                raise InvalidConfig(at, known.refused)
            if known.kind is not None:
                check_kind(known.kind, value, at)
            if name == "on_device_generation":
                _check_generation(value, at)
            elif name in QUANTIZATIONS:
                _check_quantization(value, at, *QUANTIZATIONS[name])
            values[name] = value
            if name == "fuse_mlp" and value and not given.get(FUSED_NEEDS):
                raise InvalidConfig(at, f"needs {FUSED_NEEDS}, without which the library fails: set it to true too")
    problems.check()
    return values


def _check_generation(value: Mapping[str, Any], at: str) -> None:
    """Every request has its own parameters, whatever the graphs were compiled with."""
    required = {"dynamic": (True,), "per_batch_line": (True,), "do_sample": (True,), "deterministic": (False,)}
    ignored = {"max_length", "top_k", "top_p", "temperature", "top_p_min_tokens", "eos_token_id"}
    for key, one in value.items():
        if key == "global_top_k":
            if one != GLOBAL_TOP_K:
                raise InvalidConfig(f"{at}.{key}", f"is {GLOBAL_TOP_K} here: leave it out")
        elif key not in required and key not in ignored:
            raise InvalidConfig(f"{at}.{key}", f"GenerationConfig has no `{key}`{near(key, (*required, *ignored))}")


def _check_quantization(value: Mapping[str, Any], at: str, known: tuple[str, ...], method: str) -> None:
    for key in value:
        if key not in known:
            raise InvalidConfig(f"{at}.{key}", f"is no setting of a quantization{near(key, known)}")
    if (dtype := value.get("quant_dtype", "s8")) not in QUANT_DTYPES:
        raise InvalidConfig(f"{at}.quant_dtype", f"must be one of {', '.join(QUANT_DTYPES)}, got {dtype!r}")
    if value.get("quantize_method", method) != method:
        raise InvalidConfig(f"{at}.quantize_method", f"must be {method}: leave it out")


def settings_of(config: RuntimeConfig, model: Mapping[str, Any], target: Target) -> Settings:
    """The settings of a model.

    Args:
        model: config.json.

    Raises:
        InvalidConfig: names every field that contradicts another one, the model or the device.
        InvalidModel: config.json lacks a number.
        FatalError: UNSUPPORTED_ARCHITECTURE.
    """
    check_document(config)
    check_platform(target.platform, "$.backend")
    return _Derivation(config, model, target, family_of(model)).settings()


def check_platform(platform: Platform, at: str) -> None:
    """Raises InvalidConfig if the library does not compile for it. at: what names the backend."""
    if platform.name not in PLATFORMS:
        message = f"transformers-neuronx compiles for {' and '.join(PLATFORMS)}, not for {platform.name}"
        raise InvalidConfig(at, f"{message}: use the backend nxdi")


def family_of(model: Mapping[str, Any]) -> Family:
    """Raises FatalError with UNSUPPORTED_ARCHITECTURE if no class computes the model rightly."""
    names = [str(name) for name in model.get("architectures") or ()]
    family = next((FAMILIES[name] for name in names if name in FAMILIES), None)
    if family is None:
        message = f"config.json names {', '.join(names) or 'no architecture'}; this backend runs {', '.join(FAMILIES)}"
        raise FatalError(ExitCode.UNSUPPORTED_ARCHITECTURE, f"{message}: use the backend nxdi for others")
    wrong = dict(ignored_by(model, family.ignores))
    if method := quantization_of(model):
        wrong["quantization_config"] = method
    scaling = model.get("rope_scaling") or model.get("rope_parameters") or {}
    kind = scaling.get("rope_type", scaling.get("type"))
    if family.name == "llama" and kind not in LLAMA_SCALINGS:
        wrong["rope_scaling"] = kind
    if model.get("hidden_act", "silu") != "silu":  # `hlo.gated_mlp` is called with silu
        wrong["hidden_act"] = model["hidden_act"]
    for name, value in wrong.items():
        raise FatalError(
            ExitCode.UNSUPPORTED_ARCHITECTURE,
            f"config.json: transformers-neuronx's {family.name} does not compute {name} {value!r}: use the backend "
            "nxdi",
        )
    return family


@dataclass
class _Derivation:
    """One pass over the fields, in the order in which they depend on one another. What is wrong is collected."""

    _config: RuntimeConfig
    _model: Mapping[str, Any]
    _target: Target
    _family: Family
    _found: ConfigProblems = field(default_factory=ConfigProblems)

    def settings(self) -> Settings:
        config = self._config
        override = read_override(config.override_neuron_config)
        generates = override.pop("on_device_generation", None) is not None
        longest, vocabulary_size = (number_of(self._model, name) for name in ("max_position_embeddings", "vocab_size"))
        rows = config.limits.max_sequences or DEFAULT_MAX_SEQUENCES
        tensor, dtype = self._tensor(), dtype_of(config.dtype, self._model, self._found)
        length = config.limits.max_model_length or min(longest, self._window() or longest, DEFAULT_MAX_LENGTH)
        if not 2 <= length <= longest:
            message = f"must be from 2 to the model's {longest} positions, got {length}"
            self._found.add("$.limits.maxModelLength", message)
        if 0 < self._window() < length:
            message = f"is {length}, above the model's sliding window of {self._window()} tokens: set that or less"
            self._found.add("$.limits.maxModelLength", message)
        if generates and config.sampling == "Host":
            self._found.add(f"{PATH}.on_device_generation", "has no effect, because sampling is Host: leave it out")
        for name in override:
            if self._family.name != "llama" and BY_NAME[name].llama_only and override[name]:
                self._found.add(f"{PATH}.{name}", f"its class for {self._family.name} does not have it: leave it out")
        shards = self._shards(tensor, override)
        context, tokens = self._context_buckets(length, shards), self._token_buckets(length, rows, shards)
        self._found.check()
        neuron_config = {**DEFAULTS, **override}
        for name in QUANTIZATIONS:
            if name in override:
                neuron_config[name] = {"quant_dtype": "s8", "dequant_dtype": AMP[dtype], **override[name]}
        return Settings(
            model_class=self._family.model_class,
            tensor=tensor,
            dtype=dtype,
            max_rows=rows,
            max_model_length=length,
            context_buckets=context,
            token_buckets=tokens,
            sampling=config.sampling or "Device",
            vocabulary_size=vocabulary_size,
            neuron_config=neuron_config,
        )

    def _window(self) -> int:
        """Tokens that Mistral's layers see; 0: all. Beyond it the library slices the cache of a step, which was never
        compared with anything."""
        window = self._model.get("sliding_window")
        return window if self._family.name == "mistral" and isinstance(window, int) else 0

    def _tensor(self) -> int:
        """The tensor-parallel degree. Left open: as many of this process's cores as divide the heads, or one."""
        heads, degree = number_of(self._model, "num_attention_heads"), self._config.parallelism.tensor
        return degree or max(one for one in range(1, max(self._target.granted_cores, 1) + 1) if heads % one == 0)

    def _shards(self, tensor: int, override: Mapping[str, Any]) -> int:
        """Among how many cores the positions of a line are divided (`shard_over_sequence`)."""
        if not override.get("shard_over_sequence"):
            return 1
        heads = number_of(self._model, "num_attention_heads")
        kv_heads = self._model.get("num_key_value_heads") or heads
        if tensor % kv_heads or kv_heads in (tensor, heads):
            message = (
                "divides a line of the cache among cores, so the tensor-parallel degree must be a multiple of the "
                f"model's {kv_heads} heads of keys and values, which more than one head of queries share; it is "
                f"{tensor}: leave it out"
            )
            self._found.add(f"{PATH}.shard_over_sequence", message)
            return 1
        return tensor // int(kv_heads)

    def _context_buckets(self, length: int, shards: int) -> tuple[int, ...]:
        sizes, most = self._config.buckets.context, self._config.limits.max_step_tokens
        path = "$.buckets.context"
        if not sizes:
            longest = min(most or length, length)
            prompts = bucket_plan.prompts((), longest)
            cost, count = bucket_plan.prefill_cost, bucket_plan.MAX_CONTEXT_BUCKETS
            sizes = bucket_plan.choose(prompts, longest, count, cost, least=SMALLEST_BUCKET, strict=False)
        elif 0 < most < sizes[-1]:
            message = f"is {most}, but the largest context bucket is {sizes[-1]}"
            self._found.add("$.limits.maxStepTokens", message)
        if sizes[-1] > length:
            self._found.add(path, f"{sizes[-1]} is above the model's length of {length}")
        if sizes[0] < 2:
            self._found.add(path, "1 is too short: the library takes a call of one token for a step; the least is 2")
        if wrong := [size for size in sizes if size % shards]:
            message = f"{wrong[0]} is no multiple of {shards}, among which cores shard_over_sequence divides it"
            self._found.add(path, message)
        return sizes

    def _token_buckets(self, length: int, rows: int, shards: int) -> tuple[int, ...]:
        """With `shard_over_sequence` one: a core writes what belongs to another one to the last place of its part,
        which in a smaller bucket holds a token (`flash_decoding.convert_attn_mask_and_cache_id`). The largest is 128
        longer than its sequences (`LlamaForSampling.__init__`), so that nothing is there."""
        sizes, path = self._config.buckets.token_generation, "$.buckets.tokenGeneration"
        if sizes and sizes[-1] > length:
            self._found.add(path, f"{sizes[-1]} is above the model's length of {length}")
        if shards > 1:
            if sizes and sizes != (length,):
                message = f"must be {length} alone: with shard_over_sequence, tokens would be lost at the end of others"
                self._found.add(path, message)
            return (length,)
        if sizes:
            return tuple(sorted({*sizes, length}))
        contexts = bucket_plan.contexts_of(bucket_plan.log_uniform(bucket_plan.SHORTEST_PROMPT, length), rows)
        cost = bucket_plan.decode_cost(self._model, rows)
        most, least = bucket_plan.MAX_TOKEN_BUCKETS, 2 * SMALLEST_BUCKET
        return bucket_plan.choose(contexts, length, most, cost, least=least)
