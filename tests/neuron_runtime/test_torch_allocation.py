"""What a loaded backend has set up, seen in the process that loads it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from helpers.torch_models import random_model

LOAD = """
import os, re, resource
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from neuron_runtime.backend.torch import load_backend
from neuron_runtime.config import EngineLimits, ModelSource, RuntimeConfig

model = ModelSource(uri="file:///model")
config = RuntimeConfig(version=1, model=model, served_names=("m",), limits=EngineLimits())
backend = load_backend(Path({folder!r}), config, lambda stage, share: None)
import torch
"""
HUGE = """
print(os.environ["THP_MEM_ALLOC_ENABLE"])
weights = torch.ones(2**22)
inside = weights.data_ptr() + 2**22
for begin, end, flags in re.findall(
    r"^([0-9a-f]+)-([0-9a-f]+) .*?^VmFlags:(.*?)$", Path("/proc/self/smaps").read_text(), re.MULTILINE | re.DOTALL
):
    if int(begin, 16) <= inside < int(end, 16):
        print("hg" in flags.split())
del weights
"""
TRITON = """
from torch.utils._triton import has_triton_package
print(has_triton_package())
"""
STEPS = """
def step():
    torch.ones(2**20), torch.ones(5 * 2**20)

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

with ThreadPoolExecutor(1) as thread:
    for _ in range(10):
        before = faults()
        for _ in range(15):
            thread.submit(step).result()
        print(faults() - before)
"""


def printed(script: str, folder: Path, **environment: str) -> list[str]:
    given = {name: value for name, value in os.environ.items() if name != "THP_MEM_ALLOC_ENABLE"}
    found = subprocess.run(
        [sys.executable, "-c", (LOAD + script + "backend.close()").replace("{folder!r}", repr(str(folder)))],
        env={**given, **environment, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        capture_output=True,
        text=True,
        timeout=200,
        check=True,
    )
    return found.stdout.split()


HAS_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage").exists()
"""Whether the kernel records the request for huge pages, granted or not."""


def test_weights_use_huge_pages_and_memory_freed_by_a_step_is_reused(tmp_path: Path) -> None:
    words = printed(HUGE + STEPS, random_model(tmp_path))
    switch, noted, faults = words[0], words[1:-10], words[-10:]
    assert switch == "1"
    assert noted == ["True"] or not HAS_HUGE_PAGES
    # 15 steps of 24 MiB cause thousands of page faults if their memory is allocated again, else next to none. The
    # kernel sometimes moves pages itself, so the best of several intervals counts.
    assert min(map(int, faults)) < 100


def test_the_environment_overrides_huge_pages_and_torch_finds_no_triton(tmp_path: Path) -> None:
    switch, *noted, has_triton = printed(HUGE + TRITON, random_model(tmp_path), THP_MEM_ALLOC_ENABLE="0")
    assert switch == "0"
    assert noted == ["False"] or not HAS_HUGE_PAGES
    assert has_triton == "False"
