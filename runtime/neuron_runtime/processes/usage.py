"""CPU time, memory and files of the processes of one command, for `/metrics`.

Created by the front end, and read at a scrape. Without `/proc` there are no series.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

from prometheus_client.process_collector import ProcessCollector

from neuron_runtime.server.metrics import PROCESS
from neuron_runtime.server.series import Reading

_FAMILIES = {family.name: family for family in PROCESS}


class Processes:
    def __init__(self) -> None:
        self.engine_pid: int | None = None
        """None while there is no engine process."""

    def read(self) -> Iterator[Reading]:
        pids = {"supervisor": os.getppid(), "engine": self.engine_pid, "front-end": os.getpid()}
        for name, pid in pids.items():
            if pid is not None:
                yield from _readings(name, pid)


def _readings(name: str, pid: int) -> Iterator[Reading]:
    """Nothing if the process has exited."""
    for metric in ProcessCollector(pid=lambda: pid, registry=None).collect():
        for sample in metric.samples:
            yield _FAMILIES[sample.name], (name,), sample.value
