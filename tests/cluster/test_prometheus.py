"""The boards' queries and the alerts in Prometheus' own programs: their timing in promtool, and a real Prometheus.

It scrapes an operator, which runs against a real API server, and served models, as processes of this machine. Devices
are simulated and kubelets are played: slow steps and failing pods are the faults, everything that counts them is real.
`tests/contract/test_board.py` checks the values that the queries give.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import urllib.parse
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import (
    AbstractAsyncContextManager,
    AsyncExitStack,
    ExitStack,
    aclosing,
    asynccontextmanager,
    contextmanager,
)
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from cluster.rig.binaries import ensure
from cluster.rig.machine import WAIT_SECONDS, wait_until
from cluster.rig.needs import NotPossibleHere
from helpers import gateway_process
from helpers.answers import answer as answer_of
from helpers.apiserver import ApiServer, service_account
from helpers.controllers import Status, controlling, ended_twice, finished_or_ready, kubelet, replica
from helpers.gateways import Asked, Running, answer, echo, replicas, running
from helpers.operator_rights import OPERATOR_NAMESPACE, grant
from helpers.operators import BY_KIND, OPERATOR_USER, Namespace, client_of, served
from helpers.ports import free_ports
from helpers.serve_command import ENGINE, ServeCommand, post, serve
from neuron_operator.api import names
from neuron_operator.cluster.client import NEURON_ADAPTERS, NEURON_MODELS, PODS
from neuron_operator.gateway.process import observed
from neuron_operator.gateway.watching import wake

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

ROOT = Path(__file__).parents[2]
CHART = ROOT / "charts" / "neuron-serving"
RULES = yaml.safe_load((CHART / "rules" / "neuron-serving.yaml").read_text())
ALERTS = [rule["alert"] for group in RULES["groups"] for rule in group["rules"]]
MODEL = ROOT / "examples" / "demo-model"
BOARDS = [json.loads(file.read_text()) for file in (CHART / "dashboards").iterdir()]
CHOSEN = {"__rate_interval": "60s", "namespace": ".*", "model": "chat", "pod": ".*"}
"""Values of the boards' variables."""


@pytest.fixture(scope="module")
def programs() -> Path:
    try:
        return ensure("prometheus")["prometheus"]
    except NotPossibleHere as error:
        pytest.skip(str(error))


def test_each_alert_fires_and_ends_in_time(programs: Path, tmp_path: Path) -> None:
    """Without annotations, which promtool would compare word by word."""
    bare = [{key: value for key, value in rule.items() if key != "annotations"} for rule in RULES["groups"][0]["rules"]]
    rules = yaml.safe_dump({"groups": [{"name": "neuron-serving", "rules": bare}]})
    cases = (ROOT / "tests" / "cases" / "alerts.yaml").read_text()

    def tested() -> str:
        (tmp_path / "rules.yaml").write_text(rules)
        (tmp_path / "alerts.yaml").write_text(cases.replace("[RULES]", "[rules.yaml]"))
        command = [programs / "promtool", "test", "rules", tmp_path / "alerts.yaml"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    assert "SUCCESS" in answer_of("promtool", tested, programs.name, rules, cases)
    checks = [check for case in yaml.safe_load(cases)["tests"] for check in case["alert_rule_test"]]
    for fires in (True, False):
        assert {check["alertname"] for check in checks if bool(check.get("exp_alerts")) == fires} == set(ALERTS)


def hurried(text: str) -> str:
    """Rules in which an hour takes a minute and a minute a second."""
    assert not re.search(r"\b\d+[sd]\b", text)
    return re.sub(r"\b(\d+)h\b", lambda m: f"{60 * int(m[1])}s", re.sub(r"\b(\d+)m\b", r"\1s", text))


class Prometheus:
    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}/api/v1"

    def query(self, expression: str) -> list[Any]:
        with urllib.request.urlopen(f"{self.url}/query?{urllib.parse.urlencode({'query': expression})}") as answer:
            found = json.load(answer)["data"]
        return list(found["result"]) if found["resultType"] == "vector" else [found["result"]]

    def firing(self) -> set[tuple[str, str]]:
        """Each alert with its model, which is empty if it is about the operator or all gateways."""
        found = [one["metric"] for one in self.query('ALERTS{alertstate="firing"}')]
        kinds = ("model_name", "name", "model")
        return {(one["alertname"], next((one[kind] for kind in kinds if kind in one), "")) for one in found}

    def has(self, expression: str) -> bool:
        """Whether it has a sample; False until Prometheus answers."""
        try:
            return bool(self.query(expression))
        except OSError:
            return False


