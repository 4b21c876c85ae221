"""Fetches into a store in S3 that are interrupted, and go on elsewhere with what the store has."""

from __future__ import annotations

import os
import random
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import cast

import pytest

from helpers.file_faults import FileFaults
from helpers.hub import Shelf
from helpers.hub import serving as serving_hub
from helpers.s3_server import BUCKET, S3Server
from helpers.tiny_model import write_tiny_model
from helpers.weights import CHUNK_BYTES, NUM_READERS, contents, shelf_with_model, size
from neuron_runtime.errors import ExitCode, FatalError
from neuron_runtime.weights.fetching import Supplied, Tools, fetch, supply
from neuron_runtime.weights.journal import Claim
from neuron_runtime.weights.remote import RemoteStore
from neuron_runtime.weights.staging import FOLDER, NUM_SENDERS, Staging
from neuron_runtime.weights.store import ABANDONED_SECONDS, Store
from neuron_runtime.weights.transfer import Amount, TransferLimits

MODEL = "hf://acme/model"
LIMITS = TransferLimits(NUM_READERS, CHUNK_BYTES)
SHARD = "model-00001-of-00004.safetensors"

pytestmark = pytest.mark.slow


@pytest.fixture
def shelf(tmp_path: Path) -> Shelf:
    return shelf_with_model(tmp_path / "hub")


@pytest.fixture
def model(shelf: Shelf) -> Path:
    return shelf.root / "acme/model/main"


