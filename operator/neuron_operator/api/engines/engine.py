"""`Engine`: what the operator knows of a value of `engine.backend`, as data and pure functions over plain values.

Parser, planner, renderer and `why` ask the row: outside this package nobody knows an engine by its name. Each module
beside this one has the rows of one kind of engine.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from neuron_operator.api.reasons import Reason

GIB = 2**30
MIB = 2**20
TORCH_BYTES = 512 * MIB
"""An engine with torch needs so much beside weights: 350 MiB measured, without its libraries' files."""
START_SECONDS = 3600
"""How long a pod may at least take to start, before the kubelet restarts it; see `place.sizing.start_seconds`."""


@dataclass(frozen=True)
class Launch:
    """How one replica is started."""

    document: Mapping[str, Any]
    """The RuntimeConfig document, which is also mounted."""
    arguments: Sequence[str]
    """Where weights and artifacts are, as flags of our runtime."""
    has_api_keys: bool
    host: HostBytes
    """Of the model, in each pod."""
    model_dir: str = ""
    """The folder of the model, of an engine that is not our runtime."""
    version: str = ""
    """One of the row's."""
    family: str = ""
    """Of the devices; empty: it is computed on the host."""
    nodes: int = 1
    """The pods of the replica; of several, this is the leader."""
    args: Sequence[str] = ()
    """The manifest's own flags."""
    artifact: str = ""
    """The folder with what a Job compiled, of an engine that is not our runtime; empty: none did."""
    start_seconds: int = START_SECONDS
    """How long the start may take."""


@dataclass(frozen=True)
class Served:
    """What runs in the pod, besides what all pods have."""

    command: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    free: frozenset[str] = frozenset()
    """Those of `env` that the manifest may set otherwise."""
    stop_delay_seconds: int = 0
    """From when the pod leaves the endpoints until it is told to stop, if it does not wait by itself."""
    stop_command: tuple[str, ...] = ()
    """Instead of a delay: it runs in the pod, which is told to stop when it has ended."""
    working_dir: str = ""
    """Empty: that of the image, which is read-only."""


@dataclass(frozen=True)
class Probe:
    """The path that is asked, how often, and how many failures in a row count."""

    path: str
    period_seconds: int
    failures: int = 0
    """0: as many as there is time for in a start."""


@dataclass(frozen=True)
class Probes:
    startup: Probe
    readiness: Probe
    liveness: Probe | None


@dataclass(frozen=True)
class HostBytes:
    """Bytes of a model in the memory of a pod's host."""

    weights: int
    """As they are stored, or in the number type that the manifest names."""
    widened: int
    """How much larger weights are that are quantized, and computed in bfloat16."""
    embedding: int
    """One copy of it."""
    cache: int
    block: int
    """One block of the cache."""
    loading: int
    """Of an engine that brings the weights to devices."""
    sequences: int
    """Number that it has room for."""
    activations: int = 0
    """Of the largest step of a model that makes vectors, and to lay out its weights; 0: it generates text."""
    adapter: int = 0
    """Of one adapter of the largest rank; 0: the model serves none."""
    pictures: int = 0
    """Where they are read and computed; 0: the model sees none."""
    num_adapter_places: int = 0
    num_adapters_loaded: int = 0


@dataclass(frozen=True)
class CompilerMemory:
    """What compiling takes. Only a guess to start with: a compiler that runs out of memory gets twice as much."""

    bytes: int
    per_layer: int = 0
    per_weight_byte: float = 0.0


@dataclass(frozen=True)
class CacheBudget:
    """How an engine that keeps its cache in blocks shares out the memory of a core. It computes prompts in segments,
    and has a graph for 1, 2, 4, ... sequences."""

    block_size: int
    utilization: float
    """Share of the memory for weights and cache together."""
    share: float
    """Of that, what the cache has at most."""
    min_bytes: int
    """With less for the cache, the engine does not start."""
    number_bytes: int | None = None
    """Of a number in the cache, if the manifest says."""


@dataclass(frozen=True)
class DeviceRules:
    """What limits a plan on devices, beside what is in the fields of the manifest."""

    families: tuple[str, ...] = ()
    """That it runs on; empty: all."""
    powers_of_two: bool = False
    """Whether other tensor-parallel degrees are refused."""
    max_nodes: int | None = None
    """Of a replica; None: any number."""
    cache: CacheBudget | None = None
    """None: as NxD Inference."""


def unknown(architecture: str, known: Collection[str]) -> Iterator[tuple[str, str]]:
    """The refusal of a model whose architecture, if that is known, is none that an engine has. known: empty: all."""
    if architecture and known and architecture not in known:
        text = f"{architecture} has no implementation in this engine, which has {', '.join(sorted(known))}"
        yield "model.uri", text


