"""What goes wrong in a cluster, one call each: a context in which it is so, and after which it is not any more.
Entering returns when the fault is made (where the cluster shows it as a number, when the number is seen), leaving when
what it broke is well again."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import threading
import time
from collections.abc import Collection, Iterator
from datetime import UTC, datetime
from typing import Any

from cluster.rig.cgroups import Group, kill
from cluster.rig.machine import wait_until
from cluster.rig.rig import Rig

_SEAT_HOLDER = "neuron-serving:seat-holder"
_PATH = "/api/v1/namespaces"
_SCHEMA_HEADER = "x-kubernetes-pf-flowschema-uid"
_HOLD_SECONDS = 45  # less than the minute after which the API server ends any request


@contextlib.contextmanager
def power_off(rig: Rig, node: str) -> Iterator[None]:
    """The node loses power: everything on it ends at once, its disk stays."""
    rig.machine(node).power_off()
    try:
        yield
    finally:
        rig.start_node(node)


@contextlib.contextmanager
def kubelet_killed(rig: Rig, node: str) -> Iterator[None]:
    """The kubelet dies, and is not restarted; containers go on."""
    rig.machine(node).stop("kubelet")
    try:
        yield
    finally:
        rig.start_node(node)


@contextlib.contextmanager
def link_cut(rig: Rig, node: str) -> Iterator[None]:
    """The node's cable is pulled: it runs on, alone."""
    rig.control_plane.ip("link", "set", node, "down")
    try:
        yield
    finally:
        rig.control_plane.ip("link", "set", node, "up")
        rig.wait_for_nodes(node, since=datetime.now(UTC))


@contextlib.contextmanager
def devices_unhealthy(rig: Rig, node: str, devices: Collection[int]) -> Iterator[None]:
    """The plugin reports devices of the node (by minor number) unhealthy; pods that hold them run on."""
    file = rig.folders.unhealthy_file(rig.topology.node(node))
    before = file.read_text() if file.exists() else ""
    file.write_text(before + "".join(f"{device}\n" for device in sorted(devices)))
    try:
        rig.wait_for_nodes(node)
        yield
    finally:
        file.write_text(before)
        rig.wait_for_nodes(node)


def kill_containers(rig: Rig, namespace: str, selector: str) -> list[str]:
    """Every container of the pods that match is killed with SIGKILL, and the pods' names are returned.

    The kubelets start them again: that is their undoing, and takes longer each time (1 s, 10 s, 20 s, ...).

    Raises:
        ValueError: no container of such a pod runs; a fault that hits nothing would make a test that proves nothing.
    """
    pods = rig.get("pods", "--namespace", namespace, "--selector", selector)["items"]
    killed = []
    for pod in pods:
        running = [group for group in _container_groups(rig, pod) if group.processes()]
        for group in running:
            group.kill()
        killed += [pod["metadata"]["name"]] if running else []
    if not killed:
        raise ValueError(f"no container runs in namespace {namespace} in pods with {selector}")
    return killed


def kill_processes(rig: Rig, pod: Any, word: str) -> None:
    """Every process of a pod whose command line has `word` among its arguments is killed with SIGKILL.

    Raises:
        ValueError: there is none.
    """
    for pid in _processes_with(rig, pod, word):
        kill(pid)


@contextlib.contextmanager
def frozen(rig: Rig, pod: Any, word: str) -> Iterator[None]:
    """The processes that `kill_processes` would kill stand still.

    Raises:
        ValueError: there is none.
    """
    pids = _processes_with(rig, pod, word)
    try:
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        yield
    finally:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


def _processes_with(rig: Rig, pod: Any, word: str) -> list[int]:
    processes = [process for group in _container_groups(rig, pod) for process in group.processes()]
    hit = [process.pid for process in processes if word in process.command]
    if not hit:
        commands = [" ".join(process.command) for process in processes]
        raise ValueError(f"no process with {word} runs in pod {pod['metadata']['name']}, but {commands}")
    return hit


