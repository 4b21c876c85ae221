"""The operator's metrics as Prometheus reads them."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from neuron_operator.metrics import Metrics


def samples(metrics: Metrics) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    families = text_string_to_metric_families(metrics.exposition().decode())
    return {(s.name, frozenset(s.labels.items())): s.value for family in families for s in family.samples}


def model(*conditions: tuple[str, str]) -> dict[str, object]:
    return {"status": {"conditions": [{"type": kind, "reason": reason} for kind, reason in conditions]}}


def test_models_are_counted_by_the_reason_of_ready_at_each_scrape() -> None:
    metrics = Metrics()
    models = [model(("Accepted", "Accepted"), ("Ready", "Loading")), model(("Ready", "Loading")), {}, {"status": None}]
    metrics.report_models(lambda: models)
    found = samples(metrics)
    assert found["neuron_operator_models", frozenset({("reason", "Loading")})] == 2
    assert found["neuron_operator_models", frozenset({("reason", "Unknown")})] == 2
    models.clear()
    assert not [name for name, _ in samples(metrics) if name == "neuron_operator_models"]


def test_requests_watches_and_passes_are_counted_with_their_labels() -> None:
    metrics = Metrics()
    metrics.observe_request("get", "jobs", "404")
    metrics.observe_watch_start("pods", "list")
    metrics.passes.labels("changed").inc()
    metrics.leader.set(1)
    found = samples(metrics)
    request = frozenset({("verb", "get"), ("resource", "jobs"), ("code", "404")})
    assert found["neuron_operator_api_requests_total", request] == 1
    assert found["neuron_operator_watch_starts_total", frozenset({("resource", "pods"), ("how", "list")})] == 1
    assert found["neuron_operator_passes_total", frozenset({("result", "changed")})] == 1
    assert found["neuron_operator_leader", frozenset()] == 1


def test_two_operators_in_one_process_have_separate_metrics() -> None:
    one, two = Metrics(), Metrics()
    one.leader.set(1)
    assert samples(two)["neuron_operator_leader", frozenset()] == 0
