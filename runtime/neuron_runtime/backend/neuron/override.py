"""The keys of `overrideNeuronConfig`, whichever Neuron library they are for: errors about names and types. Pure."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any

from neuron_runtime.errors import InvalidConfig

PATH = "$.overrideNeuronConfig"

KINDS: dict[type, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a word",
    list: "a list",
    dict: "an object",
}


def check_kind(kind: type, value: Any, at: str) -> None:
    """Raises InvalidConfig if a value has another type."""
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise InvalidConfig(at, f"must be {KINDS[kind]}, got {value!r}")


def near(name: str, known: Iterable[str]) -> str:
    """The end of an error about an unknown name."""
    found = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f"; did you mean `{found[0]}`?" if found else ""
