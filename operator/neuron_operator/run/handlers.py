"""The only module that knows kopf, which owns the process: start-up, login, signals, liveness, stopping. For `run`.

kopf watches no resource here and posts no Events: docs/architecture.md says why.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

import kopf
from kubernetes.aio.client import Configuration

from neuron_operator.api.errors import ClusterFault


async def run_kopf(
    work: Callable[[], Coroutine[Any, Any, None]], configuration: Configuration, liveness_endpoint: str
) -> None:
    """Run `work` until SIGTERM or SIGINT, or until it ends by itself.

    Raises what `work` raises, OSError if the endpoint's port is in use, ClusterFault if kopf fails.
    """
    registry = kopf.OperatorRegistry()
    ended = asyncio.Event()
    working: list[asyncio.Task[None]] = []

    @kopf.on.login(registry=registry)
    async def login(**__: Any) -> kopf.ConnectionInfo:
        header = await configuration.get_api_key_with_prefix("BearerToken") or ""
        scheme, _, token = header.partition(" ")
        return kopf.ConnectionInfo(
            server=configuration.host,
            ca_path=configuration.ssl_ca_cert,
            insecure=not configuration.verify_ssl,
            scheme=scheme or None,
            token=token or None,
            certificate_path=configuration.cert_file,
            private_key_path=configuration.key_file,
            proxy_url=configuration.proxy,
        )

    @kopf.on.startup(registry=registry)
    async def start(**_: Any) -> None:
        task = asyncio.create_task(work(), name="operator")
        task.add_done_callback(lambda _: ended.set())
        working.append(task)

    @kopf.on.cleanup(registry=registry)
    async def end(**_: Any) -> None:
        working[0].cancel()
        await asyncio.wait(working)

    logging.getLogger("kopf").setLevel(logging.WARNING)
    settings = kopf.OperatorSettings()
    settings.posting.enabled = False
    settings.scanning.disabled = True
    settings.networking.request_timeout = 30
    try:
        await kopf.operator(
            registry=registry,
            settings=settings,
            standalone=True,
            clusterwide=True,
            stop_flag=ended,
            liveness_endpoint=liveness_endpoint,
        )
    except OSError:
        raise
    except Exception as error:  # kopf does not export what its client raises
        raise ClusterFault(f"kopf failed: {error}", retriable=True) from error
    if working and not working[0].cancelled():
        working[0].result()
