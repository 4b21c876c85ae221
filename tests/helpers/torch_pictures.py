"""Small models that see pictures, with random weights; prompts with pictures, and transformers' logits of them."""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch
from safetensors.torch import load, load_file, save, save_file

from helpers.torch_models import NEAR_TIE, runtime_config
from helpers.torch_parity import load_adapters
from neuron_runtime.backend.torch.loader import load as load_model
from neuron_runtime.core import Picture, Request, Sampling
from neuron_runtime.engine.loop import Engine
from neuron_runtime.host import FreeMemory

IMAGE, VIDEO, BREAK, END, START, WHOLE = 10, 11, 12, 13, 14, 15
"""Tokens that stand for a part of a picture, end a line of them, and end all."""
TEXT = range(20, 256)

MISTRAL = {
    "model_type": "mistral",
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "sliding_window": None,
}
PIXTRAL = {
    "model_type": "pixtral",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "head_dim": 16,
    "image_size": 64,
    "patch_size": 8,
}


class Seen(NamedTuple):
    """A picture: tokens of the prompt, and what the processor makes of it."""

    tokens: list[int]
    pixels: dict[str, torch.Tensor]


class Family(NamedTuple):
    """config: of the model. patch: the side of what one image token stands for, or of a tile. make: a picture of so
    many of these in rows and columns."""

    architecture: str
    config: Mapping[str, Any]
    patch: int
    make: Callable[[int, int, int, torch.Generator], Seen]


def _lines(lines: int, columns: int, patch: int, generator: torch.Generator) -> Seen:
    """Pixels and their size."""
    height, width = lines * patch, columns * patch
    tokens = ([IMAGE] * columns + [BREAK]) * lines
    pixels = torch.randn(1, 3, height, width, generator=generator)
    return Seen([*tokens[:-1], END], {"pixel_values": pixels, "image_sizes": torch.tensor([[height, width]])})


