"""How a checkpoint stores quantized weights, read from its config.json as one value; and which form of weights a
configuration wants.

Called by what checks, reads and converts tensors; it knows names, shapes and dtypes, and reads no weights. Only weights
count: scales of activations and of the cache are left out, because both are computed in the model's dtype.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, cast, get_args

from neuron_runtime.dtypes import COMPUTED_STORED
from neuron_runtime.errors import ExitCode, FatalError, InvalidConfig

WHOLE = 0
"""Of `Quantization.block`: the whole dimension."""

Kind = Literal["int8", "fp8"]
"""What quantized weights can be converted to."""
Format = Literal["int8", "fp8", "none"]
"""What weights can be converted to. none: multiplied out, in the model's dtype."""
Quantizing = Literal[
    "auto",
    "none",
    "int8",
    "fp8",
    "compressed-tensors",
    "awq",
    "awq_marlin",
    "fbgemm_fp8",
    "gptq",
    "gptq_marlin",
    "modelopt",
    "mxfp4",
]
"""Values of the configuration. The last ones are methods of checkpoints, or vLLM's products for them: its words for
what they say anyway."""

KINDS: Mapping[str, Kind] = {"I8": "int8", "F8_E4M3": "fp8"}
"""By the dtype in which numbers are stored."""
WORD, WORD_BITS = "I32", 32
"""The dtype in which several whole numbers are packed."""
LARGEST: Mapping[Kind, float] = {"int8": 127.0, "fp8": 240.0}
"""The largest number of converted weights. float8_e4m3fn goes to 448, but that of Neuron devices ends here."""

UNREAD = re.compile(r"\.(input|output|q|k|v|kv)_scale$|\.(activation_scale_ub|weight_shape|g_idx)$")
"""Tensors that a quantized checkpoint may have and that nobody needs."""


class StoredTensor(NamedTuple):
    name: str
    shape: tuple[int, ...]
    dtypes: tuple[str, ...]
    """Those that it may have, as safetensors names them."""


