"""The process that compiles a model, or checks what another one compiled. It ends afterwards.

Started by `compiling`, with a scratch folder as working directory and TMPDIR: compilers keep memory and threads, leave
files where they run, and are killed when memory runs out. It knows no store and no key.
"""

from __future__ import annotations

import argparse
import errno
import importlib
import os
import resource
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import cast

import msgspec

from neuron_runtime.artifacts.store import CompiledGraph
from neuron_runtime.backend_protocol import Compiler, CompileUnit
from neuron_runtime.config import load_config
from neuron_runtime.engine.backends import BackendPackage
from neuron_runtime.errors import ExitCode, FatalError

WATCH_SECONDS = 0.5
"""Interval of looks at what is ready, where several graphs are compiled together."""


# What the process tells its parent: lines of JSON in a pipe, apart from what compilers print.


class Began(msgspec.Struct, frozen=True, tag=True):
    """A graph is being compiled, or several together; they count from 1."""

    graph: int
    num_graphs: int
    name: str
    together: bool = False


class Made(msgspec.Struct, frozen=True, tag=True):
    """One of several that are compiled together is ready."""

    graph: int
    num_graphs: int
    name: str
    seconds: float
    """Since they began."""


class Ended(msgspec.Struct, frozen=True, tag=True):
    """Everything is done."""

    tools: dict[str, str] = {}
    graphs: tuple[CompiledGraph, ...] = ()
    peak_bytes: int = 0
    """The peak memory of the largest of its processes."""


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The error with which it ends."""

    exit_code: int
    message: str
    trace: str = ""


Message = Began | Made | Ended | Failed


class Lines:
    """Puts messages together from what was read."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, raw: bytes) -> Iterator[Message]:
        *lines, self._rest = (self._rest + raw).split(b"\n")
        for line in lines:
            yield msgspec.json.decode(line, type=Message)


def compile_graphs(compiler: Compiler, folder: Path, send: Callable[[Message], None]) -> Ended:
    tools, graphs = dict(compiler.tools()), compiler.graphs()
    done: list[CompiledGraph] = []
    count = sum(len(graph.parts) or 1 for graph in graphs)
    for graph in graphs:
        send(Began(len(done) + 1, count, graph.name, together=bool(graph.parts)))
        began = time.monotonic()
        with _watching(graph, done, count, send):
            graph.compile(folder)
        if not graph.parts:
            done.append(CompiledGraph(graph.name, round(time.monotonic() - began, 3)))
    return Ended(tools, tuple(done), peak_bytes())


@contextmanager
def _watching(
    graph: CompileUnit, done: list[CompiledGraph], count: int, send: Callable[[Message], None]
) -> Iterator[None]:
    """Report each part of a graph once it is ready; those that are not seen before, at the end."""
    began, ended, waiting = time.monotonic(), threading.Event(), list(graph.parts)

    def take(ready: Collection[str]) -> None:
        for name in [name for name in waiting if name in ready]:
            waiting.remove(name)
            done.append(CompiledGraph(name, round(time.monotonic() - began, 3)))
            send(Made(len(done), count, name, done[-1].seconds))

    def watch() -> None:
        while not ended.wait(WATCH_SECONDS):
            take(graph.ready())

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield
    finally:
        ended.set()
        watcher.join()
    take(waiting.copy())


def peak_bytes() -> int:
    """Most memory of this process, or of one of those that it has waited for."""
    return max(resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)) * 1024


def die_with_parent() -> None:
    """End with everything that the compiler has started once the parent, which holds the other end of stdin, ends."""
    while os.read(sys.stdin.fileno(), 1):
        pass
    os.killpg(0, signal.SIGKILL)


def failed(error: Exception) -> Failed:
    match error:
        case FatalError(exit_code=code):
            return Failed(int(code), str(error))
        case MemoryError():
            return Failed(int(ExitCode.COMPILE_OUT_OF_MEMORY), str(error) or "memory ran out")
        case OSError(errno=errno.ENOSPC | errno.EDQUOT):
            return Failed(int(ExitCode.STORAGE_FULL), f"{error}; provide more space")
    trace = "".join(traceback.format_exception(error))
    return Failed(int(ExitCode.COMPILE_FAILED), f"{type(error).__name__}: {error}", trace)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="neuron_runtime.artifacts.process")
    parser.add_argument("work", choices=("compile", "check"))
    parser.add_argument("--package", required=True)
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--model-dir", type=Path, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--messages-fd", type=int, required=True)
    options = parser.parse_args(arguments)
    threading.Thread(target=die_with_parent, daemon=True).start()
    os.set_inheritable(options.messages_fd, False)

    def send(message: Message) -> None:
        os.write(options.messages_fd, msgspec.json.encode(message) + b"\n")

    try:
        package = cast(BackendPackage, importlib.import_module(options.package))
        compiler = package.compiler(load_config(options.config), options.model_dir)
        if options.work == "check":
            compiler.check(options.folder)
            send(Ended())
        else:
            send(compile_graphs(compiler, options.folder, send))
    except Exception as error:  # noqa: BLE001 - a compiler may raise anything
        failure = failed(error)
        send(failure)
        return failure.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
