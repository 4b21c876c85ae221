"""Reads a model folder without its weights: config.json, and the location of each tensor in the safetensors files
(https://github.com/huggingface/safetensors#format).

Called by `inspect` (facts about a model) and by the backends (what to load, how many bytes). Uses neither torch nor the
safetensors package, so it starts fast and its errors name the file and the byte counts.
"""

from __future__ import annotations

import hashlib
import math
import os
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from neuron_runtime.dtypes import BY_STORED, COMPUTED_STORED
from neuron_runtime.errors import ExitCode, FatalError
from neuron_runtime.quantization import QUANTIZATION_FIELDS, UNREAD, WORD, Quantization, StoredTensor, numbers_in_word

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
GRAPHS_FILE, GRAPHS_CONFIG_FILE = "model.pt", "neuron_config.json"
"""What NxD Inference compiled. Without the second file the first one is something else."""
SHARD_FILE = "weights/tp{rank}_sharded_checkpoint.safetensors"
"""Beside them, if it wrote the weights too: those of one rank. A model may have no others."""
_SHARD = re.compile(SHARD_FILE.replace("{rank}", r"(\d+)").replace(".", r"\."))
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")
"""A model needs one of these to serve text; transformers makes the first from the others."""
TEMPLATES_FOLDER = "additional_chat_templates"
"""Has chat templates by name, beside `chat_template.jinja`."""
CONVERTERS = ("sentencepiece", "tiktoken")
"""transformers reads tokenizer.model with one of these packages."""
MAX_HEADER_BYTES = 100_000_000
"""The limit of the safetensors library."""
MAX_JSON_BYTES = 64_000_000
MAX_DIMENSIONS = 16
MAX_NAMED = 5
"""Tensors named in one error message."""
HEAD = "lm_head.weight"
QUANTIZATION_FILE = "hf_quant_config.json"
"""Of ModelOpt, which wrote it before config.json had a `quantization_config`."""
FUSION = "fc.weight"
"""Fuses tokens with hidden states: EAGLE heads alone have it."""
COMPARED_BYTES = 2**24

PACKED = {
    ("U8", "_blocks"): 2,
    ("U8", "_scales"): 0,
    **{(WORD, end): 0 for end in (".qzeros", ".weight_zero_point", ".g_idx")},
}
"""Parameters in each stored number, by its dtype and the end of the tensor's name."""
WORDS = (".qweight", ".weight_packed")
"""Ends of the names of tensors in which as many numbers are packed as config.json says."""


class InvalidModel(FatalError):
    """The folder does not contain a readable model; the message names the file."""

    def __init__(self, message: str) -> None:
        super().__init__(ExitCode.INVALID_MODEL, message)


