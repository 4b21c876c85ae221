"""The cluster starts after any earlier failure and stops without leftovers."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from cluster.rig.cgroups import process_of
from cluster.rig.commands import run
from cluster.rig.machine import wait_until
from cluster.rig.rig import WAITING, Rig

pytestmark = [pytest.mark.cluster, pytest.mark.long]

_FOLDERS = (
    "/var/lib/containerd",
    "/var/lib/kubelet",
    "/etc/cni",
    "/etc/cni/net.d",
    "/var/lib/cni",
    "/run/neuron-serving",
)


def _traces() -> dict[str, object]:
    """Everything that a cluster could leave on a machine."""
    return {
        "network namespaces": run("ip", "netns"),
        "links": [line.split(": ")[1] for line in run("ip", "-o", "link").splitlines()],
        # Routes learned from a router have a decreasing lifetime.
        "routes": re.sub(r" expires \S+", "", run("ip", "route", "show", "table", "all")),
        "rules": run("ip", "rule"),
        "packet filter": [line for line in run("iptables-save").splitlines() if line.startswith("-A")],
        "mounts": sorted(line.split()[1] for line in Path("/proc/self/mounts").read_text().splitlines()),
        "control groups": sorted(map(str, Path("/sys/fs/cgroup").glob("*/neuron-serving*"))),
        "folders": [folder for folder in _FOLDERS if Path(folder).exists()],
        "forwarding": Path("/proc/sys/net/ipv4/ip_forward").read_text(),
    }


def _command_line(*arguments: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)}
    command = [sys.executable, "-m", "cluster.rig", *arguments]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)


@dataclass(frozen=True)
class NoCluster:
    """The machine without a cluster: its state, and the images to load again."""

    traces: dict[str, object]
    archives: list[Path]


@pytest.fixture
def no_cluster(rig: Rig) -> Iterator[NoCluster]:
    archives = rig.loaded_archives()
    rig.down()
    try:
        yield NoCluster(_traces(), archives)
    finally:
        rig.up(archives)


def _up_until(line: str, archives: list[Path]) -> None:
    """Runs `up` and kills it when it prints `line`."""
    with _command_line("up", *map(str, archives)) as up:
        assert up.stdout is not None
        assert any(line in printed for printed in up.stdout)
        up.kill()


@pytest.mark.parametrize("line", ["control plane started", "nodes are on", "nodes and devices ready"])
def test_down_cleans_up_after_a_killed_up(rig: Rig, no_cluster: NoCluster, line: str) -> None:
    assert not no_cluster.traces["control groups"]
    _up_until(line, no_cluster.archives)
    assert _traces() != no_cluster.traces
    with _command_line("down", "--force") as down:
        assert down.wait() == 0
    assert _traces() == no_cluster.traces
    assert not rig.folders.state.exists()


def test_up_completes_after_a_killed_up(rig: Rig, no_cluster: NoCluster) -> None:
    _up_until("control plane started", no_cluster.archives)
    rig.up(no_cluster.archives)
    assert rig.is_up


def test_loaded_images_are_present_after_down_and_up(rig: Rig, probe: Path) -> None:
    image = rig.load_image(probe)
    archives = rig.loaded_archives()
    assert probe in archives
    rig.down()
    rig.up(archives)
    rig.create_namespace("loaded-images")
    here = ("--namespace", "loaded-images")
    rig.kubectl(*here, "run", "probe", f"--image={image.name}", "--image-pull-policy=Never", "--", "serve", ":8080")
    rig.kubectl(*here, "wait", "--for=condition=Ready", "pod/probe", WAITING)
    rig.kubectl("delete", "namespace", "loaded-images", "--wait=false")


def test_a_half_made_network_is_rebuilt(rig: Rig, no_cluster: NoCluster) -> None:
    machine = rig.machine("n1")

    def killed() -> None:
        machine.ip("link", "add", machine.link, "type", "veth", "peer", "name", "n1")
        raise RuntimeError

    with pytest.raises(RuntimeError):
        machine.make_network(killed)
    rig.up(no_cluster.archives)
    assert json.loads(machine.ip("-json", "route", "show", "default"))


def test_a_machine_without_power_has_no_link(rig: Rig) -> None:
    rig.machine("n1").power_off()
    assert "n1" not in rig.control_plane.ip("link", "show")
    rig.up()


def test_up_restarts_killed_programs(rig: Rig) -> None:
    rig.machine("n1").power_off()
    rig.machine("n2").stop("kube-proxy")
    rig.control_plane.stop("kube-apiserver")
    rig.control_plane.stop("etcd")
    assert not all(machine.is_running(program.name) for machine, program in rig.everything())
    rig.up()
    assert rig.is_up
    assert len(rig.get("nodes")["items"]) == 3


def test_manual_down_is_refused_while_tests_run(rig: Rig) -> None:
    with _command_line("down") as down:
        assert down.wait() == 1
    assert rig.is_up


def test_status_reports_a_running_cluster(rig: Rig) -> None:
    with _command_line("status") as status:
        output, _ = status.communicate()
    assert status.returncode == 0
    assert "everything that `up` starts is running" in output


def test_kubectl_works_with_the_printed_environment(rig: Rig) -> None:
    with _command_line("env") as env:
        lines, _ = env.communicate()
    assert run("sh", "-c", f"{lines}\nkubectl get nodes -o name").split() == ["node/n1", "node/n2", "node/n3"]


def test_a_process_is_listed_while_one_of_its_threads_lives() -> None:
    program = """if True:
        import ctypes, threading
        threading.Thread(target=input).start()
        ctypes.CDLL(None).pthread_exit(None)
    """
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE) as process:
        status = Path(f"/proc/{process.pid}/status")
        wait_until("its first thread is dead", lambda: "State:\tZ" in status.read_text())
        assert process_of(process.pid) is not None
        process.kill()
        wait_until("it is dead", lambda: process_of(process.pid) is None)


def test_a_process_is_listed_during_exec_and_not_after_it_dies(tmp_path: Path) -> None:
    again = tmp_path / "again.sh"
    again.write_text('[ "$1" -gt 0 ] && exec sh "$0" $(($1 - 1))\nread line\n')
    with subprocess.Popen(["sh", str(again), "300"], stdin=subprocess.PIPE) as changing:
        last: tuple[str, ...] = ()
        while last[2:] != ("0",):
            seen = process_of(changing.pid)
            assert seen is not None
            last = seen.command
        changing.kill()
        wait_until("it is dead", lambda: process_of(changing.pid) is None)
        assert Path(f"/proc/{changing.pid}").exists()  # a zombie that has not been reaped
