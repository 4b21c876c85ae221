"""The Neuron devices of a process: their platform, the cores that it was granted, and the variables that the Neuron
libraries read.

Called by `graphs` and by whoever loads. It reads the environment and files of the kernel, and imports no Neuron
library: the variables must be set before the first import.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from neuron_runtime.backend.neuron.override import PATH
from neuron_runtime.config import RuntimeConfig
from neuron_runtime.distributed.layout import address_of, bracketed, num_nodes_of
from neuron_runtime.errors import ExitCode, FatalError, InvalidConfig
from neuron_runtime.flags import plain
from neuron_runtime.host import DEV, device_nodes

PLATFORM_VARIABLE = "NEURON_PLATFORM_TARGET_OVERRIDE"
LOGICAL_CORE_VARIABLE = "NEURON_LOGICAL_NC_CONFIG"
LOGICAL_CORE_VARIABLES = (LOGICAL_CORE_VARIABLE, "NEURON_RT_VIRTUAL_CORE_SIZE")
"""NxD Inference reads the first, the Neuron runtime the second."""
LOGICAL_CORE_KEYS = ("logical_nc_config", "logical_neuron_cores")
"""Of `overrideNeuronConfig`."""
VISIBLE_CORES_VARIABLE = "NEURON_RT_VISIBLE_CORES"
NUM_CORES_VARIABLE = "NEURON_RT_NUM_CORES"
PROCESS_TAG_VARIABLE = "NEURON_PROCESS_TAG"
"""By which AWS's exporter names a process; the board of the chart compares it with names of pods."""
EXEC_TIMEOUT_VARIABLE = "NEURON_RT_EXEC_TIMEOUT"

ROOT_VARIABLE = "NEURON_RT_ROOT_COMM_ID"
EFA_VARIABLES = {"FI_PROVIDER": "efa", "FI_EFA_USE_DEVICE_RDMA": "1", "FI_EFA_FORK_SAFE": "1"}
EFA_INTERFACES = "class/infiniband"
"""Below /sys."""

EXEC_TIMEOUT_SECONDS = 600
"""The runtime's own default is documented as 30 or 600, so it is always set. NxD Inference wants 600 for long
prompts."""
TIMEOUT_SHARE = 0.9
"""The share of the Neuron runtime's own limit on a step after which the watchdog ends a hung one."""
LONG_CONTEXT = 32768
"""From this length of prompts on, NxD Inference sets variables of its own."""

PRODUCT_NAME = "devices/virtual/dmi/id/product_name"
"""Below /sys: the instance type."""

LogicalCore = Literal[1, 2]

_PLATFORM = re.compile(r"(inf2|trn1|trn2|trn3)(?![0-9])")
"""Also the beginning of an instance type."""


@dataclass(frozen=True, slots=True)
class Platform:
    name: str
    physical_cores: int
    """Physical cores of one device."""
    logical_core: LogicalCore
    """Physical cores per logical core, unless configured."""

    @property
    def logical_cores(self) -> tuple[LogicalCore, ...]:
        return (1, 2) if self.logical_core == 2 else (1,)


PLATFORMS = {
    platform.name: platform
    for platform in (
        Platform("inf2", 2, 1),
        Platform("trn1", 2, 1),
        Platform("trn2", 8, 2),
        Platform("trn3", 8, 2),
    )
}


@dataclass(frozen=True, slots=True)
class Target:
    """What graphs are compiled for, and what this process may use."""

    platform: Platform
    logical_core: LogicalCore
    granted_cores: int
    """Logical cores; 0: unknown, as on a machine that only compiles."""
    num_nodes: int = 1
    """Among which the cores of the model are divided."""

    def cores_of_node(self, tensor: int) -> int:
        """Those of a model that are on each node."""
        return tensor // self.num_nodes


