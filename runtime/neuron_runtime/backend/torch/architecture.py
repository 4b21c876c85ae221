"""What a decoder looks like, as data: read from config.json, so that a further model family is a table entry.

Called by the loader, by the memory arithmetic and by `inspect` (which must not import torch: this module does not).
It reads no weights and knows no tensors, only their names and shapes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from neuron_runtime.checkpoint import InvalidModel
from neuron_runtime.errors import ExitCode, FatalError

MAX_LAYERS = 10_000
"""Beyond this a config.json is a mistake, and listing its tensors would take for ever."""

RopeKind = Literal["default", "linear", "llama3"]


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary position embedding. Formulas: `rotary.py`."""

    theta: float = 10_000.0
    kind: RopeKind = "default"
    factor: float = 1.0
    low_frequency_factor: float = 1.0
    high_frequency_factor: float = 4.0
    original_max_position_embeddings: int = 0


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """Shape of a pre-norm decoder with RMSNorm, rotary positions, grouped queries and SwiGLU."""

    architecture: str
    vocabulary_size: int
    hidden_size: int
    intermediate_size: int
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

    @property
    def kv_elements_per_token(self) -> int:
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim


@dataclass(frozen=True, slots=True)
class Family:
    """How one architecture differs from the others: which projections have a bias, given its config.json."""

    qkv_bias: Literal["attention_bias", True, False]
    output_bias: Literal["attention_bias", True, False]


FAMILIES: Mapping[str, Family] = {
    "LlamaForCausalLM": Family(qkv_bias="attention_bias", output_bias="attention_bias"),
}


def decoder_config(config: Mapping[str, Any]) -> DecoderConfig:
    """Read a config.json as written by transformers 4 or 5.

    Raises:
        FatalError: UNSUPPORTED_ARCHITECTURE with the architecture (or the feature) and what is supported.
        InvalidModel: a field is missing or of the wrong type; the message names it.
    """
    architecture = _architecture(config)
    family = FAMILIES[architecture]
    if (activation := config.get("hidden_act", "silu")) != "silu":
        raise _unsupported(f"hidden_act {activation!r} of {architecture}", "silu")
    if config.get("quantization_config"):
        raise _unsupported(f"quantization_config of {architecture}", "weights in float32, bfloat16 or float16")
    attention_bias = _boolean(config, "attention_bias", False)
    num_layers = _positive(config, "num_hidden_layers")
    if num_layers > MAX_LAYERS:
        raise InvalidModel(f"config.json: num_hidden_layers must be at most {MAX_LAYERS}, got {num_layers}")
    hidden_size = _positive(config, "hidden_size")
    num_heads = _positive(config, "num_attention_heads")
    num_kv_heads = _positive(config, "num_key_value_heads", num_heads)
    head_dim = _positive(config, "head_dim", hidden_size // num_heads)
    if num_heads % num_kv_heads:
        raise InvalidModel(
            f"config.json: num_attention_heads ({num_heads}) must be a multiple of num_key_value_heads ({num_kv_heads})"
        )
    if head_dim % 2:
        raise InvalidModel(f"config.json: head_dim must be even for rotary positions, got {head_dim}")
    return DecoderConfig(
        architecture=architecture,
        vocabulary_size=_positive(config, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=_positive(config, "intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_position_embeddings=_positive(config, "max_position_embeddings"),
        rms_norm_epsilon=_number(config, "rms_norm_eps", 1e-6),
        rope=_rope(config),
        tied_embeddings=_boolean(config, "tie_word_embeddings", False),
        qkv_bias=attention_bias if family.qkv_bias == "attention_bias" else family.qkv_bias,
        output_bias=attention_bias if family.output_bias == "attention_bias" else family.output_bias,
        mlp_bias=_boolean(config, "mlp_bias", False),
    )


def tensor_shapes(config: DecoderConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor that a checkpoint of this model must hold (names as transformers writes them)."""
    hidden, inner = config.hidden_size, config.intermediate_size
    query, key = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocabulary_size, hidden)}
    projections = {
        "self_attn.q_proj": (query, hidden, config.qkv_bias),
        "self_attn.k_proj": (key, hidden, config.qkv_bias),
        "self_attn.v_proj": (key, hidden, config.qkv_bias),
        "self_attn.o_proj": (hidden, query, config.output_bias),
        "mlp.gate_proj": (inner, hidden, config.mlp_bias),
        "mlp.up_proj": (inner, hidden, config.mlp_bias),
        "mlp.down_proj": (hidden, inner, config.mlp_bias),
    }
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}"
        for name, (rows, columns, has_bias) in projections.items():
            shapes[f"{prefix}.{name}.weight"] = (rows, columns)
            if has_bias:
                shapes[f"{prefix}.{name}.bias"] = (rows,)
        shapes[f"{prefix}.input_layernorm.weight"] = (hidden,)
        shapes[f"{prefix}.post_attention_layernorm.weight"] = (hidden,)
    shapes["model.norm.weight"] = (hidden,)
    if not config.tied_embeddings:
        shapes["lm_head.weight"] = (config.vocabulary_size, hidden)
    return shapes


def _architecture(config: Mapping[str, Any]) -> str:
    match config.get("architectures"):
        case [str(name), *_]:
            pass
        case _:
            raise InvalidModel("config.json: architectures must be a list that names the model class")
    if name not in FAMILIES:
        raise _unsupported(f"architecture {name}", ", ".join(sorted(FAMILIES)))
    return name


def _rope(config: Mapping[str, Any]) -> Rope:
    # transformers 5 writes one object, rope_parameters; transformers 4 writes rope_theta beside rope_scaling.
    parameters = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(parameters, Mapping):
        raise InvalidModel("config.json: rope_parameters (or rope_scaling) must be an object")
    theta = _number(parameters, "rope_theta", _number(config, "rope_theta", 10_000.0))
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    match kind:
        case "default":
            return Rope(theta=theta)
        case "linear":
            return Rope(theta=theta, kind="linear", factor=_number(parameters, "factor"))
        case "llama3":
            low, high = _number(parameters, "low_freq_factor"), _number(parameters, "high_freq_factor")
            if low >= high:
                raise InvalidModel(f"config.json: low_freq_factor ({low}) must be below high_freq_factor ({high})")
            return Rope(
                theta=theta,
                kind="llama3",
                factor=_number(parameters, "factor"),
                low_frequency_factor=low,
                high_frequency_factor=high,
                original_max_position_embeddings=_positive(parameters, "original_max_position_embeddings"),
            )
    raise _unsupported(f"rope type {kind!r}", "default, linear, llama3")


def _unsupported(what: str, supported: str) -> FatalError:
    return FatalError(
        ExitCode.UNSUPPORTED_ARCHITECTURE, f"{what} is not supported by the torch backend; supported: {supported}"
    )


def _positive(config: Mapping[str, Any], name: str, default: int | None = None) -> int:
    value = config.get(name)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise InvalidModel(f"config.json: {name} must be a positive integer, got {value!r}")
    return value


def _number(config: Mapping[str, Any], name: str, default: float | None = None) -> float:
    value = config.get(name)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
        raise InvalidModel(f"config.json: {name} must be a positive number, got {value!r}")
    return float(value)


def _boolean(config: Mapping[str, Any], name: str, default: bool) -> bool:
    value = config.get(name)
    value = default if value is None else value
    if not isinstance(value, bool):
        raise InvalidModel(f"config.json: {name} must be true or false, got {value!r}")
    return value