@dataclass(frozen=True, slots=True)
class Quantization:
    """A weight `[rows, columns]` is stored as numbers of another type, less a zero point, times a scale: both are one
    for each block of numbers.

    block: rows and columns that share a scale.
    weight, scale, zero, group: the last words of the tensors' names. zero: ""; packed numbers stand for those around 0.
        group: of the tensor that has the block of each column; "": they are in order.
    packed: numbers in each stored one, along rows and columns, of which one is 1. Zero points are packed along rows.
    places: of the numbers in a packed one, from its lowest bits on; (): they are in order.
    zero_added: to zero points that are stored.
    transposed: whether all tensors are stored so.
    spare_bias: whether layers that have no bias may be stored with one, of zeros.
    scale_stored: the types that scales may have; U8 is the exponent of a power of 2.
    """

    method: str
    stored: str
    block: tuple[int, int]
    scale: str = "weight_scale"
    weight: str = "weight"
    packed: tuple[int, int] = (1, 1)
    zero: str = ""
    group: str = ""
    places: tuple[int, ...] = ()
    zero_added: int = 0
    transposed: bool = False
    spare_bias: bool = False
    scale_stored: tuple[str, ...] = COMPUTED_STORED

    @property
    def kind(self) -> str:
        """int4, int8, fp8, or the method."""
        return f"int{self.bits}" if self.stored == WORD else KINDS.get(self.stored, self.method)

    @property
    def in_each(self) -> int:
        """Numbers in each stored one."""
        return max(self.packed)

    @property
    def bits(self) -> int:
        """Of a packed number."""
        return WORD_BITS // self.in_each

    @property
    def scales_rows(self) -> bool:
        """Whether each row is int8 or fp8 numbers times one scale."""
        return self.kind in LARGEST and not self.zero and self.block in BLOCKS

    @property
    def is_converted(self) -> bool:
        """Whether weights that are stored so are converted, see `conversion`."""
        return self.kind in LARGEST and not self.zero

    def in_words(self) -> str:
        shared = BLOCKS.get(self.block, f"in blocks of {self.block[0]} x {self.block[1]}")
        return f"{self.method}: {self.kind} {shared}{', packed' if self.in_each > 1 else ''}"

    def weight_name(self, name: str) -> str:
        """Of the tensor that stores this weight. name: as an unquantized model has it."""
        return name.removesuffix("weight") + self.weight

    def scale_name(self, name: str) -> str:
        return name.removesuffix("weight") + self.scale

    def scale_shape(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """`[blocks of rows, blocks of columns]` of a weight of this shape. The last ones may be cut short."""
        rows, columns = (
            1 if size == WHOLE else -(-total // size) for total, size in zip(shape, self.block, strict=True)
        )
        return rows, columns

    def tensors(self, name: str, shape: tuple[int, ...]) -> tuple[StoredTensor, ...]:
        """The tensors that store a weight, its numbers and scales first, and their shapes; that of the scale may lack
        or add dimensions of size 1."""
        module, scales = name.removesuffix("weight"), self.scale_shape(shape)
        numbers = tuple(-(-size // packed) for size, packed in zip(shape, self.packed, strict=True))
        found = [
            StoredTensor(self.weight_name(name), self._as_stored(numbers), (self.stored,)),
            StoredTensor(self.scale_name(name), self._as_stored(scales), self.scale_stored),
        ]
        if self.zero:
            zeros = -(-scales[0] // self.in_each), scales[1]
            found.append(StoredTensor(module + self.zero, self._as_stored(zeros), (WORD,)))
        if self.group:
            found.append(StoredTensor(module + self.group, shape[1:], (WORD,)))
        return tuple(found)

    def _as_stored(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return shape[::-1] if self.transposed else shape


BLOCKS = {(WHOLE, WHOLE): "per tensor", (1, WHOLE): "per channel"}

CONVERTED: Mapping[Kind, Quantization] = {
    "int8": Quantization("compressed-tensors", "I8", (1, WHOLE)),
    "fp8": Quantization("compressed-tensors", "F8_E4M3", (1, WHOLE)),
}
"""How converted weights are stored: each row has a scale, `[rows, 1]` in float32."""

QUANTIZATION_FIELDS = ("quantization_config", "compression_config")
"""Of config.json. The second one is the older name."""

CONVERTER = "neuron_serving_conversion"
"""Of config.json: says that its weights were converted here, so that none is beyond `LARGEST`."""

_PLAIN = re.compile(r"(^|\.)(embed_tokens|lm_head|gate|router|shared_expert_gate)\.weight$")
"""Weights that are never quantized, because each error in them counts: embedding, head, and what chooses experts."""


@dataclass(frozen=True, slots=True)
class QuantizedWeights:
    """What a backend does with quantized weights.

    formats: those in which it computes, given as `CONVERTED`.
    quantizes: whether it makes them of unquantized weights while it loads.
    reads: whether it reads what a checkpoint stores, whatever that is, by config.json. Then it also multiplies out.
    plain_with_bias: last words of layers which must not be quantized where they have biases.
    experts: whether it computes quantized experts.
    """

    formats: tuple[Kind, ...] = ()
    quantizes: bool = False
    reads: Callable[[Mapping[str, Any]], bool] = lambda config: False
    plain_with_bias: tuple[str, ...] = ()
    experts: bool = False


def quantizable(shapes: Mapping[str, tuple[int, ...]]) -> list[str]:
    """The weights of linear layers that are quantized if weights are. shapes: of all tensors of a model, by name."""
    return [name for name in linear_weights(shapes) if not _PLAIN.search(name)]


def linear_weights(shapes: Mapping[str, tuple[int, ...]]) -> list[str]:
    """Those of all linear layers. An embedding is none."""
    return [
        name
        for name, shape in shapes.items()
        if len(shape) == 2 and name.endswith(".weight") and not name.endswith("embed_tokens.weight")
    ]


def wanted_format(config: Mapping[str, Any], wanted: Quantizing, field: str = "$.quantization") -> Format | Literal[""]:
    """The form of weights that the configuration asks for; "": that in which they are stored.

    config: config.json.
    Raises InvalidConfig at the field if the checkpoint is quantized in another way, and as `quantization_of`.
    """
    stored = quantization_of(config)
    if wanted == "auto":
        return ""
    if wanted == "none":
        return "none" if stored else ""
    if stored is None:
        if wanted in get_args(Kind):
            return cast(Kind, wanted)
        message = f"is {wanted}, but the checkpoint is not quantized: leave it out, or set int8 or fp8"
        raise InvalidConfig(field, message)
    if wanted.removesuffix("_marlin") not in (stored.kind, stored.method):
        message = f"is {wanted}, but the checkpoint is quantized already ({stored.in_words()}): leave it out, or set "
        raise InvalidConfig(field, f"{message}none, or serve a checkpoint that is not quantized")
    return ""


def has_known_method(config: Mapping[str, Any]) -> bool:
    """Whether a checkpoint is quantized by a method of which `quantization_of` knows some, and which is converted."""
    given = config.get("quantization_config") or config.get("compression_config")
    method = given.get("quant_method") if isinstance(given, Mapping) else None
    if not isinstance(method, str) or method not in METHODS.keys() - UNCONVERTED:
        return False
    try:
        stored = quantization_of(config)
    except FatalError:
        return True  # The words of that error are the best.
    return stored is not None and stored.is_converted


def numbers_in_word(config: Mapping[str, Any]) -> int:
    """Of a checkpoint whose weights are packed in `WORD`s; 1 where it is not known."""
    try:
        stored = quantization_of(config)
    except FatalError:
        return 1
    return stored.in_each if stored is not None and stored.stored == WORD else 1


def quantization_of(config: Mapping[str, Any]) -> Quantization | None:
    """How the weights are quantized; None: they are not. Raises FatalError (UNSUPPORTED_ARCHITECTURE)."""
    given = config.get("quantization_config") or config.get("compression_config")
    if not given:
        return None
    method = given.get("quant_method") if isinstance(given, Mapping) else None
    if not isinstance(method, str) or method not in METHODS:
        raise _unsupported(f"quant_method {method!r}", ", ".join(sorted(METHODS)))
    return METHODS[method](given)


def _compressed_tensors(given: Mapping[str, Any]) -> Quantization:
    """Of llm-compressor: https://github.com/vllm-project/compressed-tensors."""
    for name in ("sparsity_config", "transform_config"):
        value = given.get(name)
        if value and not (isinstance(value, Mapping) and value.get("format") == "dense"):
            raise _unsupported(f"{name} of compressed-tensors", "none")
    groups = given.get("config_groups")
    schemes = [
        group.get("weights") if isinstance(group, Mapping) else None
        for group in (groups.values() if isinstance(groups, Mapping) else ())
    ]
    scheme = schemes[0] if schemes else None
    if not isinstance(scheme, Mapping) or any(other != scheme for other in schemes):
        raise _unsupported("config_groups of compressed-tensors", "one scheme for the weights of all layers")
    kind = (scheme.get("type"), scheme.get("num_bits"))
    packed = given.get("format") == "pack-quantized"
    if kind not in ((("int", 4), ("int", 8)) if packed else (("int", 8), ("float", 8))):
        known = "int and float with 8 bits, pack-quantized int with 4 or 8 bits"
        raise _unsupported(f"weights of type {kind[0]} with {kind[1]} bits", known)
    if scheme.get("actorder") not in (None, "static", "weight"):
        raise _unsupported(f"actorder {scheme.get('actorder')!r}", "null, static, weight")
    block = _block(scheme)
    zero = "" if scheme.get("symmetric", True) is True else "weight_zero_point"
    if zero and not (packed and block[0] == 1):
        known = "symmetric ones, and pack-quantized ones per channel or group"
        raise _unsupported("asymmetric weights (weight_zero_point)", known)
    if packed:
        words = (1, WORD_BITS // (4 if kind == ("int", 4) else 8))
        return Quantization("compressed-tensors", WORD, block, weight="weight_packed", packed=words, zero=zero)
    return Quantization("compressed-tensors", "I8" if kind[0] == "int" else "F8_E4M3", block)


def _block(scheme: Mapping[str, Any]) -> tuple[int, int]:
    """The numbers that share a scale, by the strategy of compressed-tensors."""
    strategy, size = scheme.get("strategy"), scheme.get("group_size")
    match strategy, size, scheme.get("block_structure"):
        case "tensor", _, _:
            return WHOLE, WHOLE
        case "channel", _, _:
            return 1, WHOLE
        case "group", int(size), _ if size > 0:
            return 1, size
        case "block", _, [int(rows), int(columns)] if rows > 0 and columns > 0:
            return rows, columns
    raise _unsupported(f"strategy {strategy!r} of weights", "tensor, channel, group with group_size, block")


def _fp8(given: Mapping[str, Any]) -> Quantization:
    """Of transformers (blocks of DeepSeek and Qwen) and of AutoFP8 (a scale for each tensor)."""
    if given.get("fmt", "e4m3") != "e4m3":
        raise _unsupported(f"fmt {given['fmt']!r} of fp8", "e4m3")
    match given.get("weight_block_size"):
        case None:
            return Quantization("fp8", "F8_E4M3", (WHOLE, WHOLE))
        case [int(rows), int(columns)] if rows > 0 and columns > 0:
            return Quantization("fp8", "F8_E4M3", (rows, columns), scale="weight_scale_inv")
    raise _unsupported(f"weight_block_size {given['weight_block_size']!r}", "two numbers above 0")


def _fbgemm(given: Mapping[str, Any]) -> Quantization:
    return Quantization("fbgemm_fp8", "F8_E4M3", (1, WHOLE))


def _modelopt(given: Mapping[str, Any]) -> Quantization:
    if given.get("quant_algo") != "FP8":
        raise _unsupported(f"quant_algo {given.get('quant_algo')!r} of modelopt", "FP8")
    return Quantization("modelopt", "F8_E4M3", (WHOLE, WHOLE))


def _mxfp4(given: Mapping[str, Any]) -> Quantization:
    """Of OCP's Microscaling Formats: of gpt-oss, whose experts alone are quantized."""
    return Quantization("mxfp4", "U8", (1, 32), scale="scales", weight="blocks", packed=(1, 2), scale_stored=("U8",))


_TRANSPOSED: Mapping[str, Any] = {"scale": "scales", "weight": "qweight", "zero": "qzeros", "transposed": True}


def _awq(given: Mapping[str, Any]) -> Quantization:
    """Of AutoAWQ: https://github.com/casper-hansen/AutoAWQ."""
    bits, version = given.get("bits", given.get("w_bit")), _layout(given, "version", "gemm")
    if bits != 4:
        raise _unsupported(f"bits {bits!r} of awq", "4")
    if version != "gemm" or given.get("backend") == "llm-awq":  # Other backends are what it was made or is run with.
        raise _unsupported(f"version {version!r}, backend {given.get('backend')!r} of awq", "gemm, not of llm-awq")
    if given.get("zero_point", True) is not True:
        raise _unsupported(f"zero_point {given['zero_point']!r} of awq", "true")
    block = _group(given.get("group_size", given.get("q_group_size")), "awq")
    places = (0, 4, 1, 5, 2, 6, 3, 7)
    return Quantization("awq", WORD, block, packed=(8, 1), places=places, **_TRANSPOSED)


def _gptq(given: Mapping[str, Any]) -> Quantization:
    """Of AutoGPTQ and GPTQModel: https://github.com/ModelCloud/GPTQModel."""
    bits, layout = given.get("bits"), _layout(given, "checkpoint_format", "gptq")
    if bits not in (4, 8):
        raise _unsupported(f"bits {bits!r} of gptq", "4, 8")
    if layout not in ("gptq", "gptq_v2") or given.get("is_marlin_format"):
        raise _unsupported(f"checkpoint_format {layout!r} of gptq", "gptq, gptq_v2, and no is_marlin_format")
    dynamic = given.get("dynamic") or {}
    if not isinstance(dynamic, Mapping) or not all(str(name).startswith("-:") for name in dynamic):
        raise _unsupported("dynamic of gptq", "names of modules that are not quantized, with -: before them")
    return Quantization(
        "gptq",
        WORD,
        _group(given.get("group_size"), "gptq"),
        packed=(1, WORD_BITS // bits),
        group="g_idx" if given.get("desc_act") else "",
        zero_added=int(layout == "gptq"),
        spare_bias=True,
        **_TRANSPOSED,
    )


def _layout(given: Mapping[str, Any], field: str, usual: str) -> str:
    """How numbers are packed. Newer libraries call it `format`."""
    return str(given.get(field) or given.get("format") or usual).lower()


def _group(size: Any, method: str) -> tuple[int, int]:
    """The numbers that share a scale, by the size of a group in a row."""
    if type(size) is not int or (size != -1 and size < 1):
        raise _unsupported(f"group_size {size!r} of {method}", "-1, or a number above 0")
    return 1, WHOLE if size == -1 else size


METHODS: Mapping[str, Callable[[Mapping[str, Any]], Quantization]] = {
    "awq": _awq,
    "compressed-tensors": _compressed_tensors,
    "fbgemm_fp8": _fbgemm,
    "fp8": _fp8,
    "gptq": _gptq,
    "modelopt": _modelopt,
    "mxfp4": _mxfp4,
}
"""By `quant_method`."""
UNCONVERTED = frozenset({"awq", "gptq", "mxfp4"})
"""Those of which nothing is converted: a backend reads them, or it does not."""


def _unsupported(what: str, supported: str) -> FatalError:
    return FatalError(
        ExitCode.UNSUPPORTED_ARCHITECTURE,
        f"config.json: quantization_config: {what}: not supported; supported: {supported}",
    )
