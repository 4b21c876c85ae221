"""The text of one choice, assembled from its tokens: detokenizer, stop strings, reasoning and calls of tools.

Stop 8 of a request; the front end and the offline class create one per choice. It detects stop strings; the caller
then aborts the request.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from neuron_runtime.core import FinishReason
from neuron_runtime.text.detokenizer import make_detokenizer
from neuron_runtime.text.reasoning import ReasoningSplitter
from neuron_runtime.text.stop_strings import StopStrings
from neuron_runtime.text.tokenizer import Tokenizer
from neuron_runtime.text.tool_calls import CallPiece, ToolCallSplitter

_Utf8 = codecs.getincrementaldecoder("utf-8")


class ChoiceText:
    """Converts the tokens of a choice to text incrementally; ignores tokens after its end.

    Args:
        stop: texts that end the answer after more than `min_tokens` tokens.
        include_stop: keep the stop text or token in the text.
        splitter: separates reasoning from the text; stop strings also end reasoning.
        calls: separates calls of tools from the rest; stop strings also end calls.
        locates: whether to record `text_offsets`.
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
        splitter: ReasoningSplitter | None = None,
        calls: ToolCallSplitter | None = None,
        locates: bool = False,
    ) -> None:
        self.num_tokens = 0
        """Tokens of the answer so far, including the one that ended it."""
        self.finish_reason: FinishReason | None = None
        self.reasoning = ""
        """The reasoning so far; callers that show it in parts clear it."""
        self.calls: list[CallPiece] = []
        """The calls so far; callers that show them in parts clear it."""
        self.text_offsets: list[int] = []
        """For each token, the index of its first character in the text with reasoning and removed stop strings."""
        self._detokenizer = make_detokenizer(tokenizer, prompt_token_ids, skip_special_tokens)
        self._stops = StopStrings(stop, include_stop)
        self._splitter = splitter
        self._call_splitter = calls
        self._locates = locates
        self._tokenizer = tokenizer
        self._skips_special = skip_special_tokens
        self._num_characters = 0
        self._held = b""
        """Bytes of tokens whose last character is incomplete."""
        self._always_one_by_one = bool(stop) or locates
        self._one_by_one = self._always_one_by_one or splitter is not None
        self._shows_stop_token = include_stop
        self._min_tokens = min_tokens

    @property
    def stop_string(self) -> str | None:
        return self._stops.stopped

    @property
    def calls_tools(self) -> bool:
        """Whether a call has begun."""
        return self._call_splitter is not None and self._call_splitter.num_calls > 0

    @property
    def num_reasoning_tokens(self) -> int:
        return 0 if self._splitter is None else self._splitter.num_tokens

    def feed(self, token_ids: tuple[int, ...], finish_reason: FinishReason | None) -> str:
        """The text of new tokens that may be emitted; sets `finish_reason` if the answer ends with them."""
        text = self._feed(token_ids, finish_reason)
        if self._call_splitter is None:
            return text
        text, calls = self._call_splitter.feed(text)
        if self.finish_reason is not None:
            rest, more = self._call_splitter.flush()
            text, calls = text + rest, calls + more
        self.calls += calls
        return text

    def _feed(self, token_ids: tuple[int, ...], finish_reason: FinishReason | None) -> str:
        """The text with calls."""
        shown = token_ids
        if finish_reason is FinishReason.STOP and not self._shows_stop_token:
            shown = token_ids[:-1]
        one_by_one = self._one_by_one
        text = self._feed_one_by_one(shown) if one_by_one else self._detokenizer.feed(shown)
        if self.finish_reason is not None:
            return text + self._flush_reasoning()
        hidden = len(token_ids) - len(shown)
        self.num_tokens += hidden if one_by_one else len(token_ids)
        if self._locates:
            self.text_offsets += [self._num_characters] * hidden
        if finish_reason is None:
            return text
        text += self._without_reasoning(self._until_stop(self._detokenizer.flush()), 0)
        self.finish_reason = FinishReason.STOP if self._stops.stopped is not None else finish_reason
        return text + self._without_reasoning(self._stops.flush(), 0) + self._flush_reasoning()

    def _feed_one_by_one(self, token_ids: tuple[int, ...]) -> str:
        """Feed one token at a time, so that the one that completes a stop string or the reasoning is counted last."""
        parts = []
        for token_id in token_ids:
            self.num_tokens += 1
            part = self._detokenizer.feed((token_id,))
            if self._locates:
                self._locate(token_id, part)
            part = self._until_stop(part)
            parts.append(self._without_reasoning(part, 1))
            if self._stops.stopped is not None:
                self.finish_reason = FinishReason.STOP
                break
        if self._splitter is not None and self._splitter.over:
            self._one_by_one = self._always_one_by_one
        return "".join(parts)

    def _until_stop(self, text: str) -> str:
        return self._stops.feed(text, may_stop=self.num_tokens > self._min_tokens)

    def _locate(self, token_id: int, part: str) -> None:
        hidden = self._skips_special and self._tokenizer.is_special(token_id)
        own = b"" if hidden else self._tokenizer.token_bytes(token_id)
        if part:
            at = max(len(part) - len(_Utf8(errors="replace").decode(own)), 0)
            self._held = b""
        else:
            at = len(self._held.decode(errors="ignore"))
            self._held += own
        self.text_offsets.append(self._num_characters + at)
        self._num_characters += len(part)

    def _without_reasoning(self, text: str, num_tokens: int) -> str:
        if self._splitter is None:
            return text
        reasoning, answer = self._splitter.feed(text, num_tokens)
        self.reasoning += reasoning
        return answer

    def _flush_reasoning(self) -> str:
        if self._splitter is None:
            return ""
        reasoning, answer = self._splitter.flush()
        self.reasoning += reasoning
        return answer
