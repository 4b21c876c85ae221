"""What the bodies of all APIs read in the same way: texts of parts, and fields that a type requires."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from neuron_runtime.errors import InvalidRequest
from neuron_runtime.pictures.sources import PictureAt
from neuron_runtime.requests.chats import SEEN


class Part(Protocol):
    """A part of a message, a block or an item."""

    @property
    def type(self) -> str: ...
    @property
    def text(self) -> str | None: ...


def texts_of(content: str | Sequence[Part], at: str, types: Sequence[str] = ("text",)) -> str | list[str]:
    """Content that must be a text, or parts of these types. Raises InvalidRequest."""
    if isinstance(content, str):
        return content
    return [text_of(part, f"{at}[{number}]", types) for number, part in enumerate(content)]


def text_of(part: Part, at: str, types: Sequence[str] = ("text",)) -> str:
    """The text of a part that must be of one of these types. Raises InvalidRequest."""
    if part.type not in types:
        known = " or ".join(f"`{one}`" for one in types)
        raise InvalidRequest.at(f"{at}.type", f"must be {known}, got `{part.type}`: other types are not supported yet")
    if part.text is None:
        raise missing("text", at)
    return part.text


@dataclass(frozen=True)
class PictureForm:
    """How the parts of one API have pictures."""

    type: str
    read: Callable[[Any, str], PictureAt]
    """From a part and its path. Raises InvalidRequest."""


def contents_of(
    content: str | Sequence[Part], at: str, role: str, form: PictureForm, types: Sequence[str] = ("text",)
) -> str | Sequence[str | PictureAt]:
    """Content that must be a text, or parts of these types and, where the role may have them, pictures. Raises
    InvalidRequest."""
    if isinstance(content, str):
        return content
    return [content_of(part, f"{at}[{number}]", role, form, types) for number, part in enumerate(content)]


def content_of(part: Part, at: str, role: str, form: PictureForm, types: Sequence[str] = ("text",)) -> str | PictureAt:
    """The text of a part, or its picture. Raises InvalidRequest."""
    if role not in SEEN:
        return text_of(part, at, types)
    return form.read(part, at) if part.type == form.type else text_of(part, at, (*types, form.type))


def required(part: msgspec.Struct, name: str, at: str) -> str:
    """A field that the type of a part requires. Raises InvalidRequest."""
    value: str | None = getattr(part, name)
    if value is None:
        raise missing(name, at)
    return value


def missing(name: str, at: str) -> InvalidRequest:
    return InvalidRequest.at(f"{at}.{name}", "is missing")
