"""A real Kubernetes cluster on this machine, started, used and stopped through one class.

The control plane and each node are a `Machine`; no traffic of the cluster leaves the host, which reaches it over one
link. `up` does only what is missing, so it also repairs a damaged cluster; `down` finds the leftovers of any run. A
machine has at most one cluster."""

from __future__ import annotations

import contextlib
import fcntl
import http.client
import json
import os
import shutil
import ssl
import string
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from http import HTTPStatus
from pathlib import Path
from typing import Any

import grpc

from cluster.rig import host_state, programs
from cluster.rig.binaries import CLUSTER_COMPONENTS, ensure
from cluster.rig.cache import Cache, content_key
from cluster.rig.cgroups import ROOT_GROUP, Group
from cluster.rig.commands import COMMAND_SECONDS, CommandFailed, run
from cluster.rig.device_plugin import read_unhealthy
from cluster.rig.machine import NETNS_FOLDER, WAIT_SECONDS, Machine, StartFailed, wait_until
from cluster.rig.needs import NotPossibleHere, require_machine, search_path
from cluster.rig.neuron_devices import CORE_RESOURCE, DEVICE_RESOURCE, resource_ids, unhealthy_ids
from cluster.rig.node_images import (
    Archive,
    ensure_store,
    import_commands,
    link_store,
    read_archive,
    read_archives,
    remove_store_builder,
    write_archives,
    write_program_archive,
)
from cluster.rig.pki import make_pki
from cluster.rig.stubs import ensure_stubs, import_stubs
from cluster.rig.topology import TOPOLOGY, Node, Topology

WAITING = f"--timeout={WAIT_SECONDS:g}s"
"""Time limit of kubectl and helm commands that wait."""
_CONTROL_PLANE = "control-plane"
_BRIDGE = "br0"
_HOST_LINK = "neuron-serving"
_MACHINE_FOLDER = Path("/run/neuron-serving")
_HOST_STATE = _MACHINE_FOLDER / "before.json"
_MANIFESTS = Path(__file__).parent / "manifests"
_SHARED_BYTES = 4 * 2**30
# Sources that define a cluster and its files: a cluster made by other versions is recreated, not repaired.
_SPECIFIED_BY = (
    "rig.py",
    "machine.py",
    "programs.py",
    "pki.py",
    "node_images.py",
    "device_plugin.py",
    "neuron_devices.py",
    "manifests",
)


@dataclass(frozen=True)
class AuditEvent:
    """One finished request in the audit log of the API server."""

    user: str
    verb: str
    group: str
    resource: str
    subresource: str
    namespace: str
    name: str
    code: int
    stage: str
    time: str


@dataclass(frozen=True)
class Answer:
    """An HTTP response with lower-case header names."""

    status: int
    headers: dict[str, str]


@dataclass(frozen=True)
class DeviceHolding:
    """Device ids that the kubelet has allocated to a container."""

    namespace: str
    pod: str
    container: str
    resource: str
    ids: tuple[str, ...]


