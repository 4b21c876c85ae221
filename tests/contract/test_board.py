"""The Grafana boards and the alerts of the chart: Prometheus' engine evaluates every query over real `/metrics`.

Scraped are a server under the scripted load, an overloaded model, a foreign vLLM server, and an operator.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest

from cluster.rig.needs import NotPossibleHere
from helpers.gateways import STREAM_HEAD, Asked, echo, replicas, running
from helpers.promql import Answer, Result, Scraped, evaluate
from helpers.scripted_load import ScriptedLoad, run_against_a_server
from neuron_operator.api.errors import ClusterFault
from neuron_operator.api.reasons import Reason
from neuron_operator.gateway.models import Served
from neuron_operator.run.metrics import Metrics as OperatorMetrics
from neuron_runtime.core import BackendLimits
from neuron_runtime.engine.backpressure import QueueLimits
from neuron_runtime.engine.messages import Ready, Step
from neuron_runtime.engine.stats import EngineStats
from neuron_runtime.server.metrics import FAMILIES, Metrics

CHART = Path(__file__).parents[2] / "charts" / "neuron-serving"
BOARDS = {file.stem: json.loads(file.read_text()) for file in sorted((CHART / "dashboards").iterdir())}
BOARD, OPERATOR_BOARD = BOARDS["neuron-serving"], BOARDS["neuron-serving-operator"]
GATEWAY_BOARD = BOARDS["neuron-serving-gateway"]
DOCS_FOLDER = Path(__file__).parents[2] / "docs"
DOCS = (DOCS_FOLDER / "metrics.md").read_text()
SCALED_OBJECT = yaml.safe_load((CHART.parents[1] / "examples" / "autoscaling-keda.yaml").read_text())
RULES_TEXT = (CHART / "rules" / "neuron-serving.yaml").read_text()
RULES = {rule["alert"]: rule for group in yaml.safe_load(RULES_TEXT)["groups"] for rule in group["rules"]}
PANELS = [panel for board in BOARDS.values() for panel in board["panels"] if panel["type"] != "row"]
VARIABLES = {variable["name"]: variable for variable in BOARD["templating"]["list"]}


def queries_of(board: Mapping[str, Any]) -> dict[str, str]:
    return {
        f"{panel['title']} / {t['refId']}": t["expr"] for panel in board["panels"] for t in panel.get("targets", ())
    }


QUERIES = {title: query for board in BOARDS.values() for title, query in queries_of(board).items()}

OF_GATEWAYS = ("neuron_serving_gateway_", "neuron_serving_tokens_")

PERIOD_SECONDS = 15.0
"""Seconds between scrapes in Prometheus time; the real duration of the load does not matter."""


def substituted(expression: str, num_scrapes: int) -> str:
    """Values as Grafana sends them: all namespaces and pods, the model of the load, a range that covers everything."""
    values = {
        "__rate_interval": f"{PERIOD_SECONDS * num_scrapes:.0f}s",
        "namespace": ".*",
        "model": "chat",
        "pod": "chat-.*",
    }
    return re.sub(r"\$(\w+)", lambda match: values[match[1]], expression)


# The file


def test_every_panel_has_a_description_and_uses_the_chosen_data_source() -> None:
    for panel in PANELS:
        assert panel["description"].endswith("."), panel["title"]
        assert panel["fieldConfig"]["defaults"]["unit"], panel["title"]
        for asker in (panel, *panel["targets"]):
            assert asker["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
    assert len({panel["title"] for panel in PANELS}) == len(PANELS)


@pytest.mark.parametrize("board", BOARDS.values(), ids=BOARDS)
def test_panels_do_not_overlap(board: dict[str, Any]) -> None:
    taken: set[tuple[int, int]] = set()
    for panel in board["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert max(x for x, _ in cells) < 24
        assert not cells & taken, panel["title"]
        taken |= cells
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])


def test_queries_use_only_variables_of_their_board() -> None:
    assert VARIABLES.keys() == {"datasource", "namespace", "model", "pod"}
    for board in (OPERATOR_BOARD, GATEWAY_BOARD):
        assert [variable["name"] for variable in board["templating"]["list"]] == ["datasource"]
    chosen = 'namespace=~"$namespace",model_name=~"$model",pod=~"$pod"'
    boards = ((BOARD, {"namespace", "model", "pod"}), (OPERATOR_BOARD, set()), (GATEWAY_BOARD, set()))
    for board, variables in boards:
        used = {name for query in queries_of(board).values() for name in re.findall(r"\$(\w+)", query)}
        assert used == {*variables, "__rate_interval"}
        for title, query in queries_of(board).items():
            for name, labels in re.findall(
                r"\b((?:vllm:|neuron_(?:serving|operator)_|process_)\w+)(?:\{(.*?)\})?", query
            ):
                assert name.startswith("neuron_operator_") == (board is OPERATOR_BOARD), title
                assert name.startswith(OF_GATEWAYS) == (board is GATEWAY_BOARD), title
                assert f"{labels},".startswith(f"{chosen}," if variables else ","), title


def test_table_columns_follow_the_order_of_the_queries() -> None:
    (table,) = [panel for panel in PANELS if panel["type"] == "table"]
    for target in table["targets"]:
        assert (target["format"], target["instant"]) == ("table", True)
        assert "by (namespace, model_name" in target["expr"]
    merge, organize = table["transformations"]
    assert (merge["id"], organize["id"]) == ("merge", "organize")
    fields = ["namespace", "model_name", *(f"Value #{target['refId']}" for target in table["targets"])]
    names, order = organize["options"]["renameByName"], organize["options"]["indexByName"]
    assert list(names) == fields
    assert sorted(order, key=order.__getitem__) == ["Time", *fields]
    used = {override["matcher"]["options"] for override in table["fieldConfig"]["overrides"]}
    used |= {column["displayName"] for column in table["options"]["sortBy"]}
    (link,) = [
        link
        for override in table["fieldConfig"]["overrides"]
        for one in override["properties"]
        if one["id"] == "links"
        for link in one["value"]
    ]
    assert link["url"].startswith(f"/d/{BOARD['uid']}/")
    used |= set(re.findall(r"\$\{__data\.fields\.(\w+)\}", link["url"]))
    assert used <= set(names.values())


# docs/metrics.md


def table(title: str) -> list[list[str]]:
    """Cells of the rows of the only table under a heading."""
    text = re.split(r"^## ", DOCS, flags=re.MULTILINE)
    (found,) = (part for part in text if part.startswith(f"{title}\n"))
    lines = [line for line in found.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines[2:]]


def test_the_docs_list_the_rows_in_board_order() -> None:
    documented = [rows.split(", ") for _, rows in table("Grafana boards")]
    boards = (BOARD, OPERATOR_BOARD, GATEWAY_BOARD)
    assert documented == [[one["title"] for one in board["panels"] if one["type"] == "row"] for board in boards]


@pytest.mark.parametrize("board", BOARDS.values(), ids=BOARDS)
def test_every_panel_says_what_it_shows(board: dict[str, Any]) -> None:
    assert [one["title"] for one in board["panels"] if one["type"] != "row" and not one.get("description")] == []


def test_the_docs_list_the_alerts_with_their_severity() -> None:
    documented = [(name.strip("`"), severity) for name, severity, _ in table("Alerts")]
    assert documented == [(name, rule["labels"]["severity"]) for name, rule in RULES.items()]


def test_the_runbook_has_a_section_for_each_alert() -> None:
    sections = re.findall(r"^## (.+)$", (DOCS_FOLDER / "runbook.md").read_text(), re.MULTILINE)
    assert sections == list(RULES)


# The queries


def operator_text(passes: int, failed: int, leader: int, reason: str | None) -> str:
    """`reason` of the model's conditions; None for a standby, which reports no models."""
    metrics = OperatorMetrics()
    metrics.passes.labels("changed").inc(passes)
    metrics.passes.labels("failed").inc(failed)
    for _ in range(passes):
        metrics.pass_seconds.observe(0.02)
        metrics.api_requests.labels("patch", "neuronmodels/status", "200").inc()
        metrics.watch_starts.labels("pods", "watch").inc()
    metrics.leader.set(leader)
    metrics.upgrades.labels("Waiting").set(3)
    is_ready = reason == "Ready"
    conditions = [{"type": kind, "status": str(is_ready), "reason": reason} for kind in ("Available", "Ready")]
    scaling = {"loadSeconds": 85, "activeAt": "2026-03-01T12:00:00Z"}
    held = {"replicas": 1, "plan": {"devices": 2}, "scaling": scaling}
    status = {"conditions": conditions, "readyReplicas": int(is_ready), **held}
    model = {"metadata": {"namespace": "team", "name": "chat"}, "spec": {"replicas": 1}, "status": status}
    metrics.report_models(lambda: [model] if reason else [])
    of_adapter = {"replicas": 1, "readyReplicas": int(is_ready)}
    adapter = {"metadata": {"namespace": "team", "name": "voice"}, "spec": {"model": "chat"}, "status": of_adapter}
    metrics.report_adapters(lambda: [adapter] if reason else [])
    return metrics.exposition().decode()


