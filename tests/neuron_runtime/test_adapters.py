"""What adapters are: PEFT's format as read, what fits a model, and how every other file is refused."""

from __future__ import annotations

import contextlib
import json
import math
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from helpers.adapters import adapter_config, adapter_tensors, tensor_name, write_adapter
from helpers.tiny_model import TINY_CONFIG
from neuron_runtime.adapters.peft import (
    CONFIG_FILE,
    MAX_HEADER_BYTES,
    TARGETS,
    WEIGHTS_FILE,
    AdapterRules,
    open_adapter,
    read_adapter,
)
from neuron_runtime.adapters.tensors import pairs
from neuron_runtime.errors import ExitCode, FatalError

RULES = AdapterRules(max_rank=16)
NOT_SUPPORTED, INVALID = ExitCode.ADAPTER_NOT_SUPPORTED, ExitCode.INVALID_ADAPTER


def refusal(folder: Path, model: dict[str, Any] = TINY_CONFIG, rules: AdapterRules = RULES) -> FatalError:
    with pytest.raises(FatalError) as caught:
        read_adapter(folder, model, rules)
    assert len(str(caught.value)) < 1500
    assert str(caught.value).isprintable()
    return caught.value


# What fits


def test_the_facts_are_those_of_the_tensors(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path, rank=4, targets=("v_proj", "q_proj"), layers=[1])
    facts = read_adapter(folder, TINY_CONFIG, RULES)
    assert (facts.rank, facts.targets, facts.base_model) == (4, ("q_proj", "v_proj"), "org/base")
    assert facts.num_bytes == sum(
        tensor.nbytes for tensor in adapter_tensors(targets=("q_proj", "v_proj"), layers=[1]).values()
    )


@pytest.mark.parametrize(
    ("config", "scaling"),
    [({}, 2.0), ({"lora_alpha": 3}, 0.75), ({"use_rslora": True}, 4.0), ({"lora_alpha": -0.5}, -0.125)],
)
def test_the_scaling_is_that_of_plain_or_rank_stabilized_lora(
    tmp_path: Path, config: dict[str, Any], scaling: float
) -> None:
    folder = write_adapter(tmp_path, rank=4, config=config)
    assert {pair.scaling for pair in open_adapter(folder).pairs} == {scaling}


def test_ranks_of_a_pattern_are_those_of_their_tensors(tmp_path: Path) -> None:
    config = {"rank_pattern": {r"layers\.1\..*v_proj": 16}, "use_rslora": True}
    folder = write_adapter(tmp_path, rank=4, ranks={(1, "v_proj"): 16}, config=config)
    assert read_adapter(folder, TINY_CONFIG, RULES).rank == 16
    scalings = {(pair.layer, pair.target): pair.scaling for pair in open_adapter(folder).pairs}
    assert scalings[1, "v_proj"] == 8 / math.sqrt(16)
    assert scalings[0, "v_proj"] == 8 / math.sqrt(4)


@pytest.mark.parametrize(
    "names",
    [
        "all-linear",
        r"(a|a)*+.*_proj$",
        None,
        ["self_attn.q_proj"],
        ["model.layers.1.self_attn.q_proj", "layers.0.self_attn.q_proj"],
    ],
    ids=str,
)
def test_target_modules_may_have_any_form_of_peft(tmp_path: Path, names: object) -> None:
    folder = write_adapter(tmp_path, targets=["q_proj"], config={"target_modules": names})
    assert read_adapter(folder, TINY_CONFIG, RULES).targets == ("q_proj",)


@pytest.mark.parametrize("layers", [1, [1], [0, 1]])
def test_layers_to_transform_may_be_some(tmp_path: Path, layers: object) -> None:
    folder = write_adapter(tmp_path, layers=[1], config={"layers_to_transform": layers})
    assert {pair.layer for pair in open_adapter(folder).pairs} == {1}


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_the_digest_is_of_configuration_and_tensors(tmp_path: Path, dtype: Any) -> None:
    def digest(name: str, **changes: Any) -> str:
        return read_adapter(write_adapter(tmp_path / name, dtype=dtype, **changes), TINY_CONFIG, RULES).digest

    first = digest("a")
    assert first == digest("b")
    assert (
        len({first, digest("c", seed=1), digest("d", config={"lora_alpha": 1}), digest("e", targets=["q_proj"])}) == 4
    )
    assert len(first) == 64


