"""Splitting reasoning from the answer depends on text and prompt, not on how the text was split into pieces."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from neuron_runtime.text.reasoning import REASONING_PARSERS, ReasoningSplitter

QWEN, DEEPSEEK = REASONING_PARSERS["qwen3"], REASONING_PARSERS["deepseek_r1"]


def split(parser: str, prompt: str, pieces: list[str]) -> tuple[str, str, int]:
    watch = ReasoningSplitter(REASONING_PARSERS[parser], prompt)
    parts = [watch.feed(piece) for piece in pieces] + [watch.flush()]
    return "".join(thought for thought, _ in parts), "".join(answer for _, answer in parts), watch.num_tokens


@pytest.mark.parametrize(
    ("parser", "prompt", "text", "expected"),
    [
        ("qwen3", "assistant\n", "<think>\na b\n</think>\n\nyes", ("\na b\n", "\n\nyes")),
        ("qwen3", "assistant\n", "\n<think>a</think>yes", ("a", "yes")),
        ("qwen3", "assistant\n", "yes, <think> is a mark", ("", "yes, <think> is a mark")),
        ("qwen3", "assistant\n<think>\n", "a</think>yes</think>", ("a", "yes</think>")),
        ("qwen3", "assistant\n<think>\n", "a that was cut", ("a that was cut", "")),
        ("qwen3", "assistant\n<think>\n\n</think>\n\n", "yes", ("", "yes")),
        ("qwen3", "assistant\n", "<thi", ("", "<thi")),
        ("qwen3", "assistant\n<think>", "a</thin", ("a</thin", "")),
        ("qwen3", "assistant\n", "", ("", "")),
        ("deepseek_r1", "<Assistant>", "a</think>yes", ("a", "yes")),
        ("deepseek_r1", "<Assistant>", "<think>\na</think>yes", ("\na", "yes")),
        ("deepseek_r1", "<Assistant>", "a that was cut", ("a that was cut", "")),
        ("deepseek_r1", "<Assistant><think>\n", "a</think>yes", ("a", "yes")),
        ("deepseek_r1", "<Assistant>", "<thi", ("<thi", "")),
    ],
)
@given(cuts=st.lists(st.integers(1, 4), min_size=1, max_size=6))
def test_reasoning_ends_at_its_end_marker_for_any_split(
    parser: str, prompt: str, text: str, expected: tuple[str, str], cuts: list[int]
) -> None:
    pieces, at, turn = [], 0, 0
    while at < len(text):
        pieces.append(text[at : at + cuts[turn % len(cuts)]])
        at, turn = at + cuts[turn % len(cuts)], turn + 1
    assert split(parser, prompt, pieces)[:2] == expected


def test_reasoning_tokens_include_the_markers() -> None:
    assert split("qwen3", "", ["<think>", "a", "b", "</think>", "yes", "no"])[2] == 4
    assert split("qwen3", "", ["<th", "ink>", "a", "</think>", "yes"])[2] == 4
    assert split("qwen3", "<think>\n", ["a", "</", "think>", "yes"])[2] == 3
    assert split("qwen3", "", ["\n", "yes", "no"])[2] == 0
    assert split("deepseek_r1", "", ["<thi"])[2] == 1
