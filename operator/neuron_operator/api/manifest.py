"""Parses a manifest: a NeuronModel, or an error that names every field that is wrong.

Called by `decide` in every pass, also of `neuron-operator local`, where no API server has checked the manifest.
Everything that the CRD refuses is therefore refused here too, with the same field.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

import msgspec

from neuron_operator.api import names
from neuron_operator.api.adapter import AdapterSpec, NeuronAdapter
from neuron_operator.api.engines import ENGINES
from neuron_operator.api.errors import FieldNotSupported, InvalidSpec, Refusals
from neuron_operator.api.field_types import NAME_PATTERN
from neuron_operator.api.fields import SpecPart, as_json, broken_rules, fields_of, located, supporting, unwrapped, walk
from neuron_operator.api.model import FOR_TEXT, NeuronModel, Spec

MAX_PARSED = 64
"""More manifests than there are models in work at a time."""
MAX_SPEC_BYTES = 131_072
"""The size of a spec as JSON. The longest chat template fits; the bounds of all fields together would allow megabytes,
and the operator keeps a spec several times: in the model, its revisions, Deployment and pods."""
MAX_LEVELS = 64
"""Of lists and objects in each other. The API server takes thousands in fields that the schema leaves open, which would
take seconds to write in a readable form."""
SPEC_BYTES = "specBytes"
"""In a manifest without its spec: how long that was."""


def parse(body: Mapping[str, Any], *, has_defaults: bool = False) -> NeuronModel:
    """Parse a NeuronModel from the API server or a YAML file.

    `has_defaults`: the engine may be chosen later, if the manifest names none; `check_engine` then checks its fields.

    Raises:
        InvalidSpec: names the field, e.g. `spec.serving.maxModelLength`, and what was expected.
        FieldNotSupported: names a valid field that this version does not support, and the cure.
        Refusals: several fields are invalid, or valid and not supported.
    """
    metadata = _mapping(body.get("metadata"))
    annotations = _mapping(metadata.get("annotations"))
    num_bytes, spec = weighed(body)
    if num_bytes > MAX_SPEC_BYTES:
        text = f"is {num_bytes} bytes as JSON, at most {MAX_SPEC_BYTES} are allowed"
        raise InvalidSpec("spec", f"{text}; shorten engine.env or the annotations")
    if _is_deeper(body.get("spec"), MAX_LEVELS):
        text = f"has lists or objects in more than {MAX_LEVELS} others; shorten engine.overrideNeuronConfig"
        raise InvalidSpec("spec", f"{text} or what else has them")
    return _parsed(
        msgspec.json.encode(
            (
                *map(metadata.get, ("name", "namespace", "uid")),
                *map(annotations.get, (names.REFRESH_ANNOTATION, names.ROLLBACK_ANNOTATION)),
                spec,
            )
        ),
        has_defaults,
    )


def _is_deeper(value: object, levels: int) -> bool:
    here = [value]
    for _ in range(levels):
        held = (one.values() if isinstance(one, Mapping) else one for one in here if isinstance(one, Mapping | list))
        here = [inner for values in held for inner in values]
    return any(isinstance(one, Mapping | list) for one in here)


def check_engine(model: NeuronModel) -> None:
    """Raises FieldNotSupported or Refusals for fields that the engine lacks, where the manifest leaves it open."""
    is_open = f"; the backend is {model.spec.backend}: or set engine.backend" if model.spec.leaves_engine_open else ""
    _refuse(*not_supported(model.spec, default_note(model) or is_open))


def default_note(model: NeuronModel) -> str:
    """The end of a cure: another engine may be the cure, too. Empty: the manifest names the engine."""
    return f"; the backend is {model.backend_words}: or set engine.backend" if model.default_for else ""


def weighed(body: Mapping[str, Any]) -> tuple[int, msgspec.Raw]:
    """Bytes of the spec as JSON, also if it was left out because of them; and the spec."""
    spec = msgspec.json.encode(body.get("spec"))
    return body.get(SPEC_BYTES, len(spec)), msgspec.Raw(spec)


@lru_cache(maxsize=MAX_PARSED)
def _parsed(read: bytes, has_defaults: bool) -> NeuronModel:
    """What is read of a manifest, as JSON: a pass parses it again after each write, and so does the next one."""
    name, namespace, uid, refresh, rollback_to, raw = msgspec.json.decode(read)
    _refuse(*_invalid_name(name), *_invalid(Spec, raw, "spec"))
    spec = msgspec.convert(raw, Spec)
    if not (has_defaults and spec.leaves_engine_open):
        _refuse(*not_supported(spec))
    return NeuronModel(
        name=str(name),
        namespace=str(namespace or "default"),
        uid=str(uid or ""),
        refresh=str(refresh or ""),
        rollback_to=str(rollback_to or ""),
        spec=spec,
    )


def parse_adapter(body: Mapping[str, Any]) -> NeuronAdapter:
    """Parse a NeuronAdapter. Raises InvalidSpec, or Refusals, with the field."""
    metadata = _mapping(body.get("metadata"))
    _, raw = weighed(body)
    name = metadata.get("name")
    _refuse(*_invalid_name(name), *_invalid(AdapterSpec, msgspec.json.decode(raw), "spec"))
    return NeuronAdapter(
        name=str(name),
        namespace=str(metadata.get("namespace") or "default"),
        uid=str(metadata.get("uid") or ""),
        refresh=str(_mapping(metadata.get("annotations")).get(names.REFRESH_ANNOTATION) or ""),
        spec=msgspec.convert(body.get("spec"), AdapterSpec),
    )


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _refuse(*refusals: InvalidSpec) -> None:
    """Raises all refusals, if there are any."""
    if refusals:
        raise refusals[0] if len(refusals) == 1 else Refusals(refusals)


def _invalid_name(name: object) -> Iterator[InvalidSpec]:
    if not isinstance(name, str) or len(name) > names.MAX_MODEL_NAME or not re.fullmatch(NAME_PATTERN, name):
        text = f"must be a DNS label of at most {names.MAX_MODEL_NAME} characters that begins with a letter"
        yield InvalidSpec("metadata.name", text)


def _invalid(kind: Any, raw: object, path: str) -> Iterator[InvalidSpec]:
    """An error for each part of `raw` that is not as declared. Parts of a valid part are not searched again."""
    try:
        value = msgspec.convert(raw, kind)
    except msgspec.ValidationError as error:
        core, _ = unwrapped(kind)
        inside = list(_invalid_within(core, raw, path))
        yield from inside or [_invalid_value(core, raw, path, error)]
    else:
        yield from (InvalidSpec(*broken) for broken in broken_rules(kind, value, path))


def _invalid_within(core: Any, raw: object, path: str) -> Iterator[InvalidSpec]:
    """The errors in the fields of an object and in the items of a list."""
    if isinstance(raw, Mapping) and isinstance(core, type) and issubclass(core, SpecPart):
        declared = {one.key: one for one in fields_of(core)}
        yield from (InvalidSpec(path, f"has no field {shown(key)}") for key in raw if key not in declared)
        for key, one in declared.items():
            if key in raw:
                yield from _invalid(one.kind, raw[key], f"{path}.{key}")
            elif one.default is msgspec.NODEFAULT:
                yield InvalidSpec(path, f"lacks the required field {key}")
    elif isinstance(raw, Mapping) and get_origin(core) is dict:
        for key, item in raw.items():
            yield from _invalid(get_args(core)[1], item, f"{path}[{key}]")
    elif isinstance(raw, list) and get_origin(core) is tuple:
        for index, item in enumerate(raw):
            yield from _invalid(get_args(core)[0], item, f"{path}[{index}]")


def _invalid_value(core: Any, raw: object, path: str, error: msgspec.ValidationError) -> InvalidSpec:
    if raw is None and path == "spec":
        return InvalidSpec(path, "is required")
    if get_origin(core) is Literal:
        return InvalidSpec(path, f"must be one of {', '.join(map(str, get_args(core)))}, got {shown(raw)}")
    if isinstance(core, type) and issubclass(core, SpecPart):
        return InvalidSpec(path, "must be an object")
    if isinstance(raw, float) and get_origin(core) in (Union, UnionType):
        return InvalidSpec(path, f'must be a whole number or text: write "{raw}" in quotes')
    return InvalidSpec(*located(error, path))


def not_supported(spec: Spec, note: str = "") -> Iterator[FieldNotSupported]:
    """An error for each valid value that this version does not support. `note`: the end of each cure."""
    walked = walk(spec, "spec", supporting)
    values = [(path, one, support, value) for path, one, value in walked for support in one.supports]
    engine = spec.runs if spec.backend in ENGINES else None
    # Fields that others depend on, such as the backend, come first.
    for path, one, support, value in sorted(values, key=lambda row: row[2].of is None):
        value_found = support.of(spec) if support.of else value
        accepted = support.values if support.of else (one.default, *support.values)
        is_honoured = support.of is None and engine is not None and support.is_honoured(path, engine.honours)
        if value_found not in accepted and not is_honoured:
            yield FieldNotSupported(path, shown(value_found), support.cure + note)
    yield from _not_of_task(spec, note)


def _not_of_task(spec: Spec, note: str) -> Iterator[FieldNotSupported]:
    """An error for each value that only a model which generates text could have."""
    for path, one, value in () if spec.generates else walk(spec, "spec"):
        accepted = FOR_TEXT.get(path.removeprefix("spec."))
        if accepted is not None and value not in (one.default, *accepted):
            cure = f"remove it, or serving.task: {spec.serving.task}: it is for models that generate text"
            yield FieldNotSupported(path, shown(value), cure + note)


def shown(value: object, most: int = 80) -> str:
    """As JSON, of at most so many characters."""
    text = json.dumps(as_json(value), ensure_ascii=False)
    return text if len(text) <= most else f"{text[: most - 3]}..."
