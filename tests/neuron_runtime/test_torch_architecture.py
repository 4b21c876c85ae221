"""config.json becomes a decoder's shape; what is not supported or not sensible is refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from neuron_runtime.backend.torch.architecture import Rope, decoder_config, tensor_shapes
from neuron_runtime.checkpoint import InvalidModel
from neuron_runtime.errors import ExitCode, FatalError

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
}
LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def test_defaults_of_old_configs_are_filled_in() -> None:
    model = decoder_config(CONFIG)
    assert (model.head_dim, model.rope, model.tied_embeddings, model.qkv_bias) == (8, Rope(), False, False)
    assert model.kv_elements_per_token == 2 * 2 * 2 * 8
    old = {key: value for key, value in CONFIG.items() if key != "num_key_value_heads"}
    assert decoder_config(old).num_kv_heads == 4


@pytest.mark.parametrize(
    "fields",
    [
        {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **LLAMA3}},
        {"rope_theta": 5e5, "rope_scaling": {"type": "llama3", **LLAMA3}},
        {"rope_parameters": {"rope_theta": 5e5, "rope_type": "llama3", **LLAMA3}},
    ],
)
def test_rope_is_read_as_transformers_4_and_5_write_it(fields: dict[str, Any]) -> None:
    assert decoder_config({**CONFIG, **fields}).rope == Rope(5e5, "llama3", 8.0, 1.0, 4.0, 8192)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"architectures": ["GptNext"]}, "architecture GptNext .* supported: LlamaForCausalLM"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "rope type 'yarn' .* default, linear, llama3"),
    ],
)
def test_what_is_not_supported_is_named_beside_what_is(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(FatalError, match=message) as caught:
        decoder_config({**CONFIG, **fields})
    assert caught.value.exit_code is ExitCode.UNSUPPORTED_ARCHITECTURE


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"architectures": None}, "architectures must be a list"),
        ({"architectures": [3]}, "architectures must be a list"),
        ({"hidden_size": "768"}, "hidden_size must be a positive integer, got '768'"),
        ({"num_hidden_layers": True}, "num_hidden_layers must be a positive integer"),
        ({"vocab_size": None}, "vocab_size must be a positive integer, got None"),
        ({"num_key_value_heads": 3}, "must be a multiple of num_key_value_heads"),
        ({"head_dim": 5}, "head_dim must be even"),
        ({"rms_norm_eps": 0}, "rms_norm_eps must be a positive number"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings must be true or false"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers must be at most 10000"),
        ({"rope_scaling": 4}, "must be an object"),
        ({"rope_scaling": {"rope_type": "llama3", **LLAMA3, "low_freq_factor": 4}}, "must be below high_freq_factor"),
        ({"rope_scaling": {"rope_type": "llama3", **LLAMA3, "factor": None}}, "factor must be a positive number"),
    ],
)
def test_a_field_that_cannot_be_is_named(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidModel, match=message):
        decoder_config({**CONFIG, **fields})


def test_biases_and_the_head_are_tensors_only_where_the_config_says_so() -> None:
    plain = tensor_shapes(decoder_config(CONFIG))
    assert "lm_head.weight" in plain
    assert not any(name.endswith(".bias") for name in plain)
    assert plain["model.layers.1.self_attn.k_proj.weight"] == (16, 32)
    other = {**CONFIG, "tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}
    shapes = tensor_shapes(decoder_config(other))
    assert "lm_head.weight" not in shapes
    assert sum(name.endswith(".bias") for name in shapes) == 2 * 7
    assert shapes["model.layers.0.mlp.down_proj.bias"] == (32,)
