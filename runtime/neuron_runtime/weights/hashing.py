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

    def digest(self) -> bytes: ...


class _Crc32:
    def __init__(self) -> None:
        self._value = 0

    def update(self, data: memoryview | bytes, /) -> None:
        self._value = zlib.crc32(data, self._value)

    def digest(self) -> bytes:
        return self._value.to_bytes(4, "big")


class _Parts:
    """S3's checksum of an object that was uploaded in parts: the hash of the hashes of the parts."""

    def __init__(self, algorithm: str, part_bytes: int) -> None:
        self._algorithm = algorithm
        self._part_bytes = self._left = part_bytes
        self._whole, self._part = _new(algorithm), _new(algorithm)

    def update(self, data: memoryview | bytes, /) -> None:
        view = memoryview(data)
        while view:
            if not self._left:
                self._whole.update(self._part.digest())
                self._part, self._left = _new(self._algorithm), self._part_bytes
            piece = view[: self._left]
            self._part.update(piece)
            self._left -= len(piece)
            view = view[len(piece) :]

    def digest(self) -> bytes:
        self._whole.update(self._part.digest())
        return self._whole.digest()


def hasher(check: Check, num_bytes: int) -> Hasher:
    """Computes `check.value` over a file of `num_bytes`."""
    if check.part_bytes:
        return _Parts(check.algorithm, check.part_bytes)
    if check.algorithm == "git":
        git = _new("sha1")
        git.update(b"blob %d\0" % num_bytes)
        return git
    return _new(check.algorithm)


def _new(algorithm: str) -> Hasher:
    return _Crc32() if algorithm == "crc32" else hashlib.new(algorithm, usedforsecurity=False)


class FileHash:
    """Hashes of one file: our own, and the one that its source states, if any."""

    def __init__(self, num_bytes: int, check: Check | None) -> None:
        self._own = hashlib.sha256()
        self._check = check
        self._stated: Hasher | None = None
        if check is not None and check != Check("sha256", check.value):
            self._stated = hasher(check, num_bytes)

    def update(self, data: memoryview | bytes) -> None:
        self._own.update(data)
        if self._stated is not None:
            self._stated.update(data)

    @property
    def sha256(self) -> str:
        return self._own.digest().hex()

    def difference(self) -> str:
        """What differs from the source's statement, "" if nothing does."""
        if self._check is None:
            return ""
        computed, stated = (self._stated or self._own).digest().hex(), self._check
        name = "git id" if stated.algorithm == "git" else stated.algorithm + (" in parts" if stated.part_bytes else "")
        return "" if computed == stated.value else f"its {name} is {computed}, the source states {stated.value}"
