"""Models that think before they answer: which part of a text is the thought, and which the answer.

One `Thoughts` per stream, fed with text from which stop strings are already taken, by `text.choice_text`. Which marks a
model uses is data, named by `--reasoning-parser`; whether an answer begins inside a thought is read from the end of
its prompt, because templates open a thought, close an empty one, or leave it to the model.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from neuron_runtime.text.stop_strings import num_possible_start_characters


@dataclass(frozen=True, slots=True)
class Marks:
    """How a family of models writes its thoughts."""

    start: str
    end: str
    thinks_unmarked: bool
    """An answer whose thought nobody opened begins with one all the same."""


REASONING_PARSERS = {
    "deepseek_r1": Marks("<think>", "</think>", thinks_unmarked=True),
    "qwen3": Marks("<think>", "</think>", thinks_unmarked=False),
}
"""By vLLM's names."""


class _State(Enum):
    BEGIN = "begin"
    """Nothing was said yet but, maybe, a part of the start mark."""
    INSIDE = "inside"
    OUTSIDE = "outside"


class Thoughts:
    """Cuts a stream of text into thought and answer; the marks belong to neither.

    What comes out depends on the text alone, not on how it was cut into pieces. Text that could be the beginning of a
    mark is held back until it is known not to be.

    Args:
        prompt: the text that the answer follows; its end decides where the answer begins.
    """

    def __init__(self, marks: Marks, prompt: str) -> None:
        self._marks = marks
        self._held = ""
        self._num_held_tokens = 0
        self.num_tokens = 0
        """Tokens of the thought so far, marks included."""
        end = prompt.rstrip()
        if end.endswith(marks.end):
            self._state = _State.OUTSIDE
        elif end.endswith(marks.start):
            self._state = _State.INSIDE
        else:
            self._state = _State.BEGIN

    def feed(self, text: str, num_tokens: int = 1) -> tuple[str, str]:
        """Thought and answer, as far as it is known which; `num_tokens` tokens were needed to say it."""
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
        thought, mark, answer = text.partition(self._marks.end)
        if mark:
            self._state = _State.OUTSIDE
            return thought, answer
        keep = num_possible_start_characters(text, (self._marks.end,))
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], ""

    def flush(self) -> tuple[str, str]:
        """What was held back when the stream has ended."""
        held, self._held = self._held, ""
        if self._state is _State.BEGIN:
            self._state = self._unopened
            if self._state is _State.INSIDE:
                self.num_tokens += self._num_held_tokens
        return (held, "") if self._state is _State.INSIDE else ("", held)

    @property
    def over(self) -> bool:
        """Whatever comes now is answer."""
        return self._state is _State.OUTSIDE

    @property
    def _unopened(self) -> _State:
        return _State.INSIDE if self._marks.thinks_unmarked else _State.OUTSIDE