def bad_model(num_stalls: int) -> str:
    """A model with slow tokens and a cache that is too small."""
    metrics = Metrics("bad")
    metrics.engine_started(1)
    metrics.engine_ready(Ready(BackendLimits(2, 256, 256, num_blocks=64), QueueLimits(), 1.0, 1.0))
    for _ in range(num_stalls):
        metrics.tokens(1, 3.0)
    metrics.step(Step((), (), EngineStats(num_preemptions_total=num_stalls, stream_gap_bound_seconds=0.1 * num_stalls)))
    return metrics.render().decode()


def somebody_elses(num_waiting: int) -> str:
    """An overloaded vLLM: it has the metrics that we adopted, and none of ours."""
    lines = [line for line in bad_model(num_waiting).splitlines(keepends=True) if "neuron_serving_" not in line]
    text = "".join(lines).replace('"bad"', '"theirs"')
    idle = 'vllm:num_requests_waiting{engine="0",model_name="theirs"} 0.0'
    assert idle in text
    return text.replace(idle, idle.replace("0.0", str(num_waiting)))


MEMORY_USES = ("constants", "model_code", "model_shared_scratchpad", "runtime_memory", "tensors")


def of_neuron_devices(number: int) -> str:
    """The n-th answer of AWS's exporter on the node of the pod, as it is documented."""
    registry = CollectorRegistry()
    node = {"instance_id": "i-0abc", "instance_name": "", "instance_type": "trn2.48xlarge"}

    def series(kind: type[Gauge | Counter], name: str, value: float, **labels: str) -> None:
        family = families.setdefault(name, kind(name, "of AWS", (*node, *labels), registry=None))
        one = family.labels(**node, **labels)
        if isinstance(one, Counter):
            one.inc(value)
        else:
            one.set(value)

    families: dict[str, Gauge | Counter] = {}
    for tag in ("chat-0", "4711"):
        for core in "01":
            series(Gauge, "neuroncore_utilization_ratio", 0.4201, neuroncore=core, runtime_tag=tag)
            for use in MEMORY_USES:
                labels = {"memory_location": "None", "neuroncore": core, "runtime_tag": tag}
                series(Gauge, f"neuroncore_memory_usage_{use}", 2e8, **labels)
        for location in ("host", "neuron_device"):
            series(Gauge, "neuron_runtime_memory_used_bytes", 7e9, memory_location=location, runtime_tag=tag)
        for status in ("completed", "timed_out"):
            series(Counter, "execution_status_total", 123 * number, status_type=status, runtime_tag=tag)
        for error in ("transient", "hardware"):
            series(Counter, "execution_errors_total", number, error_type=error, runtime_tag=tag)
        for percentile in ("p50", "p99"):
            series(Gauge, "execution_latency_seconds", 0.01, percentile=percentile, runtime_tag=tag)
    for event in ("mem_ecc_corrected", "mem_ecc_uncorrected"):
        series(Counter, "hardware_ecc_events_total", 3 * number, neuron_device_index="0", event_type=event)
    for family in families.values():
        registry.register(family)
    return generate_latest(registry).decode()


