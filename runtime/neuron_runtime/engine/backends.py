"""The backends of this runtime.

Called by the supervisor to check the configured backend, and by the engine process to load it. A backend's package is
imported on demand; it is cheap to import, and loads its device stack only in `load_backend`.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, cast

from neuron_runtime.backend_protocol import ONE_RANK, Backend, Compiler, ProgressCallback, Rank
from neuron_runtime.config import RuntimeConfig
from neuron_runtime.console import say
from neuron_runtime.core import BackendLimits, Task
from neuron_runtime.errors import InvalidConfig
from neuron_runtime.quantization import QuantizedWeights

PACKAGES = {
    "torch": "neuron_runtime.backend.torch",
    "simulated": "neuron_runtime.backend.simulated",
    "nxdi": "neuron_runtime.backend.nxdi",
    "optimum": "neuron_runtime.backend.optimum",
    "transformers-neuronx": "neuron_runtime.backend.transformers_neuronx",
}


class BackendPackage(Protocol):
    """Interface of a backend's package."""

    FREED_BY_EXIT: bool
    """Whether the device is freed only by the end of the process, not by `close`. `LLM` then runs the engine in a
    process of its own."""

    ALWAYS_COMPILES: bool
    """Whether it runs compiled graphs only; otherwise the configuration's `compile` decides."""

    PROCESS_PER_RANK: bool
    """Whether each rank of tensor parallelism is a process of its own; otherwise one process drives all of a node."""

    MIN_ADAPTER_RANK: int
    """Smallest rank of adapters, of a backend that is an `AdapterBackend` when the configuration has adapters; 0: it is
    none."""

    TASKS: tuple[Task, ...]
    """What it computes."""

    DRAFT_METHODS: tuple[str, ...]
    """Methods of `Speculation` for which it has `BackendLimits.max_drafts` as the configuration says."""

    QUANTIZED_WEIGHTS: QuantizedWeights
    """What it does with quantized weights."""

    def needs_weights(self, config: RuntimeConfig) -> bool:
        """Whether a model's weights are needed to serve it; otherwise its small files suffice."""

    def check_config(self, config: RuntimeConfig) -> None:
        """Check settings without model and device. Raises InvalidConfig."""

    def check_model(self, model_dir: Path, config: RuntimeConfig) -> None:
        """Check settings against a model's config.json: what `load_backend` would refuse on every machine.

        Raises InvalidConfig or InvalidModel.
        """

    def versions(self) -> Mapping[str, str]:
        """Versions of the libraries and drivers that it runs on, by their names. Cheap: imports none of them."""

    __name__: str

    def compiler_reads_weights(self, config: RuntimeConfig) -> bool:
        """Whether graphs are compiled with the weights; otherwise config.json and the headers of the weights suffice,
        and the data of every tensor may be a hole in its file. Needs never depend on the data."""

    def compiler(self, config: RuntimeConfig, model_dir: Path) -> Compiler:
        """What to compile. Only the fields of `config` that are marked `COMPILED` are set, all others have defaults.

        Raises:
            InvalidConfig: a setting cannot be compiled, or must be set so that shapes do not depend on the machine.
            InvalidModel: the model cannot be compiled.
        """

    def load_backend(
        self,
        model_dir: Path,
        config: RuntimeConfig,
        progress: ProgressCallback,
        artifact: Path | None = None,
        *,
        rank: Rank = ONE_RANK,
    ) -> Backend:
        """See `load_backend` of the torch backend.

        artifact: a folder with the compiled graphs, which may be read-only; None: nothing is compiled.
        rank: which one to be, if each is a process.
        """


class GraphPlan(Protocol):
    """The graphs that would be compiled of a model."""

    def lines(self) -> Iterable[str]:
        """For people."""

    def document(self) -> Mapping[str, Any]:
        """As plain JSON values, which `bench simulate --plan` reads."""


class PlanningPackage(BackendPackage, Protocol):
    """Interface of the package of a backend whose graphs have fixed sizes (buckets)."""

    def plan(self, config: RuntimeConfig, model_dir: Path, lengths: Sequence[tuple[int, float]]) -> GraphPlan:
        """The graphs that would be compiled. Needs config.json alone. Raises InvalidConfig as `compiler` does.

        lengths: distribution of prompts' lengths as (tokens, share); empty: unknown.
        """


