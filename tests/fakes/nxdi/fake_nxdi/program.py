"""A loaded program: graphs of exact shapes over cache tensors that lie as the real ones do.

A call finds its graph by the shapes of all its inputs, or nothing. What a graph reads and writes follows from rows,
positions, block tables and slots alone, so wrong inputs do their damage here as on a device. In strict mode the ledger
tells of it instead.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

import fake_nxdi
from fake_nxdi import device, quantized, sampler
from fake_nxdi.decoder import Decoder, Layer
from fake_nxdi.ledger import COPY, NEVER, ROOT, RULES, TAIL, WARM, Ledger, numbers
from fake_nxdi.lora import Seats
from fake_nxdi.plan import CONTEXT, FUSED, SPECULATION, Graph, Plan

Tensors = list[torch.Tensor]


@dataclass
class Notes:
    """What only the caller's side of the graph knows, for the strict checks."""

    real: list[bool]
    """Rows that the caller gave; the others were added to fill the batch."""
    given: int = 0
    """Columns that the caller gave, before padding to the bucket."""
    prompt: list[int] = field(default_factory=list)
    """Blocks: the whole prompt of the call's only row."""
    table: list[int] = field(default_factory=list)
    warm_up: bool = False
    copies: list[bool] = field(default_factory=list)
    """Rows that filled a free line in the call that launched this step ahead."""


@dataclass
class Later:
    """Outputs of a step that may still run: what async mode hands from one step to the next."""

    outputs: Tensors
    ready_at: float
    fed: torch.Tensor
    """Token ids that the step took."""
    positions: torch.Tensor
    copies: list[bool] = field(default_factory=list)
    """See `Notes`."""

    def wait(self) -> Tensors:
        device.Device.wait_until(self.ready_at)
        return self.outputs


