"""Models that compute vectors as data, read from config.json: encoders, and decoders without their heads.

Called by the loader, by the memory arithmetic and by `inspect`, which must not import torch; this module does not. A
new family is a table entry. What becomes of the hidden states is in `recipes.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from neuron_runtime.backend.torch.architecture import (
    FAMILIES,
    MAX_LAYERS,
    DecoderConfig,
    decoder_config,
    positive,
    tensor_shapes,
)
from neuron_runtime.checkpoint import Checkpoint, InvalidModel, TensorInfo
from neuron_runtime.errors import ExitCode, FatalError
from neuron_runtime.quantization import Quantization, quantization_of
from neuron_runtime.recipes import Pooling

ACTIVATIONS = {"gelu": "none", "gelu_new": "tanh", "gelu_pytorch_tanh": "tanh"}
"""How GELU is approximated, by the names that config.json has."""

Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class EncoderConfig:
    """Shape of a post-norm encoder with LayerNorm, learned positions, all heads alike and an MLP with GELU. Each token
    sees all tokens of its text."""

    architecture: str
    vocabulary_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_positions: int
    """In the table, of which a text has the last `max_position_embeddings`."""
    first_position: int
    num_types: int
    epsilon: float
    approximate: str

    @property
    def num_kv_heads(self) -> int:
        return self.num_heads

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads

    @property
    def max_position_embeddings(self) -> int:
        return self.num_positions - self.first_position


class Head(NamedTuple):
    """What makes a score of the hidden states: a layer with tanh, which may be missing, and one with one output."""

    inner: str
    outer: str
    has_bias: bool
    pooling: Pooling


@dataclass(frozen=True, slots=True)
class VectorModel:
    """body: what computes the hidden states. head: of a model that scores pairs of texts; None: of one that embeds."""

    architecture: str
    body: EncoderConfig | DecoderConfig
    head: Head | None = None

    @property
    def quantization(self) -> Quantization | None:
        return self.body.quantization if isinstance(self.body, DecoderConfig) else None


class _Row(NamedTuple):
    """prefix: of the body's tensors, which checkpoints of a bare body lack. offset: whether positions begin behind that
    of the padding token."""

    prefix: str
    offset: bool
    head: Head | None = None


_BERT = Head("pooler.dense", "classifier", True, "cls")
_ROBERTA = Head("classifier.dense", "classifier.out_proj", True, "cls")
_DECODER = Head("", "score", False, "lasttoken")

ENCODERS: Mapping[str, _Row] = {
    "BertModel": _Row("bert.", False),
    "BertForMaskedLM": _Row("bert.", False),
    "BertForSequenceClassification": _Row("bert.", False, _BERT),
    **{
        f"{name}{end}": _Row("roberta.", True, head)
        for name in ("Roberta", "XLMRoberta", "Camembert")
        for end, head in (("Model", None), ("ForMaskedLM", None), ("ForSequenceClassification", _ROBERTA))
    },
}
DECODERS: Mapping[str, tuple[str, Head | None]] = {
    **{f"{name}ForCausalLM": (f"{name}ForCausalLM", None) for name in ("Llama", "Mistral", "Qwen2", "Qwen3")},
    **{f"{name}Model": (f"{name}ForCausalLM", None) for name in ("Llama", "Mistral", "Qwen2", "Qwen3")},
    **{
        f"{name}ForSequenceClassification": (f"{name}ForCausalLM", _DECODER)
        for name in ("Llama", "Mistral", "Qwen2", "Qwen3")
    },
}
"""Decoders by the names of all their classes: the class that generates, and what makes a score."""
ARCHITECTURES = (*ENCODERS, *DECODERS)


def architecture_of(config: Mapping[str, Any]) -> str:
    """The class of a model, if it is one that computes vectors; else empty."""
    names = config.get("architectures")
    return next((name for name in names if name in ARCHITECTURES), "") if isinstance(names, list) else ""


def computes_only_vectors(config: Mapping[str, Any]) -> bool:
    """Whether a model has nothing with which it could generate text."""
    name = architecture_of(config)
    return bool(name) and name not in FAMILIES


def vector_model(config: Mapping[str, Any]) -> VectorModel:
    """Raises FatalError (UNSUPPORTED_ARCHITECTURE) and InvalidModel as `decoder_config`."""
    name = architecture_of(config)
    if not name:
        raise _unsupported(f"architecture {config.get('architectures')}", ", ".join(sorted(ARCHITECTURES)))
    if name in ENCODERS:
        row = ENCODERS[name]
        model = VectorModel(name, _encoder(name, config, row), row.head)
    else:
        generating, head = DECODERS[name]
        body = replace(decoder_config({**config, "architectures": [generating]}), tied_embeddings=True)
        model = VectorModel(name, body, head)
    if model.head is not None and (labels := _num_labels(config)) != 1:
        raise _unsupported(f"{name} with {labels} labels", "1 label, a score")
    return model


def _encoder(name: str, config: Mapping[str, Any], row: _Row) -> EncoderConfig:
    if quantization_of(config):
        raise _unsupported(f"quantization_config of {name}", "none")
    for field, only in (("position_embedding_type", "absolute"), ("is_decoder", False)):
        if config.get(field, only) not in (None, only):
            raise _unsupported(f"{field} {config[field]!r} of {name}", repr(only))
    act = config.get("hidden_act", "gelu")
    if act not in ACTIVATIONS:
        raise _unsupported(f"hidden_act {act!r} of {name}", ", ".join(ACTIVATIONS))
    epsilon = config.get("layer_norm_eps", 1e-12)
    if isinstance(epsilon, bool) or not isinstance(epsilon, int | float) or not 0 < epsilon < 1:
        raise InvalidModel(f"config.json: layer_norm_eps must be a number between 0 and 1, got {epsilon!r}")
    padding = config.get("pad_token_id", 1)
    first = (padding if isinstance(padding, int) and padding >= 0 else 1) + 1 if row.offset else 0
    hidden, heads = positive(config, "hidden_size"), positive(config, "num_attention_heads")
    layers, positions = positive(config, "num_hidden_layers"), positive(config, "max_position_embeddings")
    if hidden % heads:
        raise InvalidModel(f"config.json: hidden_size ({hidden}) must be a multiple of num_attention_heads ({heads})")
    if layers > MAX_LAYERS:
        raise InvalidModel(f"config.json: num_hidden_layers must be at most {MAX_LAYERS}, got {layers}")
    if positions <= first:
        raise InvalidModel(f"config.json: max_position_embeddings must be above {first}, got {positions}")
    return EncoderConfig(
        architecture=name,
        vocabulary_size=positive(config, "vocab_size"),
        hidden_size=hidden,
        intermediate_size=positive(config, "intermediate_size"),
        num_layers=layers,
        num_heads=heads,
        num_positions=positions,
        first_position=first,
        num_types=positive(config, "type_vocab_size", 2),
        epsilon=float(epsilon),
        approximate=ACTIVATIONS[act],
    )


def _num_labels(config: Mapping[str, Any]) -> int:
    names = config.get("id2label")
    return len(names) if isinstance(names, Mapping) else positive(config, "num_labels", 2)


def shapes_of(model: VectorModel) -> Shapes:
    """Name and shape of every tensor that is read, by the names that `as_named` gives them."""
    body = model.body
    shapes = _encoder_shapes(body) if isinstance(body, EncoderConfig) else tensor_shapes(body)
    if model.head is not None:
        hidden = body.hidden_size
        shapes |= _linear(model.head.inner, hidden, hidden, bias=True) if model.head.inner else {}
        shapes |= _linear(model.head.outer, 1, hidden, bias=model.head.has_bias)
    return shapes


def _encoder_shapes(body: EncoderConfig) -> Shapes:
    hidden, inner = body.hidden_size, body.intermediate_size
    shapes: Shapes = {
        "embeddings.word_embeddings.weight": (body.vocabulary_size, hidden),
        "embeddings.position_embeddings.weight": (body.num_positions, hidden),
        "embeddings.token_type_embeddings.weight": (body.num_types, hidden),
    }
    shapes |= _norm("embeddings.LayerNorm", hidden)
    for layer in range(body.num_layers):
        prefix = f"encoder.layer.{layer}"
        for name in ("query", "key", "value"):
            shapes |= _linear(f"{prefix}.attention.self.{name}", hidden, hidden)
        shapes |= _linear(f"{prefix}.attention.output.dense", hidden, hidden)
        shapes |= _norm(f"{prefix}.attention.output.LayerNorm", hidden)
        shapes |= _linear(f"{prefix}.intermediate.dense", inner, hidden)
        shapes |= _linear(f"{prefix}.output.dense", hidden, inner)
        shapes |= _norm(f"{prefix}.output.LayerNorm", hidden)
    return shapes


def _linear(name: str, rows: int, columns: int, *, bias: bool = True) -> Shapes:
    return {f"{name}.weight": (rows, columns), **({f"{name}.bias": (rows,)} if bias else {})}


def _norm(name: str, size: int) -> Shapes:
    return {f"{name}.weight": (size,), f"{name}.bias": (size,)}


def as_named(checkpoint: Checkpoint, model: VectorModel) -> Checkpoint:
    """The same checkpoint with the names of `shapes_of`, without tensors that no vector depends on."""
    return replace(checkpoint, tensors=dict(_named(checkpoint, model)))


def _named(checkpoint: Checkpoint, model: VectorModel) -> Iterator[tuple[str, TensorInfo]]:
    of_encoder = isinstance(model.body, EncoderConfig)
    prefix = ENCODERS[model.architecture].prefix if of_encoder else "model."
    of_head = tuple(filter(None, (model.head.inner, model.head.outer))) if model.head else ()
    for stored, info in checkpoint.tensors.items():
        name = stored.removeprefix(prefix)
        if of_encoder:
            name = name.replace("LayerNorm.gamma", "LayerNorm.weight").replace("LayerNorm.beta", "LayerNorm.bias")
            is_unread = name.startswith(UNREAD) and not name.startswith(of_head)
        else:
            is_unread = False
            name = name if name.startswith(("lm_head.", *of_head)) else f"model.{name}"
        if not is_unread:
            yield name, info


UNREAD = ("pooler.", "cls.", "lm_head.", "embeddings.position_ids", "embeddings.token_type_ids")
"""Beginnings of the names of tensors that encoders do not read: other heads, and numbers in a row."""


def _unsupported(what: str, supported: str) -> FatalError:
    return FatalError(
        ExitCode.UNSUPPORTED_ARCHITECTURE,
        f"{what} computes no vectors on the torch backend; supported: {supported}",
    )
