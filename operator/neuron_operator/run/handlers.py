"""The only module that knows kopf. Called by `run`.

Kopf owns the process (start-up, login, signals, stopping), watches the NeuronModels and posts Events about
them. It stores nothing in objects: no finalizers, no annotations, no peering.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
from collections.abc import Callable, Collection, Coroutine, Iterator
from itertools import chain, repeat
from typing import Any, cast

import aiohttp
import kopf
from kubernetes.aio.client import Configuration

from neuron_operator.api.errors import ClusterFault
from neuron_operator.api.names import GROUP, MANAGER, PLURAL, VERSION
from neuron_operator.cluster.client import (
    CONNECT_SECONDS,
    NEURON_MODELS,
    REQUEST_SECONDS,
    WATCH_SECONDS,
    WATCH_SILENCE_SECONDS,
    Forbidden,
    NotFound,
)
from neuron_operator.read.world import Announcement, Object

PAGE_SIZE = 20
"""Models that kopf lists at a time, as objects, which take several times the memory of their JSON."""
MAX_NOTE_BYTES = 1024
"""The API server refuses an Event with a longer message."""
BACKOFF_SECONDS = (1, 1, 2, 3, 5, 8, 13, 21)
"""Before kopf repeats a request that was not answered, or with 403, 429 or 5xx; the last of them again and again. With
a deleted namespace the Role in it is gone, too, and may come back."""
_FINAL = {401: Forbidden, 404: NotFound}
"""Faults that no time cures, by the status of the API server's answer."""


class Poster:
    """Posts Events about NeuronModels. Kopf sends them in the background and tries for a minute."""

    def __init__(self) -> None:
        self._context: contextvars.Context | None = None
        """The one of a handler: kopf keeps there where Events go."""

    def enable(self) -> None:
        """Called in a handler."""
        if self._context is None:
            self._context = contextvars.copy_context()

    def post(self, model: Object, announcement: Announcement) -> None:
        """Post an Event about a model, or about an adapter. It is lost while kopf has delivered no model at all: then
        nothing is served, and the object's own conditions say so."""
        if self._context is None:
            return
        message = announcement.message.encode()[:MAX_NOTE_BYTES].decode(errors="ignore")
        about = kopf.Body(cast(kopf.RawBody, model))
        self._context.run(kopf.event, about, type=announcement.type, reason=announcement.reason, message=message)


class _WithoutEnd:
    """BACKOFF_SECONDS, and the last of them again and again."""

    def __iter__(self) -> Iterator[float]:
        return chain(BACKOFF_SECONDS, repeat(BACKOFF_SECONDS[-1]))


def _is_first_attempt(record: logging.LogRecord) -> bool:
    """Kopf logs each attempt of a request, and there is no last one."""
    text = record.getMessage()
    return not text.startswith("Request attempt #") or text.startswith("Request attempt #1 ")


class _NoDiffs(kopf.DiffBaseStorage):
    """Nothing compares a model with its earlier self, which kopf would otherwise copy for each event."""

    def build(self, *, body: kopf.Body, extra_fields: Any = None) -> kopf.BodyEssence:
        return kopf.BodyEssence({})

    def fetch(self, *, body: kopf.Body) -> kopf.BodyEssence | None:
        return None

    def store(self, *, body: kopf.Body, patch: kopf.Patch, essence: kopf.BodyEssence) -> None:
        raise NotImplementedError("no handler needs it")


