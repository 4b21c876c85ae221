"""The folder shared by the processes of one serving command: sockets, deadlines, configuration, records.

Created by the supervisor's command and removed when it exits. The next command removes the folder of a command that was
killed: the kernel has released the lock of that folder.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from neuron_runtime.errors import ExitCode, FatalError, InvalidConfig

PREFIX = "neuron-runtime-"
LOCK_FILE = "lock"
MAX_PATH_BYTES = 80
"""Longest path of the folder: the path of a socket in it must fit into 107 bytes (`sun_path`, unix(7))."""


@contextmanager
def made_run_dir() -> Iterator[Path]:
    """A new folder below $TMPDIR that is removed at the end of the context. Also removes folders of killed commands.

    Raises:
        InvalidConfig: the path of $TMPDIR is too long for sockets, or there is no folder that can be written.
        FatalError: STORAGE_FULL if the disk is full, also within the context.
    """
    try:
        _remove_abandoned(Path(tempfile.gettempdir()))
        folder = Path(tempfile.mkdtemp(prefix=PREFIX))
    except OSError as error:
        message = f"no temporary folder can be written ({error.strerror}): set it to one that can"
        raise InvalidConfig("TMPDIR", message) from error
    try:
        if (length := len(os.fsencode(folder))) > MAX_PATH_BYTES:
            most = MAX_PATH_BYTES - length + len(os.fsencode(folder.parent))
            message = f"path of {folder.parent} is too long for sockets, max {most} bytes: choose another folder"
            raise InvalidConfig("TMPDIR", message)
        with (folder / "lock-to-be").open("w") as lock:
            # Renamed once it is held, so that only locks of dead owners can be acquired under this name.
            fcntl.flock(lock, fcntl.LOCK_EX)
            os.rename(lock.name, folder / LOCK_FILE)
            yield folder
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        message = f"{folder.parent} is full: free some space, or set TMPDIR to a folder on another disk"
        raise FatalError(ExitCode.STORAGE_FULL, message) from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _remove_abandoned(parent: Path) -> None:
    for folder in parent.glob(f"{PREFIX}*"):
        try:
            if folder.lstat().st_uid != os.geteuid():
                continue
            lock = os.open(folder / LOCK_FILE, os.O_RDONLY | os.O_NOFOLLOW)
        except OSError:
            # Not such a folder, or one that is being created or removed.
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
        except BlockingIOError:
            # Its command is running.
            continue
        finally:
            os.close(lock)
