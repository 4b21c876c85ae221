"""What the operator may watch is found at its start, and what it may watch later begins it again."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from neuron_operator.api.errors import ClusterFault
from neuron_operator.cluster.client import NEURON_ADAPTERS, Client, Forbidden, Page, Resource
from neuron_operator.run import process
from neuron_operator.run.process import refused_namespaces


class Rights:
    """A cluster in which all may be listed but `refused`, each with its namespace."""

    def __init__(self, *refused: tuple[Resource, str]) -> None:
        self.refused = set(refused)

    async def list(self, resource: Resource, namespace: str | None, **_: Any) -> Page:
        if (resource, namespace) in self.refused:
            raise Forbidden(f"cannot list {resource.plural}", retriable=False, status=403)
        return Page((), "1")


async def test_a_namespace_without_one_right_is_left_out_until_it_has_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one whose Role is of an earlier version. Otherwise the operator would begin again and again, for all."""
    monkeypatch.setattr(process, "GRANT_SECONDS", 0.0)
    monkeypatch.setattr(process, "REGRANT_SECONDS", 0.01)
    rights = Rights((NEURON_ADAPTERS, "old"))
    cluster = cast(Client, rights)
    assert await refused_namespaces(cluster, ("new", "old")) == {"old"}
    waiting = asyncio.create_task(process.until_one_is_granted(cluster, {"old"}))
    await asyncio.sleep(0.1)
    assert not waiting.done()
    rights.refused.clear()
    with pytest.raises(ClusterFault, match="namespace old can be watched now"):
        await waiting
