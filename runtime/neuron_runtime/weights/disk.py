"""Writes to the folder of weights: what its errors mean, and what makes a write durable.

Used by `transfer`, `journal` and `store`.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from neuron_runtime.errors import ExitCode, FatalError, ServingError

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_REFUSED = frozenset({errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST, errno.ELOOP, errno.EISDIR})


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Turn errors of the disk below `folder` into STORAGE_FULL, an invalid configuration, or a temporary error."""
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            message = f"{folder}: {error.strerror}; provide more space, or prune it"
            raise FatalError(ExitCode.STORAGE_FULL, message) from error
        if error.errno in _REFUSED:
            message = f"{folder} cannot be written: {error.strerror}; name a folder that this user may write"
            raise FatalError(ExitCode.INVALID_ENGINE_CONFIG, message) from error
        raise ServingError(f"{folder} cannot be used: {error.strerror or error}") from error


def open_file(path: Path, flags: int) -> int:
    """A descriptor of a regular file; everything else is an error."""
    # Without O_NONBLOCK, opening a pipe would wait for its other end.
    fd = os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, 0o644)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EISDIR, f"{path.name} is not a regular file")
    return fd


def make_folder(path: Path) -> None:
    """Make a folder unless it is there. A symbolic link is an error: what is behind it is not ours to delete."""
    path.mkdir(parents=True, exist_ok=True)
    if path.is_symlink():
        raise OSError(errno.ELOOP, f"{path.name} is a symbolic link")


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_all(fd: int, data: memoryview, position: int) -> None:
    while data:
        num_written = os.pwrite(fd, data, position)
        data, position = data[num_written:], position + num_written


def read_blocks(path: Path, begin: int, end: int, buffer: bytearray) -> Iterator[memoryview]:
    """Bytes of a regular file through one buffer; fewer if it is shorter. Raises OSError."""
    view = memoryview(buffer)
    with open(open_file(path, os.O_RDONLY), "rb", buffering=0) as file:
        file.seek(begin)
        while begin < end and (num_read := file.readinto(view[: end - begin])):
            yield view[:num_read]
            begin += num_read
