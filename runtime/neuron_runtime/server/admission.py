"""Admission, stop 2 of a request: template, tokenize, and check every length and count against the model's limits.

What passes here cannot fail in the scheduler or on the device. Called by the routes, and by the offline class, with a
typed body; gives back what the engine needs (`core.Request` without an id) and what the text needs. No I/O, no clock.
"""

from __future__ import annotations

import secrets
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

import msgspec

from neuron_runtime import sampling_modes
from neuron_runtime.config import ServerOptions
from neuron_runtime.core import BackendLimits, FinishReason, Sampling
from neuron_runtime.engine.admission import max_new_tokens
from neuron_runtime.errors import InvalidRequest
from neuron_runtime.not_built import Surface, refuse
from neuron_runtime.server.wire import ChatBody, CompletionBody, Generate, Message, TokenizeBody
from neuron_runtime.text.bad_words import bad_word_sequences
from neuron_runtime.text.chat_template import ChatTemplate, TemplateRefused
from neuron_runtime.text.choice_text import ChoiceText
from neuron_runtime.text.generation_config import GenerationDefaults
from neuron_runtime.text.reasoning import Marks, Thoughts
from neuron_runtime.text.tokenizer import Tokenizer

DEFAULT_COMPLETION_TOKENS = 16
"""`max_tokens` of /v1/completions where neither client nor model says one, as in OpenAI's API."""
"""Answers to one HTTP request: prompts times `n`."""
MAX_STOP_STRINGS = 16
MAX_STOP_CHARACTERS = 1024
MAX_STOP_TOKEN_IDS = 1024
GREEDY_TEMPERATURE = 1e-5
"""At or below it logits divided by it overflow: the likeliest token is meant."""
MAX_SALT_CHARACTERS = 256

N = TypeVar("N", int, float)


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
    """For each token of the prompt the character at which it begins; empty where nobody asks."""


@dataclass(frozen=True)
class Details:
    """What an answer tells of itself besides its text."""

    logprobs: int | None = None
    """How many alternatives to each token of the answer, and of a repeated prompt; None: no log-probabilities."""
    prompt_logprobs: int | None = None
    """The same for the prompt by itself."""
    token_ids: bool = False
    tokens_as_token_ids: bool = False
    """Tokens are written `token_id:N` where log-probabilities name them."""


@dataclass(frozen=True)
class Ask:
    """One HTTP request, admitted: its prompts and how each is continued."""

    prompts: tuple[tuple[int, ...], ...]
    sampling: tuple[Sampling, ...]
    """Per prompt; for `n` answers each is used with `choice` 0 to n-1."""
    num_choices: int = 1
    echoes: tuple[Echo, ...] = ()
    """Per prompt, where the answers repeat it; else empty."""
    generates: bool = True
    """False: the answers are the echo alone, although one token is computed."""
    details: Details | None = None
    """None: text alone, as most clients ask; such answers pay for nothing else."""
    thinks: Callable[[], Thoughts] | None = None
    """Makes what tells the thought of an answer from its text; None: there is nothing to tell apart."""
    shows_thoughts: bool = True
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


def served_defaults(defaults: GenerationDefaults, limits: BackendLimits) -> GenerationDefaults:
    """A model's defaults as far as its sampling mode serves them; the others are told in `not_applied`."""
    neutral = GenerationDefaults()
    refused = [
        name
        for name in ("min_p", "repetition_penalty")
        if sampling_modes.PARAMETERS[name].where(limits.sampling) is sampling_modes.Where.REFUSED
        and getattr(defaults, name) != getattr(neutral, name)
    ]
    told = tuple(f"{name}={getattr(defaults, name)} (with {limits.sampling} sampling)" for name in refused)
    plain = {name: getattr(neutral, name) for name in refused}
    return replace(defaults, **plain, not_applied=defaults.not_applied + told)