# What does not fit


def test_a_rank_above_the_highest_is_refused_with_both(tmp_path: Path) -> None:
    write_adapter(tmp_path, rank=32)
    error = refusal(tmp_path)
    assert error.exit_code.reason == "RankTooHigh"
    assert "r has rank 32, but the highest that is served is 16" in str(error)
    write_adapter(
        tmp_path, rank=4, ranks={(0, "q_proj"): 17}, config={"rank_pattern": {"layers.0.self_attn.q_proj": 17}}
    )
    assert "rank_pattern has rank 17" in str(refusal(tmp_path))


def test_a_backend_may_need_a_least_rank(tmp_path: Path) -> None:
    write_adapter(tmp_path, rank=1)
    assert read_adapter(tmp_path, TINY_CONFIG, RULES).rank == 1
    error = refusal(tmp_path, rules=AdapterRules(max_rank=16, min_rank=2))
    assert error.exit_code is NOT_SUPPORTED
    assert "rank 1 is not supported: this backend computes ranks from 2 on" in str(error)


def test_projections_that_are_not_served_are_refused_with_those_that_are(tmp_path: Path) -> None:
    write_adapter(tmp_path)
    error = refusal(tmp_path, rules=AdapterRules(max_rank=16, targets=TARGETS[:4]))
    assert error.exit_code.reason == "TargetsNotServed"
    assert "changes gate_proj, up_proj, down_proj, but" in str(error)
    assert "adapters of q_proj, k_proj, v_proj, o_proj:" in str(error)


def test_adapters_of_experts_are_not_served(tmp_path: Path) -> None:
    model = {**TINY_CONFIG, "num_local_experts": 4}
    write_adapter(tmp_path, targets=TARGETS[:4])
    assert read_adapter(tmp_path, model, RULES).targets == TARGETS[:4]
    write_adapter(tmp_path)
    assert refusal(tmp_path, model).exit_code is ExitCode.TARGETS_NOT_SERVED
    name = tensor_name(0, "up_proj", "A").replace("mlp", "mlp.experts.3")
    write_adapter(tmp_path, targets=TARGETS[:4], more_tensors={name: np.zeros((4, 32), np.float32)})
    assert refusal(tmp_path, model).exit_code is ExitCode.TARGETS_NOT_SERVED


