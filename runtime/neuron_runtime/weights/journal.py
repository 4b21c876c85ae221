"""The journal of a transfer: which chunks of which files are on the disk, so that a killed transfer resumes.

Written by `transfer` only. A line is a claim, with a checksum: whoever resumes reads the chunk and believes the bytes,
not the line. So nothing needs to be synced before its line is written.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path

import msgspec

from neuron_runtime.weights.disk import open_file, write_all

VERSION = 1


class Claim(msgspec.Struct, frozen=True, array_like=True):
    """Bytes `begin` to `end` of a file are written and have this CRC-32. An empty range drops the file's claims."""

    name: str
    begin: int
    end: int
    crc32: int


class Header(msgspec.Struct, frozen=True):
    """What the claims are about."""

    version: int
    digest: str


_header, _claim = msgspec.json.Decoder(Header), msgspec.json.Decoder(Claim)


def parse(raw: bytes, digest: str) -> tuple[dict[tuple[str, int], Claim], int]:
    """Claims by name and first byte, and the number of valid bytes: a killed writer may leave half a line."""
    claims: dict[tuple[str, int], Claim] = {}
    begin = end = raw.find(b"\n") + 1
    try:
        if not end or _header.decode(raw[:end]) != Header(VERSION, digest):
            return {}, 0
        while end := raw.find(b"\n", begin) + 1:
            claim = _claim.decode(raw[begin:end])
            if claim.begin < claim.end:
                claims[claim.name, claim.begin] = claim
            else:
                claims = {key: kept for key, kept in claims.items() if key[0] != claim.name}
            begin = end
    except msgspec.MsgspecError:
        pass  # lost by a crash of the machine: what follows is not believed either
    return claims, begin


class Journal:
    """Appends claims to a file. Used by several threads; raises OSError."""

    def __init__(self, path: Path, digest: str) -> None:
        self._lock = threading.Lock()
        self._fd = open_file(path, os.O_RDWR | os.O_CREAT)
        with open(self._fd, "rb", closefd=False) as file:
            self.claims, self._end = parse(file.read(), digest)
        os.ftruncate(self._fd, self._end)
        if not self._end:
            self.add(Header(VERSION, digest))

    def drop(self, name: str) -> None:
        """Withdraw all claims about a file."""
        self.add(Claim(name, 0, 0, 0))

    def close(self) -> None:
        with self._lock:
            os.close(self._fd)
            self._fd = -1

    def add(self, line: Claim | Header) -> None:
        raw = memoryview(msgspec.json.encode(line) + b"\n")
        with self._lock:
            if self._fd >= 0:
                write_all(self._fd, raw, self._end)
                self._end += len(raw)
