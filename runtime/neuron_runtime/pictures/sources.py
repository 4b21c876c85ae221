"""The bytes of a picture that a request names: in the request itself (a data: URL), or at an https URL.

Called by `reader`, on a thread. Every problem is an InvalidRequest that names the part of the request.
"""

from __future__ import annotations

import binascii
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from neuron_runtime.errors import InvalidRequest

TOO_LARGE, BROKEN, NO_URL, NOT_FETCHED = (
    *("image_too_large", "invalid_image", "invalid_image_url", "failed_to_download_image"),
)
"""Codes of errors."""
Fetch = Callable[[str, str, int], bytes]
"""The bytes at a URL, which the client wrote at this place; at most so many."""

_CHUNK = 1 << 20
"""Characters that are decoded at a time; a multiple of 4. Other threads get their turn between two."""


@dataclass(frozen=True)
class PictureAt:
    """A picture as a client gives it."""

    given: Any
    """A URL; or, of a Python caller, an image of Pillow, an array, or the bytes of a file."""
    at: str
    """The client's path of it."""


def read_source(url: str, at: str, max_bytes: int, fetch: Fetch) -> bytes:
    """Raises InvalidRequest."""
    scheme, colon, rest = url[:2048].partition(":")
    match scheme.lower() if colon else "":
        case "data":
            return _of_data_url(url, at, max_bytes)
        case "https":
            return fetch(url, at, max_bytes)
    shown = f"`{scheme[:16]}:`" if colon and rest else "no URL"
    raise InvalidRequest.at(at, f"must be a `data:` or `https:` URL, got {shown}", NO_URL)


def _of_data_url(url: str, at: str, max_bytes: int) -> bytes:
    comma = url.find(",", 0, 1024)
    if comma < 0 or not url[:comma].lower().endswith(";base64"):
        raise InvalidRequest.at(at, "must be `data:image/...;base64,` and the picture in base64", BROKEN)
    begin, size = comma + 1, (len(url) - comma - 1) // 4 * 3
    if size - 2 > max_bytes:
        raise too_large(at, max_bytes)
    try:
        parts = [
            binascii.a2b_base64(url[start : start + _CHUNK], strict_mode=True)
            for start in range(begin, len(url), _CHUNK)
        ]
    except (binascii.Error, ValueError) as error:
        raise InvalidRequest.at(at, f"is not base64: {error}", BROKEN) from error
    return b"".join(parts)


def too_large(at: str, max_bytes: int) -> InvalidRequest:
    problem = f"must have at most {max_bytes} bytes (maxImageBytes): send a smaller picture"
    return InvalidRequest.at(at, problem, TOO_LARGE)
