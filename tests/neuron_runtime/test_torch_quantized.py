"""Quantized checkpoints give the logits of the weights that they stand for; what cannot be read is refused by name."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from helpers.quantized import FORMATS, PACKED, compressed, quantize
from helpers.torch_models import random_model, reference, reference_logits
from helpers.torch_parity import TOLERANCE, feed, load_decoder_and_cache, logits_on_ranks, on_ranks, random_sequences
from neuron_runtime.backend.torch import eight_bits
from neuron_runtime.backend.torch.held import MULTIPLIED_OUT, Held, held_as
from neuron_runtime.backend.torch.ranks import ALONE, Ranks
from neuron_runtime.backend.torch.step_module import constants
from neuron_runtime.backend.torch.weights import WeightReader
from neuron_runtime.checkpoint import CONFIG_FILE, WEIGHTS_FILE, Checkpoint, InvalidModel, TensorInfo, read_checkpoint
from neuron_runtime.errors import ExitCode, FatalError, InvalidConfig
from neuron_runtime.inspection import model_facts
from neuron_runtime.quantization import Quantizing, quantization_of

STEPS = [[(0, 0, 18), (1, 0, 24)], [(0, 18, 19), (1, 24, 31)]]
PER_CHANNEL = FORMATS["int8 per channel"]
ALL = {**FORMATS, **PACKED}


@pytest.mark.parametrize("name", ALL)
def test_logits_are_those_of_the_weights_that_are_stored(name: str, tmp_path: Path) -> None:
    source = random_model(tmp_path / "source", mlp_bias=True)
    plain = quantize(source, tmp_path / "model", ALL[name], head=True)
    sequences = random_sequences(19, 31)
    whole = feed(*load_decoder_and_cache(tmp_path / "model", "blocks"), STEPS, sequences)
    model = reference(plain)
    for logits, tokens in zip(whole, sequences, strict=True):
        torch.testing.assert_close(logits, reference_logits(model, tokens), atol=TOLERANCE, rtol=0)
    for split in logits_on_ranks(4, tmp_path / "model", STEPS, sequences, meeting=tmp_path):
        for found, expected in zip(split, whole, strict=True):
            torch.testing.assert_close(found, expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("name", ALL)
def test_facts_of_a_quantized_model_count_its_numbers_and_name_their_type(name: str, tmp_path: Path) -> None:
    source = random_model(tmp_path / "source")
    quantize(source, tmp_path / "model", ALL[name])
    facts, original = (model_facts(read_checkpoint(tmp_path / part)) for part in ("model", "source"))
    assert original.parameters <= facts.parameters <= 1.1 * original.parameters
    assert facts.weights_bytes < 0.6 * original.weights_bytes


@pytest.mark.parametrize("name", [name for name in FORMATS if "int8 per" in name])
def test_int8_weights_of_one_scale_per_row_take_the_memory_that_they_have_on_disk(name: str, tmp_path: Path) -> None:
    quantize(
        random_model(tmp_path / "source", hidden_size=128, intermediate_size=512), tmp_path / "model", FORMATS[name]
    )
    decoder, _, _ = load_decoder_and_cache(tmp_path / "model", "blocks")
    assert resident_bytes(decoder) == pytest.approx(read_checkpoint(tmp_path / "model").num_bytes, rel=0.05)
    numbers = [one for one in constants(decoder.weights).values() if one.dtype == torch.int8]
    assert len(numbers) == 2 * 4  # layers
    assert len({one.untyped_storage().data_ptr() for one in numbers}) == 1  # which has huge pages
    plain, _, _ = load_decoder_and_cache(tmp_path / "model", "blocks", quantization="none")
    assert resident_bytes(plain) == pytest.approx(read_checkpoint(tmp_path / "source").num_bytes, rel=0.05)


IN_BLOCKS = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
KEPT = {name: method for name, method in FORMATS.items() if not {"blocks", "groups,"}.intersection(name.split())}
KEPT["fp8 in blocks of 128"] = IN_BLOCKS


@pytest.mark.parametrize("name", KEPT)
def test_bfloat16_computes_with_numbers_of_8_bits_as_well_as_with_those_that_are_multiplied_out(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the kernel, on one rank and on two, in the memory that they have on disk; and without it."""
    source = random_model(tmp_path / "source", hidden_size=128, intermediate_size=512, mlp_bias=True)
    model = reference(quantize(source, tmp_path / "model", KEPT[name], head=True))
    sequences = random_sequences(19, 31)

    def error(ranks: Ranks = ALONE, quantization: Quantizing = "auto") -> float:
        loaded = load_decoder_and_cache(
            tmp_path / "model", "blocks", ranks=ranks, dtype=torch.bfloat16, quantization=quantization
        )
        if quantization == "auto" and ranks is ALONE and eight_bits.kernel():
            numbers = sum(one.numel() for one in constants(loaded[0].weights).values() if one.element_size() == 1)
            assert numbers == 2 * 128 * (2 * 128 + 2 * 64 + 3 * 512) + 256 * 128
        found = feed(*loaded, STEPS, sequences)
        pairs = zip(found, sequences, strict=True)
        return float(max((one - reference_logits(model, tokens)).abs().max() for one, tokens in pairs))

    limit = 1.3 * error(quantization="none")
    errors = [error(), *on_ranks(2, tmp_path, error)]
    monkeypatch.setattr(eight_bits, "kernel", lambda: None)
    errors.append(error())
    assert max(errors) <= limit


