"""The cluster on one machine: replicas, ports, restarts and shutdown."""

from __future__ import annotations

import asyncio
import socket
import sys
from pathlib import Path
from typing import Any

import pytest

from helpers.ports import free_ports
from neuron_operator.local.machine import Machine
from neuron_operator.local.pods import CannotRunHere, LocalHost, instance_type

READY_AT_ONCE = "import sys, time; print('up', flush=True); time.sleep(float(sys.argv[1]))"


def deployment(replicas: int = 1, *argv: str, port: int | None = None) -> dict[str, Any]:
    container: dict[str, Any] = {"name": "c", "command": [sys.executable, "-c", READY_AT_ONCE, *(argv or ("60",))]}
    if port:
        container["ports"] = [{"name": "http", "containerPort": port}]
    template = {"metadata": {"labels": {"a": "b"}}, "spec": {"containers": [container]}}
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": "chat", "namespace": "default"},
        "spec": {"replicas": replicas, "template": template},
    }


def machine(root: Path, first_port: int = 0) -> tuple[Machine, list[str]]:
    lines: list[str] = []
    return Machine(
        LocalHost(root / "default.chat", {}, 0), first_port, lambda: None, lambda _, line: lines.append(line)
    ), lines


async def until(condition: Any) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.01)


async def test_replicas_use_consecutive_ports_and_scaling_down_stops_the_last(tmp_path: Path) -> None:
    with free_ports(2) as first:
        here, _ = machine(tmp_path, first)
        await here.apply(deployment(2, port=8000))
        assert [p.process.plan.ports for p in here.running] == [{"http": first}, {"http": first + 1}]
        await until(lambda: sum(p.process.ready for p in here.running) == 2)
        await here.apply(deployment(1, port=8000))
        assert [p.name for p in here.running] == ["chat-0"]
        await here.close()
        assert here.pods == ()


