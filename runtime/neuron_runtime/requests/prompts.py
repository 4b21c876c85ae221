"""Converts prompts to token ids within the model's limits. Called by `admission`.

It tokenizes texts, checks lists of ids, truncates prompts on request, and refuses a prompt that cannot run, with its
length and the limit.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import msgspec

from neuron_runtime.core import BackendLimits, FinishReason
from neuron_runtime.errors import InvalidRequest
from neuron_runtime.requests.options import CompletionOptions
from neuron_runtime.requests.token_ids import check_characters, check_token_ids
from neuron_runtime.text.choice_text import ChoiceText
from neuron_runtime.text.tokenizer import Tokenizer

PromptField = str | list[str | int | list[int]]
"""A text, several, a list of token ids, or several."""


@dataclass(frozen=True)
class Prompt:
    """One prompt as token ids and text."""

    token_ids: tuple[int, ...]
    text: str | None = None
    """As sent by the client; None if it sent token ids or the prompt was truncated."""


@dataclass(frozen=True)
class Echo:
    """A prompt as repeated by an answer."""

    text: str
    text_offsets: tuple[int, ...]
    """For each token of the prompt, the index of its first character; empty without log-probabilities."""


@dataclass(frozen=True)
class Prompts:
    """Reads prompts for one model."""

    tokenizer: Tokenizer
    limits: BackendLimits

    @property
    def _room(self) -> int:
        """For tokens that must fit behind a prompt."""
        return 0 if self.limits.vector_size else 1

    @property
    def vocabulary_size(self) -> int:
        """Upper bound of the token ids that the model has; what it samples beyond its tokenizer may be sent back."""
        return self.limits.vocabulary_size or self.tokenizer.vocabulary_size

    def checked(self, content: str | list[int], adds_special_tokens: bool, cut: int | None, name: str) -> Prompt:
        """A prompt that can run. Raises InvalidRequest."""
        prompt = self.read(content, adds_special_tokens, cut, name)
        self.check(prompt.token_ids, name)
        return prompt

    def check(self, token_ids: Sequence[int], name: str) -> None:
        """Raises InvalidRequest unless the tokens of a prompt can run."""
        limits, count = self.limits, len(token_ids)
        if not count:
            raise InvalidRequest.at(name, "has no tokens: at least one is required")
        if limits.max_new_tokens(count) < self._room:
            raise self._too_long(f"{count} tokens", name)
        if count < limits.min_prefill_tokens:
            message = f"`{name}` has {count} tokens: this backend needs at least {limits.min_prefill_tokens}"
            raise InvalidRequest(message, field=name)
        if count > limits.longest_prompt:
            problem = f"`{name}` has {count} tokens, and this backend can prefill at most {limits.longest_prompt}"
            raise context_length_exceeded(limits, problem, name)
        if self.tokenizer.vocabulary_size > self.vocabulary_size:
            check_token_ids(token_ids, name, self.vocabulary_size)

    def read(self, content: str | list[int], adds_special_tokens: bool, cut: int | None, name: str) -> Prompt:
        """A prompt of any length; `cut`: number of last tokens to keep, or of first ones where a vector is computed.
        Raises InvalidRequest for unknown ids, and for texts that cannot fit."""
        keeps_end = bool(self._room)
        if not isinstance(content, str):
            check_token_ids(content, name, self.vocabulary_size)
            kept_ids = content if cut is None else content[-cut:] if keeps_end else content[:cut]
            return Prompt(tuple(kept_ids))
        check_characters(content, name)
        if cut is None:
            # Tokenizing a long text takes seconds, so one that certainly does not fit is refused before.
            at_least = len(content) // self.tokenizer.longest_token_characters
            if len(content) > self.limits.max_model_length * self.tokenizer.longest_token_characters:
                raise self._too_long(f"{len(content)} characters, at least {at_least} tokens", name)
            return Prompt(self.tokenizer.encode(content, adds_special_tokens), content)
        # Twice the text that can be kept, so that the kept tokens are the same as those of the whole text.
        most = 2 * cut * self.tokenizer.longest_token_characters
        kept = content[-most:] if keeps_end else content[:most]
        ids = self.tokenizer.encode(kept, adds_special_tokens, max_tokens=cut, keeps_end=keeps_end)
        return Prompt(ids, content if len(ids) < cut else None)

    def cut(self, asked: int | None, max_tokens: int | None) -> int | None:
        """Number of last tokens of a prompt to keep; None: all. Raises InvalidRequest."""
        if asked is None:
            return None
        longest = min(self.limits.max_new_tokens(0) - self._room, self.limits.longest_prompt)
        if asked == -1:
            return max(min(longest, self.limits.max_new_tokens(0) - max(max_tokens or self._room, self._room)), 1)
        if not 1 <= asked <= longest:
            message = f"`truncate_prompt_tokens` must be from 1 to {longest}, or -1 for as many as fit, got {asked}"
            raise InvalidRequest(message, field="truncate_prompt_tokens")
        return asked

    def echo(self, prompt: Prompt, options: CompletionOptions) -> Echo:
        locates = options.logprobs is not None
        if prompt.text is not None:
            starts = self.tokenizer.starts(prompt.text, options.add_special_tokens is not False) if locates else ()
            return Echo(prompt.text, starts)
        skips = options.skip_special_tokens is not False
        if not locates:
            return Echo(self.tokenizer.decode(prompt.token_ids, skips), ())
        text = ChoiceText(self.tokenizer, (), skip_special_tokens=skips, locates=True)
        return Echo(text.feed(prompt.token_ids, FinishReason.LENGTH), tuple(text.text_offsets))

    def _too_long(self, size: str, name: str) -> InvalidRequest:
        cure = (
            "which leaves no room for an answer: shorten it"
            if self._room
            else ("the longest that is served: shorten it, or set `truncate_prompt_tokens`")
        )
        problem = f"`{name}` has {size}, {cure}"
        return context_length_exceeded(self.limits, problem, name)


def context_length_exceeded(limits: BackendLimits, problem: str, field: str) -> InvalidRequest:
    """The error for a request that the model cannot hold.

    It begins with the words of OpenAI and vLLM, by which clients such as LiteLLM and LangChain recognize it.
    """
    message = f"This model's maximum context length is {limits.max_new_tokens(0)} tokens. However, {problem}"
    return InvalidRequest(message, field=field, code="context_length_exceeded")


def each_prompt(prompt: PromptField, max_prompts: int, name: str = "prompt") -> Iterable[str | list[int]]:
    """One text, one list of ids, or a list of either, as in OpenAI's API. Raises InvalidRequest."""
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise InvalidRequest.at(name, "must not be empty")
    if len(prompt) > max_prompts and not isinstance(prompt[0], int):
        what = "prompts" if name == "prompt" else "texts"
        raise InvalidRequest.at(name, f"must have at most {max_prompts} {what}, got {len(prompt)}")
    try:
        if isinstance(prompt[0], str):
            return msgspec.convert(prompt, list[str])
        if isinstance(prompt[0], int):
            return [msgspec.convert(prompt, list[int])]
        return msgspec.convert(prompt, list[list[int]])
    except msgspec.ValidationError as error:
        message = f"`{name}` must be a text, a list of texts, a list of token ids, or a list of such lists"
        raise InvalidRequest(message, field=name) from error
