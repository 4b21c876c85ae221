"""The real vLLM, as another maker builds it for CPUs, in an environment of its own.

Used by the tests of the engine `vllm`. It serves without a device what AWS's image serves on one, and begins and ends
as that does; what only a device shows is left to `fakes/vllm_serve`.
"""

from __future__ import annotations

import sys
from pathlib import Path

from cluster.rig.image_vllm import ALIAS, PINS
from cluster.rig.needs import NotPossibleHere
from helpers.environments import python_environment

ENVIRONMENT = {
    "VLLM_CPU_CI_ENV": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
}
"""Starts soon, takes little, and asks nobody but who asks it."""


def folder() -> Path:
    """The folder that has the program `vllm`. Raises NotPossibleHere."""
    return python_environment("vllm", PINS, alias=ALIAS)


if __name__ == "__main__":
    try:
        print(folder())
    except NotPossibleHere as error:
        sys.exit(str(error))
