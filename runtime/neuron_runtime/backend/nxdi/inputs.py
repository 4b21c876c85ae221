"""Batches as calls of NxD Inference: the graphs that they run, and the arguments of `forward()`.

Used by the backend on the engine's thread, while the step before runs. What NxD Inference would pad or sort by itself,
at a cost that grows with the square of the rows, arrives padded and sorted here. Tensors are new for each call, because
it keeps some of them and writes to others; only a block table that no row has outgrown is passed again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from neuron_runtime.backend.neuron.device import GREEDY, Call, FloatArray, column, device_parameters, row_of
from neuron_runtime.backend.neuron.step_graphs import Decode, Encode, Graph, Prefill
from neuron_runtime.backend.nxdi.buckets import decode_graph, prefill_graph
from neuron_runtime.backend.nxdi.pixels import arguments_of, places_of, shift_of, takes_another
from neuron_runtime.backend.nxdi.settings import Settings
from neuron_runtime.backend.slots import FedRows, IntArray, SlotMirror
from neuron_runtime.backend_protocol import IllegalBatch
from neuron_runtime.core import NO_TOKEN, BackendLimits, Batch, Picture

BoolArray = npt.NDArray[np.bool_]

NO_ADAPTERS: Mapping[str, int] = MappingProxyType({})
BASE_MODEL = 0
"""The library's number of what rows without an adapter have."""
NO_SLOT = -1
"""In a slot mapping: keys and values of the token are not kept."""
MAX_SEQUENCE_ID = 2**30
"""Identifiers of sequences start again here; NxD Inference casts them to int32."""


@dataclass(slots=True)
class _Places:
    """What decode steps with the same rows have in common."""

    rows: IntArray
    """The decode rows of the batch."""
    places: IntArray
    """Index of each decode row in the call."""
    source: IntArray
    """For each row of the call, the index of the row it holds, or repeats."""
    of_place: IntArray
    """For each row of the call, its slot."""
    identifiers: IntArray
    """For each row of the call, the number of its sequence."""
    parameters: FloatArray
    """For each row of the call, how it is sampled."""
    is_real: BoolArray
    """Whether a row of the call is one of these rows; the others keep nothing."""
    num_rows: int
    """See `decode_graph`."""
    position: int
    """The largest one of the newest call."""
    table: torch.Tensor | None = None
    """The block table of the newest call, unless a row got a block since."""


class _Seen(NamedTuple):
    """The pictures of a prompt."""

    pictures: tuple[Picture, ...]
    places: IntArray
    """See `places_of`."""
    graph: Encode


