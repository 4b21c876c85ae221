"""A cluster of one machine: stores the desired objects, runs their pods, and reports their state.

`neuron-operator local` runs the same pure decision as the operator in a cluster; this module replaces API server,
controllers and kubelet. It runs Jobs, Deployments and the StatefulSets of groups, stores passive kinds, and refuses
kinds that need another controller. It knows no field of NeuronModel.
"""

from __future__ import annotations

import asyncio
import secrets
import socket
import uuid
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from urllib.parse import urlsplit

from neuron_operator.api import names
from neuron_operator.local.pods import LOOPBACK, CannotRunHere, LocalHost, interpret
from neuron_operator.local.process import PodProcess
from neuron_operator.read.objects import is_owned, written
from neuron_operator.read.world import NodeDevices, Object

Key = tuple[str, str]

_PASSIVE_KINDS = frozenset(
    ("ControllerRevision", "NetworkPolicy", "PersistentVolumeClaim", "PodDisruptionBudget", "Service", "ServiceAccount")
)
_FIRST_BACKOFF_SECONDS = 1.0
_MAX_BACKOFF_SECONDS = 60.0


@dataclass(frozen=True)
class LocalPod:
    """A pod of this machine: its object, its process, and the number of restarts."""

    body: Object
    process: PodProcess
    ports: Mapping[int, int]
    """By port of the container, that of this machine."""
    num_restarts: int = 0

    @property
    def was_ready(self) -> bool:
        """It was ready once, before or after a restart."""
        return self.num_restarts > 0 or self.process.was_ready

    @property
    def name(self) -> str:
        return str(self.body["metadata"]["name"])

    @property
    def owner(self) -> str:
        """The name of its workload."""
        return _owner(self.body)


