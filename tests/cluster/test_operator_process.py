"""`neuron-operator run` as a process against a real API server: kopf, health, signals, and error messages."""

from __future__ import annotations

import contextlib
import copy
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from resource import RLIMIT_NOFILE, getrlimit, setrlimit
from typing import Any
from urllib.error import HTTPError

import pytest
import yaml

from cluster.rig.machine import WAIT_SECONDS
from helpers.apiserver import ApiServer
from helpers.operator_process import Process
from helpers.operator_rights import CLUSTER_RULES, OPERATOR_NAMESPACE, ensure_namespace, grant
from helpers.operators import (
    BY_KIND,
    CRDS,
    OPERATOR_USER,
    Namespace,
    eventually,
    may_write_services,
    served,
    serves,
)
from helpers.ports import free_ports
from helpers.quotas import set_quota
from neuron_operator.cluster.client import CHILDREN, LEASES, NEURON_ADAPTERS, NEURON_MODELS, NODES, PODS, REPLICA_SETS

LEASE_SECONDS = 15
"""Long enough that no replica loses it when the machine stalls for some seconds."""

IMPATIENT = """
import sys
from neuron_operator.__main__ import main
from neuron_operator.run import installed
installed.GRANT_SECONDS, installed.REGRANT_SECONDS = 3.0, 1.0
sys.exit(main())
"""
"""Looks more often than each half minute for a namespace that was left out."""

pytestmark = [pytest.mark.cluster, pytest.mark.slow]


Start = Callable[..., Process]


@pytest.fixture
def start(server: ApiServer, tmp_path: Path) -> Iterator[Start]:
    """Starts a process that logs to the file `name` and ends after the test."""
    with contextlib.ExitStack() as stack:

        def start(name: str, *flags: str, **options: Any) -> Process:
            ports = stack.enter_context(free_ports(2))
            kubeconfig = server.kubeconfig(OPERATOR_USER)
            flags = ("--lease-seconds", str(LEASE_SECONDS), *flags)
            process = Process(kubeconfig, tmp_path / name, ports, *flags, **options)
            stack.callback(process.kill)
            return process

        yield start


async def test_the_standby_takes_over_from_a_killed_leader_while_the_model_keeps_serving(
    server: ApiServer, start: Start
) -> None:
    namespace = Namespace(server)
    processes = [start(name, "--identity", name) for name in ("a", "b")]
    await eventually(lambda: all(p.get("/readyz")[0] == 200 and p.get("/healthz")[0] == 200 for p in processes))
    leading = await eventually(lambda: [p for p in processes if p.is_leading()])
    namespace.put_model()
    await namespace.settle()
    (leader,) = leading
    (standby,) = (p for p in processes if p is not leader)
    assert not standby.is_leading()
    assert 'neuron_operator_models{reason="Loading"} 1.0' in leader.get("/metrics")[1]
    assert leader.end(signal.SIGKILL) == -signal.SIGKILL
    await eventually(standby.is_leading)
    namespace.delete(BY_KIND["Service"], "chat")
    await eventually(lambda: namespace.children()["Service"])
    assert standby.end() == 0
    held = server.call("GET", LEASES.path(OPERATOR_NAMESPACE, "neuron-operator"))
    assert held["spec"].get("holderIdentity", "") == ""


async def test_kopf_writes_nothing_and_uses_only_granted_rights(server: ApiServer) -> None:
    """After the test above: requests of kopf in addition to our client."""
    assert [e["requestURI"] for e in server.requests(OPERATOR_USER) if e["responseStatus"].get("code") == 403] == []
    managers = {
        entry["manager"]
        for model in server.call("GET", "/apis/neuron-serving.dev/v1alpha1/neuronmodels")["items"]
        for entry in model["metadata"]["managedFields"]
    }
    assert managers <= {"user", "neuron-operator-status"}


