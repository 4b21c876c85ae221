"""Pictures are cut into tiles as the processor of transformers does it, whose results for some are kept here."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from PIL import Image

from neuron_runtime.pictures.families import family_of
from neuron_runtime.pictures.tiling import Tiling

SIZES: list[tuple[tuple[int, int], tuple[int, int], tuple[int, int], int, int]] = [
    ((1, 1), (1, 1), (336, 336), 1, 147),
    ((24, 16), (1, 1), (336, 224), 1, 147),
    ((336, 336), (1, 1), (336, 336), 1, 147),
    ((337, 336), (1, 2), (337, 336), 3, 437),
    ((500, 300), (1, 2), (500, 300), 3, 437),
    ((300, 500), (2, 1), (300, 500), 3, 437),
    ((640, 480), (2, 2), (640, 480), 5, 727),
    ((1024, 768), (3, 4), (1024, 768), 13, 1887),
    ((1000, 336), (1, 3), (1000, 336), 4, 582),
    ((61, 700), (3, 1), (61, 700), 4, 582),
    ((1920, 1080), (3, 5), (1680, 945), 16, 2322),
    ((3000, 200), (1, 9), (3000, 200), 10, 1452),
    ((5, 2000), (6, 1), (5, 2000), 7, 1017),
    ((2000, 2000), (4, 4), (1344, 1344), 17, 2467),
]
"""Width and height of a picture; rows and columns of tiles; width and height on them; all tiles; tokens. With the
published settings."""
PUBLISHED = {
    "architectures": ["Llama4ForConditionalGeneration"],
    "vision_config": {
        "model_type": "llama4_vision_model",
        "image_size": 336,
        "patch_size": 14,
        "pixel_shuffle_ratio": 0.5,
    },
}

SMALL = {
    "size": {"height": 4, "width": 4},
    "max_patches": 4,
    "image_mean": [0.5, 0.4, 0.3],
    "image_std": [0.5, 0.25, 0.3],
}
VALUES = {
    0: (-1.0, -1.6015625, -1.0),
    1: (-0.9921875, -1.5859375, -0.98828125),
    100: (-0.21484375, -0.03125, 0.3046875),
    200: (0.5703125, 1.5390625, 1.609375),
    255: (1.0, 2.40625, 2.328125),
}
"""What the model reads for a level of each channel, with these settings."""
LEVELS: dict[tuple[int, int], str] = {
    (8, 8): (
        "00172e45253c536a4a61788f6f869db45a71889f7f96adc4a4bbd2e9c9e0f70eb4cbe2f9d9f0071efe152c43233a5168"
        "5c738aa18198afc6a6bdd4ebcbe2f910b6cde4fbdbf1092000172e45253c536a10273e55354c637a5a71889f7f96adc4"
        "94abc2d9b9d0e7fedef50c23031a3148ed051c33132a4158384f667d5d748ba2485f768d6d849bb292a9c0d7b7cee5fc"
        "f0071e35152c435a3a51687f5f768da44a61788f6f869db494abc2d9b9d0e7fda4bbd2e8c9e0f70eee051c33132a4158"
        "2a5482ab6d97b5a4b2b96b4a7b50557a84aaaf83b495474c5a4b6992537dabd4ba76445f654f79a26b95b3a2adc96e42"
    ),
    (7, 3): (
        "00172e45253c536a4a61788f000000005a71889f7f96adc4a4bbd2e900000000b4cbe2f9d9f0071efe152c4300000000"
        "5c738a008198af00a6bdd40000000000b6cde400dbf1090000172e000000000010273e00354c63005a71880000000000"
        "0c305a7e234771953f638db1567aa4c8668ab4d87da1cb9b99bda257b0d44622c0e45632d07b4049be374165902e587c"
    ),
    (11, 5): (
        "102c4d6d3b5778986783a4c492aecfa66a86a7c795b1c28cc1dd7721ae483649c4bea428cd512c4c63375878466283a3"
        "8babccbdb6c08d43dc6c233f4b374e6abe9d26424930516d3c5c7d996787a8c43f5f809c6a8aabc796b6d78dc1b84232"
        "000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000"
        "235d9bc34e88b5757ab49d35a5b24a577db4a441a8a0435ac6574c866f4477b1c2694f89843f7ab44c68a6b65993b14a"
    ),
}
"""Of all tiles of a picture of this width and height, a line for each channel of a tile."""


def picture(width: int, height: int) -> Image.Image:
    row, column, channel = np.indices((height, width, 3))
    return Image.fromarray(((row * 37 + column * 23 + channel * 90) % 256).astype(np.uint8))


def levels_of(pixels: Any, tiling: Tiling) -> Any:
    """The level of each value."""
    found = [np.searchsorted(values, pixels[:, channel]) for channel, values in enumerate(tiling._values)]
    return np.stack(found, axis=1)


@pytest.mark.parametrize(("size", "canvas", "inside", "num_tiles", "num_tokens"), SIZES)
def test_a_picture_has_the_tiles_and_tokens_of_their_processor(
    size: tuple[int, int], canvas: tuple[int, int], inside: tuple[int, int], num_tiles: int, num_tokens: int
) -> None:
    made = Tiling({}, 336)(Image.new("RGB", size, "white"))
    family = family_of(PUBLISHED)
    assert family is not None
    assert tuple(made["aspect_ratios"][0]) == canvas
    assert made["pixel_values"].shape == (num_tiles, 3, 336, 336)
    assert len(family.tokens(PUBLISHED, made)) == num_tokens
    first = made["pixel_values"][: canvas[0] * canvas[1], 0].reshape(*canvas, 336, 336).swapaxes(1, 2)
    height, width = np.nonzero(first.reshape(canvas[0] * 336, -1) == 1)
    assert (width.max() + 1, height.max() + 1) == inside


@pytest.mark.parametrize("size", LEVELS)
def test_a_picture_has_the_pixels_of_their_processor(size: tuple[int, int]) -> None:
    """But for rounding, where it is resized."""
    tiling = Tiling(SMALL, 4)
    levels = levels_of(tiling(picture(*size))["pixel_values"], tiling)
    expected = np.frombuffer(bytes.fromhex(LEVELS[size]), np.uint8).reshape(levels.shape).astype(int)
    assert np.abs(levels - expected).max() <= 1
    if size == (8, 8):
        assert (levels[:-1] == expected[:-1]).all()


def test_the_model_reads_what_it_was_trained_with() -> None:
    """Values of bfloat16."""
    values = Tiling(SMALL, 4)._values
    assert {level: tuple(values[:, level].tolist()) for level in VALUES} == VALUES


def test_a_picture_fills_the_largest_canvas_if_the_settings_say_so() -> None:
    settings = {**SMALL, "resize_to_max_canvas": True}
    made = Tiling(settings, 4)(Image.new("RGB", (3, 3), "white"))
    assert made["aspect_ratios"].tolist() == [[2, 2]]
    assert (made["pixel_values"][:, 0] == 1).all()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"size": {"height": 8, "width": 8}}, r"size must be \{'height': 4, 'width': 4\}, got"),
        ({"resample": 3}, "resample must be 2, got 3"),
        ({"do_normalize": False}, "do_normalize must be True, got False"),
    ],
)
def test_settings_that_are_not_followed_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Tiling({**SMALL, **settings}, 4)
