"""`neuron-operator run`: builds the object graph of one replica and runs it until a signal or a fatal error.

All replicas keep their caches up to date; the one that holds the Lease works. kopf owns the process: on SIGTERM it
cancels the work, which releases the Lease.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import socket
import sys
import uuid
from collections.abc import AsyncIterator, Callable, Iterable, Sequence, Set
from contextlib import AbstractAsyncContextManager
from dataclasses import KW_ONLY, dataclass, replace
from datetime import UTC, datetime
from functools import partial
from resource import RLIMIT_NOFILE, getrlimit, setrlimit

import uvloop
from aiohttp import web

from neuron_operator.api.errors import OperatorError
from neuron_operator.cluster.apart import Work, run_apart, run_on
from neuron_operator.cluster.client import (
    CHILDREN,
    NEURON_MODELS,
    Client,
    Forbidden,
    NotFound,
    accept_deep_json,
    connect,
)
from neuron_operator.cluster.holding import Holdings
from neuron_operator.cluster.lease import LeaderLease
from neuron_operator.cluster.reflector import Caches, Key, Version, key_of_model
from neuron_operator.cluster.workqueue import WorkQueue
from neuron_operator.decide.adapter import decide_adapter
from neuron_operator.decide.course import decide
from neuron_operator.read.objects import dig
from neuron_operator.read.world import UPGRADES, Announcement, Object, Upgrade
from neuron_operator.run import settings as settings_module
from neuron_operator.run.handlers import Poster, run_kopf
from neuron_operator.run.installed import (
    INSTALL,
    check_schemas,
    optional_children,
    refused_namespaces,
    until_one_is_granted,
)
from neuron_operator.run.metrics import Metrics
from neuron_operator.run.pace import Pace
from neuron_operator.run.reconcile import Decide, Reconciler, run_workers
from neuron_operator.run.settings import InvalidSetting, RunSettings
from neuron_operator.run.upgrades import Turns

logger = logging.getLogger(__name__)

COLLECT_AFTER = 20_000
"""New objects until the collector looks for cycles. Passes make thousands from JSON, which has none."""

Connect = Callable[[], AbstractAsyncContextManager[Client]]


@dataclass(eq=False)
class Operator:
    """One replica without its process: caches, Lease, queue and workers."""

    client: Client
    settings: RunSettings
    metrics: Metrics
    _: KW_ONLY
    post: Callable[[Object, Announcement], None]
    connect_lease: Connect | None = None
    """Opens a connection for the Lease, which is then kept on a thread of its own; None: on this event loop, through
    `client`."""
    left_out: Set[str] = frozenset()
    """Namespaces that could not be watched at the start."""
    decide: Decide = decide
    now: Callable[[], datetime] = lambda: datetime.now(UTC)

    def __post_init__(self) -> None:
        settings, metrics = self.settings, self.metrics
        self._queue: WorkQueue[Key] | None = None
        """The queue of this term; None while another replica leads."""
        self.caches = Caches(
            self.client,
            settings.watch_namespaces or (None,),
            wake=self.wake,
            children=(*CHILDREN, *optional_children(settings.models)),
            count_start=lambda plural, how: metrics.watch_starts.labels(plural, how).inc(),
        )
        self._lease: LeaderLease
        """Once the caches are filled."""
        self.turns, self.pace = Turns(self.wake), Pace(self.wake)
        self._holdings = Holdings(self.client, self.caches, settings.installation, check_term=self._check_term)
        self._reconciler = Reconciler(
            self.client,
            self.caches,
            settings.models,
            self.decide,
            decide_adapter=decide_adapter,
            post=self.post,
            now=self.now,
            check_term=self._check_term,
            turns=self.turns,
            pace=self.pace,
            holdings=self._holdings,
        )
        metrics.leader.set_function(lambda: self.is_leading)
        metrics.queue_depth.set_function(lambda: len(self._queue or ()))
        metrics.report_models(lambda: self._own(self.caches.models))
        metrics.report_adapters(lambda: self._own(self.caches.adapters))
        metrics.foreign_namespaces.set_function(self._count_foreign)
        metrics.refused_namespaces.set_function(lambda: len(self.refused))
        for upgrade in UPGRADES:
            metrics.upgrades.labels(upgrade).set_function(partial(self._count_upgrades, upgrade))

    def _own(self, objects: Callable[[], Iterable[Object]]) -> Iterable[Object]:
        found = objects() if self.is_leading else ()
        return (one for one in found if not self._holdings.is_foreign(one["metadata"]["namespace"]))

    def _count_foreign(self) -> int:
        namespaces = {namespace for namespace, _ in self.caches.model_keys()} if self.is_leading else ()
        return sum(map(self._holdings.is_foreign, namespaces))

    def _count_upgrades(self, upgrade: Upgrade) -> int:
        return self.turns.count()[upgrade] if self.is_leading else 0

    @property
    def is_leading(self) -> bool:
        return self._queue is not None

    @property
    def refused(self) -> Set[str]:
        """The namespaces that may not be watched; empty text: the cluster."""
        return self.left_out | self.caches.refused

    @property
    def is_ready(self) -> bool:
        """Whether the caches are filled, and may be kept up to date for some namespace."""
        return self.caches.is_synced and not set(self.settings.watch_namespaces or ("",)) <= self.refused

    def wake(self, key: Key, version: Version | None = None) -> None:
        """`version`: of an object that changed."""
        if self._queue is not None:
            self._queue.add(key, version)

    async def run(self) -> None:
        """Run until cancelled, then release the Lease. Raises ClusterFault, in a group, if a right is missing."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.caches.run(), name="caches")
            await self.caches.wait_synced()
            if self.connect_lease is None:
                await self._lead(self.client, self._work)
            else:
                await run_apart(partial(self._lead_apart, self.connect_lease, asyncio.get_running_loop()))

    async def _lead_apart(self, connect_lease: Connect, loop: asyncio.AbstractEventLoop) -> None:
        """On the thread of the Lease; the work is done on `loop`."""
        async with connect_lease() as cluster:
            await self._lead(cluster, lambda: run_on(loop, self._work))

    async def _lead(self, cluster: Client, work: Work) -> None:
        settings, identity = self.settings, f"{self.settings.identity}_{uuid.uuid4().hex[:8]}"
        self._lease = LeaderLease(cluster, settings.namespace, settings.lease_name, identity, timings=settings.lease)
        await self._lease.run(work)

    def _check_term(self) -> None:
        self._lease.check_term()

    async def _work(self) -> None:
        # Half of the workers: those of the others find a free one at once, however long the passes of one take.
        most = max(1, self.settings.num_workers // 2)
        queue = self._queue = WorkQueue[Key](party_of=lambda key: key[0], max_running=most)
        self._reconciler.begin_term()
        try:
            # The edits that nobody has acted on come first.
            keys = [key_of_model(model) for model in sorted(self.caches.models(), key=_is_observed)]
            self.turns.begin(keys)
            self.pace.begin()
            for key in (*keys, *self.caches.adapter_keys()):
                queue.add(key)
            await run_workers(queue, self._reconciler, self.metrics, self.settings.num_workers)
        finally:
            self._queue = None


def _is_observed(model: Object) -> bool:
    return bool(dig(model, "status", "observedGeneration") == model["metadata"].get("generation"))


def one_line(error: BaseException) -> str:
    """The first fault in `error` in one line, with its cure."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if isinstance(error, NotFound):
        return f"{error}; {INSTALL[NEURON_MODELS]}"
    if isinstance(error, Forbidden):
        return f"{error}; grant it with the chart (helm upgrade neuron-serving)"
    return str(error) or type(error).__name__


@contextlib.asynccontextmanager
async def serving(operator: Operator, metrics: Metrics, host: str, *ports: int) -> AsyncIterator[None]:
    """Serve `/healthz`, `/readyz` and `/metrics` on each port within the block. Raises OSError if one is in use."""

    async def healthz(_: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def readyz(_: web.Request) -> web.Response:
        refused = ", ".join(sorted(where or "the cluster" for where in operator.refused))
        text = f"leading: {operator.is_leading}\n" + (f"may not be watched: {refused}\n" if refused else "")
        return web.Response(text=text, status=200 if operator.is_ready else 503)

    async def exposition(request: web.Request) -> web.Response:
        names = request.query.getall("name[]", [])
        return web.Response(body=metrics.exposition(names), headers={"Content-Type": "text/plain; version=0.0.4"})

    app = web.Application()
    app.add_routes([web.get("/healthz", healthz), web.get("/readyz", readyz), web.get("/metrics", exposition)])
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    try:
        for port in ports:
            site = web.SockSite(runner, _listener(host, port))
            await site.start()
            logger.info("serving /healthz, /readyz and /metrics at %s", site.name)
        yield
    finally:
        await runner.cleanup()


def _listener(host: str, port: int) -> socket.socket:
    """All addresses are those of both families: a cluster's pods may have only one of them."""
    if host in ("::", "0.0.0.0"):
        if socket.has_dualstack_ipv6():
            return socket.create_server(("::", port), family=socket.AF_INET6, dualstack_ipv6=True)
        host = "0.0.0.0"  # the kernel has no IPv6
    return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)


