"""Kind, name, labels and owner of every child, for the other builders."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from neuron_operator.api import names
from neuron_operator.api.model import NeuronModel
from neuron_operator.read.world import Object


def child(
    model: NeuronModel,
    api_version: str,
    kind: str,
    name: str,
    *,
    component: str,
    labels: Mapping[str, str] | None = None,
) -> Object:
    """An object in the model's namespace, owned by the model; the caller adds spec or data."""
    owner = {**owner_reference(model), "controller": True}
    all_labels = {**names.labels(model.name, component), **(labels or {})}
    return _frame(model, api_version, kind, name, labels=all_labels, owner=owner)


def shared(
    model: NeuronModel,
    api_version: str,
    kind: str,
    name: str,
    *,
    component: str,
    labels: Mapping[str, str] | None = None,
) -> Object:
    """An object that the models of the namespace share: equal for all of them but for the owner, who is one of them."""
    all_labels = {**names.shared_labels(component), **(labels or {})}
    return _frame(model, api_version, kind, name, labels=all_labels, owner=owner_reference(model))


def _frame(model: NeuronModel, api_version: str, kind: str, name: str, *, labels: Object, owner: Object) -> Object:
    metadata = {"name": name, "namespace": model.namespace, "labels": labels, "ownerReferences": [owner]}
    return {"apiVersion": api_version, "kind": kind, "metadata": metadata}


def owner_reference(model: NeuronModel) -> Object:
    return {"apiVersion": names.API_VERSION, "kind": names.KIND, "name": model.name, "uid": model.uid}


def without_empty(value: Mapping[str, Any]) -> dict[str, Any]:
    """`value` without None and empty strings, lists and objects."""
    return {key: item for key, item in value.items() if item is not None and item not in ("", [], (), {})}
