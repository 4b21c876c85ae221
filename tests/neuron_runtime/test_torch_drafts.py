"""Rows with drafts on the torch backend: the answers are those of decoding one token at a time."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from helpers.adapters import write_adapter
from helpers.chat_model import byte_level_tokenizer
from helpers.guides import mask_of
from helpers.told_drafts import Told, events_of, tokens_of
from helpers.torch_models import MODELS, load_backend, random_model
from helpers.torch_parity import LAYOUTS, load_adapters, random_sequences
from neuron_runtime.backend.torch.backend import TorchBackend
from neuron_runtime.backend_protocol import IllegalBatch
from neuron_runtime.checkpoint import read_config
from neuron_runtime.config import AdapterOptions
from neuron_runtime.core import KNOWN, Added, Batch, Form, Late, Request, Rows, Sampling, StepOutput, TokenEvent
from neuron_runtime.engine.loop import Engine
from neuron_runtime.grammars.guides import GrammarGuides
from neuron_runtime.text.tokenizer import Tokenizer

GREEDY = Sampling(temperature=0.0)
PROMPT = tuple(range(40, 53))
MAX_DRAFTS = 4


def some_requests() -> list[Request]:
    """Greedy and drawn ones, with what changes logits and what is reported; one up to the model's length."""
    one, two, three, four = (tuple(prompt) for prompt in random_sequences(40, 3, 21, 70))
    drawn = Sampling(temperature=0.9, seed=5, max_tokens=20)
    penalised = replace(drawn, top_p=0.9, frequency_penalty=0.6, repetition_penalty=1.2, presence_penalty=0.3)
    return [
        Request("greedy", one, replace(GREEDY, max_tokens=24)),
        Request("drawn", two, drawn),
        Request("long", four, replace(GREEDY, max_tokens=88 - len(four))),
        Request("reported", three, replace(GREEDY, logprobs=2, prompt_logprobs=1, max_tokens=16)),
        Request("penalised", one, replace(penalised, logprobs=1)),
        Request("biased", three, replace(drawn, min_tokens=6, stop_token_ids=frozenset(range(0, 256, 3)), min_p=0.05)),
        Request("worded", two, replace(GREEDY, bad_words=((7,), (9, 11)), logit_bias=((9, 4.0), (11, 4.0)))),
    ]


def check_reported(events: list[TokenEvent], expected: list[TokenEvent]) -> None:
    """Equal log-probabilities, token by token."""
    found, others = ([one for event in of for one in event.logprobs] for of in (events, expected))
    assert [one.token_id for one in found] == [one.token_id for one in others]
    assert [one.logprob for one in found] == pytest.approx([one.logprob for one in others], abs=1e-4)
    assert [token for one in found for token, _ in one.top] == [token for one in others for token, _ in one.top]


@pytest.mark.parametrize(
    ("name", "layout"),
    [(name, LAYOUTS[number % 2]) for number, name in enumerate(MODELS)],
)
def test_answers_with_drafts_are_those_without(name: str, layout: str, tmp_path: Path) -> None:
    """Beside prompts, in parts too, and rows without drafts; the cache is too small for all, so some are preempted."""
    folder = random_model(tmp_path, **MODELS[name])
    config: dict[str, Any] = {"layout": layout, "max_sequences": 4, "max_model_length": 88, "max_step_tokens": 24}
    if layout == "blocks":
        config |= {"block_size": 8, "num_blocks": 24}
    events, told = [], Told({})
    for max_drafts in (0, MAX_DRAFTS):
        backend = load_backend(folder, max_drafts=max_drafts, **config)
        told = Told(tokens_of(events[0])) if max_drafts else told
        events.append(events_of(Engine(backend, drafting=told if max_drafts else None), some_requests()))
        backend.close()
    without, with_drafts = events
    assert tokens_of(with_drafts) == tokens_of(without)
    for request in some_requests():
        check_reported(with_drafts[request.request_id], without[request.request_id])
    assert 20 < told.num_accepted < told.num_drafts


