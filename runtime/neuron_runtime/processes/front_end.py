"""The front end process: HTTP on one side, the engine process on the other.

Started by the supervisor as a command with the listening socket as a file descriptor; the supervisor reports engine
events and drains on its standard input. It serves before the model is ready: until then `/health` reports the progress.
It does not import torch.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import os
import socket
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import IO, Any, cast

import uvicorn
import uvloop

from neuron_runtime import record
from neuron_runtime.arguments import default_artifacts_dir, default_weights_dir
from neuron_runtime.artifacts.loading import find_adapter
from neuron_runtime.config import RuntimeConfig, load_config
from neuron_runtime.console import say
from neuron_runtime.engine.messages import Ready
from neuron_runtime.engine.pixel_files import PixelFiles
from neuron_runtime.errors import BackendFailed, Draining, FatalError
from neuron_runtime.local_settings import ONLY_NAMED, AdapterSettings, LocalSettings, add_adapter_flags, add_local_flags
from neuron_runtime.pictures.reader import PictureReader, PixelRoom, give_memory_back, load_reader
from neuron_runtime.processes import control
from neuron_runtime.processes.children import FRONT_END_DEADLINE, FRONT_END_MODULE, begun, child_parser
from neuron_runtime.processes.control import EngineEnded, EngineStalled, EngineStarted, StartDrain
from neuron_runtime.processes.lifeline import Deadline
from neuron_runtime.record import AdapterFacts
from neuron_runtime.requests.admission import Admissions
from neuron_runtime.requests.targets import Targets
from neuron_runtime.requests.texts import Text, adapted_text, load_text
from neuron_runtime.server.adapter_list import Wanted
from neuron_runtime.server.adapters import Adapters
from neuron_runtime.server.app import build_app
from neuron_runtime.server.bodies import Bodies, check_may_wait
from neuron_runtime.server.edge import Edge
from neuron_runtime.server.engine_client import EngineClient
from neuron_runtime.server.exchange import count
from neuron_runtime.server.fetched_adapters import FetchedAdapters
from neuron_runtime.server.gate import Gate
from neuron_runtime.server.http_protocol import BoundedProtocol
from neuron_runtime.server.metrics import LOG_LINES_LOST, LORA_REQUESTS, OPEN_CONNECTIONS, Metrics, process_readings
from neuron_runtime.server.series import Reading

KEEP_ALIVE_SECONDS = 75
"""Longer than common clients and proxies keep idle connections, so that they close them first."""
ALIVE_SECONDS = 30.0
"""The supervisor kills a front end whose event loop stalls for this long; a turn takes milliseconds."""
BEAT_SECONDS = 1.0
NUM_NEW_OBJECTS = 50_000
"""Garbage collection threshold, above the default because requests leave no cycles."""
SHUTDOWN_SECONDS = 5
"""Time for connections to close after their requests have ended."""


HERE = LocalSettings(default_weights_dir(), default_artifacts_dir())


class Server(uvicorn.Server):
    """uvicorn without its signal handlers, because the supervisor stops this process."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    @property
    def connections(self) -> list[BoundedProtocol]:
        return [one for one in self.server_state.connections if isinstance(one, BoundedProtocol)]

    def close_connections(self) -> None:
        """Close those that wait for a request, and the others after their answers: nothing more is admitted. A new one
        ends with the refusal of its request."""
        for connection in self.connections:
            if not connection.is_new:
                connection.shutdown()


