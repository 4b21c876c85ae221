"""The shape of an EAGLE head as data, read from its config.json and from the names of its tensors. Needs no torch.

Called by the loader, before weights are read. Heads of the hub differ in names and in where they say what; this module
knows all of that, and what does not fit the model or is unknown is an error that names it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from neuron_runtime.backend.torch.architecture import DecoderConfig, boolean, decoder_config, positive, tensor_shapes
from neuron_runtime.checkpoint import FUSION, HEAD, Checkpoint, InvalidModel, TensorInfo, check_tensors
from neuron_runtime.errors import InvalidConfig

BLOCK, MIDLAYER = "layers.0.", "midlayer."
"""What names of tensors of the first block begin with, and what they may begin with in EAGLE 3."""
STATES = "eagle_aux_hidden_state_layer_ids"
EMBEDDING, FUSION_BIAS = "embed_tokens.weight", "fc.bias"
STATE_NORM, FUSED_NORM, NORM = "layers.0.hidden_norm.weight", "input_norm.weight", "norm.weight"
TOKENS, UNREAD = "d2t", "t2d"
"""The token of each draft token, as a distance, and which tokens have one, which follows from the former."""
URI = "$.speculation.model.uri"


@dataclass(frozen=True, slots=True)
class Eagle:
    """A head for a model. Its fields are those of EAGLE 3; EAGLE 1 has none of `states`.

    blocks: the shape of its decoder; the vocabulary is that of drafts.
    states: hidden states of the model that it reads: after so many blocks; none: those that the model's head reads.
    fuses_normed: they are normalised, together.
    normed_states: how many of them are normalised, one by one.
    adds_normed: its block adds to the normalised hidden state.
    keeps_normed: it continues with its hidden states after the last norm.
    """

    blocks: DecoderConfig
    states: tuple[int, ...]
    fuses_normed: bool
    normed_states: int
    adds_normed: bool
    keeps_normed: bool
    has_fusion_bias: bool
    has_embedding: bool
    """Otherwise it uses the model's."""
    has_head: bool
    """Otherwise it uses the model's."""
    has_tokens: bool

    @property
    def elements_per_token(self) -> int:
        """Keys and values of its own, and what it reads of the model."""
        return self.blocks.kv_elements_per_token + self.blocks.hidden_size


def read_eagle(checkpoint: Checkpoint, model: DecoderConfig) -> tuple[Eagle, Checkpoint]:
    """A head and its checkpoint, whose tensors have the names of this module.

    Raises:
        InvalidModel, FatalError (UNSUPPORTED_ARCHITECTURE): the checkpoint is wrong, or has what is unknown.
        InvalidConfig: it is for another model.
    """
    tensors = {_common(name): info for name, info in checkpoint.tensors.items()}
    eagle = _eagle(checkpoint.config, tensors, model)
    if eagle.has_tokens:
        _check_tokens(checkpoint, tensors.get(TOKENS), eagle.blocks.vocabulary_size)
    # Errors name the tensors as the checkpoint does.
    stored = {name: info.name for name, info in tensors.items()}
    block = MIDLAYER if any(name.startswith(MIDLAYER) for name in checkpoint.tensors) else BLOCK
    shapes = {
        stored.get(name, name.replace(BLOCK, block, 1)): shape for name, shape in head_shapes(eagle, model).items()
    }
    apart = {stored.get(name) for name in (TOKENS, UNREAD)}
    numbers = {name: info for name, info in checkpoint.tensors.items() if name not in apart}
    check_tensors(replace(checkpoint, tensors=numbers), shapes)
    return eagle, replace(checkpoint, tensors=tensors)


def _common(name: str) -> str:
    """The name of a tensor, whoever wrote it."""
    name = name.removeprefix("model.")
    return BLOCK + name.removeprefix(MIDLAYER) if name.startswith(MIDLAYER) else name


