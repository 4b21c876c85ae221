"""Graphs over caches that lie as on a device: lines of positions, one for each sequence.

What a graph reads and writes follows from positions and lines alone, so wrong inputs do their damage here as on a
device. In strict mode the ledger tells of it instead.
"""

from __future__ import annotations

import fake_nxdi
import numpy as np
import torch
from fake_nxdi import device
from fake_nxdi.decoder import Decoder
from fake_nxdi.ledger import COPY, NEVER, ROOT, RULES, TAIL, WARM, Ledger

LOST, KEPT_BY_OTHERS = 9, ("shard-over-sequence", "attends a token that the end of a bucket lost")
MASKED = -30000.0
_RANDOM = torch.Generator()


def seed(number: int) -> None:
    """A device has no seed; tests have one."""
    _RANDOM.manual_seed(number)


class Program:
    """Both phases of a model. shards: among how many cores the positions of a line are divided."""

    def __init__(self, decoder: Decoder, lines: int, length: int, shards: int) -> None:
        shape = decoder.shape
        self._decoder, self._shards = decoder, shards
        self._length = length
        size = (lines, shape.kv_heads, length, shape.head_size)
        self._past = [
            (torch.zeros(size, dtype=decoder.dtype), torch.zeros(size, dtype=decoder.dtype))
            for _ in range(shape.layers)
        ]
        self._ledger = Ledger(lines * length)

    def scramble(self) -> None:
        """After an error nobody knows what the device's memory holds."""
        for tensor in (one for pair in self._past for one in pair):
            tensor.copy_(torch.randn(tensor.shape))

    def _places(self, line: int, positions: range) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
        return line * self._length + np.arange(positions.start, positions.stop, dtype=np.int64)

    @torch.inference_mode()
    def prefill(self, ids: torch.Tensor, positions: torch.Tensor, line: int, last: int) -> torch.Tensor:
        """Logits `[1, vocabulary]` of one prompt, padded to its bucket."""
        width = ids.shape[1]
        causal = torch.ones(1, width, width, dtype=torch.bool).tril()
        hidden, new = self._decoder.forward(ids, positions, None, causal)
        for (keys, values), (old_keys, old_values) in zip(new, self._past, strict=True):
            # A line is stored from its beginning, whatever the positions say.
            old_keys[line, :, :width], old_values[line, :, :width] = keys[0], values[0]
        tokens = ids[0, : last + 1].tolist()
        self._ledger.spoil(self._places(line, range(width)), TAIL)
        if len(tokens) > 1 and len(set(tokens)) == 1:
            # One token over and over is a call that only wants to run the graph.
            self._ledger.spoil(self._places(line, range(width)), WARM)
        else:
            self._ledger.write(self._places(line, range(last + 1)), tokens, ROOT)
        return self._decoder.logits(hidden[:, last])

    @torch.inference_mode()
    def decode(self, ids: torch.Tensor, positions: torch.Tensor, size: int, named: list[int]) -> torch.Tensor:
        """Logits `[lines, vocabulary]`. size: of the bucket. named: lines that the caller gave."""
        where = positions[:, 0].tolist()
        self._check(ids[:, 0].tolist(), where, size, named)
        lines = torch.arange(len(ids))
        before = [(keys[:, :, :size], values[:, :, :size]) for keys, values in self._past]
        earlier = torch.arange(size)[None] < positions
        seen = torch.cat((earlier[:, None], torch.ones(len(ids), 1, 1, dtype=torch.bool)), dim=2)
        hidden, new = self._decoder.forward(ids, positions, before, seen)
        for (keys, values), (old_keys, old_values) in zip(new, self._past, strict=True):
            for line, position in enumerate(where):
                for lost in self._lost(position, size):
                    old_keys[line, :, lost], old_values[line, :, lost] = keys[line, :, 0], values[line, :, 0]
            old_keys[lines, :, positions[:, 0]] = keys[:, :, 0]
            old_values[lines, :, positions[:, 0]] = values[:, :, 0]
        return self._decoder.logits(hidden[:, -1])

    def _lost(self, position: int, size: int) -> range | list[int]:
        """Every core but that of the position writes to the last place of its part of the bucket."""
        if self._shards == 1:
            return []
        return [place for place in range(size - self._shards, size) if (place - position) % self._shards]

    def _check(self, tokens: list[int], where: list[int], size: int, named: list[int]) -> None:
        """Each row attends one sequence, and all of it; notes what rows write."""
        ledger = self._ledger
        for line, (token, position) in enumerate(zip(tokens, where, strict=True)):
            spot = self._places(line, range(position, position + 1))
            places = self._places(line, range(position))
            broken = ledger.broken_at(places)
            for lost in self._lost(position, size):
                ledger.spoil(self._places(line, range(lost, lost + 1)), LOST)
            if line not in named:
                ledger.spoil(spot, COPY)
            elif broken < 0:
                ledger.write(spot, [token], int(ledger.number[places[-1]]) if position else ROOT)
            elif (why := int(ledger.why[places[broken]])) in (NEVER, WARM) or not fake_nxdi.strict():
                ledger.spoil(spot, WARM)
            else:
                rule, what = RULES.get(why, KEPT_BY_OTHERS)
                fake_nxdi.refuse(rule, f"line {line} at position {position} {what} (from position {broken})")


def sample(logits: torch.Tensor, parameters: torch.Tensor, candidates: int) -> torch.Tensor:
    """One token for each row, after `generation.sample` and `hlo.topk_masked`, `topp` and `multinomial`.

    parameters: `[rows, 3]` of top_k, top_p and temperature. Top_p keeps the token that crosses the limit.
    """
    top_k, top_p, temperature = parameters[:, :1], parameters[:, 1:2], parameters[:, 2:]
    values, ids = logits.topk(candidates, dim=-1)
    rank = torch.arange(candidates).expand_as(values)
    values = (values / temperature).masked_fill(rank >= top_k, MASKED)
    kept = (values.softmax(-1).cumsum(-1) < top_p).sum(-1, keepdim=True).clamp(min=0)
    values = values.masked_fill(rank > kept, MASKED)
    sums = values.softmax(-1).cumsum(-1)
    sums = sums / sums[:, -1:]
    drawn = torch.rand((len(logits), 1), generator=_RANDOM)
    return ids.gather(1, (drawn > sums).sum(-1, keepdim=True))


def nrt_error(graph: str, error: Exception) -> RuntimeError:
    return device.nrt_error(f"nrt_execute of {graph} ({error})", 1006)
