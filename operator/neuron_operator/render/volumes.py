"""A volume of a pod with its path in the container. Built by `pods` and `storage`, rendered by `pods`."""

from __future__ import annotations

from dataclasses import dataclass

from neuron_operator.read.world import Object


@dataclass(frozen=True)
class Mount:
    """A volume of the pod, and its path in the container."""

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
        return {
            "name": self.name,
            "mountPath": self.path,
            **({"readOnly": True} if self.read_only else {}),
            **({"subPath": self.sub_path} if self.sub_path else {}),
        }
