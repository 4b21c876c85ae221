"""What a model is compiled for: made by `planner`, used by the renderer and by the pinned revision.

A value; it decides nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

from neuron_operator.api import names
from neuron_operator.place.catalog import Family, label_values
from neuron_operator.place.sizing import Load, Memory
from neuron_operator.read.placement import counted
from neuron_operator.read.world import Object


@dataclass(frozen=True)
class Target:
    """What a model is compiled for: the same for the Job that compiles it and for all its replicas."""

    family: Family
    logical_core: int
    """Physical cores per logical core."""
    cores: int
    """Logical cores of the devices of a replica, on all its nodes."""
    tensor: int
    """The logical cores that the model runs on: its tensor-parallel degree."""
    instance_types: tuple[str, ...] = ()
    """The types of nodes for it; empty: the manifest names one."""
    site: str = ""
    """The type that it was planned for."""
    load: Load | None = None
    """Length, sequences and blocks; None: the runtime decides."""
    memory: Memory | None = None
    """The memory of each core."""

    @property
    def node_rule(self) -> Object | None:
        """The node affinity that keeps a pod on its family; None if the manifest names the type."""
        if not self.instance_types:
            return None
        return {"key": names.INSTANCE_TYPE_LABEL, "operator": "In", "values": label_values(self.instance_types)}

    @property
    def words(self) -> str:
        return f"tensor-parallel degree {self.tensor} on {counted(self.cores, 'NeuronCore')} of {self.family.name}"
