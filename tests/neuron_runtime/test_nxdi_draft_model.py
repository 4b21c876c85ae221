"""Drafts that a second model makes within the graphs of NxD Inference: every answer is as without them."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file

from helpers.engine_driver import OfTheDevice
from helpers.nxdi import Mode
from helpers.nxdi_engine import (
    BLOCKS,
    SLOTS,
    TARGET,
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
from helpers.told_drafts import events_of, tokens_of
from neuron_runtime.backend import nxdi
from neuron_runtime.backend.nxdi.buckets import all_graphs, limits_of
from neuron_runtime.backend.nxdi.foreign import differences
from neuron_runtime.backend.nxdi.graph_plan import plan_of
from neuron_runtime.backend.nxdi.settings import DraftFiles
from neuron_runtime.checkpoint import InvalidModel
from neuron_runtime.config import RuntimeConfig
from neuron_runtime.core import Request, Sampling
from neuron_runtime.engine.loop import Engine
from neuron_runtime.errors import InvalidConfig

DRAFT: dict[str, Any] = {"speculation": {"method": "Draft", "numTokens": 3, "model": {"uri": "file:///d"}}}


pytestmark = pytest.mark.usefixtures("one_core")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Model]:
    return {family: Model(tmp_path_factory.mktemp(family) / "model", family) for family in ("Llama", "Qwen3")}


def some_requests(random: Random, model: Model, length: int, count: int) -> list[Request]:
    """Some reach the model's length; lengths of prompts are around the number of drafts, too."""
    size, found = model.config["vocab_size"], []
    for number in range(count):
        prompt = tuple(random.randrange(size) for _ in range(random.choice((1, 3, 4, 5, 33, 60))))
        most = random.choice((1, 9, 20, length - len(prompt)))
        found.append(Request(f"{number}", prompt, Sampling(max_tokens=most, temperature=0.0)))
    return found


@pytest.mark.parametrize(
    ("version", "mode", "draft", "rows"),
    [("0.9", "strict", "Llama", 4), ("0.7", "damage", "Llama", 1), ("0.9", "damage", "Qwen3", 4)],
)
def test_an_answer_is_as_without_the_drafts_of_a_second_model(
    models: dict[str, Model], tmp_path: Path, *, version: str, mode: Mode, draft: str, rows: int
) -> None:
    """With itself for a draft model alone, a row has all drafts accepted."""
    model, second = models["Llama"], models[draft]
    document = {**SLOTS, "limits": {"maxSequences": rows, "maxModelLength": 96}, "buckets": {"context": [32, 64, 96]}}
    with library(version, mode):
        settings = settings_for(model, **document, **drafts_by(second.folder, 3))
        requests = some_requests(Random(5), model, settings.max_model_length, 9)
        backend = backend_for(model, settings, tmp_path / "artifact", second.folder)
        drafting = OfTheDevice(backend.limits)
        answers = served(backend, requests, drafting)
    for one in requests:
        model.check(one, answers[one.request_id])
    share = sum(accepted for _, accepted in drafting.learned) / sum(count for count, _ in drafting.learned)
    # Several rows open their places to one another's drafts.
    assert share < 0.3 if draft != "Llama" else share > 0.99 if rows == 1 else 0.3 < share < 0.99


@pytest.mark.parametrize(("version", "mode"), [("0.9", "strict"), ("0.7", "damage")])
def test_answers_over_blocks_share_prefixes_and_are_as_without_drafts(
    version: str, mode: Mode, models: dict[str, Model], tmp_path: Path
) -> None:
    """Up to the model's length, which is that of blocks; some drafts of a row have no block."""
    model, random = models["Llama"], Random(6)
    limits = {"maxSequences": 3, "maxModelLength": 192, "blockSize": 32, "numBlocks": 12}
    document = {**BLOCKS, "chunkedPrefill": "auto", "limits": limits}
    document["buckets"] = {"context": [128, 192], "prefix": [64, 192], "tokenGeneration": [128, 224]}
    beginning = tuple(random.randrange(256) for _ in range(70))
    requests = []
    for number in range(9):
        prompt = (
            *beginning[: random.choice((0, 40, 70))],
            *(random.randrange(256) for _ in range(random.randint(1, 60))),
        )
        most = random.choice((1, 9, 30)) if number % 4 else 192 - len(prompt)
        requests.append(Request(f"{number}", prompt, Sampling(max_tokens=most, temperature=0.0)))
    with library(version, mode):
        settings = settings_for(model, **document, **drafts_by(model.folder, 3))
        assert settings.neuron_config["seq_len"] == 224
        backend = backend_for(model, settings, tmp_path / "artifact", model.folder)
        drafting = OfTheDevice(backend.limits)
        engine = Engine(backend, drafting=drafting)
        backend.warm_up(lambda stage, share: None)
        answers = tokens_of(events_of(engine, requests))
        engine.close()
        backend.close()
    for one in requests:
        assert len(answers[one.request_id]) == one.sampling.max_tokens
        model.check(one, answers[one.request_id])
    assert engine.stats.num_prefix_hits_total > 0
    assert sum(accepted for _, accepted in drafting.learned) > 0.3 * sum(count for count, _ in drafting.learned)


