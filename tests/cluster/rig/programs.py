"""Command lines and configuration files of every program of the cluster, from the topology and the folders; the
only I/O is writing those files. `Rig` starts the programs in order."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cluster.rig.cgroups import Group
from cluster.rig.needs import search_path
from cluster.rig.pki import Pki
from cluster.rig.topology import Node, Topology

_RIG = Path(__file__).parent
_TESTS = _RIG.parent.parent
CONTAINERD_SOCKET = "/run/containerd/containerd.sock"
PAUSE_IMAGE = "localhost/pause:1"
COREDNS_IMAGE = "localhost/coredns:1"
DEVICE_FOLDER = "/run/neuron-devices"


@dataclass(frozen=True)
class Program:
    name: str
    command: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Folders:
    """Folders of built programs by component, of stubs, certificates and the state of the running cluster."""

    components: Mapping[str, Path]
    stubs: Path
    state: Path

    @property
    def pki(self) -> Pki:
        return Pki(self.state / "pki")

    @property
    def audit_log(self) -> Path:
        return self.state / "audit.log"

    @property
    def shared(self) -> Path:
        """A file system that all nodes see: `shared_storage`."""
        return self.state / "shared"

    def machine(self, name: str) -> Path:
        return self.state / name

    def kubernetes(self, program: str) -> str:
        return str(self.components["hyper"] / program)

    def containerd(self, program: str) -> str:
        return str(self.components["containerd"] / program)

    def unhealthy_file(self, node: Node) -> Path:
        return self.machine(node.name) / "unhealthy-devices"

    def visible_file(self, node: Node) -> Path:
        return self.machine(node.name) / "visible-cores"


def _flags(options: Mapping[str, object]) -> tuple[str, ...]:
    return tuple(
        f"--{name}={str(value).lower() if isinstance(value, bool) else value}" for name, value in options.items()
    )


def etcd(folders: Folders) -> Program:
    client, peer = "http://127.0.0.1:2379", "http://127.0.0.1:2380"
    options = {
        "data-dir": folders.state / "etcd",
        "listen-client-urls": client,
        "advertise-client-urls": client,
        "listen-peer-urls": peer,
        "unsafe-no-fsync": True,  # the data must survive processes, not a power loss
        "log-level": "warn",
    }
    return Program("etcd", (str(folders.components["etcd"] / "etcd"), *_flags(options)))


def api_server(topology: Topology, folders: Folders) -> Program:
    pki = folders.pki
    options = {
        "etcd-servers": "http://127.0.0.1:2379",
        "bind-address": topology.api_address,
        "advertise-address": topology.api_address,
        "secure-port": topology.api_port,
        "service-cluster-ip-range": topology.service_cidr,
        "authorization-mode": "Node,RBAC",
        "enable-admission-plugins": "NodeRestriction",
        "allow-privileged": True,
        "client-ca-file": pki.crt("ca"),
        "tls-cert-file": pki.crt("api-server"),
        "tls-private-key-file": pki.key("api-server"),
        "kubelet-certificate-authority": pki.crt("ca"),
        "kubelet-client-certificate": pki.crt("kubelet-client"),
        "kubelet-client-key": pki.key("kubelet-client"),
        "kubelet-preferred-address-types": "InternalIP",
        "service-account-issuer": "https://kubernetes.default.svc.cluster.local",
        "service-account-key-file": pki.folder / "service-accounts.pub",
        "service-account-signing-key-file": pki.key("service-accounts"),
        "requestheader-client-ca-file": pki.crt("front-proxy-ca"),
        "requestheader-allowed-names": "front-proxy-client",
        "requestheader-username-headers": "X-Remote-User",
        "requestheader-group-headers": "X-Remote-Group",
        "requestheader-extra-headers-prefix": "X-Remote-Extra-",
        "proxy-client-cert-file": pki.crt("front-proxy-client"),
        "proxy-client-key-file": pki.key("front-proxy-client"),
        "enable-aggregator-routing": True,  # no kube-proxy on its machine: webhooks are called at pod addresses
        "audit-policy-file": _RIG / "manifests" / "audit-policy.yaml",
        "audit-log-path": folders.audit_log,
        "audit-log-maxsize": 1000,  # MB; a test reads one file
        "default-not-ready-toleration-seconds": topology.times.toleration_seconds,
        "default-unreachable-toleration-seconds": topology.times.toleration_seconds,
    }
    return Program("kube-apiserver", (folders.kubernetes("kube-apiserver"), *_flags(options)))


def controller_manager(topology: Topology, folders: Folders) -> Program:
    pki = folders.pki
    options = {
        **_clients(pki, "controller-manager"),
        "bind-address": "127.0.0.1",
        "leader-elect": False,
        "use-service-account-credentials": True,
        "kube-api-qps": 500,  # with the default, controllers start four seconds late
        "kube-api-burst": 1000,
        "root-ca-file": pki.crt("ca"),
        "service-account-private-key-file": pki.key("service-accounts"),
        "cluster-signing-cert-file": pki.crt("ca"),
        "cluster-signing-key-file": pki.key("ca"),
        "node-monitor-period": topology.times.node_monitor_period,
        "node-monitor-grace-period": topology.times.node_monitor_grace_period,
        "horizontal-pod-autoscaler-sync-period": topology.times.autoscaler_sync_period,
    }
    return Program("kube-controller-manager", (folders.kubernetes("kube-controller-manager"), *_flags(options)))


def scheduler(folders: Folders) -> Program:
    options = {**_clients(folders.pki, "scheduler"), "bind-address": "127.0.0.1", "leader-elect": False}
    return Program("kube-scheduler", (folders.kubernetes("kube-scheduler"), *_flags(options)))


def _clients(pki: Pki, name: str) -> dict[str, object]:
    return dict.fromkeys(("kubeconfig", "authentication-kubeconfig", "authorization-kubeconfig"), pki.kubeconfig(name))


def containerd(node: Node, folders: Folders) -> Program:
    """Its configuration puts the node's shims into a separate group: they outlive a killed containerd."""
    config = folders.machine(node.name) / "containerd.toml"
    program = folders.containerd("containerd")
    environment = {"PATH": f"{folders.components['containerd']}:{search_path()}"}
    return Program("containerd", (program, "--config", str(config), "--log-level", "warn"), environment)


