"""Admission, stop 2 of a request: template, tokenize, and check every length and count against the model's limits.

What passes here cannot fail in the scheduler or on the device. Called by the routes, and by the offline class, with a
typed body; gives back what the engine needs (`core.Request` without an id) and what the text needs. No I/O, no clock.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec

from neuron_runtime.core import BackendLimits, SamplingParams
from neuron_runtime.engine.admission import max_new_tokens
from neuron_runtime.errors import InvalidRequest
from neuron_runtime.server.wire import ChatBody, CompletionBody, Generate, Message, TokenizeBody
from neuron_runtime.text.chat_template import TemplateRefused
from neuron_runtime.text.generation_config import GenerationDefaults
from neuron_runtime.text.tokenizer import Tokenizer

DEFAULT_COMPLETION_TOKENS = 16
"""`max_tokens` of /v1/completions where neither client nor model says one, as in OpenAI's API."""
MAX_BODY_BYTES = 32 * 1024 * 1024
MAX_CHOICES = 128
"""Answers to one HTTP request: prompts times `n`."""
MAX_STOP_STRINGS = 16
MAX_STOP_CHARACTERS = 1024
MAX_STOP_TOKEN_IDS = 1024
MAX_TEMPERATURE = 100.0
GREEDY_TEMPERATURE = 1e-5
"""At or below it logits divided by it overflow: the likeliest token is meant."""
MAX_SALT_CHARACTERS = 256
INT64 = range(-(2**63), 2**63)

N = TypeVar("N", int, float)


@dataclass(frozen=True)
class Ask:
    """One HTTP request, admitted: its prompts and how each is continued."""

    prompts: tuple[tuple[int, ...], ...]
    sampling: tuple[SamplingParams, ...]
    """Per prompt; for `n` answers each is used with `choice` 0 to n-1."""
    num_choices: int = 1
    stop: tuple[str, ...] = ()
    include_stop: bool = False
    skip_special_tokens: bool = True
    priority: int = 0
    cache_salt: str = ""
    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False

    @property
    def num_prompt_tokens(self) -> int:
        return sum(map(len, self.prompts))


