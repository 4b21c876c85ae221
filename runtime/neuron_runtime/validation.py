"""Converts validation errors of msgspec to a path and a message that lists the allowed values.

Called by the parsers of configurations, backend settings and request bodies, which raise their own errors.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from typing import Any

import msgspec
from msgspec import inspect

_PATH = re.compile(r"(.*) - at (?:`key` in )?`\$(.*)`", re.DOTALL)
_KEY = re.compile(r"\[[^\]]*\]|[^.\[]+")
_INVALID_CHOICE = "Invalid enum value "


def explain(error: msgspec.ValidationError | RecursionError, struct: type[msgspec.Struct]) -> tuple[str, str]:
    """Path and message of an error.

    Args:
        struct: the target type of the conversion.

    Returns:
        The path without `$`, e.g. `.messages[0].role` (empty for the whole value), and the message.
    """
    found = _PATH.fullmatch(str(error))
    message, path = (found[1], found[2]) if found else (str(error), "")
    if message.startswith(_INVALID_CHOICE):
        message += f": must be one of {', '.join(f'`{one}`' for one in choices(struct, path))}"
    return path, message


def choices(struct: type[msgspec.Struct], path: str) -> list[Any]:
    """The allowed values of a field, without the empty one that means the default."""
    return [one for one in _literals(_type_info(struct), _KEY.findall(path)) if one != ""]


_type_info = cache(inspect.type_info)


def _literals(kind: inspect.Type, keys: Sequence[str]) -> Sequence[Any]:
    match kind:
        case inspect.LiteralType(values) if not keys:
            return values
        case inspect.UnionType(types):
            return next((found for one in types if (found := _literals(one, keys))), ())
        case inspect.StructType() if keys:
            field = next((field for field in kind.fields if field.encode_name == keys[0]), None)
            return () if field is None else _literals(field.type, keys[1:])
        case inspect.ListType() | inspect.VarTupleType() if keys:
            return _literals(kind.item_type, keys[1:])
        case inspect.DictType() if keys:
            return _literals(kind.value_type, keys[1:])
        case inspect.Metadata():
            return _literals(kind.type, keys)
    return ()
