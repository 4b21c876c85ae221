"""The decoder's logits equal those of transformers for any split into steps and any cache layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from helpers.torch_models import random_model, reference, reference_logits
from helpers.torch_parity import MAX_LENGTH, TOLERANCE, feed, load_decoder_and_cache, random_sequences
from neuron_runtime.backend.torch.architecture import decoder_config
from neuron_runtime.backend.torch.cache import KVCache
from neuron_runtime.backend.torch.loader import load_decoder
from neuron_runtime.checkpoint import read_checkpoint

SHAPES: dict[str, dict[str, Any]] = {
    "grouped queries": {},
    "every head its own keys": {"num_heads": 4, "num_kv_heads": 4},
    "one key head": {"num_heads": 4, "num_kv_heads": 1},
    "tied embeddings": {"tie_word_embeddings": True},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "wide heads": {"head_dim": 32},
    "other rope base": {"rope_theta": 500000.0},
    "linear rope scaling": {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
    "llama 3 rope scaling": {
        "rope_theta": 500000.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    },
}


@pytest.mark.parametrize("layout", ["slots", "blocks"])
@pytest.mark.parametrize("shape", SHAPES)
def test_logits_match_transformers_for_every_shape_and_layout(shape: str, layout: str, tmp_path: Path) -> None:
    folder = random_model(tmp_path, **SHAPES[shape])
    (tokens,) = random_sequences(86)
    one_by_one = [[(0, i, i + 1)] for i in range(66, 86)]
    (logits,) = feed(*load_decoder_and_cache(folder, layout), [[(0, 0, 40)], [(0, 40, 66)], *one_by_one], [tokens])
    torch.testing.assert_close(logits, reference_logits(reference(folder), tokens), atol=TOLERANCE, rtol=0)


CUTS: dict[str, list[list[tuple[int, int, int]]]] = {
    "prompts together, then decoded together": [
        [(0, 0, 30), (1, 0, 5), (2, 0, 17)],
        *[[(0, 30 + i, 31 + i), (1, 5 + i, 6 + i), (2, 17 + i, 18 + i)] for i in range(3)],
    ],
    "a prompt joins in chunks while others decode, out of slot order": [
        [(0, 0, 30), (2, 0, 18)],
        [(2, 18, 19), (0, 30, 31), (1, 0, 3)],
        [(2, 19, 20), (1, 3, 7), (0, 31, 32)],
        [(1, 7, 8), (0, 32, 33)],
    ],
    "chunks of one token, and a row left alone far from line 0": [
        [(0, 0, 33), (2, 0, 1)],
        [(2, 1, 2), (1, 0, 1)],
        [(1, 1, 8), (2, 2, 19)],
        [(2, 19, 20)],
    ],
}


@pytest.mark.parametrize("layout", ["slots", "blocks"])
@pytest.mark.parametrize("cut", CUTS)
def test_logits_do_not_depend_on_the_split_into_steps(cut: str, layout: str, tmp_path: Path) -> None:
    folder = random_model(tmp_path)
    tokens = random_sequences(33, 8, 20)
    found = feed(*load_decoder_and_cache(folder, layout), CUTS[cut], tokens)
    model = reference(folder)
    for logits, ids in zip(found, tokens, strict=True):
        torch.testing.assert_close(logits, reference_logits(model, ids), atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("layout", ["slots", "blocks"])
def test_remains_of_an_earlier_sequence_in_the_cache_have_no_effect(layout: str, tmp_path: Path) -> None:
    folder = random_model(tmp_path)
    decoder, cache, lines = load_decoder_and_cache(folder, layout)
    first, second = random_sequences(86, 12)
    feed(decoder, cache, lines, [[(0, 0, 86)]], [first])
    (logits,) = feed(decoder, cache, lines, [[(0, 0, 6)], *[[(0, i, i + 1)] for i in range(6, 12)]], [second])
    torch.testing.assert_close(logits, reference_logits(reference(folder), second), atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"])
def test_a_half_precision_model_stays_close_to_float32(architecture: str, dtype: torch.dtype, tmp_path: Path) -> None:
    folder = random_model(tmp_path, architecture=architecture, dtype=str(dtype).removeprefix("torch."), head_dim=16)
    checkpoint = read_checkpoint(folder)
    model = decoder_config(checkpoint.config)
    decoder = load_decoder(checkpoint, model, dtype, lambda what, share: None)
    cache = KVCache.empty(model.windows, (4, 2, MAX_LENGTH, 16), dtype)
    tokens = random_sequences(30, 30)
    steps = [[(0, 0, 20), (1, 0, 20)], *[[(0, i, i + 1), (1, i, i + 1)] for i in range(20, 30)]]
    found = feed(decoder, cache, np.arange(4).reshape(4, 1), steps, tokens)
    expected = [reference_logits(reference(folder), ids) for ids in tokens]
    spread = torch.stack(expected).std()
    for logits, wanted in zip(found, expected, strict=True):
        assert (logits - wanted).abs().max() < 0.1 * spread
