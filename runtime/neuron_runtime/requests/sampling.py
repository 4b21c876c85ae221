"""The sampling parameters of a request, and the model's defaults, as `core.Sampling`. Called by `admission`."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

from neuron_runtime.core import BackendLimits, Form, Sampling
from neuron_runtime.errors import InvalidRequest
from neuron_runtime.requests import token_ids
from neuron_runtime.requests.forms import form_of
from neuron_runtime.requests.generation_defaults import PARAMETERS, GenerationDefaults
from neuron_runtime.requests.options import Generate
from neuron_runtime.requests.parameters import Names
from neuron_runtime.requests.tools import ToolUse
from neuron_runtime.text.tokenizer import Tokenizer

GREEDY_TEMPERATURE = 1e-5
"""Temperatures up to this are greedy, because dividing logits by them overflows."""

SMALLEST_TOP_P = 1e-9
"""What 0 means: no set of tokens is smaller than the likeliest one."""

_OF_THE_ANSWER = {"max_tokens", "logprobs", "prompt_logprobs"}
"""What `admission` decides per prompt."""
SHARED = [one.name for one in fields(Sampling) if one.name in PARAMETERS and one.name not in _OF_THE_ANSWER]
"""Parameters with the same name in bodies and in `core.Sampling`."""


@dataclass(frozen=True)
class Sampler:
    """Creates `core.Sampling` for one model."""

    tokenizer: Tokenizer
    limits: BackendLimits
    defaults: GenerationDefaults
    vocabulary_size: int

    @cached_property
    def _defaults(self) -> dict[str, Any]:
        return {name: self.defaults.value(name) for name in SHARED}

    def sampling(self, options: Generate, names: Names, use: ToolUse | None, **reported: int | None) -> Sampling:
        """All of it but `max_tokens`, which depends on the prompt. Raises InvalidRequest.

        reported: `logprobs` and `prompt_logprobs`.
        """
        form = self._form(options, names, use)
        values: dict[str, Any] = {**reported, "seeded": options.seed is not None, "form": form}
        for name, default in self._defaults.items():
            value = getattr(options, name)
            if value is None:
                value = default
            convert = _CONVERSIONS.get(name)
            values[name] = value if convert is None else convert(self, value, options)
        return Sampling(**values)

    def _form(self, options: Generate, names: Names, use: ToolUse | None) -> Form | None:
        asked = form_of(options, names["response_format"])
        forced, strict = (None, None) if use is None else (use.forced, use.strict)
        # That of `response_format` is for text, of which an answer that must call a tool has none.
        if asked is not None and forced is not None and asked.field != names["response_format"]:
            message = f"`{forced.field}` and `{asked.field}` are two forms of one answer: leave one out"
            raise InvalidRequest(message, field=forced.field)
        form = forced or asked or strict
        if form is None:
            return None
        for name in ("ignore_eos", "min_tokens"):
            if getattr(options, name):
                raise InvalidRequest.at(name, f"contradicts `{form.field}`: the answer ends when the form is complete")
        if not self.defaults.stop_token_ids:
            raise InvalidRequest.at(form.field, "needs a model with an end token, and this one has none")
        return form

    def _stop_token_ids(self, ids: list[int] | None, options: Generate) -> frozenset[int]:
        ends = frozenset[int]() if options.ignore_eos else self.defaults.stop_token_ids
        return token_ids.stop_tokens(ids, self.vocabulary_size) | ends

    def _temperature(self, temperature: float, options: Generate) -> float:
        if temperature <= GREEDY_TEMPERATURE:
            return 0.0
        if self.limits.greedy_only:
            problem = "must be 0, because the device verifies drafts by the likeliest token alone: leave it out"
            raise InvalidRequest.at("temperature", f"{problem}, got {temperature}")
        return temperature

    def _top_k(self, top_k: int, options: Generate) -> int:
        most = self.limits.max_top_k
        if self.limits.sampling == "Device" and 0 < most < top_k:
            message = (
                f"`top_k` is at most {most} with Device sampling, got {top_k}: a larger one needs `DeviceWithLogits` "
                "or `Host`"
            )
            raise InvalidRequest(message, field="top_k")
        # To a device that draws from the likeliest tokens only, 0 does not mean all.
        every = not most and top_k >= self.tokenizer.vocabulary_size
        return 0 if top_k <= 0 or every else top_k


_CONVERSIONS: dict[str, Callable[[Sampler, Any, Generate], Any]] = {
    "temperature": Sampler._temperature,
    "top_p": lambda sampler, value, options: value or SMALLEST_TOP_P,
    "top_k": Sampler._top_k,
    "logit_bias": lambda sampler, value, options: token_ids.bias_entries(value, sampler.vocabulary_size),
    "allowed_token_ids": lambda sampler, value, options: token_ids.allowed_tokens(value, sampler.vocabulary_size),
    "bad_words": lambda sampler, value, options: token_ids.bad_word_sequences(value, sampler.tokenizer),
    "seed": lambda sampler, value, options: secrets.randbits(63) if value is None else value,
    "stop_token_ids": Sampler._stop_token_ids,
}
"""Conversions of parameters that `core.Sampling` does not hold as clients write them."""
