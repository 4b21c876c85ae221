"""What gateways of others read: the pool of a model, and the names of its adapters."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from helpers.operator_worlds import SETTINGS, SPEC, body, resolved_world
from neuron_operator.api.manifest import parse
from neuron_operator.cluster.client import CLAIM_TEMPLATES, INFERENCE_POOLS, LEADER_WORKER_SETS
from neuron_operator.decide.course import decide
from neuron_operator.read.world import GroupSettings, InferencePools
from neuron_operator.render.gateways import adapter_names, inference_pool
from neuron_operator.run.installed import optional_children


def adapter(name: str, ready: str = "True", **served: str) -> dict[str, Any]:
    conditions = [{"type": "Ready", "status": ready}]
    return {
        "metadata": {"name": name},
        "spec": {"model": "chat"},
        "status": {"conditions": conditions, **({"served": served} if served else {})},
    }


def test_adapters_are_routed_to_the_name_that_the_model_serves_also_while_a_replica_starts() -> None:
    model = parse(body({"model": {"uri": "hf://acme/tiny", "servedNames": ["tiny-chat", "x"]}}))
    told = {"model": "chat", "uri": "hf://acme/a", "key": "k", "digest": "1" * 64}
    adapters = [adapter("b", **told), adapter("a", "False", **told), adapter("not-fetched", "False"), {"metadata": {}}]
    found = adapter_names(model, adapters)
    assert found["data"] == {"baseModel": "tiny-chat", "adapters": json.dumps(["a", "b"])}
    assert found["metadata"]["labels"]["inference.llm-d.ai/ipp-managed"] == "true"


def test_a_pool_without_a_picker_names_none() -> None:
    pool = inference_pool(parse(body()), InferencePools(enabled=True))
    assert pool["spec"].keys() == {"selector", "targetPorts"}


def test_the_names_of_adapters_go_when_nobody_reads_them() -> None:
    spec = {**SPEC, "serving": {"adapters": {"maxActive": 1}}}
    with_pools = replace(SETTINGS, inference_pools=InferencePools(enabled=True))
    world, _ = resolved_world(with_pools, spec=spec)
    (routed,) = (one for one in world.children if one["metadata"]["name"] == "chat-routed")
    assert routed["data"]["adapters"] == "[]"
    assert routed not in decide(world, with_pools).delete
    assert routed in decide(world, SETTINGS).delete


def test_only_what_an_installation_uses_must_be_in_the_cluster() -> None:
    assert optional_children(SETTINGS) == ()
    using = replace(
        SETTINGS,
        groups=GroupSettings(controller="LeaderWorkerSet"),
        device_mode="Auto",
        inference_pools=InferencePools(enabled=True),
    )
    assert optional_children(using) == (LEADER_WORKER_SETS, CLAIM_TEMPLATES, INFERENCE_POOLS)
