"""Runs other programs and turns their failure into one error that says what failed and what it printed."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence

from cluster.rig.needs import search_path


class CommandFailed(Exception):
    """A program ended with a status other than 0.

    Attributes:
        status: the exit status.
        output: what it wrote to stderr, or to stdout when stderr is empty.
    """

    def __init__(self, command: Sequence[str], status: int, output: str) -> None:
        self.status = status
        self.output = output.strip()
        super().__init__(f"{' '.join(command)}: exit status {status}: {self.output}")


def run(
    *command: str,
    stdin: str | None = None,
    environment: Mapping[str, str] | None = None,
    timeout_seconds: float = 120,
) -> str:
    """Runs `command` to its end and returns what it wrote to stdout.

    Raises:
        CommandFailed: the status was not 0.
        subprocess.TimeoutExpired: it did not end in time, and was killed.
    """
    done = subprocess.run(
        command,
        input=stdin,
        stdin=subprocess.DEVNULL if stdin is None else None,
        env={**(os.environ if environment is None else environment), "PATH": search_path(environment)},
        capture_output=True,
        text=True,
        timeout=timeout_seconds,
        check=False,
    )
    if done.returncode:
        raise CommandFailed(command, done.returncode, done.stderr or done.stdout)
    return done.stdout
