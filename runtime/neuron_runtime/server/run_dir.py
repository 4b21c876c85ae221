"""The folder in which the processes of one serving command meet: sockets, the deadline, configuration, records.

Made by the supervisor's command and removed when it ends. A command that was killed cannot remove its own; the next one
does, and knows by a lock, which the kernel drops with the process that held it, that nobody is in there.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from neuron_runtime.errors import InvalidConfig

PREFIX = "neuron-runtime-"
LOCK_FILE = "lock"
MAX_PATH_BYTES = 80
"""Longest path of the folder: with the name of a socket behind it, it must fit into an address of 107 bytes
(`sun_path`, unix(7))."""


@contextmanager
def made_run_dir() -> Iterator[Path]:
    """A new folder below $TMPDIR for as long as the context lasts; folders of killed commands are removed.

    Raises:
        InvalidConfig: sockets cannot be made below $TMPDIR, because its path is too long.
    """
    _remove_abandoned(Path(tempfile.gettempdir()))
    folder = Path(tempfile.mkdtemp(prefix=PREFIX))
    try:
        if (length := len(os.fsencode(folder))) > MAX_PATH_BYTES:
            most = MAX_PATH_BYTES - length + len(os.fsencode(folder.parent))
            message = f"{folder.parent} is too long a path for sockets in it, at most {most} bytes: name another folder"
            raise InvalidConfig("TMPDIR", message)
        with (folder / "lock-to-be").open("w") as lock:
            # Renamed when it is held: a lock that others can see and take is one whose owner is gone.
            fcntl.flock(lock, fcntl.LOCK_EX)
            os.rename(lock.name, folder / LOCK_FILE)
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _remove_abandoned(parent: Path) -> None:
    for folder in parent.glob(f"{PREFIX}*"):
        try:
            if folder.lstat().st_uid != os.geteuid():
                continue
            lock = os.open(folder / LOCK_FILE, os.O_RDONLY | os.O_NOFOLLOW)
        except OSError:
            # No folder of ours, or one that is being made or removed right now.
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
        except BlockingIOError:
            # Its command lives.
            continue
        finally:
            os.close(lock)
