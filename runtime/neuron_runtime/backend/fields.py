"""Refuses the fields of a configuration that a backend does not have.

Called by `check_config` of backends that lack some of the fields marked `ON_DEVICE`. Needs no model.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import msgspec

from neuron_runtime.config import ON_DEVICE, RuntimeConfig
from neuron_runtime.errors import ConfigProblems, InvalidConfig
from neuron_runtime.flags import Field, fields_of

FIELDS = tuple(field for field in fields_of(RuntimeConfig) if ON_DEVICE in field.annotations)


def check_fields(config: RuntimeConfig, accepted: Mapping[str, Collection[Any]]) -> None:
    """Raises InvalidConfig with every field that the backend does not have.

    Args:
        accepted: the values of a field, by its path, that mean what the backend does anyway. The default always does.
    """
    document = msgspec.to_builtins(config)
    problems = ConfigProblems()
    for field in FIELDS:
        value, values = _value(document, field), accepted.get(field.path, ())
        with problems.collecting():
            if value != msgspec.to_builtins(field.value) and value not in values:
                only = f"accepts only {' or '.join(map(str, values))}" if values else "has no such setting"
                raise InvalidConfig(f"$.{field.path}", f"the {config.backend} backend {only}: leave it out")
    problems.check()


def _value(document: Any, field: Field) -> Any:
    for key in field.path.split("."):
        document = document[key]
    return document
