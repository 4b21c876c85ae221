"""The likeliest tokens of each row without sorting the vocabulary: by the maxima of groups of neighbouring tokens.

Called by sampling and log-probabilities. One pass over the logits finds the maximum of each group, and the mass of
rows that need it. Later queries (is a row finite, its best token, its best hundred) read groups instead of tokens.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

FloatArray = npt.NDArray[np.float64]

GROUP = 128
"""Tokens per maximum. Measured: smaller groups have more maxima to search, larger ones more tokens to read."""
PART = 8
"""Tokens per maximum when searching within the chosen groups."""
ROWS_AT_ONCE = 8
MAX_SHIFT = 128.0
"""Rows with a smaller shift (top divided by temperature) are shifted and scaled in one pass: rounding the shift then
changes weights by a relative error below 3e-6."""


@dataclass(frozen=True, slots=True)
class Scores:
    """Logits of some rows and the maxima of their groups. Rows are chosen without copying their logits.

    everything: float32 `[all rows, vocabulary]`, contiguous.
    index: int64 `[rows]`, positions of these rows in `everything`, ascending.
    maxima: `[rows, groups]`; the last group is shorter where the vocabulary is not a multiple of `GROUP`.
    top, top_group: `[rows, 1]`, the largest logit and the first group that contains it.
    masses: `[rows, 1]`, the sum of `weigh` over the vocabulary, for rows with a temperature.
    """

    everything: torch.Tensor
    index: torch.Tensor
    maxima: torch.Tensor
    top: torch.Tensor
    top_group: torch.Tensor
    masses: torch.Tensor

    @classmethod
    def of(cls, logits: torch.Tensor, temperature: FloatArray | None = None) -> Scores:
        """Scores of all rows of `logits`. With temperature 0, or without one, the mass of a row is not computed."""
        num_rows, vocabulary = logits.shape
        made = cls(
            everything=logits,
            index=torch.arange(num_rows),
            maxima=torch.empty(num_rows, -(-vocabulary // GROUP)),
            top=torch.empty(num_rows, 1),
            top_group=torch.empty(num_rows, 1, dtype=torch.int64),
            masses=torch.ones(num_rows, 1),
        )
        if temperature is None or not temperature.any():
            made._look(slice(0, num_rows))
            return made
        buffer = torch.empty(min(ROWS_AT_ONCE, num_rows), vocabulary)
        for begin in range(0, num_rows, ROWS_AT_ONCE):
            rows = slice(begin, min(begin + ROWS_AT_ONCE, num_rows))
            made._look(rows)
            made._weigh(rows, temperature[rows], buffer)
        return made

    def __len__(self) -> int:
        return len(self.index)

    @property
    def vocabulary(self) -> int:
        return self.everything.shape[1]

    def rows(self, index: torch.Tensor) -> Scores:
        """The rows at `index`, which is ascending."""
        if len(index) == len(self):
            return self
        chosen = (one[index] for one in (self.index, self.maxima, self.top, self.top_group, self.masses))
        return Scores(self.everything, *chosen)

    def parts(self) -> Iterator[tuple[slice, torch.Tensor]]:
        """A few rows at a time with their logits, so that intermediate results fit the processor's cache."""
        for begin in range(0, len(self), ROWS_AT_ONCE):
            rows = slice(begin, min(begin + ROWS_AT_ONCE, len(self)))
            yield rows, self._logits(self.index[rows])

    def logits(self, i: int) -> torch.Tensor:
        """Logits of one row: `[vocabulary]`."""
        return self.everything[int(self.index[i])]

    def take(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Logits of tokens `[rows, n]` of each row."""
        return self.everything.view(-1).take(token_ids + self.index.unsqueeze(1) * self.vocabulary)

    def buffer(self, num_rows: int) -> torch.Tensor:
        """A buffer for weights of `num_rows` rows, in whole groups; 0 beyond the vocabulary."""
        made = torch.empty(num_rows, self.maxima.shape[1] * GROUP)
        made[:, self.vocabulary :] = 0.0
        return made

    def copy(self) -> Scores:
        """A deep copy."""
        cloned = (one.clone() for one in (self.maxima, self.top, self.top_group, self.masses))
        return Scores(self.everything[self.index], torch.arange(len(self)), *cloned)

    def refresh(self, rows: Iterable[int], temperature: FloatArray | None = None) -> None:
        """Recompute rows of `everything` whose logits were changed in place."""
        buffer = torch.empty(1, self.vocabulary)
        for row in rows:
            one = slice(row, row + 1)
            self._look(one)
            if temperature is not None:
                self._weigh(one, temperature[one], buffer)

    def best(self) -> torch.Tensor:
        """The best token of each row, the first one on a tie: int64 `[rows]`."""
        at = self.of_groups(self.top_group).argmax(dim=-1, keepdim=True)
        return _ids(self.top_group, at).squeeze(1)

    def likeliest(self, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The `count` largest logits of each row, best first, and their ids: `[rows, count]` each.

        They are in the `count` groups with the largest maxima. Ties at the end are broken arbitrarily.
        """
        if count * GROUP * 4 > self.vocabulary:
            values, ids = zip(*(logits.topk(count, dim=-1) for _, logits in self.parts()), strict=True)
            return torch.cat(values), torch.cat(ids)
        groups = self.maxima.topk(count, dim=-1, sorted=False).indices
        logits = self.of_groups(groups)
        # Tokens of a part are a stride apart, so that the maxima of neighbouring parts are vectorized.
        stride = logits.shape[1] // PART
        parts = logits.view(len(self), PART, stride).amax(dim=1).topk(count, dim=-1, sorted=False).indices
        among = (parts.unsqueeze(1) + torch.arange(0, PART * stride, stride).unsqueeze(1)).flatten(1)
        best, at = logits.gather(1, among).topk(count, dim=-1)
        return best, _ids(groups, among.gather(1, at))

    def _look(self, rows: slice) -> None:
        """Compute the maxima and tops of rows."""
        self.maxima[rows] = group_maxima(self.everything[rows])
        torch.max(self.maxima[rows], dim=-1, keepdim=True, out=(self.top[rows], self.top_group[rows]))

    def _weigh(self, rows: slice, temperature: FloatArray, buffer: torch.Tensor) -> None:
        """Compute the masses of rows right after `_look`, while they are in the processor's cache."""
        if temperature.any():
            some = np.where(temperature > 0.0, temperature, 1.0)
            weights = weigh(self.everything[rows], self.top[rows], some, buffer)
            torch.sum(weights, dim=-1, keepdim=True, out=self.masses[rows])

    def _logits(self, index: torch.Tensor) -> torch.Tensor:
        begin, end = int(index[0]), int(index[-1]) + 1
        return self.everything[begin:end] if end - begin == len(index) else self.everything[index]

    def of_groups(self, groups: torch.Tensor) -> torch.Tensor:
        """Logits of all tokens of some groups of each row: `[rows, groups * GROUP]`, -inf beyond the vocabulary."""
        if not self.vocabulary % GROUP:
            # Copying whole groups takes a tenth of the time of copying single tokens.
            places = (self.index.unsqueeze(1) * self.maxima.shape[1] + groups).flatten()
            return self.everything.view(-1, GROUP).index_select(0, places).view(len(self), -1)
        token_ids = (groups.unsqueeze(-1) * GROUP + torch.arange(GROUP)).flatten(1)
        outside = token_ids >= self.vocabulary
        return self.take(token_ids.clamp_max(self.vocabulary - 1)).masked_fill_(outside, float("-inf"))


def _ids(groups: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    """Token ids of positions `[rows, n]` in the result of `of_groups`."""
    return groups.gather(1, at // GROUP) * GROUP + at % GROUP


def weigh(logits: torch.Tensor, top: torch.Tensor, temperature: FloatArray, buffer: torch.Tensor) -> torch.Tensor:
    """exp((logits - top) / temperature), float32 `[rows, vocabulary]`, in the first rows of `buffer`.

    Reuse one buffer: getting fresh memory from the kernel costs more than this computation. The result of a row does
    not depend on other rows; neighbours with the same method are computed together.

    top: `[rows, 1]`. temperature: `[rows]`.
    """
    # exp2 takes half the time of exp.
    rates = (math.log2(math.e) / temperature).astype(np.float32)
    shift, out = top * torch.from_numpy(-rates).unsqueeze(1), buffer[: len(logits)]
    ways = zip(rates.tolist(), (shift.squeeze(1).abs() < MAX_SHIFT).tolist(), strict=True)
    begin = 0
    for (rate, at_once), group in itertools.groupby(ways):
        rows = slice(begin, begin := begin + len(list(group)))
        if at_once:
            torch.add(shift[rows], logits[rows], alpha=rate, out=out[rows])
        else:
            torch.sub(logits[rows], top[rows], out=out[rows]).mul_(rate)
    return out.exp2_()


def group_maxima(logits: torch.Tensor) -> torch.Tensor:
    rows, vocabulary = logits.shape
    num_whole = vocabulary // GROUP
    shape, strides = (rows, num_whole, GROUP), (logits.stride(0), GROUP, 1)
    maxima = logits.as_strided(shape, strides).amax(dim=-1)
    if num_whole * GROUP == vocabulary:
        return maxima
    rest = logits[:, num_whole * GROUP :].amax(dim=-1, keepdim=True)
    return torch.cat((maxima, rest), dim=1)


def group_sums(weights: torch.Tensor) -> torch.Tensor:
    """Sums over each group of the last dimension, which consists of whole groups."""
    return weights.view(*weights.shape[:-1], -1, GROUP).sum(dim=-1)