def test_graphs_over_blocks_that_others_compiled_are_loaded_for_what_is_shorter_by_a_block(
    models: dict[str, Model], tmp_path: Path
) -> None:
    model, draft = models["Llama"], models["Qwen3"].folder
    limits = {"maxSequences": 2, "maxModelLength": 192, "blockSize": 32, "numBlocks": 12}
    document = {"layout": "blocks", "prefixCaching": "enabled", "limits": limits, **drafts_by(draft, 3)}
    with library():
        settings = settings_for(model, **document)
        assert not settings.segments
        backend_for(model, settings, tmp_path / "theirs", draft).close()
        config = config_of(model, draft, limits={}, prefixCaching="enabled", **drafts_by(draft, 3))
        assert nxdi.compiler(config, model.folder).ready_made(tmp_path / "theirs") == tmp_path / "theirs"
        backend = nxdi.load_backend(model.folder, config, lambda stage, share: None, tmp_path / "theirs")
        backend.close()
    assert (backend.limits.max_model_length, backend.limits.layout) == (192, "blocks")


def config_of(model: Model, draft: Path, **document: Any) -> RuntimeConfig:
    limits = {"maxSequences": 2, "maxModelLength": 96}
    return config_for(model, **{"limits": limits, **drafts_by(draft, 2), **document})


@pytest.mark.parametrize("sharded", [False, True])
def test_both_models_are_compiled_into_one_artifact_and_loaded(
    sharded: bool, models: dict[str, Model], tmp_path: Path
) -> None:
    model, draft = models["Qwen3"], models["Llama"]
    request = Request("r", (5, 7, 11), Sampling(max_tokens=40, temperature=0.0))
    with library():
        config = config_of(
            model, draft.folder, overrideNeuronConfig={"save_sharded_checkpoint": True} if sharded else {}
        )
        backend = compiled_for(config, model, tmp_path / "artifact")
        answers = served(backend, [request], OfTheDevice(backend.limits))
    model.check(request, answers["r"])


def test_a_draft_model_with_a_sliding_window_as_long_as_the_model_drafts_for_short_prompts(
    models: dict[str, Model], tmp_path: Path
) -> None:
    model, draft = models["Llama"], Model(tmp_path / "draft", "Mistral")
    document = {**SLOTS, "limits": {"maxSequences": 1, "maxModelLength": 96}, "buckets": {"context": [32, 96]}}
    with library():
        settings = settings_for(model, **document, **drafts_by(draft.folder, 3))
        backend = backend_for(model, settings, tmp_path / "artifact", draft.folder)
        request = Request("r", (5, 7, 11), Sampling(max_tokens=20, temperature=0.0))
        answers = served(backend, [request], OfTheDevice(backend.limits))
    model.check(request, answers["r"])


def test_a_weight_of_the_draft_model_that_no_module_reads_ends_the_load(
    models: dict[str, Model], tmp_path: Path
) -> None:
    model, draft = models["Llama"], tmp_path / "draft"
    shutil.copytree(models["Qwen3"].folder, draft)
    tensors = load_file(draft / "model.safetensors")
    tensors["model.layers.1.self_attn.q_proj.bias"] = torch.zeros(128)
    save_file(tensors, draft / "model.safetensors")
    with library():
        config = config_of(model, draft)
        with pytest.raises(InvalidModel, match=r"draft: .* the tensors model.layers.1.self_attn.q_proj.bias, so"):
            compiled_for(config, model, tmp_path / "artifact")