def test_an_adapter_of_a_model_with_images_changes_its_text_model(tmp_path: Path) -> None:
    """Of Llama 4 Scout and Maverick, whose config.json has the fields of the text apart. PEFT names that part, too."""
    images = {"architectures": ["Llama4ForConditionalGeneration"], "text_config": TINY_CONFIG}
    write_adapter(tmp_path, targets=TARGETS[:2])
    facts, plain = read_adapter(tmp_path, images, RULES), load_file(tmp_path / WEIGHTS_FILE)
    for part in ("language_model.model", "model.language_model"):
        named = {name.replace(".model.model.", f".model.{part}."): one for name, one in plain.items()}
        save_file(named, tmp_path / WEIGHTS_FILE)
        found = read_adapter(tmp_path, images, RULES)
        assert (found.targets, found.num_bytes) == (facts.targets, facts.num_bytes)
        assert "but this model has no language_model" in str(refusal(tmp_path))
    save_file(named | plain, tmp_path / WEIGHTS_FILE)
    assert "which are one" in str(refusal(tmp_path, images))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 64}, "a q_proj of 64 to 32 numbers in layer 0, but that of the model is of 32 to 32"),
        ({"num_key_value_heads": 4}, "a k_proj of 32 to 32 numbers in layer 0, but that of the model is of 32 to 16"),
        ({"intermediate_size": 64}, "a gate_proj of 32 to 64 numbers in layer 0"),
        ({"num_hidden_layers": 3}, "changes layer 2, but the layers of the model are 0 to 1"),
    ],
)
def test_an_adapter_of_another_model_is_refused_with_both_shapes(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    write_adapter(tmp_path, {**TINY_CONFIG, **changes})
    error = refusal(tmp_path)
    assert error.exit_code.reason == "AdapterMismatch"
    assert message in str(error)
    assert "which was trained for org/base" in str(error)


# More than plain LoRA


@pytest.mark.parametrize(
    "config",
    [
        {"use_dora": True},
        {"bias": "all"},
        {"bias": "lora_only"},
        {"lora_bias": True},
        {"modules_to_save": ["lm_head"]},
        {"alpha_pattern": {"q_proj": 32}},
        {"lora_alpha": 0},
        {"layer_replication": [[0, 2]]},
        {"trainable_token_indices": [3]},
        {"target_parameters": ["experts.gate_up_proj"]},
        {"use_qalora": True},
        {"alora_invocation_tokens": [1, 2]},
        {"init_lora_weights": "pissa_niter_4"},
        {"init_lora_weights": "olora"},
        {"init_lora_weights": "loftq"},
        {"task_type": "SEQ_CLS"},
        {"peft_type": "IA3"},
        {"invented_next_year": {"a": 1}},
    ],
    ids=str,
)
def test_what_is_more_than_plain_lora_is_refused_by_its_name(tmp_path: Path, config: dict[str, Any]) -> None:
    write_adapter(tmp_path, config=config)
    error = refusal(tmp_path)
    assert error.exit_code.reason == "AdapterNotSupported"
    assert next(iter(config)) in str(error)


@pytest.mark.parametrize(
    ("name", "what"),
    [
        (tensor_name(0, "q_proj", "A").replace("lora_A.weight", "lora_magnitude_vector.weight"), "of DoRA"),
        ("base_model.model.model.embed_tokens.lora_embedding_A", "of embeddings"),
        ("base_model.model.model.embed_tokens.weight", "of embeddings"),
        ("base_model.model.lm_head.lora_A.weight", "of the head"),
        ("base_model.model.lm_head.weight", "of the head"),
        (tensor_name(0, "q_proj", "B").replace("weight", "bias"), "a bias"),
        ("base_model.model.model.layers.0.self_attn.q_proj.bias", "a bias"),
        ("base_model.model.model.norm.weight", "modules_to_save"),
    ],
)
def test_tensors_of_more_than_plain_lora_are_refused_whatever_the_configuration_says(
    tmp_path: Path, name: str, what: str
) -> None:
    write_adapter(tmp_path, more_tensors={name: np.zeros((4, 32), np.float32)})
    error = refusal(tmp_path)
    assert error.exit_code is NOT_SUPPORTED
    assert what in str(error)


@pytest.mark.parametrize("module", ["self_attn.qkv_proj", "mlp.q_proj", "mlp.gate", "self_attn.Ｑ_proj"])
def test_other_projections_are_refused_by_their_tensor(tmp_path: Path, module: str) -> None:
    name = f"base_model.model.model.layers.0.{module}.lora_A.weight"
    write_adapter(tmp_path, more_tensors={name: np.zeros((4, 32), np.float32)})
    error = refusal(tmp_path)
    assert error.exit_code is ExitCode.TARGETS_NOT_SERVED
    assert name in str(error)


def test_weights_of_another_type_are_refused(tmp_path: Path) -> None:
    write_adapter(tmp_path, dtype=np.int8)
    assert refusal(tmp_path).exit_code is NOT_SUPPORTED


# Damaged and hostile files


def header(folder: Path, entries: object, data: bytes = b"") -> None:
    raw = entries if isinstance(entries, bytes) else json.dumps(entries).encode()
    (folder / WEIGHTS_FILE).write_bytes(struct.pack("<Q", len(raw)) + raw + data)


def without(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def config_text(text: str) -> Callable[[Path], object]:
    return lambda folder: (folder / CONFIG_FILE).write_text(text)


def configured(**changes: Any) -> Callable[[Path], object]:
    return config_text(json.dumps(adapter_config(**changes)))


def tensors(**shapes: Any) -> Callable[[Path], None]:
    return lambda folder: (without(WEIGHTS_FILE)(folder), write_adapter(folder, more_tensors=shapes))[0]


def truncated(folder: Path) -> None:
    os.truncate(folder / WEIGHTS_FILE, 2000)


def half(folder: Path) -> None:
    name = tensor_name(1, "up_proj", "A")
    write_adapter(folder, targets=["q_proj"], more_tensors={name: np.zeros((4, 32), np.float32)})


def pickled(folder: Path) -> None:
    (folder / WEIGHTS_FILE).rename(folder / "adapter_model.bin")


def pipe(folder: Path) -> None:
    (folder / WEIGHTS_FILE).unlink()
    os.mkfifo(folder / WEIGHTS_FILE)


def overlapping(folder: Path) -> None:
    names = tensor_name(0, "q_proj", "A"), tensor_name(0, "q_proj", "B")
    entry = {"dtype": "F32", "shape": [4, 32], "data_offsets": [0, 512]}
    header(folder, dict.fromkeys(names, entry), bytes(512))


def huge(folder: Path) -> None:
    entry = {"dtype": "F32", "shape": [2**40, 2**40], "data_offsets": [0, 2**82]}
    header(folder, {tensor_name(0, "q_proj", "A"): entry})


def strange(folder: Path) -> None:
    write_adapter(folder, more_tensors={"\n" + "x" * 5000: np.zeros((4, 32), np.float32)})


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (without(CONFIG_FILE), "adapter_config.json is missing: the folder of an adapter"),
        (without(WEIGHTS_FILE), "adapter_model.safetensors is missing: save the adapter"),
        (pickled, "adapter_model.bin is not read, because it may run code: save the adapter"),
        (config_text("{"), "malformed JSON"),
        (config_text("[" * 100_000), "malformed JSON"),
        (config_text("[1]"), "must be a JSON object"),
        (config_text(" " * 5_000_000), "5000000 bytes, the limit is"),
        (config_text(json.dumps({"r": 4})), "missing required field `peft_type`"),
        (config_text(json.dumps({"peft_type": "LORA"})), "missing required field `r`"),
        (config_text(json.dumps(adapter_config()).replace("0.05", "NaN")), "malformed JSON"),
        (config_text(json.dumps(adapter_config()).replace("0.05", "1e999")), "out of range"),
        (configured(lora_alpha=1e300), "lora_alpha 1e+300"),
        (configured(lora_alpha="8"), "lora_alpha Expected `float`, got `str`"),
        (configured(r=0), "r Expected `int` >= 1"),
        (configured(r=True), "r Expected `int`, got `bool`"),
        (configured(rank_pattern={"q_proj": -1}), "rank_pattern"),
        (configured(target_modules={"a": 1}), "target_modules"),
        (configured(target_modules=["k_proj"]), "q_proj of layer 0 is not among target_modules"),
        (configured(layers_to_transform=[0]), "q_proj of layer 1 is not among"),
        (configured(rank=8), "has shapes [4, 32] and [32, 4], but adapter_config.json promises rank 8"),
        (half, "up_proj of layer 1 has lora_A alone"),
        (truncated, "truncated"),
        (pipe, "not a regular file"),
        (overlapping, "begins at byte"),
        (huge, "truncated: its tensors end at byte 4835703278458516698824885"),
        (strange, "is no tensor of a PEFT adapter"),
        (lambda folder: header(folder, {}), "has no tensors"),
        (lambda folder: header(folder, b"<html>"), "malformed JSON"),
        (lambda folder: header(folder, b" " * (MAX_HEADER_BYTES + 1)), f"the limit is {MAX_HEADER_BYTES}"),
        (lambda folder: header(folder, {"x\n" * 4000: 1}), "the header entry of tensor x?x?"),
    ],
)
def test_damaged_files_are_refused_by_their_name(
    tmp_path: Path, damage: Callable[[Path], object], message: str
) -> None:
    write_adapter(tmp_path)
    damage(tmp_path)
    error = refusal(tmp_path)
    assert error.exit_code.reason == "InvalidAdapter"
    assert message in str(error)


