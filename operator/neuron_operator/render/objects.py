"""The frame that every child has: kind, name, labels, owner. Used by the other builders only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from neuron_operator import names
from neuron_operator.model import NeuronModel
from neuron_operator.world import Object


def child(
    model: NeuronModel,
    api_version: str,
    kind: str,
    name: str,
    *,
    component: str,
    labels: Mapping[str, str] | None = None,
) -> Object:
    """An object of the model's namespace that is collected with the model; the caller adds what it holds."""
    return {
        "apiVersion": api_version,
        "kind": kind,
        "metadata": {
            "name": name,
            "namespace": model.namespace,
            "labels": {**names.labels(model.name, component), **(labels or {})},
            "ownerReferences": [owner_reference(model)],
        },
    }


def owner_reference(model: NeuronModel) -> Object:
    return {
        "apiVersion": names.API_VERSION,
        "kind": names.KIND,
        "name": model.name,
        "uid": model.uid,
        "controller": True,
    }


def without_empty(value: Mapping[str, Any]) -> dict[str, Any]:
    """Leave out what says nothing: None, and empty strings, lists and objects."""
    return {key: item for key, item in value.items() if item is not None and item not in ("", [], (), {})}
