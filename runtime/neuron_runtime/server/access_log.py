"""The access log: one line of JSON for every request that has ended, open paths excepted.

Shown every exchange by the outermost layer. Lines are written by a thread of their own, so that a reader who is slow,
or gone, costs lines and never time; lost lines are counted. No key, no answer and, unless asked for, no prompt.
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
"""Characters of a path or a user agent that are logged."""
MAX_QUEUED_LINES = 10_000
"""Lines that may wait for the reader; beyond them the newest are lost."""
GATHER_SECONDS = 0.05
"""How long lines are gathered before they are written together."""
WRITE_BYTES = 4096
"""What a pipe takes in one piece (PIPE_BUF): lines of several processes do not mix."""
FLUSH_SECONDS = 2.0
"""How long the end of the process waits for a slow reader."""

_FIELD = re.compile(r"[a-z0-9_.\[\]]{1,64}")


class AccessLog:
    """An observer of exchanges.

    Args:
        write: takes lines, each ended by a newline; must not block.
        prompt_characters: how much of each prompt is logged; 0: nothing.
    """

    def __init__(self, write: Callable[[bytes], None], prompt_characters: int = 0) -> None:
        self._write = write
        self._prompt_characters = prompt_characters

    def ended(self, exchange: Exchange) -> None:
        if exchange.path not in OPEN_PATHS:
            told = entry(exchange, self._prompt_characters)
            self._write(orjson.dumps(told, option=orjson.OPT_APPEND_NEWLINE))


def entry(exchange: Exchange, prompt_characters: int = 0) -> dict[str, Any]:
    """What the log says of an exchange; docs/server.md has the meaning of each field."""
    told: dict[str, Any] = {
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
        told["api_key"] = exchange.key
    if exchange.error is not None:
        told["error"] = exchange.error.code or "invalid_request"
        told["param"] = _param(exchange.error)
    generation = exchange.generation
    if generation is not None:
        ask = generation.ask
        told |= {
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
        if prompt_characters and exchange.tokenizer is not None:
            # Tokens are bytes at least: no more of them are looked at than characters may be shown.
            decode = exchange.tokenizer.decode
            texts = (decode(list(prompt[:prompt_characters]), skip_special_tokens=False) for prompt in ask.prompts)
            told["prompt_texts"] = [text[:prompt_characters] for text in texts]
    return told


def _param(error: ServingError) -> str | None:
    """The field that was wrong, unless a client made it up: then it could be anything, a prompt included."""
    field = error.field if isinstance(error, InvalidRequest) else None
    return field if field is None or _FIELD.fullmatch(field) else "..."


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 6)


class LineWriter:
    """Writes lines to a file descriptor on a thread of its own, many at once; never blocks whoever has a line."""

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
        """Lines that found no room, or could not be written."""
        return self._num_dropped + self._num_unwritten

    def write(self, line: bytes) -> None:
        if len(self._lines) >= MAX_QUEUED_LINES:
            self._num_dropped += 1
            return
        self._lines.append(line)
        if not self._wake.is_set():
            self._wake.set()

    def close(self) -> None:
        """Write what waits, as far as the reader takes it in time."""
        self._closing.set()
        self._wake.set()
        self._thread.join(FLUSH_SECONDS)

    def _run(self) -> None:
        while True:
            self._wake.wait()
            closing = self._closing.wait(GATHER_SECONDS)
            # Cleared before the lines are looked at: what comes later wakes again.
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
            # Somebody made this descriptor, which others share, not wait.
            select.select([], [fd], [])
