"""Converted models: the numbers of each format, conversions that are killed or compete, and how they are served."""

from __future__ import annotations

import contextlib
import json
import shutil
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from helpers.chat_model import write_chat_model
from helpers.quantized import FORMATS, quantize, say_beside
from helpers.tiny_model import write_tiny_model
from helpers.torch_models import reference, reference_logits
from neuron_runtime.backend.nxdi.models import family_of
from neuron_runtime.backend.torch.architecture import decoder_config, tensor_shapes
from neuron_runtime.checkpoint import (
    CONFIG_FILE,
    INDEX_FILE,
    WEIGHTS_FILE,
    check_tensors,
    read_checkpoint,
    read_config,
)
from neuron_runtime.commands.command_line import main
from neuron_runtime.config import ModelSource
from neuron_runtime.conversion import converting, measuring, shards, weights, writing
from neuron_runtime.conversion.converting import convert
from neuron_runtime.conversion.plan import Conversion, conversion_of
from neuron_runtime.conversion.shards import shards_of
from neuron_runtime.conversion.weights import Weights
from neuron_runtime.conversion.writing import write_weights
from neuron_runtime.errors import ExitCode, FatalError, InvalidConfig
from neuron_runtime.inspection import inspect_model
from neuron_runtime.quantization import quantization_of
from neuron_runtime.record import Converted
from neuron_runtime.text.tokenizer import load_tokenizer
from neuron_runtime.weights.fetching import described, materialize
from neuron_runtime.weights.store import MANIFEST, Store
from neuron_runtime.weights.transfer import Amount, Tools

