"""The shape of a decoder as data, read from config.json. A new model family is a table entry.

Called by the loader, by the memory arithmetic and by `inspect`, which must not import torch; this module does not. It
knows names and shapes of tensors but reads no weights.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, NamedTuple

from neuron_runtime.checkpoint import InvalidModel
from neuron_runtime.errors import ExitCode, FatalError
from neuron_runtime.quantization import Quantization, quantization_of

MAX_LAYERS = 10_000
"""A config.json with more is a mistake, and listing its tensors would never end."""

MAX_INTEGER = 2**63 - 1
"""Larger ones are a mistake, and neither torch nor a float has room for all of them."""

MAX_EXPERTS = 100_000
"""Of all layers, as `MAX_LAYERS`."""

LAYER_TYPES = ("full_attention", "sliding_attention")

RopeKind = Literal["default", "linear", "dynamic", "llama3", "yarn"]


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary position embedding. Formulas: `rotary.py`."""

    theta: float = 10_000.0
    kind: RopeKind = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    scale: float = 1.0
    """Of cosines and sines."""


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """Where a family has its experts: fields of config.json, and tensors, whose names begin with that of their layer.

    shared: the expert that all tokens have, beside the others, and the gate of its outputs.
    """

    num_experts: str = "num_experts"
    intermediate_size: str = "moe_intermediate_size"
    shared_size: str = ""
    router: str = "mlp.gate"
    expert: str = "mlp.experts"
    gate_up_down: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    shared: str = "mlp.shared_expert"
    shared_gate: str = "mlp.shared_expert_gate"


@dataclass(frozen=True, slots=True)
class ExpertsConfig:
    """The experts of a mixture: each token has `top_k` of them, by the highest probabilities of the router.

    normalises: whether the shares of a token's experts are divided by their sum.
    shared_size: of the expert that all tokens have; 0: there is none.
    layers: whether each layer has experts, or one MLP.
    """

    num_experts: int
    top_k: int
    intermediate_size: int
    normalises: bool
    shared_size: int
    layers: tuple[bool, ...]
    names: ExpertNames


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """Shape of a pre-norm decoder with RMSNorm, rotary positions, grouped queries and SwiGLU."""

    architecture: str
    vocabulary_size: int
    hidden_size: int
    intermediate_size: int
    """0: every layer has experts."""
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_epsilon: float
    rope: Rope
    tied_embeddings: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    query_key_norm: bool
    """RMSNorm over each head of queries and of keys, before rotation."""
    windows: tuple[int | None, ...]
    """Sliding window per layer: how many positions a token sees, including its own; None for all of them."""
    quantization: Quantization | None = None
    """How weights of linear layers are stored."""
    experts: ExpertsConfig | None = None

    @property
    def attention_scale(self) -> float:
        return float(self.head_dim**-0.5)

    @property
    def kv_elements_per_token(self) -> int:
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim


@dataclass(frozen=True, slots=True)
class TorchFamily:
    """How one architecture differs from the others.

    defaults: values of fields that config.json leaves out, as in the configuration class of transformers. A null field
        counts as given.
    fixed: fields with only one supported value, which is also their default. Other values are refused, because
        transformers would ignore them.
    output_bias: whether `attention_bias` also applies to the output projection.
    """

    defaults: Mapping[str, Any] = field(default_factory=dict)
    fixed: Mapping[str, Any] = field(default_factory=dict)
    output_bias: bool = True
    query_key_norm: bool = False
    experts: ExpertNames | None = None
    theta: float = 10_000.0
    """Of rotary positions, where config.json has none."""


# For every architecture.
FIXED: Mapping[str, Any] = {"hidden_act": "silu", "partial_rotary_factor": 1.0, "is_causal": True, "use_mrope": False}

# Qwen's sliding layers begin at max_window_layers; where all layers slide (Mistral), that is layer 0.
_QWEN_WINDOW = {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28}

