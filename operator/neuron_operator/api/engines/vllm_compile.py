"""The program of a Job that compiles with vLLM's image, which has only Python and vLLM: `vllm` sends its text along.

vLLM with its plugin compiles as it starts, keeps the graphs in a cache, and then serves. So this starts it, waits until
it is healthy, ends it, and puts the graphs into the store: under our key, by one rename. It leaves the record of a
compilation. Nothing of this package is imported here.
"""

import errno
import hashlib
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from importlib import import_module
from importlib.metadata import distributions
from importlib.util import find_spec
from pathlib import Path
from tempfile import gettempdir
from threading import Thread
from typing import Any, NoReturn

STORAGE_FULL = 15, "StorageFull"
COMPILE_FAILED = 21, "CompileFailed"
COMPILE_OUT_OF_MEMORY = 22, "CompileOutOfMemory"
POLL_SECONDS = 1.0
STOP_SECONDS = 120.0
OUTPUT_SECONDS = 5.0
"""For output that vLLM left when it ended: compilers that it started may hold it open for an hour."""
ABANDONED_SECONDS = 24 * 3600
CONTENTS = "contents.json"
"""Beside the graphs: the checksum of each file, and what compiled them."""
COMPILER = re.compile("neuron|^nki|^vllm|^torch$", re.IGNORECASE)
MAX_MESSAGE_BYTES = 1500
"""Kubelets cut a record after 4096 bytes, and then it is none."""
LIBRARY = "libtorch_neuronx_lite"
FULL = errno.ENOSPC, errno.EDQUOT
SAYS_LESS = "Engine core initialization failed", "WorkerProc initialization failed"
"""In errors of vLLM that follow from the cause."""
GRAPH = re.compile("[0-9a-f]{32}")
OOM_COUNTS = "/sys/fs/cgroup/memory.events", "/sys/fs/cgroup/memory/memory.oom_control"
"""Of this container, with either version of control groups."""
OUT_OF_MEMORY = "Cannot allocate memory", "can't allocate memory", "std::bad_alloc", "MemoryError"


def main(record: str, folder: str, address: str, *command: str) -> None:
    """record: the file for the record. folder: the key's, in the store. address: of the health of what is started."""
    # The first process of a container would not notice it.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    began, target = time.monotonic(), Path(folder)
    cache = Path(os.environ["VLLM_CACHE_ROOT"], "neuron", "compile_cache")
    is_found = is_whole(target)
    if is_found:
        with suppress(OSError):
            os.utime(target)  # it is in use now: what is not for long is deleted
    else:
        partial = prepared(record, target)
        compile_graphs(record, address, command)
        publish(record, cache, partial, target)
    artifact = {
        "key": target.name,
        "bytes": sum(one.stat().st_size for one in files_of(target)),
        "seconds": round(time.monotonic() - began, 1),
        "reused": is_found,
        "peakBytes": resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024,
    }
    write(record, ok=True, artifact=artifact)


def files_of(folder: Path) -> Iterator[Path]:
    return (one for one in sorted(folder.rglob("*")) if one.is_file() and one != folder / CONTENTS)


def contents_of(folder: Path) -> "dict[str, dict[str, str]]":
    files = {}
    for one in files_of(folder):
        with one.open("rb") as file:
            files[str(one.relative_to(folder))] = hashlib.file_digest(file, "sha256").hexdigest()
    installed = ((one.name or "", one.version) for one in distributions())
    # Graphs are found by them: an image may have become another one under its name.
    return {"files": files, "versions": {name: version for name, version in installed if COMPILER.search(name)}}


def is_whole(folder: Path) -> bool:
    """Whether the graphs are those that a Job left. A pod that misses one would find it missing for ever otherwise."""
    try:
        return bool(json.loads((folder / CONTENTS).read_text(encoding="utf-8")) == contents_of(folder))
    except (OSError, ValueError):
        return False


def compile_graphs(record: str, address: str, command: "tuple[str, ...]") -> None:
    print("neuron-runtime: vLLM loads the model and compiles", flush=True)
    before = num_oom_kills()
    # The compilers leave files where they are started.
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        cwd=gettempdir(),
    )
    try:
        errors: deque[str] = deque(maxlen=1)
        reader = Thread(target=copy_output, args=(process, errors), daemon=True)
        reader.start()
        while not is_healthy(address):
            if process.poll() is not None:
                reader.join(OUTPUT_SECONDS)
                what = f"vLLM ended with code {process.returncode}: {''.join(errors) or 'see its log'}"
                lacked = num_oom_kills() > before or any(text in what for text in OUT_OF_MEMORY)
                fail(record, what, COMPILE_OUT_OF_MEMORY if lacked else COMPILE_FAILED)
            time.sleep(POLL_SECONDS)
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(STOP_SECONDS)
    finally:
        process.kill()
        process.wait()


