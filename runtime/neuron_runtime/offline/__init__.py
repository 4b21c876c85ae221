"""`LLM` and `SamplingParams`: a model in the caller's own process, with the arguments and outputs of vLLM's classes.

For scripts, notebooks and benchmarks; `from neuron_runtime import LLM, SamplingParams`. Requests pass the server's
admission. No process is started, no port is opened, and torch is imported only when an `LLM` is made.

Contract: https://docs.vllm.ai/en/latest/api/vllm/entrypoints/llm.html
"""

from neuron_runtime.offline.llm import LLM
from neuron_runtime.offline.outputs import CompletionOutput, Logprob, RequestOutput
from neuron_runtime.offline.sampling_params import SamplingParams

__all__ = ["LLM", "CompletionOutput", "Logprob", "RequestOutput", "SamplingParams"]
