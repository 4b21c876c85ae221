"""A draft model on the torch backend: answers are as without it, and a model that drafts for itself is always right."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from helpers.device_drafts import BLOCKS, MAX_DRAFTS, SLOTS, EverySecond, some_requests
from helpers.told_drafts import events_of, tokens_of
from helpers.torch_models import load_backend, random_model
from neuron_runtime.backend.torch import draft_model
from neuron_runtime.config import DraftSource, Speculation
from neuron_runtime.core import Request, Sampling
from neuron_runtime.engine.loop import Engine
from neuron_runtime.errors import InvalidConfig


def with_draft(folder: Path) -> Speculation:
    return Speculation(method="Draft", num_tokens=MAX_DRAFTS, model=DraftSource(uri=folder.as_uri()))


@pytest.mark.parametrize("period", [1, 2, 5])
@pytest.mark.parametrize("layout", [BLOCKS, SLOTS])
def test_a_model_that_drafts_for_itself_is_always_right(layout: dict[str, Any], period: int, tmp_path: Path) -> None:
    folder = random_model(tmp_path / "model")
    backend = load_backend(folder, **layout)
    expected = tokens_of(events_of(Engine(backend), some_requests()))
    backend.close()
    backend = load_backend(folder, speculation=with_draft(folder), **layout)
    drafting = EverySecond(period)
    found = tokens_of(events_of(engine := Engine(backend, drafting=drafting), some_requests()))
    backend.close()
    assert found == expected
    assert sum(count for count, _ in drafting.learned) > 20
    assert all(count == accepted for count, accepted in drafting.learned), drafting.learned
    assert layout["layout"] == "slots" or engine.stats.num_prefix_hits_total > 0


@pytest.mark.parametrize("period", [1, 2, 10**9])
def test_a_prefix_whose_answer_had_few_drafts_or_none_is_computed_before_it_is_used(
    period: int, tmp_path: Path
) -> None:
    """As the next question of a chat, whose prefix is the prompt and the answer before."""
    folder = random_model(tmp_path)
    backend = load_backend(folder, speculation=with_draft(folder), **BLOCKS)
    drafting = EverySecond(period)
    engine = Engine(backend, drafting=drafting)
    prompt, greedy = tuple(range(20)), Sampling(temperature=0.0, max_tokens=40)
    answer = tokens_of(events_of(engine, [Request("first", prompt, greedy)]))["first"]
    drafting.learned.clear()
    drafting.period = 1
    events_of(engine, [Request(f"next {last}", (*prompt, *answer, last), greedy) for last in (7, 8)])
    backend.close()
    assert engine.stats.num_prefix_hits_total >= 2 * 56
    assert len(drafting.learned) > 10
    assert all(count == accepted for count, accepted in drafting.learned), drafting.learned


def test_nothing_is_learned_of_rows_for_whose_drafts_there_was_no_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next question of a chat, whose long prefix the draft model computes over some steps."""
    monkeypatch.setattr(draft_model, "MAX_CAUGHT_UP", 16)
    folder = random_model(tmp_path)
    backend = load_backend(folder, speculation=with_draft(folder), **BLOCKS)
    drafting = EverySecond(10**9)
    engine = Engine(backend, drafting=drafting)
    prompt, greedy = tuple(range(20)), Sampling(temperature=0.0, max_tokens=40)
    answer = tokens_of(events_of(engine, [Request("first", prompt, greedy)]))["first"]
    drafting.period, drafting.num_asked = 1, 0
    events_of(engine, [Request("next", (*prompt, *answer, 7), greedy)])
    backend.close()
    assert 8 < len(drafting.learned) <= drafting.num_asked - 2
    assert all(count == accepted for count, accepted in drafting.learned), drafting.learned
    assert engine.stats.num_drafts_total == sum(count for count, _ in drafting.learned)


def test_another_model_drafts_and_changes_no_answer(tmp_path: Path) -> None:
    folder, other = random_model(tmp_path / "model"), random_model(tmp_path / "other", num_hidden_layers=1)
    backend = load_backend(folder, **BLOCKS)
    expected = tokens_of(events_of(Engine(backend), some_requests()))
    backend.close()
    backend = load_backend(folder, speculation=with_draft(other), **BLOCKS)
    drafting = EverySecond(1)
    assert tokens_of(events_of(Engine(backend, drafting=drafting), some_requests())) == expected
    backend.close()
    assert any(accepted < count for count, accepted in drafting.learned)


def test_a_draft_model_with_other_tokens_is_refused(tmp_path: Path) -> None:
    folder, other = random_model(tmp_path / "model"), random_model(tmp_path / "other", vocab_size=300)
    with pytest.raises(InvalidConfig, match="300 tokens, and the model 256") as refused:
        load_backend(folder, speculation=with_draft(other), **BLOCKS)
    assert refused.value.field == "$.speculation.model.uri"
