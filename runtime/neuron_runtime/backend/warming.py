"""The steps that a backend runs before the first request: each alone, of a sequence that exists only for it.

Called by `warm_up` of the backends that compute.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from neuron_runtime.backend_protocol import Backend, ProgressCallback, StepTime
from neuron_runtime.core import KNOWN, NO_TOKEN, Added, BackendLimits, Batch, Rows, Sampling, StepOutput

NUM_RUNS = 2
"""How often each step runs; only the last time is measured."""


def lone_step(limits: BackendLimits, slot: int, start: int, end: int, *, decodes: bool) -> Batch:
    """A step with one row, which feeds the tokens from `start` to `end` of a new sequence."""
    added = Added(
        slot=slot,
        token_ids=(0,) * end,
        num_prompt_tokens=end,
        sampling=Sampling(temperature=0.0),
        blocks=(slot,) if limits.layout == "slots" else tuple(range(limits.blocks_for(end))),
    )
    rows = Rows((slot,), (start,), (end - start,), (NO_TOKEN,), (KNOWN,), (True,))
    return Batch(step=-1, rows=rows, num_prefills=0 if decodes else 1, added=(added,))


def with_adapter(step: Batch, digest: str) -> Batch:
    """The same step, whose sequence has this adapter, at place 1."""
    added = tuple(replace(one, adapter=1) for one in step.added)
    return replace(step, adapters=((1, digest),), added=added)


def timed(backend: Backend, steps: Sequence[Batch], progress: ProgressCallback) -> list[StepTime]:
    """Run each of these steps, and release its sequence; returns them with their times."""
    times: list[StepTime] = []
    for at, batch in enumerate(steps):
        progress("warming up", at / len(steps))
        for _ in range(NUM_RUNS):
            seconds = _run(backend, batch).device_seconds
            _run(backend, Batch(step=-1, rows=Rows(), released=batch.rows.slot))
        times.append((batch, seconds))
    progress("warming up", 1.0)
    return times


def _run(backend: Backend, batch: Batch) -> StepOutput:
    backend.launch(batch)
    backend.sample(batch.step, None)
    return backend.collect(batch.step)
