"""The CustomResourceDefinition of NeuronModel, from the Structs that declare its fields.

`make generate` writes it to `crds/` and the chart; `neuron-operator crd` prints it. The schema is structural, every
list has a merge type, and descriptions are the declared Markdown without links.
"""

from __future__ import annotations

import re
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

import yaml
from msgspec import NODEFAULT, Meta

from neuron_operator.api import names
from neuron_operator.api.field_types import NAME_PATTERN
from neuron_operator.api.fields import Json, OpenPart, Rule, Shape, SpecPart, description_of, fields_of, unwrapped
from neuron_operator.api.model import Spec
from neuron_operator.api.model_status import Status

Schema = dict[str, Any]
SCALARS: dict[Any, Schema] = {
    bool: {"type": "boolean"},
    int: {"type": "integer", "format": "int32"},
    str: {"type": "string"},
}
ANY_OBJECT: Schema = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
LENGTHS = {"array": ("minItems", "maxItems"), "object": ("minProperties", "maxProperties")}
LINK = r"\[([^]]*)\]\([^)]*\)"
REFERENCE = rf" See {LINK}\.|, see {LINK}"
BELOW = ("items", "additionalProperties", "properties")
# Name, type, JSON path, priority: 1 is shown with `-o wide` only.
COLUMNS = (
    ("Model", "string", ".spec.model.uri", 0),
    ("Ready", "string", ".status.ready", 0),
    ("Reason", "string", '.status.conditions[?(@.type=="Ready")].reason', 0),
    ("URL", "string", ".status.url", 0),
    ("Devices", "integer", ".status.plan.devices", 1),
    ("Instance type", "string", ".status.plan.instanceType", 1),
    ("Max length", "integer", ".status.plan.maxModelLength", 1),
    ("Revision", "string", ".status.updateRevision", 1),
    ("Age", "date", ".metadata.creationTimestamp", 0),
)


def definition() -> Schema:
    name = {"type": "string", "maxLength": names.MAX_MODEL_NAME, "pattern": NAME_PATTERN}
    version = {
        "name": names.VERSION,
        "served": True,
        "storage": True,
        "subresources": {
            "status": {},
            "scale": {
                "specReplicasPath": ".spec.replicas",
                "statusReplicasPath": ".status.replicas",
                "labelSelectorPath": ".status.selector",
            },
        },
        "additionalPrinterColumns": [
            {"name": name, "type": kind, "jsonPath": path, **({"priority": priority} if priority else {})}
            for name, kind, path, priority in COLUMNS
        ],
        "schema": {
            "openAPIV3Schema": {
                "type": "object",
                "description": "A language model served on AWS Neuron devices (or CPUs) behind the OpenAI API.",
                "required": ["spec"],
                "properties": {
                    "apiVersion": {"type": "string"},
                    "kind": {"type": "string"},
                    "metadata": {"type": "object", "properties": {"name": name}},
                    "spec": schema_of(Spec),
                    # Until the operator has seen the object, it must not look complete: kstatus compares generations.
                    "status": {**schema_of(Status), "default": {"observedGeneration": -1}},
                },
            }
        },
    }
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {
            "name": f"{names.PLURAL}.{names.GROUP}",
            # Uninstalling the chart keeps the models.
            "annotations": {"helm.sh/resource-policy": "keep"},
        },
        "spec": {
            "group": names.GROUP,
            "scope": "Namespaced",
            "names": {
                "kind": names.KIND,
                "listKind": f"{names.KIND}List",
                "plural": names.PLURAL,
                "singular": names.KIND.lower(),
                "shortNames": ["nm"],
            },
            "versions": [version],
        },
    }


def schema_of(kind: Any) -> Schema:
    """The structural schema of a declared type with its annotations."""
    core, annotations = unwrapped(kind)
    schema = _type(core)
    if text := description_of(kind):
        schema["description"] = re.sub(LINK, r"\1", re.sub(REFERENCE, "", text))
    for one in annotations:
        if isinstance(one, Meta):
            schema |= _bounds(one, str(schema.get("type")))
        elif isinstance(one, Shape):
            schema |= _object(one.part)
        elif isinstance(one, Rule):
            schema |= one.schema
    rules = [one for one in annotations if isinstance(one, Rule)]
    if in_cel := [{"rule": rule.cel, "message": rule.message} for rule in rules if rule.cel]:
        schema["x-kubernetes-validations"] = in_cel
    return {key: schema[key] for key in sorted(schema, key=BELOW.__contains__)}


def _type(core: Any) -> Schema:
    arguments = get_args(core)
    if core in SCALARS:
        return dict(SCALARS[core])
    if core == Json:
        return dict(ANY_OBJECT)
    if isinstance(core, type) and issubclass(core, SpecPart):
        return _object(core)
    origin = get_origin(core)
    if origin is Literal:
        return {**SCALARS[type(arguments[0])], "enum": list(arguments)}
    if origin is tuple:
        return {"type": "array", "x-kubernetes-list-type": "atomic", "items": schema_of(arguments[0])}
    if origin is dict:
        return {"type": "object", "additionalProperties": schema_of(arguments[1])}
    if origin in (Union, UnionType):
        text = schema_of(arguments[1])
        return {"x-kubernetes-int-or-string": True, "maxLength": text["maxLength"]}
    raise TypeError(f"no schema for {core}")


def _object(part: type[SpecPart]) -> Schema:
    schema: Schema = dict(ANY_OBJECT) if issubclass(part, OpenPart) else {"type": "object"}
    if required := [one.key for one in fields_of(part) if one.default is NODEFAULT]:
        schema["required"] = required
    schema["properties"] = {}
    for one in fields_of(part):
        default = {"default": one.default} if isinstance(one.default, bool | int | str) else {}
        schema["properties"][one.key] = {**schema_of(one.kind), **default}
    return schema


def _bounds(meta: Meta, kind: str) -> Schema:
    low, high = LENGTHS.get(kind, ("minLength", "maxLength"))
    bounds = {
        "minimum": meta.ge,
        "maximum": meta.le,
        low: meta.min_length,
        high: meta.max_length,
        "pattern": meta.pattern,
    }
    return {key: value for key, value in bounds.items() if value is not None} | dict(meta.extra_json_schema or {})


def to_yaml() -> str:
    """The committed file."""
    head = "# Written by `make generate` from neuron_operator/api/model.py. Later versions only add fields.\n"
    # None: innermost maps and lists are on one line each.
    return head + yaml.safe_dump(definition(), sort_keys=False, width=120, allow_unicode=True, default_flow_style=None)