PLAIN = ""
LARGEST = {"int8": 127, "fp8": 240}
OUTPUTS = [
    *((PLAIN, kind) for kind in ("int8", "fp8")),
    *((name, kind) for name in FORMATS for kind in (name[:4].strip(), "none")),
]
OUTPUTS.remove(("int8 per channel", "int8"))  # is served as it is stored
DIGEST = "ab" * 32


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A small model in every format, and unquantized with the empty name."""
    folder = tmp_path_factory.mktemp("models")
    found = {PLAIN: write_tiny_model(folder / "source")}
    for number, (name, method) in enumerate(FORMATS.items()):
        quantize(found[PLAIN], folder / str(number), method)
        shutil.copy(found[PLAIN] / "tokenizer.json", folder / str(number))
        found[name] = folder / str(number)
    return found


def wanted(folder: Path, kind: str) -> Conversion:
    """As for nxdi, or if that takes it as it is, as another conversion of it would be."""
    checkpoint = read_checkpoint(folder)
    conversion = conversion_of(checkpoint.config, checkpoint.tensors, "nxdi", "auto" if kind == "stored" else kind)  # type: ignore[arg-type]
    assert conversion is not None
    return conversion


def ignore(amount: Amount) -> None:
    pass


def shown(title: str) -> Any:
    return ignore


def written(folder: Path, conversion: Conversion, work: Path, report: Any = ignore) -> writing.Written:
    work.mkdir(parents=True, exist_ok=True)
    checkpoint = read_checkpoint(folder)
    source = Weights(checkpoint, tensor_shapes(decoder_config(checkpoint.config)), conversion)
    return write_weights(source, shards_of(conversion.outputs), DIGEST, work=work, report=report)


def tensors_in(work: Path) -> dict[str, torch.Tensor]:
    return {
        name: tensor
        for file in sorted((work / "files").glob("*.safetensors"))
        for name, tensor in load_file(file).items()
    }


def halved(name: str) -> bool:
    """Whether the stored numbers are kept: fp8 with a scale for each row, or one for all."""
    return name.startswith("fp8") and "blocks" not in name


@pytest.mark.parametrize(("name", "kind"), OUTPUTS)
def test_converted_weights_are_those_that_are_stored_quantized(
    models: dict[str, Path], tmp_path: Path, name: str, kind: str
) -> None:
    folder = models[name]
    plain = load_file((folder.with_name(f"{folder.name}-plain") if name else folder) / WEIGHTS_FILE)
    conversion = wanted(folder, kind)
    outcome = written(folder, conversion, tmp_path)
    found = tensors_in(tmp_path)
    assert found.keys() == {output.name for output in conversion.outputs}
    for weight in plain:
        if weight not in conversion.quantized:
            assert found[weight].dtype == torch.float16
            assert torch.equal(found[weight], plain[weight].half()), weight
            continue
        numbers, scale = found[weight], found[f"{weight}_scale"]
        rows = plain[weight].float()
        assert scale.dtype == torch.float32
        assert scale.shape == (len(rows), 1)
        assert numbers.dtype == (torch.int8 if kind == "int8" else torch.float8_e4m3fn)
        assert numbers.float().abs().max() <= LARGEST[kind]
        if halved(name):
            # Exact but for the smallest numbers, which lose a bit.
            torch.testing.assert_close(numbers.float() * scale, rows, atol=float(scale.max()) * 2**-10, rtol=0)
        elif name.startswith("int8 per"):
            assert torch.equal(numbers.float() * scale, rows)
        else:
            expected = rows.abs().amax(1, keepdim=True) / LARGEST[kind]
            torch.testing.assert_close(scale, expected, rtol=1e-6, atol=0)
            quotient = rows / scale
            assert torch.equal(
                numbers, quotient.round().to(torch.int8) if kind == "int8" else quotient.to(numbers.dtype)
            )
    assert 0 <= outcome.layer_error < (0.05 if kind == "fp8" else 0.02)
    assert outcome.read_bytes > 0


def test_a_row_of_zeros_and_one_of_tiny_numbers_are_converted(tmp_path: Path) -> None:
    folder, name = write_tiny_model(tmp_path / "model"), "model.layers.0.mlp.up_proj.weight"
    tensors = load_file(folder / WEIGHTS_FILE)
    tensors[name][0] = 0
    tensors[name][1] = 6e-8
    save_file(tensors, folder / WEIGHTS_FILE, metadata={"format": "pt"})
    written(folder, wanted(folder, "fp8"), tmp_path / "work")
    found = tensors_in(tmp_path / "work")
    again = found[name].float() * found[f"{name}_scale"]
    assert torch.equal(again[0], torch.zeros(32))
    torch.testing.assert_close(again[1], tensors[name][1].float())


def test_only_a_few_rows_are_in_memory(
    models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = []
    add = weights.LayerError.add

    def noted(self: weights.LayerError, part: weights.Part) -> None:
        sizes.append(part.plain.numel())
        add(self, part)

    monkeypatch.setattr(weights.LayerError, "add", noted)
    monkeypatch.setattr(weights, "PART_ELEMENTS", 100)
    for number, (name, kind) in enumerate([(PLAIN, "int8"), ("fp8 in blocks", "fp8"), ("fp8 of FBGEMM", "none")]):
        written(models[name], wanted(models[name], kind), tmp_path / str(number))
    assert max(sizes) <= 100
    with_parts = tensors_in(tmp_path / "0")
    monkeypatch.undo()
    written(models[PLAIN], wanted(models[PLAIN], "int8"), tmp_path / "whole")
    for name, tensor in tensors_in(tmp_path / "whole").items():
        assert torch.equal(tensor, with_parts[name])


def test_weights_are_divided_among_files_with_an_index(
    models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shards, "MAX_SHARD_BYTES", 5000)
    entry = converted_entry(models[PLAIN], tmp_path, "int8")
    files = {path.name for path in entry.iterdir()}
    shard_files = {f"model-0000{number}-of-00006.safetensors" for number in range(1, 7)}
    assert files == {INDEX_FILE, CONFIG_FILE, "tokenizer.json", MANIFEST, *shard_files}
    assert all((entry / file).stat().st_size < 5000 + 2000 for file in shard_files)
    checkpoint = read_checkpoint(entry)
    model = decoder_config(checkpoint.config)
    check_tensors(checkpoint, tensor_shapes(model), quantization_of(checkpoint.config))
    for tensor in checkpoint.tensors.values():
        assert tensor.begin % (tensor.num_bytes // max(1, tensor.num_parameters)) == 0, tensor


class Killed(BaseException):
    pass


class Disk:
    """Writes until so many bytes are written; what is in flight then is torn."""

    def __init__(self, num_bytes: int) -> None:
        self.left = num_bytes

    def write_all(self, fd: int, data: memoryview, position: int) -> None:
        WRITE_ALL(fd, data[: self.left], position)
        self.left -= len(data)
        if self.left < 0:
            raise Killed


WRITE_ALL = writing.write_all


WEIGHTS, WHOLE = f"files/{WEIGHTS_FILE}", 60_000
"""More bytes than a conversion writes."""


@example(kills=[WHOLE], damage=[(WEIGHTS, 0.9)])
@example(kills=[20_000], damage=[(WEIGHTS, 0.4)])
@example(kills=[WHOLE], damage=[("journal", 0.5)])
@example(kills=[WHOLE], damage=[("errors", 0.5)])
@settings(max_examples=25, deadline=None)
@given(
    kills=st.lists(st.integers(1, WHOLE), max_size=4),
    damage=st.lists(st.tuples(st.sampled_from([WEIGHTS, "journal", "errors"]), st.floats(0, 0.999))),
)
def test_a_conversion_that_is_killed_goes_on_where_it_ended(
    models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory, kills: list[int], damage: list[tuple[str, float]]
) -> None:
    folder = models[PLAIN]
    conversion, work = wanted(folder, "int8"), tmp_path_factory.mktemp("work")
    whole = written(folder, conversion, work / "whole")
    read_bytes = 0
    for num_bytes in kills:
        amounts: list[Amount] = []
        with pytest.MonkeyPatch.context() as monkeypatch:
            disk = Disk(num_bytes)
            monkeypatch.setattr(writing, "write_all", disk.write_all)
            monkeypatch.setattr("neuron_runtime.weights.journal.write_all", disk.write_all)
            with contextlib.suppress(Killed):
                written(folder, conversion, work / "killed", amounts.append)
        read_bytes += amounts[-1].read_bytes if amounts else 0
    if not damage:
        rest = written(folder, conversion, work / "killed")
        assert read_bytes + rest.read_bytes <= whole.read_bytes + 64 * 1024 * len(kills)
    for name, where in damage:
        path = work / "killed" / name
        raw = bytearray(path.read_bytes() if path.exists() else b"")
        if raw:
            raw[int(where * len(raw))] ^= 1
            path.write_bytes(raw)
    again = written(folder, conversion, work / "killed")
    assert (again.files, again.layer_error) == (whole.files, whole.layer_error)


def test_what_was_converted_to_another_format_is_not_taken_over(models: dict[str, Path], tmp_path: Path) -> None:
    folder = models[PLAIN]
    checkpoint = read_checkpoint(folder)
    for kind, digest in (("int8", "ab" * 32), ("fp8", "cd" * 32)):
        conversion = wanted(folder, kind)
        source = Weights(checkpoint, tensor_shapes(decoder_config(checkpoint.config)), conversion)
        write_weights(source, shards_of(conversion.outputs), digest, work=tmp_path, report=ignore)
    written(folder, wanted(folder, "fp8"), tmp_path / "whole")
    assert (tmp_path / "files" / WEIGHTS_FILE).read_bytes() == (tmp_path / "whole/files" / WEIGHTS_FILE).read_bytes()


def converted_by(folder: Path, store: Path, kind: Any, **more: Any) -> Converted:
    more = {"backend": "torch", **more}
    return convert(ModelSource(uri=folder.as_uri()), Store(store), shown, wanted=kind, **more)[0]


def converted_entry(folder: Path, store: Path, kind: Any) -> Path:
    return store / converted_by(folder, store, kind).weights.digest


def test_two_converters_at_once_convert_once(
    models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("neuron_runtime.weights.store.WAIT_SECONDS", 0.01)
    both = threading.Barrier(2)

    def work(number: int) -> Converted:
        both.wait()
        return converted_by(models[PLAIN], tmp_path, "int8")

    with ThreadPoolExecutor(2) as threads:
        first, second = threads.map(work, range(2))
    assert first.figures == second.figures
    assert min(first.weights.read_bytes, second.weights.read_bytes) == 0
    assert max(first.weights.read_bytes, second.weights.read_bytes) > 0


def test_a_second_run_finds_the_entry_and_reads_nothing(
    models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = converted_by(models[PLAIN], tmp_path, "int8")
    monkeypatch.setattr(converting, "_make", lambda *_, **more: pytest.fail("converted again"))
    second = converted_by(models[PLAIN], tmp_path, "int8")
    assert second.figures == first.figures
    assert (second.weights.read_bytes, second.weights.digest) == (0, first.weights.digest)
    assert [row.state for row in Store(tmp_path).rows()] == ["complete"]
    ((_, wrong),) = Store(tmp_path).verify(lambda key, num_bytes: lambda more: None)
    assert wrong == []


def spoiled(folder: Path, target: Path, **changes: torch.Tensor | None) -> Path:
    """A copy with other tensors, or without those that are None."""
    shutil.copytree(folder, target)
    tensors = load_file(target / WEIGHTS_FILE)
    for name, tensor in changes.items():
        if tensor is None:
            del tensors[name]
        else:
            tensors[name] = tensor
    save_file(tensors, target / WEIGHTS_FILE, metadata={"format": "pt"})
    return target


UP = "model.layers.1.mlp.up_proj.weight"


def test_models_in_place_that_differ_by_their_numbers_or_texts_alone_are_converted_apart(
    models: dict[str, Path], tmp_path: Path
) -> None:
    """Fine-tunes of one model have the same config.json, names and shapes."""
    plain = spoiled(models[PLAIN], tmp_path / "plain")
    tuned = spoiled(plain, tmp_path / "tuned", **{UP: load_file(plain / WEIGHTS_FILE)[UP].flip(1).contiguous()})
    told = shutil.copytree(plain, tmp_path / "told")
    (told / "chat_template.jinja").write_text("{{ messages }}")
    copied = shutil.copytree(plain, tmp_path / "copied")
    folders, store = (plain, tuned, told, copied), tmp_path / "store"
    assert len({read_checkpoint(folder).digest for folder in folders}) == 1
    entries = [converted_entry(folder, store, "int8") for folder in folders]
    assert len({*entries}) == 3
    assert entries[0] == entries[3], "a copy shares the result"
    weights = [load_file(entry / WEIGHTS_FILE)[UP] for entry in entries]
    assert torch.equal(weights[1], weights[0].flip(1))
    assert (entries[2] / "chat_template.jinja").read_text() == "{{ messages }}"
    (copied / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": null}}')
    for folder, entry in zip(folders, entries, strict=True):
        planned = inspect_model(folder.as_uri(), "torch", quantization="int8").conversion
        assert planned is not None
        assert planned.digest == entry.name


def test_a_pinned_conversion_is_found_or_made_of_the_model_that_was_inspected(
    models: dict[str, Path], tmp_path: Path
) -> None:
    folder = spoiled(models[PLAIN], tmp_path / "model")
    planned = inspect_model(folder.as_uri(), "torch", quantization="int8").conversion
    assert planned is not None
    made = converted_by(folder, tmp_path / "store", "int8", pinned=planned.digest)
    assert made.weights.digest == planned.digest
    raw = (folder / WEIGHTS_FILE).read_bytes()
    (folder / WEIGHTS_FILE).write_bytes(raw[:-64] + bytes(64))
    assert converted_by(folder, tmp_path / "store", "int8", pinned=planned.digest).weights.read_bytes == 0
    with pytest.raises(FatalError, match=f"{planned.digest} is pinned: .* set the refresh annotation") as caught:
        converted_by(folder, tmp_path / "other", "int8", pinned=planned.digest)
    assert caught.value.exit_code is ExitCode.CHECKSUM_MISMATCH
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("fp8 per channel", {f"{UP}_scale": None}, rf"missing: {UP}_scale .*compressed-tensors: fp8 per channel"),
        ("fp8 per channel", {f"{UP}_scale": torch.ones(47, 1)}, rf"{UP}_scale has shape \[47, 1\].*fp8 per channel"),
        (
            "fp8 per channel",
            {f"{UP}_scale": torch.full((48, 1), float("nan"))},
            rf"{UP}_scale has scales .*channel",
        ),
        ("fp8 of FBGEMM", {f"{UP}_scale": -torch.ones(48, 1)}, rf"{UP}_scale has scales below 0.*fbgemm_fp8"),
        ("fp8 in blocks", {UP: None}, rf"missing: {UP}.*fp8 in blocks of 48 x 24"),
        (
            "int8 per tensor",
            {UP: torch.zeros(48, 31, dtype=torch.int8)},
            rf"{UP} has shape \[48, 31\].*int8 per",
        ),
    ],
)
def test_wrong_weights_are_refused_before_anything_is_written(
    models: dict[str, Path], tmp_path: Path, name: str, changes: dict[str, Any], message: str
) -> None:
    folder = spoiled(models[name], tmp_path / "model", **changes)
    with pytest.raises(FatalError, match=message) as caught:
        converted_by(folder, tmp_path / "store", "auto", backend="nxdi")
    assert caught.value.exit_code is ExitCode.INVALID_MODEL
    assert not list((tmp_path / "store").glob("**/*.safetensors"))


def test_what_modelopt_says_beside_config_json_is_read_and_is_not_said_of_converted_weights(
    models: dict[str, Path], tmp_path: Path
) -> None:
    beside = tmp_path / "beside"
    shutil.copytree(models["fp8 of ModelOpt"], beside)
    before = read_checkpoint(beside)
    say_beside(beside)
    found = read_checkpoint(beside)
    assert quantization_of(found.config) == quantization_of(before.config) is not None
    assert found.digest != before.digest
    digest = converted_by(beside, tmp_path / "store", "none", backend="nxdi").weights.digest
    plain = read_checkpoint(tmp_path / "store" / digest)
    assert quantization_of(plain.config) is None
    (beside / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": "NVFP4"}}')
    with pytest.raises(FatalError, match="quant_algo 'NVFP4' of modelopt: not supported"):
        converted_by(beside, tmp_path / "store", "none", backend="nxdi")
    (beside / "hf_quant_config.json").write_text('{"quantization": "FP8"}')
    with pytest.raises(FatalError, match=r"hf_quant_config.json: quantization must be an object, got 'FP8'"):
        read_checkpoint(beside)
    (beside / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": null, "kv_cache_quant_algo": "FP8"}}')
    assert quantization_of(read_checkpoint(beside).config) is None, "the cache alone is quantized"


def test_quantized_experts_are_multiplied_out_for_nxdi_if_that_is_asked(tmp_path: Path) -> None:
    plain = write_tiny_model(
        tmp_path / "plain",
        architectures=["Qwen3MoeForCausalLM"],
        model_type="qwen3_moe",
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        norm_topk_prob=True,
    )
    expected = load_file(quantize(plain, tmp_path / "stored", FORMATS["fp8 per channel"]) / WEIGHTS_FILE)
    shutil.copy(plain / "tokenizer.json", tmp_path / "stored")
    with pytest.raises(FatalError, match=r"Qwen3MoeForCausalLM has experts, .* \(fp8\): set -*quantization none"):
        converted_by(tmp_path / "stored", tmp_path / "store", "auto", backend="nxdi")
    digest = converted_by(tmp_path / "stored", tmp_path / "store", "none", backend="nxdi").weights.digest
    found = load_file(tmp_path / "store" / digest / WEIGHTS_FILE)
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        assert torch.equal(tensor, expected[name].to(tensor.dtype)), name
    assert family_of(read_config(tmp_path / "store" / digest), "").application == "qwen3_moe"


def test_numbers_that_are_none_are_refused_by_the_name_of_the_tensor(models: dict[str, Path], tmp_path: Path) -> None:
    plain = spoiled(models[PLAIN], tmp_path / "plain", **{UP: torch.full((48, 32), float("inf")).half()})
    with pytest.raises(FatalError, match=f"{UP} has numbers that are not finite"):
        converted_by(plain, tmp_path / "store", "int8")
    numbers = torch.full((48, 32), float("nan")).to(torch.float8_e4m3fn)
    for name in ("fp8 of FBGEMM", "fp8 in blocks"):
        stored = spoiled(models[name], tmp_path / name, **{UP: numbers})
        with pytest.raises(FatalError, match=rf"{UP} has numbers that are none \(f.* fp8 "):
            converted_by(stored, tmp_path / "store", "fp8", backend="nxdi")


def test_what_a_backend_takes_as_it_is_is_not_converted(models: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match="--quantization: there is nothing to convert: the torch backend takes"):
        converted_by(models["fp8 in blocks"], tmp_path, "auto")


@pytest.mark.parametrize(("name", "kind"), [(PLAIN, "fp8"), ("fp8 in blocks", "auto"), ("int8 per tensor", "auto")])
def test_a_converted_model_is_taken_as_it_is(models: dict[str, Path], tmp_path: Path, name: str, kind: Any) -> None:
    converted = converted_by(models[name], tmp_path, kind, backend="nxdi")
    checkpoint = read_checkpoint(tmp_path / converted.weights.digest)
    for backend in ("torch", "nxdi"):
        assert conversion_of(checkpoint.config, checkpoint.tensors, backend, "auto") is None


def test_a_converted_model_is_read_in_the_place_of_its_source(models: dict[str, Path], tmp_path: Path) -> None:
    entry = converted_entry(models[PLAIN], tmp_path, "int8")
    model = ModelSource(uri="hf://acme/tiny", digest="cd" * 20, converted=entry.name)
    assert materialize(model, tmp_path, lambda stage, share: None) == entry
    assert materialize(model, tmp_path, lambda stage, share: None, with_weights=False) == entry
    with described(model, tmp_path) as found:
        assert found == (entry, entry.name)
    missing = ModelSource(uri="hf://acme/tiny", converted="ef" * 32)
    with pytest.raises(FatalError, match="convert it there: neuron-runtime convert hf://acme/tiny") as caught:
        materialize(missing, tmp_path, lambda stage, share: None)
    assert caught.value.exit_code is ExitCode.WEIGHTS_MISSING
    with pytest.raises(FatalError, match="neuron-runtime convert"), described(missing, tmp_path):
        pass


def test_the_command_tells_the_error_that_a_conversion_makes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, record = write_chat_model(tmp_path / "model"), tmp_path / "record.json"
    arguments = ["convert", str(model), str(tmp_path / "store"), "--backend", "torch", "-q", "int8"]
    assert main([*arguments, "--record", str(record)]) == 0
    out, err = capsys.readouterr()
    outcome = json.loads(record.read_text())
    assert out.strip() == str(tmp_path / "store" / outcome["weights"]["digest"])
    assert "the outputs of linear layers differ by 0." in err
    figures = outcome["conversion"]
    assert figures["format"] == "int8"
    assert 0 < figures["layerError"] < 0.02
    assert figures["convertedPerplexity"] == pytest.approx(figures["perplexity"], rel=0.05)
    assert figures["convertedPerplexity"] != figures["perplexity"]
    config = json.loads((Path(out.strip()) / CONFIG_FILE).read_text())
    assert config["quantization_config"]["ignore"] == ["lm_head"]


@pytest.mark.parametrize("what", ["an endless weight", "four bits", "nothing to convert"])
def test_the_command_says_that_a_conversion_failed_for_good(what: str, tmp_path: Path) -> None:
    model, record = write_chat_model(tmp_path / "model"), tmp_path / "record.json"
    quantization = "int8"
    if what == "an endless weight":
        tensors = load_file(model / WEIGHTS_FILE)
        name = next(name for name in tensors if name.endswith("q_proj.weight"))
        tensors[name][0, 0] = torch.inf
        save_file(tensors, model / WEIGHTS_FILE)
        says = f"tensor {name} has numbers that are not finite"
    elif what == "four bits":
        config = json.loads((model / CONFIG_FILE).read_text())
        given = {"quant_method": "awq", "bits": 4, "group_size": 32}
        (model / CONFIG_FILE).write_text(json.dumps(config | {"quantization_config": given}))
        quantization, says = "none", "which are not converted"
    else:
        quantization, says = "auto", "there is nothing to convert"
    arguments = ["convert", str(model), str(tmp_path / "store"), "--backend", "nxdi", "-q", quantization]
    assert main([*arguments, "--record", str(record)]) == 17
    outcome = json.loads(record.read_text())
    assert (outcome["reason"], outcome["exitCode"]) == ("ConversionFailed", 17)
    assert says in outcome["message"]


def test_the_perplexity_is_that_of_transformers(tmp_path: Path) -> None:
    folder = write_chat_model(tmp_path / "model", dtype="float32")
    save_file({name: one.float() * 8 for name, one in load_file(folder / WEIGHTS_FILE).items()}, folder / WEIGHTS_FILE)
    ids = load_tokenizer(folder).encode(measuring.TEXT)[: measuring.MAX_TOKENS]
    logits = reference_logits(reference(folder), list(ids))
    expected = torch.nn.functional.cross_entropy(logits[:-1], torch.tensor(ids[1:])).exp()
    assert measuring.perplexity(read_checkpoint(folder), folder) == pytest.approx(float(expected), rel=1e-3)


def test_the_layer_that_is_computed_is_the_only_one_in_memory() -> None:
    class Made:
        pass

    alive: list[weakref.ref[Made]] = []

    def read(number: int) -> Any:
        assert number == len(alive)
        assert not any(one() for one in alive)
        made = Made()
        alive.append(weakref.ref(made))
        return made

    layers = measuring.OneLayer(read, 3)
    assert [layers[number // 2] is not None for number in range(6)] == [True] * 6
    assert len(alive) == len(layers) == 3
    with pytest.raises(IndexError):
        layers[3]


def test_a_perplexity_that_takes_too_much_memory_is_not_computed(
    models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chat = write_chat_model(tmp_path / "model")
    free = converting.free_memory()
    monkeypatch.setattr(converting, "free_memory", lambda: type(free)(1000))
    figures = converted_by(chat, tmp_path / "store", "int8").figures
    assert figures.perplexity is None
    assert "of memory, 1000 bytes are free" in figures.unmeasured
    assert "the text has 0 tokens" in converted_by(models[PLAIN], tmp_path / "store", "int8").figures.unmeasured or (
        "bytes are free" in converted_by(models[PLAIN], tmp_path / "store", "int8").figures.unmeasured
    )


def test_perplexities_that_kill_processes_are_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chat, attempts = write_chat_model(tmp_path / "model"), []

    def killed(*_: object) -> float:
        attempts.append(1)
        raise Killed

    with monkeypatch.context() as context:
        context.setattr(converting, "perplexity", killed)
        for _ in range(converting.MAX_ATTEMPTS):
            with pytest.raises(Killed):
                converted_by(chat, tmp_path / "store", "int8")
    figures = converted_by(chat, tmp_path / "store", "int8").figures
    assert len(attempts) == 3
    assert figures.unmeasured == "processes were killed while they computed them"


def test_perplexities_are_computed_by_the_process_after_one_that_was_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chat = write_chat_model(tmp_path / "model")
    with monkeypatch.context() as context:
        context.setattr(converting, "perplexity", killing)
        with pytest.raises(Killed):
            converted_by(chat, tmp_path / "store", "int8")
    again = converted_by(chat, tmp_path / "store", "int8")
    assert again.weights.read_bytes == 0, "nothing is converted again"
    assert again.figures == converted_by(chat, tmp_path / "other", "int8").figures
    assert again.figures.perplexity is not None


def killing(*_: object) -> float:
    raise Killed


def test_a_full_disk_is_known_before_anything_is_converted(models: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(FatalError, match=r"more bytes in .* but 10 are free") as caught:
        converted_by(models[PLAIN], tmp_path, "int8", tools=Tools(free_bytes=lambda folder: 10))
    assert caught.value.exit_code is ExitCode.STORAGE_FULL
