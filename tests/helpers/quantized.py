"""Quantized copies of small checkpoints, as llm-compressor, transformers and ModelOpt write them, and the same weights
unquantized. Of our own, so that tests do not read what they judge."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from neuron_runtime.checkpoint import CONFIG_FILE, WEIGHTS_FILE

BLOCK = (48, 24)
GROUP = 16


def compressed(kind: str, strategy: str, file_format: str, **others: Any) -> dict[str, Any]:
    scheme = {"num_bits": 8, "type": kind, "symmetric": True, "strategy": strategy, "group_size": None, **others}
    return {
        "quant_method": "compressed-tensors",
        "format": file_format,
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": scheme, "input_activations": None}},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
    }


FORMATS: Mapping[str, dict[str, Any]] = {
    "int8 per channel": compressed("int", "channel", "int-quantized"),
    "int8 per tensor": compressed("int", "tensor", "int-quantized"),
    "int8 in groups, packed": compressed("int", "group", "pack-quantized", group_size=GROUP),
    "fp8 per channel": compressed("float", "channel", "float-quantized"),
    "fp8 per tensor": compressed("float", "tensor", "float-quantized"),
    "fp8 in blocks of compressed-tensors": compressed("float", "block", "float-quantized", block_structure=list(BLOCK)),
    "fp8 in blocks": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": list(BLOCK)},
    "fp8 of AutoFP8": {"quant_method": "fp8", "activation_scheme": "static"},
    "fp8 of FBGEMM": {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0},
    "fp8 of ModelOpt": {"quant_method": "modelopt", "quant_algo": "FP8"},
}

_GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "sym": False, "desc_act": False}
PACKED: Mapping[str, dict[str, Any]] = {
    "AWQ": {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm", "zero_point": True},
    "GPTQ": _GPTQ,
    "GPTQ of 8 bits per channel": {**_GPTQ, "bits": 8, "group_size": -1},
    "GPTQ in order of activations": {**_GPTQ, "desc_act": True, "checkpoint_format": "gptq"},
    "GPTQ, version 2": {**_GPTQ, "checkpoint_format": "gptq_v2", "sym": True},
    "int4 in groups": compressed("int", "group", "pack-quantized", num_bits=4, group_size=GROUP),
    "int4 in groups, asymmetric": compressed(
        "int", "group", "pack-quantized", num_bits=4, group_size=GROUP, symmetric=False
    ),
    "int8 per channel, asymmetric": compressed("int", "channel", "pack-quantized", symmetric=False),
}
"""Those of whole numbers in words of 32 bits, less a zero point."""


def quantize(source: Path, target: Path, method: Mapping[str, Any], *, head: bool = False) -> Path:
    """A copy of a model with one weights file, whose projections (and head) are quantized. Returns a folder with the
    weights that those stand for, in float32."""
    config = json.loads((source / CONFIG_FILE).read_text())
    tensors, plain = load_file(source / WEIGHTS_FILE), {}
    stored: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        if name.endswith("_proj.weight") or (head and name == "lm_head.weight"):
            if method in PACKED.values():
                plain[name], words = _packed(tensor.float(), method)
                named = {f"{name.removesuffix('weight')}{one}": word.contiguous() for one, word in words.items()}
                stored = {**named, **stored}  # A bias of its own stays.
                continue
            numbers, scale, of_number = _quantized(tensor.float(), method)
            plain[name] = numbers.float() * of_number
            stored |= _stored(name.removesuffix(".weight"), numbers, scale, method)
        else:
            stored[name], plain[name] = tensor, tensor.float()
    folders = target, target.with_name(f"{target.name}-plain")
    for folder, content, fields in zip(folders, (stored, plain), ({"quantization_config": method}, {}), strict=True):
        folder.mkdir(parents=True)
        (folder / CONFIG_FILE).write_text(json.dumps({**config, **fields}))
        save_file(content, folder / WEIGHTS_FILE, metadata={"format": "pt"})
    return folders[1]


MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
_FLOAT4 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def quantize_experts(source: Path, target: Path) -> Path:
    """A copy of a gpt-oss with one weights file, whose experts are MXFP4. Returns as `quantize`."""
    config = json.loads((source / CONFIG_FILE).read_text())
    stored = load_file(source / WEIGHTS_FILE)
    plain = dict(stored)
    for name in [name for name in stored if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        groups = stored.pop(name).transpose(1, 2).unflatten(2, (-1, 32))
        exponents = groups.abs().amax(dim=-1).log2().floor() - 2
        numbers = groups / exponents.exp2().unsqueeze(-1)
        codes = (numbers.abs().unsqueeze(-1) - _FLOAT4).abs().argmin(dim=-1)
        values = _FLOAT4[codes] * numbers.sign()
        nibbles = (codes + 8 * (numbers < 0)).to(torch.uint8)
        stored[f"{name}_blocks"] = nibbles[..., ::2] | nibbles[..., 1::2] << 4
        stored[f"{name}_scales"] = (exponents + 127).to(torch.uint8)
        plain[name] = (values * exponents.exp2().unsqueeze(-1)).flatten(2).transpose(1, 2).contiguous()
    folders = target, target.with_name(f"{target.name}-plain")
    for folder, content, fields in zip(folders, (stored, plain), ({"quantization_config": MXFP4}, {}), strict=True):
        folder.mkdir(parents=True)
        (folder / CONFIG_FILE).write_text(json.dumps({**config, **fields}))
        save_file(content, folder / WEIGHTS_FILE, metadata={"format": "pt"})
    return folders[1]


def _weights(method: Mapping[str, Any]) -> dict[str, Any]:
    """The scheme of the weights, in compressed-tensors' words."""
    match method["quant_method"]:
        case "compressed-tensors":
            scheme: dict[str, Any] = method["config_groups"]["group_0"]["weights"]
            return scheme
        case "fbgemm_fp8":
            return {"type": "float", "strategy": "channel"}
    block = method.get("weight_block_size")
    return {"type": "float", "strategy": "block" if block else "tensor", "block_structure": block}


