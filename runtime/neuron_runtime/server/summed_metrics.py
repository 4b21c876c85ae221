"""Sums the metrics of all front ends of one command, so that any of them can answer a scrape.

Created by the front end process. Each front end returns its numbers on a socket in the run folder, after writing them
to a file. A replacement of a front end continues from that file, and for one that does not respond the file is used.
So scraped counters never decrease.

prometheus_client's multiprocess mode is not used: an increment costs ten times as much, for every token, and it would
add up numbers that the engine sends to every front end.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import msgspec

from neuron_runtime.server.exposition import TEXT, Format
from neuron_runtime.server.metrics import Metrics
from neuron_runtime.server.series import Exported

PEER_SECONDS = 5.0
"""Time limit for the response of another front end: longer than scheduling delays of a busy machine, shorter than the
scrape timeout of Prometheus (10 s by default)."""
MAX_EXPORT_BYTES = 16 * 1024 * 1024

_decoder = msgspec.msgpack.Decoder(Exported)


class SummedMetrics:
    """
    Args:
        run_dir: the folder shared by the processes of one command.
        front_end: index of this front end.
    """

    def __init__(self, metrics: Metrics, run_dir: Path, front_end: int, num_front_ends: int) -> None:
        self._metrics = metrics
        self._run_dir = run_dir
        self._front_end = front_end
        self._peers = [peer for peer in range(num_front_ends) if peer != front_end]
        self._server: asyncio.Server | None = None

    async def open(self) -> None:
        """Continue from the numbers of a predecessor, and listen for other front ends."""
        kept = self._kept(self._front_end)
        if kept is not None:
            self._metrics.restore(kept)
        if self._peers:
            path = self._socket(self._front_end)
            path.unlink(missing_ok=True)
            self._server = await asyncio.start_unix_server(self._answer, path)

    async def render(self, form: Format = TEXT) -> bytes:
        """The exposition of all front ends."""
        others = await asyncio.gather(*map(self._ask, self._peers))
        self._keep()
        return self._metrics.render([other for other in others if other is not None], form)

    def close(self) -> None:
        if self._server is not None:
            self._server.close()

    def _keep(self) -> bytes:
        """Write the numbers of this front end to its file, and return them."""
        raw = msgspec.msgpack.encode(self._metrics.export())
        path = self._file(self._front_end)
        written = path.with_suffix(".new")
        written.write_bytes(raw)
        os.replace(written, path)
        return raw

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(self._keep())
        writer.close()

    async def _ask(self, peer: int) -> Exported | None:
        try:
            async with asyncio.timeout(PEER_SECONDS):
                reader, writer = await asyncio.open_unix_connection(self._socket(peer))
                try:
                    return _decoder.decode(await reader.read(MAX_EXPORT_BYTES))
                finally:
                    writer.close()
        except (OSError, TimeoutError, msgspec.DecodeError):
            # It is starting, has exited, or stalls.
            return self._kept(peer)

    def _kept(self, front_end: int) -> Exported | None:
        try:
            return _decoder.decode(self._file(front_end).read_bytes())
        except FileNotFoundError:
            return None

    def _file(self, front_end: int) -> Path:
        return self._run_dir / f"metrics-{front_end}"

    def _socket(self, front_end: int) -> Path:
        return self._run_dir / f"metrics-{front_end}.socket"
