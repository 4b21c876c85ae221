"""Pictures become RGB and upright, whatever their format has."""

from __future__ import annotations

import io
import struct
import zlib
from typing import Any

import numpy as np
import pytest
from PIL import Image

from neuron_runtime.errors import InvalidRequest
from neuron_runtime.pictures.decoding import decoded


def seen(image: Image.Image, kind: str = "PNG", **options: Any) -> Any:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return decoded(file.getvalue(), "at", 1000)


def test_gray_of_16_bits_keeps_its_shades() -> None:
    shades = np.arange(256, dtype=np.uint16).reshape(16, 16)
    assert np.array_equal(np.asarray(seen(Image.fromarray(shades * 257)))[..., 0], shades)


@pytest.mark.parametrize("kind", ["PNG", "WEBP", "GIF"])
def test_what_is_transparent_is_white(kind: str) -> None:
    image = seen(Image.new("RGBA", (2, 2), (255, 0, 0, 0)), kind)
    assert (image.mode, image.getpixel((0, 0))) == ("RGB", (255, 255, 255))


def test_a_photograph_is_turned_as_its_exif_says() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    assert seen(Image.new("RGB", (8, 4)), "JPEG", exif=exif).size == (4, 8)


def test_a_picture_that_pillow_does_not_open_has_too_many_pixels() -> None:
    header = b"IHDR" + struct.pack(">IIBBBBB", 20_000, 20_000, 8, 2, 0, 0, 0)
    raw = b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + header + struct.pack(">I", zlib.crc32(header))
    raw += struct.pack(">I", 0) + b"IDAT"
    with pytest.raises(InvalidRequest, match=r"has too many pixels, max 1000 \(maxPixels\)"):
        decoded(raw, "at", 1000)
