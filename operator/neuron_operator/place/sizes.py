"""Placement: the devices of one replica and the nodes it may run on, or Unplaceable with the numbers.

Called when a revision is pinned (`place`), by `planner`, which chooses what the manifest leaves open, by the renderer
(`size_rule`), and by `why` to describe the nodes that match a pod (`describe_free`, `describe_sizes`). Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from neuron_operator.api import names
from neuron_operator.api.errors import Unplaceable
from neuron_operator.api.model import NeuronModel
from neuron_operator.api.reasons import Reason
from neuron_operator.place.catalog import INSTANCE_TYPES, claimed_sizes, label_values, type_named
from neuron_operator.read.placement import NodeRules, Placement
from neuron_operator.read.world import BY_PLUGIN, FreeDevices, Granting, Object, Settings


def place(model: NeuronModel, settings: Settings) -> Placement:
    """The devices or cores of the manifest, or one device, before a node is chosen. Raises Unplaceable for a size that
    no node grants."""
    accelerator = model.spec.accelerator
    holds_devices = accelerator.type != "CPU" and accelerator.cores is None
    placement = Placement(
        devices=(accelerator.devices or 1) if holds_devices else 0,
        cores=accelerator.cores or 0,
        instance_type=model.spec.pod_template.spec.node_selector.get(names.INSTANCE_TYPE_LABEL, ""),
        nodes=model.spec.parallelism.nodes or 1,
    )
    if placement.on_devices:
        _check(placement, settings.grantings)
    return placement


NAME_THE_TYPE = f"name the type in podTemplate.spec.nodeSelector[{names.INSTANCE_TYPE_LABEL}]"


def legal_sizes(instance_type: str, devices: int, granting: Granting, *, in_cores: bool) -> tuple[int, ...]:
    """What a pod may ask of a node, ascending; empty if that is unknown.

    Args:
        devices: of the node; 0: unknown.
        in_cores: whether it asks for cores instead of devices.
    """
    kind = type_named(instance_type)
    if kind is not None:
        sizes = kind.sizes(granting, in_cores=in_cores)
        return sizes if in_cores else tuple(size for size in sizes if size <= (devices or kind.devices))
    if in_cores or not devices:
        return ()
    if granting == "DRA":
        return claimed_sizes(devices)
    return tuple(range(1, devices + 1)) if granting == "PluginWithExtension" else tuple(sorted({1, devices}))


def size_rule(placement: Placement, granting: Granting) -> Object | None:
    """The node affinity that keeps a pod off the known instance types whose kubelets would refuse its size; None if
    there are none, or the manifest names the type, or its claim says so."""
    refusing = () if placement.instance_type or placement.by_claim else _refusing(placement, granting)
    if not refusing:
        return None
    return {"key": names.INSTANCE_TYPE_LABEL, "operator": "NotIn", "values": label_values(refusing)}


def describe_free(free: FreeDevices | None, placement: Placement, rules: NodeRules) -> str:
    """A clause for a condition: the number of free devices in total and per node, or that it is unknown."""
    if free is None:
        return "free: not counted yet"
    if free.nodes is None:
        return "free: unknown (the operator may not list nodes and pods)"
    usable = [node for node in free.nodes if placement.fits_on(node, rules)]
    if not usable:
        return "free: 0 (no ready node that it may use offers any)"
    by_node = {node.name: placement.free_on(node) for node in usable}
    shown = sorted(by_node.items(), key=lambda item: (-item[1], item[0]))[:MAX_NODES_SHOWN]
    more = ", ..." if len(by_node) > len(shown) else ""
    apart = "" if any(placement.has_room_on(node, rules) for node in usable) else _not_connected(by_node, placement)
    return f"free: {sum(by_node.values())} ({', '.join(f'{name} {count}' for name, count in shown)}{more}){apart}"


def _not_connected(by_node: Mapping[str, int], placement: Placement) -> str:
    """Said where a node has as many free devices as are needed, but no such set of connected ones."""
    return f", no {placement.size} connected" if max(by_node.values()) >= placement.size > 1 else ""


def describe_sizes(free: FreeDevices | None, placement: Placement, rules: NodeRules) -> str | None:
    """Why no node that the manifest allows grants this size; None if one does, or there is none or they are unknown."""
    for granting in BY_PLUGIN:
        rule = size_rule(placement, granting)
        if rule is not None and any(rule in term for term in rules.terms):
            allowed = [node for node in (free and free.nodes) or () if rules.without(rule).accept(node)]
            if not allowed or any(node.instance_type not in rule["values"] for node in allowed):
                return None
            shown = ", ".join(sorted(node.name for node in allowed)[:MAX_NODES_SHOWN])
            types = sorted({node.instance_type for node in allowed})
            others = sorted(INSTANCE_TYPES.keys() - set(rule["values"]))
            return (
                f"{_not_a_size(placement, f'the nodes of this model ({shown}) grant', types, (granting,))}; or add a "
                f"node of a type that grants it, such as {', '.join(others)}"
            )
    return None


MAX_NODES_SHOWN = 8


def _refusing(placement: Placement, *grantings: Granting) -> tuple[str, ...]:
    """Names of the known instance types that grant this size in none of these ways."""
    in_cores = bool(placement.cores)
    sizes = {
        name: {size for granting in grantings for size in kind.sizes(granting, in_cores=in_cores)}
        for name, kind in INSTANCE_TYPES.items()
    }
    return tuple(sorted(name for name, granted in sizes.items() if placement.size not in granted))


def _check(placement: Placement, grantings: Sequence[Granting]) -> None:
    """Raises Unplaceable unless the given instance type, or any if none is given, grants the size."""
    if placement.cores and "DRA" in grantings and len(grantings) == 1:
        text = "spec.accelerator.cores: claims (chart value devices.mode: DRA) have whole devices: set devices"
        raise Unplaceable(Reason.TOPOLOGY_IMPOSSIBLE, text)
    refusing, named = _refusing(placement, *grantings), placement.instance_type
    if named in label_values(refusing):
        raise Unplaceable(Reason.TOPOLOGY_IMPOSSIBLE, _not_a_size(placement, f"{named} grants", (named,), grantings))
    if not named and len(refusing) == len(INSTANCE_TYPES):
        text = _not_a_size(placement, "any known instance type grants", refusing, grantings)
        raise Unplaceable(Reason.TOPOLOGY_IMPOSSIBLE, text)


def _not_a_size(placement: Placement, who_grants: str, types: Iterable[str], grantings: Sequence[Granting]) -> str:
    in_cores = bool(placement.cores)
    field = "cores" if in_cores else "devices"
    kinds = [kind for kind in map(type_named, types) if kind]
    sizes = sorted({size for kind in kinds for one in grantings for size in kind.sizes(one, in_cores=in_cores)})
    if not sizes:
        return f"{who_grants} no devices by claims (chart value devices.mode): set it to Auto, or use other nodes"
    hint = "; other sizes need the scheduler extension (chart value devices.mode)" if grantings == ("Plugin",) else ""
    return (
        f"spec.accelerator.{field}: {placement.size} is not a size that {who_grants} to one pod; "
        f"choose one of {_ranges(sizes)}{hint}"
    )


def _ranges(numbers: list[int]) -> str:
    """`1, 6, 12` or `1-12, 16`."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
