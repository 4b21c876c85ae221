"""The record: what the runtime's commands leave as termination message, read without trust.

Called by `views`; `steps` uses the facts, `why` the messages. A message may be a record,
the tail of a log, cut anywhere, or nothing; only a whole record is one. The fields mirror `neuron_runtime.record`.
"""

from __future__ import annotations

import msgspec
from msgspec import Struct

VERSION = 1


class Facts(Struct, frozen=True, kw_only=True, rename="camel"):
    """What `inspect` found out about a model. Sizes in bytes, `parameters` as a count."""

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


class Record(Struct, frozen=True, kw_only=True, rename="camel"):
    version: int
    command: str
    ok: bool
    exit_code: int = 0
    reason: str = ""
    message: str = ""
    facts: Facts | None = None
    seconds: float = 0.0


def parse_record(message: object) -> Record | None:
    """The record in a termination message, or None where it holds no whole record of this version.

    Keys that a newer runtime adds are ignored; the version says when a meaning changes.
    """
    if not isinstance(message, str):
        return None
    try:
        record = msgspec.json.decode(message.encode(errors="surrogatepass"), type=Record)
    except (msgspec.MsgspecError, UnicodeError):
        return None
    return record if record.version == VERSION else None
