"""Reads an adapter in PEFT's format without its weights, and checks that it is plain LoRA that fits a model.

Called wherever an adapter is inspected, fetched or loaded. Uses neither torch nor the peft library. The files may come
from anybody: what is wrong with them is a FatalError that says what and how to cure it. The tensors tell which
projections change, so patterns in the configuration, which may be any regular expression, are never run.
"""

from __future__ import annotations

import hashlib
import math
import re
import stat
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import msgspec
from msgspec import Meta

from neuron_runtime.checkpoint import MAX_NAMED, InvalidModel, TensorInfo, check_folder, read_header, read_object
from neuron_runtime.dtypes import COMPUTED_STORED
from neuron_runtime.errors import ExitCode, FatalError
from neuron_runtime.record import MAX_MESSAGE_CHARACTERS, AdapterFacts
from neuron_runtime.validation import explain

__all__ = [
    "TARGETS",
    "TEXT_FILES",
    "Adapter",
    "AdapterFacts",
    "AdapterRules",
    "Target",
    "check_adapter",
    "check_config",
    "check_digest",
    "check_names",
    "digest_of",
    "open_adapter",
    "read_adapter",
    "read_config",
    "reading",
]

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
TEXT_FILES = (
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
)
"""What it may have beside them: its chat template, the tokens that it ends with, and sampling defaults."""
PICKLED_FILES = ("adapter_model.bin", "adapter_model.pt")

