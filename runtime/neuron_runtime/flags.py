"""Derives command-line flags and arguments from the fields of a configuration Struct.

A field is `name: Annotated[type, Meta(ge=...), "Description", Flag(...)] = default`. `fields_of` reads these
declarations; argparse flags, argument names and the tables of the docs are derived from its result.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import msgspec
from msgspec import inspect

from neuron_runtime.errors import InvalidConfig

SHORT = {
    "data_parallel_size": "-dp",
    "pipeline_parallel_size": "-pp",
    "quantization": "-q",
    "speculative_config": "-sc",
    "tensor_parallel_size": "-tp",
}
"""vLLM's short spellings, by the name of the argument."""


@dataclass(frozen=True)
class Flag:
    """Gives a field a command-line flag."""

    argument: str = ""
    """Name of the argument, vLLM's if the meaning is the same; the flag has dashes. Empty: the field's name."""
    llm: bool = False
    """Whether it is also an argument of `LLM`."""
    metavar: str = ""
    """Empty: derived from the type."""
    default: str = ""
    """Description of the default, if its value does not show it."""
    read: Callable[[str], Any] | None = None
    """Converts the text of the flag to the value in the document, and for a part of the document also an argument that
    is no text. Raises ValueError."""


@dataclass(frozen=True)
class Field:
    """A field of the document, at any depth."""

    path: str
    """Keys of the JSON document, joined by dots."""
    kind: inspect.Type
    description: str
    value: Any
    """Default; NODEFAULT: required."""
    flag: Flag | None
    argument: str
    """Name of the argument; empty: no flag."""
    annotations: tuple[Any, ...] = ()
    """All of the declaration."""

    @property
    def option(self) -> str:
        return as_flag(self.argument)

    @property
    def default(self) -> str:
        """Description of the default."""
        if self.flag and self.flag.default:
            return self.flag.default
        if self.value is msgspec.NODEFAULT:
            return "required"
        if isinstance(self.value, bool):
            return "on" if self.value else "off"
        return "none" if self.value in ("", (), {}) else str(self.value).removesuffix(".0")

    @property
    def is_switch(self) -> bool:
        """Whether the flag is a boolean for a field with the values auto, enabled and disabled."""
        return isinstance(self.kind, inspect.LiteralType) and "enabled" in self.kind.values

    def read(self, value: Any) -> Any:
        """The value in the document for a given argument. Raises ValueError."""
        if self.is_switch and isinstance(value, bool):
            return "enabled" if value else "disabled"
        is_part = isinstance(self.kind, inspect.StructType)
        is_number_of = isinstance(value, Mapping) and isinstance(self.kind, inspect.IntType)
        if (isinstance(value, str) or is_part or is_number_of) and self.flag and self.flag.read:
            value = self.flag.read(value)
        return [value] if isinstance(value, str) and isinstance(self.kind, inspect.VarTupleType) else value


def fields_of(struct: type[msgspec.Struct], path: str = "") -> Iterator[Field]:
    """The fields of a configuration and of its parts, in order of declaration. A part is a field if it has a flag."""
    for field in msgspec.structs.fields(struct):
        kind = inspect.type_info(field.type)
        annotations = get_args(field.type)
        flag = next((one for one in annotations if isinstance(one, Flag)), None)
        if flag or not isinstance(kind, inspect.StructType):
            value = field.default if field.default_factory is msgspec.NODEFAULT else field.default_factory()
            description = next(one for one in annotations if isinstance(one, str))
            argument = flag.argument or field.name if flag else ""
            yield Field(path + field.encode_name, kind, description, value, flag, argument, annotations)
        if isinstance(kind, inspect.StructType):
            yield from fields_of(kind.cls, f"{path}{field.encode_name}.")


def add_flags(
    parser: argparse._ActionsContainer, fields: Iterable[Field], defaults: Mapping[str, str] | None = None
) -> None:
    """Add the flags of these fields; a flag that is not set is None.

    defaults: descriptions of defaults by argument, if a command has its own.
    """
    for field in fields:
        if field.flag:
            default = (defaults or {}).get(field.argument, field.default)
            meaning = f"{field.description} (default: {default})".replace("`", "")
            parser.add_argument(*spellings(field.argument), help=meaning, **_form(field, field.flag))


def as_flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def spellings(argument: str) -> list[str]:
    """The flag of an argument, and its short one."""
    return [as_flag(argument), *([SHORT[argument]] if argument in SHORT else [])]


