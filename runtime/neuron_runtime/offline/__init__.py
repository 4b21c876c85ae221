"""`LLM` and `SamplingParams`: a model in the caller's process, with the arguments and outputs of vLLM's classes.

For scripts, notebooks and benchmarks; `from neuron_runtime import LLM, SamplingParams`. It uses the server's admission,
starts no process, opens no port, and imports torch only when an `LLM` is created.

Contract: https://docs.vllm.ai/en/latest/api/vllm/entrypoints/llm.html
"""

from neuron_runtime.offline.adapters import LoRARequest
from neuron_runtime.offline.llm import LLM
from neuron_runtime.offline.outputs import (
    CompletionOutput,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    Logprob,
    RequestOutput,
    ScoringOutput,
    ScoringRequestOutput,
)
from neuron_runtime.offline.pooling_params import PoolingParams
from neuron_runtime.offline.sampling_params import SamplingParams

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
