"""config.json determines the shape of the decoder; unsupported and invalid fields are refused by name."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import AutoConfig

from helpers.random_model import model_type
from neuron_runtime.backend.torch.architecture import FAMILIES, Rope, Window, decoder_config, tensor_shapes
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
MISTRAL = {"architectures": ["MistralForCausalLM"], "sliding_window": 32}
GEMMA3 = {"architectures": ["Gemma3ForCausalLM"], "num_hidden_layers": 6}
QWEN_VL = {"architectures": ["Qwen2_5_VLForConditionalGeneration"]}
QWEN2 = {"architectures": ["Qwen2ForCausalLM"]}
QWEN3 = {"architectures": ["Qwen3ForCausalLM"]}
SLIDING = {**QWEN2, "use_sliding_window": True, "sliding_window": 32}
LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def test_defaults_of_old_configs_are_applied() -> None:
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
def test_rope_is_parsed_in_the_forms_of_transformers_4_and_5(fields: dict[str, Any]) -> None:
    assert decoder_config({**CONFIG, **fields}).rope == Rope(5e5, "llama3", 8.0, 1.0, 4.0, 8192)


@pytest.mark.parametrize("kind", ["rope_scaling", "rope_parameters"])
def test_each_pair_of_dimensions_turns_by_one_of_three_parts_in_qwen_vl(kind: str) -> None:
    sections = {"type": "mrope" if kind == "rope_scaling" else "default", "mrope_section": [1, 1, 2]}
    nested = {**QWEN_VL, "text_config": {**CONFIG, "rope_theta": 5e5, kind: sections}}
    for fields in (nested, {**CONFIG, **QWEN_VL, "rope_theta": 5e5, kind: sections}):
        assert decoder_config(fields).rope == Rope(5e5, parts=(0, 1, 2, 2))


@pytest.mark.parametrize(
    "fields",
    [
        {"rope_local_base_freq": 2e4, "rope_theta": 5e5, "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
        {
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 5e5},
                "sliding_attention": {"rope_type": "default", "rope_theta": 2e4},
            }
        },
    ],
)
def test_layers_with_a_window_have_rotary_positions_of_their_own_in_gemma_3(fields: dict[str, Any]) -> None:
    model = decoder_config({**CONFIG, **GEMMA3, "sliding_window": 32, **fields})
    assert (model.rope, model.local_rope) == (Rope(5e5, "linear", 8.0), Rope(2e4))
    assert model.local_layers == {0, 1, 2, 3, 4}
    assert model.windows == (*[Window(32)] * 5, None)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"architectures": ["GptNext"]}, "architecture GptNext .* supported: Gemma3ForCausalLM, .*, Llama4"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        (
            {"rope_scaling": {"rope_type": "longrope", "factor": 2.0}},
            "rope type 'longrope' .* linear, dynamic, llama3, yarn",
        ),
        ({"rope_scaling": {"rope_type": ["llama3"]}}, "rope type"),
        (
            {"rope_scaling": {"type": "linear", "factor": 2.0, "mrope_section": [1]}},
            "mrope_section of rope type 'linear'",
        ),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "full_attention of rope type 'default'"),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5 of LlamaForCausalLM .* supported: 1.0"),
        ({"is_causal": False}, "is_causal False"),
        ({"sliding_window": 32}, "sliding_window 32 of LlamaForCausalLM .* supported: null"),
        ({"layer_types": ["full_attention", "chunked_attention"]}, "layer_types 'chunked_attention'"),
        ({"layer_types": [{}, []]}, "layer_types {} of"),
        ({**MISTRAL, "use_sliding_window": False}, "use_sliding_window False of MistralForCausalLM"),
        ({**MISTRAL, "max_window_layers": 1}, "max_window_layers 1 of MistralForCausalLM"),
        ({**MISTRAL, "attention_bias": True}, "attention_bias True of MistralForCausalLM"),
        (
            {**MISTRAL, "layer_types": ["sliding_attention", "full_attention"]},
            "layer_types that differ from sliding_window 32",
        ),
        ({**QWEN2, "attention_bias": False}, "attention_bias False of Qwen2ForCausalLM .* supported: true"),
        ({**QWEN2, "mlp_bias": True}, "mlp_bias True of Qwen2ForCausalLM"),
        ({**QWEN2, "use_mrope": True}, "use_mrope True"),
        ({**GEMMA3, "use_bidirectional_attention": True}, "use_bidirectional_attention True .* supported: false"),
        ({**GEMMA3, "final_logit_softcapping": 30.0}, "final_logit_softcapping 30.0 .* supported: null"),
        ({**GEMMA3, "hidden_activation": "gelu"}, "hidden_activation 'gelu' .* supported: \"gelu_pytorch_tanh\""),
    ],
)
def test_an_unsupported_value_is_named_with_the_supported_ones(fields: dict[str, Any], message: str) -> None:
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
        ({"max_position_embeddings": 10**400}, "max_position_embeddings must be a positive integer of at most"),
        ({"vocab_size": None}, "vocab_size must be a positive integer, got None"),
        ({"num_key_value_heads": 3}, "must be a multiple of num_key_value_heads"),
        ({"head_dim": 5}, "head_dim must be even"),
        ({"rms_norm_eps": 0}, "rms_norm_eps must be a positive number"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings must be true or false"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers must be at most 10000"),
        ({"rope_scaling": 4}, "must be an object"),
        (
            {"rope_scaling": {"rope_type": "llama3", **LLAMA3, "low_freq_factor": 5}},
            "must not be above high_freq_factor",
        ),
        ({"rope_scaling": {"rope_type": "llama3", **LLAMA3, "factor": None}}, "factor must be a positive number"),
        (
            {"rope_parameters": {"rope_theta": 1e4}, "rope_scaling": {"rope_theta": 1e5}},
            "rope_parameters.rope_theta and rope_scaling.rope_theta contradict one another: 10000.0 and 100000.0",
        ),
        ({"rope_theta": 1e4, "rope_parameters": {"rope_theta": 1e5}}, "rope_theta and rope_parameters.rope_theta"),
        ({"rope_scaling": {"type": "linear", "rope_type": "default"}}, "rope_type and type contradict"),
        ({"rope_theta": 10**400}, "rope_theta must be a positive number"),
        ({"rope_theta": 1}, "rope_theta must be above 1"),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0, "beta_slow": 32}}, "beta_slow .* must be below beta_fast"),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0, "beta_fast": 1e308}}, "beta_fast must be within"),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0, "beta_slow": 5e-324}}, "beta_slow must be within"),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0, "mscale": "1"}}, "mscale must be a positive number"),
        ({**GEMMA3, "rope_parameters": {"rope_theta": 1e4}}, "must have full_attention and sliding_attention"),
        ({**GEMMA3, "rope_parameters": {"sliding_attention": 3}}, "rope_parameters must be an object"),
        ({**QWEN_VL, "rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 1]}}, r"half of head_dim \(4\), got"),
        ({**QWEN_VL, "rope_parameters": {"mrope_section": "all"}}, "mrope_section must be three integers"),
        ({**QWEN_VL, "rope_scaling": 3}, "rope_scaling must be an object"),
        ({**GEMMA3, "query_pre_attn_scalar": 0}, "query_pre_attn_scalar must be a positive number"),
        ({**MISTRAL, "sliding_window": 0}, "sliding_window must be a positive integer, got 0"),
        ({**MISTRAL, "sliding_window": "32"}, "sliding_window must be a positive integer"),
        ({**SLIDING, "use_sliding_window": "yes"}, "use_sliding_window must be true or false"),
        ({**SLIDING, "max_window_layers": None}, "max_window_layers must be an integer of at least 0, got None"),
        ({**SLIDING, "layer_types": ["full_attention"]}, r"layer_types must be a list of num_hidden_layers \(2\)"),
        ({**QWEN2, "layer_types": ["sliding_attention"] * 2}, "layer_types names sliding_attention, but"),
    ],
)
def test_an_invalid_field_is_named(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidModel, match=message):
        decoder_config({**CONFIG, **fields})


def test_biases_and_the_head_are_tensors_only_if_configured() -> None:
    plain = tensor_shapes(decoder_config(CONFIG))
    assert "lm_head.weight" in plain
    assert not any(name.endswith(".bias") for name in plain)
    assert plain["model.layers.1.self_attn.k_proj.weight"] == (16, 32)
    other = {**CONFIG, "tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}
    shapes = tensor_shapes(decoder_config(other))
    assert "lm_head.weight" not in shapes
    assert sum(name.endswith(".bias") for name in shapes) == 2 * 7
    assert shapes["model.layers.0.mlp.down_proj.bias"] == (32,)


@pytest.mark.parametrize(
    ("fields", "windows"),
    [
        ({}, (None, None)),
        ({"sliding_window": None}, (None, None)),
        ({"layer_types": ["full_attention"] * 2}, (None, None)),
        (MISTRAL, (32, 32)),
        ({**MISTRAL, "layer_types": ["sliding_attention"] * 2}, (32, 32)),
        ({**MISTRAL, "sliding_window": None}, (None, None)),
        ({**MISTRAL, "sliding_window": 63}, (63, 63)),
        ({**MISTRAL, "sliding_window": 64}, (None, None)),
        ({"architectures": MISTRAL["architectures"], "max_position_embeddings": 8192}, (4096, 4096)),
        ({**QWEN2, "sliding_window": 32, "max_window_layers": 0}, (None, None)),
        ({**QWEN2, "sliding_window": 32, "use_sliding_window": None}, (None, None)),
        (SLIDING, (None, None)),
        ({**SLIDING, "max_window_layers": 1}, (None, 32)),
        ({**SLIDING, "max_window_layers": 0, "layer_types": ["sliding_attention", "full_attention"]}, (32, None)),
    ],
)
def test_sliding_windows_match_transformers(fields: dict[str, Any], windows: tuple[int | None, ...]) -> None:
    fields = {"num_key_value_heads": 2, **fields}
    assert decoder_config({**CONFIG, **fields}).windows == tuple(size and Window(size) for size in windows)


@pytest.mark.parametrize("family", [name for name, family in FAMILIES.items() if not family.text])
def test_omitted_fields_have_the_defaults_of_transformers(family: str) -> None:
    left_out = ("num_key_value_heads", "rms_norm_eps")
    fields = {name: value for name, value in CONFIG.items() if name not in left_out}
    fields |= {
        "architectures": [family],
        "num_attention_heads": 32,
        "hidden_size": 320,
        "max_position_embeddings": 16384,
    }
    model = decoder_config(fields)
    theirs = AutoConfig.for_model(model_type(family), **fields)
    assert model.num_kv_heads == theirs.num_key_value_heads
    assert model.head_dim == (getattr(theirs, "head_dim", None) or 10)
    assert model.rms_norm_epsilon == theirs.rms_norm_eps
    assert model.tied_embeddings == theirs.tie_word_embeddings
    sizes = (getattr(theirs, name, None) for name in ("sliding_window", "attention_chunk_size"))
    assert {window.size for window in model.windows if window} == {size for size in sizes if size}
    rope = getattr(theirs, "rope_parameters", None) or vars(theirs)
    assert model.rope.theta == rope.get("full_attention", rope)["rope_theta"]
    if model.local_rope is not None:
        local = rope.get("sliding_attention", {}).get("rope_theta") or theirs.rope_local_base_freq
        assert (model.local_rope.theta, model.attention_scale) == (local, theirs.query_pre_attn_scalar**-0.5)


def test_qwen3_has_head_norms_and_biases_follow_each_class() -> None:
    qwen2, qwen3 = (tensor_shapes(decoder_config({**CONFIG, **fields, "head_dim": 16})) for fields in (QWEN2, QWEN3))
    assert {name.split(".")[4] for name in qwen2 if name.endswith(".bias")} == {"q_proj", "k_proj", "v_proj"}
    assert not any("_norm" in name.replace("_layernorm", "") for name in qwen2)
    assert not any(name.endswith(".bias") for name in qwen3)
    assert qwen3["model.layers.1.self_attn.q_norm.weight"] == qwen3["model.layers.1.self_attn.k_norm.weight"] == (16,)
    biased = tensor_shapes(decoder_config({**CONFIG, **QWEN3, "attention_bias": True}))
    assert {name.split(".")[4] for name in biased if name.endswith(".bias")} == {"q_proj", "k_proj", "v_proj", "o_proj"}
