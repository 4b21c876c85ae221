"""`inspect`: facts without weights, from a folder and from a hub, and messages for unusable models."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from helpers.hub import Shelf, serving
from helpers.quantized import FORMATS, quantize, say_beside
from helpers.tiny_model import TINY_CONFIG, write_tiny_model
from helpers.torch_models import MODELS, random_model
from neuron_runtime import record
from neuron_runtime.backend.neuron import devices
from neuron_runtime.backend.torch.architecture import decoder_config
from neuron_runtime.checkpoint import InvalidModel, TensorInfo, read_checkpoint, read_config
from neuron_runtime.commands.command_line import main
from neuron_runtime.config import ModelSource
from neuron_runtime.errors import ExitCode, FatalError, InvalidConfig
from neuron_runtime.inspection import facts_as_json, facts_as_text, inspect_model, model_facts
from neuron_runtime.record import ModelFacts
from neuron_runtime.weights.fetching import materialize

EMBEDDING_MODEL = Path(__file__).parents[2] / "examples" / "embedding-model"


@pytest.fixture
def shelf(tmp_path: Path) -> Shelf:
    return Shelf(tmp_path / "hub")


@pytest.fixture
def hub(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The hub of the environment."""
    shelf.root.mkdir()
    with serving(shelf) as endpoint:
        monkeypatch.setenv("HF_ENDPOINT", endpoint)
        yield


def facts_of_tiny(digest: str) -> ModelFacts:
    num_parameters = 2 * 64 * 32 + 32 + 2 * (2 * 32 * 32 + 2 * 16 * 32 + 3 * 48 * 32 + 2 * 32)
    return ModelFacts(
        architecture="LlamaForCausalLM",
        model_type="llama",
        parameters=num_parameters,
        weights_bytes=2 * num_parameters,
        dtype="float16",
        num_layers=2,
        hidden_size=32,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        vocabulary_size=64,
        max_position_embeddings=128,
        intermediate_size=48,
        digest=digest,
    )


@pytest.mark.parametrize("num_shards", [1, 3])
def test_a_folder_gives_facts_and_a_digest(tmp_path: Path, num_shards: int) -> None:
    folder = write_tiny_model(tmp_path / "model", num_shards=num_shards)
    assert inspect_model(f"file://{folder}") == facts_of_tiny(read_checkpoint(folder).digest)


@pytest.mark.parametrize("num_shards", [1, 3])
def test_a_hub_model_gives_the_same_facts_and_its_commit(shelf: Shelf, hub: None, num_shards: int) -> None:
    write_tiny_model(shelf.root / "acme/tiny/main", num_shards=num_shards)
    assert inspect_model("hf://acme/tiny") == facts_of_tiny(shelf.commit("acme/tiny"))


def test_a_pinned_commit_is_inspected_after_its_branch_moved(shelf: Shelf, hub: None) -> None:
    write_tiny_model(shelf.root / "acme/tiny/v1")
    write_tiny_model(shelf.root / "acme/tiny/main", num_hidden_layers=5)
    pinned = shelf.commit("acme/tiny", "v1")
    assert inspect_model("hf://acme/tiny@main", digest=pinned) == facts_of_tiny(pinned)


def test_a_hub_model_may_say_beside_its_configuration_how_it_is_quantized(
    shelf: Shelf, hub: None, tmp_path: Path
) -> None:
    folder = shelf.root / "acme/tiny/main"
    quantize(write_tiny_model(tmp_path / "plain"), folder, FORMATS["fp8 of ModelOpt"])
    (folder / "tokenizer.json").write_bytes((tmp_path / "plain/tokenizer.json").read_bytes())
    say_beside(folder)
    assert inspect_model("hf://acme/tiny", "nxdi").quantization == "modelopt: fp8 per tensor"
    copy = materialize(ModelSource(uri="hf://acme/tiny"), tmp_path / "store", lambda *_: None)
    assert read_config(copy)["quantization_config"]["quant_method"] == "modelopt"


def test_a_folder_with_another_digest_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_tiny_model(tmp_path / "model")
    digest = read_checkpoint(folder).digest
    assert main(["inspect", str(folder), "--digest", digest]) == 0
    assert main(["inspect", str(folder), "--digest", "ab" * 32]) == ExitCode.CHECKSUM_MISMATCH
    assert f"has digest {digest}, not {'ab' * 32}" in capsys.readouterr().err


