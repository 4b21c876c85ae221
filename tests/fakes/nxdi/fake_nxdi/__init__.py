"""What the fake NxD Inference is told to be (version, mode, times, faults) and what it counts.

The packages beside this one carry NxDI's import names and call in here; `helpers.nxdi.fake_nxdi` sets `SETTINGS` for
tests, the environment (`FAKE_NXDI_*`) for processes. Nothing here imports torch.
"""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass, field
from typing import Literal, NoReturn

VERSIONS = ("0.7", "0.8", "0.9", "0.10")
"""0.7, 0.8 and 0.9 follow their public source. 0.10 has none: it is 0.9, unverified."""
VERIFIED = ("0.7", "0.8", "0.9")
LIBRARY_VERSIONS = {"0.7": "0.7.0", "0.8": "0.8.0", "0.9": "0.9.0", "0.10": "0.10.0"}


class FakeRefusal(AssertionError):
    """The strict fake was called in a way that the real library answers with silent damage.

    `rule` names the rule of the contract that was broken. It is an AssertionError so that no code that handles the
    library's own errors takes it for one of them.
    """

    def __init__(self, rule: str, what: str) -> None:
        super().__init__(f"NxDI rule {rule}: {what}")
        self.rule = rule


@dataclass
class Faults:
    """What goes wrong, and when. Counted down; 0 or None: nothing."""

    held_loads: int = 0
    """So many loads find the cores taken by another process (`NRT_RESOURCE`)."""
    nrt_code: int = 0
    """The status with which the device fails."""
    at_step: int = -1
    """The device step that fails with `nrt_code`, counted from 0 over all graphs; -1: none."""


@dataclass
class Settings:
    version: str = "0.9"
    mode: Literal["strict", "damage"] = "strict"
    step_seconds: float = 0.0
    """Time that the device takes for a graph, besides the time of computing it here."""
    compile_seconds: float = 0.0
    """Time that the compiler takes for a graph."""
    compiler: bool = True
    """False: the machine has no neuronx-cc."""
    memory_bytes: int = 0
    """Memory of a core; 0: without a limit."""
    devices: str = ""
    """Folder with a lock per core that processes share; "": every process has its own device."""
    faults: Faults = field(default_factory=Faults)

    @property
    def release(self) -> int:
        return int(self.version.split(".")[1])


def from_environment() -> Settings:
    read = os.environ.get
    return Settings(
        version=read("FAKE_NXDI_VERSION", "0.9"),
        mode="damage" if read("FAKE_NXDI_MODE", "strict") == "damage" else "strict",
        step_seconds=float(read("FAKE_NXDI_STEP_SECONDS", "0")),
        compile_seconds=float(read("FAKE_NXDI_COMPILE_SECONDS", "0")),
        compiler=read("FAKE_NXDI_COMPILER", "present") != "missing",
        memory_bytes=int(read("FAKE_NXDI_MEMORY_BYTES", "0")),
        devices=read("FAKE_NXDI_DEVICES", ""),
        faults=Faults(
            held_loads=int(read("FAKE_NXDI_HELD_LOADS", "0")),
            nrt_code=int(read("FAKE_NXDI_NRT_CODE", "0")),
            at_step=int(read("FAKE_NXDI_FAIL_AT_STEP", "-1")),
        ),
    )


@dataclass
class Counts:
    """What the device did since the fake was set up."""

    steps: int = 0
    graphs: Counter[str] = field(default_factory=Counter)
    """Runs by graph, e.g. `token_generation_model 4x128`."""
    compiled: int = 0
    wasted: int = 0
    """Steps that async mode launched ahead and threw away."""
    busy_seconds: float = 0.0


SETTINGS = from_environment()
COUNTS = Counts()
AT_IMPORT: dict[str, str] = {}
"""The environment when the library was imported."""


def configure(settings: Settings) -> Settings:
    """Takes other settings, with a device that is free and counts of nothing; returns the former ones."""
    global SETTINGS, COUNTS
    from fake_nxdi import device

    former = SETTINGS
    SETTINGS, COUNTS = settings, Counts()
    device.DEVICE.give_up()
    device.DEVICE = device.Device()
    return former


def strict() -> bool:
    return SETTINGS.mode == "strict"


def refuse(rule: str, what: str) -> NoReturn:
    raise FakeRefusal(rule, what)


def has(release: int) -> bool:
    """Whether the emulated version is at least 0.`release`."""
    return SETTINGS.release >= release
