"""Quantized weights and caches of NxD Inference: what is served, with which arguments, and what is refused by name."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import warnings
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file

from helpers.adapters import write_adapter
from helpers.converted import converted
from helpers.eagle_heads import write_head
from helpers.engine_driver import OfTheDevice
from helpers.nxdi import fake_nxdi, installed
from helpers.nxdi_engine import TARGET
from helpers.nxdi_tokens import settings_of as tokens_settings
from helpers.quantized import FORMATS
from helpers.tiny_model import write_tiny_model
from helpers.torch_models import random_model, reference, with_adapters
from neuron_runtime.artifacts.store import DOCUMENT
from neuron_runtime.backend import nxdi
from neuron_runtime.backend.nxdi import library
from neuron_runtime.backend.nxdi.foreign import differences
from neuron_runtime.backend.nxdi.graph_plan import plan_of
from neuron_runtime.backend.nxdi.graphs import described, fitting
from neuron_runtime.backend.nxdi.models import family_of
from neuron_runtime.backend.nxdi.quantized import ENVIRONMENT, OF_WEIGHTS, words_for
from neuron_runtime.backend.nxdi.settings import Settings, settings_of
from neuron_runtime.backend.nxdi.unread import all_weights_read
from neuron_runtime.checkpoint import CONFIG_FILE, WEIGHTS_FILE, InvalidModel
from neuron_runtime.config import ModelSource, RuntimeConfig, parse_config
from neuron_runtime.conversion.converting import convert
from neuron_runtime.core import Request, Sampling
from neuron_runtime.engine.loop import Engine
from neuron_runtime.errors import FatalError, InvalidConfig
from neuron_runtime.weights.store import Store

PROMPT = (5, 9, 13, 2, 8, 7, 3, 21)
FAMILIES: Mapping[str, dict[str, Any]] = {
    "Llama": {},
    "Llama, tied": {"tie_word_embeddings": True},
    "Mistral": {"architecture": "MistralForCausalLM", "sliding_window": 600},
    "Qwen2, with biases": {"architecture": "Qwen2ForCausalLM"},
    "Qwen3, tied": {"architecture": "Qwen3ForCausalLM", "head_dim": 32, "tie_word_embeddings": True},
}
BIASED = ("q_proj", "k_proj", "v_proj")

on_the_fake = pytest.mark.skipif(installed(), reason="needs a version or a fault of the fake")


@pytest.fixture(autouse=True)
def _one_core(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NEURON_RT_NUM_CORES", "1")
    for name in ("NEURON_LOGICAL_NC_CONFIG", "XLA_HANDLE_SPECIAL_SCALAR", "UNSAFE_FP8FNCAST"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_model(tmp_path_factory.mktemp("model") / "llama")


def config_of(folder: Path, **document: Any) -> RuntimeConfig:
    base = {
        "version": 1,
        "model": {"uri": folder.as_uri()},
        "servedNames": ["m"],
        "backend": "nxdi",
        "compile": True,
        "dtype": "float32",
        "limits": {"maxSequences": 2, "maxModelLength": 128},
    }
    return parse_config(msgspec.json.encode(base | document))


def settings(model: Path, **document: Any) -> Settings:
    return settings_of(config_of(model, **document), json.loads((model / CONFIG_FILE).read_text()), TARGET)


def refusal(model: Path, **document: Any) -> dict[str, str]:
    with pytest.raises(InvalidConfig) as error:
        settings(model, **document)
    return dict(error.value.parts)


@pytest.fixture(scope="module")
def int8(llama: Path) -> Path:
    """With the folder `model-plain` beside it."""
    converted(llama, llama.with_name("model"), "int8")
    return llama.with_name("model")


def answer(
    weights: Path, folder: Path, count: int = 6, *, adapter: Path | None = None, foreign: bool = False, **document: Any
) -> list[int]:
    """Compiled, loaded, and asked for the likeliest tokens behind PROMPT. foreign: as graphs of others."""
    config = config_of(weights, **document)
    compiler = nxdi.compiler(config, weights)
    folder.mkdir()
    for graph in compiler.graphs():
        graph.compile(folder)
    if not foreign:
        (folder / DOCUMENT).touch()
    backend = nxdi.load_backend(weights, config, lambda stage, share: None, folder)
    try:
        engine = Engine(backend, drafting=OfTheDevice(backend.limits) if backend.limits.max_drafts else None)
        if adapter is not None:
            engine.load_adapter("a", adapter)
            while engine.is_reading:
                assert engine.take_adapter_news() in ([], [("a", "")])
        name = "a" if adapter is not None else ""
        engine.add(Request("0", PROMPT, Sampling(temperature=0.0, max_tokens=count), adapter=name))
        found: list[int] = []
        while engine.has_work:
            found += [token for event in engine.step() for token in event.token_ids]
        engine.close()
        return found
    finally:
        backend.close()


def expected(model: Any, count: int = 6) -> list[int]:
    """By transformers. model: one of its own, or a folder."""
    made, tokens = reference(model) if isinstance(model, Path) else model, list(PROMPT)
    for _ in range(count):
        with torch.inference_mode():
            tokens.append(int(made(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(PROMPT) :]


def changed(model: Path, target: Path, change: Mapping[str, Any] = MappingProxyType({}), **tensors: Any) -> Path:
    """A copy with other fields of config.json and other tensors; None: without."""
    shutil.copytree(model, target)
    config = json.loads((model / CONFIG_FILE).read_text()) | change
    (target / CONFIG_FILE).write_text(json.dumps({name: one for name, one in config.items() if one is not None}))
    found = load_file(model / WEIGHTS_FILE) | {name: one for name, one in tensors.items() if one is not None}
    save_file({name: one for name, one in found.items() if tensors.get(name, 0) is not None}, target / WEIGHTS_FILE)
    return target


# What is served

VERSIONS = ("0.7", "0.8", "0.9")
CASES = [(family, kind) for family in FAMILIES for kind in ("int8", "fp8")]


@on_the_fake
@pytest.mark.parametrize(
    ("family", "kind", "version"),
    [
        *((family, kind, VERSIONS[number % 3]) for number, (family, kind) in enumerate(CASES)),
        *(("Llama", kind, version) for kind in ("int8", "fp8") for version in VERSIONS),
    ],
)
def test_quantized_weights_answer_as_transformers_does_with_their_products(
    family: str, kind: Literal["int8", "fp8"], version: str, tmp_path: Path
) -> None:
    source = random_model(tmp_path / "source", **FAMILIES[family])
    plain = converted(source, tmp_path / "model", kind, BIASED if "biases" in family else ())
    with fake_nxdi(version):
        found = answer(tmp_path / "model", tmp_path / "artifact")
    assert found == expected(plain)


@on_the_fake
@pytest.mark.parametrize(
    "document",
    [
        {"dtype": "bfloat16"},
        {"layout": "blocks", "prefixCaching": "disabled", "chunkedPrefill": "disabled"},
        {"overrideNeuronConfig": {"save_sharded_checkpoint": True}},
        {"kvCacheDtype": "fp8"},
    ],
)
def test_quantized_weights_are_served_with_other_settings(int8: Path, document: dict[str, Any], tmp_path: Path) -> None:
    with fake_nxdi():
        found = answer(int8, tmp_path / "artifact", **document)
    exact = expected(int8.with_name("model-plain"))
    # Numbers of fewer bits may choose another token; then all that follow are others.
    assert found == exact or ("overrideNeuronConfig" not in document and found[0] == exact[0])


@on_the_fake
@pytest.mark.parametrize(("version", "head"), [("0.7", False), ("0.9", False), ("0.9", True)])
def test_a_quantized_model_verifies_drafts_of_an_unquantized_one(
    int8: Path, llama: Path, version: str, head: bool, tmp_path: Path
) -> None:
    fused = version == "0.9"
    draft = write_head(tmp_path / "head", llama, 1) if head else llama
    method = {"method": "Eagle" if head else "Draft", "numTokens": 3, "model": {"uri": draft.as_uri()}}
    with fake_nxdi(version):
        found = answer(int8, tmp_path / "artifact", speculation=method, overrideNeuronConfig={"fused_qkv": fused})
    assert found == expected(int8.with_name("model-plain"))


@on_the_fake
def test_an_adapter_is_added_to_quantized_weights(int8: Path, tmp_path: Path) -> None:
    model = json.loads((int8 / CONFIG_FILE).read_text())
    adapter = write_adapter(tmp_path / "adapter", {**model, "quantization_config": None}, scale=0.3)
    with fake_nxdi():
        found = answer(int8, tmp_path / "artifact", adapter=adapter, adapters={"maxActive": 2, "maxRank": 8})
    plain = int8.with_name("model-plain")
    tuned = expected(with_adapters(reference(plain), {"a": adapter}))
    assert tuned != expected(plain)
    assert found == tuned


@on_the_fake
@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_what_convert_makes_is_served(kind: Literal["int8", "fp8"], tmp_path: Path) -> None:
    """Of a model with biases, whose modules stay as they are."""
    source = random_model(tmp_path / "source", architecture="Qwen2ForCausalLM")
    shutil.copy(write_tiny_model(tmp_path / "tiny") / "tokenizer.json", source)
    store = Store(tmp_path / "store")
    found, folder = convert(
        ModelSource(uri=source.as_uri()), store, lambda title: lambda amount: None, backend="nxdi", wanted=kind
    )
    tensors, fields = load_file(Path(folder) / WEIGHTS_FILE), {"quantization_config": None}
    plain = changed(Path(folder), tmp_path / "plain", fields, **multiplied(tensors))
    with fake_nxdi():
        served = {"uri": source.as_uri(), "converted": found.weights.digest}
        assert answer(Path(folder), tmp_path / "artifact", model=served, quantization=kind) == expected(plain)


def multiplied(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor | None]:
    scales = {name: one for name, one in tensors.items() if name.endswith("_scale")}
    weights = {name.removesuffix("_scale"): one for name, one in scales.items()}
    return {**dict.fromkeys(scales), **{name: tensors[name].float() * scale for name, scale in weights.items()}}


# What the library is told


def test_the_library_is_told_of_one_form_and_of_the_modules_without_it(llama: Path, tmp_path: Path) -> None:
    converted(llama, tmp_path / "model", "fp8", BIASED)
    found = settings(tmp_path / "model")
    told = {name: found.neuron_config[name] for name in OF_WEIGHTS}
    assert told == {
        "quantized": True,
        "quantization_type": "per_channel_symmetric",
        "quantization_dtype": "f8e4m3",
        "modules_to_not_convert": ["k_proj", "lm_head", "q_proj", "v_proj"],
    }
    assert found.environment == {"XLA_HANDLE_SPECIAL_SCALAR": "1", "UNSAFE_FP8FNCAST": "1"}


def test_modules_are_named_by_their_last_words_where_these_name_no_others(llama: Path, tmp_path: Path) -> None:
    """`v_proj` is a part of `qkv_proj`, in which the library has all three."""
    for excluded, words in {
        ("o_proj", "up_proj"): ["lm_head", "o_proj", "up_proj"],
        ("v_proj",): [*(f"layers.{number}.self_attn.qkv_proj.v_proj" for number in range(2)), "lm_head"],
        ("layers.1.mlp.down_proj",): ["layers.1.mlp.down_proj", "lm_head"],
    }.items():
        model = tmp_path / words[0]
        converted(llama, model, "int8", excluded)
        assert settings(model).neuron_config["modules_to_not_convert"] == sorted(words)


def test_layers_whose_numbers_begin_alike_are_told_apart() -> None:
    paths = [f"layers.{number}.mlp.down_proj" for number in (1, 10, 11)]
    assert words_for(paths[:1], paths[1:]) == paths[:1]


def test_a_module_that_cannot_be_named_without_another_one_is_refused() -> None:
    with pytest.raises(InvalidModel, match=r"cannot leave layers\.0\.mlp\.gate unquantized without .*gate_proj"):
        words_for(["layers.0.mlp.gate"], ["layers.0.mlp.gate_proj"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ignore": ["lm_head", "re:.*mlp"]}, "ignore has 're:.*mlp': it must name each module"),
        ({"ignore": 7}, "ignore must be a list of modules, got 7"),
        ({"ignore": [7]}, "ignore has 7"),
        ({"layers": 10**9}, "num_hidden_layers is 1000000000, and the limit is 10000"),
    ],
)
def test_a_strange_config_json_is_refused(int8: Path, change: dict[str, Any], message: str, tmp_path: Path) -> None:
    config = json.loads((int8 / CONFIG_FILE).read_text())
    method = config["quantization_config"] | {"ignore": change.get("ignore", ["lm_head"])}
    config |= {"quantization_config": method, "num_hidden_layers": change.get("layers", 2)}
    with pytest.raises(InvalidModel, match=re.escape(message)):
        family_of(config, "")


def test_a_class_of_ones_own_decides_what_it_reads(int8: Path, tmp_path: Path) -> None:
    """NxD Inference is told nothing of its weights, so nothing is asked of config.json."""
    method = json.loads((int8 / CONFIG_FILE).read_text())["quantization_config"] | {"ignore": ["re:.*mlp"]}
    model = changed(int8, tmp_path / "model", {"quantization_config": method, "num_hidden_layers": None})
    assert settings(model, applicationClass="ours:Class").quantized is None


def test_keys_of_the_library_that_say_the_same_are_accepted(int8: Path) -> None:
    same = {
        "quantized": True,
        "quantization_type": "per_channel_symmetric",
        "quantization_dtype": "int8",
        "modules_to_not_convert": ["lm_head"],
    }
    assert settings(int8, overrideNeuronConfig=same) == settings(int8)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("quantized", False, "is False, but the model's config.json makes it True"),
        ("quantization_type", "per_tensor_symmetric", "makes it 'per_channel_symmetric'"),
        ("quantization_dtype", "f8e4m3", "makes it 'int8'"),
        ("modules_to_not_convert", ["self_attn"], "makes it ['lm_head']"),
        ("modules_to_not_convert", 5, "must be a list, got 5"),
        ("quantized_checkpoints_path", "/q", "makes it unset"),
        ("mlp_kernel_enabled", True, "takes the quantized weights of gate_proj, up_proj, down_proj without"),
        ("qkv_kernel_enabled", True, "takes the quantized weights of q_proj, k_proj, v_proj without"),
        ("activation_quantization_type", "dynamic", "is not supported yet"),
    ],
)
def test_keys_of_the_library_that_contradict_the_checkpoint_are_refused(
    int8: Path, key: str, value: Any, message: str
) -> None:
    found = refusal(int8, overrideNeuronConfig={key: value})
    assert list(found) == [f"$.overrideNeuronConfig.{key}"]
    assert message in found[f"$.overrideNeuronConfig.{key}"]


def test_projections_are_fused_only_if_all_are_quantized(llama: Path, int8: Path, tmp_path: Path) -> None:
    fused = {"overrideNeuronConfig": {"fused_qkv": True}}
    assert settings(int8, **fused).neuron_config["modules_to_not_convert"] == ["lm_head"]
    message = "needs q_proj, k_proj and v_proj quantized in each layer"
    converted(llama, tmp_path / "model", "int8", BIASED)
    assert message in refusal(tmp_path / "model", **fused)["$.overrideNeuronConfig.fused_qkv"]
    method = json.loads((int8 / CONFIG_FILE).read_text())["quantization_config"]
    method |= {"ignore": ["lm_head", "model.layers.1.self_attn.k_proj"]}
    model = changed(int8, tmp_path / "one", {"quantization_config": method})
    assert message in refusal(model, **fused)["$.overrideNeuronConfig.fused_qkv"]


def test_the_key_of_an_artifact_has_types_and_exclusions_and_no_scales_or_folders(
    llama: Path, int8: Path, tmp_path: Path
) -> None:
    converted(llama, tmp_path / "fp8", "fp8")
    converted(llama, tmp_path / "other", "int8", ("o_proj",))
    converted(random_model(tmp_path / "twin"), tmp_path / "same", "int8")
    with fake_nxdi():
        keys = [
            nxdi.compiler(config_of(folder), folder).needs.settings
            for folder in (int8, tmp_path / "same", tmp_path / "fp8", tmp_path / "other", llama)
        ]
    assert keys[0] == keys[1]
    assert len({json.dumps(key, sort_keys=True) for key in keys}) == 4


# What is refused


@pytest.mark.parametrize(
    ("method", "form"),
    [
        ({"quant_method": "awq"}, "awq"),
        ({"quant_method": "gptq"}, "gptq"),
        (FORMATS["fp8 in blocks"], "fp8 in blocks"),
        (FORMATS["int8 per tensor"], "int8 per tensor"),
        (FORMATS["fp8 in blocks of compressed-tensors"], "fp8 in blocks"),
        (FORMATS["fp8 per channel"], "fp8 per channel up to 448"),
    ],
)
def test_other_forms_are_refused_by_name(llama: Path, method: dict[str, Any], form: str, tmp_path: Path) -> None:
    model = changed(llama, tmp_path / "model", {"quantization_config": method})
    with pytest.raises(
        FatalError, match=f"the weights are {form}, but .* int8 per channel or fp8 per channel alone"
    ) as no:
        settings(model)
    assert ("`neuron-runtime convert`" in str(no.value)) == (form not in ("awq", "gptq"))


def test_quantized_experts_are_refused_by_name() -> None:
    mixture = {"architectures": ["MixtralForCausalLM"], "quantization_config": FORMATS["int8 per channel"]}
    with pytest.raises(FatalError, match=r"the weights are int8 per channel, but .*quantized experts"):
        family_of(mixture, "")


def test_quantized_modules_with_biases_are_refused_by_name(tmp_path: Path) -> None:
    converted(random_model(tmp_path / "source", architecture="Qwen2ForCausalLM"), tmp_path / "model", "int8")
    with pytest.raises(InvalidModel, match=r"k_proj is quantized and has a bias.*leaves k_proj, q_proj, v_proj unq"):
        settings(tmp_path / "model")


Q_PROJ = "model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        (
            {f"{Q_PROJ}.weight_scale": torch.ones(1, 64)},
            r"a scale .* of shape \[64, 1\], and has one of shape \[1, 64\]",
        ),
        ({f"{Q_PROJ}.weight_scale": torch.ones(1)}, r"and has one of shape \[1\]"),
        ({f"{Q_PROJ}.weight_scale": None}, "and has none"),
        ({f"{Q_PROJ}.weight": torch.ones(64, 64)}, "has dtype F32, but config.json says I8"),
        ({"lm_head.weight": torch.ones(256, 64, dtype=torch.int8)}, "is quantized .* among those that are not"),
    ],
)
def test_tensors_that_contradict_config_json_are_refused_before_a_device_is_held(
    int8: Path, tensors: dict[str, Any], message: str, tmp_path: Path
) -> None:
    """Before they are compiled, if they are there by then."""
    model = changed(int8, tmp_path / "model", **tensors)
    with fake_nxdi() as fake, pytest.raises(InvalidModel, match=message):
        answer(model, tmp_path / "artifact")
    assert not fake.COUNTS.compiled
    (tmp_path / "artifact" / DOCUMENT).touch()
    with fake_nxdi() as fake, pytest.raises(InvalidModel, match=message):
        nxdi.load_backend(model, config_of(model), lambda stage, share: None, tmp_path / "artifact")
    assert not fake.device.DEVICE.world_size


def test_a_quantized_draft_model_is_refused(int8: Path, tmp_path: Path) -> None:
    method = {"method": "Draft", "numTokens": 3, "model": {"uri": int8.as_uri()}}
    with fake_nxdi(), pytest.raises(InvalidConfig, match="its weights are int8 per channel"):
        nxdi.compiler(config_of(int8, speculation=method), int8)


def test_weights_that_are_not_as_wanted_must_be_converted_first(llama: Path, int8: Path) -> None:
    with (
        fake_nxdi(),
        pytest.raises(InvalidConfig, match="is int8, but these weights are not: convert them"),
    ):
        nxdi.compiler(config_of(llama, quantization="int8"), llama)
    with fake_nxdi():
        assert nxdi.compiler(config_of(int8, quantization="int8"), int8)
        with pytest.raises(InvalidConfig, match="is none, but these weights are not: convert them"):
            nxdi.compiler(config_of(int8, quantization="none"), int8)


def test_a_scale_that_the_library_drops_is_an_error(int8: Path) -> None:
    """It renames scales when it reads them."""
    found = settings(int8)
    with pytest.raises(InvalidModel, match=r"down_proj\.weight_scale"), all_weights_read(int8, found):
        warnings.warn("Removing redundant keys from checkpoint: ['layers.0.mlp.down_proj.scale']", stacklevel=1)
    with all_weights_read(int8, found):
        copied = ["layers.0.self_attn.q_proj.scale", "layers.0.mlp.down_proj.input_scale"]
        warnings.warn(f"Removing redundant keys from checkpoint: {copied}", stacklevel=1)


@on_the_fake
def test_a_checkpoint_that_the_library_quantized_is_not_taken_for_an_unquantized_one(
    int8: Path, llama: Path, tmp_path: Path
) -> None:
    """Its config.json says nothing, and its scales have the library's own names."""
    tensors = load_file(int8 / WEIGHTS_FILE)
    (tmp_path / "model").mkdir()
    shutil.copy(llama / CONFIG_FILE, tmp_path / "model")
    renamed = {name.replace(".weight_scale", ".scale"): tensor for name, tensor in tensors.items()}
    save_file(renamed, tmp_path / "model" / WEIGHTS_FILE)
    with fake_nxdi(mode="damage"), pytest.raises(InvalidModel, match=r"does not read the tensors .*down_proj\.scale"):
        answer(tmp_path / "model", tmp_path / "artifact")


