"""Time of the host to sample tokens from logits, without and with each parameter.

Used by the suite. Logits are generated for the vocabulary of Qwen models: like those of a language model, where the
probability of the n-th likeliest token falls with a power of n, from 1 to 2 over the rows; and flatter ones, where
top-p keeps up to half of the vocabulary. No model runs, and the copy that restores modified logits is not timed.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import numpy as np
import torch

from bench.report import Meter, Row, at_most
from neuron_runtime.backend.host_sampling.sampler import HostSampler
from neuron_runtime.backend.torch.before_import import set_up_allocation
from neuron_runtime.core import Added, Sampling

VOCABULARY = 151_936
NUM_ROWS = 64
PROMPT_LEN = 512
TARGET_MILLISECONDS = 8.0

CASES: dict[str, dict[str, Any]] = {
    "temperature 0.7, top_p 0.9": {"top_p": 0.9},
    "greedy": {"temperature": 0.0},
    "temperature alone": {},
    "top_k 50": {"top_k": 50},
    "min_p 0.05": {"min_p": 0.05},
    "top_p 0.9, all penalties": {
        "top_p": 0.9,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.5,
    },
    "top_p 0.9, logit_bias of 300": {"top_p": 0.9, "logit_bias": tuple((7 * n, 1.0) for n in range(300))},
    "top_p 0.9, 32 bad_words": {"top_p": 0.9, "bad_words": tuple((n, n + 1) for n in range(32))},
    "top_p 0.9, allowed_token_ids of 1,000": {"top_p": 0.9, "allowed_token_ids": tuple(range(0, 7000, 7))},
    "top_p 0.9, 5 logprobs": {"top_p": 0.9, "logprobs": 5},
}
"""Parameters of all rows; temperature 0.7 by default."""
SPREADS = (4, 3, 2, 1)
"""Standard deviations of normally distributed logits for flat distributions."""


def measure(num_iters: int = 9, vocabulary_size: int = VOCABULARY, num_rows: int = NUM_ROWS) -> tuple[Row, ...]:
    """Medians in milliseconds for all rows together, with torch's default threads; CPU time is in the notes."""
    set_up_allocation()
    logits = like_a_model(num_rows, vocabulary_size)
    rows = [_row(name, params, logits, num_iters) for name, params in CASES.items()]
    normal = torch.randn(num_rows, vocabulary_size, generator=torch.Generator().manual_seed(0))
    for spread in SPREADS:
        rows.append(_row(f"top_p 0.9, normal logits, sigma {spread}", {"top_p": 0.9}, normal * spread, num_iters))
    return tuple(rows)


def like_a_model(num_rows: int, vocabulary_size: int) -> torch.Tensor:
    """Logits, float32 `[rows, vocabulary]`, with likely tokens scattered over the vocabulary."""
    generator = torch.Generator().manual_seed(0)
    fall = -torch.arange(1, vocabulary_size + 1).float().log()
    powers = torch.linspace(1, 2, num_rows).tolist()
    return torch.stack([power * fall[torch.randperm(vocabulary_size, generator=generator)] for power in powers])


@torch.inference_mode()
def _row(name: str, params: dict[str, Any], logits: torch.Tensor, num_iters: int) -> Row:
    num_rows, vocabulary_size = logits.shape
    sampler = _sampler(Sampling(**{"temperature": 0.7, **params}), num_rows, vocabulary_size)
    slots, changed = np.arange(num_rows), torch.empty_like(logits)
    positions = np.full(num_rows, PROMPT_LEN)
    wall, cpu = [], []
    meter = Meter()
    for _ in range(num_iters + 1):
        changed.copy_(logits)
        began, cpu_began = time.perf_counter(), time.process_time()
        sampler.choose(changed, slots, positions)
        wall.append(time.perf_counter() - began)
        cpu.append(time.process_time() - cpu_began)
    # The first run allocates memory and selects kernels.
    milliseconds, cpu_milliseconds = (1e3 * statistics.median(one[1:]) for one in (wall, cpu))
    return Row(
        f"{name}, {num_rows} rows",
        (milliseconds,),
        unit="ms",
        target=at_most(TARGET_MILLISECONDS) if name == "temperature 0.7, top_p 0.9" else None,
        note=f"{cpu_milliseconds:.1f} ms of CPU",
        load=meter.read(),
    )


def _sampler(params: Sampling, num_rows: int, vocabulary_size: int) -> HostSampler:
    """Before the first token after a prompt of each row."""
    prompts = np.random.default_rng(0).integers(0, vocabulary_size, size=(num_rows, PROMPT_LEN), dtype=np.int32)
    sampler = HostSampler(prompts, vocabulary_size)
    for slot, prompt in enumerate(prompts.tolist()):
        sampler.add(Added(slot, tuple(prompt), PROMPT_LEN, params, (slot,)))
    return sampler
