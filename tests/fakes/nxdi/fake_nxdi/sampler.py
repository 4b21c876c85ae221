"""Sampling on the device: the distribution of NxDI's sampler, its order of steps and its flaws included.

top_p drops the token that crosses the limit, top_k 0 or -1 masks every candidate alike (a uniform choice among them).
"""

from __future__ import annotations

import torch

MASKED = -3000.0

_RANDOM = torch.Generator()


def seed(number: int) -> None:
    """A device has no seed; tests have one."""
    _RANDOM.manual_seed(number)


def sample(logits: torch.Tensor, parameters: torch.Tensor, *, config: dict[str, object], rescale: bool) -> torch.Tensor:
    """One token id for each row of `logits [rows, vocabulary]`; `parameters [rows, 3]`: top_k, top_p, temperature.

    `rescale`: the sums of probabilities are divided by their last, as NxDI does since 0.8.
    """
    if not (config["do_sample"] or config["dynamic"]):
        return logits.argmax(-1)
    ids, probabilities = distribution(logits, parameters, config)
    sums = probabilities.cumsum(-1)
    if rescale:
        sums = sums / sums[:, -1:]
        sums[:, -1] = 1.0
    if config["deterministic"]:
        drawn = torch.full((len(logits), 1), 0.5)
    else:
        drawn = torch.rand((len(logits), 1), generator=_RANDOM)
    return ids.gather(1, (drawn > sums).sum(-1, keepdim=True)).flatten()


def distribution(
    logits: torch.Tensor, parameters: torch.Tensor, config: dict[str, object]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Candidates of each row and their probabilities, likeliest first."""
    candidates = int(config["global_topk"])  # type: ignore[call-overload]
    if candidates > 0:
        values, ids = logits.topk(candidates, dim=-1)
    else:
        values, ids = logits.sort(dim=-1, descending=True)
    top_k, top_p, temperature = parameters[:, :1], parameters[:, 1:2], parameters[:, 2:]
    rank = torch.arange(values.shape[1]).expand_as(values)
    values = values.masked_fill(rank >= top_k, MASKED) / temperature
    sums = values.softmax(-1).cumsum(-1)
    # The smallest sum of the whole batch is the floor of every row's top_p.
    over = sums > torch.maximum(sums.min(), top_p)
    over[:, 0] = False
    return ids, values.masked_fill(over, MASKED).softmax(-1)


def verified(
    logits: torch.Tensor, drafts: torch.Tensor, parameters: torch.Tensor, config: dict[str, object]
) -> torch.Tensor:
    """Rejection sampling of single guesses: `[rows, 1 + drafts]`, behind the first token that is no draft anything."""
    tokens = torch.zeros(logits.shape[:2], dtype=torch.int64)
    for place in range(logits.shape[1]):
        ids, probabilities = distribution(logits[:, place], parameters, config)
        if place < drafts.shape[1]:
            is_draft = ids == drafts[:, place : place + 1]
            chance = (probabilities * is_draft).sum(-1)
            taken = torch.rand(len(ids), generator=_RANDOM) < chance
            # Where the draft has all of it, it is taken.
            others = (probabilities * ~is_draft).clamp(min=1e-30)
            drawn = ids.gather(1, torch.multinomial(others, 1, generator=_RANDOM)).flatten()
            tokens[:, place] = torch.where(taken, drafts[:, place].long(), drawn)
        else:
            tokens[:, place] = ids.gather(1, torch.multinomial(probabilities, 1, generator=_RANDOM)).flatten()
    return tokens
