"""The fields of a request that ask for structured output, and the one `core.Form` that they mean.

The fields are those of OpenAI (`response_format`), of vLLM (`structured_outputs`) and of its older versions
(`guided_...`). Sizes and contradictions are checked here; whether a form compiles is found by `grammars/`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec

from neuron_runtime.core import Form, FormKind
from neuron_runtime.errors import InvalidRequest

if TYPE_CHECKING:
    from neuron_runtime.requests.sampling_fields import SamplingFields

MAX_FORM_CHARACTERS = 1 << 18
MAX_FORM_DEPTH = 64
MAX_FORM_CHOICES = 4096


class JsonSchema(msgspec.Struct, frozen=True):
    """A named schema."""

    name: Annotated[str | None, "Without effect"] = None
    description: Annotated[str | None, "Without effect"] = None
    schema: Annotated[dict[str, Any] | bool | None, "The JSON schema. Default: any object"] = None
    strict: Annotated[bool | None, "Without effect: the answer always fits the schema"] = None


class ResponseFormat(msgspec.Struct, frozen=True, omit_defaults=True):
    """What an answer is."""

    type: Annotated[Literal["text", "json_object", "json_schema", "structural_tag"], "What the answer is"]
    json_schema: Annotated[JsonSchema | None, "With type `json_schema`"] = None
    structures: Annotated[list[Any] | None, "With type `structural_tag`: tags of `begin`, `schema` and `end`"] = None
    triggers: Annotated[list[str] | None, "With type `structural_tag`: texts with which tags begin"] = None


class StructuredOutputs(msgspec.Struct, frozen=True):
    """One of several forms of an answer."""

    json: Annotated[dict[str, Any] | bool | str | None, "A JSON schema, or its text"] = None
    regex: Annotated[str | None, "A regular expression that the whole answer matches"] = None
    choice: Annotated[list[str] | None, f"The answer is one of these texts; at most {MAX_FORM_CHOICES}"] = None
    grammar: Annotated[str | None, "A grammar, in Lark's or in GBNF's notation"] = None
    json_object: Annotated[bool | None, "True: any JSON object"] = None
    structural_tag: Annotated[
        dict[str, Any] | str | None, "`structures` and `triggers`, or their text: free text with tags that fit a schema"
    ] = None
    backend: Annotated[str | None, "Accepted without effect"] = None


def form_of(fields: SamplingFields, response_format: str) -> Form | None:
    """The form that a request asks for; None: any text.

    response_format: what the client's API calls this field.

    Raises:
        InvalidRequest: names the field, and what it contradicts.
    """
    asked: dict[str, Form] = {}
    if fields.response_format is not None and fields.response_format.type != "text":
        asked[response_format] = _of_response_format(fields.response_format, response_format)
    if fields.structured_outputs is not None:
        asked |= _of_outputs(fields.structured_outputs, "structured_outputs.{}".format)
    older = StructuredOutputs(
        json=fields.guided_json, regex=fields.guided_regex, choice=fields.guided_choice, grammar=fields.guided_grammar
    )
    if older != StructuredOutputs():
        asked |= _of_outputs(older, "guided_{}".format)
    if len(asked) > 1:
        first, second, *_ = asked
        raise InvalidRequest(f"`{first}` and `{second}` are two forms of one answer: leave one out", field=second)
    for name, form in asked.items():
        if len(form.text) > MAX_FORM_CHARACTERS:
            raise InvalidRequest.at(name, f"must have at most {MAX_FORM_CHARACTERS} characters, got {len(form.text)}")
        return form
    return None


def form_of_schemas(kind: FormKind, value: object, field: str) -> Form:
    """The form of schemas that `field` asks for. Raises InvalidRequest naming the field."""
    form = _form(kind, value, field)
    if len(form.text) > MAX_FORM_CHARACTERS:
        message = f"`{field}`: the schemas have {len(form.text)} characters, at most {MAX_FORM_CHARACTERS} are allowed"
        raise InvalidRequest(message, field=field)
    return form


def _of_response_format(response_format: ResponseFormat, name: str) -> Form:
    match response_format.type:
        case "json_schema":
            if response_format.json_schema is None:
                raise InvalidRequest(f"`{name}.json_schema` is required with this type", field=name)
            schema = response_format.json_schema.schema
            return _form("json_schema", {"type": "object"} if schema is None else schema, name)
        case "structural_tag":
            return _tags({"structures": response_format.structures, "triggers": response_format.triggers}, name)
        case _:
            return _form("json_schema", {"type": "object"}, name)


def _of_outputs(outputs: StructuredOutputs, name_of: Callable[[str], str]) -> dict[str, Form]:
    asked = {key: getattr(outputs, key) for key in _MAKERS}
    asked |= {} if outputs.json_object else {"json_object": None}
    forms = {name_of(key): _MAKERS[key](value, name_of(key)) for key, value in asked.items() if value is not None}
    if not forms:
        name = name_of("json").partition(".")[0]
        raise InvalidRequest.at(name, "names no form: leave it out")
    return forms


def _of_choice(texts: list[str], name: str) -> Form:
    if not 1 <= len(texts) <= MAX_FORM_CHOICES:
        raise InvalidRequest.at(name, f"must have 1 to {MAX_FORM_CHOICES} texts, got {len(texts)}")
    return _form("choice", texts, name)


_MAKERS: dict[str, Callable[[Any, str], Form]] = {
    "json": lambda value, name: _form("json_schema", _read(value, name), name),
    "regex": lambda value, name: Form("regex", value, field=name),
    "choice": _of_choice,
    "grammar": lambda value, name: Form("grammar", value, field=name),
    "json_object": lambda value, name: _form("json_schema", {"type": "object"}, name),
    "structural_tag": lambda value, name: _tags(_read(value, name), name),
}
"""The form of a value of `StructuredOutputs`, from the value and its name in errors."""


class _Tag(msgspec.Struct):
    begin: str
    end: str
    schema: dict[str, Any] | bool | None = None


class _Tags(msgspec.Struct):
    structures: Annotated[list[_Tag], msgspec.Meta(min_length=1)]
    triggers: Annotated[list[Annotated[str, msgspec.Meta(min_length=1)]], msgspec.Meta(min_length=1)]


def _tags(value: Any, name: str) -> Form:
    try:
        tags = msgspec.convert(value, _Tags)
    except (msgspec.ValidationError, RecursionError) as error:
        raise InvalidRequest(f"`{name}`: {error}", field=name) from error
    for tag in tags.structures:
        if not tag.begin.startswith(tuple(tags.triggers)):
            raise InvalidRequest(f"`{name}`: {tag.begin!r} begins with none of the triggers", field=name)
    return _form("structural_tag", tags, name)


def _read(value: Any, name: str) -> Any:
    """JSON, or what its text says."""
    if not isinstance(value, str):
        return value
    if len(value) > MAX_FORM_CHARACTERS:
        raise InvalidRequest.at(name, f"must have at most {MAX_FORM_CHARACTERS} characters")
    try:
        return msgspec.json.decode(value)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise InvalidRequest.at(name, f"is not JSON: {error}") from error


def _form(kind: FormKind, value: Any, name: str) -> Form:
    try:
        text = msgspec.json.encode(value).decode()
    except (RecursionError, TypeError, ValueError) as error:
        raise InvalidRequest.at(name, f"is not JSON: {error}") from error
    if (depth := _depth(text)) > MAX_FORM_DEPTH:
        raise InvalidRequest.at(name, f"must be at most {MAX_FORM_DEPTH} levels deep, got {depth}")
    return Form(kind, text, field=name)


_STRUCTURE = re.compile(r'"(?:[^"\\]|\\.)*"|[\[{]|[\]}]')


def _depth(text: str) -> int:
    """Levels of objects and lists of a JSON text."""
    deepest = depth = 0
    for bracket in _STRUCTURE.finditer(text):
        depth += {"{": 1, "[": 1, "}": -1, "]": -1}.get(bracket[0], 0)
        deepest = max(deepest, depth)
    return deepest
