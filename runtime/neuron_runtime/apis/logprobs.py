"""Formats log-probabilities for responses: OpenAI's two formats, and vLLM's for prompts.

Called by the writers. It converts tokens to text; `apis.generation` collects tokens and text offsets.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from neuron_runtime.core import TokenLogprobs
from neuron_runtime.text.tokenizer import Tokenizer

LEAST = -9999.0
"""OpenAI's value for a probability of 0, because JSON has no infinity."""


class Located(NamedTuple):
    """A token of an answer, or of the echoed prompt."""

    token_id: int
    logprobs: TokenLogprobs | None
    """None for the first token of a prompt."""
    text_offset: int


class Speller:
    """Formats tokens, named by text or `as_token_ids`, and their log-probabilities."""

    def __init__(self, tokenizer: Tokenizer, as_token_ids: bool) -> None:
        self._tokenizer = tokenizer
        self._as_token_ids = as_token_ids

    def completion(self, tokens: Sequence[Located], num_alternatives: int) -> dict[str, Any]:
        """`logprobs` of a completion, https://platform.openai.com/docs/api-reference/completions/object."""
        return {
            "text_offset": [token.text_offset for token in tokens],
            "token_logprobs": [_finite(token.logprobs.logprob) if token.logprobs else None for token in tokens],
            "tokens": [self._unmistakable(token.token_id) for token in tokens],
            "top_logprobs": [
                self._top(token.logprobs, num_alternatives) if token.logprobs else None for token in tokens
            ],
        }

    def chat(self, tokens: Sequence[Located], num_alternatives: int) -> dict[str, Any]:
        """`logprobs` of a chat completion, https://platform.openai.com/docs/api-reference/chat/object."""
        content = [
            {
                **self._entry(token.token_id, token.logprobs.logprob),
                "top_logprobs": [self._entry(*one) for one in token.logprobs.top[:num_alternatives]],
            }
            for token in tokens
            if token.logprobs is not None
        ]
        return {"content": content, "refusal": None}

    def prompt(self, logprobs: Sequence[TokenLogprobs], num_alternatives: int) -> list[dict[str, Any] | None]:
        """vLLM's `prompt_logprobs`: by token id, for each token but the first."""
        return [None, *(self._ranked(one, num_alternatives) for one in logprobs)]

    def _ranked(self, one: TokenLogprobs, num_alternatives: int) -> dict[str, Any]:
        ranked = [(one.token_id, one.logprob, one.rank)]
        top = enumerate(one.top[:num_alternatives], start=1)
        ranked += [(token_id, value, rank) for rank, (token_id, value) in top if token_id != one.token_id]
        return {
            str(token_id): {"logprob": _finite(value), "rank": rank, "decoded_token": self._text(token_id)}
            for token_id, value, rank in ranked
        }

    def _top(self, one: TokenLogprobs, num_alternatives: int) -> dict[str, float]:
        entries = dict(one.top[:num_alternatives]) | {one.token_id: one.logprob}
        return {self._unmistakable(token_id): _finite(value) for token_id, value in entries.items()}

    def _entry(self, token_id: int, logprob: float) -> dict[str, Any]:
        raw = self._tokenizer.token_bytes(token_id)
        name = f"token_id:{token_id}" if self._as_token_ids else raw.decode(errors="replace")
        return {"token": name, "logprob": _finite(logprob), "bytes": list(raw)}

    def _text(self, token_id: int) -> str:
        return self._tokenizer.token_bytes(token_id).decode(errors="replace")

    def _unmistakable(self, token_id: int) -> str:
        """The token's text, or its bytes in OpenAI's notation if they are not valid UTF-8."""
        if self._as_token_ids:
            return f"token_id:{token_id}"
        raw = self._tokenizer.token_bytes(token_id)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def _finite(logprob: float) -> float:
    return max(logprob, LEAST)