def _form(field: Field, flag: Flag) -> dict[str, Any]:
    """Arguments of `add_argument` for a field."""
    match field.kind:
        case inspect.BoolType():
            return {"action": argparse.BooleanOptionalAction}
        case inspect.LiteralType() if field.is_switch:
            return {"action": argparse.BooleanOptionalAction}
        case inspect.IntType() if flag.read is None:
            return {"type": whole_number, "metavar": flag.metavar or "N"}
        case inspect.FloatType():
            return {"type": float, "metavar": flag.metavar or "N"}
        case inspect.LiteralType(values):
            return {"metavar": flag.metavar or "|".join(str(value) for value in values if value)}
        case inspect.VarTupleType() if flag.read is None:
            return {"nargs": "+", "metavar": flag.metavar or "NAME"}
    return {"metavar": flag.metavar or "TEXT"}


_UNITS = {"k": 10**3, "m": 10**6, "g": 10**9, "K": 2**10, "M": 2**20, "G": 2**30}


def whole_number(text: str) -> int:
    """A number, in units if it ends with one: as in vLLM, small letters are decimal and capital ones binary."""
    digits, unit = (text[:-1], _UNITS[text[-1]]) if text[-1:] in _UNITS else (text, 1)
    try:
        number = int(digits) if unit == 1 else float(digits) * unit
    except ValueError as error:
        message = f"must be a whole number, such as 4096, 4k (4000) or 4K (4096), got {text!r}"
        raise argparse.ArgumentTypeError(message) from error
    return int(number)


def plain(key: str) -> str:
    """The name of a key that may be written with dashes or capitals."""
    return re.sub(r"(?<=[a-z0-9])([A-Z])", r"_\1", key).replace("-", "_").lower()


def numbers(text: str) -> list[int]:
    """A list of numbers with commas between them; brackets as in JSON are allowed."""
    inside = text.strip().removeprefix("[").removesuffix("]")
    try:
        return [int(one) for one in inside.split(",")] if inside.strip() else []
    except ValueError as error:
        raise ValueError(f"must be numbers with commas between them, got {text!r}") from error


def absolute(text: str) -> Path:
    """Raises ValueError for the home of an unknown user."""
    try:
        return Path(text).expanduser().absolute()
    except RuntimeError as error:
        raise ValueError(f"{text}: there is no home directory of that user") from error


def model_uri(model: str) -> str:
    """The URI of a model argument: a URI, an existing folder, or `org/name` on the hub. Raises InvalidConfig."""
    if "://" in model:
        return model
    if not model.startswith(("/", ".", "~")) and not Path(model).exists():
        return f"hf://{model}"
    try:
        return absolute(model).as_uri()
    except ValueError as error:
        raise InvalidConfig("$.model.uri", str(error)) from error


def word_or_folder(text: str) -> str:
    return text if text in ("auto", "vllm") else str(absolute(text).resolve())


def template(text: str) -> str:
    """A file with the template or, as in vLLM, the template itself."""
    if any(character in text for character in "{}\n"):
        return text
    try:
        return Path(text).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"cannot read {text}: {error}") from error


def json_value(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{text!r} is not JSON: {error}") from error


def json_or_pairs(text: str) -> Any:
    """JSON or, as vLLM took it with transformers-neuronx, `name:value` with commas between them."""
    pairs = [one.partition(":") for one in text.split(",")]
    if not all(re.fullmatch(r"\s*\w+", name) and colon for name, colon, _ in pairs):
        return json_value(text)
    words = {"True": True, "False": False, "None": None}
    return {
        name.strip(): words[value.strip()] if value.strip() in words else json_or_text(value.strip())
        for name, _, value in pairs
    }


def json_or_text(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def images_per_prompt(text: Any) -> Any:
    """vLLM's limits by kind of media, of which there are images here."""
    value = json_or_text(text) if isinstance(text, str) else text
    if isinstance(value, Mapping):
        others = {name: count for name, count in value.items() if name != "image" and count}
        if others:
            raise ValueError(f"only images can be served, got {', '.join(others)}: leave them out, or set 0")
        value = value.get("image", 8)
        value = value.get("count", 8) if isinstance(value, Mapping) else value
    return value


def write_json(path: Path, value: Any) -> None:
    """Write the file of a flag `--json`. Raises InvalidConfig if it cannot be written."""
    try:
        path.write_bytes(msgspec.json.format(msgspec.json.encode(value), indent=2) + b"\n")
    except OSError as error:
        raise InvalidConfig("--json", f"cannot write {path}: {error.strerror}") from error
