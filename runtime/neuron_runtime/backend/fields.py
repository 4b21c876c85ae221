"""Refuses the fields of a configuration that a backend does not have.

Called by `check_config` of backends that lack some of the fields marked `ON_DEVICE`. Needs no model.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import reduce
from operator import getitem
from typing import Any

import msgspec

from neuron_runtime.config import ON_DEVICE, RuntimeConfig
from neuron_runtime.errors import ConfigProblems
from neuron_runtime.flags import fields_of

FIELDS = tuple(field for field in fields_of(RuntimeConfig) if ON_DEVICE in field.annotations)


def check_fields(config: RuntimeConfig, accepted: Mapping[str, Collection[Any]]) -> None:
    """Raises InvalidConfig with every field that the backend does not have.

    Args:
        accepted: the values of a field, by its path, that mean what the backend does anyway. The default always does.
    """
    document = msgspec.to_builtins(config)
    problems = ConfigProblems()
    for field in FIELDS:
        value, values = reduce(getitem, field.path.split("."), document), accepted.get(field.path, ())
        if value != msgspec.to_builtins(field.value) and value not in values:
            only = f"accepts only {' or '.join(map(str, values))}" if values else "has no such setting"
            problems.add(f"$.{field.path}", f"the {config.backend} backend {only}: leave it out")
    problems.check()
