"""The ScaledObjects of `examples` have the fields of KEDA's CRD, as far as they use it: KEDA does not run in the tests.
The HorizontalPodAutoscalers run with real controllers, in `cluster/test_operator_autoscaling.py` and a story."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from neuron_operator.api import names
from neuron_runtime.server.metrics import FAMILIES

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("autoscaling-*.yaml"))
TARGET = {"apiVersion": names.API_VERSION, "kind": names.KIND, "name": "chat"}
HELD = "llm_d_epp_flow_control_queue_size"
"""Of llm-d's endpoint picker, which holds requests for models without replicas."""


def closed(required: str = "", **properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": required.split(),
        "additionalProperties": False,
    }


SECONDS = {"type": "integer", "minimum": 0}
TRIGGER = closed(
    "serverAddress query threshold",
    serverAddress={"type": "string", "pattern": "^https?://"},
    query={"type": "string"},
    threshold={"type": "string", "pattern": "^[0-9.]+$"},
    activationThreshold={"type": "string"},
    ignoreNullValues={"enum": ["true", "false"]},
)
KEDA = closed(
    "scaleTargetRef triggers",
    scaleTargetRef={"const": TARGET},
    pollingInterval=SECONDS,
    cooldownPeriod=SECONDS,
    initialCooldownPeriod=SECONDS,
    idleReplicaCount={"const": 0},
    minReplicaCount=SECONDS,
    maxReplicaCount=SECONDS,
    advanced=closed(horizontalPodAutoscalerConfig=closed(behavior={"type": "object"})),
    triggers={
        "type": "array",
        "minItems": 1,
        "items": closed("type metadata", type={"const": "prometheus"}, metadata=TRIGGER),
    },
)
"""The fields of `keda.sh/v1alpha1` that an example may have; values of a trigger are strings there."""


@pytest.mark.parametrize("path", [path for path in EXAMPLES if "keda" in path.name], ids=lambda path: path.stem)
def test_a_scaled_object_has_the_fields_of_kedas_crd(path: Path) -> None:
    found = yaml.safe_load(path.read_text())
    assert (found["apiVersion"], found["kind"]) == ("keda.sh/v1alpha1", "ScaledObject")
    jsonschema.validate(found["spec"], KEDA)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_autoscaler_asks_for_metrics_that_exist(path: Path) -> None:
    """One that goes to zero also asks for what is held meanwhile: a model without replicas has no series."""
    spec = yaml.safe_load(path.read_text())["spec"]
    assert spec["scaleTargetRef"] == TARGET
    asked = [trigger["metadata"]["query"] for trigger in spec.get("triggers", ())]
    asked += [one["external"]["metric"]["name"] for one in spec.get("metrics", ())]
    used = {name for query in asked for name in re.findall(r"\b(?:vllm:|neuron_|llm_d_)\w+", query)}
    ours = {family.name for family in FAMILIES}
    goes_to_zero = 0 in (spec.get("minReplicas"), spec.get("minReplicaCount"))
    assert used - ours == ({HELD} if goes_to_zero else set())
    assert used & ours
    assert ("vllm:num_requests_running" in used) == goes_to_zero, "a request that runs keeps the last replica"
