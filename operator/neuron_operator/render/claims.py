"""What the pods of a revision claim of the Neuron DRA driver, and the template of these claims.

Called by `decide.pin`, by `render.pods` and by `decide`, where nodes give devices by claims (`Placement.by_claim`). The
device plugin has no part in it. Fields and attributes are those of the guide of the driver (Neuron SDK, dra.rst).
"""

from __future__ import annotations

from neuron_operator.api import names
from neuron_operator.api.model import NeuronModel
from neuron_operator.place.planner import Choice
from neuron_operator.read.world import Object
from neuron_operator.render.objects import child, without_empty

DEVICES = "devices"
NETWORK = "efa"
"""Names of the requests in a claim."""
IS_DEVICE = f'device.attributes["{names.DEVICE_DRIVER}"].?resourceType.orValue("neuron_device") == "neuron_device"'
"""The driver also offers whole nodes of UltraServers. Drivers before them have no such attribute."""


def claim_spec(choice: Choice | None) -> Object:
    """The spec of the claim of each pod; empty: its devices come from the device plugin, or it has none.

    Several devices are connected ones: those that share the driver's id of a set of that size. A group's pods have the
    network interfaces that are nearest to their devices.
    """
    if choice is None or not choice.placement.by_claim:
        return {}
    site, placement = choice.chosen.site, choice.placement
    has_network = placement.nodes > 1 and site.efa > 0
    requests = [_request(DEVICES, names.DEVICE_DRIVER, placement.devices, IS_DEVICE)]
    if has_network:
        share = site.efa * placement.devices // max(site.devices, placement.devices)
        requests.append(_request(NETWORK, names.EFA_CLASS, max(1, share)))
    constraints = []
    if placement.devices > 1 or has_network:
        constraints.append(
            {"requests": [one["name"] for one in requests], "matchAttribute": set_of(placement.devices, site.efa)}
        )
    config = []
    if site.family.logical_core > 1:
        parameters = {
            "apiVersion": f"{names.DEVICE_DRIVER}/v1",
            "kind": "NeuronConfig",
            "logicalNeuronCore": choice.chosen.logical_core,
        }
        config.append({"requests": [DEVICES], "opaque": {"driver": names.DEVICE_DRIVER, "parameters": parameters}})
    return {"devices": without_empty({"requests": requests, "constraints": constraints, "config": config})}


def set_of(size: int, efa: int) -> str:
    """The attribute that connected devices share. Only nodes with EFA have the first."""
    return f"resource.aws.com/devicegroup{size}_id" if efa else f"{names.DEVICE_DRIVER}/topology{size}_id"


def _request(name: str, device_class: str, count: int, selector: str = "") -> Object:
    selectors = [{"cel": {"expression": selector}}] if selector else []
    exactly = {"deviceClassName": device_class, "selectors": selectors, "allocationMode": "ExactCount", "count": count}
    return {"name": name, "exactly": without_empty(exactly)}


def claim_template(model: NeuronModel, spec: Object) -> Object:
    """What the pods of a revision name. Kubernetes makes a claim for each pod, which goes with it."""
    name = names.claim_name(model.name, spec)
    return child(model, names.CLAIM_API, names.CLAIM_TEMPLATE, name, spec={"spec": spec})


def in_pod(model: NeuronModel, spec: Object) -> Object:
    """The pod's field."""
    if not spec:
        return {}
    return {"resourceClaims": [{"name": names.CLAIM, "resourceClaimTemplateName": names.claim_name(model.name, spec)}]}
