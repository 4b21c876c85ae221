"""Compares our decoder and engine with transformers: feeds chunks, serves requests, checks greedy tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from helpers.step_counts import StepCounts
from helpers.torch_models import (
    NEAR_TIE,
    load_backend,
    reference,
    reference_logits,
    runtime_config,
    use_adapter,
    with_adapters,
)
from neuron_runtime.backend.torch.architecture import decoder_config, tensor_shapes
from neuron_runtime.backend.torch.backend import TorchBackend
from neuron_runtime.backend.torch.cache import KVCache, StepRows
from neuron_runtime.backend.torch.held import held_as
from neuron_runtime.backend.torch.linear import tiled_kinds
from neuron_runtime.backend.torch.loader import load, load_decoder
from neuron_runtime.backend.torch.naming import as_named
from neuron_runtime.backend.torch.ranks import ALONE, Gloo, Ranks
from neuron_runtime.backend.torch.step_module import DecodeStep, constants
from neuron_runtime.backend_protocol import Rank
from neuron_runtime.checkpoint import check_tensors, read_checkpoint
from neuron_runtime.core import Request
from neuron_runtime.engine.loop import Engine
from neuron_runtime.host import FreeMemory
from neuron_runtime.quantization import Quantizing

Result = TypeVar("Result")

TOLERANCE = 1e-4
MAX_NEAR_TIES = 0.05
"""Maximum share of near ties; with more, the comparison would show little."""
MAX_LENGTH = 88
LAYOUTS = ("slots", "blocks")

Cut = tuple[int, int, int]
"""Positions [start, end) of sequence i."""


def load_decoder_and_cache(
    folder: Path,
    layout: str,
    *,
    rows: int = 4,
    max_length: int = MAX_LENGTH,
    ranks: Ranks = ALONE,
    dtype: torch.dtype = torch.float32,
    quantization: Quantizing = "auto",
) -> tuple[Any, KVCache, np.ndarray[Any, Any]]:
    """Decoder, cache and cache lines of each row, scattered if the layout allows; or one rank's part of them."""
    checkpoint = read_checkpoint(folder)
    model = decoder_config(checkpoint.config)
    checkpoint = as_named(checkpoint, model)
    check_tensors(checkpoint, tensor_shapes(model), model.quantization)
    own = tiled_kinds(dtype)
    held = held_as(checkpoint, tensor_shapes(model), model.quantization, quantization, own=own, num_ranks=ranks.size)
    decoder = load_decoder(checkpoint, model, dtype, lambda what, share: None, ranks, held=held)
    line_length = max_length if layout == "slots" else 8
    lines = np.random.default_rng(3).permutation(rows * max_length // line_length).reshape(rows, -1)
    shape = (lines.size, decoder.config.num_kv_heads, line_length, model.head_dim)
    return decoder, KVCache.empty(model.windows, shape, dtype), lines


@torch.inference_mode()
def feed(decoder: Any, cache: KVCache, lines: Any, steps: list[list[tuple[int, int, int]]], sequences: Any) -> Any:
    """Feeds `steps`, lists of (sequence, start, end); returns logits of every fed position, per sequence."""
    found = [torch.full((len(s), 256), float("nan")) for s in sequences]
    for step in steps:
        which = np.array([row[0] for row in step])
        start = np.array([row[1] for row in step])
        rows = StepRows(start=start, num_tokens=np.array([row[2] for row in step]) - start, lines=lines[which])
        tokens = torch.tensor([t for i, begin, end in step for t in sequences[i][begin:end]])
        logits = decoder.logits(decoder.forward(tokens, cache.plan(rows)))
        offset = 0
        for i, begin, end in step:
            found[i][begin:end] = logits[offset : offset + end - begin]
            offset += end - begin
    return found


def place(folder: Path, rank: int, size: int) -> Rank:
    """The place of a rank on this machine; the folder is that of one group."""
    return Rank(rank, size, size, f"file://{folder}/rendezvous", "127.0.0.1")


def backends_of(folder: Path, size: int, meeting: Path, **config: Any) -> list[TorchBackend]:
    """One of each rank of a group."""

    def one(rank: int) -> TorchBackend:
        return load(
            folder,
            runtime_config(**config),
            lambda stage, share: None,
            # Each rank finds another amount, and all must come to the same limits.
            lambda: FreeMemory(2**30 - rank * 2**20),
            place=place(meeting, rank, size) if size > 1 else Rank(),
        )

    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(one, range(size)))