@contextmanager
def scraping(
    programs: Path, folder: Path, port: int, targets: dict[str, tuple[str, dict[str, str]]]
) -> Iterator[Prometheus]:
    """A Prometheus that scrapes twice a second. targets: by job, address and labels, as a PodMonitor gives them."""
    (folder / "rules.yaml").write_text(hurried(yaml.safe_dump(RULES)))
    jobs = [
        {
            "job_name": job,
            "honor_labels": job == "operator",
            "static_configs": [{"targets": [address], "labels": labels}],
        }
        for job, (address, labels) in targets.items()
    ]
    pace = {"scrape_interval": "500ms", "scrape_timeout": "500ms", "evaluation_interval": "500ms"}
    config = {"global": pace, "rule_files": ["rules.yaml"], "scrape_configs": jobs}
    (folder / "prometheus.yaml").write_text(yaml.safe_dump(config))
    command = [
        programs / "prometheus",
        f"--config.file={folder / 'prometheus.yaml'}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
        "--query.lookback-delta=5s",
    ]
    with (folder / "prometheus.log").open("wb") as log, subprocess.Popen(command, stdout=log, stderr=log) as process:
        try:
            yield Prometheus(port)
        finally:
            process.kill()


MEETS_A_BUG = "meets-a-bug"
WRITTEN_SLOWLY = "written-slowly"
FAULTY = f"""
import asyncio

import neuron_operator.decide.course as module
from neuron_operator.cluster.client import Client

decide, met = module.decide, set()

def decide_with_a_bug(world, settings):
    name = world.body["metadata"]["name"]
    if name == "{MEETS_A_BUG}" and name not in met:
        met.add(name)
        raise RuntimeError("the bug of this test")
    return decide(world, settings)

create = Client.create

async def create_slowly(self, resource, desired, **options):
    if resource.kind == "Job" and desired["metadata"]["namespace"] == "{WRITTEN_SLOWLY}":
        await asyncio.sleep(5)
    return await create(self, resource, desired, **options)

module.decide, Client.create = decide_with_a_bug, create_slowly
from neuron_operator.run import installed

installed.REGRANT_SECONDS = 1.0
from neuron_operator.__main__ import main

raise SystemExit(main())
"""
"""`neuron-operator` with a bug: the first pass over one model fails; and writes to one namespace take long."""


class Operator:
    """`neuron-operator run`, which can be killed and started again."""

    def __init__(self, server: ApiServer, folder: Path, port: int) -> None:
        self._environ = {
            "PATH": os.environ["PATH"],
            "PYTHONPATH": os.environ.get("PYTHONPATH", ""),
            "NEURON_OPERATOR_NAMESPACE": OPERATOR_NAMESPACE,
            "NEURON_OPERATOR_KUBECONFIG": str(server.kubeconfig(OPERATOR_USER)),
        }
        ports = ("--http-port", str(port), "--health-port", str(port + 1), "--lease-seconds", "6")
        flags = ("--http-host", "127.0.0.1", "--runtime-upgrade", "Rolling", *ports)
        self._command = [sys.executable, "-c", FAULTY, "run", *flags]
        self._log = folder / "operator.log"

    def start(self, image: str = "1") -> None:
        command = [*self._command, "--runtime-image", f"example.com/runtime:{image}"]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(command, env=self._environ, stdout=log, stderr=log)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    async def change_to(self, image: str) -> None:
        """It ends cleanly, and one with another runtime image comes."""
        self._process.terminate()
        await self.restart(image)

    async def restart(self, image: str = "1") -> None:
        """Once it has ended."""
        await asyncio.to_thread(self._process.wait)
        self.start(image)


