"""`HostSampler`: tokens and log-probabilities from logits, by each row's own parameters.

A backend creates one, tells it which sequence enters which slot, and calls it on one thread with the logits of any
rows: all of a step, or those that the device did not sample. The result of a row does not depend on other rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from neuron_runtime.backend.host_sampling import drawing
from neuron_runtime.backend.host_sampling.adjustments import Adjustments, allowed_ids
from neuron_runtime.backend.host_sampling.drawing import IntArray, SamplingTable
from neuron_runtime.backend.host_sampling.likeliest import Scores
from neuron_runtime.core import Added, TokenLogprobs

PerRow = tuple[tuple[TokenLogprobs, ...], ...]
"""One tuple per row of a batch; empty when no row requests any."""


class Chosen(NamedTuple):
    """The tokens of some rows, int64, and the log-probabilities of each that requests them; empty if none does."""

    tokens: IntArray
    logprobs: list[TokenLogprobs | None]

    def per_row(self, rows: IntArray, num_rows: int) -> PerRow:
        """The log-probabilities for a batch of `num_rows`, of which these tokens are those of `rows`."""
        if not self.logprobs:
            return ()
        of_row = dict(zip(rows.tolist(), self.logprobs, strict=True))
        return tuple((one,) if (one := of_row.get(row)) else () for row in range(num_rows))


class HostSampler:
    """State per slot as arrays, so that many rows cost a few array operations."""

    def __init__(self, tokens: npt.NDArray[np.int32], vocabulary_size: int) -> None:
        """tokens: `[slots, length]`, the tokens of the sequence in each slot. The backend keeps them up to date."""
        self._tokens = tokens
        self._vocabulary_size = vocabulary_size
        self._table = SamplingTable(len(tokens))
        self._adjustments = Adjustments(len(tokens), vocabulary_size)

    def add(self, added: Added) -> None:
        """A sequence enters a slot, in place of the one before. Output tokens that it already has are counted."""
        self._table.set(added.slot, added.sampling, added.num_prompt_tokens)
        self._adjustments.set(added.slot, added.sampling, added.token_ids, added.num_prompt_tokens)

    @torch.inference_mode()
    def choose(
        self,
        logits: torch.Tensor,
        slots: IntArray,
        positions: IntArray,
        masks: Mapping[int, memoryview] | None = None,
    ) -> Chosen:
        """Choose the next token of some sequences. The caller writes it to `tokens` before their next one is chosen.

        Args:
            logits: float32 `[rows, vocabulary]`, finite, contiguous; changed in place by penalties, bias and the like.
                Further columns are padding of the model's vocabulary, and never chosen.
            slots: of each row's sequence; no slot twice.
            positions: of each row's new token in its sequence. All tokens before it are known.
            masks: by row, bits of the only tokens that it may choose, see `Late`.

        Raises:
            NotFinite: the logits of a row are not finite.
        """
        if logits.shape[1] > self._vocabulary_size:
            logits = logits[:, : self._vocabulary_size].contiguous()
        table = self._table
        only = {row: allowed_ids(mask, logits.shape[1]) for row, mask in (masks or {}).items()}
        changed = self._adjustments.adjusted(slots, positions)
        if only:
            changed = np.union1d(changed, list(only))
        reported_rows = np.flatnonzero(table.num_logprobs[slots] >= 0)
        if not (len(changed) or len(reported_rows) or table.temperature[slots].any()):
            return Chosen(drawing.best(logits), [])
        weighed_at = drawing.weighed_at(table, slots, logits.shape[1])
        unchanged_at = weighed_at.copy()
        unchanged_at[changed] = 0.0
        scores = Scores.of(logits, unchanged_at)
        drawing.check_finite(scores)
        reported = scores.rows(torch.from_numpy(reported_rows)) if len(reported_rows) else None
        if len(changed):
            # Log-probabilities are reported from the model's own logits, before adjustments.
            reported = reported and reported.copy()
            self._adjustments.apply(logits.numpy(), slots, positions, self._tokens, only)
            scores.refresh(changed.tolist(), weighed_at)
        tokens = drawing.choose(scores, table, slots, positions)
        self._adjustments.record(slots, tokens)
        if reported is None:
            return Chosen(tokens, [])
        logprobs: list[TokenLogprobs | None] = [None] * len(tokens)
        of_wanted = drawing.logprobs(reported, tokens[reported_rows], table.num_logprobs[slots[reported_rows]])
        for i, one in zip(reported_rows.tolist(), of_wanted, strict=True):
            logprobs[i] = one
        return Chosen(tokens, logprobs)


def logprobs_of(logits: torch.Tensor, tokens: IntArray, num_alternatives: int) -> list[TokenLogprobs]:
    """Log-probabilities of one given token per row of `logits`, for prompts. Raises NotFinite."""
    scores = Scores.of(logits)
    drawing.check_finite(scores)
    return drawing.logprobs(scores, tokens, np.full(len(tokens), num_alternatives))
