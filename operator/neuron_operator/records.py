"""Parses the record that the runtime's commands leave as termination message. The input is not trusted.

Called by `views`; `steps` uses the facts, `why` the messages. A message may be a record, a truncated one, the tail of a
log, or empty. The fields mirror `neuron_runtime.record`.
"""

from __future__ import annotations

import msgspec
from msgspec import Struct

VERSION = 1


class Facts(Struct, frozen=True, kw_only=True, rename="camel"):
    """What `inspect` reports about a model."""

    architecture: str
    model_type: str
    parameters: int
    weights_bytes: int
    dtype: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocabulary_size: int
    max_position_embeddings: int
    digest: str


class StoredWeights(Struct, frozen=True, kw_only=True, rename="camel"):
    """What `fetch` reports about a model in a store."""

    digest: str
    bytes: int
    read_bytes: int


class StoredArtifact(Struct, frozen=True, kw_only=True, rename="camel"):
    """What `compile` reports about an artifact in a store."""

    key: str
    bytes: int
    seconds: float
    reused: bool
    peak_bytes: int


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
    seconds: float = 0.0


def parse_record(message: object) -> Record | None:
    """The record in a termination message, or None if it is not a complete record of this version.

    Unknown keys, which a newer runtime may add, are ignored.
    """
    if not isinstance(message, str):
        return None
    try:
        record = msgspec.json.decode(message.encode(errors="surrogatepass"), type=Record)
    except (msgspec.MsgspecError, UnicodeError):
        return None
    return record if record.version == VERSION else None
