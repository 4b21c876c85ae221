"""Tensor parallelism: several ranks compute what one computes, each from its own part of the weights.

The ranks are threads of the test, and exchange tensors as processes do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
import torch
from safetensors import safe_open

from helpers.covering import covering
from helpers.device_drafts import Seen
from helpers.eagle import head_config, head_tensors, write_head
from helpers.groups import group_of
from helpers.told_drafts import Told, events_of, tokens_of
from helpers.torch_models import MODELS, random_model, reference, reference_logits, runtime_config
from helpers.torch_parity import (
    TOLERANCE,
    backends_of,
    check_greedy,
    load_decoder_and_cache,
    logits_on_ranks,
    on_ranks,
    place,
    random_sequences,
)
from neuron_runtime.backend.torch import loader, weights
from neuron_runtime.backend.torch.architecture import decoder_config
from neuron_runtime.backend.torch.backend import TorchBackend
from neuron_runtime.backend.torch.cache import StepRows
from neuron_runtime.backend.torch.loader import load, load_decoder
from neuron_runtime.backend.torch.parts import part_of_model
from neuron_runtime.backend.torch.ranks import Ranks
from neuron_runtime.checkpoint import read_checkpoint
from neuron_runtime.config import DraftSource, Speculation
from neuron_runtime.core import NO_TOKEN, Request, Sampling
from neuron_runtime.engine.loop import Engine
from neuron_runtime.errors import ExitCode, FatalError
from neuron_runtime.host import FreeMemory

Result = TypeVar("Result")
Cut = tuple[int, int, int]

STEPS: list[list[Cut]] = [
    [(0, 0, 18), (2, 0, 24)],
    [(0, 18, 24), (2, 24, 25), (1, 0, 1)],
    [(0, 24, 60)],
    [(3, 0, 64)],
    [(3, 64, 65), (0, 60, 61)],
    *[[(0, 61 + i, 62 + i), (3, 65 + i, 66 + i)] for i in range(4)],
]


@pytest.mark.parametrize(("name", "size"), covering(MODELS, (2, 4)))
def test_the_logits_of_all_ranks_are_those_of_transformers(name: str, size: int, tmp_path: Path) -> None:
    folder = random_model(tmp_path, **MODELS[name])
    sequences = random_sequences(65, 1, 25, 69)
    layout = "blocks" if size == 2 else "slots"
    found = logits_on_ranks(size, folder, STEPS, sequences, meeting=tmp_path, layout=layout)
    model = reference(folder)
    for number, tokens in enumerate(sequences):
        expected = reference_logits(model, tokens)
        for of_rank in found:
            assert torch.equal(of_rank[number], found[0][number]), "ranks must have the same bits"
        torch.testing.assert_close(found[0][number], expected, atol=TOLERANCE, rtol=0)


def test_ranks_hold_weights_alike_where_their_processors_differ(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They would come to other limits, and the group would never start."""
    here = iter([frozenset({"int8", "fp8"}), frozenset({"fp8"})])
    monkeypatch.setattr(loader, "tiled_kinds", lambda dtype: next(here))
    assert on_ranks(2, tmp_path, lambda ranks: loader.own_kinds(torch.bfloat16, ranks)) == [{"fp8"}, {"fp8"}]


def test_a_vocabulary_that_does_not_divide_is_split_with_padding(tmp_path: Path) -> None:
    folder = random_model(tmp_path, vocabulary_size=249, mlp_bias=True)
    tokens = [248, 0, 187, 125, 63, 62]

    @torch.inference_mode()
    def logits(ranks: Ranks) -> torch.Tensor:
        decoder, cache, lines = load_decoder_and_cache(folder, "blocks", ranks=ranks)
        rows = StepRows(start=np.array([0]), num_tokens=np.array([len(tokens)]), lines=lines[:1])
        result: torch.Tensor = decoder.logits(decoder.forward(torch.tensor(tokens), cache.plan(rows)))
        return result

    expected = reference_logits(reference(folder), tokens)
    for found in on_ranks(4, tmp_path, logits):
        torch.testing.assert_close(found, expected, atol=TOLERANCE, rtol=0)


def run(engine: Engine, requests: Sequence[Request]) -> Mapping[str, list[int]]:
    """Requests arrive one by one, some steps apart."""
    tokens: dict[str, list[int]] = {request.request_id: [] for request in requests}
    for request in requests:
        engine.add(request)
        for _ in range(3):
            for event in engine.step():
                tokens[event.request_id] += event.token_ids
    while engine.has_work:
        for event in engine.step():
            tokens[event.request_id] += event.token_ids
    return tokens


