"""`SamplingParams`: the sampling fields of a request with the names and defaults of vLLM's Python class.

Its ranges and refusals are those of the HTTP body that it becomes.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from neuron_runtime.not_built import Surface, refuse
from neuron_runtime.requests.bodies import CompletionBody, typed
from neuron_runtime.requests.parameters import parameters_of
from neuron_runtime.requests.sampling_fields import DEFAULT_COMPLETION_TOKENS, SamplingFields


class SamplingParams(SamplingFields, kw_only=True):
    """How to continue a prompt; names and defaults are those of vLLM's class.

    Values out of range and parameters that are not built yet are refused when the object is made; values that depend on
    the model (lengths, the vocabulary) when a prompt is there. None means vLLM's default, not the model's.

    Raises:
        InvalidRequest: naming the parameter.
    """

    max_tokens: int | None = DEFAULT_COMPLETION_TOKENS
    """None: as many as fit. More than fit are cut to what fits, as in vLLM."""
    logprobs: int | None = None
    """How many alternatives to report per token, the chosen one always; 0: only that one."""
    best_of: int | None = None
    detokenize: bool = True
    early_stopping: bool = False
    extra_args: dict[str, Any] | None = None
    guided_decoding: Any = None
    length_penalty: float = 1.0
    logits_processors: list[Any] | None = None
    spaces_between_special_tokens: bool = True
    structured_outputs: Any = None
    use_beam_search: bool = False

    def __post_init__(self) -> None:
        for name, row in parameters_of(SamplingFields).items():
            if getattr(self, name) is None and row.default is not None:
                setattr(self, name, row.default)
        self.body({"prompt": [0]}, 1)

    def clone(self) -> SamplingParams:
        """A copy that can be changed."""
        return copy.deepcopy(self)

    def body(self, prompt: Mapping[str, Any], max_model_length: int) -> CompletionBody:
        """What the server would be asked. Raises InvalidRequest.

        prompt: the fields that say what is continued, which win over these parameters.
        """
        given = {}
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if not refuse(Surface.SAMPLING_PARAMS, name, value):
                given[name] = value
        if given["max_tokens"] is None:
            given["max_tokens"] = max_model_length
        return typed({**given, **prompt}, CompletionBody)
