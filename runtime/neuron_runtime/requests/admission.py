"""Admission, stop 2 of a request: apply the template, tokenize, and check every length and count.

Scheduler and device do not check again, so an admitted request cannot fail there. The routes and the offline class ask
`Admissions` for the `Admission` of the model or adapter that is asked for, and call it with typed options and a prompt
or a chat; it returns an `Ask` with the data that the engine and the text modules need. No I/O, no clock.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache, partial
from typing import Any

import msgspec

from neuron_runtime.config import ServerOptions
from neuron_runtime.core import BackendLimits, Picture, Sampling, Task
from neuron_runtime.errors import InvalidRequest
from neuron_runtime.pictures.placing import check_places, find_seeds, place
from neuron_runtime.pictures.reader import PictureReader
from neuron_runtime.pictures.sources import PictureAt
from neuron_runtime.requests.chats import Chat, chat_text, pictures_shown
from neuron_runtime.requests.generation_defaults import PARAMETERS, GenerationDefaults
from neuron_runtime.requests.options import MAX_SALT_CHARACTERS, CompletionOptions, Generate, StreamOptions
from neuron_runtime.requests.parameters import NO_NAMES, Names, check_parameter_served, check_served
from neuron_runtime.requests.prompts import Echo, Prompt, PromptField, Prompts, context_length_exceeded, each_prompt
from neuron_runtime.requests.sampling import Sampler
from neuron_runtime.requests.sampling_fields import DEFAULT_COMPLETION_TOKENS, MAX_STOP_CHARACTERS, MAX_STOP_STRINGS
from neuron_runtime.requests.targets import Target, Targets
from neuron_runtime.requests.texts import Text
from neuron_runtime.requests.token_ids import check_token_ids
from neuron_runtime.requests.tools import ToolUse, tool_use
from neuron_runtime.text.chat_template import ChatTemplate
from neuron_runtime.text.reasoning import ReasoningSplitter
from neuron_runtime.text.tokenizer import Tokenizer
from neuron_runtime.text.tool_calls import CallTag, ToolCallSplitter

NUM_KEPT = 512
"""Targets for which a server keeps what it has prepared: twice the adapters of a list."""


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
    """Per prompt; the `n` answers use it with `choice` 0 to n-1. With no tokens at most, the answer is a vector."""
    target: Target
    num_choices: int = 1
    pictures: tuple[tuple[Picture, ...], ...] = ()
    """Per prompt, if there are any."""
    second_at: tuple[int, ...] = ()
    """Per prompt, if they are pairs of texts: the first token of the second one."""
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
class Admissions:
    """Admits requests for a model and its adapters, within the model's limits."""

    text: Text
    """The model's, and that of adapters without one."""
    limits: BackendLimits
    targets: Targets
    max_queued_requests: int = 0
    max_queued_tokens: int = sys.maxsize
    cuts_max_tokens: bool = False
    """Reduce `max_tokens` to what fits after the prompt; otherwise larger values are refused."""
    options: ServerOptions = field(default_factory=ServerOptions)
    """Limits of one request."""
    task: Task = "generate"
    pictures: PictureReader | None = None
    """None: the model, or its backend, sees no pictures."""

    def of(self, name: str | None) -> Admission:
        """Of the target with this name. Raises as `Targets.of`."""
        return self.at(self.targets.of(name))

    @cached_property
    def at(self) -> Callable[[Target], Admission]:
        """Of a target. What has been prepared for it is kept."""
        return lru_cache(NUM_KEPT)(partial(Admission, self))


