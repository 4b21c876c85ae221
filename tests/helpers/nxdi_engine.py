"""Engines over NxD Inference with small models: the fake, or with NXDI_UNDER_TEST=installed what this machine has."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest
import torch

from helpers.eagle_heads import memoryless
from helpers.nxdi import Mode, fake_nxdi, installed
from helpers.told_drafts import events_of, tokens_of
from helpers.torch_models import NEAR_TIE, random_model, reference
from neuron_runtime.backend import nxdi
from neuron_runtime.backend.neuron.device import DeviceBackend
from neuron_runtime.backend.neuron.devices import PLATFORMS, Target
from neuron_runtime.backend.nxdi.backend import NxdiBackend
from neuron_runtime.backend.nxdi.buckets import limits_of
from neuron_runtime.backend.nxdi.draft_model import accepting, draft_files
from neuron_runtime.backend.nxdi.library import application
from neuron_runtime.backend.nxdi.settings import DraftFiles, Settings, settings_of
from neuron_runtime.backend_protocol import Backend
from neuron_runtime.config import RuntimeConfig, parse_config
from neuron_runtime.core import BackendLimits, Request, Sampling
from neuron_runtime.engine.drafting import Drafting
from neuron_runtime.engine.loop import Engine
from neuron_runtime.engine.stats import EngineStats
from neuron_runtime.errors import InvalidConfig

NUM_REQUESTS = int(os.environ.get("NEURON_SERVING_NXDI_REQUESTS", "8"))

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

    def __init__(self, folder: Path, family: str = "Llama", *, forgets: float = 1.0, **config: Any) -> None:
        """forgets: share that counts of what the model reads but the last token, see `memoryless`."""
        self.folder = random_model(folder, **FAMILIES[family], **config)
        memoryless(self.folder, forgets)
        self.config = json.loads((folder / "config.json").read_text())
        self._reference = reference(folder)

    @torch.inference_mode()
    def logits(self, tokens: Sequence[int]) -> torch.Tensor:
        """`[tokens, vocabulary]` of a sequence."""
        found: torch.Tensor = self._reference(torch.tensor([list(tokens)])).logits[0]
        return found

    @torch.inference_mode()
    def check(self, request: Request, output: list[int]) -> None:
        """Checks that the output is what transformers generates greedily, with one pass over all of it."""
        prompt = request.prompt_token_ids
        logits = self.logits((*prompt, *output))[len(prompt) - 1 : -1]
        best, given = logits.max(dim=-1).values, logits.gather(1, torch.tensor(output).unsqueeze(1)).squeeze(1)
        wrong = (best - given > NEAR_TIE).nonzero().flatten().tolist()
        assert not wrong, f"{request.request_id}: token {wrong[0]} of {len(output)} after {len(prompt)} prompt tokens"


def drafts_by(draft: Path, num_tokens: int, method: str = "Draft") -> dict[str, Any]:
    """Of a configuration, that a second model makes drafts."""
    return {"speculation": {"method": method, "numTokens": num_tokens, "model": {"uri": draft.as_uri()}}}


def settings_for(model: Model, **document: Any) -> Settings:
    config = config_for(model, **document)
    return settings_of(config, model.config, TARGET, draft=draft_files(config))


def config_for(model: Model, **document: Any) -> RuntimeConfig:
    base = {"version": 1, "model": {"uri": model.folder.as_uri()}, "servedNames": ["m"], "backend": "nxdi"}
    return parse_config(msgspec.json.encode({**base, "compile": True, "dtype": "float32", **document}))


def compiled_for(config: RuntimeConfig, model: Model, folder: Path) -> Backend:
    """Compiled into `folder` as the command does, and loaded."""
    compiler = nxdi.compiler(config, model.folder)
    folder.mkdir()
    for unit in compiler.graphs():
        unit.compile(folder)
    compiler.check(folder)
    return nxdi.load_backend(model.folder, config, lambda stage, share: None, folder)


def refusals(document: dict[str, Any]) -> dict[str, str]:
    """What is wrong with a configuration of a small Llama, by field; `config` has further keys of config.json, `draft`
    those of the draft
    model's, `shapes` its tensors."""
    base = {"version": 1, "model": {"uri": "file:///m"}, "servedNames": ["m"], "backend": "nxdi", "dtype": "float32"}
    model = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 100,
        "max_position_embeddings": 512,
        "num_attention_heads": 4,
        "intermediate_size": 64,
        "hidden_size": 32,
        "num_hidden_layers": 2,
    }
    draft, shapes = model | document.pop("draft", {}), document.pop("shapes", {})
    model |= document.pop("config", {})
    files = DraftFiles(config=draft, shapes=shapes)
    with pytest.raises(InvalidConfig) as error:
        settings_of(parse_config(json.dumps(base | document).encode()), model, TARGET, draft=files)
    return dict(error.value.parts)


