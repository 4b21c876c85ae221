"""What a model is compiled with for NxD Inference: `Settings`, in a normal form, and the `Application` that runs it.

Derived once from the configuration and config.json by whoever compiles and whoever serves. Pure: it imports neither
NxD Inference nor torch, and knows no path, no time and nothing of this machine.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Everything that decides the graphs and the limits."""

    application: str
    """Key in the registry of NxD Inference, such as `llama`, or `module:Class`."""
    tensor: int
    """Tensor-parallel degree: the number of cores that a model runs on."""
    logical_core: Literal[1, 2]
    """Physical cores that make one logical core (LNC)."""
    dtype: str
    layout: Literal["slots", "blocks"]
    max_rows: int
    max_model_length: int
    max_context_length: int
    """Longest prompt of one context-encoding call."""
    block_size: int
    """The model's length with slots."""
    num_blocks: int
    """Without the one that NxD Inference adds for what must not be kept."""
    segments: bool
    """Whether a prompt may be computed in several calls, over the graphs of prefix caching."""
    shares_prefixes: bool
    context_buckets: tuple[int, ...]
    """Ascending, as all buckets. With blocks: tokens that one call computes."""
    prefix_buckets: tuple[int, ...]
    """With blocks: tokens that were computed before; 0 is one of them."""
    token_buckets: tuple[int, ...]
    """Lengths of a decode step."""
    row_buckets: tuple[int, ...]
    """Rows of a decode step; empty: `max_rows` alone."""
    sampling: Literal["Device", "DeviceWithLogits", "Host"]
    global_topk: int
    """Candidates that the device samples from."""
    asynchronous: bool
    vocabulary_size: int
    neuron_config: Mapping[str, Any]
    """All arguments of NeuronConfig, as plain JSON."""


class Application(Protocol):
    """A model of NxD Inference, wrapped as little as possible; made by `library`."""

    def compile(self, folder: Path) -> None:
        """Write the compiled graphs into a folder."""

    def load(self, folder: Path) -> None:
        """Load graphs and weights onto the device, without running any graph."""

    def forward(self, **arguments: torch.Tensor) -> Any:
        """One call, which blocks; returns the output object of NxD Inference. Only keywords: positions differ between
        versions."""