def test_only_the_first_range_of_hub_weights_is_read(shelf: Shelf, hub: None) -> None:
    folder = write_tiny_model(shelf.root / "acme/wide/main", vocab_size=20_000)
    assert (folder / "model.safetensors").stat().st_size > 2_000_000
    inspect_model("hf://acme/wide")
    ranges = {asked.range for asked in shelf.asked if "/large/" in asked.path}
    assert ranges == {"bytes=0-199999"}


def test_a_header_longer_than_the_first_range_is_read_completely(
    shelf: Shelf, hub: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("neuron_runtime.weights.fetching.FIRST_HEADER_BYTES", 100)
    write_tiny_model(shelf.root / "acme/tiny/main")
    assert inspect_model("hf://acme/tiny") == facts_of_tiny(shelf.commit("acme/tiny"))


def test_the_facts_of_any_model_fit_into_a_record(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "model")
    facts = inspect_model(f"file://{folder}")
    raw = record.encode(record.success("inspect", facts))
    assert len(raw) < record.MAX_RECORD_BYTES // 2
    assert msgspec.json.decode(raw, type=record.Record).facts == facts


def test_inspect_prints_a_summary_or_json(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "model")
    facts = inspect_model(f"file://{folder}")
    text = facts_as_text("file:///model", facts)
    assert "LlamaForCausalLM (supported)" in text
    assert "19.62 K parameters, 38.31 KiB in float16" in text
    assert json.loads(facts_as_json(facts))["numKvHeads"] == 2


def drop(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def write(name: str, content: bytes) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        (folder / name).write_bytes(content)

    return change


def configure(**changes: object) -> Callable[[Path], None]:
    return write("config.json", json.dumps({**TINY_CONFIG, **changes}).encode())


def truncate(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def move(name: str, to: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).rename(folder / to) and None


def become_a_pipe(name: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        (folder / name).unlink()
        os.mkfifo(folder / name)

    return change


BROKEN = [
    (drop("config.json"), ExitCode.INVALID_MODEL, "config.json is missing"),
    (write("config.json", b"{"), ExitCode.INVALID_MODEL, "config.json: malformed JSON"),
    (drop("model.safetensors"), ExitCode.INVALID_MODEL, "neither model.safetensors nor"),
    (truncate, ExitCode.INVALID_MODEL, "model.safetensors: truncated"),
    (write("model.safetensors", b"<html>404</html>"), ExitCode.INVALID_MODEL, "not a safetensors file"),
    (configure(num_hidden_layers=3), ExitCode.INVALID_MODEL, "tensors missing: model.layers.2"),
    (configure(vocab_size=65), ExitCode.INVALID_MODEL, "has shape [64, 32], config.json requires [65, 32]"),
    (configure(hidden_size=None), ExitCode.INVALID_MODEL, "hidden_size must be a positive integer"),
    (drop("tokenizer.json"), ExitCode.INVALID_MODEL, "tokenizer is missing; add tokenizer.json or"),
    (move("tokenizer.json", "tokenizer.model"), ExitCode.INVALID_MODEL, "tokenizer.json is missing, and tokenizer.mod"),
    (configure(architectures=["MambaForCausalLM"]), ExitCode.UNSUPPORTED_ARCHITECTURE, "supported: Gemma3ForCausalLM"),
]


@pytest.mark.parametrize("place", ["folder", "hub"])
@pytest.mark.parametrize("fault", BROKEN, ids=[words for _, _, words in BROKEN])
def test_an_unusable_model_is_reported_with_file_and_cause(
    shelf: Shelf, hub: None, fault: tuple[Callable[[Path], None], ExitCode, str], place: str
) -> None:
    break_it, exit_code, words = fault
    folder = write_tiny_model(shelf.root / "acme/broken/main")
    break_it(folder)
    uri = f"file://{folder}" if place == "folder" else "hf://acme/broken"
    with pytest.raises(FatalError) as caught:
        inspect_model(uri)
    assert caught.value.exit_code is exit_code
    assert words in str(caught.value)
    assert "neuron-inspect-" not in str(caught.value)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_pipe_instead_of_a_file_is_refused_at_once(tmp_path: Path, name: str) -> None:
    folder = write_tiny_model(tmp_path / "model")
    become_a_pipe(name)(folder)
    with pytest.raises(FatalError, match=f"{name}: not a regular file"):
        inspect_model(f"file://{folder}")


def test_a_model_with_only_pickled_weights_is_refused_with_a_conversion_hint(shelf: Shelf, hub: None) -> None:
    folder = write_tiny_model(shelf.root / "acme/old/main")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(FatalError, match=r"contains pytorch_model\.bin; convert the model"):
        inspect_model("hf://acme/old")


def test_inspection_imports_neither_torch_nor_transformers(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "model")
    program = (
        "import sys; from neuron_runtime.inspection import inspect_model;"
        f"inspect_model('file://{folder}');"
        "print([name for name in ('torch', 'transformers', 'numpy') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=200)
    assert done.stdout.strip() == "[]"


DBRX = {"architectures": ["DbrxForCausalLM"], "model_type": "dbrx"}


def test_an_architecture_that_only_nxd_inference_runs_has_facts(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | DBRX | {"head_dim": None}))
    facts = inspect_model(f"file://{folder}")
    assert facts == inspect_model(f"file://{folder}", "nxdi")
    assert (facts.architecture, facts.num_layers, facts.head_dim) == ("DbrxForCausalLM", 2, 8)
    assert "DbrxForCausalLM (supported, with backend nxdi)" in facts_as_text("model", facts)
    with pytest.raises(FatalError, match="not supported by the torch backend"):
        inspect_model(f"file://{folder}", "torch")


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "MixtralForCausalLM"])
@pytest.mark.parametrize("backend", ["", "nxdi"])
def test_quantized_weights_are_refused_before_anything_is_compiled(
    tmp_path: Path, architecture: str, backend: str
) -> None:
    folder = write_tiny_model(tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    quantized = {"architectures": [architecture], "quantization_config": {"quant_method": "awq"}}
    (folder / "config.json").write_text(json.dumps(config | quantized))
    with pytest.raises(FatalError, match="the weights are awq") as caught:
        inspect_model(f"file://{folder}", backend)
    assert caught.value.exit_code == ExitCode.UNSUPPORTED_ARCHITECTURE


def test_an_architecture_that_only_an_application_class_runs_has_facts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_tiny_model(tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"architectures": ["OursForCausalLM"]}))
    uri = f"file://{folder}"
    with pytest.raises(FatalError, match="OursForCausalLM"):
        inspect_model(uri)
    facts = inspect_model(uri, application_class="ours.serving:OursForCausalLM")
    assert (facts.architecture, facts.num_layers, facts.vocabulary_size) == ("OursForCausalLM", 2, 64)
    assert inspect_model(uri, application_class="llama") == facts
    assert main(["inspect", uri, "--application-class", "ours.serving:OursForCausalLM"]) == 0
    assert "OursForCausalLM (supported, with backend nxdi)" in capsys.readouterr().out


def test_tensors_of_a_private_model_are_not_those_of_its_architecture(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"intermediate_size": 24}))
    with pytest.raises(InvalidModel, match="has shape"):
        inspect_model(f"file://{folder}")
    assert inspect_model(f"file://{folder}", application_class="ours:Class").intermediate_size == 24


