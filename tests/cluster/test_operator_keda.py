"""KEDA takes a model to zero and back by the ScaledObject of the example: its real operator and metrics adapter with
their own rights, Kubernetes' own HorizontalPodAutoscaler, and a played kubelet. The metrics come from the test."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from cluster.conftest import not_possible
from cluster.rig.needs import NotPossibleHere
from helpers import keda
from helpers.apiserver import ApiServer
from helpers.controllers import CONTROLLERS, controlling, finished_or_ready, kubelet, loading_on, put_status
from helpers.operators import Namespace, client_of, eventually, is_ready, operating, run_settings, served
from neuron_operator.api import names
from neuron_operator.cluster.client import NEURON_MODELS, PODS

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.long]

EXAMPLE = Path(__file__).parents[2] / "examples" / "autoscaling-keda-zero.yaml"
PROMETHEUS = "http://prometheus.monitoring:9090"
QUICK = {"pollingInterval": 1, "cooldownPeriod": 3}
"""The example asks every 15 s, and sleeps a quarter of an hour later."""
AUTOSCALER = (
    "--horizontal-pod-autoscaler-sync-period=1s",
    "--horizontal-pod-autoscaler-initial-readiness-delay=1s",
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    folder = tmp_path_factory.mktemp("api-server")
    certificates = keda.certificate(folder / "keda")
    with served(folder, flags=keda.aggregator_flags(certificates)) as server, contextlib.ExitStack() as stack:
        try:
            stack.enter_context(keda.running(server, certificates))
        except NotPossibleHere as reason:
            not_possible(str(reason))
        yield server


async def test_keda_takes_a_model_from_zero_to_two_and_back_and_breaks_none_off_that_loads(server: ApiServer) -> None:
    namespace = Namespace(server, "default")  # the example's queries name it
    held, waiting, running, loads = 0, 0, 1, False

    def leaders() -> list[Any]:
        """Without those that wait for a kubelet's word to be gone."""
        pods = [pod for pod in namespace.list(PODS) if "deletionTimestamp" not in pod["metadata"]]
        return [pod for pod in pods if pod["metadata"]["labels"][names.ROLE_LABEL] == names.ROLE_LEADER]

    def scrape() -> str:
        lines = [f'llm_d_epp_flow_control_queue_size{{inference_pool="chat"}} {held}']
        for number, pod in enumerate(leaders()):
            if pod["status"].get("conditions", [{}])[-1].get("status") == "True":  # one that loads has no series
                about = f'{{namespace="default",model_name="chat",pod="{number}"}}'
                values = {"waiting": waiting, "running": running} if number == 0 else {"waiting": 0, "running": 0}
                lines += [f"vllm:num_requests_{name}{about} {value}" for name, value in values.items()]
        return "\n".join([*lines, ""])

    def status_of(pod: Any) -> Any:
        is_loading = loads and pod["metadata"]["labels"][names.ROLE_LABEL] == names.ROLE_LEADER
        return loading_on("n1", namespace, pod) if is_loading else finished_or_ready(pod)

    def wanted() -> int:
        scale = server.call("GET", NEURON_MODELS.path(namespace.name, "chat", "scale"))
        assert scale["status"]["selector"]
        return int(scale["spec"].get("replicas", 0))

    def is_at_zero() -> bool:
        return namespace.condition("Available") == ("True", "ScaledToZero") and not leaders()

    scaled = "/apis/keda.sh/v1alpha1/namespaces/default/scaledobjects/chat"
    autoscalers = "/apis/autoscaling/v2/namespaces/default/horizontalpodautoscalers"

    def about() -> Any:
        return server.call("GET", scaled).get("status"), namespace.model()["status"]

    async with keda.prometheus(scrape) as url, contextlib.AsyncExitStack() as stack:
        controllers = (*CONTROLLERS, "horizontal-pod-autoscaler-controller")
        stack.enter_context(controlling(server, controllers=controllers, flags=AUTOSCALER))
        client = await stack.enter_async_context(client_of(server))
        await stack.enter_async_context(operating(client, run_settings("--watch-namespaces", namespace.name)))
        await stack.enter_async_context(kubelet(namespace, status_of))
        namespace.put_model(replicas=1)
        await eventually(lambda: is_ready(namespace), about=namespace.model)
        text = EXAMPLE.read_text()
        assert text.count(PROMETHEUS) == 2
        example = yaml.safe_load(text.replace(PROMETHEUS, url))
        server.apply(scaled, {**example, "spec": {**example["spec"], **QUICK}})

        await eventually(lambda: "ValidMetricFound" in str(server.call("GET", autoscalers)), about=about)
        assert wanted() == 1, "a request that runs keeps the replica"
        running = 0
        await eventually(is_at_zero, about=about)
        assert wanted() == 0
        held, loads = 2, True
        await eventually(lambda: wanted() == 1, about=about)
        await eventually(lambda: len(leaders()) == 1)
        # The clients give up while the replica loads.
        held = 0
        await eventually(lambda: wanted() == 0, about=about)
        await eventually(lambda: "is not broken off" in str(namespace.model()["status"]), about=about)
        (kept,) = leaders()
        # The next ones find it, and it is as many as two replicas are for.
        held = 8
        await eventually(lambda: wanted() == 2, about=about)
        assert kept["metadata"]["uid"] in {pod["metadata"]["uid"] for pod in leaders()}
        loads = False
        for pod in leaders():
            put_status(namespace, pod, finished_or_ready(pod))
        held, waiting, running = 0, 8, 2
        await eventually(lambda: wanted() == 2 and is_ready(namespace) and len(leaders()) == 2, about=about)
        assert kept["metadata"]["uid"] in {pod["metadata"]["uid"] for pod in leaders()}
        waiting = running = 0
        await eventually(is_at_zero, about=about)
        assert wanted() == 0
        conditions = {one["type"]: one["status"] for one in server.call("GET", scaled)["status"]["conditions"]}
        assert (conditions["Ready"], conditions["Active"]) == ("True", "False")
