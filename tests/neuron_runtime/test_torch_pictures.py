"""Models that see pictures give the tokens of transformers, however prompts are cut, shared, preempted or split."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from helpers.torch_pictures import (
    FAMILIES,
    Served,
    check,
    renamed,
    request,
    seeing_model,
    seeing_reference,
    seen,
    text,
)
from neuron_runtime.core import Request

ROOM: dict[str, dict[str, Any]] = {
    "whole prompts, slots": {"layout": "slots", "max_sequences": 3, "max_step_tokens": 512},
    "chunks, slots": {"layout": "slots", "max_sequences": 3, "max_step_tokens": 11},
    "chunks, blocks": {"layout": "blocks", "max_sequences": 3, "max_step_tokens": 11, "block_size": 8},
}


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
            check(model, one, answers[one.request_id], served.logprobs[one.request_id])
        assert served.vision.num_kept == 0
    finally:
        served.close()


def test_a_shared_prefix_computes_no_picture_again(family: str, folder: Path, model: Any) -> None:
    served = Served(folder, layout="blocks", max_sequences=2, max_step_tokens=11, block_size=4)
    try:
        kind = FAMILIES[family]
        a, b = seen(kind, 48, 32, 2), seen(kind, 32, 16, 3)
        first, same = (request(name, [text(5), a, text(5, 1)]) for name in ("first", "same"))
        other = request("other", [text(5), a, text(5, 1), b, text(3, 3)])
        assert served.answers(first) | served.answers(same) == served.answers(first, same)
        assert served.vision.num_encoded == 1
        check(model, other, served.answers(other)["other"], served.logprobs["other"])
        assert (served.vision.num_encoded, served.vision.num_kept) == (2, 0)
    finally:
        served.close()


def test_pictures_of_a_preempted_sequence_are_computed_again(family: str, folder: Path) -> None:
    kind = FAMILIES[family]
    asked = [request(name, [text(9), seen(kind, 32, 48, i), text(3, i)], max_tokens=28) for i, name in enumerate("ab")]
    length = len(asked[0].prompt_token_ids)
    few, found = 2 * -(-length // 4) + 3, []
    for num_blocks in (few, 100):
        room = {"num_blocks": num_blocks, "block_size": 4, "max_model_length": length + 29, "max_sequences": 2}
        served = Served(folder, layout="blocks", prefix_caching="disabled", **room)
        found.append(served.answers(*asked))
        again = int(num_blocks == few)
        assert served.engine.stats.num_preemptions_total == again
        assert (served.vision.num_encoded, served.vision.num_kept) == (2 + again, 0)
        served.close()
    assert found[0] == found[1]


NEW = {
    "language_model.model.": "model.language_model.",
    "language_model.lm_head.": "lm_head.",
    "vision_tower.": "model.vision_tower.",
    "multi_modal_projector.": "model.multi_modal_projector.",
}


def test_checkpoints_of_old_and_of_new_transformers_are_read(family: str, folder: Path, tmp_path: Path) -> None:
    asked = request("a", [text(5), seen(FAMILIES[family], 16, 32, 1), text(3)])
    found = []
    for names in ({new: old for old, new in NEW.items()}, NEW):
        copy = tmp_path / str(len(found))
        shutil.copytree(folder, copy)
        renamed(copy, names)
        served = Served(copy, layout="slots", max_sequences=2)
        found.append(served.answers(asked))
        served.close()
    assert found[0] == found[1]
