"""Makes the kernel read weight files from the disk while torch is imported, which takes about as long.

Called by `load_backend` first. It is advice to the kernel: it allocates no memory and leaves file errors to the loader.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path

STEP_BYTES = 2**20
"""Bytes per request; the kernel truncates longer ones."""
MAX_BYTES = 2 * 2**30
"""About what a fast disk delivers during the import; more might evict what was read first."""


def read_ahead(model_dir: Path, max_bytes: int = MAX_BYTES) -> threading.Thread:
    """Read files in order of their names, in the background; returns at once."""
    thread = threading.Thread(target=_advise, args=(model_dir, max_bytes), name="read-ahead", daemon=True)
    thread.start()
    return thread


def _advise(model_dir: Path, max_bytes: int) -> None:
    if not hasattr(os, "posix_fadvise"):
        return
    left = max_bytes
    for path in sorted(model_dir.glob("*.safetensors")):
        try:
            with path.open("rb") as file:
                size = min(left, os.fstat(file.fileno()).st_size)
                for begin in range(0, size, STEP_BYTES):
                    os.posix_fadvise(file.fileno(), begin, STEP_BYTES, os.POSIX_FADV_WILLNEED)
        except OSError:
            return
        left -= size
