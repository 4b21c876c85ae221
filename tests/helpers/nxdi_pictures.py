"""Small models that see pictures, prompts with random ones, and what transformers answers to them."""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import torch
from safetensors.torch import load, save

from helpers.torch_models import NEAR_TIE
from helpers.torch_pictures import FAMILIES, START, VIDEO
from neuron_runtime.core import Picture, Request, Sampling

IMAGE, BREAK, END = 10, 12, 13
PATCH, CHUNK = 8, 16
TEXT: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 256,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
}
SEEING: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
ONE_EXPERT: dict[str, Any] = {
    "intermediate_size_mlp": 96,
    "moe_layers": [],
    "use_qk_norm": False,
    "no_rope_layers": [1, 1],
    "attention_chunk_size": 512,
    "num_local_experts": 2,
    "num_experts_per_tok": 1,
    "attn_temperature_tuning": False,
}


def _pixtral() -> Any:
    from transformers import LlavaConfig, LlavaForConditionalGeneration

    encoder = {**SEEING, "model_type": "pixtral", "intermediate_size": 48, "image_size": 64, "patch_size": PATCH}
    config = LlavaConfig(
        vision_config={**encoder, "head_dim": 16},
        text_config={**TEXT, "model_type": "mistral", "sliding_window": None},
        image_token_index=IMAGE,
        vision_feature_layer=-1,
        vision_feature_select_strategy="full",
    )
    return LlavaForConditionalGeneration(config)


def _llama4() -> Any:
    from transformers import Llama4Config, Llama4ForConditionalGeneration

    sizes = {"vision_output_dim": 64, "projector_input_dim": 64, "projector_output_dim": 64, "intermediate_size": 128}
    config = Llama4Config(
        vision_config={**SEEING, **sizes, "image_size": CHUNK, "patch_size": 4},
        text_config={**TEXT, **ONE_EXPERT},
        image_token_index=IMAGE,
        boi_token_index=11,
        eoi_token_index=END,
    )
    return Llama4ForConditionalGeneration(config)


def _qwen3_vl(*, tied: bool = False) -> Any:
    from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

    given = FAMILIES["Qwen3-VL"].config
    return Qwen3VLForConditionalGeneration(
        Qwen3VLConfig(
            **{name: value for name, value in given.items() if name.endswith("_id")},
            # Of transformers, 4 reads the inner one of the two.
            text_config={**given["text_config"], **TEXT, "rope_theta": 1000.0, "tie_word_embeddings": tied},
            vision_config={**given["vision_config"], "depth": 3, "deepstack_visual_indexes": [0, 1]},
            tie_word_embeddings=tied,
        )
    )


MODELS = {"Pixtral": _pixtral, "Llama 4": _llama4, "Qwen3-VL": _qwen3_vl}


class SeeingModel:
    """A checkpoint with random weights, whose answers depend on what is seen, and what transformers makes of it."""

    @torch.no_grad()
    def __init__(self, folder: Path, kind: str, **options: Any) -> None:
        torch.manual_seed(0)
        self.kind, self.folder = kind, folder
        self._reference = MODELS[kind](**options).float().eval()
        for name, parameter in self._reference.named_parameters():
            parameter.add_(torch.randn_like(parameter) * (0.02 if "norm" in name else 0.1))
        if kind == "Qwen3-VL":
            # The reference takes such tokens of an answer for those of a picture.
            self._reference.lm_head.weight[[IMAGE, VIDEO, START]] = 0
        self._reference.save_pretrained(folder)
        self.config = json.loads((folder / "config.json").read_text())

    def picture(self, random: Random, start: int, size: tuple[int, int]) -> tuple[list[int], Picture]:
        """Tokens of a picture of so many patches, or tiles, and the picture."""
        made = torch.Generator().manual_seed(random.randrange(2**31))
        height, width = size
        if self.kind == "Pixtral":
            shape = (height * PATCH, width * PATCH)
            pixels = torch.randn((1, 3, *shape), generator=made)
            tensors = {"pixel_values": pixels, "image_sizes": torch.tensor([shape])}
            tokens = [*[*[IMAGE] * width, BREAK] * (height - 1), *[IMAGE] * width, END]
        elif self.kind == "Qwen3-VL":
            pixels = torch.randn((4 * height * width, 2 * 3 * PATCH**2), generator=made)
            tensors = {"pixel_values": pixels, "image_grid_thw": torch.tensor([[1, 2 * height, 2 * width]])}
            tokens = [IMAGE] * (height * width)
            return [START, *tokens, END], self.of_tensors(tensors, start + 1, len(tokens))
        else:
            chunks = height * width + (height * width > 1)
            tensors = {"pixel_values": torch.randn((chunks, 3, CHUNK, CHUNK), generator=made)}
            tokens = [11, *([*[IMAGE] * 4, BREAK] * (chunks - 1)), 14, *[IMAGE] * 4, END]
        return tokens, self.of_tensors(tensors, start, len(tokens))

    def of_tensors(self, tensors: dict[str, torch.Tensor], start: int, num_tokens: int) -> Picture:
        pixels = save(tensors)
        return Picture(hashlib.sha256(pixels).hexdigest(), start, num_tokens, memoryview(pixels))

    def request(
        self, name: str, random: Random, parts: Sequence[int | tuple[int, int]], num_answer: int = 12
    ) -> Request:
        """A prompt of parts: so many random words, or a picture of a size."""
        tokens, pictures = list[int](), list[Picture]()
        for part in parts:
            if isinstance(part, int):
                tokens += [random.randrange(20, 256) for _ in range(part)]
                continue
            of_picture, picture = self.picture(random, len(tokens), part)
            tokens += of_picture
            pictures.append(picture)
        sampling = Sampling(temperature=0.0, max_tokens=num_answer)
        return Request(name, tuple(tokens), sampling, pictures=tuple(pictures))

    @torch.inference_mode()
    def check(self, request: Request, output: list[int]) -> None:
        """Checks that the output is what transformers generates greedily, with one pass over all of it."""
        prompt, tensors = request.prompt_token_ids, [load(bytes(one.pixels)) for one in request.pictures]
        seen: dict[str, Any] = {}
        if tensors and self.kind == "Pixtral":
            sizes = torch.cat([one["image_sizes"] for one in tensors])
            height, width = sizes.max(dim=0).values.tolist()
            pixels = torch.zeros((len(tensors), 3, height, width))
            for at, one in enumerate(tensors):
                of_one = one["pixel_values"][0]
                pixels[at, :, : of_one.shape[1], : of_one.shape[2]] = of_one
            seen = {"pixel_values": pixels, "image_sizes": sizes}
        elif tensors:
            seen = {name: torch.cat([one[name] for one in tensors]) for name in tensors[0]}
        # An answer may have the token of pictures, too.
        words = [token if token != IMAGE or at < len(prompt) else 0 for at, token in enumerate((*prompt, *output))]
        if "mm_token_type_ids" in inspect.signature(self._reference.forward).parameters:
            seen["mm_token_type_ids"] = (torch.tensor([words]) == IMAGE).int()
        logits = self._reference(input_ids=torch.tensor([words]), **seen).logits[0, len(prompt) - 1 : -1]
        best, given = logits.max(dim=-1).values, logits.gather(1, torch.tensor(output).unsqueeze(1)).squeeze(1)
        end = output.index(IMAGE) + 1 if IMAGE in output else len(output)
        wrong = (best - given > NEAR_TIE)[:end].nonzero().flatten().tolist()
        assert not wrong, f"{request.request_id}: token {wrong[0]} of {len(output)} after {len(prompt)} prompt tokens"
