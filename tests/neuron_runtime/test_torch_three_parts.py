"""Rotary positions with three parts are those of transformers, and cost nothing where no sequence has pictures."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from helpers.torch_models import load_backend
from helpers.torch_pictures import FAMILIES, request, seeing_model, seeing_reference, seen, text
from neuron_runtime.backend.slots import FedRows
from neuron_runtime.backend.torch.cache import KVCache, StepRows
from neuron_runtime.backend.torch.three_parts import Grid, ThreeParts
from neuron_runtime.core import TokenEvent
from neuron_runtime.engine.loop import Engine

LINES = np.arange(4).reshape(4, 1)


def turned(three_parts: ThreeParts, *rows: tuple[int, int, int]) -> torch.Tensor:
    """Of rows (slot, start, end)."""
    slots, start, ends = np.array(rows).T
    cache = KVCache.empty((None,), (4, 1, 64, 2), torch.float32)
    plan = cache.plan(StepRows(start, ends - start, LINES[slots]))
    fed = FedRows(slots, start, ends, slots, slots, slots > 0, 0)
    found = three_parts.turned(fed, plan)
    assert (found is plan) == (not three_parts._known)
    return found.positions


def test_positions_of_cut_sequences_are_those_of_transformers(tmp_path: Path) -> None:
    family = FAMILIES["Qwen2.5-VL"]
    pictures = [seen(family, *size, seed=0) for size in ((32, 64), (48, 16))]
    tokens = torch.tensor([[*text(3), *pictures[0].tokens, *text(2), *pictures[1].tokens, *text(4)]])
    grids = torch.cat([one.pixels["image_grid_thw"] for one in pictures])
    model = seeing_reference(seeing_model(tmp_path, family)).model
    kinds = (
        {"mm_token_type_ids": (tokens == 10).int()}
        if "mm_token_type_ids" in inspect.signature(model.get_rope_index).parameters
        else {}
    )
    expected, shift = model.get_rope_index(tokens, image_grid_thw=grids, **kinds)

    three_parts = ThreeParts()
    assert turned(three_parts, (0, 0, 5), (1, 7, 8)).tolist() == [0, 1, 2, 3, 4, 7]
    three_parts.add(1, [Grid(4, (1, 2, 4)), Grid(4 + 8 + 2 + 2, (1, 3, 1))])
    end = tokens.shape[1]
    assert torch.equal(turned(three_parts, (1, 0, end)), expected[:, 0].T)
    both = turned(three_parts, (0, 3, 5), (1, 6, end + 2), (2, 9, 10))
    assert torch.equal(both[2 : 2 + end - 6], expected[:, 0, 6:].T)
    assert both[:2].tolist() == [[3] * 3, [4] * 3]
    assert both[-3:].tolist() == [[place + int(shift)] * 3 for place in (end, end + 1)] + [[9] * 3]
    assert turned(three_parts, (1, end, end + 1), (0, 5, 6)).tolist() == [end + int(shift), 5]
    three_parts.remove(1)
    assert turned(three_parts, (1, 0, 3)).tolist() == [0, 1, 2]


def test_a_prompt_whose_pictures_are_in_the_prefix_cache_has_the_answer_of_the_first(tmp_path: Path) -> None:
    family = FAMILIES["Qwen2.5-VL"]
    folder = seeing_model(tmp_path, family)
    backend = load_backend(folder, layout="blocks", max_sequences=2, max_step_tokens=64, block_size=4)
    try:
        engine, answers = Engine(backend), []
        for name in ("first", "second"):
            engine.add(request(name, [text(3), seen(family, 48, 64, 1), text(6, 2)]))
            answers.append([token for event in steps(engine) for token in event.token_ids])
        assert answers[0] == answers[1]
        assert backend._vision is not None
        assert backend._vision.num_encoded == 1
    finally:
        backend.close()


def steps(engine: Engine) -> Iterator[TokenEvent]:
    while engine.has_work:
        yield from engine.step()
