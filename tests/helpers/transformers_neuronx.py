"""The fake transformers-neuronx for tests: `with fake_library(mode="strict"):` installs it under the real name.

Its device is that of the fake NxD Inference.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from helpers import nxdi

FOLDER = Path(__file__).parents[1] / "fakes" / "transformers_neuronx"
NAMES = ("transformers_neuronx", "fake_transformers_neuronx")


@contextmanager
def fake_library(mode: nxdi.Mode = "strict", **settings: Any) -> Iterator[Any]:
    """The package `fake_nxdi`, see `nxdi.fake_nxdi`."""
    with nxdi.fake_nxdi(mode=mode, **settings) as fake:
        sys.path.insert(0, str(FOLDER))
        os.environ["NEURON_PLATFORM_TARGET_OVERRIDE"] = "inf2"
        try:
            yield fake
        finally:
            for name in [name for name in sys.modules if name.partition(".")[0] in NAMES]:
                del sys.modules[name]
            sys.path.remove(str(FOLDER))


def process_environment(mode: nxdi.Mode = "strict") -> dict[str, str]:
    """Variables that put the fake into a process."""
    environment = nxdi.process_environment(mode=mode)
    path = os.pathsep.join((str(FOLDER), environment["PYTHONPATH"]))
    return {**environment, "PYTHONPATH": path, "NEURON_PLATFORM_TARGET_OVERRIDE": "inf2"}
