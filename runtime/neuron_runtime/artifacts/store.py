"""Artifacts in a store: the document that each one has beside its graphs, and the search for one that fits.

Called by `compiling`, by whoever serves and by the commands. The store itself, with its locks, manifests and checksums,
is that of models (`weights/store.py`).
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from neuron_runtime.artifacts.key import differences, key_of
from neuron_runtime.errors import ExitCode, FatalError
from neuron_runtime.weights.fetching import open_remote
from neuron_runtime.weights.selection import is_plain
from neuron_runtime.weights.store import Damaged, Entry, EntryKind, Store, read_entry

if TYPE_CHECKING:
    from neuron_runtime.weights.remote import RemoteStore

DOCUMENT = "artifact.json"
MAX_DOCUMENT_BYTES = 2**20

MAX_DOCUMENTS = 32
"""So many documents of another store are read for an error message."""

LARGE_BYTES = 2**28
"""Larger files (weights that were compiled in) are not read twice when a model is loaded."""


def is_artifact_file(name: str) -> bool:
    """Whether an artifact may have a file of this name, which may lie in a subfolder."""
    return all(map(is_plain, name.split("/")))


ARTIFACTS = EntryKind(
    "artifact",
    "compilation",
    is_artifact_file,
    ExitCode.ARTIFACT_MISSING,
    "delete it and compile the model again",
    ExitCode.ARTIFACT_MISSING,
)


class CompiledGraph(msgspec.Struct, frozen=True):
    name: str
    seconds: float


class Artifact(msgspec.Struct, frozen=True, kw_only=True):
    """What an artifact is, and how it was made."""

    cover: dict[str, Any]
    """What its key covers, see `key`."""
    tools: dict[str, str]
    """Versions of the programs that compiled it."""
    graphs: tuple[CompiledGraph, ...]
    seconds: float
    peak_bytes: int
    """Most memory that the compiler's processes had together."""

    def differences(self, cover: Mapping[str, Any]) -> list[str]:
        """What it covers, as far as it is not this."""
        return differences(cover, self.cover)


def artifact_store(folder: Path) -> Store:
    return Store(folder, ARTIFACTS)


def remote_artifacts(uri: str) -> RemoteStore | None:
    """The store in S3 at this address; None for none."""
    return open_remote(uri, "--artifacts-store", ARTIFACTS) if uri else None


def read_artifact(entry: Entry) -> Artifact:
    """The document of a complete entry. Raises Damaged."""
    try:
        with (entry.folder / DOCUMENT).open("rb") as file:
            artifact = msgspec.json.decode(file.read(MAX_DOCUMENT_BYTES), type=Artifact)
    except OSError as error:
        raise Damaged(entry.folder, f"{DOCUMENT}: {error.strerror}", ARTIFACTS) from error
    except msgspec.MsgspecError as error:
        raise Damaged(entry.folder, f"{DOCUMENT} is malformed: {error}", ARTIFACTS) from error
    return artifact


def find(store: Store, cover: Mapping[str, Any], *, whole: bool = False) -> Entry | None:
    """The artifact that covers exactly this, and a note that it is used now. Raises Damaged if its files are wrong.

    Args:
        whole: compare the contents of every file with its checksum; False: without those of large files.
    """
    entry = store.find(key_of(cover))
    if entry is not None and (differing := _checked(entry, whole).differences(cover)):
        raise Damaged(entry.folder, f"{DOCUMENT} does not belong to its key: {differing[0]}", ARTIFACTS)
    return entry


def read_fitting(folder: Path, cover: Mapping[str, Any]) -> tuple[Entry | None, list[str]]:
    """The artifact in a folder of any name, and what differs from what is wanted; None if there is nothing.

    Raises:
        Damaged: its files are wrong, or are no artifact.
        FatalError: ARTIFACT_MISSING, the folder cannot be read.
    """
    try:
        is_empty = folder.is_dir() and not any(folder.iterdir())
    except OSError as error:
        raise FatalError(ExitCode.ARTIFACT_MISSING, f"cannot read {folder}: {error.strerror}") from error
    entry = None if is_empty else read_entry(folder, ARTIFACTS)
    return entry, [] if entry is None else _checked(entry, whole=False).differences(cover)


def _checked(entry: Entry, whole: bool) -> Artifact:
    """Graphs are programs: what is damaged must not run."""
    if wrong := entry.verify(lambda num_bytes: None, None if whole else LARGE_BYTES):
        raise Damaged(entry.folder, wrong[0], ARTIFACTS)
    return read_artifact(entry)


def nearest(entries: Iterable[Entry], cover: Mapping[str, Any]) -> tuple[Entry, list[str]] | None:
    """The artifact with the fewest values that differ, the newest of equals; and those values."""
    best: tuple[Entry, list[str]] | None = None
    for entry in entries:
        try:
            candidate = entry, read_artifact(entry).differences(cover)
        except Damaged:
            continue
        if best is None or (len(candidate[1]), -entry.manifest.created) < (len(best[1]), -best[0].manifest.created):
            best = candidate
    return best


def entries_of(store: Store) -> Iterator[Entry]:
    """All complete artifacts of a folder, none if it does not exist."""
    for key in store.all_keys() if store.folder.is_dir() else ():
        with contextlib.suppress(Damaged):
            if entry := store.read(key):
                yield entry


def documents_of(remote: RemoteStore) -> Iterator[Entry]:
    """Some complete artifacts of another store, with nothing but their documents, in a folder that ends with the
    iteration."""
    rows = (row for row in remote.rows() if row.state == "complete")
    with tempfile.TemporaryDirectory(prefix="neuron-serving-artifacts-") as folder:
        for row in islice(rows, MAX_DOCUMENTS):
            with contextlib.suppress(FatalError):
                store = artifact_store(Path(folder))
                entry = remote.download(row.name, store, lambda amount: None, wanted=lambda name: name == DOCUMENT)
                if entry is not None:
                    yield entry
