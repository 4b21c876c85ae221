"""The operator's own numbers, `neuron_operator_*`, for `/metrics`. Fed by client, reflectors, workers and lease.

Each process has one `Metrics` with a registry of its own, so that tests can hold several side by side.
"""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from neuron_operator.world import Object

PASS_BUCKETS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)


class Metrics:
    """What is counted; the names and labels are part of the operator's interface."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.passes = Counter(
            "neuron_operator_passes",
            "Passes over a NeuronModel by result: unchanged, changed (something was written), retried (a fault), "
            "failed (an error of the operator itself), cancelled (leadership ended).",
            ["result"],
            registry=self.registry,
        )
        self.pass_seconds = Histogram(
            "neuron_operator_pass_seconds", "Time of one pass.", buckets=PASS_BUCKETS, registry=self.registry
        )
        self.api_requests = Counter(
            "neuron_operator_api_requests",
            "Answered requests to the API server.",
            ["verb", "resource", "code"],
            registry=self.registry,
        )
        self.watch_starts = Counter(
            "neuron_operator_watch_starts",
            "Watches opened (how=watch) and lists read to start or restart one (how=list).",
            ["resource", "how"],
            registry=self.registry,
        )
        self.leader = Gauge("neuron_operator_leader", "1 where this replica acts, else 0.", registry=self.registry)
        self.queue_depth = Gauge(
            "neuron_operator_queue_depth", "Models that wait for a worker.", registry=self.registry
        )

    def observe_request(self, verb: str, resource: str, code: str) -> None:
        self.api_requests.labels(verb, resource, code).inc()

    def observe_watch_start(self, resource: str, how: str) -> None:
        self.watch_starts.labels(resource, how).inc()

    def report_models(self, models: Callable[[], Iterable[Object]]) -> None:
        """Count models by the reason of their condition Ready at each scrape."""
        self.registry.register(_ModelsByReason(models))

    def exposition(self) -> bytes:
        """The text that Prometheus reads."""
        return generate_latest(self.registry)


class _ModelsByReason(Collector):
    def __init__(self, models: Callable[[], Iterable[Object]]) -> None:
        self._models = models

    def collect(self) -> Iterator[Any]:
        family = GaugeMetricFamily(
            "neuron_operator_models",
            "NeuronModels by the reason of their condition Ready; counted by the replica that leads.",
            labels=["reason"],
        )
        for reason, number in sorted(Tally(map(_reason, self._models())).items()):
            family.add_metric([reason], number)
        yield family


def _reason(model: Object) -> str:
    conditions = (model.get("status") or {}).get("conditions") or ()
    return next((str(c.get("reason")) for c in conditions if c.get("type") == "Ready"), "Unknown")
