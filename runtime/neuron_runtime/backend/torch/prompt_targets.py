"""Which prompt tokens of a step get log-probabilities. Used by the backend on its device thread."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from neuron_runtime.backend.slots import FedRows, IntArray
from neuron_runtime.core import Added


class PromptTargets:
    """What the sequence in each slot requests for its prompt."""

    def __init__(self, num_slots: int) -> None:
        self._num_prompt_tokens = np.zeros(num_slots, dtype=np.int64)
        self.num_logprobs = np.full(num_slots, -1, dtype=np.int64)
        """Alternatives for each prompt token; -1: none requested, or already reported."""

    def add(self, added: Added) -> None:
        self._num_prompt_tokens[added.slot] = added.num_prompt_tokens
        # A sequence that has output tokens was preempted, after its prompt had been reported.
        is_new = len(added.token_ids) == added.num_prompt_tokens
        requested = added.sampling.prompt_logprobs if is_new else None
        self.num_logprobs[added.slot] = -1 if requested is None else requested

    def of_rows(self, rows: FedRows, tokens: npt.NDArray[np.int32]) -> list[tuple[int, IntArray]]:
        """Each row that feeds prompt tokens of such a request, with the tokens that follow the ones it feeds, up to the
        end of the prompt; `tokens` are those of all slots."""
        targets = []
        for row in np.flatnonzero(self.num_logprobs[rows.slots] >= 0).tolist():
            slot, begin, end = rows.slots[row], rows.start[row], rows.ends[row]
            following = tokens[slot, begin + 1 : min(end + 1, self._num_prompt_tokens[slot])]
            if len(following):
                targets.append((row, following.astype(np.int64)))
        return targets
