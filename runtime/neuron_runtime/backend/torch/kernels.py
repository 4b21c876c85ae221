"""Builds kernels in C++ for this processor, and finds those that were built before.

`eight_bits` and `lora` call it, each for its own source. A kernel is kept for all processes of a user, by its source,
the compiler and the processor.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import stat
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from neuron_runtime.arguments import default_weights_dir
from neuron_runtime.backend.torch.graphs import cxx
from neuron_runtime.console import say

FLAGS = ("-O3", "-march=native", "-std=c++17", "-fopenmp", "-fno-math-errno", "-fno-trapping-math", "-fwrapv")
BUILD_SECONDS = 300

Kernel = TypeVar("Kernel")


def built(source: Path, made: Callable[[ctypes.CDLL], Kernel], otherwise: str) -> Kernel | None:
    """What `made` makes of the library; it raises OSError if this processor is not fit. Then, and where it cannot be
    built, there is None, and `otherwise` is said, what follows from that."""
    try:
        return made(_library(source))
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:  # RuntimeError: there is no home
        said = error.stderr if isinstance(error, subprocess.CalledProcessError) else str(error)
        reason = next((line for line in said.splitlines() if "error" in line), said.partition("\n")[0])
        say(f"warning: {otherwise}: {reason}")
        return None


def _library(source: Path) -> ctypes.CDLL:
    path = path_of(source)
    try:
        _check_owner(path.parent)
        return ctypes.CDLL(str(path))
    except OSError:  # not built yet, damaged, or of somebody else
        with tempfile.TemporaryDirectory() as folder:
            new = Path(folder, path.name)
            _run("-shared", "-fPIC", str(source), "-o", str(new))
            _keep(new, path)
            return ctypes.CDLL(str(new))


def path_of(source: Path) -> Path:
    """Where its library is kept. The compiler says what it takes this processor for."""
    said = _run("-###", "-E", str(source)).stderr
    key = hashlib.sha256(b"\0".join((source.read_bytes(), *(one.encode() for one in (*FLAGS, said))))).hexdigest()[:32]
    return default_weights_dir().with_name("kernels") / f"{key}.so"


def _run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [cxx(), *FLAGS, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=BUILD_SECONDS)


def _keep(new: Path, path: Path) -> None:
    """A folder that cannot be written keeps nothing."""
    with contextlib.suppress(OSError):
        path.parent.mkdir(0o755, parents=True, exist_ok=True)
        _check_owner(path.parent)
        # A name of its own: processes of containers that share the folder may have the same number.
        descriptor, scratch = tempfile.mkstemp(dir=path.parent, prefix=f"{path.name}.")
        try:
            with open(descriptor, "wb") as file:
                file.write(new.read_bytes())
                os.fchmod(descriptor, 0o644)
                file.flush()
                os.fsync(descriptor)  # a library that is cut short ends who loads it
            os.replace(scratch, path)
        except OSError:
            os.unlink(scratch)
            raise


def _check_owner(folder: Path) -> None:
    """Raises OSError if somebody else may write there, whose library would be run."""
    found = folder.stat()
    if found.st_uid not in (0, os.geteuid()) or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise PermissionError(f"{folder} can be written by other users")
