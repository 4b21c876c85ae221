"""Benchmarks in process: generated models, and formulas of rates on a small model."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from bench import model as models
from bench.model import SHAPES, byte_level_vocabulary, model_folder_or_uri, random_model
from bench.offline import OfflineEngine, measure, random_prompts
from helpers.torch_models import random_model as small_model
from neuron_runtime.checkpoint import read_checkpoint
from neuron_runtime.core import Request
from neuron_runtime.errors import InvalidConfig
from neuron_runtime.text.tokenizer import load_tokenizer

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_model(tmp_path_factory.mktemp("bench") / "model")


def test_a_generated_model_is_complete_reused_and_keyed_by_its_recipe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(SHAPES, "tiny", {"hidden_size": 32, "num_layers": 1, "vocabulary_size": 900})
    folder = random_model("tiny", tmp_path)
    written = (folder / "model.safetensors").stat().st_mtime_ns
    assert read_checkpoint(folder).config["vocab_size"] == 900
    assert random_model("tiny", tmp_path) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == written
    monkeypatch.setattr(models, "RECIPE", models.RECIPE + 1)
    assert random_model("tiny", tmp_path) != folder
    assert len(os.listdir(tmp_path)) == 2  # no half-written folder remains


def test_every_id_of_a_generated_model_decodes_to_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SHAPES, "tiny", {"hidden_size": 32, "num_layers": 1, "vocabulary_size": 5000})
    tokenizer = load_tokenizer(random_model("tiny", tmp_path))
    assert tokenizer.vocabulary_size == 5000
    assert all(tokenizer.decode((one,)) for one in range(5000))
    text = "some words, and a bit of Ünicode"
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_an_impossible_vocabulary_size_is_refused() -> None:
    with pytest.raises(ValueError, match="vocabulary size must be"):
        byte_level_vocabulary(10_000_000)


def test_an_unknown_shape_is_refused_listing_the_known_ones() -> None:
    with pytest.raises(InvalidConfig, match="random:139M"):
        model_folder_or_uri("random:1T")
    assert model_folder_or_uri("org/name") == "hf://org/name"


def test_the_figures_of_a_point_follow_their_formulas(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    requests: list[Request] = []
    with OfflineEngine(str(tiny), {"max_num_seqs": 4, "max_model_len": 64}) as engine:
        add = engine.engine.add

        def noted(request: Request) -> None:
            requests.append(request)
            add(request)

        monkeypatch.setattr(engine.engine, "add", noted)
        point = measure(engine, 4, input_len=8, output_len=16, num_iters=2)
    assert point.decode == pytest.approx(4 / point.step_seconds)
    # At least both iterations, once with one token and once with all.
    num_iters, left = divmod(sum(one.sampling.max_tokens for one in requests), 4 * (1 + 16))
    assert left == 0
    assert num_iters >= 2
    assert sum(len(one.prompt_token_ids) for one in requests) == num_iters * 2 * 4 * 8


class Scripted:
    """An engine with prefill times set by the test."""

    def __init__(self, *seconds: float) -> None:
        self.backend = SimpleNamespace(limits=SimpleNamespace(vocabulary_size=1000))
        self.asked: list[int] = []
        self._seconds = list(seconds)

    def generate(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> float:
        self.asked.append(max_tokens)
        return self._seconds.pop(0)


def test_an_iteration_delayed_before_its_decode_steps_is_measured_again() -> None:
    engine = Scripted(9.0, 5.0, 1.0, 4.0, 1.0, 7.0)
    point = measure(cast(OfflineEngine, engine), 2, input_len=8, output_len=4, num_iters=2)
    assert engine.asked == [1, 4] * 3
    assert point.step_seconds == pytest.approx((1.0 + 2.0) / 2)
    assert point.decode == pytest.approx(2 / 1.5)


def test_prompts_depend_only_on_the_seed_and_avoid_small_ids() -> None:
    assert random_prompts(3, 5, 1, 1000) == random_prompts(3, 5, 1, 1000) != random_prompts(3, 5, 2, 1000)
    assert min(min(prompt) for prompt in random_prompts(50, 50, 0, 1000)) >= 256
    assert max(max(prompt) for prompt in random_prompts(50, 50, 0, 100)) < 100