ASKED_AT_A_TIME = 20


async def of_a_gateway(count: int) -> list[str]:
    """So many scrapes: from the second on one replica refuses, one breaks its answers, and a model cannot be woken."""

    async def break_off(asked: Asked, writer: asyncio.StreamWriter) -> bool:
        writer.write(STREAM_HEAD)
        return False

    async def fail(_: Served) -> bool:
        raise ClusterFault("the gateway has no right to do so", retriable=True)

    quick = {"timeouts": {"avoidSeconds": 0.001}}
    async with replicas(echo, echo, break_off) as (chat, refusing, breaking), running(quick, wake=fail) as gateway:
        gateway.serve("chat", chat, refusing)
        gateway.serve("breaks", breaking)
        gateway.serve("sleeps", is_asleep=True)
        await refusing.stop()
        path, made = "/v1/completions", [gateway.gateway.metrics.exposition().decode()]
        waiting = await gateway.connect()
        waiting.send(path, {"model": "sleeps", "prompt": "x"})
        for number in range(1, count):
            for prompt in range(ASKED_AT_A_TIME):
                body = {"model": "chat", "prompt": f"{number} {prompt}"}
                assert (await gateway.post(path, body)).status == 200
            client = await gateway.connect()
            client.send(path, {"model": "breaks", "prompt": "x"})
            await client.rest()
            await client.aclose()
            made.append(gateway.gateway.metrics.exposition().decode())
        await waiting.aclose()
    return made


