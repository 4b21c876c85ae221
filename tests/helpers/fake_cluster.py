"""An in-memory API server for tests in virtual time: resource versions, UIDs, conflicts, watches with bounded history.
It refuses what the real one refuses (tests/cluster runs the same code against the real one). It neither sets defaults
nor merges."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator

import msgspec

from neuron_operator.cluster.client import (
    AlreadyExists,
    Conflict,
    Gone,
    NotFound,
    Page,
    Resource,
    Unreachable,
    WatchEvent,
)
from neuron_operator.read.world import Object


class FakeCluster:
    """`is_down` makes every request fail and ends watches; a watch can replay `remembered` events."""

    def __init__(self, remembered: int = 1000) -> None:
        self.remembered = remembered
        self.is_down = False
        self.calls: list[str] = []
        self._objects: dict[tuple[str, str, str], Object] = {}
        self._version = 0
        self._uids = itertools.count(1)
        self._events: list[tuple[int, str, WatchEvent]] = []
        self._changed = asyncio.Condition()

    async def get(self, resource: Resource, namespace: str | None, name: str) -> Object:
        await self._call("get")
        return self._find(resource, namespace, name)

    async def list(
        self, resource: Resource, namespace: str | None, *, label_selector: str = "", field_selector: str = ""
    ) -> Page:
        await self._call("list")
        items = tuple(obj for (plural, _, _), obj in self._objects.items() if plural == resource.plural)
        return Page(items, str(self._version))

    async def watch(
        self,
        resource: Resource,
        namespace: str | None,
        *,
        resource_version: str,
        label_selector: str = "",
        field_selector: str = "",
    ) -> AsyncIterator[WatchEvent]:
        await self._call("watch")
        seen = int(resource_version)
        while True:
            if self._events and seen < self._events[0][0] - 1:
                raise Gone("too old resource version", retriable=True, status=410)
            for version, plural, event in list(self._events):
                if version > seen:
                    seen = version
                    if plural == resource.plural:
                        yield event
            async with self._changed:
                await self._changed.wait()
            self._check()

    async def create(self, resource: Resource, obj: Object, *, dry_run: bool = False) -> Object:
        await self._call("create")
        key = (resource.plural, obj["metadata"].get("namespace", ""), obj["metadata"]["name"])
        if key in self._objects:
            raise AlreadyExists(f"{key} exists", retriable=True, status=409)
        if dry_run:
            return obj
        return await self._store(resource, obj, "ADDED", {"uid": str(next(self._uids))})

    async def replace(self, resource: Resource, obj: Object) -> Object:
        await self._call("update")
        live = self._find(resource, obj["metadata"].get("namespace"), obj["metadata"]["name"])
        if live["metadata"]["resourceVersion"] != obj["metadata"]["resourceVersion"]:
            raise Conflict("the object has been modified", retriable=True, status=409)
        return await self._store(resource, obj, "MODIFIED", {"uid": live["metadata"]["uid"]})

    async def apply(self, resource: Resource, desired: Object, live: Object) -> Object:
        raise NotImplementedError("merging needs the real server: use tests/helpers/operators.py")

    async def apply_status(self, resource: Resource, live: Object, status: Object) -> Object:
        raise NotImplementedError("merging needs the real server: use tests/helpers/operators.py")

    async def patch(self, resource: Resource, live: Object, patch: Object, *, unchanged: bool = True) -> Object:
        raise NotImplementedError("merging needs the real server: use tests/helpers/operators.py")

    async def delete(self, resource: Resource, live: Object, *, unchanged: bool = False) -> None:
        await self._call("delete")
        metadata = live["metadata"]
        found = self._find(resource, metadata.get("namespace"), metadata["name"])
        if found["metadata"]["uid"] != metadata["uid"]:
            raise Conflict("the UID in the precondition does not match", retriable=True, status=409)
        if unchanged and found["metadata"]["resourceVersion"] != metadata["resourceVersion"]:
            raise Conflict("the resourceVersion in the precondition does not match", retriable=True, status=409)
        del self._objects[resource.plural, metadata.get("namespace", ""), metadata["name"]]
        await self._publish(resource, "DELETED", found, {})

    async def cut(self, is_down: bool) -> None:
        """Turns the network off or on."""
        self.is_down = is_down
        async with self._changed:
            self._changed.notify_all()

    async def _store(self, resource: Resource, obj: Object, kind: str, stamps: Object) -> Object:
        stored = await self._publish(resource, kind, obj, stamps)
        self._objects[resource.plural, obj["metadata"].get("namespace", ""), obj["metadata"]["name"]] = stored
        return stored

    async def _publish(self, resource: Resource, kind: str, obj: Object, stamps: Object) -> Object:
        self._version += 1
        stamped = {**obj, "metadata": {**obj["metadata"], **stamps, "resourceVersion": str(self._version)}}
        event = msgspec.json.decode(msgspec.json.encode({"type": kind, "object": stamped}), type=WatchEvent)
        self._events = [*self._events, (self._version, resource.plural, event)][-self.remembered :]
        async with self._changed:
            self._changed.notify_all()
        return stamped

    def _find(self, resource: Resource, namespace: str | None, name: str) -> Object:
        found = self._objects.get((resource.plural, namespace or "", name))
        if found is None:
            raise NotFound(f"{resource.plural} {name} not found", retriable=True, status=404)
        return found

    async def _call(self, verb: str) -> None:
        self.calls.append(verb)
        await asyncio.sleep(0.01)
        self._check()

    def _check(self) -> None:
        if self.is_down:
            raise Unreachable("no route to host", retriable=True)