class Slice(NamedTuple):
    """What one tensor is of another one in the file, which has several.

    number: of the first dimension. transposed: the next two are exchanged. begin, step: of the rows that are left, of
    which it has `shape[0]`.
    """

    number: int
    transposed: bool
    begin: int
    step: int


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor as described by its file's header; its data are bytes `begin` to `end` of the file."""

    name: str
    dtype: str
    """As in safetensors, e.g. `BF16`."""
    shape: tuple[int, ...]
    file: str
    """File name within the folder, with its subfolder."""
    begin: int
    end: int
    slice: Slice | None = None
    """None: it is all of the tensor in the file. Otherwise what `name`, `begin` and `end` say is about that one."""

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * BY_STORED[self.dtype].num_bytes

    @property
    def num_parameters(self) -> int:
        packed = (n for (dtype, end), n in PACKED.items() if self.dtype == dtype and self.name.endswith(end))
        return next(packed, 1) * math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A model folder: its configuration and its tensors."""

    folder: Path
    config: Mapping[str, Any]
    tensors: Mapping[str, TensorInfo]
    digest: str
    """sha256 over config.json, with the file that has its quantization, the index (if any) and the headers of weight
    files, in order of their names. With shards, the configuration of their graphs instead of the index."""
    is_sharded: bool = False
    """The weights are those of compiled graphs alone, cut for their ranks: names and shapes are the library's, keys of
    `tensors` have the file too, and what several ranks hold counts several times."""

    @property
    def num_parameters(self) -> int:
        in_word = numbers_in_word(self.config)
        return sum(
            tensor.num_parameters * (in_word if tensor.dtype == WORD and tensor.name.endswith(WORDS) else 1)
            for tensor in self.tensors.values()
        )

    @property
    def num_bytes(self) -> int:
        return sum(tensor.num_bytes for tensor in self.tensors.values())

    @property
    def files(self) -> tuple[str, ...]:
        return tuple(sorted({tensor.file for tensor in self.tensors.values()}))

    @property
    def is_eagle_head(self) -> bool:
        return not self.tensors.keys().isdisjoint((FUSION, f"model.{FUSION}"))


def read_checkpoint(folder: Path) -> Checkpoint:
    """Read configuration and headers of a model folder.

    Raises:
        FatalError: MODEL_NOT_FOUND if the folder does not exist.
        InvalidModel: config.json or weights are missing, malformed or truncated.
    """
    raw_config = _read_config(folder)
    config, raw_quantization = _with_quantization(folder, _json_object(raw_config, folder / CONFIG_FILE))
    digest = hashlib.sha256(raw_config + raw_quantization)

    weight_map: dict[str, str] | None = None
    files, is_sharded = [WEIGHTS_FILE], has_only_shards(folder)
    if is_sharded:
        digest.update(_read(folder / GRAPHS_CONFIG_FILE, "it belongs to compiled graphs"))
        files = shard_files(_names(folder))
    elif not (folder / WEIGHTS_FILE).exists():
        index_path = folder / INDEX_FILE
        raw_index = _read(index_path, advice_without_safetensors(_names(folder)))
        digest.update(raw_index)
        weight_map = parse_index(raw_index, index_path)
        files = sorted(set(weight_map.values()))

    tensors: dict[str, TensorInfo] = {}
    for file in files:
        header, entries = read_header(folder / file)
        digest.update(header)
        # A shard may contain tensors that the index does not list; they are not part of the model.
        if is_sharded:
            tensors.update((f"{file}: {t.name}", replace(t, file=file)) for t in entries)
            continue
        tensors.update((t.name, t) for t in entries if weight_map is None or weight_map.get(t.name) == file)
    if weight_map is not None and (missing := sorted(weight_map.keys() - tensors.keys())):
        name, num_more = missing[0], len(missing) - 1
        raise InvalidModel(
            f"{folder / weight_map[name]}: {INDEX_FILE} lists tensor {name} in this file, but it is missing"
            + (f" (and {num_more} more)" if num_more else "")
        )
    return Checkpoint(folder, config, tensors, digest.hexdigest(), is_sharded)


def read_whole_checkpoint(folder: Path) -> Checkpoint:
    """For those who read tensors by their names. Raises as `read_checkpoint`, also if the model has only shards."""
    checkpoint = read_checkpoint(folder)
    if checkpoint.is_sharded:
        raise InvalidModel(
            f"{folder}: its weights are cut for graphs that NxD Inference compiled: serve it with the backend nxdi, or "
            f"add {WEIGHTS_FILE}"
        )
    return checkpoint


def is_shard(name: str) -> bool:
    return _SHARD.fullmatch(name) is not None


def shard_files(names: Collection[str]) -> list[str]:
    """The weights of compiled graphs, in order of their ranks; empty unless all that they need is there."""
    ranks = sorted(int(match[1]) for match in map(_SHARD.fullmatch, names) if match)
    complete = ranks == list(range(len(ranks))) and {GRAPHS_FILE, GRAPHS_CONFIG_FILE} <= set(names)
    return [SHARD_FILE.format(rank=rank) for rank in ranks] if complete else []


def has_only_shards(folder: Path) -> bool:
    """Whether a model's only weights are those of compiled graphs."""
    return not any((folder / name).exists() for name in (WEIGHTS_FILE, INDEX_FILE)) and bool(
        shard_files(_names(folder))
    )


def advice_without_safetensors(names: Collection[str]) -> str:
    """What to do about a model with these files but without weights that can be read."""
    ranks = {int(match[1]) for match in map(_SHARD.fullmatch, names) if match}
    if ranks or GRAPHS_CONFIG_FILE in names:
        shards = (SHARD_FILE.format(rank=rank) for rank in range(max(ranks, default=0) + 1))
        missing = next(name for name in (GRAPHS_FILE, GRAPHS_CONFIG_FILE, *shards) if name not in names)
        return f"its graphs of NxD Inference lack {missing}: add it, or {WEIGHTS_FILE}"
    others = sorted(
        name for name in names if any(fnmatchcase(name, end) for end in ("*.bin", "*.pt", "*.pth", "*.gguf"))
    )
    if others:
        return f"only safetensors weights are supported, but the folder contains {others[0]}; convert the model"
    return f"the folder contains neither {WEIGHTS_FILE} nor {INDEX_FILE}; download the model's weights"


