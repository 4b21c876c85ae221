"""The access log: one line of JSON for each request, with the fields of the servers' own log where they are the same.

A thread writes the lines: a slow or closed reader loses lines, and never delays a request. Keys, prompts and answers
are never logged.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from neuron_operator.gateway.exchange import Exchange

MAX_TEXT = 200
MAX_QUEUED_LINES = 10_000
GATHER_SECONDS = 0.05
FLUSH_SECONDS = 2.0


def entry(exchange: Exchange, now: float) -> dict[str, Any]:
    """docs/gateway.md describes each field."""
    request, seconds = exchange.request, now - exchange.began
    fields: dict[str, Any] = {
        "time": datetime.fromtimestamp(time.time() - seconds, UTC).isoformat(timespec="milliseconds"),
        "request_id": request.request_id,
        "client": exchange.client.address,
        "method": request.method.decode("latin-1"),
        "path": request.path[:MAX_TEXT],
        "status": exchange.status,
        "duration_seconds": round(seconds, 6),
        "user_agent": request.named.get(b"user-agent", b"")[:MAX_TEXT].decode("latin-1"),
    }
    if exchange.key is not None:
        fields["api_key"] = exchange.key.name
    if exchange.error:
        fields["error"] = exchange.error
    if exchange.target is not None:
        fields |= {
            "namespace": exchange.target.model.served.namespace,
            "model": exchange.model_name,
            "replica": exchange.last_replica,
            "retries": exchange.num_retries,
            "held_seconds": round(exchange.held_seconds, 6),
            "first_byte_seconds": None if exchange.first_byte is None else round(exchange.first_byte, 6),
        }
    if exchange.usage is not None:
        fields |= {
            "prompt_tokens": exchange.usage.prompt,
            "output_tokens": exchange.usage.output,
            "is_estimated": exchange.usage.is_estimated,
        }
    return fields


class LineWriter:
    """Writes lines to a file descriptor on a thread of its own; `write` never blocks."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self.num_lost = 0
        self._lines: deque[bytes] = deque()
        self._wake = threading.Event()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="access-log", daemon=True)
        self._thread.start()

    def write(self, fields: dict[str, Any]) -> None:
        if len(self._lines) >= MAX_QUEUED_LINES:
            self.num_lost += 1
            return
        self._lines.append(msgspec.json.encode(fields) + b"\n")
        self._wake.set()

    def close(self) -> None:
        """Write what is left, for a short time at most."""
        self._closing.set()
        self._wake.set()
        self._thread.join(FLUSH_SECONDS)

    def _run(self) -> None:
        while True:
            self._wake.wait()
            is_closing = self._closing.wait(GATHER_SECONDS)
            # Cleared before the queue is read, so that later lines wake the thread again.
            self._wake.clear()
            while self._lines:
                self._write(self._lines.popleft())
            if is_closing:
                return

    def _write(self, line: bytes) -> None:
        left = memoryview(line)
        try:
            while left:
                left = left[os.write(self._fd, left) :]
        except OSError:
            self.num_lost += 1
