"""Responds to generation requests in any API: runs the generation, and sends what a writer makes of its pieces.

Stop 9 of a request, as plain ASGI: one write per wake-up. Headers are sent with the first message of the engine, so
that a refusal still gets its status. The formats are the writers of `apis`.
"""

from __future__ import annotations

import asyncio
from contextlib import AbstractContextManager

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from neuron_runtime.apis.generation import Piece, Writer
from neuron_runtime.errors import ServingError
from neuron_runtime.server.exchange import exchange_of
from neuron_runtime.server.generation import LiveGeneration
from neuron_runtime.server.http_protocol import body_writer
from neuron_runtime.server.wire import error_response

MANY_TOKENS = 256
"""Responses with log-probabilities of more tokens are formatted on a thread."""


MANY_BYTES = 2**16
"""Responses with more bytes of vectors too."""


class ClientGone(Exception):
    """The client disconnected."""


class GenerationResponse(Response):
    """The ASGI response of one generation request; `running` is entered while it runs, for a drain to wait."""

    def __init__(self, writer: Writer, generation: LiveGeneration, running: AbstractContextManager[None]) -> None:
        super().__init__()
        self._writer = writer
        self._generation = generation
        self._running = running
        self._begun = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        watch = asyncio.create_task(self._watch(receive))
        try:
            with self._running:
                await (self._stream if self._generation.ask.stream else self._whole)(scope, receive, send)
        except ServingError as error:
            await self._fail(error, scope, receive, send)
        except ClientGone:
            return
        finally:
            watch.cancel()
            self._generation.end()

    async def _watch(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._generation.fail(ClientGone())

    async def _stream(self, scope: Scope, receive: Receive, send: Send) -> None:
        generation = self._generation
        await generation.begin()
        headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
        writer, body = self._writer, body_writer(scope)
        body.begin()
        self._begun = True
        await send({"type": "http.response.start", "status": 200, "headers": headers})

        def show(pieces: list[Piece]) -> bool:
            if not body.writable:
                return False
            body.write(writer.pieces(pieces))
            return True

        body.when_writable(generation.show_pending)
        await generation.finish(show)
        body.end()
        body.write(writer.end())
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _whole(self, scope: Scope, receive: Receive, send: Send) -> None:
        generation = self._generation
        await generation.begin()
        answers = await generation.whole()
        details = [answer.details for answer in answers if answer.details is not None]
        is_long = sum(len(one.located) + len(one.prompt_logprobs) for one in details) > MANY_TOKENS
        if is_long or sum(len(answer.vector) for answer in answers) > MANY_BYTES:
            # Formatting them would delay streams.
            body = await asyncio.to_thread(self._writer.whole, answers)
        else:
            body = self._writer.whole(answers)
        await Response(body, media_type="application/json")(scope, receive, send)

    async def _fail(self, error: ServingError, scope: Scope, receive: Receive, send: Send) -> None:
        response = error_response(error, exchange_of(scope))
        if not self._begun:
            await response(scope, receive, send)
            return
        # The status was sent.
        body_writer(scope).write(self._writer.failure(error))
        await send({"type": "http.response.body", "body": b"", "more_body": False})
