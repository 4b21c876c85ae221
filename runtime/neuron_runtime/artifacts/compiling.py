"""Compiles a model into a store, once for all who wait.

Called by the command `compile`, and by `loading` if an artifact is missing. Compilers run in processes of their own
(`process`); this module starts, watches and stops them, and knows what it means how they end.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from neuron_runtime.artifacts.key import compiled_part, covered, key_of
from neuron_runtime.artifacts.process import Began, Ended, Failed, Lines, Made, Message
from neuron_runtime.artifacts.store import ARTIFACTS, DOCUMENT, Artifact, find
from neuron_runtime.backend_protocol import ProgressCallback
from neuron_runtime.checkpoint import CONFIG_FILE, read_checkpoint
from neuron_runtime.config import RuntimeConfig
from neuron_runtime.console import bytes_text, say, seconds_text
from neuron_runtime.engine.backends import backend_package, planned_graphs
from neuron_runtime.errors import ExitCode, FatalError
from neuron_runtime.host import describe_exit, memory_limit, num_oom_kills, session_bytes
from neuron_runtime.weights.disk import make_folder, writing
from neuron_runtime.weights.store import (
    Damaged,
    Entry,
    Manifest,
    Store,
    StoredFile,
    names_below,
    read_entry,
)

if TYPE_CHECKING:
    from neuron_runtime.weights.remote import RemoteStore
    from neuron_runtime.weights.transfer import Amount

WATCH_SECONDS = 0.5
"""Interval of looks at a running compiler."""
MAX_SHARE = 0.99
"""The share of a stage that has not ended: after the last graph comes the compiler's own end."""
MAX_OUTPUT_BYTES = 4096
MAX_TAIL_CHARACTERS = 600
OUT_OF_MEMORY = ("Cannot allocate memory", "std::bad_alloc", "virtual memory exhausted")
"""What compilers print where the kernel refuses memory instead of killing."""


@dataclass(frozen=True)
class Wanted:
    """An artifact by what its key covers, and what it is compiled from."""

    package: str
    """The module of the backend."""
    config: RuntimeConfig
    """Only its compiled part."""
    model_dir: Path
    cover: dict[str, Any]

    @property
    def key(self) -> str:
        return key_of(self.cover)


def wanted_artifact(config: RuntimeConfig, model_dir: Path, digest: str = "") -> Wanted:
    """What must be compiled to serve a model. Raises InvalidConfig if the backend does not compile with these settings.

    Args:
        model_dir: the model, see `BackendPackage.compiler`.
        digest: that of the model; default: from the configuration or the folder.
    """
    package, part = backend_package(config), compiled_part(config)
    digest = digest or config.model.served_digest or digest_of(model_dir, with_weights=package.needs_weights(config))
    needs = package.compiler(part, model_dir).needs
    return Wanted(package.__name__, part, model_dir, covered(config.backend, digest, needs))


def make(
    wanted: Wanted, store: Store, progress: ProgressCallback, remote: RemoteStore | None = None
) -> tuple[Entry, bool]:
    """The artifact as a complete entry of the store, compiled unless it is there; and whether it was there.

    Of several processes that make it at the same time in one folder, one compiles and the others wait. A damaged one is
    replaced.

    Args:
        remote: another store, from which it is copied, or to which it is copied once it is compiled.

    Raises:
        FatalError: COMPILE_FAILED with the last lines of the compiler, COMPILE_OUT_OF_MEMORY with the number,
            STORAGE_FULL, or a store cannot be written.
        SourceUnreachable: the other store does not respond.
    """
    entry, reused = _stored(wanted, store, progress, remote), True
    if entry is None:
        entry, reused = _make(wanted, store, progress)
    if remote is not None:
        remote.upload(entry, amount_line(progress, f"copying the artifact to {remote.address}"))
    return entry, reused


def download(wanted: Wanted, store: Store, progress: ProgressCallback, remote: RemoteStore) -> Entry | None:
    """The artifact of another store as an entry of this one; None if that has none.

    Raises:
        FatalError: ARTIFACT_MISSING if it is damaged; STORAGE_FULL, WEIGHTS_UNAUTHORIZED, or this store cannot be
            written.
        SourceUnreachable: the other store does not respond.
    """
    try:
        remote.download(wanted.key, store, amount_line(progress, f"copying the artifact from {remote.address}"))
    except FatalError as error:
        if error.exit_code != ExitCode.CHECKSUM_MISMATCH:
            raise
        raise FatalError(ExitCode.ARTIFACT_MISSING, str(error)) from error
    return find(store, wanted.cover)