def put_under_load(url: str) -> None:
    """Eight answers, and a request that is refused."""
    for number in range(8):
        body = {"model": "chat", "prompt": f"{number} What is a NeuronModel?", "max_tokens": 8, "ignore_eos": True}
        assert post(f"{url}/v1/completions", body).status_code == 200
    assert post(f"{url}/v1/completions", {"model": "chat", "prompt": "x", "max_tokens": 10**6}).status_code == 400


def test_a_prometheus_answers_every_query_of_the_boards(programs: Path, server: ApiServer, tmp_path: Path) -> None:
    flags = ("--port", "0", "--served-model-name", "chat", "--max-model-len", "512", "--enable-prefix-caching")
    with ExitStack() as stack:
        model = stack.enter_context(serve(str(MODEL), *flags))
        port = stack.enter_context(free_ports(3))
        operator = Operator(server, tmp_path, port)
        operator.start()
        stack.callback(operator.kill)
        namespace = Namespace(server)
        address = model.until_ready().removeprefix("http://")
        document = {"models": [{"name": "chat", "addresses": [address]}]}
        gateway = stack.enter_context(gateway_process.started(document))
        targets = {
            "gateway": (f"127.0.0.1:{gateway.port + 1}", {"namespace": OPERATOR_NAMESPACE, "pod": "gateway-1"}),
            "models": (address, {"namespace": namespace.name, "pod": "chat-1"}),
            "operator": (f"127.0.0.1:{port}", {"namespace": OPERATOR_NAMESPACE, "pod": "operator-1"}),
        }
        prometheus = stack.enter_context(scraping(programs, tmp_path, port + 2, targets))
        wait_until("all targets are scraped", lambda: prometheus.has("sum(up) == 3"))

        namespace.put_model(replicas=1)
        namespace.put_adapter()
        wait_until("the Job exists", namespace.finish_resolve)
        wait_until("the model is resolved", lambda: namespace.condition("UpToDate")[0] == "True")
        empty: set[str] = set()
        panels = [panel for board in BOARDS for panel in board["panels"]]
        asked = [(panel, target) for panel in panels for target in panel.get("targets", ())]
        # No device, no model at zero, no replica that fails and no exporter of AWS here: tests/contract/test_board.py
        # and tests/neuron_operator/test_metrics.py have those series.
        without = r"model_(devices|idle|last_load)|gateway_(retries|broken|wake_ups)"
        ours = re.compile(rf"vllm:|neuron_(serving|operator)_(?!{without})|process_")
        asked = [(panel, target) for panel, target in asked if ours.search(target["expr"])]

        def all_answered() -> bool:
            empty.clear()
            put_under_load(gateway.url)  # each time: most queries look back one minute
            for panel, target in asked:
                query = re.sub(r"\$(\w+)", lambda match: CHOSEN[match[1]], target["expr"])
                if not [found for found in prometheus.query(query) if found["value"][1] != "NaN"]:
                    empty.add(f"{panel['title']} / {target['refId']}")
            return not empty

        try:
            wait_until("every query has an answer", all_answered)
        finally:
            print("empty:", sorted(empty))


# Faults


