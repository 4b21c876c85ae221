"""Refuses to import torch where it does not fit: the kernel would kill the process without a word.

Called by `load_backend` before the import. The weights are `sizing`'s to check, which needs torch itself.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

from neuron_runtime.errors import ExitCode, FatalError
from neuron_runtime.host import FreeMemory, free_memory, gib

IMPORT_BYTES = 100 * 2**20
CUDA_IMPORT_BYTES = 250 * 2**20
"""What the import takes and the kernel cannot drop. A build with CUDA relocates larger libraries."""


def check_room_for_torch(measure: Callable[[], FreeMemory] = free_memory) -> None:
    """Raises FatalError (DEVICE_OUT_OF_MEMORY)."""
    if "torch" in sys.modules:
        return
    free, needed = measure(), CUDA_IMPORT_BYTES if _has_cuda() else IMPORT_BYTES
    if free.available < needed:
        message = f"not enough memory to import torch: it needs {gib(needed)}, and there is {free}; {free.cure(needed)}"
        raise FatalError(ExitCode.DEVICE_OUT_OF_MEMORY, message)


def _has_cuda() -> bool:
    spec = find_spec("torch")
    return bool(spec and spec.origin and Path(spec.origin).parent.joinpath("lib/libtorch_cuda.so").exists())
