"""Drafts with NxD Inference: its graphs for several tokens verify them, and every answer is as without drafts."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import pytest

from helpers.nxdi import Mode
from helpers.nxdi_engine import BLOCKS, SLOTS, Model, backend_for, library, refusals, settings_for
from helpers.told_drafts import Told, events_of, tokens_of
from neuron_runtime.backend.nxdi.buckets import all_graphs, limits_of
from neuron_runtime.backend.nxdi.foreign import differences
from neuron_runtime.backend.nxdi.library import application
from neuron_runtime.backend.nxdi.settings import Settings
from neuron_runtime.core import Request, Sampling, TokenEvent
from neuron_runtime.engine.loop import Engine

DRAFTS: dict[str, Any] = {"speculation": {"method": "NGram", "numTokens": 3}}


pytestmark = pytest.mark.usefixtures("one_core")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Model]:
    return {family: Model(tmp_path_factory.mktemp(family) / "model", family) for family in ("Llama", "Qwen3")}


class Run(NamedTuple):
    events: dict[str, list[TokenEvent]]
    num_steps: int


def run(model: Model, settings: Settings, requests: list[Request], folder: Path, drafting: Told | None = None) -> Run:
    backend = backend_for(model, settings, folder)
    backend.warm_up(lambda stage, share: None)
    engine = Engine(backend, drafting=drafting)
    events = events_of(engine, requests)
    assert engine.stats.last_step is not None
    engine.close()
    backend.close()
    return Run(events, engine.stats.last_step.step)


def some_requests(random: Random, model: Model, length: int, count: int) -> list[Request]:
    """Greedy ones, and sampled ones with all that the host applies; some reach the model's length."""
    size = model.config["vocab_size"]
    found = []
    for number in range(count):
        prompt = tuple(random.randrange(size) for _ in range(random.choice((1, 2, 4, 33, 60))))
        most = length - len(prompt)
        sampling = Sampling(
            max_tokens=random.choice((1, 9, 20, most)),
            temperature=random.choice((0.0, 0.0, 0.8)),
            seed=number,
            repetition_penalty=random.choice((1.0, 1.3)),
            logprobs=random.choice((None, 1)),
        )
        found.append(Request(f"{number}", prompt, sampling))
    return found


@pytest.mark.parametrize(("family", "mode"), [("Llama", "strict"), ("Llama", "damage"), ("Qwen3", "strict")])
def test_an_answer_has_the_same_tokens_with_and_without_drafts(
    family: str, mode: Mode, models: dict[str, Model], tmp_path: Path
) -> None:
    model, document = models[family], {**SLOTS, "sampling": "Host"}
    with library(mode=mode):
        plain = settings_for(model, **document)
        requests = some_requests(Random(5), model, plain.max_model_length, 12)
        without = run(model, plain, requests, tmp_path / "plain")
        settings = settings_for(model, **document, **DRAFTS)
        drafting = Told(tokens_of(without.events))
        found = run(model, settings, requests, tmp_path / "drafts", drafting)
    assert tokens_of(found.events) == tokens_of(without.events)
    for name, events in found.events.items():
        expected = [one.logprob for event in without.events[name] for one in event.logprobs]
        assert [one.logprob for event in events for one in event.logprobs] == pytest.approx(expected, abs=1e-4)
    assert 0 < drafting.num_accepted < drafting.num_drafts
    assert found.num_steps < 0.7 * without.num_steps


@pytest.mark.parametrize("version", ["0.7", "0.9"])
def test_a_single_row_has_drafts_up_to_the_models_length(
    version: str, models: dict[str, Model], tmp_path: Path
) -> None:
    """Also a prompt of one token behind a sequence that ended with its first one."""
    model, document = models["Llama"], {"limits": {"maxSequences": 1, "maxModelLength": 96}, "sampling": "Host"}
    prompts = {tuple(range(3, 63)): 1, (5,): 8, tuple(range(3, 80)): 96 - 77}
    requests = [
        Request(f"{number}", prompt, Sampling(max_tokens=most, temperature=0.0))
        for number, (prompt, most) in enumerate(prompts.items())
    ]
    with library(version=version):
        plain, drafting = (settings_for(model, **document, **given) for given in ({}, DRAFTS))
        without = run(model, plain, requests, tmp_path / "plain")
        expected = tokens_of(without.events)
        found = run(model, drafting, requests, tmp_path / "drafts", Told(expected))
    assert tokens_of(found.events) == expected
    assert found.num_steps < without.num_steps