@dataclass(frozen=True)
class Site:
    """What faults strike."""

    prometheus: Prometheus
    operator: Operator
    namespace: Namespace
    ports: dict[str, int]
    """Ports of served models."""
    failing: set[str]
    """Models whose pods fail from now on."""
    gateway: Running
    """It may wake no model."""
    observation: AsyncExitStack
    """Of the gateway by Prometheus."""

    def status_of(self, pod: Any) -> Status:
        """What a kubelet would report of the pod."""
        is_broken = pod["spec"]["containers"][0]["image"].endswith(f":{BROKEN}")
        is_failing = pod["metadata"]["labels"].get(names.MODEL_LABEL) in self.failing
        status = {**finished_or_ready(pod), "podIP": REPLICA, "podIPs": [{"ip": REPLICA}]}
        return ended_twice(status) if status["phase"] == "Running" and (is_broken or is_failing) else status


Cure = Callable[[], Awaitable[None]]
Fault = Callable[[Site, str], AbstractAsyncContextManager[Cure]]
"""Strikes the model of this name, or the operator, and gives its cure. What it started ends with the context."""


async def not_needed() -> None:
    """The alert is about an event and ends by itself."""


@dataclass(frozen=True)
class Load:
    """The same request again and again, by so many clients. With a pause, requests do not wait for earlier ones."""

    num_prompt: int
    num_answer: int
    num_clients: int = 1
    pause_seconds: float = 0.0

    async def put_on(self, port: int, model: str) -> None:
        """Until cancelled."""
        prompt = [7] * self.num_prompt
        body = {"model": model, "prompt": prompt, "max_tokens": self.num_answer, "ignore_eos": True}
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(timeout=WAIT_SECONDS, limits=limits, verify=False) as http:

            async def ask() -> None:
                answer = await http.post(f"http://127.0.0.1:{port}/v1/completions", json=body)
                assert answer.status_code in (200, 429), answer.text

            async def go_on() -> None:
                while True:
                    if self.pause_seconds:
                        asking.create_task(ask())
                        await asyncio.sleep(self.pause_seconds)
                    else:
                        await ask()

            async with asyncio.TaskGroup() as asking:
                for _ in range(self.num_clients):
                    asking.create_task(go_on())


@asynccontextmanager
async def under(loads: tuple[Load, ...], port: int, model: str) -> AsyncIterator[None]:
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(load.put_on(port, model)) for load in loads]
        yield
        for task in tasks:
            task.cancel()


def device(**options: object) -> tuple[str, str]:
    return ("--override-neuron-config", json.dumps(options))


@asynccontextmanager
async def serving(port: int, name: str, flags: tuple[str, ...]) -> AsyncIterator[ServeCommand]:
    """A model on a simulated device."""
    more = ("--backend", "simulated", "--no-enable-prefix-caching", "--max-model-len", "512")
    command = serve(str(MODEL), "--port", str(port), "--served-model-name", name, *more, *flags)
    with ExitStack() as stack:
        model = await asyncio.to_thread(stack.enter_context, command)
        try:
            await asyncio.to_thread(model.until_ready)
            yield model
        finally:
            await asyncio.to_thread(stack.close)


@dataclass(frozen=True)
class Misfit:
    """A model is served with flags that do not fit its load. The cure is to serve it with others, under the same
    load."""

    flags: tuple[str, ...]
    cure: tuple[str, ...]
    loads: tuple[Load, ...]

    @asynccontextmanager
    async def __call__(self, site: Site, model: str) -> AsyncIterator[Cure]:
        port = site.ports[model]
        # Otherwise the alerts might only be over because the server was gone.
        long_up = f'min_over_time(up{{pod="{model}"}}[20s]) == 1'
        async with AsyncExitStack() as stack:

            async def begin(flags: tuple[str, ...]) -> None:
                await stack.enter_async_context(serving(port, model, flags))
                await stack.enter_async_context(under(self.loads, port, model))

            async def cure() -> None:
                await stack.aclose()
                await begin(self.cure)
                await until(f"{model} was up for longer than its alerts wait", lambda: site.prometheus.has(long_up))

            await begin(self.flags)
            yield cure


