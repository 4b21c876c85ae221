"""The list of a model's adapters, as its replicas read it. Called by `decide`. Pure.

It is one ConfigMap, which kubelets bring up to date in running pods: no restart, no call into a pod, and no Secret in
it. The runtime reads the list once a second and leaves everything as it is while the list is invalid.
"""

from __future__ import annotations

import json
from collections.abc import Iterable

import msgspec

from neuron_operator.api import names
from neuron_operator.api.adapter import ServedAdapter
from neuron_operator.api.model import NeuronModel
from neuron_operator.read.objects import dig, name_of, text
from neuron_operator.read.world import Object
from neuron_operator.render.objects import child

MAX_LISTED = 256
"""Adapters of one list, the oldest ones first: the ConfigMap has to stay far below the API server's limit."""


def served_of(adapter: Object) -> ServedAdapter | None:
    """What the status of a NeuronAdapter says is served; None: nothing yet, or only on another model."""
    try:
        served = msgspec.convert(dig(adapter, "status", "served"), ServedAdapter)
    except msgspec.ValidationError:
        return None
    return served if served.model == text(adapter, "spec", "model") else None


def adapter_list(model: NeuronModel, adapters: Iterable[Object]) -> Object:
    """The ConfigMap, from the NeuronAdapters that name the model: those that passed their steps."""
    oldest_first = sorted(adapters, key=lambda one: (text(one, "metadata", "creationTimestamp"), name_of(one)))
    passed = [(name_of(one), served) for one in oldest_first if (served := served_of(one)) is not None]
    listed = [
        {"name": name, "uri": served.uri, "digest": served.digest, "sourceDigest": served.source_digest or ""}
        for name, served in sorted(passed[:MAX_LISTED])
    ]
    document = json.dumps({"adapters": listed}, indent=2, ensure_ascii=False) + "\n"
    return child(model, "v1", "ConfigMap", names.adapters_name(model.name), data={names.ADAPTERS_KEY: document})
