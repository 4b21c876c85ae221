"""Compiling a model with NxD Inference, and loading what we or others compiled, or saying what is wrong with it."""

from __future__ import annotations

import logging
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Llama4Config

from helpers.hub import Shelf, serving
from helpers.nxdi import Mode, fake_nxdi, installed
from helpers.torch_models import random_model, reference
from neuron_runtime.artifacts.key import covered, differences
from neuron_runtime.artifacts.loading import ARTIFACT_VARIABLE, check_artifact, provide
from neuron_runtime.backend import nxdi
from neuron_runtime.backend.neuron import failures
from neuron_runtime.backend.neuron.devices import PLATFORMS, Target
from neuron_runtime.backend.neuron.failures import classified, when_free
from neuron_runtime.backend.neuron.installed import DRIVER_VERSION, device_memory
from neuron_runtime.backend.neuron.model_config import completed
from neuron_runtime.backend.nxdi import library
from neuron_runtime.backend.nxdi.library import application, sees_pictures
from neuron_runtime.backend.nxdi.settings import settings_of
from neuron_runtime.checkpoint import InvalidModel, check_tokenizer, read_checkpoint, read_config, read_whole_checkpoint
from neuron_runtime.config import ModelSource, RuntimeConfig, parse_config
from neuron_runtime.core import Request, Sampling
from neuron_runtime.engine.loop import Engine
from neuron_runtime.errors import ExitCode, FatalError, InvalidConfig
from neuron_runtime.inspection import inspect_model
from neuron_runtime.local_settings import LocalSettings
from neuron_runtime.weights.fetching import materialize

PROMPTS = ([5, 9, 13, 2, 8], [7, 3, 21])
LIMITS = {"maxSequences": 2, "maxModelLength": 256}


on_the_fake = pytest.mark.skipif(installed(), reason="needs a version or a fault of the fake")


@contextmanager
def library_of(version: str = "0.9", mode: Mode = "strict") -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch, nullcontext() if installed() else fake_nxdi(version, mode) as fake:
        # Loading sets it, and a process has one.
        patch.delenv("NEURON_LOGICAL_NC_CONFIG", raising=False)
        yield fake


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_model(tmp_path_factory.mktemp("model") / "llama")


