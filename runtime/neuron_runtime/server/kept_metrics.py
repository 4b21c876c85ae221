"""Keeps the numbers of `/metrics` across replacements of the front end, so that scraped counters never decrease.

Created by the front end process. It writes the numbers to a file in the run folder before each answer; a replacement of
the front end continues from that file. It does not count anything itself.
"""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from neuron_runtime.server.exposition import TEXT, Format
from neuron_runtime.server.metrics import Metrics
from neuron_runtime.server.series import Exported

FILE = "metrics"


class KeptMetrics:
    """
    Args:
        run_dir: the folder shared by the processes of one command. A predecessor's numbers there replace those of
            `metrics`.
    """

    def __init__(self, metrics: Metrics, run_dir: Path) -> None:
        self._metrics = metrics
        self._path = run_dir / FILE
        if self._path.exists():
            metrics.restore(msgspec.msgpack.decode(self._path.read_bytes(), type=Exported))

    def render(self, form: Format = TEXT) -> bytes:
        """The exposition. Whatever it reports is in the file."""
        numbers = self._metrics.export()
        new = self._path.with_suffix(".new")
        new.write_bytes(msgspec.msgpack.encode(numbers))
        os.replace(new, self._path)
        return self._metrics.render(numbers, form)
