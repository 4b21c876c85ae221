"""Converts validation errors of msgspec to paths and messages that list the allowed values.

Called by the parsers of configurations, backend settings and request bodies, which raise their own errors.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
from msgspec import inspect

_PATH = re.compile(r"(.*) - at (?:`key` in )?`\$(.*)`", re.DOTALL)
_KEY = re.compile(r"\[[^\]]*\]|[^.\[]+")
_INVALID_CHOICE = "Invalid enum value "


def problems(value: Any, kind: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """Path and message of what is invalid: the first problem of each field, at any depth of Structs.

    msgspec ends at the first of all, so this is for values that it has refused.

    Args:
        kind: the target type of the conversion.
        path: that of the value.
    """
    if not (isinstance(kind, type) and issubclass(kind, msgspec.Struct) and isinstance(value, dict)):
        try:
            msgspec.convert(value, kind, str_keys=True)
        except (msgspec.ValidationError, RecursionError) as error:
            inside, message = explain(error, kind)
            yield path + inside, message
        return
    fields = {field.encode_name: field for field in msgspec.structs.fields(kind)}
    for name, field in fields.items():
        if name in value:
            yield from problems(value[name], field.type, f"{path}.{name}")
        elif field.required:
            yield path, f"Object missing required field `{name}`"
    if kind.__struct_config__.forbid_unknown_fields:
        yield from ((path, f"Object contains unknown field `{name}`") for name in value if name not in fields)


def explain(error: msgspec.ValidationError | RecursionError, kind: Any) -> tuple[str, str]:
    """Path without `$` (empty for the whole value), such as `.messages[0].role`, and message of an error.

    kind: the target type of the conversion.
    """
    match = _PATH.fullmatch(str(error))
    message, path = (match[1], match[2]) if match else (str(error), "")
    if message.startswith(_INVALID_CHOICE):
        message += f": must be one of {', '.join(f'`{one}`' for one in choices(kind, path))}"
    return path, message


def choices(kind: Any, path: str) -> list[Any]:
    """The allowed values of a field, without the empty one that means the default."""
    return [one for one in _literals(inspect.type_info(kind), _KEY.findall(path)) if one != ""]


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
