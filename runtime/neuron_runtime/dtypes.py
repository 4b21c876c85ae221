"""Data types of tensors: their names and sizes. The configuration, checkpoints and all backends read this one table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

ComputedDtype = Literal["float32", "bfloat16", "float16"]
"""Names of the types in which models are computed."""


@dataclass(frozen=True, slots=True)
class Dtype:
    name: str
    """As in torch."""
    stored: str
    """As in safetensors."""
    num_bytes: int
    """Bytes of one number."""
    alias: str = ""
    """Another name, which vLLM takes."""


DTYPES = (
    Dtype("float32", "F32", 4, "float"),
    Dtype("bfloat16", "BF16", 2),
    Dtype("float16", "F16", 2, "half"),
    Dtype("float64", "F64", 8),
    Dtype("complex64", "C64", 8),
    Dtype("float8_e4m3fn", "F8_E4M3", 1),
    Dtype("float8_e5m2", "F8_E5M2", 1),
    Dtype("float8_e8m0fnu", "F8_E8M0", 1),
    Dtype("bool", "BOOL", 1),
    Dtype("uint8", "U8", 1),
    Dtype("int8", "I8", 1),
    Dtype("uint16", "U16", 2),
    Dtype("int16", "I16", 2),
    Dtype("uint32", "U32", 4),
    Dtype("int32", "I32", 4),
    Dtype("uint64", "U64", 8),
    Dtype("int64", "I64", 8),
)

BY_NAME = {one.name: one for one in DTYPES}
BY_STORED = {one.stored: one for one in DTYPES}
COMPUTED: tuple[ComputedDtype, ...] = get_args(ComputedDtype)
COMPUTED_STORED = tuple(BY_NAME[name].stored for name in COMPUTED)
"""The same types, as safetensors names them."""

_ALIASES = {one.alias: one.name for one in DTYPES if one.alias}


def dtype_name(text: str) -> str:
    """The name of a type that a user may have written as vLLM or torch do; other words unchanged."""
    word = text.removeprefix("torch.")
    return _ALIASES.get(word, word)


def cache_dtype_name(text: str) -> str:
    """The name of a type of the cache that a user may have written as vLLM does; other words unchanged."""
    return {"fp8_e4m3": "fp8"}.get(text, text)
