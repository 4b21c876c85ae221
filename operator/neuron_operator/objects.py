"""Reading raw Kubernetes objects: missing and oddly typed parts read as absent. Used by the operator's pure middle.

Objects are JSON as the API server sends it; nothing here changes one.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any


def dig(value: Any, *path: str) -> Any:
    """The value below `path`, or None where a step is missing or is not an object."""
    for step in path:
        if not isinstance(value, Mapping):
            return None
        value = value.get(step)
    return value


def items(value: Any, *path: str) -> list[Mapping[str, Any]]:
    """The objects of the list below `path`; empty where there is none."""
    found = dig(value, *path)
    return [item for item in found if isinstance(item, Mapping)] if isinstance(found, list | tuple) else []


def name_of(value: Any) -> str:
    return str(dig(value, "metadata", "name") or "")


def labels_of(value: Any) -> Mapping[str, str]:
    found = dig(value, "metadata", "labels")
    return found if isinstance(found, Mapping) else {}


def condition(value: Any, kind: str) -> Mapping[str, Any]:
    """The condition `kind` of the object's status; empty where there is none."""
    return next((c for c in items(value, "status", "conditions") if c.get("type") == kind), {})


def is_true(value: Any, kind: str) -> bool:
    return condition(value, kind).get("status") == "True"


def is_deleting(value: Any) -> bool:
    return bool(dig(value, "metadata", "deletionTimestamp"))


def whole(value: Any) -> int:
    """A whole number, written as one or as a string; 0 where it is neither."""
    text = str(value)
    return int(text) if text.isdecimal() else 0


def instant(value: Any) -> datetime | None:
    """A time as Kubernetes writes it, with time zone."""
    try:
        found = datetime.fromisoformat(value)
    except (TypeError, ValueError):
        return None
    return found if found.tzinfo else None
