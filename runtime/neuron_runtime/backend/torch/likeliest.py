"""The likeliest tokens of each row without sorting the vocabulary: by the maxima of groups of neighbouring tokens.

Called by sampling and log-probabilities. One pass over the logits finds the largest one of each group; whatever is
asked afterwards (is a row finite, its best token, its best hundred) looks at groups instead of tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

GROUP = 64
"""Tokens whose logits share a maximum. Measured: with 32 the maxima take longer, with 128 what is read behind them."""


@dataclass(frozen=True, slots=True)
class Scores:
    """Logits of some rows and the maxima of their groups.

    logits: float32 `[rows, vocabulary]`.
    maxima: `[rows, groups]`, the last group being shorter where the vocabulary is no multiple of `GROUP`.
    """

    logits: torch.Tensor
    maxima: torch.Tensor

    @classmethod
    def of(cls, logits: torch.Tensor) -> Scores:
        return cls(logits, group_maxima(logits))

    @property
    def vocabulary(self) -> int:
        return self.logits.shape[1]

    def rows(self, index: torch.Tensor) -> Scores:
        """Some of the rows, in ascending order; no copy where they are all of them."""
        if len(index) == len(self.logits):
            return self
        return Scores(self.logits[index], self.maxima[index])

    def copy(self, index: torch.Tensor) -> Scores:
        """The same, but what happens to the one does not happen to the other."""
        return Scores(self.logits[index], self.maxima[index])

    def refresh(self, index: torch.Tensor) -> None:
        """Logits of these rows were changed in place."""
        self.maxima[index] = group_maxima(self.logits[index])

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
            return self.logits.topk(count, dim=-1)
        logits, ids = self._of_groups(self.maxima.topk(count, dim=-1, sorted=False).indices)
        values, at = logits.topk(count, dim=-1)
        return values, ids.gather(1, at)

    def _of_groups(self, groups: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits and ids of all tokens of some groups of each row: `[rows, groups * GROUP]` each."""
        ids = (groups.unsqueeze(-1) * GROUP + torch.arange(GROUP)).flatten(1)
        if not self.vocabulary % GROUP:
            return self.logits.gather(1, ids), ids
        outside = ids >= self.vocabulary
        ids = ids.clamp_max(self.vocabulary - 1)
        return self.logits.gather(1, ids).masked_fill_(outside, float("-inf")), ids


def group_maxima(logits: torch.Tensor) -> torch.Tensor:
    rows, vocabulary = logits.shape
    num_whole = vocabulary // GROUP
    shape, strides = (rows, num_whole, GROUP), (logits.stride(0), GROUP, 1)
    maxima = logits.as_strided(shape, strides).amax(dim=-1)
    if num_whole * GROUP == vocabulary:
        return maxima
    rest = logits[:, num_whole * GROUP :].amax(dim=-1, keepdim=True)
    return torch.cat((maxima, rest), dim=1)
