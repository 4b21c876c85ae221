"""docs/sampling.md names the numbers of the code; `make generate` writes its tables."""

from __future__ import annotations

from pathlib import Path

import pytest

from neuron_runtime.backend.torch.likeliest import GROUP
from neuron_runtime.backend.torch.sampling import MAX_LOGPROBS, NUMBERS_OF_CANDIDATES

PAGE = (Path(__file__).parents[2] / "docs" / "sampling.md").read_text()
TEXT = " ".join(PAGE.split())


few, more = (number for number, for_unbounded in NUMBERS_OF_CANDIDATES.items() if for_unbounded)


@pytest.mark.parametrize(
    "sentence",
    [
        f"At most {MAX_LOGPROBS} alternatives",
        f"groups of {GROUP} tokens",
        f"among the {few}, then the {more} likeliest tokens",
    ],
)
def test_the_numbers_are_those_of_the_code(sentence: str) -> None:
    assert sentence in TEXT
