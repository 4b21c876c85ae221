"""A device plugin without hardware, for the kubelet's real protocol (v1beta1). One process per node serves both Neuron
resources; `neuron_devices` decides. A file lists the numbers of unhealthy devices, another one the only cores that
containers may use."""

from __future__ import annotations

import argparse
import os
import stat
import sys
import threading
import time
from collections.abc import Iterator
from concurrent import futures
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from cluster.rig.neuron_devices import (
    CORE_RESOURCE,
    DEVICE_RESOURCE,
    VISIBLE_CORES_VARIABLE,
    InvalidSize,
    allocate,
    resource_ids,
    unhealthy_ids,
)
from cluster.rig.stubs import import_stubs
from cluster.rig.topology import NeuronHardware

# The kubelet's own constant, whatever its --root-dir.
PLUGIN_FOLDER = Path("/var/lib/kubelet/device-plugins")
_KUBELET_SOCKET = PLUGIN_FOLDER / "kubelet.sock"
_POLL_SECONDS = 0.2

# Numbers reserved for local use; the kernel never assigns them to a driver. A free one has no driver: a container can
# stat the device and gets ENXIO when it opens it.
_LOCAL_MAJORS: tuple[int, ...] = (*range(120, 128), *range(60, 64))


def free_major(proc_devices: str) -> int:
    """A character device number without a driver, from the text of /proc/devices.

    Raises:
        ValueError: none is free.
    """
    characters = proc_devices.split("Block devices:", maxsplit=1)[0]
    taken = {int(line.split()[0]) for line in characters.splitlines() if line.strip() and line.split()[0].isdigit()}
    for major in _LOCAL_MAJORS:
        if major not in taken:
            return major
    raise ValueError(f"no character device number for local use is free: {_LOCAL_MAJORS} are taken")


