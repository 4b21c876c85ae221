"""The gateway's metrics, `neuron_serving_gateway_*` and `neuron_serving_tokens_total`, on a port of their own.

Labels of requests are a model's namespace and name as `namespace/name`, never what a client wrote: names that mean
nothing have an empty label.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.metrics_core import GaugeMetricFamily, Metric

if TYPE_CHECKING:
    from neuron_operator.gateway.exchange import Exchange
    from neuron_operator.gateway.gateway import Gateway

PREFIX = "neuron_serving_gateway_"
_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)


class Metrics:
    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._requests = Counter(
            PREFIX + "requests",
            "Requests that have ended, by the status of their answer.",
            ("model", "code"),
            registry=self.registry,
        )
        self._first_byte = Histogram(
            PREFIX + "first_byte_seconds",
            "Time from a request to the first byte of its answer from a replica, waiting included.",
            ("model",),
            buckets=_BUCKETS,
            registry=self.registry,
        )
        self._retries = Counter(
            PREFIX + "retries",
            "Requests sent again: refused, stale, reset, draining, not_ready or full.",
            ("model", "reason"),
            registry=self.registry,
        )
        self._broken = Counter(
            PREFIX + "broken_answers",
            "Answers that began and did not end.",
            ("model", "reason"),
            registry=self.registry,
        )
        self._wake_ups = Counter(
            PREFIX + "wake_ups",
            "Sleeping models woken: by this gateway, found awake, or failed.",
            ("model", "outcome"),
            registry=self.registry,
        )
        self._tokens = Counter(
            "neuron_serving_tokens",
            "Tokens of prompts and answers, by the name of the API key; without keys it is empty.",
            ("key", "model"),
            registry=self.registry,
        )
        # A look-up of a series takes as long as all else that is counted of a request.
        self._request_series = lru_cache(4096)(self._requests.labels)
        self._first_byte_series = lru_cache(4096)(self._first_byte.labels)
        self._token_series = lru_cache(4096)(self._tokens.labels)

    def report(self, gateway: Gateway) -> None:
        """Add what is read when someone asks."""
        self.registry.register(_State(gateway))

    def ended(self, exchange: Exchange) -> None:
        model = "" if exchange.target is None else exchange.target.model.label
        self._request_series(model, str(exchange.status)).inc()
        if exchange.target is None:
            return
        if exchange.first_byte is not None:
            self._first_byte_series(model).observe(exchange.first_byte)
        if exchange.broken:
            self._broken.labels(model, exchange.broken).inc()
        if exchange.usage is not None:
            key = "" if exchange.key is None else exchange.key.name
            self._token_series(key, model).inc(exchange.usage.total)

    def retried(self, model: str, reason: str) -> None:
        self._retries.labels(model, reason).inc()

    def woken(self, model: str, outcome: str) -> None:
        self._wake_ups.labels(model, outcome).inc()

    def exposition(self) -> bytes:
        return generate_latest(self.registry)


class _State:
    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    def collect(self) -> Iterable[Metric]:
        held = GaugeMetricFamily(PREFIX + "held_requests", "Requests that wait for a replica.", labels=("model",))
        running = GaugeMetricFamily(
            PREFIX + "in_flight", "Requests that a replica has of this gateway.", labels=("model", "replica")
        )
        ready = GaugeMetricFamily(PREFIX + "ready_replicas", "Replicas that are ready.", labels=("model",))
        for model in self._gateway.directory.models.values():
            held.add_metric((model.label,), len(model.room))
            ready.add_metric((model.label,), len(model.replicas))
            for replica in model.replicas.values():
                running.add_metric((model.label, replica.address), replica.in_flight)
        connections = GaugeMetricFamily(PREFIX + "connections", "Open connections of clients.")
        connections.add_metric((), len(self._gateway.connections))
        return held, running, ready, connections
