"""The fake NxD Inference for tests: `with fake_nxdi(version="0.9", mode="strict"):` installs it under the real names.

A process gets it by PYTHONPATH and FAKE_NXDI_* of `process_environment`. With NXDI_UNDER_TEST=installed nothing is
installed, and tests that ask `installed()` run on what the machine has.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

FOLDER = Path(__file__).parents[1] / "fakes" / "nxdi"
NAMES = ("neuronx_distributed_inference", "neuronx_distributed", "torch_neuronx", "torch_xla", "neuronxcc")

Mode = Literal["strict", "damage"]


def installed() -> bool:
    """Whether tests are to run on the NxD Inference of this machine."""
    return os.environ.get("NXDI_UNDER_TEST") == "installed"


def _forget() -> dict[str, Any]:
    """Takes the library out of the loaded modules, so that the next import reads it again."""
    if torch := sys.modules.get("torch"):
        vars(torch.classes).pop("neuron", None)
    names = [name for name in sys.modules if name.partition(".")[0] in NAMES]
    return {name: sys.modules.pop(name) for name in names}


@contextmanager
def fake_nxdi(version: str = "0.9", mode: Mode = "strict", step_seconds: float = 0.0, **settings: Any) -> Iterator[Any]:
    """The package `fake_nxdi`, with a free device of its own; `settings` are further fields of `fake_nxdi.Settings`.

    The environment, which NxDI writes to, is put back at the end.
    """
    sys.path.insert(0, str(FOLDER))
    loaded, environment = _forget(), dict(os.environ)
    import fake_nxdi as fake

    former = fake.configure(replace(fake.Settings(**settings), version=version, mode=mode, step_seconds=step_seconds))
    try:
        yield fake
    finally:
        fake.configure(former)
        _forget()
        sys.modules.update(loaded)
        sys.path.remove(str(FOLDER))
        os.environ.clear()
        os.environ.update(environment)


def process_environment(version: str = "0.9", mode: Mode = "strict", step_seconds: float = 0.0) -> dict[str, str]:
    """Variables that put the fake into a process; its device is shared by folder with FAKE_NXDI_DEVICES."""
    path = os.pathsep.join(filter(None, (str(FOLDER), os.environ.get("PYTHONPATH", ""))))
    return {
        "PYTHONPATH": path,
        "FAKE_NXDI_VERSION": version,
        "FAKE_NXDI_MODE": mode,
        "FAKE_NXDI_STEP_SECONDS": str(step_seconds),
    }
