"""The host's side of one submodel: chooses a bucket, pads a call to it and to the graph's rows, and undoes that.

Follows NxDI's ModelWrapper in what a caller can notice: strict bucket selection, missing lines filled with copies of
row 0 and sorted, prompts one after another when the graph takes one. The library's own slips are kept.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
import torch.nn.functional as F

import fake_nxdi
from fake_nxdi.plan import CONTEXT, FUSED, SPECULATION, TOKEN
from fake_nxdi.program import Later, Notes, Program


@dataclass(frozen=True, kw_only=True)
class Call:
    """Arguments of one call, in the order of a graph's inputs. A field that is None is no input."""

    ids: Any
    """Token ids, or the outputs of a step that may still run."""
    mask: torch.Tensor
    positions: torch.Tensor
    seq_ids: torch.Tensor
    sampling: torch.Tensor
    adapters: torch.Tensor
    slots: torch.Tensor | None = None
    table: torch.Tensor | None = None
    queries: torch.Tensor | None = None
    computed: torch.Tensor | None = None
    turned: torch.Tensor | None = None
    """Positions that turn, in three parts."""
    features: torch.Tensor | None = None
    """Of pictures, padded to the graph; and the places of the prompt that take them."""
    places: torch.Tensor | None = None
    deeper: torch.Tensor | None = None
    """Features for layers."""

    @property
    def rows(self) -> int:
        return int(self.seq_ids.shape[0])

    def changed(self, change: Any) -> Call:
        """Every tensor replaced by `change(tensor)`."""
        found = {item.name: getattr(self, item.name) for item in fields(self)}
        return Call(
            **{name: change(value) if isinstance(value, torch.Tensor) else value for name, value in found.items()}
        )

    def part(self, start: int, stop: int) -> Call:
        return self.changed(lambda tensor: tensor[start:stop])


