"""Reads raw Kubernetes objects: missing and wrongly typed parts read as absent. Used by `views` and `revision`."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, TypeVar

from neuron_operator.api import names

Part = TypeVar("Part")


def dig(value: Any, *path: str) -> Any:
    """The value below `path`, or None if a step is missing or not an object."""
    for step in path:
        if not isinstance(value, dict):
            return None
        value = value.get(step)
    return value


def text(value: Any, *path: str) -> str:
    """The string below `path`, else empty."""
    part = dig(value, *path)
    return part if isinstance(part, str) else ""


def printable(line: str) -> str:
    """The text on one line, without characters that control a terminal or the direction of writing."""
    if line.isprintable():
        return line
    return "".join(char if char.isprintable() else " " for char in line)


def items(value: Any, *path: str) -> list[Mapping[str, Any]]:
    """The objects of the list below `path`, else empty."""
    part = dig(value, *path)
    return [item for item in part if isinstance(item, dict)] if isinstance(part, list | tuple) else []


def only(value: Mapping[str, Part], keys: Collection[str]) -> dict[str, Part]:
    """The fields with these keys, as far as there are any."""
    return {key: part for key, part in value.items() if key in keys}


def kind_of(value: Any) -> str:
    return text(value, "kind")


def name_of(value: Any) -> str:
    return text(value, "metadata", "name")


def labels_of(value: Any) -> Mapping[str, str]:
    labels = dig(value, "metadata", "labels")
    return labels if isinstance(labels, dict) else {}


def owners_of(value: Any) -> list[Mapping[str, Any]]:
    return items(value, "metadata", "ownerReferences")


MAX_OWNERS = 8
"""The most owners of an object that many models share, unless several join at once."""


def is_shared(value: Any) -> bool:
    """Whether this is an object of ours that belongs to no single model."""
    return names.MODEL_LABEL not in labels_of(value)


def is_owned(value: Any, uid: str) -> bool:
    """Whether the object with this UID owns `value`."""
    return any(owner.get("uid") == uid for owner in owners_of(value))


MAX_DESCENT = 3
"""From a follower to its model by way of two StatefulSets. Anybody may write owners that go round in a circle."""


def descends(value: Any, uid: str, owners: Mapping[str, Any], most: int = MAX_DESCENT) -> bool:
    """Whether the object with this UID owns `value`, through others of `owners` (by UID) or not. What nobody owns may
    be adopted."""
    uids = [text(owner, "uid") for owner in owners_of(value)]
    return not uids or any(
        one == uid or (most > 1 and one in owners and descends(owners[one], uid, owners, most - 1)) for one in uids
    )


def is_orphan(value: Any) -> bool:
    return not owners_of(value)


def whole(value: Any) -> int:
    """A non-negative integer, as a number or a string; else 0."""
    if isinstance(value, int) and not isinstance(value, bool):
        return max(value, 0)
    is_number = isinstance(value, str) and value.isdecimal() and len(value) < 20
    return int(value) if is_number else 0


_UNITS = {"n": 1e-9, "u": 1e-6, "m": 1e-3, **{unit: 1000.0**power for power, unit in enumerate(("", *"kMGTPE"))}}
_UNITS |= {f"{unit}i": 1024.0**power for power, unit in enumerate("KMGTPE", 1)}


def number_of(quantity: Any) -> float:
    """A quantity such as `500m` or `16Gi` as a number; 0 for anything else."""
    match = re.fullmatch(r"([0-9]{1,18}\.?[0-9]{0,9}|\.[0-9]{1,9})([numkMGTPE]i?|[eE][0-9]{1,2}|)", str(quantity))
    if match is None:
        return 0.0
    number, unit = float(match[1]), match[2]
    return number * _UNITS[unit] if unit in _UNITS else float(f"{number}{unit}") if unit[1:].isdecimal() else 0.0


def requested(pod: Any, resource: str, kinds: Sequence[str] = ("requests", "limits")) -> float:
    """What scheduler and quotas count for a pod: the sum over its containers and sidecars, or its largest init
    container with the sidecars started before it (https://kubernetes.io/docs/concepts/workloads/pods/init-containers/),
    and what its RuntimeClass adds: to requests always, to limits only where there are any.

    kinds: of a container's resources, the first that it has.
    """

    def of(container: Any) -> float:
        given = (dig(container, "resources", kind) for kind in kinds)
        return number_of(dig(next(filter(None, given), {}), resource))

    sidecars = largest = 0.0
    for container in items(pod, "spec", "initContainers"):
        if container.get("restartPolicy") == "Always":
            sidecars += of(container)
        else:
            largest = max(largest, sidecars + of(container))
    held = max(largest, sidecars + sum(map(of, items(pod, "spec", "containers"))))
    if held or "requests" in kinds:
        held += number_of(dig(pod, "spec", "overhead", resource))
    return held


def instant(value: Any) -> datetime | None:
    """A timestamp with time zone, else None."""
    try:
        moment = datetime.fromisoformat(value)
    except (TypeError, ValueError):
        return None
    return moment if moment.tzinfo else None


def written(moment: datetime) -> str:
    """The timestamp as Kubernetes writes it."""
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def rendered_hash(job: Mapping[str, Any]) -> str:
    """Hash of the spec with which the operator created the Job; the API server adds to the spec itself."""
    return text(job, "metadata", "annotations", names.RENDERED_ANNOTATION)