def kubelet(node: Node, folders: Folders) -> Program:
    options = {
        "config": folders.machine(node.name) / "kubelet.json",
        "kubeconfig": folders.pki.kubeconfig(f"kubelet-{node.name}"),
        "hostname-override": node.name,
        "node-ip": node.address,
        "node-labels": ",".join(f"{key}={value}" for key, value in node.labels.items()),
        "v": 1,
    }
    return Program("kubelet", (folders.kubernetes("kubelet"), *_flags(options)))


def kube_proxy(node: Node, folders: Folders) -> Program:
    config = folders.machine(node.name) / "kube-proxy.json"
    return Program("kube-proxy", (folders.kubernetes("kube-proxy"), f"--config={config}"))


def device_plugin(node: Node, folders: Folders) -> Program:
    """Raises:
    ValueError: the node has no Neuron devices.
    """
    if node.neuron is None:
        raise ValueError(f"node {node.name} has no Neuron devices")
    options = {
        "num-devices": node.neuron.num_devices,
        "cores-per-device": node.neuron.cores_per_device,
        "unhealthy-file": folders.unhealthy_file(node),
        "visible-file": folders.visible_file(node),
        "device-folder": DEVICE_FOLDER,
        "stubs": folders.stubs,
    }
    command = (sys.executable, "-m", "cluster.rig.device_plugin", *_flags(options))
    return Program("device-plugin", command, {"PYTHONPATH": str(_TESTS)})


def node_programs(node: Node, folders: Folders) -> list[Program]:
    """Programs of a node besides containerd, which must respond before the kubelet starts."""
    programs = [kubelet(node, folders), kube_proxy(node, folders)]
    return [*programs, device_plugin(node, folders)] if node.neuron else programs


def write_node_files(topology: Topology, node: Node, folders: Folders, group: Group) -> None:
    folder = folders.machine(node.name)
    (folder / "cni").mkdir(parents=True, exist_ok=True)
    files = {
        "cni/10-rig.conflist": json.dumps(_cni(node)),
        "kubelet.json": json.dumps(_kubelet_configuration(topology, node, folders.pki, group)),
        "kube-proxy.json": json.dumps(_kube_proxy_configuration(topology, node, folders.pki)),
        "containerd.toml": _containerd_configuration(group),
    }
    for name, text in files.items():
        file = folder / name
        if not file.exists() or file.read_text() != text:  # kube-proxy exits whenever its file is written
            file.write_text(text)


