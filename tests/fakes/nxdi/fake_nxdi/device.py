"""The Neuron device of this process: cores taken until the process ends, steps in order, faults of the runtime.

Graphs ask it for their time. It computes nothing.
"""

from __future__ import annotations

import fcntl
import json
import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import fake_nxdi
from fake_nxdi.others import Others

if TYPE_CHECKING:
    import torch

NRT_NAMES = {
    4: "NRT_RESOURCE",
    5: "NRT_TIMEOUT",
    9: "NRT_LOAD_NOT_ENOUGH_NC",
    10: "NRT_UNSUPPORTED_NEFF_VERSION",
    11: "NRT_FAIL_HOST_MEM_ALLOC",
    101: "NRT_EXEC_UNIT_UNRECOVERABLE",
    1002: "NRT_EXEC_BAD_INPUT",
    1003: "NRT_EXEC_COMPLETED_WITH_NUM_ERR",
    1004: "NRT_EXEC_COMPLETED_WITH_ERR",
    1005: "NRT_EXEC_NC_BUSY",
    1006: "NRT_EXEC_OOB",
    1200: "NRT_EXEC_HW_ERR_COLLECTIVES",
    1201: "NRT_EXEC_HW_ERR_HBM_UE",
    1202: "NRT_EXEC_HW_ERR_NC_UE",
    1203: "NRT_EXEC_HW_ERR_DMA_ABORT",
    1205: "NRT_EXEC_HW_ERR_REPAIRABLE_HBM_UE",
    1206: "NRT_NETWORK_PROXY_FAILURE",
}

CORE_VARIABLES = (
    *("NEURON_RT_VISIBLE_CORES", "NEURON_RT_NUM_CORES"),
    *("NEURON_LOGICAL_NC_CONFIG", "NEURON_RT_VIRTUAL_CORE_SIZE"),
)
"""By which the runtime decides which cores it takes; the lock of each core has those of its process."""


CORE_BYTES = 16 * 2**30
"""The memory of a core without another limit."""


def nrt_error(call: str, code: int) -> RuntimeError:
    """As the runtime's errors reach Python: a RuntimeError whose text holds status and name."""
    name = NRT_NAMES.get(code, "NRT_FAILURE")
    return RuntimeError(f"The PyTorch Neuron Runtime could not be used: {call} failed, status_code={code} ({name})")


def visible_cores() -> list[int]:
    """Numbers of the cores that this process may take; NEURON_RT_VISIBLE_CORES wins over NEURON_RT_NUM_CORES."""
    listed = os.environ.get("NEURON_RT_VISIBLE_CORES", "")
    if listed:
        cores: list[int] = []
        for part in listed.split(","):
            first, _, last = part.partition("-")
            cores.extend(range(int(first), int(last or first) + 1))
        return cores
    return list(range(int(os.environ.get("NEURON_RT_NUM_CORES", "0") or "0") or 64))


class Device:
    def __init__(self) -> None:
        self.world_size = 0
        self.used_bytes = 0
        self.failed: BaseException | None = None
        self.free_at = 0.0
        self.others: Others | None = None
        self._locks: list[Any] = []
        self._one_at_a_time = threading.Lock()

    def take(self, world_size: int, size_bytes: int) -> None:
        """Reserves cores for a model; nothing gives them back but the end of the process."""
        settings = fake_nxdi.SETTINGS
        if settings.faults.held_loads > 0:
            settings.faults.held_loads -= 1
            raise nrt_error("nrt_init", 4)
        if self.world_size and self.world_size != world_size:
            raise nrt_error(f"nrt_init with {world_size} cores after one with {self.world_size}", 4)
        cores = visible_cores()
        if len(cores) < world_size:
            raise nrt_error(f"nrt_load of {world_size} ranks on {len(cores)} cores", 9)
        if settings.memory_bytes and self.used_bytes + size_bytes > settings.memory_bytes:
            raise nrt_error("nrt_tensor_allocate", 4)
        if settings.devices and not self._locks:
            self._lock_cores(Path(settings.devices), cores[:world_size])
        self.world_size = world_size
        self.used_bytes += size_bytes

    def _lock_cores(self, folder: Path, cores: list[int]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        for core in cores:
            # The kernel drops the lock when the process ends, however it ends.
            lock = (folder / f"core-{core}").open("a")
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                lock.close()
                self.give_up()
                raise nrt_error("nrt_init", 4) from error
            lock.truncate(0)
            json.dump({name: value for name, value in os.environ.items() if name in CORE_VARIABLES}, lock)
            lock.flush()
            self._locks.append(lock)

    def give_up(self) -> None:
        """Ends this device, as the end of its process would."""
        if self.others is not None:
            self.others.close()
        for lock in self._locks:
            lock.close()
        self._locks = []

    def meet(self, first: int, cores: int, world_size: int) -> None:
        """Waits for the processes that have the other ranks of a model."""
        if cores != world_size and self.others is None:
            try:
                self.others = Others(first, cores, world_size)
            except OSError as error:
                raise nrt_error(f"nrt_init ({error})", 1206) from error

    def start_call(self) -> None:
        if self.failed is not None and fake_nxdi.strict():
            fake_nxdi.refuse("21-8", f"a call after an exception ({self.failed!r}): the runtime's state is undefined")
        if not self._one_at_a_time.acquire(blocking=False):
            fake_nxdi.refuse("21-1", "two threads call forward() at once")

    def end_call(self, error: BaseException | None) -> None:
        self.failed = self.failed or error
        self._one_at_a_time.release()

    def memory_stats(self) -> tuple[int, int]:
        """Bytes of a core that are used and free; (-1, -1) without a runtime, as the real one answers."""
        if self.failed is not None and fake_nxdi.strict():
            fake_nxdi.refuse("21-8", f"a call after an exception ({self.failed!r}): the runtime's state is undefined")
        if not self._one_at_a_time.acquire(blocking=False):
            fake_nxdi.refuse("21-1", "the memory is asked for during a call: what the runtime then does is unknown")
        self._one_at_a_time.release()
        if not self.world_size:
            return -1, -1
        return self.used_bytes, (fake_nxdi.SETTINGS.memory_bytes or CORE_BYTES) - self.used_bytes

    def run(self, graph: str, inputs: Sequence[torch.Tensor] = ()) -> float:
        """Counts a step and returns when the device will have finished it; steps run in the order of their launches."""
        counts, faults = fake_nxdi.COUNTS, fake_nxdi.SETTINGS.faults
        step = counts.steps
        counts.steps += 1
        counts.graphs[graph] += 1
        if faults.nrt_code and step == faults.at_step:
            raise nrt_error("nrt_execute", faults.nrt_code)
        if self.others is not None:
            try:
                self.others.exchange(graph, inputs)
            except OSError as error:
                call = f"nrt_execute of {graph} (suspected hang in collectives operation: {error})"
                raise nrt_error(call, 1200) from error
        seconds = fake_nxdi.SETTINGS.step_seconds
        counts.busy_seconds += seconds
        self.free_at = max(self.free_at, time.monotonic()) + seconds
        return self.free_at

    @staticmethod
    def wait_until(moment: float) -> None:
        left = moment - time.monotonic()
        if left > 0:
            time.sleep(left)


DEVICE = Device()