@asynccontextmanager
async def killed_engine(site: Site, model: str) -> AsyncIterator[Cure]:
    async with serving(site.ports[model], model, ()) as command:
        wanted = f'neuron_serving_engine_restarts_total{{model_name="{model}"}} == 0'
        await until(f"{model} is scraped", lambda: site.prometheus.has(wanted))
        os.kill(command.child(ENGINE), signal.SIGKILL)
        yield not_needed


@asynccontextmanager
async def failing_pods(site: Site, model: str) -> AsyncIterator[Cure]:
    """The containers of the model's pods end again and again, until they run."""

    async def cure() -> None:
        site.failing.remove(model)
        for pod in site.namespace.list(PODS):
            if pod["metadata"]["labels"].get(names.MODEL_LABEL) == model:
                site.namespace.patch(PODS, f"{pod['metadata']['name']}/status", {"status": finished_or_ready(pod)})

    site.failing.add(model)
    site.namespace.put_model(model, replicas=1)
    yield cure


@asynccontextmanager
async def adapter_without_room(site: Site, adapter: str) -> AsyncIterator[Cure]:
    """The replica of a model cannot store an adapter, until it can."""
    model, entry = "has-adapters", {"name": adapter, "state": "Failed", "reason": "StorageFull"}

    async def cure() -> None:
        entry["state"] = "Ready"

    async with replica(REPLICA, [entry]):
        site.namespace.put_model(model, replicas=1, serving={"adapters": {"maxActive": 1}})
        site.namespace.put_adapter(adapter, model=model)
        yield cure
        site.namespace.delete(NEURON_ADAPTERS, adapter)
        site.namespace.delete(NEURON_MODELS, model)


@asynccontextmanager
async def bug(site: Site, _: str) -> AsyncIterator[Cure]:
    site.namespace.put_model(MEETS_A_BUG, replicas=1)
    yield not_needed
    site.namespace.delete(NEURON_MODELS, MEETS_A_BUG)


@asynccontextmanager
async def many_models(site: Site, _: str) -> AsyncIterator[Cure]:
    """Models of a namespace whose passes take long."""
    tenant = Namespace(site.namespace.server, WRITTEN_SLOWLY)
    models = [f"m{number}" for number in range(100)]

    def put() -> None:
        for name in models:
            tenant.put_model(name, model={"uri": f"hf://acme/{name}"}, replicas=1)

    async def cure() -> None:
        for name in models:
            await asyncio.to_thread(tenant.delete, NEURON_MODELS, name)

    await asyncio.to_thread(put)
    yield cure


@asynccontextmanager
async def killed_operator(site: Site, _: str) -> AsyncIterator[Cure]:
    async def cure() -> None:
        site.operator.start()

    site.operator.kill()
    yield cure


@asynccontextmanager
async def start_without_rights(site: Site, _: str) -> AsyncIterator[Cure]:
    """An operator for all namespaces, with a Role in one, until it has its ClusterRole. Then it begins again."""

    async def cure() -> None:
        grant(site.namespace.server)
        await site.operator.restart()

    grant(site.namespace.server, namespaces=[site.namespace.name])
    await site.operator.change_to("1")
    yield cure


@asynccontextmanager
async def broken_image(site: Site, _: str) -> AsyncIterator[Cure]:
    """An operator with a runtime image that does not start, until one with a better image comes."""

    def has_moved() -> bool:
        pods = [one["spec"]["template"]["spec"] for one in site.namespace.list(BY_KIND["Deployment"])]
        models = [one["metadata"]["name"] for one in site.namespace.list(NEURON_MODELS)]
        return all(pod["containers"][0]["image"].endswith(":2") for pod in pods) and all(
            site.namespace.condition("UpToDate", name)[0] == "True" for name in models
        )

    async def cure() -> None:
        await site.operator.change_to("2")
        await until("the models have moved", has_moved)

    await site.operator.change_to(BROKEN)
    yield cure


@asynccontextmanager
async def silent_gateway(site: Site, _: str) -> AsyncIterator[Cure]:
    async def cure() -> None:
        await site.observation.enter_async_context(observed(site.gateway.gateway))

    await site.observation.aclose()
    yield cure


