"""Answers of a form as llguidance follows them, and answers at random that try a form before it is served.

Called by `guides` with the model's vocabulary, and by `checker`, in a process of its own, with bytes for tokens. All
answers of a form share an automaton, to which the library adds states as they are needed, up to a number; then it
gives up. So an answer whose automaton is full goes on with a new one.
"""

from __future__ import annotations

import math
import random
import time
from array import array
from collections.abc import Callable, Sequence
from itertools import takewhile
from weakref import WeakSet

from llguidance import LLMatcher, LLTokenizer

from neuron_runtime.grammars.language import compiled

MAX_REPLAYED = 256
"""Tokens that an answer may follow again for each of its tokens, at 2 us each; it fails where that does not suffice."""
FULL = "too many states"
"""In the library's error."""


class Grammar:
    """A form, and the automaton of its answers."""

    def __init__(self, text: str, tokenizer: LLTokenizer, max_states: int) -> None:
        """Raises ValueError: llguidance does not take the form; says why."""
        self.answers: WeakSet[Answer] = WeakSet()
        """Those that there are."""
        self.text, self.tokenizer, self._max_states = text, tokenizer, max_states
        self.renew()

    def renew(self) -> None:
        """Take a new automaton."""
        self.start = compiled(self.text, self.tokenizer, self._max_states)
        """At the beginning of an answer."""


class Answer:
    """One answer to a form."""

    def __init__(self, grammar: Grammar) -> None:
        self.tokens = array("I")
        self.num_followed = 0
        """Tokens that the matcher knows."""
        self.grammar = grammar
        self._renewed_at = -1
        """How many tokens there were when it asked for a new automaton."""
        grammar.answers.add(self)
        self._begin()

    def followed(self) -> int:
        """The next token, which the matcher learns now."""
        self.num_followed += 1
        return self.tokens[self.num_followed - 1]

    def retract(self, count: int) -> None:
        """Forget the newest tokens, all of which the matcher knows."""
        if not count:
            return
        del self.tokens[-count:]
        self.num_followed -= count
        self._renewed_at = min(self._renewed_at, len(self.tokens))
        if self.matcher.is_error() or not self.matcher.rollback(count):
            self._begin()

    def num_kept(self, token_ids: Sequence[int]) -> int:
        """How many of these tokens, from the first on, may follow; the end of the answer is none of them. None if it
        has asked for an automaton or has to: its work is limited, and looks ahead take no part of it."""
        if self._renewed_at >= 0:
            return 0
        known = [*takewhile(range(self.grammar.tokenizer.vocab_size).__contains__, token_ids)]
        count = self._up_to_date().validate_tokens(known)
        return 0 if self.matcher.is_error() else count

    def forced(self) -> list[int]:
        """Tokens of the text that must follow, as the tokenizer writes it. Without its last one, which may go on with
        what is not forced."""
        if self._renewed_at >= 0:
            return []  # see `num_kept`
        tokens, _ = self.grammar.tokenizer.tokenize_partial(self._up_to_date().compute_ff_bytes())
        # The tokenizer may write it with tokens that the model lacks.
        return tokens[: self.num_kept(tokens)] if tokens else tokens

    def restart(self) -> bool:
        """Go on with another automaton if this one is full; False if it is not, or that would not help."""
        if FULL not in self.matcher.get_error():
            return False
        if self._start is self.grammar.start:
            if len(self.tokens) - self._renewed_at <= len(self.tokens) // MAX_REPLAYED:
                return False
            self._renewed_at = len(self.tokens)
            self.grammar.renew()
        self._begin()
        return True

    def _up_to_date(self) -> LLMatcher:
        behind = self.tokens[self.num_followed :].tolist()
        if behind:
            # One that does not fit leaves the matcher in an error, which whoever asks for a mask finds.
            self.matcher.consume_tokens(behind)
            self.num_followed = len(self.tokens)
        return self.matcher

    def _begin(self) -> None:
        self._start = self.grammar.start
        self.matcher = self._start.deep_copy()  # the library's deep copy shares the automaton
        if self.num_followed:
            self.matcher.consume_tokens(self.tokens[: self.num_followed].tolist())


def try_answers(
    grammar: Grammar,
    answers: Sequence[tuple[int, int]],
    max_seconds: float = math.inf,
    on_full: Callable[[], None] = lambda: None,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Write answers at random.

    answers: for each the tokens to choose where one of them may follow, as bits, and how many at most.
    max_seconds: no token is chosen after that, by `clock`.
    on_full: called when the automaton is full, while it is still there.

    Raises:
        ValueError: an answer could not go on; says why.
    """
    dice, ends_at = random.Random(0), clock() + max_seconds  # noqa: S311 - not for secrets
    any_token = answers[0][0]
    for preferred, max_tokens in answers:
        answer = Answer(grammar)
        while len(answer.tokens) < max_tokens and clock() < ends_at:
            allowed = int.from_bytes(answer.matcher.compute_bitmask(), "little")
            if FULL in answer.matcher.get_error():
                on_full()
                if answer.restart():
                    continue
            if answer.matcher.is_error():
                reason = answer.matcher.get_error()
                at_end = "no token of the model fits there" if reason.startswith("NoExtension") else reason
                raise ValueError(f"an answer could not go on: {at_end}")
            may_follow = allowed & preferred or allowed & any_token
            if not may_follow:
                break
            first = dice.randrange((may_follow & -may_follow).bit_length() - 1, may_follow.bit_length())
            above = may_follow >> first << first
            answer.tokens.append((above & -above).bit_length() - 1)
            answer.matcher.consume_token(answer.tokens[-1])
            answer.num_followed += 1
