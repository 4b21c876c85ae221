"""Which installation acts in a namespace."""

from __future__ import annotations

import pytest

from neuron_operator.cluster.holding import ANSWER_SECONDS, ASK_SECONDS, Move, judge


@pytest.mark.parametrize(
    ("holder", "question", "seconds", "move"),
    [
        ("", "", None, "take"),
        ("", "other", None, "take"),
        ("ours", "", None, "act"),
        ("ours", "other", None, "answer"),
        ("other", "", None, "ask"),
        ("other", "", 0.0, "wait"),  # it has just answered
        ("other", "", ASK_SECONDS - 1, "wait"),
        ("other", "", ASK_SECONDS, "ask"),
        ("other", "ours", None, "wait"),  # asked by an earlier process: how long ago is unknown
        ("other", "ours", ANSWER_SECONDS - 1, "wait"),
        ("other", "ours", ANSWER_SECONDS, "take"),
        ("other", "third", None, "wait"),
        ("other", "third", ANSWER_SECONDS, "take"),  # the API server lets one of both
    ],
)
def test_a_namespace_has_one_holder_until_that_does_not_answer(
    holder: str, question: str, seconds: float | None, move: Move
) -> None:
    assert judge(holder, question, "ours", seconds) == move
