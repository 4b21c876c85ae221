"""The sampling parameters as one table: what each may be, and where each sampling mode serves it.

Asked by whoever admits requests, the server and the offline class, before anything is computed: `check_ranges` as soon
as the values are there, `check_served` when it is known what will compute them. The functions below turn a client's
spelling of token ids into that of `core.Sampling`. Which mode a model runs in is decided when it is compiled:
`Device` (the device hands out tokens alone), `DeviceWithLogits` (it also hands out the logits of the sampled position,
for the rows that need them), `Host` (the host samples).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from neuron_runtime.core import BackendLimits
from neuron_runtime.errors import InvalidRequest
from neuron_runtime.not_built import is_neutral

MAX_BIASED_TOKENS = 1024
MAX_BAD_WORDS = 256
MAX_BAD_WORD_CHARACTERS = 256


ABOVE_ZERO = 5e-324
"""The least number above 0: the lower end of what must be positive."""


class Where(Enum):
    """Who acts on a parameter."""

    DEVICE = "device"
    HOST = "host"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter, named as clients name it.

    neutral: the values besides None that ask for nothing; they are accepted everywhere.
    lowest, highest: the range of a number, both ends included; None: no end, or one that depends on the model.
    """

    device: Where
    device_with_logits: Where
    host: Where
    neutral: tuple[Any, ...] = ()
    lowest: float | None = None
    highest: float | None = None

    @property
    def range(self) -> str:
        """In words."""
        low, high = self.lowest, self.highest
        least = "above 0" if low == ABOVE_ZERO else f"at least {low}"
        if high is None:
            return least
        return f"above 0 and at most {high}" if low == ABOVE_ZERO else f"from {low} to {high}"

    def where(self, mode: str) -> Where:
        return {"Device": self.device, "DeviceWithLogits": self.device_with_logits, "Host": self.host}[mode]

    def asks(self, value: Any) -> bool:
        """Whether a value changes anything."""
        return not is_neutral(value, self.neutral)


def _on_device(neutral: tuple[Any, ...] = (), lowest: float | None = None, highest: float | None = None) -> Parameter:
    return Parameter(Where.DEVICE, Where.DEVICE, Where.HOST, neutral, lowest, highest)


def _on_logits(neutral: tuple[Any, ...] = (), lowest: float | None = None, highest: float | None = None) -> Parameter:
    return Parameter(Where.REFUSED, Where.HOST, Where.HOST, neutral, lowest, highest)


def _on_tokens(neutral: tuple[Any, ...] = (), lowest: float | None = None, highest: float | None = None) -> Parameter:
    return Parameter(Where.HOST, Where.HOST, Where.HOST, neutral, lowest, highest)


PARAMETERS: Mapping[str, Parameter] = {
    "temperature": _on_device((1,), 0, 100),
    "top_k": _on_device((0, -1), -1),
    "top_p": _on_device((1,), ABOVE_ZERO, 1),
    "min_p": _on_logits((0,), 0, 1),
    "seed": _on_logits((), -(2**63), 2**63 - 1),
    "repetition_penalty": _on_logits((1,), 0.01, 100),
    "presence_penalty": _on_logits((0,), -2, 2),
    "frequency_penalty": _on_logits((0,), -2, 2),
    "logit_bias": _on_logits(({},)),
    "allowed_token_ids": _on_logits(),
    "bad_words": _on_logits(([],)),
    "min_tokens": _on_logits((0,), 0),
    "logprobs": _on_logits((False,), 0),
    "top_logprobs": _on_logits((0,), 0),
    "prompt_logprobs": Parameter(Where.REFUSED, Where.REFUSED, Where.HOST, (), 0),
    "max_tokens": _on_tokens((), 1),
    "max_completion_tokens": _on_tokens((), 1),
    "n": _on_tokens((1,), 1),
    "stop": _on_tokens(([],)),
    "stop_token_ids": _on_tokens(([],)),
    "ignore_eos": _on_tokens((False,)),
    "include_stop_str_in_output": _on_tokens((False,)),
    "echo": _on_tokens((False,)),
}
"""`prompt_logprobs` needs the logits of every position of the prompt, which no compiled Neuron graph hands out."""

