"""API keys: read from a file, compared in constant time, read again when the file changes.

The outermost layer of the front end asks for the key of every request that is not for an open path, before any of its
body is read. Keys are held as digests and appear in no log, error, record or configuration document.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from neuron_runtime.console import say
from neuron_runtime.errors import InvalidConfig, Unauthorized
from neuron_runtime.server.exchange import OPEN_PATHS, exchange_of
from neuron_runtime.server.wire import error_answer

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

FILE_FLAG, KEY_FLAG = "--api-key-file", "--api-key"
KEYS_NAME = "api-keys"
MAX_FILE_BYTES = 64 * 1024
MAX_KEYS = 256
MAX_DROPPED_BYTES = 1024 * 1024
"""A body of at most this length that nobody reads does not cost the client its connection."""
LOOK_SECONDS = 1.0
"""How often a request's arrival makes the file be looked at."""
DOCUMENTATION = ("/openapi.json", "/docs")
"""Describes the API and nothing else. A browser cannot send a key when it opens a page."""

_KEY = re.compile(rb"[\x21-\x7e]+")


def check_keys(file: Path | None, keys: Sequence[str]) -> None:
    """What a command was given, before anything is started with it. Raises InvalidConfig, never with a key in it."""
    if file is not None and keys:
        raise InvalidConfig(KEY_FLAG, f"is in the file already: give it or {FILE_FLAG}")
    if file is not None:
        ApiKeys(file)
    elif keys:
        parse_keys("\n".join(keys).encode(), KEY_FLAG, KEY_FLAG)


def api_key_file(file: Path | None, keys: Sequence[str], folder: Path) -> Path | None:
    """The file for the front end: the one that was given, or one in `folder` with the keys that were; None: no keys.

    A file, because the arguments of a process can be read by every user of a machine.
    """
    if not keys:
        return file
    path = folder / KEYS_NAME
    path.touch(mode=0o600)
    path.write_text("\n".join(keys))
    return path


def parse_keys(raw: bytes, source: str, flag: str = FILE_FLAG) -> tuple[bytes, ...]:
    """Keys, one per line; empty lines do not count. Raises InvalidConfig, which names a line and never shows it."""
    lines = [line.strip() for line in raw.splitlines()]
    for number, line in enumerate(lines, 1):
        if line and not _KEY.fullmatch(line):
            message = f"line {number} of {source} is no key: a key is printable ASCII without spaces"
            raise InvalidConfig(flag, message)
    keys = tuple(filter(None, lines))
    if not 1 <= len(keys) <= MAX_KEYS or len(raw) > MAX_FILE_BYTES:
        wanted = f"from 1 to {MAX_KEYS} keys, one per line, in at most {MAX_FILE_BYTES // 1024} KiB"
        raise InvalidConfig(flag, f"{source} must hold {wanted}; it has {len(keys)} in {len(raw)} bytes")
    return keys


class ApiKeys:
    """The keys of a file, and those that it holds later.

    A file that is missing or wrong at the start is an error; later the keys that were read last stay in force.

    Raises:
        InvalidConfig: naming the file and what is wrong with it.
    """

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._path = path
        self._clock = clock
        self._seen: object = None
        self._digests: tuple[bytes, ...] = ()
        self._look_at = clock() + LOOK_SECONDS
        self._read()

    def number_of(self, presented: bytes) -> int | None:
        """Which key of the file this is, from 1; None for none. Takes the same time whichever it is."""
        now = self._clock()
        if now >= self._look_at:
            self._look_at = now + LOOK_SECONDS
            self._look()
        digest = _digest(presented)
        found = None
        for number, known in enumerate(self._digests, 1):
            if hmac.compare_digest(known, digest):
                found = number
        return found

    def _look(self) -> None:
        try:
            if _signature(os.stat(self._path)) != self._seen:
                self._read()
                say(f"{self._path} has changed: {len(self._digests)} API keys are in force")
        except (OSError, InvalidConfig) as error:
            if self._seen is not None:
                self._seen = None
                say(f"{error}; the API keys that were read before stay in force")

    def _read(self) -> None:
        try:
            with self._path.open("rb") as file:
                seen = _signature(os.fstat(file.fileno()))
                raw = file.read(MAX_FILE_BYTES + 1)
        except OSError as error:
            raise InvalidConfig(FILE_FLAG, f"cannot read {self._path}: {error.strerror}") from error
        # Equal lengths for every key, and nothing to read in a dump of memory.
        self._digests = tuple(map(_digest, parse_keys(raw, str(self._path))))
        self._seen = seen


def needs_key(path: str) -> bool:
    """Whether requests to this path must carry a key."""
    return path not in OPEN_PATHS and path not in DOCUMENTATION and not path.startswith("/docs/")


class Guard:
    """An ASGI layer that lets requests with a known key pass, and all requests to paths that need no key.

    The others are answered before anything of their body is read.
    """

    def __init__(self, app: ASGIApp, keys: ApiKeys) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # OPTIONS says which methods there are, and a browser asks it without credentials.
        if needs_key(scope["path"]) and scope["method"] != "OPTIONS":
            exchange = exchange_of(scope)
            presented = _bearer(exchange.headers.get(b"authorization", b""))
            exchange.key = self._keys.number_of(presented) if presented else None
            if exchange.key is None:
                exchange.error = Unauthorized(bool(presented))
                await _refuse(exchange.error, exchange.headers, send)
                return
        await self._app(scope, receive, send)


async def _refuse(error: Unauthorized, headers: Mapping[bytes, bytes], send: Send) -> None:
    status, body, more = error_answer(error)
    if b"transfer-encoding" in headers or int(headers.get(b"content-length", b"0")) > MAX_DROPPED_BYTES:
        more = {**more, "connection": "close"}
    told = {"content-type": "application/json", "content-length": str(len(body)), **more}
    raw = [(name.encode(), value.encode()) for name, value in told.items()]
    await send({"type": "http.response.start", "status": status, "headers": raw})
    await send({"type": "http.response.body", "body": body, "more_body": False})


def _bearer(authorization: bytes) -> bytes:
    """The token of an Authorization header; empty where it is of another kind."""
    scheme, _, token = authorization.partition(b" ")
    return token.strip() if scheme.lower() == b"bearer" else b""


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _signature(status: os.stat_result) -> object:
    return status.st_dev, status.st_ino, status.st_mtime_ns, status.st_size
