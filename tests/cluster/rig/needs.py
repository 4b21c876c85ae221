"""Requirements of the cluster on the machine. The command line prints the message of a missing one, the tests skip with
it (and fail with it under CI=true). Installs nothing."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path


class NotPossibleHere(Exception):
    """The machine lacks something; the message is one line that ends with the remedy."""


@dataclass(frozen=True)
class DebianPackage:
    """A package and the files that show that it is installed: names are looked up in PATH, paths are absolute."""

    name: str
    files: tuple[str, ...]


DEBIAN_PACKAGES = (
    DebianPackage("runc", ("runc",)),
    DebianPackage("containernetworking-plugins", ("/usr/lib/cni/bridge", "/usr/lib/cni/host-local")),
    DebianPackage("iptables", ("iptables",)),
    DebianPackage("conntrack", ("conntrack",)),
    DebianPackage("socat", ("socat",)),
    DebianPackage("iproute2", ("ip",)),
    DebianPackage("util-linux", ("nsenter", "unshare")),
    DebianPackage("openssl", ("openssl",)),
    DebianPackage("debootstrap", ("debootstrap",)),
    DebianPackage("binutils", ("as", "ld", "nm", "readelf")),
)

# The PATH of a root shell opened with `su` lacks these folders.
_SYSTEM_PATH = "/usr/local/sbin:/usr/sbin:/sbin"

CGROUP_ROOT = Path("/sys/fs/cgroup")


def search_path(environment: Mapping[str, str] | None = None) -> str:
    """PATH with the folders of system programs, for look-ups and for programs of the cluster."""
    environment = os.environ if environment is None else environment
    return f"{environment.get('PATH', '/usr/bin:/bin')}:{_SYSTEM_PATH}"


def missing_packages(packages: Sequence[DebianPackage] = DEBIAN_PACKAGES) -> list[str]:
    path = search_path()
    return [p.name for p in packages if not all(shutil.which(f, path=path) for f in p.files)]


def cgroup_hierarchies(root: Path = CGROUP_ROOT) -> list[Path]:
    """The version 1 hierarchies, each once (controllers that share a mount are one hierarchy under several names)."""
    if not root.is_dir():
        return []
    folders = (d for d in root.iterdir() if d.is_dir() and not d.is_symlink())
    return sorted(d for d in folders if (d / "cgroup.procs").exists() and not (d / "cgroup.controllers").exists())


def main() -> None:
    """`python -m cluster.rig.needs`: the names of the packages that are missing, for apt-get."""
    print(" ".join(missing_packages()))


def require_machine() -> None:
    """Raises:
    NotPossibleHere: with the first missing requirement.
    """
    if os.geteuid() != 0:
        raise NotPossibleHere("the cluster needs root: run `sudo make ...`, or leave the cluster tests out")
    if lacking := missing_packages():
        raise NotPossibleHere(f"Debian packages are missing ({' '.join(lacking)}): run `make cluster-deps`")
    present = {d.name for d in cgroup_hierarchies()}
    if lacking := sorted({"memory", "pids", "cpuset", "devices", "freezer"} - present):
        raise NotPossibleHere(
            f"cgroup version 1 hierarchies are missing ({' '.join(lacking)}): the cluster runs on version 1 only; "
            "boot with systemd.unified_cgroup_hierarchy=0 or use another machine"
        )


if __name__ == "__main__":
    main()
