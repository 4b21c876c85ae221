"""Incremental detokenizer: ids of a stream become pieces of text that never hold half a character.

One per stream, in the front end and in the offline class. The pieces, joined, are the text of all ids. Stop strings
are looked for afterwards, in `text.stop_strings`.
"""

from __future__ import annotations

from collections.abc import Sequence

from neuron_runtime.text.tokenizer import Tokenizer

REPLACEMENT = "\ufffd"

NUM_CONTEXT_TOKENS = 5
"""Prompt tokens decoded before the answer, so that its first piece keeps the space that it begins with."""

MAX_CHARACTER_BYTES = 4
MAX_HELD_TOKENS = 64
"""A tail this long that is no text yet never will be."""


class Detokenizer:
    """Decodes a window: the tokens of the piece before (what follows may depend on them) and those not yet shown.

    A window whose text ends with U+FFFD may end inside a character and is held until it does not, so pieces are cut
    only between characters. Cost per token is that of decoding two short windows, whatever the length of the answer.
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int] = (), skip_special_tokens: bool = True
    ) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._shown, self._shown_text = self._context(prompt_token_ids)
        self._held: list[int] = []

    def feed(self, token_ids: Sequence[int]) -> str:
        """The text that is certain now; empty while a character is incomplete."""
        self._held += token_ids
        text = self._tokenizer.decode(self._shown + self._held, self._skip)
        if text.endswith(REPLACEMENT) and len(self._held) < MAX_HELD_TOKENS:
            return ""
        return self._show(text)

    def flush(self) -> str:
        """What is left when the stream has ended; bytes of an incomplete character as U+FFFD."""
        return self._show(self._tokenizer.decode(self._shown + self._held, self._skip)) if self._held else ""

    def _context(self, prompt_token_ids: Sequence[int]) -> tuple[list[int], str]:
        """The end of the prompt, and its text: a few tokens, more where they would begin inside a character."""
        for count in range(NUM_CONTEXT_TOKENS, NUM_CONTEXT_TOKENS + MAX_CHARACTER_BYTES):
            context = list(prompt_token_ids[-count:])
            text = self._tokenizer.decode(context, self._skip)
            if not text.endswith(REPLACEMENT):
                return context, text
        # A prompt of ids may end inside a character; its bytes are the client's, not part of the answer.
        return [], ""

    def _show(self, text: str) -> str:
        piece = text[len(self._shown_text) :]
        if self._held:
            self._shown, self._held = self._held, []
            self._shown_text = self._tokenizer.decode(self._shown, self._skip)
        return piece
