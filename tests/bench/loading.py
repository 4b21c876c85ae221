"""Speed of loading weights into their final layout, compared with a plain read of the same files.

Used by the suite, for files on the disk and on a store that is mounted from afar. Both are timed with files outside the
page cache, as after a pod's start on a fresh node, and with cached ones. Only the files of the model are dropped from
the cache, which needs no privileges.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.report import Load, Meter

READ_BYTES = 8 * 2**20


@dataclass(frozen=True, slots=True)
class Loading:
    """Median bytes per second; `cold` is None if the files could not be dropped from the cache."""

    num_bytes: int
    read_cold: float | None
    read_warm: float
    load_cold: float | None
    load_warm: float
    load: Load

    @property
    def ratio_cold(self) -> float | None:
        if self.read_cold is None or self.load_cold is None:
            return None
        return self.load_cold / self.read_cold


def measure(model_dir: Path, num_iters: int = 3) -> Loading:
    """Times reading and loading in turns. Raises the loader's error for an invalid folder."""
    from neuron_runtime.backend.torch import prepare
    from neuron_runtime.backend.torch.architecture import decoder_config, tensor_shapes
    from neuron_runtime.backend.torch.choices import stored_dtype
    from neuron_runtime.backend.torch.held import held_as
    from neuron_runtime.backend.torch.linear import tiled_kinds
    from neuron_runtime.backend.torch.loader import DTYPES, load_decoder
    from neuron_runtime.backend.torch.naming import as_named
    from neuron_runtime.checkpoint import read_checkpoint

    checkpoint = read_checkpoint(model_dir)
    model = decoder_config(checkpoint.config)
    checkpoint = as_named(checkpoint, model)
    dtype = DTYPES[stored_dtype(checkpoint)]
    own = tiled_kinds(dtype) if model.quantization else ()
    held = held_as(checkpoint, tensor_shapes(model), model.quantization, "auto", own=own)
    files = [model_dir / file for file in checkpoint.files]
    num_bytes = sum(file.stat().st_size for file in files)

    def load() -> None:
        ahead = prepare(model_dir)
        load_decoder(checkpoint, model, dtype, lambda stage, share: ahead.loaded(share), held=held)
        ahead.stop()

    load()  # libraries choose their kernels once
    meter = Meter()
    cold = drop_from_cache(files)
    read_cold, load_cold, read_warm, load_warm = [], [], [], []
    for _ in range(num_iters):
        if cold:
            drop_from_cache(files)
            read_cold.append(_seconds(lambda: read_through(files)))
            drop_from_cache(files)
            load_cold.append(_seconds(load))
        read_warm.append(_seconds(lambda: read_through(files)))
        load_warm.append(_seconds(load))
    return Loading(
        num_bytes=num_bytes,
        read_cold=num_bytes / statistics.median(read_cold) if cold else None,
        read_warm=num_bytes / statistics.median(read_warm),
        load_cold=num_bytes / statistics.median(load_cold) if cold else None,
        load_warm=num_bytes / statistics.median(load_warm),
        load=meter.read(),
    )


def read_through(files: Sequence[Path]) -> int:
    """Reads all bytes in order into one buffer and returns their number."""
    buffer = bytearray(READ_BYTES)
    count = 0
    for path in files:
        with path.open("rb", buffering=0) as file:
            while read := file.readinto(buffer):
                count += read
    return count


def drop_from_cache(files: Sequence[Path]) -> bool:
    """Drops these files from the page cache; returns whether all were dropped."""
    if not hasattr(os, "posix_fadvise"):
        return False
    for path in files:
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)  # a dirty page stays
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)
    return all(cached_share(path) == 0.0 for path in files)


def cached_share(path: Path) -> float:
    """The share of a file in the page cache, without reading it. Works only for own files (mincore)."""
    size = path.stat().st_size
    if not size:
        return 0.0
    pages = (ctypes.c_ubyte * -(-size // mmap.PAGESIZE))()
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) as memory:
        begin = ctypes.c_char.from_buffer(memory)
        failed = ctypes.CDLL(None, use_errno=True).mincore(ctypes.byref(begin), ctypes.c_size_t(size), pages)
        del begin  # or the mapping could not be closed
    if failed:
        raise OSError(ctypes.get_errno(), "mincore")
    return sum(page & 1 for page in pages) / len(pages)


def _seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began
