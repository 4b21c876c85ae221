"""The fake optimum-neuron for tests: `with fake_optimum("0.4.5"):` installs a release of it under the real names.

It shares the device, and the modes `strict` and `damage`, with the fake NxD Inference.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from helpers.nxdi import FOLDER as NXDI_FOLDER
from helpers.nxdi import Mode, fake_nxdi

FOLDER = Path(__file__).parents[1] / "fakes" / "optimum"
RELEASES = ("0.4.5", "sdk2.31")
"""The newer one computes prompts in chunks."""


def _forget() -> dict[str, Any]:
    names = [name for name in sys.modules if name.partition(".")[0] in ("optimum", "fake_optimum")]
    return {name: sys.modules.pop(name) for name in names}


def _folders(release: str) -> list[str]:
    return [str(FOLDER), str(FOLDER / "releases" / release)]


@contextmanager
def fake_optimum(release: str = "0.4.5", mode: Mode = "strict", **settings: Any) -> Iterator[Any]:
    """The package `fake_nxdi`, whose settings and counts these are, with a free device of its own."""
    with fake_nxdi(mode=mode, **settings) as fake:
        loaded, folders = _forget(), _folders(release)
        sys.path[:0] = folders
        try:
            yield fake
        finally:
            _forget()
            sys.modules.update(loaded)
            for folder in folders:
                sys.path.remove(folder)


def process_environment(release: str = "0.4.5", mode: Mode = "strict") -> dict[str, str]:
    """Variables that put the fake into a process."""
    path = os.pathsep.join(filter(None, (*_folders(release), str(NXDI_FOLDER), os.environ.get("PYTHONPATH", ""))))
    return {"PYTHONPATH": path, "FAKE_NXDI_MODE": mode}
