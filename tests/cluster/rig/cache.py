"""The cache folder of everything slow to build: programs, images, generated code, and the state of the running cluster.
An entry is named by a key of its inputs, built under a lock in a temporary folder and moved into place, so that an
interrupted or concurrent run never leaves half an entry. Old entries are removed."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

_TAG = "CACHEDIR.TAG"
_TAG_TEXT = (
    "Signature: 8a477f597d28d172789f06886806bc55\n# Made by neuron-serving's tests; `make clean-cache` empties it.\n"
)
_MAX_ENTRIES_OF_A_KIND = 3


def cache_root(environment: Mapping[str, str] | None = None) -> Path:
    """NEURON_SERVING_CACHE, or `neuron-serving` in the user's cache folder."""
    environment = os.environ if environment is None else environment
    if chosen := environment.get("NEURON_SERVING_CACHE"):
        return Path(chosen).absolute()
    base = environment.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "neuron-serving"


def content_key(*parts: str | bytes | Path) -> str:
    """A key of 16 hex digits over strings, bytes and files; a folder stands for its files with names and modes."""
    digest = hashlib.sha256()

    def add(data: bytes) -> None:
        digest.update(len(data).to_bytes(8, "big"))
        digest.update(data)

    def add_file(name: str, path: Path) -> None:
        add(name.encode())
        add(oct(path.stat().st_mode & 0o111).encode())
        with path.open("rb") as file:
            add(hashlib.file_digest(file, "sha256").digest())

    for part in parts:
        if isinstance(part, bytes):
            add(part)
        elif isinstance(part, str):
            add(part.encode())
        elif part.is_dir():
            for file in sorted(p for p in part.rglob("*") if p.is_file() and "__pycache__" not in p.parts):
                add_file(str(file.relative_to(part)), file)
        else:
            add_file(part.name, part)
    return digest.hexdigest()[:16]


@dataclass(frozen=True)
class Cache:
    root: Path

    @classmethod
    def default(cls) -> Cache:
        return cls(cache_root())

    def folder(self, *names: str) -> Path:
        """A folder below the root, created if missing."""
        self._mark()
        path = self.root.joinpath(*names)
        path.mkdir(parents=True, exist_ok=True)
        return path

    @contextlib.contextmanager
    def lock(self, name: str, *, on_wait: Callable[[], None] = lambda: None) -> Iterator[None]:
        """Holds the machine-wide lock `name`; `on_wait` is called once if another process holds it."""
        path = self.folder("locks") / f"{name}.lock"
        with path.open("a") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                on_wait()
                fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def find(self, kind: str, name: str, key: str) -> Path | None:
        """The entry if it exists, marked as used now."""
        path = self._path(kind, name, key)
        try:
            os.utime(path)
        except FileNotFoundError:
            return None
        return path

    def entry(
        self,
        kind: str,
        name: str,
        key: str,
        build: Callable[[Path], None],
        *,
        max_entries: int = _MAX_ENTRIES_OF_A_KIND,
    ) -> Path:
        """The folder of entry `name` with content `key`, built by `build(empty folder)` if missing.

        The `max_entries` most recently used entries of this kind and name are kept.
        An exception of `build` is raised and leaves no entry.
        """
        if found := self.find(kind, name, key):
            return found
        with self.lock(
            f"{kind}-{name}", on_wait=lambda: print(f"waiting: another run is building {kind} {name}", flush=True)
        ):
            if found := self.find(kind, name, key):
                return found
            path = self._path(kind, name, key)
            for rest in path.parent.glob(f".making-{name}-*"):  # left by killed runs: we hold the lock
                shutil.rmtree(rest)
            temporary = Path(tempfile.mkdtemp(prefix=f".making-{name}-", dir=self.folder(kind)))
            try:
                temporary.chmod(0o755)
                build(temporary)
                temporary.rename(path)
            except BaseException:
                shutil.rmtree(temporary)
                raise
            entries = sorted(self._entries(kind, name), key=lambda p: p.stat().st_mtime_ns, reverse=True)
            for old in entries[max_entries:]:
                shutil.rmtree(old)
            return path

    def bound(self, name: str, max_bytes: int) -> None:
        """Removes the folder `name` below the root if it is larger than `max_bytes`."""
        folder = self.root / name
        if sum(_disk_bytes(folder.rglob("*"))) > max_bytes:
            shutil.rmtree(folder, ignore_errors=True)  # another process may be filling it

    def clear(self) -> int:
        """Removes the whole cache and returns the number of bytes freed.

        Raises:
            ValueError: this class did not create the folder.
        """
        if not self.root.exists():
            return 0
        if not (self.root / _TAG).is_file():
            raise ValueError(f"{self.root} has no {_TAG}: it is not a cache of this project, nothing was removed")
        num_bytes = sum(_disk_bytes(self.root.rglob("*")))
        shutil.rmtree(self.root)
        return num_bytes

    def _mark(self) -> None:
        tag = self.root / _TAG
        if not tag.exists():
            self.root.mkdir(parents=True, exist_ok=True)
            tag.write_text(_TAG_TEXT)

    def _path(self, kind: str, name: str, key: str) -> Path:
        return self.root / kind / f"{name}@{key}"

    def _entries(self, kind: str, name: str) -> Iterable[Path]:
        return (self.root / kind).glob(f"{name}@*")


def _disk_bytes(paths: Iterable[Path]) -> Iterator[int]:
    seen = set()
    for path in paths:
        status = path.lstat()
        if (status.st_dev, status.st_ino) not in seen:
            seen.add((status.st_dev, status.st_ino))
            yield status.st_blocks * 512


def main(arguments: list[str]) -> int:
    """`python -m cluster.rig.cache clear`, or no argument to list its content."""
    cache = Cache.default()
    if arguments == ["clear"]:
        if (cache.root / "run").exists():
            print("the cluster's state is in the cache: run `make cluster-down` first", file=sys.stderr)
            return 1
        print(f"{cache.root}: {cache.clear() / 1e9:.1f} GB freed")
        return 0
    if arguments:
        print("usage: python -m cluster.rig.cache [clear]", file=sys.stderr)
        return 2
    for kind in sorted(p for p in cache.root.glob("*") if p.is_dir()):
        print(f"{sum(_disk_bytes(kind.rglob('*'))) / 1e6:10.1f} MB  {kind.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
