"""Prompts: what a client sends becomes token ids within the model's limits. Called by `admission`.

Texts are tokenized, lists of ids are checked, long prompts are cut where the client asked for that, and a prompt that
cannot run is refused with its length and the limit.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import msgspec

from neuron_runtime.core import BackendLimits, FinishReason
from neuron_runtime.errors import InvalidRequest
from neuron_runtime.requests.bodies import CompletionBody
from neuron_runtime.requests.token_ids import check_token_ids
from neuron_runtime.text.choice_text import ChoiceText
from neuron_runtime.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Prompt:
    """One prompt as text and as what the model reads."""

    token_ids: tuple[int, ...]
    text: str | None = None
    """As the client sent it; None where that was token ids, or where `token_ids` are only its end."""


@dataclass(frozen=True)
class Echo:
    """A prompt as an answer repeats it."""

    text: str
    text_offsets: tuple[int, ...]
    """For each token of the prompt the character at which it begins; empty without log-probabilities."""


@dataclass(frozen=True)
class Prompts:
    """What can be a prompt of one model."""

    tokenizer: Tokenizer
    limits: BackendLimits

    @property
    def vocabulary_size(self) -> int:
        """Token ids that both the tokenizer and the model have are below this."""
        known = self.tokenizer.vocabulary_size
        return min(known, self.limits.vocabulary_size or known)

    def completions(
        self, given: str | list[str | int | list[int]], body: CompletionBody, cut: int | None, max_prompts: int
    ) -> tuple[Prompt, ...]:
        """Of /v1/completions. Raises InvalidRequest."""
        adds_special = body.add_special_tokens is not False
        return tuple(self.checked(one, adds_special, cut, "prompt") for one in _each(given, max_prompts))

    def checked(self, given: str | list[int], adds_special_tokens: bool, cut: int | None, name: str) -> Prompt:
        """A prompt that can run. Raises InvalidRequest."""
        prompt = self.read(given, adds_special_tokens, cut, name)
        limits, count = self.limits, len(prompt.token_ids)
        if not count:
            raise InvalidRequest(f"`{name}` has no tokens: at least one is needed", field=name)
        if limits.max_new_tokens(count) < 1:
            raise self._too_long(f"{count} tokens", name)
        if count < limits.min_prefill_tokens:
            message = f"`{name}` has {count} tokens: this backend needs at least {limits.min_prefill_tokens}"
            raise InvalidRequest(message, field=name)
        if not limits.chunks_prefill and count > limits.longest_prefill:
            message = f"`{name}` has {count} tokens: this backend can prefill at most {limits.longest_prefill}"
            raise InvalidRequest(message, field=name, code="context_length_exceeded")
        if self.tokenizer.vocabulary_size > self.vocabulary_size:
            check_token_ids(prompt.token_ids, name, self.vocabulary_size)
        return prompt

    def read(self, given: str | list[int], adds_special_tokens: bool, cut: int | None, name: str) -> Prompt:
        """A prompt of any length. Raises InvalidRequest for ids that are none, and for texts that cannot fit.

        Args:
            cut: how many last tokens are kept; None: all.
        """
        if not isinstance(given, str):
            check_token_ids(given, name, self.vocabulary_size)
            return Prompt(tuple(given if cut is None else given[-cut:]))
        if cut is None:
            self._check_characters(given, name)
            return Prompt(self.tokenizer.encode(given, adds_special_tokens), given)
        # Twice the text that could be kept: so far from the cut, its tokens are those of the whole text.
        kept = given[-2 * cut * self.tokenizer.longest_token_characters :]
        ids = self.tokenizer.encode(kept, adds_special_tokens, max_tokens=cut)
        return Prompt(ids, given if len(ids) < cut else None)

    def cut(self, asked: int | None, max_tokens: int | None) -> int | None:
        """How many last tokens of a prompt are kept; None: all. Raises InvalidRequest."""
        if asked is None:
            return None
        longest = self.limits.max_new_tokens(0) - 1
        if asked == -1:
            return max(longest + 1 - max(max_tokens or 1, 1), 1)
        if not 1 <= asked <= longest:
            message = f"`truncate_prompt_tokens` must be from 1 to {longest}, or -1 for as many as fit, got {asked}"
            raise InvalidRequest(message, field="truncate_prompt_tokens")
        return asked

    def echo(self, prompt: Prompt, body: CompletionBody) -> Echo:
        locates = body.logprobs is not None
        if prompt.text is not None:
            starts = self.tokenizer.starts(prompt.text, body.add_special_tokens is not False) if locates else ()
            return Echo(prompt.text, starts)
        skips = body.skip_special_tokens is not False
        if not locates:
            return Echo(self.tokenizer.decode(prompt.token_ids, skips), ())
        text = ChoiceText(self.tokenizer, (), skip_special_tokens=skips, locates=True)
        return Echo(text.feed(prompt.token_ids, FinishReason.LENGTH), tuple(text.text_offsets))

    def _check_characters(self, text: str, name: str) -> None:
        # Tokenizing a text takes seconds; one that cannot fit, whatever its tokens are, is refused before.
        longest = self.limits.max_model_length * self.tokenizer.longest_token_characters
        if len(text) > longest:
            at_least = len(text) // self.tokenizer.longest_token_characters
            raise self._too_long(f"{len(text)} characters, at least {at_least} tokens", name)

    def _too_long(self, size: str, name: str) -> InvalidRequest:
        length = self.limits.max_new_tokens(0)
        message = f"`{name}` has {size}: prompt and answer together have at most {length} tokens here"
        return InvalidRequest(message, field=name, code="context_length_exceeded")


def _each(prompt: str | list[str | int | list[int]], max_prompts: int) -> Iterable[str | list[int]]:
    """One text, one list of ids, or a list of either, as OpenAI's API takes them."""
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise InvalidRequest("`prompt` must not be empty", field="prompt")
    if len(prompt) > max_prompts and not isinstance(prompt[0], int):
        raise InvalidRequest(f"`prompt` takes at most {max_prompts} prompts, got {len(prompt)}", field="prompt")
    try:
        if isinstance(prompt[0], str):
            return msgspec.convert(prompt, list[str])
        return _id_lists(prompt)
    except msgspec.ValidationError as error:
        message = "`prompt` must be a text, a list of texts, a list of token ids, or a list of such lists"
        raise InvalidRequest(message, field="prompt") from error


def _id_lists(prompt: Sequence[str | int | list[int]]) -> list[list[int]]:
    if isinstance(prompt[0], int):
        return [msgspec.convert(prompt, list[int])]
    return msgspec.convert(prompt, list[list[int]])
