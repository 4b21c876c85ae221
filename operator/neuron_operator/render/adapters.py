"""The list of a model's adapters, as its replicas read it. Called by `decide`. Pure.

It is one ConfigMap, which kubelets bring up to date in running pods: no restart, no call into a pod, and no Secret in
it. The runtime reads the list once a second and leaves everything as it is while the list is invalid.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from neuron_operator.api import names
from neuron_operator.api.adapter import ServedAdapter
from neuron_operator.api.model import NeuronModel
from neuron_operator.read.objects import dig, name_of, text
from neuron_operator.read.world import Object
from neuron_operator.render.objects import child

MAX_LISTED, MAX_LIST_BYTES = 256, 384 * 1024
"""Of one list, the oldest adapters first: the ConfigMap has to stay far below what the API server, and the operator's
watch, take as one object. Few addresses are long enough for the second to matter."""

Entry = Mapping[str, str]


def served_of(adapter: Object) -> ServedAdapter | None:
    """What the status of a NeuronAdapter says is served; None: nothing yet, or only on another model."""
    try:
        served = msgspec.convert(dig(adapter, "status", "served"), ServedAdapter)
    except msgspec.ValidationError:
        return None
    return served if served.model == text(adapter, "spec", "model") else None


def listed(adapters: Iterable[Object]) -> Sequence[Entry]:
    """Of the NeuronAdapters that name a model, those that passed their steps and have room, by name."""
    oldest_first = sorted(adapters, key=lambda one: (text(one, "metadata", "creationTimestamp"), name_of(one)))
    found: list[Entry] = []
    num_bytes = 0
    for adapter in oldest_first:
        if len(found) == MAX_LISTED:
            break
        served = served_of(adapter)
        if served is not None and num_bytes + _weight(entry := _entry(name_of(adapter), served)) <= MAX_LIST_BYTES:
            found.append(entry)
            num_bytes += _weight(entry)
    return sorted(found, key=lambda one: one["name"])


def adapter_list(model: NeuronModel, adapters: Iterable[Object]) -> Object:
    """The ConfigMap that replicas read."""
    document = {"adapters": listed(adapters)}
    written = json.dumps(document, indent=2, ensure_ascii=False) + "\n"
    return child(model, "v1", "ConfigMap", names.adapters_name(model.name), data={names.ADAPTERS_KEY: written})


def num_before(adapter: str, served: ServedAdapter, config_map: Object | None) -> int:
    """How many other adapters leave no room for it in this list; 0: the list has it, or could have it."""
    try:
        listed = msgspec.json.decode(text(config_map, "data", names.ADAPTERS_KEY), type=_List).adapters
    except msgspec.MsgspecError:
        return 0  # there is no list yet, or somebody else wrote it
    if any(one.get("name") == adapter for one in listed):
        return 0
    is_full = len(listed) >= MAX_LISTED or sum(map(_weight, (*listed, _entry(adapter, served)))) > MAX_LIST_BYTES
    return len(listed) if is_full else 0


class _List(msgspec.Struct):
    adapters: list[dict[str, str]]


def _entry(name: str, served: ServedAdapter) -> Entry:
    return {"name": name, "uri": served.uri, "digest": served.digest, "sourceDigest": served.source_digest or ""}


def _weight(entry: Entry) -> int:
    """Its bytes as the API server gets it: JSON in a string of JSON."""
    return len(json.dumps(json.dumps(entry, indent=2, ensure_ascii=False), ensure_ascii=False).encode())
