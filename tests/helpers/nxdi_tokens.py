"""An application of NxD Inference on token ids instead of keys and values, for fast tests of what `forward()` is given.

It checks the shape and type of every argument, pads and selects graphs as NxD Inference does, and writes and reads its
cache as the compiled graphs do, harm included. The next token is a pure function of the tokens that a row reads and of
its sampling parameters, so a wrong line, block, position or parameter shows in the tokens.
"""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch

from neuron_runtime.backend.neuron.step_graphs import Decode
from neuron_runtime.backend.nxdi.settings import Settings

NOTHING = -1
"""Content of a place of the cache that was never written."""

BOTH = {"input_ids", "position_ids", "seq_ids", "sampling_params"}
WITH_BLOCKS = BOTH | {"slot_mapping", "block_table", "full_context_lens", "computed_context_lens"}


def settings_of(**changes: Any) -> Settings:
    """Small settings with slots; `changes` replace fields, `layout="blocks"` others too."""
    blocks = changes.get("layout") == "blocks"
    fields: dict[str, Any] = {
        "application": "llama",
        "tensor": 1,
        "logical_core": 2,
        "dtype": "float32",
        "layout": "slots",
        "max_rows": 4,
        "max_model_length": 64,
        "max_context_length": 32 if blocks else 64,
        "block_size": 8 if blocks else 64,
        "num_blocks": 32 if blocks else 4,
        "segments": blocks,
        "shares_prefixes": blocks,
        "context_buckets": (16, 32) if blocks else (16, 32, 64),
        "prefix_buckets": (0, 16, 64) if blocks else (),
        "token_buckets": (32, 64),
        "row_buckets": (),
        "sampling": "Device",
        "global_topk": 0 if changes.get("sampling") == "Host" else 64,
        "asynchronous": False,
        "vocabulary_size": 997,
        "neuron_config": {},
    }
    return Settings(**fields | changes)


def next_token(context: Sequence[int], parameters: Sequence[float], vocabulary_size: int) -> int:
    seed = zlib.crc32(array("f", parameters).tobytes())
    return zlib.crc32(array("q", context).tobytes(), seed) % vocabulary_size