@dataclass(frozen=True)
class Admission:
    """What a model can be asked, as data."""

    tokenizer: Tokenizer
    limits: BackendLimits
    served_names: tuple[str, ...]
    defaults: GenerationDefaults = field(default_factory=GenerationDefaults)
    max_queued_requests: int = 0
    max_queued_tokens: int = sys.maxsize
    cuts_max_tokens: bool = False
    """Where more tokens are asked for than fit behind the prompt, as many as fit are meant; else that is refused."""
    options: ServerOptions = field(default_factory=ServerOptions)
    """The most that one request may ask for."""
    reasoning: Marks | None = None
    """How the model writes its thoughts; None: they are left in the text."""

    def check_model(self, name: str | None) -> None:
        """Raises InvalidRequest (404) for a model that is not served here; no name at all means the one there is."""
        if name is not None and name not in self.served_names:
            known = ", ".join(self.served_names)
            message = f"the model `{name}` does not exist here; served: {known}"
            raise InvalidRequest(message, field="model", status=404, code="model_not_found")

    def completion(self, body: CompletionBody) -> Ask:
        """Raises InvalidRequest."""
        self._check_common(body)
        echo = body.echo is True
        if body.best_of not in (None, 1, body.n):
            message = f"`best_of` is {body.best_of}: more answers than `n` are not supported yet, leave it out"
            raise InvalidRequest(message, field="best_of")
        generates = not (echo and body.max_tokens == 0)
        # Zero is a number of tokens where the prompt is all that is shown.
        sampling_modes.check_ranges(body if generates else msgspec.structs.replace(body, max_tokens=None))
        if echo and body.logprobs is not None:
            sampling_modes.check_one_served("prompt_logprobs", self.limits, "echo")
        cut = self._cut(body, body.max_tokens)
        prompts = tuple(
            self._prompt(prompt, body.add_special_tokens is not False, cut) for prompt in self._prompts(body.prompt)
        )
        for prompt in prompts:
            self._check_prompt(prompt.token_ids, "prompt")
        return self._ask(
            body,
            prompts,
            asked=body.max_tokens if generates else 1,
            name="max_tokens",
            default=self.defaults.max_tokens or DEFAULT_COMPLETION_TOKENS,
            logprobs=body.logprobs,
            repeated_logprobs=body.logprobs if echo else None,
            echoes=tuple(self._echo(prompt, body) for prompt in prompts) if echo else (),
            generates=generates,
        )

    def chat(self, body: ChatBody) -> Ask:
        """Raises InvalidRequest."""
        self._check_common(body)
        sampling_modes.check_ranges(body)
        if body.top_logprobs and not body.logprobs:
            raise InvalidRequest("`top_logprobs` needs `logprobs: true`", field="top_logprobs")
        if None not in (body.max_tokens, body.max_completion_tokens) and body.max_tokens != body.max_completion_tokens:
            message = (
                f"`max_tokens` is {body.max_tokens} and `max_completion_tokens` {body.max_completion_tokens}: they are "
                "one limit, leave `max_tokens` out"
            )
            raise InvalidRequest(message, field="max_tokens")
        name = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
        asked = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
        text = self.chat_text(body.messages, body)
        prompt = self._prompt(text, body.add_special_tokens is True, self._cut(body, asked), "messages")
        self._check_prompt(prompt.token_ids, "messages")
        return self._ask(
            body,
            (prompt,),
            asked=asked,
            name=name,
            default=self.defaults.max_tokens or self.limits.max_model_length,
            logprobs=(body.top_logprobs or 0) if body.logprobs else None,
            thinks=None if self.reasoning is None else partial(Thoughts, self.reasoning, text),
            shows_thoughts=body.include_reasoning is not False,
        )

    def tokenize(self, body: TokenizeBody) -> tuple[int, ...]:
        """Raises InvalidRequest."""
        self.check_model(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise InvalidRequest("exactly one of `prompt` and `messages` is needed", field="prompt")
        if body.messages is not None:
            text = self.chat_text(body.messages, body)
            return self._prompt(text, body.add_special_tokens is True, None, "messages").token_ids
        return self._prompt(body.prompt or "", body.add_special_tokens is not False, None).token_ids

    @property
    def vocabulary_size(self) -> int:
        """Token ids that both the tokenizer and the model have are below this."""
        known = self.tokenizer.vocabulary_size
        return min(known, self.limits.vocabulary_size or known)

    def check_token_ids(self, token_ids: Sequence[int], name: str) -> None:
        """Raises InvalidRequest naming the first id outside the vocabulary."""
        size = self.vocabulary_size
        for at, token in enumerate(token_ids):
            if not 0 <= token < size:
                message = f"`{name}[{at}]`: {token} is not a token id of this model (0 to {size - 1})"
                raise InvalidRequest(message, field=name)

    def chat_text(self, messages: Sequence[Message], asked: ChatBody | TokenizeBody) -> str:
        """What the template makes of a chat; it writes its own BOS. Raises InvalidRequest."""
        template = self.tokenizer.chat_template
        if template is None:
            message = "this model has no chat template: send a prompt (/v1/completions) instead of messages"
            raise InvalidRequest(message, field="messages")
        if not messages:
            raise InvalidRequest("`messages` must not be empty", field="messages")
        plain = [_plain(message, f"messages[{at}]", template) for at, message in enumerate(messages)]
        variables = dict(asked.chat_template_kwargs or {})
        effort = asked.reasoning_effort if isinstance(asked, ChatBody) else None
        if effort is not None:
            if "reasoning_effort" not in template.variables:
                message = "`reasoning_effort` means nothing to this model's chat template: leave it out"
                raise InvalidRequest(message, field="reasoning_effort")
            variables.setdefault("reasoning_effort", effort)
        if asked.continue_final_message and asked.add_generation_prompt:
            message = "`continue_final_message` and `add_generation_prompt` exclude one another: leave out one of them"
            raise InvalidRequest(message, field="continue_final_message")
        try:
            if asked.continue_final_message:
                text = template.render_open(plain, variables)
            else:
                text = template.render(plain, asked.add_generation_prompt is not False, variables)
        except TemplateRefused as error:
            message = f"the model's chat template does not accept these messages: {error}"
            raise InvalidRequest(message, field="messages") from error
        return text

    def _check_common(self, body: Generate) -> None:
        """What can be said before anything is tokenized."""
        self.check_model(body.model)
        sampling_modes.check_served(body, self.limits)
        if body.stream_options is not None and not body.stream:
            raise InvalidRequest("`stream_options` needs `stream: true`", field="stream_options")
        if body.prompt_logprobs is not None and body.stream:
            raise InvalidRequest("`prompt_logprobs` cannot be streamed: leave out `stream`", field="prompt_logprobs")

    def _cut(self, body: Generate, max_tokens: int | None) -> int | None:
        """How many tokens of a prompt are kept; None: all."""
        cut = body.truncate_prompt_tokens
        if cut is None:
            return None
        longest = max_new_tokens(self.limits, 0) - 1
        if cut == -1:
            return max(longest + 1 - max(max_tokens or 1, 1), 1)
        if not 1 <= cut <= longest:
            message = f"`truncate_prompt_tokens` must be from 1 to {longest}, or -1 for as many as fit, got {cut}"
            raise InvalidRequest(message, field="truncate_prompt_tokens")
        return cut

    def _prompt(
        self, prompt: str | list[int], add_special_tokens: bool, cut: int | None, name: str = "prompt"
    ) -> Prompt:
        if not isinstance(prompt, str):
            self.check_token_ids(prompt, name)
            return Prompt(tuple(prompt if cut is None else prompt[-cut:]))
        if cut is None:
            self._check_characters(prompt, name)
            return Prompt(self.tokenizer.encode(prompt, add_special_tokens), prompt)
        # Twice the text that could be kept: far behind where it is cut, its tokens are those of the whole text.
        kept = prompt[-2 * cut * self.tokenizer.longest_token_characters :]
        ids = self.tokenizer.encode(kept, add_special_tokens, max_tokens=cut)
        return Prompt(ids, prompt if len(ids) < cut else None)

    def _prompts(self, prompt: str | list[str | int | list[int]]) -> Iterable[str | list[int]]:
        """One text, one list of ids, or a list of either, as OpenAI's API takes them."""
        if isinstance(prompt, str):
            return [prompt]
        if not prompt:
            raise InvalidRequest("`prompt` must not be empty", field="prompt")
        most = self.options.max_prompts
        if len(prompt) > most and not isinstance(prompt[0], int):
            raise InvalidRequest(f"`prompt` takes at most {most} prompts, got {len(prompt)}", field="prompt")
        try:
            return msgspec.convert(prompt, list[str]) if isinstance(prompt[0], str) else _id_lists(prompt)
        except msgspec.ValidationError as error:
            message = "`prompt` must be a text, a list of texts, a list of token ids, or a list of such lists"
            raise InvalidRequest(message, field="prompt") from error

    def _echo(self, prompt: Prompt, body: CompletionBody) -> Echo:
        locates = body.logprobs is not None
        if prompt.text is not None:
            starts = self.tokenizer.starts(prompt.text, body.add_special_tokens is not False) if locates else ()
            return Echo(prompt.text, starts)
        if not locates:
            return Echo(self.tokenizer.decode(prompt.token_ids, body.skip_special_tokens is not False), ())
        answer = ChoiceText(self.tokenizer, (), skip_special_tokens=body.skip_special_tokens is not False, locates=True)
        return Echo(answer.feed(prompt.token_ids, FinishReason.LENGTH), tuple(answer.text_offsets))

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
        self,
        body: Generate,
        prompts: tuple[Prompt, ...],
        *,
        asked: int | None,
        name: str,
        default: int,
        logprobs: int | None,
        repeated_logprobs: int | None = None,
        **more: Any,
    ) -> Ask:
        num_choices = 1 if body.n is None else body.n
        most = min(self.options.max_choices, self.limits.max_rows + self.max_queued_requests)
        if num_choices * len(prompts) > most:
            message = f"`n` is {num_choices}: prompts times `n` are at most {most}"
            raise InvalidRequest(message, field="n")
        num_tokens = num_choices * sum(len(prompt.token_ids) for prompt in prompts)
        if num_choices * len(prompts) > 1 and num_tokens > self.max_queued_tokens:
            most = self.max_queued_tokens
            message = f"`n` is {num_choices}: prompts times `n` have {num_tokens} tokens, at most {most} may wait"
            raise InvalidRequest(message, field="n")
        options = body.stream_options
        details = Details(
            logprobs=logprobs,
            prompt_logprobs=body.prompt_logprobs,
            token_ids=body.return_token_ids is True,
            tokens_as_token_ids=body.return_tokens_as_token_ids is True,
        )
        of_prompt = [one for one in (body.prompt_logprobs, repeated_logprobs) if one is not None]
        sampling = replace(self._sampling(body), logprobs=logprobs, prompt_logprobs=max(of_prompt, default=None))
        lengths = [self._max_tokens(len(prompt.token_ids), asked, name, default) for prompt in prompts]
        if sampling.min_tokens > min(lengths):
            message = f"`min_tokens` is {sampling.min_tokens}, above the {min(lengths)} tokens of the answer"
            raise InvalidRequest(message, field="min_tokens")
        return Ask(
            prompts=tuple(prompt.token_ids for prompt in prompts),
            sampling=tuple(replace(sampling, max_tokens=max_tokens) for max_tokens in lengths),
            num_choices=num_choices,
            details=None if replace(details, tokens_as_token_ids=False) == Details() else details,
            stop=_stops(body.stop),
            include_stop=body.include_stop_str_in_output is True,
            skip_special_tokens=body.skip_special_tokens is not False,
            priority=_within("priority", body.priority or 0, -(2**31), 2**31 - 1),
            cache_salt=_salt(body.cache_salt or ""),
            stream=body.stream is True,
            include_usage=options is not None and options.include_usage is True,
            continuous_usage=options is not None
            and options.include_usage is True
            and options.continuous_usage_stats is True,
            **more,
        )

    def _max_tokens(self, num_prompt_tokens: int, asked: int | None, name: str, default: int) -> int:
        room = max_new_tokens(self.limits, num_prompt_tokens)
        most = self.options.max_output_tokens or room
        if asked is None:
            return min(default, room, most)
        if self.options.max_output_tokens and asked > most:
            raise InvalidRequest(f"`{name}` is {asked}: an answer has at most {most} tokens here", field=name)
        if asked <= room:
            return asked
        if self.cuts_max_tokens:
            return room
        message = (
            f"`{name}` is {asked}, but a prompt of {num_prompt_tokens} tokens leaves room for {room}: together "
            f"they have at most {room + num_prompt_tokens} tokens here"
        )
        raise InvalidRequest(message, field=name, code="context_length_exceeded")

    def _sampling(self, body: Generate) -> Sampling:
        """All of it but what depends on the prompt."""
        defaults, size = self.defaults, self.vocabulary_size
        temperature = _or(body.temperature, defaults.temperature)
        stop_token_ids = frozenset(body.stop_token_ids or ())
        if len(stop_token_ids) > MAX_STOP_TOKEN_IDS:
            message = f"`stop_token_ids` takes at most {MAX_STOP_TOKEN_IDS} ids, got {len(stop_token_ids)}"
            raise InvalidRequest(message, field="stop_token_ids")
        self.check_token_ids(body.stop_token_ids or (), "stop_token_ids")
        ends = frozenset[int]() if body.ignore_eos else defaults.stop_token_ids
        return Sampling(
            min_tokens=body.min_tokens or 0,
            temperature=temperature if temperature > GREEDY_TEMPERATURE else 0.0,
            top_k=self._top_k(body.top_k),
            top_p=_or(body.top_p, defaults.top_p),
            min_p=_or(body.min_p, defaults.min_p),
            repetition_penalty=_or(body.repetition_penalty, defaults.repetition_penalty),
            presence_penalty=body.presence_penalty or 0.0,
            frequency_penalty=body.frequency_penalty or 0.0,
            logit_bias=sampling_modes.bias_entries(body.logit_bias, size),
            allowed_token_ids=sampling_modes.allowed_tokens(body.allowed_token_ids, size),
            bad_words=bad_word_sequences(self.tokenizer, body.bad_words),
            seed=secrets.randbits(63) if body.seed is None else body.seed,
            stop_token_ids=stop_token_ids | ends,
        )

    def _top_k(self, asked: int | None) -> int:
        top_k = self.defaults.top_k if asked is None else asked
        if top_k <= 0 or top_k >= self.tokenizer.vocabulary_size:
            return 0
        if self.limits.max_top_k and top_k > self.limits.max_top_k:
            if asked is None:
                return self.limits.max_top_k
            message = f"`top_k` is at most {self.limits.max_top_k} with {self.limits.sampling} sampling, got {top_k}"
            raise InvalidRequest(message, field="top_k")
        return top_k


