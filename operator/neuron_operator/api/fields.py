"""The annotations of a field beside its type: description, rules, support, key in RuntimeConfig.

`model.py` declares fields with them; parser, `schema.py`, `config_document.py`, `revision.py` and the docs' tables read
them. In `Annotated`, a string is the description, in Markdown; bounds are msgspec's `Meta`. No field is named here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property
from types import NoneType, UnionType
from typing import Annotated, Any, ClassVar, TypeVar, Union, get_args, get_origin

import msgspec
from msgspec import NODEFAULT, Struct

T = TypeVar("T")
Json = dict[str, Any]


@dataclass(frozen=True)
class Rule:
    """A rule that bounds cannot express, in CEL for the API server and in Python for the parser.

    Rules follow a field's type in `Annotated`, or are in the RULES of the Struct that they constrain.
    """

    message: str
    holds: Callable[[Any], bool]
    cel: str = ""
    schema: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """Schema keywords that enforce a rule without CEL."""


def unique(by: str = "") -> Rule:
    """The items of a list are unique, or their fields `by` are."""
    kind = {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": [by]} if by else {}

    def holds(items: tuple[Any, ...]) -> bool:
        return len({getattr(item, by) if by else item for item in items}) == len(items)

    return Rule("must be unique", holds, schema=kind or {"x-kubernetes-list-type": "set"})


def exactly_one(*keys: str) -> Rule:
    """Exactly one of the Struct's fields `keys` (JSON names) is set."""

    def holds(part: SpecPart) -> bool:
        return sum(getattr(part, one.name) is not None for one in fields_of(type(part)) if one.key in keys) == 1

    present = ", ".join(f"has(self.{key})" for key in keys)
    return Rule(f"exactly one of {', '.join(keys)} must be set", holds, f"[{present}].exists_one(x, x)")


@dataclass(frozen=True)
class Supported:
    """This version supports only some values of a valid field; others are refused, with the cure.

    The default and `values` are accepted, and with an engine that honours the field all values. Accepted values of an
    idle field mean the same as its default.
    """

    cure: str
    values: tuple[object, ...] = ()
    about: str = ""
    """The value that this is about, if other values are another matter: engines honour it as `path=value`."""
    of: Callable[[Any], object] | None = None
    """Reads the value to check against `values` from the spec; by default the field's own."""

    def is_honoured(self, path: str, honours: Callable[[str], bool]) -> bool:
        """Whether an engine acts on the field at this path."""
        return honours(f"{path}={self.about}" if self.about else path)


@dataclass(frozen=True)
class NotPinned:
    """No pod depends on the field: an edit makes no new revision."""


@dataclass(frozen=True)
class ConfigKey:
    """Path of the value in the RuntimeConfig document, which omits None and idle fields."""

    path: str
    words: Mapping[object, object] = field(default_factory=dict)
    """Replacements: value in the spec -> value in the document."""
    compiled: bool = False
    """Whether a compiled artifact depends on it; the runtime marks the same fields with `COMPILED`."""


class SpecPart(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, rename="camel", omit_defaults=True):
    """A part of the resource: camelCase in JSON, unknown keys refused. Its docstring is its description."""

    RULES: ClassVar[tuple[Rule, ...]] = ()


class OpenPart(SpecPart, frozen=True, forbid_unknown_fields=False):
    """What the operator reads of an object with more fields, which it passes on."""


@dataclass(frozen=True)
class Shape:
    """Follows `Json`: the fields in it that the operator reads have these types."""

    part: type[OpenPart]

    def faults(self, value: Json, path: str) -> Iterator[tuple[str, str]]:
        """Path and message of the first field with another type."""
        try:
            msgspec.convert(value, self.part)
        except msgspec.ValidationError as error:
            yield located(error, path)


def located(error: msgspec.ValidationError, path: str) -> tuple[str, str]:
    """The path of the wrong field, and the message; `path` is that of the converted value."""
    text, _, place = str(error).partition(" - at ")
    return path + place.removeprefix("`key` in ").strip("`").removeprefix("$"), text.replace("`", "")