@dataclass(frozen=True)
class Admission:
    """What a model can be asked, as data."""

    tokenizer: Tokenizer
    limits: BackendLimits
    served_names: tuple[str, ...]
    defaults: GenerationDefaults = field(default_factory=GenerationDefaults)
    max_queued_requests: int = 0
    cuts_max_tokens: bool = False
    """Where more tokens are asked for than fit behind the prompt, as many as fit are meant; else that is refused."""

    def check_model(self, name: str | None) -> None:
        """Raises InvalidRequest (404) for a model that is not served here; no name at all means the one there is."""
        if name is not None and name not in self.served_names:
            known = ", ".join(self.served_names)
            message = f"the model `{name}` does not exist here; served: {known}"
            raise InvalidRequest(message, field="model", status=404, code="model_not_found")

    def completion(self, body: CompletionBody) -> Ask:
        """Raises InvalidRequest."""
        self.check_model(body.model)
        add_special = body.add_special_tokens is not False
        prompts = tuple(self._prompt(prompt, add_special) for prompt in _prompts(body.prompt))
        for prompt in prompts:
            self._check_prompt(prompt, "prompt")
        default = self.defaults.max_tokens or DEFAULT_COMPLETION_TOKENS
        return self._ask(body, prompts, body.max_tokens, "max_tokens", default)

    def chat(self, body: ChatBody) -> Ask:
        """Raises InvalidRequest."""
        self.check_model(body.model)
        prompt = self.render(
            body.messages, body.add_generation_prompt, body.chat_template_kwargs, body.add_special_tokens
        )
        self._check_prompt(prompt, "messages")
        name = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
        asked = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
        return self._ask(body, (prompt,), asked, name, self.defaults.max_tokens or self.limits.max_model_length)

    def tokenize(self, body: TokenizeBody) -> tuple[int, ...]:
        """Raises InvalidRequest."""
        self.check_model(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise InvalidRequest("exactly one of `prompt` and `messages` is needed", field="prompt")
        if body.messages is not None:
            return self.render(
                body.messages, body.add_generation_prompt, body.chat_template_kwargs, body.add_special_tokens
            )
        self._check_characters(body.prompt or "", "prompt")
        return self.tokenizer.encode(body.prompt or "", body.add_special_tokens is not False)

    def check_token_ids(self, token_ids: Sequence[int], name: str) -> None:
        """Raises InvalidRequest naming the first id outside the vocabulary."""
        size = self.tokenizer.vocabulary_size
        for at, token in enumerate(token_ids):
            if not 0 <= token < size:
                message = f"`{name}[{at}]`: {token} is not a token id of this model (0 to {size - 1})"
                raise InvalidRequest(message, field=name)

    def render(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool | None,
        variables: Mapping[str, Any] | None,
        add_special_tokens: bool | None,
    ) -> tuple[int, ...]:
        """Token ids of a chat. The template writes its own BOS, so none is added unless asked for."""
        text = self.chat_text(messages, add_generation_prompt, variables)
        return self.tokenizer.encode(text, add_special_tokens=add_special_tokens is True)

    def chat_text(
        self, messages: Sequence[Message], add_generation_prompt: bool | None, variables: Mapping[str, Any] | None
    ) -> str:
        """What the template makes of a chat. Raises InvalidRequest."""
        template = self.tokenizer.chat_template
        if template is None:
            message = "this model has no chat template: send a prompt (/v1/completions) instead of messages"
            raise InvalidRequest(message, field="messages")
        if not messages:
            raise InvalidRequest("`messages` must not be empty", field="messages")
        try:
            text = template.render([_plain(m) for m in messages], add_generation_prompt is not False, variables)
        except TemplateRefused as error:
            message = f"the model's chat template does not accept these messages: {error}"
            raise InvalidRequest(message, field="messages") from error
        self._check_characters(text, "messages")
        return text

    def _prompt(self, prompt: str | list[int], add_special_tokens: bool) -> tuple[int, ...]:
        if isinstance(prompt, str):
            self._check_characters(prompt, "prompt")
            return self.tokenizer.encode(prompt, add_special_tokens)
        self.check_token_ids(prompt, "prompt")
        return tuple(prompt)

    def _check_characters(self, text: str, name: str) -> None:
        # A text that cannot fit whatever its tokens are is not worth the seconds of tokenizing it.
        longest = self.limits.max_model_length * self.tokenizer.longest_token_characters
        if len(text) > longest:
            at_least = len(text) // self.tokenizer.longest_token_characters
            raise self._too_long(f"{len(text)} characters, at least {at_least} tokens", name)

    def _check_prompt(self, prompt: Sequence[int], name: str) -> None:
        limits, count = self.limits, len(prompt)
        if not prompt:
            raise InvalidRequest(f"`{name}` has no tokens: at least one is needed", field=name)
        if max_new_tokens(limits, count) < 1:
            raise self._too_long(f"{count} tokens", name)
        if count < limits.min_prefill_tokens:
            message = f"`{name}` has {count} tokens: this backend needs at least {limits.min_prefill_tokens}"
            raise InvalidRequest(message, field=name)
        if not limits.chunks_prefill and count > limits.longest_prefill:
            message = f"`{name}` has {count} tokens: this backend can prefill at most {limits.longest_prefill}"
            raise InvalidRequest(message, field=name, code="context_length_exceeded")

    def _too_long(self, size: str, name: str) -> InvalidRequest:
        length = max_new_tokens(self.limits, 0)
        message = f"`{name}` has {size}: prompt and answer together have at most {length} tokens here"
        return InvalidRequest(message, field=name, code="context_length_exceeded")

    def _ask(
        self, body: Generate, prompts: tuple[tuple[int, ...], ...], asked: int | None, name: str, default: int
    ) -> Ask:
        num_choices = 1 if body.n is None else body.n
        most = min(MAX_CHOICES, self.limits.max_rows + self.max_queued_requests)
        if num_choices < 1 or num_choices * len(prompts) > most:
            message = f"`n` is {num_choices}: it must be positive, and prompts times `n` at most {most}"
            raise InvalidRequest(message, field="n")
        if body.stream_options is not None and not body.stream:
            raise InvalidRequest("`stream_options` needs `stream: true`", field="stream_options")
        options = body.stream_options
        return Ask(
            prompts=prompts,
            sampling=tuple(self._sampling(body, len(prompt), asked, name, default) for prompt in prompts),
            num_choices=num_choices,
            stop=_stops(body.stop),
            include_stop=body.include_stop_str_in_output is True,
            skip_special_tokens=body.skip_special_tokens is not False,
            priority=_within("priority", body.priority or 0, -(2**31), 2**31 - 1),
            cache_salt=_salt(body.cache_salt or ""),
            stream=body.stream is True,
            include_usage=options is not None and options.include_usage,
            continuous_usage=options is not None and options.include_usage and options.continuous_usage_stats,
        )

    def _sampling(
        self, body: Generate, num_prompt_tokens: int, asked: int | None, name: str, default: int
    ) -> SamplingParams:
        room = max_new_tokens(self.limits, num_prompt_tokens)
        if asked is not None and self.cuts_max_tokens:
            asked = min(asked, room)
        if asked is not None and asked > room:
            message = (
                f"`{name}` is {asked}, but a prompt of {num_prompt_tokens} tokens leaves room for {room}: together "
                f"they have at most {room + num_prompt_tokens} tokens here"
            )
            raise InvalidRequest(message, field=name, code="context_length_exceeded")
        max_tokens = _within(name, min(default, room) if asked is None else asked, 1, room)
        temperature = self.defaults.temperature if body.temperature is None else body.temperature
        _within("temperature", temperature, 0.0, MAX_TEMPERATURE)
        top_p = self.defaults.top_p if body.top_p is None else body.top_p
        if not 0.0 < top_p <= 1.0:
            raise InvalidRequest(f"`top_p` must be above 0 and at most 1, got {top_p}", field="top_p")
        seed = secrets.randbits(63) if body.seed is None else body.seed
        if seed not in INT64:
            raise InvalidRequest("`seed` must be an integer of 64 bits", field="seed")
        stop_token_ids = frozenset(body.stop_token_ids or ())
        if len(stop_token_ids) > MAX_STOP_TOKEN_IDS:
            message = f"`stop_token_ids` takes at most {MAX_STOP_TOKEN_IDS} ids, got {len(stop_token_ids)}"
            raise InvalidRequest(message, field="stop_token_ids")
        self.check_token_ids(body.stop_token_ids or (), "stop_token_ids")
        ends = frozenset[int]() if body.ignore_eos else self.defaults.stop_token_ids
        return SamplingParams(
            max_tokens=max_tokens,
            min_tokens=_within("min_tokens", body.min_tokens or 0, 0, max_tokens),
            temperature=temperature if temperature > GREEDY_TEMPERATURE else 0.0,
            top_k=self._top_k(body.top_k),
            top_p=top_p,
            seed=seed,
            stop_token_ids=stop_token_ids | ends,
        )

    def _top_k(self, asked: int | None) -> int:
        top_k = self.defaults.top_k if asked is None else asked
        if top_k < -1:
            raise InvalidRequest(f"`top_k` must be positive, or 0 or -1 for all tokens, got {top_k}", field="top_k")
        if top_k <= 0 or top_k >= self.tokenizer.vocabulary_size:
            return 0
        if self.limits.max_top_k and top_k > self.limits.max_top_k:
            if asked is None:
                return self.limits.max_top_k
            message = f"`top_k` is at most {self.limits.max_top_k} with {self.limits.sampling} sampling, got {top_k}"
            raise InvalidRequest(message, field="top_k")
        return top_k


def _prompts(prompt: str | list[str | int | list[int]]) -> Iterable[str | list[int]]:
    """One text, one list of ids, or a list of either, as OpenAI's API takes them."""
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise InvalidRequest("`prompt` must not be empty", field="prompt")
    if len(prompt) > MAX_CHOICES and not isinstance(prompt[0], int):
        raise InvalidRequest(f"`prompt` takes at most {MAX_CHOICES} prompts, got {len(prompt)}", field="prompt")
    try:
        return msgspec.convert(prompt, list[str]) if isinstance(prompt[0], str) else _id_lists(prompt)
    except msgspec.ValidationError as error:
        message = "`prompt` must be a text, a list of texts, a list of token ids, or a list of such lists"
        raise InvalidRequest(message, field="prompt") from error


def _id_lists(prompt: list[str | int | list[int]]) -> list[list[int]]:
    if isinstance(prompt[0], int):
        return [msgspec.convert(prompt, list[int])]
    return msgspec.convert(prompt, list[list[int]])


def _plain(message: Message) -> dict[str, str]:
    content = message.content if isinstance(message.content, str) else "\n".join(p.text for p in message.content)
    plain = {"role": message.role, "content": content}
    return plain if message.name is None else {**plain, "name": message.name}


def _stops(stop: str | list[str] | None) -> tuple[str, ...]:
    stops = (stop,) if isinstance(stop, str) else tuple(stop or ())
    if len(stops) > MAX_STOP_STRINGS:
        raise InvalidRequest(f"`stop` takes at most {MAX_STOP_STRINGS} strings, got {len(stops)}", field="stop")
    for one in stops:
        if not 1 <= len(one) <= MAX_STOP_CHARACTERS:
            message = f"`stop` strings have from 1 to {MAX_STOP_CHARACTERS} characters, got {len(one)}"
            raise InvalidRequest(message, field="stop")
    return stops


def _salt(salt: str) -> str:
    if len(salt) > MAX_SALT_CHARACTERS:
        raise InvalidRequest(f"`cache_salt` has at most {MAX_SALT_CHARACTERS} characters", field="cache_salt")
    return salt


def _within(name: str, value: N, lowest: N, highest: N) -> N:
    if not lowest <= value <= highest:
        raise InvalidRequest(f"`{name}` must be from {lowest} to {highest}, got {value}", field=name)
    return value
