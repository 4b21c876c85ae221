"""Pictures as arguments of `forward()`, for the call that computes their prompt.

Used by `inputs` on the engine's thread, and to warm up.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from safetensors.torch import load, save

from neuron_runtime.backend.neuron.device import Application
from neuron_runtime.backend.neuron.step_graphs import Encode
from neuron_runtime.backend.nxdi.vision import CHUNKS, GRIDS, PATCHES, Vision
from neuron_runtime.backend.slots import IntArray
from neuron_runtime.backend_protocol import IllegalBatch
from neuron_runtime.core import Picture

NUDGE = 2.0**-20
"""What is added to one number of pictures whose sum is 0, which NxD Inference takes for no pictures, and ignores. It is
lost where numbers are rounded to bfloat16, after they were summed."""


def places_of(vision: Vision, pictures: Iterable[Picture], tokens: Sequence[int] | IntArray) -> IntArray:
    """Positions of the tokens that take features, in order."""
    of_pictures = [
        one.start + np.flatnonzero(np.asarray(tokens[one.start : one.end]) == vision.image_token) for one in pictures
    ]
    return np.concatenate(of_pictures) if of_pictures else np.zeros(0, dtype=np.int64)


def arguments_of(vision: Vision, pictures: Sequence[Picture], places: IntArray, end: int, width: int) -> dict[str, Any]:
    """What `forward()` gets of pictures.

    places: see `places_of`. end: of the prompt, which is padded to `width`.

    Raises IllegalBatch if pixels and tokens do not fit each other.
    """
    tensors = [load(bytes(one.pixels)) for one in pictures]
    try:
        arguments, num_features = _MADE[vision.counts](vision, tensors)
    except (KeyError, RuntimeError, IndexError, ValueError) as error:
        raise IllegalBatch(f"pixels of a picture that the model's processor does not make: {error}") from error
    if num_features != len(places):
        raise IllegalBatch(f"{len(places)} tokens stand for pictures of {num_features} features")
    if vision.counts == GRIDS:
        return arguments  # it finds the places by their token
    mask = torch.zeros((1, width, 1), dtype=torch.bool)
    mask[0, places] = True
    if takes_another(places):
        mask[0, end] = True
    return {**arguments, "vision_mask": mask}


def takes_another(places: IntArray) -> bool:
    """NxD Inference would take one place for none. Behind the prompt there is always another, which nobody reads."""
    return len(places) == 1


def shift_of(vision: Vision, arguments: Mapping[str, Any]) -> int:
    """By how much the positions that turn what follows these pictures differ from the running index: each takes as many
    as its longer side has squares."""
    grids = arguments["image_grid_thw"][:, 1:] // vision.merge
    return int((grids.max(dim=1).values - grids.prod(dim=1)).sum())


def turning(application: Application) -> Application:
    """One that takes the shifts of the rows of a decode call, which NxD Inference keeps of its last prompt alone."""

    def call(*, rope_deltas: torch.Tensor | None = None, **arguments: Any) -> Any:
        if rope_deltas is not None:
            application.rope_deltas = rope_deltas  # type: ignore[attr-defined]
        return application(**arguments)

    return call


def _patches(vision: Vision, tensors: Sequence[dict[str, torch.Tensor]]) -> tuple[dict[str, Any], int]:
    """Pictures of several sizes are padded to the largest; lists, because it takes each row's alone."""
    sizes = torch.cat([one["image_sizes"] for one in tensors]).to(torch.int32)
    height, width = sizes.max(dim=0).values.tolist()
    pixels = torch.zeros((len(tensors), 3, height, width))
    for at, one in enumerate(tensors):
        given = one["pixel_values"][0].float()
        pixels[at, :, : given.shape[1], : given.shape[2]] = given
    num_features = int((sizes // vision.patch).prod(dim=1).sum())
    return {"pixel_values": [_noticed(pixels)], "image_sizes": [sizes]}, num_features


def _chunks(vision: Vision, tensors: Sequence[dict[str, torch.Tensor]]) -> tuple[dict[str, Any], int]:
    pixels = torch.cat([one["pixel_values"].float() for one in tensors])
    return {"pixel_values": _noticed(pixels)}, len(pixels) * vision.unit_tokens


def _grids(vision: Vision, tensors: Sequence[dict[str, torch.Tensor]]) -> tuple[dict[str, Any], int]:
    pixels = torch.cat([one["pixel_values"].float() for one in tensors])
    grids = torch.cat([one["image_grid_thw"] for one in tensors]).to(torch.int64)
    num_patches = int(grids.prod(dim=1).sum())
    if len(pixels) != num_patches:
        raise ValueError(f"{len(pixels)} patches in grids of {num_patches}")
    return {"pixel_values": _noticed(pixels), "image_grid_thw": grids}, num_patches // vision.merge**2


_MADE: Mapping[str, Callable[[Vision, Sequence[dict[str, torch.Tensor]]], tuple[dict[str, Any], int]]] = {
    PATCHES: _patches,
    CHUNKS: _chunks,
    GRIDS: _grids,
}
"""Arguments of pictures, and the number of their features."""


def _noticed(pixels: torch.Tensor) -> torch.Tensor:
    """The pixels, or if they sum to 0 almost the same."""
    amount = NUDGE
    while pixels.sum() == 0:
        pixels = pixels.clone()
        pixels.view(-1)[0] += amount
        amount *= 2
    return pixels


def filling(vision: Vision, graph: Encode, longest: int) -> Iterator[Picture]:
    """Pictures, one behind the other, for which the encoder takes this graph, if a prompt can be so long."""
    start = int(vision.opening >= 0)
    size = min(graph.size, (longest - start) * vision.merge**2 // vision.unit_tokens)
    shapes: Iterable[tuple[int, dict[str, torch.Tensor]]]
    if vision.counts == GRIDS:
        grid = torch.tensor([[1, vision.merge, size // vision.merge]])
        shapes = [(size, {"pixel_values": torch.ones((size, vision.numbers_of_patch)), "image_grid_thw": grid})]
    elif vision.counts == CHUNKS:
        shapes = [(size, {"pixel_values": torch.ones((size, 3, vision.side, vision.side))})]
    else:
        below = max((one for one in vision.buckets if one < size), default=0)
        # No picture is wider or higher than `side`.
        columns = next((one for one in range(vision.side, 0, -1) if size // one * one > below), 1)
        lines = range(0, size // columns, vision.side)
        shapes = [_ones(vision, min(size // columns - line, vision.side), columns) for line in lines]
    for num_units, tensors in shapes:
        pixels = save(tensors)
        num_tokens = num_units * vision.unit_tokens // vision.merge**2
        yield Picture(hashlib.sha256(pixels).hexdigest(), start, num_tokens, memoryview(pixels))
        start += num_tokens


def _ones(vision: Vision, rows: int, columns: int) -> tuple[int, dict[str, torch.Tensor]]:
    size = (rows * vision.patch, columns * vision.patch)
    return rows * columns, {"pixel_values": torch.ones((1, 3, *size)), "image_sizes": torch.tensor([size])}