def amount_line(progress: ProgressCallback, stage: str) -> Callable[[Amount], None]:
    """Reports bytes as a stage."""
    return lambda amount: progress(stage, amount.done_bytes / max(1, amount.total_bytes))


def _stored(wanted: Wanted, store: Store, progress: ProgressCallback, remote: RemoteStore | None) -> Entry | None:
    """An intact artifact of one of the stores. A damaged one is removed, or left to be replaced."""
    with contextlib.suppress(Damaged):
        if entry := find(store, wanted.cover, whole=True):
            return entry
    if remote is None or remote.intact(wanted.key) is None:
        return None
    try:
        return download(wanted, store, progress, remote)
    except FatalError as error:
        if error.exit_code != ExitCode.ARTIFACT_MISSING:
            raise
        say(f"{error}: compiling it again")
        remote.discard(wanted.key)
        return None


def _make(wanted: Wanted, store: Store, progress: ProgressCallback) -> tuple[Entry, bool]:
    store.prepare()
    with store.lock(wanted.key, f"artifact {wanted.key}", "compiles it") as work:
        try:
            if entry := find(store, wanted.cover, whole=True):
                return entry, True
        except Damaged as error:
            say(f"{error.what}: compiling it again")
            store.discard(wanted.key)
        files = work / "files"
        with writing(work):
            shutil.rmtree(files)
            make_folder(files)
        for line in planned_graphs(wanted.config, wanted.model_dir):
            say(line)
        artifact = _compile(wanted, files, progress)
        with writing(work):
            (files / DOCUMENT).write_bytes(msgspec.json.format(msgspec.json.encode(artifact)))
            stored = tuple(_stored_file(files, name) for name in sorted(names_below(files)))
        manifest = Manifest(digest=wanted.key, uri=wanted.config.model.uri, created=time.time(), files=stored)
        entry = store.publish(wanted.key, work, manifest)
    say(
        f"compiled {len(artifact.graphs)} graphs in {seconds_text(artifact.seconds)} with "
        f"{bytes_text(artifact.peak_bytes)} of memory: artifact {wanted.key}, {bytes_text(manifest.num_bytes)}"
    )
    return entry, False


def digest_of(model_dir: Path, *, with_weights: bool) -> str:
    """The digest of a model that nobody pinned."""
    with contextlib.suppress(Damaged):
        if entry := read_entry(model_dir):
            return entry.manifest.digest
    if with_weights:
        return read_checkpoint(model_dir).digest
    return _sha256(model_dir / CONFIG_FILE)


def _compile(wanted: Wanted, files: Path, progress: ProgressCallback) -> Artifact:
    began = time.monotonic()
    ended = _run("compile", wanted, files, progress)
    _run("check", wanted, files, progress)
    return Artifact(
        cover=wanted.cover,
        tools=ended.tools,
        graphs=ended.graphs,
        seconds=round(time.monotonic() - began, 3),
        peak_bytes=ended.peak_bytes,
    )


def _run(work: Literal["compile", "check"], wanted: Wanted, files: Path, progress: ProgressCallback) -> Ended:
    with tempfile.TemporaryDirectory(prefix="neuron-serving-compile-", ignore_cleanup_errors=True) as scratch:
        return _Process(work, wanted, files, Path(scratch)).wait(progress)


