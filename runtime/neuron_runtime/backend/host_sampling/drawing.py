"""Token sampling from logits: greedy, temperature, min-p, top-k, top-p. Called by `sampler`, after `adjustments`.

A drawn token depends only on the row's logits and on (seed, choice, output position). A draw walks the kept tokens in
order of id (inverse of the cumulative distribution), not of probability: rounding that swaps two nearly equal logits
then moves a boundary a little instead of swapping tokens.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt
import torch

from neuron_runtime.backend.host_sampling.likeliest import GROUP, ROWS_AT_ONCE, Scores, group_sums, weigh
from neuron_runtime.core import Sampling, TokenLogprobs
from neuron_runtime.errors import ExitCode, FatalError

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]

NUMBERS_OF_CANDIDATES = {32: True, 64: False, 128: True, 256: False}
"""Numbers of likeliest tokens to try, in order, and whether rows without top-k try them too. Rows without top-k may
keep any number of tokens, usually few, so they take larger steps (measured). Rows that keep more than the last number
search the whole vocabulary, at a cost that does not depend on how many tokens they keep."""
MARGIN = 8
MAX_APART = 32
"""In pivots of `GROUP` tokens each: MARGIN is how far around the expected end of a nucleus to search, MAX_APART how far
apart two pivots may be for the tokens between them to be sorted. Measured: smaller values compute the mass above a
pivot more often, larger ones sort more."""
MAX_GUESSES = 3
"""Guesses of that place before a binary search."""
MIN_TEMPERATURE = 1e-30
"""At this value a draw always returns the best token; smaller ones overflow to infinity, and softmax to NaN."""

_LOW = np.uint64(0xFFFFFFFF)
_HIGH = np.uint64(32)
_MULTIPLIERS = np.array([[0xD2511F53], [0xCD9E8D57]], dtype=np.uint64)
_KEY_STEPS = np.array([[0x9E3779B9], [0xBB67AE85]], dtype=np.uint64)


def philox_4x32(counter: npt.NDArray[np.uint64], key: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Philox-4x32-10 of Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011), over many counters.

    counter, result: `[4, n]`. key: `[2, n]`. Each number is below 2**32.
    """
    even, odd = counter[0::2], counter[1::2]
    for _ in range(10):
        product = _MULTIPLIERS * even
        even, odd = (product[::-1] >> _HIGH) ^ odd ^ key, product[::-1] & _LOW
        key = (key + _KEY_STEPS) & _LOW
    return np.stack((even[0], odd[0], even[1], odd[1]))


def uniform(
    seed: npt.NDArray[np.uint64], choice: npt.NDArray[np.uint64], position: npt.NDArray[np.uint64]
) -> npt.NDArray[np.float64]:
    """One number in [0, 1) per (seed, choice, output position): key = seed, counter = (position, choice)."""
    counter = np.stack((position & _LOW, position >> _HIGH, choice & _LOW, choice >> _HIGH))
    words = philox_4x32(counter, np.stack((seed & _LOW, seed >> _HIGH)))
    bits = (words[0] << np.uint64(21)) ^ (words[1] >> np.uint64(11))
    numbers: npt.NDArray[np.float64] = bits.astype(np.float64) * 2.0**-53
    return numbers


class SamplingTable:
    """Sampling parameters per slot, as arrays."""

    def __init__(self, num_slots: int) -> None:
        self.temperature = np.zeros(num_slots)
        self.top_k = np.zeros(num_slots, dtype=np.int64)
        self.top_p = np.ones(num_slots)
        self.min_p = np.zeros(num_slots)
        self.seed = np.zeros(num_slots, dtype=np.uint64)
        self.choice = np.zeros(num_slots, dtype=np.uint64)
        self.num_prompt_tokens = np.zeros(num_slots, dtype=np.int64)
        self.num_logprobs = np.full(num_slots, -1, dtype=np.int64)
        """-1: none requested."""

    def set(self, slot: int, params: Sampling, num_prompt_tokens: int) -> None:
        self.temperature[slot] = params.temperature
        self.top_k[slot] = params.top_k
        self.top_p[slot] = params.top_p
        self.min_p[slot] = params.min_p
        self.seed[slot] = params.seed & 0xFFFFFFFFFFFFFFFF
        self.choice[slot] = params.choice
        self.num_prompt_tokens[slot] = num_prompt_tokens
        self.num_logprobs[slot] = -1 if params.logprobs is None else params.logprobs


