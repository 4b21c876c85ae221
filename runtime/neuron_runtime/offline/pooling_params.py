"""`PoolingParams`: how `LLM.embed` cuts texts and vectors, with the fields of vLLM's class."""

from __future__ import annotations

from dataclasses import dataclass

from neuron_runtime.requests.vectors import VectorOptions


@dataclass(frozen=True, slots=True)
class PoolingParams:
    """dimensions: numbers of a vector, where the model allows fewer than it has; None: all."""

    dimensions: int | None = None
    truncate_prompt_tokens: int | None = None
    """Longer texts are cut to so many tokens; -1: to the model's length; None: they are refused."""

    @property
    def options(self) -> VectorOptions:
        return VectorOptions(truncate_prompt_tokens=self.truncate_prompt_tokens)
