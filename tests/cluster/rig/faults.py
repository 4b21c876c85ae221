"""Faults of a cluster, one context manager each. Entering returns when the fault is in effect (and visible in the API
where it changes a number), leaving when the cluster has recovered."""

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
from cluster.rig.machine import NETNS_FOLDER, wait_until
from cluster.rig.rig import WAITING, Rig
from cluster.rig.slow_link import Relay, open_interface

_SEAT_HOLDER = "neuron-serving:seat-holder"
_PATH = "/api/v1/namespaces"
_SCHEMA_HEADER = "x-kubernetes-pf-flowschema-uid"
_SLOW_LINK = "slow0"
_HOLD_SECONDS = 45  # less than the minute after which the API server ends any request


@contextlib.contextmanager
def power_off(rig: Rig, node: str) -> Iterator[None]:
    """The node loses power: all its processes end at once, its disk stays."""
    rig.machine(node).power_off()
    try:
        yield
    finally:
        rig.start_node(node)


@contextlib.contextmanager
def kubelet_killed(rig: Rig, node: str) -> Iterator[None]:
    """The kubelet dies and is not restarted; containers keep running."""
    rig.machine(node).stop("kubelet")
    try:
        yield
    finally:
        rig.start_node(node)


@contextlib.contextmanager
def link_cut(rig: Rig, node: str) -> Iterator[None]:
    """The node's link is cut; its processes keep running."""
    rig.control_plane.ip("link", "set", node, "down")
    try:
        yield
    finally:
        rig.control_plane.ip("link", "set", node, "up")
        rig.wait_for_nodes(node, since=datetime.now(UTC))


@contextlib.contextmanager
def packets_lost(rig: Rig, node: str, other: str) -> Iterator[None]:
    """What pods of one node send to pods of the other is lost, not refused. The nodes stay ready."""
    machine, cidrs = rig.machine(node), [rig.topology.node(name).pod_cidr for name in (node, other)]
    rules = [("FORWARD", "-s", source, "-d", to, "-j", "DROP") for source, to in (cidrs, cidrs[::-1])]
    for rule in rules:
        machine.run("iptables", "-w", "-I", *rule)
    try:
        yield
    finally:
        for rule in rules:
            machine.run("iptables", "-w", "-D", *rule)


@contextlib.contextmanager
def link_slow(rig: Rig, node: str, other: str, *, delay_seconds: float, loss: float) -> Iterator[Relay]:
    """What pods of two nodes send each other arrives this much later, in both directions, and a share of it never."""
    nodes = [rig.topology.node(name) for name in (node, other)]
    machines = [rig.machine(name) for name in (node, other)]
    files = [open_interface(NETNS_FOLDER / machine.netns, _SLOW_LINK) for machine in machines]
    # Before the relay: an interface that is up sends packets of its own, and one that is down takes none.
    for machine in machines:
        machine.ip("link", "set", _SLOW_LINK, "up")
    with Relay(*files, delay_seconds=delay_seconds, loss=loss) as relay:
        for machine, there in zip(machines, reversed(nodes), strict=True):
            machine.ip("route", "replace", there.pod_cidr, "dev", _SLOW_LINK)
        try:
            yield relay
        finally:
            for machine, there in zip(machines, reversed(nodes), strict=True):
                machine.ip("route", "replace", there.pod_cidr, "via", there.address)


@contextlib.contextmanager
def drained(rig: Rig, node: str, selector: str) -> Iterator[None]:
    """The node takes no new pods, and those of the selector are evicted, as far as their PodDisruptionBudgets allow."""
    which = ("--pod-selector", selector, "--ignore-daemonsets", "--delete-emptydir-data")
    try:
        rig.kubectl("drain", node, *which, WAITING)
        yield
    finally:
        rig.kubectl("uncordon", node)


@contextlib.contextmanager
def devices_unhealthy(rig: Rig, node: str, devices: Collection[int]) -> Iterator[None]:
    """The plugin reports devices of the node (by minor number) unhealthy; pods that hold them keep running."""
    file = rig.folders.unhealthy_file(rig.topology.node(node))
    before = file.read_text() if file.exists() else ""
    file.write_text(before + "".join(f"{device}\n" for device in sorted(devices)))
    try:
        rig.wait_for_nodes(node)
        yield
    finally:
        file.write_text(before)
        rig.wait_for_nodes(node)


@contextlib.contextmanager
def cores_withheld(rig: Rig, node: str, visible: str) -> Iterator[None]:
    """The plugin lets new containers of the node use only some cores of their devices (NEURON_RT_VISIBLE_CORES)."""
    file = rig.folders.visible_file(rig.topology.node(node))
    file.write_text(visible)
    try:
        yield
    finally:
        file.unlink()


def kill_containers(rig: Rig, namespace: str, selector: str) -> list[str]:
    """Kills every container of the matching pods with SIGKILL and returns the names of the pods.

    The kubelets restart them, with growing back-off (1 s, 10 s, 20 s, ...).

    Raises:
        ValueError: no container of such a pod runs, so the fault would have no effect.
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
    """Kills every process of a pod that has `word` among its arguments with SIGKILL.

    Raises:
        ValueError: there is none.
    """
    for pid in _processes_with(rig, pod, word):
        kill(pid)


@contextlib.contextmanager
def frozen(rig: Rig, pod: Any, word: str) -> Iterator[None]:
    """Stops the processes that `kill_processes` would kill.

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
    """The API server answers new requests of `user` with 429 and Retry-After: 1, with a priority level without seats.

    user: a full user name, such as system:serviceaccount:NAMESPACE:NAME. Its open watches continue. Even a level
    without seats serves one request at a time, so one request is kept open; when it is renewed, at most every 45 s, one
    request of the user may get through.
    """
    name = f"throttled-{re.sub('[^a-z0-9]+', '-', user.lower())}"
    rig.apply(_priority_level(name), _flow_schema(name, user))
    schema = rig.get("flowschema", name)["metadata"]["uid"]
    stop = threading.Event()
    holder = threading.Thread(target=_hold_seat, args=(rig, stop))
    try:
        # Only now: a request before the level is in force would be held in another one.
        wait_until(f"{user} has the priority level", lambda: rig.ask(_PATH, user).headers.get(_SCHEMA_HEADER) == schema)
        holder.start()
        wait_until(f"{user} is throttled", lambda: rig.ask(_PATH, user).status == 429)
        yield
    finally:
        stop.set()
        if holder.ident is not None:
            holder.join()
        rig.kubectl("delete", f"flowschema/{name}", f"prioritylevelconfiguration/{name}")
        wait_until(f"{user} is no longer throttled", lambda: rig.ask(_PATH, user).status != 429)


def _hold_seat(rig: Rig, stop: threading.Event) -> None:
    """Keeps one request open by never sending its announced body; any user may send it."""
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
                    break  # a response or a closed connection: another request had the seat, so try again


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
            "matchingPrecedence": 2,  # precedes all except the schema that exempts administrators
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
