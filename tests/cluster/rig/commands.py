"""Runs programs and turns a failure or a timeout into one error with the command and its output."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence

from cluster.rig.needs import search_path

COMMAND_SECONDS = 300.0
"""Default time limit of a program; even on a busy machine only a hung one takes this long."""


class CommandFailed(Exception):
    """A program ended with a status other than 0, or did not end in time.

    Attributes:
        status: the exit status; None after a timeout.
        output: its stderr, or its stdout if stderr is empty.
    """

    def __init__(self, command: Sequence[str], status: int | None, output: str) -> None:
        self.status = status
        self.output = output.strip()
        how = "did not end in time" if status is None else f"exit status {status}"
        super().__init__(f"{' '.join(command)}: {how}: {self.output}")


def run(
    *command: str,
    stdin: str | None = None,
    environment: Mapping[str, str] | None = None,
    timeout_seconds: float = COMMAND_SECONDS,
) -> str:
    """Runs `command` and returns its stdout.

    Raises:
        CommandFailed: the status was not 0, or the command was killed after `timeout_seconds`.
    """
    try:
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
    except subprocess.TimeoutExpired as late:
        raise CommandFailed(command, None, f"killed after {timeout_seconds:g} s") from late
    if done.returncode:
        raise CommandFailed(command, done.returncode, done.stderr or done.stdout)
    return done.stdout