def _grid(lines: int, columns: int, patch: int, generator: torch.Generator) -> Seen:
    """Rows of patches and their grid, two by two merged."""
    patches = torch.randn(4 * lines * columns, 3 * 2 * (patch // 2) ** 2, generator=generator)
    grid = torch.tensor([[1, 2 * lines, 2 * columns]])
    return Seen([START, *[IMAGE] * (lines * columns), END], {"pixel_values": patches, "image_grid_thw": grid})


def _tiles(lines: int, columns: int, patch: int, generator: torch.Generator) -> Seen:
    """Tiles, and the whole picture in one, each of 16 patches, four by four merged."""
    line = [*[*[IMAGE] * 4, BREAK] * (columns - 1), *[IMAGE] * 4, VIDEO]
    tokens = [START, *(line * lines if lines * columns > 1 else ()), WHOLE, *[IMAGE] * 4, END]
    num_tiles = lines * columns + (lines * columns > 1)
    return Seen(tokens, {"pixel_values": torch.randn(num_tiles, 3, patch, patch, generator=generator)})


def _square(lines: int, columns: int, patch: int, generator: torch.Generator) -> Seen:
    """As large as all others, and 9 tokens."""
    return Seen([START, *[IMAGE] * 9, END], {"pixel_values": torch.randn(1, 3, 24, 24, generator=generator)})


_LLAVA = {"image_token_index": IMAGE, "text_config": MISTRAL, "vision_config": PIXTRAL, "tie_word_embeddings": False}
FAMILIES = {
    "Pixtral": Family(
        "LlavaForConditionalGeneration",
        {**_LLAVA, "model_type": "llava", "vision_feature_layer": -1, "vision_feature_select_strategy": "full"},
        8,
        _lines,
    ),
    "Mistral 3": Family(
        "Mistral3ForConditionalGeneration",
        {**_LLAVA, "model_type": "mistral3", "vision_feature_layer": -1, "spatial_merge_size": 2},
        16,
        _lines,
    ),
    "Qwen2.5-VL": Family(
        "Qwen2_5_VLForConditionalGeneration",
        {
            "model_type": "qwen2_5_vl",
            "image_token_id": IMAGE,
            "video_token_id": VIDEO,
            "vision_start_token_id": START,
            "vision_end_token_id": END,
            "text_config": {
                **MISTRAL,
                "model_type": "qwen2_5_vl_text",
                "bos_token_id": None,
                "eos_token_id": None,
                "rope_theta": 1000.0,
                "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]},
            },
            "vision_config": {
                "model_type": "qwen2_5_vl",
                "hidden_size": 32,
                "intermediate_size": 48,
                "depth": 2,
                "num_heads": 2,
                "patch_size": 8,
                "window_size": 32,
                "out_hidden_size": 64,
                "fullatt_block_indexes": [1],
            },
        },
        16,
        _grid,
    ),
    "Qwen3-VL": Family(
        "Qwen3VLForConditionalGeneration",
        {
            "model_type": "qwen3_vl",
            "image_token_id": IMAGE,
            "video_token_id": VIDEO,
            "vision_start_token_id": START,
            "vision_end_token_id": END,
            "text_config": {
                **MISTRAL,
                "model_type": "qwen3_vl_text",
                "bos_token_id": None,
                "eos_token_id": None,
                "rope_theta": 1000.0,
                "rope_scaling": {"rope_type": "default", "mrope_interleaved": True, "mrope_section": [4, 2, 2]},
            },
            "vision_config": {
                "model_type": "qwen3_vl",
                "hidden_size": 32,
                "intermediate_size": 48,
                "depth": 2,
                "num_heads": 2,
                "patch_size": 8,
                "out_hidden_size": 64,
                "num_position_embeddings": 16,
                "deepstack_visual_indexes": [0],
            },
        },
        16,
        _grid,
    ),
    "Llama 4": Family(
        "Llama4ForConditionalGeneration",
        {
            "model_type": "llama4",
            "image_token_index": IMAGE,
            "tie_word_embeddings": False,
            "text_config": {
                **MISTRAL,
                "model_type": "llama4_text",
                "num_hidden_layers": 4,
                "intermediate_size": 48,
                "intermediate_size_mlp": 96,
                "num_local_experts": 4,
                "num_experts_per_tok": 1,
                "interleave_moe_layer_step": 2,
                "attention_chunk_size": 20,
                "rope_theta": 1000.0,
            },
            "vision_config": {
                "model_type": "llama4_vision_model",
                "hidden_size": 32,
                "intermediate_size": 128,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "image_size": 16,
                "patch_size": 4,
                "vision_output_dim": 24,
                "projector_input_dim": 24,
                "projector_output_dim": 24,
            },
        },
        16,
        _tiles,
    ),
    "Gemma 3": Family(
        "Gemma3ForConditionalGeneration",
        {
            "model_type": "gemma3",
            "image_token_index": IMAGE,
            "boi_token_index": START,
            "eoi_token_index": END,
            "mm_tokens_per_image": 9,
            "text_config": {
                **MISTRAL,
                "model_type": "gemma3_text",
                "num_hidden_layers": 3,
                "sliding_window": 12,
                "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
                "query_pre_attn_scalar": 16,
            },
            "vision_config": {
                "model_type": "siglip_vision_model",
                "hidden_size": 32,
                "intermediate_size": 48,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "image_size": 24,
                "patch_size": 4,
                "vision_use_head": False,
            },
        },
        16,
        _square,
    ),
}


def seeing_model(folder: Path, family: Family, seed: int = 0) -> Path:
    """A folder as transformers writes it."""
    import transformers

    config = transformers.CONFIG_MAPPING[family.config["model_type"]].from_dict(dict(family.config))
    torch.manual_seed(seed)
    model = getattr(transformers, family.architecture)(config).float()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm" in name or "ln_pre" in name else 0.0, 0.15)
        # The reference takes such a token of an answer for one of a picture.
        model.get_output_embeddings().weight[[IMAGE, VIDEO]] = 0
    model.save_pretrained(folder)
    # transformers 4 writes it into the text_config of Qwen2.5-VL.
    leave_out(folder, architectures=[family.architecture])
    return folder


def renamed(folder: Path, names: Mapping[str, str]) -> None:
    """The first words of tensors' names are others: `names` by what they are."""
    path = folder / "model.safetensors"
    found = {}
    for name, tensor in load_file(path).items():
        theirs = next((one for one in names if name.startswith(one)), "")
        found[names.get(theirs, "") + name.removeprefix(theirs)] = tensor
    save_file(found, path, metadata={"format": "pt"})


def leave_out(folder: Path, **fields: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | fields))


def seen(family: Family, height: int, width: int, seed: int) -> Seen:
    """A random picture of so many pixels."""
    generator = torch.Generator().manual_seed(seed)
    return family.make(height // family.patch, width // family.patch, family.patch, generator)


def text(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).choice(TEXT, length).tolist()


def request(name: str, parts: Sequence[list[int] | Seen], *, max_tokens: int = 6, **others: Any) -> Request:
    """What asks for a prompt of texts and pictures."""
    tokens: list[int] = []
    pictures = []
    for part in parts:
        if isinstance(part, Seen):
            pixels = save({name: tensor.contiguous() for name, tensor in part.pixels.items()})
            digest = hashlib.sha256(pixels).hexdigest()
            # Of some families, the tokens around are those of a text.
            first, last = part.tokens.index(IMAGE), len(part.tokens) - part.tokens[::-1].index(IMAGE)
            pictures.append(Picture(digest, len(tokens) + first, last - first, memoryview(pixels)))
        tokens += part.tokens if isinstance(part, Seen) else part
    sampling = Sampling(max_tokens=max_tokens, temperature=0.0, logprobs=0)
    return Request(name, tuple(tokens), sampling, pictures=tuple(pictures), **others)


def seeing_reference(folder: Path) -> Any:
    """The same model in transformers, in float32."""
    from transformers import AutoModelForImageTextToText

    return AutoModelForImageTextToText.from_pretrained(folder).float().eval()


@torch.inference_mode()
def seeing_logits(model: Any, asked: Request, answer: Sequence[int]) -> torch.Tensor:
    """Logits of the tokens of an answer."""
    tokens = torch.tensor([[*asked.prompt_token_ids, *answer]])
    pixels = [load(bytes(picture.pixels)) for picture in asked.pictures]
    together = _together(pixels)
    for name in {"mm_token_type_ids", "token_type_ids"} & inspect.signature(model.forward).parameters.keys():
        together[name] = (tokens == IMAGE).int()
    logits: torch.Tensor = model(tokens, **together).logits[0]
    return logits[len(asked.prompt_token_ids) - 1 : -1]


def _together(pixels: Sequence[Mapping[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """What a processor makes of several pictures: filled up to the largest one."""
    found = {}
    for name in pixels[0] if pixels else ():
        each = [one[name] for one in pixels]
        if each[0].dim() == 4:
            height, width = (max(one.shape[side] for one in each) for side in (-2, -1))
            fill = torch.nn.functional.pad
            each = [fill(one, (0, width - one.shape[-1], 0, height - one.shape[-2])) for one in each]
        found[name] = torch.cat(each)
    return found


class Served:
    """An engine over a model, and what it has answered. loaded: adapters."""

    def __init__(
        self,
        folder: Path,
        *,
        drafting: Any = None,
        loaded: Mapping[str, Path] = MappingProxyType({}),
        quantization: Any = "auto",
        **config: Any,
    ) -> None:
        made = msgspec.structs.replace(runtime_config(**config), quantization=quantization)
        self.backend = load_model(folder, made, lambda what, share: None, lambda: FreeMemory(2**30))
        self.backend.warm_up(lambda what, share: None)
        self.engine = Engine(self.backend, drafting=drafting)
        load_adapters(self.engine, loaded)
        assert self.backend._vision is not None
        self.vision = self.backend._vision
        self.logprobs: dict[str, list[float]] = {}
        """Of the tokens of each answer."""

    def answers(self, *asked: Request) -> dict[str, list[int]]:
        tokens: dict[str, list[int]] = {one.request_id: [] for one in asked}
        for one in asked:
            self.engine.add(one)
        while self.engine.has_work:
            for event in self.engine.step():
                tokens[event.request_id] += event.token_ids
                self.logprobs.setdefault(event.request_id, []).extend(one.logprob for one in event.logprobs)
        return tokens

    def close(self) -> None:
        self.backend.close()


def check(model: Any, asked: Request, answer: list[int], logprobs: list[float]) -> None:
    """An answer has the tokens of transformers, but for near ties, and their log-probabilities."""
    assert len(answer) == asked.sampling.max_tokens
    logits = seeing_logits(model, asked, answer)
    expected = logits.log_softmax(-1).gather(1, torch.tensor(answer).unsqueeze(1)).squeeze(1)
    torch.testing.assert_close(torch.tensor(logprobs), expected, atol=NEAR_TIE, rtol=0)
    best = logits.topk(2).values
    behind = best[:, 0] - logits.gather(1, torch.tensor(answer).unsqueeze(1)).squeeze(1)
    assert (behind < NEAR_TIE).all(), f"{asked.request_id}: {answer}"
    assert (best[:, 0] - best[:, 1]).max() > NEAR_TIE
