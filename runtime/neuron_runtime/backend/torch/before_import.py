"""What must be done before torch is imported. Called by `load_backend`.

A step reads all weights; with 4 KiB pages that is a quarter of a million page translations per gigabyte. Memory that is
returned to the kernel after a step comes back page by page, zeroed. So torch gets huge pages, kept between steps.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

from neuron_runtime.errors import ExitCode, FatalError
from neuron_runtime.host import FreeMemory, free_memory, gib

IMPORT_BYTES = 100 * 2**20
CUDA_IMPORT_BYTES = 250 * 2**20
"""What the import takes and the kernel cannot drop. A build with CUDA relocates larger libraries."""

HUGE_PAGES = "THP_MEM_ALLOC_ENABLE"
"""torch reads this variable at its first tensor: tensors of 2 MiB and more then use huge pages."""
MAX_HEAP_BLOCK_BYTES = 2**25
"""Larger blocks come from the kernel each time; the maximum that glibc accepts for `M_MMAP_THRESHOLD`."""
KEPT_BYTES = 2**28
"""Free memory that a heap keeps; more than the scratch memory of a step."""

# <malloc.h> of glibc, see mallopt(3).
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8


def check_room_for_torch(measure: Callable[[], FreeMemory] = free_memory) -> None:
    """Raises FatalError (DEVICE_OUT_OF_MEMORY): the kernel would kill the process without a word. `sizing` checks the
    weights."""
    if "torch" in sys.modules:
        return
    free, needed = measure(), CUDA_IMPORT_BYTES if _has_cuda() else IMPORT_BYTES
    if free.available < needed:
        message = f"not enough memory to import torch: it needs {gib(needed)}, and there is {free}; {free.cure(needed)}"
        raise FatalError(ExitCode.DEVICE_OUT_OF_MEMORY, message)


def leave_out_triton() -> None:
    """It compiles for GPUs. What compiles for CPUs imports it where it is installed, and at the end of the process it
    prints a page of warnings. Applies to the whole process, unless it is imported already."""
    sys.modules.setdefault("triton", None)  # type: ignore[arg-type]  # the import system's way to say: there is none


def _has_cuda() -> bool:
    spec = find_spec("torch")
    return bool(spec and spec.origin and Path(spec.origin).parent.joinpath("lib/libtorch_cuda.so").exists())


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
