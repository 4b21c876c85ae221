"""The tensors of a checkpoint by the names that the decoder has for them, one for each expert. Needs no torch.

Called before tensors are checked and read. Most families need nothing of it: their checkpoints have these names.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace

from neuron_runtime.backend.torch.architecture import FAMILIES, DecoderConfig, ExpertsConfig, Stack, Stored
from neuron_runtime.checkpoint import Checkpoint, Slice, TensorInfo


def as_named(checkpoint: Checkpoint, model: DecoderConfig) -> Checkpoint:
    """The same checkpoint. model: its shape. What does not fit it keeps its name, so that `check_tensors` names it."""
    return replace(checkpoint, tensors=named_tensors(checkpoint.tensors, model))


def named_tensors(tensors: Mapping[str, TensorInfo], model: DecoderConfig) -> Mapping[str, TensorInfo]:
    """Those of a checkpoint."""
    stored = FAMILIES[model.architecture].stored
    return tensors if stored is None else dict(_named(tensors, stored, model.experts))


def _named(
    tensors: Mapping[str, TensorInfo], stored: Stored, experts: ExpertsConfig | None
) -> Iterator[tuple[str, TensorInfo]]:
    for stored_name, info in tensors.items():
        if stored_name.removeprefix("model.").startswith(stored.unread):
            continue
        name = stored_name
        for theirs, ours in stored.replaced.items():
            name = name.replace(theirs, ours, 1)
        if experts is None:
            yield name, info
            continue
        module, found, end = name.rpartition(f".{experts.names.expert}.")
        stack = stored.stacks.get(end) if found else None
        if stack is not None and end.endswith("_scale") and math.prod(info.shape) == 1:
            for number in range(experts.num_experts):
                yield from ((f"{module}{found}{number}.{part}", info) for part in stack.parts)
            continue
        if stack is None or not 2 <= len(info.shape) <= 4 or info.shape[0] != experts.num_experts:
            yield name, info
            continue
        for number in range(experts.num_experts):
            for part, of_expert in zip(stack.parts, _parts(info, stack, number), strict=True):
                yield f"{module}{found}{number}.{part}", of_expert


def _parts(info: TensorInfo, stack: Stack, number: int) -> Iterator[TensorInfo]:
    rows, *columns = info.shape[1:]
    if stack.transposed and columns:
        rows, columns[0] = columns[0], rows
    # A block and the numbers in it are one dimension of the weight.
    shape = columns if len(columns) < 2 else [columns[0] * columns[1]]
    count = len(stack.parts)
    for place in range(count):
        begin, step = (place, count) if stack.alternate else (place * (rows // count), 1)
        of_expert = Slice(number, stack.transposed, begin, step)
        yield replace(info, shape=(rows // count, *shape), slice=of_expert)
