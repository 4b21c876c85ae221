"""What is installed of the Neuron libraries, and what they and the driver say of this machine.

Called by the `library` of each Neuron backend. Imports a Neuron library only where it says so.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from contextlib import suppress
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from neuron_runtime.core import DeviceMemory

DRIVER_VERSION = "module/neuron/version"
"""Below /sys."""


def missing(packages: Mapping[str, str]) -> list[str]:
    """Distributions that are not installed. packages: the name to import of each distribution."""
    return [name for name, module in packages.items() if not has_module(module)]


def has_module(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except (ImportError, ValueError):
        return False


def version_of(distribution: str) -> str:
    """The installed version; empty if it is not installed, or does not say."""
    with suppress(metadata.PackageNotFoundError):
        return metadata.version(distribution)
    return ""


def driver_version(sys: Path = Path("/sys")) -> str:
    """The version of the Neuron driver; empty without one."""
    with suppress(OSError):
        return (sys / DRIVER_VERSION).read_text().strip()
    return ""


def platform_target() -> str:
    """The platform of this machine by torch-neuronx, which this imports; empty if that does not know it."""
    try:
        return str(importlib.import_module("torch_neuronx.utils").get_platform_target())
    except Exception:  # noqa: BLE001 - off a Neuron instance it raises what it likes
        return ""


def device_memory() -> DeviceMemory | None:
    """Memory of one logical core of this process, which must have loaded a model; None if it is unknown.

    Not called while the model runs.
    """
    import torch  # noqa: PLC0415  (takes seconds)

    try:
        # torch-neuronx registers the class. Asking for one, or for a method, that a version lacks is an error.
        used, free = map(int, torch.classes.neuron.Runtime().get_vnc_memory_stats())
    except Exception:  # noqa: BLE001 - a figure for monitoring ends no load, whatever a version raises
        return None
    return DeviceMemory(used, free) if used >= 0 and free >= 0 else None