def test_a_mixture_that_a_release_runs_with_many_rows_only_is_refused_with_fewer() -> None:
    few = dataclasses.replace(tokens_settings(), application="qwen3_moe", max_rows=8)
    with fake_nxdi("0.8"), pytest.raises(InvalidConfig, match=r"must be at least 16: Neuron SDK 2\.28") as error:
        library.check_rows(few)
    assert error.value.parts[0][0] == "$.limits.maxSequences"
    with fake_nxdi("0.8"):
        library.check_rows(dataclasses.replace(few, max_rows=16))
    with fake_nxdi("0.9"):
        library.check_rows(few)


# The cache


@on_the_fake
@pytest.mark.parametrize(
    ("layout", "version"),
    [*(("slots", version) for version in VERSIONS), ("blocks", "0.8"), ("blocks", "0.9")],
)
def test_a_cache_of_fp8_is_half_as_large_and_its_answers_change_a_little(
    llama: Path, version: str, layout: str, tmp_path: Path
) -> None:
    document = {"layout": layout, "dtype": "bfloat16"}
    with fake_nxdi(version):
        from fake_nxdi import device

        exact = answer(llama, tmp_path / "exact", **document)
        plain = device.DEVICE.used_bytes
    with fake_nxdi(version):
        from fake_nxdi import device

        found = answer(llama, tmp_path / "artifact", **document, kvCacheDtype="fp8")
        small = device.DEVICE.used_bytes
    assert found[0] == exact[0]  # of the prompt, which does not read the cache
    cache = plan_of(config_of(llama, **document), json.loads((llama / CONFIG_FILE).read_text()), TARGET).cache_bytes
    assert plain - small == cache / 2