def test_the_key_has_the_draft_models_shape_but_not_its_weights(models: dict[str, Model], tmp_path: Path) -> None:
    model, draft = models["Llama"], models["Qwen3"].folder
    other = tmp_path / "other"
    shutil.copytree(draft, other)
    weights = other / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-4] + b"\0\0\0\0")
    deeper = tmp_path / "deeper"
    shutil.copytree(draft, deeper)
    document = json.loads((deeper / "config.json").read_text())
    (deeper / "config.json").write_text(json.dumps(document | {"num_hidden_layers": 7}))
    with library():
        first, same, another = (
            nxdi.compiler(config_of(model, one), model.folder).needs for one in (draft, other, deeper)
        )
        shards = {"overrideNeuronConfig": {"save_sharded_checkpoint": True}}
        held, not_same = (nxdi.compiler(config_of(model, one, **shards), model.folder).needs for one in (draft, other))
    assert first == same != another
    assert held != not_same


def test_graphs_are_longer_than_the_promised_length_and_the_device_is_greedy(models: dict[str, Model]) -> None:
    settings = settings_for(models["Llama"], **SLOTS, **drafts_by(models["Qwen3"].folder, 3))
    length = settings.max_model_length
    assert settings.neuron_config["seq_len"] == settings.token_buckets[-1] == length + 3
    assert settings.neuron_config["speculation_length"] == 4
    assert settings.neuron_config["enable_fused_speculation"] is True
    assert settings.neuron_config["on_device_sampling_config"] == {"do_sample": False, "dynamic": False}
    limits = limits_of(settings, 600.0)
    assert (limits.max_model_length, limits.max_drafts, limits.sampling) == (length, 3, "Device")
    assert limits.greedy_only
    assert limits.drafts_every_row
    assert not limits_of(replace(settings, draft=None), 600.0).greedy_only
    decodes = [graph.name for graph in all_graphs(settings) if graph.name.startswith("decode")]
    assert all(name.endswith("_of_4") for name in decodes)


def test_a_plan_counts_the_cache_of_the_draft_model(models: dict[str, Model]) -> None:
    model, draft = models["Llama"], models["Qwen3"]
    with_draft = config_of(model, draft.folder, layout="slots")
    plain = msgspec.structs.replace(with_draft, speculation=type(with_draft.speculation)())
    alone = plan_of(plain, model.config, TARGET).cache_bytes
    other = plan_of(plain, draft.config, TARGET).cache_bytes
    assert plan_of(with_draft, model.config, TARGET, draft=DraftFiles(config=draft.config)).cache_bytes == alone + other


def test_graphs_with_another_draft_model_that_others_compiled_do_not_fit(
    models: dict[str, Model], tmp_path: Path
) -> None:
    model = models["Llama"]
    deep = {**models["Qwen3"].config, "num_hidden_layers": 7}
    with library():
        settings = settings_for(model, **SLOTS, **drafts_by(models["Qwen3"].folder, 3))
        backend_for(model, settings, tmp_path / "theirs", models["Qwen3"].folder).close()
    assert differences(settings, model.config, tmp_path / "theirs") == []
    assert settings.draft is not None
    deeper = replace(settings, draft=replace(settings.draft, config=deep))
    assert differences(deeper, model.config, tmp_path / "theirs") == [
        f"num_hidden_layers of the draft model: {models['Qwen3'].config['num_hidden_layers']} instead of 7"
    ]
    plain = settings_for(model, **SLOTS)
    assert "enable_fused_speculation: true instead of false" in differences(plain, model.config, tmp_path / "theirs")


def test_graphs_that_others_compiled_for_prompts_as_long_as_their_cache_are_loaded(
    models: dict[str, Model], tmp_path: Path
) -> None:
    """By default it is so; what is promised is shorter, because a row writes its drafts behind its last token."""
    model, draft, theirs = models["Llama"], models["Qwen3"], tmp_path / "theirs"
    document = {**SLOTS, "limits": {"maxSequences": 2, "maxModelLength": 96}, "buckets": {"context": [32, 99]}}
    with library():
        settings = settings_for(model, **document, **drafts_by(draft.folder, 3))
        backend_for(model, settings, theirs, draft.folder).close()
        config = config_of(model, draft.folder, limits={}, **drafts_by(draft.folder, 3))
        assert nxdi.compiler(config, model.folder).ready_made(theirs) == theirs
        backend = nxdi.load_backend(model.folder, config, lambda stage, share: None, theirs)
        assert backend.limits.max_model_length == 96
        requests = [
            Request(f"{size}", tuple(range(size)), Sampling(max_tokens=96 - size, temperature=0.0))
            for size in (3, 90, 95)
        ]
        answers = served(backend, requests, OfTheDevice(backend.limits))
    for one in requests:
        model.check(one, answers[one.request_id])


