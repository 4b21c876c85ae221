"""The engine of manifests that name none: chosen by the family of devices when a revision is pinned, and kept."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import pytest

from helpers.operator_worlds import (
    FACTS,
    RESULTS,
    SETTINGS,
    body,
    condition,
    find,
    fresh,
    serving_pod,
    settle,
    stepped,
)
from neuron_operator.api import names
from neuron_operator.api.errors import InvalidSpec, Unplaceable
from neuron_operator.api.manifest import parse
from neuron_operator.api.model import Claim
from neuron_operator.api.reasons import Need, Reason
from neuron_operator.decide.course import decide
from neuron_operator.decide.pin import pin
from neuron_operator.read.records import Facts
from neuron_operator.read.revision import Revision
from neuron_operator.read.world import (
    Decision,
    EngineSettings,
    FreeDevices,
    NodeDevices,
    Object,
    Place,
    Settings,
    StorageSettings,
    World,
)

KNOWN = msgspec.convert(FACTS, Facts)
SPEC: dict[str, Any] = {"model": {"uri": "hf://acme/tiny"}}
KEPT = Place(persistent_volume_claim=Claim(claim_name="kept"))
NONE = replace(
    SETTINGS,
    engines={"vllm": EngineSettings("vllm:0.29")},
    storage=StorageSettings(weights=KEPT, artifacts=KEPT),
)
USING = replace(NONE, engine_defaults={"trn2": "vllm"})
ROLLING = replace(USING, runtime_upgrade="Rolling")


def nodes(*types: str) -> FreeDevices:
    return FreeDevices(
        tuple(NodeDevices(f"n{at}", 1, 1, 0, 0, {names.INSTANCE_TYPE_LABEL: one}) for at, one in enumerate(types))
    )


TRN2, INF2 = "trn2.3xlarge", "inf2.8xlarge"


def pinned(spec: dict[str, Any], *types: str, using: Settings = USING) -> Revision:
    return pin(parse(body({**SPEC, **spec}), has_defaults=True), KNOWN, using, 1, free=nodes(*types))


def on(instance_type: str) -> dict[str, Any]:
    return {"podTemplate": {"spec": {"nodeSelector": {names.INSTANCE_TYPE_LABEL: instance_type}}}}


@pytest.mark.parametrize(
    ("spec", "types", "backend"),
    [
        ({}, [TRN2], "vllm"),
        ({}, [INF2], "nxdi"),
        # The cheaper place decides.
        ({}, [TRN2, INF2], "nxdi"),
        ({"accelerator": {"logicalNeuronCore": 2}}, [TRN2, INF2], "vllm"),
        (on(TRN2), [], "vllm"),
        (on(INF2), [TRN2], "nxdi"),
        ({"engine": {"backend": "nxdi"}}, [TRN2], "nxdi"),
        ({"accelerator": {"type": "CPU"}}, [TRN2], "torch"),
        # An image is one of our runtime, unless the manifest says of which engine.
        ({"engine": {"image": "own:1"}}, [TRN2], "nxdi"),
    ],
)
def test_the_family_of_the_best_place_decides(spec: dict[str, Any], types: list[str], backend: str) -> None:
    revision = pinned(spec, *types)
    assert (revision.backend, revision.pinned.plan.backend) == (backend, backend)


def test_the_plan_says_who_chose_the_engine() -> None:
    assert "with backend vllm, the default for trn2, tensor-parallel" in str(pinned({}, TRN2).pinned.plan.summary)
    assert "with backend nxdi, the default for inf2, tensor-parallel" in str(pinned({}, INF2).pinned.plan.summary)
    assert "the default" not in str(pinned({"engine": {"backend": "vllm"}}, TRN2).pinned.plan.summary)


def test_without_defaults_a_revision_is_what_it_was() -> None:
    spec = parse(body(SPEC))
    assert pin(spec, KNOWN, NONE, 1, free=nodes(TRN2)).default_for == ""
    named = pinned({"engine": {"backend": "nxdi"}}, INF2, using=NONE).pinned
    assert named == pinned({"engine": {"backend": "nxdi"}}, INF2).pinned


def test_a_model_that_fits_on_the_devices_of_one_engine_only_runs_there() -> None:
    huge = msgspec.structs.replace(KNOWN, parameters=18 * 10**9, weights_bytes=36 * 10**9)
    found = pin(parse(body(SPEC), has_defaults=True), huge, USING, 1, free=nodes(TRN2, INF2))
    assert found.backend == "vllm"
    with pytest.raises(Unplaceable, match=r"does not fit on 1 Neuron device of inf2\.8xlarge"):
        pin(parse(body(SPEC), has_defaults=True), huge, USING, 1, free=nodes(INF2))
    larger = msgspec.structs.replace(huge, parameters=100 * 10**9, weights_bytes=200 * 10**9)
    with pytest.raises(
        Unplaceable, match=r"does not fit on .* of inf2.*\. the model does not fit on .* of trn2"
    ) as error:
        pin(parse(body(SPEC), has_defaults=True), larger, USING, 1, free=nodes(TRN2, INF2))
    assert error.value.needs == {Need.FREE_DEVICES}


LARGE = msgspec.structs.replace(
    KNOWN, num_layers=32, hidden_size=4096, num_heads=32, num_kv_heads=8, head_dim=128, max_position_embeddings=131072
)


@pytest.mark.parametrize("billions", [13, 24])
@pytest.mark.parametrize("serves", [{}, {"maxSequences": 4, "maxModelLength": 4096}], ids=["open", "all set"])
def test_a_cheaper_family_with_less_room_is_not_chosen(billions: int, serves: dict[str, int]) -> None:
    facts = msgspec.structs.replace(LARGE, parameters=billions * 10**9, weights_bytes=2 * billions * 10**9)
    spec = parse(body({**SPEC, "accelerator": {"devices": 1}, "serving": serves}), has_defaults=True)
    # As where there are no defaults.
    plans = [
        pin(spec, facts, replace(NONE, engine_defaults=defaults), 1, free=nodes("trn2.48xlarge", INF2)).pinned.plan
        for defaults in ({}, {"trn2": "nxdi", "inf2": "nxdi"}, {"trn2": "vllm"})
    ]
    assert [plan.instance_type for plan in plans] == ["trn2.48xlarge"] * 3
    assert (plans[1].max_model_length, plans[1].max_sequences) == (plans[0].max_model_length, plans[0].max_sequences)


@pytest.mark.parametrize(
    ("spec", "types", "path", "cure"),
    [
        ({"accelerator": {"cores": 1}}, [TRN2], "spec.accelerator.cores", "vllm, the default for trn2"),
        ({"engine": {"args": ["--seed=1"]}}, [INF2], "spec.engine.args", "nxdi, the default for inf2"),
        (
            {"engine": {"args": ["--max-model-len=8"]}},
            [TRN2],
            "spec.engine.args",
            "set serving.maxModelLength.*; the backend is vllm, the default for trn2: or set engine.backend",
        ),
    ],
)
def test_a_field_that_the_default_lacks_is_refused_and_the_message_says_who_chose_the_engine(
    spec: dict[str, Any], types: list[str], path: str, cure: str
) -> None:
    if "cores" in str(spec):
        types = []
        spec = {**spec, **on(TRN2)}
    with pytest.raises(InvalidSpec, match=cure) as refusal:
        pinned(spec, *types)
    assert (refusal.value.field.partition("[")[0], refusal.value.reason) == (path, Reason.FIELD_NOT_SUPPORTED)


# A model of the cluster.


def at_work(world: World, using: Settings) -> tuple[World, Decision]:
    return stepped(*settle(world, using), using)


def edited(world: World, spec: dict[str, Any]) -> World:
    return replace(world, body={**world.body, "spec": spec})


def answering(world: World, using: Settings) -> World:
    deployment = find(world.children, "Deployment")
    return at_work(replace(world, pods=(serving_pod(deployment, "chat-0", ready=True),)), using)[0]


def serving(using: Settings, *types: str, spec: dict[str, Any] = SPEC) -> World:
    return answering(at_work(replace(fresh(spec=spec), free=nodes(*types)), using)[0], using)


def template(world: World) -> Object:
    found: Object = find(world.children, "Deployment")["spec"]["template"]
    return found


def image(world: World) -> str:
    return str(template(world)["spec"]["containers"][0]["image"])


def test_a_model_gets_the_default_and_its_conditions_say_so() -> None:
    world = serving(USING, TRN2)
    status = world.body["status"]
    assert image(world) == "vllm:0.29"
    assert (status["plan"]["backend"], condition(status, "Ready")["status"]) == ("vllm", "True")
    assert "vllm, the default for trn2" in condition(status, "Placed")["message"]


@pytest.mark.parametrize(
    ("then", "types"),
    [
        (USING, [INF2]),
        (USING, []),
        (NONE, [TRN2]),
        (replace(USING, engine_defaults={"trn2": "nxdi"}), [TRN2]),
        (replace(USING, engine_defaults={"inf2": "vllm"}), [INF2, TRN2]),
    ],
    ids=["other nodes", "no nodes", "no defaults", "another default", "a default elsewhere"],
)
@pytest.mark.parametrize("before", [USING, NONE], ids=["vllm", "nxdi"])
def test_a_running_model_keeps_its_engine(before: Settings, then: Settings, types: list[str]) -> None:
    world = serving(before, TRN2)
    now, decision = at_work(replace(world, free=nodes(*types), has_turn=True), then)
    assert template(now) == template(world)
    assert (decision.upgrade, decision.desired) == (None, settle(world, before)[1].desired)


def test_an_edit_that_is_planned_again_gets_the_default_of_today() -> None:
    world = serving(NONE, TRN2)
    assert image(world) == NONE.runtime_image
    scaled, _ = at_work(edited(world, {**SPEC, "replicas": 2}), USING)
    assert image(scaled) == NONE.runtime_image
    longer, decision = at_work(edited(world, {**SPEC, "serving": {"maxSequences": 2}}), USING)
    assert image(longer) == "vllm:0.29"
    assert "vllm, the default for trn2" in condition(decision.status, "Placed")["message"]


def test_an_edit_stays_on_the_family_whose_devices_the_model_holds() -> None:
    world = replace(serving(USING, TRN2), free=nodes(INF2, TRN2))
    moved, _ = at_work(edited(world, {**SPEC, "serving": {"maxSequences": 2}}), USING)
    assert image(moved) == "vllm:0.29"


def test_an_engine_that_the_manifest_named_is_no_default() -> None:
    world = serving(NONE, TRN2, spec={**SPEC, "engine": {"backend": "vllm"}})
    assert image(at_work(edited(world, SPEC), NONE)[0]) == NONE.runtime_image


def test_with_runtime_upgrade_rolling_a_model_moves_to_another_default_in_its_turn() -> None:
    before = serving(NONE, TRN2)
    world, decision = at_work(before, ROLLING)
    assert (decision.upgrade, image(world)) == ("Waiting", NONE.runtime_image)
    world, decision = at_work(replace(world, has_turn=True), ROLLING)
    assert (decision.upgrade, image(world)) == ("Running", "vllm:0.29")
    world, decision = at_work(replace(world, has_turn=False), ROLLING)
    assert (decision.upgrade, image(world)) == ("Running", "vllm:0.29")
    world, decision = at_work(replace(answering(world, ROLLING), has_turn=True), ROLLING)
    assert (decision.upgrade, condition(decision.status, "UpToDate")["status"]) == (None, "True")

    back = replace(NONE, runtime_upgrade="Rolling")
    world, decision = at_work(replace(world, has_turn=False), back)
    assert (decision.upgrade, image(world)) == ("Waiting", "vllm:0.29")
    world, decision = at_work(replace(world, has_turn=True), back)
    assert (decision.upgrade, image(world)) == ("Running", NONE.runtime_image)


@pytest.mark.parametrize(
    ("spec", "architecture"),
    [
        ({"engine": {"applicationClass": "NeuronLlamaForCausalLM"}}, "LlamaForCausalLM"),
        ({}, "MixtralForCausalLM"),
        ({"storage": {"weights": {"objectStore": {"uri": "s3://bucket/weights"}}}}, "LlamaForCausalLM"),
        ({"engine": {"overrideNeuronConfig": {"fused_qkv": True}}}, "LlamaForCausalLM"),
    ],
    ids=["field", "model", "storage", "settings of its engine"],
)
def test_a_model_that_the_new_default_would_refuse_stays_as_it_is(
    spec: dict[str, Any], architecture: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(RESULTS, "resolve", {"facts": {**FACTS, "architecture": architecture}})
    world = serving(NONE, TRN2, spec={**SPEC, **spec})
    now, decision = at_work(replace(world, has_turn=True), ROLLING)
    assert (decision.upgrade, template(now)) == (None, template(world))
    assert condition(decision.status, "Ready")["status"] == "True"
    is_refused = "overrideNeuronConfig" not in str(spec)
    said = condition(decision.status, "UpToDate")["message"]
    assert ("; vllm, the default for trn2, would refuse it: spec." in said) == is_refused

    # Also when it moves to another image: with the engine that it has.
    newer = replace(ROLLING, runtime_image="registry.example/neuron-serving-runtime:2")
    now, decision = at_work(replace(world, has_turn=True), newer)
    assert (decision.upgrade, image(now)) == ("Running", newer.runtime_image)
    assert condition(decision.status, "Accepted")["status"] == "True"
    # Begun is not decided again, also by another leader, and it ends.
    now, decision = at_work(replace(now, has_turn=False), newer)
    assert (decision.upgrade, image(now)) == ("Running", newer.runtime_image)
    now, decision = at_work(replace(answering(now, newer), has_turn=True), newer)
    assert (decision.upgrade, condition(decision.status, "UpToDate")["status"]) == (None, "True")


@pytest.mark.parametrize(
    ("before", "then", "architecture"),
    [("nxdi", "optimum", "DbrxForCausalLM"), ("vllm", "optimum", "Qwen3VLForConditionalGeneration")],
)
def test_a_running_model_does_not_move_to_a_default_that_lacks_its_architecture(
    before: str, then: str, architecture: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(RESULTS, "resolve", {"facts": {**FACTS, "architecture": architecture}})
    whole = {**SPEC, "serving": {"chunkedPrefill": "Disabled"}} if before == "vllm" else SPEC
    world = serving(replace(ROLLING, engine_defaults={"trn2": before}), TRN2, spec=whole)
    now, decision = at_work(replace(world, has_turn=True), replace(ROLLING, engine_defaults={"trn2": then}))
    assert (decision.upgrade, template(now)) == (None, template(world))
    assert condition(decision.status, "Ready")["status"] == "True"
    said = f"{then}, the default for trn2, would refuse it: spec.model.uri: {architecture} has no implementation"
    assert said in condition(decision.status, "UpToDate")["message"]


def test_a_quantized_model_does_not_move_to_a_default_that_may_have_to_convert_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stored = {"quantization": "fp8: fp8 per tensor", "dtype": "float8_e4m3fn"}
    monkeypatch.setitem(RESULTS, "resolve", {"facts": FACTS | stored})
    world = serving(ROLLING, TRN2)
    assert image(world) == "vllm:0.29"
    now, decision = at_work(replace(world, has_turn=True), replace(NONE, runtime_upgrade="Rolling"))
    assert (decision.upgrade, template(now)) == (None, template(world))
    now, decision = at_work(replace(world, has_turn=True), replace(ROLLING, engine_defaults={"trn2": "nxdi"}))
    assert (decision.upgrade, template(now)) == (None, template(world))
    assert (
        "nxdi, the default for trn2, may have to convert its weights"
        in condition(decision.status, "UpToDate")["message"]
    )


def test_a_model_without_room_for_the_new_default_stays_as_it_is() -> None:
    world = replace(serving(NONE, TRN2), has_turn=True)
    now, decision = settle(replace(world, free=nodes(INF2)), ROLLING)
    assert (decision.upgrade, template(now)) == (None, template(world))
    # Nodes are read only for a model that may move.
    decision = decide(replace(world, free=None), ROLLING)
    assert (Need.FREE_DEVICES in decision.needs, decision.upgrade) == (True, "Running")


def test_a_model_that_never_served_is_planned_again_when_the_defaults_change() -> None:
    world, _ = at_work(replace(fresh(spec=SPEC), free=nodes(TRN2)), NONE)
    assert image(world) == NONE.runtime_image
    world, _ = at_work(world, USING)
    assert image(world) == "vllm:0.29"
    world, _ = at_work(world, NONE)
    assert image(world) == NONE.runtime_image


def test_a_manifest_whose_engine_is_open_is_refused_at_once_where_there_are_no_defaults() -> None:
    decision = decide(fresh(spec={**SPEC, "engine": {"args": ["--seed=1"]}}), NONE)
    refused = condition(decision.status, "Accepted")
    assert (refused["reason"], "the default" in refused["message"]) == ("FieldNotSupported", False)


@pytest.mark.parametrize("default", [None, "nxdi"])
def test_where_the_chart_returns_to_the_engine_that_serves_no_pod_is_replaced(default: str | None) -> None:
    using = replace(ROLLING, engine_defaults={"trn2": default} if default else {})
    before = serving(using, TRN2)
    world, decision = at_work(replace(before, has_turn=True), ROLLING)
    assert (decision.upgrade, image(world)) == ("Running", "vllm:0.29")
    world, decision = at_work(replace(world, has_turn=False), using)
    assert (decision.upgrade, template(world)) == (None, template(before))
    assert condition(decision.status, "UpToDate")["status"] == "True"


@pytest.mark.parametrize(
    ("before", "then", "others", "backend"),
    [
        # The hash of a spec leaves out what its engine does not use.
        (NONE, USING, {}, "nxdi"),
        (replace(USING, engine_defaults={"trn2": "nxdi"}), USING, {}, "nxdi, the default for trn2"),
        # A revision of the time with defaults is still kept.
        (USING, NONE, {"serving": {"maxSequences": 2}}, "nxdi"),
    ],
    ids=["before defaults", "another default", "no defaults"],
)
def test_a_field_that_the_engine_of_the_model_lacks_is_refused(
    before: Settings, then: Settings, others: dict[str, Any], backend: str
) -> None:
    world = serving(before, TRN2)
    now, decision = at_work(edited(world, {**SPEC, **others, "engine": {"args": ["--seed=1"]}}), then)
    refused = condition(decision.status, "Accepted")
    assert (refused["status"], refused["reason"]) == ("False", "FieldNotSupported")
    assert f"the backend is {backend}: or set engine.backend" in refused["message"]
    assert template(now) == template(world)