def _container_groups(rig: Rig, pod: Any) -> Iterator[Group]:
    node, uid = pod["spec"].get("nodeName"), pod["metadata"]["uid"]
    statuses = pod["status"].get("containerStatuses", ())
    for container_id in [s["containerID"].removeprefix("containerd://") for s in statuses if s["state"].get("running")]:
        yield from rig.machine(node).group.find(f"pod{uid}/{container_id}")


@contextlib.contextmanager
def throttled(rig: Rig, user: str) -> Iterator[None]:
    """The API server answers new requests of `user` with 429 and Retry-After: 1, by a priority level without a seat.

    user: a full user name, such as system:serviceaccount:NAMESPACE:NAME. What it watches already goes on. Even a level
    of no seats serves one request at a time, so that one is kept busy; a request of the user gets through when that
    one is renewed, which is at most once in 45 s.
    """
    name = f"throttled-{re.sub('[^a-z0-9]+', '-', user.lower())}"
    rig.apply(_priority_level(name), _flow_schema(name, user))
    schema = rig.get("flowschema", name)["metadata"]["uid"]
    stop = threading.Event()
    holder = threading.Thread(target=_hold_seat, args=(rig, stop))
    try:
        # Only then: a request that the level does not know yet would be held in another one.
        wait_until(f"{user} is of the level", lambda: rig.ask(_PATH, user).headers.get(_SCHEMA_HEADER) == schema)
        holder.start()
        wait_until(f"{user} is throttled", lambda: rig.ask(_PATH, user).status == 429)
        yield
    finally:
        stop.set()
        if holder.ident is not None:
            holder.join()
        rig.kubectl("delete", f"flowschema/{name}", f"prioritylevelconfiguration/{name}")
        wait_until(f"{user} is throttled no more", lambda: rig.ask(_PATH, user).status != 429)


def _hold_seat(rig: Rig, stop: threading.Event) -> None:
    """Keeps one request in the works, by never sending the body that it announces: any user may make it."""
    while not stop.is_set():
        with contextlib.closing(rig.connect()) as connection:
            connection.putrequest("POST", "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews")
            for name, value in (
                ("Impersonate-User", _SEAT_HOLDER),
                ("Content-Type", "application/json"),
                ("Content-Length", "100"),
            ):
                connection.putheader(name, value)
            connection.endheaders()
            end = time.monotonic() + _HOLD_SECONDS
            connection.sock.settimeout(0.05)
            while not stop.is_set() and time.monotonic() < end:
                with contextlib.suppress(TimeoutError):
                    connection.sock.recv(1)
                    break  # an answer, or the end: the seat was somebody else's, so try again


def _priority_level(name: str) -> Any:
    return {
        "apiVersion": "flowcontrol.apiserver.k8s.io/v1",
        "kind": "PriorityLevelConfiguration",
        "metadata": {"name": name},
        "spec": {
            "type": "Limited",
            "limited": {
                "nominalConcurrencyShares": 0,
                "lendablePercent": 0,
                "borrowingLimitPercent": 0,
                "limitResponse": {"type": "Reject"},
            },
        },
    }


def _flow_schema(name: str, user: str) -> Any:
    everything = {"verbs": ["*"], "apiGroups": ["*"], "resources": ["*"], "clusterScope": True, "namespaces": ["*"]}
    return {
        "apiVersion": "flowcontrol.apiserver.k8s.io/v1",
        "kind": "FlowSchema",
        "metadata": {"name": name},
        "spec": {
            "matchingPrecedence": 2,  # before all but the one that exempts administrators
            "priorityLevelConfiguration": {"name": name},
            "rules": [
                {
                    "subjects": [{"kind": "User", "user": {"name": name}} for name in (user, _SEAT_HOLDER)],
                    "resourceRules": [everything],
                    "nonResourceRules": [{"verbs": ["*"], "nonResourceURLs": ["*"]}],
                }
            ],
        },
    }