@pytest.fixture(autouse=True)
def _one_core(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NEURON_RT_NUM_CORES", "1")


def config_of(model: Path, **document: Any) -> RuntimeConfig:
    base = {
        "version": 1,
        "model": {"uri": model.as_uri()},
        "servedNames": ["m"],
        "backend": "nxdi",
        "compile": True,
        "dtype": "float32",
        "limits": LIMITS,
    }
    return parse_config(msgspec.json.encode(base | document))


def compiled(config: RuntimeConfig, model: Path, folder: Path) -> Path:
    compiler = nxdi.compiler(config, model)
    folder.mkdir()
    for graph in compiler.graphs():
        graph.compile(folder)
    compiler.check(folder)
    return folder


def generated(model: Path, config: RuntimeConfig, artifact: Path, count: int = 6) -> list[list[int]]:
    """Greedy answers to PROMPTS."""
    backend = nxdi.load_backend(model, config, lambda stage, share: None, artifact)
    try:
        list(backend.warm_up(lambda stage, share: None))
        engine = Engine(backend)
        for name, prompt in enumerate(PROMPTS):
            engine.add(Request(str(name), tuple(prompt), Sampling(temperature=0.0, max_tokens=count)))
        found: dict[str, list[int]] = {str(name): [] for name in range(len(PROMPTS))}
        while engine.has_work:
            for event in engine.step():
                found[event.request_id] += event.token_ids
        return list(found.values())
    finally:
        backend.close()


def expected(model: Path, count: int = 6) -> list[list[int]]:
    made, answers = reference(model), []
    for prompt in PROMPTS:
        tokens = list(prompt)
        for _ in range(count):
            with torch.inference_mode():
                tokens.append(int(made(torch.tensor([tokens])).logits[0, -1].argmax()))
        answers.append(tokens[len(prompt) :])
    return answers


@pytest.mark.parametrize("version", ["0.7", "0.9"])
@pytest.mark.parametrize(
    "document",
    [
        {},
        {"prefixCaching": "enabled"},
        {"layout": "blocks", "prefixCaching": "disabled", "chunkedPrefill": "disabled"},
        {"sampling": "Host"},
    ],
)
def test_a_compiled_model_answers_as_transformers_does_and_its_library_warns_of_nothing(
    version: str, document: dict[str, Any], model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = config_of(model, **document)
    with library_of(version):
        with caplog.at_level(logging.WARNING):
            artifact = compiled(config, model, tmp_path / "artifact")
        assert "Unexpected keyword" not in caplog.text
        assert generated(model, config, artifact) == expected(model)


def test_neither_compiling_nor_loading_leaves_a_folder_behind(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (scratch := tmp_path / "scratch").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    config = config_of(model)
    with library_of("0.9"):
        artifact = compiled(config, model, tmp_path / "artifact")
        nxdi.load_backend(model, config, lambda stage, share: None, artifact).close()
    assert list(scratch.iterdir()) == []


def test_a_read_only_artifact_is_loaded_from_another_folder_than_that_of_the_model_it_was_compiled_from(
    model: Path, tmp_path: Path
) -> None:
    config = config_of(model)
    with library_of():
        elsewhere = tmp_path / "was compiled here"
        elsewhere.symlink_to(model)
        artifact = compiled(config, elsewhere, tmp_path / "artifact")
        elsewhere.unlink()
        artifact.chmod(0o500)
        assert generated(model, config, artifact) == expected(model)


@on_the_fake
@pytest.mark.parametrize(
    "document",
    [
        {"buckets": {"sequences": [1]}},
        {"layout": "blocks", "limits": {**LIMITS, "blockSize": 128, "numBlocks": 4}},
        {"sampling": "Host", "speculation": {"method": "NGram"}},
        {"speculation": {"method": "Draft", "model": {"uri": "its own"}}},
    ],
)
def test_each_graph_is_reported_once_it_is_compiled(model: Path, tmp_path: Path, document: dict[str, Any]) -> None:
    if document.get("speculation", {}).get("model"):
        document = {"speculation": document["speculation"] | {"model": {"uri": model.as_uri()}}}
    with library_of() as fake, pytest.MonkeyPatch.context() as patch:
        (graph,) = nxdi.compiler(config_of(model, **document), model).graphs()
        seen: list[list[str]] = []
        # The fake sleeps as long as it compiles a graph.
        patch.setattr(time, "sleep", lambda seconds: seen.append(list(graph.ready())))
        graph.compile(tmp_path)
        assert fake.COUNTS.compiled == len(graph.parts) >= 3
    assert seen == [list(graph.parts[:number]) for number in range(len(graph.parts))]


@on_the_fake
def test_what_a_version_does_not_have_is_refused_before_compiling(model: Path, tmp_path: Path) -> None:
    with library_of("0.7"), pytest.raises(InvalidConfig) as caught:
        compiled(config_of(model, buckets={"sequences": [1]}), model, tmp_path / "artifact")
    assert dict(caught.value.parts) == {
        "$.buckets.sequences": "NxD Inference 0.7.0 does not have `token_generation_batches`: leave it out"
    }


@on_the_fake
@pytest.mark.parametrize(
    ("override", "path", "message"),
    [
        (
            {"weights_to_skip_layout_optimization": ["lm_head"]},
            "$.overrideNeuronConfig.weights_to_skip_layout_optimization",
            "NxD Inference 0.7.0 ignores `weights_to_skip_layout_optimization`: leave it out",
        ),
        (
            {"on_device_sampling_config": {"sampling_dp_degree": 2}},
            "$.overrideNeuronConfig.on_device_sampling_config.sampling_dp_degree",
            "NxD Inference 0.7.0 ignores `sampling_dp_degree`: leave it out",
        ),
    ],
)
def test_what_a_version_would_drop_without_an_error_is_refused(
    override: dict[str, Any], path: str, message: str, model: Path, tmp_path: Path
) -> None:
    with library_of("0.7", "damage"), pytest.raises(InvalidConfig) as caught:
        compiled(config_of(model, overrideNeuronConfig=override), model, tmp_path / "artifact")
    assert dict(caught.value.parts) == {path: message}


def test_an_older_version_runs_a_family_by_the_class_that_it_has(tmp_path: Path) -> None:
    mistral = random_model(tmp_path / "mistral", architecture="MistralForCausalLM", sliding_window=None)
    config = config_of(mistral)
    with library_of("0.7"):
        assert generated(mistral, config, compiled(config, mistral, tmp_path / "artifact")) == expected(mistral)


@on_the_fake
@pytest.mark.parametrize(
    ("version", "most", "name"),
    [
        ("0.7", 8, "NeuronLlama4TextForCausalLM"),
        ("0.9", 0, "NeuronLlama4TextForCausalLM"),
        ("0.9", 8, "NeuronLlama4ForCausalLM"),
    ],
)
def test_llama_4_runs_by_the_class_of_its_text_where_it_sees_no_pictures(
    version: str, most: int, name: str, tmp_path: Path
) -> None:
    text = {"hidden_size": 64, "intermediate_size": 64, "intermediate_size_mlp": 64, "num_hidden_layers": 2}
    text |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "num_local_experts": 2}
    folder = tmp_path / "llama4"
    config = Llama4Config(text_config={**text, "vocab_size": 512, "max_position_embeddings": 512})
    config.architectures = ["Llama4ForConditionalGeneration"]
    config.save_pretrained(folder)
    config = config_of(folder, media={"maxImages": most})
    with library_of(version):
        sees = sees_pictures()
        settings = settings_of(config, read_config(folder), Target(PLATFORMS["trn2"], 2, 1), sees_pictures=sees)
        assert name in [one.__name__ for one in type(application(settings, folder)).__mro__]


@on_the_fake
def test_an_older_class_that_ignores_a_sliding_window_serves_no_more_tokens_than_the_window(tmp_path: Path) -> None:
    mistral = random_model(tmp_path / "mistral", architecture="MistralForCausalLM", sliding_window=128)
    with library_of("0.7"), pytest.raises(InvalidConfig, match="does not know the sliding window of 128 tokens"):
        compiled(config_of(mistral), mistral, tmp_path / "artifact")


def test_an_artifact_with_weights_is_not_that_of_other_weights(model: Path, tmp_path: Path) -> None:
    other = random_model(tmp_path / "other", scale=0.2)
    sharded = {"overrideNeuronConfig": {"save_sharded_checkpoint": True}}
    with library_of():
        wanted, found = (nxdi.compiler(config_of(one, **sharded), one).needs for one in (model, other))
        assert wanted != found
        assert wanted == nxdi.compiler(config_of(model, **sharded), model).needs
        for source, is_told in (
            (ModelSource(uri="hf://acme/m", digest="0" * 64), True),
            (ModelSource(uri="file:///m", digest="0" * 64, converted="1" * 64), True),
            (ModelSource(uri="pvc://claim/m", digest="0" * 64), False),
        ):
            pinned = msgspec.structs.replace(config_of(model, **sharded), model=source)
            needs = nxdi.compiler(pinned, model).needs
            assert ("weights" not in needs.settings) == is_told, "the digest in place tells names and shapes alone"


def test_what_a_library_needs_of_a_model_follows_from_its_other_fields() -> None:
    assert completed({"hidden_size": 64, "num_attention_heads": 4}) == {"head_dim": 16}
    llama3 = {"rope_theta": 500000.0, "rope_type": "llama3", "factor": 8.0}
    assert completed({"rope_parameters": llama3}) == {
        "rope_theta": 500000.0,
        "rope_scaling": {"rope_type": "llama3", "factor": 8.0},
    }
    assert completed({"rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}}) == {"rope_theta": 1e6}
    scaling = {"original_max_position_embeddings": 4096}
    assert completed({"model_type": "gpt_oss", "rope_scaling": scaling}) == {"initial_context_length": 4096}


def test_a_model_as_transformers_5_writes_it_is_read_alike(tmp_path: Path) -> None:
    model = random_model(tmp_path / "llama", rope_theta=500.0)
    config = config_of(model)
    answers = expected(model)
    document = read_config(model)
    new = {name: value for name, value in document.items() if name not in ("rope_theta", "torch_dtype")}
    new |= {"rope_parameters": {"rope_theta": 500.0, "rope_type": "default"}, "dtype": "float32"}
    (model / "config.json").write_bytes(msgspec.json.encode(new))
    with library_of():
        assert generated(model, config, compiled(config, model, tmp_path / "artifact")) == answers


def test_the_key_has_the_cores_and_the_versions(model: Path) -> None:
    with library_of():
        needs = nxdi.compiler(config_of(model), model).needs
        assert needs.target == {"platform": "trn2", "logicalCore": 2, "tensor": 1}
        assert "neuronx-distributed-inference" in needs.libraries
        assert needs == nxdi.compiler(config_of(model, parallelism={"tensor": 1}), model).needs
        other = nxdi.compiler(config_of(model, accelerator={"logicalNeuronCore": 1}), model).needs
    wanted, found = (covered("nxdi", "digest", one) for one in (needs, other))
    assert differences(wanted, found) == ["target.logicalCore: 1 instead of 2"]


def test_another_tensor_degree_is_another_artifact(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NEURON_RT_NUM_CORES", "2")
    with library_of():
        wanted, found = (
            covered("nxdi", "digest", nxdi.compiler(config_of(model, parallelism={"tensor": degree}), model).needs)
            for degree in (1, 2)
        )
    assert differences(wanted, found) == ["target.tensor: 2 instead of 1"]


def test_too_few_granted_cores_are_named_before_anything_is_compiled(model: Path) -> None:
    with library_of(), pytest.raises(FatalError, match=r"needs 2 NeuronCores .* granted 1 ") as caught:
        nxdi.compiler(config_of(model, parallelism={"tensor": 2}), model)
    assert caught.value.exit_code == ExitCode.DEVICE_HELD


@on_the_fake
def test_a_missing_library_is_named_with_the_image_that_has_it(model: Path) -> None:
    for call in (nxdi.check_config, lambda config: nxdi.compiler(config, model)):
        with pytest.raises(
            InvalidConfig, match=r"\$\.backend: nxdi needs neuronx-distributed-inference, .*runtime-neuron"
        ):
            call(config_of(model))


@on_the_fake
def test_a_missing_compiler_is_named(model: Path) -> None:
    with fake_nxdi("0.9", compiler=False), pytest.raises(FatalError, match="neuronx-cc is not installed") as caught:
        nxdi.compiler(config_of(model), model).tools()
    assert caught.value.exit_code == ExitCode.COMPILE_FAILED


def test_keys_of_an_override_are_checked_without_a_model(model: Path) -> None:
    with library_of():
        nxdi.check_config(config_of(model, overrideNeuronConfig={"moe_tp_degree": 2}))
        nxdi.check_config(config_of(model, overrideNeuronConfig={"moe_tp_degree": 2}, applicationClass="Mixtrall"))
        with pytest.raises(InvalidConfig, match="did you mean `tp_degree`"):
            nxdi.check_config(config_of(model, overrideNeuronConfig={"tp_degre": 2}))


def test_a_sharded_checkpoint_is_part_of_the_artifact(model: Path, tmp_path: Path) -> None:
    config = config_of(model, overrideNeuronConfig={"save_sharded_checkpoint": True})
    assert not nxdi.needs_weights(config)
    assert nxdi.compiler_reads_weights(config)
    with library_of():
        artifact = compiled(config, model, tmp_path / "artifact")
        outline = tmp_path / "outline"
        outline.mkdir()
        (outline / "config.json").write_bytes((model / "config.json").read_bytes())
        assert generated(outline, config, artifact) == expected(model)
        next(artifact.glob("weights/*")).unlink()
        with pytest.raises(FatalError, match="has no weights/tp0_sharded_checkpoint") as caught:
            generated(outline, config, artifact)
    assert caught.value.exit_code == ExitCode.ARTIFACT_MISSING


@on_the_fake
def test_a_held_device_is_waited_for(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(failures, "RETRY_SECONDS", 0.0)
    config = config_of(model)
    with fake_nxdi("0.9") as fake:
        artifact = compiled(config, model, tmp_path / "artifact")
        fake.SETTINGS.faults.held_loads = 2
        assert generated(model, config, artifact) == expected(model)
    assert capsys.readouterr().err.count("trying again") == 2


def test_a_device_that_stays_held_is_given_up() -> None:
    seconds = iter(range(0, 1000, 50))
    slept: list[float] = []

    def load() -> None:
        raise RuntimeError("nrt_init failed: NRT_RESOURCE")

    with pytest.raises(FatalError) as caught:
        when_free(load, seconds=120, clock=lambda: float(next(seconds)), sleep=slept.append)
    assert caught.value.exit_code == ExitCode.DEVICE_HELD
    assert slept


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("nrt_execute failed: NRT_EXEC_BAD_INPUT", ExitCode.DEVICE_FAILED),
        ("Failed to execute model, nrt_execute status=1004", ExitCode.DEVICE_FAILED),
        ("NRT_TIMEOUT (status 5)", ExitCode.DEVICE_FAILED),
        ("status_code=1202, NRT_EXEC_HW_ERR_NC_UE", ExitCode.DEVICE_FAILED_NODE),
        ("error code: 1201", ExitCode.DEVICE_FAILED_NODE),
        ("NRT_RESOURCE: Logical Neuron Core(s) not available - Requested:2 Available:0", ExitCode.DEVICE_HELD),
        ("nrt_allocate_neuron_cores: NeuronCore(s) not available", ExitCode.DEVICE_HELD),
        ("NRT_RESOURCE: failed to allocate 2048 bytes of device memory", ExitCode.DEVICE_OUT_OF_MEMORY),
        ("NRT_UNSUPPORTED_NEFF_VERSION", ExitCode.DRIVER_INCOMPATIBLE),
        ("The Neuron driver version 2.1 is too old", ExitCode.DRIVER_INCOMPATIBLE),
        ("list index out of range", ExitCode.DEVICE_FAILED),
    ],
)
def test_errors_of_the_device_say_who_must_act(text: str, code: ExitCode) -> None:
    found = classified(RuntimeError(text))
    assert isinstance(found, FatalError)
    assert found.exit_code == code
    assert text in str(found)


@pytest.mark.parametrize(
    ("document", "path"),
    [
        (
            {"overrideNeuronConfig": {"is_block_kv_layout": True, "pa_num_blocks": 1, "pa_block_size": 128}},
            "pa_num_blocks",
        ),
        ({"buckets": {"context": [128, 1024]}}, "$.buckets.context"),
        ({"parallelism": {"tensor": 3}}, "$.parallelism.tensor"),
    ],
)
def test_a_check_without_devices_explains_contradictions_with_the_model(
    document: dict[str, Any], path: str, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NEURON_RT_NUM_CORES")
    monkeypatch.setenv("NEURON_PLATFORM_TARGET_OVERRIDE", "trn2")
    nxdi.check_model(model, config_of(model))
    with pytest.raises(InvalidConfig) as caught:
        nxdi.check_model(model, config_of(model, **document))
    assert [path in where for where, _ in caught.value.parts] == [True]
    monkeypatch.delenv("NEURON_PLATFORM_TARGET_OVERRIDE")
    nxdi.check_model(model, config_of(model, **document))


@pytest.mark.parametrize(("given", "limit"), [("90", 81.0), (None, 540.0)])
def test_a_step_is_hung_before_the_neuron_runtime_gives_it_up(
    given: str | None, limit: float, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if given is None:
        monkeypatch.delenv("NEURON_RT_EXEC_TIMEOUT", raising=False)
    else:
        monkeypatch.setenv("NEURON_RT_EXEC_TIMEOUT", given)
    config = config_of(model)
    with library_of():
        backend = nxdi.load_backend(model, config, quiet, compiled(config, model, tmp_path / "artifact"))
        assert backend.limits.max_step_seconds == limit
        backend.close()


def test_versions_name_the_sdk_the_compiler_and_the_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (driver := tmp_path / DRIVER_VERSION).parent.mkdir(parents=True)
    driver.write_text("2.25.4.0\n")
    found = {"neuronx-distributed-inference": "0.8.16251", "neuronx-cc": "2.23.6484"}

    def version(name: str) -> str:
        if name not in found:
            raise metadata.PackageNotFoundError(name)
        return found[name]

    monkeypatch.setattr(metadata, "version", version)
    assert library.versions(tmp_path) == {"neuron-sdk": "2.28", **found, "driver": "2.25.4.0"}


def test_our_own_errors_are_not_reclassified() -> None:
    error = InvalidConfig("$.dtype", "NRT_TIMEOUT")
    assert classified(error) is error


def test_the_log_names_the_neuron_sdk() -> None:
    assert library.sdk_of("0.9.17334+abc") == "2.29"
    assert library.sdk_of("0.10.18399") == "2.31"
    assert library.sdk_of("") == ""


def test_steps_report_the_memory_of_a_core_as_the_runtime_does(model: Path, tmp_path: Path) -> None:
    config = config_of(model)
    with library_of() as fake:
        if fake is not None:
            assert device_memory() is None, "no library has registered its class"
        artifact = compiled(config, model, tmp_path / "artifact")
        assert device_memory() is None, "nothing is loaded"
        backend = nxdi.load_backend(model, config, quiet, artifact)
        backend.warm_up(quiet)
        engine = Engine(backend)
        engine.add(Request("0", (5, 9, 13), Sampling(temperature=0.0, max_tokens=4)))
        asked = 0
        while engine.has_work:
            engine.step()
            asked += engine.stats.device_memory is not None
        backend.close()
        found = engine.stats.device_memory
        if found is None and installed():
            pytest.skip("NxD Inference's Python alone, on a CPU, has no Neuron runtime that knows its memory")
        assert found is not None
        assert asked >= 3, "it stays between two answers"
        assert found.used_bytes > sum(path.stat().st_size for path in model.glob("*.safetensors"))
        assert found == device_memory()
        if fake is not None:
            fake.SETTINGS.memory_bytes = 1
            assert device_memory() is None, "what the runtime cannot tell is negative"


@pytest.mark.parametrize(
    "answer", [(1, 2, 3), ("many", 1), None, OSError("sysfs"), TypeError("no such overload")], ids=str
)
def test_a_figure_that_a_version_tells_otherwise_is_unknown(answer: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is for monitoring: no load ends for it."""

    class Runtime:
        def get_vnc_memory_stats(self) -> object:
            if isinstance(answer, Exception):
                raise answer
            return answer

    monkeypatch.setattr(torch, "classes", SimpleNamespace(neuron=SimpleNamespace(Runtime=Runtime)))
    assert device_memory() is None


# Folders that others compiled


def others(model: Path, folder: Path, **fields: Any) -> Path:
    """A folder that a script made with NxD Inference alone."""
    from neuronx_distributed_inference.utils.constants import MODEL_TYPES
    from neuronx_distributed_inference.utils.hf_adapter import load_pretrained_config

    cls = MODEL_TYPES["llama"]["causal-lm"]
    given = {
        "tp_degree": 1,
        "batch_size": 2,
        "ctx_batch_size": 1,
        "is_continuous_batching": True,
        "seq_len": 512,
        "max_context_length": 256,
        "torch_dtype": "float32",
        "enable_bucketing": True,
        "on_device_sampling_config": {"dynamic": True, "global_topk": 64},
        **fields,
    }
    neuron_config = cls.get_neuron_config_cls()(**given)
    config = cls.get_config_cls()(neuron_config, load_config=load_pretrained_config(str(model)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BASE_COMPILE_WORK_DIR", f"{folder.parent / 'work'}/")
        cls(str(model), config).compile(str(folder))
    return folder


def open_config(model: Path, **document: Any) -> RuntimeConfig:
    return config_of(model, **{"limits": {}, "dtype": "auto", **document})


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"enable_bucketing": False, "on_device_sampling_config": None},
        {"is_block_kv_layout": True, "is_prefix_caching": True, "pa_num_blocks": 40, "pa_block_size": 32},
        {"save_sharded_checkpoint": True, "context_encoding_buckets": [128, 256]},
    ],
)
def test_a_folder_that_others_compiled_decides_what_the_configuration_leaves_open(
    fields: dict[str, Any], model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with library_of():
        folder = others(model, tmp_path / "theirs", **fields)
        monkeypatch.setenv(ARTIFACT_VARIABLE, str(folder))
        config = open_config(model)
        artifact = provide(config, model, places(tmp_path), lambda stage, share: None)
        assert artifact == folder
        assert generated(model, config, artifact) == expected(model)


def places(folder: Path) -> LocalSettings:
    return LocalSettings(folder / "weights", folder / "artifacts", on_artifact_miss="fail")


@pytest.mark.parametrize(
    ("fields", "document", "message"),
    [
        ({}, {"limits": {"maxSequences": 4}}, "batch_size: is 2, but limits.maxSequences is 4"),
        ({"tp_degree": 2}, {}, "needs 2 NeuronCores"),
        ({"allow_input_truncation": True}, {}, "allow_input_truncation: is True"),
        ({"ctx_batch_size": 2, "is_continuous_batching": False}, {}, "ctx_batch_size: is 2"),
        ({"on_device_sampling_config": {"dynamic": False}}, {}, "dynamic: must be true"),
        (
            {
                "is_block_kv_layout": True,
                "is_prefix_caching": True,
                "pa_num_blocks": 40,
                "pa_block_size": 32,
                "context_encoding_buckets": [128, 256],
                "prefix_buckets": [],
            },
            {},
            "prefix_buckets: [] instead of [",
        ),
    ],
)
def test_a_folder_that_others_compiled_for_something_else_is_refused(
    fields: dict[str, Any], document: dict[str, Any], message: str, model: Path, tmp_path: Path
) -> None:
    with library_of(), pytest.MonkeyPatch.context() as patch:
        patch.setenv(ARTIFACT_VARIABLE, str(others(model, tmp_path / "theirs", **fields)))
        with pytest.raises(FatalError) as caught:
            provide(open_config(model, **document), model, places(tmp_path), lambda stage, share: None)
    assert caught.value.exit_code == ExitCode.ARTIFACT_MISSING
    assert message in str(caught.value)


def test_a_folder_of_another_model_is_refused(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wider = random_model(tmp_path / "wider", intermediate_size=read_config(model)["intermediate_size"] * 2)
    with library_of():
        monkeypatch.setenv(ARTIFACT_VARIABLE, str(others(model, tmp_path / "theirs")))
        with pytest.raises(FatalError, match=r"intermediate_size: \d+ instead of \d+"):
            provide(open_config(wider), wider, places(tmp_path), lambda stage, share: None)


def test_a_folder_beside_the_model_is_found(tmp_path: Path) -> None:
    model = random_model(tmp_path / "llama")
    with library_of():
        folder = others(model, model / "neuron-compiled-artifacts" / "0123")
        assert provide(open_config(model), model, places(tmp_path), lambda stage, share: None) == folder
        with pytest.raises(FatalError, match="has no artifact"):
            provide(open_config(model, limits={"maxSequences": 9}), model, places(tmp_path), lambda stage, share: None)


def test_graphs_of_a_hub_repository_are_loaded_if_they_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model, shelf = random_model(tmp_path / "hub" / "acme" / "llama" / "main"), Shelf(tmp_path / "hub")
    (model / "tokenizer.json").write_text("{}")

    def served(**document: Any) -> tuple[RuntimeConfig, Path, Path]:
        config = msgspec.structs.replace(open_config(model, **document), model=ModelSource(uri="hf://acme/llama"))
        check_artifact(config, places(tmp_path), quiet)
        folder = materialize(config.model, tmp_path / "weights", quiet)
        return config, folder, provide(config, folder, places(tmp_path), quiet)

    with library_of(), serving(shelf) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub)
        compiled_by_others = others(model, tmp_path / "theirs")
        for name in ("model.pt", "neuron_config.json"):
            shutil.copy(compiled_by_others / name, model / name)
        config, folder, artifact = served()
        assert artifact == folder != model
        assert generated(folder, config, artifact) == expected(model)
        capsys.readouterr()
        with pytest.raises(FatalError, match="has no artifact") as caught:
            served(limits={"maxSequences": 9})
        assert caught.value.exit_code == ExitCode.ARTIFACT_MISSING
        assert "batch_size: is 2, but limits.maxSequences is 9" in capsys.readouterr().err
        (model / "neuron_config.json").write_text('{"batch_size": 2, "sequence_length": 512}')
        with pytest.raises(FatalError, match="has no artifact"):
            served()
        assert "is no configuration of NxD Inference with a `neuron_config`" in capsys.readouterr().err


# Models with no other weights than those of compiled graphs


@pytest.fixture(scope="module")
def sharded(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with graphs, their weights, config.json and a tokenizer."""
    with library_of():
        folder = others(model, tmp_path_factory.mktemp("sharded") / "theirs", save_sharded_checkpoint=True)
    shutil.copy(model / "config.json", folder / "config.json")
    (folder / "tokenizer.json").write_text("{}")
    return folder


def provided(config: RuntimeConfig, folder: Path) -> tuple[Path, Path]:
    """The model's folder and that of its graphs, as `serve` finds them."""
    weights = folder / "weights"
    check_artifact(config, places(folder), quiet)
    needed = nxdi.needs_weights(config)
    model_dir = materialize(config.model, weights, quiet, with_weights=needed, check=check_tokenizer)
    return model_dir, provide(config, model_dir, places(folder), quiet)


def test_a_model_with_no_other_weights_than_those_of_its_graphs_is_loaded(
    sharded: Path, model: Path, tmp_path: Path
) -> None:
    config = open_config(sharded)
    with library_of():
        folder, artifact = provided(config, tmp_path)
        assert folder == artifact == sharded
        assert generated(folder, config, artifact) == expected(model)
        # Settings that say what the graphs are.
        same = config_of(sharded, limits={"maxSequences": 2, "maxModelLength": 512})
        assert generated(folder, same, provided(same, tmp_path)[1]) == expected(model)
        more = open_config(sharded, limits={"maxSequences": 9})
        with pytest.raises(FatalError, match=r"batch_size: is 2, but .* is 9.* add the model's own weights") as caught:
            provided(more, tmp_path)
    assert caught.value.exit_code == ExitCode.ARTIFACT_MISSING
    facts = inspect_model(sharded.as_uri(), "nxdi")
    assert (facts.architecture, facts.digest) == ("LlamaForCausalLM", read_checkpoint(sharded).digest)
    with pytest.raises(InvalidModel, match=r"serve it with the backend nxdi, or add model.safetensors"):
        read_whole_checkpoint(sharded)


def test_a_repository_with_no_other_weights_than_those_of_its_graphs_is_fetched_and_loaded(
    sharded: Path, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(sharded, tmp_path / "hub" / "acme" / "llama" / "main")
    config = msgspec.structs.replace(open_config(sharded), model=ModelSource(uri="hf://acme/llama"))
    with library_of(), serving(Shelf(tmp_path / "hub")) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub)
        folder, artifact = provided(config, tmp_path)
        assert artifact == folder
        assert generated(folder, config, artifact) == expected(model)
        assert inspect_model("hf://acme/llama", "nxdi").parameters > 0


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        ("model.pt", "its graphs of NxD Inference lack model.pt: add it, or model.safetensors"),
        ("neuron_config.json", "its graphs of NxD Inference lack neuron_config.json"),
        ("weights/tp0_sharded_checkpoint.safetensors", "lack weights/tp0_sharded_checkpoint.safetensors"),
        ("config.json", "config.json is missing"),
        ("tokenizer.json", "tokenizer is missing"),
    ],
)
def test_a_file_that_such_a_model_lacks_is_named(
    missing: str, message: str, sharded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = shutil.copytree(sharded, tmp_path / "hub" / "acme" / "llama" / "main")
    (model / missing).unlink()
    with serving(Shelf(tmp_path / "hub")) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub)
        for uri in (model.as_uri(), "hf://acme/llama"):
            with pytest.raises(FatalError, match=message) as caught:
                materialize(ModelSource(uri=uri), tmp_path / "weights", quiet, check=check_tokenizer)
            assert caught.value.exit_code == ExitCode.INVALID_MODEL


def test_with_a_named_folder_that_has_weights_the_model_needs_none(
    sharded: Path, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (small := tmp_path / "small").mkdir()
    for name in ("config.json", "tokenizer.json"):
        shutil.copy(sharded / name, small / name)
    config = open_config(small)
    assert nxdi.needs_weights(config)
    monkeypatch.setenv(ARTIFACT_VARIABLE, str(sharded))
    with library_of():
        folder, artifact = provided(config, tmp_path)
        assert (folder, artifact) == (small, sharded)
        assert generated(folder, config, artifact) == expected(model)


def quiet(stage: str, share: float) -> None:
    pass


def with_tensors(model: Path, folder: Path, *names: str) -> Path:
    """A copy of a model whose checkpoint has more tensors."""
    shutil.copytree(model, folder)
    save_file(
        load_file(model / "model.safetensors") | {name: torch.ones(8) for name in names}, folder / "model.safetensors"
    )
    return folder


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.self_attn.q_proj.bias",
        "model.layers.1.self_attn.o_proj.bias",
        "model.layers.0.self_attn.q_norm.weight",
        "model.layers.9.input_layernorm.weight",
        "extra.weight",
    ],
)
@pytest.mark.parametrize("where", ["at load", "where the artifact has the weights"])
def test_a_weight_that_no_module_reads_ends_the_load(model: Path, tmp_path: Path, name: str, where: str) -> None:
    strange = with_tensors(model, tmp_path / "model", name, "model.rotary_emb.inv_freq")
    sharded = {"overrideNeuronConfig": {"save_sharded_checkpoint": True}}
    config = config_of(strange, **({} if where == "at load" else sharded))
    with library_of(), pytest.raises(InvalidModel) as caught:
        generated(strange, config, compiled(config, strange, tmp_path / "artifact"))
    assert f"NxD Inference does not read the tensors {name}, so" in str(caught.value)


def test_a_weight_that_the_configuration_names_may_stay_unread(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    strange = with_tensors(model, tmp_path / "model", "model.layers.0.self_attn.q_norm.weight", "extra.weight")
    with library_of():
        artifact = compiled(config_of(strange), strange, tmp_path / "artifact")
        with pytest.raises(InvalidModel, match=r"does not read the tensors extra\.weight, so"):
            generated(strange, named_unread(strange, "*.q_norm.weight"), artifact)
        assert generated(strange, named_unread(strange, "*.q_norm.weight", "extra.*"), artifact) == expected(model)
    assert "does not read extra.weight, model.layers.0.self_attn.q_norm.weight" in capsys.readouterr().err
    with library_of(), pytest.raises(InvalidConfig, match=r"unread_weights: must be a list of names of tensors"):
        nxdi.check_config(config_of(strange, overrideNeuronConfig={"unread_weights": "extra"}))


def named_unread(model: Path, *names: str) -> RuntimeConfig:
    return config_of(model, overrideNeuronConfig={"unread_weights": list(names)})


def test_buffers_that_no_module_reads_are_left_out(model: Path, tmp_path: Path) -> None:
    names = ("model.rotary_emb.inv_freq", "model.layers.0.self_attn.rotary_emb.inv_freq", "vision_tower.a.weight")
    with library_of():
        more = with_tensors(model, tmp_path / "model", *names)
        config = config_of(more)
        assert generated(more, config, compiled(config, more, tmp_path / "artifact")) == expected(model)
