"""Quantized weights and caches as NxD Inference takes them: numbers of 8 bits with a scale for each row.

What the library takes without a word and computes wrongly, strict mode refuses; damage mode computes the same garbage.
Rules are those of section 8 of the features' contract, with the section of others.
"""

from __future__ import annotations

from enum import Enum
from typing import Any

import torch

import fake_nxdi

TYPES = {
    "int8": torch.int8,
    "f8e4m3": torch.float8_e4m3fn,
    "f8e4m3fn": torch.float8_e4m3fn,
    "f8e5m2": torch.float8_e5m2,
}
PER_TENSOR, PER_CHANNEL = "per_tensor_symmetric", "per_channel_symmetric"
NARROW = (torch.int8, torch.float8_e4m3fn, torch.float8_e5m2)
LARGEST = 240.0
"""Of the device's FP8; a number beyond is none."""
VARIABLES = ("XLA_HANDLE_SPECIAL_SCALAR", "UNSAFE_FP8FNCAST")


class Method(Enum):
    PER_TENSOR_SYMMETRIC = PER_TENSOR
    PER_KEY_SYMMETRIC = "per_key_symmetric"


class KVQuantizationConfig:
    def __init__(self, **given: Any) -> None:
        self.k_quant_method = given.pop("k_quant_method", Method.PER_TENSOR_SYMMETRIC)
        self.v_quant_method = given.pop("v_quant_method", Method.PER_TENSOR_SYMMETRIC)
        self.quant_dtype = given.pop("quant_dtype", torch.float8_e4m3fn)
        self.direct_cast = given.pop("direct_cast", True)
        if self.direct_cast:
            methods = {self.k_quant_method, self.v_quant_method}
            assert methods == {Method.PER_TENSOR_SYMMETRIC}, "When using direct cast both must be PER_TENSOR_SYMMETRIC"


def check(neuron: Any) -> None:
    """What an application is made with."""
    cache = getattr(neuron, "kv_quant_config", None)
    if neuron.quantized:
        assert neuron.quantization_dtype.upper() in {name.upper() for name in TYPES}, "is not a valid QuantizedDtype"
        _check_type(neuron)
    if cache is not None and not cache.direct_cast:
        raise NotImplementedError("the fake has no scales of a cache")
    if cache is not None and not isinstance(cache.quant_dtype, torch.dtype):
        raise TypeError("zeros(): argument 'dtype' must be torch.dtype, not str")
    if neuron.kv_cache_quant and neuron.is_block_kv_layout and not fake_nxdi.has(8):
        raise RuntimeError("scatter(): Expected self.dtype to be equal to src.dtype")
    if not fake_nxdi.strict():
        return
    if fake_nxdi.has(8) and bool(neuron.kv_cache_quant) != (cache is not None):
        fake_nxdi.refuse("Q4", "kv_quant_config decides the cache's type, and kv_cache_quant tells the compiler")
    has_fp8 = (neuron.quantized and neuron.quantization_dtype != "int8") or neuron.kv_cache_quant or cache
    if has_fp8 and (missing := [name for name in VARIABLES if fake_nxdi.AT_IMPORT.get(name) != "1"]):
        fake_nxdi.refuse("4.1", f"{missing[0]} was not set when the library was imported, which FP8 needs")


def _check_type(neuron: Any) -> None:
    if neuron.quantization_type not in (PER_TENSOR, PER_CHANNEL):
        raise NotImplementedError(f"the fake has no {neuron.quantization_type}")
    if neuron.quantization_type == PER_TENSOR:
        if fake_nxdi.strict():
            fake_nxdi.refuse("Q3", "a scale for each tensor corrupts what is excluded, and its fp8 does not load")
        if neuron.quantization_dtype != "int8":
            raise RuntimeError("Cannot get channel axis for the scale")
    if neuron.quantization_dtype == "f8e4m3fn" and fake_nxdi.strict():
        fake_nxdi.refuse("4.1", "the compiler is told of FP8 only if its type is f8e4m3")


def check_experts(config: Any) -> None:
    factor = getattr(config.neuron_config, "capacity_factor", None)
    experts = getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None)
    chosen = getattr(config, "num_experts_per_tok", None)
    if factor and experts and chosen and factor * chosen < experts and fake_nxdi.strict():
        fake_nxdi.refuse("E1", f"with a capacity_factor of {factor} experts drop tokens")