@dataclass(frozen=True)
class Field:
    """A field of a SpecPart, as declared."""

    name: str
    key: str
    """Its name in JSON."""
    kind: Any
    """The annotated type."""
    default: Any
    """NODEFAULT: required."""

    def annotations(self, kind: type[T]) -> tuple[T, ...]:
        """The annotations of this type."""
        return tuple(one for one in self.unwrapped[1] if isinstance(one, kind))

    @cached_property
    def supports(self) -> tuple[Supported, ...]:
        return self.annotations(Supported)

    def is_idle(self, path: str, honours: Callable[[str], bool]) -> bool:
        """Whether an engine uses nothing of the field at this path."""
        return any(one.of is None and not one.is_honoured(path, honours) for one in self.supports)

    @cached_property
    def unwrapped(self) -> tuple[Any, tuple[object, ...]]:
        return unwrapped(self.kind)


@cache
def fields_of(part: type[SpecPart]) -> tuple[Field, ...]:
    return tuple(
        Field(
            one.name,
            one.encode_name,
            one.type,
            one.default if one.default_factory is NODEFAULT else one.default_factory(),
        )
        for one in msgspec.structs.fields(part)
    )


def unwrapped(kind: Any) -> tuple[Any, tuple[object, ...]]:
    """The type inside `Annotated` and `| None`, and its annotations, RULES of a SpecPart last."""
    annotations: tuple[object, ...] = ()
    while True:
        arguments = get_args(kind)
        if get_origin(kind) is Annotated:
            kind, annotations = arguments[0], (*arguments[1:], *annotations)
        elif get_origin(kind) in (Union, UnionType) and NoneType in arguments and len(arguments) == 2:
            (kind,) = (option for option in arguments if option is not NoneType)
        else:
            return kind, (*annotations, *getattr(kind, "RULES", ()))


def description_of(kind: Any) -> str:
    """The description in Markdown: the string of the declaration, else the docstring of a SpecPart, else empty."""
    core, annotations = unwrapped(kind)
    text = next((one for one in annotations if isinstance(one, str)), None)
    if text is None and isinstance(core, type) and issubclass(core, SpecPart):
        text = core.__doc__
    return " ".join((text or "").split())


def as_json(value: Any) -> Any:
    """A declared value as JSON: parts become objects without defaults, tuples become lists."""
    return msgspec.json.decode(msgspec.json.encode(value))


def walk(
    part: SpecPart, path: str, fields: Callable[[type[SpecPart]], tuple[Field, ...]] = fields_of
) -> Iterator[tuple[str, Field, Any]]:
    """Path, declaration and value of each field (of each part: of its `fields`), recursively, in the order of
    declaration."""
    for one in fields(type(part)):
        value, here = getattr(part, one.name), f"{path}.{one.key}"
        yield here, one, value
        if isinstance(value, SpecPart):
            yield from walk(value, here, fields)


@cache
def supporting(part: type[SpecPart]) -> tuple[Field, ...]:
    """The fields that are `Supported`, and those with such fields below."""

    def is_one(field: Field) -> bool:
        core = field.unwrapped[0]
        return bool(field.supports) or (
            isinstance(core, type) and issubclass(core, SpecPart) and bool(supporting(core))
        )

    return tuple(filter(is_one, fields_of(part)))


def broken_rules(kind: Any, value: Any, path: str) -> Iterator[tuple[str, str]]:
    """Path and message of each broken rule, in the order of declaration; None and a field's default break none."""
    if value is not None:
        yield from _broken(*unwrapped(kind), value, path)


def _broken(core: Any, annotations: tuple[object, ...], value: Any, path: str) -> Iterator[tuple[str, str]]:
    for one in annotations:
        if isinstance(one, Rule) and not one.holds(value):
            yield path, one.message
        elif isinstance(one, Shape):
            yield from one.faults(value, path)
    if isinstance(value, SpecPart):
        for part in fields_of(type(value)):
            below = getattr(value, part.name)
            if below is not None and below != part.default:
                yield from _broken(*part.unwrapped, below, f"{path}.{part.key}")
    elif isinstance(value, tuple):
        for index, item in enumerate(value):
            yield from broken_rules(get_args(core)[0], item, f"{path}[{index}]")
