"""The base image of image builds on a machine that reaches package mirrors but no image registry: Debian with its
Python, in place of `python:3.11-slim`. Only `images` uses it; it is never published. Also writes the empty image that
lint uses as a base."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import shutil
import stat
import subprocess
import tarfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

from cluster.rig.cache import Cache, content_key
from cluster.rig.needs import NotPossibleHere, search_path

# Its Python is 3.11, as in the image that it replaces.
DEBIAN_SUITE = "bookworm"
DEBIAN_PACKAGES = ("ca-certificates", "netbase", "python3", "python3-pip", "tzdata")

_ENVIRONMENT = {"PATH": "/usr/local/bin:/usr/local/sbin:/usr/sbin:/usr/bin:/sbin:/bin", "LANG": "C.UTF-8"}
_CREATED = "1970-01-01T00:00:00Z"
_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
# Folders with leftovers of the bootstrap or with content that is created at run time.
_EMPTY_FOLDERS = (
    "debootstrap",
    "dev",
    "proc",
    "run",
    "sys",
    "tmp",
    "usr/share/doc",
    "usr/share/locale",
    "usr/share/man",
    "var/cache",
    "var/lib/apt/lists",
    "var/log",
)
# Debian marks its Python as externally managed; the official image does not.
_LEFT_OUT_NAMES = frozenset({"EXTERNALLY-MANAGED", "__pycache__"})


@dataclass(frozen=True)
class OciLayout:
    """A folder in the OCI image layout with one image."""

    path: Path
    digest: str
    """Digest of the image's manifest, `sha256:...`."""


def base_image(cache: Cache) -> OciLayout:
    """The stand-in for `python:3.11-slim`; built once (a minute), then cached.

    Raises:
        NotPossibleHere: debootstrap is missing or did not reach a mirror.
    """

    def build(folder: Path) -> None:
        rootfs = folder / "rootfs"
        _debootstrap(rootfs)
        python = rootfs / "usr/bin/python"
        if not python.exists():
            python.symlink_to("python3")
        write_layout(folder, tree_members(rootfs), environment=_ENVIRONMENT, command=["python3"])
        shutil.rmtree(rootfs)

    key = content_key(Path(__file__))
    return read_layout(cache.entry("image", "base", key, build, max_entries=1))


def empty_image(cache: Cache) -> OciLayout:
    """An image without files, enough for lint, which resolves bases but does not run them."""

    def build(folder: Path) -> None:
        write_layout(folder, (), environment=_ENVIRONMENT, command=["python3"])

    return read_layout(cache.entry("image", "empty", content_key(Path(__file__)), build, max_entries=1))


def read_layout(path: Path) -> OciLayout:
    return OciLayout(path, json.loads((path / "index.json").read_text())["manifests"][0]["digest"])


