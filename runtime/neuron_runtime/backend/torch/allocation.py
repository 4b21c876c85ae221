"""How torch gets memory from the system: in huge pages, and without giving back what the next step takes again.

Called by `load_backend` before torch is imported. A step reads all weights, which in pages of 4 KiB are a quarter of a
million addresses a gigabyte to look up; and memory that goes back to the kernel after every step comes from it again
page by page, zeroed.
"""

from __future__ import annotations

import ctypes
import os

HUGE_PAGES = "THP_MEM_ALLOC_ENABLE"
"""torch's own switch, which it reads at its first tensor: tensors of 2 MiB and more ask for huge pages."""
MAX_HEAP_BLOCK_BYTES = 2**25
"""What is larger comes from the kernel every time; as much as glibc takes for `M_MMAP_THRESHOLD`."""
KEPT_BYTES = 2**28
"""Free memory that a heap keeps; above what a step needs for itself."""

# <malloc.h> of glibc, see mallopt(3).
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8


def set_up_allocation() -> None:
    """For the whole process; what the environment says of huge pages holds."""
    os.environ.setdefault(HUGE_PAGES, "1")
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return  # another C library, which has no such thresholds
    mallopt(_M_MMAP_THRESHOLD, MAX_HEAP_BLOCK_BYTES)
    # Heaps of threads have at most 64 MiB each, and one that is free goes back as a whole.
    mallopt(_M_ARENA_MAX, 1)
    mallopt(_M_TRIM_THRESHOLD, KEPT_BYTES)