def test_a_huge_rank_is_refused_as_too_high(tmp_path: Path) -> None:
    write_adapter(tmp_path, config={"r": 10**18})
    assert refusal(tmp_path).exit_code is ExitCode.RANK_TOO_HIGH


def test_a_folder_that_is_not_there_is_not_found(tmp_path: Path) -> None:
    error = refusal(tmp_path / "absent")
    assert error.exit_code is ExitCode.MODEL_NOT_FOUND
    assert "name the folder that contains adapter_config.json" in str(error)


def check_outcome(folder: Path) -> None:
    """Facts, or an error of adapters that can be shown."""
    with contextlib.suppress(FatalError):
        assert read_adapter(folder, TINY_CONFIG, RULES).rank <= 16
        return
    assert 60 <= refusal(folder).exit_code <= 64


@given(
    st.dictionaries(
        st.sampled_from(sorted(adapter_config())),
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9),
            lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner, max_size=3),
            max_leaves=5,
        ),
    )
)
def test_no_configuration_crashes_the_reader(tmp_path_factory: pytest.TempPathFactory, changes: dict[str, Any]) -> None:
    folder = write_adapter(tmp_path_factory.mktemp("any"), targets=["q_proj"], config=changes)
    check_outcome(folder)


@given(st.integers(0, 3000), st.binary(max_size=9))
def test_no_damage_of_the_weights_file_crashes_the_reader(
    tmp_path_factory: pytest.TempPathFactory, at: int, written: bytes
) -> None:
    folder = write_adapter(tmp_path_factory.mktemp("any"), targets=["q_proj"])
    path = folder / WEIGHTS_FILE
    raw = bytearray(path.read_bytes())
    raw[at : at + len(written)] = written
    path.write_bytes(raw)
    check_outcome(folder)