def _debootstrap(rootfs: Path) -> None:
    program = shutil.which("debootstrap", path=search_path())
    if program is None:
        raise NotPossibleHere("Debian packages are missing (debootstrap): run `make cluster-deps`")
    done = subprocess.run(
        [program, "--variant=minbase", f"--include={','.join(DEBIAN_PACKAGES)}", DEBIAN_SUITE, str(rootfs)],
        env={**os.environ, "PATH": search_path(), "LC_ALL": "C"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode:
        last = next(reversed(done.stdout.strip().splitlines()), "no output")
        raise NotPossibleHere(f"debootstrap failed ({last}): the machine must reach a Debian mirror")


def tree_members(root: Path) -> Iterator[tuple[tarfile.TarInfo, Path | None]]:
    """The files below `root` as tar members, in a fixed order and without times, so that equal trees have one digest.

    Yields:
        A member with its path below `root`, and the file with its content (None: no content).
    """
    links: dict[tuple[int, int], str] = {}

    def walk(folder: Path) -> Iterator[Path]:
        for path in sorted(folder.iterdir()):
            name = str(path.relative_to(root))
            if path.name in _LEFT_OUT_NAMES:
                continue
            yield path
            if path.is_dir() and not path.is_symlink() and name not in _EMPTY_FOLDERS:
                yield from walk(path)

    for path in walk(root):
        status = path.lstat()
        member = tarfile.TarInfo(str(path.relative_to(root)))
        member.mode, member.uid, member.gid = stat.S_IMODE(status.st_mode), status.st_uid, status.st_gid
        content = None
        if stat.S_ISDIR(status.st_mode):
            member.type = tarfile.DIRTYPE
        elif stat.S_ISLNK(status.st_mode):
            member.type, member.linkname = tarfile.SYMTYPE, str(path.readlink())
        elif not stat.S_ISREG(status.st_mode):
            continue
        elif status.st_nlink > 1 and (first := links.get((status.st_dev, status.st_ino))):
            member.type, member.linkname = tarfile.LNKTYPE, first
        else:
            links[status.st_dev, status.st_ino] = member.name
            member.size, content = status.st_size, path
        yield member, content


class _Hashing:
    """A writable file that counts and hashes what passes through."""

    def __init__(self, file: IO[bytes] | gzip.GzipFile) -> None:
        self._file = file
        self._hash = hashlib.sha256()
        self.num_bytes = 0

    def write(self, data: bytes) -> int:
        self._hash.update(data)
        self.num_bytes += len(data)
        return self._file.write(data)

    @property
    def digest(self) -> str:
        return f"sha256:{self._hash.hexdigest()}"


def write_layout(
    folder: Path,
    members: Iterable[tuple[tarfile.TarInfo, Path | None]],
    *,
    environment: Mapping[str, str],
    command: list[str],
) -> None:
    """Writes an OCI image layout with one gzip layer of `members` into `folder`."""
    blobs = folder / "blobs" / "sha256"
    blobs.mkdir(parents=True)

    def put(document: Mapping[str, Any], media_type: str) -> dict[str, Any]:
        data = json.dumps(document, sort_keys=True).encode()
        digest = hashlib.sha256(data).hexdigest()
        (blobs / digest).write_bytes(data)
        return {"mediaType": media_type, "digest": f"sha256:{digest}", "size": len(data)}

    layer_file = folder / "layer"
    with layer_file.open("wb") as raw:
        packed = _Hashing(raw)
        with gzip.GzipFile(filename="", mode="wb", fileobj=cast(Any, packed), mtime=0, compresslevel=1) as squeezed:
            plain = _Hashing(squeezed)
            with tarfile.open(fileobj=cast(Any, plain), mode="w|", format=tarfile.PAX_FORMAT) as tar:
                for member, content in members:
                    if content is None:
                        tar.addfile(member)
                    else:
                        with content.open("rb") as file:
                            tar.addfile(member, file)
    layer_file.rename(blobs / packed.digest.removeprefix("sha256:"))

    image_type = "application/vnd.oci.image"
    platform = {"architecture": _ARCHITECTURES.get(os.uname().machine, os.uname().machine), "os": "linux"}
    config = put(
        {
            **platform,
            "created": _CREATED,
            "config": {"Env": [f"{k}={v}" for k, v in environment.items()], "Cmd": command},
            "rootfs": {"type": "layers", "diff_ids": [plain.digest]},
            "history": [{"created": _CREATED, "created_by": f"Debian {DEBIAN_SUITE}: {' '.join(DEBIAN_PACKAGES)}"}],
        },
        f"{image_type}.config.v1+json",
    )
    layer = {"mediaType": f"{image_type}.layer.v1.tar+gzip", "digest": packed.digest, "size": packed.num_bytes}
    manifest = put(
        {
            "schemaVersion": 2,
            "mediaType": f"{image_type}.manifest.v1+json",
            "config": config,
            "layers": [layer],
        },
        f"{image_type}.manifest.v1+json",
    )
    index = {
        "schemaVersion": 2,
        "mediaType": f"{image_type}.index.v1+json",
        "manifests": [{**manifest, "platform": platform}],
    }
    (folder / "index.json").write_text(json.dumps(index))
    (folder / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')
