"""The operator's own metrics, `neuron_operator_*`. Updated by client, reflectors, workers and Lease.

Each `Metrics` has its own registry, so that tests can have several in one process.
"""

from __future__ import annotations

import time
from collections import Counter as Tally
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal, get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from neuron_operator.api import names
from neuron_operator.api.reasons import SHOWN
from neuron_operator.read.objects import dig, instant, items, name_of, text, whole
from neuron_operator.read.views import scaling_of
from neuron_operator.read.world import Object

PASS_BUCKETS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)

PassResult = Literal["unchanged", "changed", "retried", "failed", "cancelled"]
"""How a pass ended."""


class Metrics:
    """Names and labels are part of the operator's interface."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.passes = Counter(
            "neuron_operator_passes",
            "Reconciliations of a NeuronModel by result: unchanged, changed (something was written), retried (the API "
            "server or network failed), failed (a bug in the operator), cancelled (leadership ended).",
            ["result"],
            registry=self.registry,
        )
        for result in get_args(PassResult):
            self.passes.labels(result)  # from 0: Prometheus sees no increase in the first value of a series
        self.pass_seconds = Histogram(
            "neuron_operator_pass_seconds", "Seconds per reconciliation.", buckets=PASS_BUCKETS, registry=self.registry
        )
        self.api_requests = Counter(
            "neuron_operator_api_requests",
            "Requests that the API server answered.",
            ["verb", "resource", "code"],
            registry=self.registry,
        )
        self.watch_starts = Counter(
            "neuron_operator_watch_starts",
            "Watches opened (how=watch) and lists read to start or restart one (how=list).",
            ["resource", "how"],
            registry=self.registry,
        )
        self.leader = Gauge("neuron_operator_leader", "1 if this replica leads, else 0.", registry=self.registry)
        self.queue_depth = Gauge(
            "neuron_operator_queue_depth", "NeuronModels waiting for a worker.", registry=self.registry
        )
        self.foreign_namespaces = Gauge(
            "neuron_operator_foreign_namespaces",
            "Namespaces with NeuronModels that this operator leaves alone, because another installation acts there; "
            "only the leader counts them.",
            registry=self.registry,
        )
        self.refused_namespaces = Gauge(
            "neuron_operator_refused_namespaces",
            "Namespaces that this operator may not watch, such as deleted ones; without watchNamespaces, 1 if it lacks "
            "a right in the cluster.",
            registry=self.registry,
        )
        self.upgrades = Gauge(
            "neuron_operator_upgrades",
            "NeuronModels that move to a newer runtime image by themselves, by state: Waiting, Running, Failed (which "
            "stops the others); only the leader counts them.",
            ["state"],
            registry=self.registry,
        )

    def report_models(self, models: Callable[[], Iterable[Object]], now: Callable[[], float] = time.time) -> None:
        """Describe `models` at each scrape. A deleted model has no series. `now`: the wall clock."""
        self.registry.register(_Models(models, now))

    def report_adapters(self, adapters: Callable[[], Iterable[Object]]) -> None:
        """The same for NeuronAdapters."""
        self.registry.register(_Adapters(adapters))

    def exposition(self, names: Iterable[str] = ()) -> bytes:
        """The text that Prometheus reads; `names` of series, if given, are all that it has."""
        chosen = tuple(names)
        return generate_latest(self.registry.restricted_registry(chosen) if chosen else self.registry)


class _Adapters(Collector):
    def __init__(self, adapters: Callable[[], Iterable[Object]]) -> None:
        self._adapters = adapters

    def collect(self) -> Iterator[Any]:
        missing = GaugeMetricFamily(
            "neuron_operator_adapter_missing_replicas",
            "Replicas of its NeuronModel that do not serve the NeuronAdapter.",
            labels=["namespace", "name", "model"],
        )
        for body in self._adapters():
            key = [text(body, "metadata", "namespace"), name_of(body), text(body, "spec", "model")]
            wanted, ready = (whole(dig(body, "status", name)) for name in ("replicas", "readyReplicas"))
            missing.add_metric(key, max(0, wanted - ready))
        yield missing


class _Models(Collector):
    def __init__(self, models: Callable[[], Iterable[Object]], now: Callable[[], float]) -> None:
        self._models, self._now = models, now

    def collect(self) -> Iterator[Any]:
        by_reason = GaugeMetricFamily(
            "neuron_operator_models",
            "NeuronModels by the reason of their condition Ready; only the leader reports them.",
            labels=["reason"],
        )
        model = ("namespace", "name")
        condition = GaugeMetricFamily(
            "neuron_operator_model_condition",
            "1 if the condition of the NeuronModel is true, 0 if it is false or unknown. Reconciling, Stalled and "
            "Contested exist only while true.",
            labels=[*model, "condition", "reason"],
        )
        desired = GaugeMetricFamily(
            "neuron_operator_model_desired_replicas",
            "Replicas that the NeuronModel requests; model_name as in the series of its pods.",
            labels=[*model, "model_name"],
        )
        ready = GaugeMetricFamily(
            "neuron_operator_model_ready_replicas", "Replicas of the NeuronModel that can serve.", labels=model
        )
        held = GaugeMetricFamily(
            "neuron_operator_model_devices",
            "Neuron devices, or NeuronCores, that the pods of the NeuronModel request, by its plan.",
            labels=[*model, "resource"],
        )
        idle = GaugeMetricFamily(
            "neuron_operator_model_idle_seconds",
            "Seconds since the operator last knew of a request or a new replica; only with spec.idle. It asks replicas "
            "when they could have been idle for long enough.",
            labels=model,
        )
        load = GaugeMetricFamily(
            "neuron_operator_model_last_load_seconds",
            "Seconds that the replica that started last took from when it got its node until it was ready.",
            labels=model,
        )
        reasons: Tally[str] = Tally()
        for body in self._models():
            key = [text(body, "metadata", "namespace"), name_of(body)]
            conditions = {text(one, "type"): one for one in items(body, "status", "conditions")}
            reasons[text(conditions.get("Ready"), "reason") or "Unknown"] += 1
            # The conditions of others would be series without bound.
            for kind in SHOWN:
                if kind in conditions:
                    condition.add_metric(
                        [*key, kind, text(conditions[kind], "reason")], text(conditions[kind], "status") == "True"
                    )
            served = dig(body, "spec", "model", "servedNames")
            first = served[0] if isinstance(served, list) and served else key[1]
            desired.add_metric([*key, str(first)], whole(dig(body, "spec", "replicas")))
            ready.add_metric(key, whole(dig(body, "status", "readyReplicas")))
            for resource, number in _devices_of(body):
                held.add_metric([*key, resource], number)
            scaling = scaling_of(body)
            if scaling.load_seconds is not None:
                load.add_metric(key, scaling.load_seconds)
            if active := instant(scaling.active_at):
                idle.add_metric(key, max(0.0, self._now() - active.timestamp()))
        for reason, number in sorted(reasons.items()):
            by_reason.add_metric([reason], number)
        yield from (by_reason, condition, desired, ready, held, idle, load)


def _devices_of(body: Object) -> Iterator[tuple[str, int]]:
    """Those that its pods request, by resource."""
    plan = dig(body, "status", "plan")
    pods = whole(dig(body, "status", "replicas")) * max(1, whole(dig(plan, "nodes")))
    cores, devices = whole(dig(plan, "cores")), whole(dig(plan, "devices"))
    for resource, number in ((names.CORE_RESOURCE, cores), (names.DEVICE_RESOURCE, 0 if cores else devices)):
        if number:
            yield resource, pods * number
