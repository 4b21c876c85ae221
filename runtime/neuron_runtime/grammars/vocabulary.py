"""A model's tokenizer as llguidance reads it: the bytes of each token. Called by `guides`, once per engine."""

from __future__ import annotations

import string
from collections.abc import Iterable
from typing import Any

from llguidance import LLTokenizer, TokenizerWrapper

from neuron_runtime.text.tokenizer import Tokenizer

_MARKS = frozenset(mark.encode() for mark in string.punctuation)
_SPECIAL = b"\xff"
"""Before the name of a token that is not text; no text has this byte."""


class Vocabulary:
    """The tokens that a model and its tokenizer both have, and one of our own for the end of an answer.

    What ends an answer differs between requests; `guides` puts the request's own tokens in the place of ours.
    """

    def __init__(self, tokenizer: Tokenizer, vocabulary_size: int) -> None:
        """vocabulary_size: of the model; 0: that of the tokenizer."""
        size = min(tokenizer.vocabulary_size, vocabulary_size or tokenizer.vocabulary_size)
        self.end_token_id = size
        tokens = _Tokens(tokenizer, size)
        self.for_grammars = LLTokenizer(TokenizerWrapper(tokens), n_vocab=size + 1, eos_token=self.end_token_id)
        self.mask_bytes = (size + 1 + 31) // 32 * 4
        self.kinds = (
            (1 << size) - 1,
            _bits(at for at, one in enumerate(tokens.tokens) if len(one) == 1),
            _bits(at for at, one in enumerate(tokens.tokens) if one in _MARKS),
        )
        """All tokens, those of one byte, and marks, with which texts and lists end: what answers at random prefer."""


class _Tokens:
    """What `TokenizerWrapper` asks for."""

    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, size: int) -> None:
        self._tokenizer = tokenizer
        self.eos_token_id = size
        self.special_token_ids = [token for token in range(size) if tokenizer.is_special(token)] + [size]
        special = set(self.special_token_ids)
        self.tokens: list[bytes] = [
            (_SPECIAL if token in special else b"") + tokenizer.token_bytes(token) for token in range(size)
        ]
        self.tokens.append(_SPECIAL + b"<end of the answer>")

    def __call__(self, text: Any) -> list[int]:
        text = text.decode(errors="replace") if isinstance(text, bytes) else text
        return [token for token in self._tokenizer.encode(text, add_special_tokens=False) if token < self.eos_token_id]


def _bits(tokens: Iterable[int]) -> int:
    return sum(1 << token for token in tokens)
