"""The seam between engine and device: the Backend protocol that every backend (torch, NxDI, fakes) implements, and the
Compiler protocol of those that compile.

A Backend is called by `engine.loop` on the one thread that owns the device; it handles batches and token ids, and knows
nothing of requests, text or HTTP. A Compiler is called by `artifacts/`, and knows nothing of keys and stores.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from neuron_runtime.core import BackendLimits, Batch, Late, StepOutput

ProgressCallback = Callable[[str, float], None]
"""Called with (stage, share done from 0 to 1) during long work."""

StepTime = tuple[Batch, float]
"""A step, and the seconds that a step of its shape takes."""


@dataclass(frozen=True, slots=True)
class Rank:
    """Which rank of a replica a backend is, and how it finds the others. Ranks of one node have numbers in a row."""

    rank: int = 0
    size: int = 1
    per_node: int = 1
    rendezvous: str = ""
    """Where ranks meet: a file of one machine (`file:///...`), or `tcp://host:port`, where rank 0 listens."""
    address: str = ""
    """The address at which other ranks reach this node."""


ONE_RANK = Rank()


class IllegalBatch(Exception):
    """A batch broke the contract of `Batch` or `BackendLimits`. Always a bug in the engine."""


class Backend(Protocol):
    """Runs steps. The order of calls for one step is launch, sample, collect.

    `sample` is called exactly once per launched step and before the next launch. With two steps in flight the next
    step may be launched (and sampled) before the previous one is collected; steps are collected in order. An
    exception from any of the three leaves the device undefined: the engine process ends.
    """

    @property
    def limits(self) -> BackendLimits: ...

    def warm_up(self, progress: ProgressCallback) -> Iterable[StepTime]:
        """Run every compiled shape, so that the first request is not slower than others. Called once, before launch.

        Returns steps of the shapes that were run, with their times without first-run overhead.
        """

    def graph(self, batch: Batch) -> str:
        """Name of what the device runs for this step, called before its `launch`; cheap.

        Steps with the same name take about the same time: a compiled graph, or `size_of` where sizes are dynamic.
        """

    def launch(self, batch: Batch) -> None:
        """Apply the delta and start the step. Returns as soon as the step is enqueued."""

    def sample(self, step: int, late: Late | None) -> None:
        """Choose tokens for the launched step; `late` is None unless a row needs data from the host."""

    def collect(self, step: int) -> StepOutput:
        """Block until the step is done and return what it produced."""

    def close(self) -> None:
        """Release the device. Safe to call twice."""


class AdapterBackend(Backend, Protocol):
    """A backend whose `limits.max_adapters` is not 0.

    The engine reads an adapter on any thread, adds it between steps, and names it in batches from then on. It removes
    one that no place has any more. A batch names only adapters that were added.
    """

    def read_adapter(self, folder: Path) -> Any:
        """The weights of an adapter as `add_adapter` takes them. Called on any thread, also while steps run.

        folder: `adapter_config.json` and `adapter_model.safetensors`, which `adapters` has checked. Raises FatalError,
        which refuses the adapter and nothing else.
        """

    def add_adapter(self, digest: str, folder: Path, weights: Any) -> None:
        """Keep the weights under this name, which is new. Called by the owner of the device, between steps."""

    def remove_adapter(self, digest: str) -> None:
        """Forget the weights. No row of a step in flight uses them, and none will before they are added again."""


def size_of(batch: Batch) -> str:
    """A name for steps of about the same size: the kind, and rows and tokens rounded up to a power of two."""
    rows, tokens = (1 << max(count - 1, 0).bit_length() for count in (len(batch.rows), batch.num_tokens))
    return f"{batch.kind.value} of {rows} rows, {tokens} tokens"


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """What compiled graphs depend on besides the model's digest: plain JSON values in a normal form.

    Equal on every machine that can run the graphs, with or without a compiler: no path, no time, no free memory, no
    default that is left open. Two configurations with equal needs share an artifact.
    """

    shapes: Mapping[str, Any]
    """Rows, lengths, buckets: the sizes that are compiled."""
    settings: Mapping[str, Any]
    """Everything else that changes the graphs: dtype, layout, options of the compiler, a hash of our own source."""
    libraries: Mapping[str, str]
    """Versions that must be equal where graphs are compiled and where they run."""
    target: Mapping[str, Any]
    """The processors or devices that can run them, with the number of cores and ranks."""


@dataclass(frozen=True, slots=True)
class CompileUnit:
    """One unit of compilation, which may make several files (all submodels and buckets of a library that compiles them
    together)."""

    name: str
    """For people: `decode of 8 rows`."""
    compile: Callable[[Path], None]
    """Write its files into a folder that all graphs share. Names of files and subfolders are plain and visible."""
    parts: tuple[str, ...] = ()
    """Names of the graphs that it makes together, if it can tell which are ready; empty: one, with its own name."""
    ready: Callable[[], Collection[str]] = tuple
    """The parts that are ready now. Called on another thread while it compiles."""


class Compiler(Protocol):
    """What a backend compiles of one model and configuration; see `BackendPackage` in `engine/backends.py`.

    `needs` is read wherever a model is served, so it costs little and needs no compiler and no device. The rest is
    called only in a process of its own that ends afterwards, with a scratch folder as working directory and TMPDIR.
    Whatever it raises or prints is reported as COMPILE_FAILED; a FatalError keeps its code.
    """

    @property
    def needs(self) -> Needs: ...

    def ready_made(self, given: Path | None) -> Path | None:
        """A folder of graphs that the library compiled without us, and that fits: the given one, or one beside the
        model; None if there is none. Raises FatalError with ARTIFACT_MISSING and what differs if the given one is such
        a folder, but does not fit."""
        return None

    def tools(self) -> Mapping[str, str]:
        """Versions of the programs that compile, for the record: they are not part of the key, because a serving pod
        lacks them. Raises FatalError with COMPILE_FAILED and a cure if one is missing."""

    def graphs(self) -> Sequence[CompileUnit]:
        """In the order in which they are compiled. Raises InvalidConfig for what cannot run with the versions
        installed."""

    def check(self, folder: Path) -> None:
        """Load every graph once, without weights, device or compiler, as far as that is possible. Raises if it fails.

        Called in another process than `graphs`, whose PATH is empty.
        """
