"""The bare decode step of the torch backend: the same kernels on the same shapes, and nothing around them.

Called by `bench offline --raw`: it shows what scheduler, mirror, sampling options and the border between threads cost.
It has its own copy of the weights and runs on the engine's device thread, whose helpers it shares: with helpers of its
own both would be slow.
"""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import torch

from neuron_runtime.backend.torch.architecture import decoder_config
from neuron_runtime.backend.torch.cache import KVCache, StepRows
from neuron_runtime.backend.torch.loader import load_decoder
from neuron_runtime.backend.torch.sampling import best
from neuron_runtime.checkpoint import read_checkpoint
from neuron_runtime.core import BackendLimits


class RawSteps:
    """A decoder and a cache in the slot layout, in the dtype of the file.

    limits: as the engine has them, so that both have caches of one shape.
    """

    def __init__(self, model_dir: Path, limits: BackendLimits) -> None:
        checkpoint = read_checkpoint(model_dir)
        model = decoder_config(checkpoint.config)
        stored = checkpoint.tensors["model.embed_tokens.weight"].dtype
        dtype = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}[stored]
        self._decoder = load_decoder(checkpoint, model, dtype, lambda stage, share: None)
        self._cache = KVCache(
            windows=model.windows,
            num_lines=limits.max_rows,
            num_kv_heads=model.num_kv_heads,
            line_length=limits.max_model_length,
            head_dim=model.head_dim,
            dtype=dtype,
        )

    @torch.inference_mode()
    def decode(self, num_rows: int, start: int, num_steps: int) -> list[float]:
        """Seconds of each of `num_steps` greedy steps of `num_rows` rows, the first at position `start`."""
        token_ids = torch.zeros(num_rows, dtype=torch.int64)
        lines, ones = np.arange(num_rows).reshape(-1, 1), np.ones(num_rows, dtype=np.int64)
        seconds = []
        for position in range(start, start + num_steps):
            began = time.perf_counter()
            plan = self._cache.plan(StepRows(start=np.full(num_rows, position), num_tokens=ones, lines=lines))
            token_ids = torch.from_numpy(best(self._decoder.logits(self._decoder.forward(token_ids, plan))))
            seconds.append(time.perf_counter() - began)
        return seconds