class NotFinite(FatalError):
    """The model computed NaN or infinity. Its cache may hold such values for other rows too, so the engine restarts."""

    def __init__(self, num_rows: int, what: str = "logits") -> None:
        super().__init__(
            ExitCode.DEVICE_FAILED,
            f"the {what} of {num_rows} of the requests in a step are not finite (NaN or infinite): the weights are "
            "broken, or overflow in this dtype (float32 and bfloat16 have the widest range)",
        )


def check_finite(scores: Scores) -> None:
    """Raises NotFinite for a row with NaN or +inf, or with only -inf; checking its largest logit is enough."""
    finite = scores.top.isfinite()
    if not finite.all():
        raise NotFinite(int((~finite).sum()))


def best(logits: torch.Tensor) -> IntArray:
    """The best token of each row, the first one on a tie. For steps in which every row is plain greedy.

    Raises as `check_finite`.
    """
    values = logits.numpy()
    tokens: IntArray = values.argmax(axis=1)  # takes a third of torch's time; NaN counts as the largest
    finite = np.isfinite(values[np.arange(len(tokens)), tokens])
    if not finite.all():
        raise NotFinite(int((~finite).sum()))
    return tokens


@dataclass(frozen=True, slots=True)
class Draws:
    """Sampling parameters of the rows to draw, as arrays `[rows]`.

    top_k: 0 means all. top_p: 1.0 means all. min_p: 0.0 means all. number: the random number, in [0, 1).
    """

    temperature: FloatArray
    top_k: IntArray
    top_p: FloatArray
    min_p: FloatArray
    number: FloatArray

    def rows(self, index: IntArray) -> Draws:
        """The rows at `index`, which is ascending."""
        if len(index) == len(self.number):
            return self
        return Draws(*(getattr(self, one.name)[index] for one in fields(self)))


def weighed_at(table: SamplingTable, slots: IntArray, vocabulary_size: int) -> FloatArray:
    """The temperature for `Scores.of` at which each row needs its mass; 0 for rows that draw without it."""
    temperature = table.temperature[slots]
    everything = (table.top_k[slots] == 0) | (table.top_k[slots] >= vocabulary_size)
    needed = everything & (table.min_p[slots] == 0.0) & (table.top_p[slots] < 1.0)
    return np.where(needed & (temperature > 0.0), np.maximum(temperature, MIN_TEMPERATURE), 0.0)


def choose(scores: Scores, table: SamplingTable, slots: IntArray, positions: IntArray) -> IntArray:
    """One token per row.

    Args:
        scores: with the masses of `weighed_at`.
        slots: slot of each row, into `table`.
        positions: position of each row's new token in its sequence.
    """
    temperature = table.temperature[slots]
    drawn = np.flatnonzero(temperature > 0.0)
    tokens = np.empty(len(slots), dtype=np.int64)
    if len(drawn) < len(slots):
        greedy = np.flatnonzero(temperature == 0.0)
        tokens[greedy] = _numpy(scores.rows(torch.from_numpy(greedy)).best())
    if len(drawn):
        slots, positions = slots[drawn], positions[drawn]
        output_position = (positions - table.num_prompt_tokens[slots]).astype(np.uint64)
        draws = Draws(
            temperature=temperature[drawn],
            top_k=table.top_k[slots],
            top_p=table.top_p[slots],
            min_p=table.min_p[slots],
            number=uniform(table.seed[slots], table.choice[slots], output_position),
        )
        tokens[drawn] = draw(scores.rows(torch.from_numpy(drawn)), draws)
    return tokens


def draw(scores: Scores, draws: Draws) -> IntArray:
    """Draw one token per row from softmax(logits / temperature), restricted by min-p, top-k and top-p.

    Min-p keeps the tokens that are at least `min_p` times as likely as the likeliest; top-k keeps the `top_k` likeliest
    of those; top-p keeps the nucleus of those, the smallest set of likeliest tokens whose share of the mass reaches
    `top_p`. A token exactly as likely as the last one kept is kept too, so that ties have no order.
    """
    vocabulary = scores.vocabulary
    restricted = ((draws.top_k > 0) & (draws.top_k < vocabulary)) | (draws.top_p < 1.0) | (draws.min_p > 0.0)
    tokens = np.empty(len(restricted), dtype=np.int64)
    rows = np.flatnonzero(~restricted)
    if len(rows):
        tokens[rows] = _draw_among_all(scores.rows(torch.from_numpy(rows)), draws.rows(rows))
    rows = np.flatnonzero(restricted)
    if len(rows):
        tokens[rows] = _draw_restricted(scores.rows(torch.from_numpy(rows)), draws.rows(rows))
    return tokens