def resident_bytes(decoder: Any) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in constants(decoder.weights).values())


def test_weights_that_are_quantized_while_they_are_read_are_those_of_a_quantized_checkpoint(tmp_path: Path) -> None:
    source = random_model(tmp_path / "source", mlp_bias=True)
    model = reference(quantize(source, tmp_path / "model", PER_CHANNEL))
    sequences = random_sequences(19, 31)
    alone = feed(*load_decoder_and_cache(source, "blocks", quantization="int8"), STEPS, sequences)
    for found in (alone, *logits_on_ranks(4, source, STEPS, sequences, meeting=tmp_path, quantization="int8")):
        for logits, tokens in zip(found, sequences, strict=True):
            torch.testing.assert_close(logits, reference_logits(model, tokens), atol=TOLERANCE, rtol=0)


def test_weights_that_are_quantized_to_fp8_while_they_are_read_are_multiplied_out(tmp_path: Path) -> None:
    source = random_model(tmp_path / "source")
    weight, held = load_file(source / WEIGHTS_FILE)[O_PROJ], Held(made={O_PROJ: "fp8"})
    shapes = {O_PROJ: tuple(weight.shape)}
    reader = WeightReader(read_checkpoint(source), shapes, torch.float32, lambda stage, share: None, {}, held=held)
    scale = weight.abs().amax(dim=1, keepdim=True) / 240
    expected = (weight / scale).to(torch.float8_e4m3fn).float() * scale
    torch.testing.assert_close(reader.take_weight(O_PROJ), expected)


def test_the_int8_numbers_of_each_layer_begin_at_a_multiple_of_64(tmp_path: Path) -> None:
    source = random_model(tmp_path, hidden_size=36, num_heads=2, intermediate_size=35)
    decoder, *_ = load_decoder_and_cache(source, "blocks", quantization="int8")
    numbers = [one for one in constants(decoder.weights).values() if one.dtype == torch.int8]
    assert [one.data_ptr() % 64 for one in numbers] == [0] * 8


SHAPES = {
    "model.embed_tokens.weight": (256, 64),
    **{f"model.layers.0.self_attn.{name}_proj.weight": (64, 64) for name in "qkvo"},
    "model.layers.0.input_layernorm.weight": (64,),
    "lm_head.weight": (256, 64),
}
O_PROJ = "model.layers.0.self_attn.o_proj.weight"


def checkpoint_of(stored: Mapping[str, str], config: Mapping[str, Any]) -> Checkpoint:
    tensors = {name: TensorInfo(name, stored.get(name, "BF16"), shape, "f", 0, 0) for name, shape in SHAPES.items()}
    return Checkpoint(Path(), config, tensors, "")


def held(stored: Mapping[str, str], wanted: Quantizing, config: Mapping[str, Any], **others: Any) -> Held:
    return held_as(checkpoint_of(stored, config), SHAPES, quantization_of(config), wanted, **others)


def test_embedding_head_and_norms_are_not_quantized_and_compiled_steps_have_no_int8_weights() -> None:
    linears = {name for name in SHAPES if name.endswith("_proj.weight")}
    assert held({}, "auto", {}) == MULTIPLIED_OUT
    assert (held({}, "int8", {}).kept, held({}, "int8", {}).made) == (linears, dict.fromkeys(linears, "int8"))
    assert (held({}, "fp8", {}).kept, held({}, "fp8", {}).made) == (set(), dict.fromkeys(linears, "fp8"))
    compiled = held({}, "int8", {}, compiled=True)
    assert (compiled.kept, compiled.made) == (set(), dict.fromkeys(linears, "int8"))


