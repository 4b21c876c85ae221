"""Incremental detokenizer: converts the ids of a stream to pieces of text without incomplete characters.

One per stream, in the front end and in the offline class. The concatenated pieces are the text of all ids.

`tokenizers.decoders.DecodeStream` is not used: it never emits a tail of invalid bytes, repeats an incomplete character
at the end of the prompt (both tested in `test_text_detokenizer.py`), and takes twice the time per token for byte-level
tokenizers.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Protocol

from neuron_runtime.text.tokenizer import Tokenizer

REPLACEMENT = "\ufffd"

NUM_CONTEXT_TOKENS = 5
"""Prompt tokens decoded before the answer, so that its first piece keeps its leading space."""

MAX_CHARACTER_BYTES = 4
MAX_HELD_TOKENS = 64
"""A longer undecodable tail will never become text."""


class Detokenizer(Protocol):
    def feed(self, token_ids: Sequence[int]) -> str:
        """The text that is final now; empty while a character is incomplete."""

    def flush(self) -> str:
        """The rest at the end of the stream; bytes of an incomplete character become U+FFFD."""


def make_detokenizer(
    tokenizer: Tokenizer, prompt_token_ids: Sequence[int] = (), skip_special_tokens: bool = True
) -> Detokenizer:
    """The fastest detokenizer that is correct for this tokenizer."""
    if tokenizer.joins_bytes:
        return ByteDetokenizer(tokenizer, skip_special_tokens)
    return WindowDetokenizer(tokenizer, prompt_token_ids, skip_special_tokens)


class ByteDetokenizer:
    """For tokenizers whose text is the concatenation of the tokens' bytes: one look-up per token."""

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._pieces = tokenizer.pieces(skip_special_tokens)
        self._decoder: codecs.IncrementalDecoder | None = None
        """Not None while a character is incomplete."""

    def feed(self, token_ids: Sequence[int]) -> str:
        out = ""
        for token_id in token_ids:
            piece = self._pieces.get(token_id)
            if piece is None:
                piece = self._tokenizer.piece(token_id, self._skip)
            out += piece if self._decoder is None and isinstance(piece, str) else self._continue(piece)
        return out

    def flush(self) -> str:
        decoder, self._decoder = self._decoder, None
        return "" if decoder is None else decoder.decode(b"", final=True)

    def _continue(self, piece: str | bytes) -> str:
        decoder = self._decoder or _Utf8(errors="replace")
        text = decoder.decode(piece.encode() if isinstance(piece, str) else piece)
        self._decoder = decoder if decoder.getstate()[0] else None
        return text


_Utf8 = codecs.getincrementaldecoder("utf-8")


class WindowDetokenizer:
    """For all tokenizers: decodes the tokens of the previous piece, on which the text may depend, and the new ones.

    A window whose text ends with U+FFFD may end inside a character and is held back, so pieces are split only between
    characters. The cost per token is that of decoding two short windows, independent of the length of the answer.
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int] = (), skip_special_tokens: bool = True
    ) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._shown, self._shown_text = self._context(prompt_token_ids)
        self._held: list[int] = []

    def feed(self, token_ids: Sequence[int]) -> str:
        self._held += token_ids
        text = self._tokenizer.decode(self._shown + self._held, self._skip)
        if text.endswith(REPLACEMENT) and len(self._held) < MAX_HELD_TOKENS:
            return ""
        return self._show(text)

    def flush(self) -> str:
        return self._show(self._tokenizer.decode(self._shown + self._held, self._skip)) if self._held else ""

    def _context(self, prompt_token_ids: Sequence[int]) -> tuple[list[int], str]:
        """A few last tokens of the prompt and their text; more tokens if they would begin inside a character."""
        for count in range(NUM_CONTEXT_TOKENS, NUM_CONTEXT_TOKENS + MAX_CHARACTER_BYTES):
            context = list(prompt_token_ids[-count:])
            text = self._tokenizer.decode(context, self._skip)
            if not text.endswith(REPLACEMENT):
                return context, text
        # A prompt of ids may end inside a character; its bytes are not part of the answer.
        return [], ""

    def _show(self, text: str) -> str:
        piece = text[len(self._shown_text) :]
        if self._held:
            self._shown, self._held = self._held, []
            self._shown_text = self._tokenizer.decode(self._shown, self._skip)
        return piece
