"""A manifest is parsed into a frozen value or refused naming the field; unsupported fields are never ignored."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given

from helpers.manifests import REFUSED, spec_with
from helpers.operator_worlds import JSON_VALUES, body, fresh
from neuron_operator.api import names
from neuron_operator.api.errors import FieldNotSupported, InvalidSpec
from neuron_operator.api.manifest import parse
from neuron_operator.api.model_status import MAX_MESSAGE
from neuron_operator.cluster.reflector import trimmed_model
from neuron_operator.read.views import observe

CRD = Path(__file__).parents[2] / "crds" / "neuronmodels.yaml"


@pytest.mark.parametrize("case", REFUSED["cases"], ids=lambda case: case["name"])
def test_an_invalid_manifest_is_refused_naming_the_field(case: dict[str, Any]) -> None:
    with pytest.raises(InvalidSpec) as refusal:
        parse(body(spec_with(case["spec"])))
    shown = refusal.value.field.replace("[...]", "")
    assert shown == case["field"], str(refusal.value)
    assert case.get("says", "") in str(refusal.value)
    assert isinstance(refusal.value, FieldNotSupported) == (case["by"] == "operator")


@pytest.mark.parametrize("changes", REFUSED["accepted"], ids=str)
def test_explicit_defaults_are_accepted(changes: dict[str, Any]) -> None:
    assert parse(body(spec_with(changes))).spec.backend == "torch"


@pytest.mark.parametrize("case", REFUSED["names"], ids=lambda case: case["name"])
def test_a_name_that_is_no_dns_label_is_refused(case: dict[str, Any]) -> None:
    with pytest.raises(InvalidSpec, match=r"^metadata\.name: "):
        parse(body(spec_with({}), name=case["name"]))


def test_the_minimal_manifest_serves_one_replica_under_its_name() -> None:
    model = parse(body({"model": {"uri": "hf://acme/tiny"}, "accelerator": {"type": "CPU"}}))
    assert model.spec.model.served_names == ()
    assert model.spec.replicas == 1
    assert (model.spec.rollout.drain_delay_seconds, model.spec.rollout.drain_seconds) == (10, 300)


def test_an_unknown_field_is_refused_by_name() -> None:
    with pytest.raises(InvalidSpec, match=r"^spec\.serving: has no field \"maxLength\"$"):
        parse(body(spec_with({"serving": {"maxLength": 1}})))


def refused(changes: dict[str, Any], name: str = "chat") -> str:
    with pytest.raises(InvalidSpec) as refusal:
        parse(body(spec_with(changes), name=name))
    return str(refusal.value)


def test_everything_invalid_is_refused_together() -> None:
    found = refused(
        {
            "replicas": -1,
            "accelerator": {"type": "GPU", "devices": "two"},
            "serving": {"maxLength": 1, "contextBuckets": [2, 1]},
            "engine": {"env": [{"name": "A", "value": "x"}, {"name": "HOME", "value": "y"}, {"value": "z"}]},
            "podTemplate": {"spec": {"tolerations": 5}},
        },
        name="Chat",
    )
    assert [refusal.partition(": ")[0] for refusal in found.split(". ")] == [
        "metadata.name",
        "spec.replicas",
        "spec.accelerator.type",
        "spec.accelerator.devices",
        "spec.serving",
        "spec.serving.contextBuckets",
        "spec.engine.env[1].name",
        "spec.engine.env[2]",
        "spec.podTemplate.spec.tolerations",
    ]


def test_everything_unsupported_is_refused_together_with_each_cure() -> None:
    changes = {
        "engine": {"backend": "torch", "overrideNeuronConfig": {"x": 1}},
        "accelerator": {"logicalNeuronCore": 1},
        "serving": {"contextBuckets": [128]},
    }
    text = refused(changes)
    for part in ("spec.engine.overrideNeuronConfig", "has no settings"):
        assert part in text
    for part in (
        "spec.accelerator.logicalNeuronCore: 1",
        "computes on the host",
        "spec.serving.contextBuckets",
        "computes any length",
    ):
        assert part in text


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"accelerator": {"type": "GPU"}}, 'spec.accelerator.type: must be one of Neuron, CPU, got "GPU"'),
        ({"accelerator": {"logicalNeuronCore": 3}}, "spec.accelerator.logicalNeuronCore: must be one of 1, 2, got 3"),
        ({"engine": {"imagePullPolicy": 1}}, "must be one of Always, IfNotPresent, Never, got 1"),
        ({"rollout": {"strategy": ["Auto"]}}, 'must be one of Auto, Surge, Replace, got ["Auto"]'),
    ],
    ids=str,
)
def test_an_invalid_choice_lists_the_choices(changes: dict[str, Any], says: str) -> None:
    assert says in refused(changes)


def test_the_refusals_of_one_manifest_are_bounded() -> None:
    text = refused({"serving": {f"{'long' * 100}{number}": 1 for number in range(300)}})
    assert len(text) < MAX_MESSAGE - 100, "a note must fit behind it"
    assert text.startswith('spec.serving: has no field "longlong')
    assert re.search(r"\. 292 more are refused$", text)


def test_a_number_beyond_64_bits_is_quoted_in_the_refusal() -> None:
    with pytest.raises(FieldNotSupported, match=r"overrideNeuronConfig: .*1000000000000000000000"):
        parse(body(spec_with({"engine": {"overrideNeuronConfig": {"x": 10**21}}})))


@pytest.mark.parametrize(("value", "paused"), [("true", True), ("false", False), ("", False), (None, False)])
def test_only_the_annotation_value_true_pauses(value: str | None, paused: bool) -> None:
    annotations = {} if value is None else {names.PAUSED_ANNOTATION: value}
    assert observe(fresh(annotations=annotations)).model.is_paused is paused


def test_every_list_map_and_text_of_the_spec_is_bounded() -> None:
    unbounded = list(_unbounded(_schema()["properties"]["spec"], "spec"))
    assert unbounded == []


def test_the_crd_stays_small() -> None:
    assert len(CRD.read_bytes()) < 64 * 1024


def test_status_fields_are_not_encoded_strings() -> None:
    """Only counters and conditions: no phase."""
    assert "phase" not in _schema()["properties"]["status"]["properties"]


@given(JSON_VALUES)
def test_no_body_crashes_the_parser(value: object) -> None:
    for candidate in ({"metadata": value, "spec": value}, body(spec=None) | {"spec": value}):
        with pytest.raises(InvalidSpec, match=r"^(spec|metadata\.name)"):
            parse(candidate)


def _schema() -> dict[str, Any]:
    crd = yaml.safe_load(CRD.read_text())
    schema: dict[str, Any] = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    return schema


def _unbounded(schema: dict[str, Any], path: str) -> Any:
    match schema.get("type"):
        case "array" if "maxItems" not in schema:
            yield path
        case "string" if not {"maxLength", "enum", "format"} & set(schema):
            yield path
        case "object" if "properties" not in schema and "maxProperties" not in schema:
            yield path
    for name, child in schema.get("properties", {}).items():
        yield from _unbounded(child, f"{path}.{name}")
    for step in ("items", "additionalProperties"):
        if step in schema:
            yield from _unbounded(schema[step], f"{path}[]")


@pytest.mark.parametrize(("spec", "says"), [(None, "spec: is required"), ([], "spec: must be an object")])
def test_a_missing_spec_and_one_of_another_type_have_different_messages(spec: Any, says: str) -> None:
    with pytest.raises(InvalidSpec, match=says):
        parse({"metadata": {"name": "chat"}, "spec": spec})


def test_a_spec_with_lists_in_many_others_is_refused() -> None:
    nested: Any = 1
    for _ in range(100):
        nested = [nested]
    with pytest.raises(InvalidSpec, match="spec: has lists or objects in more than 64 others"):
        parse(body(spec_with({"engine": {"backend": "nxdi", "overrideNeuronConfig": {"a": nested}}})))


def test_a_spec_that_is_too_heavy_is_refused_also_when_only_its_weight_was_kept() -> None:
    env = [{"name": f"A{number}", "value": "x" * 4096} for number in range(40)]
    heavy = body(spec_with({"engine": {"env": env}}))
    heavy["metadata"] |= {"annotations": {"example.com/note": "x" * 100_000}, "labels": {"a" * 63: "b" * 63}}
    kept = trimmed_model(heavy)
    assert len(json.dumps(kept)) < 1000
    for one in (heavy, kept):
        with pytest.raises(InvalidSpec, match=r"^spec: is 16\d{4} bytes as JSON, at most 131072 are allowed; shorten"):
            parse(one)
    lighter = body(spec_with({"engine": {"backend": "torch", "env": env[:20]}}))
    assert parse(trimmed_model(lighter)).spec == parse(lighter).spec
