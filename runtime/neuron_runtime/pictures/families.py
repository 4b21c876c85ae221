"""Which models see pictures, and what stands for a picture in their prompts: a row per family.

Read by `reader`, which knows a model by its config.json. Data and pure functions; no torch, no transformers. What a
backend can compute is in its own tables.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Config = Mapping[str, Any]
"""config.json."""
Made = Mapping[str, Any]
"""Arrays of one picture, by the names of the model's processor."""


@dataclass(frozen=True)
class Family:
    """How models of one kind have pictures in their prompts."""

    placeholder: str
    """What a chat template writes for a picture, and whoever writes a prompt."""
    seed: str
    """The token in the text whose place the tokens of the picture take."""
    feature: str
    """The token that takes features: the model's image token."""
    tokens: Callable[[Config, Made], Sequence[str]]
    """The tokens of a picture."""
    tensors: tuple[str, ...]
    """What the model's encoder reads."""
    replaced: str = ""
    """What the placeholder becomes in the text; empty: it stays."""
    alone: str = ""
    """A picture in a text, for templates that take only texts; empty: the placeholder."""
    opening: str = ""
    """The token right before each picture, and nowhere else; empty: none is needed."""
    options: Callable[[Config], dict[str, Any]] = lambda config: {}
    """For the model's processor, beyond its own settings."""
    is_tiled: bool = False
    """`tiling` makes what the encoder reads; otherwise the processor of transformers."""

    @property
    def marks(self) -> frozenset[str]:
        """The texts that only pictures may put into a prompt."""
        return frozenset(filter(None, (self.placeholder, self.seed, self.feature, self.opening)))

    @property
    def in_text(self) -> str:
        """What stands for a picture in a text."""
        return self.alone or self.placeholder


def _patch(config: Config) -> int:
    return int(config["vision_config"]["patch_size"]) * int(config.get("spatial_merge_size", 1))


def _rows(config: Config, made: Made) -> list[str]:
    """Rows of patches, each with a mark behind it."""
    height, width = (int(edge) // _patch(config) for edge in made["image_sizes"][0])
    return [*["[IMG]"] * width, "[IMG_BREAK]"] * (height - 1) + [*["[IMG]"] * width, "[IMG_END]"]


def _merged(config: Config, made: Made) -> list[str]:
    frames, height, width = map(int, made["image_grid_thw"][0])
    return ["<|image_pad|>"] * (frames * height * width // int(config["vision_config"]["spatial_merge_size"]) ** 2)


def _tiles(config: Config, made: Made) -> list[str]:
    """Tiles row by row, then the whole picture in one tile."""
    vision = config["vision_config"]
    side, ratio = int(vision["image_size"]) // int(vision["patch_size"]), float(vision["pixel_shuffle_ratio"])
    tile = ["<|patch|>"] * (side * side // round(1 / ratio**2))
    rows, columns = map(int, made["aspect_ratios"][0])
    row = [*tile, "<|tile_x_separator|>"] * (columns - 1) + [*tile, "<|tile_y_separator|>"]
    return ["<|image_start|>", *(row * rows if rows * columns > 1 else ()), "<|image|>", *tile, "<|image_end|>"]


def _fixed(config: Config, made: Made) -> list[str]:
    return ["<image_soft_token>"] * int(config.get("mm_tokens_per_image", 256))


_PIXTRAL = Family(
    placeholder="[IMG]",
    seed="[IMG]",
    feature="[IMG]",
    tokens=_rows,
    tensors=("pixel_values", "image_sizes"),
    options=lambda config: {"patch_size": {"height": _patch(config), "width": _patch(config)}},
)
_QWEN = Family(
    placeholder="<|image_pad|>",
    seed="<|image_pad|>",
    feature="<|image_pad|>",
    tokens=_merged,
    tensors=("pixel_values", "image_grid_thw"),
    alone="<|vision_start|><|image_pad|><|vision_end|>",
    opening="<|vision_start|>",
)
_LLAMA4 = Family(
    placeholder="<|image|>",
    seed="<|image|>",
    feature="<|patch|>",
    tokens=_tiles,
    tensors=("pixel_values",),
    is_tiled=True,
)
_GEMMA3 = Family(
    placeholder="<start_of_image>",
    seed="<image_soft_token>",
    feature="<image_soft_token>",
    tokens=_fixed,
    tensors=("pixel_values",),
    replaced="\n\n<start_of_image><image_soft_token><end_of_image>\n\n",
    # As transformers, whatever the settings say, unless a caller asks for it.
    options=lambda config: {"do_pan_and_scan": False},
)

FAMILIES: Mapping[tuple[str, str], Family] = {
    ("LlavaForConditionalGeneration", "pixtral"): _PIXTRAL,
    ("Mistral3ForConditionalGeneration", "pixtral"): _PIXTRAL,
    ("Llama4ForConditionalGeneration", "llama4_vision_model"): _LLAMA4,
    **{("Qwen2_5_VLForConditionalGeneration", kind): _QWEN for kind in ("", "qwen2_5_vl", "qwen2_5_vl_vision")},
    **{("Qwen3VLForConditionalGeneration", kind): _QWEN for kind in ("", "qwen3_vl", "qwen3_vl_vision")},
    ("Qwen3VLMoeForConditionalGeneration", "qwen3_vl_moe"): _QWEN,
    ("Gemma3ForConditionalGeneration", "siglip_vision_model"): _GEMMA3,
}
"""By the model's architecture and the `model_type` of its vision tower."""


def family_of(config: Config) -> Family | None:
    """None: the model sees no pictures, or is none of these."""
    vision = config.get("vision_config")
    kind = vision.get("model_type", "") if isinstance(vision, Mapping) else None
    found = (FAMILIES.get((name, str(kind))) for name in config.get("architectures") or ())
    return next((family for family in found if family is not None), None)
