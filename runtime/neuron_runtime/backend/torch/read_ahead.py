"""Makes the kernel read weights before they are needed: first while torch is imported, then ahead of the loader.

Called by `load_backend`. It is advice to the kernel, which reads many ranges at the same time: on a mounted store each
read takes a while, and page faults would wait for one after another. It leaves file errors to the loader.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

from neuron_runtime.checkpoint import TensorInfo, read_header
from neuron_runtime.errors import FatalError

STEP_BYTES = 2**17
"""Bytes per request. The kernel truncates longer ones without notice: to this size on most network file systems."""
MAX_AHEAD_BYTES = 2 * 2**30
"""How far it may be ahead of the loader: what a fast disk delivers while torch is imported. More might evict from
memory what was read first."""
LOADING = "loading weights"
"""The stage of the loader."""


class ReadAhead:
    """Reads the tensors of a model in the background, in the order in which they are loaded."""

    def __init__(self, model_dir: Path, max_ahead_bytes: int = MAX_AHEAD_BYTES) -> None:
        self._model_dir = model_dir
        self._max_ahead_bytes = max_ahead_bytes
        self._moved = threading.Condition()
        self._share = 0.0
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="read-ahead", daemon=True)

    def start(self) -> None:
        """Returns at once."""
        self._thread.start()

    def loaded(self, share: float) -> None:
        """Note how much of all tensors the loader has."""
        with self._moved:
            self._share = share
            self._moved.notify()

    def stop(self) -> None:
        with self._moved:
            self._stopped = True
            self._moved.notify()

    def join(self) -> None:
        self._thread.join()

    def _run(self) -> None:
        if not hasattr(os, "posix_fadvise"):
            return
        try:
            self._advise(sorted(_tensors(self._model_dir), key=_order))
        except (OSError, FatalError):
            return  # the loader says what is wrong

    def _advise(self, tensors: list[TensorInfo]) -> None:
        total_bytes, num_bytes = sum(tensor.num_bytes for tensor in tensors), 0
        with ExitStack() as files:
            fds: dict[str, int] = {}
            asked: set[tuple[str, int]] = set()
            for tensor in tensors:
                if tensor.file not in fds:
                    fds[tensor.file] = files.enter_context((self._model_dir / tensor.file).open("rb")).fileno()
                # Whole steps of the file: a range that begins within a page has one page more than the kernel reads.
                for begin in range(tensor.begin - tensor.begin % STEP_BYTES, tensor.end, STEP_BYTES):
                    num_bytes += min(begin + STEP_BYTES, tensor.end) - max(begin, tensor.begin)
                    if (tensor.file, begin) in asked:
                        continue
                    asked.add((tensor.file, begin))
                    if not self._may_reach(num_bytes, total_bytes):
                        return
                    os.posix_fadvise(fds[tensor.file], begin, STEP_BYTES, os.POSIX_FADV_WILLNEED)

    def _may_reach(self, num_bytes: int, total_bytes: int) -> bool:
        """Wait for the loader if it is too far behind. False: stopped."""
        with self._moved:
            self._moved.wait_for(
                lambda: self._stopped or num_bytes <= self._share * total_bytes + self._max_ahead_bytes
            )
            return not self._stopped


def _tensors(model_dir: Path) -> Iterator[TensorInfo]:
    for path in model_dir.glob("*.safetensors"):
        yield from read_header(path)[1]


def _order(tensor: TensorInfo) -> tuple[bool, list[tuple[int, str]]]:
    """As the decoder takes them: the layers by their numbers, what is not part of them (the head) last."""
    parts = [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", tensor.name)]
    return not tensor.name.startswith("model."), parts
