"""Speed of `neuron-runtime fetch` from a real S3 server on this machine, compared with one curl stream and the disk.

Used by the suite. All three end with synced files, and read or write the same bytes. Server, client and hashes share
the machine: on few cores they compete, which a network's other end does not.
"""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.report import Load, Meter
from helpers.grown import grow
from helpers.s3_server import ACCESS_KEY, BUCKET, SECRET_KEY, serving
from helpers.weights import size, write_model

PREFIX = "model"
PART_BYTES = 64 * 2**20
NUM_FILES = 4
WRITE_BYTES = 2**20


@dataclass(frozen=True, slots=True)
class Fetching:
    """Median bytes per second, and CPU seconds per GB of the client."""

    num_bytes: int
    fetch: float
    curl: float
    write: float
    fetch_cpu: float
    curl_cpu: float
    load: Load


def measure(num_bytes: int, num_iters: int = 3) -> Fetching:
    """Fetch, copy with curl and write about `num_bytes`, in turns.

    Raises:
        NotPossibleHere: the server cannot be built.
        FileNotFoundError: there is no curl.
    """
    with tempfile.TemporaryDirectory(prefix="bench-fetching-") as name, serving(Path(name, "s3")) as server:
        folder = Path(name)
        model = write_model(folder / "model")
        for path in sorted(model.glob("*.safetensors"))[:NUM_FILES]:
            grow(path, num_bytes // NUM_FILES, os.urandom(2**24))
        num_bytes = size(model)
        server.upload(model, PREFIX, PART_BYTES)
        environment = os.environ | server.environment | {"AWS_ENDPOINT_URL": server.direct}
        addresses = list(_addresses(server.direct, [path.name for path in model.iterdir()]))
        store, copies, written = folder / "store", folder / "copies", folder / "written"

        def fetch() -> None:
            command = [sys.executable, "-m", "neuron_runtime", "fetch", f"s3://{BUCKET}/{PREFIX}", str(store)]
            subprocess.run(command, env=environment, check=True, capture_output=True)

        def curl() -> None:
            copies.mkdir()
            for number, address in enumerate(addresses):
                subprocess.run(["curl", "-sSf", "-o", copies / str(number), address], check=True)
            for path in copies.iterdir():
                _sync(path)

        def write() -> None:
            with written.open("wb", buffering=0) as file:
                for path in model.iterdir():
                    with path.open("rb") as source:
                        shutil.copyfileobj(source, file, WRITE_BYTES)
            _sync(written)

        meter = Meter()
        seconds: dict[Callable[[], None], list[float]] = {fetch: [], curl: [], write: []}
        cpu: dict[Callable[[], None], list[float]] = {fetch: [], curl: [], write: []}
        for _ in range(num_iters):
            for work, found in seconds.items():
                began, before = time.perf_counter(), _children_cpu()
                work()
                found.append(time.perf_counter() - began)
                cpu[work].append(_children_cpu() - before)
                for path in (store, copies):
                    shutil.rmtree(path, ignore_errors=True)
                with contextlib.suppress(FileNotFoundError):
                    written.unlink()
        rate = {work: num_bytes / statistics.median(found) for work, found in seconds.items()}
        per_gb = {work: statistics.median(found) / num_bytes * 1e9 for work, found in cpu.items()}
        return Fetching(num_bytes, rate[fetch], rate[curl], rate[write], per_gb[fetch], per_gb[curl], meter.read())


def _addresses(endpoint: str, names: list[str]) -> Iterator[str]:
    """Signed addresses of the objects."""
    import boto3
    from botocore.config import Config

    client: Any = boto3.client(
        "s3",
        endpoint_url=endpoint,
        aws_access_key_id=ACCESS_KEY,
        aws_secret_access_key=SECRET_KEY,
        region_name="us-east-1",
        config=Config(signature_version="s3v4"),
    )
    for name in names:
        yield client.generate_presigned_url("get_object", Params={"Bucket": BUCKET, "Key": f"{PREFIX}/{name}"})


def _children_cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
