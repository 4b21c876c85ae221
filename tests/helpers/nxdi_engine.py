"""Engines over NxD Inference with small models: the fake, or with NXDI_UNDER_TEST=installed what this machine has."""

from __future__ import annotations

import json
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import msgspec
import torch

from helpers.nxdi import Mode, fake_nxdi, installed
from helpers.torch_models import NEAR_TIE, random_model, reference
from neuron_runtime.backend.nxdi.backend import NxdiBackend
from neuron_runtime.backend.nxdi.buckets import limits_of
from neuron_runtime.backend.nxdi.devices import PLATFORMS, Target
from neuron_runtime.backend.nxdi.library import application
from neuron_runtime.backend.nxdi.settings import Settings, settings_of
from neuron_runtime.config import parse_config
from neuron_runtime.core import Request

TARGET = Target(PLATFORMS["trn2"], 2, 1)

FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Mistral": {"architecture": "MistralForCausalLM", "sliding_window": 600},
    "Qwen2.5": {"architecture": "Qwen2ForCausalLM"},
    "Qwen3": {"architecture": "Qwen3ForCausalLM", "head_dim": 32, "tie_word_embeddings": True},
}
SLOTS: dict[str, Any] = {
    "limits": {"maxSequences": 4, "maxModelLength": 256, "maxStepTokens": 128},
    "buckets": {"context": [32, 64, 128], "tokenGeneration": [64, 128, 256]},
}
BLOCKS: dict[str, Any] = {
    "layout": "blocks",
    "prefixCaching": "enabled",
    "chunkedPrefill": "enabled",
    "limits": {"maxSequences": 4, "maxModelLength": 512, "blockSize": 32, "numBlocks": 24},
    "buckets": {"context": [128, 256], "prefix": [128, 256, 512], "tokenGeneration": [256, 512]},
}


def library(version: str = "0.9", mode: Mode = "strict", step_seconds: float = 0.0) -> AbstractContextManager[Any]:
    """The library under test: a version of the fake, or the installed one."""
    return nullcontext() if installed() else fake_nxdi(version=version, mode=mode, step_seconds=step_seconds)


class Model:
    """A checkpoint with random weights, and what transformers makes of it."""

    def __init__(self, folder: Path, family: str = "Llama") -> None:
        self.folder = random_model(folder, **FAMILIES[family])
        self.config = json.loads((folder / "config.json").read_text())
        self._reference = reference(folder)

    @torch.inference_mode()
    def check(self, request: Request, output: list[int]) -> None:
        """Checks that the output is what transformers generates greedily, with one pass over all of it."""
        prompt = request.prompt_token_ids
        logits = self._reference(torch.tensor([[*prompt, *output]])).logits[0, len(prompt) - 1 : -1]
        best, given = logits.max(dim=-1).values, logits.gather(1, torch.tensor(output).unsqueeze(1)).squeeze(1)
        wrong = (best - given > NEAR_TIE).nonzero().flatten().tolist()
        assert not wrong, f"{request.request_id}: token {wrong[0]} of {len(output)} after {len(prompt)} prompt tokens"


def settings_for(model: Model, **document: Any) -> Settings:
    base = {"version": 1, "model": {"uri": "file:///m"}, "servedNames": ["m"], "backend": "nxdi", "dtype": "float32"}
    return settings_of(parse_config(msgspec.json.encode(base | document)), model.config, TARGET)


def backend_for(model: Model, settings: Settings, folder: Path) -> NxdiBackend:
    """Compiled into `folder` and loaded."""
    made = application(settings, model.folder)
    made.compile(str(folder))
    made.load(str(folder), skip_warmup=True)
    return NxdiBackend(made, settings, limits_of(settings, 600.0))
