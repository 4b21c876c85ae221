"""`VectorBackend`: the Backend protocol over a model that gives a vector of each text, on one device thread.

Created by `vector_loader`, called by `engine.loop`. A sequence is added and computed whole in one step, so nothing is
kept between steps.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch.nn import functional

from neuron_runtime.backend.host_sampling.drawing import NotFinite
from neuron_runtime.backend.torch.decoder import Decoder
from neuron_runtime.backend.torch.packed import PackedRows, causal_plan
from neuron_runtime.backend.warming import lone_step, timed
from neuron_runtime.backend_protocol import IllegalBatch, ProgressCallback, StepTime, size_of
from neuron_runtime.checkpoint import InvalidModel
from neuron_runtime.core import BackendLimits, Batch, Late, StepOutput
from neuron_runtime.recipes import Activation, Pooling


class Stage(Protocol):
    """From vectors to vectors, `[rows, size]`."""

    def __call__(self, x: torch.Tensor, /) -> torch.Tensor: ...


ACTIVATIONS: dict[Activation, Stage] = {
    "Identity": lambda x: x,
    "Tanh": torch.tanh,
    "Sigmoid": torch.sigmoid,
    "ReLU": torch.relu,
    "GELU": functional.gelu,
}


class Body(Protocol):
    """Computes the hidden states of the tokens of a step: `[tokens, hidden size]`."""

    def forward(self, token_ids: torch.Tensor, rows: PackedRows) -> torch.Tensor: ...


class DecoderBody:
    """A decoder whose keys and values nobody needs later."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder

    def forward(self, token_ids: torch.Tensor, rows: PackedRows) -> torch.Tensor:
        windows, dtype = self._decoder.config.windows, self._decoder.weights.embedding.dtype
        return self._decoder.forward(token_ids, causal_plan(windows, rows, dtype))


class Layer(NamedTuple):
    """A layer behind the pooling, with what follows it. Float32, as vectors are."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    activation: Activation

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return ACTIVATIONS[self.activation](functional.linear(x, self.weight, self.bias))


def normalise(x: torch.Tensor) -> torch.Tensor:
    return functional.normalize(x, dim=-1)


def pool(hidden: torch.Tensor, rows: PackedRows, modes: Sequence[Pooling]) -> torch.Tensor:
    """Vectors of the texts, of those of their tokens: `[rows, size]`, float32."""
    lengths, ends = torch.tensor(rows.lengths), rows.ends
    size = (len(lengths), hidden.shape[1])

    def at(places: torch.Tensor) -> torch.Tensor:
        return hidden[places].float()

    def total() -> torch.Tensor:
        return torch.zeros(size).index_add_(0, rows.row, hidden.float())

    def greatest() -> torch.Tensor:
        index = rows.row.unsqueeze(1).expand_as(hidden)
        return torch.zeros(size).scatter_reduce_(0, index, hidden.float(), "amax", include_self=False)

    by_mode: dict[Pooling, Callable[[], torch.Tensor]] = {
        "cls": lambda: at(ends - lengths),
        "lasttoken": lambda: at(ends - 1),
        "mean": lambda: total() / lengths.unsqueeze(1),
        "mean_sqrt_len_tokens": lambda: total() / lengths.unsqueeze(1).sqrt(),
        "max": greatest,
    }
    return torch.cat([by_mode[mode]() for mode in modes], dim=1)


class VectorBackend:
    """See `backend_protocol.Backend`. `device` is the thread on which the model was loaded.

    stages: what makes the vectors of a step of the pooled ones.
    """

    def __init__(
        self,
        body: Body,
        pooling: Sequence[Pooling],
        stages: Sequence[Stage],
        limits: BackendLimits,
        device: ThreadPoolExecutor,
    ) -> None:
        self.limits = limits
        self._body = body
        self._pooling = pooling
        self._stages = stages
        self._thread = device
        self._steps: dict[int, Future[StepOutput]] = {}

    def warm_up(self, progress: ProgressCallback) -> list[StepTime]:
        """Run a short text. Raises InvalidModel if its vector is not finite."""
        step = lone_step(self.limits, 0, 0, min(8, self.limits.max_model_length), decodes=False)
        try:
            return timed(self, [step], progress)
        except NotFinite as error:
            raise InvalidModel(str(error)) from error

    def graph(self, batch: Batch) -> str:
        return size_of(batch)

    def launch(self, batch: Batch) -> None:
        self._steps[batch.step] = self._thread.submit(self._run, batch)

    def sample(self, step: int, late: Late | None) -> None:
        """Nothing is left to the host."""

    def collect(self, step: int) -> StepOutput:
        return self._steps.pop(step).result()

    def close(self) -> None:
        self._thread.shutdown(wait=True, cancel_futures=True)

    @torch.inference_mode()
    def _run(self, batch: Batch) -> StepOutput:
        begin, added = time.perf_counter(), {one.slot: one for one in batch.added}
        if len(batch.rows) == 0:
            return StepOutput(batch.step, ())
        texts = [added.get(slot) for slot in batch.rows.slot]
        if any(one is None or len(one.token_ids) != fed for one, fed in zip(texts, batch.rows.num_tokens, strict=True)):
            raise IllegalBatch(f"step {batch.step} has a row that does not feed the whole text which it adds")
        known = [one for one in texts if one is not None]
        rows = PackedRows.of([len(one.token_ids) for one in known], [one.second_at for one in known])
        token_ids = torch.from_numpy(np.concatenate([np.array(one.token_ids, dtype=np.int64) for one in known]))
        vectors = pool(self._body.forward(token_ids, rows), rows, self._pooling)
        for stage in self._stages:
            vectors = stage(vectors)
        if broken := int((~torch.isfinite(vectors).all(dim=1)).sum()):
            raise NotFinite(broken, "vectors")
        return StepOutput(
            step=batch.step,
            token_ids=((),) * len(known),
            vectors=tuple(one.tobytes() for one in vectors.numpy()),
            device_seconds=time.perf_counter() - begin,
        )
