"""Reads the JSON of vLLM's `--speculative-config` as the part `speculation` of the configuration.

`config.py` declares it as the reader of that flag and argument. It knows vLLM's keys only: bounds are checked with the
document.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from neuron_runtime.errors import ConfigProblems, InvalidConfig
from neuron_runtime.flags import json_value, model_uri
from neuron_runtime.not_built import Surface, refuse

EXAMPLE = '{"method": "ngram", "num_speculative_tokens": 4}'
NUMBERS = {"num_speculative_tokens": "numTokens", "prompt_lookup_min": "minMatch", "prompt_lookup_max": "maxMatch"}
"""Keys of the document by vLLM's."""
NGRAM = ("ngram", "[ngram]")
"""Words for drafts from the text itself; older versions of vLLM put them in the place of a draft model."""
WITH_MODEL = {"draft_model": "Draft", "eagle": "Eagle", "eagle3": "Eagle"}
"""Methods of the document by vLLM's words, of those that have a second model. Which EAGLE it is says its checkpoint."""
OF_NGRAM = ("prompt_lookup_min", "prompt_lookup_max")


def speculation(given: Any) -> dict[str, Any]:
    """Raises ValueError with every key that is wrong."""
    given = json_value(given) if isinstance(given, str) else given
    if not isinstance(given, Mapping):
        raise ValueError(f"must be an object such as {EXAMPLE}, got {given!r}")
    values = {key: value for key, value in given.items() if value is not None}
    problems = ConfigProblems()
    for key, value in values.items():
        with problems.collecting():
            known = refuse(Surface.SPECULATIVE, key, value, at=f"`{key}`") or key in NUMBERS or key == "model"
            if not known:
                problems.add(f"`{key}`", f"is no key of it: use method, model, {', '.join(NUMBERS)}")
    model = values.get("model", "")
    has_model = bool(model) and model not in NGRAM
    method = WITH_MODEL.get(str(values.get("method", "draft_model" if has_model else "")))
    if values and not {"method", "model"} & values.keys():
        problems.add("`method`", "is missing: set ngram, or draft_model with a model")
    if method and not (has_model and isinstance(model, str)):
        problems.add("`model`", "is missing: name the draft model")
    if has_model and not method:
        problems.add("`model`", f"is for the methods {', '.join(WITH_MODEL)}: leave it out, or set one of them")
    for key in OF_NGRAM:
        if method and key in values:
            problems.add(f"`{key}`", "is for the method ngram: leave it out")
    uri = ""
    try:
        problems.check()
        uri = model_uri(model) if method else ""
    except InvalidConfig as error:
        raise ValueError(str(error)) from error
    numbers = {path: values[key] for key, path in NUMBERS.items() if key in values}
    if method:
        return {"method": method, "model": {"uri": uri}, **numbers}
    return {"method": "NGram", **numbers} if values else {}
