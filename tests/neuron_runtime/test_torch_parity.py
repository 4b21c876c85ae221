"""Torch backend under the engine: greedy tokens match transformers, drawn tokens do not depend on other rows."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from helpers.torch_models import random_model
from helpers.torch_parity import check_greedy, serve
from neuron_runtime.core import Request, Sampling, StepKind

DEMO_MODEL = Path(__file__).parents[2] / "examples" / "demo-model"
DRAWN = {"temperature": 0.9, "top_p": 0.95, "top_k": 50}

SETTINGS: dict[str, dict[str, Any]] = {
    "slots": {"layout": "slots", "max_sequences": 4, "max_step_tokens": 64},
    "slots, prompts in chunks": {"layout": "slots", "max_sequences": 4, "max_step_tokens": 16},
    "blocks": {"layout": "blocks", "max_sequences": 4, "max_step_tokens": 64, "block_size": 8},
    "blocks, prompts in chunks": {"layout": "blocks", "max_sequences": 4, "max_step_tokens": 16, "block_size": 16},
    "blocks, so few that sequences are preempted": {
        "layout": "blocks",
        "max_sequences": 4,
        "max_step_tokens": 32,
        "block_size": 4,
        "num_blocks": 27,
        "max_model_length": 104,
    },
}


def requests(sampling: Mapping[str, Any], *, lengths: Sequence[int] = (1, 2, 7, 16, 33, 50, 64)) -> list[Request]:
    rng = np.random.default_rng(11)
    return [
        Request(
            request_id=f"r{i}",
            prompt_token_ids=tuple(rng.integers(0, 256, length).tolist()),
            sampling=Sampling(max_tokens=40 - 3 * i, **{"seed": 100 + i, **sampling}),
        )
        for i, length in enumerate(lengths)
    ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def drawn_alone(folder: Path) -> Mapping[str, Sequence[int]]:
    """Tokens of each drawing request served alone."""
    answers: dict[str, Sequence[int]] = {}
    for request in requests(DRAWN):
        answers |= serve(folder, [(0, request)], layout="slots", max_sequences=1)[0]
    return answers


@pytest.mark.parametrize("setting", SETTINGS)
def test_greedy_tokens_match_transformers(setting: str, folder: Path) -> None:
    asked = requests({"temperature": 0.0})
    tokens, engine, steps = serve(folder, [(3 * i, r) for i, r in enumerate(asked)], **SETTINGS[setting])
    assert (engine.stats.num_preemptions_total > 0) == ("preempted" in setting)
    assert steps.num_ahead + steps.num(StepKind.MIXED) > 0
    check_greedy(folder, asked, tokens)


def test_greedy_tokens_of_the_demo_model_match_transformers() -> None:
    tokenizer = Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json"))
    questions = list(json.loads((DEMO_MODEL / "expected.json").read_text()))[:12]
    asked = [
        Request(question, tuple(tokenizer.encode(question).ids), Sampling(max_tokens=24, temperature=0.0))
        for question in questions
    ]
    tokens, *_ = serve(DEMO_MODEL, list(enumerate(asked)), dtype="float32", max_model_length=128)
    check_greedy(DEMO_MODEL, asked, tokens)


@pytest.mark.parametrize("setting", SETTINGS)
def test_drawn_tokens_are_equal_alone_in_a_batch_and_after_preemption(
    setting: str, folder: Path, drawn_alone: Mapping[str, Sequence[int]]
) -> None:
    together, engine, _ = serve(folder, [(2 * i, r) for i, r in enumerate(requests(DRAWN))], **SETTINGS[setting])
    assert (engine.stats.num_preemptions_total > 0) == ("preempted" in setting)
    assert together == drawn_alone


def test_seed_and_choice_change_the_answer_but_the_request_id_does_not(folder: Path) -> None:
    prompt = tuple(range(20))

    def answer(name: str, seed: int, choice: int) -> tuple[int, ...]:
        sampling = Sampling(max_tokens=12, temperature=1.0, seed=seed, choice=choice)
        tokens, *_ = serve(folder, [(0, Request(name, prompt, sampling))], layout="slots")
        return tuple(tokens[name])

    assert answer("a", 1, 0) == answer("b", 1, 0)
    assert len({answer("a", 1, 0), answer("a", 2, 0), answer("a", 1, 1), answer("a", 2, 1)}) == 4


def test_a_greedy_row_is_unaffected_by_drawing_rows(folder: Path) -> None:
    drawing = requests({"temperature": 1.0})
    greedy = Request("greedy", tuple(range(9)), Sampling(max_tokens=20, temperature=0.0))
    alone, *_ = serve(folder, [(0, greedy)], layout="slots")
    beside, *_ = serve(folder, [(0, greedy), *((i, r) for i, r in enumerate(drawing))], layout="slots")
    assert beside["greedy"] == alone["greedy"]
