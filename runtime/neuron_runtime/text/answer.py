"""One answer as text: tokens in as the engine makes them, text out as far as it is certain, and where the answer ends.

Stop 8 of a request: detokenizer and stop strings together. One per choice, in the front end and in the offline class.
Aborting a request whose answer ended by its text is the caller's business.
"""

from __future__ import annotations

from collections.abc import Sequence

from neuron_runtime.core import FinishReason
from neuron_runtime.text.detokenizer import Detokenizer
from neuron_runtime.text.stop_strings import StopStrings
from neuron_runtime.text.tokenizer import Tokenizer


class Answer:
    """Tokens behind its end, which the engine may have run on to make, are not looked at.

    Args:
        stop: texts that end the answer, once more than `min_tokens` tokens were generated.
        include_stop: what stopped the answer, text or token, stays in its text.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_token_ids: Sequence[int],
        *,
        stop: tuple[str, ...] = (),
        include_stop: bool = False,
        skip_special_tokens: bool = True,
        min_tokens: int = 0,
    ) -> None:
        self.num_tokens = 0
        """Tokens of the answer so far, the one included that ended it."""
        self.finish_reason: FinishReason | None = None
        self._detokenizer = Detokenizer(tokenizer, prompt_token_ids, skip_special_tokens)
        self._stops = StopStrings(stop, include_stop)
        self._has_stops = bool(stop)
        self._shows_stop_token = include_stop
        self._min_tokens = min_tokens

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended the answer."""
        return self._stops.stopped

    def feed(self, token_ids: tuple[int, ...], finish_reason: FinishReason | None) -> str:
        """Text of new tokens that may be shown; sets `finish_reason` when the answer ends with them."""
        shown = token_ids
        if finish_reason is FinishReason.STOP and not self._shows_stop_token:
            shown = token_ids[:-1]
        text = self._feed_one_by_one(shown) if self._has_stops else self._detokenizer.feed(shown)
        if self.finish_reason is not None:
            return text
        self.num_tokens += len(token_ids) - (len(shown) if self._has_stops else 0)
        if finish_reason is None:
            return text
        text += self._stops.feed(self._detokenizer.flush())
        self.finish_reason = FinishReason.STOP if self._stops.stopped is not None else finish_reason
        return text + self._stops.flush()

    def _feed_one_by_one(self, token_ids: tuple[int, ...]) -> str:
        """So that the token in which a stop string completes is the last one counted."""
        parts = []
        for token_id in token_ids:
            self.num_tokens += 1
            part = self._detokenizer.feed((token_id,))
            if self.num_tokens > self._min_tokens:
                part = self._stops.feed(part)
            parts.append(part)
            if self._stops.stopped is not None:
                self.finish_reason = FinishReason.STOP
                break
        return "".join(parts)
