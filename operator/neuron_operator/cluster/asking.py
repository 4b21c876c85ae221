"""Asks a replica what it tells about its adapters, or for its metrics. Called by `on_demand`, and by `local` without a
cluster.

A replica may be anything: neither redirects nor proxies are followed, and no credentials are sent.
"""

from __future__ import annotations

import aiohttp

from neuron_operator.read.world import Told

ASK_TIMEOUT = aiohttp.ClientTimeout(total=2.0)
MAX_TOLD_BYTES = 1_048_576


async def told_at(address: str) -> Told:
    try:
        async with (
            aiohttp.ClientSession(timeout=ASK_TIMEOUT) as session,
            session.get(address, allow_redirects=False) as response,
        ):
            content = await response.content.read(MAX_TOLD_BYTES)
            while len(content) < MAX_TOLD_BYTES and (more := await response.content.read(MAX_TOLD_BYTES)):
                content += more
            if response.status != 200:
                return Told(fault=f"it answers with status {response.status}")
            return Told(content.decode(errors="replace"))
    except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
        return Told(fault=str(error) or type(error).__name__)
