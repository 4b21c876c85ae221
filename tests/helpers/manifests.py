"""The manifests of `cases/refused.yaml`, for tests of the parser and of the API server."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

CASES = Path(__file__).parents[1] / "cases"
REFUSED: dict[str, Any] = yaml.safe_load((CASES / "refused.yaml").read_text())


def spec_with(changes: Mapping[str, Any]) -> dict[str, Any]:
    """The accepted base merged with `changes`; null removes a key."""
    return _laid_over(copy.deepcopy(REFUSED["base"]), changes)


def _laid_over(base: dict[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    for key, value in changes.items():
        if value is None:
            base.pop(key, None)
        elif isinstance(value, Mapping) and isinstance(base.get(key), dict):
            _laid_over(base[key], value)
        else:
            base[key] = value
    return base
