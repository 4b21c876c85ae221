"""An EAGLE head: makes drafts from tokens and from hidden states of the model. See `eagle.py` for what differs.

`draft_model.py` calls it. At position p it computes with the token there and with the model's hidden state of the
position before, and so never at position 0. What the model computes is kept beside the caches, position by position, so
that the head can compute what it missed. Drafts continue from hidden states of its own.

Papers: https://arxiv.org/abs/2401.15077, https://arxiv.org/abs/2503.01840.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from neuron_runtime.backend.torch import eagle as names
from neuron_runtime.backend.torch.cache import KVCache, StepPlan, lazy_zeros
from neuron_runtime.backend.torch.decoder import Decoder, Tap, Weights, read_layer, rms_norm
from neuron_runtime.backend.torch.eagle import Eagle
from neuron_runtime.backend.torch.linear import Linear, linear
from neuron_runtime.backend.torch.rotary import frequencies_of
from neuron_runtime.backend.torch.weights import WeightReader
from neuron_runtime.checkpoint import FUSION, HEAD, Checkpoint, InvalidModel


class HeadWeights(NamedTuple):
    """blocks: embedding and head are the model's where the head has none.

    state_norm: of hidden states, in EAGLE 3. state_norms: of each of the model's; fused_norm: of all of them together.
    tokens: of each draft token, that of the model; None if they are the same.
    """

    blocks: Weights
    fusion: Linear
    state_norm: torch.Tensor | None
    state_norms: tuple[torch.Tensor, ...]
    fused_norm: torch.Tensor | None
    tokens: torch.Tensor | None


class EagleHead:
    """Implements `draft_model.Network`. model: this rank's part of it. num_lines, line_length: of its cache."""

    def __init__(self, eagle: Eagle, weights: HeadWeights, model: Decoder, num_lines: int, line_length: int) -> None:
        self._eagle, self._weights, blocks = eagle, weights, eagle.blocks
        self._decoder = Decoder(blocks, weights.blocks)
        self._embed = (self._decoder if eagle.has_embedding else model).embed
        self._logits = (self._decoder if eagle.has_head else model).logits
        dtype = weights.blocks.embedding.dtype
        shape = (num_lines, blocks.num_kv_heads, line_length, blocks.head_dim)
        self.cache = KVCache.empty(blocks.windows, shape, dtype, first=1)
        self._states = lazy_zeros((num_lines, line_length, blocks.hidden_size), dtype)
        """What the head reads of the model, by position, as the cache lies."""
        self._taken: list[torch.Tensor] = []
        self.tap: Tap | None = self._take if eagle.states else None

    def hear(self, plan: StepPlan, hidden: torch.Tensor) -> None:
        taken, self._taken = self._taken, []
        self._states[plan.write_line, plan.write_offset] = self._fused(taken) if taken else hidden

    def forward(self, token_ids: torch.Tensor, plan: StepPlan, before: torch.Tensor | None) -> torch.Tensor:
        eagle, weights, embedded = self._eagle, self._weights, self._embed(token_ids)
        if before is None:
            at = self.cache.plan(replace(plan.rows, start=plan.rows.start - 1))
            before = self._states[at.write_line, at.write_offset]
        if weights.state_norm is None:
            return self._decoder.blocks(weights.fusion(torch.cat((embedded, before), dim=-1)), plan)
        normed = self._normalise(before, weights.state_norm)
        first = torch.cat((self._normalise(embedded, weights.blocks.layers[0].attention_norm), normed), dim=-1)
        hidden = self._decoder.blocks(normed if eagle.adds_normed else before, plan, first)
        return self._decoder.normed(hidden) if eagle.keeps_normed else hidden

    def likeliest(self, states: torch.Tensor) -> torch.Tensor:
        hidden = states if self._eagle.keeps_normed else self._decoder.normed(states)
        found = self._logits(hidden).argmax(dim=-1)
        return found if self._weights.tokens is None else self._weights.tokens[found]

    def _take(self, num_blocks: int, hidden: torch.Tensor) -> None:
        if num_blocks in self._eagle.states:
            self._taken.append(hidden)

    def _fused(self, taken: Sequence[torch.Tensor]) -> torch.Tensor:
        if norms := self._weights.state_norms:
            taken = [self._normalise(one, norm) for one, norm in zip(taken, norms, strict=True)]
        return self._weights.fusion(self._normalise(torch.cat(list(taken), dim=-1), self._weights.fused_norm))

    def _normalise(self, x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        return x if weight is None else rms_norm(x, weight, self._eagle.blocks.rms_norm_epsilon)


def read_weights(eagle: Eagle, checkpoint: Checkpoint, reader: WeightReader, model: Decoder) -> HeadWeights:
    """Those of a checkpoint that `eagle.read_eagle` has checked."""

    def norm(is_there: bool, name: str) -> torch.Tensor | None:
        return reader.take(name).float() if is_there else None

    blocks, is_third = eagle.blocks, bool(eagle.states)
    own = Weights(
        embedding=reader.take(names.EMBEDDING) if eagle.has_embedding else model.weights.embedding,
        frequencies=frequencies_of(blocks),
        layers=tuple(
            read_layer(blocks, reader, linear, f"layers.{i}.", has_attention_norm=is_third or i > 0)
            for i in range(blocks.num_layers)
        ),
        norm=norm(is_third, names.NORM),
        head=linear(reader.take(HEAD)) if eagle.has_head else model.weights.head,
    )
    state_norms = (norm(True, f"fc_norm.{number}.weight") for number in range(eagle.normed_states))
    return HeadWeights(
        blocks=own,
        fusion=linear(reader.take(FUSION), reader.take_if_any(eagle.has_fusion_bias, names.FUSION_BIAS)),
        state_norm=norm(is_third, names.STATE_NORM),
        state_norms=tuple(one for one in state_norms if one is not None),
        fused_norm=norm(eagle.fuses_normed, names.FUSED_NORM),
        tokens=_tokens(checkpoint, reader.take_whole(names.TOKENS), model) if eagle.has_tokens else None,
    )


def _tokens(checkpoint: Checkpoint, distances: torch.Tensor, model: Decoder) -> torch.Tensor:
    found = torch.arange(len(distances)) + distances.long()
    count = model.config.vocabulary_size
    if wrong := [number for number in (int(found.min()), int(found.max())) if not 0 <= number < count]:
        info = checkpoint.tensors[names.TOKENS]
        where = f"{checkpoint.folder / info.file}: tensor {info.name}"
        raise InvalidModel(f"{where} maps a draft to token {wrong[0]}, but the model has {count} tokens")
    return found
