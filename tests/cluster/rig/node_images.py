"""Images on the cluster's nodes: what an archive holds, archives of single programs, and the stores nodes start from.

Images that are known when the cluster comes up are unpacked once, by a containerd of our own, into a store in the
cache; a node's store is that one with hard links, which is sound because containerd never writes into a blob or a
snapshot that is complete. Images that come later are imported by each node's containerd (`Rig.load_image`)."""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
import tarfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster.rig.cache import Cache, content_key
from cluster.rig.cgroups import ROOT_GROUP, Group
from cluster.rig.commands import CommandFailed, run
from cluster.rig.machine import wait_until
from cluster.rig.needs import search_path

_NAME_ANNOTATION = "io.containerd.image.name"
_OCI = "application/vnd.oci.image"
_NAMESPACE = "k8s.io"  # of containerd, for what the kubelet sees
_LABEL = "io.cri-containerd.image=managed"
_BUILDER_GROUP = Group(f"{ROOT_GROUP}-image-store")
_CONTAINERD = """\
version = 3
root = "{folder}/root"
state = "{folder}/state"
disabled_plugins = ["io.containerd.grpc.v1.cri", "io.containerd.cri.v1.images",
  "io.containerd.cri.v1.runtime", "io.containerd.nri.v1.nri"]
[grpc]
  address = "{folder}/state/s"
"""


@dataclass(frozen=True)
class Archive:
    """An OCI archive with one image.

    Attributes:
        name: the full reference that pods use.
        digest: of the manifest.
        config_digest: of the configuration, which the kubelet takes as the image's id.
    """

    path: Path
    name: str
    digest: str
    config_digest: str


def read_archive(path: Path) -> Archive:
    """Raises:
    ValueError: not an OCI archive, or not with exactly one named image for one platform in it.
    FileNotFoundError: no such file.
    """
    try:
        with tarfile.open(path) as archive:
            manifests = _read_json(archive, "index.json")["manifests"]
            if len(manifests) != 1:
                raise ValueError(f"{path}: {len(manifests)} images in one archive, 1 is supported")
            name = manifests[0].get("annotations", {}).get(_NAME_ANNOTATION)
            if not name:
                raise ValueError(f"{path}: the image has no name (annotation {_NAME_ANNOTATION})")
            digest = manifests[0]["digest"]
            manifest = _read_json(archive, _blob_path(digest))
            if "config" not in manifest:
                raise ValueError(f"{path}: an index of platforms; build it for one, without attestations")
            return Archive(path, name, digest, manifest["config"]["digest"])
    except (tarfile.TarError, KeyError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} is not an OCI archive: {error}") from error


def write_program_archive(path: Path, name: str, program: Path) -> None:
    """Writes an OCI archive of an image with nothing in it but `program`, which it runs.

    The same program and name give the same bytes.
    """
    layer = _tar({program.name: program.read_bytes()})
    configuration = {
        "architecture": "amd64",
        "os": "linux",
        "config": {"Entrypoint": [f"/{program.name}"]},
        "rootfs": {"type": "layers", "diff_ids": [_digest(layer)]},
    }
    config_blob = json.dumps(configuration).encode()
    manifest = {
        "schemaVersion": 2,
        "mediaType": f"{_OCI}.manifest.v1+json",
        "config": _descriptor(f"{_OCI}.config.v1+json", config_blob),
        "layers": [_descriptor(f"{_OCI}.layer.v1.tar", layer)],
    }
    manifest_blob = json.dumps(manifest).encode()
    reference = _descriptor(f"{_OCI}.manifest.v1+json", manifest_blob) | {"annotations": {_NAME_ANNOTATION: name}}
    files = {
        "oci-layout": b'{"imageLayoutVersion":"1.0.0"}',
        "index.json": json.dumps({"schemaVersion": 2, "manifests": [reference]}).encode(),
    }
    path.write_bytes(_tar(files | {_blob_path(_digest(blob)): blob for blob in (layer, config_blob, manifest_blob)}))


