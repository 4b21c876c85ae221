"""Declarations of request fields: description, range, neutral values, default, and the sampling modes that serve it.

Bodies and options declare each field once with a `Parameter`. Range checks, model defaults, the offline class, the
published schema and the tables of the docs are derived from it. The sampling mode of a model is set when it is
compiled: `Device` (the device returns only tokens), `DeviceWithLogits` (it also returns the logits of the sampled
position for rows that need them), or `Host` (the host samples).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import Enum
from functools import cache
from typing import Any, get_args, get_type_hints

import msgspec

from neuron_runtime.core import ACTS, SAMPLING_MODES, Acts, BackendLimits
from neuron_runtime.errors import InvalidRequest
from neuron_runtime.not_built import is_neutral


class Where(Enum):
    """What acts on a parameter."""

    DEVICE = "device"
    HOST = "host"
    REFUSED = "refused"


_BY_HOST_ONLY = (Where.REFUSED, Where.HOST, Where.HOST)
_WHERE: dict[Acts | None, tuple[Where, Where, Where]] = {
    Acts.DEVICE: (Where.DEVICE, Where.DEVICE, Where.HOST),
    Acts.HOST: _BY_HOST_ONLY,
    Acts.DRAW: _BY_HOST_ONLY,
    Acts.PROMPT: (Where.REFUSED, Where.REFUSED, Where.HOST),
    Acts.TOKENS: (Where.HOST, Where.HOST, Where.HOST),
}
"""What acts on a parameter in each of SAMPLING_MODES."""


@dataclass(frozen=True, slots=True)
class Parameter:
    """Declaration of one field besides its name and type.

    acts: what acts on it; None: as on the field of `core.Sampling` with the same name, and without one, it does not
        affect sampling.
    lowest, highest: the range of a number, inclusive; None: unbounded, or bounded by the model.
    neutral: values besides None that have no effect; every mode and every route accepts them.
    default: the meaning of None if the model has no default.
    setting: name of the model's default in generation_config.json; empty: none.
    description: see `parameters_of`.
    """

    acts: Acts | None = None
    lowest: float | None = None
    highest: float | None = None
    neutral: tuple[Any, ...] = ()
    default: Any = None
    setting: str = ""
    description: str = ""

    @property
    def range(self) -> str:
        """In words; empty if there is none."""
        low, high = self.lowest, self.highest
        if low is None:
            return ""
        if high is None:
            return f"at least {low}"
        return f"from {low} to {high}"

    def where(self, mode: str) -> Where:
        """Raises KeyError if it does not affect sampling."""
        return _WHERE[self.acts][SAMPLING_MODES.index(mode)]

    def check(self, name: str, value: Any) -> None:
        """Raises InvalidRequest for a value outside the range."""
        low, high = self.lowest, self.highest
        if value is None or low is None:
            return
        # NaN must be outside every range.
        if not (value >= low and (high is None or value <= high)):
            raise InvalidRequest.at(name, f"must be {self.range}, got {value}")


class Names(dict[str, str]):
    """What the client's API calls a field, by our name, for errors. A field that is not listed has our name."""

    def __missing__(self, name: str) -> str:
        return name


NO_NAMES = Names()


@cache
def parameters_of(struct: type[msgspec.Struct]) -> dict[str, Parameter]:
    """All fields by the client's name, declared as `Annotated[type, "Description", Parameter(...)]`, or with less."""
    hints = get_type_hints(struct, include_extras=True)
    return {
        client_name: replace(
            row,
            acts=row.acts or ACTS.get(name),
            description=next((one for one in annotations if isinstance(one, str)), ""),
        )
        for name, client_name in zip(struct.__struct_fields__, struct.__struct_encode_fields__, strict=True)
        for annotations in [tuple(_annotations(hints[name]))]
        for row in [next((one for one in annotations if isinstance(one, Parameter)), Parameter())]
    }


def _annotations(hint: Any) -> Iterator[Any]:
    """Annotations of a type, then those of its parts."""
    yield from getattr(hint, "__metadata__", ())
    for part in get_args(hint):
        yield from _annotations(part)


def check_served(options: msgspec.Struct, limits: BackendLimits, names: Names = NO_NAMES) -> None:
    """Check that the sampling mode serves every parameter that is not neutral. Raises InvalidRequest with the field and
    the mode that would serve it."""
    for name, row in parameters_of(type(options)).items():
        value = getattr(options, name)
        if value is not None and row.acts and not is_neutral(value, row.neutral):
            check_parameter_served(names[name], row, limits)
            if name in _COUNTS_OF_LOGPROBS and value is not True and value > limits.max_logprobs:
                raise InvalidRequest.at(names[name], f"must be at most {limits.max_logprobs}, got {value}")


def check_parameter_served(name: str, row: Parameter, limits: BackendLimits) -> None:
    """The same for one parameter; `name` is its name in the error."""
    if row.where(limits.sampling) is Where.REFUSED:
        serving = " or ".join(f"`{mode}`" for mode in SAMPLING_MODES if row.where(mode) is not Where.REFUSED)
        message = f"`{name}` is not supported with {limits.sampling} sampling, it needs {serving}: leave it out"
        raise InvalidRequest(message, field=name)
    if row.acts is Acts.PROMPT and not limits.reports_prompt_logprobs:
        raise InvalidRequest.at(name, "is not supported by this backend: leave it out")


_COUNTS_OF_LOGPROBS = ("logprobs", "top_logprobs", "prompt_logprobs")
