"""Collects the facts about a model that the operator plans with, without reading weights or importing torch.

Called by `neuron-runtime inspect URI` (a Job of a few seconds before any device is held) and by `serve` for its own
arithmetic. It checks that the architecture is supported and that the files match each other.
"""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from pathlib import Path

import msgspec

from neuron_runtime.backend.torch.architecture import decoder_config, tensor_shapes
from neuron_runtime.checkpoint import Checkpoint, InvalidModel, check_tokenizer, read_checkpoint
from neuron_runtime.console import bytes_text
from neuron_runtime.record import ModelFacts
from neuron_runtime.weights.fetching import outline

DTYPE_NAMES = {"F64": "float64", "F32": "float32", "BF16": "bfloat16", "F16": "float16", "F8_E4M3": "float8_e4m3fn"}
"""safetensors names to torch names; others are reported unchanged."""


def inspect_model(uri: str) -> ModelFacts:
    """Inspect a model: config.json, the index, the headers of the weights, and whether it has a tokenizer.

    Raises:
        InvalidConfig: the URI is malformed or its scheme is not supported.
        FatalError: MODEL_NOT_FOUND, WEIGHTS_UNAUTHORIZED, UNSUPPORTED_ARCHITECTURE or INVALID_MODEL.
        SourceUnreachable: the source does not respond; retry later.
    """
    with (
        tempfile.TemporaryDirectory(prefix="neuron-inspect-") as scratch,
        outline(uri, Path(scratch)) as (folder, digest),
    ):
        facts = model_facts(read_checkpoint(folder), digest)
        check_tokenizer(folder)
        return facts


def model_facts(checkpoint: Checkpoint, digest: str | None = None) -> ModelFacts:
    """Facts of a model folder. The digest is its source's, or the checkpoint's own hash.

    Raises:
        FatalError: UNSUPPORTED_ARCHITECTURE, or INVALID_MODEL when tensors and configuration contradict one another.
    """
    config = decoder_config(checkpoint.config)
    for name, shape in tensor_shapes(config).items():
        tensor = checkpoint.tensors.get(name)
        if tensor is None:
            raise InvalidModel(f"{checkpoint.folder}: config.json requires tensor {name}, but no weights file has it")
        if tensor.shape != shape:
            raise InvalidModel(
                f"{checkpoint.folder}: tensor {name} of {tensor.file} has shape {list(tensor.shape)}, "
                f"but config.json requires {list(shape)}"
            )
    num_bytes_by_dtype: Counter[str] = Counter()
    for tensor in checkpoint.tensors.values():
        num_bytes_by_dtype[tensor.dtype] += tensor.num_bytes
    [(dtype, _)] = num_bytes_by_dtype.most_common(1)
    return ModelFacts(
        architecture=config.architecture,
        model_type=str(checkpoint.config.get("model_type", "")),
        parameters=checkpoint.num_parameters,
        weights_bytes=checkpoint.num_bytes,
        dtype=DTYPE_NAMES.get(dtype, dtype),
        num_layers=config.num_layers,
        hidden_size=config.hidden_size,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        vocabulary_size=config.vocabulary_size,
        max_position_embeddings=config.max_position_embeddings,
        digest=digest or checkpoint.digest,
    )


def facts_as_text(uri: str, facts: ModelFacts) -> str:
    """A summary for people, one line per fact."""
    heads = f"{facts.num_heads} heads, {facts.num_kv_heads} for keys and values, of {facts.head_dim}"
    cache_bytes = 2 * facts.num_layers * facts.num_kv_heads * facts.head_dim
    rows = {
        "model": uri,
        "architecture": f"{facts.architecture} (supported)",
        "weights": f"{_amount(facts.parameters)} parameters, {bytes_text(facts.weights_bytes)} in {facts.dtype}",
        "shape": f"{facts.num_layers} layers of {facts.hidden_size}, {heads}",
        "vocabulary": f"{facts.vocabulary_size:,} tokens",
        "longest": f"{facts.max_position_embeddings:,} tokens",
        "cache": f"{cache_bytes:,} elements per token",
        "digest": facts.digest,
    }
    return "\n".join(f"{name + ':':<14}{value}" for name, value in rows.items())


def facts_as_json(facts: ModelFacts) -> str:
    """The facts as in the record, indented."""
    return json.dumps(msgspec.to_builtins(facts), indent=2)


def _amount(number: int) -> str:
    for unit, size in (("B", 10**9), ("M", 10**6), ("K", 10**3)):
        if number >= size:
            return f"{number / size:.2f} {unit}"
    return str(number)