def on_ranks(size: int, folder: Path, work: Callable[[Ranks], Result]) -> list[Result]:
    """What each rank's thread returns."""
    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(lambda rank: work(Gloo(place(folder, rank, size))), range(size)))


def logits_on_ranks(
    size: int,
    model_dir: Path,
    steps: list[list[Cut]],
    sequences: Any,
    *,
    meeting: Path,
    layout: str = "blocks",
    **how: Any,
) -> list[Any]:
    """What `feed` returns on each rank. `how`: options of `load_decoder_and_cache`."""

    def logits(ranks: Ranks) -> Any:
        return feed(*load_decoder_and_cache(model_dir, layout, ranks=ranks, **how), steps, sequences)

    return on_ranks(size, meeting, logits)


class TracedStep:
    """A decode step before it is compiled, with a decoder's weights. num_rows: of each step that it ran."""

    def __init__(self, step: DecodeStep) -> None:
        self._step = step
        self.num_rows: list[int] = []

    def run(self, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        self.num_rows.append(len(inputs[0]))
        return [self._step(*inputs)]


@torch.inference_mode()
def traced_step(decoder: Any, layout: str) -> TracedStep:
    step = DecodeStep(decoder.config, torch.float32, blocks=layout == "blocks")
    for name, tensor in constants(decoder.weights).items():
        setattr(step, name, torch.nn.Parameter(tensor, requires_grad=False))
    return TracedStep(step)


def random_sequences(*lengths: int) -> list[list[int]]:
    rng = np.random.default_rng(7)
    return [rng.integers(0, 256, length).tolist() for length in lengths]


def serve(
    folder: Path, requests: Sequence[tuple[int, Request]], *, loaded: Mapping[str, Path] | None = None, **config: Any
) -> tuple[Mapping[str, Sequence[int]], Engine, StepCounts]:
    """Tokens of each request; request `r` of `(n, r)` arrives before the engine's n-th step. loaded: adapters."""
    backend = load_backend(folder, **config)
    try:
        backend.warm_up(lambda what, share: None)
        engine = Engine(backend)
        load_adapters(engine, loaded or {})
        steps = StepCounts(engine)
        tokens: dict[str, list[int]] = {request.request_id: [] for _, request in requests}
        arrivals = sorted(requests, key=lambda item: item[0])
        num_steps = 0
        while arrivals or engine.has_work:
            while arrivals and (arrivals[0][0] <= num_steps or not engine.has_work):
                engine.add(arrivals.pop(0)[1])
            for event in engine.step():
                tokens[event.request_id] += event.token_ids
            num_steps += 1
        return tokens, engine, steps
    finally:
        backend.close()


def load_adapters(engine: Engine, adapters: Mapping[str, Path]) -> None:
    """Let requests use these adapters."""
    for digest, folder in adapters.items():
        engine.load_adapter(digest, folder)
    news: list[tuple[str, str]] = []
    while len(news) < len(adapters):
        news += engine.take_adapter_news()
    assert news == [(digest, "") for digest in adapters]


def check_greedy(
    folder: Path,
    asked: Sequence[Request],
    tokens: Mapping[str, Sequence[int]],
    loaded: Mapping[str, Path] | None = None,
) -> None:
    """Asserts that every token is the reference's best or nearly tied with it; prints the share of near ties."""
    model = with_adapters(reference(folder), loaded) if loaded else reference(folder)
    num_near_ties = num_tokens = 0
    for request in asked:
        answer = tokens[request.request_id]
        assert len(answer) == request.sampling.max_tokens
        if loaded:
            use_adapter(model, request.adapter)
        logits = reference_logits(model, [*request.prompt_token_ids, *answer])[len(request.prompt_token_ids) - 1 : -1]
        best = logits.topk(2).values
        behind = best[:, 0] - logits.gather(1, torch.tensor(answer).unsqueeze(1)).squeeze(1)
        # Fed with our tokens, the reference stays comparable after a near tie.
        assert (behind < NEAR_TIE).all(), f"{request.request_id}: {answer}"
        num_near_ties += int(((best[:, 0] - best[:, 1]) < NEAR_TIE).sum())
        num_tokens += len(answer)
    print(f"near ties: {num_near_ties} of {num_tokens} tokens")
    assert num_near_ties / num_tokens <= MAX_NEAR_TIES
