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

PATCHES, CHUNKS = "patches", "chunks"
LADDERS = {PATCHES: tuple(1024 << at for at in range(8)), CHUNKS: (8, 28)}
"""Sizes below the largest. One picture of 512 x 512 pixels has 1,024 patches of 16."""
MOST_CHUNKS = 88
"""NxD Inference's largest."""
CHUNKS_OF_PICTURE = 17
"""Most that the processor of Llama 4 makes of a picture: 16 tiles, and the whole."""
LEFT_OUT = {
    PATCHES: {"image_size": 1024, "patch_size": 16, "hidden_size": 1024, "num_attention_heads": 16},
    CHUNKS: {"image_size": 448, "patch_size": 14, "hidden_size": 768, "num_attention_heads": 16},
}
"""Defaults of transformers, which a config.json need not name."""
IMAGE_TOKEN = {PATCHES: {"image_token_index": 32000}, CHUNKS: {"image_token_index": 200092}}
LAYERS, PIXEL_SHUFFLE = {PATCHES: 24, CHUNKS: 34}, 0.5


@dataclass(frozen=True, kw_only=True)
class Vision:
    """What decides the graphs of the encoder, and the limits of pictures."""

    counts: Literal["patches", "chunks"]
    buckets: tuple[int, ...]
    """Sizes of a call, which computes all pictures of a prompt. Ascending."""
    unit_tokens: int
    """Tokens of a patch or chunk."""
    max_pictures: int
    max_picture_tokens: int
    """With those that separate lines or tiles."""
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

    def graph(self, num_tokens: int) -> Encode:
        """The one for pictures with so many features. Raises ValueError if there is none."""
        size = at_least(self.buckets, -(-num_tokens // self.unit_tokens))
        return Encode(size, size * self.unit_tokens)

    @property
    def graphs(self) -> tuple[Encode, ...]:
        return tuple(Encode(size, size * self.unit_tokens) for size in self.buckets)


def encoder_of(model: Mapping[str, Any], counts: Literal["patches", "chunks"]) -> Mapping[str, Any]:
    """The part of config.json that describes it."""
    given = model.get("vision_config")
    return LEFT_OUT[counts] | (dict(given) if isinstance(given, Mapping) else {})


def check_encoder(model: Mapping[str, Any], counts: Literal["patches", "chunks"]) -> None:
    """Raises FatalError (UNSUPPORTED_ARCHITECTURE) unless NxD Inference computes what config.json says."""
    if counts == CHUNKS:
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
    counts: Literal["patches", "chunks"],
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
    size, patch = number_of(encoder, "image_size"), number_of(encoder, "patch_size")
    # Cores that do not share its heads compute them again, or another part of the chunks.
    cores = math.gcd(tensor, number_of(encoder, "num_attention_heads"))
    pictures, side = max(asked, 1), size // patch
    if counts == PATCHES:
        unit, step, of_one = 1, 1, side * side
        largest = min(pictures * of_one, longest)
        most_tokens = min(of_one, largest) * (side + 1) // side
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
        image_token=number_of({**IMAGE_TOKEN[counts], **model}, "image_token_index", 0),
        side=side,
        patch=patch,
        layers=int(encoder.get("num_hidden_layers") or LAYERS[counts]),
        hidden=number_of(encoder, "hidden_size"),
        neuron_config={**arguments, **shared},
    )
