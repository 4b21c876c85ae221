"""Checks of the chart without helm; `tests/cluster/test_chart.py` renders and installs it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import pytest
import yaml

from neuron_operator.api.engines import ENGINES
from neuron_operator.place.catalog import FAMILIES
from neuron_operator.run.settings import load

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "charts" / "neuron-serving"
VALUES = yaml.safe_load((CHART / "values.yaml").read_text())
SCHEMA = json.loads((CHART / "values.schema.json").read_text())

# Described in the API but without effect yet: refused, so that no user relies on them.
WRONG: tuple[dict[str, Any], ...] = (
    {"commonLabels": {"app.kubernetes.io/name": "other"}},
    {"commonLabels": {"team": "a b"}},
    {"replicas": 0},
    {"replicas": "2"},
    {"replica": 3},
    {"image": {"repository": "x"}},
    {"logLevel": "loud"},
    {"lease": {"seconds": 1}},
    {"watchNamespaces": ["Upper"]},
    {"devices": {"mode": "PluginWithExtension", "schedulerName": ""}},
    {"devices": {"mode": "Plugin", "schedulerName": "neuron-scheduler"}},
    {"jobs": {"image": "x"}},
    {"provisionable": {"instanceTypes": ["inf2"]}},
    {"provisionable": {"instanceTypes": ["inf2.xlarge", "inf2.xlarge"]}},
    {"runtimeUpgrade": "Never"},
    {"image": {"runtime": ""}},
    {"engines": {"defaults": {"trn9": "vllm"}}},
    {"engines": {"defaults": {"trn2": "torch"}}},
    {"engines": {"defaults": "vllm"}},
    {"engines": {"vllm": {"version": "0.29"}}},
    {"image": {"operator": "a b"}},
    {"caBundle": {"configMap": {"name": "ca"}}},
    {"caBundle": {"configMap": {"name": "ca", "key": "k"}, "secret": {"name": "ca", "key": "k"}}},
    {"storage": {"weights": {"emptyDir": {}, "objectStore": {"uri": "s3://bucket/weights"}}}},
    {"storage": {"weights": {"pvcTemplate": {"storageClassName": "efs"}}}},
    {"storage": {"weights": {"pvcTemplate": {"size": "much"}}}},
    {"storage": {"weights": {"persistentVolumeClaim": {"claimName": "Models"}}}},
    {"storage": {"weights": {"objectStore": {"uri": "s3://bucket"}}}},
    {"storage": {"artifacts": {"emptyDir": {}}}},
    {"storage": {"keepDays": -1}},
    {"storage": {"keepDays": "30"}},
    {"monitoring": {"podMonitors": {"interval": "often"}}},
    {"monitoring": {"serviceMonitor": {"enabled": True}}},
    {"monitoring": {"rules": {"runbookUrl": "docs/runbook.md"}}},
)

RIGHT: tuple[dict[str, Any], ...] = (
    {
        "storage": {
            "weights": {"emptyDir": {"sizeLimit": "100Gi"}},
            "artifacts": {"objectStore": {"uri": "s3://b-1/a/b"}},
        }
    },
    {"storage": {"weights": {"pvcTemplate": {"size": "1Ti"}}, "artifacts": {"pvcTemplate": {"size": 1073741824}}}},
    {"storage": {"weights": {"persistentVolumeClaim": {"claimName": "models.a", "subPath": "a/b"}}}},
    {"storage": {"imageVolumes": True}},
    {"storage": {"keepDays": 90}},
)


def merged(values: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """Merges values over those of the chart as helm does."""
    return {
        **values,
        **{
            key: merged(values[key], value) if isinstance(value, dict) and isinstance(values.get(key), dict) else value
            for key, value in over.items()
        },
    }


WITH_IMAGES = merged(VALUES, {"image": {"operator": "registry.test/operator:1", "runtime": "registry.test/runtime:1"}})


def test_the_values_schema_is_valid_and_accepts_the_defaults_with_images() -> None:
    jsonschema.Draft7Validator.check_schema(SCHEMA)
    jsonschema.validate(WITH_IMAGES, SCHEMA)
    refused = {error.json_path for error in jsonschema.Draft7Validator(SCHEMA).iter_errors(VALUES)}
    assert refused == {"$.image.operator", "$.image.runtime"}


@pytest.mark.parametrize("values", RIGHT, ids=json.dumps)
def test_the_operator_reads_every_place_that_the_schema_accepts(values: dict[str, Any]) -> None:
    jsonschema.validate(merged(WITH_IMAGES, values), SCHEMA)
    loaded = load(["--runtime-image", "i", "--storage", json.dumps(merged(WITH_IMAGES, values)["storage"])], {})
    read = json.loads(msgspec.json.encode(loaded.models.storage))
    assert {key: place for key, place in read.items() if place} == values["storage"]


def test_the_operator_reads_the_types_that_the_schema_accepts() -> None:
    values = {"instanceTypes": ["inf2.24xlarge", "trn2u.48xlarge"]}
    jsonschema.validate(merged(WITH_IMAGES, {"provisionable": values}), SCHEMA)
    loaded = load(["--runtime-image", "i", "--provisionable", json.dumps(values)], {})
    assert loaded.models.provisionable.instance_types == ("inf2.24xlarge", "trn2u.48xlarge")


def test_the_operator_reads_the_engines_and_defaults_that_the_schema_accepts() -> None:
    defaults = {"trn2": "vllm", "trn3": "vllm", "inf2": "nxdi", "trn1": "transformers-neuronx"}
    values = {"vllm": {"image": "v:1", "version": "0.29"}, "defaults": defaults}
    jsonschema.validate(merged(WITH_IMAGES, {"engines": values}), SCHEMA)
    assert load(["--runtime-image", "i", "--engines", json.dumps(values)], {}).models.engine_defaults == defaults
    allowed = SCHEMA["properties"]["engines"]["properties"]["defaults"]
    assert allowed["propertyNames"]["enum"] == list(FAMILIES)
    assert allowed["additionalProperties"]["enum"] == [name for name, row in ENGINES.items() if row.on_device]


@pytest.mark.parametrize("values", WRONG, ids=json.dumps)
def test_an_ignored_or_invalid_value_is_refused(values: dict[str, Any]) -> None:
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(merged(WITH_IMAGES, values), SCHEMA)


def test_values_that_lack_a_default_are_refused_by_name() -> None:
    """As `helm upgrade --reuse-values` leaves out what the new chart has and the old one had not."""
    for key, part in WITH_IMAGES.items():
        assert key in SCHEMA["required"]
        for name in part if isinstance(part, dict) and key != "resources" else ():
            lacking = {**WITH_IMAGES, key: {other: value for other, value in part.items() if other != name}}
            with pytest.raises(jsonschema.ValidationError, match=f"'{name}' is a required property"):
                jsonschema.validate(lacking, SCHEMA)


def test_every_value_has_a_default_and_a_type() -> None:
    assert set(SCHEMA["properties"]) - {"global", "enabled"} == set(VALUES)  # of a chart that depends on this one


def test_uninstalling_the_chart_keeps_the_crd() -> None:
    resource = yaml.safe_load((CHART / "files" / "neuronmodels.yaml").read_text())
    assert resource["metadata"]["annotations"]["helm.sh/resource-policy"] == "keep"
    assert not (CHART / "crds").exists(), "helm never upgrades files in a chart's crds folder"


def test_chart_and_project_have_the_same_version() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    version = re.search(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert version is not None
    assert {chart["version"], str(chart["appVersion"])} == {version[1]}
