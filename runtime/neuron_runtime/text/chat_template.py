"""Chat templates: messages in, prompt text out. Compiled once per model, rendered for every chat request.

The environment is that of `apply_chat_template` in transformers, for which published templates are written: a sandbox,
trimmed blocks, loop controls, `raise_exception`, `strftime_now`, `tojson` without HTML escapes. A test compares the
output of both. It is built here because importing transformers imports torch, which the front end must not.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import CallBlock, Node
from jinja2.parser import Parser
from jinja2.runtime import Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment

_OPEN_END = "\ue000open end\ue001 "
"""Marks the end of the last message in the rendered text; ends with a space, to detect whether the template trims."""


class TemplateRefused(Exception):
    """The template does not accept these messages; the message is the template's own."""


class _GenerationBlocks(Extension):
    """`{% generation %}` marks model output for training; serving renders only its content."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares the attribute

    def parse(self, parser: Parser) -> Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return CallBlock(self.call_method("_content"), [], [], body).set_lineno(line)

    def _content(self, caller: Macro) -> str:
        return str(caller())


class ChatTemplate:
    """A compiled template together with the special tokens that it may use.

    Raises:
        ValueError: the source is not a template.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlocks, loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ValueError(f"line {error.lineno}: {error.message}") from error
        self._special_tokens = dict(special_tokens)
        self.knows_developer = "developer" in source
        """Whether the template handles the role; otherwise developer messages become system messages."""
        self.takes_parts = self._shows([{"type": "text", "text": _PROBE}])
        """Whether the content of a message may be a list of parts."""
        self.takes_text = self._shows(_PROBE) or not self.takes_parts
        """Whether the content of a message may be a string."""
        self.source = source
        self.knows_tools = self._renders([_ASKED], tools=[_TOOL])
        """Whether the template shows tools to the model."""
        objects, texts = ([_ASKED, _called(arguments)] for arguments in (_ARGUMENTS, json.dumps(_ARGUMENTS)))
        self.takes_argument_objects = self._renders(objects, _KEY) or not self._renders(texts, _KEY)
        """Whether the arguments of an earlier call may be an object; otherwise they are its JSON."""

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt text, including special tokens. Raises TemplateRefused."""
        try:
            return self._template.render(
                {
                    **self._special_tokens,
                    "tools": None,
                    "documents": None,
                    **(variables or {}),
                    "messages": messages,
                    "add_generation_prompt": add_generation_prompt,
                }
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

    def _renders(
        self, messages: Sequence[Mapping[str, Any]], text: str = "", tools: Sequence[Mapping[str, Any]] | None = None
    ) -> bool:
        """Whether the prompt has the text, by default the probe."""
        try:
            return (text or _PROBE) in self.render(messages, variables={"tools": tools})
        except TemplateRefused:
            return False

    def _shows(self, content: Any) -> bool:
        try:
            text = self.render([{"role": "user", "content": content}])
        except TemplateRefused:
            return False
        return _PROBE in text and "'text'" not in text and '"text"' not in text


_PROBE = "neuron-probe"
_ASKED = {"role": "user", "content": "a"}
_ARGUMENTS, _KEY = {"neuron-key": 1}, '"neuron-key"'
_TOOL = {
    "type": "function",
    "function": {"name": _PROBE, "description": "a", "parameters": {"type": "object", "properties": {}}},
}


def _called(arguments: Any) -> dict[str, Any]:
    function = {"name": _PROBE, "arguments": arguments}
    call = {"id": "abcdefghi", "type": "function", "function": function}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(layout: str) -> str:
    return datetime.now().strftime(layout)
