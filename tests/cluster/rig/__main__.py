"""`python -m cluster.rig up|down|images|status|env`: manages the cluster manually; used by the Makefile."""

from __future__ import annotations

import argparse
import contextlib
import shlex
import sys
from pathlib import Path

from cluster.rig.cache import cache_root
from cluster.rig.cgroups import ROOT_GROUP, Group
from cluster.rig.commands import CommandFailed
from cluster.rig.image_builder import BuildFailed
from cluster.rig.images import TARGETS, build_image
from cluster.rig.machine import StartFailed
from cluster.rig.needs import NotPossibleHere, require_machine
from cluster.rig.rig import Rig, machine_lock, take_down, tests_lock


def _say(line: str) -> None:
    print(line, flush=True)


def _up(archives: list[Path]) -> int:
    rig = Rig.prepare(say=_say)
    rig.up(archives, say=_say)
    print(f"KUBECONFIG={rig.kubeconfig}")
    print('kubectl, kubectl neuron and helm for it: eval "$(make -s cluster-env)"')
    return 0


def _down(force: bool) -> int:
    with contextlib.nullcontext() if force else tests_lock(_refuse_while_tests_run), machine_lock(_say):
        take_down(cache_root() / "run")
    return 0


def _refuse_while_tests_run() -> None:
    raise NotPossibleHere("tests are using the cluster: wait for them, or use --force")


def _images() -> int:
    """Builds the product's images, loads them into the nodes and prints the helm command that uses them."""
    rig = Rig.prepare(say=_say)
    rig.up(say=_say)
    images = {target: build_image(target, say=_say) for target in TARGETS}
    for image in images.values():
        rig.load_image(image.archive)
    print(
        "helm install neuron-serving charts/neuron-serving --namespace neuron-serving --create-namespace --wait "
        f"--set image.operator={images['operator'].name},image.runtime={images['runtime-cpu'].name}"
    )
    return 0


def _status() -> int:
    require_machine()
    if not Group(ROOT_GROUP).processes():
        print("the cluster is down")
        return 1
    rig = Rig.prepare(say=_say)
    print(rig.kubectl("get", "nodes", "-o", "wide"), end="")
    print(
        "everything that `up` starts is running" if rig.is_up else "some programs are not running: `up` restarts them"
    )
    return 0 if rig.is_up else 1


def _environment() -> int:
    environment = Rig.prepare(say=lambda line: print(line, file=sys.stderr)).environment
    plugins = Path(sys.executable).parent  # kubectl-neuron
    for name, value in {**environment, "PATH": f"{environment['PATH']}:{plugins}"}.items():
        print(f"export {name}={shlex.quote(value)}")
    return 0


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m cluster.rig", description="A Kubernetes cluster on this machine.")
    commands = parser.add_subparsers(dest="command", required=True)
    up = commands.add_parser("up", help="start or repair the cluster; prints KUBECONFIG")
    up.add_argument("archives", nargs="*", type=Path, metavar="ARCHIVE", help="OCI archives of images for the nodes")
    down = commands.add_parser("down", help="stop the cluster and remove all its state")
    down.add_argument("--force", action="store_true", help="even while tests use it")
    commands.add_parser("images", help="build the images of Dockerfile.neuron and load them into the nodes")
    commands.add_parser("status", help="show what runs; exit status 1 if anything does not")
    commands.add_parser("env", help="print shell exports for kubectl and helm")
    chosen = parser.parse_args(arguments)
    try:
        match chosen.command:
            case "up":
                return _up(chosen.archives)
            case "down":
                return _down(chosen.force)
            case "images":
                return _images()
            case "status":
                return _status()
            case _:
                return _environment()
    except (NotPossibleHere, StartFailed, BuildFailed, CommandFailed, TimeoutError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