@dataclass
class TokenApplication:
    """See `backend.Application`."""

    settings: Settings
    calls: list[dict[str, torch.Tensor]] = field(default_factory=list)
    graphs: list[str] = field(default_factory=list)
    """Names of the graphs that ran."""
    fails_at: int = -1
    """Index of the call that raises."""

    def __post_init__(self) -> None:
        settings = self.settings
        num_lines, length = (
            (settings.max_rows, settings.compiled_length)
            if settings.layout == "slots"
            else (settings.num_blocks + 1, settings.block_size)
        )
        self.cache = [[NOTHING] * length for _ in range(num_lines)]

    def __call__(self, **given: torch.Tensor) -> Any:
        self.calls.append({name: tensor.clone() for name, tensor in given.items()})
        if len(self.calls) - 1 == self.fails_at:
            raise RuntimeError("nrt_execute failed: status 1005")
        self._check_types(given)
        if self.settings.layout == "slots":
            contexts = self._run_slots(given)
        else:
            contexts = [[context] for context in self._run_blocks(given)]
        parameters = given["sampling_params"].tolist()
        given["sampling_params"].fill_(-7.0)  # NxD Inference may write to it
        if self.settings.draft is not None:
            return self._accepted(given, contexts, parameters)
        return self._output(contexts, parameters)

    def _output(self, contexts: list[list[list[int]]], parameters: list[list[float]]) -> Any:
        """contexts: of each row, those of the tokens that it fed and whose logits are returned."""
        settings, size = self.settings, self.settings.vocabulary_size
        with_logits = settings.sampling != "Device"
        logits = torch.zeros(len(contexts), len(contexts[0]), size)
        for row, of_row in enumerate(contexts):
            for at, context in enumerate(of_row):
                logits[row, at, next_token(context, (), size)] = 9.0
        firsts = [of_row[0] for of_row in contexts]
        tokens = torch.tensor(
            [next_token(*pair, size) for pair in zip(firsts, parameters, strict=True)], dtype=torch.int32
        )
        on_device = settings.sampling != "Host"
        return SimpleNamespace(
            tokens=tokens if on_device else logits,
            logits=logits if with_logits else None,
            hidden_states=[] if on_device and with_logits else tokens if on_device else logits,
        )

    def _accepted(
        self, given: dict[str, torch.Tensor], contexts: list[list[list[int]]], parameters: list[list[float]]
    ) -> Any:
        """Tokens that the device drafts and verifies itself. contexts: of each row, those of its token and drafts."""
        size, width = self.settings.vocabulary_size, 1 + self.settings.max_drafts
        accepted = torch.full((len(contexts), width), -1, dtype=torch.int32)
        count = torch.ones(len(contexts), 1, dtype=torch.int32)
        for row, (of_row, of_sampling) in enumerate(zip(contexts, parameters, strict=True)):
            tokens = [next_token(context, of_sampling, size) for context in of_row]
            drafts = [context[-1] for context in of_row[1:]]
            while int(count[row]) < len(of_row) and drafts[int(count[row]) - 1] == tokens[int(count[row]) - 1]:
                count[row] += 1
            accepted[row, : int(count[row])] = torch.tensor(tokens[: int(count[row])])
        following = given["position_ids"][:, -1:] + count
        return SimpleNamespace(fused_outputs=[accepted, accepted[:, :1], torch.ones(1), following.to(torch.int32)])

    def _drafts(self, line: list[int], position: int) -> list[int]:
        """What a second model thinks of these tokens: mostly right."""
        context = line[: position + 1]
        for _ in range(self.settings.max_drafts):
            right = next_token(context, (1.0, 1.0, 1.0), self.settings.vocabulary_size)
            context.append(right if sum(context) % 5 else right ^ 1)
        return [token % self.settings.vocabulary_size for token in context[position + 1 :]]

    def _check_types(self, given: dict[str, torch.Tensor]) -> None:
        ids, positions = given["input_ids"], given["position_ids"]
        rows = len(ids)
        names = BOTH if self.settings.layout == "slots" else WITH_BLOCKS
        assert set(given) - {"attention_mask"} == names
        assert ids.shape == positions.shape
        assert ids.dim() == 2
        assert given["seq_ids"].shape == (rows,)
        assert len(set(given["seq_ids"].tolist())) == rows, "each row is another sequence"
        assert given["sampling_params"].shape == (rows, 3)
        assert given["sampling_params"].dtype == torch.float32
        assert all(tensor.dtype == torch.int64 for name, tensor in given.items() if name != "sampling_params")
        assert int(ids.min()) >= 0
        assert int(ids.max()) < self.settings.vocabulary_size
        for top_k, top_p, temperature in given["sampling_params"].tolist():
            assert top_k == int(top_k)
            assert 1 <= top_k <= max(self.settings.global_topk, 1)
            assert 0.0 < top_p <= 1.0
            assert temperature > 0.0
        if self.settings.layout == "blocks":
            for name in ("full_context_lens", "computed_context_lens"):
                assert given[name].shape == (rows, 1)
            table = given["block_table"]
            assert len(table) == rows
            assert int(table.min()) >= 0
            assert int(table.max()) < self.settings.num_blocks

    # Slots

    def _run_slots(self, given: dict[str, torch.Tensor]) -> list[list[list[int]]]:
        settings = self.settings
        ids, positions = given["input_ids"], given["position_ids"]
        if int(positions.min()) == 0:
            assert len(ids) == 1, "one prompt per call"
            mask = given.get("attention_mask", torch.ones(1, ids.shape[1]))
            bucket = strict_first_fit(settings.context_buckets, mask.shape[1])
            fed = ids[0].tolist() + [0] * (bucket - ids.shape[1])
            where = positions[0].tolist() + [1] * (bucket - ids.shape[1])
            last = where.index(max(where))
            line = self.cache[int(given["seq_ids"][0])]
            line[:bucket] = fed
            self.graphs.append(f"prefill_{bucket}")
            return [[fed[: last + 1]]]
        width, starts = 1 + settings.max_drafts, positions[:, 0]
        if settings.draft is not None:
            assert ids.shape[1] == 1, "the device makes the drafts"
            rows, length = settings.max_rows, strict_first_fit(settings.token_buckets, int(starts.max()) + width)
            assert given["seq_ids"].tolist() == list(range(rows)), "row i holds line i"
            self.graphs.append(Decode(rows, length, width).name)
            contexts = []
            for line, token, position in zip(self.cache, ids[:, 0].tolist(), starts.tolist(), strict=True):
                line[position] = token
                line[position : position + width] = [token, *self._drafts(line, position)]
                contexts.append([line[: end + 1] for end in range(position, position + width)])
            return contexts
        assert (positions == starts[:, None] + torch.arange(width)).all()
        furthest = int(starts.max())
        if settings.max_drafts:
            mask = given["attention_mask"]
            assert (mask == (torch.arange(mask.shape[1]) < starts[:, None])).all(), (
                "the tokens before it, and no drafts"
            )
            rows, length = settings.max_rows, strict_first_fit(settings.token_buckets, mask.shape[1] + width)
        elif settings.row_buckets:
            rows = min(count for count in (*settings.row_buckets, settings.max_rows) if count >= len(ids))
            length = min(length for length in settings.token_buckets if length >= furthest)
        else:
            rows, length = settings.max_rows, strict_first_fit(settings.token_buckets, furthest)
        assert given["seq_ids"].tolist() == list(range(rows)), "row i holds line i"
        assert settings.max_drafts or "attention_mask" not in given
        self.graphs.append(Decode(rows, length, width).name)
        contexts = []
        for line, tokens, position in zip(self.cache, ids.tolist(), starts.tolist(), strict=False):
            line[position : position + width] = tokens
            contexts.append([line[: end + 1] for end in range(position, position + width)])
        return contexts

    # Blocks

    def _run_blocks(self, given: dict[str, torch.Tensor]) -> list[list[int]]:
        ids, positions = given["input_ids"], given["position_ids"]
        computed = given["computed_context_lens"]
        if ids.shape[1] > 1 and int(positions.min()) == 0:
            return [self._prefill(given, int(given["full_context_lens"]), int(computed))]
        assert ids.shape[1] == 1
        assert len(ids) == self.settings.max_rows
        assert (computed == positions).all()
        assert (given["full_context_lens"] == positions + 1).all()
        length = next(length for length in self.settings.token_buckets if length > int(computed.max()))
        assert given["block_table"].shape[1] <= length // self.settings.block_size
        self.graphs.append(f"decode_{len(ids)}x{length}")
        size, contexts = self.settings.block_size, []
        for row, (token, position) in enumerate(zip(ids[:, 0].tolist(), positions[:, 0].tolist(), strict=True)):
            table = given["block_table"][row].tolist()
            place = table[position // size] * size + position % size
            active = int(given["slot_mapping"][row, 0])
            assert active in (-1, place)
            contexts.append([*self._read(table, position), token])
            self._write(place if active >= 0 else -1, token)
        return contexts

    def _prefill(self, given: dict[str, torch.Tensor], end: int, start: int) -> list[int]:
        ids, where = given["input_ids"][0].tolist(), given["position_ids"][0].tolist()
        slots, table = given["slot_mapping"], given["block_table"][0].tolist()
        assert slots.shape == (1, end - start), "slots of uncomputed tokens only"
        assert given["block_table"].shape == (1, -(-end // self.settings.block_size))
        tokens, prefix = self._prefill_graph(start, end - start)
        self.graphs.append(f"prefill_{tokens}_after_{prefix}" if prefix else f"prefill_{tokens}")
        first = max(start - (tokens - (end - start)), 0)
        fed = ids[first:] + [0] * (tokens - len(ids[first:]))
        where = where[first:] + [1] * (tokens - len(where[first:]))
        assert len(fed) == tokens
        assert first <= prefix
        places = [-1] * (start - first) + slots[0].tolist()
        context = self._read(table, first)
        for token, place in zip(fed, places, strict=False):
            self._write(place, token)
        return context + fed[: where.index(max(where)) + 1]

    def _prefill_graph(self, start: int, count: int) -> tuple[int, int]:
        active, prefixes = self.settings.context_buckets, self.settings.prefix_buckets
        if 256 < start + count <= 512 and 512 in active:
            return 512, 0
        tokens = min(bucket for bucket in active if bucket >= count)
        return tokens, min(bucket for bucket in prefixes if bucket >= start - (tokens - count))

    def _read(self, table: list[int], end: int) -> list[int]:
        size = self.settings.block_size
        return [self.cache[table[position // size]][position % size] for position in range(end)]

    def _write(self, place: int, token: int) -> None:
        size = self.settings.block_size
        block, offset = divmod(place, size) if place >= 0 else (self.settings.num_blocks, 0)
        self.cache[block][offset] = token


def strict_first_fit(buckets: Sequence[int], size: int) -> int:
    for bucket in buckets:
        if size < bucket:
            return bucket
    assert size == buckets[-1], f"{size} exceeds the largest bucket"
    return buckets[-1]
