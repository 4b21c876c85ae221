"""The encoder: hidden states of all tokens of a step, of which each sees all tokens of its text. Plain eager torch.

Called by the backend of vectors on its device thread. Its layers run over all tokens of a step at once.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.nn import functional

from neuron_runtime.backend.torch.decoder import Reader
from neuron_runtime.backend.torch.linear import Linear, linear
from neuron_runtime.backend.torch.packed import PackedRows, attend_all
from neuron_runtime.backend.torch.vector_models import EncoderConfig


class Norm(NamedTuple):
    weight: torch.Tensor
    bias: torch.Tensor
    epsilon: float

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return functional.layer_norm(x, self.weight.shape, self.weight, self.bias, self.epsilon)


class Layer(NamedTuple):
    qkv: Linear
    output: Linear
    attention_norm: Norm
    up: Linear
    down: Linear
    norm: Norm


class Encoder:
    """Reads its weights when it is made."""

    def __init__(self, config: EncoderConfig, reader: Reader) -> None:
        self._config = config
        self._words = reader.take("embeddings.word_embeddings.weight")
        # A text has the positions behind those that stand for none.
        self._positions = reader.take("embeddings.position_embeddings.weight")[config.first_position :]
        self._types = reader.take("embeddings.token_type_embeddings.weight")
        self._norm = self._read_norm(reader, "embeddings.LayerNorm")
        self._layers = [self._read_layer(reader, f"encoder.layer.{number}") for number in range(config.num_layers)]

    def forward(self, token_ids: torch.Tensor, rows: PackedRows) -> torch.Tensor:
        """`[tokens, hidden size]`"""
        types = rows.second.clamp(max=self._config.num_types - 1)
        x = self._norm(self._words[token_ids] + self._types[types] + self._positions[rows.position])
        groups, heads = rows.groups(), (3, self._config.num_heads, self._config.head_dim)
        for layer in self._layers:
            query, key, value = layer.qkv(x).view(-1, *heads).unbind(1)
            x = layer.attention_norm(layer.output.plus(attend_all(query, key, value, groups), x))
            inner = functional.gelu(layer.up(x), approximate=self._config.approximate)
            x = layer.norm(layer.down.plus(inner, x))
        return x

    def _read_layer(self, reader: Reader, prefix: str) -> Layer:
        def read(*names: str) -> Linear:
            weight = reader.take_weight(*(f"{prefix}.{name}.weight" for name in names))
            return linear(weight, reader.take(*(f"{prefix}.{name}.bias" for name in names)))

        return Layer(
            qkv=read(*(f"attention.self.{name}" for name in ("query", "key", "value"))),
            output=read("attention.output.dense"),
            attention_norm=self._read_norm(reader, f"{prefix}.attention.output.LayerNorm"),
            up=read("intermediate.dense"),
            down=read("output.dense"),
            norm=self._read_norm(reader, f"{prefix}.output.LayerNorm"),
        )

    def _read_norm(self, reader: Reader, name: str) -> Norm:
        return Norm(reader.take(f"{name}.weight"), reader.take(f"{name}.bias"), self._config.epsilon)
