"""A store in a real S3 server: uploads, downloads, and what killed, rival and hostile uploaders leave."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest

from helpers.s3_server import BUCKET, S3Server, use
from helpers.weights import CHUNK_BYTES, NUM_READERS, contents, size, write_model
from neuron_runtime import record
from neuron_runtime.commands.command_line import main
from neuron_runtime.config import ModelSource
from neuron_runtime.errors import ExitCode, FatalError, InvalidConfig
from neuron_runtime.offline.llm import LLM
from neuron_runtime.weights import fetching
from neuron_runtime.weights.fetching import Fetched, fetch, materialize, supply
from neuron_runtime.weights.remote import RemoteFile, RemoteManifest, RemoteStore
from neuron_runtime.weights.store import DAY_SECONDS, MANIFEST, Damaged, Entry, Store, StoredFile
from neuron_runtime.weights.transfer import Amount, Tools, TransferLimits

MODEL = f"s3://{BUCKET}/origin/chat"
LIMITS = TransferLimits(NUM_READERS, CHUNK_BYTES)

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "chat")


@pytest.fixture(scope="module", autouse=True)
def uploaded(running: S3Server, model: Path) -> None:
    running.upload(model, "origin/chat")


@pytest.fixture
def remote(server: S3Server, request: pytest.FixtureRequest) -> RemoteStore:
    """An empty store."""
    return store_at(re.sub(r"\W+", "-", request.node.name))


@pytest.fixture(scope="module")
def local(running: S3Server, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A local store with the model."""
    folder = tmp_path_factory.mktemp("local") / "store"
    with pytest.MonkeyPatch.context() as monkeypatch:
        use(running, monkeypatch)
        fetch(MODEL, Store(folder), quiet)
    return folder


@pytest.fixture
def entry(local: Path, tmp_path: Path) -> Entry:
    """The model in a local store of the test's own."""
    store = Store(shutil.copytree(local, tmp_path / "uploader"))
    entry = store.find(store.all_keys()[0])
    assert entry is not None
    return entry


def store_at(prefix: str) -> RemoteStore:
    return RemoteStore(f"s3://{BUCKET}/stores/{prefix}", tools=Tools(sleep=lambda seconds: None, limits=LIMITS))


def quiet(amount: Amount) -> None:
    """A report that nobody reads."""


def supplied(remote: RemoteStore, folder: Path, uri: str = MODEL) -> Fetched:
    return supply(uri, remote, Store(folder), quiet, quiet)


def served(remote: RemoteStore, folder: Path, digest: str, *, with_weights: bool = True) -> Fetched:
    parts = fetching.MODEL if with_weights else fetching.TEXT
    return fetch(MODEL, Store(folder), quiet, digest, remote=remote, on_miss="fail", parts=parts)


def objects(remote: RemoteStore, key: str) -> list[str]:
    return sorted(item.name for item in remote.objects(f"{key}/"))


def put(server: S3Server, remote: RemoteStore, name: str, raw: bytes) -> None:
    prefix = remote.address.removeprefix(f"s3://{BUCKET}/")
    server.client().put_object(Bucket=BUCKET, Key=f"{prefix}/{name}", Body=raw)


def other_contents(entry: Entry, folder: Path) -> Entry:
    """Another entry of the same key, as a compiler may make it."""
    copy = Store(folder)
    copy.prepare()
    with copy.lock(entry.key, "model") as work:
        for file in entry.manifest.files:
            (work / "files" / file.name).write_bytes((entry.folder / file.name).read_bytes())
        changed = work / "files" / "config.json"
        changed.write_bytes(changed.read_bytes() + b" ")

        files = tuple(
            StoredFile(file.name, (work / "files" / file.name).stat().st_size,
                       hashlib.sha256((work / "files" / file.name).read_bytes()).hexdigest())
            for file in entry.manifest.files
        )  # fmt: skip
        return copy.publish(entry.key, work, msgspec.structs.replace(entry.manifest, files=files))