class Inputs:
    """What the calls of a step take, from the mirror of the slots and what NxD Inference must know besides."""

    def __init__(self, settings: Settings, limits: BackendLimits, adapter_ids: Mapping[str, int] = NO_ADAPTERS) -> None:
        """adapter_ids: the library's numbers of adapters, by their digests."""
        num_slots, self._settings = settings.max_rows, settings
        self._adapter_ids = adapter_ids
        self._places_of_adapters: dict[int, int] = {0: BASE_MODEL}
        """The library's number of what each place has."""
        self._adapters = np.full(num_slots, BASE_MODEL, dtype=np.int64)
        """The same of each slot."""
        # Row i of a decode call has the adapter of seat i, to which the call for the prompt has bound it.
        self._by_seat = settings.layout == "slots" or settings.max_adapters > 0
        self._block_size = settings.block_size
        self._mirror = SlotMirror(limits)
        self._started = np.zeros(num_slots, dtype=bool)
        """Slots with keys and values that a decode step must not lose."""
        self._parameters: FloatArray = np.full((num_slots, 3), GREEDY, dtype=np.float32)
        """How the sequence in each slot is sampled."""
        self._sequence_ids = np.zeros(num_slots, dtype=np.int64)
        self._next_id = num_slots
        self._shifts = np.zeros(num_slots, dtype=np.int64)
        """Of each slot, how much more than its position turns a token that follows its pictures."""
        self._pictures: dict[int, _Seen] = {}
        """Of slots whose prompt is not computed yet."""
        self._resolved: tuple[Batch, FedRows, list[Graph]] | None = None
        self._places: _Places | None = None
        """The rows of the decode call made last."""

    def graphs(self, batch: Batch) -> list[Graph | Encode]:
        """The graphs that the batch will run, before or after it is applied. Raises IllegalBatch if none fits a row."""
        rows, graphs = self._resolve(batch)
        seen = self._pictures | self._seen(batch)
        prompts = rows.slots[rows.num_decodes :].tolist()
        return [*graphs, *(seen[slot].graph for slot in prompts if slot in seen)]

    def apply(self, batch: Batch) -> tuple[list[Call], FedRows]:
        """Apply the delta; returns the calls in the order in which they must run, and the rows.

        The decode call comes first: with slots it overwrites the lines of all sequences that it does not hold. Raises
        IllegalBatch if a slot, block, position or token is impossible.
        """
        rows, graphs = self._resolve(batch)
        self._mirror.apply(batch, rows)
        self._change(batch)
        calls: list[Call] = []
        if rows.num_decodes:
            places = self._places
            if places is None or not rows.repeats:
                places = self._places = self._placed(batch.step, rows, graphs[0])
            else:
                places.position += 1
            calls.append(self._decode_call(rows, graphs[0], places))
        for row in range(rows.num_decodes, len(rows.slots)):
            calls.append(self._prefill_call(rows, row, graphs[len(calls)]))
        if not rows.repeats:
            self._started[rows.slots] = True
        self._resolved = None
        return calls, rows

    def _change(self, batch: Batch) -> None:
        for slot in batch.released:
            self._started[slot] = False
            self._pictures.pop(slot, None)
        self._pictures |= self._seen(batch)
        for place, digest in batch.adapters:
            self._places_of_adapters[place] = self._adapter_ids[digest]
        for added in batch.added:
            self._adapters[added.slot] = self._places_of_adapters[added.adapter]
            self._parameters[added.slot] = device_parameters(added.sampling, self._settings.global_topk)
            self._sequence_ids[added.slot] = added.slot if self._by_seat else self._next_id
            self._shifts[added.slot] = 0
            self._next_id = self._next_id + 1 if self._next_id < MAX_SEQUENCE_ID else self._settings.max_rows
        if self._places is not None and batch.appended_blocks:
            self._places.table = None

    def _seen(self, batch: Batch) -> dict[int, _Seen]:
        """What is seen of pictures that come with a batch, by slot."""
        vision, found = self._settings.vision, dict[int, _Seen]()
        for added in batch.added:
            if added.pictures and vision is None:
                raise IllegalBatch(f"step {batch.step} adds pictures at slot {added.slot}, which the model cannot see")
            if added.pictures and vision is not None:
                places = places_of(vision, added.pictures, added.token_ids)
                try:
                    found[added.slot] = _Seen(added.pictures, places, vision.graph(len(places)))
                except ValueError as error:
                    raise IllegalBatch(f"step {batch.step}: pictures of slot {added.slot}: {error}") from error
        return found

    def _resolve(self, batch: Batch) -> tuple[FedRows, list[Graph]]:
        if self._resolved is None or self._resolved[0] is not batch:
            rows = self._mirror.resolve(batch)
            self._resolved = (batch, rows, self._graphs(batch.step, rows))
        return self._resolved[1:]

    def _graphs(self, step: int, rows: FedRows) -> list[Graph]:
        graphs: list[Graph] = []
        try:
            if rows.repeats and self._places is not None:
                return [decode_graph(self._settings, self._places.num_rows, self._places.position + 1)]
            if rows.num_decodes:
                graphs.append(decode_graph(self._settings, *self._extent(rows)))
            for row in range(rows.num_decodes, len(rows.slots)):
                graphs.append(prefill_graph(self._settings, int(rows.start[row]), int(rows.ends[row])))
        except ValueError as error:
            raise IllegalBatch(f"step {step}: {error}") from error
        return graphs

    # Calls

    def _prefill_call(self, rows: FedRows, row: int, graph: Graph) -> Call:
        assert isinstance(graph, Prefill)
        slot, start, end = int(rows.slots[row]), int(rows.start[row]), int(rows.ends[row])
        width, vision, seen = end, self._settings.vision, self._pictures.pop(slot, None)
        # NxD Inference pads positions with 1, and samples at the largest: it must not pad a prompt of one token. And it
        # pads features to what takes the tokens that it is given, and those to what takes them and one more.
        padded = end == 1 or vision is not None
        if padded:
            width = graph.tokens
        mask = np.ones(end, dtype=np.int64)
        if vision is not None and vision.turns:
            # The mask alone decides the graph: it is longer than the one before.
            smaller = max((size for size in self._settings.context_buckets if size < graph.tokens), default=0)
            mask = _padded(mask, max(end + (seen is not None and takes_another(seen.places)), smaller + 1))
            if seen is not None:
                width = len(mask)  # it names the tokens among which pictures are looked for
        positions = np.zeros(width, dtype=np.int64)
        positions[:end] = np.arange(end)
        tokens = _padded(self._mirror.tokens[slot, :end], width)
        arguments: dict[str, Any] = {
            "input_ids": row_of(tokens),
            "position_ids": row_of(positions),
            "sampling_params": torch.from_numpy(self._parameters[[slot]]),
            **self._adapters_of(np.array([slot])),
        }
        if self._settings.layout == "slots":
            arguments["seq_ids"] = torch.tensor([slot])
            if padded:
                arguments["attention_mask"] = row_of(mask)
        else:
            blocks = self._mirror.blocks[slot]
            fed = np.arange(start, end)
            arguments |= {
                "seq_ids": torch.tensor([self._sequence_ids[slot]]),
                "slot_mapping": row_of(blocks[fed // self._block_size] * self._block_size + fed % self._block_size),
                "block_table": row_of(blocks[: -(-end // self._block_size)].copy()),
                "full_context_lens": torch.tensor([[end]]),
                "computed_context_lens": torch.tensor([[start]]),
            }
        call = Call(graph, arguments, np.array([row]), np.zeros(1, dtype=np.int64), end - start)
        if seen is not None and vision is not None:
            if seen.pictures[-1].end > end:
                raise IllegalBatch(f"slot {slot} feeds {end} tokens, and its last picture ends behind them")
            arguments |= arguments_of(vision, seen.pictures, seen.places, end, width)
            if vision.turns:
                self._shifts[slot] = shift_of(vision, arguments)
                if takes_another(seen.places):
                    tokens[end] = vision.image_token
            call.encodes = (seen.graph, len(seen.places))
        return call

    def _extent(self, rows: FedRows) -> tuple[int, int]:
        """Number of rows and largest position of a decode call; see `decode_graph`."""
        slots, start = rows.slots[: rows.num_decodes], rows.start[: rows.num_decodes]
        return int(slots.max()) + 1 if self._by_seat else len(slots), int(start.max())

    def _adapters_of(self, slots: IntArray) -> dict[str, torch.Tensor]:
        if not self._settings.max_adapters:
            return {}
        return {"adapter_ids": torch.from_numpy(self._adapters[slots].astype(np.int32))}

    def _placed(self, step: int, rows: FedRows, graph: Graph) -> _Places:
        assert isinstance(graph, Decode)
        slots, num_rows = rows.slots[: rows.num_decodes], graph.rows
        if self._settings.layout == "slots":
            absent = self._started & self._mirror.live
            absent[slots] = False
            if absent.any():
                raise IllegalBatch(f"step {step} would overwrite slot {int(absent.argmax())}, which has no row")
        places = slots if self._by_seat else np.arange(len(slots))
        source = np.zeros(num_rows, dtype=np.int64)  # places without a sequence repeat the first row
        source[places] = np.arange(len(slots))
        is_real = np.zeros(num_rows, dtype=bool)
        is_real[places] = True
        identifiers = np.arange(num_rows)
        if not self._by_seat:
            # Identifiers below the number of slots belong to no sequence.
            identifiers[: len(slots)] = self._sequence_ids[slots]
        of_place = slots[source]
        return _Places(
            np.arange(len(slots)),
            places,
            source,
            of_place,
            identifiers,
            self._parameters[of_place],
            is_real,
            *self._extent(rows),
        )

    def _decode_call(self, rows: FedRows, graph: Graph, places: _Places) -> Call:
        assert isinstance(graph, Decode)
        count = rows.num_decodes
        start, after = rows.start[:count], rows.after[:count]
        positions = start[places.source]
        verifies = graph.width > 1 and self._settings.draft is None
        """Else the device makes the drafts of the row, if it has any."""
        run = np.arange(graph.width if verifies else 1)
        arguments = {
            "position_ids": torch.from_numpy(positions[:, None] + run),
            "sampling_params": torch.from_numpy(places.parameters.copy()),
            "seq_ids": torch.from_numpy(places.identifiers.copy()),
            **self._adapters_of(places.of_place),
        }
        if self._settings.vision is not None and self._settings.vision.turns:
            arguments["rope_deltas"] = column(self._shifts[places.of_place])
        if self._settings.layout == "blocks":
            width = min(graph.length // self._block_size, self._mirror.blocks.shape[1])
            if places.table is None or places.table.shape[1] != width:
                places.table = torch.from_numpy(self._mirror.blocks[places.of_place, :width])
            arguments |= {
                "slot_mapping": torch.from_numpy(self._kept(rows, positions, graph.width, places)),
                "block_table": places.table,
                "full_context_lens": column(positions + 1),
                "computed_context_lens": column(positions.copy()),
            }
        if verifies:
            # The mask of a verification names the tokens in the cache; one left out would name the drafts too.
            cached = np.arange(int(positions.max()))
            arguments["attention_mask"] = torch.from_numpy((cached < positions[:, None]).astype(np.int64))
        named = self._mirror.named(rows, slice(count))  # `feed` writes to it
        num_tokens = count if rows.num_drafts is None else count + int(rows.num_drafts[:count].sum())
        drafts = _padded_drafts(rows, count, graph.width - 1 if verifies else 0)
        return Call(graph, arguments, places.rows, places.places, num_tokens, named, after, places.source, drafts)

    def _kept(self, rows: FedRows, positions: IntArray, width: int, places: _Places) -> IntArray:
        """For each row of a decode call, where the keys and values of its token and of drafts are kept: drafts of the
        device beyond those that the row takes have no place in its blocks."""
        count, blocks = rows.num_decodes, self._mirror.blocks
        num_drafts = np.zeros(count, dtype=np.int64) if rows.num_drafts is None else rows.num_drafts[:count]
        run = np.arange(width)
        block, offset = np.divmod(positions[:, None] + run, self._block_size)
        block = np.minimum(block, blocks.shape[1] - 1)
        kept: IntArray = blocks[places.of_place[:, None], block] * self._block_size + offset
        kept[~places.is_real] = NO_SLOT
        kept[run > num_drafts[places.source][:, None]] = NO_SLOT
        return kept


def _padded_drafts(rows: FedRows, count: int, width: int) -> IntArray:
    """`[decode rows, width]`: drafts, and behind them any token, whose keys and values nothing reads."""
    drafts = np.zeros((count, width), dtype=np.int64)
    if rows.drafts is not None and width:
        given = rows.drafts[:count]
        drafts[:, : given.shape[1]] = np.where(given == NO_TOKEN, 0, given)
    return drafts


def _padded(tokens: npt.NDArray[np.int32] | IntArray, width: int) -> IntArray:
    padded = np.zeros(width, dtype=np.int64)
    padded[: len(tokens)] = tokens
    return padded