def read_config(folder: Path) -> dict[str, Any]:
    """Read only config.json, from a folder that may have no weights. Raises as `read_checkpoint`."""
    return _with_quantization(folder, _json_object(_read_config(folder), folder / CONFIG_FILE))[0]


def _with_quantization(folder: Path, config: dict[str, Any]) -> tuple[dict[str, Any], bytes]:
    """config.json with what another file says of quantized weights, and the bytes of that."""
    path = folder / QUANTIZATION_FILE
    if not path.exists() or any(config.get(field) for field in QUANTIZATION_FIELDS):
        return config, b""
    raw, whole = read_object(path, "it says how the weights are quantized")
    given = whole.get("quantization")
    if not isinstance(given, dict):
        raise InvalidModel(f"{path}: quantization must be an object, got {given!r:.100}")
    if given.get("quant_algo") is None:
        return config, b""  # the cache alone is quantized
    return {**config, "quantization_config": {"quant_method": "modelopt", **given}}, raw


def read_object(path: Path, cure: str, limit: int = MAX_JSON_BYTES) -> tuple[bytes, dict[str, Any]]:
    """The bytes of a JSON file, at most so many, and the object in it.

    Raises InvalidModel if it is missing, with the cure, or malformed.
    """
    raw = _read(path, cure, limit)
    return raw, _json_object(raw, path)


def check_tokenizer(folder: Path) -> None:
    """Raises InvalidModel if the folder has no tokenizer, or only one that this installation cannot convert."""
    present = [name for name in TOKENIZER_FILES if (folder / name).is_file()]
    if not present:
        raise InvalidModel(f"{folder}: tokenizer is missing; add {' or '.join(TOKENIZER_FILES)} to the model")
    if present == ["tokenizer.model"] and not any(map(find_spec, CONVERTERS)):
        raise InvalidModel(
            f"{folder}: tokenizer.json is missing, and tokenizer.model cannot be converted here: install "
            f"{' or '.join(CONVERTERS)}, or add the tokenizer.json that transformers' "
            "`AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)` writes"
        )


def parse_index(raw: bytes, source: Path) -> dict[str, str]:
    """Tensor name to file name, from the bytes of `model.safetensors.index.json`.

    Raises InvalidModel if it is malformed or empty, or a file name leaves the folder.
    """
    weight_map = _json_object(raw, source).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise InvalidModel(f"{source}: weight_map must be an object that names a file for each tensor")
    for name, file in weight_map.items():
        if not isinstance(file, str) or file != os.path.basename(file) or file in ("", ".", ".."):
            raise InvalidModel(
                f"{source}: weight_map.{name} must be the name of a file in the same folder, got {file!r}"
            )
    return weight_map


def read_header(path: Path, limit: int = MAX_HEADER_BYTES) -> tuple[bytes, list[TensorInfo]]:
    """Header bytes, at most so many, and tensors of one safetensors file, checked against the size of the file.

    Raises InvalidModel with the byte counts if it is missing, truncated or malformed.
    """
    _check_regular(path)
    try:
        with path.open("rb") as file:
            num_file_bytes = os.fstat(file.fileno()).st_size
            prefix = file.read(8)
            num_header_bytes = header_length(prefix, num_file_bytes, path, limit)
            header = file.read(num_header_bytes)
    except OSError as error:
        raise InvalidModel(f"{path}: cannot read the weights: {_cause(error)}") from error
    return header, parse_header(header, num_file_bytes, path)


def header_length(prefix: bytes, num_file_bytes: int, path: Path, limit: int = MAX_HEADER_BYTES) -> int:
    """Bytes of the header, from the first 8 bytes of a file of `num_file_bytes`."""
    if len(prefix) < 8:
        raise InvalidModel(f"{path}: {num_file_bytes} bytes are too few for a safetensors file; download it again")
    length = int.from_bytes(prefix, "little")
    if length > limit:
        raise InvalidModel(
            f"{path}: not a safetensors file: its first 8 bytes declare a header of {length} bytes, "
            f"the limit is {limit}"
        )
    if 8 + length > num_file_bytes:
        raise InvalidModel(
            f"{path}: truncated: the header ends at byte {8 + length}, but the file has {num_file_bytes} bytes; "
            "download it again"
        )
    return length


