"""The NxD Inference backend through the engine: tokens equal to those of transformers, whatever else happens.

Runs on the fake in its strict mode, which refuses what a device would answer wrongly, and in its damaging mode, or with
NXDI_UNDER_TEST=installed on the NxD Inference of this machine.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest

from helpers.nxdi_engine import BLOCKS, FAMILIES, SLOTS, Model, backend_for, library, settings_for
from neuron_runtime.core import BackendLimits, Request, Sampling
from neuron_runtime.engine.loop import Engine
from neuron_runtime.engine.stats import EngineStats

NUM_REQUESTS = int(os.environ.get("NEURON_SERVING_NXDI_REQUESTS", "16"))

MODES: dict[str, dict[str, Any]] = {
    "slots": SLOTS,
    "row buckets": {**SLOTS, "buckets": {**SLOTS["buckets"], "sequences": [1, 2]}},
    "slots, asynchronous": {**SLOTS, "asyncMode": True},
    "slots, logits": {**SLOTS, "sampling": "DeviceWithLogits"},
    "slots, host": {**SLOTS, "sampling": "Host"},
    "blocks": BLOCKS,
    "blocks, asynchronous": {**BLOCKS, "asyncMode": True},
    "blocks, logits": {**BLOCKS, "sampling": "DeviceWithLogits"},
    "blocks, host": {**BLOCKS, "sampling": "Host"},
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Model]:
    return {family: Model(tmp_path_factory.mktemp("model") / "model", family) for family in FAMILIES}


@pytest.fixture(autouse=True)
def own_work_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BASE_COMPILE_WORK_DIR", str(tmp_path / "work"))


def some_requests(random: Random, limits: BackendLimits, vocabulary_size: int) -> Iterator[Request]:
    """Greedy requests, whose tokens are known, beside others with all kinds of parameters."""
    longest = (limits.max_model_length if limits.chunks_prefill else limits.longest_prefill) - 1
    text = [random.randrange(vocabulary_size) for _ in range(longest)]
    for number in range(NUM_REQUESTS):
        length = random.choice((1, 2, 31, 32, 33, random.randint(1, longest), longest))
        common = random.choice((0, 0, length // 2, length - 1))
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


def serve(model: Model, settings_document: dict[str, Any], folder: Path, seed: int) -> tuple[EngineStats, Counter[str]]:
    """Random arrivals and aborts; checks every greedy request. Returns the statistics and the steps of each graph."""
    random = Random(seed)
    settings = settings_for(model, **settings_document)
    backend = backend_for(model, settings, folder)
    backend.warm_up(lambda stage, share: None)
    engine = Engine(backend)
    waiting = list(some_requests(random, backend.limits, settings.vocabulary_size))
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
            graphs[last.bucket] += 1
    backend.close()
    for one in requests:
        if output := outputs[one.request_id]:
            assert max(output) < settings.vocabulary_size
            if one.sampling.greedy:
                model.check(one, output)
        assert one.request_id in ended
    return engine.stats, graphs


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("damage", ["strict", "damage"])
@pytest.mark.parametrize("version", ["0.7", "0.9"])
def test_tokens_equal_those_of_transformers_in_every_mode(
    models: dict[str, Model], tmp_path: Path, mode: str, damage: Any, version: str
) -> None:
    if mode == "row buckets" and version == "0.7":
        pytest.skip("0.7 has no buckets of rows")
    with library(version, damage):
        stats, graphs = serve(models["Llama"], MODES[mode], tmp_path / "artifact", seed=len(mode))
    assert len(graphs) > 3
    assert "blocks" not in mode or stats.num_prefix_hits_total


@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "Llama"])
@pytest.mark.parametrize("mode", ["slots", "blocks"])
def test_tokens_equal_those_of_transformers_for_every_family(
    models: dict[str, Model], tmp_path: Path, family: str, mode: str
) -> None:
    with library():
        serve(models[family], MODES[mode], tmp_path / "artifact", seed=len(family))
