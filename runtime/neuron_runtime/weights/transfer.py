"""Copies files of any source to a folder: the one loop for all of them.

Files are split into chunks that several threads read at the same time, each with a small buffer. A journal makes a
killed transfer resume. A file is hashed in order, from the page cache, right behind its chunks; one that does not match
is dropped.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from neuron_runtime.errors import ExitCode, FatalError
from neuron_runtime.weights.disk import make_folder, open_file, read_blocks, write_all, writing
from neuron_runtime.weights.hashing import FileHash
from neuron_runtime.weights.journal import Claim, Journal
from neuron_runtime.weights.source import (
    BLOCK_BYTES,
    TIMEOUT_SECONDS,
    Attempts,
    BrokenAnswer,
    Check,
    Listing,
    Source,
    SourceFile,
)


@dataclass(frozen=True, slots=True)
class TransferLimits:
    """num_readers: ranges that are read at the same time.
    chunk_bytes: of one range; a killed transfer reads at most `num_readers` of them again.
    num_files: files that are read at the same time, so that their hashes are computed in parallel.
    min_bytes: a reader that gets fewer within TIMEOUT_SECONDS is cut off and tries again.
    """

    num_readers: int = 8
    chunk_bytes: int = 16 * 2**20
    num_files: int = 4
    min_bytes: int = 2**18


STOP_SECONDS = 2.0
"""How long a transfer that failed waits for its other readers."""


@dataclass(frozen=True, slots=True)
class Amount:
    """How far a transfer is. `read_bytes`: from the source, in this run."""

    done_bytes: int
    total_bytes: int
    read_bytes: int


@dataclass(frozen=True, slots=True)
class Chunk:
    file: int
    """Index of the file."""
    number: int
    """Within the file."""
    begin: int
    end: int


def num_chunks(num_bytes: int, limits: TransferLimits) -> int:
    """Chunks of one file; an empty one has one, too."""
    return max(1, -(-num_bytes // limits.chunk_bytes))


def chunks_of(sizes: Sequence[int], limits: TransferLimits) -> Iterator[Chunk]:
    """All chunks in the order of reading: files in groups, the chunks of a group in turns."""
    for first in range(0, len(sizes), limits.num_files):
        group = range(first, min(first + limits.num_files, len(sizes)))
        for number in range(max(num_chunks(sizes[one], limits) for one in group)):
            begin = number * limits.chunk_bytes
            for file in group:
                if begin < sizes[file] or number == 0:
                    yield Chunk(file, number, begin, min(begin + limits.chunk_bytes, sizes[file]))


def free_bytes(folder: Path) -> int:
    return shutil.disk_usage(folder).free


@dataclass(frozen=True)
class Tools:
    """What copying needs from its surroundings; tests replace it."""

    sleep: Callable[[float], None] = time.sleep
    free_bytes: Callable[[Path], int] = free_bytes
    limits: TransferLimits = TransferLimits()


TOOLS = Tools()


@contextlib.contextmanager
def copying(
    attempts: Attempts[Source], listing: Listing, work: Path, tools: Tools
) -> Iterator[Callable[[Sequence[str], Callable[[Amount], None]], tuple[dict[str, str], int]]]:
    """A function that copies files with these names to `work/files`. It returns the sha256 of each, and the number of
    bytes read from the source: what a killed process has copied is not read again. Errors as of `Transfer.run`."""
    with writing(work):
        journal = Journal(work / "journal", listing.digest)

    def copy(names: Sequence[str], report: Callable[[Amount], None]) -> tuple[dict[str, str], int]:
        transfer = Transfer(attempts, listing, names, folder=work / "files", journal=journal, tools=tools)
        return transfer.run(report), transfer.amount.read_bytes

    with contextlib.closing(journal):
        yield copy


class _Stopped(Exception):
    """Another thread failed, or the caller gave up."""


class _Target:
    """One file on the disk, and the hash that follows its chunks."""

    def __init__(self, file: SourceFile, path: Path, num_chunks: int) -> None:
        self.file = file
        self.path = path
        self.sha256 = ""
        """Known once all chunks are there and match."""
        self.num_chunks = num_chunks
        self._hash: FileHash | None = None
        self._lock = threading.Lock()
        self._waiting: dict[int, Chunk] = {}
        self._next = 0
        self._busy = False

    def create(self) -> None:
        make_folder(self.path.parent)
        with open(open_file(self.path, os.O_RDWR | os.O_CREAT), "r+b") as file:
            file.truncate(self.file.num_bytes)

    def settled(self, chunk: Chunk, check: Callable[[], Check | None], buffer: bytearray) -> str:
        """Note that a chunk is on the disk, and hash as far as chunks follow one another.

        Returns after the last chunk how the file differs from its source's statement; "" otherwise.
        """
        with self._lock:
            self._waiting[chunk.number] = chunk
        while (following := self._take()) is not None:
            if self._hash is None:
                self._hash = FileHash(self.file.num_bytes, check())
            for block in read_blocks(self.path, following.begin, following.end, buffer):
                self._hash.update(block)
            with self._lock:
                self._busy = False
                self._next += 1
            if following.number == self.num_chunks - 1:
                return self._end(self._hash)
        return ""

    def _take(self) -> Chunk | None:
        """The next chunk to hash, unless another thread is at it: that one goes on."""
        with self._lock:
            if self._busy or self._next not in self._waiting:
                return None
            self._busy = True
            return self._waiting.pop(self._next)

    def _end(self, contents: FileHash) -> str:
        difference = contents.difference()
        if difference:
            self.path.unlink(missing_ok=True)
        else:
            with open(open_file(self.path, os.O_RDWR), "r+b") as file:
                os.fsync(file)
            self.sha256 = contents.sha256
        return difference


class Transfer:
    """One copy of some files of a listing. `run` is called once."""

    def __init__(
        self,
        attempts: Attempts[Source],
        listing: Listing,
        names: Sequence[str],
        *,
        folder: Path,
        journal: Journal,
        tools: Tools,
    ) -> None:
        self._attempts = attempts
        self._source = attempts.source
        self._listing = listing
        self._folder = folder
        self._journal = journal
        self._limits = limits = tools.limits
        self._free_bytes = tools.free_bytes
        files = [listing.files[name] for name in names]
        self._targets = [_Target(file, folder / file.name, num_chunks(file.num_bytes, limits)) for file in files]
        # Not a list: what a source says of sizes is believed once the disk has the space.
        self._todo = chunks_of([file.num_bytes for file in files], limits)
        self._total_bytes = sum(file.num_bytes for file in files)
        self._lock = threading.Lock()
        self._done_bytes = self._read_bytes = 0
        self._stop = threading.Event()
        self._ended = threading.Semaphore(0)
        self._error: BaseException | None = None

    @property
    def amount(self) -> Amount:
        with self._lock:
            return Amount(self._done_bytes, self._total_bytes, self._read_bytes)

    def run(self, report: Callable[[Amount], None], period_seconds: float = 1.0) -> dict[str, str]:
        """Copy, and return the sha256 of each file. report: called once per period.

        Raises:
            FatalError: STORAGE_FULL, CHECKSUM_MISMATCH, or what the source's verdict is.
            SourceUnreachable: the source does not respond.
        """
        with writing(self._folder):
            self._check_space()
            for target in self._targets:
                target.create()
        num_readers = min(self._limits.num_readers, sum(target.num_chunks for target in self._targets))
        for number in range(num_readers):
            # Daemons: one that waits for a silent source must not delay the end of the process.
            threading.Thread(target=self._work, name=f"transfer-{number}", daemon=True).start()
        num_ended = 0
        try:
            report(self.amount)
            while num_ended < num_readers and self._error is None:
                if self._ended.acquire(timeout=period_seconds):
                    num_ended += 1
                else:
                    report(self.amount)
        finally:
            self._stop.set()
            # Whoever is at the disk ends first: the caller's lock protects it. One that waits for a source does not.
            until = time.monotonic() + STOP_SECONDS
            while num_ended < num_readers and self._ended.acquire(timeout=max(0.0, until - time.monotonic())):
                num_ended += 1
        if self._error is not None:
            raise self._error
        report(self.amount)
        return {target.file.name: target.sha256 for target in self._targets}

    def _check_space(self) -> None:
        allocated = 0
        for target in self._targets:
            with contextlib.suppress(FileNotFoundError):
                allocated += min(target.path.lstat().st_blocks * 512, target.file.num_bytes)
        needed, free = self._total_bytes - allocated, self._free_bytes(self._folder)
        if free < needed:
            raise FatalError(
                ExitCode.STORAGE_FULL,
                f"{self._source.uri} needs {needed:,} more bytes in {self._folder}, but {free:,} are free; "
                "provide more space",
            )

    def _work(self) -> None:
        buffer = bytearray(BLOCK_BYTES)
        try:
            while not self._stop.is_set():
                with self._lock:
                    chunk = next(self._todo, None)
                if chunk is None:
                    return
                self._settle(chunk, buffer)
        except _Stopped:
            return
        except BaseException as error:  # noqa: BLE001 - raised again by `run`
            with self._lock:
                self._error = self._error or error
        finally:
            self._ended.release()

    def _settle(self, chunk: Chunk, buffer: bytearray) -> None:
        target = self._targets[chunk.file]
        name = target.file.name
        with writing(self._folder):
            there = self._is_there(target, chunk, buffer)
        if there:
            self._count(chunk.end - chunk.begin, read=False)
        elif chunk.begin < chunk.end:
            crc32 = self._fetch(target, chunk)
            with writing(self._folder):
                self._journal.add(Claim(name, chunk.begin, chunk.end, crc32))
        with writing(self._folder):
            difference = target.settled(
                chunk, lambda: self._attempts(lambda: self._source.check(self._listing, target.file)), buffer
            )
            if difference:
                self._journal.drop(name)
                raise FatalError(
                    ExitCode.CHECKSUM_MISMATCH, f"{self._source.uri}: {name}: {difference}; fetch it again"
                )

    def _is_there(self, target: _Target, chunk: Chunk, buffer: bytearray) -> bool:
        """Whether the journal claims the chunk and the disk has these bytes."""
        claim = self._journal.claims.get((target.file.name, chunk.begin))
        if claim is None or claim.end != chunk.end:
            return False
        crc32 = 0
        for block in read_blocks(target.path, chunk.begin, chunk.end, buffer):
            crc32 = zlib.crc32(block, crc32)
        return crc32 == claim.crc32

    def _fetch(self, target: _Target, chunk: Chunk) -> int:
        """Write a chunk and return its CRC-32. A new attempt goes on where the last one ended."""
        position, crc32 = chunk.begin, 0

        def attempt() -> None:
            nonlocal position, crc32
            self._check_running()
            if position == chunk.end:
                return  # the connection broke after the last byte
            began, seen = time.monotonic(), 0
            with self._source.read(self._listing, target.file, position, chunk.end) as blocks:
                for block in blocks:
                    data = memoryview(block)[: chunk.end - position]
                    self._check_running()
                    with writing(self._folder):
                        write_all(fd, data, position)
                    crc32 = zlib.crc32(data, crc32)
                    position += len(data)
                    seen += len(data)
                    self._count(len(data), read=True)
                    if len(data) < len(block):
                        break  # more than requested
                    if seen >= self._limits.min_bytes:
                        began, seen = time.monotonic(), 0
                    elif time.monotonic() - began > TIMEOUT_SECONDS:
                        raise BrokenAnswer(f"fewer than {self._limits.min_bytes:,} bytes in {TIMEOUT_SECONDS:.0f} s")
            if position < chunk.end:
                raise BrokenAnswer(f"{target.file.name}: the answer ended {chunk.end - position:,} bytes early")

        with writing(self._folder):
            fd = open_file(target.path, os.O_RDWR)
        try:
            self._attempts(attempt, lambda: (position - chunk.begin) // self._limits.min_bytes)
        finally:
            os.close(fd)
        return crc32

    def _count(self, num_bytes: int, *, read: bool) -> None:
        with self._lock:
            self._done_bytes += num_bytes
            self._read_bytes += num_bytes if read else 0

    def _check_running(self) -> None:
        if self._stop.is_set():
            raise _Stopped
