"""The likeliest tokens found with group maxima are those of the whole vocabulary, for every size."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from neuron_runtime.backend.host_sampling.likeliest import GROUP, ROWS_AT_ONCE, Scores

VOCABULARIES = [1, 7, GROUP, GROUP + 1, 5 * GROUP - 3, 40 * GROUP, 300 * GROUP, 300 * GROUP + 77]


def logits(rows: int, vocabulary: int, *, coarse: bool = False) -> torch.Tensor:
    """Normally distributed scores: all different within a row on any processor, or many equal if coarse."""
    random = torch.Generator().manual_seed(vocabulary)
    if coarse:
        return (torch.randn(rows, vocabulary, generator=random) * 3).round()
    ranks = torch.stack([torch.randperm(vocabulary, generator=random) for _ in range(rows)])
    return 3 * torch.special.ndtri((ranks.double() + 0.5) / vocabulary).float()


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
@pytest.mark.parametrize("count", [1, 5, 64, 1000])
def test_the_top_k_equal_those_of_the_whole_sorted_vocabulary(vocabulary: int, count: int) -> None:
    count = min(count, vocabulary)
    given = logits(2 * ROWS_AT_ONCE + 1, vocabulary)
    values, ids = Scores.of(given).likeliest(count)
    expected = given.topk(count, dim=-1)
    assert torch.equal(values, expected.values)
    assert torch.equal(ids, expected.indices)


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
def test_the_top_1_is_the_first_of_equal_maxima(vocabulary: int) -> None:
    given = logits(9, vocabulary, coarse=True)
    assert Scores.of(given).best().tolist() == given.argmax(dim=-1).tolist()


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
def test_ties_may_return_any_token_with_correct_values(vocabulary: int) -> None:
    count = min(20, vocabulary)
    given = logits(9, vocabulary, coarse=True)
    values, ids = Scores.of(given).likeliest(count)
    assert torch.equal(values, given.topk(count, dim=-1).values)
    assert torch.equal(given.gather(1, ids), values)
    assert all(len(set(row)) == count for row in ids.tolist())


def test_excluded_tokens_come_last_and_are_valid_tokens() -> None:
    given = torch.full((1, 300 * GROUP + 5), float("-inf"))
    given[0, [7, 300 * GROUP + 2]] = 1.0
    values, ids = Scores.of(given).likeliest(4)
    assert values[0].tolist()[:2] == [1.0, 1.0]
    assert set(ids[0].tolist()[:2]) == {7, 300 * GROUP + 2}
    assert ids.max() < given.shape[1]
    assert ids.min() >= 0


@pytest.mark.parametrize("vocabulary", [5 * GROUP - 3, 40 * GROUP])
def test_a_subset_of_rows_gives_the_same_result(vocabulary: int) -> None:
    given = logits(2 * ROWS_AT_ONCE + 3, vocabulary)
    temperature = np.linspace(0.0, 2.0, len(given))
    for rows in ([0, 3, 4, 18], list(range(5, 17)), [18]):
        some = Scores.of(given, temperature).rows(torch.tensor(rows))
        alone = Scores.of(given[rows], temperature[rows])
        assert torch.equal(some.maxima, alone.maxima)
        assert torch.allclose(some.masses, alone.masses)
        assert some.best().tolist() == alone.best().tolist()
        assert torch.equal(some.likeliest(9)[1], alone.likeliest(9)[1])
        token_ids = torch.arange(len(rows)).unsqueeze(1)
        assert torch.equal(some.take(token_ids), given[rows].gather(1, token_ids))
        assert torch.equal(torch.cat([part for _, part in some.parts()]), given[rows])


@pytest.mark.parametrize("raised", [0.0, 1000.0, -3e6])
@pytest.mark.parametrize(("coldest", "warmest"), [(0.3, 2.0), (0.7, 0.7), (1e-30, 1.0), (1e-30, 1e-30)])
def test_masses_use_the_given_temperatures(raised: float, coldest: float, warmest: float) -> None:
    given = logits(ROWS_AT_ONCE + 4, 5 * GROUP - 3) + raised
    temperature = np.linspace(coldest, warmest, len(given))
    column = torch.from_numpy(temperature).unsqueeze(1)
    expected = ((given.double() - given.amax(-1, keepdim=True)) / column).exp().sum(-1, keepdim=True)
    assert torch.allclose(Scores.of(given, temperature).masses.double(), expected, rtol=1e-5)
    assert (Scores.of(given).masses == 1.0).all()


def test_a_changed_row_is_recomputed_and_a_copy_is_not_modified() -> None:
    given = logits(3, 40 * GROUP)
    scores = Scores.of(given, np.ones(3))
    kept = scores.rows(torch.tensor([1])).copy()
    best = int(kept.best())
    given[1, 5] = 100.0
    scores.refresh([1], np.ones(3))
    assert scores.best()[1] == 5
    assert scores.masses[1] == pytest.approx(1.0)
    assert int(kept.best()) == best
    assert float(kept.take(torch.tensor([[5]]))) < 100.0
