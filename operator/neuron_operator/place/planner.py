"""Chooses where a compiled model runs: instance type, devices, tensor-parallel degree, length and sequences.

Called when a revision is pinned, and by the command `plan`. Pure. What the manifest names is taken as given; of the
rest, the cheapest that fits is chosen, by the arithmetic of `sizing`: `choose` returns the `Choice`, with everything
that was considered, or raises with the numbers. It chooses a type of node; the scheduler chooses the node.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import partial
from itertools import product
from typing import Any

from msgspec import structs

from neuron_operator.api import names
from neuron_operator.api.engines.engine import CacheBudget, DeviceRules
from neuron_operator.api.errors import InvalidSpec, Unplaceable
from neuron_operator.api.fields import as_json
from neuron_operator.api.model import DEFAULT_MAX_RANK, TARGETS, Accelerator, NeuronModel, Parallelism
from neuron_operator.api.reasons import Need, Reason
from neuron_operator.place import sizing
from neuron_operator.place.catalog import FAMILIES, INSTANCE_TYPES, Family, family_of, label_values, type_named
from neuron_operator.place.sizes import NAME_THE_TYPE, legal_sizes, place
from neuron_operator.place.sizing import AdapterRoom, Load, Memory, Widths, gb
from neuron_operator.read.objects import number_of
from neuron_operator.read.placement import TOLERATES_NEURON, NodeRules, Placement, counted
from neuron_operator.read.records import Facts, PlannedConversion
from neuron_operator.read.world import BY_PLUGIN, FreeDevices, Granting, NodeDevices, Object, Room, Settings

USUAL_SEQUENCES = (16, 8, 4, 2, 1)
"""The most that fit are chosen, if the manifest sets no number."""
USUAL_LENGTH = 4096
"""Or the model's, if that is shorter."""
DEFAULT_PICTURES = 8
"""Of a prompt, as in the runtime."""
LEAST = ((USUAL_LENGTH, 4), (USUAL_LENGTH, 1), (2048, 1), (1024, 1))
"""Length and sequences that a place must have room for. Only if none has is the next row tried: fewer sequences are
better than a dearer node, but one at a time, or short ones, are not."""
SHORTEST_LENGTH = 1024
"""That is proposed where nothing fits."""
BLOCK_SIZE = 32
"""As the runtime's default."""

MAX_NODES = 64
"""The most nodes of one replica."""

HOST_PROCESSES_BYTES = 256 * 2**20
"""Memory of the processes of a pod beside its engine."""


class Supply(IntEnum):
    """Where the devices come from, best first."""

    THERE = 0
    """A node has them free."""
    TO_BUY = 1
    """A node of this type can be added, or is named by the manifest."""
    TAKEN = 2
    """A node has them, but other pods hold them now."""


@dataclass(frozen=True)
class Site:
    """A type of node that the model may run on."""

    name: str
    family: Family
    devices: int
    """Devices of one node; 0: unknown."""
    price: float
    """Dollars per hour of a node."""
    host_memory: int = 0
    """Bytes that pods can request; 0: unknown."""
    vcpus: int = 0
    """0: unknown."""
    efa: int = 0
    """Interfaces of the network over which devices of several nodes compute together."""
    free: tuple[tuple[str, Room], ...] = ()
    """For each node there is: the domain in which the nodes of a group must be, and its free devices (or cores)."""
    is_buyable: bool = True
    by_claim: bool = False
    """Whether its nodes give devices by claims (DRA)."""

    def supply(self, size: int, nodes: int) -> Supply:
        together = Counter(domain for domain, room in self.free if room.holds(size))
        if max(together.values(), default=0) >= nodes:
            return Supply.THERE
        return Supply.TO_BUY if self.is_buyable else Supply.TAKEN


@dataclass(frozen=True)
class Held:
    """The place of the model's revision before. It is kept if it still fits: an edit must not move a model to other
    devices, which its own replicas do not hold already."""

    instance_type: str
    """Empty: any of the family."""
    family: str
    size: int
    nodes: int = 1
    by_claim: bool = False

    def contains(self, option: Option) -> bool:
        there = option.placement
        return self.is_on(option.site) and (there.size, there.nodes) == (self.size, self.nodes)

    def is_on(self, site: Site) -> bool:
        is_named = site.name == self.instance_type or (not self.instance_type and site.family.name == self.family)
        return is_named and site.by_claim == self.by_claim


