"""A torch backend whose decoder is a table: logits depend only on a token and its position, exactly, in any batch.

So sampled tokens can be compared bit for bit between batches of any shape, and distributions are known.
"""

from __future__ import annotations

from typing import Any

import torch

from neuron_runtime.backend.torch.backend import TorchBackend
from neuron_runtime.backend.torch.cache import KVCache, StepPlan
from neuron_runtime.core import BackendLimits


class MarkovDecoder:
    """Replaces `decoder.Decoder`.

    table: float32 `[period, vocabulary, vocabulary]`, logits after a token at a position modulo the period.
    """

    def __init__(self, table: torch.Tensor) -> None:
        self.table = table
        self.most_logits = 0
        """Rows of logits per call."""
        self.num_logits = 0
        """Rows of logits in total."""

    def forward(
        self, token_ids: torch.Tensor, plan: StepPlan, tap: object = None, placed: object = None
    ) -> torch.Tensor:
        return torch.stack((plan.positions % len(self.table), token_ids), dim=1)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        self.most_logits = max(self.most_logits, len(hidden))
        self.num_logits += len(hidden)
        return self.table[hidden[:, 0], hidden[:, 1]].clone()


def random_table(vocabulary: int, *, period: int = 3, seed: int = 0, scale: float = 2.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(period, vocabulary, vocabulary, generator=generator) * scale


def markov_backend(table: torch.Tensor, **changes: Any) -> TorchBackend:
    """A backend over the table, by default with blocks for all of its rows."""
    given: dict[str, Any] = {
        "max_rows": 4,
        "max_model_length": 64,
        "max_step_tokens": 16,
        "max_prefill_rows": 4,
        "block_size": 4,
        "num_blocks": 64,
        "vocabulary_size": table.shape[-1],
        "max_logprobs": 20,
        "reports_prompt_logprobs": True,
        "steps_in_flight": 2,
        "token_feedback": "device",
        **changes,
    }
    limits = BackendLimits(**given)
    cache = KVCache.empty((None,), (limits.num_blocks, 1, limits.block_size, 1), torch.float32)
    return TorchBackend(MarkovDecoder(table), cache, limits)  # type: ignore[arg-type]
