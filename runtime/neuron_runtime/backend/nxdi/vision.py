"""The encoder of a model that sees pictures: its sizes, and how much of a picture a call of it takes.

Called by `models` and `settings`. Pure: what a call is given is made by `pixels`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from neuron_runtime.backend.neuron.model_config import number_of
from neuron_runtime.backend.neuron.step_graphs import Encode, at_least
from neuron_runtime.errors import ExitCode, FatalError

Counts = Literal["patches", "chunks", "grids"]
"""What an encoder is given of a picture: patches, chunks, or patches with their grid, squares of which are a token."""
PATCHES, CHUNKS, GRIDS = "patches", "chunks", "grids"
_LADDER = tuple(1024 << at for at in range(8))
LADDERS = {PATCHES: _LADDER, CHUNKS: (8, 28), GRIDS: _LADDER}
"""Sizes below the largest. One picture of 512 x 512 pixels has 1,024 patches of 16."""
MOST_PATCHES = 16384
"""Most of a call with grids, by AWS's release notes."""
MOST_CHUNKS = 88
"""NxD Inference's largest."""
CHUNKS_OF_PICTURE = 17
"""Most that the processor of Llama 4 makes of a picture: 16 tiles, and the whole."""
LEFT_OUT: Mapping[str, dict[str, Any]] = {
    PATCHES: {"image_size": 1024, "patch_size": 16, "hidden_size": 1024, "num_attention_heads": 16},
    CHUNKS: {"image_size": 448, "patch_size": 14, "hidden_size": 768, "num_attention_heads": 16},
    GRIDS: {
        "patch_size": 16,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "in_channels": 3,
        "num_heads": 16,
        "hidden_size": 1152,
        "depth": 27,
        "deepstack_visual_indexes": [8, 16, 24],
        "num_position_embeddings": 2304,
    },
}
"""Defaults of transformers, which a config.json need not name."""
IMAGE_TOKEN = {PATCHES: {"image_token_index": 32000}, CHUNKS: {"image_token_index": 200092}}
FOR_PICTURES = {"image_token_id": 151655, "vision_start_token_id": 151652}
"""The same of models with grids, and the token before a picture."""
LAYERS, PIXEL_SHUFFLE = {PATCHES: 24, CHUNKS: 34}, 0.5
FUSED = {"fused_qkv": True}
"""Without it, the encoder of grids does not find its weights."""


