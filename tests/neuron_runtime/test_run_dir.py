"""The run directory is removed with its command, or by the next one after a kill."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from neuron_runtime.engine import messages
from neuron_runtime.errors import ExitCode, FatalError, InvalidConfig
from neuron_runtime.processes.lifeline import Deadline
from neuron_runtime.processes.run_dir import MAX_PATH_BYTES, PREFIX, made_run_dir

HOLD = """
from neuron_runtime.processes.run_dir import made_run_dir
with made_run_dir() as folder:
    (folder / "socket").touch()
    print(folder, flush=True)
    input()
"""


@pytest.fixture(autouse=True)
def tmpdir(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="nr-") as folder:
        monkeypatch.setenv("TMPDIR", folder)
        monkeypatch.setattr(tempfile, "tempdir", None)
        yield Path(folder)


def holder() -> tuple[subprocess.Popen[str], Path]:
    """A process with a run directory."""
    process = subprocess.Popen([sys.executable, "-c", HOLD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


def test_a_full_disk_is_an_error_that_names_the_folder(tmpdir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int, offset: int, size: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    message = rf"^{tmpdir} is full: free some space, or set TMPDIR"
    with pytest.raises(FatalError, match=message) as caught, made_run_dir() as folder:
        Deadline(folder / "deadline")
    assert caught.value.exit_code is ExitCode.STORAGE_FULL
    assert list(tmpdir.iterdir()) == []


def test_the_space_of_a_deadline_is_reserved(tmpdir: Path) -> None:
    with Deadline(tmpdir / "deadline"):
        assert (tmpdir / "deadline").stat().st_blocks > 0


def test_a_temporary_folder_that_does_not_exist_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/nowhere")
    with pytest.raises(InvalidConfig, match="TMPDIR: no temporary folder can be written"), made_run_dir():
        raise AssertionError


def test_the_run_directory_is_removed_after_success_and_failure(tmpdir: Path) -> None:
    def fail() -> None:
        with made_run_dir() as folder:
            assert folder.parent == tmpdir
            (folder / "deadline-1").touch()
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert list(tmpdir.iterdir()) == []


def test_only_the_leftovers_of_killed_commands_are_removed(tmpdir: Path) -> None:
    killed, abandoned = holder()
    living, used = holder()
    (tmpdir / f"{PREFIX}being-made").mkdir()
    (tmpdir / f"{PREFIX}file").touch()
    (tmpdir / f"{PREFIX}link").symlink_to(used)
    with killed, living:
        killed.kill()
        killed.wait()
        assert abandoned.exists()
        before = set(tmpdir.iterdir())
        with made_run_dir() as ours:
            assert set(tmpdir.iterdir()) == (before - {abandoned}) | {ours}
            assert (used / "socket").exists()
            # Another start while ours runs.
            with made_run_dir():
                assert ours.exists()
        living.communicate("\n")
    assert not used.exists()


def test_a_run_directory_too_long_for_socket_addresses_is_refused(
    tmpdir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    longest = MAX_PATH_BYTES - len(f"/{PREFIX}12345678")
    for length in (longest, longest + 1):
        folder = tmpdir / ("x" * (length - len(str(tmpdir)) - 1))
        folder.mkdir()
        monkeypatch.setattr(tempfile, "tempdir", str(folder))
        if length > longest:
            with pytest.raises(InvalidConfig, match=rf"TMPDIR.*max {longest} bytes"), made_run_dir():
                pass
        else:
            with made_run_dir() as made, zmq.Context() as context:
                messages.socket(context, zmq.PULL, made, messages.ENGINE_OUTBOX, 10_000).close()
        assert list(folder.iterdir()) == []