FAMILIES: Mapping[str, TorchFamily] = {
    "LlamaForCausalLM": TorchFamily(fixed={"sliding_window": None}),
    "MistralForCausalLM": TorchFamily(
        defaults={"num_key_value_heads": 8, "sliding_window": 4096},
        fixed={"attention_bias": False, "mlp_bias": False, "use_sliding_window": True, "max_window_layers": 0},
    ),
    "Qwen2ForCausalLM": TorchFamily(
        defaults={"num_key_value_heads": 32, **_QWEN_WINDOW},
        fixed={"attention_bias": True, "mlp_bias": False},
        output_bias=False,
    ),
    "Qwen3ForCausalLM": TorchFamily(
        defaults={"num_key_value_heads": 32, "head_dim": 128, **_QWEN_WINDOW},
        fixed={"mlp_bias": False},
        query_key_norm=True,
    ),
    "MixtralForCausalLM": TorchFamily(
        defaults={
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5,
            "sliding_window": None,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
        },
        fixed={
            "attention_bias": False,
            "mlp_bias": False,
            "use_sliding_window": True,
            "max_window_layers": 0,
            "norm_topk_prob": True,
        },
        experts=ExpertNames(
            num_experts="num_local_experts",
            intermediate_size="intermediate_size",
            router="block_sparse_moe.gate",
            expert="block_sparse_moe.experts",
            gate_up_down=("w1", "w3", "w2"),
        ),
        theta=1_000_000.0,
    ),
    "Qwen2MoeForCausalLM": TorchFamily(
        defaults={
            "num_key_value_heads": 16,
            "num_experts": 60,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 1408,
            "shared_expert_intermediate_size": 5632,
        },
        fixed={"attention_bias": True, "qkv_bias": True, "mlp_bias": False, "use_sliding_window": False},
        output_bias=False,
        experts=ExpertNames(shared_size="shared_expert_intermediate_size"),
    ),
    "Qwen3MoeForCausalLM": TorchFamily(
        defaults={
            "num_key_value_heads": 4,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
        },
        fixed={"mlp_bias": False, "use_sliding_window": False},
        query_key_norm=True,
        experts=ExpertNames(),
    ),
}
"""By the class named in `architectures` of config.json. One decoder computes all of them."""


