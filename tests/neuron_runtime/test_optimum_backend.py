"""The optimum backend, on a fake of optimum-neuron that refuses or imitates what the library answers wrongly.

Tokens are compared with those of transformers.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file

from helpers.nxdi import Mode
from helpers.nxdi_engine import Model, serve_checked
from helpers.optimum import RELEASES, fake_optimum
from neuron_runtime.artifacts.key import covered, differences
from neuron_runtime.backend import optimum
from neuron_runtime.backend.neuron.device import DeviceBackend
from neuron_runtime.backend_protocol import IllegalBatch, Rank
from neuron_runtime.checkpoint import GRAPHS_CONFIG_FILE, InvalidModel
from neuron_runtime.config import RuntimeConfig, parse_config
from neuron_runtime.core import KNOWN, NO_TOKEN, Added, Batch, Request, Rows, Sampling
from neuron_runtime.engine.loop import Engine
from neuron_runtime.errors import ExitCode, FatalError, InvalidConfig

SMALL: dict[str, Any] = {"limits": {"maxSequences": 4, "maxModelLength": 160}}
CHUNKS: dict[str, Any] = {"limits": {**SMALL["limits"], "maxStepTokens": 32}}
HOST = {"sampling": "Host"}
ONE_ROW: dict[str, Any] = {"limits": {**SMALL["limits"], "maxSequences": 1}}

FIRST, SECOND = (7, 8, 9, 3, 1), (200, 4)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Model]:
    return {family: Model(tmp_path_factory.mktemp("model") / "model", family) for family in ("Llama", "Qwen3")}


@pytest.fixture(scope="module")
def llama(models: dict[str, Model]) -> Model:
    return models["Llama"]


@pytest.fixture(autouse=True)
def _inferentia(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NEURON_RT_NUM_CORES", "4")
    monkeypatch.setenv("NEURON_PLATFORM_TARGET_OVERRIDE", "inf2")
    monkeypatch.setenv("FAKE_NXDI_PLATFORM", "inf2")
    monkeypatch.delenv("NEURON_LOGICAL_NC_CONFIG", raising=False)


def config_of(**document: Any) -> RuntimeConfig:
    base = {"version": 1, "model": {"uri": "file:///m"}, "servedNames": ["m"], "backend": "optimum"}
    common = {"dtype": "float32", "parallelism": {"tensor": 1}, **SMALL}
    return parse_config(msgspec.json.encode({**base, **common, **document}))


def compiled(config: RuntimeConfig, model: Path, folder: Path) -> Path:
    compiler = optimum.compiler(config, model)
    folder.mkdir(exist_ok=True)
    for unit in compiler.graphs():
        unit.compile(folder)
    compiler.check(folder)
    return folder


def loaded(config: RuntimeConfig, model: Path, artifact: Path) -> DeviceBackend:
    backend = optimum.load_backend(model, config, lambda stage, share: None, artifact)
    assert isinstance(backend, DeviceBackend)
    return backend


def built(config: RuntimeConfig, model: Path, folder: Path) -> DeviceBackend:
    return loaded(config, model, compiled(config, model, folder))


def greedy(backend: DeviceBackend, *prompts: tuple[int, ...], count: int = 6) -> list[list[int]]:
    engine = Engine(backend)
    for number, prompt in enumerate(prompts):
        engine.add(Request(str(number), prompt, Sampling(temperature=0.0, max_tokens=count)))
    outputs: dict[str, list[int]] = {str(number): [] for number in range(len(prompts))}
    while engine.has_work:
        for event in engine.step():
            outputs[event.request_id] += event.token_ids
    backend.close()
    return list(outputs.values())


def check_greedy(model: Model, backend: DeviceBackend) -> None:
    for prompt, output in zip((FIRST, SECOND), greedy(backend, FIRST, SECOND), strict=True):
        model.check(Request("", prompt), output)


# Tokens


@pytest.mark.parametrize("mode", ["strict", "damage"])
@pytest.mark.parametrize(
    ("release", "document"),
    [("0.4.5", SMALL), ("sdk2.31", CHUNKS), ("sdk2.31", {**CHUNKS, **HOST})],
    ids=["whole prompts", "chunks", "chunks, sampled on the host"],
)
def test_tokens_are_those_of_transformers_under_random_loads(
    release: str, document: dict[str, Any], mode: Mode, llama: Model, tmp_path: Path
) -> None:
    with fake_optimum(release, mode):
        _stats, graphs = serve_checked(llama, built(config_of(**document), llama.folder, tmp_path / "artifact"), seed=1)
    chunked = document != SMALL
    assert {*graphs} == {"decode_4x160", "prefill_32" if chunked else "prefill_160"}


@pytest.mark.parametrize(("release", "document"), [("0.4.5", {**ONE_ROW, **HOST}), ("sdk2.31", ONE_ROW)])
def test_a_model_of_one_row_is_compiled_without_continuous_batching(
    release: str, document: dict[str, Any], models: dict[str, Model], tmp_path: Path
) -> None:
    with fake_optimum(release):
        model = models["Qwen3"]
        check_greedy(model, built(config_of(**document), model.folder, tmp_path / "artifact"))
        exported = json.loads((tmp_path / "artifact" / GRAPHS_CONFIG_FILE).read_text())
    assert exported["continuous_batching"] is False


@pytest.mark.parametrize("mode", ["strict", "damage"])
@pytest.mark.parametrize("release", RELEASES)
def test_a_sequence_that_skips_steps_keeps_its_tokens(release: str, mode: Mode, llama: Model, tmp_path: Path) -> None:
    document = CHUNKS if release == "sdk2.31" else SMALL
    with fake_optimum(release, mode):
        backend = built(config_of(**document), llama.folder, tmp_path / "artifact")
        first = run(backend, prompt(0, 0, FIRST))
        second = run(backend, prompt(1, 3, SECOND))
        outputs = {0: [first], 3: [second]}
        lengths = {0: len(FIRST), 3: len(SECOND)}
        for step, slot in enumerate((0, 0, 3, 0, 3, 3), start=2):
            token = run(backend, decode(step, slot, lengths[slot], outputs[slot][-1]))
            outputs[slot].append(token)
            lengths[slot] += 1
        backend.close()
    llama.check(Request("first", FIRST), outputs[0])
    llama.check(Request("second", SECOND), outputs[3])


def prompt(step: int, slot: int, tokens: tuple[int, ...]) -> Batch:
    added = Added(slot, tokens, len(tokens), Sampling(temperature=0.0), (slot,))
    return Batch(step, Rows((slot,), (0,), (len(tokens),), (NO_TOKEN,), (KNOWN,), (True,)), 1, added=(added,))


def decode(step: int, slot: int, position: int, token: int) -> Batch:
    return Batch(step, Rows((slot,), (position,), (1,), (token,), (KNOWN,), (True,)))


def run(backend: DeviceBackend, batch: Batch) -> int:
    backend.launch(batch)
    backend.sample(batch.step, None)
    ((token,),) = backend.collect(batch.step).token_ids
    return token


def test_a_prompt_that_is_too_long_for_a_call_is_refused(llama: Model, tmp_path: Path) -> None:
    with fake_optimum("sdk2.31"):
        backend = built(config_of(**CHUNKS), llama.folder, tmp_path / "artifact")
        with pytest.raises(IllegalBatch, match="more than 32 tokens"):
            backend.launch(prompt(0, 0, (1,) * 33))
        backend.close()


# The fake


def left_out(llama: Model, folder: Path) -> list[int]:
    """Tokens of a sequence in slot 0 that the decode calls of another one leave out."""
    backend = built(config_of(), llama.folder, folder)
    first, second = run(backend, prompt(0, 0, FIRST)), run(backend, prompt(1, 1, SECOND))
    model = backend._application._model  # type: ignore[attr-defined]
    for position in range(len(SECOND), len(FIRST)):
        # The library calls this row 0, and gives its token and position to all others.
        model(torch.tensor([[second]]), torch.tensor([[position]]), torch.tensor([1]), torch.ones(1, 3))
    third = run(backend, decode(2, 0, len(FIRST), first))
    backend.close()
    return [first, third]


def test_a_slot_that_a_call_leaves_out_is_refused_or_loses_its_keys_and_values(llama: Model, tmp_path: Path) -> None:
    with fake_optimum("0.4.5", "strict") as fake, pytest.raises(fake.FakeRefusal, match="1 rows of 4"):
        left_out(llama, tmp_path / "strict")
    with fake_optimum("0.4.5", "damage"):
        tokens = left_out(llama, tmp_path / "damage")
    with pytest.raises(AssertionError, match="token 1 of 2"):
        llama.check(Request("first", FIRST), tokens)


# Settings


@pytest.mark.parametrize(
    ("release", "document", "expected"),
    [
        ("0.4.5", {"limits": {"maxModelLength": 512}}, (16, 512, 0, "Device")),
        ("sdk2.31", {"limits": {"maxModelLength": 512}}, (16, 512, 0, "Device")),
        ("sdk2.31", {"limits": {"maxModelLength": 512, "maxStepTokens": 64}}, (16, 512, 64, "Device")),
        ("sdk2.31", {"chunkedPrefill": "enabled", "limits": {"maxModelLength": 512}}, (16, 512, 512, "Device")),
        ("sdk2.31", {"chunkedPrefill": "disabled", **HOST}, (4, 160, 0, "Host")),
    ],
)
def test_what_is_left_open_is_as_the_library_chooses(
    release: str, document: dict[str, Any], expected: tuple[Any, ...], llama: Model
) -> None:
    with fake_optimum(release):
        needs = optimum.compiler(config_of(**document), llama.folder).needs
    shapes = needs.shapes
    assert (shapes["rows"], shapes["length"], shapes["chunk"], needs.settings["sampling"]) == expected
    assert needs.target == {"platform": "trn1", "tensor": 1}
    assert needs.libraries["optimum-neuron"] == {"0.4.5": "0.4.5", "sdk2.31": "0.4.7.dev0"}[release]


def test_on_two_cores_rows_of_qwen_are_sampled_on_the_host(models: dict[str, Model]) -> None:
    two = {"parallelism": {"tensor": 2}}
    with fake_optimum():
        assert optimum.compiler(config_of(**two), models["Qwen3"].folder).needs.settings["sampling"] == "Host"
        with pytest.raises(InvalidConfig, match=r"\$\.sampling: Device: .*qwen3 on two cores would be garbage"):
            optimum.compiler(config_of(**two, sampling="Device"), models["Qwen3"].folder)


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ({"layout": "blocks"}, r"\$\.layout: the optimum backend has no blocks"),
        ({"prefixCaching": "enabled"}, r"\$\.layout: the optimum backend has no blocks"),
        ({"buckets": {"context": [64]}}, r"\$\.buckets\.context: the optimum backend has no such setting"),
        ({"asyncMode": True}, r"\$\.asyncMode: the optimum backend has no such setting"),
        ({"sampling": "DeviceWithLogits"}, r"\$\.sampling: .* accepts only Device or Host"),
        ({"overrideNeuronConfig": {"batch_size": 2}}, r"batch_size: is decided by limits\.maxSequences"),
        ({"overrideNeuronConfig": {"max_topkk": 2}}, r"did you mean `max_topk`"),
        ({"overrideNeuronConfig": {"max_topk": "2"}}, r"max_topk: must be a whole number"),
    ],
)
def test_a_setting_that_it_does_not_have_is_refused_by_name(document: dict[str, Any], message: str) -> None:
    with fake_optimum(), pytest.raises(InvalidConfig, match=message):
        optimum.check_config(config_of(**document))


@pytest.mark.parametrize(
    ("document", "platform", "message"),
    [
        ({"chunkedPrefill": "enabled"}, "inf2", r"\$\.chunkedPrefill: the installed optimum-neuron computes whole"),
        (CHUNKS, "inf2", r"\$\.limits\.maxStepTokens: is 32, but a call computes a whole prompt of up to 160"),
        ({"limits": {"maxModelLength": 513}}, "inf2", r"\$\.limits\.maxModelLength: must be from 2 to .* 512"),
        ({}, "trn3", r"\$\.backend: optimum-neuron runs on inf2, trn1, trn2, not on trn3"),
        ({"accelerator": {"logicalNeuronCore": 1}}, "trn2", r"\$\.accelerator\.logicalNeuronCore"),
    ],
)
def test_a_setting_that_contradicts_the_model_or_the_machine_is_refused(
    document: dict[str, Any], platform: str, message: str, llama: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NEURON_PLATFORM_TARGET_OVERRIDE", platform)
    with fake_optimum("0.4.5"), pytest.raises(InvalidConfig, match=message):
        optimum.check_model(llama.folder, config_of(**document))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["MistralForCausalLM"]}, "names MistralForCausalLM; the optimum backend runs Granite"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "does not compute rope_scaling"),
        ({"attention_bias": True}, "does not compute attention_bias true"),
        ({"quantization_config": {"quant_method": "awq"}}, "the weights are awq"),
    ],
)
def test_a_model_whose_tokens_would_be_wrong_is_refused(
    changes: dict[str, Any], message: str, llama: Model, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**llama.config, **changes}))
    with fake_optimum(), pytest.raises(FatalError, match=message) as caught:
        optimum.check_model(tmp_path, config_of())
    assert caught.value.exit_code == ExitCode.UNSUPPORTED_ARCHITECTURE


def test_a_missing_library_is_named_with_the_image_that_has_it() -> None:
    with pytest.raises(InvalidConfig, match=r"\$\.backend: optimum needs optimum-neuron, .*image runtime-optimum"):
        optimum.check_config(config_of())


def test_a_class_that_the_release_does_not_have_is_named(llama: Model, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(llama.folder, model)
    changed = {**llama.config, "architectures": ["GraniteForCausalLM"], "model_type": "granite"}
    (model / "config.json").write_text(json.dumps(changed))
    with fake_optimum(), pytest.raises(FatalError, match=r"optimum-neuron 0\.4\.5 has no granite") as caught:
        compiled(config_of(), model, tmp_path / "artifact")
    assert caught.value.exit_code == ExitCode.UNSUPPORTED_ARCHITECTURE


def test_a_configuration_without_a_dtype_is_exported_with_the_one_that_is_computed(
    llama: Model, tmp_path: Path
) -> None:
    model = tmp_path / "model"
    shutil.copytree(llama.folder, model)
    kept = {name: value for name, value in llama.config.items() if name not in ("dtype", "torch_dtype")}
    (model / "config.json").write_text(json.dumps(kept))
    with fake_optimum():
        folder = compiled(config_of(dtype="auto"), model, tmp_path / "artifact")
    assert json.loads((folder / GRAPHS_CONFIG_FILE).read_text())["torch_dtype"] == "bfloat16"


def test_the_key_has_what_graphs_depend_on(llama: Model) -> None:
    def needs(release: str = "0.4.5", **document: Any) -> dict[str, Any]:
        with fake_optimum(release):
            compiler = optimum.compiler(config_of(**document), llama.folder)
            return covered("optimum", "digest", compiler.needs)

    base = needs()
    assert not differences(base, needs())
    for other in (
        needs("sdk2.31"),
        needs(**HOST),
        needs(dtype="bfloat16"),
        needs(parallelism={"tensor": 2}),
        needs(overrideNeuronConfig={"max_topk": 64}),
    ):
        assert differences(base, other)


# Artifacts


def test_each_graph_is_reported_once_it_is_compiled(llama: Model, tmp_path: Path) -> None:
    with fake_optimum() as fake:
        compiler = optimum.compiler(config_of(), llama.folder)
        (unit,) = compiler.graphs()
        (tmp_path / "artifact").mkdir()
        assert unit.parts == ("prefill", "decode")
        assert not unit.ready()
        unit.compile(tmp_path / "artifact")
        assert fake.COUNTS.compiled == 2
    assert {path.name for path in (tmp_path / "artifact").iterdir()} >= {"config.json", "model.pt", GRAPHS_CONFIG_FILE}
    assert not list((tmp_path / "artifact").glob("*.safetensors"))


def exported(model: Model, folder: Path, release: str = "0.4.5", **document: Any) -> Path:
    """A model's folder as one finds it on a hub: with the library's graphs and the weights."""
    with fake_optimum(release):
        compiled(config_of(**document), model.folder, folder)
    shutil.copy(model.folder / "model.safetensors", folder)
    return folder


OPEN: dict[str, Any] = {"dtype": "auto", "parallelism": {}, "limits": {}}


def test_a_repository_with_graphs_is_served_without_compiling_and_decides_what_is_open(
    llama: Model, tmp_path: Path
) -> None:
    folder = exported(llama, tmp_path / "hub", "sdk2.31", **CHUNKS, **HOST)
    # The model's own config.json has the architecture; the library saves one too.
    shutil.copy(llama.folder / "config.json", folder)
    with fake_optimum("sdk2.31") as fake:
        assert optimum.compiler(config_of(**OPEN), folder).ready_made(None) == folder
        backend = loaded(config_of(**OPEN), folder, folder)
        assert fake.COUNTS.compiled == 0
        limits = backend.limits
        assert (limits.max_rows, limits.max_model_length, limits.longest_prefill) == (4, 160, 32)
        assert limits.sampling == "Host"
        check_greedy(llama, backend)


def test_graphs_with_sharded_weights_need_no_others(
    llama: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = exported(llama, tmp_path / "hub")
    shards = folder / "checkpoint" / "weights"
    shards.mkdir(parents=True)
    tensors = load_file(folder / "model.safetensors")
    save_file(
        {name.removeprefix("model."): one for name, one in tensors.items()},
        shards / "tp0_sharded_checkpoint.safetensors",
    )
    (folder / "model.safetensors").unlink()
    outline = tmp_path / "outline"
    outline.mkdir()
    shutil.copy(llama.folder / "config.json", outline)
    monkeypatch.setenv("NEURON_COMPILED_ARTIFACTS", str(folder))
    with fake_optimum():
        assert not optimum.needs_weights(config_of())
        assert optimum.compiler(config_of(), outline).ready_made(folder) == folder
        check_greedy(llama, loaded(config_of(), outline, folder))


@pytest.mark.parametrize(
    ("release", "document", "message"),
    [
        ("0.4.5", {"limits": {"maxModelLength": 128}}, "sequence_length: 160 instead of 128"),
        ("0.4.5", {"parallelism": {"tensor": 2}}, "tp_degree: 1 instead of 2"),
        ("0.4.5", HOST, "on_device_sampling: true instead of false"),
        ("sdk2.31", {}, 'optimum_neuron_version: "0.4.5" instead of "0.4.7.dev0"'),
    ],
)
def test_graphs_that_were_exported_for_something_else_are_refused(
    release: str, document: dict[str, Any], message: str, llama: Model, tmp_path: Path
) -> None:
    folder = exported(llama, tmp_path / "hub")
    with fake_optimum(release), pytest.raises(FatalError, match="exported for something else") as caught:
        optimum.compiler(config_of(**document), llama.folder).ready_made(folder)
    assert message in str(caught.value)
    assert caught.value.exit_code == ExitCode.ARTIFACT_MISSING


def test_a_held_device_is_waited_for(llama: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("neuron_runtime.backend.neuron.failures.RETRY_SECONDS", 0.0)
    with fake_optimum() as fake:
        artifact = compiled(config_of(), llama.folder, tmp_path / "artifact")
        fake.SETTINGS.faults.held_loads = 1
        check_greedy(llama, loaded(config_of(), llama.folder, artifact))


def test_several_nodes_are_refused(llama: Model, tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match="one node only"):
        optimum.load_backend(llama.folder, config_of(), lambda stage, share: None, tmp_path, rank=Rank(size=2))


# Weights that no module reads


def with_tensors(model: Path, folder: Path, *names: str) -> Path:
    """A copy of a model whose checkpoint has more tensors."""
    shutil.copytree(model, folder)
    weights = load_file(model / "model.safetensors") | {name: torch.ones(8) for name in names}
    save_file(weights, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.self_attn.q_proj.bias",
        "model.layers.1.self_attn.o_proj.bias",
        "model.layers.0.self_attn.q_norm.weight",
        "extra.weight",
    ],
)
def test_a_weight_that_the_library_drops_ends_the_load(release: str, name: str, llama: Model, tmp_path: Path) -> None:
    strange = with_tensors(llama.folder, tmp_path / "model", name, "model.layers.0.self_attn.rotary_emb.inv_freq")
    with fake_optimum(release):
        artifact = compiled(config_of(), strange, tmp_path / "artifact")
        with pytest.raises(InvalidModel, match=rf"optimum-neuron does not read the tensors {re.escape(name)}, so"):
            loaded(config_of(), strange, artifact)
        allowed = config_of(overrideNeuronConfig={"unread_weights": [name.replace("0", "*")]})
        check_greedy(llama, loaded(allowed, strange, artifact))
        with pytest.raises(InvalidConfig, match=r"unread_weights: must be a list of names of tensors"):
            optimum.check_config(config_of(overrideNeuronConfig={"unread_weights": name}))
