"""Which steps are compiled, for which processors, and by which C++ compiler.

Read by whoever describes, compiles and loads them. Imports no torch.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

PROCESSOR = "x86-64-v3"
"""The level of processors that graphs are compiled for (x86-64 psABI): those with AVX2. It is not that of the compiling
machine, so graphs run on all nodes, and the key does not depend on which one compiled them."""


@dataclass(frozen=True, slots=True)
class StepGraph:
    """A step that is compiled. num_rows: None for every number above one."""

    name: str
    file: str
    num_rows: int | None


ONE_ROW = StepGraph("decode of one row", "decode-one.so", 1)
SEVERAL_ROWS = StepGraph("decode of several rows", "decode-several.so", None)
STEPS = (ONE_ROW, SEVERAL_ROWS)


def cxx() -> str:
    """The C++ compiler's command."""
    return os.environ.get("CXX", "g++")
