"""EAGLE heads within the graphs of NxD Inference: no answer changes, and published heads are read."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any, Literal

import pytest
import torch
from safetensors.torch import load_file, save_file

from helpers.chi_square import assert_follows
from helpers.eagle_heads import write_head
from helpers.engine_driver import OfTheDevice
from helpers.nxdi import Mode, installed
from helpers.nxdi_engine import (
    BLOCKS,
    SLOTS,
    Model,
    backend_for,
    compiled_for,
    config_for,
    drafts_by,
    library,
    refusals,
    served,
    settings_for,
)
from neuron_runtime.backend.nxdi.buckets import limits_of
from neuron_runtime.backend.nxdi.eagle import converted, not_computed, read_tensor
from neuron_runtime.backend.nxdi.foreign import differences
from neuron_runtime.checkpoint import InvalidModel
from neuron_runtime.core import Request, Sampling

EAGLE: dict[str, Any] = {"speculation": {"method": "Eagle", "numTokens": 3, "model": {"uri": "file:///h"}}}
SHAPES_1 = {"fc.weight": (32, 64)}
NORMS = ("midlayer.input_layernorm.weight", "midlayer.hidden_norm.weight", "norm.weight")
SHAPES_3: dict[str, tuple[int, ...]] = {"fc.weight": (32, 96), **dict.fromkeys(NORMS, (32,))}
LAYERS = {1: 2, 3: 7}
LLAMA = {"model_type": "llama", "num_hidden_layers": 1}


pytestmark = pytest.mark.usefixtures("one_core")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Model]:
    """By the version of EAGLE."""
    folder = tmp_path_factory.mktemp("models")
    return {
        version: Model(folder / f"{version}", forgets=0.05, num_layers=count, num_kv_heads=4)
        for version, count in LAYERS.items()
    }


@pytest.mark.parametrize(
    ("version", "family", "library_version", "mode", "head"),
    [
        (1, "", "0.9", "strict", {}),
        (1, "", "0.7", "damage", {"input_norm": True}),
        (3, "", "0.9", "strict", {"known": 220}),
        (1, "Qwen3", "0.9", "strict", {}),
        (1, "Qwen2.5", "0.9", "damage", {"input_norm": True}),
    ],
)
def test_an_answer_is_as_without_an_eagle_head(
    models: dict[int, Model],
    tmp_path: Path,
    *,
    version: Literal[1, 3],
    family: str,
    library_version: str,
    mode: Mode,
    head: dict[str, Any],
) -> None:
    """Greedy ones are equal. Sampled ones have only tokens that their own parameters allow."""
    layers = LAYERS[version]
    other = Model(tmp_path / "model", family, forgets=0.05, num_layers=layers, num_kv_heads=4) if family else None
    model = other or models[version]
    draft = write_head(tmp_path / "head", model.folder, version, **head)
    document = {**SLOTS, "limits": {"maxSequences": 4, "maxModelLength": 96}, "buckets": {"context": [32, 64, 96]}}
    with library(library_version, mode):
        settings = settings_for(model, **document, **drafts_by(draft, 3, "Eagle"))
        backend = backend_for(model, settings, tmp_path / "artifact", draft)
        drafting, random = OfTheDevice(backend.limits), Random(3)
        requests = []
        for number in range(9):
            prompt = tuple(random.randrange(256) for _ in range(random.choice((1, 3, 4, 5, 33, 60))))
            sampling = Sampling(
                max_tokens=random.choice((1, 9, 20, 96 - len(prompt))),
                temperature=0.0 if number % 3 else 1.5,
                top_k=0 if number % 3 else 3,
            )
            requests.append(Request(f"{number}", prompt, sampling))
        answers = served(backend, requests, drafting)
    for one in requests:
        answer = answers[one.request_id]
        if one.sampling.greedy:
            model.check(one, answer)
        else:
            logits = model.logits((*one.prompt_token_ids, *answer))[len(one.prompt_token_ids) - 1 : -1]
            likeliest = logits.topk(3, dim=-1).indices.tolist()
            assert all(token in candidates for token, candidates in zip(answer, likeliest, strict=True))
    assert sum(accepted for _, accepted in drafting.learned) > 0.15 * len(drafting.learned)


def test_sampled_tokens_have_the_distribution_of_their_own_rows_parameters(tmp_path: Path) -> None:
    """Drafts, what came instead of one, and what followed them. By chi-square over the ranks of tokens."""
    model = Model(tmp_path / "model", forgets=0.0, num_kv_heads=4)
    draft = write_head(tmp_path / "head", model.folder, 1)
    document = {"limits": {"maxSequences": 4, "maxModelLength": 256}, "buckets": {"context": [32, 256]}}
    asked = [Sampling(max_tokens=240, temperature=t, top_k=k) for t, k in ((1.0, 4), (0.4, 3), (3.0, 8), (0.0, 0))]
    requests = [Request(f"{at}", (7 * at + 3,), asked[at % 4]) for at in range(8)]
    with library():
        if not installed():
            from fake_nxdi import sampler

            sampler.seed(5)
        settings = settings_for(model, **document, **drafts_by(draft, 3, "Eagle"))
        backend = backend_for(model, settings, tmp_path / "artifact", draft)
        drafting = OfTheDevice(backend.limits)
        answers = served(backend, requests, drafting)
    found, expected = torch.zeros(4, 8), torch.zeros(4, 8)
    for at, one in enumerate(requests):
        tokens, sampling, row = answers[one.request_id], one.sampling, at % 4
        logits = model.logits((*one.prompt_token_ids, *tokens))[len(one.prompt_token_ids) - 1 : -1]
        likeliest = logits.topk(sampling.top_k or 1, dim=-1)
        ranks = (likeliest.indices == torch.tensor(tokens)[:, None]).nonzero()[:, 1]
        assert len(ranks) == len(tokens)
        found[row] += torch.bincount(ranks, minlength=8)
        shares = (likeliest.values / (sampling.temperature or 1.0)).softmax(dim=-1).sum(dim=0)
        expected[row, : len(shares)] += shares
    for counts, sums in zip(found.numpy(), expected.numpy(), strict=True):
        assert_follows(counts, sums / sums.sum())
    num_drafts, num_accepted = (sum(numbers) for numbers in zip(*drafting.learned, strict=True))
    assert 0.1 < num_accepted / num_drafts < 0.9


def test_a_published_head_is_compiled_and_loaded(models: dict[int, Model], tmp_path: Path) -> None:
    head = write_head(tmp_path / "head", models[3].folder, 3, known=200)
    limits = {"maxSequences": 2, "maxModelLength": 96}
    config = config_for(models[3], limits=limits, **drafts_by(head, 2, "Eagle"))
    with library():
        backend = compiled_for(config, models[3], tmp_path / "artifact")
        backend.close()
    assert backend.limits.max_drafts == 2


def test_a_head_of_version_3_gets_the_names_the_embedding_and_all_tokens(
    models: dict[int, Model], tmp_path: Path
) -> None:
    model = models[3].folder
    published = load_file(write_head(tmp_path / "head", model, 3, known=200) / "model.safetensors")
    found = converted(published, 256, lambda name: read_tensor(model, name))
    weights = load_file(model / "model.safetensors")
    assert not [name for name in found if "midlayer" in name or name in ("d2t", "t2d")]
    assert torch.equal(found["embed_tokens.weight"], weights["model.embed_tokens.weight"])
    known = published["t2d"]
    assert torch.equal(found["lm_head.weight"][known], weights["lm_head.weight"][known])
    assert not found["lm_head.weight"][~known].any()
    assert torch.equal(found["layers.0.hidden_norm.weight"], published["midlayer.hidden_norm.weight"])


def test_a_head_of_version_1_gets_the_models_head(models: dict[int, Model], tmp_path: Path) -> None:
    model = models[1].folder
    published = load_file(write_head(tmp_path / "head", model, 1) / "model.safetensors")
    found = converted(published, 256, lambda name: read_tensor(model, name))
    assert torch.equal(found["lm_head.weight"], load_file(model / "model.safetensors")["lm_head.weight"])


def test_a_tied_head_is_the_embedding(models: dict[int, Model], tmp_path: Path) -> None:
    weights = load_file(models[1].folder / "model.safetensors")
    del weights["lm_head.weight"]
    save_file(weights, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    assert torch.equal(read_tensor(tmp_path, "lm_head.weight"), weights["model.embed_tokens.weight"])
    with pytest.raises(InvalidModel, match=r"has no norm2.weight, which its EAGLE head lacks too"):
        read_tensor(tmp_path, "norm2.weight")


@pytest.mark.parametrize("distances", [[0, 9], [0, -2], [0]])
def test_a_map_to_tokens_that_the_model_does_not_have_is_refused(distances: list[int]) -> None:
    tensors = {"lm_head.weight": torch.zeros(2, 4), "embed_tokens.weight": torch.zeros(9, 4)}
    with pytest.raises(InvalidModel, match="but the model has 9 tokens"):
        converted(tensors | {"d2t": torch.tensor(distances)}, 9, lambda name: None)


@pytest.mark.parametrize(
    "given",
    [
        {"eagle_aux_hidden_state_layer_ids": [2, 16, 29]},
        {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 15, 28], "use_aux_hidden_state": True}},
        {"eagle_aux_hidden_state_layer_ids": None, "norm_before_residual": False},
    ],
)
def test_the_layers_that_the_library_reads_are_the_usual_ones(given: dict[str, Any]) -> None:
    assert not_computed(given, 32) == []


def test_drafts_are_kept_by_each_rows_own_parameters(models: dict[int, Model], tmp_path: Path) -> None:
    head = write_head(tmp_path / "head", models[1].folder, 1)
    settings = settings_for(models[1], **SLOTS, **drafts_by(head, 3, "Eagle"))
    given = settings.neuron_config
    assert given["enable_eagle_speculation"]
    assert given["enable_fused_speculation"]
    assert given["enable_eagle_draft_input_norm"] is False
    assert given["on_device_sampling_config"]["do_sample"]
    assert given["on_device_sampling_config"]["dynamic"]
    assert "is_eagle3" not in given
    limits = limits_of(settings, 600.0)
    assert (limits.greedy_only, limits.sampling, limits.max_top_k) == (False, "Device", 256)
    assert limits.drafts_every_row
    assert settings.token_buckets[-1] == limits.max_model_length + 3


def test_graphs_with_a_head_of_another_version_that_others_compiled_do_not_fit(
    models: dict[int, Model], tmp_path: Path
) -> None:
    model = models[3]
    third = write_head(tmp_path / "third", model.folder, 3)
    others = {
        "first": drafts_by(write_head(tmp_path / "first", model.folder, 1), 3, "Eagle"),
        "draft": drafts_by(Model(tmp_path / "draft", num_layers=1, num_kv_heads=4).folder, 3),
    }
    with library():
        settings = settings_for(model, **SLOTS, **drafts_by(third, 3, "Eagle"))
        backend_for(model, settings, tmp_path / "theirs", third).close()
        found = {
            name: differences(settings_for(model, **SLOTS, **one), model.config, tmp_path / "theirs")
            for name, one in others.items()
        }
    assert differences(settings, model.config, tmp_path / "theirs") == []
    assert "is_eagle3: true instead of false" in found["first"]
    assert "enable_eagle_speculation: true instead of false" in found["draft"]


def test_a_head_of_version_3_needs_sequence_parallelism_and_norms(models: dict[int, Model], tmp_path: Path) -> None:
    head = write_head(tmp_path / "head", models[3].folder, 3)
    given = settings_for(models[3], **SLOTS, **drafts_by(head, 3, "Eagle")).neuron_config
    assert given["is_eagle3"]
    assert given["sequence_parallel_enabled"]
    assert given["enable_eagle_draft_input_norm"]


@pytest.mark.parametrize(
    ("document", "path", "message"),
    [
        ({"shapes": {}}, "$.speculation.model.uri", "must be 32 times 64 (EAGLE 1) or 96 (EAGLE 3), got 0 times 0"),
        ({"draft": {**LLAMA, "num_hidden_layers": 2}}, "$.speculation.model.uri", "it has 2 layers"),
        ({"draft": {**LLAMA, "vocab_size": 90}}, "$.speculation.model.uri", "it has 90 tokens, and the model 100"),
        ({"draft": {**LLAMA, "model_type": "qwen2"}}, "$.speculation.model.uri", "it is a qwen2, and NxD Inference"),
        (
            {"shapes": SHAPES_3, "config": {"architectures": ["Qwen3ForCausalLM"], "num_hidden_layers": 7}},
            "$.speculation.method",
            "EAGLE 3 needs sequence parallelism, which NxD Inference lacks in a part of qwen3",
        ),
        ({"shapes": SHAPES_3}, "$.speculation.method", "EAGLE 3 needs a model of at least 7 layers, got 2"),
        (
            {"shapes": {"fc.weight": (32, 96), "norm.weight": (32,)}, "config": {"num_hidden_layers": 7}},
            "$.speculation.model.uri",
            "it has no layers.0.input_layernorm.weight",
        ),
        (
            {"shapes": {**SHAPES_3, "lm_head.weight": (50, 32)}, "config": {"num_hidden_layers": 7}},
            "$.speculation.model.uri",
            "its lm_head has 50 tokens, and it has no d2t",
        ),
        *(
            (
                {"shapes": SHAPES_3, "config": {"num_hidden_layers": 8}, "draft": LLAMA | variant},
                "$.speculation.model.uri",
                "which NxD Inference computes otherwise",
            )
            for variant in (
                {"norm_before_residual": True},
                {"eagle_aux_hidden_state_layer_ids": [1, 4, 5]},
                {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 4, 5]}},
            )
        ),
        (
            {
                "shapes": SHAPES_3,
                "config": {"num_hidden_layers": 7},
                "parallelism": {"tensor": 2},
                "buckets": {"context": [63, 128]},
            },
            "$.buckets.context",
            "must be a multiple of the 2 cores, got 63",
        ),
        (
            {
                "shapes": SHAPES_3,
                "config": {"num_hidden_layers": 7},
                "overrideNeuronConfig": {"sequence_parallel_enabled": False},
            },
            "$.overrideNeuronConfig.sequence_parallel_enabled",
            "must be true with EAGLE 3",
        ),
        ({**BLOCKS}, "$.layout", "blocks cannot be combined with drafts"),
        ({"asyncMode": True}, "$.asyncMode", "asyncMode cannot be combined with drafts"),
        ({"adapters": {"maxActive": 2}}, "$.adapters.maxActive", "adapters cannot be combined with drafts"),
        ({"sampling": "Host"}, "$.sampling", "returns no logits: set Device, or method NGram"),
        ({"buckets": {"context": [4, 128]}}, "$.buckets.context", "takes a prompt of 4 tokens for a row"),
        (
            {"overrideNeuronConfig": {"on_device_sampling_config": {"do_sample": False}}},
            "$.overrideNeuronConfig.on_device_sampling_config.do_sample",
            "must be true with Eagle",
        ),
        (
            {"overrideNeuronConfig": {"is_eagle3": True}},
            "$.overrideNeuronConfig.is_eagle3",
            "the other settings make it False: set speculation instead",
        ),
    ],
)
def test_what_does_not_go_with_an_eagle_head_is_refused(document: dict[str, Any], path: str, message: str) -> None:
    found = refusals({**EAGLE, "draft": LLAMA, "shapes": SHAPES_1, **document})
    assert list(found) == [path]
    assert message in found[path]