class Rig:
    """The cluster. `Rig.prepare()` builds its programs; nothing runs until `up`."""

    def __init__(self, cache: Cache, folders: programs.Folders, topology: Topology = TOPOLOGY) -> None:
        self.cache = cache
        self.folders = folders
        self.topology = topology
        self._idle: list[http.client.HTTPSConnection] = []

    @classmethod
    def prepare(cls, *, say: Callable[[str], None] = print) -> Rig:
        """Builds or finds the programs.

        Raises:
            NotPossibleHere: this machine cannot run the cluster; the message ends with the remedy.
        """
        require_machine()
        cache = Cache.default()
        components = ensure(*CLUSTER_COMPONENTS, "helm", cache=cache, say=say)
        stubs = ensure_stubs(cache, components["hyper"])
        return cls(cache, programs.Folders(components, stubs, cache.root / "run"))

    # The interface for tests and the command line.

    @property
    def kubeconfig(self) -> Path:
        return Path(self.folders.pki.kubeconfig("admin"))

    @property
    def environment(self) -> dict[str, str]:
        """Environment for kubectl and helm to use this cluster."""
        bins = ":".join(str(self.folders.components[name]) for name in ("hyper", "helm"))
        return {
            "KUBECONFIG": str(self.kubeconfig),
            "PATH": f"{bins}:{search_path()}",
            "NO_PROXY": ",".join(filter(None, [os.environ.get("NO_PROXY"), self.topology.api_address])),
        }

    def kubectl(
        self, *arguments: str, stdin: str | None = None, timeout_seconds: float = COMMAND_SECONDS + WAIT_SECONDS
    ) -> str:
        """Runs kubectl as the administrator and returns its stdout.

        Raises:
            CommandFailed: kubectl failed, with its message in `output`, or timed out.
        """
        return self.command("kubectl", *arguments, stdin=stdin, timeout_seconds=timeout_seconds)

    def get(self, *arguments: str) -> Any:
        """`kubectl get ... -o json`, parsed."""
        return json.loads(self.kubectl("get", *arguments, "-o", "json"))

    def apply(self, *objects: Any) -> None:
        """Applies objects, given as dictionaries."""
        items = {"apiVersion": "v1", "kind": "List", "items": list(objects)}
        self.kubectl("apply", "-f", "-", stdin=json.dumps(items))

    def create_namespace(self, name: str) -> None:
        """Creates the namespace and waits for its `default` ServiceAccount, which pods need."""
        self.kubectl("create", "namespace", name)
        self.kubectl("--namespace", name, "wait", "--for=create", "serviceaccount/default", WAITING)

    def helm(self, *arguments: str, timeout_seconds: float = 2 * COMMAND_SECONDS) -> str:
        return self.command("helm", *arguments, timeout_seconds=timeout_seconds)

    def command(self, *command: str, stdin: str | None = None, timeout_seconds: float = COMMAND_SECONDS) -> str:
        """Runs a program of the host with `environment`."""
        environment = {**os.environ, **self.environment}
        return run(*command, stdin=stdin, environment=environment, timeout_seconds=timeout_seconds)

    def ask(self, path: str, user: str | None = None) -> Answer:
        """Sends one GET to the API server, as the administrator or as `user`, without retries."""
        with contextlib.closing(self.connect()) as connection:
            connection.request("GET", path, headers={} if user is None else {"Impersonate-User": user})
            response = connection.getresponse()
            return Answer(response.status, {name.lower(): value for name, value in response.getheaders()})

    def read(self, path: str) -> Any:
        """The JSON at a path of the API server, as the administrator. Polls use it: a kubectl takes fifty times the CPU
        time, a new connection four times.

        Raises:
            CommandFailed: the API server does not answer, or refuses.
        """
        try:
            status, content = self._get(path)
        except (OSError, http.client.HTTPException) as error:
            raise CommandFailed(("GET", path), None, repr(error)) from error
        if status != HTTPStatus.OK:
            raise CommandFailed(("GET", path), status, content.decode(errors="replace"))
        return json.loads(content)

    def _get(self, path: str) -> tuple[int, bytes]:
        """Over a connection that an earlier request left open, unless the API server has ended it meanwhile."""
        try:
            connection, is_new = self._idle.pop(), False
        except IndexError:
            connection, is_new = self.connect(), True
        try:
            connection.request("GET", path)
            response = connection.getresponse()
            content = response.read()
        except (ConnectionError, ssl.SSLError, http.client.HTTPException):
            connection.close()
            if is_new:
                raise
            self.disconnect()
            return self._get(path)
        except BaseException:
            connection.close()
            raise
        self._idle.append(connection)
        return response.status, content

    def disconnect(self) -> None:
        """Closes the connections that requests left open."""
        while self._idle:
            self._idle.pop().close()

    def connect(self) -> http.client.HTTPSConnection:
        """A connection to the API server as the administrator."""
        pki, topology = self.folders.pki, self.topology
        context = ssl.create_default_context(cafile=pki.crt("ca"))
        context.load_cert_chain(pki.crt("admin"), pki.key("admin"))
        return http.client.HTTPSConnection(topology.api_address, topology.api_port, context=context, timeout=60)

    def load_image(self, path: Path, nodes: Sequence[str] | None = None) -> Archive:
        """Loads the image of an OCI archive into running nodes (all by default); loaded ones take no time.

        Raises:
            ValueError: the archive does not contain exactly one image.
        """
        archive = read_archive(path)
        names = [node.name for node in self.topology.nodes] if nodes is None else list(nodes)

        def load(name: str) -> None:
            loaded = read_archives(self._images_file(name))
            if archive in loaded:
                return
            for command in import_commands(archive, self.folders.containerd("ctr")):
                self.machine(name).run(*command, timeout_seconds=600)
            others = [other for other in loaded if other.name != archive.name]
            write_archives(self._images_file(name), [*others, archive])

        with ThreadPoolExecutor(2) as pool:  # unpacking is CPU-bound
            list(pool.map(load, names))
        return archive

    def loaded_archives(self) -> list[Path]:
        """Archives of the images loaded into nodes, without the cluster's own, if the files still exist."""
        own = (programs.PAUSE_IMAGE, programs.COREDNS_IMAGE)
        archives = [archive for node in self.topology.nodes for archive in read_archives(self._images_file(node.name))]
        return sorted({a.path for a in archives if a.name not in own and a.path.exists()})

    def device_holdings(self, node: str) -> list[DeviceHolding]:
        """Device allocations of a node, from the kubelet's pod-resources service."""
        messages, services = import_stubs(self.folders.stubs, "podresources")
        pid = self.machine(node).init_pid
        if pid is None:
            raise StartFailed(f"node {node} is off")
        socket = f"/proc/{pid}/root/var/lib/kubelet/pod-resources/kubelet.sock"
        with grpc.insecure_channel(f"unix://{socket}") as channel:  # type: ignore[no-untyped-call]
            request = messages.ListPodResourcesRequest()
            # A kubelet may report ready before it serves this.
            answer = services.PodResourcesListerStub(channel).List(request, timeout=60, wait_for_ready=True)
        return [
            DeviceHolding(
                pod.namespace, pod.name, container.name, devices.resource_name, tuple(sorted(devices.device_ids))
            )
            for pod in answer.pod_resources
            for container in pod.containers
            for devices in container.devices
        ]

    def audit_events(self) -> list[AuditEvent]:
        """Requests to the API server except those of the cluster's own programs, in order of completion."""
        events = []
        with self.folders.audit_log.open() as file:
            for line in file:
                if not line.endswith("\n"):  # partially written
                    break
                event = json.loads(line)
                about = event.get("objectRef", {})
                events.append(
                    AuditEvent(
                        # A request with expired credentials has no user.
                        user=event["user"].get("username", ""),
                        verb=event["verb"],
                        group=about.get("apiGroup", ""),
                        resource=about.get("resource", ""),
                        subresource=about.get("subresource", ""),
                        namespace=about.get("namespace", ""),
                        name=about.get("name", ""),
                        code=event.get("responseStatus", {}).get("code", 0),
                        stage=event["stage"],
                        time=event["stageTimestamp"],
                    )
                )
        return events

    # Machines.

    @property
    def control_plane(self) -> Machine:
        return Machine(_CONTROL_PLANE, self.folders.machine(_CONTROL_PLANE), self._init_program, "host", {})

    def machine(self, name: str) -> Machine:
        """The machine of a node.

        Raises:
            KeyError: no node of that name.
        """
        node = self.topology.node(name)
        state = self.folders.machine(node.name)
        mounts = {
            "/var/lib/containerd": state / "containerd",
            "/var/lib/kubelet": state / "kubelet",
            "/etc/cni/net.d": state / "cni",
            "/var/lib/cni": state / "cni-state",
            "/var/log": state / "var-log",
        }
        setup = "\n".join(
            [
                "mkdir -p /var/lib/kubelet/device-plugins",
                "echo 1 > /proc/sys/net/ipv4/ip_forward",
                # Services must also work between pods of one node, whose packets cross only its bridge.
                "echo 1 > /proc/sys/net/bridge/bridge-nf-call-iptables",
            ]
        )
        return Machine(node.name, state, self._init_program, "eth0", mounts, setup)

    @property
    def _init_program(self) -> Path:
        return self.folders.components["pause"] / "pause"

    # Up.

    @property
    def is_up(self) -> bool:
        """Whether every program that `up` starts is running, healthy or not."""
        return all(machine.is_running(program.name) for machine, program in self.everything())

    def everything(self) -> Iterator[tuple[Machine, programs.Program]]:
        """Every program that `up` starts, with its machine."""
        for program in self._control_programs():
            yield self.control_plane, program
        for node in self.topology.nodes:
            for program in (programs.containerd(node, self.folders), *programs.node_programs(node, self.folders)):
                yield self.machine(node.name), program

    def up(self, archives: Sequence[Path] = (), *, say: Callable[[str], None] = print) -> None:
        """Starts whatever is not running and returns when nodes, devices and DNS are ready.

        archives: OCI archives of images that nodes have from the start.

        Raises:
            NotPossibleHere: a cluster of another cache folder is running.
            StartFailed: a program did not start; the message names its log.
        """
        started = time.monotonic()

        def progress(line: str) -> None:
            say(f"{time.monotonic() - started:5.1f} s  {line}")

        with machine_lock(say):
            self._claim_machine()
            specification = self._specification()
            mark = self.folders.state / "specification"
            if mark.exists() and mark.read_text() != specification:
                progress("what runs was made by another version: taking it down")
                self._down()
                self._claim_machine()
            mark.parent.mkdir(parents=True, exist_ok=True)
            mark.write_text(specification)
            self._up([read_archive(path) for path in archives], progress)

    def _up(self, archives: list[Archive], progress: Callable[[str], None]) -> None:
        since = datetime.now(UTC)
        make_pki(self.folders.pki.folder, self.topology)
        self._mount_shared_storage()  # before the nodes, which get a copy of the host's mounts
        self._start_control_plane()
        progress("control plane started")
        new_nodes = [node for node in self.topology.nodes if not self._has_store(node)]
        if new_nodes:
            wanted = [*self._own_archives(), *archives]
            # After a run was killed here, some nodes may already use the store.
            only = len(new_nodes) == len(self.topology.nodes)
            store = ensure_store(self.cache, wanted, self.folders.components["containerd"], only=only, say=progress)
            for node in new_nodes:
                link_store(store, self.folders.machine(node.name) / "containerd")
                write_archives(self._images_file(node.name), wanted)
        for node in self.topology.nodes:
            self._make_mount_points(self.machine(node.name))
        with ThreadPoolExecutor(len(self.topology.nodes)) as pool:
            list(pool.map(self._start_containerd, self.topology.nodes))
            progress("nodes are on")
            self._wait_for_api_server()
            progress("API server ready")
            # The controller manager exits if the API server has not yet created its bootstrap roles.
            for program in self._control_programs():
                self.control_plane.start(program.name, program.command, program.environment)
            list(pool.map(self._start_node_programs, self.topology.nodes))
        self._apply_base()
        self.wait_for_nodes(since=since)
        progress("nodes and devices ready")
        self.kubectl("-n", "kube-system", "rollout", "status", "daemonset/coredns", WAITING)
        progress("DNS ready")
        for archive in archives:
            self.load_image(archive.path)

    def _mount_shared_storage(self) -> None:
        folder = self.folders.shared
        if not folder.is_mount():
            folder.mkdir(exist_ok=True)
            run("mount", "-t", "tmpfs", "-o", f"size={_SHARED_BYTES}", "shared", str(folder))

    def _specification(self) -> str:
        here = Path(__file__).parent
        parts = [here / name for name in _SPECIFIED_BY]
        running = [str(self.folders.components[name]) for name in CLUSTER_COMPONENTS]
        # Running programs read files of this working tree, and the device plugin runs with this Python.
        return content_key(repr(self.topology), str(here), sys.executable, *running, *parts)

    def _claim_machine(self) -> None:
        """Records the owner of this machine's cluster: names of groups, links and namespaces are the same for all."""
        owner = _MACHINE_FOLDER / "state"
        other = owner.read_text() if owner.exists() else str(self.folders.state)
        if other != str(self.folders.state) and Group(ROOT_GROUP).processes():
            raise NotPossibleHere(f"a cluster with its state in {other} is up: run `make cluster-down` first")
        _MACHINE_FOLDER.mkdir(exist_ok=True)
        owner.write_text(str(self.folders.state))
        host_state.record(_HOST_STATE, NETNS_FOLDER)

    def _control_programs(self) -> list[programs.Program]:
        """In start order."""
        return [
            programs.etcd(self.folders),
            programs.api_server(self.topology, self.folders),
            programs.controller_manager(self.topology, self.folders),
            programs.scheduler(self.folders),
        ]

    def _start_control_plane(self) -> None:
        machine = self.control_plane
        machine.make_network(self._fill_control_network)
        machine.power_on()
        for program in self._control_programs()[:2]:
            machine.start(program.name, program.command, program.environment)

    def _fill_control_network(self) -> None:
        machine, topology = self.control_plane, self.topology
        machine.ip("link", "add", _BRIDGE, "type", "bridge")
        machine.ip("address", "add", f"{topology.api_address}/24", "dev", _BRIDGE)
        machine.ip("link", "set", _BRIDGE, "up")
        machine.ip("route", "add", "unreachable", topology.service_cidr)
        for node in topology.nodes:
            machine.ip("route", "add", node.pod_cidr, "via", node.address)
        run("ip", "link", "add", _HOST_LINK, "type", "veth", "peer", "name", machine.link, "netns", machine.netns)
        machine.ip("link", "set", machine.link, "master", _BRIDGE, "up")
        run("ip", "address", "replace", f"{topology.host_address}/24", "dev", _HOST_LINK)
        run("ip", "link", "set", _HOST_LINK, "up")

    def _fill_node_network(self, node: Node) -> None:
        machine, control = self.machine(node.name), self.control_plane
        control.ip("link", "add", node.name, "type", "veth", "peer", "name", machine.link, "netns", machine.netns)
        control.ip("link", "set", node.name, "master", _BRIDGE, "up")
        machine.ip("address", "add", f"{node.address}/24", "dev", machine.link)
        machine.ip("link", "set", machine.link, "up")
        for other in self.topology.nodes:
            if other != node:
                machine.ip("route", "add", other.pod_cidr, "via", other.address)
        # The node's own programs need a route before kube-proxy's rules match a service address. A pod's packet that
        # matches no rule is refused at once instead of timing out.
        machine.ip("route", "add", self.topology.service_cidr, "dev", machine.link)
        # Pods must not reach the host, whose replies would leave by its default route.
        for refused in (self.topology.service_cidr, self.topology.host_address):
            machine.ip("rule", "add", "iif", "cni0", "to", refused, "unreachable")
        machine.ip("route", "add", "unreachable", "default")

    def _start_containerd(self, node: Node) -> None:
        machine = self.machine(node.name)
        programs.write_node_files(self.topology, node, self.folders, machine.group)
        machine.make_network(lambda: self._fill_node_network(node))
        machine.power_on()
        (machine.group / "system" / "shims").make()
        program = programs.containerd(node, self.folders)
        machine.start(program.name, program.command, program.environment)
        wait_until(
            f"containerd of {node.name} answers, see {machine.log(program.name)}",
            lambda: machine.answers(self.folders.containerd("ctr"), "version"),
        )

    def _start_node_programs(self, node: Node) -> None:
        machine = self.machine(node.name)
        for program in programs.node_programs(node, self.folders):
            machine.start(program.name, program.command, program.environment)

    def start_node(self, name: str) -> None:
        """Starts a node, or its missing programs, and returns when it reports ready."""
        node = self.topology.node(name)
        since = datetime.now(UTC)
        self._start_containerd(node)
        self._start_node_programs(node)
        self.wait_for_nodes(name, since=since)

    def _make_mount_points(self, machine: Machine) -> None:
        """Creates the mount points on the host; `down` removes the created ones."""
        made = self.folders.state / "made-folders"
        known = made.read_text().splitlines() if made.exists() else []
        for folder in map(Path, machine.mounts):
            missing = [str(f) for f in (*reversed(folder.parents), folder) if not f.exists()]
            known += [m for m in missing if m not in known]
            made.write_text("\n".join(known))
            folder.mkdir(parents=True, exist_ok=True)

    def _wait_for_api_server(self) -> None:
        def ready() -> bool:
            try:
                return self.kubectl("get", "--raw", "/readyz", timeout_seconds=10).strip() == "ok"
            except CommandFailed:
                return False

        wait_until(f"the API server is ready, see {self.control_plane.log('kube-apiserver')}", ready)

    def _apply_base(self) -> None:
        manifest = string.Template((_MANIFESTS / "base.yaml").read_text()).substitute(
            dns_address=self.topology.dns_address, coredns_image=programs.COREDNS_IMAGE
        )
        wait_until("namespace kube-system", lambda: self._exists("namespace", "kube-system"))
        self.kubectl("apply", "--server-side", "-f", "-", stdin=manifest)

    def _exists(self, *arguments: str) -> bool:
        return bool(self.kubectl("get", *arguments, "--ignore-not-found", "-o", "name").strip())

    def wait_for_nodes(self, *names: str, since: datetime | None = None) -> None:
        """Waits until nodes (all by default) are ready and the API shows their healthy devices.

        since: earlier reports of the kubelets do not count.
        """
        wanted = [node for node in self.topology.nodes if not names or node.name in names]

        def ready() -> bool:
            present = {item["metadata"]["name"]: item["status"] for item in self.get("nodes")["items"]}
            return all(node.name in present and self._is_ready(node, present[node.name], since) for node in wanted)

        wait_until(f"nodes {' '.join(n.name for n in wanted)} and their devices are ready", ready, pause_seconds=0.2)

    def _is_ready(self, node: Node, status: Any, since: datetime | None) -> bool:
        condition = next((c for c in status.get("conditions", ()) if c["type"] == "Ready"), None)
        if condition is None or condition["status"] != "True":
            return False
        if since is not None and datetime.fromisoformat(condition["lastHeartbeatTime"]) <= since:
            return False
        if node.neuron is None:
            return True
        unhealthy = read_unhealthy(self.folders.unhealthy_file(node))
        healthy = {
            resource: len(resource_ids(node.neuron, resource)) - len(unhealthy_ids(node.neuron, resource, unhealthy))
            for resource in (DEVICE_RESOURCE, CORE_RESOURCE)
        }
        return {resource: int(status["allocatable"].get(resource, -1)) for resource in healthy} == healthy

    # Images.

    def _own_archives(self) -> list[Archive]:
        """The images for pod sandboxes and DNS."""
        wanted = {
            programs.PAUSE_IMAGE: self.folders.components["pause"] / "pause",
            programs.COREDNS_IMAGE: self.folders.components["coredns"] / "coredns",
        }
        archives = []
        for name, program in wanted.items():

            def build(folder: Path, name: str = name, program: Path = program) -> None:
                write_program_archive(folder / "image.tar", name, program)

            entry = self.cache.entry("own-images", program.name, content_key(name, program), build, max_entries=1)
            archives.append(read_archive(entry / "image.tar"))
        return archives

    def _has_store(self, node: Node) -> bool:
        return self._images_file(node.name).exists()

    def _images_file(self, node: str) -> Path:
        return self.folders.machine(node) / "images.json"

    # Down.

    def down(self, *, say: Callable[[str], None] = print) -> None:
        """Stops any cluster on this machine and removes all its state."""
        with machine_lock(say):
            self._down()

    def _down(self) -> None:
        self.disconnect()
        take_down(self.folders.state)