def num_oom_kills() -> int:
    """Processes of this container that the kernel ended because memory ran out: one of them may be a compiler alone."""
    rows = []
    for name in OOM_COUNTS:
        with suppress(OSError):
            rows += Path(name).read_text(encoding="utf-8").splitlines()
    return sum(int(row.split()[1]) for row in rows if row.startswith("oom_kill "))


def copy_output(process: "subprocess.Popen[str]", errors: "deque[str]") -> None:
    """To our log; keeps the first line that names an error of the compiler, or else the last of any."""
    is_cause = False
    for line in process.stdout or ():
        print(line, end="", flush=True)
        names_cause = "NCC_E" in line or "neuronx-cc compilation failed" in line
        if not is_cause and (names_cause or ("Error: " in line and not any(text in line for text in SAYS_LESS))):
            errors.append(line.strip())
            is_cause = names_cause


def is_healthy(address: str) -> bool:
    try:
        with urllib.request.urlopen(address, timeout=5) as answer:  # noqa: S310 - always our own
            return bool(answer.status == 200)
    except OSError:
        return False


def prepared(record: str, target: Path) -> Path:
    """An empty folder beside the target. What would keep the graphs from it is found before an hour of compiling."""
    if find_spec(LIBRARY) is None:
        fail(record, f"the image has no {LIBRARY}, which saves graphs")
    partials = target.parent / ".partial"
    for one in partials.glob(f"{target.name}.*"):
        with suppress(OSError):
            if time.time() - one.stat().st_mtime > ABANDONED_SECONDS:
                shutil.rmtree(one, ignore_errors=True)
    partial = partials / f"{target.name}.{os.uname().nodename}"
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
    except OSError as error:
        full = error.errno in FULL
        fail(record, f"cannot write to the claim: {error}", STORAGE_FULL if full else COMPILE_FAILED)
    return partial


def publish(record: str, cache: Path, partial: Path, target: Path) -> None:
    """Copy the graphs with the plugin's own function, which refuses unfinished ones, then let them appear at once.

    Beside graphs the cache has their kernels, in `nki`, which the function copies along. It only logs that it could
    not write.
    """
    save_cache = import_module(f"{LIBRARY}.compile").save_cache
    graphs = sorted(one.name for one in cache.glob("*") if GRAPH.fullmatch(one.name) and one.is_dir())
    if not graphs:
        fail(record, f"vLLM started and left no graphs in {cache}")
    try:
        for graph in graphs:
            save_cache(local_cache_dir=str(cache), remote_cache_dir=str(partial), hash_key=graph)
            if not (partial / graph).is_dir():
                fail(record, f"the graph {graph} could not be written to {target.parent}: see the log")
        (partial / CONTENTS).write_text(json.dumps(contents_of(partial)), encoding="utf-8")
    except (RuntimeError, OSError) as error:
        shutil.rmtree(partial, ignore_errors=True)
        full = isinstance(error, OSError) and error.errno in FULL
        fail(record, f"graphs cannot be saved to the claim: {error}", STORAGE_FULL if full else COMPILE_FAILED)
    try:
        partial.rename(target)
    except OSError:
        if not target.is_dir():
            raise
        if not is_whole(target):  # otherwise another Job was first
            target.rename(partial.with_name(f"{partial.name}-damaged"))
            partial.rename(target)
            shutil.rmtree(partial.with_name(f"{partial.name}-damaged"), ignore_errors=True)
        shutil.rmtree(partial, ignore_errors=True)


def fail(record: str, message: str, how: "tuple[int, str]" = COMPILE_FAILED) -> NoReturn:
    code, reason = how
    message = message.encode()[:MAX_MESSAGE_BYTES].decode(errors="ignore")
    write(record, ok=False, exitCode=code, reason=reason, message=message)
    sys.exit(code)


def write(record: str, **result: Any) -> None:
    Path(record).write_text(
        json.dumps({"version": 1, "command": "compile", **result}, ensure_ascii=False), encoding="utf-8"
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
