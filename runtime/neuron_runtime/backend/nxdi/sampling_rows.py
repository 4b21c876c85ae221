"""Sampling parameters of rows: as the device takes them, and for rows that the host samples from their logits.

Used by the backend. Every row's parameters come from its own request; nothing here depends on the order of rows.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from neuron_runtime.backend.host_sampling.sampler import Chosen, HostSampler
from neuron_runtime.backend.slots import IntArray
from neuron_runtime.core import Added, BackendLimits, Sampling, needs_host

GREEDY = (1.0, 1.0, 1.0)
"""Top_k, top_p, temperature. The device refuses temperature 0 with other values, and overwrites them."""
MIN_TEMPERATURE = 1e-5
"""Below it a row is greedy, as in vLLM: the device divides float32 logits by the temperature."""
LARGEST, SMALLEST = float(np.finfo(np.float32).max), float(np.finfo(np.float32).tiny)


def device_parameters(sampling: Sampling, global_topk: int) -> tuple[float, float, float]:
    """Top_k, top_p and temperature of a request's rows.

    Top_k 0 means all candidates of the device; NxD Inference itself would draw uniformly among them. Without candidates
    it does not sample, but takes parameters all the same.
    """
    if not global_topk or sampling.temperature < MIN_TEMPERATURE:
        return GREEDY
    top_k = sampling.top_k if 0 < sampling.top_k <= global_topk else global_topk
    return float(top_k), min(max(sampling.top_p, SMALLEST), 1.0), min(sampling.temperature, LARGEST)


class HostRows:
    """Tokens of rows that the host samples: all in mode `Host`, in `DeviceWithLogits` those that the device cannot.

    Used on the backend's thread alone: the step before may still be sampled while a batch is applied.
    """

    def __init__(self, limits: BackendLimits) -> None:
        self._limits = limits
        # The token sampled at the last position is known but never fed.
        self._tokens = np.zeros((limits.max_rows, limits.max_model_length + 1), dtype=np.int32)
        self._sampler = HostSampler(self._tokens, limits.vocabulary_size)
        self.of_host = np.full(limits.max_rows, limits.sampling == "Host")
        """For each slot, whether the host samples its rows."""

    def add(self, added: Added) -> None:
        self._tokens[added.slot, : len(added.token_ids)] = added.token_ids
        self._sampler.add(added)
        self.of_host[added.slot] = self._limits.sampling == "Host" or needs_host(added.sampling, self._limits)

    def choose(
        self,
        logits: torch.Tensor,
        slots: IntArray,
        positions: IntArray,
        masks: Mapping[int, memoryview] | None,
    ) -> Chosen:
        """See `HostSampler.choose`."""
        chosen = self._sampler.choose(logits, slots, positions, masks)
        self._tokens[slots, positions] = chosen.tokens
        return chosen
