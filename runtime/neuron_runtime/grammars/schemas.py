"""JSON schemas in the keywords that llguidance knows: the same restrictions, written otherwise or left out where empty.

Called by `language`, in the process of the checker. A keyword that restricts and cannot be written otherwise stays, and
the library refuses it by name.
"""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any] | bool

KNOWN_FORMATS = frozenset(("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"))
"""The formats of the library; it refuses others, which are annotations to JSON Schema."""
MAX_COUNTED = 4096
"""Characters that a text of a schema may have to have. The automaton has a state for each byte of those it counts."""
_COUNTS = frozenset(f"{bound}{of}" for bound in ("min", "max") for of in ("Items", "Length", "Properties"))
"""Whole numbers, which JSON Schema may have as 2.0 and the library refuses so."""
_EMPTY: dict[str, tuple[Any, ...]] = {
    "uniqueItems": (False,),
    "unevaluatedItems": (True, {}),
    "unevaluatedProperties": (True, {}),
    "dependentRequired": ({},),
    "dependentSchemas": ({},),
    "propertyNames": (True, {}, {"type": "string"}),
    "not": (False,),
}
"""Values with which a keyword restricts nothing. Names of properties are always strings."""
_OF_SCHEMA = (
    *("additionalItems", "additionalProperties", "contains", "else", "if", "items", "not", "propertyNames", "then"),
    *("unevaluatedItems", "unevaluatedProperties"),
)
_OF_SCHEMAS = ("$defs", "definitions", "dependentSchemas", "patternProperties", "properties")
_OF_LIST = ("allOf", "anyOf", "items", "oneOf", "prefixItems")


def readable(schema: Any) -> Any:
    """A schema that allows the same texts, without what llguidance would refuse for nothing.

    Raises ValueError for a text that must be so long that every answer would be cut.
    """
    if not isinstance(schema, dict):
        return schema
    if _is_one_of(schema.get("not"), (True, {})):
        return False
    plain = {key: _below(key, value) for key, value in schema.items()}
    plain = {key: value for key, value in plain.items() if not _is_one_of(value, _EMPTY.get(key, ()))}
    if isinstance(shortest := plain.get("minLength"), int) and shortest > MAX_COUNTED:
        raise ValueError(f"minLength: {shortest} is more than {MAX_COUNTED}, which no answer would reach")
    form = plain.get("format")
    if isinstance(form, str) and form not in KNOWN_FORMATS:
        del plain["format"]
    return _with_named_properties(plain)


def _below(key: str, value: Any) -> Any:
    if key in _COUNTS and isinstance(value, float) and value.is_integer():
        return int(value)
    if key in _OF_SCHEMAS and isinstance(value, dict):
        return {name: readable(one) for name, one in value.items()}
    if key in _OF_LIST and isinstance(value, list):
        return [readable(one) for one in value]
    return readable(value) if key in _OF_SCHEMA else value


def _is_one_of(value: Any, values: tuple[Any, ...]) -> bool:
    """Whether one of them is equal as JSON: 0 is not false."""
    return any(type(value) is type(one) and value == one for one in values)


def _with_named_properties(schema: dict[str, Any]) -> dict[str, Any]:
    """`propertyNames` as `properties` or `patternProperties`, where these are free."""
    names = schema.get("propertyNames")
    if not isinstance(names, dict) or "properties" in schema or "patternProperties" in schema:
        return schema
    rest: Schema = schema.get("additionalProperties", True)
    keywords = {key: value for key, value in names.items() if (key, value) != ("type", "string")}
    match keywords:
        case {"enum": [*texts], **others} if not others and all(isinstance(one, str) for one in texts):
            named = {"properties": dict.fromkeys(texts, rest)}
        case {"pattern": str(pattern), **others} if not others:
            named = {"patternProperties": {pattern: rest}}
        case _:
            return schema
    kept = {key: value for key, value in schema.items() if key != "propertyNames"}
    return {**kept, **named, "additionalProperties": False}
