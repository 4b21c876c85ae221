"""Models whose pods claim devices, where the installation changes how devices are given."""

from __future__ import annotations

from dataclasses import replace

from helpers.operator_worlds import find, fresh, having_served, serving_pod, settings, settle, stepped
from neuron_operator.decide.course import decide
from neuron_operator.read.world import FreeDevices, NodeDevices

SPEC = {"model": {"uri": "hf://acme/tiny"}, "engine": {"backend": "nxdi"}, "accelerator": {"devices": 4}, "replicas": 1}
AUTO = settings({"device_mode": "Auto", "storage": {"artifacts": {"objectStore": {"uri": "s3://bucket/artifacts"}}}})
LABELS = {"node.kubernetes.io/instance-type": "trn2.48xlarge"}
NODE = NodeDevices("n1", 16, 16, 0, 0, LABELS, connected={4: 4, 8: 2, 16: 1})


def test_a_model_whose_pods_claim_devices_stays_writable_where_nothing_is_written_about_claims_any_more() -> None:
    """The chart takes away the right to write the template, and pods that claim still need it."""
    world = replace(fresh(spec=SPEC), free=FreeDevices((NODE,)))
    world, decision = stepped(*settle(world, AUTO), AUTO)
    template = find(decision.desired, "ResourceClaimTemplate")["metadata"]["name"]
    pod = serving_pod(find(world.children, "Deployment"), "chat-1", ready=True)
    world, _ = settle(having_served(replace(world, pods=(*world.pods, pod))), AUTO)

    unseen = tuple(child for child in world.children if child["kind"] != "ResourceClaimTemplate")
    scaled = {**world.body, "spec": {**world.body["spec"], "replicas": 2}}
    decision = decide(replace(world, children=unseen, body=scaled), replace(AUTO, device_mode="Plugin"))
    assert "ResourceClaimTemplate" not in {made["kind"] for made in decision.desired}
    made = find(decision.desired, "Deployment")["spec"]
    assert made["replicas"] == 2
    claims = made["template"]["spec"]["resourceClaims"]
    assert claims == [{"name": "neuron", "resourceClaimTemplateName": template}], "no pod moves"
