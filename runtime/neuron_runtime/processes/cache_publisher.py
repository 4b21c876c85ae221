"""Publishes the events of the prefix cache over ZMQ, and repeats the latest ones for readers that missed some.

Owned by the engine process; readers are inference gateways (llm-d's router subscribes to each pod). A reader that is
slow or gone never holds up a step: what it cannot take is dropped, and it asks for it again by number.
"""

from __future__ import annotations

import socket
import time
from collections import deque
from contextlib import suppress

import msgspec
import zmq

from neuron_runtime.config import CacheEventOptions
from neuron_runtime.engine.cache_events import CacheEvent, EventBatch
from neuron_runtime.errors import InvalidConfig

END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)
DEFAULT_ROOM = 1000
MAX_REPLAYS = 1
"""Answered between two steps; further ones wait for the next."""


class CachePublisher:
    """Messages have three parts: topic, number (8 bytes, from 0), and the batch.

    Raises InvalidConfig if an address cannot be used.
    """

    def __init__(self, options: CacheEventOptions, served_name: str) -> None:
        self._topic = (options.topic or f"kv@{socket.gethostname()}@{served_name}").encode()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._kept: deque[tuple[int, bytes]] = deque(maxlen=options.num_kept)
        self._number = 0
        self._encode = msgspec.msgpack.Encoder().encode
        self._publisher = self._open(zmq.PUB, "endpoint", options.endpoint)
        self.replays: zmq.Socket[bytes] | None = None
        """Readable while a reader waits for an answer; None: nothing is repeated."""
        if options.replay_endpoint:
            self.replays = self._open(zmq.ROUTER, "replayEndpoint", options.replay_endpoint, options.num_kept + 1)

    def _open(self, kind: int, field: str, endpoint: str, room: int = DEFAULT_ROOM) -> zmq.Socket[bytes]:
        """room: messages that wait for one reader; further ones are dropped."""
        made = self._context.socket(kind)
        made.linger = 0
        made.sndhwm = room
        made.ipv6 = True
        try:
            # As vLLM: an address without a host is ours, any other one a reader's.
            (made.bind if "*" in endpoint or "::" in endpoint else made.connect)(endpoint)
        except zmq.ZMQError as error:
            self.close()
            raise InvalidConfig(f"$.cacheEvents.{field}", f"{endpoint}: {error}") from error
        return made

    def publish(self, events: tuple[CacheEvent, ...]) -> None:
        if not events:
            return
        payload = self._encode(EventBatch(time.time(), events))
        self._kept.append((self._number, payload))
        with suppress(zmq.Again):  # no reader has room
            self._publisher.send_multipart((self._topic, self._number.to_bytes(8, "big"), payload), zmq.NOBLOCK)
        self._number += 1

    def answer_replays(self) -> None:
        """Send readers what they ask for: all batches that are kept from a number on."""
        if self.replays is None:
            return
        for _ in range(MAX_REPLAYS):
            try:
                reader, *_, asked = self.replays.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            if len(asked) != 8:
                continue  # not a reader of ours
            first = int.from_bytes(asked, "big")
            answers = [(number.to_bytes(8, "big"), payload) for number, payload in self._kept if number >= first]
            for number, payload in (*answers, (END_OF_REPLAY, b"")):
                with suppress(zmq.Again, zmq.ZMQError):  # the reader is gone
                    self.replays.send_multipart((reader, b"", self._topic, number, payload), zmq.NOBLOCK)

    def close(self) -> None:
        self._context.destroy(linger=0)