def backend_for(model: Model, settings: Settings, folder: Path, draft: Path | None = None) -> NxdiBackend:
    """Compiled into `folder` and loaded."""
    made = application(settings, model.folder, draft)
    made.compile(str(folder))
    made.load(str(folder), skip_warmup=True)
    made = accepting(made) if draft else made
    return NxdiBackend(made, settings, limits_of(settings, 600.0), model_config=model.config)


def served(backend: Backend, requests: Sequence[Request], drafting: Drafting | None = None) -> dict[str, list[int]]:
    """Answers by request, which have all tokens that they asked for. The backend is closed."""
    backend.warm_up(lambda stage, share: None)
    engine = Engine(backend, drafting=drafting)
    found = tokens_of(events_of(engine, requests))
    engine.close()
    backend.close()
    assert {name: len(tokens) for name, tokens in found.items()} == {
        one.request_id: one.sampling.max_tokens for one in requests
    }
    return found


def some_requests(random: Random, limits: BackendLimits, vocabulary_size: int) -> Iterator[Request]:
    """Greedy requests, whose tokens are known, beside others with all kinds of parameters."""
    longest = (limits.max_model_length if limits.chunks_prefill else limits.longest_prefill) - 1
    text = [random.randrange(vocabulary_size) for _ in range(longest)]
    lengths = [1, 2, longest, 32, longest // 2, 31, 2 * longest // 3, 33]
    for number in range(NUM_REQUESTS):
        length = lengths[number] if number < len(lengths) else random.randint(1, longest)
        common = random.choice((0, length // 2, length - 1))
        prompt = (*text[:common], *(random.randrange(vocabulary_size) for _ in range(length - common)))
        most = min(limits.max_new_tokens(length), random.choice((1, 5, 40, 150)))
        greedy = random.random() < 0.6
        sampling = Sampling(
            max_tokens=max(most, 1),
            temperature=0.0 if greedy else random.choice((0.3, 1.0, 1.7)),
            top_k=0 if greedy else random.choice((0, 1, 7, 64)),
            top_p=1.0 if greedy else random.choice((1.0, 0.9, 0.2)),
            stop_token_ids=frozenset(random.sample(range(vocabulary_size), random.choice((0, 0, 3)))),
        )
        yield Request(f"{'greedy' if greedy else 'drawn'}-{number}", prompt, sampling)


def serve_checked(model: Model, backend: DeviceBackend, seed: int) -> tuple[EngineStats, Counter[str]]:
    """Random arrivals and aborts; checks every greedy request. Returns the statistics and the steps of each graph."""
    random, vocabulary_size = Random(seed), backend.limits.vocabulary_size
    backend.warm_up(lambda stage, share: None)
    engine = Engine(backend)
    waiting = list(some_requests(random, backend.limits, vocabulary_size))
    requests = waiting[:]
    outputs: dict[str, list[int]] = {one.request_id: [] for one in requests}
    ended: set[str] = set()
    graphs: Counter[str] = Counter()
    while waiting or engine.has_work:
        if waiting and random.random() < 0.3:
            engine.add(waiting.pop(0))
        if random.random() < 0.02:
            victim = random.choice(requests).request_id
            engine.abort(victim)
            ended.add(victim)
        for event in engine.step():
            outputs[event.request_id] += event.token_ids
            if event.finish_reason:
                ended.add(event.request_id)
        if last := engine.stats.last_step:
            graphs.update(graph.name for graph in last.graphs)
    backend.close()
    for one in requests:
        if output := outputs[one.request_id]:
            assert max(output) < vocabulary_size
            if one.sampling.greedy:
                model.check(one, output)
        assert one.request_id in ended
    return engine.stats, graphs
