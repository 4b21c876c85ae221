"""Quantized weights as NxD Inference computes them: from which checkpoints, and what its NeuronConfig is told of them.

It has one form: 8 bits, a scale for each row of a weight. Called by `models` and `settings` with config.json, and by
whoever lets the library read a checkpoint. Pure: of tensors it sees names, shapes and types. Weights in other forms are
converted before.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from neuron_runtime.backend.neuron import model_config
from neuron_runtime.backend.neuron.model_config import number_of
from neuron_runtime.checkpoint import HEAD, Checkpoint, InvalidModel
from neuron_runtime.errors import FatalError
from neuron_runtime.quantization import CONVERTER, WHOLE, Quantization, quantization_of

MAX_LAYERS = 10_000
PER_CHANNEL = "per_channel_symmetric"
"""NxD Inference's default, a scale for each tensor, corrupts what is excluded."""
INT8, FP8 = "int8 per channel", "fp8 per channel"
FORMS = (INT8, FP8)
"""Of `form_of`, those that NxD Inference computes."""
DTYPES = {INT8: "int8", FP8: "f8e4m3"}
"""Its names of them. The compiler is told of FP8 only by this one."""
EXCLUDED = "modules_to_not_convert"
OF_WEIGHTS = ("quantized", "quantization_type", "quantization_dtype", EXCLUDED)
"""The arguments of NeuronConfig that follow from the checkpoint."""
CHECKPOINT = "quantized_checkpoints_path"
ENVIRONMENT = {"XLA_HANDLE_SPECIAL_SCALAR": "1", "UNSAFE_FP8FNCAST": "1"}
"""Without these, which the libraries read when they are imported, FP8 is computed wrongly."""
_OF_DRAFT = ("layers", "lm_head", "fc")

_ATTENTION, _MLP = ("q_proj", "k_proj", "v_proj", "o_proj"), ("gate_proj", "up_proj", "down_proj")
LINEAR = (*_ATTENTION, *_MLP)
"""Last words of the linear modules of a layer."""
_HEAD = HEAD.removesuffix(".weight")


@dataclass(frozen=True, kw_only=True)
class Quantized:
    """What the graphs have of quantized weights. Their values and scales change no graph."""

    dtype: str
    excluded: tuple[str, ...]
    """Words by which NxD Inference finds the modules that are not quantized, see `words_for`."""

    @property
    def arguments(self) -> dict[str, Any]:
        values = (True, PER_CHANNEL, self.dtype, list(self.excluded))
        return dict(zip(OF_WEIGHTS, values, strict=True))


def form_of(model: Mapping[str, Any]) -> str:
    """How the weights of a model are stored, in words; "": they are not quantized."""
    method = model_config.quantization_of(model)
    try:
        stored = quantization_of(model) if method == "compressed-tensors" else None
    except FatalError:
        return method
    if stored is None or stored.in_each > 1:
        return method
    form = f"{'int8' if stored.stored == 'I8' else 'fp8'} {_spread(stored)}"
    return form if form != FP8 or CONVERTER in model else f"{FP8} up to 448"


def _spread(stored: Quantization) -> str:
    rows, columns = stored.block
    if columns != WHOLE:
        return "in blocks"
    return "per tensor" if rows == WHOLE else "per channel" if rows == 1 else "in blocks"


def weights_of(model: Mapping[str, Any], given: Collection[str] = (), *, fused: bool = False) -> Quantized | None:
    """What config.json says of quantized weights; None: NxD Inference is told of none.

    Args:
        model: config.json of a dense family.
        given: words for the excluded modules, which are taken if they mean the same.
        fused: whether the library has one matrix for queries, keys and values.
    """
    form = form_of(model)
    if form not in FORMS:
        return None
    paths = {name: _path(name, fused=fused) for name in modules_of(model)}
    without = excluded_of(model)
    excluded = {path for name, path in paths.items() if name in without}
    converted = {*paths.values()} - excluded
    same = given and {path for path in paths.values() if any(word in path for word in given)} == excluded
    return Quantized(dtype=DTYPES[form], excluded=tuple(sorted(given if same else words_for(excluded, converted))))


def modules_of(model: Mapping[str, Any]) -> list[str]:
    """The linear modules of a dense model, as checkpoints name them. Raises InvalidModel."""
    layers = number_of(model, "num_hidden_layers")
    if layers > MAX_LAYERS:
        raise InvalidModel(f"config.json: num_hidden_layers is {layers}, and the limit is {MAX_LAYERS}")
    inner = (*(f"self_attn.{one}" for one in _ATTENTION), *(f"mlp.{one}" for one in _MLP))
    return [*(f"model.layers.{number}.{one}" for number in range(layers) for one in inner), _HEAD]


def excluded_of(model: Mapping[str, Any]) -> set[str]:
    """The linear modules that a checkpoint of this config.json has not quantized. A tied head is the embedding."""
    ignored = {*_ignored(model), *([_HEAD] if model.get("tie_word_embeddings") else ())}
    return {name for name in modules_of(model) if name in ignored}


