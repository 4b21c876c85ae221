"""The likeliest tokens of each row without sorting the vocabulary: by the maxima of groups of neighbouring tokens.

Called by sampling and log-probabilities. One pass over the logits finds the largest one of each group; whatever is
asked afterwards (is a row finite, its best token, its best hundred) looks at groups instead of tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

GROUP = 64
"""Tokens whose logits share a maximum. Measured: with 32 the maxima take longer, with 128 what is read behind them."""

ROWS_AT_ONCE = 8


@dataclass(frozen=True, slots=True)
class Scores:
    """Logits of some rows and the maxima of their groups. Rows are chosen without copying their logits.

    everything: float32 `[all rows, vocabulary]`, contiguous.
    index: int64 `[rows]`, which of them these are, ascending.
    maxima: `[rows, groups]`, the last group being shorter where the vocabulary is no multiple of `GROUP`.
    """

    everything: torch.Tensor
    index: torch.Tensor
    maxima: torch.Tensor

    @classmethod
    def of(cls, logits: torch.Tensor) -> Scores:
        return cls(logits, torch.arange(len(logits)), group_maxima(logits))

    def __len__(self) -> int:
        return len(self.index)

    @property
    def vocabulary(self) -> int:
        return self.everything.shape[1]

    def rows(self, index: torch.Tensor) -> Scores:
        """Some of the rows, in ascending order."""
        return Scores(self.everything, self.index[index], self.maxima[index])

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
        return Scores(self.everything[self.index], torch.arange(len(self)), self.maxima.clone())

    def refresh(self, rows: Iterable[int]) -> None:
        """Logits of these rows of all were changed in place."""
        for row in rows:
            self.maxima[row] = group_maxima(self.everything[row : row + 1])

    def best(self) -> torch.Tensor:
        """The best token of each row, the first of several as good ones: int64 `[rows]`."""
        group = self.maxima.argmax(dim=-1, keepdim=True)
        logits, ids = self._of_groups(group)
        return ids.gather(1, logits.argmax(dim=-1, keepdim=True)).squeeze(1)

    def likeliest(self, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The `count` largest logits of each row, best first, and their ids: `[rows, count]` each.

        They lie in the `count` groups with the largest maxima. Of equal logits at the end any may be among them.
        """
        if count * GROUP * 4 > self.vocabulary:
            values, ids = zip(*(logits.topk(count, dim=-1) for _, logits in self.parts()), strict=True)
            return torch.cat(values), torch.cat(ids)
        logits, token_ids = self._of_groups(self.maxima.topk(count, dim=-1, sorted=False).indices)
        best, at = logits.topk(count, dim=-1)
        return best, token_ids.gather(1, at)

    def _logits(self, index: torch.Tensor) -> torch.Tensor:
        begin, end = int(index[0]), int(index[-1]) + 1
        return self.everything[begin:end] if end - begin == len(index) else self.everything[index]

    def _of_groups(self, groups: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits and ids of all tokens of some groups of each row: `[rows, groups * GROUP]` each."""
        ids = (groups.unsqueeze(-1) * GROUP + torch.arange(GROUP)).flatten(1)
        if not self.vocabulary % GROUP:
            return self.take(ids), ids
        outside = ids >= self.vocabulary
        ids = ids.clamp_max(self.vocabulary - 1)
        return self.take(ids).masked_fill_(outside, float("-inf")), ids


def group_maxima(logits: torch.Tensor) -> torch.Tensor:
    rows, vocabulary = logits.shape
    num_whole = vocabulary // GROUP
    shape, strides = (rows, num_whole, GROUP), (logits.stride(0), GROUP, 1)
    maxima = logits.as_strided(shape, strides).amax(dim=-1)
    if num_whole * GROUP == vocabulary:
        return maxima
    rest = logits[:, num_whole * GROUP :].amax(dim=-1, keepdim=True)
    return torch.cat((maxima, rest), dim=1)
