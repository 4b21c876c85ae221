"""Reads the JSON of vLLM's `--speculative-config` as the part `speculation` of the configuration.

`config.py` declares it as the reader of that flag and argument; `arguments.py` brings the separate flags of older
versions into its form. It knows vLLM's keys only: bounds are checked with the document.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
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
OLDER_MODEL, OLDER_LENGTH = "speculative_model", "speculative_max_model_len"
OLDER = {
    OLDER_MODEL: "model",
    "num_speculative_tokens": "num_speculative_tokens",
    "ngram_prompt_lookup_min": "prompt_lookup_min",
    "ngram_prompt_lookup_max": "prompt_lookup_max",
}
"""Keys by the arguments that older versions of vLLM have instead. A method there is none: n-grams are a model."""
OLDER_NUMBERS = (*[name for name in OLDER if name != OLDER_MODEL], OLDER_LENGTH)
OLDER_NAMES = (OLDER_MODEL, *OLDER_NUMBERS)


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
    if values and "method" not in values and not model:
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


def with_older_names(arguments: Mapping[str, Any], written: Callable[[str], str]) -> dict[str, Any]:
    """The arguments with `speculative_config` instead of the older ones. Raises InvalidConfig.

    written: how errors write the name of an argument.
    """
    values, problems = dict(arguments), ConfigProblems()
    older = {name: value for name in OLDER_NAMES if (value := values.pop(name, None)) is not None}
    if not older:
        return values
    config, model, length = written("speculative_config"), written(OLDER_MODEL), written("max_model_len")
    for name in older:
        if "speculative_config" in values:
            problems.add(written(name), f"is an older form of {config}: leave it out")
        elif OLDER_MODEL not in older:
            problems.add(written(name), f"needs {model}")
    if older.pop(OLDER_LENGTH, wanted := values.get("max_model_len")) != wanted:
        problems.add(written(OLDER_LENGTH), f"must be as {length}: drafts reach as far as the model")
    problems.check()
    return {**values, "speculative_config": {OLDER[name]: value for name, value in older.items()}}
