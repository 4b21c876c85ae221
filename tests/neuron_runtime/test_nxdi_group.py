"""A model of NxD Inference on several nodes: real commands on the fake library, whose devices run in lock-step."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from helpers.group_commands import DEMO, Stream, answer_of, document, nodes
from helpers.nxdi import fake_nxdi, installed, process_environment
from helpers.ports import free_ports
from neuron_runtime.artifacts.compiling import wanted_artifact
from neuron_runtime.backend.neuron.devices import (
    PLATFORMS,
    Target,
    check_cores,
    environment_of,
    environment_of_group,
)
from neuron_runtime.backend.neuron.failures import classified
from neuron_runtime.config import RuntimeConfig, parse_config
from neuron_runtime.distributed.layout import layout_of
from neuron_runtime.errors import ExitCode, FatalError, InvalidConfig

on_the_fake = pytest.mark.skipif(installed(), reason="the fake runs without devices")

SMALL = {
    "limits": {"maxSequences": 2, "maxModelLength": 256},
    "buckets": {"context": [256], "tokenGeneration": [256]},
}
"""Few graphs."""


def on_one_core_each(step_seconds: float = 0.0) -> dict[str, str]:
    return {
        **process_environment(step_seconds=step_seconds),
        "NEURON_PLATFORM_TARGET_OVERRIDE": "trn2",
        "NEURON_RT_NUM_CORES": "1",
    }


def nxdi_document() -> dict[str, Any]:
    return document("nxdi", 2, compile=True, sampling="Host", **SMALL)


@on_the_fake
@pytest.mark.slow
def test_two_nodes_with_half_of_the_cores_each_answer_as_one_and_end_as_one() -> None:
    """Whether the device notices first that a node is lost, or the thread that speaks to it."""
    with nodes(nxdi_document(), 2, silence_seconds=20.0, environment=on_one_core_each(step_seconds=0.1)) as group:
        answer, expected = answer_of(group.url)
        assert answer == expected
        for node, command in enumerate(group.commands):
            assert f"this node has ranks {node} to {node} of 2" in command.text
            assert "warning: this node has no EFA interface" in command.text
        stream = Stream(group.url, max_tokens=200)
        os.kill(group.rank_of(1), signal.SIGKILL)
        assert "error" in stream.end()
        assert group.wait() == [int(ExitCode.GROUP_MEMBER_LOST)] * 2


@pytest.mark.parametrize(
    ("root", "first", "cores", "rule"),
    [("leader:8011", 0, 2, "18"), ("", 2, 2, "18"), ("127.0.0.1:8011", 1, 2, "19.1"), ("127.0.0.1:8011", 0, 3, "19.1")],
)
def test_the_fake_refuses_a_group_that_cannot_meet(
    root: str, first: int, cores: int, rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NEURON_RT_ROOT_COMM_ID", root)
    with fake_nxdi() as fake:
        from fake_nxdi.others import Others

        with pytest.raises(fake.FakeRefusal) as refused:
            Others(first, cores, 4)
    assert refused.value.rule == rule


@pytest.mark.parametrize(
    ("graph", "tokens"), [("another", [1, 2]), ("decode", [1, 3])], ids=["another graph", "other inputs"]
)
def test_the_fake_refuses_a_step_in_which_nodes_differ(
    graph: str, tokens: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refusal(first: int, graph: str, tokens: list[int]) -> str:
        from fake_nxdi.others import Others

        with closing(Others(first, 2, 4)) as others:
            others.exchange("decode", [torch.tensor([7])])
            with pytest.raises(fake.FakeRefusal) as refused:
                others.exchange(graph, [torch.tensor(tokens)])
        return str(refused.value.rule)

    with free_ports() as port, fake_nxdi() as fake, ThreadPoolExecutor(2) as nodes_of_group:
        monkeypatch.setenv("NEURON_RT_ROOT_COMM_ID", f"127.0.0.1:{port}")
        found = list(nodes_of_group.map(refusal, (0, 2), ("decode", graph), ([1, 2], tokens)))
    assert found == ["19.3", "19.3"]


def target_of(num_nodes: int) -> Target:
    return Target(PLATFORMS["trn2"], 2, 4, num_nodes)


def test_each_node_needs_its_share_of_the_cores() -> None:
    check_cores(target_of(2), 8)
    with pytest.raises(FatalError, match="needs 8 NeuronCores"):
        check_cores(target_of(2), 16)
    assert environment_of(target_of(2), 8, 128, None, {})["NEURON_RT_NUM_CORES"] == "4"


def config(tensor: int = 2) -> RuntimeConfig:
    return parse_config(msgspec.json.encode(nxdi_document() | {"parallelism": {"tensor": tensor}}))


@on_the_fake
def test_one_artifact_serves_every_node_and_is_compiled_without_any(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NEURON_PLATFORM_TARGET_OVERRIDE", "trn2")
    with fake_nxdi():
        compiled = wanted_artifact(config(), DEMO, digest="d").key
        monkeypatch.setenv("NEURON_SERVING_GROUP_SIZE", "2")
        monkeypatch.setenv("NEURON_RT_NUM_CORES", "1")
        assert wanted_artifact(config(), DEMO, digest="d").key == compiled


def test_the_neuron_runtimes_meet_at_an_address_over_efa_where_there_is_some(tmp_path: Path) -> None:
    found = environment_of_group("tcp://localhost:8011", {}, tmp_path)
    assert found in ({"NEURON_RT_ROOT_COMM_ID": "127.0.0.1:8011"}, {"NEURON_RT_ROOT_COMM_ID": "[::1]:8011"})
    (tmp_path / "class/infiniband/rdmap0").mkdir(parents=True)
    assert environment_of_group("tcp://127.0.0.1:1", {"FI_PROVIDER": "tcp"}, tmp_path) == {
        "NEURON_RT_ROOT_COMM_ID": "127.0.0.1:1",
        "FI_EFA_USE_DEVICE_RDMA": "1",
        "FI_EFA_FORK_SAFE": "1",
    }


def test_a_leader_without_an_address_is_lost() -> None:
    host = "a" * 64
    with pytest.raises(FatalError, match=f"{host}: has no address") as error:
        environment_of_group(f"tcp://{host}:1", {})
    assert error.value.exit_code == ExitCode.GROUP_MEMBER_LOST


def test_collectives_that_fail_mean_a_lost_node_in_a_group_only() -> None:
    hung = RuntimeError("nrt_execute failed, status_code=1200 (NRT_EXEC_HW_ERR_COLLECTIVES)")
    codes = [classified(hung, in_group=in_group).exit_code for in_group in (True, False)]  # type: ignore[attr-defined]
    assert codes == [ExitCode.GROUP_MEMBER_LOST, ExitCode.DEVICE_FAILED]


def test_the_degree_must_be_named_in_a_group() -> None:
    with pytest.raises(InvalidConfig, match="must be set in a group of 2 nodes"):
        layout_of({"NEURON_SERVING_GROUP_SIZE": "2"}, 0, process_per_rank=False)
