"""What a cluster changes on this machine outside its own folders: settings of the kernel, which every kubelet sets, and
the mount point that `ip netns` makes. Recorded before the first start, put back once the cluster is down."""

from __future__ import annotations

import json
from pathlib import Path

from cluster.rig.commands import run

OF_KUBELETS = {"vm/overcommit_memory": "1", "kernel/panic": "10", "kernel/panic_on_oops": "1"}
"""As `setupKernelTunables` of Kubernetes 1.35 does, pkg/kubelet/cm/container_manager_linux.go."""
SYSCTLS = Path("/proc/sys")


def record(file: Path, netns: Path, sysctls: Path = SYSCTLS) -> None:
    """Write down how the machine is, unless that was done before."""
    if not file.exists():
        values = {name: (sysctls / name).read_text().strip() for name in OF_KUBELETS}
        file.write_text(json.dumps({"sysctls": values, "netns": _is_mounted(netns)}))


def put_back(file: Path, netns: Path, sysctls: Path = SYSCTLS) -> None:
    """Leave alone what somebody else has changed or uses since."""
    if not file.exists():
        return
    before = json.loads(file.read_text())
    for name, value in before["sysctls"].items():
        path = sysctls / name
        if value != OF_KUBELETS[name] and path.read_text().strip() == OF_KUBELETS[name]:
            path.write_text(value)
    if not before["netns"] and _is_mounted(netns) and not any(netns.iterdir()):
        run("umount", str(netns))
    file.unlink()


def _is_mounted(folder: Path) -> bool:
    """Also of a folder that is mounted on itself, which `Path.is_mount` does not see."""
    return any(line.split()[1] == str(folder) for line in Path("/proc/self/mounts").read_text().splitlines())
