"""Decodes pictures of clients with Pillow, within limits that are checked before a picture is decoded.

Called by `reader`, on a thread. The format is found from the bytes, whatever the client calls it; of moving pictures
the first one counts.
"""

from __future__ import annotations

import io
from typing import Any

from PIL import Image, ImageOps

from neuron_runtime.errors import InvalidRequest
from neuron_runtime.pictures.sources import BROKEN, TOO_LARGE

MAX_SCANS = 64
"""Of a progressive JPEG: each takes as long as the whole picture, and a file has room for thousands."""
_WEBP_HEADER_BYTES = 30


def sniffed(raw: bytes) -> str | None:
    """The format by Pillow's name; None for any that is not read."""
    if raw.startswith(b"\xff\xd8\xff"):
        return "JPEG"
    if raw.startswith(b"\x89PNG\r\n\x1a\n"):
        return "PNG"
    if raw[:6] in (b"GIF87a", b"GIF89a"):
        return "GIF"
    return "WEBP" if raw[:4] == b"RIFF" and raw[8:12] == b"WEBP" else None


def decoded(raw: bytes, at: str, max_pixels: int) -> Any:
    """The picture as an image of Pillow, in RGB and upright. Raises InvalidRequest."""
    kind = sniffed(raw)
    if kind is None:
        problem = "must be a JPEG, PNG, WebP or GIF picture: its bytes begin like none of these"
        raise InvalidRequest.at(at, problem, BROKEN)
    if kind == "WEBP":
        # Pillow has memory for the whole picture when it opens one.
        check_pixels(_webp_size(raw), at, max_pixels)
    if kind == "JPEG" and raw.count(b"\xff\xda") > MAX_SCANS:
        raise InvalidRequest.at(at, f"is a JPEG picture of more than {MAX_SCANS} scans: store it otherwise", TOO_LARGE)
    try:
        image = Image.open(io.BytesIO(raw), formats=(kind,))
        check_pixels(image.size, at, max_pixels)
        return plain(image)
    except InvalidRequest:
        raise
    except Image.DecompressionBombError as error:  # Pillow opens none that is so large
        problem = f"has too many pixels, max {min(max_pixels, 2 * (Image.MAX_IMAGE_PIXELS or 0))} (maxPixels)"
        raise InvalidRequest.at(at, f"{problem}: send a smaller picture", TOO_LARGE) from error
    except Exception as error:  # decoders raise anything for bytes that they were not written for
        reason = str(error) or type(error).__name__
        raise InvalidRequest.at(at, f"is a broken {kind} picture: {reason[:200]}", BROKEN) from error


def plain(image: Any) -> Any:
    """In RGB and upright; what is transparent is white."""
    image = ImageOps.exif_transpose(image)
    if image.mode == "RGB":
        return image
    if image.mode.startswith("I"):
        # Gray in 16 bits, of which Pillow would make white of all but the darkest.
        image = image.convert("I").point(lambda value: value * (1 / 257)).convert("L")
    if "A" in image.getbands() or "transparency" in image.info:
        image = image.convert("RGBA")
        ground = Image.new("RGBA", image.size, "white")
        ground.alpha_composite(image)
        image = ground
    return image.convert("RGB")


def check_pixels(size: tuple[int, int], at: str, max_pixels: int) -> None:
    """Raises InvalidRequest."""
    width, height = size
    if width * height > max_pixels:
        problem = f"has {width} x {height} pixels, max {max_pixels} (maxPixels): send a smaller picture"
        raise InvalidRequest.at(at, problem, TOO_LARGE)


def _webp_size(raw: bytes) -> tuple[int, int]:
    """Width and height by the header; of a broken one, nothing, for Pillow to say what is wrong."""
    if len(raw) < _WEBP_HEADER_BYTES:
        return 0, 0
    match raw[12:16]:
        case b"VP8X":
            return int.from_bytes(raw[24:27], "little") + 1, int.from_bytes(raw[27:30], "little") + 1
        case b"VP8L":
            bits = int.from_bytes(raw[21:25], "little")
            return (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
    return int.from_bytes(raw[26:28], "little") & 0x3FFF, int.from_bytes(raw[28:30], "little") & 0x3FFF
