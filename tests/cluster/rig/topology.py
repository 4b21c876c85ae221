"""Machines, addresses and times of the cluster, as data."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class NeuronHardware:
    num_devices: int
    cores_per_device: int

    @property
    def num_cores(self) -> int:
        return self.num_devices * self.cores_per_device


@dataclass(frozen=True)
class Node:
    name: str
    address: str
    pod_network: str  # the first three bytes of a /24
    instance_type: str
    neuron: NeuronHardware | None = None

    @property
    def pod_cidr(self) -> str:
        return f"{self.pod_network}.0/24"

    @property
    def labels(self) -> dict[str, str]:
        """Labels that a cloud's kubelet and the plugin's chart would set."""
        labels = {"node.kubernetes.io/instance-type": self.instance_type}
        return labels | ({"neuron.amazonaws.com/present": "true"} if self.neuron else {})


@dataclass(frozen=True)
class Times:
    """Delays until a lost node is noticed: a fifth of Kubernetes' defaults, so that tests do not wait minutes, yet long
    enough that a machine that stalls for some seconds loses no node. And how often autoscalers decide.

    Attributes:
        node_lease_duration_seconds: a node renews its Lease in a quarter of it.
        node_status_frequency: until a changed status is reported.
        node_status_report_frequency: how often an unchanged one is, which takes four programs some milliseconds of CPU.
    """

    node_monitor_period: str = "1s"
    node_monitor_grace_period: str = "10s"
    node_lease_duration_seconds: int = 8
    node_status_frequency: str = "1s"
    node_status_report_frequency: str = "10s"
    toleration_seconds: int = 3
    autoscaler_sync_period: str = "2s"


@dataclass(frozen=True)
class Topology:
    # 198.18.0.0/15 is reserved for test networks (RFC 2544); it is the only network that the host gets a route to.
    host_address: str = "198.18.0.1"
    api_address: str = "198.18.0.10"
    api_port: int = 6443
    pod_cidr: str = "10.244.0.0/16"
    service_cidr: str = "10.96.0.0/16"
    kubernetes_service_address: str = "10.96.0.1"
    dns_address: str = "10.96.0.10"
    nodes: tuple[Node, ...] = ()
    times: Times = Times()

    @property
    def api_server(self) -> str:
        return f"https://{self.api_address}:{self.api_port}"

    def node(self, name: str) -> Node:
        """Raises:
        KeyError: no node of that name.
        """
        for node in self.nodes:
            if node.name == name:
                return node
        raise KeyError(f"no node {name}; there are {', '.join(n.name for n in self.nodes)}")


_INF2_24XLARGE = NeuronHardware(num_devices=6, cores_per_device=2)

TOPOLOGY = Topology(
    nodes=(
        Node("n1", "198.18.0.11", "10.244.1", "inf2.24xlarge", _INF2_24XLARGE),
        Node("n2", "198.18.0.12", "10.244.2", "inf2.24xlarge", _INF2_24XLARGE),
        Node("n3", "198.18.0.13", "10.244.3", "m7i.2xlarge"),
    )
)
