"""The comparison of answers computed alone and in a batch."""

from __future__ import annotations

import pytest

from bench.batching import compare

pytestmark = pytest.mark.long


def test_an_answer_that_differs_is_counted_with_its_first_different_token() -> None:
    found = compare([[1, 2, 3], [4, 5], [6]], [[1, 9, 3], [4, 5], [6, 7]])
    assert found.equal_tokens == (1, 1)
    assert str(found) == "2 of 3 answers differ (6 tokens, first at token 2)"