def biased_of(model: Mapping[str, Any]) -> set[str]:
    """The linear modules with a bias, which NxD Inference does not compute quantized."""
    biased: list[str] = []
    if model.get("model_type") == "qwen2" or "Qwen2ForCausalLM" in (model.get("architectures") or ()):
        biased += _ATTENTION[:3]
    if model.get("attention_bias"):
        biased += _ATTENTION
    if model.get("mlp_bias"):
        biased += _MLP
    return {name for name in modules_of(model) if name.rpartition(".")[2] in biased}


def _ignored(model: Mapping[str, Any]) -> list[str]:
    """What compressed-tensors lists as not quantized. Raises InvalidModel for what is no list of names: a pattern could
    take forever."""
    config = model.get("quantization_config") or model.get("compression_config")
    ignored = (config.get("ignore") if isinstance(config, Mapping) else None) or []
    if not isinstance(ignored, list):
        raise InvalidModel(f"config.json: quantization_config.ignore must be a list of modules, got {ignored!r}")
    if wrong := [one for one in ignored if not isinstance(one, str) or one.startswith("re:")]:
        message = f"config.json: quantization_config.ignore has {wrong[0]!r}: it must name each module"
        raise InvalidModel(message)
    return ignored


def _path(name: str, *, fused: bool) -> str:
    """Where NxD Inference has a module."""
    name = name.removeprefix("model.")
    module, _, last = name.rpartition(".")
    if last in _ATTENTION[:3]:
        return f"{module}.qkv_proj.{'Wqkv' if fused else last}"
    return f"{name}.{last}" if last == "o_proj" else name


def words_for(excluded: Collection[str], converted: Collection[str]) -> list[str]:
    """Words that are parts of the paths of these modules and of no converted one: NxD Inference looks for them anywhere
    in a path, so that `v_proj` also means all of `qkv_proj`, and `layers.1` also `layers.10`.

    The last word of a path is enough where no converted module has it; else it is the whole path.

    Raises InvalidModel if a module cannot be named without another one.
    """
    found = set[str]()
    for path in excluded:
        words = (path.rpartition(".")[2], path)
        word = next((one for one in words if not any(one in other for other in converted)), None)
        if word is None:
            also = next(other for other in converted if path in other)
            raise InvalidModel(
                f"config.json: NxD Inference cannot leave {path} unquantized without {also}, whose name contains it: "
                "serve a checkpoint in which both are quantized, or neither"
            )
        found.add(word)
    return sorted(found)


def check_modules(model: Mapping[str, Any]) -> None:
    """Raises InvalidModel if config.json quantizes modules that NxD Inference does not compute so."""
    if form_of(model) not in FORMS:
        return
    if wrong := sorted(biased_of(model) - excluded_of(model)):
        raise InvalidModel(
            f"config.json: {wrong[0]} is quantized and has a bias, which NxD Inference does not compute: serve a "
            f"checkpoint that leaves {_last_words(wrong)} unquantized"
        )


def check_stored(checkpoint: Checkpoint) -> None:
    """Compares the tensors of a checkpoint with its config.json. NxD Inference takes numbers without their scale, or
    of another type, without a word.

    Raises InvalidModel with the tensor.
    """
    model = checkpoint.config
    if form_of(model) not in FORMS:
        return
    stored, without = quantization_of(model), excluded_of(model)
    assert stored is not None
    for module in modules_of(model):
        weight, scale = (checkpoint.tensors.get(f"{module}.{one}") for one in ("weight", stored.scale))
        if weight is None:
            continue  # a tied head, or one of another file; what is missing the library says itself
        where = f"{checkpoint.folder / weight.file}: tensor {weight.name}"
        if module in without:
            if weight.dtype in ("I8", "F8_E4M3") or scale is not None:
                message = f"is quantized ({weight.dtype}), but config.json lists its module among those that are not"
                raise InvalidModel(f"{where} {message}")
            continue
        if weight.dtype != stored.stored:
            raise InvalidModel(f"{where} has dtype {weight.dtype}, but config.json says {stored.stored}")
        wanted = (*weight.shape[:1], 1)
        if scale is None or scale.shape != wanted:
            found = "none" if scale is None else f"one of shape {list(scale.shape)}"
            raise InvalidModel(f"{where} must have a scale {stored.scale} of shape {list(wanted)}, and has {found}")


def of_draft(num_layers: int) -> list[str]:
    """Words for all modules of a draft model, or of an EAGLE head, of which nothing is converted. Where the library
    fuses matrices, it looks for the whole path of a layer's attention among them, and else for scales."""
    return [*_OF_DRAFT, *(f"layers.{number}.self_attn" for number in range(num_layers))]


def projections(model: Mapping[str, Any]) -> set[str]:
    """The last words of the modules that are quantized."""
    return {name.rpartition(".")[2] for name in {*modules_of(model)} - excluded_of(model)}


def _last_words(names: Sequence[str]) -> str:
    return ", ".join(sorted({name.rpartition(".")[2] for name in names}))


def named_by_checkpoint(names: Iterable[str]) -> set[str]:
    """Names as the checkpoint may have them; NxD Inference renames scales when it reads them, but for those that it has
    written itself."""
    given = {*names}
    return given | {re.sub(r"\.scale$", ".weight_scale", name) for name in given}