def find_target(
    config: RuntimeConfig,
    environment: Mapping[str, str] = os.environ,
    sys: Path = Path("/sys"),
    dev: Path = DEV,
    ask: Callable[[], str] = str,
) -> Target:
    """The target of a configuration.

    Args:
        ask: the platform's name by the Neuron libraries, or empty; asked last, because it imports them.

    Raises:
        InvalidConfig: the platform is unknown, or the configuration contradicts it.
        FatalError: TOPOLOGY_IMPOSSIBLE if the node has logical cores of another size than the configuration.
    """
    platform = _platform(environment, sys, ask)
    configured, of_node = _wanted_logical_core(config), environment.get(LOGICAL_CORE_VARIABLE, "")
    if of_node and of_node not in ("1", "2"):
        raise InvalidConfig(LOGICAL_CORE_VARIABLE, f"must be 1 or 2, got {of_node!r}")
    if of_node and configured and int(of_node) != configured:
        raise FatalError(
            ExitCode.TOPOLOGY_IMPOSSIBLE,
            f"$.accelerator.logicalNeuronCore: is {configured}, but {LOGICAL_CORE_VARIABLE} is {of_node}, as the node "
            "is set up: both must be the same",
        )
    logical_core = configured or int(of_node or platform.logical_core)
    if logical_core not in platform.logical_cores:
        message = f"{platform.name} has no logical cores of {logical_core} physical ones: leave it out, or set 1"
        raise InvalidConfig("$.accelerator.logicalNeuronCore", message)
    return Target(
        platform,
        logical_core,
        config.accelerator.cores or _granted_cores(platform, logical_core, environment, dev),
        num_nodes_of(environment),
    )


def known_platform(environment: Mapping[str, str] = os.environ, sys: Path = Path("/sys")) -> Platform | None:
    """The platform that a variable or this machine names; None: neither names one, as on a machine that inspects."""
    try:
        return _platform(environment, sys, str)
    except InvalidConfig:
        return None


def named_platform(environment: Mapping[str, str] = os.environ) -> Platform | None:
    """The platform that the variable names; None: it names none."""
    return known_platform(environment) if environment.get(PLATFORM_VARIABLE) else None


def _platform(environment: Mapping[str, str], sys: Path, ask: Callable[[], str]) -> Platform:
    name = environment.get(PLATFORM_VARIABLE, "")
    where = PLATFORM_VARIABLE if name else "the instance type"
    if not name:
        with suppress(OSError):
            name = (sys / PRODUCT_NAME).read_text().strip()
        if not _PLATFORM.match(name.lower()):
            name = ask() or name
    family = _PLATFORM.match(name.lower())
    if family is None:
        problem = f"{where} is {name!r}" if name else "this machine's instance type is unknown"
        known = ", ".join(PLATFORMS)
        raise InvalidConfig(
            PLATFORM_VARIABLE, f"{problem}; to compile on other machines, set it to the platform that serves: {known}"
        )
    return PLATFORMS[family[1]]


def _wanted_logical_core(config: RuntimeConfig) -> int:
    """That of the configuration or of its override; 0: neither says one."""
    size = config.accelerator.logical_neuron_core
    for key, value in config.override_neuron_config.items():
        if plain(key) not in LOGICAL_CORE_KEYS:
            continue
        if value not in (1, 2) or size not in (0, value):
            message = f"is {value!r}, but must be 1 or 2" + (f", and logicalNeuronCore is {size}" if size else "")
            raise InvalidConfig(f"{PATH}.{key}", message)
        return int(value)
    return size


def _granted_cores(platform: Platform, logical_core: int, environment: Mapping[str, str], dev: Path) -> int:
    visible, number = environment.get(VISIBLE_CORES_VARIABLE, ""), environment.get(NUM_CORES_VARIABLE, "")
    if visible:
        return len(core_numbers(visible))
    if number:
        if not number.isdigit():
            raise InvalidConfig(NUM_CORES_VARIABLE, f"must be a number of cores, got {number!r}")
        if int(number):
            return int(number)
    return len(device_nodes(dev)) * platform.physical_cores // logical_core


