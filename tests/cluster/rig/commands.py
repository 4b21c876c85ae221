"""Runs other programs and turns their failure, or that they do not end, into one error that says what failed and what
was printed."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence

from cluster.rig.needs import search_path

COMMAND_SECONDS = 300.0
"""How long a program may take unless its caller knows better: only what hangs takes that long on a busy machine."""


class CommandFailed(Exception):
    """A program ended with a status other than 0, or did not end in time.

    Attributes:
        status: the exit status; None when it was killed because its time was over.
        output: what it wrote to stderr, or to stdout when stderr is empty.
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
    """Runs `command` to its end and returns what it wrote to stdout.

    Raises:
        CommandFailed: the status was not 0, or it did not end in time and was killed.
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
