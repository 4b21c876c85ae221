"""`SamplingParams`: the sampling fields of a request, with the names and defaults of vLLM's class.

Ranges and refusals are those of HTTP bodies.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import msgspec

from neuron_runtime.apis.openai.body import CompletionBody
from neuron_runtime.not_built import Surface, refuse
from neuron_runtime.requests.conversion import typed
from neuron_runtime.requests.parameters import parameters_of
from neuron_runtime.requests.sampling_fields import DEFAULT_COMPLETION_TOKENS, SamplingFields


class SamplingParams(SamplingFields, kw_only=True):
    """How to continue a prompt; names and defaults are those of vLLM's class.

    Values out of range and unsupported parameters are refused on creation; values that depend on the model (lengths,
    vocabulary) when a prompt is submitted. None means vLLM's default, not the model's.

    Raises:
        InvalidRequest: names the parameter.
    """

    max_tokens: int | None = DEFAULT_COMPLETION_TOKENS
    """None: as many as fit. Larger values are reduced to what fits, as in vLLM."""
    logprobs: int | None = None
    """Number of alternatives per token, in addition to the chosen one."""
    best_of: int | None = None
    detokenize: bool = True
    early_stopping: bool = False
    extra_args: dict[str, Any] | None = None
    guided_decoding: Any = None
    length_penalty: float = 1.0
    logits_processors: list[Any] | None = None
    spaces_between_special_tokens: bool = True
    use_beam_search: bool = False

    def __post_init__(self) -> None:
        for name, row in parameters_of(SamplingFields).items():
            if getattr(self, name) is None and row.default is not None:
                setattr(self, name, row.default)
        self.body({"prompt": [0]}, 1)

    def clone(self) -> SamplingParams:
        return copy.deepcopy(self)

    def body(self, prompt: Mapping[str, Any], max_model_length: int) -> CompletionBody:
        """The equivalent request body. Raises InvalidRequest.

        prompt: fields of the prompt, which override these parameters.
        """
        values = msgspec.structs.asdict(self)
        fields = {name: value for name, value in values.items() if not refuse(Surface.SAMPLING_PARAMS, name, value)}
        if fields["max_tokens"] is None:
            fields["max_tokens"] = max_model_length
        return typed({**fields, **prompt}, CompletionBody)