@on_the_fake
def test_a_cache_that_a_release_or_a_class_does_not_cast_is_refused(llama: Path, tmp_path: Path) -> None:
    """Releases before 0.8 write the model's dtype into blocks; the class of gpt-oss never reads the type."""
    with fake_nxdi("0.7"), pytest.raises(InvalidConfig, match=r"0\.7.* has no blocks of fp8") as error:
        answer(llama, tmp_path / "artifact", layout="blocks", kvCacheDtype="fp8")
    assert error.value.parts[0][0] == "$.kvCacheDtype"
    strange = {"quantization_config": {"quant_method": "mxfp4"}, "architectures": ["GptOssForCausalLM"]}
    model = changed(llama, tmp_path / "gpt_oss", strange)
    assert settings(model).application == "gpt_oss"
    message = "is fp8, but NxD Inference's gpt_oss keeps its cache in the model's dtype"
    assert message in refusal(model, kvCacheDtype="fp8")["$.kvCacheDtype"]
    flag = {"overrideNeuronConfig": {"kv_cache_quant": True}}
    assert message in refusal(model, **flag)["$.overrideNeuronConfig.kv_cache_quant"]


def test_the_library_is_told_of_the_cache_in_its_own_words(llama: Path) -> None:
    found = settings(llama, kvCacheDtype="fp8")
    assert found.neuron_config["kv_cache_quant"] is True
    assert found.neuron_config["kv_quant_config"] == {"quant_dtype": "float8_e4m3fn", "direct_cast": True}
    assert found.environment["UNSAFE_FP8FNCAST"] == "1"
    assert settings(llama, overrideNeuronConfig={"kv_cache_quant": True}) == found
    contradiction = refusal(llama, kvCacheDtype="fp8", overrideNeuronConfig={"kv_cache_quant": False})
    assert "is auto, but kvCacheDtype is fp8" in contradiction["$.overrideNeuronConfig.kv_cache_quant"]
    for off in (None, {}):
        assert not settings(llama, overrideNeuronConfig={"kv_quant_config": off}).cache_dtype
    kernel = {"attn_block_tkg_nki_kernel_cache_update": True}
    assert settings(llama, overrideNeuronConfig=kernel)
    written = refusal(llama, kvCacheDtype="fp8", overrideNeuronConfig=kernel)
    assert "writes the model's dtype" in written["$.overrideNeuronConfig.attn_block_tkg_nki_kernel_cache_update"]
    alone = refusal(llama, overrideNeuronConfig={"kv_quant_config": {"direct_cast": True}})
    assert "set kvCacheDtype instead" in alone["$.overrideNeuronConfig.kv_quant_config"]


