"""A HorizontalPodAutoscaler with `minReplicas: 0` takes a model to zero and back: the example, the real controllers
with the gate HPAScaleToZero, and a played kubelet. The metrics come from the test."""

from __future__ import annotations

import contextlib
import time
import urllib.parse
from pathlib import Path
from typing import Any

import pytest
import yaml
from aiohttp import web

from helpers.api_proxy import proxying
from helpers.apiserver import ApiServer
from helpers.controllers import CONTROLLERS, controlling, finished_or_ready, kubelet, loading_on, put_status
from helpers.external_metrics import GROUP_VERSION, value_list
from helpers.operators import BY_KIND, Namespace, client_of, eventually, is_ready, operating, run_settings
from neuron_operator.api import names
from neuron_operator.cluster.client import PODS

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.long]

EXAMPLE = yaml.safe_load((Path(__file__).parents[2] / "examples" / "autoscaling-hpa-zero.yaml").read_text())
HELD, WAITING, RUNNING = (one["external"]["metric"]["name"] for one in EXAMPLE["spec"]["metrics"])
AUTOSCALER = (
    "--feature-gates=HPAScaleToZero=true",
    "--horizontal-pod-autoscaler-sync-period=1s",
    "--horizontal-pod-autoscaler-initial-readiness-delay=1s",
)


async def test_a_model_goes_to_zero_and_back_and_one_that_loads_is_not_broken_off(server: ApiServer) -> None:
    namespace, values, loads = Namespace(server), {HELD: 0.0, WAITING: 0.0, RUNNING: 1.0}, [False]

    def metrics(request: web.Request) -> web.Response | None:
        path = urllib.parse.unquote(request.path)
        if GROUP_VERSION not in path:
            return None
        name = path.rpartition("/")[2]
        # A model without replicas has no series.
        has_series = name == HELD or bool(replicas())
        sample = {"metric": {}, "value": [time.time(), values[name]]}
        return web.json_response(value_list(name, [sample] if has_series else []))

    def replicas() -> list[Any]:
        """Without those that wait for a kubelet's word to be gone."""
        pods = [pod for pod in namespace.list(PODS) if "deletionTimestamp" not in pod["metadata"]]
        return [pod for pod in pods if pod["metadata"]["labels"][names.ROLE_LABEL] == names.ROLE_LEADER]

    def status_of(pod: Any) -> Any:
        is_loading = loads[0] and pod["metadata"]["labels"][names.ROLE_LABEL] == names.ROLE_LEADER
        return loading_on("n1", namespace, pod) if is_loading else finished_or_ready(pod)

    def wanted() -> int:
        return int(namespace.model()["spec"]["replicas"])

    def is_at_zero() -> bool:
        return namespace.condition() == ("True", "ScaledToZero") and not replicas()

    async with proxying(server) as proxy:
        proxy.answer, proxy.user = metrics, "admin"
        async with contextlib.AsyncExitStack() as stack:
            through = {"controllers": (*CONTROLLERS, "horizontal-pod-autoscaler-controller"), "flags": AUTOSCALER}
            stack.enter_context(controlling(server, proxy.url, **through))
            client = await stack.enter_async_context(client_of(server))
            await stack.enter_async_context(operating(client, run_settings("--watch-namespaces", namespace.name)))
            await stack.enter_async_context(kubelet(namespace, status_of))
            namespace.put_model(replicas=1)
            await eventually(lambda: is_ready(namespace), about=namespace.model)
            quick = {"scaleDown": {"stabilizationWindowSeconds": 0}}  # the example waits a quarter of an hour
            path = f"/apis/autoscaling/v2/namespaces/{namespace.name}/horizontalpodautoscalers/chat"
            server.apply(path, {**EXAMPLE, "spec": {**EXAMPLE["spec"], "behavior": quick}})

            def autoscaler() -> Any:
                return server.call("GET", path).get("status")

            await eventually(lambda: "ValidMetricFound" in str(autoscaler()), about=autoscaler)
            assert wanted() == 1, "a request that runs keeps the replica"
            values[RUNNING] = 0.0
            await eventually(is_at_zero, about=autoscaler)
            values[HELD], loads[0] = 9.0, True
            await eventually(lambda: wanted() == 3, about=autoscaler)
            await eventually(lambda: len(replicas()) == 3)
            # The clients give up while the replicas load.
            values[HELD] = 0.0
            await eventually(lambda: wanted() == 0, about=autoscaler)
            await eventually(lambda: "is not broken off" in str(namespace.model()["status"]), about=namespace.model)
            await eventually(lambda: len(replicas()) == 1)
            # The next one finds it.
            values[HELD] = 1.0
            await eventually(lambda: wanted() == 1, about=autoscaler)
            (kept,) = replicas()
            loads[0] = False
            put_status(namespace, kept, finished_or_ready(kept))
            values[HELD], values[RUNNING] = 0.0, 1.0
            await eventually(lambda: is_ready(namespace), about=namespace.model)
            assert [pod["metadata"]["name"] for pod in replicas()] == [kept["metadata"]["name"]]
            assert namespace.get(BY_KIND["Deployment"], "chat")["spec"]["replicas"] == 1