class Submodel:
    def __init__(self, config: Any, tag: str) -> None:
        self.config = config
        self.neuron_config = config.neuron_config
        self.tag = tag
        self.model: Program | None = None
        if getattr(config, "pad_token_id", None) is None:
            config.pad_token_id = 0

    @property
    def blocks(self) -> bool:
        return bool(self.neuron_config.is_prefix_caching)

    @property
    def chooses_rows(self) -> bool:
        return self.tag == TOKEN and getattr(self.neuron_config, "token_generation_batches", None) is not None

    def is_neuron(self) -> bool:
        return True

    # Calls

    def __call__(self, call: Call, fit: str = "first_fit") -> Any:
        if self.model is None:
            raise RuntimeError("Forward called before load. Run load() or load_state_dict() making calling forward")
        if self.blocks and (call.slots is None or call.table is None):
            raise IndexError("list index out of range")
        call = call.changed(lambda tensor: tensor.to(torch.int32) if tensor.dtype == torch.int64 else tensor)
        given = call
        call = self._fitted(call, fit)
        batch = self.neuron_config.batch_size
        if call.rows == batch:
            outputs = self._run(call, self._notes(given, [True] * batch))
            return Launched(outputs) if self.neuron_config.async_mode else outputs
        return self._in_parts(call, given)

    def _in_parts(self, call: Call, given: Call) -> Any:
        asynchronous = self.neuron_config.async_mode
        batch = self.neuron_config.batch_size
        parts: list[Any] = []
        on_host = padded = False
        for start in range(0, call.rows, batch):
            stop = min(start + batch, call.rows)
            part = call.part(start, stop)
            if start + batch <= call.rows:
                alone = self._alone(part)
                outputs = self._run(self._fitted(alone, "first_fit"), self._notes(alone, [True] * batch))
                if asynchronous:
                    on_host, outputs = True, outputs.wait()
            else:
                padded = True
                outputs = self._padded(part, given.part(start, stop))
                if asynchronous and parts:
                    on_host, outputs = True, outputs.wait()
            parts.append(outputs)
        if asynchronous:
            return Launched(parts if on_host else parts[0], padded=padded)
        if self._lists_outputs:
            return [torch.cat(pieces, dim=0) for pieces in zip(*parts, strict=False)]
        return torch.cat(parts, dim=0)

    @property
    def _lists_outputs(self) -> bool:
        neuron = self.neuron_config
        logits = neuron.on_device_sampling_config and neuron.output_logits and neuron.is_continuous_batching
        return bool(neuron.enable_fused_speculation or logits)

    def _alone(self, call: Call) -> Call:
        """A row without the padding that the longest row of its call gave it."""
        length = int(call.positions.max()) + 1
        return replace(call, ids=call.ids[:, :length], mask=call.mask[:, :length], positions=call.positions[:, :length])

    def _notes(self, given: Call, real: list[bool]) -> Notes:
        notes = Notes(real=real, given=int(given.positions.shape[1]))
        if self.tag == CONTEXT and self.blocks and given.queries is not None and given.computed is not None:
            end = int(given.queries[0]) + int(given.computed[0])
            notes.prompt = given.ids[0, :end].tolist()
            notes.table = given.table[0].tolist() if given.table is not None else []
        return notes

    def _run(self, call: Call, notes: Notes) -> Any:
        assert self.model is not None
        neuron = self.neuron_config
        if isinstance(call.ids, Later):
            notes.copies = call.ids.copies
            call = replace(call, ids=call.ids.outputs[0])
        if neuron.async_mode:
            width = call.positions.shape[1] if self.tag == CONTEXT else neuron.n_active_tokens
            call = replace(call, ids=call.ids.reshape(neuron.batch_size, width))
        outputs = self.model.run(self._inputs(call), notes)
        if neuron.async_mode:
            return outputs
        found = outputs.wait()
        return found if neuron.output_logits or neuron.enable_fused_speculation else found[0]

    def _inputs(self, call: Call) -> list[torch.Tensor]:
        first = [call.ids, call.mask, call.positions, call.seq_ids, call.sampling]
        nothing = torch.empty(0)
        if not self.blocks:
            of_pictures = (call.turned, call.features, call.places, call.deeper)
            seen = (tensor for tensor in of_pictures if tensor is not None)
            return [*first, torch.zeros(call.rows, dtype=torch.int32), call.adapters, *seen]
        adapters = call.adapters if fake_nxdi.has(8) else nothing
        last = [call.slots, call.table, call.queries, call.computed]
        return [*first, nothing, adapters, *[nothing] * 4, *(tensor for tensor in last if tensor is not None)]

    # Rows

    def _padded(self, call: Call, given: Call) -> Any:
        """A call with fewer rows than the graph: missing lines are added, with what row 0 has."""
        neuron = self.neuron_config
        target = neuron.max_batch_size
        if self.chooses_rows:
            target = self._bucket(call, "first_fit")[0]
        live = call.seq_ids.tolist()
        lines = torch.tensor(live + [line for line in range(target) if line not in live], dtype=call.seq_ids.dtype)
        order = None
        if not self.blocks:
            lines, order = torch.sort(lines)
        real = [index < len(live) for index in (range(neuron.batch_size) if order is None else order.tolist())]
        if neuron.apply_seq_ids_mask:
            present = torch.tensor([line in live for line in range(target)])
            lines = torch.where(present, lines, torch.full_like(lines, -1))

        def filled(tensor: Any, fill: int | None = None) -> Any:
            if not isinstance(tensor, torch.Tensor) or tensor.shape[0] == neuron.batch_size:
                return tensor
            rows = tensor[:1].repeat(neuron.batch_size, *[1] * (tensor.dim() - 1))
            if fill is not None:
                rows = torch.full_like(rows, fill)
            rows[: tensor.shape[0]] = tensor
            return rows if order is None else rows.index_select(0, order)

        full = replace(
            call,
            ids=filled(call.ids),
            mask=filled(call.mask),
            positions=filled(call.positions),
            seq_ids=lines[:target],
            sampling=filled(call.sampling),
            adapters=filled(call.adapters, 0),
            slots=filled(call.slots, -1),
            table=filled(call.table),
            queries=filled(call.queries),
            computed=filled(call.computed),
        )
        if call.turned is not None:
            # It was cut along its parts, of which the first counts, and it is not sorted with the rows.
            parts = (call.turned if len(call.turned) == 3 else call.turned[:1]).expand(3, -1, -1)
            more = parts[:, :1].expand(-1, neuron.batch_size - parts.shape[1], -1)
            full = replace(full, turned=torch.cat((parts, more), dim=1))
        outputs = self._run(full, self._notes(given, real))
        if neuron.async_mode:
            return outputs
        if self.blocks:
            # With logits and tokens this cuts the list of both, not the rows of each: so does the real one.
            return outputs[: call.rows]
        if self._lists_outputs:
            return [output.index_select(0, call.seq_ids) for output in outputs]
        return torch.index_select(outputs, 0, call.seq_ids)

    # Buckets

    def _fitted(self, call: Call, fit: str) -> Call:
        if self.blocks:
            if self.tag == CONTEXT:
                # Several prompts are fitted one by one.
                return call if call.ids.shape[0] > 1 else self._fitted_prompt_in_blocks(call)
            return self._fitted_decode_in_blocks(call, fit)
        bucket = self._bucket(call, fit)
        length = bucket[1] if isinstance(bucket, list) else bucket
        if self.tag == CONTEXT:
            width = call.mask.shape[1]
            if min(length - tensor.shape[1] for tensor in (call.ids, call.mask, call.positions)) < 0:
                self._cut(f"Inputs supplied ({width} tokens) are longer than max_context_length")
            return replace(
                self._with_places(call, length),
                ids=_widened(call.ids, length, self.config.pad_token_id),
                mask=_widened(call.mask, length, 0),
                positions=_widened(call.positions, length, 1),
                turned=None if call.turned is None else _widened(call.turned, length, 1),
            )
        if call.mask.shape[1] > length:
            self._cut(f"Attention mask supplied (length={call.mask.shape[1]}) is longer than max_length")
        return replace(call, mask=_widened(call.mask, length, 0))

    def _with_places(self, call: Call, length: int) -> Call:
        """Places of features for another graph than that of the call are forgotten, and so are the features."""
        if call.places is None or call.places.dim() != 3 or call.places.shape[1] == length:
            return call
        if fake_nxdi.strict():
            fake_nxdi.refuse("M10", f"places for a graph of {call.places.shape[1]} tokens in one of {length}")
        features = torch.zeros(1, length, self.config.hidden_size)
        return replace(call, features=features, places=torch.full((1, length, 1), length - 1), deeper=None)

    def _cut(self, what: str) -> None:
        if not self.neuron_config.allow_input_truncation:
            raise ValueError(f"{what}. To truncate inputs, set allow_input_truncation=True.")
        if fake_nxdi.strict():
            fake_nxdi.refuse("0.1-18", f"{what} and is cut to it")
        warnings.warn(f"{what}. This may cause unexpected outputs.", stacklevel=2)

    def _bucket(self, call: Call, fit: str) -> Any:
        length = int(call.mask.shape[1])
        needed = length + (self.neuron_config.speculation_length if self.tag in (SPECULATION, FUSED) else 0)
        buckets = self.neuron_config.buckets
        if self.chooses_rows:
            if fit != "first_fit":
                raise ValueError(f"strategy={fit!r} is currently not supported for batch bucketing.")
            fitting = [bucket for bucket in buckets if bucket[0] >= call.rows and bucket[1] >= needed]
            if fitting:
                return min(fitting)
            largest = max(buckets)
            if self.neuron_config.allow_input_truncation and largest[0] >= call.rows:
                return largest
            raise ValueError(
                f"Input batch_size={call.rows}, seq_len={needed} exceeds largest bucket batch_size={largest[0]}, "
                f"seq_len={largest[1]} for {self.tag}. Available buckets are {buckets}."
            )
        for index, bucket in enumerate(buckets):
            if needed < bucket:
                return buckets[min(index + 1, len(buckets) - 1)] if fit == "second_fit" else bucket
        if needed == buckets[-1]:
            return buckets[-1]
        if self.neuron_config.allow_input_truncation:
            return buckets[-1]
        raise ValueError(f"Input len {length} exceeds largest bucket ({buckets[-1]}) for {self.tag}")

    def _fitted_prompt_in_blocks(self, call: Call) -> Call:
        assert call.slots is not None
        assert call.table is not None
        assert call.queries is not None
        assert call.computed is not None
        new, cached = int(call.queries[0, 0]), int(call.computed[0, 0])
        active, prefix = self._prompt_bucket(new, cached)
        # Free places among the active ones compute cached tokens again.
        kept = max(0, cached - max(0, active - new))
        slots = _widened(F.pad(call.slots, (cached - kept, 0), value=-1), active, -1)
        blocks = prefix // self.neuron_config.pa_block_size
        return replace(
            call,
            ids=_widened(call.ids[:, kept:], active, self.config.pad_token_id),
            mask=_widened(call.mask[:, :kept], prefix, 0) if prefix else torch.zeros(1, dtype=torch.int32),
            positions=_widened(call.positions[:, kept:], active, 1),
            slots=slots,
            table=_widened(call.table, blocks, 0) if blocks else torch.zeros(1, dtype=torch.int32),
        )

    def _prompt_bucket(self, new: int, cached: int) -> list[int]:
        buckets: list[list[int]] = self.neuron_config.buckets
        if 256 < new + cached <= 512 and [512, 0] in buckets:
            return [512, 0]
        actives = list(dict.fromkeys(bucket[0] for bucket in buckets))
        prefixes = list(dict.fromkeys(bucket[1] for bucket in buckets))
        chosen = sum(1 for _ in _until(actives, new))
        if chosen == len(actives):
            if not self.neuron_config.allow_input_truncation:
                raise ValueError(f"Prefill len {new} exceeds largest bucket ({actives[-1]}) for {self.tag}")
            chosen -= 1
        left = max(0, cached - max(0, actives[chosen] - new))
        behind = sum(1 for _ in _until(prefixes, left))
        assert behind != len(prefixes), f"Prefix len {left} exceeds largest bucket {prefixes[-1]} for {self.tag}"
        return buckets[chosen * len(prefixes) + behind]

    def _fitted_decode_in_blocks(self, call: Call, fit: str) -> Call:
        assert call.table is not None
        assert call.queries is not None
        assert call.computed is not None
        buckets: list[list[int]] = self.neuron_config.buckets
        new, cached = int(call.queries.max()), int(call.computed.max())
        cached += self.neuron_config.speculation_length if self.tag == FUSED else 0
        fitting = [index for index, bucket in enumerate(buckets) if bucket[1] > cached and bucket[0] >= new]
        if fitting:
            index = min(fitting, key=lambda at: buckets[at][1])
            if fit == "second_fit":
                index = min(index + 1, len(buckets) - 1)
        elif self.neuron_config.allow_input_truncation:
            index = -1
        else:
            raise ValueError(f"Input len {call.queries} exceeds largest bucket ({buckets[-1][1]}) for {self.tag}")
        prefix = buckets[index][1]
        pad = -1 if self.neuron_config.attn_block_tkg_nki_kernel_enabled else 0
        return replace(
            call,
            mask=_widened(call.mask, prefix, 0),
            table=_widened(call.table, prefix // self.neuron_config.pa_block_size, pad),
        )


def _widened(tensor: torch.Tensor, width: int, value: int) -> torch.Tensor:
    """Padded, or cut, at the right."""
    return F.pad(tensor, (0, width - tensor.shape[-1]), value=value)


def _until(buckets: list[int], needed: int) -> Any:
    """The buckets before the first that holds `needed`."""
    for bucket in buckets:
        if needed <= bucket:
            return
        yield bucket


class Launched:
    """What an asynchronous call returns: outputs to wait for, with the padding still in them."""

    def __init__(self, outputs: Any, *, padded: bool = False) -> None:
        self.outputs = outputs
        self.padded = padded

    def on_host(self, rows: torch.Tensor) -> Any:
        """The given rows, once the device is done."""
        if isinstance(self.outputs, Later):
            return [output.index_select(0, rows) for output in self.outputs.wait()]
        return torch.cat([part[0] for part in self.outputs], dim=0).index_select(0, rows)
