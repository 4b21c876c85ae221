"""The rows of a step of whole texts, one behind the other without padding, and attention within each of them.

Made by the backend of vectors, one for each step; encoders and decoders use it in every layer. Nothing is kept for
later steps.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch.nn import functional

from neuron_runtime.backend.torch.architecture import Window
from neuron_runtime.backend.torch.cache import KVCache, PromptPart, Reads, TracedPlan, additive


class PackedRows(NamedTuple):
    """Texts of `lengths` tokens. row, position: of each token. second: 1 if it belongs to the second text of a pair."""

    lengths: tuple[int, ...]
    row: torch.Tensor
    position: torch.Tensor
    second: torch.Tensor

    @classmethod
    def of(cls, lengths: Sequence[int], second_at: Sequence[int]) -> PackedRows:
        """second_at: of each row, see `core.Added`."""
        counts = torch.tensor(lengths)
        row = torch.repeat_interleave(torch.arange(len(lengths)), counts)
        position = torch.arange(len(row)) - (counts.cumsum(0) - counts)[row]
        begins = torch.tensor([at or length for at, length in zip(second_at, lengths, strict=True)])
        return cls(tuple(lengths), row, position, (position >= begins[row]).long())

    @property
    def ends(self) -> torch.Tensor:
        return torch.tensor(self.lengths).cumsum(0)

    def groups(self) -> list[tuple[int, slice | torch.Tensor]]:
        """Rows of equal lengths: the length, and where their tokens are."""
        begins: dict[int, list[int]] = defaultdict(list)
        at = 0
        for length in self.lengths:
            begins[length].append(at)
            at += length
        return [
            (length, slice(of[0], of[0] + length))
            if len(of) == 1
            else (length, (torch.tensor(of).unsqueeze(1) + torch.arange(length)).flatten())
            for length, of in begins.items()
        ]


def attend_all(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, groups: Sequence[tuple[int, slice | torch.Tensor]]
) -> torch.Tensor:
    """Each token sees all tokens of its row. `[tokens, heads, dim]`, all three; returns `[tokens, heads * dim]`."""
    out = torch.empty_like(query, memory_format=torch.contiguous_format)
    shape = query.shape[1:]
    for length, tokens in groups:
        queries, keys, values = (one[tokens].view(-1, length, *shape).transpose(1, 2) for one in (query, key, value))
        seen = functional.scaled_dot_product_attention(queries, keys, values)
        out[tokens] = seen.transpose(1, 2).reshape(-1, *shape)
    return out.flatten(1)


class NothingKept(KVCache):
    """The keys and values of the layer that is just computed, as a cache: those of whole texts are not needed later."""

    def __init__(self, windows: Sequence[Window | None]) -> None:
        self.windows = tuple(windows)

    def write(self, layer: int, plan: object, key: torch.Tensor, value: torch.Tensor) -> None:
        self._newest = key, value

    def read_prompt(self, layer: int, part: PromptPart) -> tuple[torch.Tensor, torch.Tensor]:
        key, value = (one[part.begin : part.end].transpose(0, 1) for one in self._newest)
        return key, value


def causal_plan(windows: Sequence[Window | None], rows: PackedRows, dtype: torch.dtype) -> TracedPlan:
    """What a decoder's layers need, where each token sees those before it in its row. windows: per layer."""
    none = torch.empty(0, dtype=torch.int64)
    ends = rows.ends.tolist()
    spans = list(zip((0, *ends), ends, strict=False))

    def part(begin: int, end: int, window: Window | None) -> PromptPart:
        mask, length = None, end - begin
        if window is not None and window.first(length - 1) > 0:
            query, key = torch.arange(length).unsqueeze(1), torch.arange(length)
            mask = additive((key <= query) & (key >= window.first(query)), dtype)
        return PromptPart(begin, end, none, slice(0, length), mask)

    reads = {window: Reads(None, tuple(part(*span, window) for span in spans)) for window in set(windows)}
    cache = NothingKept(windows)
    return TracedPlan(cache, rows.position, none, none, tuple(reads[window] for window in windows))
