"""Models that see pictures give the tokens of transformers, however prompts are cut, shared, preempted or split."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.torch_models import NEAR_TIE, load_backend
from helpers.torch_pictures import (
    FAMILIES,
    request,
    seeing_logits,
    seeing_model,
    seeing_reference,
    seen,
    text,
)
from neuron_runtime.core import Request
from neuron_runtime.engine.loop import Engine

ROOM: dict[str, dict[str, Any]] = {
    "whole prompts, slots": {"layout": "slots", "max_sequences": 3, "max_step_tokens": 512},
    "chunks, slots": {"layout": "slots", "max_sequences": 3, "max_step_tokens": 11},
    "chunks, blocks": {"layout": "blocks", "max_sequences": 3, "max_step_tokens": 11, "block_size": 8},
}


class Served:
    """An engine over a model, and what it has answered."""

    def __init__(self, folder: Path, **config: Any) -> None:
        self.backend = load_backend(folder, **config)
        self.backend.warm_up(lambda what, share: None)
        self.engine = Engine(self.backend)
        assert self.backend._vision is not None
        self.vision = self.backend._vision

    def answers(self, *asked: Request) -> dict[str, list[int]]:
        tokens: dict[str, list[int]] = {one.request_id: [] for one in asked}
        for one in asked:
            self.engine.add(one)
        while self.engine.has_work:
            for event in self.engine.step():
                tokens[event.request_id] += event.token_ids
        return tokens

    def close(self) -> None:
        self.backend.close()


def check(model: Any, asked: Request, answer: list[int]) -> None:
    assert len(answer) == asked.sampling.max_tokens
    logits = seeing_logits(model, asked, answer)
    best = logits.topk(2).values
    behind = best[:, 0] - logits.gather(1, torch.tensor(answer).unsqueeze(1)).squeeze(1)
    assert (behind < NEAR_TIE).all(), f"{asked.request_id}: {answer}"
    assert (best[:, 0] - best[:, 1]).max() > NEAR_TIE


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def folder(family: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return seeing_model(tmp_path_factory.mktemp("model"), FAMILIES[family])


@pytest.fixture(scope="module")
def model(folder: Path) -> Any:
    return seeing_reference(folder)


def prompts(name: str) -> list[Request]:
    """Pictures of odd sizes; several; text before, between and after them, or none."""
    kind = FAMILIES[name]
    a, b, c = seen(kind, 16, 64, 1), seen(kind, 48, 32, 2), seen(kind, 32, 16, 3)
    return [
        request("text before and after", [text(5), a, text(3, 1)]),
        request("several", [text(2, 2), a, text(7, 3), b, c, text(4, 4)]),
        request("none before", [b, text(9, 5)]),
        request("no text after", [text(6, 6), c]),
        request("no picture", [text(20, 7)]),
        request("the same twice", [a, text(1, 8), a, text(2, 9)]),
    ]


@pytest.mark.parametrize("room", ROOM)
def test_answers_about_pictures_are_those_of_transformers(family: str, folder: Path, model: Any, room: str) -> None:
    served = Served(folder, **ROOM[room])
    try:
        asked = prompts(family)
        answers = served.answers(*asked)
        for one in asked:
            check(model, one, answers[one.request_id])
        assert served.vision.num_kept == 0
    finally:
        served.close()