def test_answers_of_adapters_with_drafts_are_those_without(tmp_path: Path) -> None:
    folder = random_model(tmp_path / "model")
    adapters = {
        name: write_adapter(tmp_path / name, read_config(folder), seed=seed, scale=0.5)
        for seed, name in enumerate(("one", "two"))
    }
    asked = [
        Request(f"{number}", tuple(prompt), replace(GREEDY, max_tokens=16), adapter=adapter)
        for number, (prompt, adapter) in enumerate(
            zip(random_sequences(9, 9, 9, 9), ("", "one", "two", ""), strict=True)
        )
    ]
    answers: list[dict[str, list[int]]] = []
    for max_drafts in (0, MAX_DRAFTS):
        options = AdapterOptions(max_active=2, max_rank=4)
        backend = load_backend(folder, max_drafts=max_drafts, adapters=options, max_sequences=4, max_model_length=64)
        engine = Engine(backend, drafting=Told(answers[0]) if max_drafts else None)
        load_adapters(engine, adapters)
        answers.append(tokens_of(events_of(engine, asked)))
        backend.close()
    assert answers[0] == answers[1]


def test_answers_that_keep_to_a_form_are_with_drafts_those_without(tmp_path: Path) -> None:
    """Drafts are cut where they leave the form, the text that it forces is drafted, and each position has its mask."""
    folder, tokenizer = random_model(tmp_path), Tokenizer(byte_level_tokenizer())
    properties = {"a long name": {"enum": ["one value", "one other"]}, "n": {"type": "integer"}}
    forms = [
        Form("json_schema", json.dumps({"type": "object", "properties": properties, "required": list(properties)})),
        Form("choice", '["the first of two", "the first of three"]'),
        Form("regex", "([ab]{3},)*"),
    ]
    asked = [
        Request(
            f"{at} {temperature}", (5, 6, 7 + at), replace(GREEDY, temperature=temperature, form=form, max_tokens=40)
        )
        for at, form in enumerate(forms)
        for temperature in (0.0, 1.0)
    ]
    asked = [replace(one, sampling=replace(one.sampling, stop_token_ids=frozenset((2,)))) for one in asked]
    answers: list[dict[str, list[int]]] = []
    for max_drafts in (0, MAX_DRAFTS):
        backend = load_backend(folder, max_drafts=max_drafts, max_sequences=4, max_model_length=64)
        guides, told = GrammarGuides(lambda: tokenizer, backend.limits.vocabulary_size), Told(dict(*answers))
        engine = Engine(backend, guides=guides, drafting=told if max_drafts else None)
        for one in asked:
            engine.add(one)
        events: dict[str, list[TokenEvent]] = {}
        while engine.has_work:
            for event in engine.step():
                events.setdefault(event.request_id, []).append(event)
        answers.append(tokens_of(events))
        guides.close()
        backend.close()
    assert answers[1] == answers[0]
    assert told.num_accepted > 10


# Explicit batches


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(params=LAYOUTS)
def backend(request: pytest.FixtureRequest, folder: Path) -> Iterator[TorchBackend]:
    config = {"block_size": 8} if request.param == "blocks" else {}
    backend = load_backend(
        folder, layout=request.param, max_sequences=4, max_model_length=32, max_drafts=MAX_DRAFTS, **config
    )
    yield backend
    backend.close()


def begin(backend: TorchBackend, slot: int, num_blocks: int = 4, sampling: Sampling = GREEDY) -> int:
    """A sequence with `PROMPT` in this slot; returns its first token."""
    blocks = (slot,) if backend.limits.layout == "slots" else tuple(range(slot * 4, slot * 4 + num_blocks))
    added = Added(slot, PROMPT, len(PROMPT), sampling, blocks)
    rows = Rows((slot,), (0,), (len(PROMPT),), (-1,), (KNOWN,), (True,))
    return run(backend, Batch(0, rows, 1, added=(added,))).token_ids[0][0]


def run(backend: TorchBackend, batch: Batch, late: Late | None = None) -> StepOutput:
    backend.launch(batch)
    backend.sample(batch.step, late)
    return backend.collect(batch.step)


def row(slot: int, start: int, token: int, *drafts: int) -> Batch:
    return Batch(1, Rows((slot,), (start,), (1 + len(drafts),), (token,), (KNOWN,), (True,), (drafts,)))


