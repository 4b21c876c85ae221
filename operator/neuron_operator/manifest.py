"""Parses a manifest: a NeuronModel, or an error that names the field.

Called by `decide` in every pass, also of `neuron-operator local`, where no API server has checked the manifest.
Everything that the CRD refuses is therefore refused here too, with the same field.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from neuron_operator import names
from neuron_operator.errors import FieldNotSupported, InvalidSpec
from neuron_operator.field_types import NAME_PATTERN
from neuron_operator.fields import Supported, as_json, broken_rules, walk
from neuron_operator.model import NeuronModel, Spec


def parse(body: Mapping[str, Any]) -> NeuronModel:
    """Parse a NeuronModel from the API server or a YAML file.

    Raises:
        InvalidSpec: names the field, e.g. `spec.serving.maxModelLength`, and what was expected.
        FieldNotSupported: names a valid field that this version does not support, and the cure.
    """
    metadata = body.get("metadata")
    metadata = metadata if isinstance(metadata, Mapping) else {}
    name = metadata.get("name")
    if not isinstance(name, str) or len(name) > names.MAX_MODEL_NAME or not re.fullmatch(NAME_PATTERN, name):
        raise InvalidSpec(
            "metadata.name",
            f"must be a DNS label of at most {names.MAX_MODEL_NAME} characters that begins with a letter",
        )
    spec = _convert(body.get("spec"))
    for path, message in broken_rules(Spec, spec, "spec"):
        raise InvalidSpec(path, message)
    for refusal in not_supported(spec):
        raise refusal
    annotations = metadata.get("annotations")
    annotations = annotations if isinstance(annotations, Mapping) else {}
    return NeuronModel(
        name=name,
        namespace=str(metadata.get("namespace") or "default"),
        uid=str(metadata.get("uid") or ""),
        refresh=str(annotations.get(names.REFRESH_ANNOTATION) or ""),
        spec=spec,
    )


def is_paused(body: Mapping[str, Any]) -> bool:
    """Whether the pause annotation is set; also works for invalid specs."""
    metadata = body.get("metadata")
    annotations = metadata.get("annotations") if isinstance(metadata, Mapping) else None
    return isinstance(annotations, Mapping) and annotations.get(names.PAUSED_ANNOTATION) == "true"


def _convert(raw: object) -> Spec:
    if not isinstance(raw, Mapping):
        raise InvalidSpec("spec", "is required" if raw is None else "must be an object")
    try:
        return msgspec.convert(raw, Spec)
    except msgspec.ValidationError as error:
        message, _, place = str(error).partition(" - at ")
        path = place.removeprefix("`key` in ").strip("`").removeprefix("$")
        raise InvalidSpec(f"spec{path}", message.replace("`", "")) from error


def not_supported(spec: Spec) -> Iterator[FieldNotSupported]:
    """An error for each valid value that this version does not support."""
    found = [
        (path, one, support, value) for path, one, value in walk(spec, "spec") for support in one.annotations(Supported)
    ]
    # Fields that others depend on, such as the backend, come first.
    for path, one, support, value in sorted(found, key=lambda row: row[2].of is None):
        value_found = support.of(spec) if support.of else value
        accepted = support.values if support.of else (one.default, *support.values)
        if value_found not in accepted and spec.backend not in support.backends:
            yield FieldNotSupported(f"{path}.{support.key}" if support.key else path, _shown(value_found), support.cure)


def _shown(value: object) -> str:
    text = json.dumps(as_json(value), ensure_ascii=False)
    return text if len(text) <= 80 else text[:77] + "..."
