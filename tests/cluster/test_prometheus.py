"""The alerts in Prometheus' own programs: their timing in promtool, and a real Prometheus.

It scrapes an operator, which runs against a real API server, and a served model, as processes of this machine.
`tests/contract/test_board.py` checks the values that the queries give.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from cluster.rig.binaries import ensure
from cluster.rig.machine import wait_until
from cluster.rig.needs import NotPossibleHere
from helpers.apiserver import ApiServer
from helpers.operator_rights import OPERATOR_NAMESPACE
from helpers.operators import OPERATOR_USER, Namespace, served
from helpers.ports import free_ports
from helpers.serve_command import ENGINE, ServeCommand, post, serve
from neuron_operator.client import PODS

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

ROOT = Path(__file__).parents[2]
CHART = ROOT / "charts" / "neuron-serving"
RULES = yaml.safe_load((CHART / "rules" / "neuron-serving.yaml").read_text())
ALERTS = [rule["alert"] for group in RULES["groups"] for rule in group["rules"]]
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
    rules = tmp_path / "rules.yaml"
    bare = [{key: value for key, value in rule.items() if key != "annotations"} for rule in RULES["groups"][0]["rules"]]
    rules.write_text(yaml.safe_dump({"groups": [{"name": "neuron-serving", "rules": bare}]}))
    cases = (ROOT / "tests" / "cases" / "alerts.yaml").read_text().replace("[RULES]", f"[{rules}]")
    file = tmp_path / "alerts.yaml"
    file.write_text(cases)
    done = subprocess.run([programs / "promtool", "test", "rules", file], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
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

    def firing(self) -> set[str]:
        return {found["metric"]["alertname"] for found in self.query('ALERTS{alertstate="firing"}')}

    def is_up(self) -> bool:
        try:
            return len(self.query("up == 1")) == 2
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


class Operator:
    """`neuron-operator run`, which can be killed and started again."""

    def __init__(self, server: ApiServer, folder: Path, port: int) -> None:
        self._environ = {
            "PATH": os.environ["PATH"],
            "NEURON_OPERATOR_RUNTIME_IMAGE": "example.com/runtime:1",
            "NEURON_OPERATOR_NAMESPACE": OPERATOR_NAMESPACE,
            "NEURON_OPERATOR_KUBECONFIG": str(server.kubeconfig(OPERATOR_USER)),
        }
        ports = ("--http-port", str(port), "--health-port", str(port + 1), "--lease-seconds", "6")
        self._command = [sys.executable, "-m", "neuron_operator", "run", "--http-host", "127.0.0.1", *ports]
        self._log = folder / "operator.log"

    def start(self) -> None:
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(self._command, env=self._environ, stdout=log, stderr=log)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


def put_under_load(model: ServeCommand) -> None:
    """Eight answers, and a request that is refused."""
    url = model.until_ready()
    for number in range(8):
        body = {"model": "chat", "prompt": f"{number} What is a NeuronModel?", "max_tokens": 8, "ignore_eos": True}
        assert post(f"{url}/v1/completions", body).status_code == 200
    assert post(f"{url}/v1/completions", {"model": "chat", "prompt": "x", "max_tokens": 10**6}).status_code == 400


def test_a_prometheus_answers_every_query_of_the_boards_and_raises_and_clears_alerts(
    programs: Path, tmp_path: Path
) -> None:
    flags = ("--port", "0", "--served-model-name", "chat", "--max-model-len", "512", "--enable-prefix-caching")
    with ExitStack() as stack:
        model = stack.enter_context(serve(str(ROOT / "examples" / "demo-model"), *flags))
        server = stack.enter_context(served(tmp_path / "api-server"))
        port = stack.enter_context(free_ports(3))
        operator = Operator(server, tmp_path, port)
        operator.start()
        stack.callback(operator.kill)
        namespace = Namespace(server)
        address = model.until_ready().removeprefix("http://")
        targets = {
            "models": (address, {"namespace": namespace.name, "pod": "chat-1"}),
            "operator": (f"127.0.0.1:{port}", {"namespace": OPERATOR_NAMESPACE, "pod": "operator-1"}),
        }
        prometheus = stack.enter_context(scraping(programs, tmp_path, port + 2, targets))
        wait_until("both targets are scraped", prometheus.is_up)

        namespace.put_model(replicas=1)
        wait_until("the Job exists", namespace.finish_resolve)
        wait_until("the model is resolved", lambda: namespace.condition("UpToDate")[0] == "True")
        empty: set[str] = set()
        panels = [panel for board in BOARDS for panel in board["panels"]]
        asked = [(panel, target) for panel in panels for target in panel.get("targets", ())]
        # No device and no `neuron-monitor` here; tests/contract/test_board.py has its reports.
        asked = [(panel, target) for panel, target in asked if "neuron_serving_neuron_" not in target["expr"]]

        def all_answered() -> bool:
            empty.clear()
            put_under_load(model)  # each time: most queries look back one minute
            for panel, target in asked:
                query = re.sub(r"\$(\w+)", lambda match: CHOSEN[match[1]], target["expr"])
                if not [found for found in prometheus.query(query) if found["value"][1] != "NaN"]:
                    empty.add(f"{panel['title']} / {target['refId']}")
            return not empty

        try:
            wait_until("every query has an answer", all_answered)
        finally:
            print("empty:", sorted(empty))

        # A replica that fails, until it serves.
        failed = {"terminated": {"exitCode": 31, "message": "needs 40 GiB"}}
        container = {"name": "runtime", "image": "i", "imageID": "i", "restartCount": 1, "ready": False}
        namespace.start_pod("chat-1", {"phase": "Running", "containerStatuses": [{**container, "state": failed}]})
        wait_until("NeuronModelNotServing fires", lambda: "NeuronModelNotServing" in prometheus.firing())
        running = {**container, "ready": True, "state": {"running": {"startedAt": "2026-01-01T00:00:00Z"}}}
        conditions = [{"type": kind, "status": "True"} for kind in ("PodScheduled", "ContainersReady", "Ready")]
        status = {"status": {"containerStatuses": [running], "conditions": conditions}}
        path = PODS.path(namespace.name, "chat-1", "status")
        server.call("PATCH", path, status, "application/merge-patch+json")
        wait_until("NeuronModelNotServing ends", lambda: "NeuronModelNotServing" not in prometheus.firing())

        # An engine that ends, until its restart is long ago.
        os.kill(model.child(ENGINE), signal.SIGKILL)
        wait_until("NeuronEngineRestarts fires", lambda: "NeuronEngineRestarts" in prometheus.firing())
        model.until_ready(times=2)

        # An operator that ends, until another one leads.
        operator.kill()
        wait_until("NeuronOperatorAbsent fires", lambda: "NeuronOperatorAbsent" in prometheus.firing())
        operator.start()
        quiet = {"NeuronOperatorAbsent", "NeuronEngineRestarts", "NeuronModelNotServing"}
        wait_until("all three have ended", lambda: not quiet & prometheus.firing())
