"""What a decoder layer computes after attention: one MLP, or the few of many that a router chooses for each token.

Created from a checkpoint by `decoder.read_weights`, and called by the decoder. With several ranks each has a part of
every expert, so all ranks compute the same experts, and the sum of their outputs is that of the layer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch.nn import functional

from neuron_runtime.backend.torch.architecture import Activation, Scores
from neuron_runtime.backend.torch.linear import Linear


class Dense(NamedTuple):
    """SwiGLU; `gate_up` is a fused projection. Called with `[tokens, hidden size]`, and returns as much."""

    gate_up: Linear
    down: Linear

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(functional.silu(gate) * up)


class GeGLU(NamedTuple):
    """As `Dense`, with the approximation of GELU by tanh."""

    gate_up: Linear
    down: Linear

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(functional.gelu(gate, approximate="tanh") * up)


class Clamped(NamedTuple):
    """As `Dense`, with another activation: `(up + 1) * gate * sigmoid(alpha * gate)`, of a gate that is at most `limit`
    and an up within +-`limit`."""

    gate_up: Linear
    down: Linear
    alpha: float
    limit: float

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        return self.down((up + 1) * gate * torch.sigmoid(gate * self.alpha))


class Route(NamedTuple):
    """How a router chooses: the `top_k` experts of a token, by its outputs.

    scores: how these become shares. normalises: whether the shares of a token are divided by their sum.
    scales_inputs: whether shares are multiplied with what experts read; otherwise with what they write.
    """

    scores: Scores
    top_k: int
    normalises: bool
    scales_inputs: bool = False

    def __call__(self, outputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Shares and experts of each token, both `[tokens, top_k]`. outputs: `[tokens, experts]`, float32."""
        if self.scores == "sigmoid":
            best, chosen = outputs.topk(self.top_k, dim=-1)
            shares = best.sigmoid()
        else:
            shares, chosen = outputs.softmax(dim=-1).topk(self.top_k, dim=-1)
        if self.normalises:
            shares /= shares.sum(dim=-1, keepdim=True)
        return shares, chosen


class Experts(NamedTuple):
    """Called as `Dense` is. Each expert that a step needs is read once, for all tokens that have it.

    router: `[experts, hidden size]`. shared: what all tokens have beside their experts, times the sigmoid of
    `shared_gate` `[1, hidden size]` if there is one.
    """

    router: torch.Tensor
    experts: tuple[Dense | Clamped, ...]
    route: Route
    router_bias: torch.Tensor | None = None
    shared: Dense | None = None
    shared_gate: torch.Tensor | None = None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        shares, chosen = self.route(functional.linear(x, self.router, self.router_bias).float())
        flat = chosen.flatten()
        order = flat.argsort(stable=True)
        shares, tokens = shares.flatten()[order].unsqueeze(1).to(x.dtype), order // self.route.top_k
        out, begin = torch.zeros_like(x), 0
        for number, count in enumerate(flat.bincount().tolist()):
            if count:
                span = slice(begin, begin + count)
                rows, expert = x[tokens[span]], self.experts[number]
                scales_inputs = self.route.scales_inputs
                found = expert(rows * shares[span]) if scales_inputs else expert(rows) * shares[span]
                out.index_add_(0, tokens[span], found)
                begin += count
        if self.shared is not None:
            shared = self.shared(x)
            out += shared if self.shared_gate is None else functional.linear(x, self.shared_gate).sigmoid() * shared
        return out


Mlp = Dense | GeGLU | Experts

DENSE: Mapping[Activation, Callable[[Linear, Linear], Dense | GeGLU]] = {"silu": Dense, "gelu_tanh": GeGLU}
"""By the activation of gates."""
