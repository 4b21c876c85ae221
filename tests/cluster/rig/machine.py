"""A machine of the cluster: one process tree with its own network, mount, pid, ipc and uts namespaces in one control
group. Killing its first process turns it off. Its processes are found by control group, never by name or pid files.
`Rig` decides which machines exist and what runs in them."""

from __future__ import annotations

import json
import shlex
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from cluster.rig.cgroups import ROOT_GROUP, Group
from cluster.rig.commands import COMMAND_SECONDS, CommandFailed, run
from cluster.rig.needs import search_path

NETNS_FOLDER = Path("/run/netns")
WAIT_SECONDS = 300.0
"""Limit of every wait; normal operation takes a hundredth of it, several times as long on a busy machine."""
GO_SETTINGS = {"GOGC": "400"}
"""Go programs collect garbage a quarter as often: tests have memory to spare, but no processor time."""
_INIT = "init"
_WHOLE = "whole"


class StartFailed(Exception):
    """A program did not start; the message names its log."""


def wait_until(
    what: str, condition: Callable[[], bool], *, seconds: float = WAIT_SECONDS, pause_seconds: float = 0.05
) -> None:
    """Raises:
    StartFailed: `condition` did not become true in time.
    """
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            raise StartFailed(f"timed out after {seconds:g} s: {what}")
        time.sleep(pause_seconds)


@dataclass(frozen=True)
class Machine:
    """Attributes:
    name: unique in the cluster; also the name of its link on the bridge.
    state: the folder of its files and logs.
    init: its first program, in a path that ends with its name.
    link: the name of its network link inside the machine.
    mounts: folders of the machine (absolute) -> folders of the host mounted over them.
    setup: shell lines run once at its start, after mounting.
    """

    name: str
    state: Path
    init: Path
    link: str
    mounts: Mapping[str, Path]
    setup: str = ""

    @property
    def netns(self) -> str:
        return f"{ROOT_GROUP}-{self.name}"

    @property
    def group(self) -> Group:
        return Group(f"{ROOT_GROUP}/{self.name}")

    def program_group(self, program: str) -> Group:
        return self.group / "system" / program

    def log(self, program: str) -> Path:
        return self.state / "log" / f"{program}.log"

    @property
    def init_pid(self) -> int | None:
        """Host pid of its first process; None if the machine is off."""
        for process in self.program_group(_INIT).processes():
            if process.inner_pid == 1:
                return process.pid
        return None

    @property
    def is_on(self) -> bool:
        return self.init_pid is not None

    def make_network(self, fill: Callable[[], None]) -> None:
        """Creates its network namespace, unless it exists, and lets `fill` add links and routes.

        A namespace that a killed run left half-made is rebuilt: the last step names the loopback link.
        """
        if (NETNS_FOLDER / self.netns).exists() and self._links().get("lo") == _WHOLE:
            return
        self.remove_network()
        run("ip", "netns", "add", self.netns)
        self.ip("link", "set", "lo", "up")
        fill()
        self.ip("link", "set", "lo", "alias", _WHOLE)

    def remove_network(self) -> None:
        """Removes the link first: the kernel removes links of a deleted namespace at an arbitrary later time."""
        if not (NETNS_FOLDER / self.netns).exists():
            return
        if self.link in self._links():
            self.ip("link", "del", self.link)
        run("ip", "netns", "del", self.netns)

    def ip(self, *arguments: str) -> str:
        return run("ip", "-n", self.netns, *arguments)

    def _links(self) -> dict[str, str]:
        """Its links with their alternative names."""
        return {link["ifname"]: link.get("ifalias", "") for link in json.loads(self.ip("-json", "link", "show"))}

    def power_on(self) -> None:
        """Starts its first process, unless it is on. Its network must exist.

        Raises:
            StartFailed: the namespaces could not be created; the log has the cause.
        """
        if self.is_on:
            return
        # As a boot would: each group left by a dead container stalls the next kubelet for seconds.
        self.group.kill()
        self.group.remove()
        ready = self.state / "ready"
        ready.unlink(missing_ok=True)
        for folder in self.mounts.values():
            folder.mkdir(parents=True, exist_ok=True)
        mounts = [f"mount --bind {shlex.quote(str(f))} {shlex.quote(d)}" for d, f in self.mounts.items()]
        script = "\n".join(
            [
                "set -e",
                "mount --make-rshared /",  # the kubelet and containerd propagate mounts to each other
                *mounts,
                "mount -t tmpfs -o mode=755 run /run",
                "mkdir -p /run/netns /run/lock",
                f"hostname {self.name}",
                "ip link set lo up",
                self.setup,
                f"touch {shlex.quote(str(ready))}",
                f"exec {shlex.quote(str(self.init))}",
            ]
        )
        flags = ("--mount", "--pid", "--uts", "--ipc", "--fork", "--kill-child", "--mount-proc")
        unshare = ("unshare", *flags, "--propagation", "private")
        self._launch(_INIT, [*unshare, "sh", "-c", script], outside=("nsenter", f"--net={NETNS_FOLDER / self.netns}"))
        wait_until(f"machine {self.name} is on, see {self.log(_INIT)}", ready.exists, pause_seconds=0.01)

    def power_off(self) -> None:
        """A power cut: every process dies at once, the network is removed, files stay."""
        pid = self.init_pid
        if pid is not None:
            self.program_group(_INIT).kill()
        self.group.kill()
        self.remove_network()
        self.group.remove()

    def is_running(self, program: str) -> bool:
        return bool(self.program_group(program).processes())

    def start(self, program: str, command: Sequence[str], environment: Mapping[str, str] | None = None) -> None:
        """Starts `command` in the machine, unless it runs, with its output in `log(program)`.

        Raises:
            StartFailed: the machine is off.
        """
        if self.is_running(program):
            return
        self._launch(program, list(command), outside=self._enter(), environment=environment)

    def stop(self, program: str) -> None:
        """Kills the program with SIGKILL."""
        self.program_group(program).kill()

    def run(self, *command: str, stdin: str | None = None, timeout_seconds: float = COMMAND_SECONDS) -> str:
        """Runs `command` in the machine and returns its stdout.

        Raises:
            CommandFailed: its status was not 0, or it did not end in time.
            StartFailed: the machine is off.
        """
        return run(*self._enter(), *command, stdin=stdin, timeout_seconds=timeout_seconds)

    def answers(self, *command: str) -> bool:
        try:
            self.run(*command, timeout_seconds=5)
        except CommandFailed:
            return False
        return True

    def _enter(self) -> tuple[str, ...]:
        pid = self.init_pid
        if pid is None:
            raise StartFailed(f"machine {self.name} is off")
        return ("nsenter", "--target", str(pid), *["--mount", "--net", "--pid", "--uts", "--ipc", "--"])

    def _launch(
        self,
        program: str,
        command: list[str],
        *,
        outside: Sequence[str],
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Starts a process that outlives this one, in its control group from the start."""
        group = self.program_group(program)
        group.make()
        joins = [f"echo $$ > {shlex.quote(str(folder / 'cgroup.procs'))}" for folder in group.folders()]
        script = "\n".join(["set -e", *joins, 'setsid "$@" &'])
        log = self.log(program)
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as output:
            done = subprocess.run(
                ["sh", "-c", script, "sh", *outside, *command],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd="/",
                env={"PATH": search_path(), "HOME": "/root", **GO_SETTINGS, **(environment or {})},
                check=False,
            )
        if done.returncode:
            raise StartFailed(f"{program} of machine {self.name} was not started, see {log}")
