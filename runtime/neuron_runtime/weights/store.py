"""A folder of models (or artifacts), each under its digest: found, locked while it is made, published by one rename,
pruned.

    DIR/KEY/                 a complete entry: read-only files and a manifest; its mtime is when it was last used
    DIR/.partial/KEY/        a download or compilation: `files/`, and a download's journal; nothing loads it
    DIR/.locks/KEY           locked while the entry is made or deleted

Called by `fetching`, by `artifacts/` and by the commands. A folder that is mounted read-only is enough to find an
entry. It knows no source and never looks inside the files of an entry, except to verify them.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import os
import re
import shutil
import stat
import time
import uuid
from collections.abc import Callable, Container, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar

import msgspec

from neuron_runtime.console import say
from neuron_runtime.errors import ExitCode, FatalError
from neuron_runtime.weights.disk import make_folder, open_file, read_blocks, sync_folder, writing
from neuron_runtime.weights.hashing import FileHash
from neuron_runtime.weights.selection import is_adapter_part, is_part

MANIFEST = ".manifest.json"
MANIFEST_VERSION = 1
MAX_MANIFEST_BYTES = 2**24
PARTIAL, LOCKS, TRASH = ".partial", ".locks", ".trash"
KEY = re.compile(r"[0-9a-f]{40,64}(-text|-adapter)?")

DAY_SECONDS = 86_400.0
ABANDONED_SECONDS = DAY_SECONDS
"""A partial download without a write for so long is pruned."""
WAIT_SECONDS = 1.0
"""Interval of looks at the lock of another process."""
LOOKS_PER_LINE = 10
_NO_LOCKS = frozenset({errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP})


@dataclass(frozen=True)
class EntryKind:
    """What a store holds, and how errors speak of it."""

    noun: str
    work: str
    """What makes one."""
    accepts: Callable[[str], bool]
    """Whether an entry may have a file of this name."""
    damaged: ExitCode
    cure: str
    """What to do about a damaged one."""
    missing: ExitCode
    """If a store lacks it, or there is no store."""


MODELS = EntryKind(
    "model",
    "download",
    lambda name: is_part(name) or is_adapter_part(name),
    ExitCode.CHECKSUM_MISMATCH,
    "delete it and fetch the model again",
    ExitCode.WEIGHTS_MISSING,
)


class Damaged(FatalError):
    """An entry does not have the files of its manifest."""

    def __init__(self, folder: Path | str, what: str, kind: EntryKind = MODELS) -> None:
        self.reason = what
        self.what = f"{folder} is damaged: {what}"
        super().__init__(kind.damaged, f"{self.what}; {kind.cure}")


class NoLock(FatalError):
    """Something that is no file lies where the lock of a key should be."""

    def __init__(self, path: Path) -> None:
        super().__init__(ExitCode.INVALID_ENGINE_CONFIG, f"{path} is not a regular file: delete it")


class StoredFile(msgspec.Struct, frozen=True):
    name: str
    bytes: int
    sha256: str


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """What an entry contains and where it came from. `created`: seconds since 1970. `rule`: by which its files were
    chosen, see `Parts`."""

    version: int = MANIFEST_VERSION
    rule: int = 1
    digest: str
    uri: str
    created: float
    files: tuple[StoredFile, ...]

    @property
    def num_bytes(self) -> int:
        return sum(file.bytes for file in self.files)


M = TypeVar("M", bound=Manifest)


@dataclass(frozen=True)
class Entry:
    """A complete model or artifact of a store."""

    key: str
    folder: Path
    manifest: Manifest

    def damage(self) -> str:
        """What is wrong with names, kinds and sizes of its files, "" if nothing is. Reads no contents."""
        for file in self.manifest.files:
            path = self.folder / file.name
            try:
                status = path.lstat()
            except OSError as error:
                return f"{file.name}: {error.strerror}"
            if path.parent != self.folder and path.parent.resolve() != self.folder.resolve() / Path(file.name).parent:
                return f"{file.name} is behind a symbolic link"
            if not stat.S_ISREG(status.st_mode):
                return f"{file.name} is not a regular file"
            if status.st_size != file.bytes:
                return f"{file.name} has {status.st_size:,} bytes instead of {file.bytes:,}"
        return ""

    def verify(self, progress: Callable[[int], None], large_bytes: int | None = None) -> list[str]:
        """Compare the contents of every file with the manifest; returns what is wrong.

        Args:
            progress: called with the number of bytes just read.
            large_bytes: contents of larger files are not read; None: of all files.
        """
        buffer = bytearray(2**20)
        names = {file.name for file in self.manifest.files} | {MANIFEST}
        wrong = [f"{name} is not in the manifest" for name in sorted(names_below(self.folder) - names)]
        for file in self.manifest.files:
            if large_bytes is not None and file.bytes > large_bytes:
                continue
            contents, num_bytes = FileHash(file.bytes, None), 0
            try:
                for block in read_blocks(self.folder / file.name, 0, file.bytes + 1, buffer):
                    contents.update(block)
                    num_bytes += len(block)
                    progress(len(block))
            except OSError as error:
                wrong.append(f"{file.name}: {error.strerror}")
                continue
            if num_bytes != file.bytes:
                wrong.append(f"{file.name} has {num_bytes:,} bytes instead of {file.bytes:,}")
            elif contents.sha256 != file.sha256:
                wrong.append(f"{file.name}: its sha256 is {contents.sha256}, the manifest has {file.sha256}")
        return wrong


def read_entry(folder: Path, kind: EntryKind = MODELS) -> Entry | None:
    """The complete entry in a folder, None if there is no such folder. Raises Damaged."""
    try:
        if not stat.S_ISDIR(folder.lstat().st_mode):
            raise Damaged(folder, "it is not a folder", kind)
        fd = open_file(folder / MANIFEST, os.O_RDONLY)
    except FileNotFoundError:
        if os.path.lexists(folder):
            raise Damaged(folder, "it has no manifest", kind) from None
        return None
    except OSError as error:
        raise Damaged(folder, f"{error.strerror}", kind) from error
    with open(fd, "rb") as file:
        raw = file.read(MAX_MANIFEST_BYTES)
    manifest = parse_manifest(raw, Manifest, folder, kind)
    check_manifest(manifest, folder, kind)
    entry = Entry(folder.name, folder, manifest)
    if damage := entry.damage():
        raise Damaged(folder, damage, kind)
    return entry


def parse_manifest(raw: bytes, form: type[M], where: Path | str, kind: EntryKind) -> M:
    """Raises Damaged, naming `where`, if this is no manifest. Names of files are not checked."""
    try:
        return msgspec.json.decode(raw, type=form)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise Damaged(where, f"its manifest is malformed: {error}", kind) from error


def check_manifest(manifest: Manifest, where: Path | str, kind: EntryKind) -> None:
    """Raises Damaged, naming `where`, if this cannot be the manifest of an entry. Names of files come from it."""
    if manifest.version != MANIFEST_VERSION or not all(kind.accepts(file.name) for file in manifest.files):
        raise Damaged(where, "its manifest is not of this version", kind)


@dataclass(frozen=True)
class ListedEntry:
    """A line about something in a store. `used`, or written if it is partial, in seconds since 1970."""

    name: str
    state: Literal["complete", "damaged", "partial"]
    num_bytes: int
    used: float
    uri: str = ""
    problem: str = ""


@dataclass(frozen=True)
class Pruned:
    """Something that `prune` deletes, or would delete."""

    name: str
    num_bytes: int
    why: str


Progress = Callable[[str, int], Callable[[int], None]]
"""For a key and its number of bytes, a function that is called with the number of bytes just read."""


class Store:
    """One folder of models or artifacts."""

    def __init__(self, folder: Path, kind: EntryKind = MODELS) -> None:
        self.folder = folder
        self.address = str(folder)
        self.kind = kind

    def find(self, key: str) -> Entry | None:
        """The complete entry of a key, and a note that it is used now (if the store can be written).

        Raises Damaged if its manifest, or sizes and kinds of its files, are wrong.
        """
        entry = self.read(key)
        if entry is None:
            return None
        with contextlib.suppress(OSError):
            os.utime(entry.folder)
        return entry

    def read(self, key: str) -> Entry | None:
        """As `find`, without the note."""
        check_key(key)
        return read_entry(self.folder / key, self.kind)

    def sound(self, key: str, *, replace: bool = False) -> Entry | None:
        """As `find`, but a damaged entry counts as missing, and as an error in a read-only store.

        replace: remove a damaged entry; the caller holds its lock.
        """
        try:
            return self.find(key)
        except Damaged as error:
            if not os.access(self.folder, os.W_OK):
                raise
            if replace:
                say(f"{error.what}: fetching it again")
                self.discard(key)
            return None

    def prepare(self) -> None:
        """Make the folders of the store. Raises FatalError if they cannot be written."""
        with writing(self.folder):
            for name in (PARTIAL, LOCKS):
                make_folder(self.folder / name)

    @contextmanager
    def lock(self, key: str, title: str, does: str = "fetches it") -> Iterator[Path]:
        """Hold the key, and yield the folder for its download.

        The lock ends with the process, however that ends. Where the file system has no locks, the folder is nobody
        else's, so a killed download starts again.

        title, does: of what, and what its holder does, in the line about waiting.
        """
        check_key(key)
        fd = self._open_lock(key)
        try:
            with writing(self.folder):
                looks = itertools.count()
                while (locked := _locked(fd)) is False:
                    if next(looks) % LOOKS_PER_LINE == 0:
                        say(f"{title}: waiting for another process that {does} into this store")
                    time.sleep(WAIT_SECONDS)
                work = self.folder / PARTIAL / (key if locked else f"{key}.{uuid.uuid4().hex}")
                make_folder(work)
                make_folder(work / "files")
            yield work
        finally:
            os.close(fd)

    def publish(self, key: str, work: Path, manifest: Manifest) -> Entry:
        """Turn a checked download into an entry, by one rename."""
        files = work / "files"
        with writing(self.folder):
            names = {file.name for file in manifest.files}
            for left_over in names_below(files) - names:
                (files / left_over).unlink()
            (files / MANIFEST).write_bytes(msgspec.json.format(msgspec.json.encode(manifest)))
            for name in (*names, MANIFEST):
                with open(open_file(files / name, os.O_RDONLY), "rb") as file:
                    os.fchmod(file.fileno(), 0o644)
                    os.fsync(file)
            for folder in {(files / name).parent for name in names} | {files}:
                folder.chmod(0o755)
                sync_folder(folder)
            os.utime(files)
            sync_folder(files)
            try:
                files.rename(self.folder / key)
            except OSError:
                # Without locks another one may have been first.
                if self.read(key) is None:
                    raise
            sync_folder(self.folder)
            # Last: a download that was killed before the rename must stay writable.
            for name in (*names, MANIFEST):
                with contextlib.suppress(FileNotFoundError):
                    (self.folder / key / name).chmod(0o444)
        shutil.rmtree(work, ignore_errors=True)
        return Entry(key, self.folder / key, manifest)

    def discard(self, key: str) -> None:
        """Remove an entry. The caller holds its lock."""
        with writing(self.folder):
            trash = self.folder / TRASH / uuid.uuid4().hex
            make_folder(trash.parent)
            (self.folder / key).rename(trash)
            _remove(trash)

    def all_keys(self) -> list[str]:
        """Names of all entries, damaged ones included. Raises FatalError if the store cannot be read."""
        return [name for name in self._names(self.folder) if KEY.fullmatch(name)]

    def partials(self) -> Iterator[ListedEntry]:
        """All unfinished downloads, with the bytes that they take on the disk."""
        for name in self._names(self.folder / PARTIAL):
            if not KEY.fullmatch(name.partition(".")[0]):
                continue
            num_bytes, written = 0, 0.0
            for base, _, files in os.walk(self.folder / PARTIAL / name):
                for path in (base, *(os.path.join(base, file) for file in files)):
                    with contextlib.suppress(FileNotFoundError):
                        status = os.lstat(path)
                        num_bytes += status.st_blocks * 512 if stat.S_ISREG(status.st_mode) else 0
                        written = max(written, status.st_mtime)
            yield ListedEntry(name, "partial", num_bytes, written)

    def _names(self, folder: Path) -> list[str]:
        try:
            if folder != self.folder and folder.is_symlink():
                raise OSError(errno.ELOOP, "it is a symbolic link")
            return sorted(os.listdir(folder))
        except FileNotFoundError:
            if folder == self.folder:
                message = f"{self.folder} does not exist; name the folder of a store"
                raise FatalError(ExitCode.INVALID_ENGINE_CONFIG, message) from None
            return []
        except OSError as error:
            message = f"{folder} cannot be read: {error.strerror}"
            raise FatalError(ExitCode.INVALID_ENGINE_CONFIG, message) from error

    def _open_lock(self, key: str) -> int:
        path = self.folder / LOCKS / key
        with writing(self.folder):
            try:
                return open_file(path, os.O_RDWR | os.O_CREAT)
            except OSError as error:
                if not os.path.lexists(path) or stat.S_ISREG(path.lstat().st_mode):
                    raise
                raise NoLock(path) from error

    @contextmanager
    def held(self, key: str) -> Iterator[bool]:
        """Whether the key could be locked at once; it stays locked in the body."""
        try:
            fd = self._open_lock(key)
        except NoLock as error:
            say(str(error))
            yield False
            return
        try:
            with writing(self.folder):
                locked = _locked(fd)
            yield locked is not False
        finally:
            os.close(fd)

    def rows(self) -> Iterator[ListedEntry]:
        """Everything in it. Raises FatalError if it cannot be read."""
        for key in self.all_keys():
            try:
                entry = self.read(key)
            except Damaged as error:
                folder = self.folder / key
                yield ListedEntry(key, "damaged", bytes_in(folder), folder.lstat().st_mtime, problem=error.reason)
                continue
            if entry is not None:
                used = entry.folder.stat().st_mtime
                yield ListedEntry(key, "complete", entry.manifest.num_bytes, used, entry.manifest.uri)
        yield from self.partials()

    def verify(self, progress: Progress) -> Iterator[tuple[str, list[str]]]:
        """Each complete entry, and what is wrong with the contents of its files."""
        for key in self.all_keys():
            try:
                entry = self.read(key)
                if entry is not None:  # otherwise deleted meanwhile
                    yield key, entry.verify(progress(key, entry.manifest.num_bytes))
            except Damaged as error:
                yield key, [error.reason]

    def prune(
        self,
        keep: Iterable[str],
        unused_seconds: float,
        *,
        dry_run: bool,
        among: Container[str] | None = None,
        now: Callable[[], float] = time.time,
    ) -> Iterator[Pruned]:
        """Mark entries as used, then delete those that are unused, and abandoned downloads.

        Args:
            keep: digests or keys that are in use; all entries of their digests are marked before anything is deleted.
            among: keys of the entries that may be deleted; None: all.

        Raises FatalError if the store cannot be read or written.
        """
        kept = {key.partition("-")[0] for key in keep}
        if not dry_run:
            self.prepare()
        keys = self.all_keys()
        for key in keys:
            if key.partition("-")[0] in kept and not dry_run:
                with writing(self.folder), contextlib.suppress(FileNotFoundError):
                    os.utime(self.folder / key, (now(), now()), follow_symlinks=False)
        for key in keys:
            if key.partition("-")[0] in kept or (among is not None and key not in among):
                continue
            folder = self.folder / key
            if _unused(folder, now()) < unused_seconds:
                continue
            days = _unused(folder, now()) / DAY_SECONDS
            outcome = Pruned(key, bytes_in(folder), f"unused for {days:.0f} days")
            if dry_run:
                yield outcome
                continue
            with self.held(key) as held:
                # Somebody may have found it since.
                if held and _unused(folder, now()) >= unused_seconds:
                    self.discard(key)
                    yield outcome
        for partial in self.partials():
            if now() - partial.used < ABANDONED_SECONDS:
                continue
            outcome = Pruned(f"{PARTIAL}/{partial.name}", partial.num_bytes, f"abandoned {self.kind.work}")
            if dry_run:
                yield outcome
                continue
            with self.held(partial.name.partition(".")[0]) as held, writing(self.folder):
                if held:
                    _remove(self.folder / outcome.name)
                    yield outcome
        if not dry_run:
            # What a killed prune left.
            shutil.rmtree(self.folder / TRASH, ignore_errors=True)


def _locked(fd: int) -> bool | None:
    """Lock a file, unless another process has; None where the file system has no locks. Raises OSError."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        return None
    return True


def check_key(key: str) -> None:
    if not KEY.fullmatch(key):
        raise FatalError(ExitCode.INVALID_ENGINE_CONFIG, f"{key!r} is not a digest; it has 40 to 64 hexadecimal digits")


def _remove(path: Path) -> None:
    if path.is_symlink() or not path.is_dir():
        path.unlink()
    else:
        shutil.rmtree(path)


def _unused(folder: Path, now: float) -> float:
    """Seconds since its last use; negative if another process has deleted it."""
    try:
        return now - folder.lstat().st_mtime
    except FileNotFoundError:
        return -1.0


def names_below(folder: Path) -> set[str]:
    """Paths of everything in a folder and its subfolders, except the subfolders. Links are not followed."""
    paths = set()
    for base, folders, files in os.walk(folder):
        links = [name for name in folders if os.path.islink(os.path.join(base, name))]
        paths |= {os.path.relpath(os.path.join(base, name), folder) for name in (*files, *links)}
    return paths


def bytes_in(folder: Path) -> int:
    """Sizes of the files of an entry; 0 if it is no folder."""
    with contextlib.suppress(OSError):
        return sum((folder / name).lstat().st_size for name in names_below(folder))
    return 0
