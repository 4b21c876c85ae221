"""Describing a model folder from config and headers; faults are reported with file and byte counts."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from neuron_runtime.checkpoint import InvalidModel, read_checkpoint
from neuron_runtime.errors import ExitCode, FatalError

TENSORS: dict[str, dict[str, Any]] = {
    "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
    "b": {"dtype": "BF16", "shape": [4], "data_offsets": [24, 32]},
    "scalar": {"dtype": "I64", "shape": [], "data_offsets": [32, 40]},
}


def safetensors(tensors: dict[str, Any], num_data_bytes: int = 40) -> bytes:
    header = json.dumps({"__metadata__": {"format": "pt"}, **tensors}).encode()
    return len(header).to_bytes(8, "little") + header + bytes(num_data_bytes)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    (tmp_path / "model.safetensors").write_bytes(safetensors(TENSORS))
    return tmp_path


def shard(folder: Path, weight_map: dict[str, Any]) -> None:
    """Replaces the single file by two shards: a and b in the first, c in the second."""
    (folder / "model.safetensors").unlink()
    first = {name: TENSORS[name] for name in ("a", "b")}
    second = {"c": {"dtype": "F16", "shape": [5], "data_offsets": [0, 10]}}
    (folder / "one.safetensors").write_bytes(safetensors(first, 32))
    (folder / "two.safetensors").write_bytes(safetensors(second, 10))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


@contextlib.contextmanager
def as_nobody() -> Iterator[None]:
    """Another user than root, who may read everything."""
    before = os.geteuid()
    os.seteuid(65534 if before == 0 else before)
    try:
        yield
    finally:
        os.seteuid(before)


@pytest.mark.parametrize(("closed", "mode"), [(".", 0o000), (".", 0o444), ("..", 0o000)])
def test_a_folder_that_this_user_may_not_read_says_so(folder: Path, closed: str, mode: int) -> None:
    with tempfile.TemporaryDirectory() as place:
        volume = Path(place) / "volume"
        shutil.copytree(folder, volume / "model")
        os.chmod(place, 0o755)
        os.chmod(volume / "model" / closed, mode)
        with as_nobody(), pytest.raises(InvalidModel, match=r"/model cannot be read by user \d+: let it") as caught:
            read_checkpoint(volume / "model")
        assert caught.value.exit_code == ExitCode.INVALID_MODEL
        os.chmod(volume / "model" / closed, 0o755)


@pytest.mark.parametrize("file", ["config.json", "model.safetensors"])
def test_a_file_that_only_its_owner_may_read_says_who_should(folder: Path, file: str) -> None:
    """As the safetensors library writes them."""
    with tempfile.TemporaryDirectory() as place:
        shutil.copytree(folder, Path(place) / "model")
        os.chmod(place, 0o755)
        os.chmod(Path(place) / "model", 0o755)
        os.chmod(Path(place) / "model" / file, 0o000)
        said = rf"/{file}: cannot .*: Permission denied; let user \d+ read it \(chmod a\+r\)"
        with as_nobody(), pytest.raises(InvalidModel, match=said):
            read_checkpoint(Path(place) / "model")


def test_a_folder_is_described_without_reading_weights(folder: Path) -> None:
    checkpoint = read_checkpoint(folder)
    assert checkpoint.config == {"architectures": ["LlamaForCausalLM"]}
    assert {t.name: (t.dtype, t.shape, t.num_bytes) for t in checkpoint.tensors.values()} == {
        "a": ("F32", (2, 3), 24),
        "b": ("BF16", (4,), 8),
        "scalar": ("I64", (), 8),
    }
    assert (checkpoint.num_parameters, checkpoint.num_bytes, checkpoint.files) == (11, 40, ("model.safetensors",))
    end = (folder / "model.safetensors").stat().st_size
    assert checkpoint.tensors["scalar"].end == end


def test_shards_are_found_by_the_index(folder: Path) -> None:
    shard(folder, {"a": "one.safetensors", "b": "one.safetensors", "c": "two.safetensors"})
    checkpoint = read_checkpoint(folder)
    assert {t.name: t.file for t in checkpoint.tensors.values()} == {
        "a": "one.safetensors",
        "b": "one.safetensors",
        "c": "two.safetensors",
    }
    assert checkpoint.num_bytes == 42


def test_shards_missing_from_the_index_are_ignored(folder: Path) -> None:
    shard(folder, {"a": "one.safetensors", "c": "two.safetensors"})
    assert set(read_checkpoint(folder).tensors) == {"a", "c"}


def test_the_digest_follows_config_and_headers_but_not_the_folder(folder: Path, tmp_path_factory: Any) -> None:
    digest = read_checkpoint(folder).digest
    copy = tmp_path_factory.mktemp("copy")
    for file in folder.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    assert read_checkpoint(copy).digest == digest
    (copy / "config.json").write_text('{"architectures": ["Other"]}')
    assert read_checkpoint(copy).digest != digest
    (folder / "model.safetensors").write_bytes(safetensors({**TENSORS, "b": {**TENSORS["b"], "dtype": "F16"}}))
    assert read_checkpoint(folder).digest != digest


def edit(name: str, **changes: Any) -> Callable[[Path], None]:
    return lambda folder: write(folder, safetensors({**TENSORS, name: {**TENSORS[name], **changes}}))


def write(folder: Path, raw: bytes) -> None:
    (folder / "model.safetensors").write_bytes(raw)


WHOLE = safetensors(TENSORS)
BROKEN: dict[str, tuple[Callable[[Path], None], str]] = {
    "data cut short": (
        lambda f: write(f, WHOLE[:-7]),
        rf"model\.safetensors: truncated: its tensors end at byte {len(WHOLE)}, "
        rf"but the file has {len(WHOLE) - 7} bytes",
    ),
    "header cut short": (lambda f: write(f, WHOLE[:50]), r"the header ends at byte \d+, but the file has 50 bytes"),
    "nearly empty": (lambda f: write(f, b"\1\0\0"), "3 bytes are too few"),
    "a web page": (lambda f: write(f, b"<!DOCTYPE html><html>"), "not a safetensors file"),
    "data behind the last tensor": (lambda f: write(f, WHOLE + b"x"), "its tensors end at byte"),
    "header without JSON": (lambda f: write(f, (4).to_bytes(8, "little") + b"{,}!"), "malformed JSON"),
    "header with a list": (lambda f: write(f, (2).to_bytes(8, "little") + b"[]"), "must be a JSON object, got list"),
    "header that is not UTF-8": (lambda f: write(f, (3).to_bytes(8, "little") + b'{"\xff'), "malformed JSON"),
    "deeply nested header": (
        lambda f: write(f, (400_000).to_bytes(8, "little") + b'{"a":' * 40_000 + b"[" * 200_000),
        "malformed JSON",
    ),
    "range and shape differ": (edit("a", shape=[2, 4]), "tensor a of dtype F32 and shape .2, 4. needs 32 bytes"),
    "negative size": (edit("a", shape=[-2, 3]), "entry of tensor a is malformed"),
    "shape without end": (edit("a", shape=[2] * 20_000), "tensor a has 20000 dimensions, the limit is 16"),
    "unknown dtype": (edit("b", dtype="Q4"), "tensor b has unknown dtype Q4"),
    "overlap": (edit("b", data_offsets=[20, 28]), "tensor b begins at byte"),
    "no entry": (lambda f: write(f, safetensors({"a": 1}, 0)), "entry of tensor a is malformed"),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "contains neither model.safetensors nor"),
    "weights of another format": (
        lambda f: (f / "model.safetensors").rename(f / "pytorch_model.bin"),
        "contains pytorch_model.bin; convert the model",
    ),
    "no config": (lambda f: (f / "config.json").unlink(), r"config\.json is missing"),
    "config that is a list": (lambda f: (f / "config.json").write_text("[]") and None, r"config\.json: must be"),
    "index without a map": (lambda f: shard(f, {}), "weight_map must be an object"),
    "index that leaves the folder": (
        lambda f: shard(f, {"a": "../one.safetensors"}),
        r"weight_map\.a must be the name of a file in the same folder, got '\.\./one\.safetensors'",
    ),
    "index that names no file": (lambda f: shard(f, {"a": 3}), r"weight_map\.a must be the name of a file"),
    "shard not there": (lambda f: shard(f, {"a": "three.safetensors"}), r"three\.safetensors: cannot read the weights"),
    "tensor not in its shard": (
        lambda f: shard(f, {"a": "two.safetensors", "b": "two.safetensors"}),
        r"two\.safetensors: .* tensor a in this file, but it is missing \(and 1 more\)",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_folder_is_an_invalid_model_with_a_cause(case: str, folder: Path) -> None:
    damage, message = BROKEN[case]
    damage(folder)
    with pytest.raises(InvalidModel, match=message) as caught:
        read_checkpoint(folder)
    assert caught.value.exit_code is ExitCode.INVALID_MODEL
    assert str(folder) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_folder_is_model_not_found(tmp_path: Path) -> None:
    with pytest.raises(FatalError) as caught:
        read_checkpoint(tmp_path / "nowhere")
    assert caught.value.exit_code is ExitCode.MODEL_NOT_FOUND


def test_reading_headers_and_the_backend_registry_import_no_torch() -> None:
    modules = "neuron_runtime.checkpoint, neuron_runtime.backend.torch, neuron_runtime.backend.torch.architecture"
    code = f"import sys, {modules}; sys.exit('torch' in sys.modules or 'safetensors' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