def some_requests() -> list[Request]:
    """Greedy and drawn ones, whose prompts share a beginning."""
    base, *others = random_sequences(70, 30, 9, 41)
    prompts = [base, *(base[:48] + other for other in others), others[1]]
    greedy = [Request(f"greedy {n}", tuple(p), Sampling(temperature=0.0, max_tokens=12)) for n, p in enumerate(prompts)]
    drawn = Sampling(temperature=0.9, top_p=0.9, seed=5, max_tokens=12, frequency_penalty=0.3, logprobs=2)
    return [*greedy, *(Request(f"drawn {n}", tuple(p), drawn) for n, p in enumerate(prompts[:3]))]


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("Llama 3.1", 2),
        ("Qwen2.5, tied", 2),
        ("Qwen3 with biases and a window in some layers", 4),
        *(pytest.param(name, size, marks=pytest.mark.long) for name in MODELS for size in (2, 4)),
    ],
)
def test_a_group_answers_as_one_rank_does(name: str, size: int, tmp_path: Path) -> None:
    """With prefix hits, prompts in chunks, overlapped steps and all kinds of sampling."""
    folder = random_model(tmp_path, **MODELS[name])
    config = {"prefix_caching": "enabled", "block_size": 8, "max_sequences": 3, "max_step_tokens": 24}
    requests = some_requests()
    (alone,) = backends_of(folder, 1, tmp_path, **config)
    expected = run(Engine(alone), requests)
    alone.close()
    backends = backends_of(folder, size, tmp_path, **config)
    assert len({str(backend.limits) for backend in backends}) == 1
    remaining = iter(backends)
    with group_of(lambda: next(remaining), size) as group:
        engine = Engine(group.leader)
        tokens = run(engine, requests)
        assert engine.stats.num_prefix_hits_total >= 3 * 40
        group.finish()
    for backend in backends:
        backend.close()
    check_greedy(folder, [r for r in requests if r.sampling.greedy], tokens)
    differing = [name for name in tokens if tokens[name] != expected[name]]
    # A draw or a choice between two nearly equal tokens may differ by rounding.
    assert len(differing) <= 1, differing


def test_a_group_verifies_drafts_as_one_rank_does(tmp_path: Path) -> None:
    folder = random_model(tmp_path, **MODELS["Llama 3.1"])
    config = {"block_size": 8, "max_sequences": 3, "max_step_tokens": 24, "max_drafts": 4}
    requests = some_requests()
    (alone,) = backends_of(folder, 1, tmp_path, **config)
    expected = tokens_of(events_of(Engine(alone), requests))
    alone.close()
    backends, told = backends_of(folder, 2, tmp_path, **config), Told(expected)
    remaining = iter(backends)
    with group_of(lambda: next(remaining), 2) as group:
        tokens = tokens_of(events_of(Engine(group.leader, drafting=told), requests))
        group.finish()
    for backend in backends:
        backend.close()
    differing = [name for name in tokens if tokens[name] != expected[name]]
    assert len(differing) <= 1, differing
    assert 20 < told.num_accepted < told.num_drafts


def test_ranks_whose_draft_models_disagree_have_the_drafts_of_the_first(tmp_path: Path) -> None:
    """As nodes with other processors round otherwise. On rank 0 the model drafts for itself, so it is right."""
    folder = random_model(tmp_path / "model")
    drafts = [folder, random_model(tmp_path / "other", num_hidden_layers=1)]
    config: dict[str, Any] = {"block_size": 8, "num_blocks": 40, "max_sequences": 3, "max_step_tokens": 24}
    requests = some_requests()
    (alone,) = backends_of(folder, 1, tmp_path, **config)
    expected = tokens_of(events_of(Engine(alone), requests))
    alone.close()

    def one(rank: int) -> TorchBackend:
        speculation = Speculation(method="Draft", num_tokens=3, model=DraftSource(uri=drafts[rank].as_uri()))
        found = runtime_config(speculation=speculation, **config)
        at = place(tmp_path, rank, 2)
        return load(folder, found, lambda stage, share: None, lambda: FreeMemory(2**30), place=at)

    with ThreadPoolExecutor(2) as threads:
        backends = list(threads.map(one, range(2)))
    remaining, told = iter(backends), OnDeviceAlways()
    with group_of(lambda: next(remaining), 2) as group:
        tokens = tokens_of(events_of(Engine(group.leader, drafting=told), requests))
        group.finish()
    for backend in backends:
        backend.close()
    differing = [name for name in tokens if tokens[name] != expected[name]]
    assert len(differing) <= 1, differing
    assert told.num_accepted > 20