@on_the_fake
def test_graphs_of_others_are_loaded_if_they_have_the_same_types_and_exclusions(
    llama: Path, int8: Path, tmp_path: Path
) -> None:
    fields = {"quantized": True, "quantization_type": "per_channel_symmetric", "quantization_dtype": "int8"}
    theirs = {**settings(int8).neuron_config, **fields, "kv_cache_quant": False, "max_length": 128}

    def different(model: Path, **changes: Any) -> list[str]:
        folder = tmp_path / "graphs"
        folder.mkdir(exist_ok=True)
        (folder / "neuron_config.json").write_text(json.dumps({"neuron_config": {**theirs, **changes}}))
        return differences(settings(model), json.loads((model / CONFIG_FILE).read_text()), folder)

    assert not different(int8)
    assert "modules_to_not_convert" in different(int8, modules_to_not_convert=["lm_head", "o_proj"])[0]
    assert "quantized: true instead of false" in different(llama)
    assert "kv_quant_config" in different(int8, kv_quant_config={"quant_dtype": "float8_e4m3fn"})[0]


@on_the_fake
@pytest.mark.parametrize("version", VERSIONS)
def test_the_cache_of_graphs_of_others_is_theirs(int8: Path, version: str, tmp_path: Path) -> None:
    with fake_nxdi(version):
        found = answer(int8, tmp_path / "artifact", foreign=True, kvCacheDtype="fp8")
    with fake_nxdi(version):
        config = fitting(config_of(int8), int8, tmp_path / "artifact")
        assert described(config, int8)[0].cache_dtype == "float8_e4m3fn"
        assert described(config, int8)[0].neuron_config["modules_to_not_convert"] == ["lm_head"]
    assert found[0] == expected(int8.with_name("model-plain"), 1)[0]