async def fail(asked: Asked, writer: asyncio.StreamWriter) -> bool:
    writer.write(answer(b"{}", status=500))
    return True


@asynccontextmanager
async def failing_replica(site: Site, model: str) -> AsyncIterator[Cure]:
    """Clients of the gateway get the errors of a replica, until it answers."""

    async def ask(name: str) -> None:
        while True:
            await site.gateway.post("/v1/completions", {"model": name, "prompt": "x"})
            await asyncio.sleep(0.1)

    async with replicas(fail) as (one,), asyncio.TaskGroup() as asking:
        name = model.partition("/")[2]

        async def cure() -> None:
            one.behave = echo

        site.gateway.serve(name, one)
        task = asking.create_task(ask(name))
        yield cure
        task.cancel()


@dataclass(frozen=True)
class NoReplica:
    """A request waits at the gateway, until its model has a replica."""

    is_asleep: bool

    @asynccontextmanager
    async def __call__(self, site: Site, model: str) -> AsyncIterator[Cure]:
        async with replicas(echo) as (one,), aclosing(await site.gateway.connect()) as client:
            name = model.partition("/")[2]

            async def cure() -> None:
                site.gateway.serve(name, one)
                assert (await client.answer()).status == 200

            site.gateway.serve(name, is_asleep=self.is_asleep)
            client.send("/v1/completions", {"model": name, "prompt": "x"})
            yield cure


COME_LAST = (killed_operator, start_without_rights, broken_image, silent_gateway)
"""These come one after another, when no other fault needs the operator or the gateway."""
NO_RIGHTS = service_account(OPERATOR_NAMESPACE, "other-0")
BROKEN = "broken"
REPLICA = "127.7.7.3"
"""Address of each played pod; only replicas with adapters are asked."""
TOO_SLOW = device(stepMilliseconds=100)
LONG_PREFILLS = {"decodeMilliseconds": [[1, 20]], "prefillMilliseconds": [[1, 20], [400, 2200]]}

overload = Misfit(
    flags=("--max-num-seqs", "1", "--max-queued-requests", "64", *TOO_SLOW),
    cure=("--max-num-seqs", "64", "--max-queued-requests", "64", *TOO_SLOW),
    loads=(Load(num_prompt=8, num_answer=40, pause_seconds=0.25),),
)
long_prefills = Misfit(
    flags=device(**LONG_PREFILLS, prefill="whole"),
    cure=("--max-num-batched-tokens", "40", *device(**LONG_PREFILLS, prefill="chunks")),
    loads=(Load(num_prompt=8, num_answer=400), Load(num_prompt=400, num_answer=1, num_clients=2)),
)
small_cache = Misfit(
    flags=("--max-num-seqs", "4", "--num-gpu-blocks-override", "32"),
    cure=("--max-num-seqs", "4"),
    loads=(Load(num_prompt=8, num_answer=400, num_clients=4),),
)

FAULTS: dict[str, tuple[str, Fault]] = {
    "NeuronModelNotServing": ("pods-fail", failing_pods),
    "NeuronModelQueueGrows": ("overloaded", overload),
    "NeuronModelRefusesRequests": ("overloaded", overload),
    "NeuronEngineRestarts": ("engine-ends", killed_engine),
    "NeuronModelStreamsStall": ("long-prompts", long_prefills),
    "NeuronModelStreamsMayStall": ("long-prompts", long_prefills),
    "NeuronModelPreempts": ("small-cache", small_cache),
    "NeuronOperatorAbsent": ("", killed_operator),
    "NeuronOperatorFails": ("", bug),
    "NeuronOperatorLags": ("", many_models),
    "NeuronNamespaceNotWatched": ("", start_without_rights),
    "NeuronUpgradeBlocked": ("", broken_image),
    "NeuronModelNotReady": ("pods-fail", failing_pods),
    "NeuronAdapterMissing": ("support-de", adapter_without_room),
    "NeuronGatewayAbsent": ("", silent_gateway),
    "NeuronGatewayFailsRequests": ("default/fails", failing_replica),
    "NeuronGatewayHoldsRequests": ("default/loads", NoReplica(is_asleep=False)),
    "NeuronGatewayCannotWake": ("default/sleeps", NoReplica(is_asleep=True)),
}
"""By alert: the model or adapter that it must name, and the fault. One fault may have several."""


