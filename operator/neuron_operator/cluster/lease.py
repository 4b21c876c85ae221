"""Leader election by a Lease: one replica leads, and another takes over when it stops. Called by `run`.

Two replicas never lead at once: a holder stops `deadline_seconds` after it *sent* its last renewal, and another takes
over no sooner than `duration_seconds` after it *saw* that renewal, each by its own monotonic clock. The deadline is
also checked before each write, because a process that was frozen continues in the middle of a pass.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import KW_ONLY, dataclass, field
from datetime import UTC, datetime
from typing import Any

from neuron_operator.api.errors import ClusterFault, TermOver
from neuron_operator.cluster.client import LEASES, AlreadyExists, Client, Conflict
from neuron_operator.cluster.reflector import Reflector, key_of_model
from neuron_operator.read.world import Object

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class LeaseTimings:
    """`renew` < `deadline` < `duration`: between the last two, the work ends."""

    duration_seconds: int = 12
    deadline_seconds: float = 8.0
    renew_seconds: float = 4.0
    retry_seconds: float = 1.0
    """After a renewal that failed."""

    @classmethod
    def of(cls, duration_seconds: int) -> LeaseTimings:
        """Renewed each third of `duration_seconds`, given up after two of them."""
        third = duration_seconds / 3
        return cls(duration_seconds, 2 * third, third, third / 4)


@dataclass(eq=False)
class LeaderLease:
    """One replica's view of the Lease `namespace`/`name`. `identity` is unique to this process, not to its pod."""

    client: Client
    namespace: str
    name: str
    identity: str
    _: KW_ONLY
    timings: LeaseTimings = field(default_factory=LeaseTimings)

    def __post_init__(self) -> None:
        self._changed = asyncio.Event()
        self._term: _Term | None = None
        self._seen_at = 0.0
        """When this replica last saw the Lease change, on its own clock."""
        self._reflector = Reflector(
            self.client,
            LEASES,
            self.namespace,
            field_selector=f"metadata.name={self.name}",
            key_of=key_of_model,
            wake=lambda lease, _: self._lease_changed(),
        )

    async def run(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run `work` while this replica leads and cancel it when it does not, until cancelled itself.

        A held Lease is released at the end. Raises what `work` raises, and Forbidden without rights on Leases.
        """
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._reflector.run(), name="lease watch")
            await self._reflector.synced.wait()
            while True:
                term = await self._acquire()
                logger.info("leading as %s", self.identity)
                try:
                    await self._lead(term, work)
                finally:
                    logger.info("no longer leading")

    def check_term(self) -> None:
        """Call before each write. Raises TermOver if another replica may lead, as after this process was frozen."""
        term = self._term
        if term is None or term.ended or _now() >= term.sent_at + self.timings.deadline_seconds:
            raise TermOver("the term of this leader is over", retriable=True)

    async def _acquire(self) -> _Term:
        while True:
            self._changed.clear()
            live = self._reflector.find(self.namespace, self.name)
            wait_seconds = 0.0
            if live is not None and _holder(live) not in ("", self.identity):
                wait_seconds = self._seen_at + float(live["spec"].get("leaseDurationSeconds") or 0) - _now()
            if wait_seconds <= 0:
                sent_at, wait_seconds = _now(), self.timings.retry_seconds
                try:
                    async with asyncio.timeout(self.timings.deadline_seconds):
                        return _Term(await self._take(live), sent_at)
                except (AlreadyExists, Conflict) as fault:
                    logger.debug("another replica was faster, the watch will show it: %s", fault)
                except (ClusterFault, TimeoutError) as fault:
                    logger.warning("cannot acquire the lease: %s", fault)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_seconds):
                    await self._changed.wait()

    async def _take(self, live: Object | None) -> Object:
        stamp = _micro_time()
        spec = {
            "holderIdentity": self.identity,
            "leaseDurationSeconds": self.timings.duration_seconds,
            "acquireTime": stamp,
            "renewTime": stamp,
            "leaseTransitions": 0,
        }
        if live is None:
            metadata = {"namespace": self.namespace, "name": self.name}
            lease = {"apiVersion": LEASES.api_version, "kind": LEASES.kind, "metadata": metadata, "spec": spec}
            return await self.client.create(LEASES, lease)
        spec["leaseTransitions"] = int(live["spec"].get("leaseTransitions") or 0) + 1
        return await self.client.replace(LEASES, {**live, "spec": spec})

    async def _lead(self, term: _Term, work: Callable[[], Awaitable[None]]) -> None:
        """Work and renew until the work ends, the Lease is lost, or this is cancelled; then release the Lease."""
        self._term = term
        working = asyncio.ensure_future(work())
        renewing = asyncio.create_task(self._renew(term), name="lease renewal")
        try:
            await asyncio.wait((working, renewing), return_when=asyncio.FIRST_COMPLETED)
        finally:
            term.ended = True
            for task in (working, renewing):
                task.cancel()
            outcomes = await asyncio.gather(working, renewing, return_exceptions=True)
            if not term.lost:
                await self._release(term)
        for outcome in outcomes:
            if isinstance(outcome, Exception):
                raise outcome

    async def _renew(self, term: _Term) -> None:
        """Returns when the Lease is lost."""
        pause_seconds = self.timings.renew_seconds
        while True:
            await asyncio.sleep(pause_seconds)
            sent_at, deadline = _now(), term.sent_at + self.timings.deadline_seconds
            try:
                async with asyncio.timeout(deadline - sent_at):
                    term.held = await self._write(term.held, {"renewTime": _micro_time()})
                term.sent_at, pause_seconds = sent_at, self.timings.renew_seconds
            except _Lost as lost:
                logger.warning("%s", lost)
                term.lost = True
                return
            except (ClusterFault, TimeoutError) as fault:
                logger.warning("cannot renew the lease: %s", fault)
                pause_seconds = self.timings.retry_seconds
                if _now() + pause_seconds >= deadline:
                    # The server may still have us as holder: `_lead` tries to release it.
                    return

    async def _write(self, held: Object, changes: Object) -> Object:
        """Change the spec of a Lease that is ours, also after an earlier write whose response was lost.

        Raises _Lost if another replica holds it.
        """
        try:
            return await self.client.replace(LEASES, {**held, "spec": {**held["spec"], **changes}})
        except Conflict:
            newest = await self.client.get(LEASES, self.namespace, self.name)
            if _holder(newest) != self.identity:
                raise _Lost(f"the lease is lost; its holder is now {_holder(newest) or 'empty'}") from None
            return await self.client.replace(LEASES, {**newest, "spec": {**newest["spec"], **changes}})

    async def _release(self, term: _Term) -> None:
        try:
            async with asyncio.timeout(self.timings.retry_seconds * 2):
                await self._write(term.held, {"holderIdentity": "", "leaseDurationSeconds": 1})
        except _Lost as lost:
            logger.info("%s", lost)
        except (ClusterFault, TimeoutError) as fault:
            logger.warning("cannot release the lease, it expires on its own: %s", fault)

    def _lease_changed(self) -> None:
        self._seen_at = _now()
        self._changed.set()


class _Lost(Exception):
    """Another replica holds the lease."""


@dataclass
class _Term:
    """A held Lease: the version last written, and when that write was sent."""

    held: Object
    sent_at: float
    lost: bool = False
    ended: bool = False
    """Nothing more is written."""


def _holder(lease: Object | None) -> str:
    return str((lease or {}).get("spec", {}).get("holderIdentity") or "")


def _now() -> float:
    return asyncio.get_running_loop().time()


def _micro_time() -> str:
    """For people only: clocks of machines differ, so no decision reads it."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
