"""Sampling: random numbers match the published ones, and every path follows the requested distribution."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch

from neuron_runtime.backend.host_sampling import drawing
from neuron_runtime.backend.host_sampling.drawing import (
    NUMBERS_OF_CANDIDATES,
    Draws,
    NotFinite,
    SamplingTable,
    check_finite,
    logprobs,
    philox_4x32,
    uniform,
)
from neuron_runtime.backend.host_sampling.likeliest import GROUP, Scores
from neuron_runtime.core import Sampling

MAX_CANDIDATES = max(NUMBERS_OF_CANDIDATES)


def draw(logits: torch.Tensor, top_k: Any, top_p: Any, draws: Any, *, temperature: Any = 1.0, min_p: Any = 0.0) -> Any:
    """Samples tokens for rows of logits; each parameter is one number for all rows or one per row."""
    columns = [np.broadcast_to(np.asarray(one), len(logits)).copy() for one in (temperature, top_k, top_p, min_p)]
    return drawing.draw(Scores.of(logits.contiguous(), columns[0]), Draws(*columns, number=np.asarray(draws)))


def choose(logits: torch.Tensor, table: SamplingTable, slots: Any, positions: Any) -> Any:
    scores = Scores.of(logits.contiguous(), drawing.weighed_at(table, slots, logits.shape[1]))
    return drawing.choose(scores, table, slots, positions)


def words(*values: int) -> np.ndarray:
    return np.array([[value] for value in values], dtype=np.uint64)


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((2**32 - 1,) * 4, (2**32 - 1,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_matches_the_published_test_vectors(
    counter: tuple[int, ...], key: tuple[int, ...], expected: tuple[int, ...]
) -> None:
    assert philox_4x32(words(*counter), words(*key)).ravel().tolist() == list(expected)


def test_random_numbers_depend_on_exactly_seed_choice_and_position() -> None:
    cases = list(itertools.product([0, 1, 2**40, 2**64 - 1], [0, 1, 5], range(50)))
    seeds, choices, positions = np.array(cases, dtype=np.uint64).T
    numbers = uniform(seeds, choices, positions)
    assert len(set(numbers.tolist())) == len(numbers)
    assert ((numbers >= 0) & (numbers < 1)).all()
    order = np.random.default_rng(0).permutation(len(numbers))
    assert (uniform(seeds[order], choices[order], positions[order]) == numbers[order]).all()


def test_random_numbers_are_uniform() -> None:
    positions = np.arange(20_000, dtype=np.uint64)
    zeros = np.zeros_like(positions)
    counts = np.histogram(uniform(zeros + np.uint64(7), zeros, positions), bins=50, range=(0, 1))[0]
    # Chi-square with 49 degrees of freedom: 85 is its 99.9 % point.
    assert (((counts - 400.0) ** 2) / 400.0).sum() < 85


def expected_shares(logits: torch.Tensor, top_k: int, top_p: float) -> torch.Tensor:
    """The definition, one row at a time: top-k, then the smallest set of likeliest tokens that reaches top_p."""
    shares = logits.double().softmax(-1)
    order = shares.argsort(descending=True)[: top_k or len(shares)]
    kept = shares[order] / shares[order].sum()
    before = kept.cumsum(-1) - kept
    out = torch.zeros_like(shares)
    out[order] = kept if top_p == 1.0 else torch.where(before < top_p, kept, 0.0)
    return out / out.sum()


RESTRICTIONS = [(0, 1.0), (5, 1.0), (0, 0.8), (12, 0.9), (1, 1.0), (0, 1e-9), (40, 0.9999)]


@pytest.mark.parametrize(("top_k", "top_p"), RESTRICTIONS)
def test_draws_follow_the_restricted_distribution(top_k: int, top_p: float) -> None:
    logits = torch.randn(40, generator=torch.Generator().manual_seed(5)) * 2
    shares = expected_shares(logits, top_k, top_p).numpy()
    num = 4000
    drawn = draw(logits.expand(num, -1), np.full(num, top_k), np.full(num, top_p), (np.arange(num) + 0.5) / num)
    counts = np.bincount(drawn, minlength=40)
    # Evenly spaced draws must hit each token in proportion, up to the two ends of its interval.
    assert np.abs(counts - shares * num).max() <= 1.5


def test_random_draws_pass_a_chi_square_test() -> None:
    logits = torch.linspace(0, 3, 20)
    table = SamplingTable(1)
    table.set(0, Sampling(temperature=0.7, seed=42), num_prompt_tokens=3)
    num = 5000
    tokens = choose(logits.expand(num, -1), table, np.zeros(num, dtype=np.int64), np.arange(3, 3 + num))
    expected = expected_shares(logits / 0.7, 0, 1.0).numpy() * num
    # 19 degrees of freedom: 43.8 is the 99.9 % point.
    assert (((np.bincount(tokens, minlength=20) - expected) ** 2) / expected).sum() < 43.8


def test_every_sampler_path_gives_the_same_token() -> None:
    vocabulary = 3 * MAX_CANDIDATES
    logits = (
        torch.randn(64, vocabulary, generator=torch.Generator().manual_seed(1)) * torch.linspace(0.5, 6, 64)[:, None]
    )
    rng = np.random.default_rng(2)
    top_k = rng.choice([0, 3, 100, MAX_CANDIDATES, MAX_CANDIDATES + 1, 2 * MAX_CANDIDATES, vocabulary], 64)
    top_p = rng.choice([1.0, 0.999, 0.9, 0.5, 0.01], 64)
    draws = rng.random(64)
    together = draw(logits, top_k, top_p, draws)
    for i in range(64):
        row = slice(i, i + 1)
        assert draw(logits[row], top_k[row], top_p[row], draws[row])[0] == together[i]
        shares = expected_shares(logits[i], int(top_k[i]), float(top_p[i]))
        running = shares.cumsum(-1).numpy()
        token = together[i]
        assert shares[token] > 0
        assert running[token] - shares[token].item() - 1e-5 <= draws[i] <= running[token] + 1e-5


def spread(rows: int, vocabulary: int, sigma: float, *, coarse: bool = False) -> torch.Tensor:
    logits = torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(6)) * sigma
    return logits.bfloat16().float() if coarse else logits


def ruled_out(logits: torch.Tensor, every: int) -> torch.Tensor:
    """The model, or an allowed list, excludes the tokens `0, every, 2 * every...`."""
    changed = logits.clone()
    changed[:, ::every] = float("-inf")
    return changed


def raised(logits: torch.Tensor, every: int) -> torch.Tensor:
    changed = logits.clone()
    changed[:, ::every] += 20.0
    return changed


LARGE = 150 * GROUP
SHAPES = {
    "tens": spread(4, LARGE, 6.0),
    "hundreds": spread(4, LARGE, 3.0),
    "thousands": spread(4, LARGE, 1.5),
    "most": spread(4, LARGE, 0.3),
    "part of a group behind": spread(4, LARGE + 77, 1.5),
    "smaller than the pivots apart": spread(4, 3 * GROUP, 1.0),
    "coarse": spread(4, LARGE, 1.5, coarse=True),
    "a few values": spread(4, LARGE, 1.5).round(),
    "all equal": torch.full((2, LARGE), 2.5),
    "two values": (spread(4, LARGE, 1.0) > 0.5).float(),
    "every pivot ruled out": ruled_out(spread(4, LARGE, 1.5), GROUP),
    "all but pivots ruled out": ruled_out(spread(4, LARGE, 1.5).roll(1, dims=1), 1).scatter(
        1, torch.arange(0, LARGE, GROUP).expand(4, -1), spread(4, LARGE // GROUP, 1.5)
    ),
    "half ruled out": ruled_out(spread(4, LARGE, 1.5), 2),
    "every pivot raised": raised(spread(4, LARGE, 1.0), GROUP),
    "mass in few that are no pivots": raised(spread(4, LARGE, 1.0).roll(1, dims=1), 40 * GROUP + 1),
}


@pytest.mark.parametrize("logits", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize(
    "asked",
    [
        (0, 0.9, 0.0, 1.0), (0, 0.05, 0.0, 1.0), (0, 0.999, 0.0, 0.5), (0, 0.5, 0.0, 2.0), (0, 1e-9, 0.0, 1.0),
        (2000, 1.0, 0.0, 1.0), (2000, 0.9, 0.0, 1.0), (300, 0.5, 0.0, 1.0), (0, 0.9, 0.01, 1.0), (0, 1.0, 0.01, 1.0),
        (2000, 0.7, 0.05, 1.0),
    ],
)  # fmt: skip
def test_top_p_keeps_the_smallest_sufficient_set_of_the_vocabulary(
    monkeypatch: pytest.MonkeyPatch, logits: torch.Tensor, asked: tuple[int, float, float, float]
) -> None:
    top_k, top_p, min_p, temperature = asked
    monkeypatch.setattr(drawing, "NUMBERS_OF_CANDIDATES", {})
    thresholds = []
    draw_by_groups = drawing._draw_by_groups

    def noting(scores: Scores, draws: Draws, masses: torch.Tensor, threshold: torch.Tensor) -> Any:
        thresholds.append(threshold)
        return draw_by_groups(scores, draws, masses, threshold)

    monkeypatch.setattr(drawing, "_draw_by_groups", noting)
    number = np.linspace(0.0, 1.0, len(logits), endpoint=False)
    tokens = draw(logits, top_k, top_p, number, temperature=temperature, min_p=min_p)
    (found,) = thresholds
    for row, least, token in zip(logits.double(), found.ravel().tolist(), tokens.tolist(), strict=True):
        weights = ((row - row.max()) / temperature).exp()
        allowed = weights >= min_p * (1 - 1e-6)
        order = torch.where(allowed, row, -torch.inf).argsort(descending=True)[: top_k or len(row)]
        order = order[allowed[order]]
        assert row[token] >= least
        if top_p == 1.0:
            assert not weights[(row >= least) != (row >= row[order].min())].any()
            continue
        wanted = top_p * weights[order].sum()
        # The masses are sums of float32 weights.
        assert weights[row >= least].sum() >= wanted * (1 - 5e-6)
        assert weights[row > least].sum() < wanted * (1 + 5e-6)
        assert (row == least).any()


def test_a_row_of_a_flat_distribution_draws_the_same_token_alone_and_in_a_batch() -> None:
    sigmas = [0.0, 0.3, 1.0, 1.5, 2.0, 3.0, 6.0, 0.5, 1.2, 2.5, 4.0, 1.0]
    logits = torch.cat([spread(12, LARGE + 5, sigma)[n : n + 1] for n, sigma in enumerate(sigmas)])
    draws = np.random.default_rng(3).random(len(logits))
    together = draw(logits, 0, 0.9, draws)
    for i in range(len(logits)):
        row = slice(i, i + 1)
        assert draw(logits[row], 0, 0.9, draws[row])[0] == together[i]


def test_rounding_that_reorders_near_ties_does_not_change_the_drawn_token() -> None:
    num = 1000
    logits = torch.tensor([1.0, 2.0, 2.0 + 1e-6, 0.5])
    swapped = torch.tensor([1.0, 2.0 + 1e-6, 2.0, 0.5])
    draws = (np.arange(num) + 0.5) / num
    top_k, top_p = np.full(num, 3), np.full(num, 1.0)
    same = draw(logits.expand(num, -1), top_k, top_p, draws) == draw(swapped.expand(num, -1), top_k, top_p, draws)
    assert same.sum() >= num - 1


@pytest.mark.parametrize(("top_k", "top_p"), [(3, 1.0), (0, 0.5), (2 * MAX_CANDIDATES, 1.0)])
def test_ties_at_the_cutoff_are_all_kept_in_any_batch(top_k: int, top_p: float) -> None:
    # As coarse as in bfloat16: 5000 tokens share seven values.
    logits = (torch.randn(5000, generator=torch.Generator().manual_seed(4)) * 2).round().clamp(-3, 3)
    kept = logits >= logits.sort(descending=True).values[int((expected_shares(logits, top_k, top_p) > 0).sum()) - 1]
    ids = kept.nonzero().ravel()
    num = 200
    draws = (np.arange(num) + 0.5) / num
    tokens = draw(logits.expand(num, -1), np.full(num, top_k), np.full(num, top_p), draws)
    weights = logits[ids].double().softmax(-1).cumsum(-1)
    assert tokens.tolist() == ids[torch.searchsorted(weights, torch.from_numpy(draws))].tolist()
    beside = torch.stack([logits, torch.randn(5000, generator=torch.Generator().manual_seed(6))])
    other_k = MAX_CANDIDATES // 2
    for i in range(0, num, 20):
        found = draw(beside, np.array([top_k, other_k]), np.array([top_p, 1.0]), draws[[i, i]])
        assert found[0] == tokens[i]


def test_extreme_random_numbers_draw_kept_tokens() -> None:
    logits = torch.tensor([[-40.0, 0.0, 1.0, -40.0, -1e30]])
    for top_k, top_p in RESTRICTIONS:
        for value in (0.0, np.nextafter(1.0, 0.0)):
            token = draw(logits, np.array([top_k]), np.array([top_p]), np.array([value]))[0]
            assert expected_shares(logits[0], top_k, top_p)[token] > 0


@pytest.mark.parametrize("temperature", [1e-3, 1e-10, 1e-40, 5e-324])
@pytest.mark.parametrize(("top_k", "top_p"), [(0, 1.0), (5, 1.0), (0, 0.9), (0, 0.0)])
def test_tiny_temperatures_and_top_p_draw_the_best_token(temperature: float, top_k: int, top_p: float) -> None:
    logits = torch.tensor([[-3.0, 40.0, 60.0, 59.0, float("-inf"), 1.0, 2.0]])
    table = SamplingTable(1)
    table.set(0, Sampling(temperature=temperature, top_k=top_k, top_p=top_p), num_prompt_tokens=1)
    assert choose(logits, table, np.zeros(1, dtype=np.int64), np.array([5]))[0] == 2


def test_a_mixed_batch_gives_each_row_its_own_token() -> None:
    logits = torch.randn(6, 50, generator=torch.Generator().manual_seed(3))
    table = SamplingTable(6)
    for slot in range(6):
        table.set(slot, Sampling(temperature=0.0 if slot % 2 else 1.0, seed=slot), num_prompt_tokens=4)
    slots, positions = np.array([5, 0, 3, 2, 1, 4]), np.array([9, 4, 5, 8, 4, 7])
    together = choose(logits, table, slots, positions)
    for i in range(6):
        assert choose(logits[i : i + 1], table, slots[i : i + 1], positions[i : i + 1])[0] == together[i]
    for i in (0, 2, 4):
        assert together[i] == logits[i].argmax()


def test_the_output_position_is_counted_from_the_client_prompt_after_recomputation() -> None:
    logits = torch.zeros(1, 1000)
    short, long = SamplingTable(1), SamplingTable(1)
    short.set(0, Sampling(seed=9), num_prompt_tokens=5)
    long.set(0, Sampling(seed=9), num_prompt_tokens=50)
    slot = np.zeros(1, dtype=np.int64)
    assert choose(logits, short, slot, np.array([8])) == choose(logits, long, slot, np.array([53]))
    assert choose(logits, short, slot, np.array([8])) != choose(logits, short, slot, np.array([9]))


def test_logprobs_cover_the_whole_vocabulary_best_first() -> None:
    logits = torch.randn(3, 30, generator=torch.Generator().manual_seed(8))
    logs = logits.log_softmax(-1)
    found = logprobs(Scores.of(logits), np.array([6, 7, 8]), np.array([2, 5, 0]))
    assert [len(one.top) for one in found] == [2, 5, 0]
    assert found[2].logprob == pytest.approx(logs[2, 8].item())
    assert found[0].token_id == 6
    best = logs[0].topk(2)
    assert [token for token, _ in found[0].top] == best.indices.tolist()
    assert [value for _, value in found[0].top] == pytest.approx(best.values.tolist())


def test_the_rank_counts_more_likely_tokens_of_the_whole_vocabulary() -> None:
    logits = torch.randn(40, 500, generator=torch.Generator().manual_seed(8))
    logits[:, 7] = logits[:, 9]
    order = logits.argsort(dim=-1, descending=True)
    places = np.arange(40) * 12
    tokens = order[torch.arange(40), torch.from_numpy(places)].numpy()
    found = logprobs(Scores.of(logits), tokens, np.zeros(40, dtype=np.int64))
    expected = [int((row > row[token]).sum()) + 1 for row, token in zip(logits, tokens, strict=True)]
    assert [one.rank for one in found] == expected
    assert expected[0] == 1
    assert logprobs(Scores.of(logits[:1]), np.array([7]), np.array([0]))[0].rank == (
        logprobs(Scores.of(logits[:1]), np.array([9]), np.array([0]))[0].rank
    )


@pytest.mark.parametrize("row", [[0.0, float("nan"), 1.0], [0.0, float("inf"), 1.0], [float("-inf")] * 3])
def test_a_nan_row_is_detected_among_others(row: list[float]) -> None:
    logits = torch.tensor([[1.0, 2.0, 3.0], row])
    with pytest.raises(NotFinite, match="of 1 of the requests"):
        check_finite(Scores.of(logits))
    with pytest.raises(NotFinite, match="of 1 of the requests"):
        drawing.best(logits)


def test_a_minus_infinity_logit_is_not_a_failure() -> None:
    logits = torch.tensor([[1.0, float("-inf"), -1e38], [3e38, 0.0, 0.0]])
    check_finite(Scores.of(logits))
    assert drawing.best(logits).tolist() == [0, 0]


@pytest.mark.parametrize("vocabulary", [1, 127, 5000])
def test_best_tokens_match_those_found_with_scores(vocabulary: int) -> None:
    logits = (torch.randn(9, vocabulary, generator=torch.Generator().manual_seed(5)) * 3).round()
    assert drawing.best(logits).tolist() == Scores.of(logits).best().tolist()
