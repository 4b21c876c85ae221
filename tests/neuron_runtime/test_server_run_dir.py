"""The run folder: gone with its command, and with the next one where a command was killed."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from neuron_runtime.server.run_dir import PREFIX, made_run_dir

HOLD = """
from neuron_runtime.server.run_dir import made_run_dir
with made_run_dir() as folder:
    (folder / "socket").touch()
    print(folder, flush=True)
    input()
"""


@pytest.fixture(autouse=True)
def tmpdir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return tmp_path


def holder() -> tuple[subprocess.Popen[str], Path]:
    """A process in its run folder."""
    process = subprocess.Popen([sys.executable, "-c", HOLD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


def test_a_folder_is_gone_afterwards_whatever_happened(tmpdir: Path) -> None:
    def fail() -> None:
        with made_run_dir() as folder:
            assert folder.parent == tmpdir
            (folder / "deadline-1").touch()
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert list(tmpdir.iterdir()) == []


def test_what_a_killed_command_left_is_removed_by_the_next_and_nothing_else(tmpdir: Path) -> None:
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
            # Another start, while ours runs.
            with made_run_dir():
                assert ours.exists()
        living.communicate("\n")
    assert not used.exists()