class Machine:
    """Objects and pods of one model and its adapters on this machine.

    A pass reads `children` and `pods` and calls `apply` and `delete`. Pods run as tasks of the event loop and call
    `changed` when their visible state changes.
    """

    def __init__(
        self, host: LocalHost, first_port: int, changed: Callable[[], None], log: Callable[[str, str], None]
    ) -> None:
        self._host = host
        self._next_port = first_port
        self._kept_ports: dict[tuple[str, int], int] = {}
        self._changed = changed
        self._log = log
        self._objects: dict[Key, Object] = {}
        self._applied: dict[Key, Object] = {}
        self._pods: dict[str, LocalPod] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._expiries: dict[str, asyncio.Task[None]] = {}
        """By Job that is to be deleted."""

    # --- what the pass sees

    @property
    def children(self) -> tuple[Object, ...]:
        return tuple(map(self._with_status, self._objects.values()))

    @property
    def pods(self) -> tuple[Object, ...]:
        return tuple({**pod.body, "status": _pod_status(pod)} for pod in self._pods.values())

    @property
    def node(self) -> NodeDevices:
        """This machine, as a node with its Neuron devices."""
        num, kind = self._host.num_neuron_devices, self._host.instance_type
        labels = {names.INSTANCE_TYPE_LABEL: kind} if kind else {}
        return NodeDevices("localhost", devices=num, free_devices=num, cores=0, free_cores=0, labels=labels)

    @property
    def running(self) -> tuple[LocalPod, ...]:
        return tuple(self._pods.values())

    def here(self, pod: str, address: str) -> str:
        """The address of a port of a pod, as this machine reaches it."""
        url, running = urlsplit(address), self._pods.get(pod)
        port = running.ports.get(url.port or 0) if running else None
        return url._replace(netloc=f"{LOOPBACK}:{port}").geturl() if port else address

    # --- what the pass does

    async def apply(self, desired: Object) -> None:
        """Create or update an object that differs from the one applied last, and start its pods. Raises CannotRunHere
        if this machine cannot run the kind or the pod."""
        kind, name = key = str(desired["kind"]), str(desired["metadata"]["name"])
        if self._applied.get(key) == desired:
            return
        self._applied[key] = desired
        metadata = {
            "uid": str(uuid.uuid4()),
            "creationTimestamp": written(datetime.now(UTC)),
            **(self._objects[key]["metadata"] if key in self._objects else {}),
            **desired["metadata"],
        }
        obj = self._objects[key] = {**desired, "metadata": metadata}
        if kind == "ConfigMap":
            self._host = replace(self._host, config_maps={**self._host.config_maps, name: desired})
            for pod in self._pods.values():
                if name in _mounted(pod.body, "configMap", "name"):
                    pod.process.renew(interpret(pod.body, self._host, pod.ports).files)
            self._changed()  # a pass may wait for it
        elif kind == "Job":
            if f"{name}-0" not in self._pods:
                await self._start(_pod_of(obj, f"{name}-0"), restart=False)
        elif kind == "Deployment":
            await self._scale(obj)
        elif kind == "StatefulSet":
            await self._start_set(obj)
            self._changed()
        elif kind == "Secret":
            content = {names.GROUP_SECRET_KEY: secrets.token_hex(32)}
            self._host = replace(self._host, secrets={**self._host.secrets, name: content})
            for owner in [one for (kind, _), one in self._objects.items() if kind == "StatefulSet"]:
                await self._start_set(owner)
        elif kind not in _PASSIVE_KINDS:
            raise CannotRunHere(f"{kind} {name}: is not supported without a cluster")

    def change(self, body: Object, patch: Object) -> None:
        """Merge `patch` into an object: its owners by UID, as a strategic merge does. A Job may expire by it."""
        key = kind, name = (str(body["kind"]), str(body["metadata"]["name"]))
        if live := self._objects.get(key):
            parts = {part: {**live.get(part, {}), **changed} for part, changed in patch.items()}
            if owners := patch.get("metadata", {}).get("ownerReferences"):
                merged = {one["uid"]: one for one in (*live["metadata"].get("ownerReferences", ()), *owners)}
                kept = [one for one in merged.values() if one.get("$patch") != "delete"]
                parts["metadata"] = {**parts["metadata"], "ownerReferences": kept}
            changed = self._objects[key] = {**live, **parts}
            seconds = changed["spec"].get("ttlSecondsAfterFinished") if kind == "Job" else None
            if seconds is not None and name not in self._expiries:
                self._expiries[name] = asyncio.create_task(self._expire(changed, float(seconds)))

    async def delete(self, body: Object) -> None:
        """Remove an object with what it owns, and end their pods."""
        uid = body["metadata"].get("uid", "")
        owned = [key for key, obj in self._objects.items() if uid and is_owned(obj, uid)]
        keys = [(str(body["kind"]), str(body["metadata"]["name"])), *owned]
        for key in keys:
            self._objects.pop(key, None)
            self._applied.pop(key, None)
        owners = {name for _, name in keys}
        await self._end(p.name for p in self._pods.values() if _owner(p.body) in owners)

    async def close(self) -> None:
        """End every pod: SIGTERM, grace, SIGKILL."""
        for expiry in self._expiries.values():
            expiry.cancel()
        await self._end(list(self._pods))

    def kill(self) -> None:
        """Kill every pod, on a second Ctrl-C."""
        for pod in self._pods.values():
            pod.process.kill()

    # --- controllers

    async def _expire(self, job: Object, seconds: float) -> None:
        """Delete a finished Job some time later."""
        await asyncio.sleep(seconds)
        del self._expiries[job["metadata"]["name"]]
        await self.delete(job)
        self._changed()

    async def _scale(self, deployment: Object) -> None:
        name = deployment["metadata"]["name"]
        pods = (f"{name}-{number}" for number in range(int(deployment["spec"].get("replicas", 1))))
        bodies = {pod: _pod_of(deployment, pod) for pod in sorted(pods)}
        await self._end(
            p.name
            for p in self._pods.values()
            if _owner(p.body) == name and p.body["spec"] != bodies.get(p.name, {}).get("spec")
        )
        for pod, body in bodies.items():
            if pod not in self._pods:
                await self._start(body, restart=True)

    async def _start_set(self, owner: Object) -> None:
        """Starts the pods of a StatefulSet, which are never restarted: a group ends as a whole. Like a kubelet, it
        waits for the Secret that they mount."""
        spec, name = owner["spec"], owner["metadata"]["name"]
        mounted = (volume.get("secret", {}) for volume in spec["template"]["spec"].get("volumes", []))
        needed = {one["secretName"] for one in mounted if "secretName" in one and "items" not in one}
        if not needed <= self._host.secrets.keys():
            return
        first = int(spec.get("ordinals", {}).get("start", 0))
        for number in range(first, first + int(spec["replicas"])):
            body = _pod_of(owner, f"{name}-{number}")
            body["metadata"]["labels"] = {**body["metadata"].get("labels", {}), names.POD_INDEX_LABEL: str(number)}
            body["spec"] = {**body["spec"], "nodeName": "localhost", "subdomain": spec["serviceName"]}
            if body["metadata"]["name"] not in self._pods:
                await self._start(body, restart=False)

    async def _start(self, body: Object, *, restart: bool) -> None:
        replica = body["metadata"].get("labels", {}).get(names.REPLICA_LABEL, "")
        inside = [int(port["containerPort"]) for one in body["spec"]["containers"] for port in one.get("ports", [])]
        inside += (names.GROUP_PORT, names.GROUP_PORT + 1) if replica else ()
        ports = {number: self._port_of(replica, number) for number in inside}
        plan = interpret(body, self._host, ports)
        if replica:
            plan = replace(plan, env={**plan.env, names.GROUP_PORT_VARIABLE: str(ports[names.GROUP_PORT])})
        pod = LocalPod(body, PodProcess(plan, self._log), ports)
        await pod.process.start()
        self._pods[pod.name] = pod
        self._tasks[pod.name] = asyncio.create_task(self._keep(pod, restart))
        self._changed()

    async def _keep(self, pod: LocalPod, restart: bool) -> None:
        backoff = _FIRST_BACKOFF_SECONDS
        while True:
            await pod.process.watch(self._changed)
            if not restart or not pod.was_ready:  # a pod that never was ready is not restarted: the command reports why
                return
            await asyncio.sleep(backoff)
            pod = replace(pod, process=PodProcess(pod.process.plan, self._log), num_restarts=pod.num_restarts + 1)
            backoff = min(2 * backoff, _MAX_BACKOFF_SECONDS)
            await pod.process.start()
            self._pods[pod.name] = pod
            self._changed()

    async def _end(self, pods: Iterable[str]) -> None:
        async def end(name: str) -> None:
            await self._pods[name].process.stop()
            task = self._tasks.pop(name)
            task.cancel()
            await asyncio.wait([task])
            self._pods.pop(name)

        await asyncio.gather(*(end(name) for name in tuple(pods)))

    def _port_of(self, replica: str, inside: int) -> int:
        """For a port of a pod. Groups of the same replica, which follow each other, have the same ones."""
        if replica and (kept := self._kept_ports.get((replica, inside))):
            return kept
        port = self._next_port
        self._next_port += 1
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((LOOPBACK, port))
            except OSError as error:
                raise CannotRunHere(f"port {port} is in use: choose another with --port") from error
        if replica:
            self._kept_ports[replica, inside] = port
        return port

    # --- status, as a cluster's controllers write it

    def _with_status(self, body: Object) -> Object:
        if body["kind"] != "Job":
            return body
        pods = [p.process.terminated for p in self._pods.values() if _owner(p.body) == body["metadata"]["name"]]
        ended = [terminated for terminated in pods if terminated]
        kind = "Complete" if any(terminated.exit_code == 0 for terminated in ended) else "Failed"
        conditions = [{"type": kind, "status": "True", "lastTransitionTime": ended[0].finished_at}] if ended else []
        return {**body, "status": {"conditions": conditions}}


