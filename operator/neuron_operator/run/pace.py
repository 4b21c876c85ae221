"""Which NeuronAdapters may start a Job: a few at a time, the oldest first. An edit of a model's `maxRank` has all of
its adapters read again, which may be thousands. Those whose Jobs fail ask again and again: they come after the others.

`decide` tells which adapters wait and which have a Job that runs; `reconcile` asks here whether it is a turn of one.
Does no I/O. A new leader hears of running Jobs in its first passes, and until then there may be twice as many.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

from neuron_operator.cluster.reflector import Key, key_of_base
from neuron_operator.read.objects import text
from neuron_operator.read.world import MAX_ADAPTER_JOBS, JobTurn, Object

TURNS_OF_ROUND = 2
"""An adapter that fits needs no more: for a Job that reads it, and one that fetches it."""


class _Adapter(NamedTuple):
    num_rounds: int
    """Of turns that it has had: one is enough to be read and fetched."""
    created: str
    key: Key
    model: Key
    turn: JobTurn


class Pace:
    """Single-threaded; `wake` requests another pass over an adapter."""

    def __init__(self, wake: Callable[[Key], None]) -> None:
        self._wake = wake
        self._found: dict[str, dict[Key, _Adapter]] = {}
        """By namespace, those that wait, run, or are tried again later."""
        self._num_turns = Counter[Key]()

    def begin(self) -> None:
        """A term begins."""
        self._found = {}
        self._num_turns.clear()

    def take(self, key: Key) -> bool:
        """Whether the adapter may start a Job, or has started one.

        One that has told that it waits holds the turn from here until it tells otherwise: passes overlap. One whose
        Job was refused needs no other turn but room, so that its status says why all the time.
        """
        here = self._found.get(key[0], {})
        one = here.get(key)
        if one is None or (one.turn == "Waiting" and self._next(key[0]) != key):
            return False
        if one.turn == "Refused" and not self._has_room(key[0], one):
            return False
        if one.turn == "Waiting":
            self._num_turns[key] += 1
        here[key] = one._replace(turn="Running")
        self._wake_next(key[0])
        return True

    def tell(self, key: Key, body: Object | None, turn: JobTurn | None) -> None:
        """What the adapter waits for; None: for no Job, or it is gone."""
        here = self._found.setdefault(key[0], {})
        if body is None:
            del self._num_turns[key]
        if body is None or turn is None:
            here.pop(key, None)
        else:
            num_rounds = self._num_turns[key] // TURNS_OF_ROUND
            here[key] = _Adapter(num_rounds, text(body, "metadata", "creationTimestamp"), key, key_of_base(body), turn)
        if not here:
            del self._found[key[0]]
        self._wake_next(key[0])

    def _next(self, namespace: str) -> Key | None:
        """The oldest that waits and may start a Job."""
        here, running = self._found.get(namespace, {}).values(), self._running(namespace)
        if running.total() >= MAX_ADAPTER_JOBS.of_namespace:
            return None
        may = (one for one in here if one.turn == "Waiting" and running[one.model] < MAX_ADAPTER_JOBS.of_model)
        return first.key if (first := min(may, default=None)) else None

    def _has_room(self, namespace: str, one: _Adapter) -> bool:
        running = self._running(namespace)
        most = MAX_ADAPTER_JOBS
        return running.total() < most.of_namespace and running[one.model] < most.of_model

    def _running(self, namespace: str) -> Counter[Key]:
        """How many, by model."""
        return Counter(one.model for one in self._found.get(namespace, {}).values() if one.turn == "Running")

    def _wake_next(self, namespace: str) -> None:
        if (key := self._next(namespace)) is not None:
            self._wake(key)
