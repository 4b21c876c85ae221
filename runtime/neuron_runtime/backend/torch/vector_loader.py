"""Builds a `VectorBackend` from a model folder and a configuration."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import load_file

from neuron_runtime.backend.torch.architecture import DecoderConfig
from neuron_runtime.backend.torch.backend import device_thread
from neuron_runtime.backend.torch.choices import dtype_of
from neuron_runtime.backend.torch.decoder import Decoder, Reader, read_weights
from neuron_runtime.backend.torch.encoder import Encoder
from neuron_runtime.backend.torch.loader import DTYPES, limit_threads, load_on
from neuron_runtime.backend.torch.vector_limits import vector_limits
from neuron_runtime.backend.torch.vector_models import VectorModel, as_named, shapes_of, vector_model
from neuron_runtime.backend.torch.vectors import Body, DecoderBody, Layer, Stage, VectorBackend, normalise
from neuron_runtime.backend.torch.weights import WeightReader
from neuron_runtime.backend_protocol import ProgressCallback
from neuron_runtime.checkpoint import InvalidModel, check_tensors, read_header, read_whole_checkpoint
from neuron_runtime.config import RuntimeConfig
from neuron_runtime.host import FreeMemory, free_memory
from neuron_runtime.recipes import WEIGHTS_FILE, Activation, Dense, Recipe, read_recipe

TANH: Activation = "Tanh"


def load(
    model_dir: Path,
    config: RuntimeConfig,
    progress: ProgressCallback,
    measure: Callable[[], FreeMemory] = free_memory,
) -> VectorBackend:
    """See `load_backend`."""
    whole = read_whole_checkpoint(model_dir)
    model, recipe = vector_model(whole.config), read_recipe(model_dir, whole.config)
    checkpoint, shapes = as_named(whole, model), shapes_of(model)
    check_tensors(checkpoint, shapes, model.quantization)
    dtype = DTYPES[dtype_of(config, checkpoint)]
    limits = vector_limits(config, model, recipe, dtype.itemsize, measure())
    device = device_thread(partial(limit_threads, 1))

    def read(report: ProgressCallback) -> tuple[Body, list[Stage]]:
        reader = WeightReader(checkpoint, shapes, dtype, report, {}, quantization=model.quantization)
        with torch.inference_mode():
            return _body(model, reader), list(_stages(model_dir, model, recipe, reader))

    body, stages = load_on(device, progress, read)
    pooling = recipe.pooling if model.head is None else (model.head.pooling,)
    return VectorBackend(body, pooling, stages, limits, device)


def _body(model: VectorModel, reader: Reader) -> Body:
    if isinstance(model.body, DecoderConfig):
        return DecoderBody(Decoder(model.body, read_weights(model.body, reader, has_head=False)))
    return Encoder(model.body, reader)


def _stages(folder: Path, model: VectorModel, recipe: Recipe, reader: Reader) -> Iterator[Stage]:
    """What makes vectors, or scores, of pooled hidden states."""
    if model.head is None:
        for one in recipe.stages:
            if isinstance(one, Dense):
                yield _dense(folder, one)
            else:
                yield normalise
        return
    inner, outer, has_bias, _ = model.head
    for name, biased, activation in ((inner, True, TANH), (outer, has_bias, recipe.activation)):
        if name:
            bias = reader.take_if_any(biased, f"{name}.bias")
            yield Layer(reader.take(f"{name}.weight").float(), None if bias is None else bias.float(), activation)


def _dense(folder: Path, layer: Dense) -> Layer:
    """Raises InvalidModel."""
    path = folder / layer.folder / WEIGHTS_FILE
    shapes = {"linear.weight": (layer.outputs, layer.inputs), "linear.bias": (layer.outputs,)}
    names = list(shapes)[: 1 + layer.has_bias]
    found = {one.name: one.shape for one in read_header(path)[1]}
    for name in names:
        if found.get(name) != shapes[name]:
            raise InvalidModel(f"{path}: tensor {name} must have shape {list(shapes[name])}, found {found.get(name)}")
    tensors = load_file(path)
    weight, *bias = (tensors[name].float() for name in names)
    return Layer(weight, bias[0] if bias else None, layer.activation)
