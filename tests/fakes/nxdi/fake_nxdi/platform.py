"""Which chip the fake takes itself for: FAKE_NXDI_PLATFORM, unless the compiler is told another target."""

from __future__ import annotations

import os

TARGETS = ("trn1", "inf2", "trn2", "trn3")


def device() -> str:
    """The chip of this machine."""
    return os.environ.get("FAKE_NXDI_PLATFORM", "trn2")


def target() -> str:
    """The chip that a compilation is for."""
    return os.environ.get("NEURON_PLATFORM_TARGET_OVERRIDE") or device()


def logical_core() -> int:
    return 2 if target() in ("trn2", "trn3") else 1
