"""The access log: one line of JSON for every completed request, except to open paths.

A separate thread writes the lines, so that a slow or closed reader loses lines but never delays requests; lost lines
are counted. Keys and answers are never logged, prompts only if configured.
"""

from __future__ import annotations

import os
import re
import select
import threading
from collections import deque
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import orjson

from neuron_runtime.console import say
from neuron_runtime.errors import InvalidRequest, ServingError
from neuron_runtime.server.exchange import OPEN_PATHS, Exchange

MAX_TEXT = 200
"""Maximum characters of a path or a user agent in the log."""
MAX_QUEUED_LINES = 10_000
"""Lines that may wait for the reader; further lines are dropped."""
GATHER_SECONDS = 0.05
"""How long lines are collected before one write."""
WRITE_BYTES = 4096
"""PIPE_BUF: writes up to this size are atomic, so that lines of several processes do not mix."""
FLUSH_SECONDS = 2.0
"""How long the process waits for a slow reader when it exits."""

_FIELD = re.compile(r"[a-z0-9_.\[\]]{1,64}")


def log(write: Callable[[bytes], None], prompt_characters: int, exchange: Exchange) -> None:
    """Log an exchange that has ended; `write` must not block."""
    if exchange.path not in OPEN_PATHS:
        write(orjson.dumps(entry(exchange, prompt_characters), option=orjson.OPT_APPEND_NEWLINE))


def entry(exchange: Exchange, prompt_characters: int = 0) -> dict[str, Any]:
    """The log entry of an exchange, with so many characters of each prompt; docs/server.md describes each field."""
    fields: dict[str, Any] = {
        "time": datetime.fromtimestamp(exchange.began_at, UTC).isoformat(timespec="milliseconds"),
        "request_id": exchange.request_id,
        "client": exchange.client,
        "method": exchange.method,
        "path": exchange.path[:MAX_TEXT],
        "status": exchange.status,
        "duration_seconds": round(exchange.seconds, 6),
        "user_agent": exchange.headers.get(b"user-agent", b"")[:MAX_TEXT].decode("latin-1"),
    }
    if exchange.key is not None:
        fields["api_key"] = exchange.key
    if exchange.error is not None:
        fields["error"] = exchange.error.code or "invalid_request"
        fields["param"] = _param(exchange.error)
    generation = exchange.generation
    if generation is not None:
        ask = generation.ask
        fields |= {
            "model": exchange.model,
            "stream": ask.stream,
            "n": ask.num_choices,
            "prompts": len(ask.prompts),
            "prompt_tokens": ask.num_prompt_tokens,
            "cached_tokens": generation.num_cached_tokens,
            "output_tokens": generation.num_tokens,
            "queue_seconds": _rounded(exchange.queue_seconds),
            "first_token_seconds": _rounded(exchange.first_token_seconds),
            "finish_reasons": exchange.finish_reasons,
        }
        if prompt_characters:
            # A token has at least one byte, so no more tokens than characters are needed.
            decode = generation.tokenizer.decode
            texts = (decode(list(prompt[:prompt_characters]), skip_special_tokens=False) for prompt in ask.prompts)
            fields["prompt_texts"] = [text[:prompt_characters] for text in texts]
    return fields


def _param(error: ServingError) -> str | None:
    """The invalid field; "..." for names made up by the client, which could contain anything, e.g. a prompt."""
    field = error.field if isinstance(error, InvalidRequest) else None
    return field if field is None or _FIELD.fullmatch(field) else "..."


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 6)


class LineWriter:
    """Writes lines to a file descriptor in batches on a separate thread; `write` never blocks."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._num_dropped = 0
        self._num_unwritten = 0
        self._lines: deque[bytes] = deque()
        self._wake = threading.Event()
        self._closing = threading.Event()
        self._complained = False
        self._thread = threading.Thread(target=self._run, name="access-log", daemon=True)
        self._thread.start()

    @property
    def num_lost(self) -> int:
        """Lines that were dropped or could not be written."""
        return self._num_dropped + self._num_unwritten

    def write(self, line: bytes) -> None:
        if len(self._lines) >= MAX_QUEUED_LINES:
            self._num_dropped += 1
            return
        self._lines.append(line)
        if not self._wake.is_set():
            self._wake.set()

    def close(self) -> None:
        """Write queued lines, waiting at most FLUSH_SECONDS."""
        self._closing.set()
        self._wake.set()
        self._thread.join(FLUSH_SECONDS)

    def _run(self) -> None:
        while True:
            self._wake.wait()
            closing = self._closing.wait(GATHER_SECONDS)
            # Cleared before the queue is read, so that later lines wake the thread again.
            self._wake.clear()
            while self._lines:
                self._write_some()
            if closing:
                return

    def _write_some(self) -> None:
        part, count = bytearray(), 0
        while self._lines and (not part or len(part) + len(self._lines[0]) <= WRITE_BYTES):
            part += self._lines.popleft()
            count += 1
        try:
            _write_all(self._fd, part)
        except OSError as error:
            if not self._complained:
                say(f"the access log cannot be written: {error.strerror}")
            self._complained = True
            self._num_unwritten += count


def _write_all(fd: int, data: bytes | bytearray) -> None:
    left = memoryview(data)
    while left:
        try:
            left = left[os.write(fd, left) :]
        except BlockingIOError:
            # Another process that shares this descriptor made it non-blocking.
            select.select([], [fd], [])
