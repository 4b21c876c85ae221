"""Which installation acts in a namespace, where several watch it. Called by the pass before anything else.

The ConfigMap `neuron-serving-operator` beside the models names the holder. Who finds another one there writes a
question into it, and takes over if nobody answers: a holder that is alive sees the change and removes the question. So
one installation alone writes it once, and no clocks are compared.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from typing import Literal

from neuron_operator.api import names
from neuron_operator.cluster.client import CONFIG_MAPS, AlreadyExists, Client, Forbidden, Invalid, Terminating
from neuron_operator.cluster.reflector import Caches, Version, version_of
from neuron_operator.read.objects import text
from neuron_operator.read.world import Object

logger = logging.getLogger(__name__)

ANSWER_SECONDS = 60.0
"""For a holder to answer: its standby takes over in less, and its pods move to another node."""
ASK_SECONDS = 300.0
"""From an answer to the next question."""

Move = Literal["act", "answer", "take", "ask", "wait"]
"""The first three act: as before, with an answer to a question, or from now on."""


def judge(holder: str, question: str, installation: str, seconds: float | None) -> Move:
    """`seconds`: for how long this process has seen another's ConfigMap unchanged; None: it sees it first now."""
    if holder in ("", installation):
        return "take" if not holder else "answer" if question else "act"
    if question:
        return "take" if seconds is not None and seconds >= ANSWER_SECONDS else "wait"
    return "ask" if seconds is None or seconds >= ASK_SECONDS else "wait"


@dataclass(eq=False)
class Holdings:
    """The namespaces of one process. All replicas of an installation have the same `installation`."""

    client: Client
    caches: Caches
    installation: str
    _: KW_ONLY
    check_term: Callable[[], None]
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self._seen: dict[str, tuple[Version, float]] = {}
        """By namespace of another holder: the version of the ConfigMap, and since when it is that."""
        self._refused_until: dict[str, float] = {}
        """By namespace that may have no ConfigMap: when to try again."""
        self._locks = defaultdict[str, asyncio.Lock](asyncio.Lock)
        """By namespace: passes over many of its models begin at once."""

    def is_foreign(self, namespace: str) -> bool:
        """Whether another installation acts there."""
        return text(self._find(namespace), "data", "holder") not in ("", self.installation)

    async def seconds_to_wait(self, namespace: str) -> float | None:
        """None if this installation acts in the namespace, else when to look again. Raises ClusterFault."""
        async with self._locks[namespace]:
            live = self._find(namespace)
            if live is None and self.clock() < self._refused_until.get(namespace, 0.0):
                return None
            while True:
                holder, question = text(live, "data", "holder"), text(live, "data", "asks")
                is_foreign = holder not in ("", self.installation)
                seconds = self._seconds_seen(namespace, live) if live and is_foreign else None
                move = judge(holder, question, self.installation, seconds)
                if move == "act":
                    return None
                if move == "wait":
                    return (ANSWER_SECONDS if question else ASK_SECONDS) - (seconds or 0.0)
                try:
                    written = await self._write(namespace, live, move)
                except AlreadyExists:  # another installation was faster, or somebody removed our labels
                    live = await self.client.get(CONFIG_MAPS, namespace, names.HOLDING)
                    continue
                except (Forbidden, Terminating, Invalid) as fault:  # a quota, a policy: no reason to leave models alone
                    logger.debug("namespace %s: %s", namespace, fault)
                    self._refused_until[namespace] = self.clock() + ASK_SECONDS
                    return ASK_SECONDS if is_foreign else None
                self.caches.observe_written(CONFIG_MAPS, written)
                if move == "ask":
                    self._seen[namespace] = version_of(written), self.clock()
                    level = logging.WARNING if seconds is None else logging.DEBUG
                    logger.log(level, "namespace %s is left alone: the operator %s acts there", namespace, holder)
                    return ANSWER_SECONDS
                if is_foreign:
                    del self._seen[namespace]
                    logger.warning("namespace %s is taken over: the operator %s does not answer", namespace, holder)
                return None

    def _find(self, namespace: str) -> Object | None:
        return self.caches.find(CONFIG_MAPS, namespace, names.HOLDING)

    def _seconds_seen(self, namespace: str, live: Object) -> float | None:
        before, now = self._seen.get(namespace), self.clock()
        if before is not None and before[0] == version_of(live):
            return now - before[1]
        self._seen[namespace] = version_of(live), now
        return None if before is None else 0.0

    async def _write(self, namespace: str, live: Object | None, move: Move) -> Object:
        self.check_term()
        labels = names.shared_labels("operator")
        if live is None:
            about = {"apiVersion": CONFIG_MAPS.api_version, "kind": CONFIG_MAPS.kind}
            metadata = {"namespace": namespace, "name": names.HOLDING, "labels": labels}
            return await self.client.create(
                CONFIG_MAPS, {**about, "metadata": metadata, "data": {"holder": self.installation}}
            )
        data = {"asks": self.installation} if move == "ask" else {"holder": self.installation, "asks": None}
        return await self.client.patch(CONFIG_MAPS, live, {"metadata": {"labels": labels}, "data": data})