def _quantized(weight: torch.Tensor, method: Mapping[str, Any]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Numbers of the stored type, scales `[blocks of rows, blocks of columns]`, and the scale of each number."""
    scheme, (rows, columns) = _weights(method), weight.shape
    block = {
        "tensor": (rows, columns),
        "channel": (1, columns),
        "group": (1, scheme.get("group_size")),
        "block": scheme.get("block_structure"),
    }[scheme["strategy"]]
    padded = torch.nn.functional.pad(weight, (0, -columns % block[1], 0, -rows % block[0]))
    tiles = padded.view(padded.shape[0] // block[0], block[0], padded.shape[1] // block[1], block[1])
    is_float = scheme["type"] == "float"
    scale = tiles.abs().amax(dim=(1, 3)) / (448 if is_float else 127)
    if method.get("format") == "pack-quantized":
        scale = scale.bfloat16().float()
    of_number = scale.repeat_interleave(block[0], 0)[:rows].repeat_interleave(block[1], 1)[:, :columns]
    numbers = weight / of_number
    return (
        numbers.to(torch.float8_e4m3fn) if is_float else numbers.round().clamp(-127, 127).to(torch.int8),
        scale,
        of_number,
    )


def _stored(
    module: str, numbers: torch.Tensor, scale: torch.Tensor, method: Mapping[str, Any]
) -> dict[str, torch.Tensor]:
    match method["quant_method"], method.get("format"):
        case "compressed-tensors", "pack-quantized":
            raw = (numbers.to(torch.int32) + 128).view(len(numbers), -1, 4)
            packed = sum(raw[..., place] << 8 * place for place in range(4))
            assert isinstance(packed, torch.Tensor)
            shape = torch.tensor(numbers.shape)
            names = {"weight_packed": packed.to(torch.int32), "weight_scale": scale.bfloat16(), "weight_shape": shape}
        case "fp8", _ if "weight_block_size" in method:
            names = {"weight": numbers, "weight_scale_inv": scale}
        case (("fp8" | "modelopt"), _):
            names = {"weight": numbers, "weight_scale": scale.view(()), "input_scale": torch.tensor(0.5)}
        case _:
            names = {"weight": numbers, "weight_scale": scale.view(-1) if scale.numel() == 1 else scale}
    return {f"{module}.{name}": tensor.contiguous() for name, tensor in names.items()}


AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def _packed(weight: torch.Tensor, method: Mapping[str, Any]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The weight that is stored, and its tensors by their last words."""
    of_gptq, of_awq = (method["quant_method"] == one for one in ("gptq", "awq"))
    scheme = method if of_gptq or of_awq else _weights(method)
    bits, columns = scheme.get("bits") or scheme["num_bits"], weight.shape[1]
    size = columns if (scheme["group_size"] or -1) < 0 else scheme["group_size"]
    group = torch.arange(columns) // size
    if method.get("desc_act"):
        group = group[torch.randperm(columns, generator=torch.Generator().manual_seed(1))]
    largest, center = 2**bits - 1, 2 ** (bits - 1)
    in_groups = weight[:, group.argsort(stable=True)].unflatten(1, (-1, size))
    if scheme.get("symmetric", method.get("sym", False)):
        scale = in_groups.abs().amax(dim=-1).div(center - 1).half().float()
        zero = torch.full_like(scale, center)
    else:
        least = in_groups.amin(dim=-1)
        scale = (in_groups.amax(dim=-1) - least).div(largest).half().float()
        zero = (-least / scale).round().clamp(0, largest)
        zero[0, 0] = 0  # the least one, which version 1 of GPTQ stores as the largest
    numbers = (weight / scale[:, group] + zero[:, group]).round().clamp(0, largest)
    plain = (numbers - zero[:, group]) * scale[:, group]
    if of_awq:
        qweight, qzeros = (_words(one.t(), bits, AWQ_ORDER) for one in (numbers, zero))
        return plain, {"qweight": qweight, "qzeros": qzeros, "scales": scale.t().half()}
    if of_gptq:
        less = (zero - int(method.get("checkpoint_format") != "gptq_v2")) % (largest + 1)
        words = {"qweight": _words(numbers, bits).t(), "qzeros": _words(less.t(), bits), "scales": scale.t().half()}
        return plain, {**words, "g_idx": group.int(), "bias": torch.zeros(len(weight))}
    words = {
        "weight_packed": _words(numbers, bits),
        "weight_scale": scale.half(),
        "weight_shape": torch.tensor(weight.shape),
    }
    return plain, words if scheme["symmetric"] else {**words, "weight_zero_point": _words(zero.t(), bits).t()}


def _words(numbers: torch.Tensor, bits: int, order: tuple[int, ...] = ()) -> torch.Tensor:
    """Numbers of a row packed in words of 32 bits, from the lowest bits on. order: which of them comes next."""
    each = 32 // bits
    split = numbers.long().unflatten(1, (-1, each))
    words = torch.stack([split[..., one] << bits * place for place, one in enumerate(order or range(each))])
    return words.sum(dim=0).to(torch.int32)


def say_beside(folder: Path, **more: Any) -> None:
    """Move the quantization of ModelOpt from config.json to the file where older versions wrote it."""
    config = json.loads((folder / CONFIG_FILE).read_text())
    given = {name: value for name, value in config.pop("quantization_config").items() if name != "quant_method"}
    (folder / CONFIG_FILE).write_text(json.dumps(config))
    whole = {"producer": {"name": "modelopt"}, "quantization": {**given, "exclude_modules": ["lm_head"], **more}}
    (folder / "hf_quant_config.json").write_text(json.dumps(whole))