def parse_header(header: bytes, num_file_bytes: int, path: Path) -> list[TensorInfo]:
    """Tensors of a file from its header; checks every range against dtype, shape and file size."""
    data_begin = 8 + len(header)
    entries = _json_object(header, path).items()
    tensors = [_tensor(name, entry, data_begin, path) for name, entry in entries if name != "__metadata__"]
    position = data_begin
    for tensor in sorted(tensors, key=lambda t: (t.begin, t.end)):
        if tensor.begin != position:
            raise InvalidModel(
                f"{path}: tensor {tensor.name} begins at byte {tensor.begin}, but the previous one ends at {position}"
            )
        position = tensor.end
    if position != num_file_bytes:
        truncated = "truncated: " if position > num_file_bytes else ""
        raise InvalidModel(
            f"{path}: {truncated}its tensors end at byte {position}, but the file has {num_file_bytes} bytes; "
            "download it again"
        )
    return tensors


def _tensor(name: str, entry: object, data_begin: int, path: Path) -> TensorInfo:
    match entry:
        case {"dtype": str(dtype), "shape": list(shape), "data_offsets": [int(begin), int(end)]} if all(
            isinstance(size, int) and size >= 0 for size in shape
        ):
            pass
        case _:
            raise InvalidModel(f"{path}: the header entry of tensor {name} is malformed")
    if len(shape) > MAX_DIMENSIONS:
        # Their product could take minutes, and has too many digits for a message.
        raise InvalidModel(f"{path}: tensor {name} has {len(shape)} dimensions, the limit is {MAX_DIMENSIONS}")
    if dtype not in BY_STORED:
        raise InvalidModel(f"{path}: tensor {name} has unknown dtype {dtype}")
    num_bytes = math.prod(shape) * BY_STORED[dtype].num_bytes
    if end - begin != num_bytes or begin < 0:
        raise InvalidModel(
            f"{path}: tensor {name} of dtype {dtype} and shape {shape} needs {num_bytes} bytes, "
            f"but its data_offsets are [{begin}, {end}]"
        )
    return TensorInfo(
        name=name, dtype=dtype, shape=tuple(shape), file=path.name, begin=data_begin + begin, end=data_begin + end
    )


def check_folder(folder: Path, file: str = CONFIG_FILE) -> None:
    """Raises FatalError if it is none, or this user may not read it.

    file: what such a folder contains.
    """
    try:
        is_folder = folder.is_dir()
        if is_folder:  # Reading is tried: on a network file system the server decides.
            os.listdir(folder)
            (folder / file).exists()
    except PermissionError as error:
        message = f"{folder} cannot be read by user {os.geteuid()}: let it read the folder and what is in it"
        raise InvalidModel(message) from error
    if not is_folder:
        raise FatalError(ExitCode.MODEL_NOT_FOUND, f"{folder} is not a folder; name the folder that contains {file}")


def _read_config(folder: Path) -> bytes:
    check_folder(folder)
    return _read(folder / CONFIG_FILE, "a model folder contains config.json beside its weights")


def _names(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in (*folder.glob("*"), *folder.glob("weights/*"))}


def _check_regular(path: Path) -> None:
    """Opening a pipe or a device could block."""
    if path.exists() and not path.is_file():
        raise InvalidModel(f"{path}: not a regular file")


def _read(path: Path, cure: str, limit: int = MAX_JSON_BYTES) -> bytes:
    _check_regular(path)
    try:
        if (num_bytes := path.stat().st_size) > limit:
            raise InvalidModel(f"{path}: {num_bytes} bytes, the limit is {limit}")
        return path.read_bytes()
    except FileNotFoundError as error:
        raise InvalidModel(f"{path} is missing: {cure}") from error
    except OSError as error:
        raise InvalidModel(f"{path}: cannot be read: {_cause(error)}") from error


def _cause(error: OSError) -> str:
    """With a cure where there is one: the safetensors library writes files that only their owner may read."""
    cure = f"; let user {os.geteuid()} read it (chmod a+r)" if isinstance(error, PermissionError) else ""
    return f"{error.strerror}{cure}"


def _json_object(raw: bytes, source: Path) -> dict[str, Any]:
    try:
        value = msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidModel(f"{source}: malformed JSON: {error}") from error
    if not isinstance(value, dict):
        raise InvalidModel(f"{source}: must be a JSON object, got {type(value).__name__}")
    return value


