"""The operator's metrics as Prometheus reads them."""

from __future__ import annotations

import re

from prometheus_client.parser import text_string_to_metric_families

from neuron_operator.run.metrics import Metrics


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


def test_an_adapter_has_a_series_with_the_replicas_that_lack_it_until_it_is_deleted() -> None:
    metrics = Metrics()
    about = {"metadata": {"namespace": "team", "name": "voice"}, "spec": {"model": "chat"}}
    adapters: list[dict[str, object]] = [{**about, "status": {"replicas": 3, "readyReplicas": 1}}]
    metrics.report_adapters(lambda: adapters)
    labels = frozenset({("namespace", "team"), ("name", "voice"), ("model", "chat")})
    assert samples(metrics)["neuron_operator_adapter_missing_replicas", labels] == 2
    adapters[:] = [{**about}, {}]
    assert samples(metrics)["neuron_operator_adapter_missing_replicas", labels] == 0
    adapters.clear()
    assert "voice" not in metrics.exposition().decode()


def test_a_model_has_a_series_for_each_of_our_conditions_and_its_replicas_until_it_is_deleted() -> None:
    metrics = Metrics()
    kinds = {"Available": "True", "UpToDate": "False", "Ready": "Unknown", "example.com/Audited": "True"}
    conditions = [{"type": kind, "status": status, "reason": "Because"} for kind, status in kinds.items()]
    metadata = {"namespace": "team", "name": "chat"}
    models = [
        {"metadata": metadata, "spec": {"replicas": 3}, "status": {"conditions": conditions, "readyReplicas": 2}},
        {"metadata": metadata | {"name": "new"}, "spec": {"replicas": 1, "model": {"servedNames": ["gpt", "other"]}}},
    ]
    metrics.report_models(lambda: models)
    found = {
        (name[len("neuron_operator_model") :], *sorted(labels)): value
        for (name, labels), value in samples(metrics).items()
    }
    chat, new = (("name", "chat"), ("namespace", "team")), (("name", "new"), ("namespace", "team"))
    of_models = {key: value for key, value in found.items() if ("namespace", "team") in key}
    assert of_models == {
        ("_condition", ("condition", "Available"), *chat, ("reason", "Because")): 1,
        ("_condition", ("condition", "UpToDate"), *chat, ("reason", "Because")): 0,
        ("_condition", ("condition", "Ready"), *chat, ("reason", "Because")): 0,
        ("_desired_replicas", ("model_name", "chat"), *chat): 3,
        ("_ready_replicas", *chat): 2,
        ("_desired_replicas", ("model_name", "gpt"), *new): 1,
        ("_ready_replicas", *new): 0,
    }
    models.clear()
    assert "team" not in metrics.exposition().decode()


def test_a_model_says_what_it_holds_since_when_it_is_idle_and_how_long_it_loaded() -> None:
    """Without a rule for idle models nobody knows, and a CPU holds no devices."""
    metrics = Metrics()

    def named(name: str, **status: object) -> dict[str, object]:
        return {"metadata": {"namespace": "team", "name": name}, "status": status}

    scaling = {"loadSeconds": 85, "activeAt": "1970-01-01T00:16:40Z"}
    models = [
        named("pair", replicas=3, plan={"devices": 2, "nodes": 2}, scaling=scaling),
        named("cores", replicas=1, plan={"devices": 0, "cores": 4}),
        named("asleep", replicas=0, plan={"devices": 2}),
        named("cpu", replicas=2, plan={"devices": 0}),
    ]
    metrics.report_models(lambda: models, now=lambda: 1030.0)
    kinds = ("_devices", "_idle_seconds", "_last_load_seconds")
    found = {
        (name[len("neuron_operator_model") :], *sorted(labels)): value
        for (name, labels), value in samples(metrics).items()
    }
    team = ("namespace", "team")
    assert {key: value for key, value in found.items() if key[0] in kinds} == {
        ("_devices", ("name", "pair"), team, ("resource", "aws.amazon.com/neuron")): 12,
        ("_devices", ("name", "cores"), team, ("resource", "aws.amazon.com/neuroncore")): 4,
        ("_devices", ("name", "asleep"), team, ("resource", "aws.amazon.com/neuron")): 0,
        ("_idle_seconds", ("name", "pair"), team): 30,
        ("_last_load_seconds", ("name", "pair"), team): 85,
    }


def test_requests_watches_and_passes_are_counted_with_their_labels() -> None:
    metrics = Metrics()
    metrics.api_requests.labels("get", "jobs", "404").inc()
    metrics.watch_starts.labels("pods", "list").inc()
    metrics.passes.labels("changed").inc()
    metrics.leader.set(1)
    found = samples(metrics)
    request = frozenset({("verb", "get"), ("resource", "jobs"), ("code", "404")})
    assert found["neuron_operator_api_requests_total", request] == 1
    assert found["neuron_operator_watch_starts_total", frozenset({("resource", "pods"), ("how", "list")})] == 1
    assert found["neuron_operator_passes_total", frozenset({("result", "changed")})] == 1
    assert found["neuron_operator_leader", frozenset()] == 1


def test_the_first_failed_pass_is_an_increase() -> None:
    metrics = Metrics()
    series = "neuron_operator_passes_total", frozenset({("result", "failed")})
    assert samples(metrics)[series] == 0
    metrics.passes.labels("failed").inc()
    assert samples(metrics)[series] == 1


def test_a_scrape_of_some_series_does_not_describe_the_models() -> None:
    metrics, walks = Metrics(), []
    metrics.report_models(lambda: walks.append(1) or ())
    text = metrics.exposition(["neuron_operator_leader"]).decode()
    assert re.findall("^[a-z].*", text, re.MULTILINE) == ["neuron_operator_leader 0.0"]
    assert walks == []


def test_two_operators_in_one_process_have_separate_metrics() -> None:
    one, two = Metrics(), Metrics()
    one.leader.set(1)
    assert samples(two)["neuron_operator_leader", frozenset()] == 0
