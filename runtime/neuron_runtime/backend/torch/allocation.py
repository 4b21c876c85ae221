"""Configures how torch allocates memory: in huge pages, and kept between steps instead of returned to the kernel.

Called by `load_backend` before torch is imported. A step reads all weights; with 4 KiB pages that is a quarter of a
million page translations per gigabyte. Memory returned to the kernel after a step comes back page by page, zeroed.
"""

from __future__ import annotations

import ctypes
import os

HUGE_PAGES = "THP_MEM_ALLOC_ENABLE"
"""torch reads this variable at its first tensor: tensors of 2 MiB and more then use huge pages."""
MAX_HEAP_BLOCK_BYTES = 2**25
"""Larger blocks come from the kernel each time; the maximum that glibc accepts for `M_MMAP_THRESHOLD`."""
KEPT_BYTES = 2**28
"""Free memory that a heap keeps; more than the scratch memory of a step."""

# <malloc.h> of glibc, see mallopt(3).
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8


def set_up_allocation() -> None:
    """Applies to the whole process; a `THP_MEM_ALLOC_ENABLE` set in the environment is kept."""
    os.environ.setdefault(HUGE_PAGES, "1")
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return  # not glibc
    mallopt(_M_MMAP_THRESHOLD, MAX_HEAP_BLOCK_BYTES)
    # Thread heaps are limited to 64 MiB each and are returned whole when free.
    mallopt(_M_ARENA_MAX, 1)
    mallopt(_M_TRIM_THRESHOLD, KEPT_BYTES)
