"""Hashes of a file that is written in order: our own sha256, and what its source states.

Used by `transfer` and `store`. Pure.
"""

from __future__ import annotations

import hashlib
import zlib
from typing import Protocol

from neuron_runtime.weights.source import Check


class Hasher(Protocol):
    def update(self, data: memoryview | bytes, /) -> None: ...

    def hexdigest(self) -> str: ...


class _Crc32:
    def __init__(self) -> None:
        self._value = 0

    def update(self, data: memoryview | bytes, /) -> None:
        self._value = zlib.crc32(data, self._value)

    def hexdigest(self) -> str:
        return f"{self._value:08x}"


class _PartsMd5:
    """S3's ETag of an object that was uploaded in parts: the MD5 of the parts' MD5s, and their number."""

    def __init__(self, part_bytes: int) -> None:
        self._part_bytes = part_bytes
        self._parts: list[bytes] = []
        self._part = hashlib.md5(usedforsecurity=False)
        self._left = part_bytes

    def update(self, data: memoryview | bytes, /) -> None:
        view = memoryview(data)
        while view:
            if not self._left:
                self._end_part()
            piece = view[: self._left]
            self._part.update(piece)
            self._left -= len(piece)
            view = view[len(piece) :]

    def hexdigest(self) -> str:
        parts = [*self._parts, self._part.digest()]
        return f"{hashlib.md5(b''.join(parts), usedforsecurity=False).hexdigest()}-{len(parts)}"

    def _end_part(self) -> None:
        self._parts.append(self._part.digest())
        self._part = hashlib.md5(usedforsecurity=False)
        self._left = self._part_bytes


def hasher(check: Check, num_bytes: int) -> Hasher:
    """Computes `check.value` over a file of `num_bytes`."""
    match check.algorithm:
        case "git":
            git = hashlib.sha1(usedforsecurity=False)
            git.update(b"blob %d\0" % num_bytes)
            return git
        case "md5-parts":
            return _PartsMd5(check.part_bytes)
        case "crc32":
            return _Crc32()
        case algorithm:
            return hashlib.new(algorithm, usedforsecurity=False)


class FileHash:
    """Hashes of one file: our own, and the one that its source states, if any."""

    def __init__(self, num_bytes: int, check: Check | None) -> None:
        self._own = hashlib.sha256()
        self._check = check
        self._stated: Hasher | None = None
        if check is not None and check.algorithm != "sha256":
            self._stated = hasher(check, num_bytes)

    def update(self, data: memoryview | bytes) -> None:
        self._own.update(data)
        if self._stated is not None:
            self._stated.update(data)

    @property
    def sha256(self) -> str:
        return self._own.hexdigest()

    def difference(self) -> str:
        """What differs from the source's statement, "" if nothing does."""
        if self._check is None:
            return ""
        found = (self._stated or self._own).hexdigest()
        wanted = self._check
        name = {"git": "git id", "md5-parts": "ETag"}.get(wanted.algorithm, wanted.algorithm)
        return "" if found == wanted.value else f"its {name} is {found}, the source states {wanted.value}"
