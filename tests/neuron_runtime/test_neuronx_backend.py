"""The transformers-neuronx backend, on a fake that refuses or imitates what the library answers wrongly.

Tokens are compared with those of transformers.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from helpers.nxdi import Mode
from helpers.nxdi_engine import Model, serve_checked
from helpers.transformers_neuronx import fake_library
from neuron_runtime.artifacts.key import covered, differences
from neuron_runtime.backend import transformers_neuronx
from neuron_runtime.backend.neuron.device import DeviceBackend
from neuron_runtime.backend.neuron.devices import PLATFORMS, Target
from neuron_runtime.backend.transformers_neuronx import library
from neuron_runtime.backend.transformers_neuronx.settings import settings_of
from neuron_runtime.backend_protocol import IllegalBatch, Rank
from neuron_runtime.config import RuntimeConfig, parse_config
from neuron_runtime.core import KNOWN, NO_TOKEN, Added, Batch, Request, Rows, Sampling
from neuron_runtime.engine.loop import Engine
from neuron_runtime.errors import ExitCode, FatalError, InvalidConfig

TARGET = Target(PLATFORMS["inf2"], 1, 4)

SMALL: dict[str, Any] = {
    "limits": {"maxSequences": 4, "maxModelLength": 256, "maxStepTokens": 128},
    "buckets": {"context": [32, 64, 128], "tokenGeneration": [64, 128, 256]},
}
SHARDED = {
    "limits": SMALL["limits"],
    "buckets": {"context": [32, 64, 128]},
    "parallelism": {"tensor": 4},
    "overrideNeuronConfig": {"shard_over_sequence": True},
}
MODES: dict[str, dict[str, Any]] = {
    "device": SMALL,
    "host": {**SMALL, "sampling": "Host"},
    "one line": {**SMALL, "limits": {**SMALL["limits"], "maxSequences": 1}},
    "sharded over sequence": SHARDED,
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Model]:
    return {family: Model(tmp_path_factory.mktemp("model") / "model", family) for family in ("Llama", "Mistral")}


@pytest.fixture(scope="module")
def llama(models: dict[str, Model]) -> Model:
    return models["Llama"]


@pytest.fixture(autouse=True)
def _cores(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("NEURON_RT_NUM_CORES", "4")
    monkeypatch.setenv("NEURON_COMPILE_CACHE_URL", str(tmp_path / "cache"))


def config_of(**document: Any) -> RuntimeConfig:
    base = {"version": 1, "model": {"uri": "file:///m"}, "servedNames": ["m"], "backend": "transformers-neuronx"}
    tensor = {"parallelism": {"tensor": 1}}
    return parse_config(msgspec.json.encode({**base, "dtype": "float32", **tensor, **document}))


def compiled(config: RuntimeConfig, model: Path, folder: Path) -> Path:
    compiler = transformers_neuronx.compiler(config, model)
    folder.mkdir(exist_ok=True)
    for graph in compiler.graphs():
        graph.compile(folder)
    compiler.check(folder)
    return folder


def loaded(config: RuntimeConfig, model: Path, folder: Path) -> DeviceBackend:
    backend = transformers_neuronx.load_backend(
        model, config, lambda stage, share: None, compiled(config, model, folder)
    )
    assert isinstance(backend, DeviceBackend)
    return backend


# Tokens


@pytest.mark.parametrize("harm", ["strict", "damage"])
@pytest.mark.parametrize("mode", MODES)
def test_tokens_equal_those_of_transformers_in_every_mode(llama: Model, tmp_path: Path, mode: str, harm: Mode) -> None:
    with fake_library(harm):
        _, graphs = serve_checked(llama, loaded(config_of(**MODES[mode]), llama.folder, tmp_path / "artifact"), seed=1)
    assert len(graphs) > 3


def test_tokens_equal_those_of_transformers_for_mistral(models: dict[str, Model], tmp_path: Path) -> None:
    model = models["Mistral"]
    with fake_library():
        serve_checked(model, loaded(config_of(**SMALL), model.folder, tmp_path / "artifact"), seed=3)


def answers(backend: DeviceBackend, *requests: Request) -> dict[str, list[int]]:
    engine = Engine(backend)
    found: dict[str, list[int]] = {one.request_id: [] for one in requests}
    for one in requests:
        engine.add(one)
    while engine.has_work:
        for event in engine.step():
            found[event.request_id] += event.token_ids
    backend.close()
    return found


def test_int8_weights_are_those_that_the_library_makes(llama: Model, tmp_path: Path) -> None:
    request = Request("r", (5, 9, 13, 2, 8), Sampling(temperature=0.0, max_tokens=40))
    config = config_of(**SMALL, overrideNeuronConfig={"quant": {"quant_dtype": "s8"}})
    (rounded := tmp_path / "rounded").mkdir()
    (rounded / "config.json").write_bytes((llama.folder / "config.json").read_bytes())
    weights = load_file(llama.folder / "model.safetensors")
    for name, weight in weights.items():
        if "_proj" in name:
            scales = weight.abs().amax(1, keepdim=True) / 127
            weights[name] = (weight / scales).round() * scales
    save_file(weights, rounded / "model.safetensors", metadata={"format": "pt"})
    with fake_library():
        assert transformers_neuronx.compiler_reads_weights(config)
        of_int8 = answers(loaded(config, llama.folder, tmp_path / "int8"), request)
        of_rounded = answers(loaded(config_of(**SMALL), rounded, tmp_path / "whole"), request)
        of_whole = answers(loaded(config_of(**SMALL), llama.folder, tmp_path / "whole"), request)
    assert of_int8 == of_rounded != of_whole


def test_each_line_is_sampled_with_the_parameters_of_its_request(llama: Model, tmp_path: Path) -> None:
    greedy = Sampling(temperature=0.0, max_tokens=30)
    few = Sampling(temperature=50.0, top_k=2, max_tokens=30)
    all_of_them = Sampling(temperature=50.0, max_tokens=30)
    with fake_library():
        backend = loaded(config_of(**SMALL), llama.folder, tmp_path / "artifact")
        assert backend.limits.max_top_k == 256
        prompts = {"greedy": greedy, "few": few, "many": all_of_them, "again": greedy}
        requests = [Request(name, (7, 3, 21), sampling) for name, sampling in prompts.items()]
        found = answers(backend, *requests)
    assert found["greedy"] == found["again"] != found["few"]
    llama.check(requests[0], found["greedy"])
    logits = llama.logits((7, 3, 21, *found["few"]))[2:-1]
    best = logits.topk(2).indices.tolist()
    assert all(token in two for token, two in zip(found["few"], best, strict=True))
    assert len(set(found["many"])) > 15


# Calls


def prompts_of(step: int, *prompts: tuple[int, tuple[int, ...]]) -> Batch:
    greedy = Sampling(temperature=0.0)
    added = tuple(Added(slot, tokens, len(tokens), greedy, (slot,)) for slot, tokens in prompts)
    slots, count = tuple(slot for slot, _ in prompts), len(prompts)
    lengths = tuple(len(tokens) for _, tokens in prompts)
    rows = Rows(slots, (0,) * count, lengths, (NO_TOKEN,) * count, (KNOWN,) * count, (True,) * count)
    return Batch(step, rows, count, added=added)


def test_prompts_of_one_bucket_are_one_call_whose_runs_are_counted(llama: Model, tmp_path: Path) -> None:
    with fake_library() as fake:
        backend = loaded(config_of(**SMALL), llama.folder, tmp_path / "artifact")
        batch = prompts_of(0, (2, tuple(range(40))), (0, (5,)), (3, tuple(range(9))))
        backend.launch(batch)
        backend.sample(0, None)
        output = backend.collect(0)
        backend.close()
        assert fake.COUNTS.graphs == {"context-seqlen64-batch1": 1, "context-seqlen32-batch1": 2}
    assert [tuple(use) for use in output.graphs] == [
        ("prefill_64", 40, 64),
        ("prefill_32", 1, 32),
        ("prefill_32", 9, 32),
    ]
    for (_, tokens), (token,) in zip(((2, range(40)), (0, (5,)), (3, range(9))), output.token_ids, strict=True):
        llama.check(Request("r", tuple(tokens), Sampling()), [token])


def test_a_step_that_would_overwrite_a_line_is_refused(llama: Model, tmp_path: Path) -> None:
    with fake_library():
        backend = loaded(config_of(**SMALL), llama.folder, tmp_path / "artifact")
        backend.launch(prompts_of(0, (0, (5, 6)), (1, (7, 8))))
        backend.sample(0, None)
        backend.collect(0)
        with pytest.raises(IllegalBatch, match="step 1 would overwrite slot 1, which has no row"):
            backend.launch(Batch(1, Rows((0,), (2,), (1,), (3,), (KNOWN,), (True,))))
        backend.close()


# The fake


@pytest.fixture
def model_of_fake(llama: Model, tmp_path: Path) -> Iterator[Any]:
    from neuron_runtime.backend.transformers_neuronx import library

    with fake_library() as fake:
        settings = settings_of(config_of(**SMALL, sampling="Host"), llama.config, TARGET)
        library.compile_into(settings, llama.folder, tmp_path)
        yield library.load_from(settings, llama.folder, tmp_path), fake


def call(model: Any, ids: list[list[int]], positions: list[list[int]], lines: list[int]) -> torch.Tensor:
    result: torch.Tensor = model(torch.tensor(ids), torch.tensor(positions), torch.tensor(lines))
    return result


def test_the_fake_refuses_a_step_after_one_that_lacked_a_live_line(model_of_fake: tuple[Any, Any]) -> None:
    model, fake = model_of_fake
    call(model, [[5, 6, 7], [8, 9, 10]], [[0, 1, 2]] * 2, [0, 1])
    call(model, [[1]], [[3]], [0])
    with pytest.raises(fake.FakeRefusal, match="line 1 at position 3 attends what padded rows wrote"):
        call(model, [[1], [1]], [[4], [3]], [0, 1])


def test_the_fake_takes_a_prompt_of_one_column_for_a_step(model_of_fake: tuple[Any, Any]) -> None:
    model, fake = model_of_fake
    call(model, [[5, 6, 7]], [[0, 1, 2]], [0])
    call(model, [[9]], [[0]], [1])
    with pytest.raises(fake.FakeRefusal, match="its line was absent from a decode call"):
        call(model, [[1], [1]], [[3], [1]], [0, 1])


def test_the_fake_refuses_ids_and_positions_of_different_types(model_of_fake: tuple[Any, Any]) -> None:
    model, _ = model_of_fake
    call(model, [[5, 6, 7]], [[0, 1, 2]], [0])
    with pytest.raises(RuntimeError, match=r"scatter\(\)"):
        model(torch.tensor([[5]]), torch.tensor([[3]], dtype=torch.int32), torch.tensor([0]))


def test_the_fake_loses_tokens_at_the_end_of_a_smaller_bucket_if_lines_are_sharded(
    llama: Model, tmp_path: Path
) -> None:
    from dataclasses import replace

    from neuron_runtime.backend.transformers_neuronx import library

    with fake_library() as fake:
        settings = settings_of(config_of(**SHARDED, sampling="Host"), llama.config, TARGET)
        settings = replace(settings, token_buckets=(64, 256))
        library.compile_into(settings, llama.folder, tmp_path)
        model = library.load_from(settings, llama.folder, tmp_path)
        call(model, [list(range(62))], [list(range(62))], [0])
        call(model, [[1]], [[62]], [0])
        call(model, [[1]], [[63]], [0])
        with pytest.raises(fake.FakeRefusal, match="attends a token that the end of a bucket lost"):
            call(model, [[1]], [[64]], [0])


# Artifacts


def test_an_artifact_is_compiled_without_a_device_and_found_by_what_its_graphs_need(
    llama: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with fake_library() as fake:
        monkeypatch.setenv("NEURON_RT_NUM_CORES", "0")
        artifact = compiled(config_of(**SMALL), llama.folder, tmp_path / "artifact")
        assert not fake.device.DEVICE.world_size, "no core was taken"
        assert len(list(artifact.glob("*.neff"))) == fake.COUNTS.compiled == 6
        needs = [
            covered("b", "m", transformers_neuronx.compiler(config_of(**document), llama.folder).needs)
            for document in (
                SMALL,
                {**SMALL, "overrideNeuronConfig": {"compilation_worker_count": 2}},
                {**SMALL, "overrideNeuronConfig": {"quant": {}}},
                {**SMALL, "sampling": "Host"},
            )
        ]
        monkeypatch.setenv("NEURON_CC_FLAGS", "-O1")
        flags = covered("b", "m", transformers_neuronx.compiler(config_of(**SMALL), llama.folder).needs)
    assert needs[0] == needs[1]
    assert differences(needs[0], flags) == ['settings.compilerFlags: "-O1" instead of nothing']
    assert differences(needs[0], needs[2]) == [
        'settings.neuronConfig.quant: {"dequant_dtype":"f32","quant_dtype":"s8"} instead of nothing'
    ]
    assert differences(needs[0], needs[3]) == ["settings.globalTopK: 0 instead of 256"]


def test_graphs_that_the_library_saved_itself_are_loaded_if_they_fit(llama: Model, tmp_path: Path) -> None:
    config = config_of(**SMALL)
    with fake_library():
        artifact = compiled(config, llama.folder, tmp_path / "artifact")
        assert transformers_neuronx.compiler(config, llama.folder).ready_made(artifact) == artifact
        assert transformers_neuronx.compiler(config, llama.folder).ready_made(tmp_path) is None
        other = config_of(**{**SMALL, "sampling": "Host"})
        with pytest.raises(FatalError, match="lacks a graph of these settings: compile the model again") as caught:
            transformers_neuronx.load_backend(llama.folder, other, lambda stage, share: None, artifact)
    assert caught.value.exit_code == ExitCode.ARTIFACT_MISSING


def test_loading_says_that_support_has_ended_and_names_the_successor(
    llama: Model, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with fake_library():
        loaded(config_of(**SMALL), llama.folder, tmp_path / "artifact").close()
    assert (
        "support of transformers-neuronx ended with Neuron SDK 2.26: its successor is the backend nxdi or optimum"
        in (capsys.readouterr().err)
    )


# Refusals


@pytest.mark.parametrize(
    ("document", "path", "says"),
    [
        ({"layout": "blocks"}, "layout", "has no blocks"),
        ({"limits": {"blockSize": 16}}, "limits.blockSize", "has no blocks"),
        ({"prefixCaching": "enabled"}, "prefixCaching", "has no prefix caching: leave it out, or use nxdi"),
        ({"chunkedPrefill": "enabled"}, "chunkedPrefill", "computes a prompt in one call"),
        ({"buckets": {"prefix": [8]}}, "buckets.prefix", "no prefix caching"),
        ({"buckets": {"sequences": [2]}}, "buckets.sequences", "decodes all lines"),
        ({"asyncMode": True}, "asyncMode", "has no such mode"),
        ({"kvCacheDtype": "fp8"}, "kvCacheDtype", "quantizes it by overrideNeuronConfig.kv_cache_quant alone"),
        ({"sampling": "DeviceWithLogits"}, "sampling", "use Device, or Host"),
        ({"applicationClass": "llama"}, "applicationClass", "by the architecture"),
        ({"buckets": {"context": [1, 8]}}, "buckets.context", "the least is 2"),
        ({"buckets": {"context": [512]}}, "buckets.context", "above the model's length of 256"),
        ({"buckets": {"tokenGeneration": [512]}}, "buckets.tokenGeneration", "above the model's length"),
        ({"limits": {"maxModelLength": 4096}}, "limits.maxModelLength", "the model's 512 positions"),
        (
            {"limits": {"maxStepTokens": 16}, "buckets": {"context": [32]}},
            "limits.maxStepTokens",
            "the largest context bucket is 32",
        ),
        *(
            ({"overrideNeuronConfig": {key: value}}, f"overrideNeuronConfig.{key}", says)
            for key, value, says in (
                ("fuse_mlp", True, "needs mlp_out_weight_transpose"),
                ("fuseMlp", True, "needs mlp_out_weight_transpose"),
                ("quants", {}, "did you mean `quant`?"),
                ("fuse_qkv", 1, "must be true or false"),
                ("quant", {"quant_dtype": "s4"}, "must be one of s8, f8e4m3fn"),
                ("quant", {"dtype": "s8"}, "did you mean `quant_dtype`?"),
                ("quant", {"quantize_method": "direct_cast"}, "must be vector_dynamic"),
                ("has_pre_attention_norm", False, "have this norm"),
                ("cache_layout", "BSH", "paged attention is not supported"),
                ("continuous_batching", {"max_num_seqs": 4}, "set that instead"),
                ("is_eagle_draft", True, "speculative decoding is not supported"),
                ("on_device_generation", {"global_top_k": 64}, "is 256 here"),
                ("shard_over_sequence", True, "must be a multiple of the model's 2 heads"),
            )
        ),
    ],
)
def test_what_the_library_cannot_do_is_refused_by_name(
    llama: Model, document: dict[str, Any], path: str, says: str
) -> None:
    document = {**document, "limits": {"maxModelLength": 256, **document.get("limits", {})}}
    with pytest.raises(InvalidConfig) as caught:
        settings_of(config_of(**document), llama.config, TARGET)
    ((at, message),) = caught.value.parts
    assert at.startswith(f"$.{path}")
    assert says in message


def test_an_angle_that_transformers_did_not_find_in_the_file_is_read_from_it(
    llama: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(llama.folder, folder)
    changed = {name: value for name, value in llama.config.items() if not name.startswith("rope")}
    changed["rope_parameters"] = {"rope_theta": 500.0, "rope_type": "default"}
    (folder / "config.json").write_text(json.dumps(changed))

    def read(path: str) -> SimpleNamespace:
        """As transformers 4, which does not know rope_parameters."""
        return SimpleNamespace(**{"rope_theta": 10000.0, "rope_scaling": None, **changed})

    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", read)
    with fake_library():
        made = library.model_of(settings_of(config_of(**SMALL), changed, TARGET), folder)
    assert made.config.rope_theta == 500.0


def test_sharded_lines_have_one_decode_size(llama: Model) -> None:
    with pytest.raises(InvalidConfig, match="must be 256 alone: with shard_over_sequence, tokens would be lost"):
        settings_of(config_of(**{**SHARDED, "buckets": SMALL["buckets"]}), llama.config, TARGET)


@pytest.mark.parametrize(
    ("family", "changes", "says"),
    [
        ("Llama", {"architectures": ["Qwen2ForCausalLM"]}, "runs LlamaForCausalLM, MistralForCausalLM"),
        ("Llama", {"attention_bias": True}, "does not compute attention_bias True"),
        ("Llama", {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "does not compute rope_scaling 'yarn'"),
        ("Mistral", {"rope_scaling": {"rope_type": "llama3", "factor": 2.0}}, "does not compute rope_scaling"),
        ("Mistral", {"head_dim": 32}, "does not compute head_dim 32"),
        ("Llama", {"quantization_config": {"quant_method": "awq"}}, "quantization_config 'awq'"),
    ],
)
def test_models_that_the_library_would_compute_wrongly_are_refused(
    models: dict[str, Model], family: str, changes: dict[str, Any], says: str
) -> None:
    with pytest.raises(FatalError, match=says) as caught:
        settings_of(config_of(), {**models[family].config, **changes}, TARGET)
    assert caught.value.exit_code == ExitCode.UNSUPPORTED_ARCHITECTURE


def test_other_devices_and_several_nodes_are_refused(llama: Model, tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match="compiles for inf2 and trn1, not for trn2: use the backend nxdi"):
        settings_of(config_of(), llama.config, Target(PLATFORMS["trn2"], 2, 1))
    with pytest.raises(InvalidConfig, match="runs on one node: use nxdi"):
        transformers_neuronx.load_backend(
            llama.folder, config_of(), lambda stage, share: None, tmp_path, rank=Rank(1, 2)
        )


def test_a_fused_mlp_with_its_transpose_is_served(llama: Model) -> None:
    override = {"mlpOutWeightTranspose": True, "fuse_mlp": True}
    config = config_of(limits={"maxModelLength": 256}, overrideNeuronConfig=override)
    settings = settings_of(config, llama.config, TARGET)
    assert settings.neuron_config["fuse_mlp"]
    assert settings.neuron_config["mlp_out_weight_transpose"]


def test_a_sliding_window_bounds_the_length_of_mistral(models: dict[str, Model]) -> None:
    config = {**models["Mistral"].config, "sliding_window": 64}
    assert settings_of(config_of(), config, TARGET).max_model_length == 64
    with pytest.raises(InvalidConfig, match="above the model's sliding window of 64 tokens"):
        settings_of(config_of(limits={"maxModelLength": 128}), config, TARGET)
    override = {"shard_over_sequence": True}
    with pytest.raises(InvalidConfig, match="its class for mistral does not have it"):
        settings_of(config_of(overrideNeuronConfig=override, parallelism={"tensor": 4}), config, TARGET)
