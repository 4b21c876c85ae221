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
    interleaved: bool = False
    """A pair of dimensions lies side by side; otherwise in the two halves of a head."""
    parts: tuple[int, ...] = ()
    """Of positions with three parts (time, row, column), the one that turns each pair; empty: positions have one."""


class Window(NamedTuple):
    """The positions that a token sees: the last `size`, or in chunks those from the last multiple of `size` on."""

    size: int
    is_chunk: bool = False

    def first(self, position: Any) -> Any:
        """The first one that a token at `position` sees, which may be below 0. Of numbers, or of arrays of them."""
        return position // self.size * self.size if self.is_chunk else position + 1 - self.size


class Tempering(NamedTuple):
    """Queries at position p are multiplied by `1 + scale * log(1 + floor((p + 1) / step))`."""

    step: float
    scale: float


class BlockNorms(NamedTuple):
    """The names of the norms of a block: of what attention and the MLP read, and of what they add. Empty: no norm."""

    before_attention: str = "input_layernorm"
    after_attention: str = ""
    before_mlp: str = "post_attention_layernorm"
    after_mlp: str = ""


PRE_NORMS = BlockNorms()
"""Of most families."""


Scores = Literal["softmax", "sigmoid"]
Activation = Literal["silu", "gelu_tanh"]


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """Where a family has its experts: fields of config.json, and tensors, whose names begin with that of their layer.

    dense_layers, expert_layers, step: which layers have experts; empty: the family has no such field.
    shared: the expert that all tokens have, beside the others, and the gate of its outputs, if it has one.
    """

    num_experts: str = "num_experts"
    intermediate_size: str = "moe_intermediate_size"
    shared_size: str = ""
    dense_layers: str = "mlp_only_layers"
    expert_layers: str = ""
    step: str = "decoder_sparse_step"
    router: str = "mlp.gate"
    expert: str = "mlp.experts"
    gate_up_down: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    shared: str = "mlp.shared_expert"
    shared_gate: str = "mlp.shared_expert_gate"


class Clamp(NamedTuple):
    alpha: float
    limit: float


@dataclass(frozen=True, slots=True)
class ExpertsConfig:
    """The experts of a mixture: each token has `top_k` of them, by the highest probabilities of the router.

    normalises: whether the shares of a token's experts are divided by their sum.
    shared_size: of the expert that all tokens have; 0: there is none.
    layers: whether each layer has experts, or one MLP.
    scores: how the router's outputs become shares.
    scales_inputs: whether a share is multiplied with what the expert reads; otherwise with what it writes.
    has_bias: of the router and of all experts.
    clamp: of the experts' activation, see `mlp.Clamped`; None: it is SwiGLU.
    """

    num_experts: int
    top_k: int
    intermediate_size: int
    normalises: bool
    shared_size: int
    layers: tuple[bool, ...]
    names: ExpertNames
    scores: Scores = "softmax"
    scales_inputs: bool = False
    has_bias: bool = False
    clamp: Clamp | None = None


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """Shape of a pre-norm decoder with RMSNorm, rotary positions, grouped queries and SwiGLU or experts."""

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
    windows: tuple[Window | None, ...]
    """Per layer, which positions a token sees; None for all of them."""
    quantization: Quantization | None = None
    """How weights of linear layers are stored."""
    experts: ExpertsConfig | None = None
    sinks: bool = False
    """Each head of queries has a score that takes part in the softmax, and no value."""
    unrotated: frozenset[int] = frozenset()
    """Layers without rotary positions."""
    tempering: Tempering | None = None
    """Of the queries of these layers."""
    plain_norm: bool = False
    """RMSNorm without weights over each head of queries and of keys, in the layers that rotate them."""
    norms: BlockNorms = PRE_NORMS
    norm_offset: float = 0.0
    """What is added to the stored weights of all norms."""
    activation: Activation = "silu"
    """Of gates of dense layers."""
    embedding_scale: float = 1.0
    """What embeddings are multiplied with, for the first block."""
    query_scalar: float | None = None
    """Scores are divided by its root; None: by that of `head_dim`."""
    local_rope: Rope | None = None
    """Rotary positions of `local_layers`; None: all layers have those of `rope`."""
    local_layers: frozenset[int] = frozenset()

    @property
    def attention_scale(self) -> float:
        return float((self.query_scalar or self.head_dim) ** -0.5)

    @property
    def kv_elements_per_token(self) -> int:
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim


class Stack(NamedTuple):
    """A tensor with the weights of all experts: `[experts, outputs, inputs]`, or as it says.

    parts: the ends of the names of what it has of each expert. Their rows alternate, or follow one another.
    transposed: `[experts, inputs, outputs]`.
    """

    parts: tuple[str, ...]
    alternate: bool = False
    transposed: bool = False


@dataclass(frozen=True, slots=True)
class Stored:
    """How checkpoints of a family name tensors, where that is not as the decoder does.

    stacks: by the ends of their names. replaced: parts of names, by what the decoder has. unread: what others begin
    with, which text does not need; also behind "model.".
    """

    stacks: Mapping[str, Stack] = field(default_factory=dict)
    replaced: Mapping[str, str] = field(default_factory=dict)
    unread: tuple[str, ...] = ()


def _stacks(*, alternate: bool) -> dict[str, Stack]:
    """Those of transformers: weights are transposed, but for MXFP4. ModelOpt has a scale for all of a layer's."""
    ends = {"": "weight", "_bias": "bias", "_blocks": "blocks", "_scales": "scales"}
    ends |= {"_weight_scale": "weight_scale", "_input_scale": "input_scale"}
    return {
        f"{name}{end}": Stack(tuple(f"{part}.{kind}" for part in parts), alternate, transposed=not end)
        for name, parts in (("gate_up_proj", ("gate_proj", "up_proj")), ("down_proj", ("down_proj",)))
        for end, kind in ends.items()
    }


@dataclass(frozen=True, slots=True)
class TorchFamily:
    """How one architecture differs from the others.

    defaults: values of fields that config.json leaves out, as in the configuration class of transformers. A null field
        counts as given.
    fixed: fields with only one supported value, which is also their default. Other values are refused, because
        transformers would ignore them.
    output_bias: whether `attention_bias` also applies to the output projection.
    dense_size: the field with the size of dense layers.
    rope: where config.json says nothing of rotary positions.
    local_theta: of the rotary positions of layers with a window, where config.json has none; 0: those are as in others.
    layer_types: those of layers, where config.json does not name them; None: windows follow from other fields.
    more: more fields of `DecoderConfig`.
    text: the field that has the text model's fields. stored: how checkpoints name its tensors, see `naming.py`.
    """

    defaults: Mapping[str, Any] = field(default_factory=dict)
    fixed: Mapping[str, Any] = field(default_factory=dict)
    output_bias: bool = True
    query_key_norm: bool = False
    experts: ExpertNames | None = None
    scores: Scores = "softmax"
    clamps: bool = False
    """Its experts have biases and the activation of `mlp.Clamped`."""
    theta: float = 10_000.0
    """Of rotary positions, where config.json has none."""
    rope: Mapping[str, Any] = field(default_factory=dict)
    local_theta: float = 0.0
    interleaved: bool = False
    parts: Callable[[tuple[int, int, int]], list[int]] | None = None
    """Of rotary positions with three parts, the one of each pair of dimensions, by their numbers (`mrope_section`)."""
    sections: tuple[int, int, int] = (16, 24, 24)
    """Where config.json has none."""
    dense_size: str = "intermediate_size"
    layer_types: Callable[[Mapping[str, Any], int], list[str]] | None = None
    more: Callable[[Mapping[str, Any], int], Mapping[str, Any]] = lambda config, num_layers: {}
    text: str = ""
    stored: Stored | None = None


# For every architecture.
FIXED: Mapping[str, Any] = {"hidden_act": "silu", "partial_rotary_factor": 1.0, "is_causal": True, "use_mrope": False}

# Qwen's sliding layers begin at max_window_layers; where all layers slide (Mistral), that is layer 0.
_QWEN_WINDOW = {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28}


def _alternating(config: Mapping[str, Any], num_layers: int) -> list[str]:
    return [("sliding_attention", "full_attention")[layer % 2] for layer in range(num_layers)]


def _by_rotation(config: Mapping[str, Any], num_layers: int) -> list[str]:
    unrotated = _unrotated(config, num_layers)
    return ["full_attention" if layer in unrotated else "chunked_attention" for layer in range(num_layers)]


def _unrotated(config: Mapping[str, Any], num_layers: int) -> frozenset[int]:
    """Layers of Llama 4 without rotary positions: those with a 0 in `no_rope_layers`."""
    every = positive(config, "no_rope_layer_interval")
    rotated = config.get("no_rope_layers") or [(layer + 1) % every for layer in range(num_layers)]
    if not isinstance(rotated, list) or len(rotated) < num_layers or not all(isinstance(one, int) for one in rotated):
        raise InvalidModel(f"config.json: no_rope_layers must be a list of num_hidden_layers ({num_layers}) 0 and 1")
    return frozenset(layer for layer in range(num_layers) if not rotated[layer])


