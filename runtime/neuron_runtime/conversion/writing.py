"""Writes the weights of a converted model into a folder, tensor by tensor; a killed one goes on where it ended.

Called by `converting`, which holds the lock of the folder. A journal says which tensors are there, with checksums: who
resumes reads the tensors and believes the bytes, not the journal.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import msgspec
import torch

from neuron_runtime.conversion.shards import Place, Shard
from neuron_runtime.conversion.weights import LayerError, Weights, on_one_thread
from neuron_runtime.errors import ExitCode, FatalError
from neuron_runtime.weights.disk import make_folder, open_file, read_blocks, write_all, writing
from neuron_runtime.weights.journal import Claim, Journal
from neuron_runtime.weights.store import StoredFile
from neuron_runtime.weights.transfer import TOOLS, Amount, Tools

BUFFER_BYTES = 2**20
JOURNAL, ERRORS = "journal", "errors"


@dataclass(frozen=True, slots=True)
class Written:
    """Converted weights. layer_error: the largest one, see `LayerError`. read_bytes: of the source, by this process."""

    files: tuple[StoredFile, ...]
    layer_error: float
    read_bytes: int


class MeasuredError(msgspec.Struct, frozen=True, array_like=True):
    """A line of the file of errors. crc32: of the others, so that a damaged line is not believed."""

    name: str
    share: float
    crc32: int

    @classmethod
    def of(cls, name: str, share: float) -> Self:
        return cls(name, share, zlib.crc32(f"{name} {share!r}".encode()))


def write_weights(
    weights: Weights,
    shards: Sequence[Shard],
    digest: str,
    *,
    work: Path,
    report: Callable[[Amount], None],
    tools: Tools = TOOLS,
) -> Written:
    """Write the files of all shards into `work/files`.

    digest: of the converted model: what is there of another one is written anew.

    Raises:
        FatalError: STORAGE_FULL, INVALID_MODEL, or the folder cannot be written.
    """
    files, places = work / "files", {place.output.name: place for shard in shards for place in shard.places}
    total = sum(shard.num_bytes for shard in shards)
    with writing(work), on_one_thread(), contextlib.ExitStack() as stack:
        make_folder(files)
        _check_space(files, shards, tools)
        journal = stack.enter_context(contextlib.closing(Journal(work / JOURNAL, digest)))
        errors = stack.enter_context(contextlib.closing(_Errors(work / ERRORS)))
        if not journal.claims:
            errors.clear()
        fds = {shard.file: stack.enter_context(_created(files / shard.file, shard)) for shard in shards}
        done = read = 0
        for name, units in _units(places.values()):
            is_known = weights.is_copied(name) or name in errors.shares
            if not (is_known and all(_is_there(files, place, journal) for place in units)):
                claims, share = _write(weights, units, fds)
                if share is not None:
                    errors.add(MeasuredError.of(name, share))
                for claim in claims:
                    journal.add(claim)
                read += weights.source_bytes(name)
            done += sum(place.output.num_bytes for place in units)
            report(Amount(done, total, read))
        for fd in fds.values():
            os.fsync(fd)
        stored = tuple(StoredFile(shard.file, shard.num_bytes, sha256_of(files / shard.file)) for shard in shards)
    return Written(stored, max(errors.shares.values(), default=0.0), read)


def _units(places: Iterable[Place]) -> Iterator[tuple[str, list[Place]]]:
    """Tensors of the model, each with the places of its weight and, behind it, of its scale."""
    by_name = {place.output.name: place for place in places}
    scales = {f"{name}_scale" for name in by_name} & by_name.keys()
    for name in by_name:
        if name not in scales:
            yield name, [by_name[one] for one in (name, f"{name}_scale") if one in by_name]


def _write(weights: Weights, units: Sequence[Place], fds: Mapping[str, int]) -> tuple[list[Claim], float | None]:
    """Write a tensor, and its scale. Returns what to claim, and the error of a tensor that is not a copy."""
    name = units[0].output.name
    writers = [_PlaceWriter(fds[place.file], place) for place in units]
    if weights.is_copied(name):
        for block in weights.copy(name):
            writers[0].add(block)
        return [writers[0].claim()], None
    error = LayerError()
    for part in weights.parts(name):
        for writer, tensor in zip(writers, (part.stored, part.scale), strict=False):
            assert tensor is not None
            writer.add(tensor.contiguous().view(torch.uint8).numpy().data.cast("B"))
        error.add(part)
    return [writer.claim() for writer in writers], error.share


class _PlaceWriter:
    """Writes a tensor in order."""

    def __init__(self, fd: int, place: Place) -> None:
        self._fd, self._place = fd, place
        self._position, self._crc32 = place.begin, 0

    def add(self, data: memoryview) -> None:
        if self._position + len(data) > self._place.end:
            raise ValueError(f"{self._place.output.name} has more bytes than were planned")
        write_all(self._fd, data, self._position)
        self._crc32 = zlib.crc32(data, self._crc32)
        self._position += len(data)

    def claim(self) -> Claim:
        if self._position != self._place.end:
            raise OSError(0, f"{self._place.output.name} ended early: its file was cut while it was read")
        return Claim(self._place.file, self._place.begin, self._place.end, self._crc32)


def _is_there(files: Path, place: Place, journal: Journal) -> bool:
    """Whether the journal claims the tensor and the disk has these bytes."""
    claim = journal.claims.get((place.file, place.begin))
    if claim is None or claim.end != place.end:
        return False
    crc32 = 0
    for block in read_blocks(files / place.file, place.begin, place.end, bytearray(BUFFER_BYTES)):
        crc32 = zlib.crc32(block, crc32)
    return crc32 == claim.crc32


@contextlib.contextmanager
def _created(path: Path, shard: Shard) -> Iterator[int]:
    fd = open_file(path, os.O_RDWR | os.O_CREAT)
    try:
        os.ftruncate(fd, shard.num_bytes)
        write_all(fd, memoryview(shard.header), 0)
        yield fd
    finally:
        os.close(fd)


class _Errors:
    """The errors of tensors that are there, in a file. A line that a killed writer left half is dropped."""

    def __init__(self, path: Path) -> None:
        self._fd = open_file(path, os.O_RDWR | os.O_CREAT)
        self.shares: dict[str, float] = {}
        self._end = 0
        with open(self._fd, "rb", closefd=False) as file:
            for line in file:
                try:
                    error = msgspec.json.decode(line, type=MeasuredError)
                except msgspec.MsgspecError:
                    break
                if not line.endswith(b"\n") or error != MeasuredError.of(error.name, error.share):
                    break
                self.shares[error.name] = error.share
                self._end += len(line)
        os.ftruncate(self._fd, self._end)

    def add(self, error: MeasuredError) -> None:
        raw = memoryview(msgspec.json.encode(error) + b"\n")
        write_all(self._fd, raw, self._end)
        self._end += len(raw)
        self.shares[error.name] = error.share

    def clear(self) -> None:
        os.ftruncate(self._fd, 0)
        self.shares, self._end = {}, 0

    def close(self) -> None:
        os.close(self._fd)


def _check_space(files: Path, shards: Sequence[Shard], tools: Tools) -> None:
    needed = 0
    for shard in shards:
        needed += shard.num_bytes
        with contextlib.suppress(FileNotFoundError):
            needed -= min((files / shard.file).lstat().st_blocks * 512, shard.num_bytes)
    if (free := tools.free_bytes(files)) < needed:
        raise FatalError(
            ExitCode.STORAGE_FULL,
            f"the converted weights need {needed:,} more bytes in {files}, but {free:,} are free; provide more space",
        )


def sha256_of(path: Path) -> str:
    contents = hashlib.sha256()
    for block in read_blocks(path, 0, path.stat().st_size, bytearray(BUFFER_BYTES)):
        contents.update(block)
    return contents.hexdigest()