@dataclass(frozen=True, slots=True)
class _Kept:
    """Which tokens each row keeps, as tensors `[rows, 1]`."""

    top: torch.Tensor
    """The largest logit, float32."""
    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    floor: torch.Tensor
    """The smallest logit that min-p keeps, float32; -inf without min-p."""
    whole: torch.Tensor
    """Whether top-p applies to the whole vocabulary: the row has neither min-p nor top-k."""
    mass: torch.Tensor
    """Mass of the whole vocabulary, in units of the likeliest token's; only for rows that need it."""

    @classmethod
    def of(cls, scores: Scores, draws: Draws) -> _Kept:
        top_k = np.where((draws.top_k == 0) | (draws.top_k > scores.vocabulary), scores.vocabulary, draws.top_k)
        whole = (top_k == scores.vocabulary) & (draws.min_p == 0.0)
        temperature, top = _column(_temperature(draws)), scores.top
        with np.errstate(divide="ignore"):
            floor = top.double() + temperature * _column(np.log(draws.min_p))
        return cls(
            top=top,
            temperature=temperature,
            top_k=_column(top_k),
            top_p=_column(draws.top_p),
            floor=floor.float(),
            whole=_column(whole),
            mass=scores.masses.double(),
        )

    def rows(self, index: torch.Tensor) -> _Kept:
        """The rows at `index`, which is ascending."""
        if len(index) == len(self.top):
            return self
        return _Kept(*(getattr(self, one.name)[index] for one in fields(self)))

    def weights(self, logits: torch.Tensor) -> torch.Tensor:
        """Probabilities in units of the likeliest token's, float64."""
        return ((logits - self.top).double() / self.temperature).exp_()

    def threshold(self, values: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The smallest logit that each row keeps, and whether `values` were enough to find it.

        values: the largest logits of each row, best first. weights: their weights.
        """
        width = values.shape[1]
        within = (torch.arange(width) < self.top_k) & (values >= self.floor)
        weights = weights.masked_fill(~within, 0.0)
        until = weights.cumsum(dim=-1)
        mass = torch.where(self.whole, self.mass, until[:, -1:])
        num_kept = (within & (until - weights < self.top_p * mass)).sum(dim=-1, keepdim=True).clamp_min_(1)
        all_there = (self.top_k <= width) | (values[:, -1:] < self.floor)
        return values.gather(1, num_kept - 1), all_there | (self.whole & (until[:, -1:] >= self.top_p * mass))


def _draw_restricted(scores: Scores, draws: Draws) -> IntArray:
    kept = _Kept.of(scores, draws)
    number = _column(draws.number)
    top_k = _numpy(kept.top_k.squeeze(1))
    tokens = np.empty(len(top_k), dtype=np.int64)
    left = np.ones(len(top_k), dtype=bool)
    # One more than top-k shows whether its last token is tied with the next.
    unbounded = top_k == scores.vocabulary
    needed = np.where(unbounded, 1, top_k + 1)
    for width, for_unbounded in NUMBERS_OF_CANDIDATES.items():
        tried = np.flatnonzero(left & (needed <= width) & (for_unbounded | ~unbounded))
        if len(tried):
            rows = torch.from_numpy(tried)
            drawn, complete, needed[tried] = _draw_among_likeliest(
                scores.rows(rows), kept.rows(rows), number[rows], width
            )
            tokens[tried[complete]] = drawn[complete]
            left[tried[complete]] = False
    rest = np.flatnonzero(left)
    if len(rest):
        rows = torch.from_numpy(rest)
        tokens[rest] = _draw_among_kept(scores.rows(rows), draws.rows(rest), kept.rows(rows))
    return tokens


def _draw_among_likeliest(
    scores: Scores, kept: _Kept, number: torch.Tensor, width: int
) -> tuple[IntArray, npt.NDArray[np.bool_], IntArray]:
    """Draw among the `width` likeliest tokens.

    Returns:
        The tokens; whether the candidates included every token that the row keeps, ties included; and a lower bound of
        the number of candidates needed where they did not.
    """
    width = min(width, scores.vocabulary)
    values, ids = scores.likeliest(width)
    weights = kept.weights(values)
    threshold, known = kept.threshold(values, weights)
    complete = known & (values[:, -1:] < threshold) if width < scores.vocabulary else torch.ones_like(kept.whole)
    # The remaining tokens are at most as likely as the last candidate.
    missing = torch.where(kept.whole, kept.top_p * kept.mass - weights.sum(dim=-1, keepdim=True), 0.0)
    needed = width + 1 + (missing / weights[:, -1:]).nan_to_num_(0.0).clamp(0.0, scores.vocabulary).long()
    by_id = ids.argsort(dim=-1)
    running = weights.masked_fill_(values < threshold, 0.0).gather(1, by_id).cumsum(dim=-1)
    at, _ = _invert(running, number)
    tokens = ids.gather(1, by_id.gather(1, at))
    return _numpy(tokens.squeeze(1)), complete.squeeze(1).numpy(), _numpy(needed.squeeze(1))


def _draw_among_all(scores: Scores, draws: Draws) -> IntArray:
    """Draw from the whole vocabulary, in one pass over it."""
    temperature, buffer = _temperature(draws), scores.buffer(min(ROWS_AT_ONCE, len(scores)))
    masses = torch.empty_like(scores.maxima)
    for rows, logits in scores.parts():
        weigh(logits, scores.top[rows], temperature[rows], buffer[:, : scores.vocabulary])
        masses[rows] = group_sums(buffer[: len(logits)])
    return _draw_by_groups(scores, draws, masses, torch.full_like(scores.top, float("-inf")))


def _draw_among_kept(scores: Scores, draws: Draws, kept: _Kept) -> IntArray:
    """Draw from any number of kept tokens, in a few passes over the vocabulary."""
    temperature, (weights, spare) = _temperature(draws), scores.buffer(2)
    masses, threshold = torch.empty_like(scores.maxima), torch.empty_like(scores.top)
    # A single row fits the processor's cache.
    for i in range(len(scores)):
        row, one = _Row(scores.logits(i), weights, spare), slice(i, i + 1)
        weigh(row.logits.unsqueeze(0), scores.top[one], temperature[one], weights[: scores.vocabulary].unsqueeze(0))
        mass = float(kept.mass[i]) if kept.whole[i] else None
        least = row.threshold(float(kept.floor[i]), int(kept.top_k[i]), float(kept.top_p[i]), mass)
        masses[i], threshold[i] = row.reaching(least), least
    return _draw_by_groups(scores, draws, masses, threshold)


def _draw_by_groups(scores: Scores, draws: Draws, masses: torch.Tensor, threshold: torch.Tensor) -> IntArray:
    """Draw a group by the masses `[rows, groups]` of its tokens at or above the threshold `[rows, 1]`, then a token."""
    group, rest = _invert(masses.cumsum(dim=-1, dtype=torch.float64), _column(draws.number))
    logits = scores.of_groups(group)
    weights = weigh(logits, scores.top, _temperature(draws), torch.empty_like(logits)).mul_(logits >= threshold)
    running = weights.cumsum(dim=-1, dtype=torch.float64)
    at, _ = _invert(running, rest / running[:, -1:])
    return _numpy((group * GROUP + at).squeeze(1))


@dataclass(frozen=True, slots=True)
class _Row:
    """A row whose smallest kept logit is searched in the whole vocabulary.

    logits: `[vocabulary]`.
    weights: `[groups * GROUP]`, probabilities in units of the likeliest token's, 0 beyond the vocabulary.
    spare: scratch space like `weights`.
    """

    logits: torch.Tensor
    weights: torch.Tensor
    spare: torch.Tensor

    def reaching(self, threshold: float) -> torch.Tensor:
        """The mass of tokens at or above the threshold, per group."""
        # A float mask is several times as fast to write and to apply as a boolean one.
        torch.ge(self.logits, threshold, out=self.spare[: len(self.logits)])
        return group_sums(self.spare.mul_(self.weights))

    def mass(self, threshold: float) -> float:
        return float(self.reaching(threshold).sum(dtype=torch.float64))

    def threshold(self, floor: float, top_k: int, top_p: float, mass: float | None) -> float:
        """The smallest logit that the row keeps.

        Args:
            floor: the smallest logit that min-p keeps.
            mass: mass of the whole vocabulary if top-p applies to it, else None.
        """
        logits = self.logits.numpy()
        if top_k < len(logits):
            floor = max(floor, float(np.partition(logits, -top_k)[-top_k]))
        if top_p == 1.0:
            return floor
        if mass is not None:
            return self._crossing(top_p * mass, floor, mass)
        mass = self.mass(floor)
        # Tokens tied with the last one of top-k are kept, but top-p counts the mass of `top_k` tokens only.
        surplus = max(0, int(np.count_nonzero(logits >= floor)) - top_k)
        without = surplus * float(self.weights[int((logits == floor).argmax())]) if surplus else 0.0
        return self._crossing(top_p * (mass - without), floor, mass)

    def _crossing(self, target: float, floor: float, mass: float) -> float:
        """The largest threshold with a mass of at least `target` at or above it; `mass` is the mass above `floor`.

        The first token of each group is a pivot. The pivots' own weights give a first estimate of the threshold, the
        mass above a pivot refines it, and only the tokens between two close pivots are sorted.
        """
        logits, weights = self.logits.numpy(), self.weights.numpy()
        some = _falling(logits[::GROUP])
        some = some[: np.count_nonzero(some > floor)]
        pivots = np.concatenate(([np.inf], some, [floor]))
        seen = np.zeros(len(pivots))
        np.cumsum(_falling(weights[: len(logits) : GROUP])[: len(some)], out=seen[1:-1])
        seen[-1] = seen[-2]
        low, above, high, within = 0, 0.0, len(pivots) - 1, mass
        for guesses in itertools.count():
            expected = (low + high) // 2
            if guesses < MAX_GUESSES:
                share = (target - above) / (within - above)
                expected = low + int(np.searchsorted(seen[low:high], seen[low] + share * (seen[high] - seen[low])))
            at = min(expected + MARGIN, high)
            if at - low > MAX_APART:
                at = max(expected - MARGIN, low + MARGIN)
            else:
                between = np.flatnonzero((logits > float(pivots[at])) & (logits < float(pivots[low])))
                until = above + _falling(weights[between]).cumsum(dtype=np.float64)
                last = int(np.searchsorted(until, target)) + 1
                if last <= len(between):
                    return float(np.partition(logits[between], -last)[-last])
                if at == high:
                    break
            above_it = self.mass(float(pivots[at]))
            # Equal pivots have the same mass above them.
            if above_it >= target:
                high, within = int(np.searchsorted(-pivots, -pivots[at])), above_it
            else:
                low, above = int(np.searchsorted(-pivots, -pivots[at], side="right")) - 1, above_it
        return float(pivots[high])


def _falling(some: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Sorted, largest first. Much faster than torch, which sorts indexes too."""
    return np.sort(some)[::-1]


def _invert(running: torch.Tensor, number: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Index `[rows, 1]` at which the running sum (float64 `[rows, n]`) passes `number` times the total.

    Also returns the difference between that target and the sum before the index.
    """
    whole = running[:, -1:].contiguous()
    # Stays below the total after rounding, so that the index never passes the last token with a weight.
    target = torch.minimum(number * whole, whole.nextafter(torch.zeros_like(whole)))
    index = torch.searchsorted(running, target, right=True)
    before = running.gather(1, (index - 1).clamp_min(0)).masked_fill_(index == 0, 0.0)
    return index, target - before


def logprobs(scores: Scores, tokens: IntArray, num_alternatives: IntArray) -> list[TokenLogprobs]:
    """Log-probabilities of each row's token and of its likeliest alternatives, from the unmodified logits."""
    logits = scores.take(torch.from_numpy(tokens).unsqueeze(1))
    buffer = torch.empty(min(ROWS_AT_ONCE, len(scores)), scores.vocabulary)
    at_one = np.ones(len(scores))
    weights = (weigh(some, scores.top[rows], at_one[rows], buffer) for rows, some in scores.parts())
    whole = scores.top + torch.cat([one.sum(dim=-1, keepdim=True) for one in weights]).log()
    # Floats are several times as fast to add up as booleans.
    likelier = [torch.gt(some, logits[rows], out=buffer[: len(some)]).sum(dim=-1) for rows, some in scores.parts()]
    values, ids = scores.likeliest(max(1, int(num_alternatives.max(initial=0))))
    columns = zip(
        tokens.tolist(),
        (logits - whole).squeeze(1).tolist(),
        torch.cat(likelier).int().tolist(),
        (values - whole).tolist(),
        ids.tolist(),
        num_alternatives.tolist(),
        strict=True,
    )
    return [
        TokenLogprobs(token, value, tuple(zip(best[:count], values_of_best[:count], strict=True)), rank + 1)
        for token, value, rank, values_of_best, best, count in columns
    ]


def _temperature(draws: Draws) -> FloatArray:
    return np.maximum(draws.temperature, MIN_TEMPERATURE)


def _column(array: npt.NDArray[np.float64] | IntArray | npt.NDArray[np.bool_]) -> torch.Tensor:
    return torch.from_numpy(array).unsqueeze(1)


def _numpy(tensor: torch.Tensor) -> IntArray:
    return np.asarray(tensor.numpy(), dtype=np.int64)
