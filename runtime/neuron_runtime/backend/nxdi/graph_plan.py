"""The graphs of a model before anything is compiled: what each takes, how much of it is padding, and what it costs.

Called by the command `plan-buckets`, for the log of a compilation, and to simulate a plan. Estimates only: it needs no
device, no compiler and no Neuron library.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec

from neuron_runtime.backend.neuron import bucket_plan
from neuron_runtime.backend.neuron.bucket_plan import Lengths, number
from neuron_runtime.backend.neuron.devices import Target
from neuron_runtime.backend.neuron.step_graphs import Graph, Prefill
from neuron_runtime.backend.nxdi.buckets import all_graphs, prefill_graph, span_that_takes
from neuron_runtime.backend.nxdi.models import text_config
from neuron_runtime.backend.nxdi.settings import DraftFiles, Settings, settings_of
from neuron_runtime.backend.nxdi.vision import CHUNKS
from neuron_runtime.config import RuntimeConfig
from neuron_runtime.console import bytes_text, seconds_text
from neuron_runtime.dtypes import BY_NAME

COMPILE_SECONDS_PER_LAYER = 2.4
"""The time for one layer of one graph. AWS states 15 minutes for a model of 15 GB: 32 layers, 12 graphs."""

NO_CALL = "nothing: no call takes it"

VERSION = 1
"""The version of the document of a plan."""


@dataclass(frozen=True, slots=True)
class PlannedGraph:
    name: str
    takes: str
    """For people: `prompts of 129 to 383 tokens`."""
    padding: float | None
    """Mean share of the device time of its calls, for the assumed lengths; None if no call of them takes it."""
    activation_bytes: int
    """Per core, of the widest layer and the logits: a lower bound of what a graph needs besides weights and cache."""
    compile_seconds: float


@dataclass(frozen=True, slots=True)
class GraphPlan:
    settings: Settings
    graphs: Sequence[PlannedGraph]
    prefill_padding: float
    """Mean share of the device time of prefills, for the assumed lengths."""
    cache_bytes: int
    """Keys and values, of all cores."""

    def lines(self) -> list[str]:
        """A table for people: a line per graph, then what sums up and the flags that fix these buckets."""
        settings, graphs = self.settings, self.graphs
        widths = max(len(graph.name) for graph in graphs), max(len(graph.takes) for graph in graphs)
        rows = [
            f"{one.name:{widths[0]}}  {one.takes:{widths[1]}}  "
            f"{'-' if one.padding is None else f'{one.padding:.0%}':>7}  {bytes_text(one.activation_bytes):>11}  "
            f"{seconds_text(one.compile_seconds)}"
            for one in graphs
        ]
        cache = f"{bytes_text(self.cache_bytes)} ({bytes_text(self.cache_bytes / settings.tensor)} per core)"
        unused = f" ({self.num_unused} of them unused)" if self.num_unused else ""
        return [
            f"{settings.application}, {settings.tensor} cores, {settings.max_rows} sequences of "
            f"{settings.max_model_length} tokens, layout {settings.layout}",
            f"{'graph':{widths[0]}}  {'takes':{widths[1]}}  padding  activations  compile",
            *rows,
            f"{len(graphs)} graphs{unused}, about {seconds_text(self.compile_seconds)} to compile one after another; "
            f"the cache takes {cache}; {self.prefill_padding:.0%} of prefill time is padding",
            f"these buckets as flags: {self.flags}",
        ]

    @property
    def flags(self) -> str:
        settings = self.settings
        flags = {
            "--context-buckets": settings.context_buckets,
            "--token-generation-buckets": settings.token_buckets,
            "--prefix-buckets": settings.prefix_buckets,
            "--sequence-buckets": settings.row_buckets,
        }
        return " ".join(
            f"{flag} {','.join(str(size) for size in sizes if size)}" for flag, sizes in flags.items() if any(sizes)
        )

    def document(self) -> dict[str, Any]:
        """See `GraphPlan`; `read_plan` reads it."""
        return {"version": VERSION, **msgspec.to_builtins(self), "compile_seconds": self.compile_seconds}

    @property
    def compile_seconds(self) -> float:
        return sum(graph.compile_seconds for graph in self.graphs)

    @property
    def num_unused(self) -> int:
        """Graphs that no call takes: NxD Inference compiles every context bucket for every prefix bucket."""
        return sum(graph.takes == NO_CALL for graph in self.graphs)


def plan_of(
    config: RuntimeConfig,
    model: Mapping[str, Any],
    target: Target,
    lengths: Lengths = (),
    draft: DraftFiles | None = None,
) -> GraphPlan:
    """The plan of a configuration.

    Args:
        model: config.json. draft: as of `settings_of`.
        lengths: of prompts. Context buckets that the configuration leaves open are chosen for them; empty: every order
            of magnitude is equally likely.

    Raises: as `settings_of`.
    """
    settings = settings_of(config, model, target, lengths, draft)
    spare = settings.vision.spare if settings.vision else 0
    lengths = bucket_plan.prompts(lengths, max(settings.max_context_length - spare, 1))
    facts = _Facts.of(text_config(model), settings.tensor)
    cached = facts.cached_numbers
    if settings.draft is not None:
        cached += _Facts.of(text_config(settings.draft.config), settings.tensor).cached_numbers
    num_blocks = settings.num_blocks + (settings.layout == "blocks")  # NxD Inference adds one, for what is not kept
    return GraphPlan(
        settings,
        [*(_planned(graph, settings, facts, lengths) for graph in all_graphs(settings)), *_encoders(settings, facts)],
        _padding(lengths, settings),
        cached * num_blocks * settings.block_size * BY_NAME[settings.cache_dtype or settings.dtype].num_bytes,
    )


def read_plan(path: Path) -> Settings:
    """The settings of a plan that `plan-buckets --json` wrote. Raises ValueError with what is wrong."""
    try:
        document = msgspec.json.decode(path.read_bytes(), type=_Document)
    except OSError as error:
        raise ValueError(f"cannot be read: {error}") from error
    except msgspec.DecodeError as error:
        raise ValueError(f"is no plan that `plan-buckets --json` wrote: {error}") from error
    return document.settings


class _Document(msgspec.Struct):
    """What is read of a plan's document."""

    version: Literal[1]
    settings: Settings