def decoder_config(config: Mapping[str, Any]) -> DecoderConfig:
    """Read a config.json as written by transformers 4 or 5, and as transformers reads it.

    Raises:
        FatalError: UNSUPPORTED_ARCHITECTURE, naming the architecture or feature and the supported ones.
        InvalidModel: a field is missing or has the wrong type; names the field.
    """
    architecture = _architecture(config)
    family = FAMILIES[architecture]
    quantization = quantization_of(config)
    config = _filled_in(config, architecture)
    attention_bias = boolean(config, "attention_bias", False)
    num_layers = positive(config, "num_hidden_layers")
    if num_layers > MAX_LAYERS:
        raise InvalidModel(f"config.json: num_hidden_layers must be at most {MAX_LAYERS}, got {num_layers}")
    hidden_size = positive(config, "hidden_size")
    num_heads = positive(config, "num_attention_heads")
    num_kv_heads = positive(config, "num_key_value_heads", num_heads)
    head_dim = positive(config, "head_dim", hidden_size // num_heads)
    if num_heads % num_kv_heads:
        raise InvalidModel(
            f"config.json: num_attention_heads ({num_heads}) must be a multiple of num_key_value_heads ({num_kv_heads})"
        )
    if head_dim % 2:
        raise InvalidModel(f"config.json: head_dim must be even for rotary positions, got {head_dim}")
    max_position_embeddings = positive(config, "max_position_embeddings")
    experts = _experts(config, family.experts, num_layers) if family.experts else None
    return DecoderConfig(
        architecture=architecture,
        vocabulary_size=positive(config, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=0 if experts and all(experts.layers) else positive(config, "intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_position_embeddings=max_position_embeddings,
        rms_norm_epsilon=_number(config, "rms_norm_eps", 1e-6),
        rope=_rope(config, max_position_embeddings, family.theta),
        tied_embeddings=boolean(config, "tie_word_embeddings", False),
        qkv_bias=attention_bias,
        output_bias=attention_bias and family.output_bias,
        mlp_bias=boolean(config, "mlp_bias", False),
        query_key_norm=family.query_key_norm,
        # A window as long as the longest sequence has no effect.
        windows=tuple(
            None if window is None or window >= max_position_embeddings else window
            for window in _windows(config, architecture, num_layers)
        ),
        quantization=quantization,
        experts=experts,
    )


class Projection(NamedTuple):
    """Numbers that a projection takes and gives."""

    inputs: int
    outputs: int


def projections(config: DecoderConfig) -> dict[str, Projection]:
    """The projections of every layer, which adapters may change, by their short names (`q_proj`). Those of experts are
    none."""
    one = replace(config, num_layers=1, experts=config.experts and replace(config.experts, layers=(True,)))
    return {
        name.split(".")[-2]: Projection(shape[1], shape[0])
        for name, shape in tensor_shapes(one).items()
        if name.endswith("_proj.weight") and (config.experts is None or ".self_attn." in name)
    }


def tensor_shapes(config: DecoderConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor that a checkpoint of this model must contain, named as in transformers."""
    hidden, inner = config.hidden_size, config.intermediate_size
    query, key = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocabulary_size, hidden)}
    attention = {
        "self_attn.q_proj": (query, hidden, config.qkv_bias),
        "self_attn.k_proj": (key, hidden, config.qkv_bias),
        "self_attn.v_proj": (key, hidden, config.qkv_bias),
        "self_attn.o_proj": (hidden, query, config.output_bias),
    }
    dense = {
        "mlp.gate_proj": (inner, hidden, config.mlp_bias),
        "mlp.up_proj": (inner, hidden, config.mlp_bias),
        "mlp.down_proj": (hidden, inner, config.mlp_bias),
    }
    experts = _expert_shapes(config.experts, hidden) if config.experts else {}
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}"
        mlp = experts if config.experts and config.experts.layers[layer] else dense
        for name, (rows, columns, has_bias) in (attention | mlp).items():
            shapes[f"{prefix}.{name}.weight"] = (rows, columns)
            if has_bias:
                shapes[f"{prefix}.{name}.bias"] = (rows,)
        if config.query_key_norm:
            shapes[f"{prefix}.self_attn.q_norm.weight"] = (config.head_dim,)
            shapes[f"{prefix}.self_attn.k_norm.weight"] = (config.head_dim,)
        shapes[f"{prefix}.input_layernorm.weight"] = (hidden,)
        shapes[f"{prefix}.post_attention_layernorm.weight"] = (hidden,)
    shapes["model.norm.weight"] = (hidden,)
    if not config.tied_embeddings:
        shapes["lm_head.weight"] = (config.vocabulary_size, hidden)
    return shapes


def _expert_shapes(experts: ExpertsConfig, hidden: int) -> dict[str, tuple[int, int, bool]]:
    """Rows, columns and whether there is a bias, by the names of linear layers."""
    names, inner, shared = experts.names, experts.intermediate_size, experts.shared_size

    def mlp(name: str, size: int) -> dict[str, tuple[int, int, bool]]:
        gate, up, down = (f"{name}.{part}" for part in names.gate_up_down)
        return {gate: (size, hidden, False), up: (size, hidden, False), down: (hidden, size, False)}

    shapes = {names.router: (experts.num_experts, hidden, False)}
    for number in range(experts.num_experts):
        shapes |= mlp(f"{names.expert}.{number}", inner)
    return shapes | (mlp(names.shared, shared) | {names.shared_gate: (1, hidden, False)} if shared else {})


def _architecture(config: Mapping[str, Any]) -> str:
    match config.get("architectures"):
        case [str(name), *_]:
            pass
        case _:
            raise InvalidModel("config.json: architectures must be a list that names the model class")
    if name not in FAMILIES:
        raise _unsupported(f"architecture {name}", ", ".join(sorted(FAMILIES)))
    return name


def _filled_in(config: Mapping[str, Any], architecture: str) -> dict[str, Any]:
    """The configuration with the architecture's defaults. Refuses values that the architecture does not support."""
    family = FAMILIES[architecture]
    fixed = {**FIXED, **family.fixed}
    for name, only in fixed.items():
        value = config.get(name, only)
        # Files write null for fields that the architecture does not use.
        if value is not None and value != only:
            raise _unsupported(f"{name} {value!r} of {architecture}", json.dumps(only))
    return {**family.defaults, **config, **fixed}


def _windows(config: Mapping[str, Any], architecture: str, num_layers: int) -> tuple[int | None, ...]:
    """Sliding window of each layer, None where a layer sees everything."""
    window: int | None = None
    first: Any = 0
    if boolean(config, "use_sliding_window", False) and config.get("sliding_window") is not None:
        window, first = positive(config, "sliding_window"), config.get("max_window_layers")
    if isinstance(first, bool) or not isinstance(first, int) or first < 0:
        raise InvalidModel(f"config.json: max_window_layers must be an integer of at least 0, got {first!r}")
    by_number = tuple(window if layer >= first else None for layer in range(num_layers))
    kinds = config.get("layer_types")
    if kinds is None:
        return by_number
    if not isinstance(kinds, list) or len(kinds) != num_layers:
        raise InvalidModel(f"config.json: layer_types must be a list of num_hidden_layers ({num_layers}) names")
    for kind in kinds:
        if kind not in LAYER_TYPES:
            raise _unsupported(f"layer_types {kind!r} of {architecture}", ", ".join(LAYER_TYPES))
    if window is None and "sliding_attention" in kinds:
        raise InvalidModel(
            "config.json: layer_types names sliding_attention, but sliding_window is null or use_sliding_window false"
        )
    by_kind = tuple(window if kind == "sliding_attention" else None for kind in kinds)
    if by_kind != by_number and "max_window_layers" not in FAMILIES[architecture].defaults:
        raise _unsupported(f"layer_types that differ from sliding_window {window} of {architecture}", "no layer_types")
    return by_kind


def _experts(config: Mapping[str, Any], names: ExpertNames, num_layers: int) -> ExpertsConfig:
    dense, step = config.get("mlp_only_layers") or [], positive(config, "decoder_sparse_step", 1)
    if not isinstance(dense, list) or not all(isinstance(layer, int) for layer in dense):
        raise InvalidModel(f"config.json: mlp_only_layers must be a list of numbers of layers, got {dense!r}")
    num_experts, top_k = (positive(config, name) for name in (names.num_experts, "num_experts_per_tok"))
    if num_experts > (most := MAX_EXPERTS // num_layers):
        what = f"must be at most {most} with {num_layers} layers"
        raise InvalidModel(f"config.json: {names.num_experts} {what}, got {num_experts}")
    if top_k > num_experts:
        raise InvalidModel(
            f"config.json: num_experts_per_tok ({top_k}) must be at most {names.num_experts} ({num_experts})"
        )
    return ExpertsConfig(
        num_experts=num_experts,
        top_k=top_k,
        intermediate_size=positive(config, names.intermediate_size),
        normalises=boolean(config, "norm_topk_prob", False),
        shared_size=positive(config, names.shared_size) if names.shared_size else 0,
        layers=tuple(layer not in dense and (layer + 1) % step == 0 for layer in range(num_layers)),
        names=names,
    )


def _rope(config: Mapping[str, Any], max_position_embeddings: int, usual_theta: float) -> Rope:
    # transformers 5 writes one object, rope_parameters; transformers 4 writes rope_theta beside rope_scaling.
    for name in ("rope_parameters", "rope_scaling"):
        if not isinstance(config.get(name) or {}, Mapping):
            raise InvalidModel(f"config.json: {name} must be an object")
    new, old = config.get("rope_parameters") or {}, config.get("rope_scaling") or {}
    for what, one, other in (
        *((f"rope_parameters.{name} and rope_scaling.{name}", new[name], old[name]) for name in new if name in old),
        ("rope_theta and rope_parameters.rope_theta", config.get("rope_theta"), new.get("rope_theta")),
        ("rope_type and type", (new or old).get("rope_type"), (new or old).get("type")),
    ):
        if one is not None and other is not None and one != other:
            raise InvalidModel(f"config.json: {what} contradict one another: {one!r} and {other!r}")
    parameters = {"rope_theta": config.get("rope_theta")}
    for name, value in (*old.items(), *new.items()):
        if value is not None and (name, value) != ("partial_rotary_factor", 1):
            parameters[name] = value
    theta = _number(parameters, "rope_theta", usual_theta)
    if theta <= 1:
        raise InvalidModel(f"config.json: rope_theta must be above 1, got {theta}")
    kind: Any = str(parameters.pop("rope_type", parameters.pop("type", "default")))
    if kind not in ROPE_FIELDS:
        raise _unsupported(f"rope type {kind!r}", ", ".join(ROPE_FIELDS))
    for name in sorted(parameters.keys() - ROPE_FIELDS[kind].keys() - {"rope_theta", "type"}):
        raise _unsupported(f"{name} of rope type {kind!r}", ", ".join(sorted(ROPE_FIELDS[kind])) or "rope_theta alone")
    if "original_max_position_embeddings" in ROPE_FIELDS[kind]:
        parameters.setdefault("original_max_position_embeddings", max_position_embeddings)
    values = {name: read(parameters, name) for name, read in ROPE_FIELDS[kind].items()}
    rope = Rope(theta, kind, **(_yarn(values) if kind == "yarn" else values))
    for low, high in (("low_freq_factor", "high_freq_factor"), ("beta_slow", "beta_fast")):
        least, most = getattr(rope, low), getattr(rope, high)
        if least >= most:
            raise InvalidModel(f"config.json: {low} ({least}) must be below {high} ({most})")
    return rope


def _yarn(values: dict[str, Any]) -> dict[str, Any]:
    """Its fields of `Rope`: the scale is given, or follows from the factor as in transformers."""
    scale, *weights = (values.pop(name) for name in ("attention_factor", "mscale", "mscale_all_dim"))
    over, under = weights if all(weights) else (1.0, 0.0)
    growth = 0.1 * math.log(max(1.0, values["factor"]))
    return {**values, "scale": scale or (1 + over * growth) / (1 + under * growth)}


def _unsupported(what: str, supported: str) -> FatalError:
    return FatalError(
        ExitCode.UNSUPPORTED_ARCHITECTURE, f"{what} is not supported by the torch backend; supported: {supported}"
    )


def positive(config: Mapping[str, Any], name: str, default: int | None = None) -> int:
    value = config.get(name)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise InvalidModel(f"config.json: {name} must be a positive integer, got {value!r}")
    if value > MAX_INTEGER:
        raise InvalidModel(f"config.json: {name} must be a positive integer of at most {MAX_INTEGER}")
    return value


def _number(config: Mapping[str, Any], name: str, default: float | None = None) -> float:
    value = config.get(name)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= sys.float_info.max:
        raise InvalidModel(f"config.json: {name} must be a positive number, got {value!r}")
    return float(value)


def _number_if_any(config: Mapping[str, Any], name: str) -> float:
    """0 where there is none, as some files write it."""
    return _number(config, name) if config.get(name) else 0.0


def boolean(config: Mapping[str, Any], name: str, default: bool) -> bool:
    value = config.get(name)
    value = default if value is None else value
    if not isinstance(value, bool):
        raise InvalidModel(f"config.json: {name} must be true or false, got {value!r}")
    return value


ROPE_FIELDS: Mapping[RopeKind, Mapping[str, Callable[[Mapping[str, Any], str], Any]]] = {
    "default": {},
    "linear": {"factor": _number},
    "dynamic": {"factor": _number},
    "llama3": {
        **dict.fromkeys(("factor", "low_freq_factor", "high_freq_factor"), _number),
        "original_max_position_embeddings": positive,
    },
    "yarn": {
        "factor": _number,
        "original_max_position_embeddings": positive,
        **dict.fromkeys(("attention_factor", "mscale", "mscale_all_dim"), _number_if_any),
        "beta_fast": partial(_number, default=32.0),
        "beta_slow": partial(_number, default=1.0),
        "truncate": partial(boolean, default=True),
    },
}
"""Fields of each rope type besides its name and `rope_theta`, and what reads them."""
