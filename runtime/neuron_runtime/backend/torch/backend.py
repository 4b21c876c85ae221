"""`TorchBackend`: the Backend protocol over a decoder on CPUs; all computation runs on one device thread.

Created by `load_backend`, called by `engine.loop`. Calls only enqueue work or wait for it, so the engine schedules the
next step while this one runs. A row that waits for the step in flight is resolved on the device thread by the mirror.
A row with drafts runs like a part of a prompt, so that its positions share its keys, and all of them sample.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np
import torch

from neuron_runtime.backend.host_sampling.drawing import NotFinite
from neuron_runtime.backend.host_sampling.sampler import HostSampler, PerRow, logprobs_of
from neuron_runtime.backend.slots import FedRows, IntArray, SlotMirror, places_in_runs
from neuron_runtime.backend.torch.adapters import Adapters, AdapterWeights
from neuron_runtime.backend.torch.cache import KVCache, StepRows
from neuron_runtime.backend.torch.compiled import CompiledDecoder
from neuron_runtime.backend.torch.decoder import Decoder
from neuron_runtime.backend.torch.draft_model import DraftModel, Network
from neuron_runtime.backend.torch.ranks import Ranks
from neuron_runtime.backend.torch.vision import Vision
from neuron_runtime.backend.warming import lone_step, timed, with_adapter
from neuron_runtime.backend_protocol import ProgressCallback, StepTime, size_of
from neuron_runtime.checkpoint import InvalidModel
from neuron_runtime.core import BackendLimits, Batch, Late, StepOutput, TokenLogprobs

Result = TypeVar("Result")

NO_CHANGE = "none"
"""Names the adapter of the warm-up; digests are longer."""
LOGITS_AT_ONCE = 2**23
"""Logits computed together for prompt log-probabilities: 32 MiB."""


class _TorchStep(NamedTuple):
    """A step between run and sample."""

    batch: Batch
    rows: FedRows
    sampled: IntArray
    """The rows that sample."""
    logits: torch.Tensor | None
    """Float32 `[places, vocabulary]`: of the last token of each of them, or of its token and all drafts, row after row.
    None when no row samples."""
    prompt_logprobs: PerRow
    begin: float

    @property
    def without_drafts(self) -> tuple[int, ...]:
        """Rows that should have had some."""
        num_drafts = self.rows.num_drafts
        wanted = enumerate(self.batch.rows.drafts)
        return tuple(row for row, drafts in wanted if num_drafts is not None and drafts and not num_drafts[row])


def device_thread(set_up: Callable[[], None] = lambda: None) -> ThreadPoolExecutor:
    """The only thread that runs parallel torch operations, from loading on.

    Each thread that runs them gets its own OpenMP workers. Two such threads would have more workers than CPUs, and
    workers would then sleep between operations instead of spinning: a step took 1.4 times as long.

    set_up: runs first on the thread (thread settings are per thread).
    """
    return ThreadPoolExecutor(max_workers=1, thread_name_prefix="device", initializer=set_up)


class TorchBackend:
    """See `backend_protocol.AdapterBackend`. `device` is the thread on which the decoder was loaded.

    adapters: None if no adapters may be active. draft: what makes drafts, and the ranks that must have the same ones.
    vision: None if the model sees no pictures.
    """

    def __init__(
        self,
        decoder: Decoder | CompiledDecoder,
        cache: KVCache,
        limits: BackendLimits,
        device: ThreadPoolExecutor | None = None,
        *,
        adapters: Adapters | None = None,
        draft: tuple[Network, Ranks] | None = None,
        vision: Vision | None = None,
    ) -> None:
        self._decoder = decoder
        self._adapters, self._vision = adapters, vision
        self._cache = cache
        self.limits = limits
        self._mirror = SlotMirror(limits)
        self._draft = None
        if draft is not None:
            network, ranks = draft
            self._draft = DraftModel(network, self._mirror, ranks)
        self._prompts: dict[int, tuple[IntArray, int]] = {}
        """By slot, a prompt whose tokens get log-probabilities, and how many alternatives each."""
        self._sampler = HostSampler(self._mirror.tokens, limits.vocabulary_size)
        self._thread = device or device_thread()
        self._running: deque[tuple[int, Future[_TorchStep]]] = deque()
        self._finished: dict[int, Future[StepOutput]] = {}

    def warm_up(self, progress: ProgressCallback) -> list[StepTime]:
        """Run a prefill and a decode step, which selects kernels and allocates scratch memory; where adapters may be
        active, once more with one that changes nothing.

        Raises InvalidModel if the logits are not finite.
        """
        length = min(8, self.limits.max_model_length - 1)
        prompt = lone_step(self.limits, 0, 0, length, decodes=False)
        decode = lone_step(self.limits, 0, length, length + 1, decodes=True)
        steps = [prompt, decode]
        if self._adapters is not None:
            self.add_adapter(NO_CHANGE, Path(), self._adapters.zeros())
            steps += [with_adapter(one, NO_CHANGE) for one in steps]
        try:
            times = timed(self, steps, progress)
        except NotFinite as error:
            # No request is involved, so every request would fail like this.
            raise InvalidModel(str(error)) from error
        if self._adapters is not None:
            self.remove_adapter(NO_CHANGE)
        return times

    def graph(self, batch: Batch) -> str:
        return size_of(batch)

    def launch(self, batch: Batch) -> None:
        self._running.append((batch.step, self._thread.submit(self._run, batch)))

    def sample(self, step: int, late: Late | None) -> None:
        launched_step, launched = self._running.popleft()
        if launched_step != step:
            raise ValueError(f"sample of step {step}, but step {launched_step} was launched")
        self._finished[step] = self._thread.submit(self._sample, launched, late)

    def collect(self, step: int) -> StepOutput:
        return self._finished.pop(step).result()

    def read_adapter(self, folder: Path) -> AdapterWeights:
        assert self._adapters is not None
        return self._adapters.read(folder)

    def add_adapter(self, digest: str, folder: Path, weights: AdapterWeights) -> None:
        assert self._adapters is not None
        self._thread.submit(self._adapters.add, digest, weights)

    def remove_adapter(self, digest: str) -> None:
        assert self._adapters is not None
        # Behind the steps that were launched.
        self._thread.submit(self._adapters.remove, digest)

    def run_on_device(self, work: Callable[[], Result]) -> Result:
        """Run `work` on the device thread, between steps, and return its result."""
        return self._thread.submit(work).result()

    def close(self) -> None:
        self._thread.shutdown(wait=True, cancel_futures=True)

    @torch.inference_mode()
    def _run(self, batch: Batch) -> _TorchStep:
        begin = time.perf_counter()
        rows = self._mirror.resolve(batch)
        self._mirror.apply(batch, rows)
        self._mirror.learn(rows)
        if self._adapters is not None:
            self._adapters.apply(batch)
        if self._vision is not None:
            self._vision.apply(batch)
        for slot in batch.released:
            self._prompts.pop(slot, None)
        for added in batch.added:
            self._sampler.add(added)
            num_alternatives = added.sampling.prompt_logprobs
            # A sequence that has output tokens was preempted, after its prompt had been reported.
            if num_alternatives is not None and len(added.token_ids) == added.num_prompt_tokens:
                self._prompts[added.slot] = np.array(added.token_ids), num_alternatives
        sampled = np.flatnonzero(rows.samples)
        if not len(batch.rows):
            return _TorchStep(batch, rows, sampled, None, (), begin)
        if self._draft is not None:
            self._draft.apply(batch, rows)
            rows = self._draft.fill(rows)
        num_tokens = rows.ends - rows.start
        plan = self._cache.plan(StepRows(rows.start, num_tokens, self._mirror.blocks[rows.slots]))
        adapted = None if self._adapters is None else self._adapters.decoder_for(rows.slots, num_tokens)
        tap = None if self._draft is None else self._draft.tap
        placed = None
        if self._vision is not None:
            plan = self._vision.planned(rows, plan)
            placed = self._vision.placed(rows)
        fed = torch.from_numpy(self._mirror.token_ids(rows))
        hidden = (adapted or self._decoder).forward(fed, plan, tap, placed)
        if self._draft is not None:
            self._draft.follow(rows, plan, hidden)
        ends = np.cumsum(num_tokens)
        prompt_logprobs = self._prompt_logprobs(rows, hidden, ends - num_tokens)
        if not len(sampled):
            return _TorchStep(batch, rows, sampled, None, prompt_logprobs, begin)
        places = ends[sampled] - 1
        if rows.num_drafts is not None:
            num_drafts = rows.num_drafts[sampled]
            of_row = np.repeat(np.arange(len(sampled)), 1 + num_drafts)
            places = (places - num_drafts)[of_row] + places_in_runs(of_row)
        logits = self._decoder.logits(hidden[torch.from_numpy(places)] if len(places) != len(hidden) else hidden)
        return _TorchStep(batch, rows, sampled, logits, prompt_logprobs, begin)

    def _prompt_logprobs(self, rows: FedRows, hidden: torch.Tensor, begins: IntArray) -> PerRow:
        """Computed for some positions at a time: logits of a whole prompt could take more memory than the model."""
        if not self._prompts:
            return ()
        at_once = max(1, LOGITS_AT_ONCE // self.limits.vocabulary_size)
        per_row: list[tuple[TokenLogprobs, ...]] = [()] * len(rows.slots)
        for row, slot in enumerate(rows.slots.tolist()):
            if slot not in self._prompts:
                continue
            prompt, num_alternatives = self._prompts[slot]
            following = prompt[rows.start[row] + 1 : rows.ends[row] + 1]
            of_row: list[TokenLogprobs] = []
            for begin in range(0, len(following), at_once):
                part = following[begin : begin + at_once]
                first = int(begins[row]) + begin
                logits = self._decoder.logits(hidden[first : first + len(part)])
                of_row += logprobs_of(logits, part, num_alternatives)
            per_row[row] = tuple(of_row)
        return tuple(per_row) if any(per_row) else ()

    @torch.inference_mode()
    def _sample(self, launched: Future[_TorchStep], late: Late | None) -> StepOutput:
        step = launched.result()
        token_ids: list[tuple[int, ...]] = [()] * len(step.batch.rows)
        logprobs: PerRow = ()
        if step.logits is not None:
            tokens, logprobs = self._choose(step, step.logits, late)
            for row, of_row in zip(step.sampled.tolist(), tokens, strict=True):
                token_ids[row] = of_row
        return StepOutput(
            step=step.batch.step,
            token_ids=tuple(token_ids),
            logprobs=logprobs,
            prompt_logprobs=step.prompt_logprobs,
            device_seconds=time.perf_counter() - step.begin,
            without_drafts=step.without_drafts,
        )

    def _choose(
        self, step: _TorchStep, logits: torch.Tensor, late: Late | None
    ) -> tuple[list[tuple[int, ...]], PerRow]:
        """The tokens of each row that samples, and the log-probabilities of all rows."""
        sampled, drafts, num_drafts = step.sampled, step.rows.drafts, step.rows.num_drafts
        masks = late.of_rows(sampled.tolist()) if late else None
        places = self._mirror.sampled_positions(sampled)
        if drafts is None or num_drafts is None:
            chosen = self._sampler.choose(logits, *places, masks)
            self._mirror.record(sampled, chosen.tokens)
            return [(token,) for token in chosen.tokens.tolist()], chosen.per_row(sampled, len(step.batch.rows))
        num_masks = late.num_positions if late else 1
        found = self._sampler.verify(
            logits, *places, drafts[sampled], num_drafts[sampled], masks=masks, num_masks=num_masks
        )
        self._mirror.record(np.repeat(sampled, [len(tokens) for tokens in found.tokens]), np.concatenate(found.tokens))
        return found.tokens, found.per_row(sampled, len(step.batch.rows))
