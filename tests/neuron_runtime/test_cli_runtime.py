"""The command line: accepted flags, refusals in one line, and records."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import msgspec
import pytest

from helpers.chat_model import write_chat_model
from neuron_runtime import arguments
from neuron_runtime.arguments import BY_ARGUMENT, on_this_machine
from neuron_runtime.commands.command_line import build_parser, main
from neuron_runtime.commands.serve import configuration
from neuron_runtime.config import Accelerator, Buckets, RuntimeConfig, parse_config
from neuron_runtime.errors import InvalidConfig
from neuron_runtime.flags import model_uri
from neuron_runtime.not_built import NotBuilt, Surface, rows


def config_of(*words: str) -> RuntimeConfig:
    return configuration(build_parser().parse_args(["serve", *words]))


def test_flags_produce_a_document() -> None:
    config = config_of(
        "org/name@main", "--max-model-len", "4096", "--max-num-seqs", "8", "--block-size", "32", "--dtype", "float32",
        "--num-gpu-blocks-override", "100", "--max-num-batched-tokens", "512", "--max-queued-requests", "9",
        "--layout", "blocks", "--served-model-name", "a", "b",
    )  # fmt: skip
    limits = config.limits
    assert config.model.uri == "hf://org/name@main"
    assert config.served_names == ("a", "b")
    assert (limits.max_model_length, limits.max_sequences, limits.block_size) == (4096, 8, 32)
    assert (limits.num_blocks, limits.max_step_tokens, limits.max_queued_requests) == (100, 512, 9)
    assert (config.dtype, config.layout, config.backend) == ("float32", "blocks", "torch")


def test_a_model_is_accepted_in_its_common_notations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "local model").mkdir()
    assert model_uri("local model") == (tmp_path / "local model").as_uri()
    assert model_uri("./gone") == (tmp_path / "gone").as_uri()
    assert model_uri("org/name") == "hf://org/name"
    assert model_uri("file:///x") == "file:///x"
    assert config_of("org/name@v1").served_names == ("name",)


def test_the_model_may_be_a_flag_as_in_manifests_for_vllm(capsys: pytest.CaptureFixture[str]) -> None:
    assert config_of("--model", "org/name", "--dtype", "float32") == config_of("org/name", "--dtype", "float32")
    for words in (["org/name", "--model=org/name"], ["--model", "org/name", "org/name"]):
        with pytest.raises(SystemExit):
            config_of(*words)
        assert "not allowed with argument" in capsys.readouterr().err
    with pytest.raises(InvalidConfig, match="leave them out"):
        config_of("--config", "x", "--model", "org/name")


@pytest.mark.parametrize(
    ("words", "field", "says"),
    [
        ([], "MODEL", "serve MODEL"),
        (["m", "--config", "x"], "--config", "leave them out"),
        (["--config", "x", "--max-model-len", "5"], "--config", "leave them out"),
        (["--config", "/nowhere"], "--config", "cannot read /nowhere"),
        (
            ["a/m", "--dtype", "int7"],
            "--dtype ($.dtype)",
            "Invalid enum value 'int7': must be one of `auto`, `bfloat16`, `float16`, `float32`",
        ),
        (["a/m", "--backend", "magic"], "--backend ($.backend)", "must be one of `nxdi`, `optimum`, `simulated`, "),
        (["a/m", "--layout", "x"], "--layout ($.layout)", "must be one of `auto`, `blocks`, `slots`"),
        (
            ["a/m", "--reasoning-parser", "x"],
            "--reasoning-parser ($.text.reasoningParser)",
            "one of `deepseek_r1`, `qwen3`",
        ),
        (["a/m", "--max-num-seqs", "-1"], "--max-num-seqs ($.limits.maxSequences)", "Expected `int` >= 0, got -1"),
        (["a/m", "--allowed-origins", "[1]"], "--allowed-origins ($.server.allowedOrigins[0])", "got `int`"),
        (["a/m", "--context-buckets", "1,x"], "--context-buckets ($.buckets.context)", "must be numbers with commas"),
        (
            ["a/m", "--sequence-buckets", "4,2"],
            "--sequence-buckets ($.buckets.sequences)",
            "in ascending order, got [4, 2]",
        ),
        (["a/m", "--prefix-buckets", "0,2"], "--prefix-buckets ($.buckets.prefix[0])", "Expected `int` >= 1, got 0"),
        (["a/m", "--logical-neuron-core", "3"], "--logical-neuron-core ($.accelerator.logicalNeuronCore)", "<= 2"),
        (["a/m", "--sampling-mode", "gpu"], "--sampling-mode ($.sampling)", "`DeviceWithLogits`, `Host`"),
        (["~nobody-here/m"], "MODEL ($.model.uri)", "no home directory"),
        (["a/m", "--generation-config", "~nobody-here"], "--generation-config ($.text.generationConfig)", "no home"),
        (["m"], "MODEL ($.model.uri)", "write hf://org/name"),
        (["oci://image/m#../x"], "MODEL ($.model.uri)", "no valid path in the image"),
    ],
)
def test_invalid_flags_are_named(words: list[str], field: str, says: str) -> None:
    with pytest.raises(InvalidConfig) as caught:
        config_of(*words)
    assert caught.value.field == field
    assert says in str(caught.value)


DEVICE_FLAGS = (
    "--tensor-parallel-size=8", "--num-cores=8", "--logical-neuron-core=2", "--context-buckets=128,512",
    "--token-generation-buckets=2048", "--prefix-buckets=512", "--sequence-buckets=1,8", "--application-class=llama",
    "--sampling-mode=DeviceWithLogits", "--async-mode",
)  # fmt: skip


def test_flags_of_a_compiled_device_produce_a_document() -> None:
    flags = vars(build_parser().parse_args(["serve", "a/m", *DEVICE_FLAGS]))
    config = arguments.config_of("hf://a/m", {name: flags[name] for name in BY_ARGUMENT if flags[name] is not None})
    assert config.parallelism.tensor == 8
    assert config.accelerator == Accelerator(cores=8, logical_neuron_core=2)
    assert config.buckets == Buckets(context=(128, 512), token_generation=(2048,), prefix=(512,), sequences=(1, 8))
    assert (config.application_class, config.sampling, config.async_mode) == ("llama", "DeviceWithLogits", True)


@pytest.mark.parametrize(("backend", "accepts"), [("torch", "Host"), ("simulated", "DeviceWithLogits")])
def test_a_backend_without_a_compiled_device_refuses_every_field_of_one(backend: str, accepts: str) -> None:
    refused = [flag for flag in DEVICE_FLAGS if not flag.startswith(("--sampling", "--tensor"))]
    with pytest.raises(InvalidConfig) as caught:
        config_of("a/m", "--backend", backend, "--sampling-mode", accepts, *refused)
    assert [name.partition(" ")[0] for name, _ in caught.value.parts] == [
        "--num-cores", "--logical-neuron-core", "--context-buckets",
        "--token-generation-buckets", "--prefix-buckets", "--sequence-buckets", "--application-class", "--async-mode",
    ]  # fmt: skip
    assert str(caught.value).startswith(
        f"--num-cores ($.accelerator.cores): the {backend} backend has no such setting: leave it out"
    )
    config_of("a/m", "--backend", backend, "--tensor-parallel-size", "2", "--sampling-mode", accepts)


def test_compiled_steps_of_the_torch_backend_run_on_one_rank() -> None:
    with pytest.raises(InvalidConfig, match="compiled steps run on one rank only, not on 2"):
        config_of("a/m", "--backend", "torch", "--compile", "--tensor-parallel-size", "2")


def test_the_torch_backend_samples_on_the_host_only() -> None:
    with pytest.raises(InvalidConfig, match="the torch backend accepts only Host"):
        config_of("a/m", "--backend", "torch", "--sampling-mode", "Device")


def test_a_machine_with_neuron_devices_serves_compiled_models_by_default(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("neuron10", "neuron2", "neuron", "neuron_monitor"):
        (tmp_path / name).touch()
    assert on_this_machine({}, dev=tmp_path) == {"backend": "nxdi", "compile": True}
    assert capsys.readouterr().err.splitlines() == [
        f"neuron-runtime: backend nxdi by default: this machine has Neuron devices ({tmp_path}/neuron2)"
    ]
    assert on_this_machine({"backend": "torch"}, dev=tmp_path) == {"backend": "torch"}
    assert on_this_machine({}, dev=tmp_path / "none") == {}
    assert capsys.readouterr().err == ""


def test_commands_of_guides_for_neuron_are_understood(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "neuron0").touch()
    inside = {"override-neuron-config": {"fused_qkv": True}}
    given = {"block_size": 128, "max_model_len": 128}
    assert on_this_machine(given, device="neuron", additional_config=inside, dev=tmp_path) == {
        "backend": "nxdi", "compile": True, "max_model_len": 128, "override_neuron_config": {"fused_qkv": True}
    }  # fmt: skip
    assert "(layout slots)" in capsys.readouterr().err
    shared = {**given, "enable_prefix_caching": True}
    assert on_this_machine(shared, device="neuron", dev=tmp_path)["block_size"] == 128
    assert on_this_machine(given, device="cpu", dev=tmp_path) == {**given, "backend": "torch"}
    monkeypatch.setenv("VLLM_NEURON_FRAMEWORK", "neuronx-distributed-inference")
    assert on_this_machine({}, device="neuron", dev=tmp_path)["backend"] == "nxdi"
    monkeypatch.setenv("VLLM_NEURON_FRAMEWORK", "optimum-neuron")
    assert on_this_machine({}, dev=tmp_path)["backend"] == "optimum"
    monkeypatch.setenv("VLLM_NEURON_FRAMEWORK", "other")
    with pytest.raises(InvalidConfig, match="VLLM_NEURON_FRAMEWORK: must be one of neuronx-distributed-inference, "):
        on_this_machine({}, device="neuron", dev=tmp_path)


def test_variables_set_buckets_that_no_flag_sets(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("NEURON_CONTEXT_LENGTH_BUCKETS", "128,1024")
    monkeypatch.setenv("NEURON_TOKEN_GEN_BUCKETS", "[2048]")
    given = {"backend": "nxdi", "compile": True}
    assert on_this_machine(given) == {**given, "context_buckets": [128, 1024], "token_generation_buckets": [2048]}
    assert capsys.readouterr().err.splitlines() == [
        "neuron-runtime: NEURON_CONTEXT_LENGTH_BUCKETS: --context-buckets 128,1024",
        "neuron-runtime: NEURON_TOKEN_GEN_BUCKETS: --token-generation-buckets [2048]",
    ]
    assert on_this_machine({**given, "context_buckets": "64"})["context_buckets"] == "64"
    assert "NEURON_CONTEXT_LENGTH_BUCKETS has no effect: --context-buckets is set" in capsys.readouterr().err
    assert on_this_machine({"backend": "torch"}) == {"backend": "torch"}
    assert "has no effect: the torch backend has no buckets" in capsys.readouterr().err
    monkeypatch.setenv("NEURON_TOKEN_GEN_BUCKETS", "many")
    with pytest.raises(InvalidConfig, match="NEURON_TOKEN_GEN_BUCKETS: must be numbers with commas"):
        on_this_machine(given)


def test_manifests_for_transformers_neuronx_are_honoured_by_its_backend(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "neuron0").touch()
    monkeypatch.setenv("VLLM_NEURON_FRAMEWORK", "transformers-neuronx")
    monkeypatch.setenv("NEURON_QUANT_DTYPE", "s8")
    monkeypatch.setenv("NEURON_CONTEXT_LENGTH_BUCKETS", "128,512,1024")
    given = {"block_size": 8, "max_model_len": 2048, "override_neuron_config": "shard_over_sequence:True"}
    assert on_this_machine(given, device="neuron", dev=tmp_path) == {
        "backend": "transformers-neuronx",
        "compile": True,
        "max_model_len": 2048,
        "context_buckets": [128, 512, 1024],
        "override_neuron_config": {"quant": {"quant_dtype": "s8"}, "shard_over_sequence": True},
        "quantization": "auto",
    }
    said = capsys.readouterr().err
    assert "the block size has no effect: each request has one contiguous line of the cache" in said
    assert "NEURON_QUANT_DTYPE: weights are quantized to s8" in said
    sizes = {"override_neuron_config": {"continuous_batching": {"batch_size_for_shared_caches": 4}}}
    assert on_this_machine(sizes, device="neuron", dev=tmp_path)["max_num_seqs"] == 4
    monkeypatch.setenv("NEURON_PP_STAGES", "2")
    with pytest.raises(InvalidConfig, match="NEURON_PP_STAGES: the transformers-neuronx backend runs on one node"):
        on_this_machine(given, device="neuron", dev=tmp_path)


def test_manifests_for_optimum_neuron_are_understood(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "neuron0").touch()
    monkeypatch.setenv("VLLM_NEURON_FRAMEWORK", "optimum-neuron")
    monkeypatch.setenv("NEURON_CONTEXT_LENGTH_BUCKETS", "128,512,1024")
    given = {"block_size": 2048, "max_model_len": 2048}
    assert on_this_machine(given, device="neuron", dev=tmp_path) == {
        "backend": "optimum",
        "compile": True,
        "max_model_len": 2048,
    }
    assert "NEURON_CONTEXT_LENGTH_BUCKETS has no effect: the optimum backend has no buckets" in capsys.readouterr().err


@pytest.mark.parametrize("backend", ["torch", "nxdi"])
def test_manifests_for_transformers_neuronx_keep_their_results_on_other_backends(
    backend: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("NEURON_VOCAB_PAD_DIVISOR", "64")
    batching = {"max_num_seqs": 4, "max_model_len": 128, "optimized_paged_attention": True}
    override = {"shard_over_sequence": True, "fuse_qkv": True, "cast_logits_dtype": "float32", "own": 1}
    values = on_this_machine(
        {"backend": backend, "override_neuron_config": {"continuous_batching": batching, **override}}
    )
    assert values.pop("compile", None) == (True if backend == "nxdi" else None)
    assert values == {
        "backend": backend,
        "max_num_seqs": 4,
        "max_model_len": 128,
        "override_neuron_config": {"own": 1},
    }
    said = capsys.readouterr().err
    assert "NEURON_VOCAB_PAD_DIVISOR: no effect" in said
    assert "--override-neuron-config: shard_over_sequence, fuse_qkv, cast_logits_dtype: no effect" in said
    monkeypatch.setenv("NEURON_QUANT_DTYPE", "s4")
    changes = {"quant": {}, "on_device_generation": {}, "cast_logits_dtype": "bfloat16", "bf16_rms_norm": True}
    with pytest.raises(InvalidConfig) as caught:
        on_this_machine({"backend": backend, "override_neuron_config": changes})
    assert [path for path, _ in caught.value.parts] == [
        "NEURON_QUANT_DTYPE",
        *(f"--override-neuron-config[{key!r}]" for key in changes),
    ]
    assert "leave it out, or set the sampling mode to Device" in str(caught.value)


@pytest.mark.parametrize(
    ("variable", "given", "quant_dtype", "quantization"),
    [
        ("s8", None, "s8", "int8"),
        ("f8e4m3fn", None, "f8e4m3fn", "fp8"),
        ("f8e4m3fn", "neuron_quant", "f8e4m3fn", "fp8"),
        ("", "neuron_quant", "s8", "int8"),
        ("s8", "fp8", "f8e4m3fn", "fp8"),
        ("s8", "none", None, "none"),
        ("", "compressed-tensors", None, "compressed-tensors"),
    ],
)
def test_quantization_for_transformers_neuronx_is_understood_by_all_backends(
    monkeypatch: pytest.MonkeyPatch, variable: str, given: str | None, quant_dtype: str | None, quantization: str
) -> None:
    monkeypatch.setenv("NEURON_QUANT_DTYPE", variable)
    wanted = {"quantization": given} if given else {}
    for backend in ("torch", "nxdi"):
        assert on_this_machine({"backend": backend, **wanted})["quantization"] == quantization
    legacy = on_this_machine({"backend": "transformers-neuronx", **wanted})
    override = {"override_neuron_config": {"quant": {"quant_dtype": quant_dtype}}} if quant_dtype else {}
    own = {"quantization": "auto"} if quant_dtype else wanted
    assert legacy == {"backend": "transformers-neuronx", "compile": True, **override, **own}


def test_settings_of_nxd_inference_with_the_same_name_are_left_to_it() -> None:
    given = {"backend": "nxdi", "override_neuron_config": {"padding_side": "right", "kv_cache_quant": False}}
    assert on_this_machine(given)["override_neuron_config"] == given["override_neuron_config"]


def test_scripts_for_devices_run_on_the_cpu_if_a_variable_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("VLLM_TARGET_DEVICE", "cpu")
    given = {"tensor_parallel_size": 32, "max_model_len": 128}
    assert on_this_machine(given, device="neuron") == {"backend": "torch", "max_model_len": 128}
    assert "VLLM_TARGET_DEVICE is cpu: the model is computed on the CPU, in one process" in capsys.readouterr().err
    assert on_this_machine({**given, "backend": "torch"}) == {**given, "backend": "torch"}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ('{"a": 1}', {"a": 1}),
        ("a:True", {"a": True}),
        ("a:None, b:2,c:word", {"a": None, "b": 2, "c": "word"}),
    ],
)
def test_settings_of_a_backend_are_json_or_pairs(text: str, value: dict[str, Any]) -> None:
    config = arguments.config_of("hf://a/m", {"override_neuron_config": text})
    assert config.override_neuron_config == value
    with pytest.raises(InvalidConfig, match="is not JSON"):
        arguments.config_of("hf://a/m", {"override_neuron_config": "a b:1"})


@pytest.mark.parametrize(
    ("flag", "value", "says"),
    [
        ("--additional-config", "{", "must be an object, got '{'"),
        ("--device", "cuda", "must be 'cpu' or 'neuron', got 'cuda'"),
    ],
)
def test_unsupported_flags_are_refused_by_name(
    flag: str, value: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", "m", flag, value]) == 2
    error = capsys.readouterr().err
    assert f"{flag}: {says}" in error
    assert error.count("\n") == 1


def test_everything_wrong_with_the_flags_is_said_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    wrong = [
        "--pipeline-parallel-size=2",
        "--chat-template=none.jinja",
        "--dtype=int7",
        "--max-num-seqs=-1",
        "--layout=q",
    ]
    assert main(["serve", "a/m", *wrong]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    names = [re.match(r"--[a-z-]+", part) for part in error.partition("InvalidEngineConfig: ")[2].split("; ")]
    assert [name[0] for name in names if name] == [
        flag.partition("=")[0] for flag in wrong[:3] + wrong[4:] + wrong[3:4]
    ]


def test_what_the_backend_refuses_is_said_with_the_rest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "a/m", "--backend=optimum", "--pipeline-parallel-size=2"]) == 2
    assert "--pipeline-parallel-size: 2 is not supported yet: leave it out; --backend (" in capsys.readouterr().err
    assert main(["serve", "a/m", "--tokenizer=x", "--override-neuron-config", '{"a": 1, "b": 2}']) == 2
    error = capsys.readouterr().err
    assert [error.count(one) for one in ("--tokenizer: ", "Config.a): ", "Config.b): ")] == [1, 1, 1]


def test_everything_wrong_with_a_document_is_said_at_once_and_bounded(tmp_path: Path) -> None:
    document: dict[str, Any] = {
        "version": 1,
        "model": {"uri": "hf://a/m"},
        "servedNames": [],
        "limits": {"maxSequences": -1, "most": 3},
        "text": {"reasoningParser": "q"},
        "more": 1,
    }
    with pytest.raises(InvalidConfig) as caught:
        parse_config(json.dumps(document).encode(), "the file")
    assert caught.value.field == "$.servedNames"
    assert str(caught.value).split("; ") == [
        "$.servedNames: Expected `array` of length >= 1, got []",
        "$.limits.maxSequences: Expected `int` >= 0, got -1",
        "$.limits: Object contains unknown field `most`",
        "$.text.reasoningParser: Invalid enum value 'q': must be one of `deepseek_r1`, `qwen3`",
        "$: Object contains unknown field `more` (in the file)",
    ]
    document |= {f"extra{number}": 0 for number in range(20)}
    with pytest.raises(InvalidConfig, match=r"; and 15 more$"):
        parse_config(json.dumps(document).encode())
    document = {
        "version": 1,
        "model": {"uri": "m"},
        "servedNames": ["m"],
        "layout": "slots",
        "limits": {"blockSize": 8},
    }
    document["server"] = {"allowedOrigins": ["x"], "otlpTracesEndpoint": "y"}
    with pytest.raises(InvalidConfig) as caught:
        parse_config(json.dumps(document).encode())
    assert [name for name, _ in caught.value.parts] == [
        *("$.model.uri", "$.layout", "$.server.otlpTracesEndpoint", "$.server.allowedOrigins"),
    ]


LLM_ROWS = rows(Surface.LLM)


@pytest.mark.parametrize("row", LLM_ROWS, ids=lambda row: row.name)
def test_serve_takes_the_arguments_of_llm_as_flags(row: NotBuilt, capsys: pytest.CaptureFixture[str]) -> None:
    flag = f"--{row.name.replace('_', '-')}"
    assert main(["serve", *([flag] if row.is_switch else [flag, "17"]), "a/m", "--dtype", "int7"]) == 2
    error = capsys.readouterr().err
    if row.has_effect:
        assert f"{flag}: {'True' if row.is_switch else 17} is not supported yet: {row.cure}" in error
    else:
        assert f"{flag} has no effect here: leave it out\n" in error
        assert "--dtype ($.dtype): Invalid enum value" in error


def test_switches_of_vllm_can_be_turned_off(capsys: pytest.CaptureFixture[str]) -> None:
    config_of("--no-enable-lora", "a/m", "--no-skip-tokenizer-init")
    assert capsys.readouterr().err == ""


def test_flags_are_read_as_vllm_spells_them() -> None:
    config = config_of(
        "a/m", "--max_model_len=1k", "-tp", "2", "-pp", "1", "--seed", "0", "--no-enable-log-requests",
        "--chat_template_content_format", "auto", "--max-logprobs", "20", "--guided-decoding-backend", "xgrammar",
        "--disable-fastapi-docs", "--served_model_name", "a_b",
    )  # fmt: skip
    assert (config.limits.max_model_length, config.parallelism.tensor, config.served_names) == (1000, 2, ("a_b",))


@pytest.mark.parametrize(
    ("arguments", "see"),
    [
        (["serve", "a/m", "--unknown-flag", "5"], "neuron-runtime serve --help"),
        (["bench", "simulate", "--unknown-flag"], "neuron-runtime bench simulate --help"),
    ],
)
def test_an_unknown_flag_points_to_the_help_of_its_command(
    arguments: list[str], see: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert "unrecognized arguments: --unknown-flag" in error
    assert f"(see {see})" in error


def test_neutral_values_of_unsupported_flags_are_accepted() -> None:
    config_of(
        "a/m", "--tensor-parallel-size", "1", "--additional-config", "{}", "--override-neuron-config", "{}",
        "--generation-config", "auto",
    )  # fmt: skip


def test_flags_set_the_tokenizer_and_chat_options(tmp_path: Path) -> None:
    template = tmp_path / "chat.jinja"
    template.write_text("{{ messages }} ☃", encoding="utf-8")
    flags = ["--chat-template", str(template), "--reasoning-parser", "qwen3", "--generation-config", "vllm"]
    text = config_of("a/m", *flags).text
    assert (text.chat_template, text.reasoning_parser, text.generation_config) == ("{{ messages }} ☃", "qwen3", "vllm")
    assert config_of("a/m", "--chat-template", "{{ x }}").text.chat_template == "{{ x }}"
    folder = config_of("a/m", "--generation-config", os.path.relpath(tmp_path)).text.generation_config
    assert folder == str(tmp_path)
    with pytest.raises(InvalidConfig, match=r"--reasoning-parser \(\$\.text\.reasoningParser\)"):
        config_of("a/m", "--reasoning-parser", "x")


def test_a_missing_chat_template_is_refused_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "a/m", "--chat-template", "none.jinja"]) == 2
    assert "--chat-template ($.text.chatTemplate): cannot read none.jinja" in capsys.readouterr().err


def test_switches_are_on_off_or_default() -> None:
    config = config_of("a/m", "--enable-prefix-caching", "--no-enable-chunked-prefill")
    assert (config.prefix_caching, config.chunked_prefill) == ("enabled", "disabled")
    config = config_of("a/m", "--no-enable-prefix-caching", "--enable-chunked-prefill")
    assert (config.prefix_caching, config.chunked_prefill) == ("disabled", "enabled")
    config = config_of("a/m")
    assert (config.prefix_caching, config.chunked_prefill) == ("auto", "auto")


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "neuron_runtime", *arguments], capture_output=True, text=True, check=False, timeout=200
    )


def test_a_port_in_use_is_reported_in_one_line_with_a_remedy_and_a_record(tmp_path: Path) -> None:
    record = tmp_path / "record"
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        ended = run("serve", "org/name", "--port", port, "--record", str(record))
    assert ended.returncode == 2
    assert ended.stderr.count("\n") == 1
    assert port in ended.stderr
    assert "in use" in ended.stderr
    assert "--port" in ended.stderr
    written = msgspec.json.decode(record.read_bytes())
    assert (written["command"], written["reason"]) == ("serve", "InvalidEngineConfig")


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--host", "300.1.1.1"], "cannot listen on 300.1.1.1"),
        (["--port", "70000"], "from 0 to 65535"),
        (["--backend", "vllm"], "--backend ($.backend): `vllm` is not supported yet"),
    ],
)
def test_a_command_that_cannot_start_reports_the_cause_in_one_line(
    flags: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", "org/name", *flags]) == 2
    reported = capsys.readouterr().err
    assert says in reported
    assert reported.count("\n") == 1


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"speed": 9}, "`speed`"),
        ({"model": {"uri": "oci://"}}, "$.model.uri: 'oci://' names no image; write oci://image[@digest][#path]"),
        ({"model": {"uri": "hf://name"}}, "$.model.uri: 'hf://name' names no repository"),
        ({"overrideNeuronConfig": {"tp": 2}}, "$.overrideNeuronConfig.tp: the torch backend has no such setting"),
    ],
)
def test_an_unservable_document_is_refused_before_a_port_opens(
    changes: dict[str, object], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"version": 1, "model": {"uri": "hf://a/b"}, "servedNames": ["a"]} | changes))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        # If the port opened before the document was checked, the error would be the port in use.
        assert main(["serve", "--config", str(path), "--port", str(taken.getsockname()[1])]) == 2
    reported = capsys.readouterr().err
    assert says in reported
    assert reported.count("\n") == 1


def test_inspect_prints_facts_and_writes_a_record(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, record = write_chat_model(tmp_path / "model"), tmp_path / "record"
    assert main(["inspect", str(model), "--json", "--record", str(record)]) == 0
    facts = json.loads(capsys.readouterr().out)
    written = msgspec.json.decode(record.read_bytes())
    assert written["ok"] is True
    assert written["facts"] == facts
    assert facts["architecture"] == "LlamaForCausalLM"
    assert main(["inspect", str(model)]) == 0
    assert "LlamaForCausalLM" in capsys.readouterr().out


def test_inspect_of_a_missing_model_ends_with_its_code_and_record(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record = tmp_path / "record"
    assert main(["inspect", (tmp_path / "gone").as_uri(), "--record", str(record)]) == 10
    written = msgspec.json.decode(record.read_bytes())
    assert (written["exitCode"], written["reason"], written["ok"]) == (10, "ModelNotFound", False)
    assert "ModelNotFound" in capsys.readouterr().err


def test_a_check_of_what_could_be_served_ends_with_a_record_and_opens_no_port(tmp_path: Path) -> None:
    model, record = write_chat_model(tmp_path / "model"), tmp_path / "record"
    (model / "model.safetensors").unlink()
    assert main(["serve", str(model), "--check", "--host", "no such host", "--record", str(record)]) == 0
    written = msgspec.json.decode(record.read_bytes())
    assert (written["command"], written["ok"]) == ("check", True)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--chat-template", "{% if %}"], "$.text.chatTemplate): not a valid template: line 1"),
        (["--max-num-batched-tokens", "2"], "must be at least maxSequences (8)"),
        (["--max-model-len", "99999"], "$.limits.maxModelLength): must be at most the model's"),
        (["--override-neuron-config", '{"x": 1}'], "$.overrideNeuronConfig.x): the torch backend has no such setting"),
        (["--backend", "simulated", "--max-model-len", "99999"], "$.limits.maxModelLength): must be from 2 to"),
    ],
    ids=lambda value: value[-1] if isinstance(value, list) else "",
)
def test_a_check_refuses_what_serving_would_refuse(
    words: list[str], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, record = write_chat_model(tmp_path / "model"), tmp_path / "record"
    assert main(["serve", str(model), "--check", "--record", str(record), *words]) == 2
    assert says in msgspec.json.decode(record.read_bytes())["message"]
    assert says in capsys.readouterr().err


def test_an_unwritable_record_is_reported_and_changes_nothing_else(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = write_chat_model(tmp_path / "model")
    below_a_file = model / "config.json" / "record"
    assert main(["inspect", str(model), "--record", str(below_a_file)]) == 0
    assert f"cannot write the record to {below_a_file}" in capsys.readouterr().err


def test_help_lists_the_common_flags(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["serve", "--help"])
    text = capsys.readouterr().out
    assert all(flag in text for flag in ("--host", "--port", "--max-model-len", "--served-model-name", "--config"))
    assert "not supported" not in text


def test_the_supervisor_imports_neither_torch_nor_the_web_stack() -> None:
    code = (
        "import sys, neuron_runtime.commands.command_line, neuron_runtime.processes.supervisor; "
        "sys.exit(bool({'torch', 'transformers', 'starlette', 'uvicorn', 'zmq', 'asyncio'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_signal_to_stop_is_obeyed_while_the_program_is_still_importing_its_modules() -> None:
    """The first process of a container would lose it."""
    program = """
        import os, signal, sys
        from neuron_runtime import __main__

        class Stopping:
            def find_spec(self, name, path=None, target=None):
                if name == "neuron_runtime.commands.command_line":
                    os.kill(os.getpid(), signal.SIGTERM)

        sys.meta_path.insert(0, Stopping())
        sys.argv[1:] = ["--version"]
        sys.exit(__main__.main())
        """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


@pytest.mark.parametrize(
    ("given", "task"),
    [
        ({"task": "score"}, "rerank"),
        ({"runner": "pooling"}, "embed"),
        ({"runner": "pooling", "convert": "classify"}, "rerank"),
        ({"convert": "embed", "task": "embed"}, "embed"),
        ({"runner": "auto", "convert": "auto"}, "generate"),
    ],
)
def test_vllm_s_words_say_the_task(given: dict[str, str], task: str, tmp_path: Path) -> None:
    assert arguments.config_of("file:///m", on_this_machine(given, dev=tmp_path)).task == task


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ({"runner": "draft"}, "--runner: must be auto, generate or pooling, got 'draft'"),
        ({"runner": "generate", "convert": "embed"}, "--convert: needs another --runner than generate: pooling"),
        ({"runner": "pooling", "task": "rerank"}, "--task: 'rerank' is not what --runner say: 'embed'"),
    ],
)
def test_words_for_tasks_that_contradict_one_another_are_refused(
    given: dict[str, str], complaint: str, tmp_path: Path
) -> None:
    with pytest.raises(InvalidConfig, match=complaint):
        on_this_machine(given, dev=tmp_path)