def test_the_promised_length_is_reached_because_graphs_are_longer(models: dict[str, Model]) -> None:
    settings = settings_for(models["Llama"], **SLOTS, **DRAFTS)
    length = settings.max_model_length
    assert settings.neuron_config["seq_len"] == settings.token_buckets[-1] == length + 3
    assert settings.neuron_config["speculation_length"] == 4
    limits = limits_of(settings, 600.0)
    assert (limits.max_model_length, limits.max_drafts, limits.sampling) == (length, 3, "Host")
    assert not limits.drafts_every_row
    decodes = [graph.name for graph in all_graphs(settings) if graph.name.startswith("decode")]
    assert all(name.endswith("_of_4") for name in decodes)


def test_without_drafts_nothing_is_compiled_anew(models: dict[str, Model]) -> None:
    plain = settings_for(models["Llama"], **SLOTS)
    assert "speculation_length" not in plain.neuron_config
    for off in (0, None, False):
        assert settings_for(models["Llama"], **SLOTS, overrideNeuronConfig={"speculation_length": off}) == plain


def test_graphs_with_drafts_that_others_compiled_are_not_those_of_a_model_without(
    models: dict[str, Model], tmp_path: Path
) -> None:
    model, document = models["Llama"], {"sampling": "Host", "buckets": SLOTS["buckets"]}
    limits = SLOTS["limits"]
    with library():
        settings = settings_for(model, **document, limits=limits, **DRAFTS)
        application(settings, model.folder).compile(str(tmp_path / "theirs"))
    plain = settings_for(
        model,
        sampling="Host",
        limits={**limits, "maxModelLength": settings.compiled_length},
        buckets={"context": list(settings.context_buckets), "tokenGeneration": list(settings.token_buckets)},
    )
    assert differences(settings, model.config, tmp_path / "theirs") == []
    assert differences(plain, model.config, tmp_path / "theirs") == ["speculation_length: 4 instead of 0"]


@pytest.mark.parametrize(
    ("document", "path", "message"),
    [
        ({**BLOCKS}, "$.layout", "blocks cannot be combined with drafts"),
        ({"sampling": "Device"}, "$.sampling", "by the likeliest token alone: set Host"),
        ({"adapters": {"maxActive": 2}}, "$.adapters.maxActive", "adapters cannot be combined with drafts"),
        ({"limits": {"maxSequences": 4}, "buckets": {"sequences": [1, 2]}}, "$.buckets.sequences", "with drafts"),
        ({"buckets": {"context": [4, 128]}}, "$.buckets.context", "takes a prompt of 4 tokens for a row"),
        (
            {"config": {"architectures": ["MixtralForCausalLM"], "num_local_experts": 4, "num_experts_per_tok": 2}},
            "$.speculation.method",
            "only llama, mistral, qwen2, qwen3 are",
        ),
        (
            {"overrideNeuronConfig": {"speculation_length": 7}},
            "$.overrideNeuronConfig.speculation_length",
            "the other settings make it 4: set speculation instead",
        ),
        (
            {"overrideNeuronConfig": {"enable_fused_speculation": True}},
            "$.overrideNeuronConfig.enable_fused_speculation",
            "the other settings make it False: set speculation instead",
        ),
        (
            {"overrideNeuronConfig": {"flash_decoding_enabled": True}},
            "$.overrideNeuronConfig.flash_decoding_enabled",
            "whose graphs do not compile with it",
        ),
    ],
)
def test_what_the_library_cannot_combine_with_drafts_is_refused(
    document: dict[str, Any], path: str, message: str
) -> None:
    found = refusals({**DRAFTS, **document})
    assert list(found) == [path]
    assert message in found[path]
