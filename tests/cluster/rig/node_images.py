"""Images on the cluster's nodes: reading archives, archives of single programs, and the initial stores of nodes.

Images known when the cluster starts are unpacked once, by a separate containerd, into a store in the cache. The stores
of nodes share its layers, which is safe because containerd never writes into a complete layer. Later images are
imported by each node's containerd (`Rig.load_image`)."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import shutil
import tarfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from cluster.rig.cache import Cache
from cluster.rig.cgroups import ROOT_GROUP, Group
from cluster.rig.commands import CommandFailed, run
from cluster.rig.machine import wait_until

_NAME_ANNOTATION = "io.containerd.image.name"
_OCI = "application/vnd.oci.image"
_NAMESPACE = "k8s.io"  # containerd's namespace for the kubelet
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
        config_digest: of the configuration, the image id for the kubelet.
    """

    path: Path = field(compare=False)
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


def read_archives(file: Path) -> list[Archive]:
    """Reads the file of `write_archives`."""
    return [Archive(**{**fields, "path": Path(fields["path"])}) for fields in json.loads(file.read_text())]


def write_archives(file: Path, archives: Sequence[Archive]) -> None:
    file.write_text(json.dumps([asdict(archive) for archive in archives], default=str))


def write_program_archive(path: Path, name: str, program: Path) -> None:
    """Writes an OCI archive of an image that contains and runs only `program`.

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
    cache: Cache,
    archives: Sequence[Archive],
    containerd_folder: Path,
    *,
    only: bool = True,
    say: Callable[[str], None] = print,
) -> Path:
    """The cached root folder of a containerd with `archives`, and with `only` without those of other versions.

    Other images stay as long as their archives do, for those who use them next. Images already in it and layers shared
    between images are not unpacked again.
    """
    root = cache.folder("image-store", "nodes")
    held_file, state = root / "held.json", root / "state"
    with cache.lock("image-store-nodes", on_wait=lambda: say("waiting: another run unpacks images")):
        held = [] if state.exists() or not held_file.exists() else read_archives(held_file)
        if state.exists():  # a run was killed while it changed the store
            remove_store_builder()
            shutil.rmtree(root)
        missing = [archive for archive in archives if archive not in held]
        names = {archive.name for archive in archives}
        excess = [one for one in held if only and one not in archives and (one.name in names or not one.path.exists())]
        if missing or excess:
            say(f"unpacking {len(missing)} images for the nodes")
            state.mkdir(parents=True)
            with _running_containerd(root, state, containerd_folder) as ctr:
                for archive in missing:
                    for command in import_commands(archive, *ctr):
                        run(*command, timeout_seconds=600)
                kept = [archive for archive in held if archive not in excess]
                _remove_images_but([*kept, *missing], *ctr)
            write_archives(held_file, [*kept, *missing])
            shutil.rmtree(state)
    return root / "root"


def link_store(store: Path, target: Path) -> None:
    """Makes `target` a copy of `store` that shares the parts that containerd never changes: unpacked layers and blobs.

    The store's layer folders must exist as long as the copy is in use.
    """
    if target.exists():
        shutil.rmtree(target)

    def copy(source: Path, copied: Path) -> None:
        copied.mkdir(parents=True)
        for entry in source.iterdir():
            if source.name == "snapshots":
                (copied / entry.name).symlink_to(entry)
            elif entry.is_dir() and not entry.is_symlink():
                copy(entry, copied / entry.name)
            elif source.parent.name == "blobs":
                (copied / entry.name).hardlink_to(entry)
            else:
                shutil.copy2(entry, copied / entry.name)

    copy(store, target)


def import_commands(archive: Archive, *ctr: str) -> Iterator[tuple[str, ...]]:
    """Commands that import the archive into a running containerd with the names and labels that the kubelet expects.

    containerd's CRI plugin adds the labels to images that it pulls; without them removal by id and image volumes fail.
    """
    images = (*ctr, "--namespace", _NAMESPACE, "images")
    by_id = archive.config_digest
    yield (*images, "import", "--local", str(archive.path))
    yield (*images, "tag", "--force", "--local", archive.name, by_id)
    for name in (archive.name, by_id):
        yield (*images, "label", name, _LABEL)


def remove_store_builder() -> None:
    """Ends a leftover containerd that unpacks images."""
    _BUILDER_GROUP.kill()
    _BUILDER_GROUP.remove()


@contextlib.contextmanager
def _running_containerd(root: Path, state: Path, containerd_folder: Path) -> Iterator[tuple[str, ...]]:
    """A containerd that only unpacks images; yields the command line of its client."""
    config = state / "containerd.toml"
    config.write_text(_CONTAINERD.format(folder=root))
    _BUILDER_GROUP.make()
    joins = [f"echo $$ > {f / 'cgroup.procs'}" for f in _BUILDER_GROUP.folders()]
    # In its own mount namespace, so that nothing stays mounted if this run is killed.
    launch = f'unshare --mount setsid "$@" >{state}/log 2>&1 </dev/null &'
    program = (str(containerd_folder / "containerd"), "--config", str(config), "--log-level", "error")
    ctr = (str(containerd_folder / "ctr"), "--address", f"{state}/s")
    try:
        run("sh", "-c", "\n".join(["set -e", *joins, launch]), "sh", *program)
        wait_until(f"the containerd that unpacks images answers, see {state}/log", lambda: _succeeds(*ctr, "version"))
        yield ctr
    finally:
        remove_store_builder()


def _remove_images_but(archives: Sequence[Archive], *ctr: str) -> None:
    images = (*ctr, "--namespace", _NAMESPACE, "images")
    wanted = {name for archive in archives for name in (archive.name, archive.config_digest)}
    for name in set(run(*images, "list", "--quiet").split()) - wanted:
        run(*images, "delete", "--sync", name)


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