@pytest.fixture(scope="module")
def load() -> ScriptedLoad:
    return run_against_a_server()


@pytest.fixture(scope="module")
def scraped(load: ScriptedLoad) -> list[Scraped]:
    """Every scrape of the load, and a last one with a failing operator."""
    made = []
    scrapes = [*load.scrapes, load.scrapes[-1]]
    of_gateway = asyncio.run(of_a_gateway(len(scrapes)))
    for number, scrape in enumerate(scrapes):
        at, last = number * PERIOD_SECONDS, number == len(load.scrapes)
        model = {"namespace": "team", "pod": "chat-0", "job": "models"}
        operator = {"namespace": "neuron-serving", "job": "operator"}
        made += [
            Scraped(scrape.text, at, model, scrape.content_type),
            Scraped(
                of_neuron_devices(number), at, {"namespace": "neuron-monitor", "job": "devices", "pod": "monitor-0"}
            ),
            Scraped(bad_model(100 * number), at, model | {"pod": "bad-0"}),
            Scraped(somebody_elses(100 * number), at, {"namespace": "elsewhere", "job": "vllm", "pod": "theirs-0"}),
            Scraped(
                operator_text(number, 2 * last, 1 - last, "ImagePull" if last else "Ready"),
                at,
                operator | {"pod": "operator-0"},
                honor_labels=True,
            ),
            Scraped(operator_text(0, 0, 0, None), at, operator | {"pod": "operator-1"}, honor_labels=True),
            Scraped(of_gateway[number], at, {"namespace": "neuron-serving", "job": "gateway", "pod": "gateway-0"}),
        ]
    return made


def evaluated(scraped: list[Scraped], queries: list[tuple[str, float]]) -> Answer:
    try:
        return evaluate(scraped, queries, RULES_TEXT)
    except NotPossibleHere as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def answer(scraped: list[Scraped]) -> Answer:
    num_scrapes = len({one.at for one in scraped})
    at = (num_scrapes - 2) * PERIOD_SECONDS
    return evaluated(scraped, [(substituted(query, num_scrapes), at) for query in QUERIES.values()])


