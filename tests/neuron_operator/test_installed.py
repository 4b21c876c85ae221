"""What the operator may watch is found at its start, and what it may watch later begins it again."""

from __future__ import annotations

import asyncio
import copy
from typing import Any, cast

import pytest

from neuron_operator.api.errors import ClusterFault
from neuron_operator.api.schema import ADAPTER, MODEL, Definition, schema_of
from neuron_operator.cluster.client import NEURON_ADAPTERS, Client, Forbidden, Page, Resource
from neuron_operator.run import installed
from neuron_operator.run.installed import check_schemas, refused_namespaces


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
    monkeypatch.setattr(installed, "GRANT_SECONDS", 0.0)
    monkeypatch.setattr(installed, "REGRANT_SECONDS", 0.01)
    rights = Rights((NEURON_ADAPTERS, "old"))
    cluster = cast(Client, rights)
    assert await refused_namespaces(cluster, ("new", "old")) == {"old"}
    waiting = asyncio.create_task(installed.until_one_is_granted(cluster, {"old"}))
    await asyncio.sleep(0.1)
    assert not waiting.done()
    rights.refused.clear()
    with pytest.raises(ClusterFault, match="namespace old can be watched now"):
        await waiting


class Published(Rights):
    """A cluster whose CRDs have these schemas."""

    def __init__(self, **schemas: Any) -> None:
        super().__init__()
        self.schemas = schemas

    async def schema(self, resource: Resource) -> Any:
        found = self.schemas[resource.plural]
        if isinstance(found, Exception):
            raise found
        return copy.deepcopy(found)


def published(definition: Definition) -> Any:
    return {"properties": {"status": schema_of(definition.status)}}


async def test_a_crd_of_an_earlier_version_ends_the_start_with_what_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installed, "GRANT_SECONDS", 0.0)
    adapters = published(ADAPTER)
    await check_schemas(cast(Client, Published(neuronmodels=published(MODEL), neuronadapters=adapters)))
    earlier = published(MODEL)
    status = earlier["properties"]["status"]["properties"]
    del status["plan"]["properties"]["defaultFor"], status["groups"]["items"]["properties"]["attempt"]
    with pytest.raises(ClusterFault) as fault:
        await check_schemas(cast(Client, Published(neuronmodels=earlier, neuronadapters=adapters)))
    text = "older than this operator and lacks status.plan.defaultFor, status.groups[].attempt; install"
    assert text in str(fault.value)
    del earlier["properties"]["status"]
    with pytest.raises(ClusterFault, match="lacks status; install"):
        await check_schemas(cast(Client, Published(neuronmodels=earlier, neuronadapters=adapters)))


async def test_a_schema_that_may_not_be_read_or_is_not_there_yet_is_not_checked() -> None:
    denied = Forbidden("no right", retriable=False, status=403)
    await check_schemas(cast(Client, Published(neuronmodels=denied, neuronadapters={})))
