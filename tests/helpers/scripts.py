"""A model that says a given text, for tests of what keeps it from doing so. Used with the strict backend."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from helpers import strict_backend
from neuron_runtime.text.tokenizer import Tokenizer

_any_token = strict_backend.next_token
NextToken = Callable[..., int]


def script(tokenizer: Tokenizer, text: str) -> tuple[int, ...]:
    """A token per character, so that a form allows each of them alone, and the end."""
    ids = [token for character in text for token in tokenizer.encode(character, add_special_tokens=False)]
    assert tokenizer.eos_token_id is not None
    return (*ids, tokenizer.eos_token_id)


def next_of(
    said: tuple[int, ...],
    context: Sequence[int],
    sampling: Any,
    position: int,
    *,
    allowed: tuple[int, ...] | None = None,
    **more: Any,
) -> int:
    """The next token of a script. Where a form does not allow it: the next one behind that is allowed, or any."""
    if allowed is None:
        return said[position % len(said)]  # a step may be computed after the end
    for token in context[len(context) - position :]:
        said = said[said.index(token) + 1 :] if token in said else said
    fits = next((token for token in said if token in allowed), None)
    return _any_token(context, sampling, position, allowed=allowed, **more) if fits is None else fits
