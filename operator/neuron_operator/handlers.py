"""The only module that knows kopf: an event of a NeuronModel puts its key into the queue, and nothing else.

kopf brings login, start-up and its own well-tried watch as a second waker beside our reflectors; it writes nothing: no
finalizer, no annotation, no peering, no Events. What a pass reads never comes from here.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import aiohttp
import kopf

from neuron_operator.errors import ClusterFault
from neuron_operator.names import GROUP, PLURAL, VERSION
from neuron_operator.reflector import Key

logger = logging.getLogger(__name__)

WATCH_SECONDS = 600


def registry_for(
    wake: Callable[[Key], None], server: str, open_session: Callable[[], aiohttp.ClientSession]
) -> kopf.OperatorRegistry:
    """The handlers. `open_session` makes a session of kopf's own: it closes the one it is given."""
    registry = kopf.OperatorRegistry()

    @kopf.on.login(registry=registry)
    async def login(**_: Any) -> kopf.AiohttpSession:
        return kopf.AiohttpSession(server=server, aiohttp_session=open_session())

    @kopf.on.event(GROUP, VERSION, PLURAL, registry=registry)
    async def seen(namespace: str | None, name: str | None, **_: Any) -> None:
        if namespace and name:
            wake((namespace, name))

    return registry


async def run_kopf(
    registry: kopf.OperatorRegistry,
    namespaces: Sequence[str],
    started: Callable[[], Awaitable[None]] | None,
    stop: asyncio.Event,
) -> None:
    """Run kopf until `stop` is set; `namespaces` empty means all.

    `started` is awaited once kopf has set its signal handlers, which the caller may then replace. Raises ClusterFault
    where kopf ends by itself: what its own watch meets (a right taken away, the resource deleted) it does not survive.
    """
    logging.getLogger("kopf").setLevel(logging.WARNING)
    settings = kopf.OperatorSettings()
    settings.posting.enabled = False
    settings.scanning.disabled = True
    settings.watching.server_timeout = WATCH_SECONDS
    settings.watching.client_timeout = WATCH_SECONDS + 30
    settings.watching.connect_timeout = 5
    settings.networking.request_timeout = 30
    others = asyncio.all_tasks()  # kopf cancels all other tasks of the loop when it ends
    tasks = await kopf.spawn_tasks(
        registry=registry,
        settings=settings,
        standalone=True,
        clusterwide=not namespaces,
        namespaces=namespaces,
        stop_flag=stop,
    )
    if started is not None:
        await started()
    try:
        await kopf.run_tasks(tasks, ignored=others)
    except Exception as error:  # kopf does not export what its client raises
        raise ClusterFault(f"the watch of {PLURAL} by kopf ended: {error}", retriable=True) from error