def test_the_machine_that_inspects_may_have_devices_that_the_model_is_not_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A Job runs on any node, before one is chosen for the model."""
    product = tmp_path / "product_name"
    product.write_text("trn2.48xlarge\n")
    monkeypatch.setattr(devices, "PRODUCT_NAME", str(product))
    monkeypatch.delenv(devices.PLATFORM_VARIABLE, raising=False)
    known = devices.known_platform()
    assert known is not None
    assert known.name == "trn2"
    folder = write_tiny_model(tmp_path / "model")
    assert inspect_model(f"file://{folder}", "transformers-neuronx").num_layers == 2


@pytest.mark.parametrize("platform", ["", "inf2", "trn1", "trn2"])
def test_inspect_for_transformers_neuronx_checks_model_and_devices_as_serve_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, platform: str
) -> None:
    """As far as a machine knows where the model will be served."""
    monkeypatch.setenv("NEURON_PLATFORM_TARGET_OVERRIDE", platform)
    folder = write_tiny_model(tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    if platform == "trn2":
        with pytest.raises(InvalidConfig, match="--backend: transformers-neuronx compiles for inf2 and trn1, not for"):
            inspect_model(f"file://{folder}", "transformers-neuronx")
        return
    assert inspect_model(f"file://{folder}", "transformers-neuronx").num_layers == 2
    (folder / "config.json").write_text(json.dumps(config | {"attention_bias": True}))
    with pytest.raises(FatalError, match="does not compute attention_bias True"):
        inspect_model(f"file://{folder}", "transformers-neuronx")


def test_a_backend_that_generates_names_the_one_that_computes_vectors() -> None:
    for backend in ("nxdi", "optimum", "simulated", "transformers-neuronx"):
        with pytest.raises(
            FatalError, match=f"BertModel .* {backend} backend .* task embed .* backend torch"
        ) as refused:
            inspect_model(f"file://{EMBEDDING_MODEL}", backend)
        assert refused.value.exit_code == ExitCode.UNSUPPORTED_ARCHITECTURE
    assert inspect_model(f"file://{EMBEDDING_MODEL}", "torch").task == "embed"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (("", "no such"), r"applicationClass: must be one of .*llama.*, or `module:Class`"),
        (("torch", "ours:Class"), "--application-class: is for the nxdi backend, not for torch"),
    ],
)
def test_a_wrong_application_class_is_refused(tmp_path: Path, given: tuple[str, str], message: str) -> None:
    folder = write_tiny_model(tmp_path / "model")
    with pytest.raises(InvalidConfig, match=message):
        inspect_model(f"file://{folder}", *given)


@pytest.mark.parametrize(
    ("backend", "fields", "message"),
    [
        ("nxdi", {"architectures": 5}, "architectures must be a list of names, got 5"),
        ("vllm", {"hidden_size": "32", "head_dim": None}, "hidden_size must be a positive integer, got '32'"),
        ("vllm", {"num_attention_heads": [4], "head_dim": None}, r"num_attention_heads must be .*, got \[4\]"),
    ],
)
def test_a_field_of_another_type_is_named_for_every_engine(
    tmp_path: Path, backend: str, fields: dict[str, Any], message: str
) -> None:
    folder = write_tiny_model(tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | fields))
    with pytest.raises(InvalidModel, match=message):
        inspect_model(f"file://{folder}", backend)


def test_the_facts_of_a_nested_configuration_are_those_of_its_text_model(tmp_path: Path) -> None:
    folder = random_model(tmp_path / "model", **MODELS["Gemma 3 with images and biases"])
    config = json.loads((folder / "config.json").read_text())
    assert model_facts(read_checkpoint(folder)).vocabulary_size == 256
    config["text_config"]["vocab_size"] = None
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(FatalError, match="vocab_size must be a positive integer"):
        model_facts(read_checkpoint(folder))


def test_for_an_engine_that_is_not_this_runtime_the_configuration_tells_the_facts_of_any_model(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "model")
    text = json.loads((folder / "config.json").read_text())
    config = {"architectures": ["InternVLForConditionalGeneration"], "model_type": "internvl", "text_config": text}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(FatalError, match="InternVLForConditionalGeneration is not supported"):
        inspect_model(f"file://{folder}")
    facts = inspect_model(f"file://{folder}", backend="vllm")
    assert (facts.architecture, facts.vocabulary_size) == ("InternVLForConditionalGeneration", 64)
    (folder / "config.json").write_text(json.dumps({**config, "text_config": {}}))
    with pytest.raises(FatalError, match="num_hidden_layers must be a positive integer"):
        inspect_model(f"file://{folder}", backend="vllm")


def test_gemma_3_is_read_as_its_makers_write_it_with_the_length_that_each_backend_serves(tmp_path: Path) -> None:
    text = {"model_type": "gemma3_text", "hidden_size": 2560, "num_hidden_layers": 34, "sliding_window": 1024}
    config = {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "text_config": text}
    model = decoder_config(config)
    assert (model.vocabulary_size, model.num_heads, model.num_kv_heads, model.head_dim) == (262208, 8, 4, 256)
    small = read_checkpoint(random_model(tmp_path, **MODELS["Gemma 3"]))
    assert [model_facts(small, backend=one).max_position_embeddings for one in ("torch", "nxdi")] == [512, 22]


@pytest.mark.parametrize(("backend", "longest"), [("", 128), ("torch", 128), ("nxdi", 32), ("optimum", 32)])
def test_a_window_that_a_device_ignores_is_the_longest_sequence_there(
    tmp_path: Path, backend: str, longest: int
) -> None:
    folder = random_model(tmp_path / "model", **MODELS["Mixtral"], max_position_embeddings=128)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"sliding_window": 32, "model_type": "mixtral"}))
    assert model_facts(read_checkpoint(folder), backend=backend).max_position_embeddings == longest


def test_packed_numbers_are_counted_one_by_one_and_their_scales_not() -> None:
    packed = TensorInfo("mlp.experts.down_proj_blocks", "U8", (4, 90, 16), "f", 0, 5760)
    assert packed.num_parameters == 2 * 5760
    assert replace(packed, name="mlp.experts.down_proj_scales").num_parameters == 0
    assert replace(packed, name="mlp.down_proj.weight").num_parameters == 5760
    assert replace(packed, dtype="BF16").num_parameters == 5760
