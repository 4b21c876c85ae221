"""Tables of docs/neuronmodel.md and the reasons of docs/troubleshooting.md, from the declarations of fields and
reasons. `generate.py` calls them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, get_args

import msgspec
import yaml
from msgspec import NODEFAULT

from markdown_table import table
from neuron_operator.api.engines import ENGINES
from neuron_operator.api.fields import Field, SpecPart, Supported, description_of, fields_of, unwrapped
from neuron_operator.api.model import Spec
from neuron_operator.api.model_status import Status
from neuron_operator.api.reasons import TROUBLESHOOTING, Condition, Reason
from neuron_operator.api.schema import MODEL, Definition, schema_of
from request_tables import paragraph

FAILURES = Path(__file__).resolve().parents[1] / "tests" / "cases" / "failures.yaml"


@dataclass(frozen=True)
class Row:
    """A field with a description, and the paths below it without one."""

    path: str
    field: Field
    below: tuple[str, ...]

    @property
    def names(self) -> str:
        return " ".join([f"`{self.path}`", *(f"`{path.removeprefix(self.path)}`" for path in self.below)])

    @property
    def supported(self) -> tuple[Supported, ...]:
        return self.field.annotations(Supported)

    def engines(self, support: Supported) -> list[str]:
        """Those that act on the field."""
        return [name for name, engine in ENGINES.items() if support.is_honoured(self.path, engine.honours)]


def fields(spec: type[SpecPart] = Spec) -> str:
    """Fields of a spec that some backend supports."""
    acted_on = [row for row in rows(spec) if all(support.of or row.engines(support) for support in row.supported)]
    return table(
        ("Field", "Meaning", "Values", "Default"),
        ((row.names, description_of(row.field.kind), values(row.field), default(row.field)) for row in acted_on),
    )


def not_supported() -> str:
    """Fields of the spec, or their values, that this version refuses."""
    return table(
        ("Field", "Meaning", "Accepted values", "Otherwise"),
        (
            (
                row.names,
                meaning(row, support),
                accepted(row, support),
                support.cure,
            )
            for row in rows(Spec)
            for support in row.supported
        ),
    )


def status(of: type[SpecPart] = Status) -> str:
    """Fields of a status."""
    return table(("Field of `status`", "Meaning"), ((row.names, description_of(row.field.kind)) for row in rows(of)))


def columns(of: Definition = MODEL) -> str:
    """The sentence about the columns of `kubectl get`."""
    normal, wide = (", ".join(name for name, *_, one in of.columns if one == priority) for priority in (0, 1))
    return f"`kubectl get {of.short}` shows {normal}; `-o wide` adds {wide}."


def rows(part: type[SpecPart], path: str = "") -> Iterator[Row]:
    for one in fields_of(part):
        here = f"{path}.{one.key}" if path else one.key
        inner = part_of(one)
        bare = tuple(undescribed(*inner, here)) if inner else ()
        if description_of(one.kind) and (bare or not inner):
            yield Row(here, one, bare)
        if inner:
            yield from rows(inner[0], here + inner[1])


def undescribed(part: type[SpecPart], step: str, path: str) -> Iterator[str]:
    for one in fields_of(part):
        if not description_of(one.kind):
            here = f"{path}{step}.{one.key}"
            yield here
            inner = part_of(one)
            if inner and not description_of(inner[0]):
                yield from undescribed(*inner, here)


def part_of(one: Field) -> tuple[type[SpecPart], str] | None:
    """The type of the fields inside a field, and the path segment to them."""
    core, _ = unwrapped(one.kind)
    step = ""
    if get_args(core) and core.__origin__ is tuple:
        core, step = unwrapped(get_args(core)[0])[0], "[]"
    return (core, step) if isinstance(core, type) and issubclass(core, SpecPart) else None


def values(one: Field) -> str:
    schema = schema_of(one.kind)
    match schema:
        case {"enum": options}:
            return ", ".join(f"`{option}`" for option in options)
        case {"minimum": low, "maximum": high}:
            return f"{low} to {high}"
        case {"type": "string", "maxLength": high}:
            return f"at most {high} characters"
        case {"maxItems": high}:
            return f"at most {high} items"
        case {"maxProperties": high}:
            return f"at most {high} keys"
    return ""


def default(one: Field) -> str:
    if one.default is NODEFAULT:
        return "required"
    return f"`{one.default}`" if isinstance(one.default, int | str) else ""


def meaning(row: Row, support: Supported) -> str:
    return "see above" if support.of or row.engines(support) else description_of(row.field.kind)


def accepted(row: Row, support: Supported) -> str:
    options = support.values if support.of else (row.field.default, *support.values)
    some = ", ".join(map(shown, options))
    engines = [f"`{name}`" for name in row.engines(support)]
    return f"{some}; any with {' and '.join(engines)}" if engines else some


def shown(value: Any) -> str:
    if value in (None, msgspec.UNSET):
        return "unset"
    if value in ((), {}):
        return "empty"
    return f"`{value if isinstance(value, str) else msgspec.json.encode(value).decode()}`"


def reasons(condition: Condition) -> str:
    """The reasons of one condition by weight as a paragraph, reserved ones last."""
    declared = [reason for reason in Reason if condition in reason.row.conditions and not reason.row.of_adapters]
    given = (f"[`{reason}`]({Path(TROUBLESHOOTING).name}#{reason.lower()})" for reason in declared if reason.row.means)
    reserved = (f"`{reason}` (reserved)" for reason in declared if not reason.row.means)
    return paragraph((*given, *reserved))


def reasons_of_adapters(condition: Condition) -> str:
    """Those that only adapters have, and then those of models that they can have, too."""
    own = [one for one in Reason if one.row.of_adapters and condition in one.row.conditions]
    others = [one for one in Reason if not one.row.of_adapters and one.row.is_of(condition) and one.row.means]
    return paragraph(f"[`{one}`]({Path(TROUBLESHOOTING).name}#{one.lower()})" for one in (*own, *others))


def sections() -> str:
    """A section for each reason: the end of every message that has it links there."""
    return "\n\n".join(_section(reason) for reason in sorted(Reason) if reason.row.means)


def _section(reason: Reason) -> str:
    failures = "\n".join(
        f"- {one['what']}: {code(one['says'].strip())}. What ends it: {one['ends'][0].lower()}{one['ends'][1:]}."
        for one in _failures()
        if one["reason"] == reason
    )
    return _in_troubleshooting(f"### {reason}\n\n{reason.row.means}. **Cure:** {reason.row.do}.\n\n{failures}").strip()


def code(text: str) -> str:
    return f"`` {text} ``" if "`" in text else f"`{text}`"


@cache
def _failures() -> list[dict[str, str]]:
    """Those that tests induce."""
    found: list[dict[str, str]] = yaml.safe_load(FAILURES.read_text())
    return found


def _in_troubleshooting(text: str) -> str:
    """The links of the declarations are those of docs/neuronmodel.md."""
    here = f"[troubleshooting]({Path(TROUBLESHOOTING).name}#"
    return text.replace("](#", "](neuronmodel.md#").replace(here, "[above](#")