def one_by_one(backend: TorchBackend, slot: int, count: int) -> list[int]:
    """The next tokens of a new sequence."""
    tokens = [begin(backend, slot)]
    for at in range(count):
        tokens += run(backend, row(slot, len(PROMPT) + at, tokens[-1])).token_ids[0]
    return tokens


def test_a_row_gets_its_accepted_drafts_and_one_more_token(backend: TorchBackend) -> None:
    expected, first = one_by_one(backend, 0, 12), begin(backend, 1)
    wrong = (expected[3] + 1) % 256
    found = run(backend, row(1, 13, first, expected[1], expected[2], wrong, expected[4])).token_ids
    assert found == (tuple(expected[1:4]),)
    # What the rejected drafts left in the cache is overwritten before anything reads it.
    found = run(backend, row(1, 16, expected[3], *expected[4:8])).token_ids
    assert found == (tuple(expected[4:9]),)
    assert run(backend, row(1, 21, expected[8], wrong)).token_ids == (tuple(expected[9:10]),)


def test_drafts_reach_the_end_of_the_length_and_of_the_blocks(backend: TorchBackend) -> None:
    expected = one_by_one(backend, 0, 19)
    begin(backend, 1)
    last = backend.limits.max_model_length - 1
    run(backend, row(1, 13, expected[0], *expected[1:5]))
    for start in (18, 23):
        run(backend, row(1, start, expected[start - 13], *expected[start - 12 : start - 8]))
    found = run(backend, row(1, last - 3, expected[last - 16], *expected[last - 15 : last - 12])).token_ids
    assert found == (tuple(expected[last - 15 : last - 11]),)
    with pytest.raises(IllegalBatch, match="positions 28 to 33"):
        run(backend, row(1, last - 3, expected[last - 16], 1, 2, 3, 4))
    if backend.limits.layout == "blocks":
        first = begin(backend, 2, num_blocks=2)
        with pytest.raises(IllegalBatch, match=r"positions 13 to 17 .* in 2 blocks"):
            run(backend, row(2, 13, first, 1, 2, 3))


def test_each_position_has_its_own_mask(backend: TorchBackend) -> None:
    first = begin(backend, 0)
    masks = [(3, 4), (9, 10), (200,)]
    bits = memoryview(b"".join(mask_of(one, 256) for one in masks))
    late = Late((0,), bits, num_positions=3)
    (one,) = run(backend, row(0, 13, first, 5, 9), late).token_ids[0]
    begin(backend, 1)
    also_one, two = run(backend, row(1, 13, first, one, 5), late).token_ids[0]
    begin(backend, 2)
    assert run(backend, row(2, 13, first, one, two), late).token_ids[0] == (one, two, 200)
    assert also_one == one
    assert one in masks[0]
    assert two in masks[1]


ILLEGAL: dict[str, tuple[dict[str, Any], str]] = {
    "more than a row may have": ({"num_tokens": (6,), "drafts": ((1, 2, 3, 4, 5),)}, "at most 4 drafts"),
    "another number than it feeds": ({"num_tokens": (2,)}, "feed its token and"),
    "of a row that waits": ({"after": (0,), "start": (0,)}, "wait for no row"),
}


@pytest.mark.parametrize("case", ILLEGAL)
def test_illegal_drafts_are_refused_with_the_fault(case: str, backend: TorchBackend) -> None:
    changes, message = ILLEGAL[case]
    first = begin(backend, 0)
    rows = msgspec.structs.replace(row(0, 13, first, 1, 2).rows, **changes)
    with pytest.raises(IllegalBatch, match=message):
        run(backend, Batch(1, rows))


def test_drafts_of_a_prompt_and_rows_behind_drafts_are_refused(backend: TorchBackend) -> None:
    first = begin(backend, 0)
    with_drafts = row(0, 13, first, 1, 2)
    with pytest.raises(IllegalBatch, match="it must decode"):
        run(backend, msgspec.structs.replace(with_drafts, num_prefills=1))
    run(backend, with_drafts)
    behind = Batch(2, Rows((0,), (0,), (1,), (-1,), (0,), (True,)))
    with pytest.raises(IllegalBatch, match="waits for a row with drafts"):
        run(backend, behind)
