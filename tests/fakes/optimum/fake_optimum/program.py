"""What the graphs compute, over caches that lie as on a device: one line of the model's length for each slot.

`strict` refuses what a device would answer wrongly without an error, by the section of the reference; `damage` answers
as wrongly. What the wrapper around a graph does to a call is in `model`.
"""

from __future__ import annotations

from typing import Any

import fake_nxdi
import torch
from fake_nxdi import device
from fake_nxdi.decoder import Decoder, Layer, Shape
from fake_nxdi.sampler import sample

from fake_optimum.config import NeuronConfig

SAMPLER = {"do_sample": True, "dynamic": True, "deterministic": False}


def shape_of(config: Any) -> Shape:
    """From a configuration of transformers."""
    values = config.to_dict()
    rope = values.get("rope_parameters") or {}
    scaling = values.get("rope_scaling") or (rope if rope.get("rope_type", "default") != "default" else None)
    return Shape(
        model_type=config.model_type,
        vocabulary=config.vocab_size,
        hidden=config.hidden_size,
        layers=config.num_hidden_layers,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_size=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        epsilon=config.rms_norm_eps,
        rope_theta=float(values.get("rope_theta") or rope["rope_theta"]),
        rope_scaling=scaling,
        max_positions=config.max_position_embeddings,
        tied=bool(config.tie_word_embeddings),
        pad_token=0,
    )


class Program:
    def __init__(self, shape: Shape, neuron: NeuronConfig, weights: dict[str, torch.Tensor]) -> None:
        self._neuron, self._length = neuron, neuron.sequence_length
        self._decoder = Decoder(shape, weights, neuron.torch_dtype)
        size = (neuron.max_batch_size, shape.kv_heads, self._length, shape.head_size)
        self._cache: list[Layer] = [
            (torch.zeros(size, dtype=neuron.torch_dtype), torch.zeros(size, dtype=neuron.torch_dtype))  # type: ignore[arg-type]
            for _ in range(shape.layers)
        ]
        self._filled = [0] * neuron.batch_size
        """Positions of each slot that calls have written."""
        self.num_bytes = self._decoder.num_bytes + sum(one.nbytes for layer in self._cache for one in layer)

    def run(
        self, kind: str, ids: torch.Tensor, positions: torch.Tensor, seq_ids: torch.Tensor, sampling: torch.Tensor
    ) -> torch.Tensor:
        if fake_nxdi.strict():
            if sampling.dtype != torch.float32:
                fake_nxdi.refuse("3.4", f"sampling_params of {sampling.dtype} reach the graph as other numbers")
            getattr(self, f"_check_{kind}")(ids, positions, seq_ids)
        done = device.DEVICE.run(kind)
        hidden = getattr(self, f"_{kind}")(ids, positions, seq_ids)
        logits = self._decoder.logits(hidden)
        device.DEVICE.wait_until(done)
        if not self._neuron.on_device_sampling or kind == "chunk":
            return logits
        return sample(logits[:, -1], sampling, config={**SAMPLER, "global_topk": self._neuron.max_topk}, rescale=False)

    # Prompts

    def _prefill(self, ids: torch.Tensor, positions: torch.Tensor, seq_ids: torch.Tensor) -> torch.Tensor:
        rows, width = ids.shape
        hidden, new = self._decoder.forward(ids, positions, None, torch.ones(rows, width, width).tril().bool())
        for layer, fresh in zip(self._cache, new, strict=True):
            for cache, values in zip(layer, fresh, strict=True):
                if self._neuron.continuous_batching:
                    cache[seq_ids] = values
                else:
                    cache[:, :, :width] = values
        return _at_largest(hidden, positions)

    def _check_prefill(self, ids: torch.Tensor, positions: torch.Tensor, seq_ids: torch.Tensor) -> None:
        self._check_last(ids, positions)
        self._filled[int(seq_ids[0])] = int(positions.max()) + 1

    def _check_last(self, ids: torch.Tensor, positions: torch.Tensor) -> None:
        ends = ids[positions == positions.max()]
        if len({*ends.tolist()}) > 1:
            fake_nxdi.refuse("3.4", "several tokens have the largest position: which of them is sampled is luck")

    # Chunks

    def _chunk(self, ids: torch.Tensor, positions: torch.Tensor, seq_ids: torch.Tensor) -> torch.Tensor:
        width = ids.shape[1]
        before = [(keys[seq_ids], values[seq_ids]) for keys, values in self._cache]
        cached = (torch.arange(self._length) < positions[0, 0]).expand(1, width, -1)
        increasing = torch.cat([torch.tensor([True]), positions[0, 1:] > positions[0, :-1]])
        active = torch.ones(width, width).tril().bool() & increasing
        hidden, new = self._decoder.forward(ids, positions, before, torch.cat([cached, active[None]], dim=-1))
        for layer, fresh in zip(self._cache, new, strict=True):
            for cache, values in zip(layer, fresh, strict=True):
                cache[int(seq_ids[0])][:, positions[0]] = values[0]
        return _at_largest(hidden, positions)

    def _check_chunk(self, ids: torch.Tensor, positions: torch.Tensor, seq_ids: torch.Tensor) -> None:
        self._check_last(ids, positions)
        slot, start = int(seq_ids[0]), int(positions[0, 0])
        if start:
            self._check_position(slot, start)
        self._filled[slot] = int(positions.max()) + 1

    # Tokens

    def _decode(self, ids: torch.Tensor, positions: torch.Tensor, seq_ids: torch.Tensor) -> torch.Tensor:
        rows = torch.arange(len(ids))
        cached = torch.arange(self._length) < positions
        mask = torch.cat([cached, torch.ones(len(ids), 1, dtype=torch.bool)], dim=-1)[:, None]
        hidden, new = self._decoder.forward(ids, positions, self._cache, mask)
        for layer, fresh in zip(self._cache, new, strict=True):
            for cache, values in zip(layer, fresh, strict=True):
                cache[rows, :, positions[:, 0]] = values[:, :, 0]
        return hidden

    def _check_decode(self, ids: torch.Tensor, positions: torch.Tensor, seq_ids: torch.Tensor) -> None:
        for slot, position in enumerate(positions[:, 0].tolist()):
            self._check_position(slot, position)
            self._filled[slot] = max(self._filled[slot], position + 1)

    def _check_position(self, slot: int, position: int) -> None:
        """A row that does not take part may have written the next position, which the one that does writes again."""
        filled = self._filled[slot]
        if not max(filled - 1, 0) <= position <= filled:
            fake_nxdi.refuse("3.4", f"position {position} of slot {slot}, which has {filled}: a row of another slot")


def _at_largest(hidden: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Hidden states of the largest position; of several, of the last, as a device may choose."""
    width = positions.shape[1]
    last = width - 1 - positions.flip(1).argmax(1)
    return hidden[torch.arange(len(hidden)), last][:, None]
