"""A proxy in front of an API server that simulates faults: it answers in place of the server, and goes silent on open
connections. It speaks plain HTTP in the test's event loop, so that it sees the requests."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator, Callable

import aiohttp
from aiohttp import web

from helpers.apiserver import ApiServer

Answer = Callable[[web.Request], web.Response | None]
"""A response in place of the server's; None lets the request through."""


class ApiProxy:
    """Created by `proxying`. The switches can be set at any time."""

    def __init__(self) -> None:
        self.url = ""
        self.answer: Answer = lambda request: None
        self.user = ""
        """Of `ApiServer.tokens`: for clients that send no token over plain HTTP, as those in Go."""
        self.reshape: Callable[[list[bytes]], list[bytes]] = lambda lines: lines
        """Changes the lines of watches that arrive together."""
        self._silence = asyncio.Event()

    def silence(self) -> None:
        """Open streams go silent without closing; new connections work."""
        self._silence.set()
        self._silence = asyncio.Event()

    async def forward(
        self, request: web.Request, session: aiohttp.ClientSession, server: ApiServer
    ) -> web.StreamResponse:
        answered = self.answer(request)
        if answered is not None:
            return answered
        silenced = asyncio.ensure_future(self._silence.wait())
        headers = {
            name: value for name, value in request.headers.items() if name.lower() not in ("host", "content-length")
        }
        if self.user:
            headers["Authorization"] = f"Bearer {server.tokens[self.user]}"
        url = server.url + request.raw_path
        try:
            async with session.request(
                request.method,
                url,
                headers=headers,
                data=await request.read() or None,
                skip_auto_headers=("Content-Type",),
            ) as upstream:
                response = web.StreamResponse(status=upstream.status)
                for name in ("Content-Type", "Retry-After"):
                    if name in upstream.headers:
                        response.headers[name] = upstream.headers[name]
                await response.prepare(request)
                pending = b""
                while True:
                    reading = asyncio.ensure_future(upstream.content.readany())
                    await asyncio.wait((reading, silenced), return_when=asyncio.FIRST_COMPLETED)
                    if silenced.done():
                        reading.cancel()
                        await asyncio.Event().wait()
                    if not (chunk := reading.result()):
                        await response.write(pending)
                        return response
                    if "watch" in request.query and "json" in upstream.content_type:
                        *lines, pending = (pending + chunk).split(b"\n")
                        chunk = b"".join(line + b"\n" for line in self.reshape(lines))
                    await response.write(chunk)
        finally:
            silenced.cancel()


@contextlib.asynccontextmanager
async def proxying(server: ApiServer) -> AsyncIterator[ApiProxy]:
    """A proxy on a free port of loopback."""
    proxy = ApiProxy()
    tls = ssl.create_default_context(cafile=str(server.ca_file))
    connector = aiohttp.TCPConnector(ssl=tls, limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None)) as session:
        app = web.Application(client_max_size=2**24)

        async def forward(request: web.Request) -> web.StreamResponse:
            return await proxy.forward(request, session, server)

        app.router.add_route("*", "/{path:.*}", forward)
        runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        proxy.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        try:
            yield proxy
        finally:
            await runner.cleanup()