@pytest.mark.parametrize("generation", [1, 3])
def test_a_group_has_the_drafts_of_an_eagle_head_that_one_rank_has(generation: int, tmp_path: Path) -> None:
    """Embedding and head are the model's, of which each rank has a part."""
    folder, config = random_model(tmp_path / "model", num_layers=7), head_config(generation)
    head = write_head(tmp_path / "head", config, head_tensors(generation, config))
    speculation = Speculation(method="Eagle", num_tokens=3, model=DraftSource(uri=head.as_uri()))
    limits: dict[str, Any] = {"block_size": 8, "num_blocks": 40, "max_sequences": 3, "max_step_tokens": 24}
    requests = some_requests()
    (alone,) = backends_of(folder, 1, tmp_path, speculation=speculation, **limits)
    expected = Seen(alone)
    events_of(Engine(alone, drafting=OnDeviceAlways()), requests)
    alone.close()
    backends = backends_of(folder, 2, tmp_path, speculation=speculation, **limits)
    found, remaining = Seen(backends[0]), iter(backends)
    with group_of(lambda: next(remaining), 2) as group:
        events_of(Engine(group.leader, drafting=OnDeviceAlways()), requests)
        group.finish()
    for backend in backends:
        backend.close()
    # Sums of two ranks are rounded otherwise: near ties may differ.
    known = {tuple(tokens): drafts for tokens, drafts in expected.drafts}
    both = [(drafts, known[tuple(tokens)]) for tokens, drafts in found.drafts if tuple(tokens) in known]
    assert len(both) > 20
    assert sum(one == other for one, other in both) >= 0.95 * len(both), both


class OnDeviceAlways(Told):
    """As many drafts of the device as fit."""

    def __init__(self) -> None:
        super().__init__({})

    def propose(self, sequence: Any, most: int) -> tuple[int, ...]:
        return (NO_TOKEN,) * most


def test_a_lost_rank_is_reported_without_the_source_of_the_transport(tmp_path: Path) -> None:
    def exchange(ranks: Ranks) -> str:
        if ranks.rank == 1:
            return ""  # it leaves
        with pytest.raises(FatalError) as lost:
            ranks.sum(torch.ones(4))
        assert lost.value.exit_code == ExitCode.GROUP_MEMBER_LOST
        return str(lost.value)

    told, _ = on_ranks(2, tmp_path, exchange)
    assert told.startswith("the other ranks cannot be reached any more: ")
    assert ".cc:" not in told
    assert "Check the logs" not in told


def test_each_rank_reads_only_its_part_of_the_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = random_model(tmp_path, hidden_size=128, intermediate_size=512)
    checkpoint = read_checkpoint(folder)
    num_bytes: list[int] = []

    class Counting:
        """A file of weights that counts what is read."""

        def __init__(self, path: Path) -> None:
            self._file = safe_open(path, framework="pt", device="cpu")

        def get_tensor(self, name: str) -> torch.Tensor:
            return self._count(self._file.get_tensor(name))

        def get_slice(self, name: str) -> Any:
            counting, part = self, self._file.get_slice(name)

            class Slice:
                def __getitem__(self, key: Any) -> torch.Tensor:
                    return counting._count(part[key])

            return Slice()

        def _count(self, tensor: torch.Tensor) -> torch.Tensor:
            num_bytes.append(tensor.nbytes)
            return tensor

    monkeypatch.setattr(weights, "_open", Counting)
    model = decoder_config(checkpoint.config)

    class Third:
        rank, size = 2, 4

    load_decoder(checkpoint, model, torch.float32, lambda stage, share: None, Third())  # type: ignore[arg-type]
    norms = sum(info.num_bytes for info in checkpoint.tensors.values() if "norm" in info.name)
    # With two heads of keys, two ranks share each.
    shared = sum(info.num_bytes for name, info in checkpoint.tensors.items() if "k_proj" in name or "v_proj" in name)
    whole = checkpoint.num_bytes
    assert sum(num_bytes) == norms + shared // 2 + (whole - norms - shared) // 4


@pytest.mark.parametrize(
    ("fields", "size", "message"),
    [
        ({}, 3, r"num_attention_heads \(4\) cannot be split among 3 ranks"),
        (
            {"num_heads": 6, "num_kv_heads": 3, "head_dim": 16, "intermediate_size": 128},
            3,
            r"intermediate_size \(128\)",
        ),
        (
            {"num_heads": 6, "num_kv_heads": 2, "head_dim": 16, "intermediate_size": 129},
            3,
            r"num_key_value_heads \(2\)",
        ),
    ],
)
def test_a_model_that_cannot_be_split_is_refused_by_name(
    fields: dict[str, Any], size: int, message: str, tmp_path: Path
) -> None:
    checkpoint = read_checkpoint(random_model(tmp_path, **fields))
    with pytest.raises(FatalError, match=message) as error:
        part_of_model(decoder_config(checkpoint.config), size)
    assert error.value.exit_code == ExitCode.UNSUPPORTED_ARCHITECTURE
