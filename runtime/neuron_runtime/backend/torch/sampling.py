"""Choosing tokens from logits: greedy, temperature, top-k, top-p; the same token whatever else is in the batch.

Called by the backend on its device thread. Greedy rows cost one argmax. A drawn token depends on the row's logits
and on (seed, choice, output position) alone: the random number is a counter-based hash, there is no generator state.

A draw walks the kept tokens in the order of their ids (inverse of the cumulative distribution), not of their
probability: rounding that swaps two nearly equal logits then moves a boundary a little instead of swapping tokens.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from neuron_runtime.core import Late, SamplingParams, TokenLogprobs
from neuron_runtime.errors import ExitCode, FatalError

IntArray = npt.NDArray[np.int64]

MAX_CANDIDATES = 1024
"""Rows whose kept tokens are among this many likeliest are served without sorting the vocabulary."""
MAX_LOGPROBS = 20
MIN_TEMPERATURE = 1e-30
"""The draw is the best token long before; smaller ones would make infinities, of which softmax makes NaN."""

_LOW = np.uint64(0xFFFFFFFF)
_HIGH = np.uint64(32)


def philox_4x32(counter: npt.NDArray[np.uint64], key: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Philox-4x32-10 of Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011), over many counters.

    Args:
        counter: `[4, n]`, each below 2**32. key: `[2, n]`, each below 2**32.

    Returns:
        `[4, n]`, each below 2**32.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        product0, product1 = np.uint64(0xD2511F53) * c0, np.uint64(0xCD9E8D57) * c2
        c0, c1, c2, c3 = (product1 >> _HIGH) ^ c1 ^ k0, product1 & _LOW, (product0 >> _HIGH) ^ c3 ^ k1, product0 & _LOW
        k0, k1 = (k0 + np.uint64(0x9E3779B9)) & _LOW, (k1 + np.uint64(0xBB67AE85)) & _LOW
    return np.stack((c0, c1, c2, c3))


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
        self.seed = np.zeros(num_slots, dtype=np.uint64)
        self.choice = np.zeros(num_slots, dtype=np.uint64)
        self.num_prompt_tokens = np.zeros(num_slots, dtype=np.int64)
        self.num_logprobs = np.full(num_slots, -1, dtype=np.int64)
        """-1: none wanted."""

    def set(self, slot: int, params: SamplingParams, num_prompt_tokens: int) -> None:
        self.temperature[slot] = params.temperature
        self.top_k[slot] = params.top_k
        self.top_p[slot] = params.top_p
        self.seed[slot] = params.seed & 0xFFFFFFFFFFFFFFFF
        self.choice[slot] = params.choice
        self.num_prompt_tokens[slot] = num_prompt_tokens
        self.num_logprobs[slot] = -1 if params.logprobs is None else params.logprobs


class NotFinite(FatalError):
    """The model computed no numbers. Its cache may hold the like for other rows too, so the device begins anew."""

    def __init__(self, num_rows: int) -> None:
        super().__init__(
            ExitCode.DEVICE_FAILED,
            f"the logits of {num_rows} of the requests in a step are not finite (NaN or infinite): the weights are "
            "broken, or overflow in this dtype (float32 and bfloat16 have the widest range)",
        )


def check_finite(logits: torch.Tensor) -> None:
    """Raises NotFinite for a row with NaN or +inf, or with nothing but -inf.

    One look at each row's largest logit, which is NaN when any is: a few percent of what an argmax costs.
    """
    finite = logits.amax(dim=-1).isfinite()
    if not finite.all():
        raise NotFinite(int((~finite).sum()))


def choose(logits: torch.Tensor, table: SamplingTable, slots: IntArray, positions: IntArray) -> IntArray:
    """One token per row of `logits` (float32 `[rows, vocabulary]`).

    Args:
        slots: slot of each row, into `table`.
        positions: position in the sequence that each row's token will take.
    """
    drawn = np.flatnonzero(table.temperature[slots] > 0.0)
    if not len(drawn):
        return _numpy(logits.argmax(dim=-1))
    tokens = np.empty(len(slots), dtype=np.int64)
    if len(drawn) < len(slots):
        greedy = np.flatnonzero(table.temperature[slots] == 0.0)
        tokens[greedy] = _numpy(logits[torch.from_numpy(greedy)].argmax(dim=-1))
        logits = logits[torch.from_numpy(drawn)]
    slots, positions = slots[drawn], positions[drawn]
    output_position = (positions - table.num_prompt_tokens[slots]).astype(np.uint64)
    draws = uniform(table.seed[slots], table.choice[slots], output_position)
    temperature = torch.from_numpy(np.maximum(table.temperature[slots], MIN_TEMPERATURE)).float().unsqueeze(1)
    tokens[drawn] = draw(logits / temperature, table.top_k[slots], table.top_p[slots], draws)
    return tokens


def draw(
    logits: torch.Tensor, top_k: IntArray, top_p: npt.NDArray[np.float64], draws: npt.NDArray[np.float64]
) -> IntArray:
    """Draw one token per row from softmax(logits) restricted to top-k, then to the nucleus of mass top-p.

    The nucleus is the smallest set of likeliest tokens whose share of the top-k mass reaches top_p. A token exactly
    as likely as the last one kept is kept too, so that ties have no order.

    Args:
        logits: float32 `[rows, vocabulary]`, temperature applied.
        top_k: 0 means all. top_p: 1.0 means all. draws: in [0, 1).
    """
    vocabulary = logits.shape[1]
    top_k = np.where(top_k == 0, vocabulary, np.minimum(top_k, vocabulary))
    tokens = np.empty(len(logits), dtype=np.int64)
    restricted = (top_k < vocabulary) | (top_p < 1.0)
    among_all = ~restricted
    if restricted.any():
        rows = np.flatnonzero(restricted)
        found, complete = _draw_among_likeliest(logits[torch.from_numpy(rows)], top_k[rows], top_p[rows], draws[rows])
        tokens[rows[complete]] = found[complete]
        among_all[rows[~complete]] = True
    if among_all.any():
        rows = np.flatnonzero(among_all)
        tokens[rows] = _draw_among_all(logits[torch.from_numpy(rows)], top_k[rows], top_p[rows], draws[rows])
    return tokens


def _draw_among_likeliest(
    logits: torch.Tensor, top_k: IntArray, top_p: npt.NDArray[np.float64], draws: npt.NDArray[np.float64]
) -> tuple[IntArray, npt.NDArray[np.bool_]]:
    """Draw among the first candidates; second: whether all that a row keeps, ties included, is among them."""
    # Twice top-k shows nearly every tie with its last token.
    width = min(MAX_CANDIDATES, 2 * int(top_k.max()), logits.shape[1])
    values, ids = logits.topk(width, dim=-1)
    threshold, known = _threshold(logits, values, top_k, top_p)
    complete = known & ((values[:, -1:] < threshold) | (width == logits.shape[1]))
    by_id = ids.argsort(dim=-1)
    weights = (values - values[:, :1]).double().exp().masked_fill(values < threshold, 0.0).gather(1, by_id)
    chosen = ids.gather(1, by_id.gather(1, _invert(weights.cumsum(dim=-1), draws)))
    return _numpy(chosen.squeeze(1)), np.asarray(complete.squeeze(1).numpy(), dtype=bool)


def _draw_among_all(
    logits: torch.Tensor, top_k: IntArray, top_p: npt.NDArray[np.float64], draws: npt.NDArray[np.float64]
) -> IntArray:
    """Draw from the whole vocabulary; only rows with a restriction are sorted."""
    restricted = np.flatnonzero((top_k < logits.shape[1]) | (top_p < 1.0))
    if len(restricted):
        index = torch.from_numpy(restricted)
        some = logits[index]
        values = some.sort(dim=-1, descending=True).values
        threshold, _ = _threshold(some, values, top_k[restricted], top_p[restricted])
        logits = logits.index_copy(0, index, some.masked_fill(some < threshold, float("-inf")))
    running = logits.softmax(dim=-1).cumsum(dim=-1, dtype=torch.float64)
    return _numpy(_invert(running, draws).squeeze(1))


def _threshold(
    logits: torch.Tensor, values: torch.Tensor, top_k: IntArray, top_p: npt.NDArray[np.float64]
) -> tuple[torch.Tensor, torch.Tensor]:
    """The least logit that each row keeps, given its largest ones in `values`; second: whether they sufficed."""
    k, p = torch.from_numpy(top_k).unsqueeze(1), torch.from_numpy(top_p).unsqueeze(1)
    width, no_top_k = values.shape[1], k == logits.shape[1]
    in_top_k = torch.arange(width).unsqueeze(0) < k
    candidates = values.double().masked_fill_(~in_top_k, float("-inf"))
    # Without top-k the shares are of the whole mass, also of what lies beyond the candidates.
    mass = torch.where(no_top_k, logits.logsumexp(-1, keepdim=True).double(), candidates.logsumexp(-1, keepdim=True))
    shares = (candidates - mass).exp()
    until = shares.cumsum(dim=-1)
    num_kept = (in_top_k & (until - shares < p)).sum(dim=-1, keepdim=True).clamp_min(1)
    known = (k <= width) | (no_top_k & (until[:, -1:] >= p))
    return values.gather(1, num_kept - 1), known


def _invert(running: torch.Tensor, draws: npt.NDArray[np.float64]) -> torch.Tensor:
    """Index `[rows, 1]` at which the running sum (float64 `[rows, n]`) passes `draws` times the whole."""
    whole = running[:, -1:].contiguous()
    # Below the whole also after rounding, so that the index is never one behind the last token that weighs anything.
    target = torch.minimum(torch.from_numpy(draws).unsqueeze(1) * whole, whole.nextafter(torch.zeros_like(whole)))
    return torch.searchsorted(running, target, right=True)


def restrict(logits: torch.Tensor, rows: IntArray, late: Late) -> torch.Tensor:
    """The logits of sampling rows `rows` with every token outside `late`'s allowed ones at -inf."""
    out = logits.clone()
    for i, row in enumerate(rows):
        allowed = late.allowed_token_ids[row]
        if allowed is not None:
            ids = torch.tensor(allowed, dtype=torch.int64)
            out[i] = float("-inf")
            out[i, ids] = logits[i, ids]
    return out


def logprobs(logits: torch.Tensor, tokens: IntArray, num_alternatives: IntArray) -> list[tuple[TokenLogprobs, ...]]:
    """Log-probabilities before temperature, per row: of its token, and of its likeliest alternatives.

    `num_alternatives[i] < 0` means that row i wants none, and gets an empty tuple.
    """
    out: list[tuple[TokenLogprobs, ...]] = [()] * len(tokens)
    wanted = np.flatnonzero(num_alternatives >= 0)
    logs = logits[torch.from_numpy(wanted)].log_softmax(dim=-1)
    best = logs.topk(max(1, int(num_alternatives.max())), dim=-1)
    for i, row in enumerate(wanted):
        count, token = int(num_alternatives[row]), int(tokens[row])
        top = tuple(zip(best.indices[i, :count].tolist(), best.values[i, :count].tolist(), strict=True))
        out[row] = (TokenLogprobs(token_id=token, logprob=float(logs[i, token]), top=top),)
    return out


def _numpy(tensor: torch.Tensor) -> IntArray:
    return np.asarray(tensor.numpy(), dtype=np.int64)
