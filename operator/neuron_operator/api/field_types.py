"""Types of the fields of NeuronModel, with their bounds and rules, for `model.py`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, Literal

from msgspec import Meta

from neuron_operator.api import names
from neuron_operator.api.fields import Rule

NAME_PATTERN = r"^[a-z]([-a-z0-9]*[a-z0-9])?$"
"""Pattern of the object's name, which is also a Service's. With names.MAX_MODEL_NAME it is a DNS label."""


@dataclass(frozen=True)
class UriScheme:
    """A form of model URI."""

    form: str
    pattern: str
    separator: str = "/"
    """What stands between the place and the path in it."""


_LABEL = "[a-z0-9]([-a-z0-9]*[a-z0-9])?"
_SUBDOMAIN = f"{_LABEL}([.]{_LABEL})*"
_SEGMENT = r"([.]{0,2}[^\s/?#.]|[.]{3})[^\s/?#]*"
"""A segment of a path is neither empty nor `.` or `..`."""
_IN_S3 = rf"^s3://[a-z0-9]([.]?[-a-z0-9])+[.]?[a-z0-9](/{_SEGMENT})+/?$"

URI_SCHEMES = {
    "hf": UriScheme(
        "hf://org/name[@revision]",
        r"^hf://[A-Za-z0-9][A-Za-z0-9._-]{0,95}/[A-Za-z0-9][A-Za-z0-9._-]{0,95}"
        r"(@[A-Za-z0-9][A-Za-z0-9._/-]{0,127})?$",
    ),
    "s3": UriScheme("s3://bucket/prefix", _IN_S3),
    "pvc": UriScheme("pvc://claim/path", rf"^pvc://{_SUBDOMAIN}(/{_SEGMENT})*/?$"),
    "oci": UriScheme(
        "oci://image[@digest][#path]",
        rf"^oci://[A-Za-z0-9][A-Za-z0-9_.:/@-]*(#/?{_SEGMENT}(/{_SEGMENT})*/?)?$",
        separator="#",
    ),
    "file": UriScheme("file:///path", r"^file:///[^\s]+$"),
}
URI_FORMS = [scheme.form for scheme in URI_SCHEMES.values()]
RELATIVE_FILE = "file:./"


@dataclass(frozen=True)
class ParsedUri:
    """The parts of a URI that the operator acts on; the runtime reads the rest."""

    scheme: str
    place: str
    """The claim, image, bucket or hub organization."""
    path: str = ""
    """What follows."""

    @classmethod
    def parse(cls, uri: str) -> ParsedUri:
        """Parts of a URI of any form; a scheme that is unknown has its place before the first `/`."""
        scheme, _, rest = uri.partition(":")
        form = URI_SCHEMES.get(scheme)
        place, _, path = rest.removeprefix("//").partition(form.separator if form else "/")
        return cls(scheme, place, path)


IS_RELATIVE = f"self.startsWith('{RELATIVE_FILE}')"

Name = Annotated[str, Meta(min_length=1, max_length=253)]
ClaimName = Annotated[str, Meta(min_length=1, max_length=253, pattern=f"^{_SUBDOMAIN}$")]
_PUBLIC_HOST = rf"({_LABEL}[.])+[a-z]([-a-z0-9]*[a-z0-9])?"
"""With a dot, and a name at its end: neither a name of this network nor an address."""
MediaHost = Annotated[
    str,
    Meta(min_length=4, max_length=259, pattern=rf"^{_PUBLIC_HOST}(:[1-9][0-9]{{0,4}})?$"),
    Rule(
        "must be a public DNS name: none that ends in .local, .internal, .localhost or .svc",
        lambda host: not host.partition(":")[0].endswith((".local", ".internal", ".localhost", ".svc")),
        "!self.matches('[.](local|internal|localhost|svc)(:[0-9]+)?$')",
    ),
]
SubPath = Annotated[str, Meta(min_length=1, max_length=512, pattern=f"^{_SEGMENT}(/{_SEGMENT})*$")]
StoreUri = Annotated[str, Meta(min_length=1, max_length=1024, pattern=_IN_S3)]
ServedName = Annotated[str, Meta(min_length=1, max_length=256, pattern=r"^\S+$")]
ShortText = Annotated[str, Meta(min_length=1, max_length=64)]
LabelValue = Annotated[str, Meta(max_length=63)]
TopologyKey = Annotated[str, Meta(max_length=317)]
Quantity = int | Annotated[str, Meta(max_length=32)]
Length = Annotated[int, Meta(ge=1, le=16_777_216)]
Int64 = Annotated[int, Meta(extra_json_schema={"format": "int64"})]
Toggle = Literal["Enabled", "Disabled"]
AutoToggle = Literal["Auto", "Enabled", "Disabled"]
SWITCH_WORDS = {"Auto": None, "Enabled": "enabled", "Disabled": "disabled"}
"""The values of an AutoToggle in RuntimeConfig."""


def _has_known_form(uri: str) -> bool:
    scheme = URI_SCHEMES.get(ParsedUri.parse(uri).scheme)
    return uri.startswith(RELATIVE_FILE) or bool(scheme and re.fullmatch(scheme.pattern, uri))


def _matches(pattern: str) -> str:
    return f"self.matches('{pattern}')".replace("\\", "\\\\")


_NOT_ON_A_HUB = "^hf://([^@]*--|.*[.][.])"

Uri = Annotated[
    str,
    Meta(min_length=1, max_length=1024),
    Rule(
        "file:./ works with `neuron-operator local` only, where it is relative to the manifest; use file:///path",
        lambda uri: not uri.startswith(RELATIVE_FILE),
        f"!{IS_RELATIVE}",
    ),
    Rule(
        f"must be {', '.join(URI_FORMS[:-1])} or {URI_FORMS[-1]}",
        _has_known_form,
        " || ".join([IS_RELATIVE, *(_matches(scheme.pattern) for scheme in URI_SCHEMES.values())]),
    ),
    Rule(
        "must not contain the path segment '..'",
        lambda uri: uri.startswith(RELATIVE_FILE) or ".." not in uri.split("/"),
        f"{IS_RELATIVE} || !self.matches('(^|/)[.][.](/|$)')",
    ),
    Rule(
        "must not contain '..' in hf://, nor '--' in the name of the repository",
        lambda uri: not re.search(_NOT_ON_A_HUB, uri),
        f"!self.matches('{_NOT_ON_A_HUB}')",
    ),
]
Buckets = Annotated[
    tuple[Length, ...],
    Meta(max_length=32),
    Rule(
        "must be ascending",
        lambda buckets: all(low < high for low, high in pairwise(buckets)),
        "self.isSorted() && self.all(x, self.exists_one(y, x == y))",
    ),
]
WITHOUT_OUR_PREFIX = Rule(
    f"keys must not begin with {names.GROUP}/, which is reserved for the operator",
    lambda keys: not any(key.startswith(f"{names.GROUP}/") for key in keys),
    f"self.all(key, !key.startsWith('{names.GROUP}/'))",
)
Quantities = Annotated[
    dict[str, Quantity],
    Meta(max_length=16),
    Rule(
        "request Neuron devices with accelerator.devices or cores",
        lambda keys: not any(key.startswith(names.NEURON_RESOURCE_PREFIX) for key in keys),
        f"self.all(key, !key.startsWith('{names.NEURON_RESOURCE_PREFIX}'))",
    ),
]
