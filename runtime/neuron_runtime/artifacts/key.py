"""What the key of an artifact covers, and the key. Pure: no path, no time, nothing of this machine.

Used by whoever compiles and by whoever serves: both must come to the same key. `compiled_part` is the configuration
that a backend's compiler sees; the operator writes the same part of its document (a contract test compares both).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, get_args

import msgspec

from neuron_runtime.backend_protocol import Needs
from neuron_runtime.config import COMPILED, RuntimeConfig

COVER_VERSION = 1
"""Part of every key: raised if artifacts that were compiled before must not be loaded."""

COMPILED_NAMES = ("compiled",)
"""Names in a part of a document, which must have some."""


def compiled_part(config: RuntimeConfig) -> RuntimeConfig:
    """The fields that are marked `COMPILED`; the others have their defaults."""
    part = _marked(config)
    return RuntimeConfig(**part, version=config.version, served_names=COMPILED_NAMES)


def _marked(struct: msgspec.Struct) -> dict[str, Any]:
    marked: dict[str, Any] = {}
    for field in msgspec.structs.fields(type(struct)):
        value = getattr(struct, field.name)
        if isinstance(value, msgspec.Struct):
            marked[field.name] = type(value)(**part) if (part := _marked(value)) else type(value)()
        elif any(one is COMPILED for one in get_args(field.type)):
            marked[field.name] = value
    return marked


def covered(backend: str, digest: str, needs: Needs) -> dict[str, Any]:
    """Everything that the graphs depend on, as plain JSON."""
    return {"version": COVER_VERSION, "backend": backend, "model": digest, **asdict(needs)}


def key_of(cover: Mapping[str, Any]) -> str:
    return hashlib.sha256(msgspec.json.encode(cover, order="deterministic")).hexdigest()


def differences(wanted: Mapping[str, Any], found: Mapping[str, Any], within: str = "") -> list[str]:
    """`field: found instead of wanted` for every value that differs, in order of fields."""
    differing = []
    for key in sorted(wanted.keys() | found.keys()):
        ours, theirs = _json(wanted, key), _json(found, key)
        if ours == theirs:
            continue
        if isinstance(wanted.get(key), Mapping) and isinstance(found.get(key), Mapping):
            differing += differences(wanted[key], found[key], f"{within}{key}.")
        else:
            differing.append(f"{within}{key}: {theirs} instead of {ours}")
    return differing


def _json(values: Mapping[str, Any], key: str) -> str:
    return msgspec.json.encode(values[key], order="deterministic").decode() if key in values else "nothing"
