"""The decoder's logits equal transformers', however a sequence is cut into steps and wherever its cache lies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from helpers.torch_models import random_model, reference, reference_logits
from neuron_runtime.backend.torch.architecture import decoder_config, tensor_shapes
from neuron_runtime.backend.torch.cache import KVCache, StepRows
from neuron_runtime.backend.torch.loader import load_decoder
from neuron_runtime.backend.torch.weights import check_tensors
from neuron_runtime.checkpoint import read_checkpoint

TOLERANCE = 1e-4
MAX_LENGTH = 88

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


def load(folder: Path, layout: str, *, rows: int = 4) -> tuple[Any, KVCache, np.ndarray[Any, Any]]:
    """Decoder, cache, and the cache lines of each row: scattered where the layout allows."""
    checkpoint = read_checkpoint(folder)
    model = decoder_config(checkpoint.config)
    check_tensors(checkpoint, tensor_shapes(model))
    decoder = load_decoder(checkpoint, model, torch.float32, lambda what, share: None)
    line_length = MAX_LENGTH if layout == "slots" else 8
    lines = np.random.default_rng(3).permutation(rows * MAX_LENGTH // line_length).reshape(rows, -1)
    cache = KVCache(
        num_layers=model.num_layers,
        num_lines=lines.size,
        num_kv_heads=model.num_kv_heads,
        line_length=line_length,
        head_dim=model.head_dim,
        dtype=torch.float32,
    )
    return decoder, cache, lines


@torch.inference_mode()
def run(decoder: Any, cache: KVCache, lines: Any, steps: list[list[tuple[int, int, int]]], sequences: Any) -> Any:
    """Feed `steps`, each a list of (sequence, start, end); logits of every position fed, per sequence."""
    found = [torch.full((len(s), 256), float("nan")) for s in sequences]
    for step in steps:
        which = np.array([row[0] for row in step])
        start = np.array([row[1] for row in step])
        rows = StepRows(start=start, num_tokens=np.array([row[2] for row in step]) - start, lines=lines[which])
        tokens = torch.tensor([t for i, begin, end in step for t in sequences[i][begin:end]])
        logits = decoder.forward(tokens, cache.plan(rows), torch.arange(len(tokens)))
        offset = 0
        for i, begin, end in step:
            found[i][begin:end] = logits[offset : offset + end - begin]
            offset += end - begin
    return found


def sequences(*lengths: int) -> list[list[int]]:
    rng = np.random.default_rng(7)
    return [rng.integers(0, 256, length).tolist() for length in lengths]


@pytest.mark.parametrize("layout", ["slots", "blocks"])
@pytest.mark.parametrize("shape", SHAPES)
def test_logits_equal_transformers_for_every_shape_and_layout(shape: str, layout: str, tmp_path: Path) -> None:
    folder = random_model(tmp_path, **SHAPES[shape])
    (tokens,) = sequences(86)
    one_by_one = [[(0, i, i + 1)] for i in range(66, 86)]
    (logits,) = run(*load(folder, layout), [[(0, 0, 40)], [(0, 40, 66)], *one_by_one], [tokens])
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
def test_logits_do_not_depend_on_how_sequences_are_cut_into_steps(cut: str, layout: str, tmp_path: Path) -> None:
    folder = random_model(tmp_path)
    tokens = sequences(33, 8, 20)
    found = run(*load(folder, layout), CUTS[cut], tokens)
    model = reference(folder)
    for logits, ids in zip(found, tokens, strict=True):
        torch.testing.assert_close(logits, reference_logits(model, ids), atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("layout", ["slots", "blocks"])
def test_what_an_earlier_sequence_left_in_the_cache_does_not_show(layout: str, tmp_path: Path) -> None:
    folder = random_model(tmp_path)
    decoder, cache, lines = load(folder, layout)
    first, second = sequences(86, 12)
    run(decoder, cache, lines, [[(0, 0, 86)]], [first])
    (logits,) = run(decoder, cache, lines, [[(0, 0, 6)], *[[(0, i, i + 1)] for i in range(6, 12)]], [second])
    torch.testing.assert_close(logits, reference_logits(reference(folder), second), atol=TOLERANCE, rtol=0)


def test_a_bfloat16_model_stays_close_to_its_float32_self(tmp_path: Path) -> None:
    folder = random_model(tmp_path, dtype="bfloat16")
    checkpoint = read_checkpoint(folder)
    model = decoder_config(checkpoint.config)
    decoder = load_decoder(checkpoint, model, torch.bfloat16, lambda what, share: None)
    cache = KVCache(
        num_layers=2, num_lines=4, num_kv_heads=2, line_length=MAX_LENGTH, head_dim=16, dtype=torch.bfloat16
    )
    tokens = sequences(30, 30)
    steps = [[(0, 0, 20), (1, 0, 20)], *[[(0, i, i + 1), (1, i, i + 1)] for i in range(20, 30)]]
    found = run(decoder, cache, np.arange(4).reshape(4, 1), steps, tokens)
    expected = [reference_logits(reference(folder), ids) for ids in tokens]
    spread = torch.stack(expected).std()
    for logits, wanted in zip(found, expected, strict=True):
        assert (logits - wanted).abs().max() < 0.1 * spread
