"""Broken and hostile files: each is decoded within the limits, or refused with the place of the picture."""

from __future__ import annotations

import random

import pytest

from helpers.hostile_pictures import KINDS, animated, spoiled
from helpers.picture_models import picture
from neuron_runtime.errors import InvalidRequest
from neuron_runtime.pictures.decoding import MAX_SCANS, decoded

MAX_PIXELS = 10_000


def check(num_files: int) -> None:
    rng, refused = random.Random(7), list[str | None]()
    for _ in range(num_files):
        try:
            image = decoded(spoiled(rng), "at", MAX_PIXELS)
        except InvalidRequest as error:
            refused.append(error.field)
        else:
            assert image.mode == "RGB"
            assert image.width * image.height <= MAX_PIXELS
    assert set(refused) == {"at"}
    assert len(refused) < num_files


def test_spoiled_files_are_refused_or_read() -> None:
    check(500)


@pytest.mark.long
def test_many_spoiled_files_are_refused_or_read() -> None:
    check(10_000)


def test_a_small_file_of_a_large_picture_is_refused_by_its_header() -> None:
    for kind in KINDS:
        with pytest.raises(InvalidRequest, match="2000 x 3000 pixels, max 10000"):
            decoded(picture(2000, 3000, kind=kind), "at", MAX_PIXELS)


def test_a_jpeg_of_thousands_of_scans_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="scans"):
        decoded(picture(kind="JPEG") + b"\xff\xda" * MAX_SCANS, "at", MAX_PIXELS)


def test_the_first_picture_of_an_endless_gif_counts() -> None:
    assert decoded(animated(1000), "at", MAX_PIXELS).size == (24, 16)
