"""What a model is compiled for that runs on devices: their family, its cores, and the nodes that have them."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import msgspec
import pytest

from helpers.operator_worlds import (
    FACTS,
    NOW,
    SETTINGS,
    body,
    condition,
    find,
    fresh,
    having_served,
    settle,
    stepped,
    unscheduled_pod,
)
from neuron_operator.api import names
from neuron_operator.api.errors import InvalidSpec, OperatorError, Unplaceable
from neuron_operator.api.manifest import parse
from neuron_operator.api.model import Claim
from neuron_operator.api.reasons import Need
from neuron_operator.decide.course import decide
from neuron_operator.place.planner import Choice, choose
from neuron_operator.read.objects import items
from neuron_operator.read.records import Facts
from neuron_operator.read.world import FreeDevices, NodeDevices, Object, Place, StorageSettings

USING = replace(
    SETTINGS, storage=StorageSettings(artifacts=Place(persistent_volume_claim=Claim(claim_name="compiled")))
)
KNOWN = msgspec.convert(FACTS | {"numHeads": 8}, Facts)


def cluster(*types: str) -> FreeDevices:
    return FreeDevices(
        tuple(
            NodeDevices(f"n{at}", 6, 6, 0, 0, {names.INSTANCE_TYPE_LABEL: one} if one else {})
            for at, one in enumerate(types)
        )
    )


def chosen(free: FreeDevices | None = None, facts: Facts = KNOWN, **spec: Any) -> Choice:
    model = parse(body({"model": {"uri": "hf://acme/tiny"}, **spec}))
    return choose(model, facts, replace(USING, device_mode="PluginWithExtension"), free)


def on(instance_type: str) -> dict[str, Any]:
    return {"podTemplate": {"spec": {"nodeSelector": {names.INSTANCE_TYPE_LABEL: instance_type}}}}


@pytest.mark.parametrize(
    ("spec", "found"),
    [
        (on("inf2.48xlarge"), ("inf2", 1, 2, 2)),
        ({**on("trn1n.32xlarge"), "accelerator": {"devices": 4}}, ("trn1", 1, 8, 8)),
        (on("trn2.48xlarge"), ("trn2", 2, 4, 4)),
        ({**on("trn2u.48xlarge"), "accelerator": {"logicalNeuronCore": 1}}, ("trn2", 1, 8, 8)),
        ({**on("trn3.new"), "parallelism": {"tensor": 2}}, ("trn3", 2, 4, 2)),
        ({**on("inf2.48xlarge"), "accelerator": {"cores": 4}}, ("inf2", 1, 4, 4)),
    ],
)
def test_all_cores_of_the_devices_are_used_by_default(spec: dict[str, Any], found: tuple[Any, ...]) -> None:
    made = chosen(**spec)
    best = made.chosen
    assert (best.site.family.name, best.logical_core, best.cores, best.tensor) == found
    assert made.node_rule is None


def test_a_degree_that_is_not_documented_or_does_not_divide_the_heads_is_not_chosen() -> None:
    six_heads = msgspec.convert(FACTS, Facts)
    assert chosen(facts=six_heads, **on("trn2.48xlarge")).chosen.tensor == 2
    assert chosen(facts=six_heads, **on("trn2.48xlarge"), parallelism={"tensor": 3}).chosen.tensor == 3


def test_without_a_named_type_the_nodes_of_the_cluster_tell_the_family() -> None:
    made = chosen(cluster("inf2.24xlarge", "inf2.new", "m5.large", ""))
    assert made.chosen.site.family.name == "inf2"
    assert made.node_rule is not None
    types = made.node_rule["values"]
    assert {"inf2.24xlarge", "inf2.48xlarge", "inf2.new"} <= set(types)
    assert all(one.removeprefix("ml.").startswith("inf2") for one in types)
    selected = {"podTemplate": {"spec": {"nodeSelector": {"pool": "x"}}}}
    pool = NodeDevices("x", 1, 1, 0, 0, {names.INSTANCE_TYPE_LABEL: "trn2.48xlarge", "pool": "x"})
    nodes = cluster("inf2.24xlarge").nodes
    assert nodes is not None
    assert chosen(FreeDevices((*nodes, pool)), **selected).chosen.site.family.name == "trn2"


@pytest.mark.parametrize(
    ("free", "spec", "kind", "says"),
    [
        (cluster(), {}, Unplaceable, "no node with known devices is found: name the type in"),
        (FreeDevices(None), {}, Unplaceable, "no node with known devices is found"),
        (None, on("p5.48xlarge"), Unplaceable, "the devices of p5.48xlarge are unknown"),
        (
            None,
            {"accelerator": {"type": "CPU"}, "engine": {"backend": "nxdi"}},
            InvalidSpec,
            "set accelerator.type Neuron",
        ),
        (
            None,
            {**on("inf2.xlarge"), "parallelism": {"tensor": 8}},
            InvalidSpec,
            "spec.parallelism.tensor: 8 needs 8 NeuronCores, but 2 are those of 1 Neuron device, inf2",
        ),
        (
            None,
            {**on("trn2.48xlarge"), "parallelism": {"tensor": 3}},
            InvalidSpec,
            "3 does not divide the 8 attention heads; choose one of 1, 2, 4",
        ),
        (
            None,
            {**on("inf2.xlarge"), "accelerator": {"logicalNeuronCore": 2}},
            InvalidSpec,
            "spec.accelerator.logicalNeuronCore: inf2 has no logical cores of 2 physical ones",
        ),
    ],
)
def test_what_cannot_be_compiled_for_is_refused_with_the_numbers(
    free: FreeDevices | None, spec: dict[str, Any], kind: type[OperatorError], says: str
) -> None:
    with pytest.raises(kind) as caught:
        chosen(free, **spec)
    assert says in str(caught.value)


def test_an_edit_keeps_the_place_of_the_revision_before() -> None:
    spec: dict[str, Any] = {"model": {"uri": "hf://acme/tiny"}}
    world = replace(fresh(spec=spec), free=cluster("inf2.24xlarge"))
    world, decision = settle(world, USING)
    world, decision = stepped(world, decision, USING)
    edited = {**spec, "rollout": {"drainSeconds": 7}}
    nodes = cluster("inf2.24xlarge", "inf2.xlarge").nodes
    assert nodes is not None
    full = FreeDevices((replace(nodes[0], free_devices=0), nodes[1]))
    moved = fresh(spec=edited)
    world, decision = settle(replace(world, body={**world.body, "spec": moved.body["spec"]}, free=full), USING)
    assert "as before this edit" in condition(decision.status, "Placed")["message"]


def test_what_never_served_is_planned_again_once_its_nodes_are_gone_for_long() -> None:
    """The type for which it was compiled has no node any more; another one has."""
    first, other = cluster("inf2.24xlarge"), cluster("trn1.2xlarge")
    world, decision = settle(replace(fresh(spec={"model": {"uri": "hf://acme/tiny"}}), free=first), USING)
    world, decision = stepped(world, decision, USING)
    deployment = find(decision.desired, "Deployment")
    stuck = unscheduled_pod(deployment, "0/1 nodes are available: 1 node(s) didn't match Pod's node affinity/selector.")
    waiting = replace(world, pods=(*world.pods, stuck))
    for seconds, free, family in ((599, other, "inf2"), (600, first, "inf2"), (600, FreeDevices(None), "inf2")):
        now = NOW - timedelta(seconds=600 - seconds)
        _, decision = settle(replace(waiting, free=free, now=now), USING)
        assert family in condition(decision.status, "Placed")["message"], (seconds, free)
    served = having_served(waiting)
    _, decision = settle(replace(served, free=other), USING)
    assert "inf2" in condition(decision.status, "Placed")["message"]
    world, decision = settle(replace(waiting, free=other), USING)
    assert "of trn1" in condition(decision.status, "Placed")["message"]
    assert condition(decision.status, "Compiled")["reason"] == "Compiling"
    assert not [made for made in decision.desired if made["kind"] == "Job" and "resolve" in str(made["metadata"])]
    world, decision = stepped(replace(world, pods=(stuck,)), decision, USING)
    template = find(decision.desired, "Deployment")["spec"]["template"]
    assert env_of(template)[names.PLATFORM_VARIABLE] == "trn1"


def env_of(template: Object) -> dict[str, str]:
    (container,) = template["spec"]["containers"]
    return {variable["name"]: variable.get("value", "") for variable in container["env"]}


def test_the_shortest_manifest_compiles_off_the_devices_and_then_serves_on_them() -> None:
    spec = {"model": {"uri": "hf://acme/tiny"}}
    world, decision = settle(fresh(spec=spec), USING)
    world, decision = stepped(world, decision, USING)
    assert Need.FREE_DEVICES in decision.needs  # the nodes are read, then the pass decides again
    world = replace(world, free=cluster("inf2.24xlarge"))
    world, decision = settle(world, USING)
    assert "tensor-parallel degree 2 on 2 NeuronCores of inf2" in condition(decision.status, "Placed")["message"]
    (job,) = (found for found in world.shared if found["kind"] == "Job" and "compile" in str(found["spec"]))
    assert env_of(job["spec"]["template"])[names.PLATFORM_VARIABLE] == "inf2"
    resources = job["spec"]["template"]["spec"]["containers"][0]["resources"]
    assert not any("neuron" in name for part in resources.values() for name in part)
    assert not [one for one in decision.desired if one["kind"] == "Deployment"]
    world, decision = stepped(replace(world, free=None), decision, USING)
    template = find(decision.desired, "Deployment")["spec"]["template"]
    assert env_of(template)[names.PLATFORM_VARIABLE] == "inf2"
    container = template["spec"]["containers"][0]
    assert container["resources"]["limits"] == {"aws.amazon.com/neuron": "1"}
    assert "--on-artifact-miss fail" in " ".join(container["command"])
    terms = items(template, "spec", "affinity", "nodeAffinity", names.REQUIRED_AFFINITY, "nodeSelectorTerms")
    keys = [(rule["key"], rule["operator"]) for rule in terms[0]["matchExpressions"]]
    assert (names.INSTANCE_TYPE_LABEL, "In") in keys
    assert not decide(world, USING).needs & {Need.FREE_DEVICES}
