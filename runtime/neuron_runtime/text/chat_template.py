"""Chat templates: messages in, prompt text out. Compiled once per model, rendered for every chat request.

The environment is that of `apply_chat_template` in transformers, for which published templates are written. It is built
here because importing transformers imports torch, which the front end must not.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import CallBlock, Filter, For, Node, Template
from jinja2.parser import Parser
from jinja2.runtime import Context, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment

from neuron_runtime.text.template_shapes import shapes_of

_OPEN_END = "\ue000open end\ue001 "
"""Marks the end of the last message in the rendered text; ends with a space, to detect whether the template trims."""
_TIMED = "timed"
"""The filter of what a loop goes through."""

MAX_CHARACTERS = 2**26
MAX_SECONDS = 10.0
"""Of processor time, for one prompt, and for all those by which a template is tried.

Looked at when the template writes, calls something or turns in a loop."""
MAX_BITS = 2**16
"""Of a number that it multiplies: larger ones take long in one step."""


class TemplateRefused(Exception):
    """The template does not accept these messages; the message is the template's own."""


class PromptTooLarge(TemplateRefused):
    """The template writes too much, or takes too long."""


class _GenerationBlocks(Extension):
    """`{% generation %}` marks model output for training; serving renders only its content."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares the attribute

    def parse(self, parser: Parser) -> Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return CallBlock(self.call_method("_content"), [], [], body).set_lineno(line)

    def _content(self, caller: Macro) -> str:
        return str(caller())


class _Environment(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset({"*", "**"})

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._of_thread = threading.local()
        self.filters[_TIMED] = self._timed

    def begin(self) -> None:
        """The time of this thread begins anew."""
        self._of_thread.ends = time.thread_time() + MAX_SECONDS

    def look_at_time(self) -> None:
        """Raises PromptTooLarge."""
        if time.thread_time() > self._of_thread.ends:
            raise PromptTooLarge(f"the chat template takes more than {MAX_SECONDS:g} s to write a prompt")

    def _timed(self, items: Iterable[Any]) -> Iterator[Any]:
        for item in items:
            self.look_at_time()
            yield item

    def call(self, context: Context, called: Any, /, *args: Any, **kwargs: Any) -> Any:
        self.look_at_time()
        return super().call(context, called, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """A product or a power, unless it is large."""
        if isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length() * right if operator == "**" else left.bit_length() + right.bit_length()
            if bits > MAX_BITS:
                raise PromptTooLarge(f"the chat template computes a number of more than {MAX_BITS} bits")
        for many, times in ((left, right), (right, left)):
            if isinstance(many, Sized) and isinstance(times, int) and len(many) * times > MAX_CHARACTERS:
                raise PromptTooLarge(f"the chat template repeats something {times} times")
        return super().call_binop(context, operator, left, right)

    def _generate(self, source: Template, *args: Any, **kwargs: Any) -> str:
        """The hook of Jinja for the program of a template. Loops that write nothing look at the time, too."""
        for loop in source.find_all(For):
            loop.iter = Filter(loop.iter, _TIMED, [], [], None, None, lineno=loop.lineno)
        source.set_environment(self)
        return super()._generate(source, *args, **kwargs)

    def handle_exception(self, source: str | None = None) -> NoReturn:
        """Raise the error that is being handled as it is: Jinja would rewrite its traceback, which nobody reads, and
        leave it in a cycle that keeps all callers and what they hold until the garbage collector comes."""
        raise  # noqa: PLE0704 - called while an error is handled


class ChatTemplate:
    """A compiled template together with the special tokens that it may use.

    Raises:
        ValueError: the source is not a template, or one that writes without end whatever the chat is.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        environment = _Environment(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlocks, loopcontrols])
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ValueError(f"line {error.lineno}: {error.message}") from error
        except (SyntaxError, RecursionError) as error:
            raise ValueError(f"it is nested too deeply: {error}") from error
        self._environment = environment
        self._special_tokens = dict(special_tokens)
        self.source = source
        environment.begin()
        self.shapes = shapes_of(self._tried, "developer" in source)
        """What it takes."""

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt text, including special tokens. Raises TemplateRefused."""
        self._environment.begin()
        return self._rendered(messages, add_generation_prompt, variables or {})

    def _rendered(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool, variables: Mapping[str, Any]
    ) -> str:
        try:
            return self._joined(
                self._template.generate(
                    {
                        **self._special_tokens,
                        "tools": None,
                        "documents": None,
                        **variables,
                        "messages": messages,
                        "add_generation_prompt": add_generation_prompt,
                    }
                )
            )
        except (
            jinja2.TemplateError,
            TypeError,
            ValueError,
            ArithmeticError,
            LookupError,
            AttributeError,
            RecursionError,
        ) as error:
            # Expressions of a template can raise any of these for messages that it was not written for.
            raise TemplateRefused(str(error) or type(error).__name__) from error

    def render_open(self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any] | None = None) -> str:
        """The prompt text up to the end of the last message, which the output continues. Raises TemplateRefused."""
        *before, last = messages
        content = last["content"]
        if isinstance(content, str):
            opened: Any = content + _OPEN_END
        else:
            opened = [*content[:-1], {**content[-1], "text": content[-1]["text"] + _OPEN_END}]
        text = self.render([*before, {**last, "content": opened}], add_generation_prompt=False, variables=variables)
        begun, mark, rest = text.rpartition(_OPEN_END.rstrip())
        if not mark:
            raise TemplateRefused("it does not render the end of the last message, so the message cannot be continued")
        # If the template trims messages, trailing whitespace is not part of the prompt.
        return begun if rest.startswith(" ") else begun.rstrip()

    @property
    def behind_answers(self) -> str:
        """What the prompt has behind an answer, such as the mark of its end."""
        messages = [{"role": role, "content": self.shapes.content(role, _OPEN_END)} for role in ("user", "assistant")]
        try:
            text = self.render(messages, add_generation_prompt=False)
        except TemplateRefused:
            return ""
        _, mark, rest = text.rpartition(_OPEN_END.rstrip())
        return rest.lstrip() if mark else ""

    def _tried(self, messages: Sequence[Mapping[str, Any]], tools: Any) -> str:
        try:
            return self._rendered(messages, True, {"tools": tools})
        except PromptTooLarge as error:
            raise ValueError(str(error)) from error
        except TemplateRefused:
            return ""

    def _joined(self, pieces: Iterable[str]) -> str:
        """Raises PromptTooLarge."""
        num_characters, parts = 0, list[str]()
        for piece in pieces:
            num_characters += len(piece)
            parts.append(piece)
            if num_characters > MAX_CHARACTERS:
                raise PromptTooLarge(f"the chat template writes more than {MAX_CHARACTERS} characters")
            self._environment.look_at_time()
        return "".join(parts)


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(layout: str) -> str:
    return datetime.now().strftime(layout)
