"""The CustomResourceDefinitions of NeuronModel and NeuronAdapter, from the Structs that declare their fields.

`make generate` writes them to `crds/` and the chart; `neuron-operator crd` prints them. The schema is structural, every
list has a merge type, and descriptions are the declared Markdown without links.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

import yaml
from msgspec import NODEFAULT, Meta

from neuron_operator.api import names
from neuron_operator.api.adapter import AdapterSpec, AdapterStatus
from neuron_operator.api.field_types import NAME_PATTERN
from neuron_operator.api.fields import Json, OpenPart, Rule, Shape, SpecPart, description_of, fields_of, unwrapped
from neuron_operator.api.model import Spec
from neuron_operator.api.model_status import Status, StatusPart

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
Column = tuple[str, str, str, int]
"""Name, type, JSON path, priority: 1 is shown with `-o wide` only."""
READY: tuple[Column, ...] = (
    ("Ready", "string", ".status.ready", 0),
    ("Reason", "string", '.status.conditions[?(@.type=="Ready")].reason', 0),
)
AGE: Column = ("Age", "date", ".metadata.creationTimestamp", 0)
COLUMNS = (
    ("Model", "string", ".spec.model.uri", 0),
    *READY,
    ("URL", "string", ".status.url", 0),
    ("Task", "string", ".status.plan.task", 1),
    ("Devices", "integer", ".status.plan.devices", 1),
    ("Instance type", "string", ".status.plan.instanceType", 1),
    ("Max length", "integer", ".status.plan.maxModelLength", 1),
    ("Revision", "string", ".status.updateRevision", 1),
    AGE,
)
ADAPTER_COLUMNS = (
    ("Model", "string", ".spec.model", 0),
    *READY,
    ("Rank", "integer", ".status.served.rank", 0),
    ("Size", "string", ".status.served.size", 0),
    ("URI", "string", ".spec.uri", 1),
    ("Digest", "string", ".status.served.digest", 1),
    AGE,
)


@dataclass(frozen=True)
class Definition:
    """What the resources differ in."""

    kind: str
    plural: str
    short: str
    description: str
    spec: type[SpecPart]
    status: type[StatusPart]
    columns: tuple[Column, ...]
    subresources: Schema = field(default_factory=dict)
    """Besides status."""


MODEL = Definition(
    kind=names.KIND,
    plural=names.PLURAL,
    short=names.SHORT,
    description="A language model served on AWS Neuron devices (or CPUs) behind the OpenAI API.",
    spec=Spec,
    status=Status,
    columns=COLUMNS,
    subresources={
        "scale": {
            "specReplicasPath": ".spec.replicas",
            "statusReplicasPath": ".status.replicas",
            "labelSelectorPath": ".status.selector",
        }
    },
)
ADAPTER = Definition(
    kind=names.ADAPTER_KIND,
    plural=names.ADAPTER_PLURAL,
    short=names.ADAPTER_SHORT,
    description="A fine-tune (LoRA) that the replicas of a NeuronModel serve under a name of its own.",
    spec=AdapterSpec,
    status=AdapterStatus,
    columns=ADAPTER_COLUMNS,
)
DEFINITIONS = (MODEL, ADAPTER)


def definition(of: Definition = MODEL) -> Schema:
    name = {"type": "string", "maxLength": names.MAX_MODEL_NAME, "pattern": NAME_PATTERN}
    version = {
        "name": names.VERSION,
        "served": True,
        "storage": True,
        "subresources": {"status": {}, **of.subresources},
        "additionalPrinterColumns": [
            {"name": name, "type": kind, "jsonPath": path, **({"priority": priority} if priority else {})}
            for name, kind, path, priority in of.columns
        ],
        "schema": {
            "openAPIV3Schema": {
                "type": "object",
                "description": of.description,
                "required": ["spec"],
                "properties": {
                    "apiVersion": {"type": "string"},
                    "kind": {"type": "string"},
                    "metadata": {"type": "object", "properties": {"name": name}},
                    "spec": schema_of(of.spec),
                    # Until the operator has seen the object, it must not look complete: kstatus compares generations.
                    "status": {**schema_of(of.status), "default": {"observedGeneration": -1}},
                },
            }
        },
    }
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {
            "name": f"{of.plural}.{names.GROUP}",
            # Uninstalling the chart keeps the objects.
            "annotations": {"helm.sh/resource-policy": "keep"},
        },
        "spec": {
            "group": names.GROUP,
            "scope": "Namespaced",
            "names": {
                "kind": of.kind,
                "listKind": f"{of.kind}List",
                "plural": of.plural,
                "singular": of.kind.lower(),
                "shortNames": [of.short],
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


def to_yaml(of: Definition = MODEL) -> str:
    """The committed file."""
    module = of.spec.__module__.replace(".", "/")
    head = f"# Written by `make generate` from {module}.py. Later versions only add fields.\n"
    # None: innermost maps and lists are on one line each.
    return head + yaml.safe_dump(
        definition(of), sort_keys=False, width=120, allow_unicode=True, default_flow_style=None
    )