async def test_a_replica_opens_one_watch_per_resource(server: ApiServer, start: Start) -> None:
    def watches() -> Counter[str]:
        """Started watches; each is logged again when it ends."""
        events = server.requests(OPERATOR_USER)
        return Counter(
            e["objectRef"]["resource"] for e in events if (e["verb"], e["stage"]) == ("watch", "ResponseStarted")
        )

    expected = Counter(
        resource.plural for resource in (*CHILDREN, REPLICA_SETS, PODS, NODES, NEURON_ADAPTERS, NEURON_MODELS, LEASES)
    )
    before = watches()
    process = start("log")
    await eventually(lambda: (watches() - before).keys() >= expected.keys())
    assert process.end() == 0
    assert watches() - before == expected


async def test_sigterm_stops_a_leader_with_code_0(start: Start) -> None:
    process = start("log")
    await eventually(process.is_leading)
    assert process.end() == 0
    assert "Traceback" not in process.log.read_text()


async def test_a_missing_right_stops_the_start_with_a_remedy(server: ApiServer, start: Start) -> None:
    grant(server, [rule for rule in CLUSTER_RULES if "services" not in rule["resources"]])
    try:
        await eventually(lambda: not may_write_services(server))
        process = start("log")
        assert process.process.wait(WAIT_SECONDS) == 1
    finally:
        grant(server)
    await eventually(lambda: may_write_services(server))
    last = process.log.read_text().splitlines()[-1]
    assert 'cannot list resource "services"' in last or 'cannot list resource "serviceaccounts"' in last
    assert "grant it with the chart" in last


async def test_a_busy_port_and_a_missing_cluster_are_reported_in_one_line(
    server: ApiServer, tmp_path: Path, start: Start
) -> None:
    for flag in ("--http-port", "--health-port"):
        port = start("port", flag, str(server.port))
        assert port.process.wait(WAIT_SECONDS) == 1
        assert "already in use" in port.log.read_text().splitlines()[-1]
    config = start("config", "--kubeconfig", str(tmp_path / "none"))
    assert config.process.wait(WAIT_SECONDS) == 1
    (line,) = config.log.read_text().splitlines()
    assert line.startswith("neuron-operator: no kubeconfig at")


async def test_groups_of_a_kind_that_the_cluster_lacks_stop_the_start_with_a_remedy(
    server: ApiServer, start: Start
) -> None:
    of_groups = {
        "apiGroups": ["leaderworkerset.x-k8s.io"],
        "resources": ["leaderworkersets"],
        "verbs": ["list", "watch"],
    }
    grant(server, [*CLUSTER_RULES, of_groups])
    try:
        process = start("log", "--groups", '{"controller": "LeaderWorkerSet"}')
        assert process.process.wait(WAIT_SECONDS) == 1
    finally:
        grant(server)
    (line,) = process.log.read_text().splitlines()
    assert "the cluster has no leaderworkersets of leaderworkerset.x-k8s.io/v1; install LeaderWorkerSet, or set" in line


async def test_a_crd_of_an_earlier_version_stops_the_start_with_a_remedy(server: ApiServer, start: Start) -> None:
    """Where somebody else installs CRDs. A Deployment keeps the operator of that version until the new one is ready."""
    path = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions/neuronmodels.neuron-serving.dev"
    crd = yaml.safe_load((CRDS / "neuronmodels.yaml").read_text())
    earlier = copy.deepcopy(crd)
    (version,) = earlier["spec"]["versions"]
    del version["schema"]["openAPIV3Schema"]["properties"]["status"]["properties"]["history"]

    def is_published(has_history: bool) -> bool:
        schemas = server.call("GET", "/openapi/v3/apis/neuron-serving.dev/v1alpha1")["components"]["schemas"]
        status = schemas["dev.neuron-serving.v1alpha1.NeuronModel"]["properties"]["status"]["properties"]
        return ("history" in status) is has_history

    server.apply(path, earlier)
    try:
        await eventually(lambda: is_published(has_history=False))
        process = start("log", program=("-c", IMPATIENT))
        assert process.process.wait(WAIT_SECONDS) == 1
    finally:
        server.apply(path, crd)
        await eventually(lambda: is_published(has_history=True))
    last = process.log.read_text().splitlines()[-1]
    assert "the CRD neuronmodels is older than this operator and lacks status.history; install the CRD with" in last