@dataclass(frozen=True)
class Admission:
    """Admits requests for one target."""

    all: Admissions
    target: Target

    @property
    def text(self) -> Text:
        return self.target.text or self.all.text

    @property
    def tokenizer(self) -> Tokenizer:
        return self.text.tokenizer

    @property
    def limits(self) -> BackendLimits:
        return self.all.limits

    @cached_property
    def defaults(self) -> GenerationDefaults:
        return self.text.defaults.served(self.limits)

    def completion(self, prompt: PromptField, options: CompletionOptions, pictures: Sequence[PictureAt] = ()) -> Ask:
        """Raises InvalidRequest.

        pictures: those of the one prompt, which has a placeholder for each.
        """
        self._check_common(options, NO_NAMES)
        echo = options.echo is True
        generates = options.max_tokens != 0
        if echo and options.logprobs is not None:
            check_parameter_served("echo", PARAMETERS["prompt_logprobs"], self.limits)
        cut = self.prompts.cut(options.truncate_prompt_tokens, options.max_tokens)
        adds_special = options.add_special_tokens is not False
        contents = each_prompt(prompt, self.all.options.max_prompts)
        placed: tuple[Picture, ...] = ()
        prompts: tuple[Prompt, ...]
        if pictures:
            self._check_whole(pictures, cut)
            reader, (content,) = self._reader(pictures), contents
            whole, placed = self._placed(reader, pictures, content, adds_special, "prompt")
            self.prompts.check(whole.token_ids, "prompt")
            prompts = (whole,)
        else:
            prompts = tuple(self.prompts.checked(one, adds_special, cut, "prompt") for one in contents)
        return self._ask(
            options,
            NO_NAMES,
            prompts,
            pictures=(placed,) if placed else (),
            asked=options.max_tokens if generates else 1,
            default=self.defaults.sampling.max_tokens or DEFAULT_COMPLETION_TOKENS,
            logprobs=options.logprobs,
            repeated_logprobs=options.logprobs if echo else None,
            echoes=tuple(self.prompts.echo(one, options) for one in prompts) if echo else (),
            generates=generates,
        )

    def chat(self, chat: Chat) -> Ask:
        """Raises InvalidRequest."""
        options, names = chat.options, chat.names
        self._check_common(options, names)
        if options.top_logprobs and not options.logprobs:
            raise InvalidRequest.at("top_logprobs", "needs `logprobs: true`")
        text, reasoning = self.chat_text(chat), self.text.reasoning
        use = tool_use(options, chat.functions, self.text.tool_format, self._strict_tag)
        cut = self.prompts.cut(options.truncate_prompt_tokens, options.max_tokens)
        prompt, pictures = self._chat_prompt(chat, text, cut)
        self.prompts.check(prompt.token_ids, names["messages"])
        ask = self._ask(
            options,
            names,
            (prompt,),
            pictures=(pictures,) if pictures else (),
            asked=options.max_tokens,
            default=self.defaults.sampling.max_tokens or self.limits.max_model_length,
            logprobs=(options.top_logprobs or 0) if options.logprobs else None,
            make_splitter=None if reasoning is None else partial(ReasoningSplitter, reasoning, text),
            before_answer=("", "") if reasoning is None else reasoning.before_answer(text),
            shows_reasoning=options.include_reasoning is not False,
            use=use,
        )
        if use is not None and use.form.marks & self.tokenizer.hidden_tokens:
            # The text without special tokens would lack the marks of calls.
            return replace(ask, skip_special_tokens=False)
        return ask

    def text_tokens(self, text: str, adds_special_tokens: bool) -> tuple[int, ...]:
        """The tokens of a text, however many. Raises InvalidRequest."""
        return self.prompts.read(text, adds_special_tokens, None, "prompt").token_ids

    def chat_tokens(self, chat: Chat) -> tuple[int, ...]:
        """The tokens of a chat, however many. Raises InvalidRequest."""
        return self._chat_prompt(chat, self.chat_text(chat), None)[0].token_ids

    def check_token_ids(self, token_ids: Sequence[int], name: str) -> None:
        """Raises InvalidRequest naming the first id outside the vocabulary."""
        check_token_ids(token_ids, name, self.prompts.vocabulary_size)

    def chat_text(self, chat: Chat) -> str:
        """Render a chat with the model's template. Raises InvalidRequest."""
        reader = self._reader(chat.pictures) if chat.pictures else self.all.pictures
        return chat_text(self._template(chat), chat, "" if reader is None else reader.family.in_text)

    def pictures(self, chat: Chat) -> list[PictureAt]:
        """In the order in which the text of a chat has their places. Raises InvalidRequest."""
        template = self._template(chat)
        return [] if template is None else pictures_shown(template, chat)

    def _template(self, chat: Chat) -> ChatTemplate | None:
        known = self.tokenizer
        return known.tool_template if chat.has_tools else known.chat_template

    def _chat_prompt(self, chat: Chat, text: str, cut: int | None) -> tuple[Prompt, tuple[Picture, ...]]:
        """The tokens of a chat's text, with those of its pictures. Raises InvalidRequest."""
        name, reader = chat.names["messages"], self.all.pictures
        adds_special = chat.options.add_special_tokens is True
        if reader is None or not (chat.pictures or any(mark in text for mark in reader.family.marks)):
            return self.prompts.read(text, adds_special, cut, name), ()
        self._check_whole(chat.pictures, cut)
        return self._placed(reader, self.pictures(chat), text, adds_special, name)

    def _check_whole(self, pictures: Sequence[PictureAt], cut: int | None) -> None:
        """Raises InvalidRequest if a prompt with pictures is to be cut."""
        if pictures and cut is not None:
            raise InvalidRequest.at("truncate_prompt_tokens", "cannot be combined with pictures: leave it out")

    def _reader(self, pictures: Sequence[PictureAt]) -> PictureReader:
        """What reads these pictures. Raises InvalidRequest."""
        reader = self.all.pictures
        if reader is None:
            problem = "is a picture, and this server sees none: its model or backend reads only text"
            raise InvalidRequest.at(pictures[0].at, problem)
        reader.check(pictures)
        return reader

    def _placed(
        self,
        reader: PictureReader,
        pictures: Sequence[PictureAt],
        content: str | list[int],
        adds_special: bool,
        name: str,
    ) -> tuple[Prompt, tuple[Picture, ...]]:
        """A prompt with pictures at its placeholders. Raises InvalidRequest; what is wrong with the text, before a
        picture is read."""
        family = reader.family
        if isinstance(content, str):
            check_places(content, family, len(pictures), name)
            content = content.replace(family.placeholder, family.replaced or family.placeholder)
        prompt = self.prompts.read(content, adds_special, None, name)
        seeds = find_seeds(prompt.token_ids, family, self.tokenizer, len(pictures), name)
        token_ids, placed = place(prompt.token_ids, seeds, reader.read(pictures), self.tokenizer)
        self._check_picture_tokens(placed, pictures)
        return Prompt(token_ids), placed

    def _check_picture_tokens(self, placed: Sequence[Picture], pictures: Sequence[PictureAt]) -> None:
        """Raises InvalidRequest."""
        most = self.limits.max_picture_tokens
        for picture, given in zip(placed, pictures, strict=True):
            if 0 < most < picture.num_tokens:
                problem = f"has {picture.num_tokens} tokens, and this backend takes at most {most} of a picture"
                raise InvalidRequest.at(given.at, problem)
        most, total = self.limits.max_tokens_of_pictures, sum(one.num_tokens for one in placed)
        if 0 < most < total:
            problem = f"is the last of pictures that have {total} tokens, and this backend takes at most {most} of all"
            raise InvalidRequest.at(pictures[-1].at, problem)

    @cached_property
    def _strict_tag(self) -> CallTag | None:
        """With which calls that the model chooses to make are kept to strict schemas; None: they are not."""
        tag = None if self.text.tool_format is None else self.text.tool_format.tag
        # A form knows the text of tokens, and a special token has none.
        if tag is None or tag.mark in self.tokenizer.hidden_tokens or not self.defaults.stop_token_ids:
            return None
        return None if self.limits.sampling == "Device" else tag

    @cached_property
    def prompts(self) -> Prompts:
        return Prompts(self.tokenizer, self.limits)

    @cached_property
    def _sampler(self) -> Sampler:
        return Sampler(self.tokenizer, self.limits, self.defaults, self.prompts.vocabulary_size)

    def _check_common(self, options: Generate, names: Names) -> None:
        """Checks that need no tokenization."""
        check_served(options, self.limits, names)
        if options.prompt_logprobs is not None and options.stream:
            raise InvalidRequest.at("prompt_logprobs", "cannot be streamed: leave out `stream`")
        if len(options.cache_salt or "") > MAX_SALT_CHARACTERS:
            raise InvalidRequest.at("cache_salt", f"must have at most {MAX_SALT_CHARACTERS} characters")

    def _ask(
        self,
        options: Generate,
        names: Names,
        prompts: tuple[Prompt, ...],
        *,
        asked: int | None,
        default: int,
        logprobs: int | None,
        repeated_logprobs: int | None = None,
        before_answer: tuple[str, str] = ("", ""),
        use: ToolUse | None = None,
        **more: Any,
    ) -> Ask:
        num_choices = 1 if options.n is None else options.n
        limited = self.all
        most = min(limited.options.max_choices, self.limits.max_rows + limited.max_queued_requests)
        if num_choices * len(prompts) > most:
            message = (
                f"prompts times `n` must be at most {most}, got {num_choices * len(prompts)} with `n` {num_choices}"
            )
            raise InvalidRequest(message, field="n")
        num_tokens = num_choices * sum(len(prompt.token_ids) for prompt in prompts)
        if num_choices * len(prompts) > 1 and num_tokens > limited.max_queued_tokens:
            most = limited.max_queued_tokens
            message = f"prompts times `n` ({num_choices}) have {num_tokens} tokens, but at most {most} may wait"
            raise InvalidRequest(message, field="n")
        streaming = options.stream_options or StreamOptions()
        details = Details(
            logprobs=logprobs,
            prompt_logprobs=options.prompt_logprobs,
            token_ids=options.return_token_ids is True,
            tokens_as_token_ids=options.return_tokens_as_token_ids is True,
        )
        of_prompt = [one for one in (options.prompt_logprobs, repeated_logprobs) if one is not None]
        reported = {"logprobs": logprobs, "prompt_logprobs": max(of_prompt, default=None)}
        sampling = self._sampler.sampling(options, names, use, **reported)
        if sampling.form is not None:
            opening, behind = before_answer
            sampling = replace(sampling, form=msgspec.structs.replace(sampling.form, opening=opening, behind=behind))
        lengths = [self._max_tokens(len(prompt.token_ids), asked, names["max_tokens"], default) for prompt in prompts]
        if sampling.min_tokens > min(lengths):
            message = f"`min_tokens` is {sampling.min_tokens}, but the answer has at most {min(lengths)} tokens"
            raise InvalidRequest(message, field="min_tokens")
        return Ask(
            prompts=tuple(prompt.token_ids for prompt in prompts),
            sampling=tuple(replace(sampling, max_tokens=max_tokens) for max_tokens in lengths),
            target=self.target,
            num_choices=num_choices,
            details=None if replace(details, tokens_as_token_ids=False) == Details() else details,
            stop=_stops(options.stop, names["stop"]),
            include_stop=options.include_stop_str_in_output is True,
            make_calls=None if use is None else use.splitter,
            skip_special_tokens=options.skip_special_tokens is not False,
            priority=options.priority or 0,
            cache_salt=options.cache_salt or "",
            stream=options.stream is True,
            include_usage=streaming.include_usage is True,
            continuous_usage=streaming.include_usage is True and streaming.continuous_usage_stats is True,
            **more,
        )

    def _max_tokens(self, num_prompt_tokens: int, asked: int | None, name: str, default: int) -> int:
        room = self.limits.max_new_tokens(num_prompt_tokens)
        most = self.all.options.max_output_tokens or room
        if asked is None:
            return min(default, room, most)
        if self.all.options.max_output_tokens and asked > most:
            raise InvalidRequest.at(name, f"must be at most {most} on this server, got {asked}")
        if asked <= room:
            return asked
        if self.all.cuts_max_tokens:
            return room
        problem = f"`{name}` is {asked}, and the prompt of {num_prompt_tokens} tokens leaves room for {room}"
        raise context_length_exceeded(self.limits, problem, name)


def _stops(stop: str | list[str] | None, name: str) -> tuple[str, ...]:
    stops = (stop,) if isinstance(stop, str) else tuple(stop or ())
    if len(stops) > MAX_STOP_STRINGS:
        raise InvalidRequest.at(name, f"must have at most {MAX_STOP_STRINGS} strings, got {len(stops)}")
    for one in stops:
        if not 1 <= len(one) <= MAX_STOP_CHARACTERS:
            raise InvalidRequest.at(name, f"strings must have 1 to {MAX_STOP_CHARACTERS} characters, got {len(one)}")
    return stops