def _id_lists(prompt: list[str | int | list[int]]) -> list[list[int]]:
    if isinstance(prompt[0], int):
        return [msgspec.convert(prompt, list[int])]
    return msgspec.convert(prompt, list[list[int]])


def _plain(message: Message, at: str, template: ChatTemplate) -> dict[str, Any]:
    """A message as templates know it. Raises InvalidRequest for what only tools, images and sounds have."""
    for name in message.__struct_fields__:
        refuse(Surface.MESSAGE, name, getattr(message, name), at=f"{at}.{name}")
    refuse(Surface.ROLE, message.role, message.role, at=f"{at}.role")
    role = "system" if message.role == "developer" and not template.knows_developer else message.role
    plain: dict[str, Any] = {"role": role, "content": _content(message, at, template)}
    thought = message.reasoning_content if message.reasoning is None else message.reasoning
    if thought is not None:
        plain |= {"reasoning_content": thought, "reasoning": thought}
    return plain if message.name is None else {**plain, "name": message.name}


def _content(message: Message, at: str, template: ChatTemplate) -> str | list[dict[str, str]]:
    """The form that the template takes: a text, or a list of parts."""
    content = message.content
    if content is None:
        if message.role != "assistant":
            raise InvalidRequest(f"`{at}.content` is missing", field=f"{at}.content")
        content = ""
    if isinstance(content, str):
        return content if template.takes_text else [{"type": "text", "text": content}]
    texts = []
    for number, part in enumerate(content):
        where = f"{at}.content[{number}]"
        if part.type != "text":
            message_text = f"`{where}.type`: parts of the type `{part.type}` are not supported yet, only `text`"
            raise InvalidRequest(message_text, field=f"{where}.type")
        if part.text is None:
            raise InvalidRequest(f"`{where}.text` is missing", field=f"{where}.text")
        texts.append(part.text)
    if template.takes_parts and texts:
        return [{"type": "text", "text": text} for text in texts]
    return "\n".join(texts)


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


def _or(value: N | None, default: N) -> N:
    return default if value is None else value