def core_numbers(value: str) -> list[int]:
    """The cores of a list such as `0-3,8`. Raises InvalidConfig."""
    numbers: set[int] = set()
    for part in value.split(","):
        match = re.fullmatch(r"\s*(\d+)(?:\s*-\s*(\d+))?\s*", part)
        if match is None or int(match[2] or match[1]) < int(match[1]):
            message = f"must be numbers of cores such as `0-3` or `0,2`, got {value!r}"
            raise InvalidConfig(VISIBLE_CORES_VARIABLE, message)
        numbers.update(range(int(match[1]), int(match[2] or match[1]) + 1))
    return sorted(numbers)


def check_cores(target: Target, tensor: int) -> None:
    """Raises FatalError with DEVICE_HELD if this process has too few cores to load its share of a model."""
    needed = target.cores_of_node(tensor)
    if target.granted_cores < needed:
        raise FatalError(
            ExitCode.DEVICE_HELD,
            f"the model needs {needed} NeuronCores of {target.logical_core} physical cores each, but this process was "
            f"granted {target.granted_cores} ({VISIBLE_CORES_VARIABLE}, {NUM_CORES_VARIABLE} or the devices in /dev)",
        )


def environment_of(
    target: Target,
    tensor: int,
    max_context_length: int,
    scratch: Path | None,
    environment: Mapping[str, str] = os.environ,
) -> dict[str, str]:
    """The variables to set before the Neuron libraries are imported; what the environment has already is kept.

    scratch: to compile, a folder of this process alone: two compilations in one folder would overwrite each other's
        files.
    """
    variables = {
        **dict.fromkeys(LOGICAL_CORE_VARIABLES, str(target.logical_core)),
        PLATFORM_VARIABLE: target.platform.name,
        EXEC_TIMEOUT_VARIABLE: str(EXEC_TIMEOUT_SECONDS),
        PROCESS_TAG_VARIABLE: socket.gethostname(),
    }
    if scratch is not None:
        variables["BASE_COMPILE_WORK_DIR"] = f"{scratch}/"
    if VISIBLE_CORES_VARIABLE not in environment:
        variables[NUM_CORES_VARIABLE] = str(target.cores_of_node(tensor))
    if max_context_length >= LONG_CONTEXT:
        variables |= {"NEURON_RT_DBG_SCRATCHPAD_ON_SINGLE_CORE": "1", "NEURON_SCRATCHPAD_PAGE_SIZE": "1024"}
    return {name: value for name, value in variables.items() if name not in environment}


def environment_of_group(
    rendezvous: str, environment: Mapping[str, str] = os.environ, sys: Path = Path("/sys")
) -> dict[str, str]:
    """As `environment_of`, for a model on several nodes. Raises FatalError if the leader has no address any more.

    rendezvous: `tcp://host:port`, where the Neuron runtimes of all nodes meet.
    """
    at = urlsplit(rendezvous)
    # The runtime takes no host names of more than 63 characters, which those of pods may have.
    variables = {ROOT_VARIABLE: f"{bracketed(address_of(at.hostname or ''))}:{at.port}"}
    if has_efa(sys):
        variables |= EFA_VARIABLES
    return {name: value for name, value in variables.items() if name not in environment}


def has_efa(sys: Path = Path("/sys")) -> bool:
    """Whether this node has an interface by which devices of several nodes reach each other."""
    return any((sys / EFA_INTERFACES).glob("*"))


def exec_timeout_seconds(environment: Mapping[str, str] = os.environ) -> float:
    """After which the Neuron runtime gives up a step."""
    try:
        return float(environment.get(EXEC_TIMEOUT_VARIABLE, EXEC_TIMEOUT_SECONDS))
    except ValueError as error:
        raise InvalidConfig(EXEC_TIMEOUT_VARIABLE, f"must be a number of seconds: {error}") from error