class TestCopies:
    def test_a_model_is_stored_once_and_served_from_there(
        self, server: S3Server, remote: RemoteStore, model: Path, tmp_path: Path
    ) -> None:
        first = supplied(remote, tmp_path / "scratch")
        assert first == Fetched(remote.uri_of(first.digest), first.digest, size(model), size(model))
        server.faults.sent_bytes.clear()
        server.received.clear()
        again = supplied(remote, tmp_path / "another")
        assert again == Fetched(first.address, first.digest, size(model), 0)
        assert not server.faults.sent_bytes["model-00001-of-00004.safetensors"]
        assert not server.received

        server.asked.clear()
        found = served(remote, tmp_path / "server", first.digest)
        assert contents(found.folder) == contents(model)
        assert not [path for _, path, _ in server.asked if "/origin/" in path]
        entry = Store(tmp_path / "server").find(first.digest)
        assert entry is not None
        assert entry.verify(lambda num_bytes: None) == []

    def test_an_upload_in_parts_arrives_whole(
        self, server: S3Server, remote: RemoteStore, entry: Entry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("neuron_runtime.weights.remote.PART_BYTES", 5 * 2**20)
        files = {file.name: entry.folder / file.name for file in entry.manifest.files}
        big = files["model-00001-of-00004.safetensors"]
        big.chmod(0o644)
        with big.open("ab") as file:
            file.write(os.urandom(11 * 2**20))
        grown = resummed(entry)
        remote.upload(grown, quiet)
        assert [path for method, path, _ in server.asked if method == "POST" and path.endswith(big.name)]
        copy = remote.download(entry.key, Store(tmp_path / "copy"), quiet)
        assert copy is not None
        assert contents(copy.folder) == contents(entry.folder)

    def test_the_small_files_suffice_for_a_backend_without_weights(
        self, server: S3Server, remote: RemoteStore, entry: Entry, tmp_path: Path
    ) -> None:
        remote.upload(entry, quiet)
        server.faults.sent_bytes.clear()
        found = served(remote, tmp_path / "server", entry.key, with_weights=False)
        assert found.folder.name == f"{entry.key}-text"
        assert not [name for name in contents(found.folder) if name.endswith(".safetensors")]
        assert server.faults.num_sent_bytes < size(entry.folder) / 10

    def test_amounts_are_reported(self, remote: RemoteStore, entry: Entry, tmp_path: Path) -> None:
        amounts: list[Amount] = []
        remote.upload(entry, amounts.append)
        assert amounts[-1].done_bytes == amounts[-1].total_bytes == entry.manifest.num_bytes
        amounts.clear()
        remote.download(entry.key, Store(tmp_path / "copy"), amounts.append)
        assert amounts[-1].done_bytes == entry.manifest.num_bytes

    def test_a_model_of_no_store_is_an_error_that_names_both_stores(
        self, server: S3Server, remote: RemoteStore, tmp_path: Path
    ) -> None:
        for digest in ("0" * 64, ""):
            with pytest.raises(FatalError, match="is not in") as caught:
                served(remote, tmp_path / "server", digest)
            assert caught.value.exit_code is ExitCode.WEIGHTS_MISSING
            assert remote.address in str(caught.value)
            assert str(tmp_path / "server") in str(caught.value)
            assert digest in str(caught.value)
        assert not server.faults.num_sent_bytes

    def test_a_miss_is_fetched_from_the_source_if_that_is_permitted(
        self, server: S3Server, remote: RemoteStore, model: Path, tmp_path: Path
    ) -> None:
        folder = materialize(
            ModelSource(uri=MODEL), tmp_path, lambda stage, share: None, weights_store=remote.address
        )  # fmt: skip
        assert contents(folder) == contents(model)
        assert objects(remote, folder.name) == []


class TestInterruptions:
    def test_a_killed_upload_leaves_nothing_to_load_and_goes_on_later(
        self, server: S3Server, remote: RemoteStore, entry: Entry, tmp_path: Path
    ) -> None:
        server.upload_bytes_per_second = 400_000
        try:
            with start_upload(entry, remote) as process:
                while sum(server.received.values()) < 1_500_000 and process.poll() is None:
                    time.sleep(0.01)
                process.send_signal(signal.SIGKILL)
                process.wait(timeout=20)
        finally:
            server.upload_bytes_per_second = 0
        assert remote.find(entry.key) is None
        assert remote.download(entry.key, Store(tmp_path / "copy"), quiet) is None
        present = {name.partition("/")[2] for name in objects(remote, entry.key)}
        server.received.clear()
        remote.upload(entry, quiet)
        assert present
        assert not present & set(server.received)
        assert remote.find(entry.key) is not None

    def test_the_manifest_is_written_last(self, server: S3Server, remote: RemoteStore, entry: Entry) -> None:
        remote.upload(entry, quiet)
        prefix = remote.address.removeprefix("s3:/")
        written = [path for method, path, _ in server.asked if method == "PUT" and path.startswith(prefix)]
        assert written[-1] == f"{prefix}/{entry.key}/{MANIFEST}"
        assert len([path for path in written if not path.endswith("/.used")]) == len(entry.manifest.files) + 1

    def test_an_upload_repeats_what_failed(self, server: S3Server, remote: RemoteStore, entry: Entry) -> None:
        server.failures += [503, 0, 500]
        remote.upload(entry, quiet)
        assert remote.find(entry.key) is not None

    def test_a_damaged_local_entry_is_not_uploaded(self, remote: RemoteStore, entry: Entry) -> None:
        victim = entry.folder / "model-00002-of-00004.safetensors"
        victim.chmod(0o644)
        with victim.open("r+b") as file:
            file.seek(100_000)
            file.write(b"\xff\x00\xff")
        with pytest.raises(Damaged, match=f"{victim.name} differs from the manifest"):
            remote.upload(entry, quiet)
        assert objects(remote, entry.key) == []


class TestRivals:
    def test_of_two_uploads_with_other_contents_the_first_to_finish_stays_whole(
        self, remote: RemoteStore, entry: Entry, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        rival = other_contents(entry, tmp_path / "rival")

        class Late(RemoteStore):
            def _publish(self, key: str, manifest: RemoteManifest) -> bool:
                remote.upload(rival, quiet)
                return super()._publish(key, manifest)

        Late(remote.address).upload(entry, quiet)
        assert "another process stored it first" in capsys.readouterr().err
        before = objects(remote, entry.key)
        assert len(before) == len(rival.manifest.files) + 2
        remote.upload(entry, quiet)
        assert objects(remote, entry.key) == before
        copy = remote.download(entry.key, Store(tmp_path / "copy"), quiet)
        assert copy is not None
        assert contents(copy.folder) == contents(rival.folder)

    def test_uploads_at_the_same_time_end_with_one_whole_entry(
        self, remote: RemoteStore, entry: Entry, tmp_path: Path
    ) -> None:
        uploads = [start_upload(entry, remote), start_upload(other_contents(entry, tmp_path / "rival"), remote)]
        assert [process.wait(timeout=60) for process in uploads] == [0, 0]
        copy = remote.download(entry.key, Store(tmp_path / "copy"), quiet)
        assert copy is not None
        folders = {item.name.rpartition("/")[0].partition("/")[0] for item in remote.objects(f"{entry.key}/")}
        assert len(folders - {""}) == 1


class TestDamage:
    def test_a_replaced_object_is_found_by_the_next_fetch_and_cured(
        self, server: S3Server, remote: RemoteStore, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        digest = supplied(remote, tmp_path / "scratch").digest
        found = remote.find(digest)
        assert found is not None
        name = "model-00003-of-00004.safetensors"
        put(server, remote, f"{digest}/{found.manifest.content}/{name}", bytes(found.files[name].num_bytes))
        with pytest.raises(FatalError, match=f"{name}: its sha256 is") as caught:
            served(remote, tmp_path / "server", digest)
        assert caught.value.exit_code is ExitCode.CHECKSUM_MISMATCH
        assert not (tmp_path / "server" / digest).exists()
        capsys.readouterr()
        supplied(remote, tmp_path / "scratch")
        assert f"the CRC-32 of {name} is" in capsys.readouterr().err
        assert contents(served(remote, tmp_path / "server", digest).folder) == contents(model)

    @pytest.mark.parametrize("damage", ["missing", "truncated"])
    def test_an_incomplete_entry_is_damaged_and_replaced(
        self, server: S3Server, remote: RemoteStore, tmp_path: Path, damage: str
    ) -> None:
        digest = supplied(remote, tmp_path / "scratch").digest
        found = remote.find(digest)
        assert found is not None
        name = f"{digest}/{found.manifest.content}/config.json"
        if damage == "missing":
            remote.delete([name])
        else:
            put(server, remote, name, b"{}")
        with pytest.raises(Damaged, match=r"config\.json (is missing|has 2 bytes instead)"):
            served(remote, tmp_path / "server", digest)
        supplied(remote, tmp_path / "scratch")
        served(remote, tmp_path / "server", digest)

    def test_hostile_manifests_are_refused(
        self, server: S3Server, remote: RemoteStore, entry: Entry, tmp_path: Path
    ) -> None:
        first, *others = entry.manifest.files
        raw = (entry.folder / first.name).read_bytes()

        def manifest(name: str, num_bytes: int = first.bytes) -> RemoteManifest:
            files = (
                RemoteFile(name, num_bytes, first.sha256, ""),
                *(RemoteFile(file.name, 0, "", "") for file in others),
            )
            return RemoteManifest(digest=entry.key, uri=MODEL, created=0.0, files=files)

        hidden = manifest(MANIFEST)
        for file in hidden.files:
            put(server, remote, f"{entry.key}/{hidden.content}/{file.name}", raw if file.bytes else b"")
        manifests = [manifest("../../config.json"), manifest("/tmp/x"), manifest(first.name, -1), hidden]
        for body in (b"\xff{}", b"{}", b"", *map(msgspec.json.encode, manifests)):
            put(server, remote, f"{entry.key}/{MANIFEST}", body)
            with pytest.raises(Damaged) as caught:
                served(remote, tmp_path / "server", entry.key)
            assert str(caught.value).startswith(f"{remote.address}/{entry.key} is damaged: ")
            assert "\n" not in str(caught.value)
        assert not (tmp_path / "server").exists()
        remote.upload(entry, quiet)
        served(remote, tmp_path / "server", entry.key)

    @pytest.mark.parametrize("key", ["../x", "", "0" * 39, "a" * 40 + "/..", "0" * 64 + "\n"])
    def test_a_key_that_is_no_digest_is_refused(self, remote: RemoteStore, tmp_path: Path, key: str) -> None:
        for call in (remote.find, remote.discard, lambda key: remote.download(key, Store(tmp_path), quiet)):
            with pytest.raises(FatalError, match="is not a digest"):
                call(key)


class TestCare:
    def test_the_commands_list_and_verify_a_store(
        self, server: S3Server, remote: RemoteStore, entry: Entry, capsys: pytest.CaptureFixture[str]
    ) -> None:
        remote.upload(entry, quiet)
        damaged, partial = "a" * 64, "b" * 40
        put(server, remote, f"{damaged}/{MANIFEST}", b"{}")
        put(server, remote, f"{partial}/x/config.json", b"{}")
        put(server, remote, "README", b"nothing of a store")
        assert main(["weights", "ls", remote.address, "--json"]) == 0
        rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
        assert {name: row["state"] for name, row in rows.items()} == {
            entry.key: "complete", damaged: "damaged", partial: "partial"
        }  # fmt: skip
        assert (rows[entry.key]["bytes"], rows[entry.key]["uri"]) == (entry.manifest.num_bytes, MODEL)
        assert main(["weights", "verify", remote.address]) == 14
        captured = capsys.readouterr()
        assert f"{entry.key}: intact" in captured.out
        assert f"{damaged}: its manifest is malformed" in captured.out
        assert "1 of 2 models in" in captured.err
        found = remote.find(entry.key)
        assert found is not None
        name = "model-00002-of-00004.safetensors"
        put(server, remote, f"{entry.key}/{found.manifest.content}/{name}", bytes(found.files[name].num_bytes))
        assert main(["weights", "verify", remote.address]) == 14
        assert f"{entry.key}: {name}: its sha256 is" in capsys.readouterr().out

    def test_what_is_unused_or_abandoned_is_pruned(
        self, server: S3Server, remote: RemoteStore, entry: Entry, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        remote.upload(entry, quiet)
        unused, abandoned = "a" * 64, "b" * 40
        put(server, remote, f"{unused}/{MANIFEST}", b"{}")
        for name in (f"{abandoned}/x/config.json", "other/x"):
            put(server, remote, name, b"{}")
        before = all_objects(server, remote)
        assert pruned(remote, [entry.key], 9, days=0.9, dry_run=True) == []

        expected = [(unused, 2, "unused for 10 days"), (abandoned, 2, "abandoned upload")]
        assert sorted(pruned(remote, [entry.key], 9, days=10, dry_run=True)) == sorted(expected)
        assert all_objects(server, remote) == before
        assert sorted(pruned(remote, [entry.key], 9, days=10, dry_run=False)) == sorted(expected)
        left = all_objects(server, remote)
        assert left == {name for name in before if name.startswith((f"{entry.key}/", "other/"))}
        served(remote, tmp_path / "server", entry.key)
        assert main(["weights", "prune", remote.address, "--unused-days", "0"]) == 0
        assert "deleted " + entry.key in capsys.readouterr().out
        assert all_objects(server, remote) == {"other/x"}

    def test_a_use_is_noted_by_whoever_may_write(
        self, server: S3Server, entry: Entry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        client = server.client()
        client.create_bucket(Bucket="readable")
        remote = RemoteStore("s3://readable", tools=Tools(limits=LIMITS))
        remote.upload(entry, quiet)
        remote.delete([f"{entry.key}/.used"])
        everyone = (
            '{"Version":"2012-10-17","Statement":[{"Effect":"Allow","Principal":"*","Action":'
            '["s3:ListBucket","s3:GetObject"],"Resource":["arn:aws:s3:::readable","arn:aws:s3:::readable/*"]}]}'
        )
        client.put_bucket_policy(Bucket="readable", Policy=everyone)
        with monkeypatch.context() as reader:
            reader.delenv("AWS_ACCESS_KEY_ID")
            reader.delenv("AWS_SECRET_ACCESS_KEY")
            served(RemoteStore("s3://readable", tools=Tools(limits=LIMITS)), tmp_path / "reader", entry.key)
            with pytest.raises(FatalError, match="refused anonymous access"):
                RemoteStore("s3://readable").discard(entry.key)
        assert f"{entry.key}/.used" not in all_objects(server, remote)
        served(remote, tmp_path / "writer", entry.key)
        assert f"{entry.key}/.used" in all_objects(server, remote)


def pruned(
    remote: RemoteStore, keep: list[str], unused_days: float, *, days: float, dry_run: bool
) -> list[tuple[str, int, str]]:
    """What is pruned some days from now."""
    later = time.time() + days * DAY_SECONDS
    found = remote.prune(keep, unused_days * DAY_SECONDS, dry_run=dry_run, now=lambda: later)
    return [(one.name, one.num_bytes, one.why) for one in found]


def all_objects(server: S3Server, remote: RemoteStore) -> set[str]:
    bucket, _, prefix = remote.address.removeprefix("s3://").partition("/")
    found = server.client().list_objects_v2(Bucket=bucket, Prefix=prefix).get("Contents", [])
    return {item["Key"].removeprefix(prefix).lstrip("/") for item in found}


class TestRefusals:
    def test_a_bucket_that_does_not_exist_is_named(self, server: S3Server, tmp_path: Path) -> None:
        remote = RemoteStore("s3://no-such-bucket/models")
        for call in (lambda: supplied(remote, tmp_path), lambda: served(remote, tmp_path, "0" * 64)):
            with pytest.raises(FatalError, match="the bucket does not exist") as caught:
                call()
            assert caught.value.exit_code is ExitCode.WEIGHTS_MISSING
            assert "s3://no-such-bucket/models" in str(caught.value)

    def test_credentials_that_may_only_read_are_refused_by_name(
        self, server: S3Server, entry: Entry, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong-secret")
        with pytest.raises(FatalError, match="s3:PutObject") as caught:
            store_at("refused").upload(entry, quiet)
        assert caught.value.exit_code is ExitCode.WEIGHTS_UNAUTHORIZED
        assert "wrong-secret" not in str(caught.value)

    @pytest.mark.parametrize("uri", ["hf://acme/model", "https://host/models", "s3:/x", "file:///x"])
    def test_only_an_address_in_s3_is_a_store(self, uri: str) -> None:
        with pytest.raises(InvalidConfig, match=r"^--weights-store"):
            RemoteStore(uri)

    def test_the_offline_class_names_its_argument(self, server: S3Server) -> None:
        with pytest.raises(InvalidConfig, match="weights_store"):
            LLM(MODEL, weights_store="nowhere")

    def test_a_model_that_is_read_in_place_is_not_stored(self, remote: RemoteStore, tmp_path: Path) -> None:
        with pytest.raises(InvalidConfig, match="is read in place"):
            supplied(remote, tmp_path, f"file://{tmp_path}")


def test_the_commands_store_a_model_and_serve_a_miss_with_code_16(
    server: S3Server, remote: RemoteStore, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["fetch", MODEL, remote.address, "--record", str(tmp_path / "record")]) == 0
    outcome = msgspec.json.decode((tmp_path / "record").read_bytes(), type=record.Record)
    assert outcome.weights is not None
    digest = outcome.weights.digest
    assert outcome.weights == record.StoredWeights(digest=digest, bytes=size(model), read_bytes=size(model))
    assert capsys.readouterr().out == f"{remote.address}/{digest}\n"
    flags = ["--weights-dir", str(tmp_path / "weights"), "--on-weights-miss", "fail", "--port", "0"]
    command = [sys.executable, "-m", "neuron_runtime", "serve", MODEL, *flags, "--record", str(tmp_path / "record")]
    command += ["--weights-store", f"{remote.address}/elsewhere"]
    ended = subprocess.run(command, check=False, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 16, ended.stderr
    outcome = msgspec.json.decode((tmp_path / "record").read_bytes(), type=record.Record)
    assert (outcome.exit_code, outcome.reason) == (16, "WeightsMissing")
    assert f"or {remote.address}/elsewhere; fetch it there" in outcome.message
    assert main(["serve", MODEL, "--weights-store", "nowhere"]) == 2
    assert "--weights-store" in capsys.readouterr().err


def resummed(entry: Entry) -> Entry:
    """The entry with a manifest of its files as they are."""

    files = tuple(
        StoredFile(file.name, (entry.folder / file.name).stat().st_size,
                   hashlib.sha256((entry.folder / file.name).read_bytes()).hexdigest())
        for file in entry.manifest.files
    )  # fmt: skip
    return Entry(entry.key, entry.folder, msgspec.structs.replace(entry.manifest, files=files))


UPLOAD = """
import sys
from pathlib import Path
from neuron_runtime.weights.remote import RemoteStore
from neuron_runtime.weights.store import Store
folder, key, uri = sys.argv[1:]
RemoteStore(uri).upload(Store(Path(folder)).find(key), lambda amount: None)
"""


def start_upload(entry: Entry, remote: RemoteStore) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", UPLOAD, str(entry.folder.parent), entry.key, remote.address])
