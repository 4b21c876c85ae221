"""Devices by claim (DRA) on real kubelets: one node of the cluster has a driver in place of the device plugin, and the
same manifest is served on both."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from cluster.rig.claims import devices_by_claim
from cluster.rig.images import NEURON_TARGET
from cluster.rig.rig import Rig
from cluster.rig.shared_storage import shared_volume
from cluster.servers import hub_in_pod
from cluster.stories import (
    ANSWERS,
    ARTIFACTS_CLAIM,
    ASK,
    CLAIMS_OF_THE_CHART,
    WEIGHTS_CLAIM,
    Story,
    install,
    labelled,
    load_images,
    uninstall,
)
from neuron_operator.api import names

pytestmark = [pytest.mark.cluster, pytest.mark.long, pytest.mark.timeout(1800, func_only=True)]

PLUGIN_NODE, CLAIMS_NODE, JOBS_NODE = "n1", "n2", "n3"
TYPE = "trn1.32xlarge"
"""A type with the driver; the nodes of this cluster are of Inf2, which has none."""
IS_TRN1 = {"name": "FAKE_NXDI_PLATFORM", "value": "trn1"}
"""Otherwise the fake runtime of Inf2 would refuse graphs for another family."""
QUESTION = "What is a NeuronModel?"


@pytest.fixture
def story(rig: Rig, namespace: str) -> Iterator[Story]:
    images = load_images(rig, NEURON_TARGET)
    with ExitStack() as undo:
        where = {"node": JOBS_NODE, "models": {"demo/small": 0}}
        hub = undo.enter_context(hub_in_pod(rig, f"hub-{uuid.uuid4().hex[:8]}", images.runtime, **where))
        undo.enter_context(labelled(rig, CLAIMS_NODE, names.INSTANCE_TYPE_LABEL, TYPE))
        undo.enter_context(devices_by_claim(rig, CLAIMS_NODE, TYPE))
        undo.callback(uninstall, rig)
        jobs = {
            "env": [{"name": "HF_ENDPOINT", "value": hub.endpoint}],
            "resources": {"requests": {"cpu": "100m"}},
        }
        values = {"jobs": jobs, "storage": CLAIMS_OF_THE_CHART, "devices": {"mode": "Auto"}}
        install(rig, images, values=values)
        undo.enter_context(shared_volume(rig, namespace, WEIGHTS_CLAIM))
        undo.enter_context(shared_volume(rig, namespace, ARTIFACTS_CLAIM))
        yield Story(rig, namespace)


def test_a_model_is_served_on_devices_that_its_pods_claim_beside_one_on_devices_of_the_plugin(story: Story) -> None:
    trn1 = {"accelerator": {"devices": 4}, "engine": {"env": [IS_TRN1]}, **_on(TYPE)}
    story.apply(_model("claimed", **trn1))
    story.apply(_model("granted", **_on("inf2.24xlarge")))
    for model in ("claimed", "granted"):
        story.until_ready(1, model)
        (pod,) = story.ready_pods(model)
        url = f"http://{model}.{story.namespace}.svc.cluster.local:{names.PORT}"
        image = pod["spec"]["containers"][0]["image"]
        assert story.run_client(image, f"asks-{model}", ASK, url, model, QUESTION) == ANSWERS[QUESTION]
    (claimed,), (granted,) = story.ready_pods("claimed"), story.ready_pods("granted")
    assert (claimed["spec"]["nodeName"], granted["spec"]["nodeName"]) == (CLAIMS_NODE, PLUGIN_NODE)
    assert story.minors_seen(claimed) == _devices_of(story, claimed)
    assert len(story.minors_seen(granted)) == 1

    # An edit without spare devices: the two that are left are no set of four.
    story.apply(_model("claimed", serving={"maxQueuedRequests": 7}, **trn1))
    story.until("up to date", lambda: story.condition("claimed", "UpToDate")["status"] == "True")
    story.until_ready(1, "claimed")
    (after,) = story.ready_pods("claimed")
    assert after["metadata"]["uid"] != claimed["metadata"]["uid"]
    assert story.minors_seen(after) == _devices_of(story, after)


def _on(instance_type: str) -> dict[str, Any]:
    return {"podTemplate": {"spec": {"nodeSelector": {names.INSTANCE_TYPE_LABEL: instance_type}}}}


def _model(name: str, **spec: Any) -> dict[str, Any]:
    return {
        "apiVersion": names.API_VERSION,
        "kind": names.KIND,
        "metadata": {"name": name},
        "spec": {"model": {"uri": "hf://demo/small"}, **spec},
    }


def _devices_of(story: Story, pod: dict[str, Any]) -> set[int]:
    """Numbers of the devices that the scheduler gave the claim of a pod."""
    (claimed,) = pod["status"]["resourceClaimStatuses"]
    claim = json.loads(story.kubectl("get", "resourceclaim", claimed["resourceClaimName"], "-o", "json"))
    results = claim["status"]["allocation"]["devices"]["results"]
    return {int(one["device"].removeprefix("neurondevice")) for one in results}