@dataclass(frozen=True)
class Wishes:
    """What the manifest says about limits and modes; None: nothing."""

    tensor: int | None
    length: int | None
    sequences: int | None
    block_size: int | None
    num_blocks: int | None
    uses_blocks: bool
    shares_prefixes: bool | None
    chunks_prefill: bool | None
    adapters: AdapterRoom | None
    pictures: int
    """Of a prompt, for a model that sees them."""
    context_buckets: tuple[int, ...]
    token_buckets: tuple[int, ...]
    widths: Widths
    longest: int
    """The model's length."""
    budget: CacheBudget | None = None
    """Of an engine that shares out memory by rules of its own."""

    @property
    def least(self) -> tuple[tuple[int, int], ...]:
        """See `LEAST`, with what the manifest sets."""
        shapes = ((self.length or min(length, self.longest), self.sequences or rows) for length, rows in LEAST)
        return tuple(dict.fromkeys(shapes))

    def load(self, length: int, sequences: int, logical_core: int) -> Load:
        prefill, block_size, num_blocks, budget = length, 0, 0, self.budget
        if self.uses_blocks or budget:
            block_size = self.block_size or (budget.block_size if budget else min(BLOCK_SIZE, length))
            length = length if self.length or budget else max(1, length // block_size) * block_size
            num_blocks = self.num_blocks or sequences * -(-length // block_size)
            shares = self.shares_prefixes if self.shares_prefixes is not None else logical_core > 1
            segments = self.chunks_prefill if self.chunks_prefill is not None else logical_core > 1 or shares
            prefill = sizing.longest_segment(length, logical_core) if segments else length
        if budget:
            prefill = length if self.chunks_prefill is False else min(length, sizing.SEGMENT_TOKENS)
        return Load(
            length=length,
            sequences=sequences,
            block_size=block_size,
            num_blocks=num_blocks,
            longest_prefill=max(self.context_buckets, default=prefill),
            context_buckets=len(self.context_buckets),
            token_buckets=len({*self.token_buckets, length}) if self.token_buckets else 0,
            adapters=self.adapters,
            pictures=self.pictures,
            decode_sizes=(sequences - 1).bit_length() + 1 if budget else 0,
        )

    def loads(self, least: tuple[int, int], logical_core: int) -> Iterator[Load]:
        """Those to try, largest first."""
        length, fewest = least
        for sequences in (self.sequences,) if self.sequences else USUAL_SEQUENCES:
            if sequences >= fewest:
                yield self.load(length, sequences, logical_core)


def adapter_room(model: NeuronModel) -> AdapterRoom | None:
    """None: the model serves no adapters."""
    adapters = model.spec.serving.adapters
    if adapters.max_active is None:
        return None
    loaded = adapters.max_loaded or adapters.max_active
    return AdapterRoom(adapters.max_active, loaded, adapters.max_rank or DEFAULT_MAX_RANK, adapters.targets or TARGETS)


@dataclass(frozen=True)
class Host:
    """What a pod takes of its node besides devices."""

    memory: int
    """Bytes."""
    cpus: float = 0
    """0: less than any node has."""
    is_requested: bool = False
    """Whether the manifest says how much memory; otherwise it is what loading takes."""


@dataclass(frozen=True)
class Option:
    """Devices of a site, and what they would hold."""

    site: Site
    placement: Placement
    logical_core: int
    cores: int
    """Logical cores of all of them, on all nodes."""
    tensor: int
    load: Load
    memory: Memory
    host: Host

    @property
    def supply(self) -> Supply:
        return self.site.supply(self.placement.size, self.placement.nodes)

    @property
    def cost(self) -> float:
        """Dollars per hour: of its share of nodes that exist, or of whole ones that have to be added."""
        held, cores_per_device = self.placement, self.site.family.physical_cores // self.logical_core
        whole = self.site.devices * (cores_per_device if held.cores else 1)
        share = min(1.0, held.size / whole) if whole else 1.0
        return held.nodes * self.site.price * (1.0 if self.supply is Supply.TO_BUY else share)

    @property
    def fits(self) -> bool:
        return not self.problem

    @property
    def order(self) -> tuple[Any, ...]:
        """The best first."""
        size, site = self.placement.size, self.site
        return self.supply, round(self.cost, 3), -self.load.sequences, size, site.price, site.name, not site.by_claim

    @property
    def words(self) -> str:
        return f"{self.placement.words} of {self.site.name}"

    @property
    def shares(self) -> str:
        """Among what the model is shared out, for people."""
        family = self.site.family.name
        return f"tensor-parallel degree {self.tensor} on {counted(self.cores, 'NeuronCore')} of {family}"

    @property
    def problem(self) -> str:
        """Why it does not fit; empty: it does."""
        memory = self.memory
        used = f"{self.tensor} of {self.cores}" if self.tensor < self.cores else f"{self.tensor}"
        if not memory.cache_fits:
            needs = max(memory.cache, memory.least_cache)
            return (
                f"on each of {used} cores the engine would leave {gb(memory.cache_limit or 0)} to the cache, beside "
                f"weights of {gb(memory.weights)}, and {gb(needs)} are needed for {self.load.words}"
            )
        if not memory.fits:
            return (
                f"each of {used} cores would need {gb(self.memory.total)} (weights {gb(self.memory.weights)}, "
                f"cache {gb(self.memory.cache)}) for {self.load.words}, and may use {gb(self.memory.limit)}"
            )
        if 0 < self.site.host_memory < self.host.memory:
            takes = "its pod requests" if self.host.is_requested else "loading takes"
            return f"{takes} {gb(self.host.memory)} of host memory, and a node has {gb(self.site.host_memory)}"
        if 0 < self.site.vcpus <= self.host.cpus:
            return f"its pod requests {self.host.cpus:g} CPUs, and a node has {self.site.vcpus}, of which it keeps some"
        return ""


@dataclass(frozen=True)
class Choice:
    """The decision, and what it was chosen from."""

    asked: Placement
    """By the manifest."""
    instance_types: tuple[str, ...]
    """All types whose nodes can run what is compiled for this one."""
    chosen: Option
    fitting: tuple[Option, ...]
    """All that fit, best first."""
    others: tuple[Option, ...]
    """Those that do not."""
    is_kept: bool = False
    """Whether it is the place of the revision before."""
    rank: int = 0
    """How often nothing fitted before: on fewer nodes, or with room for longer and more sequences."""

    @property
    def order(self) -> tuple[Any, ...]:
        """Among choices for other engines: the best first."""
        return not self.is_kept, not self.chosen.fits, self.rank, self.chosen.order

    @property
    def placement(self) -> Placement:
        return replace(self.chosen.placement, instance_type=self.asked.instance_type)

    @property
    def node_rule(self) -> Object | None:
        """The node affinity that keeps a pod on what the model is compiled for; None if the manifest names the type."""
        if self.asked.instance_type:
            return None
        return {"key": names.INSTANCE_TYPE_LABEL, "operator": "In", "values": label_values(self.instance_types)}

    @property
    def runner_up(self) -> Option | None:
        """The best on another type."""
        return next((option for option in self.fitting if option.site.name != self.chosen.site.name), None)

    @property
    def arithmetic(self) -> str:
        """For people: what is on each core, and why here."""
        memory, load = self.chosen.memory, self.chosen.load
        parts = " + ".join(f"{name} {gb(part)}" for name, part in memory.parts.items())
        why = f"; {self.chosen.words}: {self.why}" if self.why else ""
        leaves = "" if memory.cache_limit is None else f"; the engine leaves {gb(memory.cache_limit)} to the cache"
        return f"{load.words}; on each core {parts} = {gb(memory.total)} of {gb(memory.limit)}{leaves}{why}"

    @property
    def why(self) -> str:
        """Why this one, for people; empty if there was nothing to choose."""
        second, chosen = self.runner_up, self.chosen
        if not chosen.fits:
            return "more than the estimate allows, but the manifest sets every number"
        if self.is_kept:
            return "as before this edit"
        if second is None:
            return ""
        if second.supply != chosen.supply:
            reason = "is there now" if chosen.supply is Supply.THERE else "can be added"
            return f"chosen because it {reason}, before {second.words}"
        if round(second.cost, 3) == round(chosen.cost, 3):
            return f"as cheap as {second.words}"
        return f"cheapest, about {dollars(chosen.cost)} per hour, before {second.words} at {dollars(second.cost)}"


def dollars(price: float) -> str:
    return f"${price:.2f}"


def choose(
    model: NeuronModel, facts: Facts, settings: Settings, free: FreeDevices | None, held: Held | None = None
) -> Choice:
    """The place of a model that is computed on devices.

    Args:
        free: the nodes of the cluster; None: not read yet.
        held: the place of the revision before.

    Raises:
        InvalidSpec: the devices do not have the cores that the manifest asks for, or the degree does not fit the model.
        Unplaceable: no allowed place holds it; says what is missing, and the nearest that would.
    """
    asked = place(model, settings)
    if not asked.on_devices:
        text = f"{model.spec.backend} runs on Neuron devices: set accelerator.type Neuron"
        raise InvalidSpec("spec.engine.backend", text)
    rules = rules_of(model, settings)
    facts = as_held(model, facts)
    wishes = wishes_of(model, facts, rules.cache)
    case = _Case(model, facts, rules, settings.by_plugin, wishes, settings.groups.max_nodes)
    sites = case.compatible(_sites(model, settings, asked, free))
    case.check_tensor(sites)
    ranked = [tuple(case.options(sites, least, nodes)) for nodes in case.node_counts for least in case.wishes.least]
    for before in (held, None) if held else (None,):
        for rank, options in enumerate(ranked):
            allowed = (one for one in options if one.fits and (before is None or before.contains(one)))
            fitting = tuple(sorted(allowed, key=lambda option: option.order))
            if fitting:
                rest = tuple(option for option in options if not option.fits)
                types = _types(fitting[0], settings, free)
                return Choice(asked, types, fitting[0], fitting, rest, is_kept=before is not None, rank=rank)
    options = next((options for options in reversed(ranked) if options), ())
    if not options:
        text = f"no node of {', '.join(sorted(site.name for site in sites))} grants {asked.words} to one pod"
        raise Unplaceable(Reason.TOPOLOGY_IMPOSSIBLE, text, needs=(Need.FREE_DEVICES,))
    closest = min(options, key=lambda option: (not option.memory.fits, option.memory.total / option.memory.limit))
    if case.is_all_set:
        return Choice(asked, _types(closest, settings, free), closest, (), options)
    raise Unplaceable(
        Reason.MODEL_TOO_LARGE,
        f"the model does not fit on {closest.words}, the best of what may be used: {closest.problem}; "
        f"{case.if_quantized(sites)}{case.nearest(sites)}",
        needs=() if asked.instance_type else (Need.FREE_DEVICES,),
    )


def as_held(model: NeuronModel, facts: Facts) -> Facts:
    """The facts, with the bytes of quantized weights that the engine computes as they are stored in the place of those
    of a conversion."""
    is_computed = facts.dtype in sizing.QUANTIZED and facts.quantization and not facts.num_experts
    if facts.conversion or not is_computed or not model.spec.quantizes or model.spec.serving.quantization == "None":
        return facts
    return structs.replace(
        facts, conversion=PlannedConversion(digest="", format=facts.dtype, bytes=facts.weights_bytes)
    )


def is_stranded(model: NeuronModel, settings: Settings, held: Held, free: FreeDevices) -> bool:
    """Whether no node of that place is left or can be added, while the manifest allows nodes that are there."""
    if free.nodes is None:
        return False
    try:
        sites = _sites(model, settings, place(model, settings), free)
    except Unplaceable:
        return False
    rules = rules_of(model, settings)
    usable = [site for site in sites if _runs_on(rules, site.family)]
    return bool(usable) and not any(map(held.is_on, usable))


@dataclass(frozen=True)
class _Case:
    """One model, whatever the sites."""

    model: NeuronModel
    facts: Facts
    rules: DeviceRules
    by_plugin: Granting
    """How nodes whose devices come from the device plugin grant them."""
    wishes: Wishes
    max_nodes: int = 1
    """Nodes of a replica whose manifest does not say how many."""

    @property
    def node_counts(self) -> tuple[int, ...]:
        """Nodes of a replica to try; the next only if the model does not fit on fewer. What is said of the devices is
        said of one node, unless the number of nodes is said as well."""
        spec = self.model.spec
        if spec.parallelism.nodes or spec.accelerator.devices or spec.accelerator.cores:
            return (spec.parallelism.nodes or 1,)
        most = min(self.max_nodes, self.rules.max_nodes or self.max_nodes)
        return tuple(count for count in (2**power for power in range(7)) if count <= most)

    @property
    def in_cores(self) -> bool:
        """Whether the manifest asks for cores."""
        return self.model.spec.accelerator.cores is not None

    @property
    def is_all_set(self) -> bool:
        """Whether the manifest sets all that decides how much memory is taken: then it is tried, fit or not."""
        accelerator = self.model.spec.accelerator
        return bool(self.wishes.length and self.wishes.sequences and (accelerator.devices or accelerator.cores))

    def compatible(self, sites: tuple[Site, ...]) -> tuple[Site, ...]:
        """The sites that the engine runs on, with logical cores as the manifest wants them.

        Raises:
            Unplaceable: the engine runs on none of them.
            InvalidSpec: none has such cores.
        """
        running = tuple(site for site in sites if _runs_on(self.rules, site.family))
        if sites and not running:
            text = (
                f"{self.model.spec.backend} runs on {', '.join(self.rules.families)}, not on "
                f"{', '.join(sorted({site.family.name for site in sites}))}: set another engine.backend, or allow "
                "other nodes"
            )
            raise Unplaceable(Reason.TOPOLOGY_IMPOSSIBLE, text, needs=(Need.FREE_DEVICES,))
        wished = self.model.spec.accelerator.logical_neuron_core or 1
        having = tuple(site for site in running if wished <= site.family.logical_core)
        if running and not having:
            message = f"{running[0].family.name} has no logical cores of {wished} physical ones: remove it"
            raise InvalidSpec("spec.accelerator.logicalNeuronCore", message)
        return having

    def check_tensor(self, sites: Iterable[Site]) -> None:
        """Raises InvalidSpec for a degree that no site can have."""
        wished = self.wishes.tensor
        offers = [
            (self.cores_of(site, size, nodes), site, size, nodes)
            for site, nodes in product(sites, self.node_counts)
            for size in self.sizes(site, nodes)
        ]
        if wished is None or not offers:
            return
        cores, site, size, nodes = max(offers, key=lambda offer: offer[0])
        if wished > cores:
            have = "are" if self.in_cores else f"are those of {self.held(site, size, nodes).words}, {site.family.name}"
            raise InvalidSpec("spec.parallelism.tensor", f"{wished} needs {wished} NeuronCores, but {cores} {have}")
        if self.facts.num_heads % wished:
            fitting = ", ".join(str(d) for d in range(1, cores + 1) if self.facts.num_heads % d == 0 and self.has(d))
            message = f"{wished} does not divide the {self.facts.num_heads} attention heads; choose one of {fitting}"
            raise InvalidSpec("spec.parallelism.tensor", message)

    def sizes(self, site: Site, nodes: int) -> tuple[int, ...]:
        """Devices (or cores) that may be asked of each of so many nodes of a site, ascending. If the manifest does not
        say, several nodes are whole ones that have a network for their devices."""
        accelerator = self.model.spec.accelerator
        pinned = accelerator.cores or accelerator.devices
        granting = "DRA" if site.by_claim else self.by_plugin
        legal = legal_sizes(site.name, site.devices, granting, in_cores=self.in_cores)
        if pinned is not None:
            return (pinned,) if not legal or pinned in legal else ()
        if nodes > 1:
            return tuple(size for size in legal if size == site.devices and site.efa)
        return legal or (1,)

    def held(self, site: Site, size: int, nodes: int) -> Placement:
        if self.in_cores:
            return Placement(cores=size, nodes=nodes)
        return Placement(devices=size, nodes=nodes, by_claim=site.by_claim)

    def cores_of(self, site: Site, size: int, nodes: int) -> int:
        """Logical cores of so many devices (or cores) on each of so many nodes."""
        each = 1 if self.in_cores else site.family.physical_cores // self.logical_core(site)
        return nodes * size * each

    def logical_core(self, site: Site) -> int:
        """Physical cores of each."""
        return self.model.spec.accelerator.logical_neuron_core or site.family.logical_core

    def options(self, sites: Iterable[Site], least: tuple[int, int], nodes: int) -> Iterator[Option]:
        """For each site and size, the largest load that fits, or the smallest if none does."""
        facts, widths, host = self.facts, self.wishes.widths, self.host(nodes)
        for site in sites:
            logical_core = self.logical_core(site)
            memory_of = partial(
                sizing.memory_of,
                facts,
                widths,
                family=site.family,
                logical_core=logical_core,
                budget=self.rules.cache,
            )
            for size in self.sizes(site, nodes):
                held, cores = self.held(site, size, nodes), self.cores_of(site, size, nodes)
                tried = (
                    Option(site, held, logical_core, cores, tensor, load, memory, host)
                    for load in self.wishes.loads(least, logical_core)
                    for tensor in self.degrees(site.family, logical_core, cores, nodes)
                    for memory in (memory_of(load, tensor),)
                )
                best: Option | None = None
                for option in tried:
                    if best is None or option.memory.total < best.memory.total:
                        best = option
                    if option.memory.fits:
                        break
                if best is not None:
                    yield best

    def host(self, nodes: int) -> Host:
        """What the manifest requests of each node, or else what loading takes."""
        overlay = self.model.spec.pod_template.spec.resources
        cpus, memory = ({**overlay.limits, **overlay.requests}.get(name) for name in ("cpu", "memory"))
        loading = sizing.host_bytes(self.facts, self.wishes.widths, nodes) + HOST_PROCESSES_BYTES
        return Host(
            memory=loading if memory is None else int(number_of(memory)),
            cpus=0 if cpus is None else number_of(cpus),
            is_requested=memory is not None,
        )

    def degrees(self, family: Family, logical_core: int, cores: int, nodes: int) -> tuple[int, ...]:
        """Tensor-parallel degrees to try, the most cores first: documented ones, on each of the nodes, that divide the
        heads and the feed-forward layers. One that the manifest sets is the only one."""
        wished = self.wishes.tensor
        if wished is not None:
            return (wished,) if wished <= cores and wished % nodes == 0 else ()
        each = {*family.degrees, *(d * family.logical_core // logical_core for d in family.degrees)}
        documented = {nodes * degree for degree in each}
        divided = [size for one in self.facts.loaded for size in (one.num_heads, one.intermediate_size)]
        legal = (d for d in documented if d <= cores and self.has(d) and not any(size % d for size in divided))
        return tuple(sorted(legal, reverse=True))

    def has(self, degree: int) -> bool:
        """Whether the engine takes this tensor-parallel degree."""
        return not self.rules.powers_of_two or degree.bit_count() == 1

    def nearest(self, sites: tuple[Site, ...]) -> str:
        """The cheapest places that would hold the model, for a message: one known node, and several that may be
        used; if there is neither, several of any type."""
        known = (kind for kind in INSTANCE_TYPES.values() if _runs_on(self.rules, kind.family))
        everywhere = tuple(_site(kind.name, kind.family) for kind in known)
        anyhow = structs.replace(self.model.spec, accelerator=Accelerator(), parallelism=Parallelism())
        freely = replace(
            self,
            model=replace(self.model, spec=anyhow),
            wishes=replace(self.wishes, tensor=None),
            max_nodes=MAX_NODES,
        )
        one, *several = freely.node_counts
        alone = freely.first_that_fits(everywhere, (one,))
        together = freely.first_that_fits(sites, several) or (not alone and freely.first_that_fits(everywhere, several))
        cures = [f"it would fit on {option}" for option in (alone, together) if option]
        if cures:
            return ", and ".join(cures)
        nowhere = f"no {MAX_NODES} nodes of any known type hold it"
        smaller = next(
            filter(None, (freely.with_least(load).first_that_fits(everywhere, (one,)) for load in self.smaller)), ""
        )
        return f"{nowhere}; less would fit on {smaller}" if smaller else nowhere

    def if_quantized(self, sites: tuple[Site, ...]) -> str:
        """Where the model would fit if its weights were quantized, for a message; empty: nowhere, or they are, or the
        engine quantizes none."""
        spec, facts = self.model.spec, self.facts
        is_open = spec.quantizes and spec.serving.quantization in ("Auto", "None") and facts.dtype in sizing.DTYPE_BYTES
        if not is_open or facts.num_experts or facts.conversion:
            return ""
        smaller = replace(self, facts=sizing.quantized(facts, "int8"))
        for nodes, least in product(self.node_counts, self.wishes.least):
            fitting = [one for one in smaller.options(sites, least, nodes) if one.fits]
            if fitting:
                best = min(fitting, key=lambda option: option.order)
                words, weights = best.words, gb(best.memory.weights)
                return f"serving.quantization: Int8 would, on {words}, with {weights} of weights on each core; "
        return ""

    @property
    def smaller(self) -> Iterator[tuple[int, int]]:
        """Lengths and sequences that the manifest could ask for instead, the largest first."""
        length, sequences = self.wishes.least[-1]
        for rows in USUAL_SEQUENCES:
            if rows < sequences:
                yield length, rows
        while length > SHORTEST_LENGTH:
            length //= 2
            yield length, 1

    def with_least(self, least: tuple[int, int]) -> _Case:
        length, sequences = least
        return replace(self, wishes=replace(self.wishes, length=length, sequences=sequences, num_blocks=None))

    def first_that_fits(self, sites: tuple[Site, ...], node_counts: Iterable[int]) -> str:
        """In words; empty: nothing does."""
        for nodes, by_plugin, least in product(node_counts, BY_PLUGIN, self.wishes.least):
            fitting = [one for one in replace(self, by_plugin=by_plugin).options(sites, least, nodes) if one.fits]
            if fitting:
                best = min(fitting, key=lambda option: option.order)
                with_it = "" if by_plugin == "Plugin" or best.site.by_claim else ", with the Neuron scheduler extension"
                how = f" (set parallelism.nodes, or the chart value groups.maxNodes, to {nodes})" if nodes > 1 else ""
                return f"{best.words}{with_it}, with {best.load.words}{how}"
        return ""


def _types(best: Option, settings: Settings, free: FreeDevices | None) -> tuple[str, ...]:
    """All types whose nodes can run what is compiled for this one."""
    family, host, families = best.site.family, best.host, settings.device_families
    of_family = (kind for kind in INSTANCE_TYPES.values() if kind.family is family)
    known = {kind.name for kind in of_family if kind.host_memory >= host.memory and kind.vcpus > host.cpus}
    named = {*(node.instance_type for node in (free and free.nodes) or ()), *families}
    others = {kind for kind in named if type_named(kind) is None and family_of(kind, families) is family}
    return tuple(sorted(known | others))


def _sites(model: NeuronModel, settings: Settings, asked: Placement, free: FreeDevices | None) -> tuple[Site, ...]:
    """Where the manifest allows it to run. Raises Unplaceable if that is unknown."""
    rules, families = _rules(model), settings.device_families
    present = (free and free.nodes) or ()
    # Karpenter adds no node for a claim: with claims only, a node to come is expected only if the manifest names it.
    only_claims = settings.device_mode == "DRA"
    provisionable = () if only_claims else settings.provisionable.instance_types
    to_buy = (asked.instance_type,) if asked.instance_type else provisionable
    found: dict[tuple[str, bool], Site] = {}
    for node in present:
        family, site_key = family_of(node.instance_type, families), (node.instance_type, node.by_claim)
        offers = node.cores if asked.cores else node.devices
        if family is None or not offers or not rules.accept(node) or (only_claims and not node.by_claim):
            continue
        room = node.room(in_cores=bool(asked.cores)) if node.schedulable else Room(0, node.connected)
        site = found.get(site_key) or _site(node.instance_type, family, node.devices)
        domain, is_bought = node.labels.get(settings.groups.topology_key, ""), node.instance_type in to_buy
        is_buyable = is_bought and node.by_claim == only_claims
        found[site_key] = replace(
            site,
            devices=max(site.devices, node.devices),  # one with a broken device has fewer
            free=(*site.free, (domain, room)),
            is_buyable=is_buyable,
            by_claim=node.by_claim,
        )
    for kind in to_buy:
        family = family_of(kind, families)
        is_there = any(name == kind for name, _ in found)
        if not is_there and family is not None and rules.accept_type(kind) and (family.has_claims or not only_claims):
            found[kind, only_claims] = _site(kind, family, by_claim=only_claims)
    sites = list(found.values())
    if model.default_for:
        others = sorted({site.family.name for site in sites} - {model.default_for})
        sites = [site for site in sites if site.family.name == model.default_for]
        if others and not sites:
            text = f"the backend is {model.backend_words}, and what may be used is {', '.join(others)}"
            cure = f"allow nodes of {model.default_for}, or set engine.backend"
            raise Unplaceable(Reason.TOPOLOGY_IMPOSSIBLE, f"{text}: {cure}", needs=(Need.FREE_DEVICES,))
    if sites and (free is not None or asked.instance_type):
        return tuple(sites)
    if asked.instance_type and family_of(asked.instance_type, families) is None:
        text = f"the devices of {asked.instance_type} are unknown, so nothing can be compiled for them: {NAME_THE_TYPE}"
        text = f"{text} of a known family ({', '.join(FAMILIES)}), or {_name_family(asked.instance_type)}"
        raise Unplaceable(Reason.TOPOLOGY_IMPOSSIBLE, text)
    left_out = "".join(f"; {why}" for why in dict.fromkeys(_left_out(rules, present, to_buy, families)))
    raise Unplaceable(
        Reason.TOPOLOGY_IMPOSSIBLE,
        "the devices to compile for are unknown, because no node with known devices is found: "
        f"{NAME_THE_TYPE}, or list types in the chart value provisionable.instanceTypes{left_out}",
        needs=(Need.FREE_DEVICES,),
    )


def families_for(model: NeuronModel, settings: Settings, free: FreeDevices | None) -> tuple[str, ...]:
    """Families of the devices that the manifest allows. Raises Unplaceable if none are known."""
    sites = _sites(model, settings, place(model, settings), free)
    return tuple(sorted({site.family.name for site in sites}))


def rules_of(model: NeuronModel, settings: Settings) -> DeviceRules:
    """Those of the engine, in the version of this installation."""
    spec = model.spec
    version = settings.engine(spec.engine_setting).version_of(spec.runs.versions)
    return spec.runs.devices(version, spec.engine.args, spec.engine.variables)


def _runs_on(rules: DeviceRules, family: Family) -> bool:
    return not rules.families or family.name in rules.families


def _rules(model: NeuronModel) -> NodeRules:
    """The nodes that its pods accept, before they have a place."""
    spec = as_json(model.spec.pod_template.spec)
    return NodeRules.of({**spec, "tolerations": [*spec.get("tolerations", ()), TOLERATES_NEURON]})


def _left_out(
    rules: NodeRules, nodes: Iterable[NodeDevices], to_buy: Iterable[str], families: Mapping[str, str]
) -> Iterator[str]:
    """Why nodes with devices, and types that can be added, are not used."""
    for node in nodes:
        taint, kind = rules.refused_taint(node), node.instance_type
        if not rules.accept_labels(node.labels):
            yield f"node {node.name} does not match the selector or affinity in podTemplate.spec"
        elif taint is not None:
            yield f"node {node.name} has the taint {taint.words}: tolerate it in podTemplate.spec.tolerations"
        elif not kind:
            yield f"node {node.name} has no label {names.INSTANCE_TYPE_LABEL}: give it one"
        elif family_of(kind, families) is None:
            yield f"node {node.name} is of type {kind}: {_name_family(kind)}"
    for kind in to_buy:
        if family_of(kind, families) is None:
            yield f"nothing is known of {kind}: {_name_family(kind)}"


def _name_family(instance_type: str) -> str:
    return f"name its family in the chart value devices.families, such as {{{instance_type}: trn1}}"


def _site(name: str, family: Family, devices: int = 0, *, by_claim: bool = False) -> Site:
    """A type; one that the table lacks costs as much per device as the cheapest of its family.

    devices: that a node of it offers; 0: as in the table.
    """
    kind = type_named(name)
    if kind is not None:
        return Site(
            name,
            family,
            devices or kind.devices,
            kind.price,
            kind.host_memory,
            kind.vcpus,
            kind.efa,
            by_claim=by_claim,
        )
    each = min(known.price / known.devices for known in INSTANCE_TYPES.values() if known.family is family)
    return Site(name, family, devices, each * max(devices, 1), by_claim=by_claim)


def wishes_of(model: NeuronModel, facts: Facts, budget: CacheBudget | None = None) -> Wishes:
    """What the manifest says. A key of `overrideNeuronConfig` counts where the field is open, as for the runtime.

    budget: of the engine, if it has one.
    """
    serving = model.spec.serving
    override = {_spelled(key): value for key, value in model.spec.engine.override_neuron_config.items()}

    def number(ours: int | None, name: str) -> int | None:
        value = override.get(name)
        return ours or (value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None)

    def switch(ours: str, name: str) -> bool | None:
        value = {"Enabled": True, "Disabled": False}.get(ours, override.get(name))
        return value if isinstance(value, bool) else None

    block_size, num_blocks = number(serving.block_size, "pa_block_size"), number(serving.num_blocks, "pa_num_blocks")
    shares = switch(serving.prefix_caching, "is_prefix_caching")
    stored = str(override.get("torch_dtype", "")).removeprefix("torch.") or facts.dtype
    dtype = serving.dtype if serving.dtype and serving.dtype != "auto" else stored
    width = sizing.width_of(dtype)
    small_cache = serving.kv_cache_dtype == "Fp8" or override.get("kv_cache_quant") is True
    return Wishes(
        tensor=number(model.spec.parallelism.tensor, "tp_degree"),
        length=number(serving.max_model_length, "seq_len"),
        sequences=number(serving.max_sequences, "batch_size"),
        block_size=block_size,
        num_blocks=num_blocks,
        uses_blocks=bool(block_size or num_blocks or shares or override.get("is_block_kv_layout")),
        shares_prefixes=shares,
        chunks_prefill=switch(serving.chunked_prefill, ""),
        adapters=adapter_room(model),
        pictures=DEFAULT_PICTURES if serving.media.max_images is None else serving.media.max_images,
        context_buckets=serving.context_buckets,
        token_buckets=serving.token_generation_buckets,
        widths=Widths(
            weights=1 if override.get("quantized") is True else width,
            cache=1 if small_cache else (budget and budget.number_bytes) or width,
            activations=width,
        ),
        longest=facts.max_position_embeddings or USUAL_LENGTH,
        budget=budget,
    )


def _spelled(key: str) -> str:
    """A key of the override as NxD Inference spells it; the runtime accepts dashes and capitals, too."""
    return re.sub(r"(?<=[a-z0-9])([A-Z])", r"_\1", key).replace("-", "_").lower()
