"""CPU and memory of pods: estimated once per revision, replaced by what chart and manifest set."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from kubernetes.utils.quantity import parse_quantity

from helpers.manifests import spec_with
from helpers.operator_worlds import FACTS, SETTINGS, body, find, fresh, resolved_world, settle
from neuron_operator.api.manifest import parse
from neuron_operator.read.records import Facts
from neuron_operator.read.world import JobSettings, Object
from neuron_operator.render.resources import compile_requests, overlaid, serving_requests

GIB = 2**30
EIGHT_B = {
    "parameters": 8_030_000_000,
    "weightsBytes": 16_060_000_000,
    "numLayers": 32,
    "hiddenSize": 4096,
    "numHeads": 32,
    "numKvHeads": 8,
    "headDim": 128,
    "vocabularySize": 128_256,
    "maxPositionEmbeddings": 131_072,
}


def requested(facts: dict[str, Any], **changes: Any) -> tuple[float, float]:
    """CPUs and GiB."""
    found = serving_requests(parse(body(spec_with(changes))), msgspec.convert({**FACTS, **facts}, Facts))
    return float(parse_quantity(found["cpu"])), float(parse_quantity(found["memory"])) / GIB


def test_the_memory_holds_weights_cache_and_processes() -> None:
    cpus, memory = requested(EIGHT_B)
    weights, embedding = 16.06e9 / GIB, 2 * 128_256 * 4096 * 2 / GIB
    cache = 8 * 4096 * 2 * 32 * 8 * 128 * 2 / GIB  # 8 sequences of 4096 tokens
    assert weights + embedding + cache < memory < 1.15 * (weights + embedding + cache) + 1
    assert 2 < cpus < 4


def test_a_model_for_devices_has_room_for_its_weights_on_the_way_and_for_its_compiler() -> None:
    engine = {"backend": "nxdi"}
    _, memory = requested(EIGHT_B, engine=engine)
    assert 2 * 16.06e9 / GIB < memory < 2.2 * 16.06e9 / GIB
    model, facts = parse(body(spec_with({"engine": engine}))), msgspec.convert({**FACTS, **EIGHT_B}, Facts)
    needed = float(parse_quantity(compile_requests(model, facts)["memory"])) / GIB
    assert 32 < needed < 64  # runs out of memory on a host with 32 GB
    tiny = compile_requests(model, msgspec.convert(FACTS, Facts))
    assert float(parse_quantity(tiny["memory"])) / GIB < 5


def test_a_tiny_model_requests_little() -> None:
    cpus, memory = requested({})
    assert (cpus, memory) == (0.2, 0.8125)


@pytest.mark.parametrize(
    ("more", "than"),
    [
        ({"serving": {"maxModelLength": 16384}}, {}),
        ({"serving": {"maxSequences": 32}}, {}),
        ({"serving": {"blockSize": 16, "numBlocks": 8192}}, {}),
        ({"serving": {"dtype": "float32"}}, {"serving": {"dtype": "bfloat16"}}),
        ({}, {"engine": {"backend": "simulated"}}),
    ],
    ids=str,
)
def test_more_in_the_manifest_requests_more_memory(more: dict[str, Any], than: dict[str, Any]) -> None:
    assert requested(EIGHT_B, **more)[1] > requested(EIGHT_B, **than)[1]


def test_a_cache_that_the_engine_can_make_smaller_does_not_keep_the_pod_from_nodes() -> None:
    many = {"maxSequences": 256, "maxModelLength": 8192}
    blocks = requested(EIGHT_B, serving={**many, "prefixCaching": "Enabled"})[1]
    no_length = requested(EIGHT_B, serving={"maxSequences": 256})[1]
    lines = requested(EIGHT_B, serving=many)[1]
    assert blocks == no_length < 40
    assert lines > 256, "a line per sequence of this length is allocated whole, or refused"


def test_a_simulated_device_needs_neither_weights_nor_torch() -> None:
    assert requested(EIGHT_B, engine={"backend": "simulated"}) == (0.2, 0.3125)


def test_converted_weights_need_their_own_memory_if_they_are_computed_as_they_are() -> None:
    plain, converted = {**EIGHT_B, "dtype": "bfloat16"}, {"digest": "c0" * 32, "bytes": 9_090_000_000}
    _, unquantized = requested(plain)
    _, int8 = requested({**plain, "conversion": {**converted, "format": "int8"}})
    _, fp8 = requested({**plain, "conversion": {**converted, "format": "fp8"}})
    compiled = {"engine": {"backend": "torch", "compile": "Enabled"}}
    _, in_graphs = requested({**plain, "conversion": {**converted, "format": "int8"}}, **compiled)
    assert unquantized - int8 > 6
    assert fp8 == in_graphs == unquantized, "they are multiplied out"


def test_quantized_weights_are_computed_in_bfloat16_and_need_its_memory() -> None:
    _, unquantized = requested({**EIGHT_B, "dtype": "bfloat16"})
    _, quantized = requested({**EIGHT_B, "dtype": "float8_e4m3fn", "weightsBytes": 9_090_000_000})
    assert quantized >= unquantized
    # Of a small model most bytes may be those of its embedding, which is not quantized.
    int4 = {**EIGHT_B, "dtype": "float16", "quantization": "awq: int4 in blocks of 1 x 128, packed"}
    assert requested({**int4, "weightsBytes": 6_000_000_000})[1] >= unquantized


@pytest.mark.parametrize("length", [0, 1, 10**12])
def test_odd_facts_give_a_valid_quantity(length: int) -> None:
    odd = {**dict.fromkeys(EIGHT_B, length), "dtype": "unheard-of"}
    cpus, memory = requested(odd)
    assert cpus > 0
    assert memory > 0


def compiler_gib(facts: dict[str, Any], times: int = 1) -> float:
    found = compile_requests(parse(body(spec_with({}))), msgspec.convert({**FACTS, **facts}, Facts), times)
    return float(parse_quantity(found["memory"])) / GIB


def test_a_compiler_requests_memory_for_the_layers_and_not_for_the_weights() -> None:
    assert 2 < compiler_gib({}) < compiler_gib({"numLayers": 32}) < 8
    assert compiler_gib({"weightsBytes": 10**12, "parameters": 5 * 10**11}) == compiler_gib({})


def test_a_compiler_that_ran_out_of_memory_requests_a_multiple() -> None:
    assert [compiler_gib(EIGHT_B, times) / compiler_gib(EIGHT_B) for times in (1, 2, 4)] == [1, 2, 4]


@pytest.mark.parametrize(
    ("overlays", "expected"),
    [
        ((), {"requests": {"cpu": "1", "memory": "2Gi"}}),
        (({"requests": {"cpu": 4}},), {"requests": {"cpu": 4, "memory": "2Gi"}}),
        # Kubernetes sets the request to the limit.
        (({"limits": {"memory": "1Gi"}},), {"limits": {"memory": "1Gi"}, "requests": {"cpu": "1"}}),
        (
            ({"limits": {"memory": "1Gi"}, "requests": {"memory": "1Gi"}}, {"requests": {"memory": "8Gi"}}),
            {"requests": {"cpu": "1", "memory": "8Gi"}},
        ),
        (({"requests": {"ephemeral-storage": "8Gi"}},), {"requests": {"cpu": "1", "memory": "2Gi"}}),
    ],
)
def test_an_overlay_replaces_request_and_limit_of_what_it_names(
    overlays: tuple[dict[str, Any], ...], expected: dict[str, Any]
) -> None:
    found = overlaid({"cpu": "1", "memory": "2Gi"}, *overlays)
    found.get("requests", {}).pop("ephemeral-storage", None)
    assert found == expected


def resources_of(workload: Object) -> Object:
    found: Object = workload["spec"]["template"]["spec"]["containers"][0]["resources"]
    return found


def test_the_resources_of_the_podtemplate_win() -> None:
    own = {"podTemplate": {"spec": {"resources": {"requests": {"cpu": "8"}, "limits": {"memory": "16Gi"}}}}}
    _, decision = resolved_world(spec=spec_with({**own, "accelerator": {"type": "CPU"}}))
    assert resources_of(find(decision.desired, "Deployment")) == {
        "limits": {"memory": "16Gi"},
        "requests": {"cpu": "8"},
    }


def test_the_jobs_resources_of_the_model_win_over_those_of_the_chart() -> None:
    chart = JobSettings(resources={"requests": {"cpu": "1"}, "limits": {"cpu": "2", "memory": "1Gi"}})
    spec = spec_with({"jobs": {"resources": {"limits": {"cpu": "4"}}}})
    _, decision = settle(fresh(spec=spec), replace(SETTINGS, jobs=chart))
    assert resources_of(find(decision.desired, "Job")) == {"limits": {"memory": "1Gi", "cpu": "4"}}
    _, decision = settle(fresh(spec=spec_with({})))
    assert resources_of(find(decision.desired, "Job")) == {"requests": {"cpu": "100m", "memory": "128Mi"}}


def test_pods_of_an_existing_revision_keep_what_they_request() -> None:
    """A new operator, or one with other estimates, must not restart pods."""
    world, decision = resolved_world()
    (keeper,) = [child for child in world.children if child["kind"] == "ControllerRevision"]
    earlier = copy.deepcopy(keeper)
    container = earlier["data"]["template"]["spec"]["containers"][0]
    container["resources"]["requests"].pop("cpu")
    children = tuple(earlier if child is keeper else child for child in world.children)
    _, again = settle(replace(world, children=children))
    assert find(again.desired, "ControllerRevision")["data"] == earlier["data"]
    assert "cpu" not in resources_of(find(again.desired, "Deployment"))["requests"]
    assert "cpu" in resources_of(find(decision.desired, "Deployment"))["requests"]


@pytest.mark.parametrize(
    "changes",
    [
        {"jobs": {"resources": {"limits": {"cpu": "4"}}}},
        {"jobs": {"annotations": {"a": "b"}}},
        {"serviceTemplate": {"spec": {"type": "NodePort"}, "metadata": {"annotations": {"a": "b"}}}},
        {"replicas": 4},
    ],
    ids=str,
)
def test_an_edit_of_jobs_or_service_restarts_no_pod(changes: dict[str, Any]) -> None:
    templates = []
    for spec in (body()["spec"], {**body()["spec"], **changes}):
        _, decision = resolved_world(spec=spec)
        templates.append(find(decision.desired, "Deployment")["spec"]["template"])
    assert templates[0] == templates[1]


def test_replicas_prefer_different_nodes_and_zones() -> None:
    _, decision = resolved_world()
    pod = find(decision.desired, "Deployment")["spec"]["template"]
    preferred = pod["spec"]["affinity"]["podAntiAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"]
    assert {term["podAffinityTerm"]["topologyKey"] for term in preferred} == {
        "kubernetes.io/hostname",
        "topology.kubernetes.io/zone",
    }
    for term in preferred:
        assert term["podAffinityTerm"]["labelSelector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()


@pytest.mark.parametrize(
    "own",
    [
        {"affinity": {"podAntiAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": []}}},
        {
            "topologySpreadConstraints": [
                {"maxSkew": 1, "topologyKey": "rack", "whenUnsatisfiable": "ScheduleAnyway", "labelSelector": {}}
            ]
        },
    ],
    ids=lambda own: next(iter(own)),
)
def test_the_users_own_spreading_wins(own: dict[str, Any]) -> None:
    spec = spec_with({"accelerator": {"type": "CPU"}, "podTemplate": {"spec": own}})
    _, decision = resolved_world(spec=spec)
    pod = find(decision.desired, "Deployment")["spec"]["template"]["spec"]
    pod["affinity"].pop("nodeAffinity")  # keeps nodes with devices free
    assert {key: pod.get(key) for key in own} == own
    anti = pod.get("affinity", {}).get("podAntiAffinity", {})
    assert not anti.get("preferredDuringSchedulingIgnoredDuringExecution")