def test_the_kernel_keeps_what_it_multiplies_in_blocks_of_whole_tiles_that_no_rank_cuts() -> None:
    linears = {name for name in SHAPES if name.endswith("_proj.weight")}
    own: Any = {"own": ("fp8",)}
    assert held({}, "fp8", {}, **own) == Held(frozenset(linears), dict.fromkeys(linears, "fp8"), True, "fp8")
    assert not held({}, "int8", {}, **own).tiled
    assert held({}, "fp8", {}, **own, compiled=True).kept == set()
    stored = dict.fromkeys(linears, "F8_E4M3")
    for block, num_ranks, kept in (([128, 64], 1, linears), ([128, 64], 2, set()), ([128, 32], 1, set())):
        config = {"quantization_config": {**IN_BLOCKS, "weight_block_size": block}}
        found = held(stored, "auto", config, **own, num_ranks=num_ranks)
        assert (found.kept, found.span if kept else 64) == (kept, 64)
        assert held(stored, "auto", config) == MULTIPLIED_OUT


def test_projections_that_are_computed_side_by_side_are_held_alike() -> None:
    config = {"quantization_config": PER_CHANNEL}
    q, k, v = (f"model.layers.0.self_attn.{name}_proj.weight" for name in "qkv")
    assert held({O_PROJ: "I8", q: "I8", k: "I8"}, "auto", config).kept == {O_PROJ}
    every = {O_PROJ: "I8", q: "I8", k: "I8", v: "I8", "lm_head.weight": "I8"}
    assert held(every, "auto", config).kept == set(every)
    assert held(every, "none", config) == MULTIPLIED_OUT
    assert held(every, "auto", {"quantization_config": FORMATS["int8 in groups, packed"]}) == MULTIPLIED_OUT
    with pytest.raises(InvalidConfig, match=r"quantization.*fp8"):
        held(every, "fp8", config)


def refused(config: Mapping[str, Any], folder: Path) -> str:
    random_model(folder)
    (folder / CONFIG_FILE).write_text(json.dumps({**json.loads((folder / CONFIG_FILE).read_text()), **config}))
    with pytest.raises(FatalError) as caught:
        load_decoder_and_cache(folder, "blocks")
    assert caught.value.exit_code is ExitCode.UNSUPPORTED_ARCHITECTURE
    return str(caught.value)


