"""What a decoder layer computes after attention: one MLP, or the few of many that a router chooses for each token.

Created from a checkpoint by `decoder.read_weights`, and called by the decoder. With several ranks each has a part of
every expert, so all ranks compute the same experts, and the sum of their outputs is that of the layer.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.nn import functional

from neuron_runtime.backend.torch.linear import Linear


class Dense(NamedTuple):
    """SwiGLU; `gate_up` is a fused projection. Called with `[tokens, hidden size]`, and returns as much."""

    gate_up: Linear
    down: Linear

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(functional.silu(gate) * up)


class Experts(NamedTuple):
    """Called as `Dense` is. Each expert that a step needs is read once, for all tokens that have it.

    router: `[experts, hidden size]`. top_k: experts of a token. normalises: whether their shares are divided by their
    sum. shared: what all tokens have beside them, times the sigmoid of `shared_gate` `[1, hidden size]`.
    """

    router: torch.Tensor
    experts: tuple[Dense, ...]
    top_k: int
    normalises: bool
    shared: Dense | None = None
    shared_gate: torch.Tensor | None = None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        shares, chosen = functional.linear(x, self.router).float().softmax(dim=-1).topk(self.top_k, dim=-1)
        if self.normalises:
            shares /= shares.sum(dim=-1, keepdim=True)
        flat = chosen.flatten()
        order = flat.argsort(stable=True)
        shares, tokens = shares.flatten()[order].unsqueeze(1).to(x.dtype), order // self.top_k
        out, begin = torch.zeros_like(x), 0
        for expert, count in enumerate(flat.bincount().tolist()):
            if count:
                span = slice(begin, begin + count)
                out.index_add_(0, tokens[span], self.experts[expert](x[tokens[span]]) * shares[span])
                begin += count
        if self.shared is not None and self.shared_gate is not None:
            out += functional.linear(x, self.shared_gate).sigmoid() * self.shared(x)
        return out


Mlp = Dense | Experts