async def test_a_deleted_namespace_is_left_out_until_it_can_be_watched_again(server: ApiServer, start: Start) -> None:
    there = Namespace(server)
    grant(server, namespaces=[there.name])
    try:
        process = start("log", "--watch-namespaces", f"{there.name},gone", program=("-c", IMPATIENT))
        await eventually(process.is_leading)
        assert "namespace gone is left out" in process.log.read_text()
        there.put_model()
        await eventually(lambda: there.condition()[1])
        ensure_namespace(server, "gone")
        grant(server)
        grant(server, namespaces=[there.name, "gone"])
        assert process.process.wait(WAIT_SECONDS) == 1
        assert "namespace gone can be watched now" in process.log.read_text().splitlines()[-1]
    finally:
        grant(server)


async def test_a_start_without_any_right_waits_unready_and_begins_when_it_may(server: ApiServer, start: Start) -> None:
    grant(server, namespaces=[Namespace(server).name])
    try:
        await eventually(lambda: not may_write_services(server))
        everywhere = start("everywhere", program=("-c", IMPATIENT))
        gone = start("gone", "--watch-namespaces", "lost-1,lost-2", program=("-c", IMPATIENT))
        for process, count in ((everywhere, 1), (gone, 2)):
            told = f"neuron_operator_refused_namespaces {count}.0"
            await eventually(lambda: told in process.get("/metrics")[1], about=process.log.read_text)  # noqa: B023
            assert not process.is_leading()
            assert (process.get("/healthz")[0], process.get("/readyz")[0]) == (200, 503)
            assert "grant it with" in process.log.read_text() or "run helm upgrade" in process.log.read_text()
        assert gone.end() == 0
    finally:
        grant(server)
    assert everywhere.process.wait(WAIT_SECONDS) == 1
    assert "the cluster can be watched now" in everywhere.log.read_text().splitlines()[-1]


async def test_more_watches_than_the_soft_limit_of_open_files_are_opened(server: ApiServer, start: Start) -> None:
    soft, hard = getrlimit(RLIMIT_NOFILE)
    spaces = [Namespace(server).name for _ in range(8)]
    setrlimit(RLIMIT_NOFILE, (96, hard))
    try:
        process = start("log", "--watch-namespaces", ",".join(spaces))
    finally:
        setrlimit(RLIMIT_NOFILE, (soft, hard))
    await eventually(lambda: process.get("/readyz")[0] == 200)
    assert len(list(Path(f"/proc/{process.process.pid}/fd").iterdir())) > 96
    assert process.end() == 0


async def test_a_quota_bounds_the_number_of_models_in_a_namespace(server: ApiServer) -> None:
    namespace = Namespace(server)
    set_quota(namespace, **{"count/neuronmodels.neuron-serving.dev": 2})
    for name in ("one", "two"):
        namespace.put_model(name)
    with pytest.raises(HTTPError) as refused:
        namespace.put_model("three")
    assert "exceeded quota: few" in refused.value.__notes__[0]


async def test_a_cluster_without_the_crd_is_reported_with_the_install_command(server: ApiServer, start: Start) -> None:
    """Runs last: it deletes the CRD."""
    server.call("DELETE", "/apis/apiextensions.k8s.io/v1/customresourcedefinitions/neuronmodels.neuron-serving.dev")
    await eventually(lambda: not serves(server))
    process = start("log")
    assert process.process.wait(WAIT_SECONDS) == 1
    (line,) = process.log.read_text().splitlines()
    assert "kubectl apply --server-side -f crds/neuronmodels.yaml" in line


@pytest.mark.long
async def test_the_operator_works_in_a_cluster_that_has_ipv6_alone(tmp_path: Path) -> None:
    with served(tmp_path / "api-server", host="::1") as server, free_ports(2) as ports:
        process = Process(server.kubeconfig(OPERATOR_USER), tmp_path / "log", ports, host="::1")
        try:
            await eventually(process.is_leading)
            namespace = Namespace(server)
            namespace.put_model()
            await eventually(namespace.finish_resolve)
            await eventually(lambda: namespace.children()["Deployment"], about=namespace.model)
            assert namespace.get(BY_KIND["Service"], "chat")["spec"]["ipFamilies"] == ["IPv6"]
            assert process.get("/healthz")[0] == 200
            assert process.end() == 0
        finally:
            process.kill()
