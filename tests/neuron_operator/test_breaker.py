"""Pods that nodes refuse are attempted ever more rarely: simulated hours of a Deployment and a kubelet."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from helpers.operator_worlds import (
    NOW,
    REFUSED,
    SPEC,
    carried_out,
    checked,
    condition,
    find,
    resolved_world,
    serving_pod,
    settle,
)
from helpers.operator_worlds import SETTINGS as USING
from neuron_operator.decide.course import decide
from neuron_operator.read.world import Object

REVISION = "neuron-serving.dev/revision"
HOUR = 3600


class Cluster:
    """A Deployment's controllers, which replace a failed pod at once, and a kubelet that decides with `accepts`. A step
    is half a second; the operator sees the state between two steps of the controllers."""

    def __init__(self, accepts: Callable[[str], bool] = lambda revision: True, **spec: Any) -> None:
        self.accepts = accepts
        self.world, _ = resolved_world(spec={**SPEC, **spec})
        self.seconds = 0.0
        self.created: list[float] = []
        self.num_writes = 0
        self.min_answering = 1000
        self._sizes: dict[str, int] = {}
        self._due = 0.0
        self._numbers = itertools.count()

    def edit(self, **spec: Any) -> None:
        """The runtime accepts the configuration."""
        body, pods = self.world.body, self.world.pods
        world = replace(self.world, body={**body, "spec": {**body["spec"], **spec}})
        self.world = replace(checked(world) if self.answering() else world, pods=pods)
        self._due = 0.0

    def run(self, seconds: float) -> None:
        end = self.seconds + seconds
        while self.seconds < end:
            self.seconds += 0.5
            self.world = replace(self.world, now=NOW + timedelta(seconds=self.seconds))
            before = self.world.pods
            self._controllers()
            self._kubelet()
            if self.world.pods != before or self.seconds >= self._due:
                self._operator()
            self.min_answering = min(self.min_answering, len(self.answering()))

    def answering(self, revision: str = "") -> list[Object]:
        return [
            pod
            for pod in self.world.pods
            if any(c["type"] == "Ready" and c["status"] == "True" for c in pod["status"].get("conditions", ()))
            and revision in pod["metadata"]["labels"][REVISION]
        ]

    def failed(self) -> list[Object]:
        return [pod for pod in self.world.pods if pod["status"]["phase"] == "Failed"]

    @property
    def deployment(self) -> Object:
        return find(self.world.children, "Deployment")

    @property
    def revision(self) -> str:
        return str(self.deployment["spec"]["template"]["metadata"]["labels"][REVISION])

    def _operator(self) -> None:
        for _ in range(5):
            decision = decide(self.world, USING)
            after = carried_out(self.world, decision)
            if after == self.world:
                break
            self.num_writes += 1
            self.world = after
        self._due = self.seconds + (decision.requeue_after_seconds or 1e9)

    def _controllers(self) -> None:
        """The rolling update of a Deployment with maxSurge 0 and maxUnavailable 1."""
        wanted, new = self.deployment["spec"]["replicas"], self.revision
        sizes = self._sizes
        sizes.setdefault(new, 0)
        old = [name for name in sizes if name != new and sizes[name]]
        if old:
            sizes[new] = min(wanted, sizes[new] + max(0, wanted - sum(sizes.values())))
            unavailable = sizes[new] - len(self.answering(new))
            spare = sum(sizes.values()) - (wanted - 1) - unavailable
            for name in old:
                shrunk = max(0, min(sizes[name], sizes[name] - spare))
                spare -= sizes[name] - shrunk
                sizes[name] = shrunk
        else:
            sizes[new] = wanted
        for name, size in sizes.items():
            pods = [
                pod
                for pod in self.world.pods
                if pod["metadata"]["labels"].get(REVISION) == name and pod["status"]["phase"] != "Failed"
            ]
            for pod in pods[size:]:
                self.world = replace(self.world, pods=tuple(p for p in self.world.pods if p is not pod))
            for _ in range(size - len(pods)):
                self.created.append(self.seconds)
                stamp = f"{self.world.now:%Y-%m-%dT%H:%M:%SZ}"
                pending = {"phase": "Pending", "containerStatuses": []}
                pod = serving_pod(self._made_of(name), f"chat-{next(self._numbers)}", created=stamp, **pending)
                self.world = replace(self.world, pods=(*self.world.pods, pod))

    def _made_of(self, revision: str) -> Object:
        keepers = [c for c in self.world.children if c["kind"] == "ControllerRevision"]
        (template,) = [k["data"]["template"] for k in keepers if k["metadata"]["labels"][REVISION] == revision]
        return {"spec": {"template": template}}

    def _kubelet(self) -> None:
        for number, pod in enumerate(self.world.pods):
            pods = self.world.pods
            self.world = replace(self.world, pods=(*pods[:number], self._admit(pod), *pods[number + 1 :]))

    def _admit(self, pod: Object) -> Object:
        if pod["status"]["phase"] != "Pending":
            return pod
        if not self.accepts(pod["metadata"]["labels"][REVISION]):
            return {**pod, "status": {**pod["status"], **REFUSED}}
        metadata = pod["metadata"]
        template = {"spec": {"template": {"metadata": {"labels": metadata["labels"]}, "spec": pod["spec"]}}}
        return serving_pod(template, metadata["name"], ready=True, created=metadata["creationTimestamp"])


@pytest.mark.parametrize("replicas", [1, 2, 8])
def test_refused_pods_are_attempted_at_doubling_distances_and_two_are_kept(replicas: int) -> None:
    cluster = Cluster(lambda revision: False, replicas=replicas)
    cluster.run(20)
    assert len(cluster.created) <= 3 * replicas
    cluster.run(HOUR)
    attempts = sorted(set(cluster.created))
    distances = [later - earlier for earlier, later in itertools.pairwise(attempts)]
    assert len(cluster.created) <= 3 * replicas + 20
    assert 300 <= max(distances) <= 305
    grown = [later for later in distances if 5 < later < 290]
    assert all(1.4 < later / earlier < 2.6 for earlier, later in itertools.pairwise(grown[1:]))
    assert len(cluster.failed()) == 2
    assert condition(cluster.world.body["status"], "Ready")["reason"] == "AllocationRejected"
    before = cluster.num_writes
    cluster.run(HOUR)
    assert cluster.num_writes - before <= 8 * HOUR / 300, (
        "writes per attempt: two of the Deployment, of the status, a pod"
    )


def test_an_accepted_attempt_is_followed_by_all_replicas_and_the_refused_pods_are_deleted() -> None:
    accepting = False
    cluster = Cluster(lambda revision: accepting, replicas=5)
    cluster.run(200)
    assert cluster.deployment["spec"]["replicas"] == 0
    accepting = True
    cluster.run(310)
    assert len(cluster.answering()) == 5
    assert cluster.failed() == []
    assert cluster.deployment["spec"]["replicas"] == 5
    assert condition(cluster.world.body["status"], "Ready")["reason"] == "Ready"


def test_replicas_that_serve_stay_while_others_are_refused() -> None:
    cluster = Cluster(replicas=3)
    cluster.accepts = lambda revision: len(cluster.answering()) < 2
    cluster.run(60)
    cluster.min_answering = 1000
    cluster.run(HOUR)
    assert cluster.min_answering == 2
    assert len(cluster.created) < 25
    message = condition(cluster.world.body["status"], "Available")["message"]
    assert message.startswith("2 of 3 replicas answer, at least 2 promised; node n1 refused pod ")


def test_the_next_attempt_of_what_serves_comes_also_while_an_edit_is_refused() -> None:
    cluster = Cluster(replicas=3)
    cluster.accepts = lambda revision: len(cluster.answering()) < 2
    cluster.run(700)
    cluster.edit(accelerator={"devices": 5})
    cluster.run(5)
    assert condition(cluster.world.body["status"], "Ready")["reason"] == "TopologyImpossible"
    cluster.accepts = lambda revision: True
    cluster.run(310)
    assert len(cluster.answering()) == 3


def test_deleting_the_refused_pods_or_an_edit_starts_the_next_attempt() -> None:
    cluster = Cluster(lambda revision: False, replicas=1)
    cluster.run(HOUR)
    num_created = len(cluster.created)
    cluster.world = replace(cluster.world, pods=())
    cluster._operator()
    cluster.run(2)
    assert len(cluster.created) > num_created
    cluster.run(HOUR)
    num_created = len(cluster.created)
    cluster.edit(serving={"maxSequences": 3})
    cluster._operator()
    cluster.run(2)
    assert len(cluster.created) > num_created


def test_a_refused_revision_is_replaced_by_the_one_that_serves_until_the_next_attempt() -> None:
    cluster = Cluster(replicas=2)
    cluster.run(30)
    first = cluster.revision
    cluster.accepts = lambda revision: revision == first
    cluster.edit(serving={"maxSequences": 3})
    cluster.min_answering = 1000
    cluster.run(HOUR)
    assert cluster.min_answering == 1
    assert len(cluster.created) < 100
    assert [len(cluster.answering(first)), cluster.revision] == [2, first]
    status = cluster.world.body["status"]
    assert condition(status, "Available")["status"] == "True"
    assert condition(status, "UpToDate")["reason"] == "RolledBack"
    assert f"revision {first} serves instead of" in condition(status, "UpToDate")["message"]
    cluster.accepts = lambda revision: True
    cluster.run(310)
    assert cluster.revision != first
    assert len(cluster.answering(cluster.revision)) == 2
    assert cluster.failed() == []
    assert condition(cluster.world.body["status"], "Ready")["reason"] == "Ready"


def test_a_new_operator_continues_the_delay() -> None:
    cluster = Cluster(lambda revision: False, replicas=1)
    cluster.run(400)
    settled, _ = settle(cluster.world)
    again, decision = settle(replace(settled, now=settled.now + timedelta(seconds=1)))
    assert find(again.children, "Deployment")["spec"]["replicas"] == 0
    assert decision.requeue_after_seconds is not None
    assert decision.requeue_after_seconds > 60
