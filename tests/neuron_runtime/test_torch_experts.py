"""gpt-oss and Llama 4: experts that lie in one tensor, in MXFP4, and attention that ends at windows and chunks while
blocks are shared and sequences are preempted. Both are compared with transformers in `test_torch_families.py`, too."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from helpers.adapters import write_adapter
from helpers.quantized import FORMATS, quantize, quantize_experts
from helpers.random_model import model_config, stacked
from helpers.torch_models import MODELS, load_backend, random_model, reference, reference_logits, runtime_config
from helpers.torch_parity import (
    TOLERANCE,
    check_greedy,
    feed,
    load_decoder_and_cache,
    logits_on_ranks,
    random_sequences,
    serve,
)
from neuron_runtime.backend.torch.architecture import Rope, Tempering, Window, decoder_config
from neuron_runtime.backend.torch.graphs import TorchCompiler
from neuron_runtime.backend.torch.linear import Scaled, Widened
from neuron_runtime.backend.torch.mlp import Clamped, Route
from neuron_runtime.checkpoint import CONFIG_FILE, WEIGHTS_FILE, InvalidModel, read_checkpoint, read_config
from neuron_runtime.config import AdapterOptions, ModelSource
from neuron_runtime.conversion.converting import convert
from neuron_runtime.conversion.plan import conversion_of
from neuron_runtime.core import Request, Sampling
from neuron_runtime.errors import FatalError, InvalidConfig
from neuron_runtime.inspection import inspect_model, model_facts
from neuron_runtime.record import Converted
from neuron_runtime.weights.store import Store

FAMILIES = ("gpt-oss", "Llama 4")
IMAGES = "Llama 4 with images, two experts and plain heads"
STEPS = [[(0, 0, 18), (1, 0, 24)], [(0, 18, 19), (1, 24, 31)]]


def test_experts_in_mxfp4_are_computed_as_the_numbers_that_they_stand_for(tmp_path: Path) -> None:
    source = random_model(tmp_path / "source", **MODELS["gpt-oss"])
    plain = quantize_experts(source, tmp_path / "model")
    sequences = random_sequences(19, 31)
    whole = feed(*load_decoder_and_cache(tmp_path / "model", "blocks"), STEPS, sequences)
    model = reference(plain)
    for logits, tokens in zip(whole, sequences, strict=True):
        torch.testing.assert_close(logits, reference_logits(model, tokens), atol=TOLERANCE, rtol=0)

    # Four ranks cut through the blocks of 32 numbers that share a scale.
    for split in logits_on_ranks(4, tmp_path / "model", STEPS, sequences, meeting=tmp_path):
        for found, expected in zip(split, whole, strict=True):
            torch.testing.assert_close(found, expected, atol=TOLERANCE, rtol=0)
    facts, original = (model_facts(read_checkpoint(folder)) for folder in (tmp_path / "model", source))
    assert facts.parameters == original.parameters
    assert facts.weights_bytes < 0.7 * original.weights_bytes


def test_the_numbers_of_mxfp4_are_those_of_transformers(tmp_path: Path) -> None:
    # It takes a second, which each process that collects tests would spend.
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    source = random_model(tmp_path / "source", **MODELS["gpt-oss"])
    folders = quantize_experts(source, tmp_path / "model"), tmp_path / "model"
    plain, stored = (load_file(folder / WEIGHTS_FILE) for folder in folders)
    name = "model.layers.1.mlp.experts.gate_up_proj"
    packed = stored[f"{name}_blocks"], stored[f"{name}_scales"]
    assert torch.equal(convert_moe_packed_tensors(*packed, dtype=torch.float32), plain[name])


def test_experts_of_llama_4_may_lie_in_tensors_of_their_own_in_fp8(tmp_path: Path) -> None:
    source, apart = random_model(tmp_path / "source", **MODELS["Llama 4"]), {}
    for name, tensor in load_file(source / WEIGHTS_FILE).items():
        module, found, projection = name.partition(".experts.")
        for number, expert in enumerate(tensor.transpose(1, 2) if found else ()):
            names = ["gate_proj", "up_proj"] if projection == "gate_up_proj" else ["down_proj"]
            for part, weight in zip(names, expert.chunk(len(names)), strict=True):
                apart[f"{module}.experts.{number}.{part}.weight"] = weight.contiguous()
        if not found:
            apart[name] = tensor
    save_file(apart, source / WEIGHTS_FILE)
    plain = quantize(source, tmp_path / "model", FORMATS["fp8 per channel"])
    save_file(
        stacked(load_file(plain / WEIGHTS_FILE), alternate=False), plain / WEIGHTS_FILE, metadata={"format": "pt"}
    )
    (tokens,) = sequences = random_sequences(30)
    (found,) = feed(*load_decoder_and_cache(tmp_path / "model", "blocks"), [[(0, 0, 30)]], sequences)
    torch.testing.assert_close(found, reference_logits(reference(plain), tokens), atol=TOLERANCE, rtol=0)


def test_a_llama_4_may_have_no_experts_at_all(tmp_path: Path) -> None:
    """Llama Guard 4."""
    none = {"moe_layers": [], "num_local_experts": 0, "interleave_moe_layer_step": 0, "num_experts_per_tok": 0}
    folder = random_model(tmp_path, **MODELS[IMAGES] | none)
    (tokens,) = sequences = random_sequences(30)
    (found,) = feed(*load_decoder_and_cache(folder, "blocks"), [[(0, 0, 30)]], sequences)
    torch.testing.assert_close(found, reference_logits(reference(folder), tokens), atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("has_scale", [True, False])
def test_experts_in_one_tensor_may_share_a_scale_as_modelopt_writes_them(has_scale: bool, tmp_path: Path) -> None:
    source = random_model(tmp_path / "source", **MODELS[IMAGES])
    plain = quantize(source, tmp_path / "model", FORMATS["fp8 of ModelOpt"])
    stored, computed = (load_file(folder / WEIGHTS_FILE) for folder in (tmp_path / "model", plain))
    for name in [name for name in stored if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        scale = stored[name].abs().max() / 448
        stored[name] = (stored[name] / scale).to(torch.float8_e4m3fn)
        computed[name] = stored[name].float() * scale
        stored |= {f"{name}_input_scale": torch.tensor(1.0)} | ({f"{name}_weight_scale": scale} if has_scale else {})
    save_file(stored, tmp_path / "model" / WEIGHTS_FILE)
    save_file(computed, plain / WEIGHTS_FILE, metadata={"format": "pt"})
    (tokens,) = sequences = random_sequences(30)
    if not has_scale:
        with pytest.raises(InvalidModel, match=r"missing: .*experts\.0\.gate_proj\.weight_scale"):
            load_decoder_and_cache(tmp_path / "model", "blocks")
        return
    (found,) = feed(*load_decoder_and_cache(tmp_path / "model", "blocks"), [[(0, 0, 30)]], sequences)
    torch.testing.assert_close(found, reference_logits(reference(plain), tokens), atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("name", FAMILIES)
def test_shared_blocks_and_preemption_change_no_token(name: str, tmp_path: Path) -> None:
    folder = random_model(tmp_path, **MODELS[name])
    rng = np.random.default_rng(2)
    # The prefix ends behind the first window and within the third chunk.
    prefix = rng.integers(0, 256, 44).tolist()
    asked = [
        Request(f"r{i}", (*prefix, *rng.integers(0, 256, 3 + 5 * i).tolist()), Sampling(max_tokens=36, temperature=0.0))
        for i in range(5)
    ]
    tokens, engine, _ = serve(
        folder,
        [(8 * i, request) for i, request in enumerate(asked)],
        layout="blocks",
        block_size=4,
        num_blocks=40,
        max_sequences=4,
        max_step_tokens=32,
        max_model_length=112,
    )
    assert engine.stats.num_preemptions_total > 0
    assert engine.stats.num_prefix_hits_total > 0
    check_greedy(folder, asked, tokens)


@pytest.mark.parametrize("name", FAMILIES)
def test_adapters_of_their_attention_give_the_tokens_of_peft(name: str, tmp_path: Path) -> None:
    model = random_model(tmp_path / "model", **MODELS[name])
    targets = ("q_proj", "k_proj", "v_proj", "o_proj")
    loaded = {"one": write_adapter(tmp_path / "one", read_config(model), targets=targets)}
    asked = [
        Request(str(i), tuple(prompt), Sampling(max_tokens=9, temperature=0.0), adapter=adapter)
        for i, (prompt, adapter) in enumerate(zip(random_sequences(33, 21, 40), ("one", "", "one"), strict=True))
    ]
    options = AdapterOptions(max_active=1, max_rank=4)
    limits = {"max_sequences": 3, "max_model_length": 64, "max_step_tokens": 24}
    tokens, *_ = serve(model, list(enumerate(asked)), loaded=loaded, adapters=options, **limits)
    check_greedy(model, asked, tokens, loaded)


@pytest.mark.parametrize("name", FAMILIES)
def test_experts_in_one_tensor_are_quantized_while_they_are_read(name: str, tmp_path: Path) -> None:
    folder, sequences = random_model(tmp_path / "model", **MODELS[name]), random_sequences(19, 31)
    decoder, *rest = load_decoder_and_cache(folder, "blocks", quantization="int8")
    assert isinstance(decoder.weights.layers[1].mlp.experts[2].gate_up, Scaled)
    exact = feed(*load_decoder_and_cache(folder, "blocks"), STEPS, sequences)
    found = feed(decoder, *rest, STEPS, sequences)
    for split in logits_on_ranks(2, folder, STEPS, sequences, meeting=tmp_path, quantization="int8"):
        for ours, whole, expected in zip(split, found, exact, strict=True):
            torch.testing.assert_close(ours, whole, atol=1e-3, rtol=0)
            assert (whole - expected).abs().mean() < expected.abs().mean() / 20


def test_the_shapes_of_llama_4_follow_its_fields() -> None:
    model = decoder_config(_config("Llama 4"))
    assert model.unrotated == {3}
    assert model.windows == (*[Window(20, is_chunk=True)] * 3, None)
    assert model.tempering == Tempering(16, 0.1)
    assert model.experts is not None
    assert model.experts.layers == (False, True, False, True)
    assert decoder_config(_config("Llama 4", attention_chunk_size=512)).windows == (None,) * 4
    assert decoder_config(_config("Llama 4", no_rope_layers=[], no_rope_layer_interval=2)).unrotated == {1, 3}


def test_a_gpt_oss_without_a_rope_has_that_of_transformers() -> None:
    fields = _config("gpt-oss")
    del fields["rope_theta"], fields["rope_scaling"]
    rope = Rope(150_000.0, "yarn", 32.0, original_max_position_embeddings=4096, truncate=False, scale=ANY)
    assert decoder_config(fields).rope == rope
    plain = {"rope_type": "default", "rope_theta": 5000.0}
    assert decoder_config(fields | {"rope_parameters": plain}).rope == Rope(5000.0)


def test_a_chunk_begins_at_its_multiples_and_a_window_where_it_ends() -> None:
    positions = np.array([0, 19, 20, 41])
    assert Window(20, is_chunk=True).first(positions).tolist() == [0, 0, 20, 40]
    assert Window(20).first(positions).tolist() == [-19, 0, 1, 22]


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        ("Llama 4", {"no_rope_layers": [1]}, r"no_rope_layers must be a list of num_hidden_layers \(4\)"),
        ("Llama 4", {"moe_layers": "all"}, "moe_layers must be a list of numbers of layers"),
        ("Llama 4", {"attention_chunk_size": None}, "names chunked_attention, but attention_chunk_size is null"),
        ("Llama 4", {"floor_scale": 0}, "floor_scale must be a positive number"),
        ("Llama 4", {"layer_types": ["sliding_attention"] * 4}, "supported: full_attention, chunked_attention"),
        ("Llama 4", {"attention_chunk_size": True}, "attention_chunk_size must be a positive integer"),
        (IMAGES, {"text_config": 3}, "text_config must be an object"),
        ("gpt-oss", {"swiglu_limit": -1}, "swiglu_limit must be a positive number"),
        ("gpt-oss", {"sliding_window": None}, "names sliding_attention, but sliding_window is null"),
        ("gpt-oss", {"layer_types": ["full_attention"]}, r"layer_types must be a list of num_hidden_layers \(3\)"),
    ],
)
def test_impossible_fields_are_an_error_that_names_them(name: str, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(FatalError, match=message):
        decoder_config(_config(name, **fields))


def test_a_stack_of_another_number_of_experts_is_named(tmp_path: Path) -> None:
    folder = random_model(tmp_path, **MODELS["gpt-oss"])
    config = json.loads((folder / CONFIG_FILE).read_text())
    (folder / CONFIG_FILE).write_text(json.dumps(config | {"num_local_experts": 5}))
    with pytest.raises(InvalidModel, match=r"unexpected: .*experts\.down_proj"):
        load_backend(folder)


def test_an_expert_of_another_shape_is_named(tmp_path: Path) -> None:
    folder = random_model(tmp_path, **MODELS["Llama 4"])
    tensors = load_file(folder / WEIGHTS_FILE)
    name = "model.layers.1.feed_forward.experts.down_proj"
    tensors[name] = tensors[name][:, :-1].contiguous()
    save_file(tensors, folder / WEIGHTS_FILE)
    with pytest.raises(InvalidModel, match=r"down_proj.* has shape \[64, 47\], config.json requires \[64, 48\]"):
        load_backend(folder)


def test_the_activation_of_gpt_oss_is_clamped() -> None:
    torch.manual_seed(0)
    layer = Clamped(Widened(torch.randn(8, 4), None), Widened(torch.eye(4), None), alpha=1.5, limit=0.7)
    x = torch.randn(9, 4) * 3
    gate, up = layer.gate_up(x).split(4, dim=-1)
    gate, up = torch.minimum(gate, torch.tensor(0.7)), up.clip(-0.7, 0.7)
    torch.testing.assert_close(layer(x), (up + 1) * gate / (1 + torch.exp(-1.5 * gate)))


def test_the_highest_outputs_choose_where_all_sigmoids_round_to_one() -> None:
    shares, chosen = Route("sigmoid", 2, normalises=False)(torch.tensor([[90.0, 100.0, 80.0], [70.0, 60.0, 65.0]]))
    assert chosen.tolist() == [[1, 0], [0, 2]]
    assert shares.tolist() == [[1, 1], [1, 1]]


@pytest.mark.parametrize(("name", "kind"), [("gpt-oss", "int8"), ("Llama 4", "fp8"), (IMAGES, "int8")])
def test_experts_in_one_tensor_are_converted_as_they_are_quantized_while_they_are_read(
    name: str, kind: Any, tmp_path: Path
) -> None:
    folder, sequences = random_model(tmp_path / "model", **MODELS[name]), random_sequences(19, 31)
    Tokenizer(WordLevel({"w0": 0}, unk_token="w0")).save(str(folder / "tokenizer.json"))

    def converted(uri: str) -> tuple[Converted, str]:
        store, quiet = Store(tmp_path / "store"), lambda title: lambda amount: None
        return convert(ModelSource(uri=uri), store, quiet, backend="torch", wanted=kind)

    made, address = converted(folder.as_uri())
    facts = inspect_model(folder.as_uri(), "torch", quantization=kind)
    assert facts.conversion is not None
    assert facts.conversion.digest == made.weights.digest
    assert 0 < made.figures.layer_error < 0.05
    read = feed(*load_decoder_and_cache(folder, "blocks", quantization=kind), STEPS, sequences)
    found = feed(*load_decoder_and_cache(Path(address), "blocks"), STEPS, sequences)
    for one, other in zip(found, read, strict=True):
        torch.testing.assert_close(one, other, atol=TOLERANCE, rtol=0)
    with pytest.raises(InvalidConfig, match="there is nothing to convert"):
        converted(Path(address).as_uri())


def test_experts_in_one_tensor_are_not_converted_for_nxdi() -> None:
    config = _config("Llama 4")
    with pytest.raises(FatalError, match="in one tensor, which is not converted for nxdi: leave quantization out"):
        conversion_of(config, {}, "nxdi", "int8")
    mxfp4 = {"quantization_config": {"quant_method": "mxfp4"}}
    assert conversion_of(_config("gpt-oss") | mxfp4, {}, "nxdi", "auto") is None  # a family of its own


@pytest.mark.parametrize("name", FAMILIES)
def test_bfloat16_is_near_float32(name: str, tmp_path: Path) -> None:
    folder = random_model(tmp_path, **MODELS[name])
    sequences = random_sequences(40)
    steps = [[(0, 0, 33)], *[[(0, 33 + i, 34 + i)] for i in range(7)]]
    exact, found = (
        feed(*load_decoder_and_cache(folder, "blocks", dtype=dtype), steps, sequences)[0]
        for dtype in (torch.float32, torch.bfloat16)
    )
    # A token whose experts are nearly tied may get others.
    assert (exact - found).abs().mean() < exact.abs().mean() / 20


@pytest.mark.parametrize("name", [*FAMILIES, IMAGES])
def test_their_steps_are_not_compiled(name: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match="without experts"):
        TorchCompiler(runtime_config(), random_model(tmp_path, **MODELS[name]))


def _config(name: str, **fields: Any) -> dict[str, Any]:
    return model_config(**MODELS[name]) | fields
