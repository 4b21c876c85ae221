"""Every model family gives the logits and tokens of transformers, with windows, biases and norms of its config.json.

Shapes are tiny and weights random; MODELS covers the differences between releases of a family (scaled positions, tied
heads, windows, separate head sizes). Prompts are longer than every window.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from helpers import torch_pictures
from helpers.covering import covering
from helpers.torch_models import DENSE, MODELS, random_model, reference, reference_logits
from helpers.torch_parity import (
    LAYOUTS,
    TOLERANCE,
    Cut,
    check_greedy,
    feed,
    load_decoder_and_cache,
    random_sequences,
    serve,
    traced_step,
)
from neuron_runtime.backend.torch.architecture import FAMILIES, Window
from neuron_runtime.backend.torch.cache import KVCache, StepRows
from neuron_runtime.backend.torch.compiled import CompiledDecoder
from neuron_runtime.core import Request, Sampling

WINDOWS = ("Mistral", "Qwen2, window in the upper layers", "Qwen3 with biases and a window in some layers")
CHUNKS = ("gpt-oss", "Llama 4")
LENGTHS = (300, 1, 25, 90)
MAX_LENGTH = 304

# Sequence 0 is fed in chunks that start within, at and after every window; the others join, decode with it in and out
# of slot order, leave, and return.
STEPS: list[list[Cut]] = [
    [(0, 0, 18), (2, 0, 24)],
    [(0, 18, 24), (2, 24, 25), (1, 0, 1)],
    [(0, 24, 25), (3, 0, 64)],
    [(3, 64, 65), (0, 25, 26)],
    [(0, 26, 59), (3, 65, 66)],
    *[[(0, 59 + i, 60 + i), (3, 66 + i, 67 + i)] for i in range(24)],
    [(0, 83, 290)],
    *[[(0, 290 + i, 291 + i)] for i in range(10)],
]


def test_every_family_is_compared_with_transformers() -> None:
    text = {fields.get("architecture", "LlamaForCausalLM") for fields in MODELS.values()}
    assert text | {family.architecture for family in torch_pictures.FAMILIES.values()} == set(FAMILIES)


@pytest.mark.parametrize(("name", "layout"), covering(MODELS, LAYOUTS))
def test_logits_match_transformers_in_prompts_chunks_and_decoding(name: str, layout: str, tmp_path: Path) -> None:
    folder = random_model(tmp_path, **MODELS[name])
    sequences = random_sequences(*LENGTHS)
    found = feed(*load_decoder_and_cache(folder, layout, max_length=MAX_LENGTH), STEPS, sequences)
    model = reference(folder)
    for logits, tokens in zip(found, sequences, strict=True):
        torch.testing.assert_close(logits, reference_logits(model, tokens), atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize(("name", "layout"), covering(DENSE, LAYOUTS[::-1]))
def test_the_step_that_is_compiled_computes_what_the_decoder_does(name: str, layout: str, tmp_path: Path) -> None:
    decoder, cache, lines = load_decoder_and_cache(
        random_model(tmp_path, **MODELS[name]), layout, max_length=MAX_LENGTH
    )
    graph = traced_step(decoder, layout)
    sequences = random_sequences(*LENGTHS)
    expected = feed(decoder, cache, lines, STEPS, sequences)
    found = feed(CompiledDecoder(decoder, graph, graph, blocks=layout == "blocks"), cache, lines, STEPS, sequences)
    assert graph.num_rows == [len(step) for step in STEPS if all(end - start == 1 for _, start, end in step)]
    for logits, others in zip(found, expected, strict=True):
        torch.testing.assert_close(logits, others, atol=1e-5, rtol=0, equal_nan=True)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", [*WINDOWS, *CHUNKS])
def test_a_prompt_longer_than_the_window_matches_transformers(name: str, layout: str, tmp_path: Path) -> None:
    folder = random_model(tmp_path, **MODELS[name])
    sequences = random_sequences(300, 60)
    found = feed(*load_decoder_and_cache(folder, layout, max_length=MAX_LENGTH), [[(0, 0, 300), (1, 0, 60)]], sequences)
    model = reference(folder)
    for logits, tokens in zip(found, sequences, strict=True):
        torch.testing.assert_close(logits, reference_logits(model, tokens), atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("name", WINDOWS)
def test_a_window_changes_only_logits_after_it(name: str, tmp_path: Path) -> None:
    fields = MODELS[name]
    window = fields["sliding_window"]
    unlimited = {key: value for key, value in fields.items() if key != "layer_types"} | {"sliding_window": None}
    (tokens,) = sequences = random_sequences(60)
    (near, far) = (
        feed(*load_decoder_and_cache(random_model(tmp_path / str(i), **shape), "blocks"), [[(0, 0, 60)]], sequences)[0]
        for i, shape in enumerate((fields, unlimited))
    )
    torch.testing.assert_close(near[:window], far[:window], atol=TOLERANCE, rtol=0)
    assert (near - far)[window:].abs().amax(dim=1).min() > 10 * TOLERANCE
    assert len(tokens) > window


@pytest.mark.parametrize(("layout", "line_length"), [("slots", 1024), ("blocks", 16)])
def test_decoding_past_a_window_reads_only_the_window(layout: str, line_length: int) -> None:
    lines = np.arange(4 * 1024 // line_length).reshape(4, -1)
    cache = KVCache.empty((None, Window(64)), (lines.size, 1, line_length, 2), torch.float32)
    rows = StepRows(start=np.array([900, 910, 1000]), num_tokens=np.ones(3, dtype=np.int64), lines=lines[:3])
    full, near = (reads.decode for reads in cache.plan(rows).reads)
    assert full is not None
    assert near is not None
    assert full.mask.shape[-1] >= 1001
    assert near.mask.shape[-1] <= 64 + 2 * 32 + (100 if layout == "slots" else 0)
    assert (near.mask == 0).sum(dim=-1).flatten().tolist() == [64, 64, 64]


SETTINGS: dict[str, dict[str, Any]] = {
    "blocks": {"layout": "blocks", "max_sequences": 3, "max_step_tokens": 512, "block_size": 8},
    "slots": {"layout": "slots", "max_sequences": 3, "max_step_tokens": 512},
    "blocks, prompts in chunks": {"layout": "blocks", "max_sequences": 3, "max_step_tokens": 48, "block_size": 16},
    "slots, prompts in chunks": {"layout": "slots", "max_sequences": 3, "max_step_tokens": 48},
}
"""In an order that gives each family the layout by default that its logits are not compared with."""


@pytest.mark.slow
@pytest.mark.parametrize(("name", "setting"), covering(MODELS, tuple(SETTINGS)))
def test_greedy_tokens_match_transformers_while_sequences_join_and_leave(
    name: str, setting: str, tmp_path: Path
) -> None:
    folder = random_model(tmp_path, **MODELS[name])
    rng = np.random.default_rng(5)
    asked = [
        Request(
            f"r{i}",
            tuple(rng.integers(0, 256, length).tolist()),
            Sampling(max_tokens=30 - 4 * i, temperature=0.0),
        )
        for i, length in enumerate((300, 1, 33, 120, 17, 64))
    ]
    tokens, *_ = serve(folder, [(4 * i, request) for i, request in enumerate(asked)], **SETTINGS[setting])
    check_greedy(folder, asked, tokens)
