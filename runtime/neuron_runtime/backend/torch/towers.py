"""Which vision towers the torch backend computes, as data: where checkpoints have them and how large they may get. A
new one is a table entry here, and a module in `vision.py`.

Called by the loader and by the memory arithmetic. Needs no torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from neuron_runtime.backend.torch.architecture import positive
from neuron_runtime.checkpoint import Checkpoint, InvalidModel, TensorInfo


class MostOfPicture(NamedTuple):
    """The largest picture: the tokens that stand for it in a prompt, and the patches that the tower computes."""

    tokens: int
    patches: int
    depth: int = 1
    """Features of a token, in numbers of the hidden size."""


@dataclass(frozen=True, slots=True)
class TowerFamily:
    """vision: the `model_type` of the `vision_config`, any of these; empty: it has none. modules: the parts of the
    model that make features of pictures, by the names that transformers gives them. most: from config.json."""

    vision: tuple[str, ...]
    modules: tuple[str, ...]
    most: Callable[[Mapping[str, Any]], MostOfPicture]
    feeds_whole: bool = False
    """See `BackendLimits.feeds_pictures_whole`."""


class TowerNeeds(NamedTuple):
    """What pictures take of memory. weights: numbers of the model's dtype. scratch: bytes, while one is computed."""

    most: MostOfPicture
    weights: int
    scratch: int
    feeds_whole: bool


def _pixtral(config: Mapping[str, Any]) -> MostOfPicture:
    vision = config["vision_config"]
    side, patch = positive(vision, "image_size", 1024), positive(vision, "patch_size", 16)
    merged = side // (patch * positive(config, "spatial_merge_size", 1))
    # One more token ends each line.
    return MostOfPicture(merged * (merged + 1), (side // patch) ** 2)


def _mistral3(config: Mapping[str, Any]) -> MostOfPicture:
    vision = {"image_size": 1540, "patch_size": 14, **config["vision_config"]}
    return _pixtral({"spatial_merge_size": 2, **config, "vision_config": vision})


MOST_TOKENS = 4096
"""Of a picture of any size."""


def _qwen(config: Mapping[str, Any]) -> MostOfPicture:
    text = config.get("text_config") or config
    tokens = min(MOST_TOKENS, positive(text, "max_position_embeddings", 32768))
    return MostOfPicture(tokens, tokens * merge_of(config) ** 2)


def _qwen3(config: Mapping[str, Any]) -> MostOfPicture:
    deeper = config["vision_config"].get("deepstack_visual_indexes", (8, 16, 24))
    if not isinstance(deeper, list | tuple):
        raise InvalidModel(f"config.json: deepstack_visual_indexes must be a list of numbers of layers, got {deeper!r}")
    return _qwen(config)._replace(depth=1 + len(deeper))


MOST_TILES = 16
"""Of a picture, without the one that has all of it."""


def _llama4(config: Mapping[str, Any]) -> MostOfPicture:
    """Tiles are computed one by one. A picture has a token more behind each but the last, and three others."""
    vision = config["vision_config"]
    ratio = vision.get("pixel_shuffle_ratio", 0.5)
    if isinstance(ratio, bool) or not isinstance(ratio, int | float) or not 0 < ratio <= 1:
        raise InvalidModel(f"config.json: pixel_shuffle_ratio must be above 0 and at most 1, got {ratio!r}")
    patches = (positive(vision, "image_size", 448) // positive(vision, "patch_size", 14)) ** 2
    tokens = patches // round(1 / ratio**2)
    return MostOfPicture((MOST_TILES + 1) * tokens + MOST_TILES + 3, patches + 1)


def _gemma3(config: Mapping[str, Any]) -> MostOfPicture:
    vision = config["vision_config"]
    patches = (positive(vision, "image_size", 224) // positive(vision, "patch_size", 16)) ** 2
    return MostOfPicture(positive(config, "mm_tokens_per_image", 256), patches)


def merge_of(config: Mapping[str, Any]) -> int:
    """Patches that are merged, along each side."""
    return positive(config["vision_config"], "spatial_merge_size", 2)


_OF_LLAVA = ("vision_tower", "multi_modal_projector")

TOWERS: Mapping[str, TowerFamily] = {
    "LlavaForConditionalGeneration": TowerFamily(("pixtral",), _OF_LLAVA, _pixtral),
    "Mistral3ForConditionalGeneration": TowerFamily(("pixtral",), _OF_LLAVA, _mistral3),
    "Llama4ForConditionalGeneration": TowerFamily(
        ("llama4_vision_model",), ("vision_model", "multi_modal_projector"), _llama4
    ),
    "Gemma3ForConditionalGeneration": TowerFamily(("siglip_vision_model",), _OF_LLAVA, _gemma3, feeds_whole=True),
    "Qwen3VLForConditionalGeneration": TowerFamily(("", "qwen3_vl", "qwen3_vl_vision"), ("visual",), _qwen3),
    "Qwen2_5_VLForConditionalGeneration": TowerFamily(("", "qwen2_5_vl", "qwen2_5_vl_vision"), ("visual",), _qwen),
}
"""By the class named in `architectures` of config.json."""


def tower_of(config: Mapping[str, Any]) -> TowerFamily | None:
    """The tower that computes pictures for a model; None: it has none, or one that is not served."""
    match config:
        case {"architectures": [str(name), *_], "vision_config": {**vision}} if (
            name in TOWERS and vision.get("model_type", "") in TOWERS[name].vision
        ):
            return TOWERS[name]
    return None


def tower_tensors(checkpoint: Checkpoint, tower: TowerFamily) -> Checkpoint:
    """The tensors of the tower alone, by the names of transformers without what it puts before all of a model."""
    prefixes = tuple(f"{name}." for name in tower.modules)
    found: dict[str, TensorInfo] = {}
    for name, info in checkpoint.tensors.items():
        if (ours := name.removeprefix("model.")).startswith(prefixes):
            found[ours] = info
    return replace(checkpoint, tensors=found)


def needs_of_tower(checkpoint: Checkpoint, tower: TowerFamily, dtype_bytes: int) -> TowerNeeds:
    """checkpoint: with the tensors of the tower alone."""
    vision, most = checkpoint.config["vision_config"], tower.most(checkpoint.config)
    widths = 8 * positive(vision, "hidden_size", 1024) + 3 * positive(vision, "intermediate_size", 4096)
    scratch = most.patches * widths * 4 + most.patches**2 * dtype_bytes
    weights = sum(math.prod(info.shape) for info in checkpoint.tensors.values())
    return TowerNeeds(most, weights, scratch, tower.feeds_whole)


def image_token_of(config: Mapping[str, Any]) -> int:
    """The token whose places take features. Raises InvalidModel if config.json does not name it."""
    for name in ("image_token_id", "image_token_index"):
        token = config.get(name)
        if isinstance(token, int) and not isinstance(token, bool) and token >= 0:
            return token
    raise InvalidModel("config.json: image_token_index must be the number of the token that stands for pictures")
