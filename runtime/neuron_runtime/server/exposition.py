"""The formats of `/metrics`, and which one a scrape gets.

Used by the route. The formats are the library's. Its own negotiation is not used: it raises on a version that is no
number, and in OpenMetrics it replaces the colons of `vllm:` names.
"""

from __future__ import annotations

import gzip
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.openmetrics import exposition as openmetrics


@dataclass(frozen=True)
class Format:
    content_type: str
    write: Callable[[CollectorRegistry], bytes]


TEXT = Format(CONTENT_TYPE_PLAIN_0_0_4, generate_latest)
OPENMETRICS = Format(
    openmetrics.CONTENT_TYPE_LATEST, partial(openmetrics.generate_latest, escaping=openmetrics.ALLOWUTF8)
)
# The versions of the text format differ only in names that we do not have.
_FORMATS = {
    **{("text/plain", version): TEXT for version in ("", "0.0.4", "1.0.0")},
    **{("application/openmetrics-text", version): OPENMETRICS for version in ("", "1.0.0")},
}
VARY = "Accept, Accept-Encoding"
"""The request headers that decide."""
_GZIP_LEVEL = 5


def chosen_format(accept: str) -> Format:
    """The most wanted format of an Accept header, of equal ones the first; text if it names none."""
    chosen, highest = TEXT, 0.0
    for name, parameters in _elements(accept):
        known = _FORMATS.get((name, parameters.get("version", "")))
        if known is not None and (quality := _quality(parameters)) > highest:
            chosen, highest = known, quality
    return chosen


def encoded(text: bytes, accept_encoding: str) -> tuple[bytes, dict[str, str]]:
    """The body and its headers: compressed if the Accept-Encoding header allows it."""
    if any(name == "gzip" and _quality(parameters) > 0 for name, parameters in _elements(accept_encoding)):
        return gzip.compress(text, _GZIP_LEVEL), {"content-encoding": "gzip"}
    return text, {}


def _elements(header: str) -> Iterator[tuple[str, dict[str, str]]]:
    """Name and parameters of each element of a header."""
    for element in header.lower().split(","):
        name, *parameters = (part.strip() for part in element.split(";"))
        yield name, {key.strip(): value.strip(' "') for key, _, value in (one.partition("=") for one in parameters)}


def _quality(parameters: dict[str, str]) -> float:
    try:
        return float(parameters.get("q", "1"))
    except ValueError:
        return 0.0
