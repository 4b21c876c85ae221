"""The likeliest tokens of each row without sorting the vocabulary: by the maxima of groups of neighbouring tokens.

Called by sampling and log-probabilities. One pass over the logits finds the largest one of each group, and the mass of
rows that need it; whatever is asked afterwards (is a row finite, its best token, its best hundred) looks at groups
instead of tokens.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

FloatArray = npt.NDArray[np.float64]

GROUP = 128
"""Tokens whose logits share a maximum. Measured: with fewer there are more maxima to choose from, with more there is
more to read behind them."""
PART = 16
"""The tokens of the groups that were chosen are chosen from likewise, in parts of so many."""
ROWS_AT_ONCE = 8


@dataclass(frozen=True, slots=True)
class Scores:
    """Logits of some rows and the maxima of their groups. Rows are chosen without copying their logits.

    everything: float32 `[all rows, vocabulary]`, contiguous.
    index: int64 `[rows]`, which of them these are, ascending.
    maxima: `[rows, groups]`, the last group being shorter where the vocabulary is no multiple of `GROUP`.
    masses: `[rows, 1]`, the sum of `weigh` over the vocabulary, of rows for which a temperature was given.
    """

    everything: torch.Tensor
    index: torch.Tensor
    maxima: torch.Tensor
    masses: torch.Tensor

    @classmethod
    def of(cls, logits: torch.Tensor, temperature: FloatArray | None = None) -> Scores:
        """Of all rows of `logits`; a temperature of 0 (or none at all): the mass of that row is not needed."""
        num_rows, vocabulary = logits.shape
        made = cls(
            everything=logits,
            index=torch.arange(num_rows),
            maxima=torch.empty(num_rows, -(-vocabulary // GROUP)),
            masses=torch.ones(num_rows, 1),
        )
        made._look(range(0, num_rows, ROWS_AT_ONCE), ROWS_AT_ONCE, temperature)
        return made

    def __len__(self) -> int:
        return len(self.index)

    @property
    def vocabulary(self) -> int:
        return self.everything.shape[1]

    def rows(self, index: torch.Tensor) -> Scores:
        """Some of the rows, in ascending order."""
        return Scores(self.everything, self.index[index], self.maxima[index], self.masses[index])

    def parts(self) -> Iterator[tuple[slice, torch.Tensor]]:
        """A few rows at a time, and their logits; what is computed over so much stays in a processor's cache."""
        for begin in range(0, len(self), ROWS_AT_ONCE):
            rows = slice(begin, min(begin + ROWS_AT_ONCE, len(self)))
            yield rows, self._logits(self.index[rows])

    def take(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Logits of tokens `[rows, n]` of each row."""
        return self.everything.view(-1).take(token_ids + self.index.unsqueeze(1) * self.vocabulary)

    def copy(self) -> Scores:
        """The same, but what happens to the one does not happen to the other."""
        return Scores(self.everything[self.index], torch.arange(len(self)), self.maxima.clone(), self.masses.clone())

    def refresh(self, rows: Iterable[int], temperature: FloatArray | None = None) -> None:
        """Logits of these rows of all were changed in place."""
        self._look(rows, 1, temperature)

    def best(self) -> torch.Tensor:
        """The best token of each row, the first of several as good ones: int64 `[rows]`."""
        group = self.maxima.argmax(dim=-1, keepdim=True)
        at = self._of_groups(group).argmax(dim=-1, keepdim=True)
        return _ids(group, at).squeeze(1)

    def likeliest(self, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The `count` largest logits of each row, best first, and their ids: `[rows, count]` each.

        They lie in the `count` groups with the largest maxima. Of equal logits at the end any may be among them.
        """
        if count * GROUP * 4 > self.vocabulary:
            values, ids = zip(*(logits.topk(count, dim=-1) for _, logits in self.parts()), strict=True)
            return torch.cat(values), torch.cat(ids)
        groups = self.maxima.topk(count, dim=-1, sorted=False).indices
        logits = self._of_groups(groups)
        parts = logits.view(len(self), -1, PART).amax(dim=-1).topk(count, dim=-1, sorted=False).indices
        among = (parts.unsqueeze(-1) * PART + torch.arange(PART)).flatten(1)
        best, at = logits.gather(1, among).topk(count, dim=-1)
        return best, _ids(groups, among.gather(1, at))

    def _look(self, begins: Iterable[int], count: int, temperature: FloatArray | None) -> None:
        """Maxima and masses of `count` rows from each of `begins` on, while they are in the processor's cache."""
        given = np.zeros(len(self)) if temperature is None else temperature
        buffer = torch.empty(min(count, len(self)), self.vocabulary)
        for begin in begins:
            rows = slice(begin, begin + count)
            logits = self.everything[rows]
            self.maxima[rows] = group_maxima(logits)
            if given[rows].any():
                top = self.maxima[rows].amax(dim=-1, keepdim=True)
                some = torch.from_numpy(np.where(given[rows] > 0.0, given[rows], 1.0)).unsqueeze(1)
                self.masses[rows] = weigh(logits, top, some, buffer).sum(dim=-1, keepdim=True)

    def _logits(self, index: torch.Tensor) -> torch.Tensor:
        begin, end = int(index[0]), int(index[-1]) + 1
        return self.everything[begin:end] if end - begin == len(index) else self.everything[index]

    def _of_groups(self, groups: torch.Tensor) -> torch.Tensor:
        """Logits of all tokens of some groups of each row: `[rows, groups * GROUP]`, -inf behind the vocabulary."""
        if not self.vocabulary % GROUP:
            # Whole groups are copied, which takes a tenth of the time of taking tokens one by one.
            places = (self.index.unsqueeze(1) * self.maxima.shape[1] + groups).flatten()
            return self.everything.view(-1, GROUP).index_select(0, places).view(len(self), -1)
        token_ids = (groups.unsqueeze(-1) * GROUP + torch.arange(GROUP)).flatten(1)
        outside = token_ids >= self.vocabulary
        return self.take(token_ids.clamp_max(self.vocabulary - 1)).masked_fill_(outside, float("-inf"))


def _ids(groups: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    """Token ids of places `[rows, n]` in what `_of_groups` gave."""
    return groups.gather(1, at // GROUP) * GROUP + at % GROUP


def weigh(logits: torch.Tensor, top: torch.Tensor, temperature: torch.Tensor, buffer: torch.Tensor) -> torch.Tensor:
    """exp((logits - top) / temperature), float32 `[rows, vocabulary]`, in the first rows of a buffer of such rows.

    One buffer serves many calls: memory that the kernel has to hand out anew costs more than what is computed in it.

    Args:
        top, temperature: `[rows, 1]`.
    """
    # As a power of two, which takes half the time of one of e.
    log2s = (math.log2(math.e) / temperature).float()
    return torch.sub(logits, top, out=buffer[: len(logits)]).mul_(log2s).exp2_()


def group_maxima(logits: torch.Tensor) -> torch.Tensor:
    rows, vocabulary = logits.shape
    num_whole = vocabulary // GROUP
    shape, strides = (rows, num_whole, GROUP), (logits.stride(0), GROUP, 1)
    maxima = logits.as_strided(shape, strides).amax(dim=-1)
    if num_whole * GROUP == vocabulary:
        return maxima
    rest = logits[:, num_whole * GROUP :].amax(dim=-1, keepdim=True)
    return torch.cat((maxima, rest), dim=1)
