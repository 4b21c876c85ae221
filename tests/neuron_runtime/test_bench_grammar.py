"""The benchmark of answers with a form: it runs on a small vocabulary, whose masks keep to the form."""

from __future__ import annotations

import pytest

from bench import grammar

pytestmark = pytest.mark.long


def test_each_figure_is_measured_and_the_step_has_a_bound() -> None:
    step, masks, form = rows = grammar.measure(1, vocabulary_size=2000, num_rows=4)
    assert step.target is not None
    assert step.target.bound == grammar.TARGET_MILLISECONDS == 0.5
    assert step.name == "host time per step, 4 rows with a form, above rows without"
    for row in (masks, form):
        (milliseconds,) = row.values
        assert isinstance(milliseconds, float)
        assert milliseconds > 0
    assert all(row.load is not None for row in rows)
    assert "microseconds a row" in masks.note


def test_the_vocabulary_spells_every_byte_and_has_the_size_that_is_asked_for() -> None:
    tokenizer = grammar.words(2000)
    assert tokenizer.vocabulary_size == 2000
    spelled = [tokenizer.token_bytes(token) for token in range(1, 2000)]
    assert len(set(spelled)) == 1999
    assert {bytes([byte]) for byte in range(256)} <= set(spelled)
    assert tokenizer.is_special(0)
