"""What an error of the Neuron libraries means: whether the request, the process, the node or its set-up is wrong.

Called by whoever compiles, loads and runs. The codes are those of the Neuron runtime (NRT), found in an exception's
text. After any of them the device's state is undefined, so the process ends; its exit code says who must act.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from neuron_runtime.console import say
from neuron_runtime.errors import ExitCode, FatalError, ServingError

_T = TypeVar("_T")

MAX_TEXT = 600
"""Characters of a library's error in a message."""

HELD_SECONDS = 120.0
"""How long to wait for a device: it is free 30 to 45 s after the end of the process that held it."""
RETRY_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Code:
    """A status of the Neuron runtime."""

    number: int
    name: str
    exit_code: ExitCode
    meaning: str


_PROCESS, _NODE = ExitCode.DEVICE_FAILED, ExitCode.DEVICE_FAILED_NODE

CODES = (
    Code(1, "NRT_FAILURE", _PROCESS, "the Neuron runtime failed"),
    Code(2, "NRT_INVALID", _PROCESS, "the Neuron runtime was given an invalid file or argument"),
    Code(3, "NRT_INVALID_HANDLE", _PROCESS, "the Neuron runtime was given an invalid handle"),
    Code(4, "NRT_RESOURCE", ExitCode.DEVICE_HELD, "NeuronCores or memory of the device are taken"),
    Code(5, "NRT_TIMEOUT", _PROCESS, "a step took longer than NEURON_RT_EXEC_TIMEOUT"),
    Code(6, "NRT_HW_ERROR", _NODE, "the device has failed"),
    Code(7, "NRT_QUEUE_FULL", _PROCESS, "the device's queue is full"),
    Code(9, "NRT_LOAD_NOT_ENOUGH_NC", ExitCode.DEVICE_HELD, "too few NeuronCores are free"),
    Code(10, "NRT_UNSUPPORTED_NEFF_VERSION", ExitCode.DRIVER_INCOMPATIBLE, "the graphs need another Neuron runtime"),
    Code(11, "NRT_FAIL_HOST_MEM_ALLOC", ExitCode.DEVICE_OUT_OF_MEMORY, "the host's memory ran out"),
    Code(13, "NRT_UNINITIALIZED", _PROCESS, "the Neuron runtime was not started"),
    Code(14, "NRT_CLOSED", _PROCESS, "the Neuron runtime was closed"),
    Code(15, "NRT_QUEUE_EMPTY", _PROCESS, "the device's queue is empty"),
    Code(101, "NRT_EXEC_UNIT_UNRECOVERABLE", _PROCESS, "the device's state is lost"),
    Code(1002, "NRT_EXEC_BAD_INPUT", _PROCESS, "a step had an input that its graph does not take"),
    Code(1003, "NRT_EXEC_COMPLETED_WITH_NUM_ERR", _PROCESS, "a step computed what is no number"),
    Code(1004, "NRT_EXEC_COMPLETED_WITH_ERR", _PROCESS, "a step failed"),
    Code(1005, "NRT_EXEC_NC_BUSY", _PROCESS, "a NeuronCore is busy"),
    Code(1006, "NRT_EXEC_OOB", _PROCESS, "a step read or wrote out of bounds"),
    Code(1100, "NRT_COLL_PENDING", _PROCESS, "cores still wait for one another"),
    Code(1200, "NRT_EXEC_HW_ERR_COLLECTIVES", _PROCESS, "cores lost one another"),
    Code(1201, "NRT_EXEC_HW_ERR_HBM_UE", _NODE, "the device's memory has failed"),
    Code(1202, "NRT_EXEC_HW_ERR_NC_UE", _NODE, "a NeuronCore has failed; EC2 retires such instances"),
    Code(1203, "NRT_EXEC_HW_ERR_DMA_ABORT", _NODE, "a transfer on the device has failed"),
    Code(1204, "NRT_EXEC_SW_NQ_OVERFLOW", _PROCESS, "the device sent too many notifications"),
    Code(1205, "NRT_EXEC_HW_ERR_REPAIRABLE_HBM_UE", _NODE, "the device's memory must be repaired by a reboot"),
    Code(1206, "NRT_NETWORK_PROXY_FAILURE", _PROCESS, "the network between devices has failed"),
)
WITHOUT_OTHERS = ("NRT_TIMEOUT", "NRT_COLL_PENDING", "NRT_EXEC_HW_ERR_COLLECTIVES", "NRT_NETWORK_PROXY_FAILURE")
"""What a node of several sees when another one is gone."""
BY_NUMBER = {code.number: code for code in CODES}
BY_NAME = {code.name: code for code in CODES}

