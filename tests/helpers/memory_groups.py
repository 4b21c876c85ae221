"""A real control group with a memory limit, for commands that shall run out of memory. Needs root and writable groups;
a test without them skips."""

from __future__ import annotations

import contextlib
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from neuron_runtime import host

LIMIT = {"cgroup": "memory.limit_in_bytes", "cgroup2": "memory.max"}


@dataclass(frozen=True)
class MemoryGroup:
    folder: Path
    """The group of the processes; the limit is on the one above."""

    @property
    def within(self) -> tuple[str, ...]:
        """A command that runs the one in its arguments in the group."""
        return ("sh", "-c", 'echo $$ > "$0" && exec "$@"', str(self.folder / "cgroup.procs"))

    def output(self, *command: str, code: int = 0) -> str:
        """Run a command in the group to its end."""
        done = subprocess.run([*self.within, *command], capture_output=True, text=True, check=False)
        assert done.returncode == code, done.stderr
        return done.stdout.strip()


@contextlib.contextmanager
def memory_group(limit_bytes: int) -> Iterator[MemoryGroup]:
    """A group below the root of the memory hierarchy, in another one that has the limit."""
    tops = dict(host._groups(Path("/"), "memory"))
    with contextlib.ExitStack() as undo:
        problem = "no hierarchy of control groups is mounted"
        for kind, top in tops.items():
            try:
                outer = Path(tempfile.mkdtemp(prefix="neuron-serving-test-", dir=top))
                undo.callback(remove, outer)
                inner = outer / "inner"
                inner.mkdir()
                undo.callback(remove, inner)
                (outer / LIMIT[kind]).write_text(str(limit_bytes))
            except OSError as error:
                problem = f"cannot set a memory limit below {top}: {error.strerror}"
                continue
            yield MemoryGroup(inner)
            return
        pytest.skip(problem)


def remove(group: Path) -> None:
    """The kernel keeps a group for a moment after its last process has ended."""
    end = time.monotonic() + 10
    while True:
        try:
            return group.rmdir()
        except OSError:
            if time.monotonic() > end:
                raise
            time.sleep(0.02)
