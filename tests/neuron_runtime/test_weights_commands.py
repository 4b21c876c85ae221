"""`neuron-runtime fetch` and `weights`, as users and the operator's Jobs call them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from helpers.file_faults import FileFaults
from helpers.hub import Shelf, serving
from helpers.weights import contents, shelf_with_model, size
from neuron_runtime import record
from neuron_runtime.commands.command_line import main
from neuron_runtime.weights.store import DAY_SECONDS

MODEL = "hf://acme/model"


@pytest.fixture
def shelf(tmp_path: Path) -> Shelf:
    return shelf_with_model(tmp_path / "hub")


@pytest.fixture
def endpoint(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    with serving(shelf) as address:
        monkeypatch.setenv("HF_ENDPOINT", address)
        yield address


@pytest.fixture
def model(shelf: Shelf) -> Path:
    return shelf.root / "acme/model/main"


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / "store"


def fetch(store: Path, *more: str) -> tuple[int, record.Record]:
    path = store.parent / "record"
    code = main(["fetch", MODEL, str(store), "--record", str(path), *more])
    return code, msgspec.json.decode(path.read_bytes(), type=record.Record)


def test_fetch_prints_the_folder_and_records_what_it_stored(
    endpoint: str, shelf: Shelf, model: Path, store: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, outcome = fetch(store)
    assert (code, outcome.ok, outcome.command) == (0, True, "fetch")
    digest = shelf.commit("acme/model")
    assert outcome.weights == record.StoredWeights(digest=digest, bytes=size(model), read_bytes=size(model))
    folder = Path(capsys.readouterr().out.strip())
    assert folder == store / digest
    assert contents(folder) == contents(model)
    code, outcome = fetch(store, "--digest", digest)
    assert code == 0
    assert outcome.weights == record.StoredWeights(digest=digest, bytes=size(model), read_bytes=0)
    assert "nothing to fetch" in capsys.readouterr().err


def test_a_failed_fetch_has_the_named_exit_code_in_its_record(
    endpoint: str, store: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, outcome = fetch(store, "--digest", "0" * 40)
    assert (code, outcome.exit_code, outcome.reason) == (10, 10, "ModelNotFound")
    assert "has no revision" in outcome.message


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["fetch", "s4://x", "DIR"], "URI: unknown scheme s4:"),
        (["fetch", "oci://a b", "DIR"], "URI: 'oci://a b' names no image"),
        (["weights", "ls", "/no/such/store"], "/no/such/store does not exist"),
        (["weights", "prune", "/", "--keep", "main"], "'main' is not a digest"),
    ],
)
def test_invalid_arguments_are_named(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    assert words in capsys.readouterr().err


def test_fetch_ends_at_sigterm_and_goes_on_later(
    endpoint: str, shelf: Shelf, model: Path, store: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    faults = FileFaults(bytes_per_second=500_000)
    shelf.body = faults.body
    command = [sys.executable, "-m", "neuron_runtime", "fetch", MODEL, str(store)]
    with subprocess.Popen(command, env=dict(os.environ), stderr=subprocess.PIPE) as process:
        while faults.num_sent_bytes < 500_000 and process.poll() is None:
            time.sleep(0.01)
        process.terminate()
        assert process.wait(timeout=20) == 130
    assert main(["weights", "ls", str(store)]) == 0
    assert "partial" in capsys.readouterr().out
    faults.bytes_per_second = 0
    assert main(["fetch", MODEL, str(store)]) == 0


def test_a_store_is_listed_verified_and_pruned(
    endpoint: str, shelf: Shelf, model: Path, store: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    digest = shelf.commit("acme/model")
    fetch(store)
    capsys.readouterr()

    assert main(["weights", "ls", "--json", str(store)]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert row | {"used": ""} == {
        "name": digest, "state": "complete", "bytes": size(model), "used": "", "uri": MODEL
    }  # fmt: skip
    assert main(["weights", "ls", str(store)]) == 0
    assert f"{digest}  4.92 MiB" in capsys.readouterr().out

    assert main(["weights", "verify", str(store)]) == 0
    assert capsys.readouterr().out == f"{digest}: intact\n"
    victim = store / digest / "model-00001-of-00004.safetensors"
    victim.chmod(0o644)
    with victim.open("r+b") as file:
        file.seek(1_000_000)
        file.write(b"\xff\x00\xff")
    assert main(["weights", "verify", str(store)]) == 14
    captured = capsys.readouterr()
    assert f"{digest}: {victim.name}: its sha256 is" in captured.out
    assert "1 of 1 models" in captured.err

    long_ago = time.time() - 40 * DAY_SECONDS
    os.utime(store / digest, (long_ago, long_ago))
    assert main(["weights", "prune", str(store), "--dry-run"]) == 0
    assert f"would delete {digest}: 4.92 MiB, unused for 40 days" in capsys.readouterr().out
    assert main(["weights", "prune", str(store), "--keep", digest, "0" * 40]) == 0
    assert main(["weights", "prune", str(store)]) == 0
    assert (store / digest).is_dir()
    os.utime(store / digest, (long_ago, long_ago))
    assert main(["weights", "prune", str(store), "--unused-days", "39.5"]) == 0
    assert not (store / digest).exists()


def test_names_on_a_shared_disk_cannot_control_the_terminal(
    endpoint: str, shelf: Shelf, store: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fetch(store)
    digest = shelf.commit("acme/model")
    manifest = store / digest / ".manifest.json"
    manifest.chmod(0o644)
    manifest.write_text(manifest.read_text().replace(MODEL, "hf://x\\u001b[2J\\u009b\\n"))
    (store / ".partial" / f"{digest}.\x1b[2J").mkdir()
    (store / digest / "\x1b]0;x\x07").write_text("")
    for command in (["ls"], ["verify"], ["prune", "--unused-days", "0", "--dry-run"]):
        main(["weights", command[0], str(store), *command[1:]])
        captured = capsys.readouterr()
        assert not {one for one in captured.out + captured.err if not one.isprintable()} - {"\n"}
    main(["weights", "ls", str(store)])
    listed = capsys.readouterr().out
    assert "hf://x\\x1b[2J\\x9b\\n" in listed
    assert f"{digest}.\\x1b[2J" in listed


@pytest.mark.parametrize("address", ["mirror.example", "mirror.example:8080", "http://", "ftp://x", "https://x:y"])
def test_an_address_of_a_hub_that_is_no_url_is_an_invalid_configuration(
    address: str, store: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", address)
    assert main(["fetch", MODEL, str(store)]) == 2
    assert f"HF_ENDPOINT: {address.rstrip('/')!r} is no URL; write https://HOST" in capsys.readouterr().err