_NUMBER = re.compile(r"(?:status|status_code|error code|nrt_\w+)\s*[=:(]?\s*(\d{1,4})\b", re.IGNORECASE)
_MEMORY = re.compile(
    r"out of (?:device )?memory|tensor_allocate|HBM|failed to allocate .*(?:memory|bytes)|device memory", re.IGNORECASE
)
_DRIVER = re.compile(r"driver.*(?:incompatible|too old|not supported|version)|incompatible.*driver", re.IGNORECASE)
_CORES = re.compile(
    r"(?:neuron ?core|\bnc|lnc).*(?:not available|in use|busy)|nrt_allocate_neuron_cores", re.IGNORECASE
)


def code_of(text: str) -> Code | None:
    """The status that an error names, by name or by number."""
    for name in re.findall(r"NRT_[A-Z_]+", text):
        if code := BY_NAME.get(name):
            return code
    for number in _NUMBER.findall(text):
        if code := BY_NUMBER.get(int(number)):
            return code
    return None


def classified(error: BaseException, *, in_group: bool = False) -> ServingError:
    """The error with an exit code for what a Neuron library raised; ours are returned as they are.

    in_group: cores of other nodes take part, which may be gone.
    """
    if isinstance(error, ServingError):
        return error
    text = f"{type(error).__name__}: {error}"
    code, shown = code_of(text), " ".join(text.split())[-MAX_TEXT:]
    if isinstance(error, MemoryError) or (_MEMORY.search(text) and (code is None or code.name == "NRT_RESOURCE")):
        message = (
            "the device's memory does not suffice: lower maxSequences or maxModelLength, compile fewer or smaller "
        )
        return FatalError(ExitCode.DEVICE_OUT_OF_MEMORY, f"{message}buckets, or use more cores ({shown})")
    if code is None and _DRIVER.search(text):
        return FatalError(ExitCode.DRIVER_INCOMPATIBLE, f"the Neuron driver does not fit this image ({shown})")
    if code is None and _CORES.search(text):
        code = BY_NAME["NRT_LOAD_NOT_ENOUGH_NC"]
    if code is None:
        return FatalError(ExitCode.DEVICE_FAILED, shown)
    cure = ": replace the node" if code.exit_code == ExitCode.DEVICE_FAILED_NODE else ""
    exit_code = ExitCode.GROUP_MEMBER_LOST if in_group and code.name in WITHOUT_OTHERS else code.exit_code
    return FatalError(exit_code, f"{code.meaning}{cure} ({code.name}, {code.number}): {shown}")


def when_free(
    load: Callable[[], _T],
    *,
    seconds: float = HELD_SECONDS,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> _T:
    """What `load` returns, which is called again while another process holds the device.

    Raises what it raised, classified; DEVICE_HELD after the given time.
    """
    began = clock()
    while True:
        try:
            return load()
        except Exception as error:
            failure = classified(error)
            held = isinstance(failure, FatalError) and failure.exit_code == ExitCode.DEVICE_HELD
            if not held or clock() - began >= seconds:
                if failure is error:
                    raise
                raise failure from error
            say(f"{failure}; trying again for {seconds - (clock() - began):.0f} s")
            sleep(RETRY_SECONDS)
