"""API keys: read from a file, compared in constant time, reloaded when the file changes.

`server.edge` requires a key for every request except to open paths.
Only digests of keys are stored; keys never appear in a log, error, record or configuration document.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from neuron_runtime.console import say
from neuron_runtime.errors import InvalidConfig
from neuron_runtime.server.exchange import OPEN_PATHS

FILE_FLAG, KEY_FLAG = "--api-key-file", "--api-key"
KEYS_NAME = "api-keys"
MAX_FILE_BYTES = 64 * 1024
MAX_KEYS = 256
CHECK_SECONDS = 1.0
"""Minimum interval between checks of the file, which requests trigger."""
DOCUMENTATION = ("/openapi.json", "/docs")
"""Open, because they only describe the API and a browser cannot send a key when it opens a page."""

_KEY = re.compile(rb"[\x21-\x7e]+")


def check_keys(file: Path | None, keys: Sequence[str]) -> None:
    """Check the arguments of a command before anything starts. Raises InvalidConfig, which never contains a key."""
    if file is not None and keys:
        raise InvalidConfig(KEY_FLAG, f"cannot be combined with {FILE_FLAG}: set one of them")
    if file is not None:
        ApiKeys(file)
    elif keys:
        parse_keys("\n".join(keys).encode(), KEY_FLAG, KEY_FLAG)


def api_key_file(file: Path | None, keys: Sequence[str], folder: Path) -> Path | None:
    """The file for the front end: `file`, or a new file in `folder` with `keys`; None without keys.

    A file, because every user of a machine can read the arguments of a process.
    """
    if not keys:
        return file
    path = folder / KEYS_NAME
    path.touch(mode=0o600)
    path.write_text("\n".join(keys))
    return path


def parse_keys(raw: bytes, source: str, flag: str = FILE_FLAG) -> tuple[bytes, ...]:
    """Keys, one per line; skips empty lines. Raises InvalidConfig, which has the line number but not its content."""
    lines = [line.strip() for line in raw.splitlines()]
    for number, line in enumerate(lines, 1):
        if line and not _KEY.fullmatch(line):
            message = f"line {number} of {source} is not a key: a key is printable ASCII without spaces"
            raise InvalidConfig(flag, message)
    keys = tuple(filter(None, lines))
    if not 1 <= len(keys) <= MAX_KEYS or len(raw) > MAX_FILE_BYTES:
        rule = f"from 1 to {MAX_KEYS} keys, one per line, in at most {MAX_FILE_BYTES // 1024} KiB"
        raise InvalidConfig(flag, f"{source} must contain {rule}; it has {len(keys)} in {len(raw)} bytes")
    return keys


class ApiKeys:
    """The keys of a file, reloaded when it changes.

    A missing or invalid file raises InvalidConfig at the start; later the previous keys stay valid.
    """

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._path = path
        self._clock = clock
        self._seen: object = None
        self._digests: tuple[bytes, ...] = ()
        self._check_at = clock() + CHECK_SECONDS
        self._read()

    def number_of(self, presented: bytes) -> int | None:
        """The number of this key in the file, from 1; None if unknown. Takes constant time."""
        now = self._clock()
        if now >= self._check_at:
            self._check_at = now + CHECK_SECONDS
            self._reload_if_changed()
        digest = _digest(presented)
        match = None
        for number, known in enumerate(self._digests, 1):
            if hmac.compare_digest(known, digest):
                match = number
        return match

    def _reload_if_changed(self) -> None:
        try:
            if _signature(os.stat(self._path)) != self._seen:
                self._read()
                say(f"{self._path} has changed: {len(self._digests)} API keys are valid now")
        except (OSError, InvalidConfig) as error:
            if self._seen is not None:
                self._seen = None
                say(f"{error}; the previous API keys stay valid")

    def _read(self) -> None:
        try:
            with self._path.open("rb") as file:
                seen = _signature(os.fstat(file.fileno()))
                raw = file.read(MAX_FILE_BYTES + 1)
        except OSError as error:
            raise InvalidConfig(FILE_FLAG, f"cannot read {self._path}: {error.strerror}") from error
        # Digests have equal lengths, and a memory dump does not reveal the keys.
        self._digests = tuple(map(_digest, parse_keys(raw, str(self._path))))
        self._seen = seen


def needs_key(path: str) -> bool:
    """Whether requests to this path need a key."""
    return path not in OPEN_PATHS and path not in DOCUMENTATION and not path.startswith("/docs/")


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _signature(status: os.stat_result) -> object:
    return status.st_dev, status.st_ino, status.st_mtime_ns, status.st_size
