"""`neuron-gateway`: builds the gateway and runs it until a signal.

With models in its configuration or flags it needs no cluster: for tests, and for users' own machines.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import logging
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path
from resource import RLIMIT_NOFILE, getrlimit, setrlimit
from typing import Any

import uvloop
import yaml
from aiohttp import web

from neuron_operator.api.errors import OperatorError
from neuron_operator.cluster.client import accept_deep_json, connect
from neuron_operator.gateway import config as config_module
from neuron_operator.gateway.access_log import LineWriter
from neuron_operator.gateway.clients import ClientConnection
from neuron_operator.gateway.config import Config, InvalidConfig
from neuron_operator.gateway.gateway import Gateway
from neuron_operator.gateway.metrics import Metrics
from neuron_operator.gateway.models import static
from neuron_operator.gateway.watching import Watching, wake

logger = logging.getLogger(__name__)

VARIABLE = "NEURON_GATEWAY_CONFIG"
BACKLOG = 4096
COLLECT_AFTER = 50_000
"""New objects until the collector looks for cycles, of which requests make few."""


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="neuron-gateway",
        description="One URL for all models: routes requests by their model and wakes sleeping ones.",
    )
    parser.add_argument("--version", action="version", version=f"neuron-gateway {version('neuron-serving')}")
    parser.add_argument(
        "--config", type=Path, metavar="FILE", help=f"YAML or JSON; by default the value of {VARIABLE}, if it is set"
    )
    parser.add_argument(
        "--model",
        action="append",
        default=[],
        metavar="NAME=HOST:PORT[,...]",
        help="serve this model from these addresses, without a cluster; may be repeated",
    )
    parser.add_argument("--keys-file", metavar="FILE", help="API keys: a list of names, keys and what each may do")
    parser.add_argument("--host", help="address to listen on; all by default")
    parser.add_argument("--port", type=int, help="port of the API; 0: a free one; 8000 by default")
    parser.add_argument("--metrics-port", type=int, help="port of /metrics, /healthz and /readyz; 8080 by default")
    parser.add_argument("--kubeconfig", metavar="FILE", help="the cluster; by default that of the pod, or $KUBECONFIG")
    return parser


def load(argv: Sequence[str], environ: Mapping[str, str] = os.environ) -> Config:
    """Raises InvalidConfig."""
    given = arguments().parse_args(argv)
    try:
        text = given.config.read_text() if given.config is not None else environ.get(VARIABLE, "")
        document: Any = yaml.safe_load(text) if text.strip() else {}
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise InvalidConfig(f"the configuration cannot be read: {error}") from error
    if not isinstance(document, dict):
        raise InvalidConfig("the configuration must be an object")
    flags = {
        "host": given.host,
        "port": given.port,
        "metricsPort": given.metrics_port,
        "keysFile": given.keys_file,
        "kubeconfig": given.kubeconfig,
    }
    document |= {name: value for name, value in flags.items() if value is not None}
    for one in given.model:
        name, equals, addresses = one.partition("=")
        if not (name and equals):
            raise InvalidConfig(f"--model {one}: write NAME=HOST:PORT[,HOST:PORT]")
        entry = {"name": name, "addresses": [part for part in addresses.split(",") if part]}
        document["models"] = [*document.get("models", ()), entry]
    return config_module.parse(document)


@contextlib.asynccontextmanager
async def serving(gateway: Gateway) -> AsyncIterator[int]:
    """The port of the API, open within the block; after it no new connection is accepted."""
    config = gateway.config
    server = await gateway.loop.create_server(
        lambda: ClientConnection(gateway), sock=_listener(config.host, config.port), backlog=BACKLOG
    )
    timekeeper = asyncio.create_task(gateway.keep_time(), name="timekeeper")
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        timekeeper.cancel()
        server.close()


@contextlib.asynccontextmanager
async def observed(gateway: Gateway) -> AsyncIterator[None]:
    """Serve `/metrics`, `/healthz` and `/readyz` within the block."""

    async def healthz(_: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def readyz(_: web.Request) -> web.Response:
        status, word = gateway.health("/health")
        return web.Response(text=f"{word}\n", status=status)

    async def exposition(_: web.Request) -> web.Response:
        content = {"Content-Type": "text/plain; version=0.0.4"}
        return web.Response(body=gateway.metrics.exposition(), headers=content)

    app = web.Application()
    app.add_routes([web.get("/healthz", healthz), web.get("/readyz", readyz), web.get("/metrics", exposition)])
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    try:
        await web.SockSite(runner, _listener(gateway.config.host, gateway.config.metrics_port)).start()
        yield
    finally:
        await runner.cleanup()


def _listener(host: str, port: int) -> socket.socket:
    """All addresses are those of both families: a cluster's pods may have only one of them."""
    if host in ("::", "0.0.0.0"):
        if socket.has_dualstack_ipv6():
            return socket.create_server(("::", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=BACKLOG)
        host = "0.0.0.0"  # the kernel has no IPv6
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=BACKLOG)


async def run(config: Config) -> None:
    """Until SIGTERM or SIGINT, and the end of the requests that run then. Raises OperatorError or OSError."""
    stopped = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    async with contextlib.AsyncExitStack() as stack:
        log = None
        if config.access_log and sys.stdout is not None:
            writer = LineWriter(sys.stdout.fileno())
            stack.callback(writer.close)
            log = writer.write
        if config.models:
            gateway = Gateway(config, Metrics(), log=log)
            for model in config.models:
                gateway.put(static(model))
            gateway.is_ready = True
        else:
            cluster = await stack.enter_async_context(connect(config.kubeconfig))
            gateway = Gateway(config, Metrics(), log=log, wake=partial(wake, cluster))
            tasks = await stack.enter_async_context(asyncio.TaskGroup())
            watch = tasks.create_task(Watching(cluster, config.namespaces or (None,), gateway).run(), name="watches")
            stack.callback(watch.cancel)
        await stack.enter_async_context(observed(gateway))
        port = await stack.enter_async_context(serving(gateway))
        logger.info("serving on port %d", port)
        await stopped.wait()
        logger.info("stopping: %d requests run", len(gateway.exchanges))
        await gateway.drain()


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 0 after a signal, 2 for a wrong configuration, 1 for a fault; prints one line for the last two."""
    try:
        config = load(sys.argv[1:] if argv is None else argv)
    except InvalidConfig as error:
        print(f"neuron-gateway: {error}", file=sys.stderr)
        return 2
    logging.basicConfig(
        level=config.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr
    )
    _, most = getrlimit(RLIMIT_NOFILE)
    setrlimit(RLIMIT_NOFILE, (most, most))
    accept_deep_json()
    gc.freeze()  # what is imported stays
    gc.set_threshold(COLLECT_AFTER)
    exit_code = 0
    try:
        uvloop.run(run(config))
    except* InvalidConfig as errors:
        print(f"neuron-gateway: {_first(errors)}", file=sys.stderr)
        exit_code = 2
    except* (OperatorError, OSError) as errors:
        print(f"neuron-gateway: {_first(errors)}", file=sys.stderr)
        exit_code = 1
    return exit_code


def _first(error: BaseException) -> str:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return str(error) or type(error).__name__


if __name__ == "__main__":
    raise SystemExit(main())
