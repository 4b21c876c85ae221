"""Parses the record that the runtime's commands leave as termination message. The input is not trusted.

Called by `views`; `steps` uses the facts, `why` the messages. A message may be a record, a truncated one, the tail of a
log, or empty. The fields mirror `neuron_runtime.record`.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta, Struct

VERSION = 1

Count = Annotated[int, Meta(ge=0, le=2**53)]
"""The status and quantities of pods can hold it; so can every JSON parser."""
Key = Annotated[str, Meta(pattern=r"^[0-9a-f]{40,64}\Z")]
Seconds = Annotated[float, Meta(ge=0, le=1e9)]
Ratio = Annotated[float, Meta(ge=0, le=1e9)]


class PlannedConversion(Struct, frozen=True, kw_only=True, rename="camel"):
    """Weights that `convert` makes of a checkpoint."""

    digest: Key
    format: Annotated[str, Meta(max_length=20)]
    bytes: Count

    @property
    def words(self) -> str:
        return "multiplied out" if self.format == "none" else self.format


class EncoderFacts(Struct, frozen=True, kw_only=True, rename="camel"):
    """What an encoder of pictures takes of a device's memory, by the tokens that stand for the pictures of a prompt."""

    layers: Count
    numbers: Count
    """Of each token, in the dtype of the model."""
    scores: Count
    """Of each token, in float32."""
    squared_scores: Count
    """Of each pair of tokens, in float32."""
    picture_tokens: Count
    """Of the largest picture, without marks."""
    most_tokens: Count
    """Of all pictures of a prompt; 0: as many as it may have."""
    sizes: Annotated[tuple[Count, ...], Meta(max_length=32)]
    """Tokens of the graphs that are compiled besides the largest, where they are smaller."""


class Facts(Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True):
    """What `inspect` reports about a model. Fields with a default are missing in what earlier versions wrote."""

    architecture: str
    model_type: str
    parameters: Count
    weights_bytes: Count
    dtype: str
    num_layers: Count
    hidden_size: Count
    num_heads: Count
    num_kv_heads: Count
    head_dim: Count
    vocabulary_size: Count
    max_position_embeddings: Count
    intermediate_size: Count = 0
    num_experts: Count = 0
    tied_embeddings: bool = False
    graphs: Annotated[str, Meta(max_length=1000)] = ""
    """Which graphs need not be compiled, in words; empty: unknown."""
    quantization: Annotated[str, Meta(max_length=200)] = ""
    """How the checkpoint stores weights, in words; empty: unquantized, or unknown."""
    conversion: PlannedConversion | None = None
    """What its weights are converted to; None: they are read as they are."""
    task: Annotated[str, Meta(max_length=20)] = "generate"
    """What it was made for, by its files: `generate`, `embed` or `rerank`."""
    vector_size: Count = 0
    """Numbers in a vector; 0: it gives none."""
    sees_pictures: bool = False
    """Whether the backend computes pictures for it; false also where an earlier version wrote it."""
    encoder: EncoderFacts | None = None
    """Of a model whose pictures a device computes; None also where an earlier version wrote it."""
    digest: str
    draft: Facts | None = None
    """Of its draft model, which the operator adds: another Job reports them."""

    @property
    def read_bytes(self) -> int:
        """Of the weights that a replica reads."""
        return self.conversion.bytes if self.conversion else self.weights_bytes

    @property
    def loaded(self) -> tuple[Facts, ...]:
        """Of all models that a replica loads."""
        return (self, self.draft) if self.draft else (self,)


class StoredWeights(Struct, frozen=True, kw_only=True, rename="camel"):
    """What `fetch` reports about a model in a store."""

    digest: str
    bytes: Count
    read_bytes: Count


class StoredArtifact(Struct, frozen=True, kw_only=True, rename="camel"):
    """What `compile` reports about an artifact in a store."""

    key: Key
    bytes: Count
    seconds: Seconds
    reused: bool
    peak_bytes: Count


class AdapterFacts(Struct, frozen=True, kw_only=True, rename="camel"):
    """What `inspect` reports about an adapter that fits its model."""

    digest: Key
    rank: Count
    targets: Annotated[tuple[Annotated[str, Meta(max_length=100)], ...], Meta(max_length=100)]
    num_bytes: Count
    base_model: Annotated[str, Meta(max_length=100)]
    source_digest: Annotated[str, Meta(max_length=100)] = ""


class ConversionFigures(Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True):
    """What `convert` reports about the error that it made."""

    format: Annotated[str, Meta(max_length=20)]
    layer_error: Ratio
    perplexity: Ratio | None = None
    converted_perplexity: Ratio | None = None
    unmeasured: Annotated[str, Meta(max_length=200)] = ""
    """Why perplexities were not computed."""


class Record(Struct, frozen=True, kw_only=True, rename="camel"):
    version: int
    command: str
    ok: bool
    exit_code: int = 0
    reason: str = ""
    message: str = ""
    facts: Facts | None = None
    weights: StoredWeights | None = None
    artifact: StoredArtifact | None = None
    adapter: AdapterFacts | None = None
    conversion: ConversionFigures | None = None
    seconds: float = 0.0

    @property
    def found_all(self) -> bool:
        """Whether there was nothing to do."""
        is_stored = self.weights is not None and self.weights.read_bytes == 0
        return is_stored or (self.artifact is not None and self.artifact.reused)


def parse_record(message: object) -> Record | None:
    """The record in a termination message, or None if it is not a complete record of this version.

    Unknown keys, which a newer runtime may add, are ignored.
    """
    if not isinstance(message, str):
        return None
    try:
        record = msgspec.json.decode(message.encode(errors="surrogatepass"), type=Record)
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return None
    return record if record.version == VERSION else None
