"""The record: the outcome of `inspect`, `fetch`, `compile`, or a failed `serve`, for the operator.

JSON of at most 2 KiB with a closed list of fields, written to the container's termination message by `__main__`.
`neuron_operator.read.records` reads it; a contract test compares the fields of both.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import NamedTuple

import msgspec

from neuron_runtime.errors import FatalError, ServingError
from neuron_runtime.quantization import Format

RECORD_VERSION = 1
MAX_RECORD_BYTES = 2048
MAX_MESSAGE_CHARACTERS = 1024
GENERAL_FAILURE = 1


class PlannedConversion(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """Weights that `convert` makes of a checkpoint. They depend on nothing else than the digest says."""

    digest: str
    """Of the converted model: sha256 over the source's digest, the format, what is excluded, and a version."""
    format: Format
    bytes: int
    """Of all converted weights."""


class EncoderFacts(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """What an encoder of pictures takes of a device's memory, by the tokens that stand for the pictures of a prompt."""

    layers: int
    numbers: int
    """Of each token, in the dtype of the model."""
    scores: int
    """Of each token, in float32."""
    squared_scores: int
    """Of each pair of tokens, in float32."""
    picture_tokens: int
    """Of the largest picture, without marks."""
    most_tokens: int
    """Of all pictures of a prompt; 0: as many as it may have."""
    sizes: tuple[int, ...]
    """Tokens of the graphs that are compiled besides the largest, where they are smaller."""


class ModelFacts(msgspec.Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True):
    """Facts about a model from its config and index, without reading weights."""

    architecture: str
    model_type: str
    parameters: int
    """Number of parameters, from the safetensors headers or index; packed ones are counted one by one."""
    weights_bytes: int
    dtype: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocabulary_size: int
    max_position_embeddings: int
    intermediate_size: int = 0
    """The size of the feed-forward layers; 0: config.json lacks it, as all that follow."""
    num_experts: int = 0
    tied_embeddings: bool = False
    """Whether the checkpoint has one matrix for embedding and head, of which devices hold two."""
    graphs: str = ""
    """Of the optimum backend, in words: those that Hugging Face's cache has, or that all must be compiled; empty:
    unknown, or not asked for."""
    quantization: str = ""
    """How the checkpoint stores weights, in words; empty: unquantized."""
    conversion: PlannedConversion | None = None
    """What its weights are converted to for the backend, and as the configuration asks; None: they are read as they
    are."""
    task: str = "generate"
    """What the model was made for, by its files."""
    vector_size: int = 0
    """Numbers in a vector of a model that embeds; 0: it gives none."""
    sees_pictures: bool = False
    """Whether the backend computes its pictures; without a backend: whether this runtime knows how it sees them."""
    encoder: EncoderFacts | None = None
    """Of a model whose pictures a device computes; None: unknown."""
    digest: str
    """The commit for hf://, else sha256 over config, index and headers of the weights; pins the served model."""


class AdapterFacts(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """Facts about an adapter that fits its model."""

    digest: str
    """sha256 over the adapter's configuration and all bytes of its tensors."""
    rank: int
    """The highest of its tensors."""
    targets: tuple[str, ...]
    """The projections that it changes, by their short names, in the order of a layer."""
    num_bytes: int
    """Of its tensors."""
    base_model: str
    """The model that it was trained for, as its configuration names it; empty: it does not say."""
    source_digest: str = ""
    """Of `inspect`: what pins it at its source, as a model's digest does; `fetch --digest` takes it."""


class StoredWeights(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """What `fetch` left in the store."""

    digest: str
    bytes: int
    read_bytes: int
    """From the source, by this command; 0 if the store had the model, less than `bytes` after a resumption."""


class StoredArtifact(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """What `compile` left in the store."""

    key: str
    bytes: int
    seconds: float
    """That it took to compile it, also if an earlier command did."""
    reused: bool
    """Whether it was there already."""
    peak_bytes: int
    """Most memory that the compiler had."""


class ConversionFigures(msgspec.Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True):
    """What a conversion changes of the model's outputs."""

    format: Format
    layer_error: float
    """The largest error of a linear layer's output, as a share of that output, on random activations."""
    perplexity: float | None = None
    """Of the source on a text that ships with this program; None: not computed."""
    converted_perplexity: float | None = None
    unmeasured: str = ""
    """Why perplexities were not computed."""

    @property
    def are_complete(self) -> bool:
        return self.perplexity is not None or bool(self.unmeasured)


class Converted(NamedTuple):
    """What `convert` left in the store."""

    weights: StoredWeights
    figures: ConversionFigures


class Record(msgspec.Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True):
    version: int
    command: str
    ok: bool
    exit_code: int = 0
    reason: str = ""
    message: str = ""
    facts: ModelFacts | None = None
    weights: StoredWeights | None = None
    artifact: StoredArtifact | None = None
    adapter: AdapterFacts | None = None
    conversion: ConversionFigures | None = None
    seconds: float = 0.0


Result = ModelFacts | StoredWeights | StoredArtifact | AdapterFacts | Converted
"""What a command that succeeded leaves behind, if anything."""


def failure(command: str, error: ServingError, seconds: float = 0.0) -> Record:
    """Errors without an exit code (temporary ones) get the general exit code and no reason."""
    named = error.exit_code if isinstance(error, FatalError) else None
    return Record(
        version=RECORD_VERSION,
        command=command,
        ok=False,
        exit_code=GENERAL_FAILURE if named is None else int(named),
        reason="" if named is None else named.reason,
        message=str(error)[:MAX_MESSAGE_CHARACTERS],
        seconds=round(seconds, 3),
    )


def success(command: str, result: Result | None = None, seconds: float = 0.0) -> Record:
    stored, figures = result if isinstance(result, Converted) else (result, None)
    return Record(
        version=RECORD_VERSION,
        command=command,
        ok=True,
        facts=result if isinstance(result, ModelFacts) else None,
        weights=stored if isinstance(stored, StoredWeights) else None,
        artifact=result if isinstance(result, StoredArtifact) else None,
        adapter=result if isinstance(result, AdapterFacts) else None,
        conversion=figures,
        seconds=round(seconds, 3),
    )


def encode(record: Record) -> bytes:
    """At most MAX_RECORD_BYTES of JSON; truncates the message, the only field that can be long."""
    raw = msgspec.json.encode(record)
    while len(raw) > MAX_RECORD_BYTES:
        over = len(raw) - MAX_RECORD_BYTES
        cut = max(0, len(record.message) - max(over, 16))
        record = msgspec.structs.replace(record, message=record.message[:cut])
        raw = msgspec.json.encode(record)
    return raw


def add_flag(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--record", type=Path, metavar="FILE", help="Write the outcome as JSON (`serve`: if it fails, or with --check)"
    )


def write(record: Record, path: Path) -> None:
    """Write in place: the kubelet mounts the termination message as a file that must not be replaced."""
    path.write_bytes(encode(record))
