"""Small checkpoints in the form that NxD Inference computes, and the same weights unquantized. Of our own, so that
tests do not read what they judge."""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path
from typing import Literal

import torch
from safetensors.torch import load_file, save_file

from helpers.quantized import compressed
from neuron_runtime.checkpoint import CONFIG_FILE, WEIGHTS_FILE

LARGEST = {"int8": 127.0, "fp8": 240.0}


def converted(source: Path, target: Path, kind: Literal["int8", "fp8"], excluded: Collection[str] = ()) -> Path:
    """A copy of a model with one weights file, whose projections have numbers of 8 bits and a scale for each row.

    excluded: words of the modules that keep their weights, beside the head; as in the middle of their names.
    Returns a folder with the weights that those stand for, in float32.
    """
    config = json.loads((source / CONFIG_FILE).read_text())
    tensors, plain = load_file(source / WEIGHTS_FILE), {}
    stored: dict[str, torch.Tensor] = {}
    ignored = ["lm_head"]
    for name, tensor in tensors.items():
        module = name.removesuffix(".weight")
        if module.endswith("_proj") and not any(word in module for word in excluded):
            scale = tensor.float().abs().amax(dim=1, keepdim=True) / LARGEST[kind]
            numbers = tensor.float() / scale
            small = numbers.round().to(torch.int8) if kind == "int8" else numbers.to(torch.float8_e4m3fn)
            stored |= {name: small, f"{module}.weight_scale": scale}
            plain[name] = small.float() * scale
        else:
            stored[name], plain[name] = tensor, tensor.float()
            ignored += [module] if module.endswith("_proj") else []
    word = {"int8": "int", "fp8": "float"}[kind]
    method = {**compressed(word, "channel", f"{word}-quantized"), "ignore": ignored}
    folders = target, target.with_name(f"{target.name}-plain")
    fields = {"quantization_config": method, "neuron_serving_conversion": {"version": 1}}
    for folder, content, more in zip(folders, (stored, plain), (fields, {}), strict=True):
        folder.mkdir(parents=True)
        (folder / CONFIG_FILE).write_text(json.dumps({**config, **more}))
        save_file({name: one.contiguous() for name, one in content.items()}, folder / WEIGHTS_FILE, {"format": "pt"})
    return folders[1]
