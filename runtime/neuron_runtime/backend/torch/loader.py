"""Builds a `TorchBackend` from a model folder and a configuration."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event

import torch

from neuron_runtime.backend.base import ProgressCallback
from neuron_runtime.backend.torch.architecture import DecoderConfig, decoder_config, tensor_shapes
from neuron_runtime.backend.torch.backend import TorchBackend, device_thread
from neuron_runtime.backend.torch.cache import KVCache
from neuron_runtime.backend.torch.choices import dtype_of
from neuron_runtime.backend.torch.compiled import CompiledDecoder, eager_because
from neuron_runtime.backend.torch.decoder import Decoder, read_weights
from neuron_runtime.backend.torch.sizing import derive_limits
from neuron_runtime.backend.torch.weights import WeightReader, check_tensors
from neuron_runtime.checkpoint import Checkpoint, read_whole_checkpoint
from neuron_runtime.config import RuntimeConfig
from neuron_runtime.console import say
from neuron_runtime.core import BackendLimits
from neuron_runtime.host import FreeMemory, free_memory, usable_cpus

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def load(
    model_dir: Path,
    config: RuntimeConfig,
    progress: ProgressCallback,
    measure: Callable[[], FreeMemory] = free_memory,
    artifact: Path | None = None,
) -> TorchBackend:
    """See `load_backend`."""
    checkpoint = read_whole_checkpoint(model_dir)
    model = decoder_config(checkpoint.config)
    check_tensors(checkpoint, tensor_shapes(model))
    dtype = DTYPES[dtype_of(config, checkpoint)]
    limits = derive_limits(config, model, dtype.itemsize, measure())
    device = device_thread(_limit_threads)
    decoder = _load_on(device, checkpoint, model, dtype, progress)
    return TorchBackend(
        decoder=decoder if artifact is None else _compiled(decoder, artifact, limits),
        cache=KVCache.empty(
            windows=model.windows,
            num_lines=limits.num_blocks,
            num_kv_heads=model.num_kv_heads,
            line_length=limits.block_size,
            head_dim=model.head_dim,
            dtype=dtype,
        ),
        limits=limits,
        device=device,
    )


def _load_on(
    device: ThreadPoolExecutor,
    checkpoint: Checkpoint,
    model: DecoderConfig,
    dtype: torch.dtype,
    progress: ProgressCallback,
) -> Decoder:
    """Load on the device thread. If this thread is interrupted, loading stops at the next tensor."""
    interrupted = Event()

    def report(stage: str, share: float) -> None:
        if interrupted.is_set():
            raise InterruptedError("the caller stopped waiting for this model")
        progress(stage, share)

    try:
        return device.submit(load_decoder, checkpoint, model, dtype, report).result()
    except BaseException:
        interrupted.set()
        device.shutdown()
        raise


def load_decoder(
    checkpoint: Checkpoint, model: DecoderConfig, dtype: torch.dtype, progress: ProgressCallback
) -> Decoder:
    """Read the weights of a checked checkpoint in `dtype`."""
    with WeightReader(checkpoint, dtype, progress) as reader, torch.inference_mode():
        return Decoder(model, read_weights(model, reader))


def _compiled(decoder: Decoder, artifact: Path, limits: BackendLimits) -> Decoder | CompiledDecoder:
    if reason := eager_because(decoder):
        say(f"warning: decode steps are not compiled, they run as without `compile`: {reason}")
        return decoder
    return CompiledDecoder.load(decoder, artifact, blocks=limits.layout == "blocks")


def _limit_threads() -> None:
    # torch counts the machine's CPUs; with a container's CPU quota, that many threads block each other.
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(min(torch.get_num_threads(), usable_cpus()))
