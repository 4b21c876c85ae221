"""Nodes that give their devices by claims (DRA) instead of the device plugin, for a while: a driver that prepares them,
and the slices and the class that AWS's driver would bring.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cluster.rig import programs
from cluster.rig.binaries import ensure
from cluster.rig.claim_plugin import DRIVER
from cluster.rig.machine import wait_until
from cluster.rig.neuron_devices import DEVICE_RESOURCE
from cluster.rig.rig import Rig
from cluster.rig.stubs import CLAIM_PROTOCOLS, ensure_stubs

_PROGRAM = "claim-plugin"
SETS = (4, 8, 16)
"""Numbers of devices of which the driver says that they are connected."""


def device_class() -> dict[str, Any]:
    selectors = [{"cel": {"expression": f"device.driver == '{DRIVER}'"}}]
    metadata = {"name": DRIVER}
    return {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "DeviceClass",
        "metadata": metadata,
        "spec": {"selectors": selectors},
    }


def slice_of(node: str, num_devices: int, instance_type: str) -> dict[str, Any]:
    """What AWS's driver writes about a node with EFA."""
    devices = [
        {
            "name": f"neurondevice{number}",
            "attributes": {
                "deviceId": {"int": number},
                "resourceType": {"string": "neuron_device"},
                "instanceType": {"string": instance_type},
                **{
                    f"resource.aws.com/devicegroup{size}_id": {"string": f"{node}-{size}-{number // size}"}
                    for size in SETS
                },
            },
        }
        for number in range(num_devices)
    ]
    pool = {"name": node, "generation": 1, "resourceSliceCount": 1}
    spec = {"driver": DRIVER, "nodeName": node, "pool": pool, "devices": devices}
    metadata = {"name": f"{node}-{DRIVER}"}
    return {"apiVersion": "resource.k8s.io/v1", "kind": "ResourceSlice", "metadata": metadata, "spec": spec}


@contextlib.contextmanager
def devices_by_claim(rig: Rig, name: str, instance_type: str) -> Iterator[None]:
    """Entering returns when the kubelet knows the driver and no longer counts devices, leaving when it does again."""
    node, machine = rig.topology.node(name), rig.machine(name)
    assert node.neuron is not None
    stubs = ensure_stubs(rig.cache, ensure("kubelet-protocols", cache=rig.cache)["kubelet-protocols"], CLAIM_PROTOCOLS)
    options = {
        "device-folder": programs.DEVICE_FOLDER,
        "kubectl": rig.folders.kubernetes("kubectl"),
        "kubeconfig": rig.folders.pki.kubeconfig(f"kubelet-{name}"),
        "stubs": stubs,
    }
    command = (
        sys.executable,
        "-m",
        "cluster.rig.claim_plugin",
        *(f"--{key}={value}" for key, value in options.items()),
    )
    offered = slice_of(name, node.neuron.num_devices, instance_type)
    machine.stop("device-plugin")
    try:
        machine.start(_PROGRAM, command, {"PYTHONPATH": str(Path(__file__).parents[2])})
        wait_until("the kubelet knows the driver", lambda: "registered: True" in machine.log(_PROGRAM).read_text())
        for made in (device_class(), offered):
            rig.kubectl("apply", "--server-side", "-f", "-", stdin=json.dumps(made))
        wait_until("the node has no devices of the plugin", lambda: _num_granted(rig, name) == 0)
        yield
    finally:
        for made in (offered, device_class()):
            rig.kubectl("delete", "--ignore-not-found", made["kind"].lower(), made["metadata"]["name"])
        machine.stop(_PROGRAM)
        rig.start_node(name)


def _num_granted(rig: Rig, node: str) -> int:
    return int(rig.get("node", node)["status"]["allocatable"].get(DEVICE_RESOURCE, 0))