def test_each_alert_has_a_fault() -> None:
    assert list(FAULTS) == ALERTS


async def until(what: str, holds: Callable[[], bool]) -> None:
    try:
        async with asyncio.timeout(WAIT_SECONDS):
            while not holds():
                await asyncio.sleep(0.2)
    except TimeoutError:
        pytest.fail(f"not in time: {what}")


async def strike(site: Site, subject: str, fault: Fault, alerts: set[str]) -> None:
    """The alerts fire about the subject after the fault, each at some time, and all are over after the cure."""
    wanted = {(alert, subject) for alert in alerts}
    fired: set[tuple[str, str]] = set()

    def have_fired() -> bool:
        fired.update(wanted & site.prometheus.firing())
        return fired == wanted

    assert not wanted & site.prometheus.firing()
    async with fault(site, subject) as cure:
        await until(f"all of {sorted(wanted)} have fired", have_fired)
        await cure()
        await until(f"none of {sorted(wanted)} fires", lambda: not wanted & site.prometheus.firing())


@pytest.mark.long
async def test_each_alert_fires_by_its_fault_and_ends_after_the_cure(programs: Path, tmp_path: Path) -> None:
    """An alert may also fire for subjects without its fault: the machine of the test can be slow."""
    alerts: dict[tuple[str, Fault], set[str]] = {}
    for alert, one in FAULTS.items():
        alerts.setdefault(one, set()).add(alert)
    served_models = sorted(
        {subject for subject, fault in alerts if isinstance(fault, Misfit) or fault is killed_engine}
    )
    async with AsyncExitStack() as stack:
        server = await asyncio.to_thread(stack.enter_context, served(tmp_path / "api-server"))
        stack.enter_context(controlling(server))
        port = stack.enter_context(free_ports(4 + len(served_models)))
        ports = {model: port + 4 + number for number, model in enumerate(served_models)}
        operator = Operator(server, tmp_path, port)
        operator.start()
        stack.callback(operator.kill)
        namespace = Namespace(server)
        targets = {
            "operator": (f"127.0.0.1:{port}", {"namespace": OPERATOR_NAMESPACE, "pod": "operator-1"}),
            "gateway": (f"127.0.0.1:{port + 3}", {"namespace": OPERATOR_NAMESPACE, "pod": "gateway-1"}),
            **{name: (f"127.0.0.1:{of}", {"namespace": namespace.name, "pod": name}) for name, of in ports.items()},
        }
        prometheus = stack.enter_context(scraping(programs, tmp_path, port + 2, targets))
        api = await stack.enter_async_context(client_of(server, NO_RIGHTS))
        gateway = await stack.enter_async_context(running({"metricsPort": port + 3}, wake=partial(wake, api)))
        observation = await stack.enter_async_context(AsyncExitStack())
        await observation.enter_async_context(observed(gateway.gateway))
        site = Site(prometheus, operator, namespace, ports, set(), gateway, observation)
        await stack.enter_async_context(kubelet(namespace, site.status_of))
        await until("the operator leads", lambda: prometheus.has("neuron_operator_leader == 1"))

        async with asyncio.TaskGroup() as beside:
            async with asyncio.TaskGroup() as first:
                for (subject, fault), fire in alerts.items():
                    if fault not in COME_LAST:
                        group = beside if subject in ports else first
                        group.create_task(strike(site, subject, fault, fire))
            for (subject, fault), fire in alerts.items():
                if fault in COME_LAST:
                    await strike(site, subject, fault, fire)
