"""A DRA driver without hardware, for the kubelet's real protocols (plugin registration v1, DRA v1).

One process per node prepares the devices that the scheduler has given to claims: it writes a CDI specification, from
which containerd adds them to containers. In a container they are numbered from 0, as with the device plugin.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from concurrent import futures
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from cluster.rig.stubs import import_stubs

DRIVER = "neuron.aws.com"
# The kubelet's own constants, whatever its --root-dir.
REGISTRY = Path("/var/lib/kubelet/plugins_registry")
SOCKET = Path("/var/lib/kubelet/plugins") / DRIVER / "dra.sock"
CDI_FOLDER = Path("/var/run/cdi")
CDI_KIND = f"{DRIVER}/claim"


@dataclass(frozen=True)
class Registration:
    """What the kubelet asks of a socket that appears in its folder for plugins."""

    messages: Any

    def GetInfo(self, request: Any, context: Any) -> Any:
        return self.messages.PluginInfo(
            type="DRAPlugin", name=DRIVER, endpoint=str(SOCKET), supported_versions=["v1.DRAPlugin"]
        )

    def NotifyRegistrationStatus(self, request: Any, context: Any) -> Any:
        print(f"registered: {request.plugin_registered} {request.error}", flush=True)
        return self.messages.RegistrationStatusResponse()


@dataclass(frozen=True)
class Driver:
    """The service that the kubelet calls before the first container of a pod with claims, and after the last."""

    messages: Any
    device_folder: Path
    kubectl: tuple[str, ...]

    def NodePrepareResources(self, request: Any, context: Any) -> Any:
        response = self.messages.NodePrepareResourcesResponse()
        for claim in request.claims:
            try:
                devices = self._prepare(claim)
            except (subprocess.CalledProcessError, KeyError, OSError) as error:
                response.claims[claim.uid].error = f"{type(error).__name__}: {error}"
                continue
            response.claims[claim.uid].devices.extend(devices)
        return response

    def _prepare(self, claim: Any) -> list[Any]:
        words = ("get", "resourceclaim", "--namespace", claim.namespace, claim.name, "--output=json")
        found = json.loads(subprocess.run([*self.kubectl, *words], check=True, capture_output=True, text=True).stdout)
        results = [one for one in found["status"]["allocation"]["devices"]["results"] if one["driver"] == DRIVER]
        minors = sorted(int(one["device"].removeprefix("neurondevice")) for one in results)
        nodes = [
            {
                "path": f"/dev/neuron{number}",
                "hostPath": str(self.device_folder / f"neuron{minor}"),
                "permissions": "rw",
            }
            for number, minor in enumerate(minors)
        ]
        specification = {
            "cdiVersion": "0.6.0",
            "kind": CDI_KIND,
            "devices": [{"name": claim.uid, "containerEdits": {"deviceNodes": nodes}}],
        }
        CDI_FOLDER.mkdir(parents=True, exist_ok=True)
        _file_of(claim.uid).write_text(json.dumps(specification))
        print(f"prepared {claim.namespace}/{claim.name}: {minors}", flush=True)
        # All devices of the claim are one of CDI, which the first of them names.
        return [
            self.messages.Device(
                request_names=[one["request"]],
                pool_name=one["pool"],
                device_name=one["device"],
                cdi_device_ids=[f"{CDI_KIND}={claim.uid}"] if number == 0 else [],
            )
            for number, one in enumerate(results)
        ]

    def NodeUnprepareResources(self, request: Any, context: Any) -> Any:
        response = self.messages.NodeUnprepareResourcesResponse()
        for claim in request.claims:
            _file_of(claim.uid).unlink(missing_ok=True)
            response.claims[claim.uid].error = ""
            print(f"freed {claim.namespace}/{claim.name}", flush=True)
        return response


def _file_of(claim: str) -> Path:
    return CDI_FOLDER / f"{DRIVER}-{claim}.json"


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="claim_plugin", description=__doc__)
    parser.add_argument("--device-folder", type=Path, required=True)
    parser.add_argument("--kubectl", required=True)
    parser.add_argument("--kubeconfig", type=Path, required=True)
    parser.add_argument("--stubs", type=Path, required=True)
    chosen = parser.parse_args(arguments)
    registration, of_registration = import_stubs(chosen.stubs, "pluginregistration")
    dra, of_dra = import_stubs(chosen.stubs, "dra")
    server = grpc.server(futures.ThreadPoolExecutor(8))  # type: ignore[no-untyped-call]
    kubectl = (chosen.kubectl, f"--kubeconfig={chosen.kubeconfig}")
    of_dra.add_DRAPluginServicer_to_server(Driver(dra, chosen.device_folder, kubectl), server)
    of_registration.add_RegistrationServicer_to_server(Registration(registration), server)
    for socket in (SOCKET, REGISTRY / f"{DRIVER}-reg.sock"):  # the second one is seen once both are served
        socket.parent.mkdir(parents=True, exist_ok=True)
        socket.unlink(missing_ok=True)
        server.add_insecure_port(f"unix://{socket}")
    server.start()
    while True:
        time.sleep(3600)


if __name__ == "__main__":
    main(sys.argv[1:])
