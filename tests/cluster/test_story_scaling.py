"""A HorizontalPodAutoscaler scales a model by its waiting requests on the real cluster: the manifest of `examples`, the
chart's PodMonitors, a real Prometheus, and a metrics adapter with the rule of docs/autoscaling.md."""

from __future__ import annotations

import json
import re
from contextlib import ExitStack
from typing import Any

import pytest
import yaml

from cluster.monitoring import Monitoring, monitoring, monitoring_kinds
from cluster.rig.rig import Rig
from cluster.stories import (
    OPERATOR_NAMESPACE,
    OPERATOR_SELECTOR,
    ROOT,
    TORCH,
    Images,
    Story,
    install,
    load_images,
    model_of,
    uninstall,
)

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(1800, func_only=True)]

AUTOSCALER = yaml.safe_load((ROOT / "examples" / "autoscaling-hpa.yaml").read_text())
SPEC = AUTOSCALER["spec"]
(RULE,) = yaml.safe_load(
    re.findall(r"```yaml\n(.*?)```", (ROOT / "docs" / "autoscaling.md").read_text(), re.DOTALL)[0]
)["externalRules"]
METRIC = SPEC["metrics"][0]["external"]["metric"]
NUM_CLIENTS = 2 * int(SPEC["metrics"][0]["external"]["target"]["averageValue"])
"""One replica answers one and lets the others wait: too many for it."""

LOAD = """
import json, sys, threading, time, urllib.request
url, num_clients = sys.argv[1], int(sys.argv[2])
body = json.dumps({"model": "chat", "prompt": "kubectl", "max_tokens": 200, "ignore_eos": True}).encode()
headers = {"Content-Type": "application/json"}
def client():
    while True:
        try:
            urllib.request.urlopen(urllib.request.Request(url + "/v1/completions", body, headers)).read()
        except OSError as error:
            print(error, flush=True)
            time.sleep(0.2)
for _ in range(num_clients):
    threading.Thread(target=client).start()
"""


def test_an_autoscaler_adds_a_replica_while_requests_wait_and_takes_it_away(rig: Rig, namespace: str) -> None:
    story = Story(rig, namespace)
    images = load_images(rig)
    with ExitStack() as stack:
        with story.stage("install with PodMonitors"):
            stack.enter_context(monitoring_kinds(rig))
            stack.callback(uninstall, rig)
            values = {"monitoring.podMonitors.enabled": True, "monitoring.rules.enabled": True}
            install(rig, images, values=values)
        with story.stage("Prometheus and an adapter"):
            monitored = stack.enter_context(monitoring(rig, images.runtime, RULE))
        _tell(story, images, monitored)


def _tell(story: Story, images: Images, monitored: Monitoring) -> None:
    with story.stage("a model with one sequence per replica, and the example's autoscaler"):
        serving = {"maxModelLength": 256, "maxSequences": 1}
        story.apply(model_of("chat", "file:///models/demo", engine=TORCH, serving=serving))
        story.until_ready(1)
        story.apply(AUTOSCALER)
        story.until("the autoscaler reads the metric", lambda: _autoscaler(story, "ScalingActive"))
    with story.stage("what Prometheus scrapes"):
        _check_scraped(story, monitored)

    with story.stage("requests wait: a second replica"):
        url = f"http://chat.{story.namespace}.svc.cluster.local:8000"
        story.start_client(images.runtime, "load", LOAD, url, str(NUM_CLIENTS))
        story.until("two replicas are wanted", lambda: _wanted(story) >= 2)
        story.until("two replicas serve", lambda: len(story.ready_pods()) >= 2)
    with story.stage("the load ends: one replica"):
        story.kubectl("delete", "pod", "load", "--grace-period=1")
        # The example waits ten minutes.
        story.apply({**AUTOSCALER, "spec": {**SPEC, "behavior": {"scaleDown": {"stabilizationWindowSeconds": 0}}}})
        story.until("one replica is wanted", lambda: _wanted(story) == 1)
        story.until_ready(1)


def _wanted(story: Story) -> int:
    return int(story.kubectl("get", "nm", "chat", "-o", "jsonpath={.spec.replicas}"))


def _autoscaler(story: Story, condition: str) -> bool:
    status = json.loads(story.kubectl("get", "hpa", "chat", "-o", "json")).get("status", {})
    return any((c["type"], c["status"]) == (condition, "True") for c in status.get("conditions", ()))


def _check_scraped(story: Story, monitored: Monitoring) -> None:
    """Every pod of the model and of the operator, no other, with the labels that boards, alerts and autoscalers use."""

    def pods(found: list[Any]) -> set[tuple[str, str, str]]:
        return {(s["metric"]["job"], s["metric"]["namespace"], s["metric"]["pod"]) for s in found}

    operators = story.rig.get("pods", "-n", OPERATOR_NAMESPACE, "-l", OPERATOR_SELECTOR)["items"]
    models, operator = (f"{OPERATOR_NAMESPACE}/neuron-operator-{name}" for name in ("models", "operator"))
    expected = {(models, story.namespace, pod["metadata"]["name"]) for pod in story.ready_pods()}
    expected |= {(operator, OPERATOR_NAMESPACE, pod["metadata"]["name"]) for pod in operators}
    story.until("the targets are up", lambda: pods(monitored.query("up == 1")) == expected)
    assert pods(monitored.query("up")) == expected

    waiting = f'{METRIC["name"]}{{namespace="{story.namespace}",model_name="chat"}} == 0'
    story.until("the model's series", lambda: monitored.query(waiting))
    selected = METRIC["selector"]["matchLabels"]
    story.until("the adapter's answer", lambda: monitored.values(story.namespace, METRIC["name"], **selected))
    assert monitored.values("default", METRIC["name"]) == [], "another namespace's requests"
    # What the operator says about a model has the namespace of the model.
    of_model = f'neuron_operator_model_ready_replicas{{namespace="{story.namespace}",name="chat"}} == 1'
    story.until("the operator's series of the model", lambda: monitored.query(of_model))
