"""Kind, name, labels and owner of every child, for the other builders, and the volumes of pods."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from neuron_operator.api import names
from neuron_operator.api.model import NeuronModel
from neuron_operator.read.world import Object

Texts = Mapping[str, str]


def child(
    model: NeuronModel,
    api_version: str,
    kind: str,
    name: str,
    *,
    labels: Texts | None = None,
    annotations: Texts | None = None,
    **content: Any,
) -> Object:
    """An object in the model's namespace, owned by the model; `content` is its spec or data."""
    own = {**names.labels(model.name), **(labels or {})}
    made = shared(model, api_version, kind, name, component="server", labels=own, annotations=annotations, **content)
    made["metadata"]["ownerReferences"] = [{**owner_reference(model), "controller": True}]
    return made


def shared(
    model: NeuronModel,
    api_version: str,
    kind: str,
    name: str,
    *,
    component: str,
    labels: Texts | None = None,
    annotations: Texts | None = None,
    **content: Any,
) -> Object:
    """An object that the models of the namespace share: equal for all of them but for the owner, who is one of them."""
    metadata: Object = {
        "name": name,
        "namespace": model.namespace,
        "labels": {**names.shared_labels(component), **(labels or {})},
        "ownerReferences": [owner_reference(model)],
        **({"annotations": annotations} if annotations else {}),
    }
    return {"apiVersion": api_version, "kind": kind, "metadata": metadata, **content}


def owner_reference(model: NeuronModel) -> Object:
    return {"apiVersion": names.API_VERSION, "kind": model.kind, "name": model.name, "uid": model.uid}


def without_empty(value: Mapping[str, Any]) -> dict[str, Any]:
    """`value` without None and empty strings, lists and objects."""
    return {key: item for key, item in value.items() if item is not None and item not in ("", [], (), {})}


@dataclass(frozen=True)
class Mount:
    """A volume of a pod, and its path in the container."""

    name: str
    path: str
    source: Object
    read_only: bool = False
    sub_path: str = ""
    """The folder of the volume that is mounted; empty: all of it."""

    @property
    def volume(self) -> Object:
        return {"name": self.name, **self.source}

    @property
    def in_container(self) -> Object:
        options = {"readOnly": self.read_only or None, "subPath": self.sub_path}
        return {"name": self.name, "mountPath": self.path, **without_empty(options)}
