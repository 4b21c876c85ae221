"""Tables of docs/runtime.md, docs/server.md and docs/offline.md: flags of `serve`, keys of its document, arguments.

Called by `generate`, from `neuron_runtime.config` and `neuron_runtime.commands.serve`.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable

from msgspec import NODEFAULT, inspect

from markdown_table import table
from neuron_runtime import not_built
from neuron_runtime.arguments import BY_ARGUMENT, FIELDS, LLM_ARGUMENTS
from neuron_runtime.commands import serve
from neuron_runtime.flags import Field, as_flag
from request_tables import paragraph, with_notes


def command_flags() -> str:
    """The flags of `serve` that are not keys of the document."""
    rows = [
        (_texts(action.option_strings or ["MODEL"]), (action.help or "") % vars(action))
        for action in _actions().values()
        if action.dest not in {*BY_ARGUMENT, "help"} and action.help != argparse.SUPPRESS
    ]
    return table(("Flag", "Meaning"), rows)


def refused_flags() -> str:
    """The flags of vLLM that are refused as a paragraph, with the values that are accepted and the cure in brackets."""
    refused = (row for row in not_built.rows(not_built.Surface.FLAG) if row.has_effect)
    return paragraph(with_notes(f"`{as_flag(row.name)}`", _accepted(row), row) for row in refused)


def ignored_flags() -> str:
    """The flags of vLLM that are accepted without effect, as a paragraph."""
    rows = (row for row in not_built.rows(not_built.Surface.FLAG) if not row.has_effect)
    return paragraph(f"`{as_flag(row.name)}`" for row in rows)


def _accepted(row: not_built.NotBuilt) -> tuple[str, ...]:
    values = (f"--no-{as_flag(row.name)[2:]}",) if row.is_switch else row.neutral
    return tuple(f"`{value}`" for value in values if value != "")


def document_keys() -> str:
    """The keys of the document without those of the HTTP server."""
    return _keys(field for field in FIELDS if not field.path.startswith("server."))


def server_keys() -> str:
    return _keys(field for field in FIELDS if field.path.startswith("server."))


def llm_arguments() -> str:
    rows = [(f"`{name}`", f"`{field.path}`") for name, field in LLM_ARGUMENTS.items()]
    return table(("Argument", "Key"), rows)


def _keys(fields: Iterable[Field]) -> str:
    actions = _actions()
    rows = []
    for field in fields:
        flags = actions[field.argument].option_strings if field.argument else ()
        default = f"`{field.default}`" if field.default == field.value else field.default
        if field.value is NODEFAULT and field.argument:
            default = f"required; with flags: {default}"
        rows.append((f"`{field.path}`", _texts(flags), values(field.kind), field.description, default))
    return table(("Key", "Flag", "Values", "Meaning", "Default"), rows)


def values(kind: inspect.Type) -> str:
    """The values of a field, in words."""
    match kind:
        case inspect.LiteralType(known):
            return _texts(filter(None, known))
        case inspect.BoolType():
            return "`true`, `false`"
        case inspect.IntType() | inspect.FloatType() if kind.ge is not None:
            return f"{kind.ge:g} to {kind.le:g}" if kind.le is not None else f"{kind.ge:g} or more"
        case inspect.IntType():
            return "integer"
        case inspect.VarTupleType():
            return "texts"
        case inspect.DictType() | inspect.StructType():
            return "object"
        case inspect.StrType():
            return "text"
    raise TypeError(f"no words for {kind}")


def _texts(values: Iterable[object]) -> str:
    return ", ".join(f"`{value}`" for value in values)


def _actions() -> dict[str, argparse.Action]:
    parser = argparse.ArgumentParser()
    serve.add_arguments(parser)
    actions: dict[str, argparse.Action] = {}
    for action in parser._actions:
        actions.setdefault(action.dest, action)
    return actions
