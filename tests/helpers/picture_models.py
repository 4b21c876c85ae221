"""Folders of models that see pictures, without weights: config, tokenizer, chat template, settings of the processor.

The tokens and templates have the form of the published models; sizes are small.
"""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from PIL import Image
from tokenizers import AddedToken

from helpers.chat_model import BOS, EOS, byte_level_tokenizer

_PARTS = (
    "{{% for part in message['content'] %}}{{% if part['type'] == 'text' %}}{{{{ part['text'] }}}}"
    "{{% elif part['type'] == 'image' %}}{picture}{{% endif %}}{{% endfor %}}"
)


def _template(picture: str, before: str, after: str) -> str:
    """A chat template whose messages have a text, or parts."""
    parts = _PARTS.format(picture=picture)
    return (
        "{{ bos_token }}{% for message in messages %}" + before + "{% if message['content'] is string %}"
        "{{ message['content'] }}{% else %}" + parts + "{% endif %}" + after + "{% endfor %}"
    )


@dataclass(frozen=True)
class PictureModel:
    """One family with small numbers."""

    config: Mapping[str, Any]
    preprocessor: Mapping[str, Any]
    template: str
    tokens: tuple[str, ...]
    processor: Mapping[str, Any] = field(default_factory=dict)
    """Of processor_config.json."""


PIXTRAL = PictureModel(
    config={
        "architectures": ["LlavaForConditionalGeneration"],
        "model_type": "llava",
        "vision_config": {"model_type": "pixtral", "patch_size": 4, "image_size": 32},
    },
    preprocessor={
        "image_processor_type": "PixtralImageProcessor",
        "size": {"longest_edge": 32},
        "patch_size": {"height": 4, "width": 4},
    },
    template=_template("[IMG]", "{% if message['role'] == 'user' %}[INST]{% endif %}", "[/INST]"),
    tokens=("[INST]", "[/INST]", "[IMG]", "[IMG_BREAK]", "[IMG_END]"),
    processor={"processor_class": "PixtralProcessor", "patch_size": 4},
)
MISTRAL3 = PictureModel(
    config={
        "architectures": ["Mistral3ForConditionalGeneration"],
        "model_type": "mistral3",
        "spatial_merge_size": 2,
        "vision_config": {"model_type": "pixtral", "patch_size": 2, "image_size": 32},
    },
    preprocessor={**PIXTRAL.preprocessor, "patch_size": {"height": 2, "width": 2}},
    template=PIXTRAL.template,
    tokens=PIXTRAL.tokens,
    processor={"processor_class": "PixtralProcessor", "patch_size": 2, "spatial_merge_size": 2},
)
QWEN = PictureModel(
    config={
        "architectures": ["Qwen2_5_VLForConditionalGeneration"],
        "model_type": "qwen2_5_vl",
        "vision_config": {"model_type": "qwen2_5_vl", "patch_size": 4, "spatial_merge_size": 2},
    },
    preprocessor={
        "image_processor_type": "Qwen2VLImageProcessor",
        "min_pixels": 64,
        "max_pixels": 1024,
        "patch_size": 4,
        "temporal_patch_size": 2,
        "merge_size": 2,
    },
    template=_template("<|vision_start|><|image_pad|><|vision_end|>", "<|start|>{{ message['role'] }}\n", "<|end|>\n"),
    tokens=("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"),
    processor={"processor_class": "Qwen2_5_VLProcessor"},
)
GEMMA3 = PictureModel(
    config={
        "architectures": ["Gemma3ForConditionalGeneration"],
        "model_type": "gemma3",
        "mm_tokens_per_image": 4,
        "vision_config": {"model_type": "siglip_vision_model", "patch_size": 4, "image_size": 16},
    },
    preprocessor={
        "image_processor_type": "Gemma3ImageProcessor",
        "size": {"height": 16, "width": 16},
        "image_seq_length": 4,
        "do_pan_and_scan": True,
    },
    template=_template("<start_of_image>", "<|start|>{{ message['role'] }}\n", "<|end|>\n"),
    tokens=("<start_of_image>", "<image_soft_token>", "<end_of_image>"),
    processor={"processor_class": "Gemma3Processor", "image_seq_length": 4},
)
QWEN3 = replace(
    QWEN,
    config={
        "architectures": ["Qwen3VLForConditionalGeneration"],
        "model_type": "qwen3_vl",
        "vision_config": {"model_type": "qwen3_vl", "patch_size": 4, "spatial_merge_size": 2},
    },
)
LLAMA4 = PictureModel(
    config={
        "architectures": ["Llama4ForConditionalGeneration"],
        "model_type": "llama4",
        "vision_config": {
            "model_type": "llama4_vision_model",
            "image_size": 16,
            "patch_size": 4,
            "pixel_shuffle_ratio": 0.5,
        },
    },
    preprocessor={
        "image_processor_type": "Llama4ImageProcessorFast",
        "size": {"height": 16, "width": 16},
        "max_patches": 6,
        "resample": 2,
    },
    template=_template("<|image|>", "<|header_start|>{{ message['role'] }}<|header_end|>\n\n", "<|eot|>"),
    tokens=(
        *("<|header_start|>", "<|header_end|>", "<|eot|>", "<|image_start|>", "<|image_end|>", "<|image|>"),
        *("<|patch|>", "<|tile_x_separator|>", "<|tile_y_separator|>"),
    ),
    processor={"processor_class": "Llama4Processor", "patch_size": 4},
)
MODELS = {
    "pixtral": PIXTRAL,
    "mistral3": MISTRAL3,
    "qwen2.5-vl": QWEN,
    "qwen3-vl": QWEN3,
    "gemma3": GEMMA3,
    "llama4": LLAMA4,
}


def write_picture_model(folder: Path, model: PictureModel = PIXTRAL, max_length: int = 4096) -> Path:
    """Returns the folder."""
    folder.mkdir(exist_ok=True)
    tokenizer = byte_level_tokenizer()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in model.tokens])
    tokenizer.save(str(folder / "tokenizer.json"))
    sizes = {"vocab_size": tokenizer.get_vocab_size(), "max_position_embeddings": max_length}
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "chat_template": model.template,
        "model_max_length": max_length,
    }
    files = {
        "tokenizer_config.json": settings,
        "config.json": {**model.config, **sizes},
        "preprocessor_config.json": model.preprocessor,
        "processor_config.json": model.processor,
        "generation_config.json": {"eos_token_id": tokenizer.token_to_id(EOS)},
    }
    for name, value in files.items():
        (folder / name).write_text(json.dumps(value), encoding="utf-8")
    return folder


def picture(width: int = 24, height: int = 16, color: str = "red", kind: str = "PNG") -> bytes:
    """The file of a picture."""
    file = io.BytesIO()
    Image.new("RGB", (width, height), color).save(file, kind)
    return file.getvalue()