def ensure_store(
    cache: Cache, archives: Sequence[Archive], containerd_folder: Path, say: Callable[[str], None] = print
) -> Path:
    """The root folder, in the cache, of a containerd that holds `archives`: unpacked once for each set of images."""
    key = content_key(containerd_folder.name, *sorted(f"{a.name} {a.digest}" for a in archives))

    def build(folder: Path) -> None:
        say(f"unpacking {len(archives)} images for the nodes")
        _build_store(folder, archives, containerd_folder)

    return cache.entry("image-store", "nodes", key, build, max_entries=2) / "root"


def link_store(store: Path, target: Path) -> None:
    """Makes `target` a copy of `store` that shares its files, but for databases, which containerd writes in place."""
    if target.exists():
        shutil.rmtree(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    run("cp", "-al", str(store), str(target))
    for database in store.rglob("*.db"):
        copy = target / database.relative_to(store)
        copy.unlink()
        shutil.copy2(database, copy)


def import_commands(archive: Archive, *ctr: str) -> Iterator[tuple[str, ...]]:
    """What makes a running containerd hold the archive, with the names and labels by which the kubelet knows it.

    The kubelet's side of containerd adds the latter to what it pulls itself; without them removal by id fails, and so
    do volumes of images.
    """
    images = (*ctr, "--namespace", _NAMESPACE, "images")
    by_id = archive.config_digest
    yield (*images, "import", "--local", str(archive.path))
    yield (*images, "tag", "--force", "--local", archive.name, by_id)
    for name in (archive.name, by_id):
        yield (*images, "label", name, _LABEL)


def remove_store_builder() -> None:
    """Ends the containerd that unpacks images, if one is left."""
    _BUILDER_GROUP.kill()
    _BUILDER_GROUP.remove()


def _build_store(folder: Path, archives: Sequence[Archive], containerd_folder: Path) -> None:
    (folder / "state").mkdir()
    config = folder / "state" / "containerd.toml"
    config.write_text(_CONTAINERD.format(folder=folder))
    remove_store_builder()  # of a run that was killed: the caller holds the store's lock
    group = _BUILDER_GROUP
    group.make()
    joins = [f"echo $$ > {f / 'cgroup.procs'}" for f in group.folders()]
    # In a mount namespace of its own, so that nothing stays mounted when this run is killed.
    launch = f'unshare --mount setsid "$@" >{folder}/state/log 2>&1 </dev/null &'
    program = (str(containerd_folder / "containerd"), "--config", str(config), "--log-level", "error")
    ctr = (str(containerd_folder / "ctr"), "--address", f"{folder}/state/s")
    try:
        environment = {**os.environ, "PATH": search_path()}
        run("sh", "-c", "\n".join(["set -e", *joins, launch]), "sh", *program, environment=environment)
        wait_until("the containerd that unpacks images answers", 20, lambda: _succeeds(*ctr, "version"))
        for archive in archives:
            for command in import_commands(archive, *ctr):
                run(*command, timeout_seconds=600)
    finally:
        remove_store_builder()
    shutil.rmtree(folder / "state")


def _succeeds(*command: str) -> bool:
    try:
        run(*command, timeout_seconds=5)
    except CommandFailed:
        return False
    return True


def _tar(files: Mapping[str, bytes]) -> bytes:
    output = io.BytesIO()
    with tarfile.open(fileobj=output, mode="w") as tar:
        for name, data in files.items():
            entry = tarfile.TarInfo(name)
            entry.mode = 0o755
            entry.size = len(data)
            tar.addfile(entry, io.BytesIO(data))
    return output.getvalue()


def _digest(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def _descriptor(media_type: str, data: bytes) -> dict[str, Any]:
    return {"mediaType": media_type, "digest": _digest(data), "size": len(data)}


def _blob_path(digest: str) -> str:
    return f"blobs/{digest.replace(':', '/')}"


def _read_json(archive: tarfile.TarFile, name: str) -> Any:
    member = archive.extractfile(name)
    if member is None:
        raise KeyError(name)
    return json.load(member)