class Program:
    def __init__(self, plan: Plan, graphs: list[Graph], decoder: Decoder, draft: Decoder | None = None) -> None:
        self.plan = plan
        self.decoder = decoder
        self.draft = draft
        self._by_shapes = {_key(graph.shapes): graph for graph in graphs}
        dtype = getattr(torch, plan.dtype)
        # Keys at even places, values at odd ones.
        self.past = [torch.zeros(plan.cache_shape, dtype=dtype) for _ in range(2 * plan.decoder.layers)]
        self.draft_past: Tensors = []
        states = plan.decoder.hidden * (3 if plan.eagle == 3 else 1)
        self.buffer = torch.zeros(plan.lines, 2 * max(plan.speculation, 1), states, dtype=dtype)
        """For each line, hidden states behind which its next tokens may begin, by position."""
        if plan.draft is not None:
            self.draft_past = [torch.zeros(plan.draft_cache_shape, dtype=dtype) for _ in range(2 * plan.draft.layers)]
        num_places = (
            plan.lines * plan.line_length if plan.layout == "slots" else (plan.num_blocks + 1) * plan.block_size
        )
        self.ledger = Ledger(num_places)
        self._prompt_ends: dict[int, int] = {}
        self.seats = Seats(plan.lora) if plan.lora else None

    def run(self, inputs: Tensors, notes: Notes) -> Later:
        shapes = _key([list(tensor.shape) for tensor in inputs])
        graph = self._by_shapes.get(shapes)
        if graph is None:
            raise torch.jit.Error(
                "The following operation failed in the TorchScript interpreter.\n"
                f"ValueError: Input shape {[list(shape) for shape in shapes]} not found in input_shape_map"
            )
        try:
            ready_at = device.DEVICE.run(graph.name, inputs)
        except RuntimeError:
            self.scramble()
            raise
        inputs = [*inputs[:4], _as_float32(inputs[4]), *inputs[5:]]
        try:
            with torch.inference_mode():
                if graph.tag == FUSED:
                    inputs = self._with_guesses(graph, inputs) if self.plan.eagle else self._with_drafts(graph, inputs)
                hidden = self._compute(graph, inputs, notes)
                logits = self.decoder.logits(hidden)
                result = logits
                if graph.tag == FUSED:
                    found = self._accepted(self._chosen(logits, inputs), inputs)
                    if self.plan.eagle:
                        self._follow(graph, inputs, found[3])
                    return Later(found, ready_at, inputs[0], inputs[2])
                if self.plan.sampling is not None and graph.tag == SPECULATION:
                    result = self._likeliest(logits)
                elif self.plan.sampling is not None:
                    result = sampler.sample(
                        logits[:, -1], inputs[4], config=self.plan.sampling, rescale=self.plan.release >= 8
                    ).to(torch.int32)
        except (IndexError, RuntimeError) as error:
            self.scramble()
            raise device.nrt_error(f"nrt_execute of {graph.name} ({error})", 1006) from error
        outputs = [result, logits] if self.plan.output_logits else [result]
        if self.draft is not None:
            outputs = self._first(result, inputs)
            if self.plan.eagle:
                self._begin(inputs, outputs[3])
        return Later(outputs, ready_at, inputs[0], inputs[2])

    def _likeliest(self, logits: torch.Tensor) -> torch.Tensor:
        assert self.plan.sampling is not None
        if self.plan.sampling["do_sample"]:
            raise IndexError("sampling at one position of several (model_base.py, FIXME)")
        if fake_nxdi.strict() and self.plan.sampling["dynamic"]:
            fake_nxdi.refuse("3.4", "a verification takes the likeliest tokens and ignores sampling_params")
        return logits.argmax(-1).to(torch.int32)

    # With a model that makes drafts

    def _with_drafts(self, graph: Graph, inputs: Tensors) -> Tensors:
        """The inputs of a verification, with the drafts that the second model makes of a decode call's."""
        assert self.draft is not None
        ids, mask, positions, *others = inputs
        fed, seen = [ids], mask.bool()
        lines, blocks = torch.arange(graph.rows), self.plan.layout == "blocks"
        # The last run only fills the cache.
        for ahead in range(graph.width):
            at = positions + ahead
            if blocks:
                before = self._gathered(inputs[12], self.draft_past)
            else:
                before = [
                    (self.draft_past[2 * layer][:, :, : graph.keys], self.draft_past[2 * layer + 1][:, :, : graph.keys])
                    for layer in range(self.draft.shape.layers)
                ]
            own = torch.ones(graph.rows, 1, 1, dtype=torch.bool)
            hidden, new = self.draft.forward(fed[-1], at, before, torch.cat((seen[:, None], own), dim=2))
            if blocks:
                self._stored(inputs[11][:, ahead], new, self.draft_past)
            for layer, pair in enumerate(new if not blocks else ()):
                for cache, values in zip(self.draft_past[2 * layer : 2 * layer + 2], pair, strict=True):
                    cache[lines[:, None], :, at.long()] = self._cast(values).transpose(1, 2)
            seen = seen.clone()
            seen[:, at.long().flatten()] = True  # each row's place is opened to all rows (3.3)
            fed.append(self.draft.logits(hidden).argmax(-1).to(torch.int32))
        return [torch.cat(fed[:-1], dim=1), mask, positions + torch.arange(graph.width, dtype=torch.int32), *others]

    def _with_guesses(self, graph: Graph, inputs: Tensors) -> Tensors:
        """The same of an EAGLE head, which is one position behind and reads hidden states."""
        ids, mask, positions, seq_ids, *_ = inputs
        width = graph.width
        self._states = self.buffer[seq_ids.long(), (positions[:, 0] % (2 * width)).long()][:, None]
        state, fed, seen = self._states, [ids], mask.bool().clone()
        seen[torch.arange(graph.rows), positions[:, 0].long() - 1] = False
        for ahead in range(width - 1):
            at = positions - 1 + ahead
            state = self._guessed(graph, fed[-1], at, seen, state)
            seen[torch.arange(graph.rows), at[:, 0].long()] = True
            assert self.draft is not None
            fed.append(self.draft.logits(state).argmax(-1).to(torch.int32))
        at = positions + torch.arange(width, dtype=torch.int32)
        return [torch.cat(fed, dim=1), mask, at, *inputs[3:]]

    def _guessed(
        self, graph: Graph, ids: torch.Tensor, at: torch.Tensor, seen: torch.Tensor, states: torch.Tensor
    ) -> torch.Tensor:
        """Hidden states of the head, whose keys and values are kept."""
        assert self.draft is not None
        past = self.draft_past
        before = [(past[0][:, :, : graph.keys], past[1][:, :, : graph.keys])]
        own = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).tril().expand(graph.rows, -1, -1)
        mask = torch.cat((seen[:, None].expand(-1, ids.shape[1], -1), own), dim=2)
        hidden, (pair,) = self.draft.forward(ids, at, before, mask, states)
        for cache, values in zip(past, pair, strict=True):
            cache[torch.arange(graph.rows)[:, None], :, at.long()] = self._cast(values).transpose(1, 2)
        return hidden

    def _follow(self, graph: Graph, inputs: Tensors, following: torch.Tensor) -> None:
        """Lets the head read what the model has computed, and keeps the hidden state behind which a row goes on."""
        ids, mask, positions, seq_ids, *_ = inputs
        states, seen = self.decoder.kept, mask.bool().clone()
        seen[torch.arange(graph.rows), positions[:, 0].long() - 1] = False
        self._guessed(graph, ids, positions - 1, seen, torch.cat((self._states, states[:, :-1]), dim=1))
        last = (following[:, 0] - positions[:, 0]).long() - 1
        rows = torch.arange(graph.rows)
        self.buffer[seq_ids.long(), (following[:, 0] % (2 * graph.width)).long()] = states[rows, last]

    def _begin(self, inputs: Tensors, following: torch.Tensor) -> None:
        places = (following[:, 0] % (2 * self.plan.speculation)).long()
        self.buffer[inputs[3].long(), places] = self._newest

    def _chosen(self, logits: torch.Tensor, inputs: Tensors) -> torch.Tensor:
        assert self.plan.sampling is not None
        if not self.plan.sampling["do_sample"]:
            return logits.argmax(-1)
        return sampler.verified(logits, inputs[0][:, 1:], inputs[4], self.plan.sampling)

    def _accepted(self, likeliest: torch.Tensor, inputs: Tensors) -> Tensors:
        """Tokens up to the first that differs from its draft, and the token, mask and position of the next step."""
        fed, mask, positions = inputs[0], inputs[1], inputs[2]
        count = 1 + (fed[:, 1:] == likeliest[:, :-1]).int().cumprod(dim=1).sum(dim=1, keepdim=True)
        place = torch.arange(likeliest.shape[1])
        accepted = torch.where(place < count, likeliest, self._filler).to(torch.int32)
        following = (positions[:, :1] + count).to(torch.int32)
        seen = (torch.arange(mask.shape[1]) < following).to(torch.int32)
        return [accepted, accepted.gather(1, count - 1), seen, following]

    def _first(self, tokens: torch.Tensor, inputs: Tensors) -> Tensors:
        """The same of prompts."""
        accepted = torch.full((len(tokens), self.plan.speculation), self._filler, dtype=torch.int32)
        accepted[:, 0] = tokens
        following = inputs[13] + inputs[14] if self.plan.layout == "blocks" else inputs[1].sum(dim=1, keepdim=True)
        following = following.to(torch.int32)
        seen = (torch.arange(self.plan.max_length) < following).to(torch.int32)
        return [accepted, accepted[:, :1], seen, following]

    @property
    def _filler(self) -> int:
        return -1 if self.plan.release >= 8 else 0

    def scramble(self) -> None:
        """After an error nobody knows what the device's memory holds."""
        for tensor in (*self.past, *self.draft_past):
            tensor.copy_(torch.randn(tensor.shape))

    def _compute(self, graph: Graph, inputs: Tensors, notes: Notes) -> torch.Tensor:
        if self.seats is not None:
            adapters, seq_ids = inputs[6], inputs[3]
            self.decoder.rows = (
                self.seats.bind(adapters, seq_ids) if graph.tag == CONTEXT else self.seats.of_rows(seq_ids, notes.real)
            )
        if self.plan.layout == "slots":
            prefill, decode = self._prefill_lines, self._decode_lines
        else:
            prefill, decode = self._prefill_blocks, self._decode_blocks
        hidden = (prefill if graph.tag == CONTEXT else decode)(graph, inputs, notes)
        if graph.width == 1 or graph.tag in (SPECULATION, FUSED):
            return hidden
        last = inputs[2].max(dim=1).indices
        return hidden[torch.arange(len(last)), last][:, None]

    # Lines

    def _prefill_lines(self, graph: Graph, inputs: Tensors, notes: Notes) -> torch.Tensor:
        ids, _, positions, seq_ids, *_ = inputs
        width = graph.width
        causal = torch.ones(width, width, dtype=torch.bool).tril().expand(graph.rows, -1, -1)
        if self.plan.deeper:
            self.decoder.turned, self.decoder.seen, self.decoder.deeper = inputs[7], (inputs[8], inputs[9]), inputs[10]
        elif self.plan.sees:
            self.decoder.seen = (inputs[7], inputs[8])
        hidden, new = self.decoder.forward(ids, positions, None, causal)
        self.decoder.seen = self.decoder.deeper = None
        lines = seq_ids.long() if self.plan.continuous else torch.arange(graph.rows)
        self._check_prompts(ids, positions, lines.tolist(), seq_ids.tolist(), notes)
        written = [(self.past, new)]
        if self.draft is not None and self.plan.eagle:
            # One position behind: at each the head reads the token after it.
            ends = (positions.max(dim=1).indices + 1).tolist()
            states = self.decoder.kept
            found = self.draft.forward(ids.roll(-1, dims=1), positions, None, causal, states)[1]
            written.append((self.draft_past, found))
            self._newest = states[torch.arange(len(ends)), torch.tensor(ends) - 1]
        elif self.draft is not None:
            written.append((self.draft_past, self.draft.forward(ids, positions, None, causal)[1]))
        for past, of_layers in written:
            for layer, (keys, values) in enumerate(of_layers):
                past[2 * layer][lines, :, :width] = self._cast(keys)
                past[2 * layer + 1][lines, :, :width] = self._cast(values)
        return hidden

    def _check_prompts(
        self, ids: torch.Tensor, positions: torch.Tensor, lines: list[int], seq_ids: list[int], notes: Notes
    ) -> None:
        if not fake_nxdi.strict():
            return
        ends = (positions.max(dim=1).indices + 1).tolist()
        for row, line in enumerate(lines):
            places = self._places(line, np.arange(positions.shape[1]))
            if notes.warm_up or not notes.real[row]:
                self.ledger.spoil(places, WARM if notes.warm_up else COPY)
                continue
            if line != seq_ids[row]:
                fake_nxdi.refuse("20-1", f"a static batch writes row {row} into line {row}, not {seq_ids[row]}")
            if self.plan.sees and ends[row] == positions.shape[1]:
                fake_nxdi.refuse("M4", "a prompt fills its bucket: its last token becomes what pads the features")
            if ends[row] > notes.given:
                fake_nxdi.refuse("20-4", "a prompt of one token: the last token is looked for in NxDI's own padding")
            tokens = ids[row, : ends[row]].tolist()
            self._prompt_ends.pop(line, None)  # of a sequence that ended with its first token
            if len(set(tokens)) == 1:
                # One token over and over is a call that only wants to run the graph.
                self.ledger.spoil(places, WARM)
                continue
            self.ledger.write(places[: ends[row]], tokens, ROOT)
            self.ledger.spoil(places[ends[row] :], TAIL)
            self._prompt_ends[line] = ends[row]

    def _decode_lines(self, graph: Graph, inputs: Tensors, notes: Notes) -> torch.Tensor:
        ids, mask, positions, seq_ids, *_ = inputs
        lines = torch.arange(graph.rows)
        read = seq_ids.long() if self.plan.chooses_rows and graph.rows != self.plan.max_rows else lines
        before = [
            (self.past[2 * layer][read, :, : graph.keys], self.past[2 * layer + 1][read, :, : graph.keys])
            for layer in range(self.plan.decoder.layers)
        ]
        width = graph.width
        causal = torch.ones(width, width, dtype=torch.bool).tril().expand(graph.rows, -1, -1)
        seen = torch.cat((mask.bool()[:, None].expand(-1, width, -1), causal), dim=2)
        self.decoder.turned = inputs[7] if self.plan.deeper else None
        hidden, new = self.decoder.forward(ids, positions, before, seen)
        where = positions.long()
        if self.plan.line_pad:
            where = torch.where((seq_ids >= 0)[:, None], where, self.plan.max_length + torch.arange(width))
        if int(where.max()) >= self.plan.line_length:
            raise IndexError(
                f"index {int(where.max())} is out of bounds for dimension 2 with size {self.plan.line_length}"
            )
        self._check_decodes(ids, mask, positions, where, notes)
        for layer, pair in enumerate(new):
            for cache, values in zip(self.past[2 * layer : 2 * layer + 2], pair, strict=True):
                cache[lines[:, None], :, where] = self._cast(values).transpose(1, 2)
        return hidden

    def _check_decodes(
        self, ids: torch.Tensor, mask: torch.Tensor, positions: torch.Tensor, where: torch.Tensor, notes: Notes
    ) -> None:
        if not fake_nxdi.strict():
            return
        rows = []
        filled = notes.copies or repeats(ids, positions, notes.real)
        for row, position in enumerate(positions[:, 0].tolist()):
            if notes.real[row] and position >= self.plan.max_length:
                fake_nxdi.refuse("20-19", f"decode at position {position} of {self.plan.max_length}")
            late_answer = notes.real[row] and self._prompt_ends.pop(row, 0) > position
            if late_answer and not filled[row] and not notes.warm_up:
                fake_nxdi.refuse(
                    "20-5", f"the prompt's answer came from a later position than {position - 1}: its padding is a ramp"
                )
            places = self._places(row, np.arange(min(position, mask.shape[1])))
            rows.append((places, self._places(row, where[row].numpy())))
        self._check_rows(ids, mask, positions, rows, notes)

    # Blocks

    def _flat(self, past: Tensors) -> list[Layer]:
        flat = [one.view(-1, *one.shape[-2:]) for one in past]
        return list(zip(flat[::2], flat[1::2], strict=True))

    def _gathered(self, table: torch.Tensor, past: Tensors) -> list[Layer]:
        rows = len(table)
        size = self.plan.block_size
        wanted = table.long()
        if self.plan.decode_kernel:
            wanted = wanted.clamp(min=0)
        if int(wanted.min()) < 0 or int(wanted.max()) > self.plan.num_blocks:
            raise IndexError("index out of range in self (block_table)")
        places = (wanted[:, :, None] * size + torch.arange(size)).reshape(rows, -1)
        return [(keys[places].transpose(1, 2), values[places].transpose(1, 2)) for keys, values in self._flat(past)]

    def _stored(self, slots: torch.Tensor, new: list[Layer], past: Tensors) -> None:
        slots = torch.where(slots == -1, self.plan.num_blocks * self.plan.block_size, slots).long().flatten()
        last = (self.plan.num_blocks + 1) * self.plan.block_size - 1
        if int(slots.min()) < 0 or int(slots.max()) > last:
            raise IndexError(f"index {int(slots.max())} is out of bounds for dimension 0 with size {last + 1}")
        for caches, pair in zip(self._flat(past), new, strict=True):
            for cache, values in zip(caches, pair, strict=True):
                cache[slots] = self._cast(values).transpose(1, 2).flatten(0, 1)

    def _prefill_blocks(self, graph: Graph, inputs: Tensors, notes: Notes) -> torch.Tensor:
        ids, mask, positions, *_ = inputs
        slots, table = inputs[11], inputs[12]
        width, prefix = graph.width, graph.keys
        seen = torch.ones(width, width, dtype=torch.bool).tril().expand(graph.rows, -1, -1)
        if prefix:
            used = torch.full((graph.rows,), prefix)
            if self.plan.masks_prefix(width):
                used = mask.sum(dim=1)
            cached = torch.arange(prefix)[None, None].expand(graph.rows, width, -1) < used[:, None, None]
            seen = torch.cat((cached, seen), dim=2)
        self._check_prefix_prefill(graph, inputs, notes)
        hidden = None
        for decoder, past in ((self.draft, self.draft_past), (self.decoder, self.past)):
            if decoder is not None:
                before = self._gathered(table, past) if prefix else None
                hidden, new = decoder.forward(ids, positions, before, seen)
                self._stored(slots, new, past)
        assert hidden is not None
        return hidden

    def _check_prefix_prefill(self, graph: Graph, inputs: Tensors, notes: Notes) -> None:
        mask, positions = inputs[1][0], inputs[2][0]
        slots, table, queries, computed = (inputs[index][0] for index in (11, 12, 13, 14))
        if not fake_nxdi.strict():
            return
        real = np.array([slot for slot in slots.tolist() if slot >= 0], np.int64)
        if notes.warm_up:
            self.ledger.spoil(real, WARM)
            return
        if graph.rows != 1:
            raise NotImplementedError("the strict fake follows prefills of one prompt a graph")
        size = self.plan.block_size
        start, end = int(computed), int(computed) + int(queries)
        last = int(positions.max(dim=0).indices)
        if int(positions[last]) != end - 1:
            fake_nxdi.refuse(
                "20-5", f"the last position is {int(positions[last])} of a prompt of {end}: padding is a ramp"
            )
        first = int(positions[0]) if end > 1 else 0
        used = int(mask.sum()) if graph.keys else 0
        if graph.keys > used and not self.plan.masks_prefix(graph.width):
            fake_nxdi.refuse("10-LNC1", f"{graph.keys - used} unused places of the prefix bucket are attended")
        held = numbers(notes.prompt[:end])
        warm = len(set(notes.prompt)) == 1
        if used and not warm:
            index = np.arange(used)
            places = np.array(table.tolist(), np.int64)[index // size] * size + index % size
            broken = self.ledger.differs_at(places, held[:used])
            if broken >= 0:
                why = int(self.ledger.why[places[broken]])
                warm = why in (NEVER, WARM)
                if not warm:
                    fake_nxdi.refuse("20-14", f"position {broken} of the prefix holds another token than the prompt's")
        for column, slot in enumerate(slots.tolist()):
            position = first + column
            if slot < 0:
                continue
            if position < start:
                fake_nxdi.refuse("20-14", f"slot {slot} stores the computed position {position} again")
            block = position // size
            if block < len(notes.table) and slot != notes.table[block] * size + position % size:
                fake_nxdi.refuse("20-14", f"slot {slot} of position {position} is not in the sequence's own blocks")
            if position < end:
                if warm:
                    self.ledger.spoil(np.array([slot]), WARM)
                else:
                    prefix = int(held[position - 1]) if position else ROOT
                    self.ledger.write(np.array([slot]), [notes.prompt[position]], prefix)

    def _decode_blocks(self, graph: Graph, inputs: Tensors, notes: Notes) -> torch.Tensor:
        ids, mask, positions, *_ = inputs
        given, table = inputs[11], inputs[12]
        size = self.plan.block_size
        before = self._gathered(table, self.past)
        position = positions.long()
        if int(position.max()) // size >= table.shape[1]:
            raise IndexError(
                f"index {int(position.max()) // size} is out of bounds for dimension 1 with size {table.shape[1]}"
            )
        through_table = table.long().gather(1, position // size) * size + position % size
        # Those of drafts are taken as they come (3.5).
        slots = given.long() if graph.tag == FUSED else torch.where(given >= 0, through_table, -1)
        if fake_nxdi.strict() and bool(((slots >= 0) & (slots != through_table)).any()):
            fake_nxdi.refuse("S2", f"slots {slots.tolist()} are not those of the block table, {through_table.tolist()}")
        width = graph.width
        causal = torch.ones(width, width, dtype=torch.bool).tril().expand(graph.rows, -1, -1)
        seen = torch.cat((mask.bool()[:, None].expand(-1, width, -1), causal), dim=2)
        if fake_nxdi.strict():
            rows = []
            for row, at in enumerate(position[:, 0].tolist()):
                index = np.arange(min(at, graph.keys))
                places = np.array(table[row].tolist(), np.int64)[index // size] * size + index % size
                of_row = slots[row].numpy()
                # Behind the first that is not kept are drafts that the caller will not take.
                rows.append((places, of_row[: max(int((of_row >= 0).cumprod().sum()), 1)]))
            self._check_rows(ids, mask, positions, rows, notes)
        hidden, new = self.decoder.forward(ids, positions, before, seen)
        self._stored(slots, new, self.past)
        return hidden

    # Both

    def _cast(self, values: torch.Tensor) -> torch.Tensor:
        return quantized.cast(values, self.plan.cache_dtype)

    def _places(self, line: int, positions: Any) -> Any:
        return line * self.plan.line_length + positions

    def _check_rows(
        self,
        ids: torch.Tensor,
        mask: torch.Tensor,
        positions: torch.Tensor,
        rows: Sequence[tuple[Any, Any]],
        notes: Notes,
    ) -> None:
        """Each real row attends one sequence, and all of it; notes what they write. `rows`: places read, written."""
        tokens, at = [tuple(row) for row in ids.tolist()], positions[:, 0].tolist()
        # Drafts of the device are not the caller's: in a copied row they follow what the line held.
        given = [row[:1] for row in tokens] if self.draft is not None else tokens
        broken = [
            self.ledger.broken_at(places) if real else 0 for (places, _), real in zip(rows, notes.real, strict=True)
        ]
        good = {
            (given[row], at[row])
            for row, index in enumerate(broken)
            if notes.real[row] and (index < 0 or int(self.ledger.why[rows[row][0][index]]) in (NEVER, WARM))
        }
        written: dict[int, int] = {}
        for row, (places, spot) in enumerate(rows):
            if spot[0] < 0:
                continue
            if notes.warm_up:
                self.ledger.spoil(spot, WARM)
                continue
            if not notes.real[row]:
                self.ledger.spoil(spot, COPY)
                continue
            if int(mask[row].sum()) != at[row] or not bool(mask[row, : at[row]].all()):
                fake_nxdi.refuse("5", f"row {row} at position {at[row]} attends other positions than those before it")
            if positions[row].tolist() != list(range(at[row], at[row] + positions.shape[1])):
                fake_nxdi.refuse("3.2", f"row {row} has the positions {positions[row].tolist()}, which are no run")
            for place in spot.tolist():
                if place in written:
                    fake_nxdi.refuse("21-4", f"rows {written[place]} and {row} write the same place")
                written[place] = row
            if broken[row] >= 0:
                why = int(self.ledger.why[places[broken[row]]])
                if why in (NEVER, WARM):
                    self.ledger.spoil(spot, WARM)
                elif (given[row], at[row]) in good or (notes.copies and notes.copies[row]):
                    # A copy of another row, by which the caller fills a free line.
                    self.ledger.spoil(spot, COPY)
                else:
                    rule, what = RULES[why]
                    fake_nxdi.refuse(rule, f"row {row} at position {at[row]} {what} (from position {broken[row]})")
                continue
            self.ledger.write(
                spot, tokens[row][: len(spot)], int(self.ledger.number[places[-1]]) if len(places) else ROOT
            )


def repeats(ids: torch.Tensor, positions: torch.Tensor, real: Sequence[bool]) -> list[bool]:
    """For each row of a decode call, whether another one of the caller feeds the same token at the same position.

    A caller fills free lines with copies of a row.
    """
    rows = list(zip(ids[:, 0].tolist(), positions[:, 0].tolist(), strict=True))
    count = Counter(row for row, given in zip(rows, real, strict=True) if given)
    return [count[row] > 1 for row in rows]


def _key(shapes: list[list[int]]) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(shape) for shape in shapes)


def _as_float32(parameters: torch.Tensor) -> torch.Tensor:
    """The graph takes the bytes that it gets for float32."""
    if parameters.dtype == torch.float32:
        return parameters
    raw = parameters.contiguous().view(torch.float32)
    return raw[:, : parameters.shape[1]].contiguous()
