"""The runtime: serves language models over HTTP (`neuron-runtime serve`) or in the caller's process (`LLM`).

The offline classes are imported lazily, because every process of the runtime imports this package and most do not need
them.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from neuron_runtime.offline import (
        LLM,
        CompletionOutput,
        EmbeddingOutput,
        EmbeddingRequestOutput,
        Logprob,
        LoRARequest,
        PoolingParams,
        RequestOutput,
        SamplingParams,
        ScoringOutput,
        ScoringRequestOutput,
    )

__all__ = [
    "LLM",
    "CompletionOutput",
    "EmbeddingOutput",
    "EmbeddingRequestOutput",
    "LoRARequest",
    "Logprob",
    "PoolingParams",
    "RequestOutput",
    "SamplingParams",
    "ScoringOutput",
    "ScoringRequestOutput",
]


def __getattr__(name: str) -> object:
    if name in __all__:
        return getattr(importlib.import_module("neuron_runtime.offline"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
