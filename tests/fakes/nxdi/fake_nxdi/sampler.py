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
    sums = values.masked_fill(over, MASKED).softmax(-1).cumsum(-1)
    if rescale:
        sums = sums / sums[:, -1:]
        sums[:, -1] = 1.0
    if config["deterministic"]:
        drawn = torch.full((len(logits), 1), 0.5)
    else:
        drawn = torch.rand((len(logits), 1), generator=_RANDOM)
    return ids.gather(1, (drawn > sums).sum(-1, keepdim=True)).flatten()