@pytest.mark.parametrize(
    ("method", "message"),
    [
        ({"bits": 4}, "quant_method None: .* supported: awq, compressed-tensors, fbgemm_fp8, fp8, gptq, modelopt"),
        ({"quant_method": "bitsandbytes"}, "quant_method 'bitsandbytes'"),
        ({**PACKED["AWQ"], "bits": 3}, "bits 3 of awq: .* 4"),
        ({**PACKED["AWQ"], "version": "gemv"}, "version 'gemv'"),
        ({**PACKED["AWQ"], "version": None, "format": "gemv_fast"}, "version 'gemv_fast'"),
        ({**PACKED["AWQ"], "backend": "llm-awq"}, "backend 'llm-awq' of awq"),
        ({**PACKED["AWQ"], "zero_point": False}, "zero_point False of awq"),
        ({**PACKED["AWQ"], "group_size": 0}, "group_size 0 of awq"),
        ({**PACKED["GPTQ"], "bits": 3}, "bits 3 of gptq: .* 4, 8"),
        ({**PACKED["GPTQ"], "checkpoint_format": "marlin"}, "checkpoint_format 'marlin'"),
        ({**PACKED["GPTQ"], "dynamic": {"+:.*down.*": {"bits": 8}}}, "dynamic of gptq"),
        ({"quant_method": ["gptq"]}, "quant_method"),
        ("gptq", "quant_method None"),
        (compressed("int", "group", "pack-quantized", num_bits=2, group_size=32), "weights of type int with 2 bits"),
        (compressed("int", "channel", "int-quantized", num_bits=4), "weights of type int with 4 bits"),
        (compressed("int", "channel", "int-quantized", symmetric=False), "asymmetric weights"),
        (compressed("int", "group", "pack-quantized", group_size=32, actorder="group"), "actorder 'group'"),
        (compressed("int", "group", "pack-quantized", group_size=-1), "strategy 'group'"),
        (compressed("int", "tensor_group", "int-quantized"), "strategy 'tensor_group'"),
        ({**PER_CHANNEL, "sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config"),
        ({**PER_CHANNEL, "config_groups": {}}, "config_groups"),
        (
            {**PER_CHANNEL, "config_groups": {"a": {"weights": {"num_bits": 8}}, "b": {"weights": None}}},
            "config_groups",
        ),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt 'e5m2'"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, r"weight_block_size \[128\]"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "quant_algo 'NVFP4'"),
    ],
)
def test_a_method_that_is_not_read_is_named_with_those_that_are(method: Any, message: str, tmp_path: Path) -> None:
    assert re.search(message, refused({"quantization_config": method}, tmp_path / "model"))


def test_a_layout_is_known_by_old_and_new_names() -> None:
    awq, gptq = PACKED["AWQ"], PACKED["GPTQ"]
    for given, same in (
        ({**awq, "version": "GEMM", "backend": "autoawq"}, awq),
        ({**awq, "format": "gemm", "backend": "auto"}, awq),
        ({"quant_method": "awq", "w_bit": 4, "q_group_size": 16}, awq),
        ({**gptq, "format": "gptq", "backend": "auto", "dynamic": {"-:.*down.*": {}}}, gptq),
        ({**gptq, "format": "gptq_v2"}, PACKED["GPTQ, version 2"]),
    ):
        assert quantization_of({"quantization_config": given}) == quantization_of({"quantization_config": same})


PROJECTION = "model.layers.1.mlp.up_proj"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(f"{PROJECTION}.weight_scale"), f"missing: {PROJECTION}.weight_scale"),
        (
            lambda t: t.update({f"{PROJECTION}.weight_scale": torch.ones(127, 1)}),
            rf"{PROJECTION}.weight_scale has shape \[127, 1\], config.json requires \[128, 1\]",
        ),
        (
            lambda t: t.update({f"{PROJECTION}.weight_scale": torch.ones(128, 1, dtype=torch.int8)}),
            "weight_scale has dtype I8",
        ),
        (
            lambda t: t.update({f"{PROJECTION}.weight": t[f"{PROJECTION}.weight"].to(torch.float8_e4m3fn)}),
            f"unexpected: {PROJECTION}.weight_scale",
        ),
        (
            lambda t: t.update({f"{PROJECTION}.weight_zero_point": torch.ones(128, 1)}),
            "unexpected: .*weight_zero_point",
        ),
        (
            lambda t: t.update({"model.embed_tokens.weight": t["model.embed_tokens.weight"].to(torch.int8)}),
            "embed_tokens.weight",
        ),
    ],
)
def test_tensors_that_contradict_the_method_are_named(change: Any, message: str, tmp_path: Path) -> None:
    quantize(random_model(tmp_path / "source"), tmp_path / "model", PER_CHANNEL)
    tensors = load_file(tmp_path / "model" / WEIGHTS_FILE)
    change(tensors)
    save_file(tensors, tmp_path / "model" / WEIGHTS_FILE, metadata={"format": "pt"})
    with pytest.raises(InvalidModel, match=message):
        load_decoder_and_cache(tmp_path / "model", "blocks")


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("AWQ", {"qzeros": None}, rf"missing: {PROJECTION}.qzeros .*awq: int4 in blocks of 1 x 16, packed"),
        (
            "AWQ",
            {"qweight": torch.zeros(8, 128, dtype=torch.int32)},
            r"up_proj.qweight has shape \[8, 128\].*\[64, 16\].*awq",
        ),
        ("GPTQ", {"qweight": torch.zeros(8, 128)}, f"unexpected: .*{PROJECTION}.qweight"),
        ("GPTQ", {"scales": torch.ones(3, 128)}, rf"{PROJECTION}.scales has shape \[3, 128\].*gptq"),
        ("GPTQ", {"bias": torch.ones(128)}, f"{PROJECTION}.bias is not 0"),
        ("GPTQ in order of activations", {"g_idx": None}, f"missing: {PROJECTION}.g_idx"),
        (
            "GPTQ in order of activations",
            {"g_idx": torch.full((64,), 4, dtype=torch.int32)},
            "g_idx has groups beyond 0 to 3",
        ),
        ("int4 in groups, asymmetric", {"weight_zero_point": None}, f"missing: {PROJECTION}.weight_zero_point"),
    ],
)
def test_packed_tensors_that_contradict_the_method_are_named(
    name: str, change: dict[str, torch.Tensor | None], message: str, tmp_path: Path
) -> None:
    quantize(random_model(tmp_path / "source"), tmp_path / "model", PACKED[name])
    path = tmp_path / "model" / WEIGHTS_FILE
    tensors = {**load_file(path), **{f"{PROJECTION}.{word}": tensor for word, tensor in change.items()}}
    save_file({key: one for key, one in tensors.items() if one is not None}, path, metadata={"format": "pt"})
    with pytest.raises(InvalidModel, match=message):
        load_decoder_and_cache(tmp_path / "model", "blocks")
