"""Results that passes share: one computation for each manifest and settings, and never a result of others."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest

from neuron_operator.api.errors import InvalidSpec
from neuron_operator.api.manifest import parse
from neuron_operator.api.model import NeuronModel, remembered

BODY: dict[str, Any] = {
    "metadata": {"name": "chat", "namespace": "ns", "uid": "u", "resourceVersion": "1"},
    "spec": {"model": {"uri": "hf://a/b"}, "accelerator": {"type": "CPU"}},
}


def test_a_result_is_computed_once_for_a_manifest_and_the_same_settings() -> None:
    computed = []

    @remembered
    def of(model: NeuronModel, settings: list[int]) -> object:
        computed.append(model.spec.replicas)
        return object()

    one, other = [1], [1]
    model = parse(BODY)
    assert of(model, one) is of(model, one)
    assert of(model, other) is not of(replace(model), other)
    assert len(computed) == 3


def test_a_manifest_is_parsed_once_until_something_that_is_read_changes() -> None:
    later = deepcopy(BODY)
    later["metadata"]["resourceVersion"] = "2"
    later["status"] = {"ready": "1/1"}
    assert parse(later) is parse(BODY)
    later["spec"]["replicas"] = 1
    assert parse(later) is not parse(BODY)


def test_a_switch_is_no_number_and_is_refused_after_the_number_was_parsed() -> None:
    one, switch = deepcopy(BODY), deepcopy(BODY)
    one["spec"]["replicas"], switch["spec"]["replicas"] = 1, True
    parse(one)
    with pytest.raises(InvalidSpec, match=r"spec\.replicas"):
        parse(switch)
