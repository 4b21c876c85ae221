"""Parses model URIs.

Called when a configuration or a command line is read, and by `weights.fetching`, which opens them. Pure and
cheap to import.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote

from neuron_runtime.errors import InvalidConfig


@dataclass(frozen=True)
class HubModel:
    """`hf://org/name[@revision]`."""

    repository: str
    revision: str | None = None

    def __str__(self) -> str:
        return f"hf://{self.repository}" + (f"@{self.revision}" if self.revision else "")


@dataclass(frozen=True)
class S3Model:
    """`s3://bucket/prefix`: the objects directly below the prefix."""

    bucket: str
    prefix: str

    def __str__(self) -> str:
        return f"s3://{self.bucket}/{self.prefix}".rstrip("/")

    def key(self, name: str) -> str:
        """The key of an object with this name below the prefix."""
        return f"{self.prefix}/{name}" if self.prefix else name


@dataclass(frozen=True)
class ClaimModel:
    """`pvc://claim/path`: a folder in a mounted volume."""

    claim: str
    path: str

    def __str__(self) -> str:
        return f"pvc://{self.claim}/{self.path}"


@dataclass(frozen=True)
class ImageModel:
    """`oci://image[@digest][#path]`: a folder in a mounted image."""

    image: str
    path: str

    def __str__(self) -> str:
        return f"oci://{self.image}" + (f"#{self.path}" if self.path else "")


@dataclass(frozen=True)
class FolderModel:
    """`file:///absolute/path`."""

    folder: Path

    def __str__(self) -> str:
        return f"file://{self.folder}"


ModelInPlace = ClaimModel | ImageModel | FolderModel
"""Read where it lies."""
Model = HubModel | S3Model | ModelInPlace

FORMS = (
    "hf://org/name[@revision], s3://bucket/prefix, pvc://claim/path, oci://image[@digest][#path] or "
    "file:///absolute/path"
)

_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}", re.ASCII)
_REVISION = re.compile(r"[A-Za-z0-9][\w./-]{0,199}", re.ASCII)
_BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]", re.ASCII)
_CLAIM = re.compile(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?", re.ASCII)
_IMAGE = re.compile(r"[A-Za-z0-9][\w.:/@-]{0,511}", re.ASCII)
_PASSWORD = re.compile(r"//[^\s/@]*:[^\s/@]*@")
_MAX_PATH_CHARACTERS = 900


def parse_uri(uri: str, field: str = "$.model.uri") -> Model:
    """Raises InvalidConfig at `field` for an unknown scheme or a malformed URI, with the accepted form."""
    scheme, separator, rest = uri.partition(":")
    uri = _PASSWORD.sub("//***@", uri)  # for messages
    if not separator:
        raise InvalidConfig(field, f"{uri!r} is not a URI; write {FORMS}")
    parse = _PARSERS.get(scheme)
    if parse is not None and (scheme == "file" or rest.startswith("//")):
        return parse(uri, rest.removeprefix("//"), field)
    raise InvalidConfig(field, f"unknown scheme {scheme}: in {uri!r}: use {FORMS}")


def store_address(uri: str, field: str) -> S3Model:
    """The bucket and prefix of a store that is no folder. Raises InvalidConfig at `field`."""
    model = parse_uri(uri, field)
    if not isinstance(model, S3Model):
        raise InvalidConfig(field, f"{uri!r} is no address of a store; write s3://bucket/prefix")
    return model


def _hub(uri: str, rest: str, field: str) -> HubModel:
    repository, at, revision = rest.partition("@")
    if not _REPOSITORY.fullmatch(repository) or ".." in repository or "--" in repository:
        raise InvalidConfig(field, f"{uri!r} names no repository; write hf://org/name[@revision]")
    if at and (not _REVISION.fullmatch(revision) or ".." in revision):
        raise InvalidConfig(
            field, f"{uri!r} has no valid revision after the @; write hf://org/name@branch-tag-or-commit"
        )
    return HubModel(repository, revision or None)


def _s3(uri: str, rest: str, field: str) -> S3Model:
    bucket, _, prefix = rest.partition("/")
    prefix = prefix.rstrip("/")
    if not _BUCKET.fullmatch(bucket) or ".." in bucket:
        raise InvalidConfig(field, f"{uri!r} names no bucket; write s3://bucket/prefix")
    if not _is_path(prefix) or "?" in prefix or "#" in prefix:
        raise InvalidConfig(field, f"{uri!r} has no valid prefix after the bucket; write s3://bucket/prefix")
    return S3Model(bucket, prefix)


def _claim(uri: str, rest: str, field: str) -> ClaimModel:
    claim, _, path = rest.partition("/")
    path = path.rstrip("/")
    if not _CLAIM.fullmatch(claim) or ".." in claim:
        raise InvalidConfig(field, f"{uri!r} names no PersistentVolumeClaim; write pvc://claim/path")
    if not _is_path(path):
        raise InvalidConfig(field, f"{uri!r} has no valid path in the volume; write pvc://claim/path")
    return ClaimModel(claim, path)


def _image(uri: str, rest: str, field: str) -> ImageModel:
    image, _, path = rest.partition("#")
    path = path.strip("/")
    if not _IMAGE.fullmatch(image) or ".." in image.split("/"):
        raise InvalidConfig(field, f"{uri!r} names no image; write oci://image[@digest][#path]")
    if not _is_path(path):
        raise InvalidConfig(field, f"{uri!r} has no valid path in the image; write oci://image[@digest][#path]")
    return ImageModel(image, path)


def _folder(uri: str, rest: str, field: str) -> FolderModel:
    if not uri.startswith("file:///") or "\0" in rest:
        raise InvalidConfig(field, f"{uri!r} names no absolute path; write file:///absolute/path")
    return FolderModel(Path(unquote(rest)))


def _is_path(path: str) -> bool:
    """Whether this is a plain relative path, or empty."""
    parts = path.split("/")
    return not path or (len(path) <= _MAX_PATH_CHARACTERS and path.isprintable() and not {"", ".", ".."} & set(parts))


_PARSERS: dict[str, Callable[[str, str, str], Model]] = {
    "hf": _hub,
    "s3": _s3,
    "pvc": _claim,
    "oci": _image,
    "file": _folder,
}
