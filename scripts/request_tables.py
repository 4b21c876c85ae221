"""Tables of request fields and parameters, from the runtime's declarations. Called by `generate`."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import msgspec

from markdown_table import table
from neuron_runtime.apis.openai.body import ChatBody, CompletionBody
from neuron_runtime.core import SAMPLING_MODES
from neuron_runtime.not_built import LEAVE_OUT, NotBuilt, Surface, rows
from neuron_runtime.offline import SamplingParams
from neuron_runtime.requests.parameters import Parameter, parameters_of
from neuron_runtime.requests.sampling_fields import SamplingFields


def as_json(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))


def refused(where: Surface, spelled: Callable[[Any], str]) -> str:
    """The refused names of one surface as a paragraph, with the values that are accepted and the cure in brackets."""
    return paragraph(
        with_notes(f"`{row.name}`", (f"`{spelled(value)}`" for value in row.neutral), row)
        for row in rows(where)
        if row.has_effect
    )


def with_notes(name: str, accepted: Iterable[str], row: NotBuilt) -> str:
    """A refused name with its accepted values and its cure."""
    notes = [text for text in (", ".join(accepted), "" if row.cure == LEAVE_OUT else row.cure) if text]
    return f"{name} ({'; '.join(notes)})" if notes else name


def fields() -> str:
    """The body fields of both completion routes, without the sampling parameters, which have a page of their own."""
    both = (parameters_of(CompletionBody), parameters_of(ChatBody))
    completions, chat = both
    lines = []
    for name in completions | chat:
        rows = [(route, body[name]) for route, body in zip(("completions", "chat"), both, strict=True) if name in body]
        if completions.get(name) == chat.get(name):
            rows = [("both", completions[name])]
        for routes, row in rows:
            if row.acts:
                continue
            required = name in ("prompt", "messages")
            default = "required" if required else "" if row.default is None else f"`{as_json(row.default)}`"
            lines.append((f"`{name}`", routes, row.description, row.range, default))
    return table(("Field", "Route", "Meaning", "Range", "Default"), lines)


def fields_of(body: type[msgspec.Struct]) -> str:
    """The fields of the body of another API."""
    required = {one.name for one in msgspec.structs.fields(body) if one.required}
    return table(
        ("Field", "Meaning", "Range", "Default"),
        (
            (
                f"`{name}`",
                row.description,
                row.range,
                "required" if name in required else "" if row.default is None else f"`{as_json(row.default)}`",
            )
            for name, row in parameters_of(body).items()
        ),
    )


def sampling_parameters() -> str:
    """The sampling parameters with ranges and neutral values."""
    return table(
        ("Parameter", "Range", "Neutral", "Meaning"),
        (
            (name, row.range, ", ".join(f"`{as_json(value)}`" for value in row.neutral), row.description)
            for name, row in _sampling()
        ),
    )


def offline_parameters() -> str:
    """The supported fields of `SamplingParams`, with their defaults."""
    params = SamplingParams()
    refused_names = {row.name for row in rows(Surface.SAMPLING_PARAMS)}
    return table(
        ("Parameter", "Default"),
        (
            (f"`{name}`", f"`{getattr(params, name)!r}`")
            for name in SamplingParams.__struct_fields__
            if name not in refused_names
        ),
    )


def settings() -> str:
    """The names in generation_config.json that set defaults of sampling parameters."""
    return ", ".join(f"`{row.setting}`" for row in parameters_of(SamplingFields).values() if row.setting)


def sampling_modes() -> str:
    """Where each sampling parameter is computed in each mode."""
    return table(
        ("Parameter", *(f"`{mode}`" for mode in SAMPLING_MODES)),
        ((name, *(row.where(mode).value for mode in SAMPLING_MODES)) for name, row in _sampling()),
    )


def _sampling() -> Iterator[tuple[str, Parameter]]:
    """Sampling parameters of both routes; those that differ name their route."""
    shared = parameters_of(SamplingFields)
    yield from ((f"`{name}`", row) for name, row in shared.items() if row.acts)
    for body, route in ((CompletionBody, "completions"), (ChatBody, "chat")):
        for name, row in parameters_of(body).items():
            if row.acts and row != shared.get(name):
                yield f"`{name}` ({route})", row


def names(where: Surface, *, has_effect: bool) -> str:
    """The names of one surface as a paragraph."""
    return paragraph(f"`{row.name}`" for row in rows(where) if row.has_effect is has_effect)


def paragraph(words: Iterable[str]) -> str:
    return textwrap.fill(", ".join(words), 120, break_long_words=False, break_on_hyphens=False)