# The fake

BROKEN: Mapping[str, tuple[dict[str, Any], str]] = {
    "weights with scales loaded as unquantized": ({"quantized": False}, "Q1"),
    "numbers of another type": ({"quantization_dtype": "f8e4m3"}, "Q1"),
    "numbers of an excluded module": ({"modules_to_not_convert": ["lm_head", "o_proj"]}, "Q1"),
    "a scale for each tensor": ({"quantization_type": "per_tensor_symmetric"}, "Q3"),
    "fp8 that the compiler is not told of": ({"quantization_dtype": "f8e4m3fn"}, "4.1"),
    "a cache of which the compiler alone is told": ({"kv_cache_quant": True}, "Q4"),
}


@on_the_fake
@pytest.mark.parametrize("case", BROKEN)
def test_the_strict_fake_refuses_what_the_library_computes_wrongly(case: str, int8: Path, tmp_path: Path) -> None:
    changes, rule = BROKEN[case]
    with (
        fake_nxdi() as fake,
        pytest.raises(InvalidConfig if rule in ("Q3", "4.1", "Q4") else fake.FakeRefusal) as error,
    ):
        run_with(int8, tmp_path, **changes)
    assert f"NxDI rule {rule}:" in str(error.value)


@on_the_fake
def test_the_strict_fake_refuses_other_scales_a_tied_head_and_large_fp8(llama: Path, tmp_path: Path) -> None:
    tied = random_model(tmp_path / "source", tie_word_embeddings=True)
    converted(tied, tmp_path / "tied", "int8")
    converted(llama, tmp_path / "model", "fp8")
    name = f"{Q_PROJ}.weight"
    large = changed(
        tmp_path / "model", tmp_path / "large", **{name: torch.full((64, 64), 300.0).to(torch.float8_e4m3fn)}
    )
    turned = changed(tmp_path / "model", tmp_path / "turned", **{f"{name}_scale": torch.ones(1, 64)})
    for model, changes, rule in (
        (tmp_path / "tied", {"modules_to_not_convert": []}, "Q2"),
        (large, {}, "4.2"),
        (turned, {}, "Q3"),
    ):
        with fake_nxdi() as fake, pytest.raises(fake.FakeRefusal, match=f"NxDI rule {rule}:"):
            run_with(model, tmp_path, **changes)


