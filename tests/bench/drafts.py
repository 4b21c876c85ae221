"""Decoding with drafts compared with decoding without, by the engine over the torch backend, in turns in one process.

Called by the suite. The model's weights are random, so the answers are told: the sampler sees the model's logits with
one raised. What an answer repeats is then known, and a step costs what it costs. The demo model, which has a draft
model, gives its own answers.
"""

from __future__ import annotations

import json
import random
import re
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.offline import OfflineEngine, random_prompts
from bench.report import Load, Meter
from neuron_runtime.backend.host_sampling.drawing import IntArray
from neuron_runtime.backend.host_sampling.sampler import Chosen, HostSampler, Verified
from neuron_runtime.backend.torch.backend import TorchBackend
from neuron_runtime.core import Added, Batch, Request, Rows, Sampling
from neuron_runtime.engine.drafts import Drafts, NGram, OnDevice
from neuron_runtime.engine.loop import Engine
from neuron_runtime.text.tokenizer import load_tokenizer

MAX_DRAFTS, OUTPUT_LEN = 8, 160
DEMO = Path(__file__).parents[2] / "examples" / "demo-model"
DEMO_DRAFTS = 4
NUM_LINES = 24
RAISED = 1e4

Answers = Mapping[tuple[int, ...], Sequence[int]]
"""By prompt."""


@dataclass(frozen=True, slots=True)
class Point:
    """Tokens per second; the ratio is the median over pairs of turns, above one: faster with drafts."""

    plain: float
    drafted: float
    ratio: float
    accepted: float
    """Drafts accepted per decode row, of all rows."""
    load: Load


class Told(HostSampler):
    """Samples from a model that gives these answers."""

    def __init__(self, sampler: HostSampler, answers: Answers) -> None:
        self.__dict__.update(sampler.__dict__)
        self._answers = answers
        self._told = np.zeros((len(self._tokens), self._tokens.shape[1] + MAX_DRAFTS), dtype=np.int64)

    def add(self, added: Added) -> None:
        super().add(added)
        told = (*added.token_ids, *self._answers[added.token_ids])
        self._told[added.slot, : len(told)] = told

    def choose(self, logits: torch.Tensor, slots: IntArray, positions: IntArray, *others: Any) -> Chosen:
        self._raise(logits, slots, positions)
        return super().choose(logits, slots, positions, *others)

    def verify(
        self, logits: torch.Tensor, slots: IntArray, positions: IntArray, *others: Any, **masks: Any
    ) -> Verified:
        counts = 1 + others[1]
        places = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        self._raise(logits, np.repeat(slots, counts), np.repeat(positions, counts) + places)
        return super().verify(logits, slots, positions, *others, **masks)

    @torch.inference_mode()
    def _raise(self, logits: torch.Tensor, slots: IntArray, positions: IntArray) -> None:
        told = torch.from_numpy(self._told[slots, positions])
        logits[torch.arange(len(told)), told] = RAISED


def edits(model_dir: Path, count: int) -> Answers:
    """Lines of a program, answered by the same lines with a name changed."""
    lines = Path(__file__).with_name("suite.py").read_text(encoding="utf-8").splitlines(keepends=True)
    encode, answers = load_tokenizer(model_dir).encode, {}
    for number in range(count):
        begin = number * 13 % (len(lines) - NUM_LINES)
        text = "".join(lines[begin : begin + NUM_LINES])
        name = re.compile(rf"\b{re.escape(random.Random(number).choice(re.findall(r'[a-z_]{4,}', text)))}\b")
        prompt, answer = (tuple(encode(one, add_special_tokens=False)) for one in (text, name.sub("renamed", text)))
        answers[prompt[-OUTPUT_LEN:]] = answer[-OUTPUT_LEN:]
    return answers


def noise(vocabulary_size: int, count: int) -> Answers:
    """Answers that repeat nothing."""
    prompts, answers = (random_prompts(count, OUTPUT_LEN, seed, vocabulary_size) for seed in (1, 2))
    return dict(zip(prompts, answers, strict=True))


def questions(count: int) -> Answers:
    """Those that the demo model answers at the greatest length, with its answers."""
    tokenizer = load_tokenizer(DEMO)
    template = tokenizer.chat_template
    assert template is not None
    expected = json.loads((DEMO / "expected.json").read_text(encoding="utf-8"))
    longest = sorted(expected.items(), key=lambda pair: len(pair[1]), reverse=True)[:count]
    prompts = (template.render([{"role": "user", "content": question}]) for question, _ in longest)
    return {
        tuple(tokenizer.encode(prompt, add_special_tokens=False)): tokenizer.encode(answer, add_special_tokens=False)
        for prompt, (_, answer) in zip(prompts, longest, strict=True)
    }


def measure_ngrams(engine: OfflineEngine, answers: Answers, *, num_turns: int) -> Point:
    """With answers that are told."""
    backend = engine.backend
    assert isinstance(backend, TorchBackend)
    own, backend._sampler = backend._sampler, Told(backend._sampler, answers)
    try:
        return _measure(backend, Drafts(NGram(), MAX_DRAFTS), answers, num_turns)
    finally:
        backend._sampler = own


def measure_draft_model(engine: OfflineEngine, answers: Answers, *, num_turns: int) -> Point:
    """With the model's own answers, of the lengths of these."""
    backend = engine.backend
    assert isinstance(backend, TorchBackend)
    return _measure(backend, Drafts(OnDevice(), DEMO_DRAFTS), answers, num_turns)


def _measure(backend: TorchBackend, drafts: Drafts, answers: Answers, num_turns: int) -> Point:
    """The rate of all these answers together, each as long as it is, behind the first token of each."""
    counted = [0, 0]
    for way in (None, drafts):
        _tokens_per_second(backend, way, answers, [0, 0])
    meter = Meter()
    turns = [
        (_tokens_per_second(backend, None, answers, [0, 0]), _tokens_per_second(backend, drafts, answers, counted))
        for _ in range(num_turns)
    ]
    plain, drafted = (statistics.median(one) for one in zip(*turns, strict=True))
    num_tokens, num_rows = counted
    ratio = statistics.median(two / one for one, two in turns)
    return Point(plain, drafted, ratio, num_tokens / num_rows - 1, meter.read())


def _tokens_per_second(backend: TorchBackend, drafts: Drafts | None, answers: Answers, counted: list[int]) -> float:
    """counted: sampled tokens and rows of decode steps, to add to."""
    engine = Engine(backend, max_queued_requests=2**31, drafting=drafts)
    missing = {str(number) for number in range(len(answers))}
    for number, (prompt, answer) in enumerate(answers.items()):
        engine.add(Request(str(number), prompt, Sampling(max_tokens=len(answer), temperature=0.0)))
    began, num_tokens = 0.0, 0
    while engine.has_work:
        events = engine.step()
        if missing:
            missing -= {event.request_id for event in events}
            began = time.perf_counter()
            continue
        of_step = sum(len(event.token_ids) for event in events)
        num_tokens += of_step
        counted[0] += of_step
        counted[1] += len(events)
    seconds = time.perf_counter() - began
    # The next engine finds all slots free.
    live = tuple(np.flatnonzero(backend._mirror.live).tolist())
    backend.launch(Batch(step=-1, rows=Rows(), released=live))
    backend.sample(-1, None)
    backend.collect(-1)
    return num_tokens / seconds