def _owner(pod: Object) -> str:
    return str(pod["metadata"]["ownerReferences"][0]["name"])


def _mounted(pod: Object, kind: str, key: str) -> set[str]:
    """The names of the objects of this kind among its volumes."""
    return {volume[kind][key] for volume in pod["spec"].get("volumes", ()) if kind in volume}


def _pod_of(workload: Object, name: str) -> Object:
    template = workload["spec"]["template"]
    owner = {"kind": workload["kind"], "name": workload["metadata"]["name"], "uid": workload["metadata"]["uid"]}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            **template.get("metadata", {}),
            "name": name,
            "namespace": workload["metadata"].get("namespace", "default"),
            "uid": str(uuid.uuid4()),
            "creationTimestamp": written(datetime.now(UTC)),
            "ownerReferences": [{**owner, "controller": True}],
        },
        "spec": template["spec"],
    }


def _pod_status(pod: LocalPod) -> Object:
    process, spec = pod.process, pod.body["spec"]
    is_first = process.current is not process.plan
    container = spec["initContainers" if is_first else "containers"][0]
    state: Object
    if process.terminated is None:
        phase, state = "Running", {"running": {"startedAt": pod.body["metadata"]["creationTimestamp"]}}
    else:
        ended = process.terminated
        phase = "Running"  # as with a kubelet: a pod whose container may restart has not failed
        if pod.body["spec"].get("restartPolicy") == "Never":
            phase = "Succeeded" if ended.exit_code == 0 else "Failed"
        state = {
            "terminated": {
                "exitCode": ended.exit_code,
                "message": ended.message,
                "finishedAt": ended.finished_at,
                "reason": "Completed" if ended.exit_code == 0 else "Error",
            }
        }
    ready = "True" if process.ready else "False"
    return {
        "phase": phase,
        "podIP": LOOPBACK,
        "conditions": [
            {"type": "PodScheduled", "status": "True"},
            {"type": "ContainersReady", "status": ready},
            {"type": "Ready", "status": ready},
        ],
        "initContainerStatuses" if is_first else "containerStatuses": [
            {
                "name": container["name"],
                "image": container.get("image", ""),
                "ready": process.ready,
                "started": process.started,
                "restartCount": pod.num_restarts,
                "state": state,
            }
        ],
    }