def check_tensors(
    checkpoint: Checkpoint, shapes: Mapping[str, tuple[int, ...]], quantization: Quantization | None = None
) -> None:
    """Check that the checkpoint has exactly the model's tensors in the right shapes.

    quantization: how it stores weights of linear layers, where it does.
    Raises InvalidModel with missing and unexpected tensors, or the first wrong shape or dtype with its file.
    """
    expected = {
        one.name: one for name, shape in shapes.items() for one in stored_as(checkpoint, name, shape, quantization)
    }
    words = f" (weights are stored as {quantization.in_words()})" if quantization else ""
    missing = [name for name in expected if name not in checkpoint.tensors]
    unexpected = sorted(
        name
        for name in checkpoint.tensors
        if name not in expected
        and not _ignored(name)
        and not (quantization and _unread(checkpoint, name, quantization))
    )
    if missing or unexpected:
        parts = [
            f"{what}: {named(names)}" for what, names in (("missing", missing), ("unexpected", unexpected)) if names
        ]
        raise InvalidModel(
            f"{checkpoint.folder}: the weights do not match config.json; tensors {'; '.join(parts)}{words}"
        )
    for name, (_, shape, dtypes) in expected.items():
        tensor = checkpoint.tensors[name]
        where = f"{checkpoint.folder / tensor.file}: tensor {name}"
        is_scale = quantization is not None and name.endswith(quantization.scale)
        if tensor.shape != shape and not (is_scale and _squeezed(tensor.shape) == _squeezed(shape)):
            raise InvalidModel(f"{where} has shape {list(tensor.shape)}, config.json requires {list(shape)}{words}")
        if tensor.dtype not in dtypes:
            also = f", or {quantization.stored} where quantization_config says so" if quantization else ""
            raise InvalidModel(
                f"{where} has dtype {tensor.dtype}; supported dtypes are {', '.join(dtypes)}{also}{words}"
            )


def _unread(checkpoint: Checkpoint, name: str, quantization: Quantization) -> bool:
    numbers = quantization.weight_name(f"{name.removesuffix('bias')}weight")
    is_spare = quantization.spare_bias and name.endswith(".bias") and numbers in checkpoint.tensors
    return is_spare or UNREAD.search(name) is not None


def stored_as(
    checkpoint: Checkpoint, name: str, shape: tuple[int, ...], quantization: Quantization | None
) -> tuple[StoredTensor, ...]:
    """The tensors that a model's tensor is stored as: a weight and its scale, where it is quantized, else itself."""
    if quantization and len(shape) == 2:
        stored = checkpoint.tensors.get(quantization.weight_name(name))
        if stored is not None and stored.dtype == quantization.stored:
            return quantization.tensors(name, shape)
    return (StoredTensor(name, shape, COMPUTED_STORED),)


def _squeezed(shape: tuple[int, ...]) -> list[int]:
    return [size for size in shape if size != 1]


def check_tied_head(checkpoint: Checkpoint) -> None:
    """A model that ties its embeddings may store the head too, as a copy: backends read the embedding alone.

    Raises InvalidModel if the head has other values.
    """
    embedding, head = (checkpoint.tensors.get(name) for name in ("model.embed_tokens.weight", HEAD))
    if checkpoint.config.get("tie_word_embeddings") is not True or embedding is None or head is None:
        return
    if (embedding.dtype, embedding.shape) == (head.dtype, head.shape):
        with (
            (checkpoint.folder / embedding.file).open("rb") as ours,
            (checkpoint.folder / head.file).open("rb") as other,
        ):
            ours.seek(embedding.begin)
            other.seek(head.begin)
            sizes = [COMPARED_BYTES] * (head.num_bytes // COMPARED_BYTES) + [head.num_bytes % COMPARED_BYTES]
            if all(ours.read(size) == other.read(size) for size in sizes):
                return
    raise InvalidModel(
        f"{checkpoint.folder / head.file}: {HEAD} differs from {embedding.name}, but config.json ties them: set "
        f"tie_word_embeddings to false there, or remove {HEAD}"
    )


def _ignored(name: str) -> bool:
    # Tied checkpoints may contain a copy of the embedding, old ones the rotary frequencies; both are redundant.
    return name == HEAD or name.endswith(".rotary_emb.inv_freq")


def named(names: list[str]) -> str:
    """The first of some names, for an error."""
    shown = ", ".join(names[:MAX_NAMED])
    return f"{shown} and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else shown
