"""What a model is compiled with for NxD Inference, and which settings are refused before anything starts."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import msgspec
import pytest

from neuron_runtime.backend.neuron.devices import PLATFORMS, Target, check_cores, environment_of, find_target
from neuron_runtime.backend.nxdi.models import text_config
from neuron_runtime.backend.nxdi.settings import Settings, settings_of
from neuron_runtime.checkpoint import InvalidModel
from neuron_runtime.config import RuntimeConfig, parse_config
from neuron_runtime.errors import ExitCode, FatalError, InvalidConfig

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "torch_dtype": "bfloat16",
}
INF2 = Target(PLATFORMS["inf2"], 1, 2)
TRN2 = Target(PLATFORMS["trn2"], 2, 4)
UNKNOWN_CORES = Target(PLATFORMS["trn2"], 2, 0)


def config_of(**document: Any) -> RuntimeConfig:
    base = {"version": 1, "model": {"uri": "file:///m"}, "servedNames": ["m"], "backend": "nxdi"}
    return parse_config(msgspec.json.encode(base | document))


def settings(target: Target = TRN2, model: dict[str, Any] | None = None, **document: Any) -> Settings:
    return settings_of(config_of(**document), LLAMA | (model or {}), target)


def refusal(target: Target = TRN2, model: dict[str, Any] | None = None, **document: Any) -> dict[str, str]:
    with pytest.raises(InvalidConfig) as caught:
        settings(target, model, **document)
    return dict(caught.value.parts)


def test_events_of_a_prefix_cache_need_one() -> None:
    """Slots are the default: the graphs of a server that ends after its start take an hour."""
    events = {"endpoint": "tcp://*:5557"}
    assert list(refusal(cacheEvents=events)) == ["$.cacheEvents.endpoint"]
    assert settings(cacheEvents=events, prefixCaching="enabled").shares_prefixes


def test_defaults_are_slots_with_continuous_batching_and_sampling_on_the_device() -> None:
    found = settings(limits={"maxSequences": 8, "maxModelLength": 4096})
    assert (found.application, found.tensor, found.logical_core, found.layout) == ("llama", 4, 2, "slots")
    assert (found.max_rows, found.max_model_length, found.max_context_length) == (8, 4096, 4096)
    assert (found.block_size, found.num_blocks, found.segments, found.shares_prefixes) == (4096, 8, False, False)
    assert found.context_buckets == (128, 384, 768, 1280, 1920, 2560, 3328, 4096)
    assert found.token_buckets == (4096,)
    assert (found.sampling, found.global_topk, found.asynchronous) == ("Device", 256, False)
    assert found.neuron_config == {
        "tp_degree": 4,
        "logical_nc_config": 2,
        "torch_dtype": "bfloat16",
        "padding_side": "right",
        "batch_size": 8,
        "ctx_batch_size": 1,
        "tkg_batch_size": 8,
        "is_continuous_batching": True,
        "seq_len": 4096,
        "max_context_length": 4096,
        "enable_bucketing": True,
        "context_encoding_buckets": list(found.context_buckets),
        "token_generation_buckets": list(found.token_buckets),
        "async_mode": False,
        "on_device_sampling_config": {"dynamic": True, "deterministic": False, "global_topk": 256},
        "output_logits": False,
    }


def test_a_single_row_is_no_continuous_batching() -> None:
    assert settings(limits={"maxSequences": 1}).neuron_config["is_continuous_batching"] is False


def test_prefix_caching_makes_blocks_and_computes_long_prompts_in_segments() -> None:
    found = settings(prefixCaching="enabled", limits={"maxSequences": 4, "maxModelLength": 8192})
    assert (found.layout, found.block_size, found.num_blocks) == ("blocks", 32, 1024)
    assert found.segments
    assert found.shares_prefixes
    assert found.context_buckets == (128, 512, 1152, 2048)
    assert found.prefix_buckets == (0, 512, 2048, 8064)
    config = found.neuron_config
    assert config["is_block_kv_layout"]
    assert config["is_prefix_caching"]
    assert config["prefix_buckets"] == [512, 2048, 8064], "NxD Inference adds 0 itself"
    assert (config["pa_num_blocks"], config["pa_block_size"]) == (1024, 32)


def test_blocks_alone_need_no_prefill_over_a_prefix_on_logical_cores_of_one_core() -> None:
    found = settings(INF2, layout="blocks", limits={"maxModelLength": 2048})
    assert (found.segments, found.shares_prefixes, found.prefix_buckets) == (False, False, (0,))
    assert found.neuron_config["prefix_buckets"] == []
    assert found.max_context_length == 2048


@pytest.mark.parametrize(
    ("document", "field"),
    [({"prefixCaching": "enabled"}, "$.prefixCaching"), ({"chunkedPrefill": "enabled"}, "$.chunkedPrefill")],
)
def test_prefills_over_a_prefix_on_logical_cores_of_one_core_need_the_attention_kernel(
    document: dict[str, Any], field: str
) -> None:
    document |= {"layout": "blocks", "limits": {"maxModelLength": 2048}}
    assert "attn_kernel_enabled" in refusal(INF2, **document)[field]
    with_kernel = document | {"overrideNeuronConfig": {"attn_kernel_enabled": True}}
    found = settings(INF2, **with_kernel)
    assert found.segments
    assert min(found.context_buckets) == 512
    short = with_kernel | {"buckets": {"context": [256, 1024]}}
    assert refusal(INF2, **short) == {
        "$.buckets.context": "256 is too short over a prefix, with logical cores of 1 physical ones: the least is 512"
    }


def test_the_mode_of_sampling_decides_what_the_device_returns() -> None:
    host = settings(sampling="Host")
    assert (host.neuron_config["on_device_sampling_config"], host.neuron_config["output_logits"]) == (None, False)
    assert host.global_topk == 0
    assert settings(sampling="DeviceWithLogits").neuron_config["output_logits"] is True


def test_a_small_vocabulary_bounds_the_candidates() -> None:
    assert settings(model={"vocab_size": 100}).global_topk == 100


def test_open_tensor_degree_takes_the_cores_that_divide_the_model() -> None:
    assert settings(Target(PLATFORMS["inf2"], 1, 12)).tensor == 8
    assert settings(model={"num_attention_heads": 14, "intermediate_size": 4864}).tensor == 2
    assert settings(UNKNOWN_CORES).tensor == 1


@pytest.mark.parametrize(
    ("document", "expected"),
    [
        (
            {"parallelism": {"tensor": 3}},
            {
                "$.parallelism.tensor": "is 3, which does not divide the model's num_attention_heads of 32; possible "
                "are 1, 2, 4, 8, 16, 32"
            },
        ),
        (
            {"parallelism": {"tensor": 8}, "accelerator": {"cores": 4}},
            {"$.parallelism.tensor": "is 8, but accelerator.cores is 4"},
        ),
        (
            {"limits": {"maxModelLength": 200000}},
            {"$.limits.maxModelLength": "must be from 2 to the model's 131072 positions, got 200000"},
        ),
        (
            {"layout": "blocks", "limits": {"maxModelLength": 4096, "numBlocks": 100}},
            {"$.limits.numBlocks": "one sequence of 4096 tokens needs 128 blocks of 32, but there are 100"},
        ),
        (
            {"layout": "blocks", "limits": {"maxModelLength": 4000, "blockSize": 64}},
            {
                "$.limits.blockSize": "the model's length of 4000 must be a multiple of the block size 64: set "
                "maxModelLength to 3968, or another block size"
            },
        ),
        (
            {"layout": "blocks", "limits": {"maxModelLength": 512, "blockSize": 16}},
            None,
        ),
        (
            {"layout": "blocks", "limits": {"maxModelLength": 128, "blockSize": 32}},
            None,
        ),
        (
            {"layout": "blocks", "limits": {"maxModelLength": 96, "blockSize": 32}},
            {
                "$.limits.blockSize": "32 is too small for 3 blocks per sequence: with fewer than 128 it must be a "
                "multiple of 64, such as 64",
            },
        ),
        (
            {"buckets": {"context": [128, 8192]}, "limits": {"maxModelLength": 4096}},
            {"$.buckets.context": "8192 is above the model's length of 4096"},
        ),
        (
            {"buckets": {"tokenGeneration": [8192]}, "limits": {"maxModelLength": 4096}},
            {"$.buckets.tokenGeneration": "8192 is above the model's length of 4096"},
        ),
        (
            {"buckets": {"context": [64, 512]}, "prefixCaching": "enabled"},
            {"$.buckets.context": "64 is too short over a prefix: the least is 128"},
        ),
        (
            {"buckets": {"sequences": [1, 4]}, "layout": "blocks"},
            {"$.buckets.sequences": "cannot be combined with layout blocks: leave out one of them"},
        ),
        (
            {"buckets": {"sequences": [1, 4]}, "asyncMode": True},
            {"$.buckets.sequences": "cannot be combined with asyncMode: leave out one of them"},
        ),
        (
            {"buckets": {"sequences": [64]}, "limits": {"maxSequences": 32}},
            {"$.buckets.sequences": "64 is above maxSequences, which is 32"},
        ),
        (
            {"asyncMode": True, "sampling": "DeviceWithLogits"},
            {"$.asyncMode": "needs sampling Device, but it is DeviceWithLogits"},
        ),
        (
            {"chunkedPrefill": "enabled"},
            {
                "$.chunkedPrefill": "with layout slots, a prompt is computed in one call: leave it out, or use layout "
                "blocks"
            },
        ),
    ],
)
def test_contradictions_are_explained(document: dict[str, Any], expected: dict[str, str] | None) -> None:
    if expected is None:
        settings(**document)
    else:
        found = refusal(**document)
        assert {name: found[name] for name in expected} == expected


def test_several_contradictions_are_reported_together() -> None:
    found = refusal(
        parallelism={"tensor": 3},
        buckets={"sequences": [64]},
        limits={"maxSequences": 4},
        overrideNeuronConfig={"on_device_sampling_config": {"global_topk": 200000}},
    )
    assert set(found) == {
        "$.parallelism.tensor",
        "$.buckets.sequences",
        "$.overrideNeuronConfig.on_device_sampling_config.global_topk",
    }


def test_a_decode_bucket_always_reaches_the_length() -> None:
    found = settings(buckets={"tokenGeneration": [512]}, limits={"maxModelLength": 2048})
    assert found.token_buckets == (512, 2048)


def test_row_buckets_have_the_largest_batch() -> None:
    found = settings(buckets={"sequences": [1, 4]}, limits={"maxSequences": 8})
    assert found.row_buckets == (1, 4, 8)
    assert found.neuron_config["token_generation_batches"] == [1, 4, 8]


def test_an_override_decides_what_the_configuration_leaves_open() -> None:
    found = settings(
        overrideNeuronConfig={
            "batch-size": 4,
            "seqLen": 2048,
            "max_context_length": 1024,
            "token_generation_buckets": [2048, 512],
            "tp_degree": 2,
            "torch_dtype": "torch.float16",
            "global_top_k": 64,
            "output_logits": True,
            "fused_qkv": True,
            "ctx_batch_size": 1,
        }
    )
    assert (found.max_rows, found.max_model_length, found.tensor, found.dtype) == (4, 2048, 2, "float16")
    assert (found.max_context_length, found.token_buckets) == (1024, (512, 2048))
    assert (found.sampling, found.global_topk) == ("DeviceWithLogits", 64)
    assert found.neuron_config["fused_qkv"] is True
    assert "global_topk" not in found.neuron_config


def test_an_override_of_the_cache_makes_blocks() -> None:
    found = settings(
        overrideNeuronConfig={
            "is_block_kv_layout": True,
            "is_prefix_caching": True,
            "pa_block_size": 64,
            "pa_num_blocks": 300,
            "seq_len": 2048,
        }
    )
    assert (found.layout, found.block_size, found.num_blocks, found.shares_prefixes) == ("blocks", 64, 300, True)


@pytest.mark.parametrize(
    ("override", "document", "expected"),
    [
        ({"tp_degre": 2}, {}, {".tp_degre": "NxD Inference has no setting `tp_degre`; did you mean `tp_degree`?"}),
        ({"frobnicate": 2}, {}, {".frobnicate": "NxD Inference has no setting `frobnicate`"}),
        (
            {"batch_size": 4},
            {"limits": {"maxSequences": 8}},
            {".batch_size": "is 4, but limits.maxSequences is 8: leave out one of them"},
        ),
        ({"padding_side": "left"}, {}, {".padding_side": "is 'left', but the other settings make it 'right'"}),
        ({"allow_input_truncation": True}, {}, {".allow_input_truncation": "is True, but the other"}),
        ({"fused_qkv": "yes"}, {}, {".fused_qkv": "must be true or false, got 'yes'"}),
        ({"speculation_length": 4}, {}, {".speculation_length": "make it 0: set speculation instead"}),
        ({"quantized": True}, {}, {".quantized": "is True, but the model's config.json makes it unset"}),
        ({"chunked_prefill_config": {"max_num_seqs": 4}}, {}, {".chunked_prefill_config": "segments do"}),
        ({"moe_tp_degree": 2}, {}, {".moe_tp_degree": "is for mixtures of experts, which llama is not"}),
        (
            {"on_device_sampling_config": {"global_tok": 3}},
            {},
            {".on_device_sampling_config.global_tok": "did you mean `global_topk`?"},
        ),
        (
            {"on_device_sampling_config": {"dynamic": False}},
            {},
            {".on_device_sampling_config.dynamic": "must be true"},
        ),
        (
            {"on_device_sampling_config": {"global_topk": 64, "global_top_k": 32}},
            {},
            {".on_device_sampling_config.global_top_k": "is given twice, as 64 and 32"},
        ),
        (
            {"on_device_sampling_config": {"temperature": 0.7}},
            {},
            {".on_device_sampling_config.temperature": "is set by requests"},
        ),
        (
            {"on_device_sampling_config": None},
            {"sampling": "Device"},
            {".on_device_sampling_config": "is off, but sampling is 'Device'"},
        ),
        ({"output_logits": True}, {"sampling": "Device"}, {".output_logits": "is true, but sampling is Device"}),
        ({"attn_kernel_enabled": False}, {"prefixCaching": "enabled"}, {".attn_kernel_enabled": "must not be false"}),
    ],
)
def test_an_override_that_would_be_dropped_or_contradicts_is_refused(
    override: dict[str, Any], document: dict[str, Any], expected: dict[str, str]
) -> None:
    found = refusal(overrideNeuronConfig=override, **document)
    for key, message in expected.items():
        assert message in found[f"$.overrideNeuronConfig{key}"]


def test_neutral_values_of_what_is_not_built_are_accepted() -> None:
    override = {"speculation_length": 0, "quantized": False, "lora_config": None, "attention_dp_degree": 1}
    assert settings(overrideNeuronConfig=override) == settings()


def test_the_class_of_a_model_comes_from_its_architecture_or_an_import_path() -> None:
    assert settings(model={"architectures": ["Qwen3ForCausalLM"]}).application == "qwen3"
    assert settings(applicationClass="mistral").application == "mistral"
    private = settings(applicationClass="company.models:NeuronOwn", overrideNeuronConfig={"own_setting": 1})
    assert (private.application, private.neuron_config["own_setting"]) == ("company.models:NeuronOwn", 1)
    assert "`module:Class`" in refusal(applicationClass="no_such")["$.applicationClass"]
    with pytest.raises(FatalError) as caught:
        settings(model={"architectures": ["T5ForConditionalGeneration"]})
    assert caught.value.exit_code == ExitCode.UNSUPPORTED_ARCHITECTURE
    assert "LlamaForCausalLM" in str(caught.value)


def test_a_model_without_block_graphs_is_refused_with_blocks() -> None:
    text = {"architectures": ["Llama4ForConditionalGeneration"], "text_config": {"vocab_size": 1000}}
    assert settings(model=text).vocabulary_size == 1000
    assert "llama4 has no layout blocks" in refusal(model=text, layout="blocks")["$.layout"]


def test_the_sizes_of_a_model_have_other_names_in_dbrx() -> None:
    sizes = {"d_model": 256, "n_heads": 8, "n_layers": 2, "max_seq_len": 1024, "vocab_size": 1000}
    given = {"ffn_config": {"ffn_hidden_size": 512}, "attn_config": {"kv_n_heads": 2}}
    model = {"architectures": ["DbrxForCausalLM"], **sizes, **given}
    found = settings_of(config_of(), model, TRN2)
    assert (found.application, found.max_model_length, found.vocabulary_size) == ("dbrx", 1024, 1000)
    assert dict(text_config(model)).items() >= {"num_key_value_heads": 2, "intermediate_size": 512}.items()


def test_a_config_file_without_a_vocabulary_is_no_model() -> None:
    with pytest.raises(InvalidModel, match="vocab_size"):
        settings(model={"vocab_size": None})


def test_the_platform_and_its_cores_are_found_or_told(tmp_path: Path) -> None:
    product = tmp_path / "devices/virtual/dmi/id/product_name"
    product.parent.mkdir(parents=True)
    product.write_text("trn2.48xlarge\n")
    (tmp_path / "neuron0").touch()
    found = find_target(config_of(), {}, tmp_path, tmp_path)
    assert found == Target(PLATFORMS["trn2"], 2, 4)
    assert find_target(config_of(), {"NEURON_LOGICAL_NC_CONFIG": "1"}, tmp_path, tmp_path).granted_cores == 8
    granted = {"NEURON_RT_VISIBLE_CORES": "0-1,5", "NEURON_RT_NUM_CORES": "4"}
    assert find_target(config_of(), granted, tmp_path, tmp_path).granted_cores == 3
    assert find_target(config_of(accelerator={"cores": 2}), granted, tmp_path, tmp_path).granted_cores == 2
    elsewhere = find_target(config_of(), {"NEURON_PLATFORM_TARGET_OVERRIDE": "inf2"}, tmp_path / "none", tmp_path)
    assert (elsewhere.platform.name, elsewhere.logical_core) == ("inf2", 1)
    assert find_target(config_of(), {}, tmp_path / "none", tmp_path, lambda: "trn1n").platform.name == "trn1"
    with pytest.raises(InvalidConfig, match=r"^NEURON_PLATFORM_TARGET_OVERRIDE: this machine's instance type"):
        find_target(config_of(), {}, tmp_path / "none", tmp_path)
    with pytest.raises(FatalError, match=r"logicalNeuronCore: is 1, but NEURON_LOGICAL_NC_CONFIG is 2") as caught:
        find_target(
            config_of(accelerator={"logicalNeuronCore": 1}), {"NEURON_LOGICAL_NC_CONFIG": "2"}, tmp_path, tmp_path
        )
    assert caught.value.exit_code == ExitCode.TOPOLOGY_IMPOSSIBLE
    with pytest.raises(InvalidConfig, match="inf2 has no logical cores of 2"):
        find_target(
            config_of(accelerator={"logicalNeuronCore": 2}),
            {"NEURON_PLATFORM_TARGET_OVERRIDE": "inf2"},
            tmp_path,
            tmp_path,
        )
    with pytest.raises(InvalidConfig, match="numbers of cores"):
        find_target(config_of(), {"NEURON_RT_VISIBLE_CORES": "all"}, tmp_path, tmp_path)


def test_a_process_that_was_granted_too_few_cores_says_both_numbers() -> None:
    check_cores(TRN2, 4)
    with pytest.raises(FatalError, match=r"needs 8 NeuronCores of 2 physical cores each.* granted 4"):
        check_cores(TRN2, 8)


def test_the_environment_of_the_neuron_libraries_keeps_what_is_set(tmp_path: Path) -> None:
    found = environment_of(TRN2, 4, 32768, tmp_path, {"NEURON_RT_EXEC_TIMEOUT": "90"})
    assert found == {
        "NEURON_LOGICAL_NC_CONFIG": "2",
        "NEURON_RT_VIRTUAL_CORE_SIZE": "2",
        "NEURON_PLATFORM_TARGET_OVERRIDE": "trn2",
        "BASE_COMPILE_WORK_DIR": f"{tmp_path}/",
        "NEURON_PROCESS_TAG": socket.gethostname(),
        "NEURON_RT_NUM_CORES": "4",
        "NEURON_RT_DBG_SCRATCHPAD_ON_SINGLE_CORE": "1",
        "NEURON_SCRATCHPAD_PAGE_SIZE": "1024",
    }
    assert "NEURON_RT_NUM_CORES" not in environment_of(TRN2, 2, 128, tmp_path, {"NEURON_RT_VISIBLE_CORES": "0-1"})


# Attention that does not see all tokens


MISTRAL = {"architectures": ["MistralForCausalLM"], "sliding_window": 1024}


def test_a_window_that_every_prompt_must_fill_decides_the_smallest_context_bucket() -> None:
    found = settings(model=MISTRAL, limits={"maxModelLength": 4096})
    assert found.context_buckets[0] >= 1023
    assert settings(model=MISTRAL).max_model_length == 1024, "no token is outside of the window"
    assert settings(model=MISTRAL).context_buckets[0] == 128
    refused = refusal(model=MISTRAL, limits={"maxModelLength": 4096}, buckets={"context": [512, 4096]})
    assert refused == {"$.buckets.context": "512 is too short for the model's sliding window: the least is 1023"}
    refused = refusal(model=MISTRAL, limits={"maxModelLength": 4096, "maxStepTokens": 1000})
    assert list(refused) == ["$.limits.maxStepTokens"]


def test_blocks_have_no_window() -> None:
    blocks = {"layout": "blocks", "limits": {"maxModelLength": 4096}}
    assert refusal(model=MISTRAL, **blocks) == {
        "$.layout": "blocks: NxD Inference has none for a sliding window of 1024 tokens: use layout slots, or set "
        "maxModelLength to 1024"
    }
    assert settings(model=MISTRAL, layout="blocks").max_model_length == 1024


def test_a_window_that_a_class_ignores_bounds_the_length() -> None:
    qwen = {"architectures": ["Qwen2ForCausalLM"], "sliding_window": 1024}
    assert settings(model=qwen, limits={"maxModelLength": 4096}).max_model_length == 4096, "it is not used"
    used = qwen | {"use_sliding_window": True}
    assert settings(model=used).max_model_length == 1024
    assert refusal(model=used, limits={"maxModelLength": 4096}) == {
        "$.limits.maxModelLength": "is 4096, but NxD Inference's qwen2 ignores the model's sliding window of 1024 "
        "tokens: set 1024 or less"
    }
    nowhere = used | {"layer_types": ["full_attention"]}
    assert settings(model=nowhere, limits={"maxModelLength": 4096}).max_model_length == 4096


def test_gemma_3_has_the_length_of_its_window_and_what_its_rotation_needs() -> None:
    gemma = {"architectures": ["Gemma3ForCausalLM"], "sliding_window": 512, "layer_types": ["sliding_attention"]}
    found = settings(model=gemma)
    assert (found.max_model_length, found.context_buckets) == (512, (512,))
    assert found.neuron_config["layer_boundary_markers"] is True
    whole = {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3"}
    whole["text_config"] = {"model_type": "gemma3_text", "intermediate_size": 10240, "sliding_window": 1024}
    found = settings_of(config_of(), whole, TRN2)
    assert (found.vocabulary_size, found.max_model_length) == (262208, 1024)
    for length in (256, 1024):
        refused = refusal(model=gemma, limits={"maxModelLength": length})
        assert "right only with the length of its sliding window: set 512" in refused["$.limits.maxModelLength"]
    refused = refusal(model=gemma, overrideNeuronConfig={"layer_boundary_markers": False})
    assert refused == {
        "$.overrideNeuronConfig.layer_boundary_markers": "must be true: without it, tokens of gemma3 are wrong"
    }


@pytest.mark.parametrize(
    ("model", "name"),
    [
        (
            {
                "architectures": ["GptOssForCausalLM"],
                "sliding_window": 128,
                "quantization_config": {"quant_method": "mxfp4"},
            },
            "gpt_oss",
        ),
        ({"architectures": ["Llama4ForConditionalGeneration"], "attention_chunk_size": 512}, "llama4"),
    ],
)
def test_a_cache_of_several_lengths_has_one_decode_size(model: dict[str, Any], name: str) -> None:
    found = settings(model=model, limits={"maxModelLength": 4096})
    assert (found.token_buckets, found.max_model_length) == ((4096,), 4096)
    refused = refusal(model=model, limits={"maxModelLength": 4096}, buckets={"tokenGeneration": [1024, 4096]})
    assert refused == {"$.buckets.tokenGeneration": f"must be 4096 alone: NxD Inference's {name} has one decode size"}


def unsupported(model: dict[str, Any]) -> str:
    with pytest.raises(FatalError) as caught:
        settings(model=model)
    assert caught.value.exit_code == ExitCode.UNSUPPORTED_ARCHITECTURE
    return str(caught.value)


FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}
FP8_IN_BLOCKS = {**FP8, "weight_block_size": [128, 128]}


@pytest.mark.parametrize("method", ["compressed-tensors", "fbgemm_fp8", "awq", "gptq", "bitsandbytes", "mxfp4"])
@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM"])
def test_quantized_weights_are_refused_by_the_name_of_their_method(architecture: str, method: str) -> None:
    message = unsupported({"architectures": [architecture], "quantization_config": {"quant_method": method}})
    assert f"the weights are {method}, but" in message


def test_quantized_weights_are_served_where_the_class_reads_them() -> None:
    mixture = {"architectures": ["Qwen3MoeForCausalLM"]}
    assert settings(model={**mixture, "quantization_config": FP8_IN_BLOCKS}).application == "qwen3_moe"
    assert "computes those that are unquantized or fp8 in blocks" in unsupported(
        {**mixture, "quantization_config": FP8}
    )
    assert "the weights are fp8 in blocks, but" in unsupported({"quantization_config": FP8_IN_BLOCKS})
    assert "the weights are an unknown method, but" in unsupported({"compression_config": {"format": "pack-quantized"}})
    assert "the weights are unquantized, but" in unsupported({"architectures": ["GptOssForCausalLM"]})


def test_an_own_class_may_read_any_weights() -> None:
    model = {"quantization_config": {"quant_method": "awq"}}
    assert settings(model=model, applicationClass="ours:Class").application == "ours:Class"


NEMO = {"hidden_size": 5120, "num_attention_heads": 32, "head_dim": 128}


def test_mistral_with_a_head_size_of_its_own_runs_in_the_class_that_computes_it() -> None:
    nemo = {"architectures": ["MistralForCausalLM"], "sliding_window": None, **NEMO}
    assert settings(model=nemo).application == "llama"
    assert settings(model={**nemo, "head_dim": 160}).application == "mistral"
    assert "does not compute head_dim 128" in unsupported({**nemo, "sliding_window": 4096})
    for architecture in ("Qwen2ForCausalLM", "MixtralForCausalLM"):
        assert "does not compute head_dim 128" in unsupported({**nemo, "architectures": [architecture]})


@pytest.mark.parametrize(
    ("architecture", "field", "value"),
    [
        ("MixtralForCausalLM", "num_experts_per_tok", 1),
        ("MixtralForCausalLM", "tie_word_embeddings", True),
        ("Qwen3MoeForCausalLM", "num_experts_per_tok", 1),
        ("Qwen3MoeForCausalLM", "tie_word_embeddings", True),
        ("Qwen3MoeForCausalLM", "mlp_only_layers", [0]),
        ("Qwen3MoeForCausalLM", "decoder_sparse_step", 2),
    ],
)
def test_mixtures_that_the_class_fails_on_are_refused(architecture: str, field: str, value: object) -> None:
    off = {"num_experts_per_tok": 2, "tie_word_embeddings": False, "mlp_only_layers": [], "decoder_sparse_step": 1}
    assert settings(model={"architectures": [architecture], **off})
    assert f"does not compute {field}" in unsupported({"architectures": [architecture], **off, field: value})


def test_experts_that_would_drop_tokens_are_refused() -> None:
    mixture = {"architectures": ["MixtralForCausalLM"], "num_local_experts": 8, "num_experts_per_tok": 2}
    refused = refusal(model=mixture, overrideNeuronConfig={"capacity_factor": 1.0})
    assert refused == {
        "$.overrideNeuronConfig.capacity_factor": "must be at least 4, got 1: experts that are full drop tokens"
    }
    assert settings(model=mixture, overrideNeuronConfig={"capacity_factor": 4.0})


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ({"architectures": ["Qwen2ForCausalLM"], "rope_scaling": {"type": "yarn"}}, 'rope_scaling "yarn"'),
        ({"architectures": ["Qwen3MoeForCausalLM"], "rope_parameters": {"rope_type": "yarn"}}, 'rope_scaling "yarn"'),
        ({"architectures": ["Qwen3ForCausalLM"], "attention_bias": True}, "attention_bias true"),
    ],
)
def test_what_a_class_ignores_of_a_model_is_refused(model: dict[str, Any], said: str) -> None:
    assert said in unsupported(model)


def test_what_a_class_ignores_may_be_off() -> None:
    off = {"rope_scaling": None, "rope_parameters": {"rope_type": "default"}, "attention_bias": False}
    assert settings(model={"architectures": ["Qwen3ForCausalLM"], **off}).application == "qwen3"
    scaled = {"rope_scaling": {"rope_type": "yarn"}, "attention_bias": True}
    assert settings(model=scaled).application == "llama"