def test_a_draft_model_that_is_elsewhere_is_named(models: dict[str, Model]) -> None:
    config = config_of(models["Llama"], Path("/d"))
    elsewhere = replace_uri(config, "hf://org/draft")
    with library(), pytest.raises(InvalidConfig, match="is not on this machine: fetch it"):
        nxdi.compiler(elsewhere, models["Llama"].folder)


def replace_uri(config: Any, uri: str) -> Any:
    source = msgspec.structs.replace(config.speculation.model, uri=uri)
    return msgspec.structs.replace(config, speculation=msgspec.structs.replace(config.speculation, model=source))


@pytest.mark.parametrize(
    ("document", "path", "message"),
    [
        ({**BLOCKS}, "$.chunkedPrefill", "prompts in several calls cannot be combined with drafts"),
        ({"sampling": "Host"}, "$.sampling", "returns no logits: set Device, or method NGram"),
        ({"sampling": "DeviceWithLogits"}, "$.sampling", "returns no logits: set Device, or method NGram"),
        (
            {"overrideNeuronConfig": {"output_logits": True}},
            "$.sampling",
            "returns no logits: set Device, or method NGram",
        ),
        (
            {"overrideNeuronConfig": {"on_device_sampling_config": {"do_sample": True}}},
            "$.overrideNeuronConfig.on_device_sampling_config",
            "keeps drafts by the likeliest token alone",
        ),
        ({"asyncMode": True}, "$.asyncMode", "asyncMode cannot be combined with drafts"),
        ({"adapters": {"maxActive": 2}}, "$.adapters.maxActive", "adapters cannot be combined with drafts"),
        ({"limits": {"maxSequences": 4}, "buckets": {"sequences": [1, 2]}}, "$.buckets.sequences", "with drafts"),
        ({"buckets": {"context": [4, 128]}}, "$.buckets.context", "takes a prompt of 4 tokens for a row"),
        ({"draft": {"vocab_size": 90}}, "$.speculation.model.uri", "it has 90 tokens, and the model 100"),
        ({"draft": {"intermediate_size": 63}, "parallelism": {"tensor": 2}}, "$.speculation.model.uri", "to 2 cores"),
        (
            {"draft": {"architectures": ["MixtralForCausalLM"], "num_local_experts": 4, "num_experts_per_tok": 2}},
            "$.speculation.model.uri",
            "is a mixtral, which is not known to make drafts",
        ),
        (
            {"draft": {"architectures": ["GPT2LMHeadModel"]}},
            "$.speculation.model.uri",
            "the draft model: config.json names GPT2LMHeadModel",
        ),
        (
            {"draft": {"quantization_config": {"quant_method": "fp8"}}},
            "$.speculation.model.uri",
            "its weights are fp8: NxD Inference makes drafts with unquantized ones",
        ),
        (
            {"draft": {"architectures": ["MistralForCausalLM"], "sliding_window": 64}},
            "$.speculation.model.uri",
            "must not end within the 512 positions",
        ),
        (
            {"overrideNeuronConfig": {"is_chunked_prefill": True}},
            "$.overrideNeuronConfig.is_chunked_prefill",
            "chunked prefill of NxD Inference, which does not work",
        ),
        (
            {"overrideNeuronConfig": {"enable_fused_speculation": False}},
            "$.overrideNeuronConfig.enable_fused_speculation",
            "the other settings make it True",
        ),
        (
            {"overrideNeuronConfig": {"token_tree_config": {"0": [1]}}},
            "$.overrideNeuronConfig.token_tree_config",
            "is not supported yet",
        ),
    ],
)
def test_what_the_library_cannot_combine_with_a_draft_model_is_refused(
    document: dict[str, Any], path: str, message: str
) -> None:
    found = refusals({**DRAFT, **document})
    assert list(found) == [path]
    assert message in found[path]