def cache_dtype(neuron: Any) -> str:
    """The type of the cache; "": that of the model."""
    if fake_nxdi.has(8):
        found = getattr(neuron, "kv_quant_config", None)
        return "" if found is None else str(found.quant_dtype).removeprefix("torch.")
    return "float8_e4m3fn" if neuron.kv_cache_quant else ""


def facts_of(neuron: Any) -> dict[str, Any] | None:
    """What of the configuration is in the graphs."""
    if not neuron.quantized:
        return None
    excluded = sorted(neuron.modules_to_not_convert or ())
    return {"type": neuron.quantization_type, "dtype": neuron.quantization_dtype, "excluded": excluded}


def is_converted(path: str, neuron: Any) -> bool:
    """Whether a linear module is replaced by a quantized one. path: where the library has it."""
    return neuron.quantized and not any(word in path for word in neuron.modules_to_not_convert or ())


def renamed(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """As the library renames what it reads."""
    return {
        name.replace(".weight_scale", ".scale") if name.endswith(".weight_scale") else name: tensor
        for name, tensor in tensors.items()
    }


def taken(
    paths: dict[str, str], tensors: dict[str, torch.Tensor], neuron: Any, *, tied: bool
) -> dict[str, torch.Tensor]:
    """The numbers and scales of quantized modules, as the device gets them.

    paths: where the library has each linear module, by its name in the checkpoint.
    """
    found: dict[str, torch.Tensor] = {}
    for module, path in paths.items():
        numbers, scale = tensors.get(f"{module}.weight"), tensors.get(f"{module}.scale")
        is_tied = tied and module == "lm_head"
        attention, _, last = module.rpartition(".")
        is_fused = neuron.quantized and neuron.fused_qkv and last in ("q_proj", "k_proj", "v_proj")
        if is_fused and scale is None and attention not in (neuron.modules_to_not_convert or ()):
            raise KeyError(f"{module}.scale")
        if not is_converted(path, neuron):
            if numbers is not None and numbers.dtype in NARROW and fake_nxdi.strict():
                fake_nxdi.refuse("Q1", f"{module} has numbers of {numbers.dtype}, which are taken for weights")
            continue
        if is_tied and fake_nxdi.strict():
            fake_nxdi.refuse("Q2", "the embedding is cast to the type of a head that is tied to it")
        numbers = tensors["embed_tokens.weight"] if is_tied else tensors[f"{module}.weight"]
        if f"{module}.bias" in tensors:
            raise NotImplementedError
        if scale is None and not is_tied:
            raise KeyError(f"{path}.scale")
        scale = torch.ones(len(numbers), 1) if scale is None else scale
        found |= _checked(module, numbers, scale, neuron)
        if is_tied:
            found["embed_tokens.weight"] = found["lm_head.weight"]
    return found


def _checked(module: str, numbers: torch.Tensor, scale: torch.Tensor, neuron: Any) -> dict[str, torch.Tensor]:
    wanted = TYPES[neuron.quantization_dtype]
    if fake_nxdi.strict():
        if numbers.dtype != wanted:
            fake_nxdi.refuse("Q1", f"{module} has numbers of {numbers.dtype}, which are cast to {wanted}")
        if tuple(scale.shape) != (len(numbers), 1):
            fake_nxdi.refuse("Q3", f"{module} has scales of shape {list(scale.shape)} for {len(numbers)} rows")
        if wanted != torch.int8 and float(numbers.float().abs().max()) > LARGEST:
            fake_nxdi.refuse("4.2", f"{module} has FP8 numbers beyond {LARGEST}")
    if tuple(scale.shape) not in ((len(numbers), 1), (1,)):
        raise RuntimeError(f"size mismatch for {module}.scale: {list(scale.shape)}")
    return {f"{module}.weight": numbers.to(wanted), f"{module}.scale": scale}


def multiplied(numbers: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    wide = numbers.float()
    if numbers.dtype != torch.int8:
        wide = torch.where(wide.abs() > LARGEST, torch.nan, wide)
    return wide * scale.float()


def cast(values: torch.Tensor, dtype: str) -> torch.Tensor:
    """What is read back of values that were written into a cache of this type."""
    if not dtype:
        return values
    return values.clamp(-LARGEST, LARGEST).to(getattr(torch, dtype)).to(values.dtype)
