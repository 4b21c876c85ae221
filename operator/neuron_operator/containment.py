"""Whether a live object already contains everything desired. Passes check this before every write, so that an
unchanged model causes none.

A live object may legitimately differ from what was applied: the API server adds defaults, drops empty values and
normalizes quantities, and other managers add fields. The object's `managedFields` name the fields that are ours and the
lists that are merged by key, so no schema is needed. Their format:
https://kubernetes.io/docs/reference/using-api/server-side-apply/#field-management.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from kubernetes.utils.quantity import parse_quantity

from neuron_operator.names import FIELD_MANAGER, STATUS_FIELD_MANAGER
from neuron_operator.world import Object

Fields = Mapping[str, Any]
"""A `fieldsV1` tree: `f:name` a field, `k:{...}` a list item by its key, `v:...` a set member, `.` the node itself."""

_QUANTITY_PARENTS = frozenset({"limits", "requests"})
_QUANTITY_FIELDS = frozenset({"sizeLimit", "divisor"})


def needs_apply(desired: Object, live: Object, subresource: str = "") -> bool:
    """Whether applying `desired` would change `live`: a field is missing, differs, is no longer marked as ours (another
    manager replaced its parent), or is ours and no longer desired."""
    entries = list(own_entries(live, subresource))
    owned = _union(entry.get("fieldsV1") or {} for entry in entries)
    identity = _tree(("f:apiVersion",), ("f:kind",), ("f:metadata", "f:name"), ("f:metadata", "f:namespace"))
    if not _contained(desired, live, _union((owned, identity))):
        return True
    return any(_has_surplus(_chosen(entry), desired) for entry in entries)


def _chosen(entry: Object) -> Fields:
    """The fields of an entry that came from us. A create's entry also contains the defaults of the API server, which
    has none for labels and annotations."""
    fields: Fields = entry.get("fieldsV1") or {}
    if entry.get("operation") == "Apply":
        return fields
    metadata = fields.get("f:metadata", {})
    return {"f:metadata": {name: metadata[name] for name in ("f:labels", "f:annotations") if name in metadata}}


def own_entries(live: Object, subresource: str = "") -> Iterable[Object]:
    """The `managedFields` entries of this operator for the object or a subresource."""
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
    if isinstance(desired, Mapping):
        if not isinstance(live, Mapping):
            return False
        return all(
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
        desired, live = _quantity(desired), _quantity(live)
    return bool(desired == live)


def _item_fields(owned: Fields, item: Any) -> Fields | None:
    """Our fields of a live list item; None: the item is not ours."""
    for key, below in owned.items():
        mark, _, text = key.partition(":")
        if mark == "v" and json.loads(text) == item:
            return {}
        if mark == "k" and all(item.get(name) == value for name, value in json.loads(text).items()):
            fields: Fields = below
            return fields
    return None


def _has_surplus(owned: Fields, desired: Any) -> bool:
    """Whether `owned`, the fields applied last, contains one that `desired` no longer has."""
    for key, below in owned.items():
        mark, _, name = key.partition(":")
        if mark == "f":
            if not isinstance(desired, Mapping) or name not in desired:
                return True
            if _has_surplus(below, desired[name]):
                return True
        elif mark == "k":
            identity = json.loads(name)
            # A key may contain a default that `desired` omits, such as the protocol of a port.
            item = next((i for i in desired or () if all(i.get(n, v) == v for n, v in identity.items())), None)
            if item is None or _has_surplus(below, item):
                return True
        elif mark == "v" and json.loads(name) not in (desired or ()):
            return True
    return False


def _union(trees: Iterable[Fields]) -> dict[str, Any]:
    merged: dict[str, Any] = {}
    for tree in trees:
        for key, below in tree.items():
            merged[key] = _union((merged.get(key, {}), below))
    return merged


def _tree(*paths: tuple[str, ...]) -> dict[str, Any]:
    return _union({path[0]: _tree(path[1:]) if path[1:] else {}} for path in paths)


def _quantity(value: Any) -> Any:
    """A quantity as a number; anything else comes back unchanged."""
    try:
        return parse_quantity(value)
    except (ValueError, ArithmeticError):
        return value