def _cni(node: Node) -> dict[str, Any]:
    bridge = {
        "type": "bridge",
        "bridge": "cni0",
        "isGateway": True,
        "ipMasq": False,
        "hairpinMode": True,
        "ipam": {
            "type": "host-local",
            "ranges": [[{"subnet": node.pod_cidr}]],
            "routes": [{"dst": "0.0.0.0/0"}],
        },
    }
    port_map = {"type": "portmap", "capabilities": {"portMappings": True}, "snat": True}
    return {"cniVersion": "1.0.0", "name": "rig", "plugins": [bridge, port_map]}


def _kubelet_configuration(topology: Topology, node: Node, pki: Pki, group: Group) -> dict[str, Any]:
    times = topology.times
    return {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "authentication": {
            "anonymous": {"enabled": False},
            "webhook": {"enabled": True},
            "x509": {"clientCAFile": pki.crt("ca")},
        },
        "authorization": {"mode": "Webhook"},
        "tlsCertFile": pki.crt(f"kubelet-{node.name}"),
        "tlsPrivateKeyFile": pki.key(f"kubelet-{node.name}"),
        "clusterDNS": [topology.dns_address],
        "clusterDomain": "cluster.local",
        "resolvConf": "",
        "containerRuntimeEndpoint": f"unix://{CONTAINERD_SOCKET}",
        "cgroupDriver": "cgroupfs",
        "cgroupRoot": f"/{group.path}",
        "failCgroupV1": False,
        "failSwapOn": False,
        "nodeStatusUpdateFrequency": times.node_status_frequency,
        "nodeStatusReportFrequency": times.node_status_report_frequency,
        "nodeLeaseDurationSeconds": times.node_lease_duration_seconds,
        # The disk belongs to the host, so the kubelet must not collect images on it.
        "imageGCHighThresholdPercent": 100,
        "imageGCLowThresholdPercent": 99,
        "evictionHard": {
            "memory.available": "200Mi",
            "nodefs.available": "1%",
            "imagefs.available": "1%",
            "nodefs.inodesFree": "1%",
        },
        "oomScoreAdj": 0,
        "serializeImagePulls": False,
        "shutdownGracePeriod": "0s",
    }


def _kube_proxy_configuration(topology: Topology, node: Node, pki: Pki) -> dict[str, Any]:
    return {
        "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
        "kind": "KubeProxyConfiguration",
        "clientConnection": {"kubeconfig": pki.kubeconfig("kube-proxy")},
        "mode": "iptables",
        "clusterCIDR": topology.pod_cidr,
        "detectLocalMode": "ClusterCIDR",
        "hostnameOverride": node.name,
        "oomScoreAdj": 0,
        # The connection tracking table belongs to the host: do not resize it.
        "conntrack": {"maxPerCore": 0, "tcpEstablishedTimeout": "0s", "tcpCloseWaitTimeout": "0s"},
        "iptables": {"minSyncPeriod": "0s", "syncPeriod": "30s"},
    }


def _containerd_configuration(group: Group) -> str:
    return f"""\
version = 3
root = "/var/lib/containerd"
state = "/run/containerd"
disabled_plugins = ["io.containerd.nri.v1.nri", "io.containerd.tracing.processor.v1.otlp",
  "io.containerd.internal.v1.tracing"]
[grpc]
  address = "{CONTAINERD_SOCKET}"
[plugins."io.containerd.cri.v1.images"]
  snapshotter = "overlayfs"
[plugins."io.containerd.cri.v1.images".pinned_images]
  sandbox = "{PAUSE_IMAGE}"
[plugins."io.containerd.cri.v1.runtime"]
  # A process may not raise its importance to the OOM killer without CAP_SYS_RESOURCE.
  restrict_oom_score_adj = true
[plugins."io.containerd.cri.v1.runtime".containerd]
  default_runtime_name = "runc"
[plugins."io.containerd.cri.v1.runtime".containerd.runtimes.runc]
  runtime_type = "io.containerd.runc.v2"
[plugins."io.containerd.cri.v1.runtime".containerd.runtimes.runc.options]
  SystemdCgroup = false
  ShimCgroup = "/{(group / "system" / "shims").path}"
[plugins."io.containerd.cri.v1.runtime".cni]
  bin_dirs = ["/usr/lib/cni"]
  conf_dir = "/etc/cni/net.d"
"""