def _eagle(config: Mapping[str, Any], names: Collection[str], model: DecoderConfig) -> Eagle:
    is_third = STATE_NORM in names
    nested, extra = config.get("transformer_layer_config"), config.get("eagle_config")
    for name, value in (("transformer_layer_config", nested), ("eagle_config", extra)):
        if not isinstance(value, Mapping | None):
            raise InvalidModel(f"config.json: {name} must be an object")
    layer, extra = nested or config, extra or {}

    def says(name: str, default: bool = False) -> bool:
        return boolean(config if name in config else extra, name, default)

    for name, only in (("use_aux_hidden_state", True), ("add_para_norm", False), ("parallel_drafting", False)):
        if says(name, only) is not only:
            raise InvalidModel(f"config.json: {name} {not only} of EAGLE heads is not supported")
    blocks = _blocks(layer, names)
    vocabulary = positive(layer, "vocab_size")
    if vocabulary != model.vocabulary_size:
        message = f"it has {vocabulary} tokens, and the model {model.vocabulary_size}: they must be the same"
        raise InvalidConfig(URI, message)
    drafted = positive(config, "draft_vocab_size", vocabulary)
    if drafted > vocabulary:
        raise InvalidModel(f"config.json: draft_vocab_size must be at most vocab_size ({vocabulary}), got {drafted}")
    field = "target_hidden_size" if config.get("target_hidden_size") is not None else "hidden_size"
    read = positive(config if field in config else layer, field)
    if read != model.hidden_size or (not is_third and blocks.hidden_size != read):
        raise InvalidConfig(URI, f"its {field} is {read}, and the model's {model.hidden_size}: name a head made for it")
    if blocks.quantization is not None:
        raise InvalidModel("config.json: quantization_config of EAGLE heads is not supported")
    if is_third and blocks.num_layers != 1:
        raise InvalidModel(f"config.json: num_hidden_layers of EAGLE 3 must be 1, got {blocks.num_layers}")
    alone = blocks.hidden_size != model.hidden_size
    states = _states(config, extra, model) if is_third else ()
    return Eagle(
        blocks=replace(blocks, vocabulary_size=drafted),
        states=states,
        fuses_normed=is_third and says("norm_before_fc"),
        normed_states=len(states) if says("fc_norm") else 0,
        # Heads written by speculators add to the normalised one unless they say otherwise.
        adds_normed=is_third and says("norm_before_residual", nested is not None),
        keeps_normed=is_third and says("norm_output"),
        has_fusion_bias=FUSION_BIAS in names,
        has_embedding=alone or EMBEDDING in names,
        has_head=alone or HEAD in names or drafted != vocabulary,
        has_tokens=TOKENS in names or drafted != vocabulary,
    )


def _blocks(config: Mapping[str, Any], names: Collection[str]) -> DecoderConfig:
    """The shape of a head's blocks. All are Llama's; biases and norms are those that are there."""
    kinds = config.get("layer_types")
    windowless = config.get("use_sliding_window") is False
    found = decoder_config(
        {
            **config,
            "architectures": ["LlamaForCausalLM"],
            "sliding_window": None if windowless else config.get("sliding_window"),
            "layer_types": None if isinstance(kinds, list) and kinds == ["full_attention"] * len(kinds) else kinds,
        }
    )
    attention = "layers.0.self_attn"
    return replace(
        found,
        tied_embeddings=False,
        qkv_bias=f"{attention}.q_proj.bias" in names,
        output_bias=f"{attention}.o_proj.bias" in names,
        query_key_norm=f"{attention}.q_norm.weight" in names,
    )


def _states(config: Mapping[str, Any], extra: Mapping[str, Any], model: DecoderConfig) -> tuple[int, ...]:
    """After how many blocks of the model an EAGLE 3 head reads its hidden states."""
    count = model.num_layers
    given = config.get(STATES)
    numbers = given
    if not given:
        # vLLM names the block that reads a state, SGLang, in `eagle_config`, the one that makes it.
        given = extra.get(STATES)
        numbers = [one + 1 if isinstance(one, int) else one for one in given] if isinstance(given, list) else given
    found = numbers or [2, count // 2, count - 3]
    is_list = isinstance(found, list) and all(isinstance(one, int) and 0 <= one <= count for one in found)
    if not is_list or found != sorted(set(found)):
        what = f"got {given!r}" if given else "which it lacks: the usual ones are those of larger models"
        raise InvalidModel(f"config.json: {STATES} must name blocks of the model, which has {count}, in order; {what}")
    return tuple(found)


def head_shapes(eagle: Eagle, model: DecoderConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of numbers that the head must have."""
    blocks, hidden = eagle.blocks, eagle.blocks.hidden_size
    shapes = {_common(name): shape for name, shape in tensor_shapes(blocks).items()}
    shapes[EMBEDDING] = (model.vocabulary_size, hidden)
    fused = model.hidden_size * (len(eagle.states) or 1)
    if eagle.states:
        for name in "qkv":
            weight = f"layers.0.self_attn.{name}_proj.weight"
            shapes[weight] = (shapes[weight][0], 2 * hidden)
        shapes |= {STATE_NORM: (hidden,), FUSION: (hidden, fused)}
        shapes |= {FUSED_NORM: (fused,)} if eagle.fuses_normed else {}
        shapes |= {f"fc_norm.{number}.weight": (model.hidden_size,) for number in range(eagle.normed_states)}
    else:
        del shapes["layers.0.input_layernorm.weight"], shapes[NORM]
        shapes[FUSION] = (hidden, hidden + fused)
    if eagle.has_fusion_bias:
        shapes[FUSION_BIAS] = (hidden,)
    for name, is_there in ((EMBEDDING, eagle.has_embedding), (HEAD, eagle.has_head)):
        if not is_there:
            del shapes[name]
    return shapes


def _check_tokens(checkpoint: Checkpoint, tensor: TensorInfo | None, count: int) -> None:
    if tensor is None:
        raise InvalidModel(f"{checkpoint.folder}: tensor {TOKENS} is missing, which maps the {count} tokens of drafts")
    if tensor.shape != (count,) or tensor.dtype not in ("I64", "I32"):
        what = f"{checkpoint.folder / tensor.file}: tensor {tensor.name}"
        raise InvalidModel(f"{what} must have dtype I64 and shape [{count}], got {tensor.dtype} {list(tensor.shape)}")
