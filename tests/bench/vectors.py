"""Vectors of texts compared with sentence-transformers' own batch encode, in turns in one process on the same threads.

Called by the suite. The model has the shape of a small encoder that people run and random weights; texts are as long as
sentences and short paragraphs.
"""

from __future__ import annotations

import random
import statistics
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import torch

from bench.report import Meter, Row, at_least
from helpers.vector_models import vector_model
from neuron_runtime import LLM

SHAPE: dict[str, Any] = {
    "hidden_size": 384,
    "num_hidden_layers": 6,
    "num_attention_heads": 12,
    "intermediate_size": 1536,
}
TARGET = 0.9
BATCH = 32
"""Texts that sentence-transformers computes together, by default."""


def texts(count: int) -> list[str]:
    draw = random.Random(1)
    words = ["".join(draw.choices("abcdef", k=draw.randint(1, 5))) for _ in range(200)]
    return [" ".join(draw.choices(words, k=draw.randint(3, 12))) for _ in range(count)]


def measure(count: int, num_turns: int) -> Row:
    """Both encode as many texts, in turns."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from sentence_transformers import SentenceTransformer

    with tempfile.TemporaryDirectory(prefix="bench-vectors-") as folder:
        model_dir = vector_model(Path(folder), max_position_embeddings=64, **SHAPE)
        theirs, given = SentenceTransformer(str(model_dir), device="cpu"), texts(count)
        with LLM(str(model_dir), task="embed", device="cpu") as llm:
            theirs.encode(given, batch_size=BATCH)
            num_tokens = sum(len(one.prompt_token_ids) for one in llm.embed(given, use_tqdm=False))
            meter, ratios, rates = Meter(), [], []
            for _ in range(num_turns):
                began = time.perf_counter()
                theirs.encode(given, batch_size=BATCH)
                between = time.perf_counter()
                llm.embed(given, use_tqdm=False)
                ours = time.perf_counter() - between
                ratios.append((between - began) / ours)
                rates.append(num_tokens / ours)
    note = f"{statistics.median(rates):.0f} tokens per second, {torch.get_num_threads()} threads, batches of {BATCH}"
    name = f"vectors of {count} texts : sentence-transformers"
    return Row(name, (statistics.median(ratios),), "ratio", at_least(TARGET), note, meter.read())