@dataclass(frozen=True, slots=True)
class _Facts:
    """Sizes of a model; those that its config.json lacks count as 1."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    vocabulary: int
    cached_numbers: int
    """Numbers in the cache per position, on all cores together."""

    @staticmethod
    def of(model: Mapping[str, Any], tensor: int) -> _Facts:
        heads, hidden = number(model, "num_attention_heads"), number(model, "hidden_size")
        size = number(model, "head_dim", max(1, hidden // heads))
        layers = number(model, "num_hidden_layers")
        return _Facts(
            layers,
            hidden,
            number(model, "intermediate_size"),
            heads * size,
            number(model, "vocab_size"),
            2 * layers * _cached_heads(heads, number(model, "num_key_value_heads", heads), tensor) * size,
        )


def _cached_heads(heads: int, cached: int, tensor: int) -> int:
    """Heads of keys and values that the cores hold together: what they cannot share out evenly they hold repeatedly."""
    if cached % tensor == 0:
        return cached
    return tensor if tensor % cached == 0 else heads


def _planned(graph: Graph, settings: Settings, facts: _Facts, lengths: Lengths) -> PlannedGraph:
    padding = None
    if isinstance(graph, Prefill):
        size, rows = graph.tokens, 1
        taken = [one for one in lengths if _taken_by(graph, settings, one[0])]
        padding = _padding(taken, settings) if taken and not graph.prefix else None
        takes = _prompts_of(graph, settings)
    else:
        size, rows = graph.num_computed_tokens, graph.num_computed_tokens
        least, most = (
            max(length - settings.max_drafts, 0)
            for length in (_previous(settings.token_buckets, graph.length), graph.length)
        )
        takes = f"up to {graph.rows} sequences of {least} to {most}"
    tensor, width = settings.tensor, BY_NAME[settings.dtype].num_bytes
    widest = 2 * facts.hidden + max(2 * facts.intermediate, 3 * facts.heads) // tensor
    activations = size * widest * width + rows * facts.vocabulary // tensor * 4
    return PlannedGraph(graph.name, takes, padding, activations, COMPILE_SECONDS_PER_LAYER * facts.layers)


def _encoders(settings: Settings, facts: _Facts) -> list[PlannedGraph]:
    """The graphs of an encoder of pictures. Its activations are those of a layer, scores of all pairs of a size that it
    computes together included, and the features, which each prompt's graph takes too."""
    vision, width, planned = settings.vision, BY_NAME[settings.dtype].num_bytes, list[PlannedGraph]()
    for graph in vision.graphs if vision else ():
        assert vision is not None
        together, times = (vision.side // vision.patch) ** 2, graph.size
        if vision.counts != CHUNKS:
            together, times = graph.size, 1
        tokens, scores = times * together, times * together * together * 4
        features = graph.tokens * (1 + vision.num_deeper) * facts.hidden * width
        activations = tokens * 6 * vision.hidden * width + scores + features
        seconds = COMPILE_SECONDS_PER_LAYER * vision.layers
        counted = CHUNKS if vision.counts == CHUNKS else "patches"
        takes = f"pictures of a prompt, {_previous(vision.buckets, graph.size) + 1} to {graph.size} {counted}"
        planned.append(PlannedGraph(graph.name, takes, None, activations, seconds))
    return planned


def _prompts_of(graph: Prefill, settings: Settings) -> str:
    if span_that_takes(settings, graph) is None:
        return NO_CALL
    low, high = _previous(settings.context_buckets, graph.tokens) + 1, graph.tokens
    if settings.layout == "slots":
        # The smallest that fits is longer than its prompt, unless it is the largest, and no pictures are seen.
        shorter = settings.vision.spare if settings.vision else int(high != settings.context_buckets[-1])
        return f"prompts of {max(low - max(shorter, 1), 1)} to {high - shorter} tokens"
    if graph.prefix:
        return f"{low} to {high} tokens after up to {graph.prefix}"
    lengths = [length for length in range(1, high + 1) if _taken_by(graph, settings, length)]
    return f"prompts of {lengths[0]} to {lengths[-1]} tokens"


def _taken_by(graph: Prefill, settings: Settings, length: int) -> bool:
    return prefill_graph(settings, 0, length) == graph


def _previous(buckets: Sequence[int], size: int) -> int:
    at = bisect_left(buckets, size)
    return buckets[at - 1] if at else 0


def _padding(lengths: Lengths | Sequence[tuple[int, float]], settings: Settings) -> float:
    """Share of the time of prefills that computes padding, without prefixes."""
    cost = bucket_plan.prefill_cost
    computed = sum(p * cost(prefill_graph(settings, 0, length).tokens) for length, p in lengths)
    return 1 - sum(p * cost(length) for length, p in lengths) / computed
