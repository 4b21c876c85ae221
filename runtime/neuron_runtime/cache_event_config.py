"""Reads the JSON of vLLM's `--kv-events-config` as the part `cacheEvents` of the configuration.

`config.py` declares it as the reader of that flag. It knows vLLM's keys only: bounds are checked with the document.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from neuron_runtime.errors import ConfigProblems
from neuron_runtime.flags import json_value

EXAMPLE = '{"enable_kv_cache_events": true, "endpoint": "tcp://*:5557"}'
DEFAULT_ENDPOINT = "tcp://*:5557"
KEYS = {"endpoint": "endpoint", "replay_endpoint": "replayEndpoint", "buffer_steps": "numKept", "topic": "topic"}
"""Keys of the document by vLLM's."""
WITHOUT_MEANING = ("hwm", "max_queue_size")
"""Sizes of queues that vLLM's publisher has; this one has none."""


def cache_events(given: Any) -> dict[str, Any]:
    """Raises ValueError with every key that is wrong."""
    given = json_value(given) if isinstance(given, str) else given
    if not isinstance(given, Mapping):
        raise ValueError(f"must be an object such as {EXAMPLE}, got {given!r}")
    problems = ConfigProblems()
    values = {key: value for key, value in given.items() if value is not None}
    is_on, publisher = values.pop("enable_kv_cache_events", False), values.pop("publisher", "zmq")
    if not isinstance(is_on, bool):
        problems.add("`enable_kv_cache_events`", f"must be true or false, got {is_on!r}")
    if publisher not in ("zmq", "null"):
        problems.add("`publisher`", f"must be zmq or null, got {publisher!r}")
    for key in values:
        if key not in (*KEYS, *WITHOUT_MEANING):
            problems.add(f"`{key}`", f"is no key of it: use enable_kv_cache_events, publisher, {', '.join(KEYS)}")
    problems.check()
    if not is_on or publisher == "null":
        return {}
    return {"endpoint": DEFAULT_ENDPOINT, **{KEYS[key]: value for key, value in values.items() if key in KEYS}}