def take_down(state: Path) -> None:
    """Ends every process of this machine's cluster and removes its links, namespaces, groups, mounts and state.

    Needs none of the programs, so it also works after the cache was deleted.

    Raises:
        TimeoutError: a process or group does not end.
    """
    group = Group(ROOT_GROUP)
    group.kill()
    remove_store_builder()
    # Before the namespace of its other end, whose removal would delete it at an arbitrary later time.
    if Path("/sys/class/net", _HOST_LINK).exists():
        run("ip", "link", "del", _HOST_LINK)
    for netns in NETNS_FOLDER.glob(f"{ROOT_GROUP}-*"):
        run("ip", "netns", "del", netns.name)
    group.remove()
    owner = _MACHINE_FOLDER / "state"
    states = {state, Path(owner.read_text())} if owner.exists() else {state}
    for folder in states:
        for mount in sorted(_mounts_below(folder), reverse=True):
            run("umount", "--lazy", mount)
        made = folder / "made-folders"
        for line in reversed(made.read_text().splitlines() if made.exists() else []):
            with contextlib.suppress(OSError):  # not empty: keep files that others put there
                Path(line).rmdir()
        # Unpacked images have very many files, for which `shutil.rmtree` takes minutes.
        run("rm", "-rf", "--one-file-system", str(folder), timeout_seconds=600)
    host_state.put_back(_HOST_STATE, NETNS_FOLDER)
    if _MACHINE_FOLDER.exists():
        shutil.rmtree(_MACHINE_FOLDER)


def machine_lock(say: Callable[[str], None] = print) -> contextlib.AbstractContextManager[None]:
    """Held while a cluster is started or stopped on this machine, whatever its cache folder."""
    return _lock("cluster", lambda: say("waiting: another run is starting or stopping the cluster"))


def tests_lock(when_taken: Callable[[], None]) -> contextlib.AbstractContextManager[None]:
    """Held by a test run while it uses the cluster, which tests break on purpose.

    `when_taken` is called if another run holds the lock; if it returns, this run waits.
    """
    return _lock("cluster-tests", when_taken)


@contextlib.contextmanager
def _lock(name: str, when_taken: Callable[[], None]) -> Iterator[None]:
    path = Path(f"/run/lock/neuron-serving-{name}.lock")
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            when_taken()
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _mounts_below(folder: Path) -> list[str]:
    points = [line.split()[1] for line in Path("/proc/self/mounts").read_text().splitlines()]
    return [point for point in points if point.startswith(f"{folder}/")]
