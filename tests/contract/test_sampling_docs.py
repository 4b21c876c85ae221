"""docs/sampling.md says of every parameter what the code's table says: range, neutral values, and who serves it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from neuron_runtime import sampling_modes
from neuron_runtime.backend.torch.likeliest import GROUP
from neuron_runtime.backend.torch.sampling import MAX_LOGPROBS, NUMBERS_OF_CANDIDATES
from neuron_runtime.sampling_modes import MODES, PARAMETERS
from neuron_runtime.server.wire import ChatBody, CompletionBody

PAGE = (Path(__file__).parents[2] / "docs" / "sampling.md").read_text()
TEXT = " ".join(PAGE.split())


def table(title: str) -> list[list[str]]:
    """The cells of the table below a heading, its head left out."""
    section = PAGE.partition(f"\n## {title}\n")[2].partition("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def test_every_parameter_stands_there_with_its_range_and_its_neutral_values() -> None:
    told = {
        name.strip("`"): (span, re.findall(r"`([^`]+)`", neutral)) for name, span, neutral, _ in table("Parameters")
    }
    assert told == {
        name: (
            "" if (one.lowest, one.highest) == (None, None) else one.range,
            [json.dumps(value) for value in one.neutral],
        )
        for name, one in PARAMETERS.items()
    }


def test_the_table_of_modes_is_the_one_that_requests_are_refused_by() -> None:
    assert [row[0].strip("`") for row in table("Modes")] == list(PARAMETERS)
    for name, *where in table("Modes"):
        assert where == [PARAMETERS[name.strip("`")].where(mode).value for mode in MODES]


def test_every_parameter_is_one_that_clients_may_send() -> None:
    assert set(PARAMETERS) <= {*CompletionBody.__struct_fields__, *ChatBody.__struct_fields__}


few, more = (number for number, for_unbounded in NUMBERS_OF_CANDIDATES.items() if for_unbounded)


@pytest.mark.parametrize(
    "sentence",
    [
        f"at most {sampling_modes.MAX_BIASED_TOKENS} tokens",
        f"at most {sampling_modes.MAX_BAD_WORDS} of up to {sampling_modes.MAX_BAD_WORD_CHARACTERS} characters",
        f"At most {MAX_LOGPROBS} alternatives",
        f"groups of {GROUP} tokens",
        f"among the {few}, then the {more} likeliest tokens",
    ],
)
def test_the_numbers_are_those_of_the_code(sentence: str) -> None:
    assert sentence in TEXT
