"""Cuts pictures into tiles as Llama 4 sees them: on the best canvas of whole tiles, and once more whole in one tile.

Called by `reader` in the place of the processor of transformers, which needs torchvision. Sizes and tiles are the same.
Pillow resizes and rounds otherwise than torchvision: of 255 levels, a value may be one beside its own (two, where a
picture is made larger). It does not write tokens (`families`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

Size = tuple[Any, Any]
"""Height and width."""

DEFAULTS: Mapping[str, Any] = {
    "size": {"height": 336, "width": 336},
    "max_patches": 16,
    "resize_to_max_canvas": False,
    "rescale_factor": 1 / 255,
    "image_mean": [0.5] * 3,
    "image_std": [0.5] * 3,
}
FIXED: Mapping[str, Any] = {
    "resample": int(Image.Resampling.BILINEAR),
    **dict.fromkeys(("do_convert_rgb", "do_resize", "do_rescale", "do_normalize"), True),
}
"""Settings with one value."""


class Tiling:
    """What the settings of a processor (`preprocessor_config.json`) make of pictures."""

    def __init__(self, settings: Mapping[str, Any], image_size: int) -> None:
        """image_size: the side of the pictures that the model computes.

        Raises ValueError for settings that it does not follow.
        """
        given = {**DEFAULTS, **FIXED, **{name: value for name, value in settings.items() if value is not None}}
        wanted = {**FIXED, "size": {"height": image_size, "width": image_size}}
        for name, value in wanted.items():
            if given[name] != value:
                raise ValueError(f"{name} must be {value}, got {given[name]}")
        self._side = image_size
        self._canvases = _canvases(int(given["max_patches"]))
        self._grows = bool(given["resize_to_max_canvas"])
        self._values = _values(given["rescale_factor"], given["image_mean"], given["image_std"])

    def __call__(self, image: Image.Image) -> dict[str, NDArray[Any]]:
        """pixel_values: `[tiles, 3, side, side]`, row by row, then the whole picture unless it is one tile.
        aspect_ratios: rows and columns of the tiles."""
        rows, columns = canvas = self._canvas((image.height, image.width))
        height, width = self._inside((image.height, image.width), canvas)
        whole = np.zeros((rows * self._side, columns * self._side, 3), np.uint8)
        whole[:height, :width] = _resized(image, height, width)
        tiles = whole.reshape(rows, self._side, columns, self._side, 3).swapaxes(1, 2).reshape(-1, *self._shape)
        if rows * columns > 1:
            tiles = np.concatenate((tiles, _resized(image, self._side, self._side)[np.newaxis]))
        pixels = np.stack([values[tiles[..., channel]] for channel, values in enumerate(self._values)], axis=1)
        return {"pixel_values": pixels, "aspect_ratios": np.array([canvas])}

    @property
    def _shape(self) -> tuple[int, int, int]:
        return self._side, self._side, 3

    def _canvas(self, size: Size) -> tuple[int, int]:
        """Rows and columns of tiles: those that the picture need be made least larger for, or least smaller; of equal
        ones, the fewest tiles."""
        # In float32, as the original does: rounding decides between equal ones.
        scales = (self._canvases * np.float32(self._side) / np.array(size, np.float32)).min(axis=1)
        larger = scales[scales >= 1]
        scale = scales.max() if self._grows or not len(larger) else larger.min()
        chosen = self._canvases[scales == scale]
        rows, columns = chosen[chosen.prod(axis=1).argmin()]
        return int(rows), int(columns)

    def _inside(self, size: Size, canvas: Size) -> tuple[int, int]:
        """The size of the picture on its canvas. It is not made larger than one tile."""
        edges: list[Any] = [np.float32(number * self._side) for number in canvas]
        if not self._grows:
            # The smaller ones are Python's, whose division is more exact; so is the original's.
            edges = [min(max(edge, self._side), most) for edge, most in zip(size, edges, strict=True)]
        scales = [edge / of for edge, of in zip(edges, size, strict=True)]
        fixed = int(scales[1] < scales[0])
        inside = [int(edge) for edge in edges]
        inside[1 - fixed] = max(1, min(int(size[1 - fixed] * scales[fixed]), inside[1 - fixed]))
        return inside[0], inside[1]


def _canvases(most: int) -> NDArray[np.float32]:
    """Rows and columns of all canvases of at most so many tiles, in the order of the original: by their ratios, those
    of the most tiles first."""
    by_ratio: dict[float, list[tuple[int, int]]] = {}
    for number in range(most, 0, -1):
        for rows in (one for one in range(1, number + 1) if number % one == 0):
            by_ratio.setdefault(rows / (number // rows), []).append((rows, number // rows))
    return np.array([one for of_ratio in by_ratio.values() for one in of_ratio], np.float32)


def _values(factor: float, mean: Sequence[float], std: Sequence[float]) -> NDArray[np.float32]:
    """What the model reads for each of the 256 levels, by channel. The original computes in bfloat16."""
    levels = _bfloat16(np.arange(256, dtype=np.float32) * np.float32(factor))
    shifted = _bfloat16(levels - _bfloat16(np.array(mean, np.float32))[:, np.newaxis])
    return _bfloat16(shifted / _bfloat16(np.array(std, np.float32))[:, np.newaxis])


def _bfloat16(x: NDArray[np.float32]) -> NDArray[np.float32]:
    """Rounded to the nearest number of bfloat16, to the even one of two."""
    bits = x.view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) & np.uint32(0xFFFF0000)).astype(np.uint32).view(np.float32)


def _resized(image: Image.Image, height: int, width: int) -> NDArray[np.uint8]:
    return np.asarray(image.resize((width, height), Image.Resampling.BILINEAR))