Target = Literal["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
"""A projection that an adapter may change."""
TARGETS: tuple[Target, ...] = get_args(Target)
"""In the order of a layer."""
_BLOCKS: Mapping[str, str] = {target: "self_attn" if target in TARGETS[:4] else "mlp" for target in TARGETS}

MAX_CONFIG_BYTES = MAX_HEADER_BYTES = MAX_TEXT_BYTES = 2**22
"""Ten times the header of an adapter of all projections of the largest models."""
_LARGEST_FLOAT32 = 3.4e38
_MAX_SHOWN = 80

_OF_TEXT = "language_model."
"""What a model with images has in the names of its text model: before `model.`, or behind it in newer transformers."""
_PROJECTION = re.compile(
    r"base_model\.model\.(?:language_model\.model|model\.language_model|model)"
    r"\.layers\.(\d{1,5})\.(self_attn|mlp)\.(\w+)\.lora_([AB])\.weight"
)
_AGAIN = "save the adapter again with PEFT's save_pretrained"
_MERGE = "train it without that, or merge it into its model (PEFT's merge_and_unload) and serve that"


@dataclass(frozen=True, slots=True)
class AdapterRules:
    """What a backend can load. targets: projections that an adapter may change; all of the model if empty."""

    max_rank: int
    targets: tuple[str, ...] = ()
    min_rank: int = 1


@dataclass(frozen=True, slots=True)
class Pair:
    """What an adapter adds to one projection: `scaling * b @ a`, of shapes (rank, in) and (out, rank)."""

    layer: int
    target: str
    a: TensorInfo
    b: TensorInfo
    scaling: float

    @property
    def rank(self) -> int:
        return self.a.shape[0]


class _Lora(msgspec.Struct, frozen=True):
    """The fields of adapter_config.json that matter for the result."""

    peft_type: Literal["LORA"]
    r: Annotated[int, Meta(ge=1)]
    lora_alpha: float
    use_rslora: bool | None = False
    rank_pattern: dict[str, Annotated[int, Meta(ge=1)]] | None = None
    target_modules: set[str] | str | None = None
    layers_to_transform: set[int] | int | None = None
    base_model_name_or_path: str | None = None

    @property
    def ranks(self) -> frozenset[int]:
        return frozenset({self.r, *(self.rank_pattern or {}).values()})

    def scaling(self, rank: int) -> float:
        return self.lora_alpha / (math.sqrt(rank) if self.use_rslora else rank)

    def changes(self, layer: int, target: str) -> bool:
        """Whether PEFT would load this pair, as far as that is told without a regular expression."""
        layers, names = self.layers_to_transform, self.target_modules
        if isinstance(layers, int):
            layers = {layers}
        parts = ["model", "layers", str(layer), _BLOCKS[target], target]
        ends = {".".join(parts[begin:]) for begin in range(len(parts))}
        return (not layers or layer in layers) and (not isinstance(names, set) or not ends.isdisjoint(names))


_ANY_VALUE = {
    *_Lora.__struct_fields__,
    *("auto_mapping", "ensure_weight_tying", "exclude_modules", "fan_in_fan_out", "inference_mode", "layers_pattern"),
    *("lora_dropout", "peft_version", "revision", "runtime_config"),
    *("corda_config", "eva_config", "loftq_config", "lora_ga_config", "megatron_core", "qalora_group_size"),
} - {"peft_type"}
"""Fields that are read, that change nothing in what is saved, or that are details of another one, which is refused."""
_VALUES: Mapping[str, Sequence[object]] = {
    "peft_type": ("LORA",),
    "task_type": ("CAUSAL_LM",),
    "bias": ("none",),
    # The others change the weights of the model before the training, so that the adapter fits only these.
    "init_lora_weights": (True, "gaussian", "eva", "orthogonal", "mica"),
}
"""What else than nothing the other fields may have. Those that are not here must be empty."""
_CURES = {"init_lora_weights": "save it with path_initial_model_for_weight_conversion, which makes plain LoRA of it"}


@dataclass(frozen=True, slots=True)
class Adapter:
    """Plain LoRA whose files agree with one another. `pairs`: in the order of layers, at least one."""

    folder: Path
    trained_for: str
    """The base model as the configuration names it, "" if it does not."""
    pairs: tuple[Pair, ...]
    raw_config: bytes

    @property
    def num_bytes(self) -> int:
        return sum(pair.a.num_bytes + pair.b.num_bytes for pair in self.pairs)

    def digest(self) -> str:
        """sha256 over the configuration and all bytes of the tensors, which are read for it. Raises FatalError."""
        path = self.folder / WEIGHTS_FILE
        digest = hashlib.sha256(hashlib.sha256(self.raw_config).digest())
        try:
            with path.open("rb") as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
        except OSError as error:
            raise _invalid(f"{path}: cannot be read: {error.strerror}") from error
        return digest.hexdigest()


def read_adapter(folder: Path, model_config: Mapping[str, Any], rules: AdapterRules) -> AdapterFacts:
    """Facts about an adapter that fits the model with this config.json, and these rules. Reads all bytes once.

    Raises:
        FatalError: MODEL_NOT_FOUND if there is no folder; RANK_TOO_HIGH, TARGETS_NOT_SERVED, ADAPTER_MISMATCH,
            ADAPTER_NOT_SUPPORTED or INVALID_ADAPTER with the value, the limit and the cure.
    """
    adapter = check_adapter(folder, model_config, rules)
    return AdapterFacts(
        digest=adapter.digest(),
        rank=max(pair.rank for pair in adapter.pairs),
        targets=tuple(target for target in TARGETS if any(pair.target == target for pair in adapter.pairs)),
        num_bytes=adapter.num_bytes,
        base_model=adapter.trained_for,
    )


def check_adapter(folder: Path, model_config: Mapping[str, Any], rules: AdapterRules) -> Adapter:
    """The adapter, if its configuration and the header of its tensors fit. Raises as `read_adapter`."""
    check_config(folder, rules)
    adapter = open_adapter(folder)
    text = model_config.get("text_config")
    if isinstance(text, Mapping):
        model_config = {**model_config, **text}
    elif named := next((pair.a.name for pair in adapter.pairs if _OF_TEXT in pair.a.name), ""):
        message = f"{folder}: the adapter has {_shown(named)}, but this model has no {_OF_TEXT[:-1]}: name its model"
        raise FatalError(ExitCode.ADAPTER_MISMATCH, message)
    shapes, num_layers = _shapes(model_config), _number(model_config, "num_hidden_layers")
    allowed = [target for target in rules.targets or TARGETS if target in shapes]
    changed = {pair.target for pair in adapter.pairs}
    if others := [target for target in TARGETS if target in changed and target not in allowed]:
        raise FatalError(
            ExitCode.TARGETS_NOT_SERVED,
            f"{folder}: the adapter changes {', '.join(others)}, but this model is served with adapters of "
            f"{', '.join(allowed) or 'nothing'}: train it with these target_modules, or set adapters.targets "
            "(--lora-target-modules)",
        )
    for pair in adapter.pairs:
        trained, expected = (pair.a.shape[1], pair.b.shape[0]), shapes[pair.target]
        if pair.layer >= num_layers:
            wrong = f"changes layer {pair.layer}, but the layers of the model are 0 to {num_layers - 1}"
        elif trained != expected:
            wrong = (
                f"has a {pair.target} of {trained[0]} to {trained[1]} numbers in layer {pair.layer}, but that of the "
                f"model is of {expected[0]} to {expected[1]}"
            )
        else:
            continue
        origin = f", which was trained for {adapter.trained_for}," if adapter.trained_for else ""
        raise FatalError(ExitCode.ADAPTER_MISMATCH, f"{folder}: the adapter{origin} {wrong}: name its model")
    return adapter


def check_config(folder: Path, rules: AdapterRules) -> None:
    """Checks what the configuration alone tells, before the weights are copied. Raises as `read_adapter`."""
    lora, _ = read_config(folder)
    path = folder / CONFIG_FILE
    if (rank := max(lora.ranks)) > rules.max_rank:
        field = "r" if rank == lora.r else "rank_pattern"
        raise FatalError(
            ExitCode.RANK_TOO_HIGH,
            f"{path}: {field} has rank {_shown(rank)}, but the highest that is served is {rules.max_rank}: train the "
            "adapter with a smaller one, or raise adapters.maxRank (--max-lora-rank)",
        )
    if (rank := min(lora.ranks)) < rules.min_rank:
        raise _unsupported(path, f"rank {rank}", f"this backend computes ranks from {rules.min_rank} on")


def open_adapter(folder: Path) -> Adapter:
    """The adapter of any model. Raises as `read_adapter`."""
    lora, raw_config = read_config(folder)
    path = folder / WEIGHTS_FILE
    check_names(folder, [name for name in (WEIGHTS_FILE, *PICKLED_FILES) if (folder / name).exists()])
    with reading():
        _, tensors = read_header(path, MAX_HEADER_BYTES)
    halves: dict[tuple[int, int], dict[str, TensorInfo]] = {}
    for tensor in tensors:
        layer, target, half = _place(tensor.name, path)
        if tensor.dtype not in COMPUTED_STORED:
            what = f"{tensor.dtype} in {_shown(tensor.name)}"
            raise _unsupported(path, what, f"save it as one of {', '.join(COMPUTED_STORED)}")
        both = halves.setdefault((layer, TARGETS.index(target)), {})
        if half in both:
            raise _invalid(f"{path}: has {_shown(both[half].name)} and {_shown(tensor.name)}, which are one; {_AGAIN}")
        both[half] = tensor
    if not halves:
        raise _invalid(f"{path}: has no tensors; {_AGAIN}")
    pairs = tuple(_pair(lora, layer, TARGETS[at], both, path) for (layer, at), both in sorted(halves.items()))
    return Adapter(folder, _shown(lora.base_model_name_or_path or ""), pairs, raw_config)


def digest_of(folder: Path) -> str:
    """That of the adapter in a folder. Raises FatalError."""
    return open_adapter(folder).digest()


def check_digest(digest: str, folder: Path) -> None:
    """Raises FatalError unless the adapter in the folder is the one with this digest."""
    if digest_of(folder) != digest:
        raise FatalError(
            ExitCode.CHECKSUM_MISMATCH, f"{folder}: the adapter has changed since it was checked: load it again"
        )


def check_names(folder: Path, names: Collection[str]) -> None:
    """Raises FatalError unless the files of an adapter, whose folder is for the message, include weights to read."""
    if WEIGHTS_FILE not in names:
        pickled = next((name for name in PICKLED_FILES if name in names), "")
        why = f"{pickled} is not read, because it may run code: save" if pickled else "save"
        raise _invalid(
            f"{folder / WEIGHTS_FILE} is missing: {why} the adapter with PEFT's save_pretrained(..., "
            "safe_serialization=True)"
        )


def _pair(lora: _Lora, layer: int, target: str, both: Mapping[str, TensorInfo], path: Path) -> Pair:
    what = f"{path}: {target} of layer {layer}"
    if len(both) < 2:
        raise _invalid(f"{what} has lora_{next(iter(both))} alone; {_AGAIN}")
    a, b = both["A"], both["B"]
    if len(a.shape) != 2 or len(b.shape) != 2 or a.shape[0] != b.shape[1] or a.shape[0] not in lora.ranks:
        promised = " or ".join(map(str, sorted(lora.ranks)[:MAX_NAMED]))
        shapes = f"{list(a.shape[:4])} and {list(b.shape[:4])}"
        raise _invalid(f"{what} has shapes {shapes}, but {CONFIG_FILE} promises rank {promised}; {_AGAIN}")
    if not lora.changes(layer, target):
        raise _invalid(f"{what} is not among target_modules and layers_to_transform of {CONFIG_FILE}; {_AGAIN}")
    return Pair(layer, target, a, b, lora.scaling(a.shape[0]))


def _place(name: str, path: Path) -> tuple[int, str, str]:
    """Layer, projection and half (A or B) of a tensor. Raises FatalError for one that is none of plain LoRA."""
    if match := _PROJECTION.fullmatch(name):
        layer, block, target, half = match.groups()
        if _BLOCKS.get(target) == block and str(int(layer)) == layer:
            return int(layer), target, half
    for part, what in _OTHER_TENSORS.items():
        if part in name:
            raise _unsupported(path, f"{_shown(name)}, {what},")
    if name.startswith("base_model.model.") and ".lora_" in name and name.endswith(".weight"):
        raise FatalError(
            ExitCode.TARGETS_NOT_SERVED,
            f"{path}: the adapter has {_shown(name)}, but adapters may change {', '.join(TARGETS)} in the layers of a "
            "language model alone: train it with these target_modules",
        )
    if name.startswith("base_model.model.") and ".lora_" not in name:
        raise _unsupported(path, f"{_shown(name)}, weights of the model itself (modules_to_save),")
    raise _invalid(f"{path}: {_shown(name)} is no tensor of a PEFT adapter; {_AGAIN}")


_OTHER_TENSORS = {
    "lora_magnitude_vector": "of DoRA",
    "lora_embedding_": "of embeddings",
    "embed_tokens": "of embeddings",
    "lm_head": "of the head",
    ".bias": "a bias",
}
"""Parts of names, and what such tensors are."""


def read_config(folder: Path) -> tuple[_Lora, bytes]:
    """The configuration, if it is of plain LoRA, and its bytes. Raises as `read_adapter`."""
    path = folder / CONFIG_FILE
    with reading():
        check_folder(folder, CONFIG_FILE)
        raw, fields = read_object(path, "the folder of an adapter in PEFT's format contains it", MAX_CONFIG_BYTES)
    # The type first: other types have other fields.
    for name, value in sorted(fields.items(), key=lambda item: item[0] != "peft_type"):
        if value and name not in _ANY_VALUE and value not in _VALUES.get(name, ()):
            raise _unsupported(path, f"{_shown(name)} {_shown(value)}", _CURES.get(name, _MERGE))
    try:
        lora = msgspec.convert(fields, _Lora)
    except (msgspec.ValidationError, RecursionError) as error:
        where, what = explain(error, _Lora)
        raise _invalid(f"{path}: {_shown(where.removeprefix('.') + ' ' + what).strip()}; {_AGAIN}") from error
    for name in TEXT_FILES:
        _check_text(folder / name)
    if lora.lora_alpha == 0:
        raise _unsupported(path, "lora_alpha 0", "it would switch the adapter off")
    if abs(lora.lora_alpha) > _LARGEST_FLOAT32:
        raise _invalid(f"{path}: lora_alpha {lora.lora_alpha} is no number of float32; {_AGAIN}")
    return lora, raw


def _check_text(path: Path) -> None:
    try:
        status = path.stat()
    except FileNotFoundError:
        return
    except OSError as error:
        raise _invalid(f"{path}: cannot be read: {error.strerror}") from error
    if not stat.S_ISREG(status.st_mode) or status.st_size > MAX_TEXT_BYTES:
        raise _invalid(f"{path} must be a file of at most {MAX_TEXT_BYTES:,} bytes: leave it out, or make it smaller")


def _shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, int]]:
    """How many numbers each projection of the model takes and gives. Those of experts are not among them."""
    hidden, heads = _number(config, "hidden_size"), _number(config, "num_attention_heads")
    head_dim = _number(config, "head_dim", hidden // heads)
    query, key = heads * head_dim, _number(config, "num_key_value_heads", heads) * head_dim
    shapes = {"q_proj": (hidden, query), "k_proj": (hidden, key), "v_proj": (hidden, key), "o_proj": (query, hidden)}
    if not (config.get("num_experts") or config.get("num_local_experts")):
        inner = _number(config, "intermediate_size")
        shapes |= {"gate_proj": (hidden, inner), "up_proj": (hidden, inner), "down_proj": (inner, hidden)}
    return shapes


def _number(config: Mapping[str, Any], name: str, default: int | None = None) -> int:
    value = config.get(name)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise InvalidModel(f"config.json: {name} must be a positive integer, got {_shown(value)}")
    return value


@contextmanager
def reading() -> Iterator[None]:
    """Files of adapters are read as those of models are: what is said of a model in the block is said of an adapter."""
    try:
        yield
    except FatalError as error:
        if error.exit_code is not ExitCode.INVALID_MODEL:
            raise
        text = "".join(one if one.isprintable() else "?" for one in str(error)[:MAX_MESSAGE_CHARACTERS])
        raise _invalid(text) from error


def _invalid(message: str) -> FatalError:
    return FatalError(ExitCode.INVALID_ADAPTER, message)


def _unsupported(path: Path, what: str, cure: str = _MERGE) -> FatalError:
    return FatalError(ExitCode.ADAPTER_NOT_SUPPORTED, f"{path}: an adapter with {what} is not supported: {cure}")


def _shown(value: object) -> str:
    """A value of a file, for an error: short, and without control characters."""
    if isinstance(value, list | dict):
        return f"of {len(value)} entries"
    text = value if isinstance(value, str) and value.isprintable() else repr(value)
    return text if len(text) <= _MAX_SHOWN else text[:_MAX_SHOWN] + "..."
