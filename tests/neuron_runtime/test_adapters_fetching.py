"""Adapters from every source: what is taken, what is refused before it is copied, and the commands for both."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from helpers.adapters import write_adapter
from helpers.hub import Shelf, serving
from helpers.s3_server import BUCKET, S3Server
from helpers.tiny_model import TINY_CONFIG, write_tiny_model
from helpers.weights import contents
from neuron_runtime import inspection, record
from neuron_runtime.adapters.peft import AdapterRules, read_adapter
from neuron_runtime.artifacts.loading import find_adapter
from neuron_runtime.commands.command_line import main
from neuron_runtime.config import AdapterOptions, ModelSource, RuntimeConfig
from neuron_runtime.errors import ExitCode, FatalError
from neuron_runtime.local_settings import LocalSettings
from neuron_runtime.record import AdapterFacts
from neuron_runtime.weights.fetching import ADAPTER, CLAIMS_DIR_VARIABLE, Fetched, fetch, fetch_adapter
from neuron_runtime.weights.remote import RemoteStore
from neuron_runtime.weights.store import Store
from neuron_runtime.weights.transfer import Amount

URI = "hf://acme/support"
FILES = {"adapter_config.json", "adapter_model.safetensors", "chat_template.jinja", "generation_config.json"}
RULES = AdapterRules(max_rank=16)


def quiet(amount: Amount) -> None:
    """A report that nobody reads."""


def add_others(folder: Path) -> None:
    """What trainers leave beside an adapter, of which its chat template and its defaults are read."""
    (folder / "generation_config.json").write_text("{}")
    for name in (
        *(
            "README.md",
            "tokenizer.json",
            "chat_template.jinja",
            "optimizer.pt",
            "training_args.bin",
            "adapter_model.bin",
        ),
        *("checkpoint-9/adapter_config.json", "checkpoint-9/adapter_model.safetensors", "runs.safetensors"),
    ):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(b"x" * 1000)


@pytest.fixture
def shelf(tmp_path: Path) -> Shelf:
    """A hub with the model acme/tiny and its adapter acme/support."""
    root = tmp_path / "hub"
    write_tiny_model(root / "acme/tiny/main")
    add_others(write_adapter(root / "acme/support/main"))
    return Shelf(root)


@pytest.fixture(autouse=True)
def hub(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    with serving(shelf) as address:
        monkeypatch.setenv("HF_ENDPOINT", address)
        yield address


@pytest.fixture
def adapter(shelf: Shelf) -> Path:
    return shelf.root / "acme/support/main"


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


def brought(store: Store, uri: str = URI, **more: Any) -> tuple[Fetched, AdapterFacts]:
    return fetch_adapter(uri, store, quiet, **{"model_config": TINY_CONFIG, "rules": RULES, **more})


def refusal(store: Store, uri: str = URI, **more: Any) -> FatalError:
    with pytest.raises(FatalError) as caught:
        brought(store, uri, **more)
    return caught.value


# Which files


def test_only_the_files_of_an_adapter_are_fetched(shelf: Shelf, adapter: Path, store: Store) -> None:
    found, facts = brought(store)
    assert found.digest == shelf.commit("acme/support")
    assert contents(found.folder) == {name: (adapter / name).read_bytes() for name in FILES}
    assert facts == read_adapter(adapter, TINY_CONFIG, RULES)
    assert found.read_bytes == sum((adapter / name).stat().st_size for name in FILES)


def test_a_repository_may_be_model_and_adapter(shelf: Shelf, adapter: Path, store: Store) -> None:
    write_tiny_model(adapter)
    first, _ = brought(store)
    model = fetch(URI, store, quiet)
    assert model.digest == first.digest
    assert model.folder != first.folder
    assert "adapter_model.safetensors" not in contents(model.folder)
    assert brought(store)[0].folder == first.folder
    assert {row.state for row in store.rows()} == {"complete"}
    assert all(not wrong for _, wrong in store.verify(lambda key, total: lambda done: None))


def test_a_pinned_adapter_of_the_store_needs_no_source(
    shelf: Shelf, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, _ = brought(store)
    num_asked = len(shelf.asked)
    again, _ = brought(store, digest=first.digest)
    assert (again.folder, again.read_bytes, len(shelf.asked)) == (first.folder, 0, num_asked)
    assert not list(store.prune([first.digest], 0.0, dry_run=True))
    assert "fetch hf://acme/support" in str(refusal(Store(store.folder / "x"), digest=first.digest, on_miss="fail"))


def test_an_adapter_that_changed_is_another_one(shelf: Shelf, adapter: Path, store: Store) -> None:
    first, before = brought(store)
    write_adapter(adapter, seed=1)
    second, after = brought(store)
    assert first.folder != second.folder
    assert before.digest != after.digest
    assert brought(store, digest=first.digest)[1] == before


def age(folder: Path) -> None:
    """Make of an entry what an earlier version fetched, which knew neither chat templates nor defaults."""
    path = folder / ".manifest.json"
    manifest = json.loads(path.read_bytes())
    assert manifest.pop("rule") == ADAPTER.rule
    manifest["files"] = [one for one in manifest["files"] if one["name"].startswith("adapter_")]
    path.chmod(0o644)
    path.write_text(json.dumps(manifest))
    for name in FILES:
        if not name.startswith("adapter_"):
            (folder / name).unlink()


def test_the_text_that_an_earlier_version_did_not_fetch_is_fetched_once(
    shelf: Shelf, store: Store, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, facts = brought(store)
    age(first.folder)
    address = os.environ["HF_ENDPOINT"]
    # Without its source, and where a Job fetches it, it is served as it was.
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:1")
    assert set(contents(brought(store, digest=first.digest)[0].folder)) == set(sorted(FILES)[:2])
    assert "without its chat template" in capsys.readouterr().err
    monkeypatch.setenv("HF_ENDPOINT", address)
    num_asked = len(shelf.asked)
    assert set(contents(brought(store, digest=first.digest, on_miss="fail")[0].folder)) == set(sorted(FILES)[:2])
    assert len(shelf.asked) == num_asked
    found, again = brought(store, digest=first.digest)
    assert (found.folder, again, set(contents(found.folder))) == (first.folder, facts, FILES)
    num_asked = len(shelf.asked)
    brought(store, digest=first.digest)
    assert len(shelf.asked) == num_asked


@pytest.mark.slow
def test_a_store_in_s3_gets_the_text_that_an_earlier_version_did_not_fetch(
    server: S3Server, shelf: Shelf, store: Store
) -> None:
    digest, remote = shelf.commit("acme/support"), RemoteStore(f"s3://{BUCKET}/aged")
    old, _ = brought(store)
    age(old.folder)
    entry = store.find(f"{digest}-adapter")
    assert entry
    remote.upload(entry, quiet)
    assert main(["fetch", URI, remote.address, "--adapter", "--digest", digest]) == 0
    found, _ = brought(Store(store.folder / "pod"), digest=digest, remote=remote, on_miss="fail")
    assert set(contents(found.folder)) == FILES


# What is refused before it is copied


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"rank": 32}, ExitCode.RANK_TOO_HIGH),
        ({"config": {"use_dora": True}}, ExitCode.ADAPTER_NOT_SUPPORTED),
        ({"model": {**TINY_CONFIG, "hidden_size": 64}}, ExitCode.ADAPTER_MISMATCH),
        ({"more_tensors": {"x": np.zeros(1, np.float32)}}, ExitCode.INVALID_ADAPTER),
    ],
    ids=str,
)
def test_what_does_not_fit_is_refused_by_its_headers(
    shelf: Shelf, adapter: Path, store: Store, changes: dict[str, Any], code: ExitCode
) -> None:
    write_adapter(adapter, **changes)
    error = refusal(store)
    assert error.exit_code is code
    assert str(error).startswith(URI)
    assert not store.folder.exists()


def test_projections_that_are_not_served_are_refused_by_the_header(shelf: Shelf, store: Store) -> None:
    error = refusal(store, rules=AdapterRules(16, ("q_proj",)))
    assert error.exit_code is ExitCode.TARGETS_NOT_SERVED
    assert str(error).startswith(URI)


def test_pickled_weights_are_refused_by_name_and_nothing_is_copied(shelf: Shelf, adapter: Path, store: Store) -> None:
    (adapter / "adapter_model.safetensors").unlink()
    with pytest.raises(FatalError) as unchecked:
        fetch(URI, store, quiet, parts=ADAPTER)
    for error in (refusal(store), unchecked.value):
        assert error.exit_code is ExitCode.INVALID_ADAPTER
        assert f"{URI}/adapter_model.safetensors is missing: adapter_model.bin is not read" in str(error)
    assert not [asked for asked in shelf.asked if asked.path.endswith(".bin")]


@pytest.mark.parametrize("raw", [b"<html>a login page</html>", b"", (2**26).to_bytes(8, "little") + bytes(100)])
def test_a_file_that_is_no_safetensors_is_an_invalid_adapter(adapter: Path, store: Store, raw: bytes) -> None:
    (adapter / "adapter_model.safetensors").write_bytes(raw)
    error = refusal(store)
    assert error.exit_code is ExitCode.INVALID_ADAPTER
    assert f"{URI}/adapter_model.safetensors" in str(error)


def test_a_configuration_of_any_size_is_refused_by_its_size(adapter: Path, store: Store) -> None:
    with (adapter / "adapter_config.json").open("wb") as file:
        file.truncate(2**27)
    assert "134217728 bytes, the limit is" in str(refusal(store))


def test_a_model_is_no_adapter(store: Store) -> None:
    error = refusal(store, "hf://acme/tiny")
    assert error.exit_code is ExitCode.INVALID_ADAPTER
    assert "hf://acme/tiny/adapter_config.json is missing" in str(error) or "adapter_model" in str(error)


# In place


def test_an_adapter_in_a_folder_or_a_claim_stays_there(
    adapter: Path, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(CLAIMS_DIR_VARIABLE, str(tmp_path / "claims"))
    claimed = tmp_path / "claims/team/adapters/support"
    shutil.copytree(adapter, claimed)
    for uri, folder in ((f"file://{adapter}", adapter), ("pvc://team/adapters/support", claimed)):
        found, facts = brought(store, uri)
        assert (found.folder, found.digest, found.read_bytes) == (folder, facts.digest, 0)
        assert brought(store, uri, digest=facts.digest)[1] == facts
    assert not store.folder.exists()
    write_adapter(claimed, seed=1)
    error = refusal(store, "pvc://team/adapters/support", digest=facts.digest)
    assert error.exit_code is ExitCode.CHECKSUM_MISMATCH
    os.symlink("/etc/hostname", claimed / "link")
    assert refusal(store, "pvc://team/adapters/support").exit_code is ExitCode.INVALID_ADAPTER


def test_a_folder_that_is_not_there_is_not_found(store: Store, tmp_path: Path) -> None:
    error = refusal(store, f"file://{tmp_path}/absent")
    assert error.exit_code is ExitCode.MODEL_NOT_FOUND
    assert "adapter_config.json" in str(error)


# S3


@pytest.mark.slow
def test_an_adapter_in_s3_has_the_digest_of_its_files(server: S3Server, adapter: Path, tmp_path: Path) -> None:
    shutil.rmtree(adapter / "checkpoint-9")
    server.upload(adapter, "adapters/support")
    uri = f"s3://{BUCKET}/adapters/support"
    found, facts = brought(Store(tmp_path / "first"), uri)
    assert set(contents(found.folder)) == FILES
    (adapter / "tokenizer.json").write_text("changed")
    server.upload(adapter, "adapters/support")
    assert brought(Store(tmp_path / "second"), uri)[0].digest == found.digest
    write_adapter(adapter, seed=1)
    server.upload(adapter, "adapters/support")
    later, other = brought(Store(tmp_path / "second"), uri)
    assert later.digest != found.digest
    assert other.digest != facts.digest
    assert refusal(Store(tmp_path / "third"), uri, digest=found.digest).exit_code is ExitCode.CHECKSUM_MISMATCH


@pytest.mark.slow
def test_a_version_in_s3_that_was_pinned_without_its_text_is_still_found(server: S3Server, tmp_path: Path) -> None:
    """Earlier versions pinned the configuration and the tensors alone, and a NeuronAdapter keeps what it has pinned."""
    folder, uri = write_adapter(tmp_path / "plain"), f"s3://{BUCKET}/pinned/support"
    server.upload(folder, "pinned/support")
    before = brought(Store(tmp_path / "first"), uri)[0].digest
    for name in FILES - set(contents(folder)):
        (folder / name).write_text("{}")
    server.upload(folder, "pinned/support")
    assert brought(Store(tmp_path / "second"), uri)[0].digest != before
    found, _ = brought(Store(tmp_path / "third"), uri, digest=before)
    assert (found.digest, set(contents(found.folder))) == (before, FILES)
    write_adapter(folder, seed=1)
    server.upload(folder, "pinned/support")
    assert refusal(Store(tmp_path / "fourth"), uri, digest=before).exit_code is ExitCode.CHECKSUM_MISMATCH


@pytest.mark.slow
def test_a_store_in_s3_has_adapters_beside_models(
    server: S3Server, shelf: Shelf, adapter: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_tiny_model(adapter)
    address = f"s3://{BUCKET}/store"
    for flags in ([], ["--adapter"]):
        assert main(["fetch", URI, address, *flags, "--record", str(tmp_path / "record")]) == 0
    digest = shelf.commit("acme/support")
    assert capsys.readouterr().out.split() == [f"{address}/{digest}", f"{address}/{digest}-adapter"]
    num_asked = len(shelf.asked)
    found, _ = brought(Store(tmp_path / "pod"), digest=digest, remote=RemoteStore(address), on_miss="fail")
    assert set(contents(found.folder)) == FILES
    assert len(shelf.asked) == num_asked


# Serving


def test_what_serves_a_model_finds_its_adapters_at_any_source(shelf: Shelf, adapter: Path, tmp_path: Path) -> None:
    config = RuntimeConfig(
        version=1,
        model=ModelSource(uri="file:///model"),
        served_names=("model",),
        adapters=AdapterOptions(max_active=1, max_rank=8),
    )
    settings = LocalSettings(tmp_path / "weights", tmp_path / "artifacts")
    model_dir = shelf.root / "acme/tiny/main"
    found, facts = find_adapter(URI, model_dir, config, settings)
    assert set(contents(found)) == FILES
    assert found.is_relative_to(settings.weights_dir)
    assert facts == read_adapter(adapter, TINY_CONFIG, RULES)
    stored_only = replace(settings, on_weights_miss="fail")
    pinned = {"digest": facts.digest, "version": shelf.commit("acme/support")}
    assert find_adapter(URI, model_dir, config, stored_only, **pinned) == (found, facts)
    write_adapter(adapter, seed=1)
    with pytest.raises(FatalError, match="is pinned"):
        find_adapter(URI, model_dir, config, settings, digest=facts.digest)
    write_adapter(adapter, rank=16)
    with pytest.raises(FatalError, match=f"{URI}/adapter_config.json: r has rank 16") as caught:
        find_adapter(URI, model_dir, config, settings)
    assert caught.value.exit_code is ExitCode.RANK_TOO_HIGH


def test_an_adapter_of_a_rank_that_the_backend_does_not_compute_is_refused(
    shelf: Shelf, adapter: Path, tmp_path: Path
) -> None:
    config = RuntimeConfig(
        version=1,
        model=ModelSource(uri="file:///model"),
        served_names=("model",),
        backend="nxdi",
        adapters=AdapterOptions(max_active=1, max_rank=8),
    )
    settings = LocalSettings(tmp_path / "weights", tmp_path / "artifacts")
    write_adapter(adapter, rank=1)
    with pytest.raises(FatalError, match="rank 1 is not supported: this backend computes ranks from 2 on"):
        find_adapter(URI, shelf.root / "acme/tiny/main", config, settings)


# The commands


def called(tmp_path: Path, *arguments: str) -> tuple[int, record.Record]:
    path = tmp_path / "record"
    code = main([*arguments, "--record", str(path)])
    return code, msgspec.json.decode(path.read_bytes(), type=record.Record)


def test_inspect_tells_whether_an_adapter_fits_its_model(
    shelf: Shelf, adapter: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, outcome = called(tmp_path, "inspect", URI, "--adapter-of", "hf://acme/tiny")
    facts = read_adapter(adapter, TINY_CONFIG, RULES)
    assert (code, outcome.ok, outcome.facts) == (0, True, None)
    assert outcome.adapter == msgspec.structs.replace(facts, source_digest=shelf.commit("acme/support"))
    assert f"digest:       {facts.digest}" in capsys.readouterr().out
    assert not [
        asked for asked in shelf.asked if "acme/tiny" in asked.path and asked.path.endswith("model.safetensors")
    ]
    called(tmp_path, "inspect", f"file://{adapter}", "--adapter-of", "hf://acme/tiny", "--json")
    assert msgspec.json.decode(capsys.readouterr().out, type=AdapterFacts).source_digest == facts.digest


@pytest.mark.parametrize(
    ("flags", "reason"),
    [(["--max-rank", "2"], "RankTooHigh"), (["--targets", "q_proj,v_proj"], "TargetsNotServed")],
)
def test_inspect_takes_what_the_graphs_can_hold(tmp_path: Path, flags: list[str], reason: str) -> None:
    code, outcome = called(tmp_path, "inspect", URI, "--adapter-of", "hf://acme/tiny", *flags)
    assert (code, outcome.exit_code, outcome.reason) == (outcome.exit_code, ExitCode(code), reason)
    assert outcome.message.startswith(URI)


@pytest.mark.parametrize(
    ("backend", "reason", "words"),
    [
        ("nxdi", "AdapterNotSupported", "this backend computes ranks from 2 on"),
        ("torch", "", ""),
        ("optimum", "InvalidEngineConfig", "optimum serves no adapters"),
        ("vllm", "InvalidEngineConfig", "vllm serves no adapters"),
    ],
)
def test_inspect_refuses_what_replicas_of_the_backend_would(
    adapter: Path, tmp_path: Path, backend: str, reason: str, words: str
) -> None:
    write_adapter(adapter, rank=1)
    _, outcome = called(tmp_path, "inspect", URI, "--adapter-of", "hf://acme/tiny", "--backend", backend)
    assert outcome.reason == reason
    assert words in outcome.message


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{% broken", "line 1"),
        ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", "more than 0.2 s"),
        ("{{ messages[0].content.center(10 ** 10) }}", "1024 MiB"),
    ],
)
def test_inspect_tries_the_chat_template_of_an_adapter_within_limits(
    adapter: Path, tmp_path: Path, template: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inspection, "TEMPLATE_SECONDS", 0.2)
    (adapter / "chat_template.jinja").write_text(template)
    code, outcome = called(tmp_path, "inspect", URI, "--adapter-of", "hf://acme/tiny")
    assert (code, outcome.reason) == (ExitCode.INVALID_ADAPTER, "InvalidAdapter")
    assert URI in outcome.message
    assert words in outcome.message
    code, _ = called(tmp_path, "inspect", URI, "--adapter-of", "hf://acme/tiny", "--ignore-chat-template")
    assert code == 0


@pytest.mark.parametrize(
    ("files", "flags", "reason", "words"),
    [
        ({"chat_template.jinja": "w5{{ eos_token }}"}, [], "", ""),
        ({"chat_template.jinja": "<pad>"}, [], "AdapterNotSupported", "need '<pad>', which is no token of the model"),
        ({"chat_template.jinja": "<pad>"}, ["--ignore-chat-template"], "", ""),
        ({"tokenizer_config.json": '{"eos_token": "<e>"}'}, ["--ignore-chat-template"], "AdapterNotSupported", "'<e>'"),
        ({"generation_config.json": '{"eos_token_id": 9999}'}, [], "InvalidAdapter", "9999 is no token of the model"),
    ],
)
def test_inspect_tells_that_the_chats_of_an_adapter_need_what_its_model_lacks(
    adapter: Path, tmp_path: Path, *, files: dict[str, str], flags: list[str], reason: str, words: str
) -> None:
    (adapter / "chat_template.jinja").unlink()
    added = {"9000": {"content": "<pad>", "special": True}}
    for name, content in ({"tokenizer_config.json": json.dumps({"added_tokens_decoder": added})} | files).items():
        (adapter / name).write_text(content)
    _, outcome = called(tmp_path, "inspect", URI, "--adapter-of", "hf://acme/tiny", *flags)
    assert outcome.reason == reason
    assert words in outcome.message
    assert URI in outcome.message or not reason


def test_inspect_refuses_projections_that_do_not_exist(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["inspect", URI, "--adapter-of", "hf://acme/tiny", "--targets", "q_proj,lm_head"])
    assert "lm_head: choose among q_proj" in capsys.readouterr().err


def test_fetch_stores_an_adapter_by_its_commit(
    shelf: Shelf, store: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    digest = shelf.commit("acme/support")
    code, outcome = called(tmp_path, "fetch", URI, str(store.folder), "--adapter", "--digest", digest)
    assert code == 0
    assert outcome.weights is not None
    assert outcome.weights.digest == digest
    folder = Path(capsys.readouterr().out.strip())
    assert set(contents(folder)) == FILES
    assert brought(store, digest=digest)[0].folder == folder
    assert main(["weights", "ls", str(store.folder)]) == 0
    assert f"{digest}-adapter" in capsys.readouterr().out


def test_fetch_replaces_an_adapter_whose_contents_have_changed(
    store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    """A replica reads all of it and refuses it, so that a Job is to bring it again."""
    found, facts = brought(store)
    path = found.folder / "adapter_model.safetensors"
    raw = path.read_bytes()
    path.chmod(0o644)
    path.write_bytes(raw[:-1] + bytes([raw[-1] ^ 1]))
    command = ["fetch", URI, str(store.folder), "--digest", found.digest, "--adapter"]
    assert main(command) == 0
    assert "adapter_model.safetensors: its sha256 is" in capsys.readouterr().err
    assert brought(store, digest=found.digest)[1] == facts
    assert main(command) == 0
    assert "nothing to fetch" in capsys.readouterr().err


def test_fetch_of_what_is_no_adapter_ends_with_its_reason(store: Store, tmp_path: Path) -> None:
    code, outcome = called(tmp_path, "fetch", "hf://acme/tiny", str(store.folder), "--adapter")
    assert (code, outcome.reason) == (64, "InvalidAdapter")
