"""Decides which weights a checkpoint must have for a backend and a configuration, and what must be converted for that.

Called by `inspect`, which tells the operator, and by `convert`, which does it: both must come to the same digest. Pure:
it sees config.json and the headers of the weights. The architecture is one of the torch backend, which knows tensors.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

from neuron_runtime.backend.torch.architecture import FAMILIES, decoder_config, tensor_shapes
from neuron_runtime.backend.torch.choices import EMBEDDINGS
from neuron_runtime.backend.torch.naming import named_tensors
from neuron_runtime.checkpoint import TensorInfo
from neuron_runtime.dtypes import BY_STORED
from neuron_runtime.engine.backends import package_of
from neuron_runtime.errors import ExitCode, FatalError, InvalidConfig
from neuron_runtime.quantization import (
    CONVERTED,
    CONVERTER,
    Format,
    Kind,
    Quantization,
    QuantizedWeights,
    Quantizing,
    has_known_method,
    linear_weights,
    quantizable,
    quantization_of,
    wanted_format,
)

VERSION = 1
"""Part of each digest: raised if weights that were converted before must not be served."""
PLAIN = "BF16"
"""In which weights are multiplied out if the embedding does not say."""


class Output(NamedTuple):
    """A tensor of the converted model. dtype: as safetensors names it."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * BY_STORED[self.dtype].num_bytes


@dataclass(frozen=True, slots=True)
class Conversion:
    """A converted model by what makes it.

    quantized: names of the weights that get the format, each with a scale in `outputs`.
    excluded: modules of the other linear layers, sorted.
    outputs: all tensors, in the order of the model.
    """

    format: Format
    quantized: frozenset[str]
    excluded: tuple[str, ...]
    outputs: tuple[Output, ...]

    @property
    def num_bytes(self) -> int:
        return sum(output.num_bytes for output in self.outputs)

    def digest(self, source: str, contents: str = "") -> str:
        """That of the converted model. source: that of the checkpoint. contents: see `contents_of`."""
        parts = ["conversion", VERSION, source, self.format, self.excluded, *filter(None, [contents])]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def conversion_of(
    config: Mapping[str, Any],
    tensors: Mapping[str, TensorInfo],
    backend: str,
    wanted: Quantizing,
    field: str = "$.quantization",
) -> Conversion | None:
    """What the weights are converted to; None: the backend takes them as they are.

    A backend that quantizes while it loads (`QuantizedWeights.quantizes`) can also do without.

    Args:
        config: config.json.
        tensors: of the checkpoint, by name.
        field: what errors name.

    Raises:
        InvalidConfig: the checkpoint is quantized in another way, or the backend computes no such weights.
        FatalError: UNSUPPORTED_ARCHITECTURE or INVALID_MODEL.
    """
    does = package_of(backend).QUANTIZED_WEIGHTS
    if wanted == "auto" and (not does.formats or does.reads(config) or not has_known_method(config)):
        return None  # The backend itself has better words for what it does not compute.
    asked, stored = wanted_format(config, wanted, field), quantization_of(config)
    if (stored is None and not asked) or (stored is not None and does.reads(config)):
        return None
    if stored is not None and not stored.is_converted:
        raise FatalError(
            ExitCode.UNSUPPORTED_ARCHITECTURE,
            f"config.json: the weights are {stored.in_words()}, which the {backend} backend does not compute, and "
            "which are not converted: serve a checkpoint that is not quantized, or one in int8 or fp8",
        )
    to = cast(Format, asked or (stored.kind if stored else "none"))
    if to != "none" and to not in does.formats:
        what = stored.in_words() if stored else f"weights in {to}"
        raise InvalidConfig(field, f"the {backend} backend does not compute {what}: set none, or leave it out")
    model = decoder_config(config)
    if FAMILIES[model.architecture].stored is not None and not does.quantizes:
        raise FatalError(
            ExitCode.UNSUPPORTED_ARCHITECTURE,
            f"config.json: {model.architecture} has several experts in one tensor, which is not converted for "
            f"{backend}: leave {field.removeprefix('$.')} out",
        )
    if to != "none" and model.experts is not None and not does.experts:
        raise FatalError(
            ExitCode.UNSUPPORTED_ARCHITECTURE,
            f"config.json: {model.architecture} has experts, and the {backend} backend does not compute quantized "
            f"ones ({to}): set {field.removeprefix('$.')} none, or serve a checkpoint that is not quantized",
        )
    shapes, tensors = tensor_shapes(model), named_tensors(tensors, model)
    given = frozenset(name for name in shapes if stored is None or not is_quantized(name, tensors, stored))
    quantized = frozenset(
        name
        for name in (quantizable(shapes) if to != "none" else ())
        if not _must_be_plain(name, shapes, does) and (stored is None or name not in given)
    )
    if (
        stored is not None
        and to != "none"
        and given | quantized == shapes.keys()
        and _is_converted(config, tensors, quantized, stored)
    ):
        return None
    excluded = tuple(sorted(name.removesuffix(".weight") for name in {*linear_weights(shapes)} - quantized))
    return Conversion(to, quantized, excluded, tuple(_outputs(shapes, tensors, given, quantized, to)))


def is_quantized(name: str, tensors: Mapping[str, TensorInfo], stored: Quantization) -> bool:
    """Whether the checkpoint stores this weight so. name: as an unquantized model has it."""
    numbers = tensors.get(stored.weight_name(name))
    return numbers is not None and numbers.dtype == stored.stored


def _must_be_plain(name: str, shapes: Mapping[str, tuple[int, ...]], does: QuantizedWeights) -> bool:
    module = name.removesuffix(".weight")
    return f"{module}.bias" in shapes and module.rpartition(".")[2] in does.plain_with_bias


def _is_converted(
    config: Mapping[str, Any], tensors: Mapping[str, TensorInfo], quantized: Collection[str], stored: Quantization
) -> bool:
    """Whether the checkpoint stores these weights as converted ones are."""
    if stored not in CONVERTED.values() or (stored.kind == "fp8" and CONVERTER not in config):
        return False
    scales = [tensors.get(stored.scale_name(name)) for name in quantized]
    return all(scale is not None and scale.dtype == "F32" and scale.shape[1:] == (1,) for scale in scales)


def _outputs(
    shapes: Mapping[str, tuple[int, ...]],
    tensors: Mapping[str, TensorInfo],
    given: Collection[str],
    quantized: Collection[str],
    to: Format,
) -> Iterator[Output]:
    plain = tensors[EMBEDDINGS[0]].dtype if EMBEDDINGS[0] in tensors else PLAIN
    for name, shape in shapes.items():
        if name in quantized:
            form = CONVERTED[cast(Kind, to)]
            yield Output(name, form.stored, shape)
            yield Output(form.scale_name(name), "F32", form.scale_shape(shape))
        else:
            yield Output(name, tensors[name].dtype if name in given and name in tensors else plain, shape)


def quantization_config(conversion: Conversion) -> dict[str, Any] | None:
    """Of config.json of the converted model, in the form of compressed-tensors; None: weights are not quantized."""
    if conversion.format == "none":
        return None
    kind = {"int8": "int", "fp8": "float"}[conversion.format]
    weights = {"num_bits": 8, "type": kind, "symmetric": True, "strategy": "channel", "dynamic": False}
    # Newer versions of the library read the format of a group, and would take int8 weights for packed ones without it.
    group: dict[str, Any] = {"targets": ["Linear"], "format": f"{kind}-quantized", "weights": weights}
    group |= {"input_activations": None, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": f"{kind}-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": list(conversion.excluded),
        "kv_cache_scheme": None,
    }
