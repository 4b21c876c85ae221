"""A machine of the cluster: one process tree in network, mount, pid, ipc and uts namespaces of its own, under one
control group. Its first process holds it: killing that is pulling the plug. What runs in it is found by control group,
never by name or by files that remember pids. `Rig` says which machines there are and what runs in them."""

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
"""How long anything is waited for: what works takes a hundredth of it, and several times as long on a busy machine."""
_INIT = "init"
_WHOLE = "whole"


class StartFailed(Exception):
    """Something did not come up; the message names its log."""


def wait_until(
    what: str, condition: Callable[[], bool], *, seconds: float = WAIT_SECONDS, pause_seconds: float = 0.05
) -> None:
    """Raises:
    StartFailed: `condition` was not true in time.
    """
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            raise StartFailed(f"not so after {seconds:g} s: {what}")
        time.sleep(pause_seconds)


@dataclass(frozen=True)
class Machine:
    """Attributes:
    name: unique in the cluster; also the name of its link on the bridge.
    state: the folder of its files and logs.
    init: the program that holds it, in a path that ends with its name.
    link: its link to the others, as it is called in the machine.
    mounts: folders of the machine (absolute) -> folders of the host that take their place.
    setup: shell lines run in it once, before anything else, with its mounts in place.
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
        """Its first process as the host numbers it; None when the machine is off."""
        for process in self.program_group(_INIT).processes():
            if process.inner_pid == 1:
                return process.pid
        return None

    @property
    def is_on(self) -> bool:
        return self.init_pid is not None

    def make_network(self, fill: Callable[[], None]) -> None:
        """Gives it a network namespace and has `fill` put links and routes into it; nothing is done when it has one.

        One that a killed run left half-made is made anew: the last step names the loopback link.
        """
        if (NETNS_FOLDER / self.netns).exists() and self._links().get("lo") == _WHOLE:
            return
        self.remove_network()
        run("ip", "netns", "add", self.netns)
        self.ip("link", "set", "lo", "up")
        fill()
        self.ip("link", "set", "lo", "alias", _WHOLE)

    def remove_network(self) -> None:
        """The link first: when the kernel removes those of a deleted namespace, and their other ends, is its choice."""
        if not (NETNS_FOLDER / self.netns).exists():
            return
        if self.link in self._links():
            self.ip("link", "del", self.link)
        run("ip", "netns", "del", self.netns)

    def ip(self, *arguments: str) -> str:
        return run("ip", "-n", self.netns, *arguments)

    def _links(self) -> dict[str, str]:
        """Its links with their further names."""
        return {link["ifname"]: link.get("ifalias", "") for link in json.loads(self.ip("-json", "link", "show"))}

    def power_on(self) -> None:
        """Starts its first process. It must have its network; when it is on, nothing is done.

        Raises:
            StartFailed: the namespaces could not be made; the log says why.
        """
        if self.is_on:
            return
        # As a boot would: the groups that dead containers leave behind make the next kubelet stall for seconds each.
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
                "mount --make-rshared /",  # the kubelet and containerd pass mounts on to each other
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
        """As if the plug were pulled: every process dies at once, the network goes, files stay."""
        pid = self.init_pid
        if pid is not None:
            self.program_group(_INIT).kill()
        self.group.kill()
        self.remove_network()
        self.group.remove()

    def is_running(self, program: str) -> bool:
        return bool(self.program_group(program).processes())

    def start(self, program: str, command: Sequence[str], environment: Mapping[str, str] | None = None) -> None:
        """Starts `command` in the machine, its output in `log(program)`; when it runs already, nothing is done.

        Raises:
            StartFailed: the machine is off.
        """
        if self.is_running(program):
            return
        self._launch(program, list(command), outside=self._enter(), environment=environment)

    def stop(self, program: str) -> None:
        """Kills it, as `kill -9` would."""
        self.program_group(program).kill()

    def run(self, *command: str, stdin: str | None = None, timeout_seconds: float = COMMAND_SECONDS) -> str:
        """Runs `command` in the machine to its end and returns its stdout.

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
        """Starts a process that outlives this one, in its control group from its first instruction on."""
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
                env={"PATH": search_path(), "HOME": "/root", **(environment or {})},
                check=False,
            )
        if done.returncode:
            raise StartFailed(f"{program} of machine {self.name} was not started, see {log}")