class FrontEnd:
    """Holds the state that the routes share, and obeys the supervisor."""

    def __init__(
        self,
        config: RuntimeConfig,
        run_dir: Path,
        url: str,
        *,
        api_key_file: Path | None = None,
        settings: LocalSettings = HERE,
        adapters: AdapterSettings = ONLY_NAMED,
    ) -> None:
        self.config = config
        self.has_keys = api_key_file is not None
        self.metrics = Metrics(config.served_names[0])
        self.targets = Targets(config.served_names)
        self.gate = Gate()
        self.bodies = Bodies(config.server.max_body_bytes)
        self.pixel_files = PixelFiles(run_dir)
        self.pixel_room = PixelRoom()
        self.client = EngineClient(
            run_dir,
            self.metrics,
            on_model=self._model_found,
            on_ready=self._engine_ready,
            on_broken=self._end,
            on_adapter=lambda news: self.adapters.loaded(news.digest, news.failure),
        )
        self._fetched = FetchedAdapters(settings.weights_dir)
        self.adapters = Adapters(
            config.adapters,
            self.targets,
            self.client,
            self._bring,
            prune=self._fetched.prune,
            run_dir=run_dir,
            list_file=adapters.adapters_file,
            allows_requests=adapters.runtime_adapters == "allow",
        )
        self._edge = Edge(config.server, api_key_file, [partial(count, self.metrics)])
        self._pids: dict[str, int | None] = {"supervisor": os.getppid(), "engine": None, "front-end": os.getpid()}
        self.metrics.read_at_scrape(lambda: process_readings(self._pids))
        self.metrics.read_at_scrape(self._adapters_in_use)
        self.metrics.read_at_scrape(lambda: [(LOG_LINES_LOST, (), self._edge.num_log_lines_lost)])
        self._deadline = Deadline(run_dir / FRONT_END_DEADLINE)
        self._url = url
        self._settings = settings
        self._began = time.monotonic()
        self._text: asyncio.Task[Text] | None = None
        self._known_text: Text | None = None
        """That was loaded last."""
        self._model_dir = Path()
        self._pictures: asyncio.Task[PictureReader | None] | None = None
        self._ready: Ready | None = None
        self._admissions: Admissions | None = None
        self._over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """The end of a drain, or why this process cannot continue."""

    def admissions(self) -> Admissions:
        """Raises BackendFailed until engine and text were ready once; `client` has the current state of the engine."""
        if self._admissions is None:
            raise BackendFailed(f"not ready: {self.client.detail}")
        return self._admissions

    async def run(self, listener: socket.socket, orders: IO[Any]) -> None:
        """Serve until drained, or until the supervisor exits and closes `orders`.

        Raises FatalError if the model's text files are unusable.
        """
        config = uvicorn.Config(
            self._edge.around(build_app(self)),
            http=cast("type[BoundedProtocol]", partial(BoundedProtocol, gate=self.gate)),
            loop="none",
            ws="none",
            lifespan="off",
            access_log=False,
            log_level="warning",
            server_header=False,
            timeout_keep_alive=KEEP_ALIVE_SECONDS,
            timeout_graceful_shutdown=SHUTDOWN_SECONDS,
        )
        server = Server(config)
        beating = asyncio.create_task(self._beat())
        self.adapters.start()
        self.metrics.read_at_scrape(lambda: [(OPEN_CONNECTIONS, (), len(server.server_state.connections))])
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        following = asyncio.create_task(self._follow(orders, server))
        await asyncio.wait((serving, following, self._over), return_when=asyncio.FIRST_COMPLETED)
        following.cancel()
        server.should_exit = True
        await serving
        beating.cancel()
        self._deadline.close()
        self.adapters.close()
        self.bodies.close()
        self.client.close()
        self._edge.close()
        if self._over.done():
            self._over.result()

    def _bring(self, wanted: Wanted, model_dir: Path) -> tuple[Path, AdapterFacts, Text]:
        with self._fetched.noting():
            folder, facts = find_adapter(
                wanted.uri, model_dir, self.config, self._settings, digest=wanted.digest, version=wanted.source_digest
            )
        base = self._known_text
        assert base is not None
        text = adapted_text(base, folder, self.config.text)
        for notice in text.defaults.notices:
            if notice not in base.defaults.notices:
                say(f"adapter {wanted.name}: {notice}")
        return folder, facts, text

    def _adapters_in_use(self) -> Iterator[Reading]:
        if self._ready is not None and self.client.ready:
            in_use = self.metrics.adapters_in_use
            waiting, running = (",".join(self.adapters.names(one)) for one in in_use)
            yield LORA_REQUESTS, (str(self._ready.limits.max_adapters), waiting, running), time.time()

    async def _beat(self) -> None:
        while True:
            self._deadline.set(ALIVE_SECONDS)
            await asyncio.sleep(BEAT_SECONDS)

    async def _follow(self, orders: IO[Any], server: Server) -> None:
        """Process the supervisor's messages until it exits."""
        reader = asyncio.StreamReader()
        loop = asyncio.get_running_loop()
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), orders)
        draining: asyncio.Task[None] | None = None
        async for line in reader:
            match control.decode_line(line):
                case EngineStarted(incarnation, num_predecessors, pid, began):
                    self._ready, self._began = None, began
                    self._pids["engine"] = pid
                    self.client.engine_started(incarnation, num_predecessors)
                case EngineEnded(message):
                    self._pids["engine"] = None
                    self.client.engine_ended(message)
                case EngineStalled(message):
                    self.client.engine_stalled(message)
                case StartDrain(delay_seconds, seconds):
                    if draining is not None:
                        draining.cancel()
                    draining = asyncio.create_task(self._drain(delay_seconds, seconds, server))
                    draining.add_done_callback(self._drained)

    async def _drain(self, delay_seconds: float, seconds: float, server: Server) -> None:
        for connection in server.connections:
            connection.drain()
        # Without admission there are no requests to wait for.
        delay_seconds = delay_seconds if self._admissions else 0.0
        if not await self.gate.drain(delay_seconds, seconds, on_closed=server.close_connections):
            say(f"{self.gate.num_running} requests still run after {seconds:.0f} s: stopping them")
            self.client.fail_all(Draining("the server is shutting down and this request took too long"))
            # Time to write the error responses.
            await self.gate.drain(0, SHUTDOWN_SECONDS)

    def _drained(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled():  # by an order to drain sooner
            self._end(task.exception())

    def _model_found(self, model_dir: Path) -> None:
        self._model_dir = model_dir
        self._text = asyncio.create_task(asyncio.to_thread(load_text, model_dir, self.config.text, self.config.task))
        self._text.add_done_callback(partial(self._text_loaded, model_dir))

    def _text_loaded(self, model_dir: Path, task: asyncio.Task[Text]) -> None:
        if task.cancelled():
            return
        error = task.exception()
        if error is None:
            self._known_text = task.result()
            self.adapters.model_found(model_dir)
            self._become_ready()
        else:
            self._end(error)

    def _pictures_loaded(self, task: asyncio.Task[PictureReader | None]) -> None:
        if task.cancelled():
            return
        if error := task.exception():
            self._end(error)
        else:
            self._become_ready()

    def _end(self, error: BaseException | None) -> None:
        if self._over.done():
            return
        if error is None:
            self._over.set_result(None)
        else:
            self._over.set_exception(error)

    def _engine_ready(self, ready: Ready) -> None:
        self._ready = ready
        self.adapters.engine_ready()
        self._become_ready()

    def _become_ready(self) -> None:
        if self._ready is None or self._text is None or not self._text.done():
            return
        limits, names = self._ready.limits, self.config.served_names
        if limits.max_pictures and self.config.media.max_images and self._pictures is None:
            give_memory_back()
            # Loading takes seconds; what it finds depends on the model alone.
            loop = asyncio.get_running_loop()

            def note(seconds: float) -> None:
                loop.call_soon_threadsafe(self.metrics.picture_read, seconds)

            load = partial(load_reader, check_thread=check_may_wait, room=self.pixel_room, note_seconds=note)
            reading = (self._model_dir, self._text.result().tokenizer, self.config.media, limits.max_pictures)
            self._pictures = asyncio.create_task(asyncio.to_thread(load, *reading))
            self._pictures.add_done_callback(self._pictures_loaded)
        if self._pictures is not None and not self._pictures.done():
            return
        text = self._text.result()
        self._admissions = Admissions(
            text,
            limits,
            self.targets,
            max_queued_requests=self._ready.queue.max_requests,
            max_queued_tokens=self._ready.queue.max_tokens,
            options=self.config.server,
            task=self.config.task,
            pictures=None if self._pictures is None else self._pictures.result(),
        )
        for notice in text.defaults.served(limits).notices:
            say(notice)
        say(
            f"ready after {time.monotonic() - self._began:.1f} s: {self._url}/v1 serves {', '.join(names)} "
            f"({limits.max_model_length} tokens, {limits.max_rows} sequences)"
        )


async def run(options: argparse.Namespace) -> None:
    listener = socket.socket(fileno=options.listener_fd)
    settings, adapters = LocalSettings.of(options), AdapterSettings.of(options)
    config = load_config(options.config)
    front_end = FrontEnd(
        config,
        options.run_dir,
        options.url,
        api_key_file=options.api_key_file,
        settings=settings,
        adapters=adapters,
    )
    await front_end.run(listener, sys.stdin)


def main(arguments: list[str] | None = None) -> int:
    parser = child_parser(FRONT_END_MODULE)
    parser.add_argument("--listener-fd", type=int, required=True)
    parser.add_argument("--url", required=True)
    parser.add_argument("--api-key-file", type=Path)
    add_local_flags(parser)
    add_adapter_flags(parser)
    options = begun(parser, arguments)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    # Imported objects stay. The threshold avoids collections while a long body with many values is parsed.
    gc.freeze()
    gc.set_threshold(NUM_NEW_OBJECTS, 20, 20)
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(run(options))
    except FatalError as error:
        record.write(record.failure("serve", error), options.record)
        return int(error.exit_code)
    return 0


if __name__ == "__main__":
    sys.exit(main())
