"""The program of a Job that compiles with vLLM's image, which has only Python and vLLM: `vllm` sends its text along.

vLLM with its plugin compiles as it starts, keeps the graphs in a cache, and then serves. So this starts it, waits until
it is healthy, ends it, and puts the graphs into the store: under our key, by one rename. It leaves the record of a
compilation. Nothing of this package is imported here.
"""

import json
import os
import resource
import shutil
import subprocess
import sys
import time
import urllib.request
from collections import deque
from importlib import import_module
from pathlib import Path
from threading import Thread
from typing import Any, NoReturn

COMPILE_FAILED = 21
POLL_SECONDS = 1.0
STOP_SECONDS = 120.0


def main(record: str, folder: str, address: str, *command: str) -> None:
    """record: the file for the record. folder: the key's, in the store. address: of the health of what is started."""
    began, target = time.monotonic(), Path(folder)
    cache = Path(os.environ["VLLM_CACHE_ROOT"], "neuron", "compile_cache")
    is_found = target.is_dir()
    if not is_found:
        compile_graphs(record, address, command)
        publish(record, cache, target)
    artifact = {
        "key": target.name,
        "bytes": sum(one.stat().st_size for one in target.rglob("*") if one.is_file()),
        "seconds": round(time.monotonic() - began, 1),
        "reused": is_found,
        "peakBytes": resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024,
    }
    write(record, ok=True, artifact=artifact)


def compile_graphs(record: str, address: str, command: tuple[str, ...]) -> None:
    print("neuron-runtime: vLLM loads the model and compiles", flush=True)
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
    errors: deque[str] = deque(maxlen=1)
    reader = Thread(target=copy_output, args=(process, errors), daemon=True)
    reader.start()
    while not is_healthy(address):
        if process.poll() is not None:
            reader.join()
            fail(record, f"vLLM ended with code {process.returncode}: {''.join(errors) or 'see its log'}")
        time.sleep(POLL_SECONDS)
    process.terminate()
    try:
        process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def copy_output(process: "subprocess.Popen[str]", errors: "deque[str]") -> None:
    """To our log; keeps the first line that names an error of the compiler, or else the last of any."""
    is_cause = False
    for line in process.stdout or ():
        print(line, end="", flush=True)
        names_cause = "NCC_E" in line or "neuronx-cc compilation failed" in line
        if not is_cause and (names_cause or "Error: " in line):
            errors.append(line.strip())
            is_cause = names_cause


def is_healthy(address: str) -> bool:
    try:
        with urllib.request.urlopen(address, timeout=5) as answer:  # noqa: S310 - always our own
            return bool(answer.status == 200)
    except OSError:
        return False


def publish(record: str, cache: Path, target: Path) -> None:
    """Copy the graphs with the plugin's own function, which refuses unfinished ones, then let them appear at once."""
    save_cache = import_module("libtorch_neuronx_lite.compile").save_cache
    graphs = sorted(one.name for one in cache.glob("*") if one.is_dir())
    if not graphs:
        fail(record, f"vLLM started and left no graphs in {cache}")
    partial = target.parent / ".partial" / f"{target.name}-{os.uname().nodename}"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    for graph in graphs:
        save_cache(local_cache_dir=str(cache), remote_cache_dir=str(partial), hash_key=graph)
    try:
        partial.rename(target)
    except OSError:
        if not target.is_dir():
            raise
        shutil.rmtree(partial, ignore_errors=True)  # another Job was first


def fail(record: str, message: str) -> NoReturn:
    write(record, ok=False, exitCode=COMPILE_FAILED, reason="CompileFailed", message=message[:1500])
    sys.exit(COMPILE_FAILED)


def write(record: str, **result: Any) -> None:
    Path(record).write_text(json.dumps({"version": 1, "command": "compile", **result}), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