class _Process:
    """A compiler at work, in a session of its own: what it starts is stopped with it."""

    def __init__(self, work: Literal["compile", "check"], wanted: Wanted, files: Path, scratch: Path) -> None:
        self._work = work
        self._stage = "checking the compiled graphs" if work == "check" else "preparing to compile"
        self._output = scratch / "output"
        self._share = 0.0
        self._peak_bytes = 0
        config, folder = scratch / "config.json", scratch / "work"
        # It works elsewhere, where a relative path would lead nowhere.
        model_dir, files = wanted.model_dir.absolute(), files.absolute()
        config.write_bytes(msgspec.json.encode(wanted.config))
        folder.mkdir()
        environment = {**os.environ, "TMPDIR": str(folder)}
        if work == "check":
            environment["PATH"] = ""
        self._num_oom_kills = num_oom_kills()
        self._read_fd, write_fd = os.pipe()
        try:
            with self._output.open("wb") as output:
                self._process = subprocess.Popen(
                    [
                        *(sys.executable, "-P", "-m", "neuron_runtime.artifacts.process", work),
                        *(f"--package={wanted.package}", f"--config={config}", f"--model-dir={model_dir}"),
                        *(f"--folder={files}", f"--messages-fd={write_fd}"),
                    ],
                    cwd=folder,
                    env=environment,
                    # Nothing is written to it: it tells the process that this one has ended.
                    stdin=subprocess.PIPE,
                    stdout=output,
                    stderr=output,
                    pass_fds=(write_fd,),
                    start_new_session=True,
                )
        finally:
            os.close(write_fd)

    def wait(self, progress: ProgressCallback) -> Ended:
        """Until it has ended well. Raises FatalError."""
        last: Message | None = None
        lines = Lines()
        try:
            while True:
                progress(self._stage, min(self._share, MAX_SHARE))
                ended = self._process.poll() is not None
                if select.select([self._read_fd], [], [], 0 if ended else WATCH_SECONDS)[0]:
                    raw = os.read(self._read_fd, 2**16)
                    for last in lines.feed(raw):
                        self._note(last, progress)
                    if raw:
                        continue
                    self._process.wait()
                    break
                if ended:
                    break
                self._peak_bytes = max(self._peak_bytes, session_bytes(self._process.pid))
        finally:
            self._stop()
        if isinstance(last, Ended) and self._process.returncode == 0:
            progress(self._stage, 1.0)
            return msgspec.structs.replace(last, peak_bytes=max(self._peak_bytes, last.peak_bytes))
        raise self._failure(last)

    def _note(self, message: Message, progress: ProgressCallback) -> None:
        if isinstance(message, Began):
            self._stage = f"compiling graph {message.graph} of {message.num_graphs} ({message.name})"
            if message.together:
                self._stage = f"compiling {message.num_graphs} graphs ({message.name})"
            self._share = 0.0
            progress(self._stage, self._share)
        if isinstance(message, Made):
            self._share = message.graph / message.num_graphs
            memory = f", {bytes_text(self._peak_bytes)} of memory" if self._peak_bytes else ""
            seconds = seconds_text(message.seconds)
            say(f"graph {message.graph} of {message.num_graphs} is ready: {message.name}, {seconds}{memory}")

    def _stop(self) -> None:
        """End it with everything that it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        os.close(self._read_fd)
        assert self._process.stdin is not None
        self._process.stdin.close()

    def _failure(self, last: Message | None) -> FatalError:
        output = self._tail()
        code = ExitCode(last.exit_code) if isinstance(last, Failed) else ExitCode.COMPILE_FAILED
        killed = num_oom_kills() > self._num_oom_kills
        if killed or (code == ExitCode.COMPILE_FAILED and any(text in output for text in OUT_OF_MEMORY)):
            code = ExitCode.COMPILE_OUT_OF_MEMORY
        if code == ExitCode.COMPILE_OUT_OF_MEMORY:
            limit = memory_limit()
            bound = "this machine has" if limit is None else f"the memory limit of {bytes_text(limit)}"
            message = (
                f"{self._stage}: the compiler needs more memory than {bound} (its processes had "
                f"{bytes_text(self._peak_bytes)} when last seen): give it more"
            )
            return FatalError(code, message)
        if isinstance(last, Failed):
            what = cause(last.message) or last.message
            sys.stderr.write(last.trace)
        else:
            what = describe_exit("compiler", self._process.returncode)
        if code == ExitCode.COMPILE_FAILED and output:
            sys.stderr.write(output + "\n")
            what += f"; its last lines: {cause(output) or output[-MAX_TAIL_CHARACTERS:]}"
        return FatalError(code, f"{self._stage}: {what}")

    def _tail(self) -> str:
        with self._output.open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - MAX_OUTPUT_BYTES))
            return file.read().decode(errors="replace").strip()


def cause(output: str) -> str:
    """The first lines in which a compiler names an error, behind commands of thousands of characters; empty: none."""
    lines = [line.strip() for line in output.splitlines() if " error: " in line]
    return "; ".join(lines)[:MAX_TAIL_CHARACTERS]


def _stored_file(folder: Path, name: str) -> StoredFile:
    """Raises FatalError for a name that a store must not have, or what is no regular file."""
    path = folder / name
    if not ARTIFACTS.accepts(name) or path.is_symlink() or not path.is_file():
        raise FatalError(ExitCode.COMPILE_FAILED, f"the compiler left {name!r}, which is no plain, visible file")
    return StoredFile(name, path.stat().st_size, _sha256(path))


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
