"""A real Kubernetes cluster on this machine: brought up, used and taken down by tests and by hands through one class.

The control plane and each node are a `Machine`; nothing of the cluster can leave the host, which reaches it by one
link. `up` does only what is not done yet, so it is also what repairs a cluster of which parts were killed; `down` finds
what is left over of any run. There is one cluster on a machine at a time."""

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
from pathlib import Path
from typing import Any

import grpc

from cluster.rig import programs
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
"""For commands of kubectl and helm that wait."""
_CONTROL_PLANE = "control-plane"
_BRIDGE = "br0"
_HOST_LINK = "neuron-serving"
_MACHINE_FOLDER = Path("/run/neuron-serving")
_MANIFESTS = Path(__file__).parent / "manifests"
# What made a cluster, and its files: one that was made by others is not repaired but made anew.
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
    """One answered request, as the API server logged it."""

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
    """An HTTP answer; the headers' names are in lower case."""

    status: int
    headers: dict[str, str]


@dataclass(frozen=True)
class DeviceHolding:
    """Device ids that the kubelet says a container holds."""

    namespace: str
    pod: str
    container: str
    resource: str
    ids: tuple[str, ...]


class Rig:
    """The cluster. `Rig.prepare()` gives one with its programs built; nothing runs until `up`."""

    def __init__(self, cache: Cache, folders: programs.Folders, topology: Topology = TOPOLOGY) -> None:
        self.cache = cache
        self.folders = folders
        self.topology = topology

    @classmethod
    def prepare(cls, *, say: Callable[[str], None] = print) -> Rig:
        """Builds or finds the programs.

        Raises:
            NotPossibleHere: this machine cannot hold the cluster; the message ends with the cure.
        """
        require_machine()
        cache = Cache.default()
        components = ensure(*CLUSTER_COMPONENTS, "helm", cache=cache, say=say)
        stubs = ensure_stubs(cache, components["hyper"])
        return cls(cache, programs.Folders(components, stubs, cache.root / "run"))

    # What tests and hands use.

    @property
    def kubeconfig(self) -> Path:
        return Path(self.folders.pki.kubeconfig("admin"))

    @property
    def environment(self) -> dict[str, str]:
        """Variables with which kubectl and helm, called by their names, talk to this cluster."""
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
            CommandFailed: kubectl said no, and `output` is what it said; or it did not end in time.
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
        """Creates it, and waits until it takes pods: they need its `default` ServiceAccount, which comes after it."""
        self.kubectl("create", "namespace", name)
        self.kubectl("--namespace", name, "wait", "--for=create", "serviceaccount/default", WAITING)

    def helm(self, *arguments: str, timeout_seconds: float = 2 * COMMAND_SECONDS) -> str:
        return self.command("helm", *arguments, timeout_seconds=timeout_seconds)

    def command(self, *command: str, stdin: str | None = None, timeout_seconds: float = COMMAND_SECONDS) -> str:
        """Runs any program of the host with `environment`."""
        environment = {**os.environ, **self.environment}
        return run(*command, stdin=stdin, environment=environment, timeout_seconds=timeout_seconds)

    def ask(self, path: str, user: str | None = None) -> Answer:
        """What the API server says to a GET, as the administrator or as `user`; no client repeats it."""
        with contextlib.closing(self.connect()) as connection:
            connection.request("GET", path, headers={} if user is None else {"Impersonate-User": user})
            response = connection.getresponse()
            return Answer(response.status, {name.lower(): value for name, value in response.getheaders()})

    def connect(self) -> http.client.HTTPSConnection:
        """A connection to the API server as the administrator."""
        pki, topology = self.folders.pki, self.topology
        context = ssl.create_default_context(cafile=pki.crt("ca"))
        context.load_cert_chain(pki.crt("admin"), pki.key("admin"))
        return http.client.HTTPSConnection(topology.api_address, topology.api_port, context=context, timeout=60)

    def load_image(self, path: Path, nodes: Sequence[str] | None = None) -> Archive:
        """Makes the image of an OCI archive known to running nodes (all of them by default); known ones take no time.

        Raises:
            ValueError: not an archive of one image.
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

        with ThreadPoolExecutor(2) as pool:  # unpacking is work for the processors
            list(pool.map(load, names))
        return archive

    def loaded_archives(self) -> list[Path]:
        """Archives of the images that nodes have beside the cluster's own, as far as the files still are there."""
        own = (programs.PAUSE_IMAGE, programs.COREDNS_IMAGE)
        archives = [archive for node in self.topology.nodes for archive in read_archives(self._images_file(node.name))]
        return sorted({a.path for a in archives if a.name not in own and a.path.exists()})

    def device_holdings(self, node: str) -> list[DeviceHolding]:
        """Who holds which devices on a node, from the kubelet's pod-resources service."""
        messages, services = import_stubs(self.folders.stubs, "podresources")
        pid = self.machine(node).init_pid
        if pid is None:
            raise StartFailed(f"node {node} is off")
        socket = f"/proc/{pid}/root/var/lib/kubelet/pod-resources/kubelet.sock"
        with grpc.insecure_channel(f"unix://{socket}") as channel:  # type: ignore[no-untyped-call]
            request = messages.ListPodResourcesRequest()
            # A kubelet that has just started may have said that it is ready before it serves this.
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
        """What others than the cluster's own programs asked of the API server, in order of answering."""
        events = []
        with self.folders.audit_log.open() as file:
            for line in file:
                if not line.endswith("\n"):  # being written
                    break
                event = json.loads(line)
                about = event.get("objectRef", {})
                events.append(
                    AuditEvent(
                        # A request whose credentials are no longer valid is nobody's.
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
                # Services must also work between pods of one node, whose packets only cross its bridge.
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
        """Whether everything runs that `up` starts; it says nothing about whether it is well."""
        return all(machine.is_running(program.name) for machine, program in self.everything())

    def everything(self) -> Iterator[tuple[Machine, programs.Program]]:
        """Everything that `up` starts, and where."""
        for program in self._control_programs():
            yield self.control_plane, program
        for node in self.topology.nodes:
            for program in (programs.containerd(node, self.folders), *programs.node_programs(node, self.folders)):
                yield self.machine(node.name), program

    def up(self, archives: Sequence[Path] = (), *, say: Callable[[str], None] = print) -> None:
        """Brings up whatever is not up, and returns when nodes, devices and DNS are ready.

        archives: OCI archives whose images the nodes shall have from the beginning.

        Raises:
            NotPossibleHere: a cluster of another cache folder is up.
            StartFailed: something did not come up; the message names its log.
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
        self._start_control_plane()
        progress("control plane started")
        new_nodes = [node for node in self.topology.nodes if not self._has_store(node)]
        if new_nodes:
            wanted = [*self._own_archives(), *archives]
            # When a run was killed here, some nodes may already use what is in the store.
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
            # Before the API server has made the roles it starts with, the controller manager gives up at once.
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

    def _specification(self) -> str:
        here = Path(__file__).parent
        parts = [here / name for name in _SPECIFIED_BY]
        running = [str(self.folders.components[name]) for name in CLUSTER_COMPONENTS]
        # What runs reads files of this working tree, and one part of it is run by this Python.
        return content_key(repr(self.topology), str(here), sys.executable, *running, *parts)

    def _claim_machine(self) -> None:
        """Writes down whose this machine's cluster is: groups, links and namespaces have the same names for all."""
        owner = _MACHINE_FOLDER / "state"
        other = owner.read_text() if owner.exists() else str(self.folders.state)
        if other != str(self.folders.state) and Group(ROOT_GROUP).processes():
            raise NotPossibleHere(f"a cluster with its state in {other} is up: run `make cluster-down` first")
        _MACHINE_FOLDER.mkdir(exist_ok=True)
        owner.write_text(str(self.folders.state))

    def _control_programs(self) -> list[programs.Program]:
        """In the order in which they are started."""
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
        # The node's own programs need some route before kube-proxy's rules can catch a service's address. A pod's
        # packet that no rule caught is refused at once; it would wait for an answer that cannot come.
        machine.ip("route", "add", self.topology.service_cidr, "dev", machine.link)
        # Nor may pods ask the host, whose answers would leave it by its own default route.
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
        """Turns a node on, or starts what does not run on it; returns when it says that it is ready."""
        node = self.topology.node(name)
        since = datetime.now(UTC)
        self._start_containerd(node)
        self._start_node_programs(node)
        self.wait_for_nodes(name, since=since)

    def _make_mount_points(self, machine: Machine) -> None:
        """The folders of the host that a node's own are mounted over; `down` removes those that were not there."""
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
        """Waits until nodes (all by default) are ready, and the API counts the devices that are healthy.

        since: what the kubelets reported before then does not count.
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
        """The two images without which there are no pods and no names."""
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
        """Ends whatever there is of a cluster on this machine, and leaves nothing."""
        with machine_lock(say):
            self._down()

    def _down(self) -> None:
        take_down(self.folders.state)


def take_down(state: Path) -> None:
    """Ends every process of the cluster of this machine, removes its links, namespaces, groups, mounts and state.

    Needs none of the programs, so that it works for a cluster whose cache is gone.

    Raises:
        TimeoutError: something cannot be ended.
    """
    group = Group(ROOT_GROUP)
    group.kill()
    remove_store_builder()
    # Before the namespace of its other end, which would take it along at a moment of the kernel's choice.
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
            with contextlib.suppress(OSError):  # somebody put something there meanwhile: then it is theirs
                Path(line).rmdir()
        if folder.exists():
            shutil.rmtree(folder)
    if _MACHINE_FOLDER.exists():
        shutil.rmtree(_MACHINE_FOLDER)


def machine_lock(say: Callable[[str], None] = print) -> contextlib.AbstractContextManager[None]:
    """Held while a cluster is brought up or taken down on this machine, whatever its cache folder."""
    return _lock("cluster", lambda: say("waiting: another run is bringing the cluster up or down"))


def tests_lock(when_taken: Callable[[], None]) -> contextlib.AbstractContextManager[None]:
    """Held by a run of tests, which break the cluster on purpose, while it uses the cluster.

    `when_taken` is called when another run holds it; if that returns, the lock is waited for.
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
