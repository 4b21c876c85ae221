"""Whether a live object already contains everything desired. Passes check this before every write, so that an
unchanged model causes none.

The API server adds defaults, drops empty values and normalizes quantities, and other managers add fields. The object's
`managedFields` name the fields that are ours and the lists that are merged by key, so no schema is needed:
https://kubernetes.io/docs/reference/using-api/server-side-apply/#field-management.
"""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import msgspec
from kubernetes.utils.quantity import parse_quantity

from neuron_operator.api.names import FIELD_MANAGER, STATUS_FIELD_MANAGER
from neuron_operator.read.world import Object

Fields = Mapping[str, Any]
"""A `fieldsV1` tree: `f:name` a field, `k:{...}` a list item by its key, `v:...` a set member, `.` the node itself."""

_QUANTITY_PARENTS = frozenset({"limits", "requests"})
_QUANTITY_FIELDS = frozenset({"sizeLimit", "divisor"})


def needs_apply(desired: Object, live: Object, subresource: str = "") -> bool:
    """Whether applying `desired` would change `live`: a field is missing, differs, is no longer marked as ours (another
    manager replaced its parent), or is ours and no longer desired."""
    entries = list(own_entries(live, subresource))
    owned = _union([*(entry.get("fieldsV1") or {} for entry in entries), _IDENTITY])
    if not _contained(desired, live, owned):
        return True
    return any(_has_surplus(_chosen(entry), desired) for entry in entries)


class Contained:
    """`needs_apply` of objects that are compared again and again: a version of a live object that contains what is
    desired is not compared with the same again."""

    def __init__(self, max_size: int = 8192) -> None:
        self._max_size = max_size
        self._found: OrderedDict[str, tuple[str, bytes]] = OrderedDict()
        """By UID: the version, and a hash of what it contains."""

    def needs_apply(self, desired: Object, live: Object) -> bool:
        uid, version = live["metadata"]["uid"], live["metadata"]["resourceVersion"]
        seen = version, hashlib.blake2b(msgspec.json.encode(desired), digest_size=16).digest()
        if self._found.get(uid) == seen:
            return False
        if needs_apply(desired, live):
            return True
        self._found[uid] = seen
        self._found.move_to_end(uid)
        if len(self._found) > self._max_size:
            self._found.popitem(last=False)
        return False


def _chosen(entry: Object) -> Fields:
    """The fields of an entry that came from us. A create's entry also contains the defaults of the API server, which
    has none for labels and annotations."""
    fields: Fields = entry.get("fieldsV1") or {}
    if entry.get("operation") == "Apply":
        return fields
    metadata = fields.get("f:metadata", {})
    return {"f:metadata": {name: metadata[name] for name in ("f:labels", "f:annotations") if name in metadata}}


def own_entries(live: Object, subresource: str = "") -> Iterable[Object]:
    manager = STATUS_FIELD_MANAGER if subresource else FIELD_MANAGER
    for entry in live.get("metadata", {}).get("managedFields") or ():
        if (entry.get("manager"), entry.get("subresource", "")) == (manager, subresource):
            yield entry


def _contained(
    desired: Any, live: Any, owned: Fields | None, *, is_quantity: bool = False, children_are: bool = False
) -> bool:
    """`owned` None: the field is not ours. A leaf owns everything below it."""
    if live is None and not desired:
        return True  # the API server drops empty values
    if owned is None:
        return False
    if not owned and desired == live:
        return True
    if isinstance(desired, dict):
        return isinstance(live, dict) and all(
            _contained(
                value,
                live.get(name),
                owned.get(f"f:{name}") if owned else owned,
                is_quantity=children_are or name in _QUANTITY_FIELDS,
                children_are=name in _QUANTITY_PARENTS,
            )
            for name, value in desired.items()
        )
    if isinstance(desired, list | tuple):
        if not isinstance(live, list):
            return False
        if not owned:  # atomic: order and length count
            return len(desired) == len(live) and all(
                _contained(item, other, owned) for item, other in zip(desired, live, strict=True)
            )
        # Merged by key: others may have added items, and the order has no meaning.
        return all(any(_contained(item, other, _item_fields(owned, other)) for other in live) for item in desired)
    if is_quantity:
        desired, live = quantity(desired), quantity(live)
    return bool(desired == live)


def _item_fields(owned: Fields, item: Any) -> Fields | None:
    """Our fields of a live list item; None: the item is not ours."""
    for key, below in owned.items():
        mark, _, text = key.partition(":")
        if mark == "v" and _key(text) == item:
            return {}
        if mark == "k" and all(item.get(name) == value for name, value in _key(text).items()):
            fields: Fields = below
            return fields
    return None


def _has_surplus(owned: Fields, desired: Any) -> bool:
    """Whether `owned`, the fields applied last, contains one that `desired` no longer has."""
    for key, below in owned.items():
        mark, _, name = key.partition(":")
        if mark == "f":
            if not isinstance(desired, dict) or name not in desired or _has_surplus(below, desired[name]):
                return True
        elif mark == "k":
            identity = _key(name)
            # A key may contain a default that `desired` omits, such as the protocol of a port.
            item = next((i for i in desired or () if all(i.get(n, v) == v for n, v in identity.items())), None)
            if item is None or _has_surplus(below, item):
                return True
        elif mark == "v" and _key(name) not in (desired or ()):
            return True
    return False


def _union(trees: Sequence[Fields]) -> Fields:
    """Parts that only one of the trees has are not copied."""
    if len(trees) == 1:
        return trees[0]
    keys = dict.fromkeys(key for tree in trees for key in tree)
    return {key: _union([tree[key] for tree in trees if key in tree]) for key in keys}


_IDENTITY: Fields = {"f:apiVersion": {}, "f:kind": {}, "f:metadata": {"f:name": {}, "f:namespace": {}}}
"""Fields that no entry names."""

_key = lru_cache(maxsize=1024)(json.loads)
"""The key of a list item. The same few are read in every pass; nobody changes what this returns."""


def quantity(value: Any) -> Any:
    """A quantity as a number; anything else comes back unchanged."""
    try:
        return parse_quantity(value)
    except (ValueError, ArithmeticError):
        return value