@on_the_fake
@pytest.mark.parametrize("case", ["weights with scales loaded as unquantized", "numbers of an excluded module"])
def test_the_fake_computes_the_garbage_that_the_library_would(case: str, int8: Path, tmp_path: Path) -> None:
    with fake_nxdi(mode="damage"):
        made = run_with(int8, tmp_path, **BROKEN[case][0])
        found = made(
            input_ids=torch.tensor([list(PROMPT)]),
            position_ids=torch.arange(len(PROMPT))[None],
            attention_mask=torch.ones(1, len(PROMPT), dtype=torch.int32),
            seq_ids=torch.tensor([0]),
            sampling_params=torch.tensor([[1.0, 1.0, 1.0]]),
        )
    assert int(found.tokens) != expected(int8.with_name("model-plain"), 1)[0]


@on_the_fake
def test_the_strict_fake_refuses_experts_that_drop_tokens(llama: Path, tmp_path: Path) -> None:
    experts = {"architectures": ["MixtralForCausalLM"], "num_local_experts": 8, "num_experts_per_tok": 2}
    model = changed(llama, tmp_path / "model", {**experts, "model_type": "mixtral", "rope_theta": 1e4})
    found = settings(model)
    told = dataclasses.replace(found, neuron_config={**found.neuron_config, "capacity_factor": 2.0})
    with fake_nxdi(), pytest.raises(InvalidConfig, match="NxDI rule E1:"):
        library.application(told, model)


def run_with(model: Path, folder: Path, **changes: Any) -> Any:
    """An application that was compiled and loaded with other arguments than ours."""
    found = settings(model)
    os.environ.update(ENVIRONMENT, BASE_COMPILE_WORK_DIR=str(folder / "work"))
    told = dataclasses.replace(found, neuron_config={**found.neuron_config, **changes})
    made = library.application(told, model)
    made.compile(str(folder / "artifact"))
    made.load(str(folder / "artifact"), skip_warmup=True)
    return made
