"""Reads the JSON of vLLM's `--speculative-config` as the part `speculation` of the configuration.

`config.py` declares it as the reader of that flag and argument. It knows vLLM's keys only: bounds are checked with the
document.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from neuron_runtime.errors import ConfigProblems, InvalidConfig
from neuron_runtime.flags import json_value
from neuron_runtime.not_built import Surface, refuse

EXAMPLE = '{"method": "ngram", "num_speculative_tokens": 4}'
NUMBERS = {"num_speculative_tokens": "numTokens", "prompt_lookup_min": "minMatch", "prompt_lookup_max": "maxMatch"}
"""Keys of the document by vLLM's."""
NGRAM = ("ngram", "[ngram]")
"""Words for drafts from the text itself; older versions of vLLM put them in the place of a draft model."""


def speculation(given: Any) -> dict[str, Any]:
    """Raises ValueError with every key that is wrong."""
    given = json_value(given) if isinstance(given, str) else given
    if not isinstance(given, Mapping):
        raise ValueError(f"must be an object such as {EXAMPLE}, got {given!r}")
    values = {key: value for key, value in given.items() if value is not None}
    problems = ConfigProblems()
    for key, value in values.items():
        with problems.collecting():
            if not refuse(Surface.SPECULATIVE, key, value, at=f"`{key}`") and key not in NUMBERS:
                problems.add(f"`{key}`", f"is no key of it: use method, {', '.join(NUMBERS)}")
    if values and not {"method", "model"} & values.keys():
        problems.add("`method`", "is missing: set ngram")
    try:
        problems.check()
    except InvalidConfig as error:
        raise ValueError(str(error)) from error
    numbers = {path: values[key] for key, path in NUMBERS.items() if key in values}
    return {"method": "NGram", **numbers} if values else {}
