"""Known but unsupported parameters are refused by name with a remedy, on every surface."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from neuron_runtime import SamplingParams
from neuron_runtime.errors import InvalidConfig, InvalidRequest
from neuron_runtime.not_built import ROWS, Surface, is_neutral, refuse, rows

CONFIGURED = Surface.LLM | Surface.FLAG | Surface.SPECULATIVE


class Unlike:
    """A value equal to no other."""


def test_each_unsupported_name_has_one_row_per_surface() -> None:
    places = Counter((surface, row.name) for row in ROWS for surface in row.where)
    assert set(places.values()) == {1}


@pytest.mark.parametrize("surface", Surface)
def test_every_row_accepts_neutral_values_and_refuses_others_with_a_remedy(surface: Surface) -> None:
    assert rows(surface)
    for row in rows(surface):
        for value in (None, *row.neutral):
            assert refuse(surface, row.name, value)
        if not row.has_effect:
            assert refuse(surface, row.name, Unlike())
            continue
        with pytest.raises((InvalidConfig, InvalidRequest)) as caught:
            refuse(surface, row.name, Unlike(), at="there")
        assert isinstance(caught.value, InvalidConfig) == (surface in CONFIGURED)
        assert caught.value.field == "there"
        assert str(caught.value).endswith(f"is not supported yet: {row.cure}")


def test_an_unlisted_name_is_left_to_the_caller() -> None:
    assert not refuse(Surface.BODY, "temperature", 1)
    assert not refuse(Surface.BODY, "tensor_parallel_size", 2)


@pytest.mark.parametrize(
    ("value", "neutral", "is_one"),
    [
        (None, (), True),
        (0.0, (0,), True),
        (1, (1.0,), True),
        (True, (1,), False),
        (1, (True,), False),
        (False, (0,), False),
        (0, (False,), False),
        ("1", (1,), False),
        ([], ({}, []), True),
        ({}, ([],), False),
    ],
)
def test_a_neutral_value_must_have_its_own_type(value: Any, neutral: tuple[Any, ...], is_one: bool) -> None:
    assert is_neutral(value, neutral) is is_one


@pytest.mark.parametrize(("name", "value"), [("detokenize", 1), ("early_stopping", 0), ("use_beam_search", 0)])
def test_a_number_is_not_a_boolean_in_python_arguments(name: str, value: Any) -> None:
    with pytest.raises(InvalidRequest, match=f"`{name}` is not supported yet"):
        SamplingParams(**{name: value})
