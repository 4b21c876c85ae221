"""Writes that somebody else undoes: an admission policy that changes a field, an autoscaler of the Deployment.

The pass asks before it repeats a write. A few are made at once, the next ones ever more rarely, up to minutes apart,
and meanwhile the status names object, field, wanted and found. Writes are kept in memory; from the status a new leader
knows what was contested, and goes on with the wait.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

from neuron_operator.api.manifest import shown
from neuron_operator.api.names import digest
from neuron_operator.cluster.containment import quantity
from neuron_operator.read.objects import items
from neuron_operator.read.world import Object

NUM_AT_ONCE = 5
MIN_WAIT_SECONDS, MAX_WAIT_SECONDS = 30.0, 600.0
MAX_DOUBLINGS = 16
"""More than lead to the longest wait. A contest may last for weeks."""
MAX_KEPT = 8192
MAX_SHOWN = 160
"""Characters of a value in a message."""


@dataclass(frozen=True)
class Difference:
    """The first field of a desired object that the live one lacks or has otherwise."""

    path: tuple[str, ...]
    desired: Any
    live: Any
    said: str = ""
    """Instead of path and values."""

    @property
    def subject(self) -> str:
        """What `words` begin with, whatever the values are."""
        return self.said or f"{'.'.join(self.path)}: wanted "

    @property
    def words(self) -> str:
        if self.said:
            return self.said
        scaling = "; scale the NeuronModel instead" if self.path == ("spec", "replicas") else ""
        desired, live = shown(self.desired, MAX_SHOWN), shown(self.live, MAX_SHOWN)
        return f"{self.subject}{desired}, but somebody else makes it {live}{scaling}"


DELETED = Difference(("status",), True, None, said="somebody deletes it before it ends")
"""What is found where a Job is gone."""
_MORE = Difference(("metadata",), True, None, said="a field comes back that the operator does not set")


def status_of(status: Object) -> Difference:
    """That the status is not this one. Times do not count: they are those of the writer."""
    conditions = [{**one, "lastTransitionTime": ""} for one in items(status, "conditions")]
    path = ("status", digest({**status, "conditions": conditions}))
    return Difference(path, True, None, said="somebody else writes the status")


def difference(desired: Object, live: Object) -> Difference:
    """Why the live object does not contain what is desired."""
    return _difference((), desired, live) or _MORE


def _difference(path: tuple[str, ...], desired: Any, live: Any) -> Difference | None:
    if isinstance(desired, dict):
        parts = [(name, value, live.get(name) if isinstance(live, dict) else None) for name, value in desired.items()]
    elif isinstance(desired, list | tuple) and isinstance(live, list) and len(desired) <= len(live):
        named = {one["name"]: one for one in live if isinstance(one, dict) and "name" in one}
        if desired and all(isinstance(one, dict) and one.get("name") in named for one in desired):
            parts = [(one["name"], one, named[one["name"]]) for one in desired]
        elif len(desired) == len(live):
            parts = [(str(number), *pair) for number, pair in enumerate(zip(desired, live, strict=True))]
        else:
            return Difference(path, desired, live)
    else:
        is_same = quantity(desired) == quantity(live) or (live is None and not desired)
        return None if is_same else Difference(path, desired, live)
    return next((deeper for part in parts if (deeper := _difference((*path, part[0]), *part[1:])) is not None), None)


@dataclass(frozen=True)
class _Write:
    wants: Difference
    at: float
    num: int
    """How often it was made since somebody first undid it."""
    uid: str = ""
    """The UID of the object that it created."""

    @property
    def wait_seconds(self) -> float:
        if self.num < NUM_AT_ONCE:
            return 0.0
        return min(MIN_WAIT_SECONDS * 2.0 ** min(self.num - NUM_AT_ONCE, MAX_DOUBLINGS), MAX_WAIT_SECONDS)


class Contests:
    """The last write of each object of one process. Bounded."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last: OrderedDict[Hashable, _Write] = OrderedDict()

    def check(self, key: Hashable, wants: Difference) -> str:
        """Before a write that repairs this: empty if it may be made, else why it has to wait."""
        before = self._undone(key, wants)
        return before.wants.words if before and self._clock() - before.at < before.wait_seconds else ""

    def wrote(self, key: Hashable, wants: Difference, uid: str = "") -> None:
        """After a write that the API server took. Nobody has undone what it refuses, such as a write of an object that
        has changed since it was read. `uid`: of the object that this created."""
        before = self._undone(key, wants)
        num = before.num + 1 if before else 1
        self._last[key] = _Write(wants, self._clock(), num, uid)
        self._last.move_to_end(key)
        if len(self._last) > MAX_KEPT:
            self._last.popitem(last=False)

    def resume(self, key: Hashable, wants: Difference, seconds: float) -> None:
        """Another process found this undone for so long: as after its writes. No-op if one of our own is remembered."""
        if key not in self._last:
            num_waits = int(seconds / MIN_WAIT_SECONDS + 1.0).bit_length() - 1
            self._last[key] = _Write(wants, self._clock(), NUM_AT_ONCE + max(0, num_waits))

    def _undone(self, key: Hashable, wants: Difference) -> _Write | None:
        """The last write, if this would repeat it because somebody else undid it."""
        before = self._last.get(key)
        if before is None or before.wants.path != wants.path or self._clock() - before.at >= 2 * MAX_WAIT_SECONDS:
            return None
        # Someone who changes his mind finds what he wrote last. Only revisions are numbered on by a rival.
        return before if wants.live != before.wants.desired or wants.path == ("revision",) else None

    def still(self, key: Hashable) -> str:
        """What was undone again and again, although it is as wanted now; empty once that has lasted."""
        before = self._last.get(key)
        is_over = before is None or self._clock() - before.at >= before.wait_seconds
        return "" if before is None or is_over else before.wants.words

    def forget(self, key: Hashable, uid: str) -> None:
        """The object that we created ended, or we delete it."""
        before = self._last.get(key)
        if before is not None and before.uid == uid:
            del self._last[key]
