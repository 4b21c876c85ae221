"""Pictures beside adapters, drafts and weights of 8 bits, and on several ranks: answers are those of the plain model,
or of one whose weights say the same."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from helpers.adapters import write_adapter
from helpers.groups import group_of
from helpers.told_drafts import Told
from helpers.torch_parity import backends_of
from helpers.torch_pictures import (
    FAMILIES,
    Family,
    Served,
    check,
    request,
    seeing_model,
    seeing_reference,
    seen,
    text,
)
from neuron_runtime.backend.torch.quantizing import quantize
from neuron_runtime.config import AdapterOptions
from neuron_runtime.core import Request
from neuron_runtime.engine.loop import Engine

ROOM = {"layout": "blocks", "block_size": 4, "max_sequences": 3, "max_step_tokens": 20}
BY_POSITION = ("Qwen2.5-VL", "Gemma 3")
"""Families in which a token of a picture has more than features that are its own."""


def asked_of(family: Family, **others: str) -> list[Request]:
    """Some that share a prefix with a picture."""
    a, b = seen(family, 48, 32, 2), seen(family, 32, 16, 3)
    return [
        request("one", [text(5), a, text(6, 1)], max_tokens=12, **others),
        request("two", [text(5), a, text(6, 1), b, text(3, 3)], max_tokens=12, **others),
        request("none", [text(20, 4)], max_tokens=12, **others),
    ]


def changed(source: Path, target: Path, changes: Mapping[str, torch.Tensor]) -> Path:
    """A copy of a model with other weights in the projections of its text; `changes` by the ends of their names."""
    shutil.copytree(source, target)
    tensors = load_file(source / "model.safetensors")
    for end, tensor in changes.items():
        (name,) = (one for one in tensors if one.endswith(end) and "vision" not in one)
        tensors[name] = tensor
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return target


def projections_of(folder: Path) -> dict[str, torch.Tensor]:
    """Weights of the text by the ends of their names."""
    found = re.compile(r"(?!.*vision).*(layers\.\d+\.[a-z_]+\.[a-z]+_proj\.weight)")
    names = [(found.fullmatch(name), tensor) for name, tensor in load_file(folder / "model.safetensors").items()]
    weights = {match[1]: tensor for match, tensor in names if match}
    assert weights
    return weights


@pytest.mark.parametrize("name", BY_POSITION)
def test_an_adapter_and_the_base_model_answer_about_pictures_in_one_step(name: str, tmp_path: Path) -> None:
    folder, family = seeing_model(tmp_path / "model", FAMILIES[name]), FAMILIES[name]
    config = json.loads((folder / "config.json").read_text())
    layers = range(config["text_config"]["num_hidden_layers"])
    adapter = write_adapter(tmp_path / "adapter", config, rank=4, layers=layers)
    tuned, tensors = projections_of(folder), load_file(adapter / "adapter_model.safetensors")
    # As the peft library names them with these models.
    named = {one.replace(".model.model.", ".model.model.language_model."): tensor for one, tensor in tensors.items()}
    save_file(named, adapter / "adapter_model.safetensors", metadata={"format": "pt"})
    for end in tuned:
        down, up = (tensors[f"base_model.model.model.{end.removesuffix('weight')}lora_{half}.weight"] for half in "AB")
        tuned[end] = tuned[end] + 2 * up @ down
    tuned_model = seeing_reference(changed(folder, tmp_path / "tuned", tuned))
    options = AdapterOptions(max_active=1, max_rank=4)
    served = Served(folder, adapters=options, loaded={"digest": adapter}, **ROOM)
    base, adapted = (asked_of(family, **others) for others in ({}, {"adapter": "digest"}))
    adapted = [request_named(one, f"{one.request_id} adapted") for one in adapted]
    answers = served.answers(base[1], *adapted, base[0])
    assert served.engine.stats.num_prefix_hits_total
    served.close()
    models = {"": seeing_reference(folder), "digest": tuned_model}
    for one in (*base[:2], *adapted):
        check(models[one.adapter], one, answers[one.request_id], served.logprobs[one.request_id])


def request_named(asked: Request, name: str) -> Request:
    return Request(name, asked.prompt_token_ids, asked.sampling, pictures=asked.pictures, adapter=asked.adapter)


@pytest.mark.parametrize("name", BY_POSITION)
def test_drafts_change_no_answer_about_pictures(name: str, tmp_path: Path) -> None:
    folder, asked = seeing_model(tmp_path, FAMILIES[name]), asked_of(FAMILIES[name])
    plain = Served(folder, **ROOM)
    expected = plain.answers(*asked)
    plain.close()
    told = Told(expected)
    drafted = Served(folder, drafting=told, max_drafts=3, **ROOM)
    assert drafted.answers(*asked) == expected
    assert 5 < told.num_accepted < told.num_drafts
    drafted.close()


@pytest.mark.parametrize("name", BY_POSITION)
def test_weights_of_8_bits_answer_about_pictures_as_what_they_stand_for(name: str, tmp_path: Path) -> None:
    """Those of the tower stay as they are."""
    folder, asked = seeing_model(tmp_path / "model", FAMILIES[name]), asked_of(FAMILIES[name])
    rounded = projections_of(folder)
    for end, tensor in rounded.items():
        numbers, scale = quantize(tensor.float(), "int8")
        rounded[end] = numbers.float() * scale
    model = seeing_reference(changed(folder, tmp_path / "rounded", rounded))
    served = Served(folder, quantization="int8", **ROOM)
    answers = served.answers(*asked)
    served.close()
    for one in asked:
        check(model, one, answers[one.request_id], served.logprobs[one.request_id])


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in BY_POSITION else pytest.mark.long) for name in FAMILIES]
)
def test_a_group_answers_about_pictures_as_one_rank_does(name: str, tmp_path: Path) -> None:
    """Followers get the pixels with the step that adds the sequence."""
    folder, asked = seeing_model(tmp_path / "model", FAMILIES[name]), asked_of(FAMILIES[name])
    model = seeing_reference(folder)
    backends = backends_of(folder, 2, tmp_path, **ROOM)
    remaining, found, logprobs = iter(backends), dict[str, list[int]](), dict[str, list[float]]()
    with group_of(lambda: next(remaining), 2) as group:
        engine = Engine(group.leader)
        for one in asked:
            engine.add(one)
        while engine.has_work:
            for event in engine.step():
                found.setdefault(event.request_id, []).extend(event.token_ids)
                logprobs.setdefault(event.request_id, []).extend(one.logprob for one in event.logprobs)
        group.finish()
    encoded = [backend._vision.num_encoded for backend in backends if backend._vision]
    for backend in backends:
        backend.close()
    assert len(encoded) == 2
    assert encoded[0] == encoded[1] > 0
    for one in asked:
        check(model, one, found[one.request_id], logprobs[one.request_id])


def test_a_picture_of_gemma_3_that_is_longer_than_a_window_is_seen_as_transformers_5_does(tmp_path: Path) -> None:
    """Its tokens see all behind them in the picture, and of those before as many as the window has."""
    gemma = FAMILIES["Gemma 3"]
    config = {**gemma.config, "text_config": {**gemma.config["text_config"], "sliding_window": 4}}
    folder = seeing_model(tmp_path, gemma._replace(config=config))
    asked = asked_of(gemma)
    served = Served(folder, **ROOM)
    answers = served.answers(*asked)
    served.close()
    model = seeing_reference(folder)
    for one in asked:
        check(model, one, answers[one.request_id], served.logprobs[one.request_id])
