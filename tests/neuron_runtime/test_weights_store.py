"""The folder of models: what it finds, what it refuses, verification and pruning."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import shutil
import stat
import subprocess
import time
from pathlib import Path

import pytest

from neuron_runtime.errors import ExitCode, FatalError
from neuron_runtime.weights import store as store_module
from neuron_runtime.weights.fetching import fetch
from neuron_runtime.weights.store import (
    DAY_SECONDS,
    MANIFEST,
    Damaged,
    Entry,
    Manifest,
    Pruned,
    Store,
    StoredFile,
)
from neuron_runtime.weights.transfer import Amount

ONE, TWO, THREE = "1" * 40, "2" * 40, "3" * 64
FILES = {"config.json": b"{}", "model.safetensors": b"weights"}


def quiet(amount: Amount) -> None:
    """A report that nobody reads."""


def publish(store: Store, key: str, files: dict[str, bytes] | None = None) -> Entry:
    files = FILES if files is None else files
    store.prepare()
    with store.lock(key, "model") as work:
        for name, raw in files.items():
            (work / "files" / name).write_bytes(raw)
        listed = tuple(StoredFile(name, len(raw), hashlib.sha256(raw).hexdigest()) for name, raw in files.items())
        return store.publish(key, work, Manifest(digest=key, uri="hf://a/b", created=time.time(), files=listed))


def age(path: Path, days: float) -> None:
    then = time.time() - days * DAY_SECONDS
    os.utime(path, (then, then))


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


class TestEntries:
    def test_an_entry_is_found_with_read_only_files_and_leaves_no_download(self, store: Store) -> None:
        publish(store, ONE)
        entry = store.find(ONE)
        assert entry is not None
        assert entry.manifest.num_bytes == 9
        assert {path.name: path.read_bytes() for path in entry.folder.iterdir() if path.name != MANIFEST} == FILES
        assert {stat.S_IMODE(path.stat().st_mode) for path in entry.folder.iterdir()} == {0o444}
        assert list(store.partials()) == []
        assert store.find(TWO) is None

    def test_a_store_mounted_read_only_is_enough_to_find_a_model(self, store: Store, tmp_path: Path) -> None:
        if os.geteuid() != 0:
            pytest.skip("needs root: mounts a folder read-only")
        publish(store, ONE)
        mounted = tmp_path / "mounted"
        mounted.mkdir()
        subprocess.run(["mount", "--bind", store.folder, mounted], check=True)
        try:
            subprocess.run(["mount", "-o", "remount,bind,ro", mounted], check=True)
            assert fetch("hf://a/b", Store(mounted), quiet, ONE).folder == mounted / ONE
            (store.folder / ONE / "config.json").unlink()
            with pytest.raises(Damaged, match=r"is damaged: config\.json"):
                fetch("hf://a/b", Store(mounted), quiet, ONE)
        finally:
            subprocess.run(["umount", mounted], check=True)

    def test_finding_an_entry_counts_as_use(self, store: Store) -> None:
        entry = publish(store, ONE)
        age(entry.folder, 30)
        store.find(ONE)
        assert time.time() - entry.folder.stat().st_mtime < 60

    @pytest.mark.parametrize("key", ["", "..", "../x", "main", "A" * 40, "1" * 39, f"{ONE}/..", f"{ONE}-other"])
    def test_only_digests_are_keys(self, store: Store, key: str) -> None:
        with pytest.raises(FatalError, match="is not a digest"):
            store.find(key)

    def test_a_pipe_in_place_of_a_manifest_is_damage(self, store: Store) -> None:
        folder = publish(store, ONE).folder
        (folder / ".manifest.json").unlink()
        os.mkfifo(folder / ".manifest.json")
        with pytest.raises(Damaged, match="is not a regular file"):
            store.find(ONE)

    def test_damage_is_named(self, store: Store, tmp_path: Path) -> None:
        def truncate(folder: Path) -> None:
            (folder / "model.safetensors").chmod(0o644)
            (folder / "model.safetensors").write_bytes(b"w")

        def link(folder: Path) -> None:
            (folder / "model.safetensors").unlink()
            (folder / "model.safetensors").symlink_to("/etc/passwd")

        def device(folder: Path) -> None:
            (folder / "model.safetensors").unlink()
            os.mkfifo(folder / "model.safetensors")

        def no_manifest(folder: Path) -> None:
            (folder / MANIFEST).unlink()

        def hostile_manifest(folder: Path) -> None:
            text = (folder / MANIFEST).read_text().replace("config.json", "../config.json")
            (folder / MANIFEST).unlink()
            (folder / MANIFEST).write_text(text)

        def malformed_manifest(folder: Path) -> None:
            (folder / MANIFEST).unlink()
            (folder / MANIFEST).write_text("{")

        def linked_entry(folder: Path) -> None:
            folder.rename(tmp_path / "elsewhere")
            folder.symlink_to(tmp_path / "elsewhere")

        cases = {
            truncate: "model.safetensors has 1 bytes instead of 7",
            link: "model.safetensors is not a regular file",
            device: "model.safetensors is not a regular file",
            no_manifest: "it has no manifest",
            hostile_manifest: "its manifest is not of this version",
            malformed_manifest: "its manifest is malformed",
            linked_entry: "it is not a folder",
        }
        for number, (damage, words) in enumerate(cases.items()):
            key = f"{number}" * 40
            damage(publish(store, key).folder)
            with pytest.raises(Damaged, match=words) as caught:
                store.find(key)
            assert caught.value.exit_code is ExitCode.CHECKSUM_MISMATCH

    def test_the_second_of_two_publishers_takes_the_entry_of_the_first(
        self, store: Store, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Where the file system has no locks."""

        def no_locks(fd: int, operation: int) -> None:
            raise OSError(errno.ENOLCK, "No locks available")

        monkeypatch.setattr(fcntl, "flock", no_locks)
        store.prepare()
        with store.lock(ONE, "model") as mine:
            other = publish(store, ONE)
            assert mine != store.folder / ".partial" / ONE
            for name, raw in FILES.items():
                (mine / "files" / name).write_bytes(raw)
            assert store.publish(ONE, mine, other.manifest).folder == other.folder
        assert list(store.partials()) == []

    def test_a_held_key_makes_others_wait(self, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(store_module, "WAIT_SECONDS", 0.001)
        store.prepare()
        with store.lock(ONE, "model"):

            class Waited(Exception):
                pass

            def say(line: str) -> None:
                raise Waited(line)

            monkeypatch.setattr(store_module, "say", say)
            with pytest.raises(Waited, match="chat: waiting for another process that makes it"):
                store.lock(ONE, "chat", "makes it").__enter__()
            with store.lock(TWO, "chat"):
                pass


class TestVerify:
    def test_an_intact_entry_has_nothing_wrong(self, store: Store) -> None:
        num_bytes: list[int] = []
        assert publish(store, ONE).verify(num_bytes.append) == []
        assert sum(num_bytes) == 9

    def test_every_wrong_file_is_named(self, store: Store) -> None:
        entry = publish(store, ONE, {"config.json": b"{}", "a.safetensors": b"aaa", "b.safetensors": b"bbb"})
        for name in ("config.json", "b.safetensors"):
            (entry.folder / name).chmod(0o644)
        (entry.folder / "b.safetensors").write_bytes(b"bxb")
        (entry.folder / "config.json").write_bytes(b"{  }")
        (entry.folder / "a.safetensors").unlink()
        (entry.folder / "extra.bin").write_bytes(b"")
        wrong = "\n".join(entry.verify(lambda num_bytes: None))
        assert "extra.bin is not in the manifest" in wrong
        assert "b.safetensors: its sha256 is" in wrong
        assert "a.safetensors: No such file" in wrong
        assert "config.json has 3 bytes instead of 2" in wrong


class TestPrune:
    def names(self, pruned: object) -> list[str]:
        return [one.name for one in pruned if isinstance(one, Pruned)]  # type: ignore[attr-defined]

    def test_what_is_unused_is_deleted_and_what_is_kept_is_marked(self, store: Store) -> None:
        for key in (ONE, TWO, THREE, f"{ONE}-text"):
            age(publish(store, key).folder, 10)
        age(store.folder / THREE, 3)
        found = list(store.prune([ONE], 7 * DAY_SECONDS, dry_run=False))
        assert self.names(found) == [TWO]
        assert found[0].num_bytes >= 9
        assert store.all_keys() == [ONE, f"{ONE}-text", THREE]
        assert self.names(store.prune([], 7 * DAY_SECONDS, dry_run=False)) == []
        assert not (store.folder / ".trash").exists()

    @pytest.mark.parametrize("kept", [ONE, f"{ONE}-text"])
    def test_a_name_as_listed_keeps_all_entries_of_its_digest(self, store: Store, kept: str) -> None:
        for key in (ONE, f"{ONE}-text", TWO):
            age(publish(store, key).folder, 10)
        assert self.names(store.prune([kept], 0, dry_run=False)) == [TWO]

    def test_a_dry_run_deletes_and_marks_nothing(self, store: Store) -> None:
        for key in (ONE, TWO):
            age(publish(store, key).folder, 10)
        before = (store.folder / ONE).stat().st_mtime
        assert self.names(store.prune([ONE], 7 * DAY_SECONDS, dry_run=True)) == [TWO]
        assert store.all_keys() == [ONE, TWO]
        assert (store.folder / ONE).stat().st_mtime == before

    def test_a_marked_entry_is_kept_even_for_zero_days(self, store: Store) -> None:
        publish(store, ONE)
        publish(store, TWO)
        assert self.names(store.prune([ONE], 0, dry_run=False)) == [TWO]

    def test_an_entry_that_is_being_replaced_is_left_alone(self, store: Store) -> None:
        age(publish(store, ONE).folder, 10)
        with store.lock(ONE, "model"):
            assert self.names(store.prune([], DAY_SECONDS, dry_run=False)) == []

    def test_downloads_are_deleted_a_day_after_their_last_write(self, store: Store) -> None:
        store.prepare()
        for key in (ONE, TWO, THREE):
            with store.lock(key, "model") as work:
                (work / "files" / "model.safetensors").write_bytes(b"part")
        for key in (ONE, TWO):
            for path in (store.folder / ".partial" / key).rglob("*"):
                age(path, 2)
            age(store.folder / ".partial" / key, 2)
        with store.lock(TWO, "model"):
            age(store.folder / ".partial" / TWO, 2)
            age(store.folder / ".partial" / TWO / "files", 2)
            assert self.names(store.prune([], DAY_SECONDS, dry_run=True)) == [f".partial/{ONE}", f".partial/{TWO}"]
            assert self.names(store.prune([], DAY_SECONDS, dry_run=False)) == [f".partial/{ONE}"]
        assert [partial.name for partial in store.partials()] == [TWO, THREE]

    def test_foreign_files_and_links_are_not_followed(self, store: Store, tmp_path: Path) -> None:
        store.prepare()
        precious = tmp_path / "precious"
        precious.mkdir()
        (precious / "file").write_text("precious")
        (store.folder / ONE).symlink_to(precious)
        (store.folder / "notes").mkdir()
        os.utime(store.folder / ONE, (0, 0), follow_symlinks=False)
        age(store.folder / "notes", 100)
        assert self.names(store.prune([], DAY_SECONDS, dry_run=False)) == [ONE]
        assert (precious / "file").read_text() == "precious"
        assert (store.folder / "notes").is_dir()

    @pytest.mark.parametrize("link", [".partial", f".partial/{ONE}", f".partial/{ONE}/files"])
    def test_a_link_in_place_of_a_folder_of_the_store_leads_to_no_deletion(
        self, store: Store, tmp_path: Path, link: str
    ) -> None:
        precious = tmp_path / "precious" / ONE
        (precious / "files").mkdir(parents=True)
        (precious / "files" / "file").write_text("precious")
        for path in (precious / "files" / "file", precious / "files", precious, precious.parent):
            age(path, 100)
        store.prepare()
        planted = store.folder / link
        planted.parent.mkdir(exist_ok=True)
        if planted.is_dir():
            planted.rmdir()
        planted.symlink_to({1: precious.parent, 2: precious}.get(len(Path(link).parts), precious / "files"))
        with contextlib.suppress(FatalError):
            list(store.prune([], 0, dry_run=False))
        if planted.is_symlink():
            with pytest.raises(FatalError, match="is a symbolic link"):
                publish(store, ONE)
        assert (precious / "files" / "file").read_text() == "precious"

    def test_what_is_no_download_is_left_alone(self, store: Store) -> None:
        store.prepare()
        (store.folder / ".partial/.nfs01").write_text("in use")
        age(store.folder / ".partial/.nfs01", 100)
        assert self.names(store.prune([], 0, dry_run=False)) == []
        assert (store.folder / ".partial/.nfs01").exists()

    def test_two_prunes_at_the_same_time_do_not_disturb_each_other(self, store: Store) -> None:
        for key in (ONE, TWO, THREE):
            age(publish(store, key).folder, 10)
        first = store.prune([], 0, dry_run=False)
        assert next(first).name == ONE
        assert self.names(store.prune([], 0, dry_run=False)) == [TWO, THREE]
        assert self.names(first) == []

    @pytest.mark.parametrize("planted", ["folder", "pipe"])
    def test_what_is_no_lock_file_is_named_and_blocks_only_its_key(
        self, store: Store, planted: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        for key in (ONE, TWO):
            age(publish(store, key).folder, 10)
        lock = store.folder / ".locks" / ONE
        lock.unlink()
        lock.mkdir() if planted == "folder" else os.mkfifo(lock)
        assert self.names(store.prune([], 0, dry_run=False)) == [TWO]
        assert f"{lock} is not a regular file: delete it" in capsys.readouterr().err
        with pytest.raises(FatalError, match="is not a regular file: delete it"), store.lock(ONE, "model"):
            pass

    def test_a_folder_that_does_not_exist_is_reported(self, tmp_path: Path) -> None:
        with pytest.raises(FatalError, match="does not exist"):
            list(Store(tmp_path / "typo").prune([], 0, dry_run=True))


def test_a_damaged_entry_of_a_writable_store_is_fetched_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from helpers.hub import Shelf, serving
    from helpers.tiny_model import write_tiny_model

    write_tiny_model(tmp_path / "hub/acme/tiny/main")
    shelf = Shelf(tmp_path / "hub")
    with serving(shelf) as address:
        monkeypatch.setenv("HF_ENDPOINT", address)
        store = Store(tmp_path / "store")
        digest = shelf.commit("acme/tiny")
        first = fetch("hf://acme/tiny", store, quiet, digest)
        (first.folder / "model.safetensors").unlink()
        second = fetch("hf://acme/tiny", store, quiet, digest)
        assert second.folder == first.folder
        assert second.read_bytes == second.num_bytes
        assert "model.safetensors: No such file or directory: fetching it again" in capsys.readouterr().err
        shutil.rmtree(store.folder)
