"""Artifacts in a store: files in subfolders, the one that fits, the nearest that does not."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from helpers.artifacts import COVER, GRAPHS, publish
from neuron_runtime.artifacts.key import key_of
from neuron_runtime.artifacts.store import DOCUMENT, artifact_store, entries_of, find, nearest
from neuron_runtime.commands.command_line import main
from neuron_runtime.errors import ExitCode
from neuron_runtime.weights.store import Damaged, Store, StoredFile


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return artifact_store(tmp_path / "store")


def test_an_artifact_with_subfolders_is_found_and_verified(store: Store) -> None:
    made = publish(store, COVER, GRAPHS)
    assert find(store, COVER) == made
    assert (made.folder / "weights/tp0.bin").read_bytes() == b"shard"
    assert made.verify(lambda num_bytes: None) == []
    assert find(store, {**COVER, "model": "cd"}) is None


def test_changed_files_in_subfolders_are_found(store: Store) -> None:
    made = publish(store, COVER, GRAPHS)
    shard = made.folder / "weights/tp0.bin"
    shard.unlink()
    shard.write_bytes(b"drahs")
    (made.folder / "weights/more").write_bytes(b"")
    names = [line.partition(":")[0].partition(" ")[0] for line in made.verify(lambda num_bytes: None)]
    assert names == ["weights/more", "weights/tp0.bin"]


def test_a_truncated_file_names_itself_and_the_cure(store: Store) -> None:
    made = publish(store, COVER, GRAPHS)
    path = made.folder / "one.bin"
    path.chmod(0o644)
    path.write_bytes(b"g")
    with pytest.raises(Damaged) as caught:
        find(store, COVER)
    assert caught.value.exit_code == ExitCode.ARTIFACT_MISSING
    message = f"{made.folder} is damaged: one.bin has 1 bytes instead of 5; delete it and compile the model again"
    assert str(caught.value) == message


def test_a_linked_subfolder_is_not_followed(store: Store, tmp_path: Path) -> None:
    made = publish(store, COVER, GRAPHS)
    (made.folder / "weights").rename(tmp_path / "elsewhere")
    (made.folder / "weights").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(Damaged, match="behind a symbolic link"):
        find(store, COVER)


def test_a_document_under_another_key_is_damage(store: Store) -> None:
    made = publish(store, COVER, GRAPHS)
    other = {**COVER, "model": "cd"}
    made.folder.rename(store.folder / key_of(other))
    with pytest.raises(Damaged, match=f"{DOCUMENT} does not belong to its key: model"):
        find(store, other)


@pytest.mark.parametrize("name", ["../evil", "/evil", "a/../../evil", "a//b", ".hidden", "a/.hidden", "a\nb", ""])
def test_a_manifest_that_names_a_file_elsewhere_is_refused(store: Store, name: str) -> None:
    made = publish(store, COVER, {})
    manifest = msgspec.structs.replace(made.manifest, files=(StoredFile(name, 0, ""),))
    path = made.folder / ".manifest.json"
    path.chmod(0o644)
    path.write_bytes(msgspec.json.encode(manifest))
    with pytest.raises(Damaged, match="manifest"):
        find(store, COVER)


def test_the_nearest_artifact_has_the_fewest_differences_and_is_the_newest(store: Store) -> None:
    far = {**COVER, "model": "cd", "shapes": {"rows": [1], "length": 32}}
    older = {**COVER, "shapes": {"rows": [1, 8], "length": 32}}
    newer = {**COVER, "shapes": {"rows": [1, 8], "length": 128}}
    for created, cover in enumerate((far, older, newer), start=1):
        publish(store, cover, GRAPHS, created)
    damaged = publish(store, {**COVER, "version": 2}, GRAPHS)
    (damaged.folder / ".manifest.json").unlink()
    found = nearest(entries_of(store), COVER)
    assert found is not None
    assert found[0].key == key_of(newer)
    assert found[1] == ["shapes.length: 128 instead of 64"]


def test_an_empty_store_has_no_nearest_artifact(store: Store) -> None:
    store.prepare()
    assert nearest(entries_of(store), COVER) is None


def test_the_commands_look_after_artifacts(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    made, other = publish(store, COVER, GRAPHS), publish(store, {**COVER, "model": "cd"}, GRAPHS)
    assert main(["artifacts", "ls", "--json", str(store.folder)]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert {row["name"]: row["state"] for row in listed} == dict.fromkeys((made.key, other.key), "complete")
    assert main(["artifacts", "verify", str(store.folder)]) == 0
    (made.folder / "one.bin").chmod(0o644)
    (made.folder / "one.bin").write_bytes(b"hparg")
    assert main(["artifacts", "verify", str(store.folder)]) == ExitCode.ARTIFACT_MISSING
    printed = capsys.readouterr()
    assert f"{made.key}: one.bin: its sha256 is" in printed.out
    assert f"{other.key}: intact" in printed.out
    assert f"1 of 2 artifacts in {store.folder} are damaged; delete them: they are compiled again" in printed.err
    assert main(["artifacts", "prune", str(store.folder), "--unused-days", "0", "--keep", made.key]) == 0
    assert store.all_keys() == [made.key]
