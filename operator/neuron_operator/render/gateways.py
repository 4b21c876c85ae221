"""What gateways of others read about a model: an InferencePool of its replicas, and the names of its adapters.

Called by `decide` where the chart's `gateway.inferencePools` is on. Sources: api/v1 of the Gateway API Inference
Extension (v1.6), and the payload processor of llm-d, which finds the base model of a name in such a ConfigMap.
"""

from __future__ import annotations

import json
from collections.abc import Iterable

from neuron_operator.api import names
from neuron_operator.api.model import NeuronModel
from neuron_operator.read.world import InferencePools, Object
from neuron_operator.render.adapters import listed
from neuron_operator.render.objects import child, without_empty

MANAGED = {"inference.llm-d.ai/ipp-managed": "true"}
"""Label of the ConfigMaps that the payload processor reads."""
MODEL = "NAME"
"""In the name of the picker's Service: the model's name."""


def inference_pool(model: NeuronModel, settings: InferencePools) -> Object:
    """Its endpoints are the ready leaders, as of the model's Service."""
    picker: Object = {}
    if settings.picker:
        picker = {
            "kind": "Service",
            "name": settings.picker.replace(MODEL, model.name),
            "port": {"number": settings.picker_port},
        }
    spec = {
        "selector": {"matchLabels": names.serving_selector(model.name)},
        "targetPorts": [{"number": names.PORT}],
        "endpointPickerRef": picker,
    }
    return child(model, names.POOL_API, names.POOL_KIND, model.name, spec=without_empty(spec))


def adapter_names(model: NeuronModel, adapters: Iterable[Object]) -> Object:
    """The names under which clients reach the model through its adapters: those that replicas serve, or load, or will
    serve once the model wakes. Whether an adapter is ready changes with each replica that starts."""
    served = [one["name"] for one in listed(adapters)]
    data = {"baseModel": (model.spec.model.served_names or (model.name,))[0], "adapters": json.dumps(served)}
    return child(model, "v1", "ConfigMap", names.routed_name(model.name), labels=MANAGED, data=data)