async def run_kopf(
    work: Callable[[], Coroutine[Any, Any, None]],
    configuration: Configuration,
    *,
    deliver: Callable[[str | None, Object], None],
    poster: Poster,
    namespaces: Collection[str],
    identity: str,
    silence_seconds: float = WATCH_SILENCE_SECONDS,
) -> None:
    """Run `work` until SIGTERM or SIGINT, or until it ends by itself, and deliver the NeuronModels of `namespaces`
    (none: of all).

    Raises what `work` raises, ClusterFault if kopf fails or may not log in; while it may not watch, it tries on.
    """
    registry = kopf.OperatorRegistry()
    ended = asyncio.Event()
    working: list[asyncio.Task[None]] = []
    # Kopf opens another session for a request that begins when it has closed its own, and leaves that one open.
    sessions: dict[kopf.ConnectionInfo, aiohttp.ClientSession] = {}

    @kopf.on.login(registry=registry)
    async def login(**__: Any) -> kopf.AiohttpSession:
        header = await configuration.get_api_key_with_prefix("BearerToken") or ""
        scheme, _, token = header.partition(" ")
        access = kopf.ConnectionInfo(
            server=configuration.host,
            ca_path=configuration.ssl_ca_cert,
            insecure=not configuration.verify_ssl,
            scheme=scheme or None,
            token=token or None,
            certificate_path=configuration.cert_file,
            private_key_path=configuration.key_file,
        )
        if access not in sessions:  # kopf tells from an equal answer that it cannot log in
            sessions[access] = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, ssl=access.as_ssl_context()),
                headers=access.as_http_headers(),
                proxy=configuration.proxy,
            )
        return kopf.AiohttpSession(server=access.server, aiohttp_session=sessions[access])

    @kopf.on.startup(registry=registry)
    async def start(**_: Any) -> None:
        task = asyncio.create_task(work(), name="operator")
        task.add_done_callback(lambda _: ended.set())
        working.append(task)

    @kopf.on.cleanup(registry=registry)
    async def end(**_: Any) -> None:
        working[0].cancel()
        await asyncio.wait(working)

    @kopf.on.event(GROUP, VERSION, PLURAL, registry=registry)
    async def observe(event: kopf.RawEvent, **_: Any) -> None:
        poster.enable()
        model = cast(dict[str, Any], event["object"])
        deliver(event["type"], dict(model))
        # Kopf keeps the object until its task for the model ends, a second later, and hundreds may change at once.
        identity = {key: model["metadata"][key] for key in ("name", "namespace", "uid")}
        model.clear()
        model["metadata"] = identity

    logging.getLogger("kopf").setLevel(logging.WARNING)
    logging.getLogger("kopf._core.reactor").setLevel(logging.CRITICAL)  # tracebacks of what is raised below
    for of_requests in ("kopf._core.reactor.observation", "kopf._cogs.clients.watching"):
        logging.getLogger(of_requests).setLevel(logging.WARNING)
        logging.getLogger(of_requests).addFilter(_is_first_attempt)
    try:
        await kopf.operator(
            registry=registry,
            settings=_settings(identity, silence_seconds),
            standalone=True,
            clusterwide=not namespaces,
            namespaces=namespaces,
            stop_flag=ended,
        )
    except OSError:
        raise
    except Exception as error:  # kopf does not export what its client raises
        raise _fault(error) from error
    finally:
        for session in sessions.values():
            await session.close()
    if working and not working[0].cancelled():
        working[0].result()


def _settings(identity: str, silence_seconds: float) -> kopf.OperatorSettings:
    settings = kopf.OperatorSettings()
    settings.scanning.disabled = True
    settings.networking.request_timeout = REQUEST_SECONDS
    settings.networking.connect_timeout = CONNECT_SECONDS
    settings.networking.error_backoffs = _WithoutEnd()
    settings.watching.server_timeout = WATCH_SECONDS
    settings.watching.inactivity_timeout = silence_seconds
    settings.watching.chunk_size = PAGE_SIZE
    settings.queueing.idle_timeout = 1.0  # a task for each model that has just changed
    settings.persistence.diffbase_storage = _NoDiffs()
    settings.posting.reporting_component = f"{GROUP}/{MANAGER}"
    settings.posting.reporting_instance = identity[:128]
    settings.posting.event_name_prefix = f"{MANAGER}-"
    return settings


def _fault(error: Exception) -> ClusterFault:
    """What ended kopf. The first cause has the API server's status and message, if that refused a request."""
    cause: BaseException = error
    while not hasattr(cause, "message") and cause.__cause__ is not None:
        cause = cause.__cause__
    status: int = getattr(cause, "status", 0)
    message, kind = getattr(cause, "message", None) or error, _FINAL.get(status, ClusterFault)
    return kind(f"cannot watch {NEURON_MODELS.plural}: {message}", retriable=kind is ClusterFault, status=status)