@pytest.fixture(scope="module")
def results(answer: Answer) -> dict[str, Result]:
    return dict(zip(QUERIES, answer.results, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("title", QUERIES)
def test_every_query_of_the_board_returns_data(title: str, results: dict[str, Result]) -> None:
    result = results[title]
    assert result.error == ""
    assert result.numbers, f"{QUERIES[title]} gives {result.samples}"


@pytest.mark.slow
def test_the_board_shows_the_load(load: ScriptedLoad, scraped: list[Scraped], results: dict[str, Result]) -> None:
    expected = load.expected
    seconds = PERIOD_SECONDS * len({one.at for one in scraped})

    def rates(title: str) -> dict[str, float]:
        ((_, result),) = [(name, one) for name, one in results.items() if name == f"{title} / A"]
        return {"".join(labels.values()): pytest.approx(value * seconds) for labels, value in result.samples}

    assert rates("Requests") == expected.finished
    assert {reason: count for reason, count in rates("Refused requests").items() if count != 0} == expected.refused
    assert rates("Tokens") == {"": sum(expected.prompts)}
    errors = {code: count for code, count in expected.responses.items() if code >= "400"}
    shares = {labels["code"]: value for labels, value in results["Error rate / A"].samples if value}
    assert shares == {code: pytest.approx(count / expected.responses.total()) for code, count in errors.items()}
    assert results["Error rate / B"].numbers == [pytest.approx(1 / sum(expected.finished.values()))]
    assert {labels["process"] for labels, _ in results["Memory / A"].samples} == {"supervisor", "engine", "front-end"}
    assert rates("Preemptions") == {"chat-0": expected.preemptions}
    assert results["Ready replicas / A"].numbers == [1]
    assert results["Missing replicas / A"].value(namespace="team", name="chat") == 0
    assert results["Models by condition / A"].value(condition="Available") == 1
    hits = results["Prefix cache hit rate / A"].value(pod="chat-0")
    assert hits == pytest.approx(expected.prefix_hits / sum(expected.prompts))
    assert results["Device utilization / A"].value(pod="chat-0") > 0
    (busy,) = {labels["runtime_tag"] for labels, _ in results["NeuronCore utilization / A"].samples}
    assert busy == "chat-0", "not another process of the node"
    assert results["NeuronCore utilization / A"].value(neuroncore="0") == pytest.approx(0.4201)
    assert results["Device memory by use / A"].value(__name__="neuroncore_memory_usage_tensors") == 2 * 2e8
    of_gateway = {labels["model"]: value for labels, value in results["Requests by model / A"].samples}
    assert of_gateway["default/chat"] == pytest.approx(ASKED_AT_A_TIME * of_gateway["default/breaks"])
    assert results["Requests that wait / A"].value(model="default/sleeps") == 1
    assert results["Padding waste / A"].value(kind="decode", bucket="none") == 0
    assert results["Prompt length / A"].numbers[0] <= max(expected.prompts)


@pytest.mark.slow
def test_the_board_counts_replicas_whose_engine_is_vllm() -> None:
    texts = {pod: somebody_elses(1).replace('"theirs"', '"chat"') for pod in ("chat-0", "chat-1")}
    made = [Scraped(text, 0, {"namespace": "team", "pod": pod, "job": "models"}) for pod, text in texts.items()]
    queries = [(substituted(QUERIES[title], 1), 0.0) for title in ("Ready replicas / A", "Models / A", "Models / B")]
    assert [result.numbers for result in evaluated(made, queries).results] == [[2], [2], [2]]


@pytest.mark.slow
def test_every_metric_is_on_the_board_or_excluded_with_a_reason(results: dict[str, Result]) -> None:
    shown = {re.sub(r"_(bucket|sum|count)$", "", name) for result in results.values() for name in result.metrics}
    ours = {family.name for family in FAMILIES}
    without = {
        "vllm:cache_config_info": "the same for as long as a pod lives",
        "vllm:lora_requests_info": "read by gateways, which pick a replica by it",
        "vllm:prompt_tokens_by_source_total": "the panel Tokens shows it with the totals",
        "vllm:request_inference_time_seconds": "the sum of two phases that are shown",
        "vllm:request_prefill_kv_computed_tokens": "the cache's hit rate is shown",
        "neuron_serving_group_wait_seconds_total": "zero but for groups, whose page names it",
        "neuron_serving_pictures_total": "zero but for models that see pictures, whose page names it",
        "neuron_serving_picture_seconds": "the same",
        "process_virtual_memory_bytes": "says nothing about the memory in use",
        "neuron_serving_neuron_logical_core_memory_used_bytes": "the panel of a core's memory shows it by use",
        "neuron_serving_neuron_logical_core_memory_free_bytes": "the same for as long as a model is loaded",
        "vllm:spec_decode_num_accepted_tokens_per_pos_total": "read when the number of draft tokens is chosen",
        "neuron_serving_idle_seconds": "read by the operator, whose board shows it by model",
        "vllm:request_params_n": "read when a model is sized",
        "vllm:request_params_max_tokens": "read when a model is sized",
        "vllm:request_max_num_generation_tokens": "read when a model is sized",
    }
    devices = set(re.findall(r"^# TYPE (?!\S+_created)(\S+) ", of_neuron_devices(1), re.MULTILINE))
    # A query may select names by a pattern.
    patterns = {name for name in shown if not name.startswith(("neuron_operator_", *OF_GATEWAYS))} - ours
    assert {name for name in devices if any(re.fullmatch(one, name) for one in patterns)} == devices
    assert [one for one in patterns if not any(re.fullmatch(one, name) for name in devices)] == []
    assert ours - shown == without.keys()
    operator = {name for name in shown if name.startswith("neuron_operator_")}
    metrics = OperatorMetrics()
    metrics.report_models(lambda: [{}])
    metrics.report_adapters(lambda: [{}])
    assert operator == declared(metrics.exposition())
    (gateway,) = {declared(text.encode()) for text in asyncio.run(of_a_gateway(1))}
    assert {name for name in shown if name.startswith(OF_GATEWAYS)} == gateway


def declared(exposition: bytes) -> frozenset[str]:
    found = re.findall(r"^# TYPE (\S+) ", exposition.decode(), re.MULTILINE)
    return frozenset(name for name in found if not name.endswith("_created"))


@pytest.mark.slow
def test_a_restart_is_annotated_on_every_panel(load: ScriptedLoad, scraped: list[Scraped]) -> None:
    ((title, query),) = [(one["name"], one["target"]["expr"]) for one in BOARD["annotations"]["list"]]
    assert title == "Engine restarts"
    restarts = [scrape.total("neuron_serving_engine_restarts_total") for scrape in load.scrapes]
    times = [number * PERIOD_SECONDS for number in range(len(restarts))]
    found = evaluated(scraped, [(substituted(query, len(times)), at) for at in times]).results
    assert [bool(result.samples) for result in found] == [number > 0 for number in restarts]


@pytest.mark.slow
def test_the_variables_of_the_board_find_values(scraped: list[Scraped]) -> None:
    at = max(one.at for one in scraped)
    asked = {
        name: re.fullmatch(r"label_values\((.+), (\w+)\)", variable["query"]["query"])
        for name, variable in VARIABLES.items()
        if variable["type"] == "query"
    }
    assert all(asked.values())
    found = evaluated(scraped, [(substituted(match[1], 9), at) for match in asked.values() if match]).results
    values = [
        {labels[match[2]] for labels, _ in result.samples}
        for match, result in zip(asked.values(), found, strict=True)
        if match
    ]
    assert values == [{"team"}, {"bad", "chat"}, {"chat-0"}]


@pytest.mark.slow
def test_metric_names_pass_the_prometheus_linter(answer: Answer) -> None:
    """Findings about `vllm:` names are ignored: vLLM chose them, and boards and autoscalers use them."""
    ours = [problem for problem in answer.lint_problems if not problem.startswith("vllm:")]
    assert ours == []
    kinds = {problem.partition(": ")[2] for problem in answer.lint_problems}
    assert kinds <= {
        "metric names should not contain ':'",
        'non-counter metrics should not have "_total" suffix',
    }


@pytest.mark.slow
def test_the_queries_of_the_docs_return_data(scraped: list[Scraped]) -> None:
    shown = re.findall(r"^```promql\n(.*?)^```", DOCS, re.MULTILINE | re.DOTALL)
    assert len(shown) > 5
    (trigger,) = SCALED_OBJECT["spec"]["triggers"]
    shown.append(trigger["metadata"]["query"].replace('namespace="default"', 'namespace="team"'))
    at = max(one.at for one in scraped)
    for query, result in zip(shown, evaluated(scraped, [(query, at) for query in shown]).results, strict=True):
        assert result.error == "", query
        assert result.numbers, query


# Alerts


@pytest.mark.slow
def test_the_alerting_rules_are_valid(answer: Answer) -> None:
    assert answer.rule_errors == ()
    for name, rule in RULES.items():
        assert rule["labels"]["severity"] in ("info", "warning", "critical"), name
        assert rule["annotations"].keys() == {"summary", "description"}, name


def fired(results: Iterator[Result], times: list[float]) -> dict[str, set[float]]:
    """Times at which each alert fired. None fires for a foreign model."""
    found: dict[str, set[float]] = {name: set() for name in RULES}
    for at in times:
        for name in RULES:
            result = next(results)
            assert result.error == "", name
            assert "theirs" not in [labels.get("model_name") for labels, _ in result.samples], name
            if result.samples:
                found[name].add(at)
    return found


@pytest.mark.slow
def test_an_alert_fires_only_under_its_condition(load: ScriptedLoad, scraped: list[Scraped]) -> None:
    times = sorted({one.at for one in scraped})
    queries = [(rule["expr"], at) for at in times for rule in RULES.values()]
    found = fired(iter(evaluated(scraped, queries).results), times)

    def moment(holds: Any) -> set[float]:
        return {number * PERIOD_SECONDS for number, scrape in enumerate(load.scrapes) if holds(scrape)}

    assert found["NeuronModelQueueGrows"] == moment(lambda scrape: scrape.total("vllm:num_requests_waiting") > 0)
    assert min(found["NeuronEngineRestarts"]) == min(
        moment(lambda scrape: scrape.total("neuron_serving_engine_restarts_total") > 0)
    )
    refusals = moment(lambda s: s.total("neuron_serving_requests_refused_total", reason="overloaded") > 0)
    assert min(found["NeuronModelRefusesRequests"]) == min(refusals)
    for name in ("NeuronModelStreamsStall", "NeuronModelStreamsMayStall", "NeuronModelPreempts"):
        assert found[name], name
    for name in ("NeuronModelNotServing", "NeuronOperatorAbsent", "NeuronOperatorFails", "NeuronModelNotReady"):
        assert found[name] == {times[-1]}, name
    assert found["NeuronGatewayHoldsRequests"] == set(times[1:])
    assert found["NeuronGatewayFailsRequests"], "answers that break off"
    assert not any(times[0] in moments for moments in found.values()), "an alert fires without a cause"


MINUTE = 60.0
NOT_SERVING, NOT_READY = "NeuronModelNotServing", "NeuronModelNotReady"


@dataclass(frozen=True)
class Life:
    """A model's conditions over time, and when alerts fire, in minutes from its creation."""

    name: str
    phases: tuple[tuple[int, str], ...]
    """Minutes, and the reason of the condition Ready; empty: the model does not exist."""
    not_serving: range = range(0)
    not_ready: range = range(0)
    replicas: int = 1
    ready: int = 0
    """Replicas that serve while the model is not ready."""

    def reasons(self) -> Iterator[str]:
        for minutes, reason in self.phases:
            yield from [reason] * minutes


LIVES = (
    Life("starts-slowly", ((2, "Resolving"), (50, "Loading"), (38, "Ready"))),
    Life("hangs", ((90, "Loading"),), not_ready=range(60, 90)),
    Life("fails-at-once", ((90, "ImagePull"),), not_serving=range(5, 90), not_ready=range(60, 90)),
    Life("cannot-be-resolved", ((1, "Resolving"), (89, "ModelNotFound")), range(6, 90), range(60, 90)),
    Life("crashes-again-and-again", ((4, "Loading"), (3, "CrashLoop")) * 12, range(9, 84), range(60, 84)),
    Life("serves-then-fails", ((20, "Ready"), (10, "CrashLoop"), (5, "Loading"), (55, "Ready")), range(25, 35)),
    Life("restarts-once", ((20, "Ready"), (1, "DeviceFailed"), (3, "Loading"), (66, "Ready"))),
    Life("serves-with-fewer", ((90, "InsufficientNeuron"),), not_ready=range(60, 90), replicas=2, ready=1),
    Life("rolls-out", ((20, "Ready"), (30, "Loading"), (40, "Ready"))),
    Life("scaled-to-zero", ((90, "ScaledToZero"),), replicas=0),
    Life("paused", ((90, "Paused"),)),
    Life("deleted", ((20, "ImagePull"), (70, "")), range(5, 20)),
)


def model_of(life: Life, reason: str) -> dict[str, Any]:
    is_ready = reason in ("Ready", "ScaledToZero")
    conditions = [{"type": kind, "status": str(is_ready), "reason": reason} for kind in ("Available", "Ready")]
    accepted = {"type": "Accepted", "status": "True", "reason": "Accepted"}
    return {
        "metadata": {"namespace": "team", "name": life.name},
        "spec": {"replicas": life.replicas},
        "status": {
            "conditions": [accepted, *conditions],
            "readyReplicas": life.replicas if is_ready else life.ready,
        },
    }


def fires(rule: Mapping[str, Any], minutes: Sequence[int], holds: set[int]) -> list[int]:
    """The minutes in which an alert fires: as Prometheus does, once its expression has held for `for`."""
    wait, since, found = {"5m": 5, "1h": 60}[rule["for"]], -1, []
    for minute in minutes:
        since = (since if since >= 0 else minute) if minute in holds else -1
        if since >= 0 and minute - since >= wait:
            found.append(minute)
    return found


@pytest.mark.slow
def test_a_model_without_a_serving_replica_is_an_alarm_and_a_long_start_is_none() -> None:
    minutes = range(90)
    reasons = {life.name: [*life.reasons(), *[""] * len(minutes)] for life in LIVES}
    scrapes = []
    for minute in minutes:
        metrics = OperatorMetrics()
        bodies = [model_of(life, reasons[life.name][minute]) for life in LIVES if reasons[life.name][minute]]
        metrics.report_models(partial(list, bodies))
        labels = {"namespace": "neuron-serving", "pod": "operator-0"}
        text = metrics.exposition().decode()
        scrapes.append(Scraped(text, minute * MINUTE, labels, honor_labels=True))
    asked = [(RULES[name]["expr"], minute * MINUTE) for name in (NOT_SERVING, NOT_READY) for minute in minutes]
    results = iter(evaluated(scrapes, asked).results)
    held: dict[tuple[str, str], set[int]] = defaultdict(set)
    for name in (NOT_SERVING, NOT_READY):
        for minute in minutes:
            result = next(results)
            assert result.error == ""
            for labels, _ in result.samples:
                assert labels["namespace"] == "team"
                held[name, labels["name"]].add(minute)
    for life in LIVES:
        for name, expected in ((NOT_SERVING, life.not_serving), (NOT_READY, life.not_ready)):
            assert fires(RULES[name], minutes, held[name, life.name]) == list(expected), (life.name, name)


def test_the_alarm_ignores_the_reasons_that_are_progress() -> None:
    (ignored,) = re.findall(r'reason!~"(.+?)"', RULES[NOT_SERVING]["expr"])
    assert ignored.split("|") == sorted(reason.row.name for reason in Reason if reason.row.passing)