def _llama4(config: Mapping[str, Any], num_layers: int) -> dict[str, Any]:
    # Early files have a number in the place of true.
    tempers = bool(config["attn_temperature_tuning"])
    return {
        "unrotated": _unrotated(config, num_layers),
        "tempering": Tempering(_number(config, "floor_scale"), _number(config, "attn_scale")) if tempers else None,
        "plain_norm": boolean(config, "use_qk_norm", True),
    }


def _in_a_row(sections: tuple[int, int, int]) -> list[int]:
    return [part for part, size in enumerate(sections) for _ in range(size)]


def _by_turns(sections: tuple[int, int, int]) -> list[int]:
    """Rows and columns have every third pair, as many as they may; the others are of the time."""
    return [place % 3 if place < 3 * sections[place % 3] else 0 for place in range(sum(sections))]


def _by_pattern(config: Mapping[str, Any], num_layers: int) -> list[str]:
    every = positive(config, "sliding_window_pattern")
    return ["sliding_attention" if (layer + 1) % every else "full_attention" for layer in range(num_layers)]


def _gemma3(config: Mapping[str, Any], num_layers: int) -> dict[str, Any]:
    return {
        "norms": BlockNorms(
            after_attention="post_attention_layernorm",
            before_mlp="pre_feedforward_layernorm",
            after_mlp="post_feedforward_layernorm",
        ),
        "norm_offset": 1.0,
        "activation": "gelu_tanh",
        "embedding_scale": positive(config, "hidden_size") ** 0.5,
        "query_scalar": _number(config, "query_pre_attn_scalar"),
    }


_GEMMA3 = TorchFamily(
    defaults={
        "vocab_size": 262_208,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 131_072,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "sliding_window_pattern": 6,
        "tie_word_embeddings": True,
    },
    fixed={
        "hidden_activation": "gelu_pytorch_tanh",
        "mlp_bias": False,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        "use_bidirectional_attention": False,
    },
    query_key_norm=True,
    theta=1_000_000.0,
    local_theta=10_000.0,
    layer_types=_by_pattern,
    more=_gemma3,
)

_LLAMA4 = TorchFamily(
    defaults={
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rms_norm_eps": 1e-5,
        "num_local_experts": 16,
        "num_experts_per_tok": 1,
        "intermediate_size_mlp": 16384,
        "no_rope_layer_interval": 4,
        "attention_chunk_size": 8192,
        "attn_temperature_tuning": True,
        "floor_scale": 8192,
        "attn_scale": 0.1,
    },
    fixed={"mlp_bias": False, "norm_topk_prob": False},
    experts=ExpertNames(
        num_experts="num_local_experts",
        intermediate_size="intermediate_size",
        shared_size="intermediate_size",
        dense_layers="",
        expert_layers="moe_layers",
        step="interleave_moe_layer_step",
        router="mlp.router",
        shared_gate="",
    ),
    scores="sigmoid",
    theta=500_000.0,
    interleaved=True,
    dense_size="intermediate_size_mlp",
    layer_types=_by_rotation,
    more=_llama4,
    stored=Stored(_stacks(alternate=False), replaced={".feed_forward.": ".mlp."}),
)

_MISTRAL = TorchFamily(
    defaults={"num_key_value_heads": 8, "sliding_window": 4096},
    fixed={"attention_bias": False, "mlp_bias": False, "use_sliding_window": True, "max_window_layers": 0},
)

_MISTRAL_WITH_PICTURES = replace(
    _MISTRAL,
    # Files leave out what a part of a model has of its class.
    defaults={
        **_MISTRAL.defaults,
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "max_position_embeddings": 131072,
    },
    fixed={**_MISTRAL.fixed, "model_type": "mistral", "tie_word_embeddings": False},
    text="text_config",
    stored=Stored(replaced={"language_model.": ""}, unread=("vision_tower.", "multi_modal_projector.")),
)

