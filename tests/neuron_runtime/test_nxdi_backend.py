"""The NxD Inference backend through the engine: tokens equal to those of transformers, whatever else happens.

Runs on the fake in its strict mode, which refuses what a device would answer wrongly, and in its damaging mode, or with
NXDI_UNDER_TEST=installed on the NxD Inference of this machine.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

import pytest

from helpers.nxdi import Mode, installed
from helpers.nxdi_engine import BLOCKS, FAMILIES, SLOTS, Model, backend_for, library, serve_checked, settings_for
from neuron_runtime.core import Request, Sampling
from neuron_runtime.engine.loop import Engine
from neuron_runtime.engine.stats import EngineStats

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


def serve(model: Model, document: dict[str, Any], folder: Path, seed: int) -> tuple[EngineStats, Counter[str]]:
    return serve_checked(model, backend_for(model, settings_for(model, **document), folder), seed)


def has_row_buckets() -> bool:
    from neuronx_distributed_inference.models.config import NeuronConfig

    return hasattr(NeuronConfig(), "token_generation_batches")


@pytest.mark.parametrize("mode", MODES)
def test_tokens_equal_those_of_transformers_in_every_mode(models: dict[str, Model], tmp_path: Path, mode: str) -> None:
    with library():
        if mode == "row buckets" and installed() and not has_row_buckets():
            pytest.skip("came with NxD Inference 0.8")
        stats, graphs = serve(models["Llama"], MODES[mode], tmp_path / "artifact", seed=1)
    assert len(graphs) > 3
    assert stats.num_prefix_hits_total if "blocks" in mode else not stats.num_prefix_queries_total


@pytest.mark.parametrize(
    ("mode", "version", "harm"),
    [
        ("slots", "0.7", "strict"),
        ("blocks", "0.7", "damage"),
        ("blocks", "0.8", "damage"),
        ("slots, asynchronous", "0.9", "damage"),
        ("blocks, asynchronous", "0.7", "strict"),
    ],
)
def test_tokens_equal_those_of_transformers_in_other_versions_and_where_errors_do_harm(
    models: dict[str, Model], tmp_path: Path, mode: str, version: str, harm: Mode
) -> None:
    with library(version, harm):
        serve(models["Llama"], MODES[mode], tmp_path / "artifact", seed=2)


@pytest.mark.parametrize(("family", "mode"), [("Mistral", "blocks"), ("Qwen2.5", "slots"), ("Qwen3", "blocks")])
def test_tokens_equal_those_of_transformers_for_every_family(
    models: dict[str, Model], tmp_path: Path, family: str, mode: str
) -> None:
    with library():
        serve(models[family], MODES[mode], tmp_path / "artifact", seed=3)


@pytest.mark.parametrize(("version", "harm"), [("0.7", "damage"), ("0.9", "strict"), ("0.9", "damage")])
@pytest.mark.parametrize("prefixes", ["enabled", "disabled"])
def test_preempted_sequences_go_on_with_the_tokens_of_transformers(
    models: dict[str, Model], tmp_path: Path, version: str, harm: Mode, prefixes: str
) -> None:
    random, model = Random(4), models["Llama"]
    few = {**BLOCKS, "prefixCaching": prefixes, "limits": {**BLOCKS["limits"], "numBlocks": 17}}
    with library(version, harm):
        settings = settings_for(model, **few)
        engine = Engine(backend_for(model, settings, tmp_path / "artifact"))
        requests = []
        for number, length in enumerate((100, 120, 90, 127, 60, 128)):
            prompt = tuple(random.randrange(settings.vocabulary_size) for _ in range(length))
            requests.append(Request(str(number), prompt, Sampling(temperature=0.0, max_tokens=80)))
            engine.add(requests[-1])
        outputs: dict[str, list[int]] = {one.request_id: [] for one in requests}
        while engine.has_work:
            for event in engine.step():
                outputs[event.request_id] += event.token_ids
    assert engine.stats.num_preemptions_total
    for one in requests:
        assert len(outputs[one.request_id]) == 80
        model.check(one, outputs[one.request_id])


@pytest.mark.long
@pytest.mark.parametrize("seed", range(10, 14))
@pytest.mark.parametrize(
    ("version", "harm"), [(version, harm) for version in ("0.7", "0.8", "0.9") for harm in ("strict", "damage")]
)
@pytest.mark.parametrize("mode", [mode for mode in MODES if mode != "row buckets"])
def test_tokens_equal_those_of_transformers_over_thousands_of_steps(
    models: dict[str, Model], tmp_path: Path, *, mode: str, version: str, harm: Mode, seed: int
) -> None:
    with library(version, harm):
        serve(models[list(FAMILIES)[seed % len(FAMILIES)]], MODES[mode], tmp_path / "artifact", seed)