@pytest.fixture
def faults(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> Iterator[FileFaults]:
    """Of the hub that the model comes from."""
    faults = FileFaults()
    shelf.body = faults.body
    with serving_hub(shelf) as address:
        monkeypatch.setenv("HF_ENDPOINT", address)
        yield faults


@pytest.fixture
def remote(server: S3Server, request: pytest.FixtureRequest) -> RemoteStore:
    """An empty store."""
    prefix = re.sub(r"\W+", "-", request.node.name)
    return RemoteStore(f"s3://{BUCKET}/stores/{prefix}", limits=LIMITS, sleep=lambda seconds: None)


def quiet(amount: Amount) -> None:
    """A report that nobody reads."""


def supplied(remote: RemoteStore, scratch: Path, limits: TransferLimits = LIMITS) -> Supplied:
    tools = Tools(sleep=lambda seconds: None, limits=limits)
    return supply(MODEL, remote, Store(scratch), quiet, quiet, tools=tools)


def staged(remote: RemoteStore) -> list[str]:
    return [item.name for key in keys(remote) for item in remote.objects(f"{key}/{FOLDER}/")]


def keys(remote: RemoteStore) -> set[str]:
    return {row.name for row in remote.rows()}


def check_stored(remote: RemoteStore, found: Supplied, folder: Path, model: Path) -> None:
    """The store has the model, and nothing else."""
    copy = fetch(MODEL, Store(folder), quiet, found.digest, remote=remote, on_miss="fail")
    assert contents(copy.folder) == contents(model)
    assert list(remote.verify(lambda key, num_bytes: lambda num_read: None)) == [(found.digest, [])]
    assert staged(remote) == []


SUPPLY = """
import sys
from pathlib import Path
from neuron_runtime.weights.fetching import Tools, supply
from neuron_runtime.weights.remote import RemoteStore
from neuron_runtime.weights.store import Store
from neuron_runtime.weights.transfer import TransferLimits
uri, store, folder, chunk_bytes, num_readers = sys.argv[1:]
limits = TransferLimits(int(num_readers), int(chunk_bytes))
report = lambda amount: None
supply(uri, RemoteStore(store), Store(Path(folder)), report, report, tools=Tools(limits=limits))
"""


def start_supply(remote: RemoteStore, scratch: Path) -> subprocess.Popen[bytes]:
    arguments = [MODEL, remote.uri, str(scratch), str(CHUNK_BYTES), str(NUM_READERS)]
    return subprocess.Popen([sys.executable, "-c", SUPPLY, *arguments], env=dict(os.environ))


def kill_in_the_middle(remote: RemoteStore, faults: FileFaults, scratch: Path, wait_seconds: float = 0.0) -> None:
    """Fetches until the hub has sent some chunks and the store has one."""
    sent = faults.num_sent_bytes
    with start_supply(remote, scratch) as process:
        while faults.num_sent_bytes < sent + 8 * CHUNK_BYTES or not staged(remote):
            assert process.poll() is None
            time.sleep(0.01)
        time.sleep(wait_seconds)
        process.kill()
    assert process.returncode != 0


def test_a_killed_fetch_goes_on_on_another_machine(
    remote: RemoteStore, faults: FileFaults, model: Path, tmp_path: Path
) -> None:
    chance, num_kills = random.Random(3), 3
    faults.bytes_per_second = 1.5e6
    for number in range(num_kills):
        kill_in_the_middle(remote, faults, tmp_path / f"machine-{number}", chance.random() * 0.2)
        assert [row.state for row in remote.rows()] == ["partial"]
    faults.bytes_per_second = 0
    found = supplied(remote, tmp_path / "last")
    small = sum(path.stat().st_size for path in model.iterdir() if path.stat().st_size <= CHUNK_BYTES)
    in_flight = (NUM_READERS + NUM_SENDERS + 1) * CHUNK_BYTES
    assert faults.num_sent_bytes <= size(model) + num_kills * (in_flight + small)
    assert found.read_bytes < size(model) - num_kills * CHUNK_BYTES
    check_stored(remote, found, tmp_path / "copy", model)


def test_chunks_with_other_bytes_than_their_name_says_are_read_again(
    server: S3Server, remote: RemoteStore, faults: FileFaults, model: Path, tmp_path: Path
) -> None:
    faults.bytes_per_second = 1.5e6
    kill_in_the_middle(remote, faults, tmp_path / "killed", 0.3)
    faults.bytes_per_second = 0
    (key,) = keys(remote)
    prefix = f"{remote.uri.removeprefix(f's3://{BUCKET}/')}/{key}"
    for item in list(remote.objects(f"{key}/{FOLDER}/"))[::2]:
        server.client().put_object(Bucket=BUCKET, Key=f"{prefix}/{item.name}", Body=bytes(item.num_bytes))
    for name in (f"0-4-00000000/{SHARD}", "0-9-00000000/../../config.json", f"9-4-0/{SHARD}", "0-7-00000000/other"):
        server.client().put_object(Bucket=BUCKET, Key=f"{prefix}/{FOLDER}/{name}", Body=b"evil")
    check_stored(remote, supplied(remote, tmp_path / "last"), tmp_path / "copy", model)


def test_a_file_that_its_source_sent_wrong_is_not_resumed(
    remote: RemoteStore, faults: FileFaults, model: Path, tmp_path: Path
) -> None:
    faults.flipped[SHARD] = 100_000
    with pytest.raises(FatalError) as caught:
        supplied(remote, tmp_path / "first")
    assert caught.value.exit_code == ExitCode.CHECKSUM_MISMATCH
    assert not [name for name in staged(remote) if name.endswith(SHARD)]
    faults.flipped.clear()
    check_stored(remote, supplied(remote, tmp_path / "last"), tmp_path / "copy", model)


def test_the_store_puts_files_together_from_their_chunks(
    server: S3Server, remote: RemoteStore, faults: FileFaults, model: Path, tmp_path: Path
) -> None:
    shutil.rmtree(model)
    write_tiny_model(model, vocab_size=140_000, hidden_size=32)
    weights = model / "model.safetensors"
    limits = TransferLimits(NUM_READERS, 5 * 2**20)
    assert weights.stat().st_size > 2 * limits.chunk_bytes
    found = supplied(remote, tmp_path / "scratch", limits)
    assert 0 <= server.received[weights.name] - weights.stat().st_size < 2000, "once, and what asks for it"
    (file,) = (item for item in remote.objects(f"{found.digest}/") if item.name.endswith(weights.name))
    assert file.num_bytes == weights.stat().st_size
    check_stored(remote, found, tmp_path / "copy", model)


def test_files_are_sent_again_if_the_store_cannot_put_them_together(
    remote: RemoteStore, faults: FileFaults, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    faults.bytes_per_second = 3e6
    both = [start_supply(remote, tmp_path / f"machine-{number}") for number in range(2)]
    assert [process.wait(timeout=60) for process in both] == [0, 0]
    check_stored(remote, supplied(remote, tmp_path / "last"), tmp_path / "copy", model)


def test_two_fetches_at_the_same_time_end_with_one_whole_model(
    remote: RemoteStore, faults: FileFaults, model: Path, tmp_path: Path
) -> None:
    faults.bytes_per_second = 3e6
    both = [start_supply(remote, tmp_path / f"machine-{number}") for number in range(2)]
    assert [process.wait(timeout=60) for process in both] == [0, 0]
    check_stored(remote, supplied(remote, tmp_path / "last"), tmp_path / "copy", model)


def test_a_source_that_changed_has_chunks_of_its_own(
    remote: RemoteStore, faults: FileFaults, model: Path, tmp_path: Path
) -> None:
    faults.bytes_per_second = 1.5e6
    kill_in_the_middle(remote, faults, tmp_path / "killed")
    faults.bytes_per_second = 0
    (before,) = keys(remote)
    with (model / SHARD).open("r+b") as file:
        file.seek(-4, os.SEEK_END)
        file.write(b"\1\2\3\4")
    found = supplied(remote, tmp_path / "last")
    assert found.digest != before
    copy = fetch(MODEL, Store(tmp_path / "copy"), quiet, found.digest, remote=remote, on_miss="fail")
    assert contents(copy.folder) == contents(model)
    states = {row.name: row.state for row in remote.rows()}
    assert states == {before: "partial", found.digest: "complete"}

    late = time.time() + 1.1 * ABANDONED_SECONDS
    pruned = list(remote.prune([], 10 * ABANDONED_SECONDS, dry_run=False, now=lambda: late))
    assert [(one.name, one.why) for one in pruned] == [(before, "abandoned upload")]
    assert keys(remote) == {found.digest}


def test_chunks_that_a_finished_fetch_left_are_deleted(
    server: S3Server, remote: RemoteStore, faults: FileFaults, model: Path, tmp_path: Path
) -> None:
    found = supplied(remote, tmp_path / "scratch")
    left = f"{remote.uri.removeprefix(f's3://{BUCKET}/')}/{found.digest}/{FOLDER}/0-4-00000000/{SHARD}"
    server.client().put_object(Bucket=BUCKET, Key=left, Body=b"left")
    late = time.time() + 1.1 * ABANDONED_SECONDS
    (pruned,) = remote.prune([], 10 * ABANDONED_SECONDS, dry_run=False, now=lambda: late)
    assert (pruned.name, pruned.num_bytes, pruned.why) == (found.digest, 4, "abandoned upload")
    check_stored(remote, found, tmp_path / "copy", model)


def test_a_fetch_that_broke_off_ends_while_readers_hand_in_chunks_that_nobody_takes() -> None:
    answers, num_sent = threading.Event(), threading.Semaphore(0)

    class Silent:
        def send_range(self, *chunk: object) -> None:
            num_sent.release()
            answers.wait()

    def threads(name: str) -> list[threading.Thread]:
        return [thread for thread in threading.enumerate() if thread.name.startswith(name)]

    def break_off(staging: Staging) -> None:
        for number in range(4 * NUM_SENDERS):
            chunk = Claim(SHARD, number, number + 1, 0)
            hand_in = partial(staging.send, chunk, Path(SHARD))
            threading.Thread(target=hand_in, name=f"reader-{number}", daemon=True).start()
        for _ in range(NUM_SENDERS):
            assert num_sent.acquire(timeout=60)
        raise InterruptedError

    with pytest.raises(InterruptedError), Staging(cast(RemoteStore, Silent()), "key") as staging:
        break_off(staging)
    answers.set()
    for thread in threads("stage-"):
        thread.join(timeout=60)
    assert threads("stage-") == []
    assert not num_sent.acquire(blocking=False), "a chunk was sent after the end"