def by_exit_code(exit_code: int, _: str) -> tuple[Reason | None, str]:
    return Reason.of_exit_code(exit_code), ""


@dataclass(frozen=True)
class Engine:
    does: str
    """Where it computes, for the plan."""
    fields: frozenset[str]
    """What it acts on among the fields that some engines refuse: paths below `spec`, or `path=value`."""
    serve: Callable[[Launch], Served]
    """How a replica's pod, or the leader of a group, is started."""
    follow: Callable[[Iterable[str]], Served]
    """From the command of a group's leader to what runs in its followers, besides the leader's variables."""
    check: Callable[[Sequence[str]], list[str]]
    """With the arguments of a launch: the command of a Job that asks whether a replica would accept its document."""
    probes: Probes
    millicores: Callable[[HostBytes], int]
    """CPU to load the model and to answer at about a token per second."""
    memory: Callable[[HostBytes], int]
    """Bytes, likewise."""
    drafts: tuple[str, ...] = ()
    """Methods of drafts that it has; a contract test compares them with those of the runtime's backend."""
    block_size: int = 16
    """Tokens of a block of its cache on a host, unless the manifest says."""
    architectures: frozenset[str] = frozenset()
    """Those that it has, of an engine of our runtime; empty: any. A contract test compares them with the runtime, which
    refuses others as it reads or compiles a model, but not when a running one moves to another default."""
    sampling: str = "Host"
    """Where it samples unless the manifest says; empty: it depends on the model."""
    sampling_of_drafts: Mapping[str, str] = field(default_factory=dict)
    """The same with drafts, by method, where that is another."""
    on_device: bool = False
    """Whether it computes on the devices of a replica, which are then planned."""
    devices: Callable[[str, Sequence[str], Mapping[str, str]], DeviceRules] = lambda *_: DeviceRules()
    """By its version, and the flags and variables of the manifest."""
    held: tuple[str, ...] = ()
    """Of an engine on a host: formats of converted weights that it does not multiply out in memory, unless steps are
    compiled."""
    quantizes_itself: bool = False
    """Of an engine that honours `serving.quantization`: whether a replica reads each format that it knows as it is, and
    quantizes other weights while it loads them. Otherwise they are converted before."""
    asks_cache: bool = False
    """Whether `inspect` is told the engine, because it asks a cache for its graphs."""
    is_narrow: bool = False
    """Whether `inspect` is told the engine, because it refuses most models that others compute."""
    compiles: Literal["never", "on request", "always", "on device"] = "never"
    """Whether Jobs compile models for it; `on request`: with `engine.compile: Enabled` only; `on device`: each replica
    compiles as it starts."""
    compiler: CompilerMemory = CompilerMemory(0)
    compile: Callable[[Launch, Mapping[str, str]], Served | None] = lambda *_: None
    """For an engine that is not our runtime: how a Job of its image compiles a launch whose document has only what
    graphs depend on, with the variables of the manifest; None: it cannot."""
    job: Callable[[str, Sequence[str]], list[str]] = lambda _, command: list(command)
    """The command of that Job, from the folder for the graphs and what `compile` says."""
    on_host: Engine | None = None
    """The row with `accelerator.type: CPU`, if that is another one."""

    is_ours: bool = True
    """Whether it is our runtime: its image has the commands of Jobs, and it loads weights from their store."""
    setting: str = ""
    """Key of the installation's image for it; empty: the backend's name."""
    versions: Sequence[str] = ()
    """Of that image, the one that is assumed last; empty: our own."""
    files: Mapping[str, str] = field(default_factory=dict)
    """What is mounted beside the document, by name."""
    api_key_variable: str = ""
    """The variable with the one key that clients must send; empty: it reads a file of keys."""
    address_variable: str = ""
    """The variable with the address at which the others of a group reach a member; empty: it finds that out."""
    user: int = 0
    """The user that the image runs as; 0: its own."""
    refusals: Callable[[Launch, str, Mapping[str, str]], Iterable[tuple[str, str]]] = lambda *_: ()
    """For a launch, the model's architecture and the variables of the manifest: the path below `spec` and the cure of
    what it would refuse or ignore."""
    explain: Callable[[int, str], tuple[Reason | None, str]] = by_exit_code
    """What an exit code and a termination message mean, and the words that say so; empty: the last line."""

    def honours(self, path: str) -> bool:
        """Whether it acts on a field, by its path in the manifest."""
        return path.removeprefix("spec.") in self.fields