FAMILIES: Mapping[str, TorchFamily] = {
    "LlamaForCausalLM": TorchFamily(fixed={"sliding_window": None}),
    "MistralForCausalLM": _MISTRAL,
    "LlavaForConditionalGeneration": _MISTRAL_WITH_PICTURES,
    "Mistral3ForConditionalGeneration": _MISTRAL_WITH_PICTURES,
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
    "GptOssForCausalLM": TorchFamily(
        defaults={
            "num_key_value_heads": 8,
            "head_dim": 64,
            "rms_norm_eps": 1e-5,
            "attention_bias": True,
            "sliding_window": 128,
            "num_local_experts": 128,
            "num_experts_per_tok": 4,
            "swiglu_alpha": 1.702,
            "swiglu_limit": 7.0,
        },
        # A softmax over the chosen experts is one over all of them, divided by the sum of theirs.
        fixed={"mlp_bias": False, "norm_topk_prob": True},
        experts=ExpertNames(
            num_experts="num_local_experts",
            intermediate_size="intermediate_size",
            dense_layers="",
            step="",
            router="mlp.router",
        ),
        clamps=True,
        theta=150_000.0,
        rope={
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
        layer_types=_alternating,
        more=lambda config, num_layers: {"sinks": True},
        stored=Stored(_stacks(alternate=True)),
    ),
    "Llama4ForCausalLM": _LLAMA4,
    "Llama4ForConditionalGeneration": replace(
        _LLAMA4,
        text="text_config",
        fixed={**_LLAMA4.fixed, "tie_word_embeddings": False},
        stored=Stored(
            _stacks(alternate=False),
            replaced={".feed_forward.": ".mlp.", "language_model.": ""},
            unread=("vision_model.", "multi_modal_projector."),
        ),
    ),
    "Qwen2_5_VLForConditionalGeneration": TorchFamily(
        defaults={
            "num_key_value_heads": 8,
            "max_position_embeddings": 32768,
            "rms_norm_eps": 1e-5,
            **_QWEN_WINDOW,
            "max_window_layers": 80,
        },
        fixed={"attention_bias": True, "mlp_bias": False},
        output_bias=False,
        theta=1_000_000.0,
        parts=_in_a_row,
        text="text_config",
        stored=Stored(replaced={"language_model.": ""}, unread=("visual.",)),
    ),
    "Qwen3VLForConditionalGeneration": TorchFamily(
        defaults={"num_key_value_heads": 32, "head_dim": 128, "max_position_embeddings": 128_000},
        fixed={"mlp_bias": False, "use_sliding_window": False},
        query_key_norm=True,
        theta=5_000_000.0,
        parts=_by_turns,
        sections=(24, 20, 20),
        text="text_config",
        stored=Stored(replaced={"language_model.": ""}, unread=("visual.",)),
    ),
    "Gemma3ForCausalLM": _GEMMA3,
    "Gemma3ForConditionalGeneration": replace(
        _GEMMA3,
        text="text_config",
        stored=Stored(
            # As transformers writes them, and as some of its releases did.
            replaced={"language_model.model.": "model.", "model.language_model.": "model.", "language_model.": ""},
            unread=("vision_tower.", "multi_modal_projector."),
        ),
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
    config = _filled_in(_text_of(config, family.text), architecture)
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
    experts = _experts(config, family, family.experts, num_layers) if family.experts else None
    more = family.more(config, num_layers)
    rope, local_rope = _ropes(config, max_position_embeddings, family)
    rope = replace(rope, interleaved=family.interleaved, parts=_parts(config, family, head_dim))
    windows = _windows(config, architecture, num_layers)
    return DecoderConfig(
        architecture=architecture,
        vocabulary_size=positive(config, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=0 if experts and all(experts.layers) else positive(config, family.dense_size),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_position_embeddings=max_position_embeddings,
        rms_norm_epsilon=_number(config, "rms_norm_eps", 1e-6),
        # A norm after rotation takes the scale back.
        rope=replace(rope, scale=1.0) if more.get("plain_norm") else rope,
        tied_embeddings=boolean(config, "tie_word_embeddings", False),
        qkv_bias=attention_bias,
        output_bias=attention_bias and family.output_bias,
        mlp_bias=boolean(config, "mlp_bias", False),
        query_key_norm=family.query_key_norm,
        # A window as long as the longest sequence has no effect.
        windows=tuple(
            None if window is None or window.size >= max_position_embeddings else window for window in windows
        ),
        quantization=quantization,
        experts=experts,
        local_rope=local_rope,
        local_layers=frozenset(layer for layer, window in enumerate(windows) if window and local_rope),
        **more,
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
        if config.sinks:
            shapes[f"{prefix}.self_attn.sinks"] = (config.num_heads,)
        if config.query_key_norm:
            shapes[f"{prefix}.self_attn.q_norm.weight"] = (config.head_dim,)
            shapes[f"{prefix}.self_attn.k_norm.weight"] = (config.head_dim,)
        shapes |= {f"{prefix}.{name}.weight": (hidden,) for name in config.norms if name}
    shapes["model.norm.weight"] = (hidden,)
    if not config.tied_embeddings:
        shapes["lm_head.weight"] = (config.vocabulary_size, hidden)
    return shapes


def _expert_shapes(experts: ExpertsConfig, hidden: int) -> dict[str, tuple[int, int, bool]]:
    """Rows, columns and whether there is a bias, by the names of linear layers."""
    names, inner, shared, bias = experts.names, experts.intermediate_size, experts.shared_size, experts.has_bias

    def mlp(name: str, size: int) -> dict[str, tuple[int, int, bool]]:
        gate, up, down = (f"{name}.{part}" for part in names.gate_up_down)
        return {gate: (size, hidden, bias), up: (size, hidden, bias), down: (hidden, size, bias)}

    shapes = {names.router: (experts.num_experts, hidden, bias)}
    for number in range(experts.num_experts):
        shapes |= mlp(f"{names.expert}.{number}", inner)
    if shared:
        shapes |= mlp(names.shared, shared)
    if shared and names.shared_gate:
        shapes[names.shared_gate] = (1, hidden, False)
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


def _text_of(config: Mapping[str, Any], part: str) -> Mapping[str, Any]:
    """The fields of the text model, which this field has, if any."""
    # The first files of Qwen2.5-VL have none, and these fields beside the others.
    text = config.get(part, {}) if part else {}
    if not isinstance(text, Mapping):
        raise InvalidModel(f"config.json: {part} must be an object")
    return {**config, **text}


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


LAYER_TYPES: Mapping[str, tuple[str, bool]] = {
    "sliding_attention": ("sliding_window", False),
    "chunked_attention": ("attention_chunk_size", True),
}
"""Kinds of layers beside `full_attention`: the field with the size of their `Window`, and whether it is a chunk."""


def _windows(config: Mapping[str, Any], architecture: str, num_layers: int) -> tuple[Window | None, ...]:
    """The window of each layer, None where a layer sees everything."""
    family, kinds = FAMILIES[architecture], config.get("layer_types")
    if family.layer_types is not None:
        return _windows_by_kind(config, architecture, kinds or family.layer_types(config, num_layers), num_layers)
    window: Window | None = None
    first: Any = 0
    if boolean(config, "use_sliding_window", False) and config.get("sliding_window") is not None:
        window, first = Window(positive(config, "sliding_window")), config.get("max_window_layers")
    if isinstance(first, bool) or not isinstance(first, int) or first < 0:
        raise InvalidModel(f"config.json: max_window_layers must be an integer of at least 0, got {first!r}")
    by_number = tuple(window if layer >= first else None for layer in range(num_layers))
    if kinds is None:
        return by_number
    allowed = config if window else {**config, "sliding_window": None}
    by_kind = _windows_by_kind(allowed, architecture, kinds, num_layers)
    if by_kind != by_number and "max_window_layers" not in family.defaults:
        size = window and window.size
        raise _unsupported(f"layer_types that differ from sliding_window {size} of {architecture}", "no layer_types")
    return by_kind


def _windows_by_kind(
    config: Mapping[str, Any], architecture: str, kinds: Any, num_layers: int
) -> tuple[Window | None, ...]:
    if not isinstance(kinds, list) or len(kinds) != num_layers:
        raise InvalidModel(f"config.json: layer_types must be a list of num_hidden_layers ({num_layers}) names")
    own = "chunked_attention" if "attention_chunk_size" in FAMILIES[architecture].defaults else "sliding_attention"
    windows: dict[Any, Window | None] = {"full_attention": None}
    for kind in kinds:
        if kind not in ("full_attention", own):
            raise _unsupported(f"layer_types {kind!r} of {architecture}", f"full_attention, {own}")
        if kind in windows:
            continue
        size, is_chunk = LAYER_TYPES[kind]
        if config.get(size) is None:
            also = " or use_sliding_window false" if size == "sliding_window" else ""
            raise InvalidModel(f"config.json: layer_types names {kind}, but {size} is null{also}")
        windows[kind] = Window(positive(config, size), is_chunk)
    return tuple(windows[kind] for kind in kinds)


def _experts(config: Mapping[str, Any], family: TorchFamily, names: ExpertNames, num_layers: int) -> ExpertsConfig:
    dense, sparse = (_layers(config, name) if name else None for name in (names.dense_layers, names.expert_layers))
    if sparse == []:  # Llama Guard 4, whose numbers of experts are 0
        config = {**config, **dict.fromkeys((names.step, names.num_experts, "num_experts_per_tok"), 1)}
    step = positive(config, names.step, 1) if names.step else 1
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
        layers=tuple(
            layer not in (dense or ()) and (layer + 1) % step == 0 if sparse is None else layer in sparse
            for layer in range(num_layers)
        ),
        names=names,
        scores=family.scores,
        scales_inputs=family.scores == "sigmoid",
        has_bias=family.clamps,
        clamp=Clamp(_number(config, "swiglu_alpha"), _number(config, "swiglu_limit")) if family.clamps else None,
    )


def _layers(config: Mapping[str, Any], name: str) -> list[int] | None:
    layers = config.get(name)
    if layers is not None and not (isinstance(layers, list) and all(isinstance(layer, int) for layer in layers)):
        raise InvalidModel(f"config.json: {name} must be a list of numbers of layers, got {layers!r}")
    return layers


def _parts(config: Mapping[str, Any], family: TorchFamily, head_dim: int) -> tuple[int, ...]:
    """See `Rope.parts`."""
    if family.parts is None:
        return ()
    stated = (config.get(name) for name in ("rope_parameters", "rope_scaling"))
    said = (one.get("mrope_section") for one in stated if isinstance(one, Mapping))
    sections = next((one for one in said if one is not None), family.sections)
    match sections:
        case [int(time), int(row), int(column)] if min(sections) >= 0 and sum(sections) == head_dim // 2:
            return tuple(family.parts((time, row, column)))
    message = f"config.json: mrope_section must be three integers whose sum is half of head_dim ({head_dim // 2})"
    raise InvalidModel(f"{message}, got {sections}")


def _without_parts(rope: Any) -> Any:
    """What is said of rotary positions beside their parts; `mrope` is the `default` of positions with parts."""
    if not isinstance(rope, Mapping):
        return rope
    kept = {name: value for name, value in rope.items() if name not in ("mrope_section", "mrope_interleaved")}
    return {name: "default" if (name, value) == ("type", "mrope") else value for name, value in kept.items()}


def _ropes(config: Mapping[str, Any], max_position_embeddings: int, family: TorchFamily) -> tuple[Rope, Rope | None]:
    """Those of layers that see everything, and of those with a window where they differ."""
    if family.parts is not None:
        config = {**config, **{name: _without_parts(config.get(name)) for name in ("rope_parameters", "rope_scaling")}}
    if not family.local_theta:
        return _rope(config, max_position_embeddings, family), None
    # transformers 5 writes an object for each kind of layer; transformers 4 writes fields of both side by side.
    kinds = config.get("rope_parameters") or {}
    if not isinstance(kinds, Mapping) or kinds.keys() - {"full_attention", "sliding_attention"}:
        raise InvalidModel("config.json: rope_parameters must have full_attention and sliding_attention, and no more")
    local = {"rope_parameters": kinds.get("sliding_attention"), "rope_theta": config.get("rope_local_base_freq")}
    return (
        _rope({**config, "rope_parameters": kinds.get("full_attention")}, max_position_embeddings, family),
        _rope(local, max_position_embeddings, replace(family, theta=family.local_theta)),
    )


def _rope(config: Mapping[str, Any], max_position_embeddings: int, family: TorchFamily) -> Rope:
    # transformers 5 writes one object, rope_parameters; transformers 4 writes rope_theta beside rope_scaling.
    for name in ("rope_parameters", "rope_scaling"):
        if not isinstance(config.get(name) or {}, Mapping):
            raise InvalidModel(f"config.json: {name} must be an object")
    new, old = config.get("rope_parameters") or {}, config.get("rope_scaling") or {}
    old = old if new else old or family.rope
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
    theta = _number(parameters, "rope_theta", family.theta)
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
    for low, high, may_equal in (("low_freq_factor", "high_freq_factor", True), ("beta_slow", "beta_fast", False)):
        least, most = getattr(rope, low), getattr(rope, high)
        if least > most or (least == most and not may_equal):
            must = "must not be above" if may_equal else "must be below"
            raise InvalidModel(f"config.json: {low} ({least}) {must} {high} ({most})")
    for name, beta in (("beta_fast", rope.beta_fast), ("beta_slow", rope.beta_slow)):
        if not 1e-9 <= beta <= 1e9:
            raise InvalidModel(f"config.json: {name} must be within 1e-9 and 1e9, got {beta}")
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