COUNTS_OF_LOGPROBS = ("logprobs", "top_logprobs", "prompt_logprobs")

MODES = ("Device", "DeviceWithLogits", "Host")


def check_ranges(asked: object) -> None:
    """Every parameter that `asked` has as an attribute lies in its range; None asks for nothing.

    Raises:
        InvalidRequest: naming the field and the range.
    """
    for name, parameter in PARAMETERS.items():
        value = getattr(asked, name, None)
        if isinstance(value, bool) or not isinstance(value, int | float):
            continue
        low, high = parameter.lowest, parameter.highest
        # Written so that NaN lies in no range.
        if not ((low is None or value >= low) and (high is None or value <= high)):
            raise InvalidRequest(f"`{name}` must be {parameter.range}, got {value}", field=name)


def check_served(asked: object, limits: BackendLimits) -> None:
    """The sampling mode serves every parameter that asks for something.

    Raises:
        InvalidRequest: naming the field, and the mode that would serve it.
    """
    for name, parameter in PARAMETERS.items():
        value: Any = getattr(asked, name, None)
        if parameter.asks(value):
            check_one_served(name, limits)
            if name in COUNTS_OF_LOGPROBS and value > limits.max_logprobs:
                message = f"`{name}` is at most {limits.max_logprobs} here, got {value}"
                raise InvalidRequest(message, field=name)


def check_one_served(name: str, limits: BackendLimits, field: str | None = None) -> None:
    """The same for one parameter that is asked for, by a field of another name if `field` says so."""
    parameter = PARAMETERS[name]
    if parameter.where(limits.sampling) is Where.REFUSED:
        serving = " or ".join(f"`{mode}`" for mode in MODES if parameter.where(mode) is not Where.REFUSED)
        message = (
            f"`{field or name}` cannot be served with {limits.sampling} sampling, it needs {serving}: leave it out"
        )
        raise InvalidRequest(message, field=field or name)
    if name == "prompt_logprobs" and not limits.reports_prompt_logprobs:
        raise InvalidRequest(f"`{field or name}` cannot be served by this backend: leave it out", field=field or name)


def bias_entries(logit_bias: Mapping[Any, float] | None, vocabulary_size: int) -> tuple[tuple[int, float], ...]:
    """`core.Sampling.logit_bias` from a mapping whose keys are token ids, as JSON has it also in strings.

    Raises:
        InvalidRequest: naming the entry.
    """
    entries = {}
    for key, bias in (logit_bias or {}).items():
        token_id = _token_id(key)
        if token_id is None or not 0 <= token_id < vocabulary_size:
            raise _no_token("logit_bias", key, vocabulary_size)
        if not -100 <= bias <= 100:
            raise InvalidRequest(f"`logit_bias[{key}]` must be from -100 to 100, got {bias}", field="logit_bias")
        entries[token_id] = float(bias)
    if len(entries) > MAX_BIASED_TOKENS:
        message = f"`logit_bias` takes at most {MAX_BIASED_TOKENS} tokens, got {len(entries)}"
        raise InvalidRequest(message, field="logit_bias")
    return tuple(sorted(entries.items()))


def allowed_tokens(token_ids: Collection[int] | None, vocabulary_size: int) -> tuple[int, ...] | None:
    """`core.Sampling.allowed_token_ids`, each once. Raises InvalidRequest."""
    if token_ids is None:
        return None
    if not token_ids:
        raise InvalidRequest("`allowed_token_ids` must not be empty: name a token or leave it out", "allowed_token_ids")
    for token_id in token_ids:
        if not 0 <= token_id < vocabulary_size:
            raise _no_token("allowed_token_ids", token_id, vocabulary_size)
    return tuple(sorted(set(token_ids)))


def _token_id(key: Any) -> int | None:
    try:
        return int(key)
    except (TypeError, ValueError):
        return None


def _no_token(name: str, value: Any, vocabulary_size: int) -> InvalidRequest:
    message = f"`{name}`: {value!r} is not a token id of this model (0 to {vocabulary_size - 1})"
    return InvalidRequest(message, field=name)