async def run(settings: RunSettings) -> None:
    """Run one replica until SIGTERM or SIGINT. Raises OperatorError or OSError (port in use), possibly in a group."""
    metrics = Metrics()
    connected = partial(connect, settings.kubeconfig, observe=lambda *key: metrics.api_requests.labels(*key).inc())
    optional = optional_children(settings.models)
    async with connected() as cluster:
        refused = await refused_namespaces(cluster, settings.watch_namespaces, optional)
        await check_schemas(cluster)
        is_idle = refused.issuperset(settings.watch_namespaces or ("",))
        if is_idle:
            logger.error("nothing may be watched: this replica is not ready, and begins once it has the rights")
        else:
            watched = tuple(one for one in settings.watch_namespaces if one not in refused)
            settings = replace(settings, watch_namespaces=watched)
        poster = Poster()
        operator = Operator(cluster, settings, metrics, post=poster.post, connect_lease=connected, left_out=refused)

        async def work() -> None:
            ports = settings.http_port, settings.health_port
            async with serving(operator, metrics, settings.http_host, *ports), asyncio.TaskGroup() as tasks:
                if not is_idle:
                    tasks.create_task(operator.run(), name="replica")
                if refused:
                    waiting = until_one_is_granted(cluster, refused, optional)
                    tasks.create_task(waiting, name="namespaces left out")

        await run_kopf(
            work,
            cluster.configuration,
            deliver=operator.caches.deliver,
            poster=poster,
            namespaces=settings.watch_namespaces,
            identity=settings.identity,
        )


def main(argv: Sequence[str]) -> int:
    """Returns 0 after a signal, 2 for an invalid setting, 1 for a fault; prints one line for the last two."""
    try:
        settings = settings_module.load(argv)
    except InvalidSetting as error:
        print(f"neuron-operator: {error}", file=sys.stderr)
        return 2
    logging.basicConfig(
        level=settings.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr
    )
    # Every watch holds a connection, and there are 16 for each watched namespace.
    _, most = getrlimit(RLIMIT_NOFILE)
    setrlimit(RLIMIT_NOFILE, (most, most))
    accept_deep_json()
    gc.freeze()  # what is imported stays
    gc.set_threshold(COLLECT_AFTER)
    exit_code = 0
    try:
        uvloop.run(run(settings))
    except* (OperatorError, OSError) as errors:
        print(f"neuron-operator: {one_line(errors)}", file=sys.stderr)
        exit_code = 1
    return exit_code