async def test_a_busy_port_is_reported_with_a_remedy(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        here, _ = machine(tmp_path, taken.getsockname()[1])
        with pytest.raises(CannotRunHere, match="is in use: choose another with --port"):
            await here.apply(deployment(port=8000))


async def test_close_stops_pods_without_restarting_them(tmp_path: Path) -> None:
    here, lines = machine(tmp_path)
    await here.apply(deployment())
    await until(lambda: here.running[0].process.ready and lines)
    await here.close()
    await asyncio.sleep(1.5)  # longer than the first back-off
    assert lines == ["up"]


def serving_deployment(root: Path) -> dict[str, Any]:
    """A replica that serves HTTP until it is killed."""
    server = [sys.executable, "-m", "http.server", "8000", "--bind", "127.0.0.1", "--directory", str(root)]
    body = deployment(port=8000)
    probe = {"httpGet": {"path": "/", "port": "http"}, "periodSeconds": 0.05, "timeoutSeconds": 60}
    body["spec"]["template"]["spec"]["containers"][0] |= {"command": server, "readinessProbe": probe}
    return body


async def test_a_killed_pod_that_was_ready_is_restarted(tmp_path: Path) -> None:
    with free_ports() as first:
        here, _ = machine(tmp_path, first)
        await here.apply(serving_deployment(tmp_path))
        await until(lambda: here.running[0].process.ready)
        here.kill()
        await until(lambda: here.running[0].num_restarts == 1 and here.running[0].process.ready)
        assert here.pods[0]["status"]["containerStatuses"][0]["restartCount"] == 1
        await here.close()


async def test_a_pod_that_was_never_ready_is_not_restarted(tmp_path: Path) -> None:
    here, lines = machine(tmp_path)
    await here.apply(deployment(1, "0"))
    await until(lambda: here.running[0].process.terminated)
    await asyncio.sleep(1.5)  # longer than the first back-off
    assert lines == ["up"]
    await here.close()


async def test_a_job_runs_once_and_reports_its_result(tmp_path: Path) -> None:
    here, _ = machine(tmp_path)
    body = deployment(1, "0") | {"kind": "Job", "metadata": {"name": "resolve", "namespace": "default"}}
    await here.apply(body)
    await until(lambda: here.children[0]["status"]["conditions"])
    await here.apply(body)
    assert here.children[0]["status"]["conditions"][0]["type"] == "Complete"
    assert len(here.pods) == 1


def config_map(content: str) -> dict[str, Any]:
    about = {"name": "chat-adapters", "namespace": "default"}
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": about, "data": {"list": content}}


async def test_a_changed_config_map_reaches_a_running_pod_and_those_that_follow_it(tmp_path: Path) -> None:
    def mounted() -> str:
        (file,) = here.running[0].process.plan.files
        return file.read_text()

    with free_ports() as first:
        here, _ = machine(tmp_path, first)
        body = serving_deployment(tmp_path)
        spec = body["spec"]["template"]["spec"]
        spec["volumes"] = [{"name": "adapters", "configMap": {"name": "chat-adapters"}}]
        spec["containers"][0]["volumeMounts"] = [{"name": "adapters", "mountPath": "/etc/adapters"}]
        await here.apply(config_map("one"))
        await here.apply(body)
        await until(lambda: here.running[0].process.ready)
        assert mounted() == "one"
        await here.apply(config_map("two"))
        assert mounted() == "two"
        assert here.running[0].process.terminated is None
        here.kill()
        await until(lambda: here.running[0].process.terminated)
        await here.apply(config_map("three"))
        await until(lambda: here.running[0].num_restarts == 1 and here.running[0].process.ready)
        assert mounted() == "three"
        (pod,) = here.pods
        assert here.here("chat-0", f"http://{pod['status']['podIP']}:8000/x") == f"http://127.0.0.1:{first}/x"
        await here.close()


async def test_owners_of_a_job_join_and_leave_and_it_expires(tmp_path: Path) -> None:
    def owners() -> list[str]:
        return [one["uid"] for one in here.children[0]["metadata"]["ownerReferences"]]

    here, _ = machine(tmp_path)
    metadata = {"name": "resolve", "namespace": "default", "ownerReferences": [{"uid": "a"}]}
    await here.apply(deployment(1, "0") | {"kind": "Job", "metadata": metadata})
    here.change(here.children[0], {"metadata": {"ownerReferences": [{"uid": "b"}]}})
    assert owners() == ["a", "b"]
    here.change(here.children[0], {"metadata": {"ownerReferences": [{"$patch": "delete", "uid": "a"}]}})
    assert owners() == ["b"]
    await until(lambda: here.children[0]["status"]["conditions"])
    here.change(here.children[0], {"spec": {"ttlSecondsAfterFinished": 0}})
    await until(lambda: not here.children and not here.pods)


def member_set(name: str, first: int = 0, owner: str = "") -> dict[str, Any]:
    """A StatefulSet of one attempt at a group of two, whose pods print what they were given."""
    said = "import os, sys, time; e = os.environ; print(e['RANK'], e['LEADER'], e['NEURON_SERVING_GROUP_PORT'], "
    said += "open(e['SECRET']).read(), flush=True); time.sleep(600)"
    index = {"fieldRef": {"fieldPath": "metadata.labels['apps.kubernetes.io/pod-index']"}}
    env = [
        {"name": "RANK", "valueFrom": index},
        {"name": "LEADER", "value": "g-0.g.default.svc"},
        {"name": "SECRET", "value": "/etc/group/secret"},
    ]
    container = {
        "name": "c",
        "command": [sys.executable, "-c", said],
        "env": env,
        "volumeMounts": [{"name": "group", "mountPath": "/etc/group"}],
    }
    volumes = [{"name": "group", "secret": {"secretName": "g", "defaultMode": 292}}]
    template = {
        "metadata": {"labels": {"neuron-serving.dev/replica": "0"}},
        "spec": {"containers": [container], "volumes": volumes},
    }
    owners = [{"kind": "StatefulSet", "name": "g", "uid": owner}] if owner else []
    return {
        "apiVersion": "apps/v1",
        "kind": "StatefulSet",
        "metadata": {"name": name, "namespace": "default", "ownerReferences": owners},
        "spec": {"replicas": 1, "serviceName": "g", "ordinals": {"start": first}, "template": template},
    }


async def test_a_group_waits_for_its_secret_shares_ports_and_ends_as_a_whole(tmp_path: Path) -> None:
    with free_ports(2) as first:
        here, lines = machine(tmp_path, first)
        await here.apply(member_set("g"))
        assert here.pods == (), "as a kubelet does not start a pod whose Secret is missing"
        (leader,) = here.children
        await here.apply({"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "g"}, "type": "Opaque"})
        await here.apply(member_set("g-followers", 1, leader["metadata"]["uid"]))
        await until(lambda: len(lines) == 2)
        (zero, one) = (line.split() for line in sorted(lines))
        assert (zero[0], one[0]) == ("0", "1")
        assert zero[1:] == one[1:]
        assert zero[1:3] == ["127.0.0.1", str(first)]
        assert len(zero[3]) == 64
        await here.delete(leader)
        assert here.pods == ()
        assert [child["kind"] for child in here.children] == ["Secret"], "only what the leader owns goes with it"


async def test_an_unsupported_kind_is_refused(tmp_path: Path) -> None:
    here, _ = machine(tmp_path)
    with pytest.raises(CannotRunHere, match="DaemonSet chat: is not supported"):
        await here.apply(deployment() | {"kind": "DaemonSet"})


def test_a_machine_with_devices_is_a_node_of_its_instance_type(tmp_path: Path) -> None:
    name = tmp_path / "devices" / "virtual" / "dmi" / "id" / "product_name"
    assert instance_type(tmp_path) == ""
    name.parent.mkdir(parents=True)
    name.write_text("inf2.8xlarge\n")
    host = LocalHost(tmp_path / "default.chat", {}, 1, instance_type(tmp_path))
    node = Machine(host, 0, lambda: None, lambda name, line: None).node
    assert (node.devices, node.instance_type) == (1, "inf2.8xlarge")
