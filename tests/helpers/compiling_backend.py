"""A backend package whose compiler does what a real one may do: `overrideNeuronConfig.behaviour` says which."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from neuron_runtime.backend_protocol import CompileUnit, Needs
from neuron_runtime.config import RuntimeConfig
from neuron_runtime.errors import ExitCode, FatalError

FREED_BY_EXIT = False
ALWAYS_COMPILES = False
PROCESS_PER_RANK = False


def needs_weights(config: RuntimeConfig) -> bool:
    return False


def compiler_reads_weights(config: RuntimeConfig) -> bool:
    return False


def versions() -> dict[str, str]:
    return {}


SEEN = "COMPILING_BACKEND_SEEN"
"""Names a file that gets a line for each graph that is compiled: the process, its working directory, its TMPDIR."""


class OddCompiler:
    def __init__(self, behaviour: str, model_dir: Path) -> None:
        self._behaviour = behaviour
        self._model_dir = model_dir
        self._ready: list[str] = []
        self._looked = threading.Event()

    @property
    def needs(self) -> Needs:
        return Needs(shapes={"rows": [1, 2]}, settings={"behaviour": self._behaviour}, libraries={}, target={})

    def ready_made(self, given: Path | None) -> None:
        return None

    def tools(self) -> Mapping[str, str]:
        if not self._model_dir.is_dir():
            raise FatalError(ExitCode.INVALID_MODEL, f"{self._model_dir} is no folder")
        if self._behaviour == "no tools":
            raise FatalError(ExitCode.COMPILE_FAILED, "there is no C++ compiler: install g++")
        return {"g++": "13"}

    def graphs(self) -> Sequence[CompileUnit]:
        if self._behaviour == "together":
            return [CompileUnit("both", self._together, ("first", "second", "third"), self._look)]
        return [CompileUnit(name, lambda folder, name=name: self._compile(name, folder)) for name in ("one", "two")]  # type: ignore[misc]

    def check(self, folder: Path) -> None:
        assert os.environ["PATH"] == ""
        if self._behaviour == "unloadable":
            raise OSError("one: undefined symbol")

    def _compile(self, name: str, folder: Path) -> None:
        with open(os.environ[SEEN], "a") as seen:
            seen.write(f"{os.getpid()} {os.getcwd()} {os.environ['TMPDIR']}\n")
        # Compilers print, and leave files where they run.
        print(f"note: compiling {name}", flush=True)
        Path("left over").write_text(name)
        (folder / name).write_text(name)
        if name == "two":
            getattr(self, "_" + self._behaviour.replace(" ", "_"), lambda folder: None)(folder)

    def _together(self, folder: Path) -> None:
        self._ready.append("second")
        self._looked.wait()
        self._ready.append("first")
        (folder / "all").write_text("all")

    def _look(self) -> list[str]:
        if "second" in self._ready:
            self._looked.set()
        return list(self._ready)

    def _raise(self, folder: Path) -> None:
        sys.stderr.write("error: unknown instruction vfoo\n")
        raise RuntimeError("g++ exited with 1")

    def _exit(self, folder: Path) -> None:
        os._exit(3)

    def _crash(self, folder: Path) -> None:
        os.abort()

    def _run_out(self, folder: Path) -> None:
        blocks = []
        while True:
            blocks.append(b"\1" * 2**22)

    def _refuse_memory(self, folder: Path) -> None:
        sys.stderr.write("cc1plus: virtual memory exhausted\n")
        raise RuntimeError("g++ exited with 1")

    def _full_disk(self, folder: Path) -> None:
        raise OSError(28, "No space left on device", str(folder / "two"))

    def _link(self, folder: Path) -> None:
        (folder / "host").symlink_to("/etc/passwd")

    def _hide(self, folder: Path) -> None:
        (folder / ".hidden").write_text("")

    def _wait(self, folder: Path) -> None:
        helper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        with open(os.environ[SEEN], "a") as seen:
            seen.write(f"{helper.pid} - -\n")
        time.sleep(600)

    def _slow(self, folder: Path) -> None:
        time.sleep(2)


def check_config(config: RuntimeConfig) -> None:
    pass


def compiler(config: RuntimeConfig, model_dir: Path) -> OddCompiler:
    return OddCompiler(config.override_neuron_config.get("behaviour", ""), model_dir)


def load_backend(*given: Any) -> Any:
    raise NotImplementedError("it only compiles")