@dataclass(frozen=True, kw_only=True)
class Vision:
    """What decides the graphs of the encoder, and the limits of pictures."""

    counts: Counts
    buckets: tuple[int, ...]
    """Sizes of a call, which computes all pictures of a prompt. Ascending."""
    unit_tokens: int
    """Tokens of a patch or chunk, or of a square."""
    max_pictures: int
    max_picture_tokens: int
    """With those that separate lines or tiles."""
    max_tokens: int
    """Of all pictures of a prompt; 0: they may fill it."""
    image_token: int
    """Stands for each of the features of a picture."""
    side: int
    """Patches, or pixels of a chunk, along an edge of the largest picture."""
    patch: int
    """Pixels along an edge of a patch."""
    layers: int
    hidden: int
    neuron_config: Mapping[str, Any]
    """All arguments of its NeuronConfig, as plain JSON."""
    merge: int = 1
    """Patches along an edge of a square."""
    numbers_of_patch: int = 0
    """Where pictures come as patches."""
    opening: int = -1
    """The token before each picture; -1: none is needed."""
    num_deeper: int = 0
    """Layers of the text that take features of their own."""

    @property
    def turns(self) -> bool:
        """Whether what stands behind a picture turns by another position than its own."""
        return self.counts == GRIDS

    @property
    def spare(self) -> int:
        """Places at the end of a prompt's graph that no prompt fills: for what stands for no feature, and, where the
        places of features are found by their token, for another one."""
        return 2 if self.counts == GRIDS else 1

    def graph(self, num_tokens: int) -> Encode:
        """The one for pictures with so many features. Raises ValueError if there is none."""
        units = -(-num_tokens // self.unit_tokens) * self.merge**2
        return self._encode(at_least(self.buckets, units))

    @property
    def graphs(self) -> tuple[Encode, ...]:
        return tuple(map(self._encode, self.buckets))

    def _encode(self, size: int) -> Encode:
        return Encode(size, size // self.merge**2 * self.unit_tokens)


def encoder_of(model: Mapping[str, Any], counts: Counts) -> Mapping[str, Any]:
    """The part of config.json that describes it."""
    given = model.get("vision_config")
    return LEFT_OUT[counts] | (dict(given) if isinstance(given, Mapping) else {})


def check_encoder(model: Mapping[str, Any], counts: Counts) -> None:
    """Raises FatalError (UNSUPPORTED_ARCHITECTURE) unless NxD Inference computes what config.json says."""
    if counts == GRIDS and not encoder_of(model, counts)["deepstack_visual_indexes"]:
        message = "config.json: vision_config.deepstack_visual_indexes is empty, which NxD Inference cannot compute"
        raise FatalError(ExitCode.UNSUPPORTED_ARCHITECTURE, f"{message}: use another backend")
    if counts != PATCHES:
        return
    text = model.get("text_config")
    kind = text.get("model_type", "llama") if isinstance(text, Mapping) else "llama"
    wanted = {
        "vision_config.model_type": (encoder_of(model, counts).get("model_type", "clip_vision_model"), ("pixtral",)),
        "text_config.model_type": (kind, ("mistral", "llama")),
        "vision_feature_layer": (model.get("vision_feature_layer", -2), (-1,)),
        "vision_feature_select_strategy": (model.get("vision_feature_select_strategy", "default"), ("full",)),
    }
    for name, (value, computed) in wanted.items():
        if value not in computed:
            message = f"config.json: {name} is {value!r}, and NxD Inference computes {' or '.join(map(repr, computed))}"
            raise FatalError(ExitCode.UNSUPPORTED_ARCHITECTURE, f"{message} alone: use another backend")


def vision_of(
    model: Mapping[str, Any],
    counts: Counts,
    *,
    asked: int,
    longest: int,
    tensor: int,
    arguments: Mapping[str, Any],
) -> Vision:
    """The encoder of a model.

    Args:
        asked: pictures of a prompt.
        longest: tokens of the longest prompt.
        tensor: cores of the model.
        arguments: of its NeuronConfig, which are those of the text too.

    Raises InvalidModel if config.json lacks a number.
    """
    encoder = encoder_of(model, counts)
    heads, layers = ("num_heads", "depth") if counts == GRIDS else ("num_attention_heads", "num_hidden_layers")
    patch, merge, more = number_of(encoder, "patch_size"), 1, dict[str, Any]()
    # Cores that do not share its heads compute them again, or another part of the chunks.
    cores = math.gcd(tensor, number_of(encoder, heads))
    pictures, size = max(asked, 1), patch if counts == GRIDS else number_of(encoder, "image_size")
    side, most_of_all = size // patch, 0
    if counts == PATCHES:
        unit, step, of_one = 1, 1, side * side
        largest = min(pictures * of_one, longest)
        most_tokens = min(of_one, largest) * (side + 1) // side
    elif counts == GRIDS:
        merge = number_of(encoder, "spatial_merge_size")
        unit, step, side = 1, merge * merge, math.isqrt(MOST_PATCHES)
        largest = min(MOST_PATCHES, longest * step)
        most_tokens = most_of_all = largest // step
        more = {
            "numbers_of_patch": patch**2
            * number_of(encoder, "temporal_patch_size")
            * number_of(encoder, "in_channels"),
            "opening": number_of({**FOR_PICTURES, **model}, "vision_start_token_id", 0),
            "num_deeper": len(encoder["deepstack_visual_indexes"]),
        }
    else:
        unit = side * side // round(1 / float(encoder.get("pixel_shuffle_ratio") or PIXEL_SHUFFLE) ** 2)
        side, step, of_one = size, 2 * (tensor // cores), CHUNKS_OF_PICTURE
        pictures = min(pictures, MOST_CHUNKS // of_one)
        largest = max(1, min(pictures * of_one, longest // unit))
        most_tokens = (unit + 1) * min(of_one, largest) + 2
    sizes = (*(one for one in LADDERS[counts] if one < largest), largest)
    buckets = tuple(sorted({-(-one // step) * step for one in sizes}))
    buckets = buckets if asked else buckets[:1]
    shared = {
        "tp_degree": cores,
        "world_size": tensor,
        "batch_size": 1,
        **(FUSED if counts == GRIDS else {}),
        "seq_len": buckets[-1] * unit,
        "enable_bucketing": True,
        "buckets": list(buckets),
    }
    return Vision(
        counts=counts,
        buckets=buckets,
        unit_tokens=unit,
        max_pictures=min(pictures, asked),
        max_picture_tokens=most_tokens,
        max_tokens=most_of_all,
        image_token=_image_token(model, counts),
        side=side,
        patch=patch,
        layers=int(encoder.get(layers) or LAYERS[counts]),
        hidden=number_of(encoder, "hidden_size"),
        neuron_config={**arguments, **shared},
        merge=merge,
        **more,
    )


def needs_of(model: Mapping[str, Any], counts: Counts, hidden: int) -> dict[str, Any]:
    """What the encoder of a model takes of memory, whatever its prompts: fields of `EncoderFacts`.

    hidden: size of the text. Raises InvalidModel if config.json lacks a number.
    """
    # More tokens than any prompt has, so that nothing but the encoder bounds a call.
    vision = vision_of(model, counts, asked=MOST_CHUNKS, longest=2**40, tensor=1, arguments={})
    merged, features = vision.merge**2, (1 + vision.num_deeper) * hidden
    if counts == CHUNKS:
        together = (vision.side // vision.patch) ** 2
        per_token, scores, squared = together // vision.unit_tokens, together * together // vision.unit_tokens, 0
        of_picture, most = CHUNKS_OF_PICTURE, vision.max_pictures * CHUNKS_OF_PICTURE
    else:
        per_token, scores, squared = merged, 0, merged**2
        of_picture, most = (vision.side**2, 0) if counts == PATCHES else (MOST_PATCHES, MOST_PATCHES)
    return {
        "layers": vision.layers,
        "numbers": 6 * vision.hidden * per_token + features,
        "scores": scores,
        "squared_scores": squared,
        "picture_tokens": of_picture * vision.unit_tokens // merged,
        "most_tokens": most * vision.unit_tokens // merged,
        "sizes": tuple(size * vision.unit_tokens // merged for size in LADDERS[counts]),
    }


def _image_token(model: Mapping[str, Any], counts: Counts) -> int:
    if counts == GRIDS:
        return number_of({**FOR_PICTURES, **model}, "image_token_id", 0)
    return number_of({**IMAGE_TOKEN[counts], **model}, "image_token_index", 0)
