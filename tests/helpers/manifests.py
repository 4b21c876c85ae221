"""The manifests of `cases/refused.yaml`, for tests of the parser and of the API server."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from neuron_operator.api.adapter import AdapterSpec
from neuron_operator.api.fields import SpecPart
from neuron_operator.api.model import Spec
from neuron_operator.cluster.client import NEURON_ADAPTERS, NEURON_MODELS, Resource

CASES = Path(__file__).parents[1] / "cases"
REFUSED: dict[str, Any] = yaml.safe_load((CASES / "refused.yaml").read_text())


@dataclass(frozen=True, eq=False)
class Manifests:
    """Those of one kind."""

    resource: Resource
    spec: type[SpecPart]
    crd: str
    told: Mapping[str, Any]
    """Its part of the file."""

    def __str__(self) -> str:
        return self.resource.kind

    def spec_with(self, changes: Mapping[str, Any]) -> dict[str, Any]:
        """The accepted base merged with `changes`; null removes a key."""
        return _laid_over(copy.deepcopy(self.told["base"]), changes)

    def cases(self, part: str = "cases", **fields: str) -> list[Any]:
        """Parameters of a test: the manifests and a case; of those, the ones with these fields."""
        found = [one for one in self.told.get(part, ()) if all(one[key] == value for key, value in fields.items())]
        return [pytest.param(self, one, id=f"{self}: {one.get('name', one)}") for one in found]


MODELS = Manifests(NEURON_MODELS, Spec, "neuronmodels", REFUSED)
ADAPTERS = Manifests(NEURON_ADAPTERS, AdapterSpec, "neuronadapters", REFUSED["adapters"])
KINDS = (MODELS, ADAPTERS)
spec_with = MODELS.spec_with


def _laid_over(base: dict[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    for key, value in changes.items():
        if value is None:
            base.pop(key, None)
        elif isinstance(value, Mapping) and isinstance(base.get(key), dict):
            _laid_over(base[key], value)
        else:
            base[key] = value
    return base
