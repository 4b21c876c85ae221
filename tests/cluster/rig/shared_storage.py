"""Storage that pods of every node read and write at the same time, like a network file system of a cloud: one file
system in memory, mounted before the nodes start, with a folder per volume. Tests make volumes of it and fill it."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster.rig.commands import run
from cluster.rig.rig import Rig

STORAGE_CLASS = "shared"
"""The storage class of the volumes. No object of this name exists, because nothing provisions them."""


@dataclass(frozen=True)
class Volume:
    name: str
    folder: Path
    """Its contents, on the host."""


@contextlib.contextmanager
def shared_volume(rig: Rig, namespace: str, claim: str) -> Iterator[Volume]:
    """A volume for the claim of this name, which may exist already; it and its contents are removed on leaving."""
    volume = Volume(f"{namespace}-{claim}", rig.folders.shared / namespace / claim)
    volume.folder.mkdir(parents=True)
    volume.folder.chmod(0o777)  # volumes of this type know no fsGroup
    rig.apply(_manifest(volume, namespace, claim))
    try:
        yield volume
    finally:
        rig.kubectl("delete", "persistentvolume", volume.name, "--wait=false")
        shutil.rmtree(volume.folder)


@contextlib.contextmanager
def storage_full(rig: Rig, spare_bytes: int) -> Iterator[None]:
    """All volumes together have room for `spare_bytes` more."""
    status = os.statvfs(rig.folders.shared)
    used = (status.f_blocks - status.f_bfree) * status.f_frsize
    _resize(rig, used + spare_bytes)
    try:
        yield
    finally:
        _resize(rig, status.f_blocks * status.f_frsize)


def _resize(rig: Rig, num_bytes: int) -> None:
    run("mount", "-o", f"remount,size={num_bytes}", str(rig.folders.shared))


def _manifest(volume: Volume, namespace: str, claim: str) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolume",
        "metadata": {"name": volume.name},
        "spec": {
            "capacity": {"storage": "1Ti"},
            "accessModes": ["ReadWriteMany"],
            "persistentVolumeReclaimPolicy": "Retain",
            "storageClassName": STORAGE_CLASS,
            "claimRef": {"namespace": namespace, "name": claim},
            "hostPath": {"path": str(volume.folder), "type": "Directory"},
        },
    }
