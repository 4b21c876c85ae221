"""Admission, stop 2 of a request: apply the template, tokenize, and check every length and count.

Scheduler and device do not check again, so an admitted request cannot fail there. Called by the routes and by the
offline class with a typed body; returns an `Ask` with the data that the engine and the text modules need. No I/O, no
clock.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import msgspec

from neuron_runtime.config import ServerOptions
from neuron_runtime.core import BackendLimits, Form, Sampling
from neuron_runtime.errors import InvalidRequest
from neuron_runtime.requests.bodies import (
    MAX_SALT_CHARACTERS,
    ChatBody,
    CompletionBody,
    Function,
    Generate,
    Message,
    TokenizeBody,
)
from neuron_runtime.requests.chats import chat_text
from neuron_runtime.requests.generation_defaults import PARAMETERS, GenerationDefaults
from neuron_runtime.requests.parameters import check_parameter_served, check_served
from neuron_runtime.requests.prompts import Echo, Prompt, Prompts, context_length_exceeded
from neuron_runtime.requests.sampling import Sampler
from neuron_runtime.requests.sampling_fields import DEFAULT_COMPLETION_TOKENS, MAX_STOP_CHARACTERS, MAX_STOP_STRINGS
from neuron_runtime.requests.token_ids import check_token_ids
from neuron_runtime.requests.tools import callable_tools, tool_use
from neuron_runtime.text.reasoning import Marks, ReasoningSplitter
from neuron_runtime.text.tokenizer import Tokenizer
from neuron_runtime.text.tool_calls import CallTag, ToolCallSplitter, ToolFormat


@dataclass(frozen=True)
class Details:
    """Data that a response includes besides text."""

    logprobs: int | None = None
    """Number of alternatives per token of the answer, and of an echoed prompt; None: no log-probabilities."""
    prompt_logprobs: int | None = None
    """The same for the prompt."""
    token_ids: bool = False
    tokens_as_token_ids: bool = False
    """Log-probabilities name tokens as `token_id:N`."""


@dataclass(frozen=True)
class Ask:
    """An admitted HTTP request: its prompts and how to continue them."""

    prompts: tuple[tuple[int, ...], ...]
    sampling: tuple[Sampling, ...]
    """Per prompt; the `n` answers use it with `choice` 0 to n-1."""
    num_choices: int = 1
    echoes: tuple[Echo, ...] = ()
    """Per prompt, if answers repeat it; else empty."""
    generates: bool = True
    """False: answers consist of the echo only, although one token is computed."""
    details: Details | None = None
    """None: only text, as most clients request."""
    make_splitter: Callable[[], ReasoningSplitter] | None = None
    """Creates the splitter of reasoning and answer; None: the model has no reasoning."""
    make_calls: Callable[[], ToolCallSplitter] | None = None
    """Creates the splitter of text and calls; None: the answer calls no tools."""
    shows_reasoning: bool = True
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
    """Admits requests for one model, within its limits."""

    tokenizer: Tokenizer
    limits: BackendLimits
    served_names: tuple[str, ...]
    defaults: GenerationDefaults = field(default_factory=GenerationDefaults)
    max_queued_requests: int = 0
    max_queued_tokens: int = sys.maxsize
    cuts_max_tokens: bool = False
    """Reduce `max_tokens` to what fits after the prompt; otherwise larger values are refused."""
    options: ServerOptions = field(default_factory=ServerOptions)
    """Limits of one request."""
    reasoning: Marks | None = None
    """How the model marks its reasoning; None: reasoning stays in the text."""
    tool_format: ToolFormat | None = None
    """How the model writes calls of tools; None: not known."""

    def check_model(self, name: str | None) -> None:
        """Raises InvalidRequest (404) for an unknown model name; None means the served model."""
        if name is not None and name not in self.served_names:
            known = ", ".join(self.served_names)
            message = f"the model `{name}` does not exist; served models: {known}"
            raise InvalidRequest(message, field="model", status=404, code="model_not_found")

    def completion(self, body: CompletionBody) -> Ask:
        """Raises InvalidRequest."""
        self._check_common(body)
        echo = body.echo is True
        if body.best_of not in (None, 1, body.n):
            message = f"`best_of` must be 1 or `n`, got {body.best_of}: other values are not supported yet"
            raise InvalidRequest(message, field="best_of")
        generates = body.max_tokens != 0
        if echo and body.logprobs is not None:
            check_parameter_served("echo", PARAMETERS["prompt_logprobs"], self.limits)
        cut = self._prompts.cut(body.truncate_prompt_tokens, body.max_tokens)
        prompts = self._prompts.completions(body.prompt, body, cut, self.options.max_prompts)
        return self._ask(
            body,
            prompts,
            asked=body.max_tokens if generates else 1,
            name="max_tokens",
            default=self.defaults.sampling.max_tokens or DEFAULT_COMPLETION_TOKENS,
            logprobs=body.logprobs,
            repeated_logprobs=body.logprobs if echo else None,
            echoes=tuple(self._prompts.echo(prompt, body) for prompt in prompts) if echo else (),
            generates=generates,
        )

    def chat(self, body: ChatBody) -> Ask:
        """Raises InvalidRequest."""
        self._check_common(body)
        if body.top_logprobs and not body.logprobs:
            raise InvalidRequest("`top_logprobs` needs `logprobs: true`", field="top_logprobs")
        if None not in (body.max_tokens, body.max_completion_tokens) and body.max_tokens != body.max_completion_tokens:
            message = (
                f"`max_tokens` ({body.max_tokens}) and `max_completion_tokens` ({body.max_completion_tokens}) differ: "
                "leave `max_tokens` out"
            )
            raise InvalidRequest(message, field="max_tokens")
        name = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
        asked = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
        functions = callable_tools(body.tools, body.tool_choice)
        text = self.chat_text(body.messages, body, functions)
        use = tool_use(body, functions, self.tool_format, self._strict_tag)
        cut = self._prompts.cut(body.truncate_prompt_tokens, asked)
        prompt = self._prompts.checked(text, body.add_special_tokens is True, cut, "messages")
        ask = self._ask(
            body,
            (prompt,),
            asked=asked,
            name=name,
            default=self.defaults.sampling.max_tokens or self.limits.max_model_length,
            logprobs=(body.top_logprobs or 0) if body.logprobs else None,
            make_splitter=None if self.reasoning is None else partial(ReasoningSplitter, self.reasoning, text),
            before_answer=("", "") if self.reasoning is None else self.reasoning.before_answer(text),
            shows_reasoning=body.include_reasoning is not False,
            make_calls=None if use is None else use.splitter,
            forced=None if use is None else use.forced,
            strict=None if use is None else use.strict,
        )
        if use is not None and use.form.marks & self.tokenizer.hidden_tokens:
            # The text without special tokens would lack the marks of calls.
            return replace(ask, skip_special_tokens=False)
        return ask

    def tokenize(self, body: TokenizeBody) -> tuple[int, ...]:
        """Raises InvalidRequest."""
        self.check_model(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise InvalidRequest("exactly one of `prompt` and `messages` is required", field="prompt")
        if body.messages is not None:
            text = self.chat_text(body.messages, body, callable_tools(body.tools, None))
            return self._prompts.read(text, body.add_special_tokens is True, None, "messages").token_ids
        return self._prompts.read(body.prompt or "", body.add_special_tokens is not False, None, "prompt").token_ids

    def num_prompt_tokens(self, body: ChatBody) -> int:
        """The tokens of a chat, however many. Raises InvalidRequest."""
        self.check_model(body.model)
        text = self.chat_text(body.messages, body, callable_tools(body.tools, body.tool_choice))
        return len(self._prompts.read(text, False, None, "messages").token_ids)

    def check_token_ids(self, token_ids: Sequence[int], name: str) -> None:
        """Raises InvalidRequest naming the first id outside the vocabulary."""
        check_token_ids(token_ids, name, self._prompts.vocabulary_size)

    def chat_text(
        self, messages: Sequence[Message], body: ChatBody | TokenizeBody, functions: Sequence[Function] = ()
    ) -> str:
        """Render a chat with the model's template. Raises InvalidRequest.

        functions: those that the model may call.
        """
        return chat_text(self.tokenizer.chat_template, messages, body, functions)

    @cached_property
    def _strict_tag(self) -> CallTag | None:
        """With which calls that the model chooses to make are kept to strict schemas; None: they are not."""
        tag = None if self.tool_format is None else self.tool_format.tag
        # A form knows the text of tokens, and a special token has none.
        if tag is None or tag.mark in self.tokenizer.hidden_tokens or not self.defaults.stop_token_ids:
            return None
        return None if self.limits.sampling == "Device" else tag

    @cached_property
    def _prompts(self) -> Prompts:
        return Prompts(self.tokenizer, self.limits)

    @cached_property
    def _sampler(self) -> Sampler:
        return Sampler(self.tokenizer, self.limits, self.defaults, self._prompts.vocabulary_size)

    def _check_common(self, body: Generate) -> None:
        """Checks that need no tokenization."""
        self.check_model(body.model)
        check_served(body, self.limits)
        if body.stream_options is not None and not body.stream:
            raise InvalidRequest("`stream_options` needs `stream: true`", field="stream_options")
        if body.prompt_logprobs is not None and body.stream:
            raise InvalidRequest("`prompt_logprobs` cannot be streamed: leave out `stream`", field="prompt_logprobs")

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
        before_answer: tuple[str, str] = ("", ""),
        forced: Form | None = None,
        strict: Form | None = None,
        **more: Any,
    ) -> Ask:
        num_choices = 1 if body.n is None else body.n
        most = min(self.options.max_choices, self.limits.max_rows + self.max_queued_requests)
        if num_choices * len(prompts) > most:
            message = (
                f"prompts times `n` must be at most {most}, got {num_choices * len(prompts)} with `n` {num_choices}"
            )
            raise InvalidRequest(message, field="n")
        num_tokens = num_choices * sum(len(prompt.token_ids) for prompt in prompts)
        if num_choices * len(prompts) > 1 and num_tokens > self.max_queued_tokens:
            most = self.max_queued_tokens
            message = f"prompts times `n` ({num_choices}) have {num_tokens} tokens, but at most {most} may wait"
            raise InvalidRequest(message, field="n")
        options = body.stream_options
        details = Details(
            logprobs=logprobs,
            prompt_logprobs=body.prompt_logprobs,
            token_ids=body.return_token_ids is True,
            tokens_as_token_ids=body.return_tokens_as_token_ids is True,
        )
        of_prompt = [one for one in (body.prompt_logprobs, repeated_logprobs) if one is not None]
        reported = {"logprobs": logprobs, "prompt_logprobs": max(of_prompt, default=None)}
        sampling = self._sampler.sampling(body, forced, strict, **reported)
        if sampling.form is not None:
            opening, behind = before_answer
            sampling = replace(sampling, form=msgspec.structs.replace(sampling.form, opening=opening, behind=behind))
        lengths = [self._max_tokens(len(prompt.token_ids), asked, name, default) for prompt in prompts]
        if sampling.min_tokens > min(lengths):
            message = f"`min_tokens` is {sampling.min_tokens}, but the answer has at most {min(lengths)} tokens"
            raise InvalidRequest(message, field="min_tokens")
        return Ask(
            prompts=tuple(prompt.token_ids for prompt in prompts),
            sampling=tuple(replace(sampling, max_tokens=max_tokens) for max_tokens in lengths),
            num_choices=num_choices,
            details=None if replace(details, tokens_as_token_ids=False) == Details() else details,
            stop=_stops(body.stop),
            include_stop=body.include_stop_str_in_output is True,
            skip_special_tokens=body.skip_special_tokens is not False,
            priority=body.priority or 0,
            cache_salt=_salt(body.cache_salt or ""),
            stream=body.stream is True,
            include_usage=options is not None and options.include_usage is True,
            continuous_usage=options is not None
            and options.include_usage is True
            and options.continuous_usage_stats is True,
            **more,
        )

    def _max_tokens(self, num_prompt_tokens: int, asked: int | None, name: str, default: int) -> int:
        room = self.limits.max_new_tokens(num_prompt_tokens)
        most = self.options.max_output_tokens or room
        if asked is None:
            return min(default, room, most)
        if self.options.max_output_tokens and asked > most:
            raise InvalidRequest(f"`{name}` must be at most {most} on this server, got {asked}", field=name)
        if asked <= room:
            return asked
        if self.cuts_max_tokens:
            return room
        problem = f"`{name}` is {asked}, and the prompt of {num_prompt_tokens} tokens leaves room for {room}"
        raise context_length_exceeded(self.limits, problem, name)


def _stops(stop: str | list[str] | None) -> tuple[str, ...]:
    stops = (stop,) if isinstance(stop, str) else tuple(stop or ())
    if len(stops) > MAX_STOP_STRINGS:
        raise InvalidRequest(f"`stop` must have at most {MAX_STOP_STRINGS} strings, got {len(stops)}", field="stop")
    for one in stops:
        if not 1 <= len(one) <= MAX_STOP_CHARACTERS:
            message = f"`stop` strings must have 1 to {MAX_STOP_CHARACTERS} characters, got {len(one)}"
            raise InvalidRequest(message, field="stop")
    return stops


def _salt(salt: str) -> str:
    if len(salt) > MAX_SALT_CHARACTERS:
        raise InvalidRequest(f"`cache_salt` must have at most {MAX_SALT_CHARACTERS} characters", field="cache_salt")
    return salt
