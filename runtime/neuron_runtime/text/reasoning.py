"""Splits the output of reasoning models into reasoning and answer.

`text.choice_text` feeds one `ReasoningSplitter` per stream, after stop strings. `--reasoning-parser` selects the marks
of the model. Whether the output begins inside the reasoning depends on the end of the prompt, because templates open
the reasoning, close an empty one, or leave it to the model.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from neuron_runtime.text.stop_strings import num_possible_start_characters


@dataclass(frozen=True, slots=True)
class Marks:
    """How a family of models marks its reasoning."""

    start: str
    end: str
    starts_inside: bool
    """The output begins with reasoning even without a start mark."""

    def before_answer(self, prompt: str) -> tuple[str, str]:
        """What comes before the answer to a prompt: the mark with which reasoning may begin (empty: it has begun), and
        the one with which it ends (empty: there is no reasoning)."""
        end = prompt.rstrip()
        if end.endswith(self.end):
            return "", ""
        begun = end.endswith(self.start) or self.starts_inside
        return "" if begun else self.start, self.end


REASONING_PARSERS = {
    "deepseek_r1": Marks("<think>", "</think>", starts_inside=True),
    "qwen3": Marks("<think>", "</think>", starts_inside=False),
}
"""By name in vLLM."""


class _State(Enum):
    BEGIN = "begin"
    """No text yet except, maybe, part of the start mark."""
    INSIDE = "inside"
    OUTSIDE = "outside"


class ReasoningSplitter:
    """Splits a stream of text into reasoning and answer; the marks belong to neither.

    The result depends only on the text, not on how it was split into pieces. Text that could be the beginning of a
    mark is held back until it is known not to be.

    Args:
        prompt: the text before the output; its end decides whether the output begins inside the reasoning.
    """

    def __init__(self, marks: Marks, prompt: str) -> None:
        self._marks = marks
        self._held = ""
        self._num_held_tokens = 0
        self.num_tokens = 0
        """Tokens of the reasoning so far, including marks."""
        end = prompt.rstrip()
        states = ((marks.end, _State.OUTSIDE), (marks.start, _State.INSIDE))
        self._state = next((state for mark, state in states if end.endswith(mark)), _State.BEGIN)

    def feed(self, text: str, num_tokens: int = 1) -> tuple[str, str]:
        """Add text of `num_tokens` tokens; returns (reasoning, answer) as far as they can be told apart."""
        if self._state is _State.OUTSIDE:
            return "", text
        self._num_held_tokens += num_tokens
        text, self._held = self._held + text, ""
        if self._state is _State.BEGIN:
            begun = text.lstrip()
            if len(begun) < len(self._marks.start) and self._marks.start.startswith(begun):
                self._held = text
                return "", ""
            if begun.startswith(self._marks.start):
                self._state, text = _State.INSIDE, begun.removeprefix(self._marks.start)
            else:
                self._state = self._unopened
        if self._state is _State.OUTSIDE:
            return "", text
        self.num_tokens += self._num_held_tokens
        self._num_held_tokens = 0
        reasoning, mark, answer = text.partition(self._marks.end)
        if mark:
            self._state = _State.OUTSIDE
            return reasoning, answer
        keep = num_possible_start_characters(text, (self._marks.end,))
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], ""

    def flush(self) -> tuple[str, str]:
        """The text that was held back, at the end of the stream."""
        held, self._held = self._held, ""
        if self._state is _State.BEGIN:
            self._state = self._unopened
            if self._state is _State.INSIDE:
                self.num_tokens += self._num_held_tokens
        return (held, "") if self._state is _State.INSIDE else ("", held)

    @property
    def over(self) -> bool:
        """All further text is answer."""
        return self._state is _State.OUTSIDE

    @property
    def _unopened(self) -> _State:
        return _State.INSIDE if self._marks.starts_inside else _State.OUTSIDE