SHORT_TOKENS = 128
"""Fewer tokens of prompt plus output are hardly on purpose: the shortest chats take more."""


def warn_of_limits(config: RuntimeConfig, limits: BackendLimits) -> None:
    """Print a line if requests may have very few tokens, and one if the model's length cannot be prefilled."""
    length = limits.max_model_length
    if length < SHORT_TOKENS and not limits.vector_size:
        configured = bool(config.limits.max_model_length)
        cause = "so it is configured" if configured else "the model or the free memory allow no more"
        say(f"warning: prompt and answer together may have only {length} tokens: {cause} (maxModelLength)")
    prompt, longest = limits.longest_prompt, limits.longest_sequence
    if not limits.recomputes(longest):
        num_full = min(limits.num_blocks // limits.blocks_for(longest - 1), limits.max_rows)
        cost = f", and of requests that may grow longer ({longest} by default) blocks suffice for {num_full} at once"
        say(
            f"warning: at most {prompt} of the model's {longest} tokens can be prefilled: longer prompts are refused"
            f"{cost if num_full < limits.max_rows else ''} (buckets.context, or buckets.prefix with chunkedPrefill)"
        )


def check_backend(config: RuntimeConfig) -> None:
    """Raises InvalidConfig if the backend is not part of this runtime, or does not support the configuration."""
    package = backend_package(config)
    package.check_config(config)
    if config.task not in package.TASKS:
        able = ", ".join(name for name in PACKAGES if config.task in package_of(name).TASKS)
        message = f"the {config.backend} backend does not compute {config.task!r}: use the backend {able}"
        raise InvalidConfig("$.task", message)
    if config.adapters.max_active and not package.MIN_ADAPTER_RANK:
        raise InvalidConfig("$.adapters.maxActive", f"the {config.backend} backend serves no adapters: leave it out")
    if (method := config.speculation.method) and method not in package.DRAFT_METHODS:
        cure = " or ".join(["leave it out", *[f"set {one}" for one in package.DRAFT_METHODS]])
        raise InvalidConfig("$.speculation.method", f"the {config.backend} backend has no {method}: {cure}")
    if config.quantization not in ("auto", "none") and not package.QUANTIZED_WEIGHTS.formats:
        message = f"the {config.backend} backend computes no quantized weights: leave it out"
        raise InvalidConfig("$.quantization", message)


def check_ranks(config: RuntimeConfig, num_ranks: int) -> None:
    """Raises InvalidConfig if the configuration wants more ranks than there are processes for them."""
    tensor = config.parallelism.tensor
    if backend_package(config).PROCESS_PER_RANK and tensor not in {0, num_ranks}:
        message = f"each of {tensor} ranks of the {config.backend} backend is a process: use `neuron-runtime serve`"
        raise InvalidConfig("$.parallelism.tensor", message)


def compiles(config: RuntimeConfig) -> bool:
    """Whether the configuration runs compiled graphs. Raises as `backend_package`."""
    return config.compile or backend_package(config).ALWAYS_COMPILES


def planning_package(config: RuntimeConfig) -> PlanningPackage:
    """Raises InvalidConfig if the backend has no buckets."""
    package = backend_package(config)
    if not hasattr(package, "plan"):
        raise InvalidConfig("$.backend", f"the {config.backend} backend has no buckets to plan")
    return cast(PlanningPackage, package)


def planned_graphs(config: RuntimeConfig, model_dir: Path) -> Iterable[str]:
    """Lines for the log of a compilation; none if the backend has no buckets."""
    package = backend_package(config)
    return cast(PlanningPackage, package).plan(config, model_dir, ()).lines() if hasattr(package, "plan") else ()


def backend_package(config: RuntimeConfig) -> BackendPackage:
    """Raises InvalidConfig if the backend is not part of this runtime."""
    if config.backend not in PACKAGES:
        known = ", ".join(PACKAGES)
        raise InvalidConfig("$.backend", f"`{config.backend}` is not supported yet; supported backends: {known}")
    return package_of(config.backend)


def package_of(backend: str) -> BackendPackage:
    """That of one of `PACKAGES`."""
    return cast(BackendPackage, importlib.import_module(PACKAGES[backend]))
