"""The pixels of requests on their way from a front end to the engine: files that both have in memory, and no copies.

The front end writes a file for each request and holds it until the request ends; the engine maps it and removes its
name. All files together have a bound. `LLM` needs none: its pictures are where they are.
"""

from __future__ import annotations

import mmap
import os
import shutil
import threading
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path

import msgspec

from neuron_runtime.core import Picture, Request
from neuron_runtime.errors import InvalidRequest, Overloaded

FOLDER = "pixels"
MAX_BYTES = 1 << 30
"""Of all pictures of requests that have not ended."""
ALIGNMENT = 64
_RETRY_SECONDS = 1.0
_NONE = memoryview(b"")


class PixelsAt(msgspec.Struct, frozen=True, array_like=True):
    """Where the pixels of a request's pictures are, one behind the other."""

    path: str
    sizes: tuple[int, ...]


class PixelFile:
    """The pixels of one request. `close` gives their room back, as does the end of this object."""

    def __init__(self, path: Path, pictures: Sequence[Picture], files: PixelFiles, num_bytes: int) -> None:
        self._path = path
        self._sizes = tuple(len(one.pixels) for one in pictures)
        self._numbers = count(1)
        self._names = [path]
        self.close = weakref.finalize(self, _release, self._names, files, num_bytes)

    def place(self) -> PixelsAt:
        """A name for the engine, which removes it; each is for one answer."""
        path = self._path.with_suffix(f".{next(self._numbers)}")
        os.link(self._path, path)
        self._names.append(path)
        return PixelsAt(str(path), self._sizes)


class PixelFiles:
    """Writes the files of one front end; used by several threads. What an earlier front end left behind is removed."""

    def __init__(self, run_dir: Path, max_bytes: int = MAX_BYTES) -> None:
        self._folder = run_dir / FOLDER
        shutil.rmtree(self._folder, ignore_errors=True)
        self._folder.mkdir(mode=0o700)
        self._max_bytes = max_bytes
        self._numbers = count()
        self._lock = threading.Lock()
        self.num_bytes = 0

    def write(self, pictures: Sequence[Picture]) -> PixelFile:
        """Raises Overloaded if those of other requests leave no room; InvalidRequest if there would never be any."""
        num_bytes = sum(end for _, end in list(_extents([len(one.pixels) for one in pictures]))[-1:])
        if num_bytes > self._max_bytes:
            message = f"the pictures have {num_bytes} bytes as the model reads them, max {self._max_bytes}: send fewer"
            raise InvalidRequest(message)
        with self._lock:
            if self.num_bytes + num_bytes > self._max_bytes:
                raise Overloaded("pictures of other requests fill the memory for them", _RETRY_SECONDS)
            self.num_bytes += num_bytes
            path = self._folder / str(next(self._numbers))
        made = PixelFile(path, pictures, self, num_bytes)
        try:
            with path.open("xb") as file:
                for picture, (begin, _) in zip(pictures, _extents([len(one.pixels) for one in pictures]), strict=True):
                    file.seek(begin)
                    file.write(picture.pixels)
        except OSError as error:
            made.close()
            raise Overloaded(f"pictures cannot be stored ({error.strerror})", _RETRY_SECONDS) from error
        return made

    def release(self, num_bytes: int) -> None:
        with self._lock:
            self.num_bytes -= num_bytes


def without_pixels(request: Request) -> Request:
    """What travels in a message."""
    return replace(request, pictures=bare(request.pictures))


def bare(pictures: Sequence[Picture]) -> tuple[Picture, ...]:
    """Without pixels."""
    return tuple(msgspec.structs.replace(one, pixels=_NONE) for one in pictures)


def with_pixels(request: Request, pixels: PixelsAt) -> Request:
    """The request as it was. Raises InvalidRequest if the front end has left it in the meantime."""
    try:
        with open(pixels.path, "rb") as file:
            whole = memoryview(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ))
        os.unlink(pixels.path)
    except (OSError, ValueError) as error:
        raise InvalidRequest(f"the pictures of the request are gone: {error}") from error
    parts = (whole[begin:end] for begin, end in _extents(pixels.sizes))
    return replace(
        request,
        pictures=tuple(
            msgspec.structs.replace(one, pixels=part) for one, part in zip(request.pictures, parts, strict=True)
        ),
    )


def _extents(sizes: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Begin and end of each picture in the file."""
    begin = 0
    for size in sizes:
        yield begin, begin + size
        begin += -(-size // ALIGNMENT) * ALIGNMENT


def _release(names: list[Path], files: PixelFiles, num_bytes: int) -> None:
    for name in names:
        name.unlink(missing_ok=True)
    files.release(num_bytes)
