"""`HostSampler`: tokens and log-probabilities from logits, by each row's own parameters.

A backend creates one, tells it which sequence enters which slot, and calls it on one thread with the logits of any
rows: all of a step, or those that the device did not sample. The result of a row does not depend on other rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from neuron_runtime.backend.host_sampling import drawing
from neuron_runtime.backend.host_sampling.adjustments import Adjustments, allowed_ids
from neuron_runtime.backend.host_sampling.drawing import IntArray, SamplingTable
from neuron_runtime.backend.host_sampling.likeliest import Scores
from neuron_runtime.core import NO_TOKEN, Added, TokenLogprobs

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


class Verified(NamedTuple):
    """By row, its accepted drafts and one more token, and their log-probabilities if the row requests them."""

    tokens: list[tuple[int, ...]]
    logprobs: list[tuple[TokenLogprobs, ...]]

    def per_row(self, rows: IntArray, num_rows: int) -> PerRow:
        """See `Chosen.per_row`."""
        if not any(self.logprobs):
            return ()
        of_row = dict(zip(rows.tolist(), self.logprobs, strict=True))
        return tuple(of_row.get(row, ()) for row in range(num_rows))


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

    @torch.inference_mode()
    def verify(
        self,
        logits: torch.Tensor,
        slots: IntArray,
        positions: IntArray,
        drafts: IntArray,
        num_drafts: IntArray,
        *,
        masks: Mapping[int, memoryview] | None = None,
        num_masks: int = 1,
    ) -> Verified:
        """Choose the next tokens of some sequences, up to the first that is not the draft at its place.

        The tokens are those that `choose` would choose one at a time, and are written to `tokens`, since the next ones
        may depend on them.

        Args:
            logits: as in `choose`, but row after row, those behind its token and behind each of its drafts.
            slots: of each row's sequence; no slot twice.
            positions: of each row's first new token in its sequence. All tokens before it are known.
            drafts: `[rows, most drafts]`; row i has the first `num_drafts[i]`, and NO_TOKEN behind them.
            masks: by row, `num_masks` masks one behind the other; such a row gets at most so many tokens.

        Raises:
            NotFinite: the logits of a row are not finite.
        """
        masks, most = masks or {}, 1 + num_drafts
        begins, guesses = np.cumsum(most) - most, np.pad(drafts, ((0, 0), (0, 1)), constant_values=NO_TOKEN)
        most[list(masks)] = np.minimum(most[list(masks)], num_masks)
        tokens: list[tuple[int, ...]] = [()] * len(slots)
        logprobs: list[tuple[TokenLogprobs, ...]] = [()] * len(slots)
        plain = (self._table.temperature[slots] == 0.0) & (self._table.num_logprobs[slots] < 0)
        plain[self._adjustments.adjusted(slots, positions)] = False
        plain[list(masks)] = False
        if plain.any():
            rows = np.flatnonzero(plain)
            best = drawing.best(logits[:, : self._vocabulary_size])
            for row, begin, of_row in zip(rows.tolist(), begins[rows].tolist(), guesses[rows].tolist(), strict=True):
                found = best[begin : begin + int(most[row])].tolist()
                tokens[row] = tuple(found[: 1 + num_equal(found[:-1], of_row)])
                self._tokens[slots[row], positions[row] : positions[row] + len(tokens[row])] = tokens[row]
        left, place = np.flatnonzero(~plain), 0
        while len(left):
            here = {
                at: masks[row][place * size : (place + 1) * size]
                for at, row in enumerate(left.tolist())
                if row in masks and (size := len(masks[row]) // num_masks)
            }
            at = torch.from_numpy(begins[left] + place)
            chosen = self.choose(logits[at], slots[left], positions[left] + place, here)
            self._tokens[slots[left], positions[left] + place] = chosen.tokens
            reported = chosen.logprobs or [None] * len(left)
            for row, token, one in zip(left.tolist(), chosen.tokens.tolist(), reported, strict=True):
                tokens[row] += (token,)
                logprobs[row] += () if one is None else (one,)
            left = left[(place + 1 < most[left]) & (chosen.tokens == guesses[left, place])]
            place += 1
        return Verified(tokens, logprobs)


def num_equal(tokens: Sequence[int], drafts: Sequence[int]) -> int:
    """How many drafts from the first on are these tokens."""
    pairs = enumerate(zip(tokens, drafts, strict=False))
    return next((at for at, (token, draft) in pairs if token != draft), min(len(tokens), len(drafts)))


def logprobs_of(logits: torch.Tensor, tokens: IntArray, num_alternatives: int) -> list[TokenLogprobs]:
    """Log-probabilities of one given token per row of `logits`, for prompts. Raises NotFinite."""
    scores = Scores.of(logits)
    drawing.check_finite(scores)
    return drawing.logprobs(scores, tokens, np.full(len(tokens), num_alternatives))
