"""The decoder: one forward step over the tokens of all rows, in plain eager torch.

Called by the backend on its device thread. Linear layers run over all tokens of a step at once; attention computes
one-token rows together and longer rows one by one. The head runs for the requested positions only. It does not sample.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch

from neuron_runtime.backend.torch import rotary
from neuron_runtime.backend.torch.architecture import DecoderConfig
from neuron_runtime.backend.torch.attention import decode_attention, prompt_attention
from neuron_runtime.backend.torch.cache import CachePlan, DecodePart, KVCache
from neuron_runtime.backend.torch.linear import Linear, Weight, linear
from neuron_runtime.backend.torch.mlp import DENSE, Clamped, Dense, Experts, Mlp, Route
from neuron_runtime.backend.torch.parts import part_of_model, tokens_of
from neuron_runtime.backend.torch.ranks import ALONE, Ranks


class Layer(NamedTuple):
    """Weights of one block; `qkv` is a fused projection, weights of norms are float32.

    attention_norm: None if attention computes with its input as it is.
    head_norm: `[heads + kv_heads, head_dim]`, for each head of queries and keys; None where they are not normalised.
    sinks: `[heads]`, float32; see `attention.py`.
    after_attention, after_mlp: of what they add to the hidden states; None: it is added as it is.
    """

    attention_norm: torch.Tensor | None
    qkv: Linear
    head_norm: torch.Tensor | None
    output: Linear
    mlp_norm: torch.Tensor
    mlp: Mlp
    sinks: torch.Tensor | None = None
    after_attention: torch.Tensor | None = None
    after_mlp: torch.Tensor | None = None


class Weights(NamedTuple):
    """Everything that a decoder computes with; frequencies: see `rotary.frequencies_of`.

    norm: None if the head computes with the hidden states as they are. head: None if these are all that is wanted.
    """

    embedding: torch.Tensor
    frequencies: tuple[torch.Tensor, ...]
    layers: Sequence[Layer]
    norm: torch.Tensor | None
    head: Linear | None


class Placed(NamedTuple):
    """Features of pictures in the place of embeddings: `features[i]` for token `places[i]` of a step. What they have
    beyond the hidden size is added after the first blocks, one part after each."""

    places: torch.Tensor
    features: torch.Tensor


class Reader(Protocol):
    """Returns tensors of a checkpoint by name; see `weights.WeightReader`."""

    def take(self, *names: str) -> torch.Tensor: ...

    def take_weight(self, *names: str) -> Weight: ...

    def take_if_any(self, present: bool, *names: str) -> torch.Tensor | None: ...


Keep = Callable[[Callable[[int], Layer], int], Sequence[Layer]]
"""Makes the layers of what reads one by its number, and of how many there are."""
MakeLinear = Callable[[Weight, torch.Tensor | None], Linear]
Tap = Callable[[int, torch.Tensor], None]
"""Called with the number of blocks done, from 0 on, and the hidden states then."""


class Decoder:
    """A model: `forward` runs its blocks, `logits` its head. With several ranks, one rank's part of it: all ranks call
    it with the same arguments and get the same results.

    config: of the whole model; `self.config` is that of the part.
    """

    def __init__(self, config: DecoderConfig, weights: Weights, ranks: Ranks = ALONE) -> None:
        self.config = part_of_model(config, ranks.size)
        self.weights = weights
        self._ranks = ranks
        self._tokens = tokens_of(config, ranks.rank, ranks.size)
        # As exact as transformers has it.
        self._embedding_scale = float(torch.tensor(config.embedding_scale, dtype=weights.embedding.dtype))

    def forward(
        self, token_ids: torch.Tensor, plan: CachePlan, tap: Tap | None = None, placed: Placed | None = None
    ) -> torch.Tensor:
        """Feed `token_ids` `[tokens]`, storing their keys and values. placed: what some of them have in the place of
        an embedding.

        Returns the hidden states after the last norm, `[tokens, hidden size]`.
        """
        return self.normed(self.blocks(self.embed(token_ids, placed), plan, tap=tap, placed=placed))

    def blocks(
        self,
        x: torch.Tensor,
        plan: CachePlan,
        first: torch.Tensor | None = None,
        tap: Tap | None = None,
        placed: Placed | None = None,
    ) -> torch.Tensor:
        """The hidden states after all blocks, from those before. first: what the first block's attention computes with,
        in the place of its normalised input. placed: as of `embed`."""
        config, weights, ranks = self.config, self.weights, self._ranks
        num_placed = config.num_heads + config.num_kv_heads
        places = rotary.placing(config, plan.positions, weights.frequencies, x.dtype)
        for index, (layer, place) in enumerate(zip(weights.layers, places, strict=True)):
            if tap is not None:
                tap(index, x)
            attended = first if index == 0 and first is not None else self._normalise(x, layer.attention_norm)
            heads = layer.qkv(attended).view(x.shape[0], -1, config.head_dim)
            turning = heads[:, :num_placed]
            if layer.head_norm is not None:
                turning = self._normalise(turning, layer.head_norm)
            turned = place(turning)
            query, key, value = turned[:, : config.num_heads], turned[:, config.num_heads :], heads[:, num_placed:]
            plan.cache.write(index, plan, key, value)
            found = ranks.sum(layer.output(self._attend(index, plan, query, key, value)))
            x = x + self._normalise(found, layer.after_attention)
            found = ranks.sum(layer.mlp(self._normalise(x, layer.mlp_norm)))
            x = x + self._normalise(found, layer.after_mlp)
            if placed is not None and index + 1 < placed.features.shape[1] // config.hidden_size:
                part = placed.features[:, (index + 1) * config.hidden_size : (index + 2) * config.hidden_size]
                x = x.index_add(0, placed.places, part.to(x.dtype))
        if tap is not None:
            tap(len(weights.layers), x)
        return x

    def normed(self, hidden: torch.Tensor) -> torch.Tensor:
        """What the head computes with."""
        return self._normalise(hidden, self.weights.norm)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits of the token that follows each hidden state: float32 `[hidden states, vocabulary]`."""
        assert self.weights.head is not None
        return self._ranks.gather(self.weights.head(hidden).float())[:, : self.config.vocabulary_size]

    def embed(self, token_ids: torch.Tensor, placed: Placed | None = None) -> torch.Tensor:
        x = self._embed(token_ids)
        if self.config.embedding_scale != 1:
            x = x * self._embedding_scale
        return x if placed is None else x.index_copy(0, placed.places, placed.features[:, : x.shape[1]].to(x.dtype))

    def _embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        if self._ranks.size == 1:
            return self.weights.embedding[token_ids]
        # Exact: all ranks but one add zero.
        own = token_ids - self._tokens.start
        elsewhere = (own < 0) | (own >= len(self._tokens))
        x = self.weights.embedding[own.masked_fill(elsewhere, 0)].masked_fill(elsewhere.unsqueeze(1), 0.0)
        return self._ranks.sum(x)

    def _attend(
        self, layer: int, plan: CachePlan, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        """Attention of all rows: query `[tokens, heads, dim]` to `[tokens, heads * dim]`."""
        decode, prompts = plan.reads[layer]
        if decode is not None and decode.flat is None:
            return self._attend_decode(layer, decode, plan.cache, query).flatten(1)
        out = torch.empty_like(query, memory_format=torch.contiguous_format)
        if decode is not None:
            out[decode.flat] = self._attend_decode(layer, decode, plan.cache, query[decode.flat])
        sinks = self.weights.layers[layer].sinks
        for part in prompts:
            span = slice(part.begin, part.end)
            if part.mask is None:
                keys, values = key[span].transpose(0, 1), value[span].transpose(0, 1)
            else:
                keys, values = plan.cache.read_prompt(layer, part)
            out[span] = prompt_attention(query[span], keys, values, part.mask, self.config.attention_scale, sinks=sinks)
        return out.flatten(1)

    def _attend_decode(self, layer: int, part: DecodePart, cache: KVCache, query: torch.Tensor) -> torch.Tensor:
        lanes = query.view(query.shape[0], self.config.num_kv_heads, -1, self.config.head_dim)
        if part.lanes is not None:
            lanes = lanes.new_zeros((len(part.mask), *lanes.shape[1:])).index_copy_(0, part.lanes, lanes)
        key, value = cache.read_decode(layer, part)
        sinks = self.weights.layers[layer].sinks
        out = decode_attention(lanes, key, value, part.mask, self.config.attention_scale, sinks=sinks)
        return out if part.lanes is None else out.index_select(0, part.lanes)

    def _normalise(self, x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        return x if weight is None else rms_norm(x, weight, self.config.rms_norm_epsilon)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """Root mean square norm over the last dimension, computed in float32 like its weight.

    torch's rms_norm mixes dtypes in half precision: ten times slower at hundreds of tokens, equal at a few.
    """
    exact = x.float()
    length: torch.Tensor = torch.linalg.vector_norm(exact, dim=-1, keepdim=True)
    scale = length.square_().div_(x.shape[-1]).add_(epsilon).rsqrt_()
    return (exact * scale).mul_(weight).to(x.dtype)


def all_layers(read: Callable[[int], Layer], count: int) -> Sequence[Layer]:
    return tuple(map(read, range(count)))


def read_weights(
    config: DecoderConfig, reader: Reader, make: MakeLinear = linear, keep: Keep = all_layers, *, has_head: bool = True
) -> Weights:
    """The tensors of a checkpoint in the decoder's layout. keep: which layers are in memory."""
    embedding = reader.take("model.embed_tokens.weight")
    frequencies = rotary.frequencies_of(config)
    has_experts = config.experts.layers if config.experts else (False,) * config.num_layers

    def layer(i: int) -> Layer:
        prefix, is_rotated = f"model.layers.{i}.", i not in config.unrotated
        return read_layer(config, reader, make, prefix, has_experts=has_experts[i], is_rotated=is_rotated)

    layers = keep(layer, config.num_layers)
    norm = reader.take("model.norm.weight").float() + config.norm_offset
    head = None
    if has_head:
        head = make(embedding if config.tied_embeddings else reader.take_weight("lm_head.weight"), None)
    return Weights(embedding, frequencies, layers, norm, head)


def read_layer(
    config: DecoderConfig,
    reader: Reader,
    make: MakeLinear,
    prefix: str,
    *,
    has_attention_norm: bool = True,
    has_experts: bool = False,
    is_rotated: bool = True,
) -> Layer:
    def projection(has_bias: bool, *names: str) -> Linear:
        weight = reader.take_weight(*(f"{prefix}{name}.weight" for name in names))
        return make(weight, reader.take_if_any(has_bias, *(f"{prefix}{name}.bias" for name in names)))

    def norm(name: str) -> torch.Tensor:
        return reader.take(f"{prefix}{name}.weight").float() + config.norm_offset

    def norm_if_any(name: str) -> torch.Tensor | None:
        return norm(name) if name else None

    def head_norm() -> torch.Tensor | None:
        if config.plain_norm and is_rotated:
            return torch.ones(config.num_heads + config.num_kv_heads, config.head_dim)
        if not config.query_key_norm:
            return None
        query, key = norm("self_attn.q_norm"), norm("self_attn.k_norm")
        return torch.cat((query.expand(config.num_heads, -1), key.expand(config.num_kv_heads, -1)))

    def dense(has_bias: bool, name: str, names: Sequence[str] = ("gate_proj", "up_proj", "down_proj")) -> Dense:
        gate, up, down = (f"{name}.{part}" for part in names)
        return Dense(projection(has_bias, gate, up), projection(has_bias, down))

    def mlp() -> Mlp:
        experts = config.experts
        if experts is None or not has_experts:
            return DENSE[config.activation](*dense(config.mlp_bias, "mlp"))
        names, has_shared = experts.names, experts.shared_size > 0
        each = (dense(experts.has_bias, f"{names.expert}.{i}", names.gate_up_down) for i in range(experts.num_experts))
        return Experts(
            router=reader.take(f"{prefix}{names.router}.weight"),
            router_bias=reader.take_if_any(experts.has_bias, f"{prefix}{names.router}.bias"),
            experts=tuple(one if experts.clamp is None else Clamped(*one, *experts.clamp) for one in each),
            route=Route(experts.scores, experts.top_k, experts.normalises, experts.scales_inputs),
            shared=dense(False, names.shared) if has_shared else None,
            shared_gate=reader.take(f"{prefix}{names.shared_gate}.weight")
            if has_shared and names.shared_gate
            else None,
        )

    return Layer(
        attention_norm=norm(config.norms.before_attention) if has_attention_norm else None,
        qkv=projection(config.qkv_bias, "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        head_norm=head_norm(),
        output=projection(config.output_bias, "self_attn.o_proj"),
        mlp_norm=norm(config.norms.before_mlp),
        mlp=mlp(),
        sinks=reader.take(f"{prefix}self_attn.sinks").float() if config.sinks else None,
        after_attention=norm_if_any(config.norms.after_attention),
        after_mlp=norm_if_any(config.norms.after_mlp),
    )
