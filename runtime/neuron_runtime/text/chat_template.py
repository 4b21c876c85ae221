"""Chat templates: messages in, the text of a prompt out. Compiled once per model, rendered for every chat request.

The environment is the one that published templates are written for (what `apply_chat_template` of transformers
offers them: a sandbox without side effects, trimmed blocks, loop controls, `raise_exception`, `strftime_now`, `tojson`
without HTML escapes); a test holds both to the same text. It is built here, and not taken from transformers, because
importing transformers imports torch, which the front end does without.
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


class TemplateRefused(Exception):
    """The template does not accept these messages; the text is the template's own."""


class _GenerationBlocks(Extension):
    """`{% generation %}` marks what a model said, for training; for serving its content is what counts."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares the attribute

    def parse(self, parser: Parser) -> Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return CallBlock(self.call_method("_content"), [], [], body).set_lineno(line)

    def _content(self, caller: Macro) -> str:
        return str(caller())


class ChatTemplate:
    """A compiled template together with the special tokens that it may name.

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

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt's text, special tokens included. Raises TemplateRefused."""
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
        except (jinja2.TemplateError, TypeError, ValueError, ArithmeticError, LookupError, AttributeError) as error:
            # What a template does with messages it was not written for is whatever its expressions raise.
            raise TemplateRefused(str(error) or type(error).__name__) from error


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(layout: str) -> str:
    return datetime.now().strftime(layout)