def make_device_nodes(folder: Path, num_devices: int, major: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for minor in range(num_devices):
        path = folder / f"neuron{minor}"
        if not path.exists():
            os.mknod(path, stat.S_IFCHR | 0o666, os.makedev(major, minor))
            path.chmod(0o666)


def read_unhealthy(path: Path) -> frozenset[int]:
    """Device numbers in the file, one per line; no file means none. Other lines are logged and ignored."""
    try:
        words = path.read_text().split()
    except FileNotFoundError:
        return frozenset()
    for word in words:
        if not word.isdigit():
            _say(f"ignored in {path}: {word!r} is not a device number")
    return frozenset(int(word) for word in words if word.isdigit())


def _visible_cores(path: Path) -> dict[str, str]:
    """The variable with the cores that the file names; none without a file."""
    return {VISIBLE_CORES_VARIABLE: path.read_text().strip()} if path.exists() else {}


@dataclass(frozen=True)
class Plugin:
    """The service that the kubelet calls for one resource."""

    hardware: NeuronHardware
    resource: str
    device_folder: Path
    unhealthy_file: Path
    visible_file: Path
    messages: Any
    services: Any

    @property
    def socket(self) -> Path:
        return PLUGIN_FOLDER / f"{self.resource.rsplit('/', maxsplit=1)[1]}.sock"

    def GetDevicePluginOptions(self, request: Any, context: Any) -> Any:
        return self.messages.DevicePluginOptions()

    def ListAndWatch(self, request: Any, context: Any) -> Iterator[Any]:
        sent = None
        while context.is_active():
            unhealthy = unhealthy_ids(self.hardware, self.resource, read_unhealthy(self.unhealthy_file))
            if unhealthy != sent:
                states = {
                    i: "Unhealthy" if i in unhealthy else "Healthy" for i in resource_ids(self.hardware, self.resource)
                }
                devices = [self.messages.Device(ID=name, health=state) for name, state in states.items()]
                yield self.messages.ListAndWatchResponse(devices=devices)
                sent = unhealthy
            time.sleep(_POLL_SECONDS)

    def GetPreferredAllocation(self, request: Any, context: Any) -> Any:
        return context.abort(grpc.StatusCode.UNIMPLEMENTED, "the plugin has no preferences")

    def PreStartContainer(self, request: Any, context: Any) -> Any:
        return self.messages.PreStartContainerResponse()

    def Allocate(self, request: Any, context: Any) -> Any:
        response = self.messages.AllocateResponse()
        for container in request.container_requests:
            ids = sorted(container.devices_ids)
            try:
                allocation = allocate(self.hardware, self.resource, ids)
            except InvalidSize as error:
                _say(f"refused {self.resource} {ids}: {error}")
                context.abort(grpc.StatusCode.UNKNOWN, str(error))
            environment = allocation.environment | _visible_cores(self.visible_file)
            _say(f"allocated {self.resource} {ids} with env {environment}")
            devices = [
                self.messages.DeviceSpec(
                    host_path=str(self.device_folder / f"neuron{device.minor}"),
                    container_path=device.container_path,
                    permissions="rw",
                )
                for device in allocation.devices
            ]
            response.container_responses.add(envs=environment, devices=devices)
        return response

    def serve_one_life(self) -> None:
        """Registers with the kubelet, serves, and returns when that kubelet has ended.

        Raises:
            OSError, grpc.RpcError: the kubelet is not running or not ready.
        """
        kubelet = _KUBELET_SOCKET.stat().st_ino
        self.socket.unlink(missing_ok=True)
        server = grpc.server(futures.ThreadPoolExecutor(8))  # type: ignore[no-untyped-call]
        self.services.add_DevicePluginServicer_to_server(self, server)
        server.add_insecure_port(f"unix://{self.socket}")
        server.start()
        try:
            with grpc.insecure_channel(f"unix://{_KUBELET_SOCKET}") as channel:  # type: ignore[no-untyped-call]
                request = self.messages.RegisterRequest(
                    version="v1beta1", endpoint=self.socket.name, resource_name=self.resource
                )
                self.services.RegistrationStub(channel).Register(request, timeout=5)
            _say(f"registered {self.resource}")
            # A starting kubelet removes every socket in the folder and recreates its own.
            while self.socket.exists() and _KUBELET_SOCKET.stat().st_ino == kubelet:
                time.sleep(_POLL_SECONDS)
        finally:
            server.stop(0).wait()

    def serve_for_ever(self) -> None:
        while True:
            try:
                self.serve_one_life()
            except (OSError, grpc.RpcError) as error:
                _say(f"{self.resource}: no kubelet to register with: {type(error).__name__}")
            time.sleep(_POLL_SECONDS)


def _say(line: str) -> None:
    print(line, flush=True)


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="device_plugin", description=__doc__)
    parser.add_argument("--num-devices", type=int, required=True)
    parser.add_argument("--cores-per-device", type=int, required=True)
    parser.add_argument("--unhealthy-file", type=Path, required=True)
    parser.add_argument("--visible-file", type=Path, required=True)
    parser.add_argument("--device-folder", type=Path, required=True)
    parser.add_argument("--stubs", type=Path, required=True)
    chosen = parser.parse_args(arguments)
    hardware = NeuronHardware(chosen.num_devices, chosen.cores_per_device)
    major = free_major(Path("/proc/devices").read_text())
    make_device_nodes(chosen.device_folder, hardware.num_devices, major)
    messages, services = import_stubs(chosen.stubs, "deviceplugin")
    threads = [
        threading.Thread(
            target=Plugin(
                hardware,
                resource,
                chosen.device_folder,
                chosen.unhealthy_file,
                chosen.visible_file,
                messages,
                services,
            ).serve_for_ever
        )
        for resource in (DEVICE_RESOURCE, CORE_RESOURCE)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:  # grpc's pools cannot start threads once the main thread has ended
        thread.join()


if __name__ == "__main__":
    main(sys.argv[1:])
