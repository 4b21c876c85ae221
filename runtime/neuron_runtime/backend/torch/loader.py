"""Builds a `TorchBackend` from a model folder and a configuration."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from threading import Event
from typing import TypeVar

import torch

from neuron_runtime.backend.torch.adapters import Adapters
from neuron_runtime.backend.torch.architecture import DecoderConfig, decoder_config, tensor_shapes
from neuron_runtime.backend.torch.backend import TorchBackend, device_thread
from neuron_runtime.backend.torch.cache import KVCache
from neuron_runtime.backend.torch.choices import dtype_of
from neuron_runtime.backend.torch.compiled import CompiledDecoder, eager_because
from neuron_runtime.backend.torch.decoder import Decoder, Keep, all_layers, read_weights
from neuron_runtime.backend.torch.draft_model import Network
from neuron_runtime.backend.torch.held import MULTIPLIED_OUT, Held, held_as
from neuron_runtime.backend.torch.linear import tiled_kinds
from neuron_runtime.backend.torch.load_drafts import find_drafts
from neuron_runtime.backend.torch.naming import as_named
from neuron_runtime.backend.torch.parts import part_of_model, parts_of
from neuron_runtime.backend.torch.quantizing import STORED
from neuron_runtime.backend.torch.ranks import ALONE, Gloo, Ranks
from neuron_runtime.backend.torch.sizing import derive_limits
from neuron_runtime.backend.torch.towers import needs_of_tower, tower_of, tower_tensors
from neuron_runtime.backend.torch.vector_limits import check_generates
from neuron_runtime.backend.torch.vision import Vision, load_tower
from neuron_runtime.backend.torch.weights import WeightReader
from neuron_runtime.backend_protocol import ONE_RANK, ProgressCallback, Rank
from neuron_runtime.checkpoint import Checkpoint, check_tensors, check_tied_head, read_whole_checkpoint
from neuron_runtime.config import RuntimeConfig
from neuron_runtime.console import say
from neuron_runtime.core import BackendLimits
from neuron_runtime.dtypes import COMPUTED
from neuron_runtime.host import FreeMemory, free_memory, usable_cpus
from neuron_runtime.quantization import Kind

Loaded = TypeVar("Loaded")

DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in COMPUTED}


def load(
    model_dir: Path,
    config: RuntimeConfig,
    progress: ProgressCallback,
    measure: Callable[[], FreeMemory] = free_memory,
    *,
    artifact: Path | None = None,
    place: Rank = ONE_RANK,
) -> TorchBackend:
    """See `load_backend`."""
    checkpoint = read_whole_checkpoint(model_dir)
    check_generates(checkpoint.config)
    model = decoder_config(checkpoint.config)
    stored, tower = checkpoint, tower_of(checkpoint.config)
    checkpoint = as_named(checkpoint, model)
    check_tensors(checkpoint, tensor_shapes(model), model.quantization)
    check_tied_head(checkpoint)
    dtype = DTYPES[dtype_of(config, checkpoint)]
    drafts = find_drafts(config.speculation, model)
    ranks = Gloo(place) if place.size > 1 else ALONE
    part = part_of_model(model, ranks.size)
    held = _held(checkpoint, model, config, dtype, ranks)
    free = measure()
    # The ranks of a node share its memory, and all ranks must come to the same limits.
    share = replace(free, available=ranks.least(free.available // place.per_node))
    pictures = None if tower is None else needs_of_tower(tower_tensors(stored, tower), tower, dtype.itemsize)
    limits = derive_limits(config, part, dtype.itemsize, share, drafts and drafts.needs, held=held, pictures=pictures)
    device = device_thread(partial(limit_threads, place.per_node))
    decoder = load_on(device, progress, lambda report: load_decoder(checkpoint, model, dtype, report, ranks, held=held))
    vision = None
    if tower is not None:
        read = partial(load_tower, stored, tower, dtype, quantization=model.quantization)
        vision = Vision(
            load_on(device, progress, read),
            checkpoint.config,
            dtype,
            three_parts=bool(model.rope.parts),
            see_each_other=tower.feeds_whole,
        )
    network = drafts and load_on(device, progress, lambda report: drafts.read(decoder, limits, dtype, report))
    shape = (limits.num_blocks, part.num_kv_heads, limits.block_size, model.head_dim)
    return TorchBackend(
        decoder=decoder if artifact is None else _compiled(decoder, artifact, limits, network),
        cache=KVCache.empty(model.windows, shape, dtype),
        limits=limits,
        device=device,
        adapters=Adapters(decoder, model, limits, ranks.rank, ranks.size) if limits.max_adapters else None,
        draft=None if network is None else (network, ranks),
        vision=vision,
    )


def _held(
    checkpoint: Checkpoint, model: DecoderConfig, config: RuntimeConfig, dtype: torch.dtype, ranks: Ranks
) -> Held:
    stored, wanted = model.quantization, config.quantization
    may_keep = not config.compile and (wanted in STORED or (stored is not None and wanted != "none"))
    own = own_kinds(dtype, ranks) if may_keep else ()
    shapes = tensor_shapes(model)
    return held_as(checkpoint, shapes, stored, wanted, compiled=config.compile, own=own, num_ranks=ranks.size)


def own_kinds(dtype: torch.dtype, ranks: Ranks) -> frozenset[Kind]:
    """As `tiled_kinds`, on all ranks: their nodes may have different processors, or no compiler, and what they hold
    decides about their limits."""
    here = tiled_kinds(dtype)
    return frozenset(kind for kind in STORED if ranks.least(int(kind in here)))


def load_on(
    device: ThreadPoolExecutor, progress: ProgressCallback, load: Callable[[ProgressCallback], Loaded]
) -> Loaded:
    """Load on the device thread. If this thread is interrupted, loading stops at the next tensor."""
    interrupted = Event()

    def report(stage: str, share: float) -> None:
        if interrupted.is_set():
            raise InterruptedError("the caller stopped waiting for this model")
        progress(stage, share)

    try:
        return device.submit(load, report).result()
    except BaseException:
        interrupted.set()
        device.shutdown()
        raise


def load_decoder(
    checkpoint: Checkpoint,
    model: DecoderConfig,
    dtype: torch.dtype,
    progress: ProgressCallback,
    ranks: Ranks = ALONE,
    *,
    held: Held = MULTIPLIED_OUT,
    keep: Keep = all_layers,
) -> Decoder:
    """Read the weights of a checked checkpoint, or what one rank needs of them. dtype: of those that are not
    `held` otherwise. keep: see `read_weights`."""
    shapes, parts = tensor_shapes(model), parts_of(model, ranks.rank, ranks.size)
    reader = WeightReader(checkpoint, shapes, dtype, progress, parts, quantization=model.quantization, held=held)
    with torch.inference_mode():
        return Decoder(model, read_weights(part_of_model(model, ranks.size), reader, keep=keep), ranks)


def _compiled(
    decoder: Decoder, artifact: Path, limits: BackendLimits, network: Network | None
) -> Decoder | CompiledDecoder:
    if network is not None and network.tap is not None:
        reason: str | None = "the EAGLE 3 head reads hidden states that they do not give out"
    else:
        reason = eager_because(decoder)
    if reason:
        say(f"warning: decode steps are not compiled, they run as without `compile`: {reason}")
        return decoder
    return CompiledDecoder.load(decoder, artifact, blocks=limits.layout == "blocks")


def limit_threads(num_sharing: int) -> None:
    """num_sharing: processes like this one that share the CPUs."""
    # torch counts the machine's CPUs; with a container's CPU quota, that many threads block each other.
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, min(torch.get_num_threads(), usable_cpus()) // num_sharing))
