"""The kubelet's gRPC protocols as Python modules, generated from the pinned Kubernetes sources into the cache."""

from __future__ import annotations

import importlib
import sys
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path
from types import ModuleType

from cluster.rig.cache import Cache, content_key

PROTOCOLS = ("deviceplugin", "podresources")
CLAIM_PROTOCOLS = ("dra", "pluginregistration")


def ensure_stubs(cache: Cache, kubernetes_folder: Path, protocols: tuple[str, ...] = PROTOCOLS) -> Path:
    """A folder with NAME_pb2 and NAME_pb2_grpc of each protocol.

    Raises:
        ValueError: protoc refuses a protocol file.
    """
    sources = [kubernetes_folder / f"{name}.proto" for name in protocols]
    key = content_key(version("grpcio-tools"), *sources)

    def build(folder: Path) -> None:
        from grpc_tools import protoc  # type: ignore[import-untyped]

        include = str(files("grpc_tools") / "_proto")
        options = (f"-I{kubernetes_folder}", f"-I{include}", f"--python_out={folder}", f"--grpc_python_out={folder}")
        if status := protoc.main(["protoc", *options, *map(str, sources)]):
            raise ValueError(f"protoc refused the kubelet's protocols with status {status}")

    return cache.entry("stubs", "-".join(protocols), key, build)


def import_stubs(folder: Path, name: str) -> tuple[ModuleType, ModuleType]:
    """The modules NAME_pb2 and NAME_pb2_grpc of a folder that `ensure_stubs` made."""
    if str(folder) not in sys.path:
        sys.path.append(str(folder))
    return importlib.import_module(f"{name}_pb2"), importlib.import_module(f"{name}_pb2_grpc")
