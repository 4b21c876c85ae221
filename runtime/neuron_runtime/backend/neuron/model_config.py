"""What Neuron libraries leave out of a config.json: fields that follow from others, and fields that a class ignores.

Called by the settings and the libraries of backends. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from neuron_runtime.checkpoint import InvalidModel
from neuron_runtime.dtypes import COMPUTED
from neuron_runtime.errors import ConfigProblems

ROPE = ("rope_theta", "rope_scaling")


def completed(model: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of config.json that follow from others."""
    missing: dict[str, Any] = {}
    hidden, heads = model.get("hidden_size"), model.get("num_attention_heads")
    if isinstance(hidden, int) and isinstance(heads, int) and heads:
        missing["head_dim"] = hidden // heads
    rope = model.get("rope_parameters")
    if isinstance(rope, Mapping) and "rope_theta" in rope:
        # As transformers 5 writes it; the versions that NxD Inference runs with do not read it.
        missing["rope_theta"] = rope["rope_theta"]
        if rope.get("rope_type", "default") != "default" or "mrope_section" in rope:
            missing["rope_scaling"] = {name: value for name, value in rope.items() if name != "rope_theta"}
    scaling = model.get("rope_scaling") or rope
    if model.get("model_type") == "gpt_oss" and isinstance(scaling, Mapping):
        missing["initial_context_length"] = scaling.get("original_max_position_embeddings", 4096)
    return missing


def number_of(model: Mapping[str, Any], name: str, least: int = 1) -> int:
    """Raises InvalidModel if config.json lacks the number, or has another value."""
    value = model.get(name)
    if not isinstance(value, int) or value < least:
        raise InvalidModel(f"config.json: {name} must be an integer >= {least}, got {value!r}")
    return value


def dtype_of(dtype: str, model: Mapping[str, Any], problems: ConfigProblems) -> str:
    """That of the configuration, or if it is auto that of config.json. Notes if no backend computes in it."""
    if dtype == "auto":
        dtype = str(model.get("dtype") or model.get("torch_dtype") or "bfloat16").removeprefix("torch.")
    if dtype not in COMPUTED:
        problems.add("$.dtype", f"must be one of {', '.join(COMPUTED)}, got {dtype!r}")
    return dtype


def quantization_of(model: Mapping[str, Any]) -> str:
    """How the weights are quantized, by config.json; "": they are not."""
    config = model.get("quantization_config") or model.get("compression_config")
    if not config:
        return ""
    method = str(config.get("quant_method") or "") if isinstance(config, Mapping) else ""
    return "fp8 in blocks" if method == "fp8" and config.get("weight_block_size") else method or "an unknown method"


def ignored_by(text: Mapping[str, Any], names: Iterable[str]) -> Iterator[tuple[str, Any]]:
    """Of these fields those that are not off, with their values."""
    for name in names:
        value = _OFF.get(name, _unless_falsy)(text, name)
        if value is not None:
            yield name, value


def _unless_falsy(text: Mapping[str, Any], name: str) -> Any:
    return text.get(name) or None


def _rope_type(text: Mapping[str, Any], name: str = "rope_scaling") -> Any:
    scaling = text.get(name) or text.get("rope_parameters")
    kind = scaling.get("rope_type", scaling.get("type")) if isinstance(scaling, Mapping) else None
    return None if kind in (None, "default") else kind


def own_head_dim(text: Mapping[str, Any], name: str = "head_dim") -> Any:
    size, hidden, heads = (text.get(field) for field in (name, "hidden_size", "num_attention_heads"))
    return size if size and hidden and heads and size * heads != hidden else None


_OFF: Mapping[str, Callable[[Mapping[str, Any], str], Any]] = {
    "rope_scaling": _rope_type,
    "head_dim": own_head_dim,
    "num_experts_per_tok": lambda text, name: 1 if text.get(name) == 1 else None,
    "decoder_sparse_step": lambda text, name: None if text.get(name) in (None, 1) else text[name],
}
"""The value of a field that is not off, None if it is off. Others are off if they are missing, false, 0 or empty."""
