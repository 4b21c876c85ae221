"""Runs compiled decode steps in the place of eager ones. Needs no compiler, and imports none of torch's.

Created by the loader from an artifact that fits, which `artifacts/` has checked. Steps that are not compiled, those
with prompts, run on the eager decoder that it wraps.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol, Self

import torch

from neuron_runtime.backend.torch.cache import StepPlan
from neuron_runtime.backend.torch.decoder import Decoder, Placed, Tap
from neuron_runtime.backend.torch.graphs import ONE_ROW, PROCESSOR, SEVERAL_ROWS
from neuron_runtime.backend.torch.linear import Packed
from neuron_runtime.backend.torch.step_module import constants, step_inputs
from neuron_runtime.errors import ExitCode, FatalError


class CompiledStep(Protocol):
    """A compiled step, called with the tensors of `StepInputs`; returns the hidden states."""

    def run(self, inputs: list[torch.Tensor]) -> list[torch.Tensor]: ...


class CompiledDecoder:
    """A decoder with the same interface, which runs graphs for decode steps. blocks: the layout of the cache."""

    def __init__(self, decoder: Decoder, one_row: CompiledStep, several_rows: CompiledStep, *, blocks: bool) -> None:
        self._decoder, self._blocks = decoder, blocks
        self._one_row, self._several_rows = one_row, several_rows

    @classmethod
    def load(cls, decoder: Decoder, folder: Path, *, blocks: bool) -> Self:
        """With the graphs of an artifact. Raises FatalError (ARTIFACT_MISSING) if they cannot be loaded here."""
        return cls(decoder, *(_load(folder / step.file, decoder) for step in (ONE_ROW, SEVERAL_ROWS)), blocks=blocks)

    def forward(
        self, token_ids: torch.Tensor, plan: StepPlan, tap: Tap | None = None, placed: Placed | None = None
    ) -> torch.Tensor:
        """See `Decoder.forward`."""
        if tap is not None or placed is not None or len(token_ids) != len(plan.rows.start):
            return self._decoder.forward(token_ids, plan, tap, placed)
        graph = self._one_row if len(token_ids) == 1 else self._several_rows
        return graph.run(step_inputs(token_ids, plan, blocks=self._blocks).tensors())[0]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """See `Decoder.logits`."""
        return self._decoder.logits(hidden)


def eager_because(decoder: Decoder) -> str | None:
    """Why this machine cannot run compiled steps of a decoder, if so."""
    if not torch.cpu._is_avx2_supported():
        return f"this processor is below {PROCESSOR}"
    if not isinstance(decoder.weights.head, Packed):
        return f"oneDNN has no {decoder.weights.embedding.dtype} products for this processor"
    return None


def load_library(path: Path) -> Any:
    """A compiled step without weights. Raises FatalError (ARTIFACT_MISSING) if it cannot be loaded here."""
    try:
        return torch._C._aoti.AOTIModelContainerRunnerCpu(str(path.absolute()), 1)
    except RuntimeError as error:
        reason = str(error).partition("\n")[0]
        raise FatalError(ExitCode.ARTIFACT_MISSING, f"{path}: cannot load the compiled step: {reason}") from error


def _load(path: Path, decoder: Decoder) -> CompiledStep:
    """A graph that computes with the decoder's own tensors, which must outlive it."""
    library, tensors = load_library(path), constants(decoder.weights)
    names = library.get_constant_names_to_original_fqns()
    library.update_constant_buffer({name: tensors[ours] for name, ours in names.items()}, False, True, True)
    graph: CompiledStep = library
    return graph
