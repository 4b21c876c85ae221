"""Parses model URIs.

Called when a configuration or a command line is read, and by `sources`, which opens them. Pure and cheap to import.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote

from neuron_runtime.errors import InvalidConfig
from neuron_runtime.not_built import Surface, refuse


@dataclass(frozen=True)
class HubModel:
    """`hf://org/name[@revision]`."""

    repository: str
    revision: str | None = None

    def __str__(self) -> str:
        return f"hf://{self.repository}" + (f"@{self.revision}" if self.revision else "")


@dataclass(frozen=True)
class FolderModel:
    """`file:///absolute/path`."""

    folder: Path

    def __str__(self) -> str:
        return f"file://{self.folder}"


_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}", re.ASCII)
_REVISION = re.compile(r"[A-Za-z0-9][\w./-]{0,199}", re.ASCII)


def parse_uri(uri: str, field: str = "$.model.uri") -> HubModel | FolderModel:
    """Parse a model URI.

    Raises:
        InvalidConfig: at `field`, for an unknown scheme or a malformed URI; names the accepted form.
    """
    scheme, separator, rest = uri.partition(":")
    if not separator:
        raise InvalidConfig(field, f"{uri!r} is not a URI; write hf://org/name[@revision] or file:///absolute/path")
    if scheme == "hf" and rest.startswith("//"):
        repository, at, revision = rest.removeprefix("//").partition("@")
        if not _REPOSITORY.fullmatch(repository) or ".." in repository or "--" in repository:
            raise InvalidConfig(field, f"{uri!r} names no repository; write hf://org/name[@revision]")
        if at and (not _REVISION.fullmatch(revision) or ".." in revision):
            raise InvalidConfig(
                field, f"{uri!r} has no valid revision after the @; write hf://org/name@branch-tag-or-commit"
            )
        return HubModel(repository, revision or None)
    if scheme == "file":
        if not rest.startswith("///") or "\0" in rest:
            raise InvalidConfig(field, f"{uri!r} names no absolute path; write file:///absolute/path")
        return FolderModel(Path(unquote(rest.removeprefix("//"))))
    refuse(Surface.SCHEME, scheme, uri, at=field)
    cure = "use hf://org/name[@revision] or file:///absolute/path"
    raise InvalidConfig(field, f"unknown scheme {scheme}: in {uri!r}: {cure}")