# Tensors


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_tensors_are_those_of_the_file(tmp_path: Path, dtype: Any) -> None:
    write_adapter(tmp_path, layers=[1, 0], dtype=dtype)
    expected = adapter_tensors(layers=[1, 0], dtype=dtype)
    found = list(pairs(tmp_path))
    assert [(pair.layer, pair.module) for pair in found] == [(layer, name) for layer in (0, 1) for name in TARGETS]
    for pair in found:
        np.testing.assert_array_equal(pair.a.numpy(), expected[tensor_name(pair.layer, pair.module, "A")])
        np.testing.assert_array_equal(pair.b.numpy(), expected[tensor_name(pair.layer, pair.module, "B")])
        assert pair.scaling == 2.0


@pytest.mark.parametrize("number", [np.nan, np.inf])
def test_numbers_that_would_spoil_answers_are_refused(tmp_path: Path, number: float) -> None:
    spoilt = np.full((4, 32), number, np.float32)
    write_adapter(tmp_path, more_tensors={tensor_name(1, "q_proj", "A"): spoilt})
    with pytest.raises(FatalError, match=r"layers\.1\.self_attn\.q_proj\.lora_A\.weight has numbers") as caught:
        list(pairs(tmp_path))
    assert caught.value.exit_code is INVALID


def test_a_file_that_is_cut_off_while_it_is_read_is_refused(tmp_path: Path) -> None:
    write_adapter(tmp_path, model={**TINY_CONFIG, "intermediate_size": 100_000})
    reading = pairs(tmp_path)
    next(reading)
    os.truncate(tmp_path / WEIGHTS_FILE, 4096)
    with pytest.raises(FatalError, match="ended while it was read") as caught:
        list(reading)
    assert caught.value.exit_code is INVALID
