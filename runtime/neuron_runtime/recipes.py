"""How a model's hidden states become a vector, and how its texts are prepared: what the files of sentence-transformers
say beside a model's configuration.

Read by the backend that computes vectors, by the front end and by `inspect`. It needs no torch and reads no weights.
Without such files a model is read as sentence-transformers reads it: the mean of all tokens.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

import msgspec

from neuron_runtime.checkpoint import InvalidModel, read_object
from neuron_runtime.errors import ExitCode, FatalError

MODULES_FILE = "modules.json"
PROMPTS_FILE = "config_sentence_transformers.json"
LENGTH_FILES = tuple(f"sentence_{kind}_config.json" for kind in ("bert", "roberta", "xlm-roberta", "xlnet"))
WEIGHTS_FILE = "model.safetensors"
MAX_MODULES = 16
MAX_SIZE = 2**16
"""Numbers in a vector."""
NAMES = frozenset({MODULES_FILE, PROMPTS_FILE, *LENGTH_FILES})
MODULE_FOLDER = re.compile(r"\d{1,3}_\w{1,64}", re.ASCII)
"""Names of the folders of modules."""
UNLIMITED = 10**9
"""Tokenizers without a limit have larger ones."""

Pooling = Literal["cls", "lasttoken", "mean", "mean_sqrt_len_tokens", "max"]
POOLING: tuple[Pooling, ...] = get_args(Pooling)
OLDER_POOLING = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
Activation = Literal["Identity", "Tanh", "Sigmoid", "ReLU", "GELU"]
ACTIVATIONS: tuple[Activation, ...] = get_args(Activation)
Similarity = Literal["cosine", "dot", "euclidean", "manhattan"]
SIMILARITIES: tuple[Similarity, ...] = get_args(Similarity)


@dataclass(frozen=True, slots=True)
class Dense:
    """A layer behind the pooling; its weights are in the folder of the module."""

    folder: str
    inputs: int
    outputs: int
    has_bias: bool
    activation: Activation


class Normalise:
    """Divides a vector by its length."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """pooling: what the tokens' hidden states become, one behind the other. stages: what follows, in order."""

    pooling: tuple[Pooling, ...] = ("mean",)
    stages: tuple[Dense | type[Normalise], ...] = ()
    activation: Activation = "Sigmoid"
    """Of the score of a pair."""
    prompts: Mapping[str, str] = field(default_factory=dict)
    """What is written before a text, by the name that clients have for it."""
    default_prompt: str = ""
    """Before texts for which a client names none."""
    similarity: Similarity = "cosine"
    max_tokens: int = 0
    """The longest text that the model was made for; 0: the files do not say."""
    lowers: bool = False
    """Texts are written in small letters first."""
    sizes: tuple[int, ...] = ()
    """Sizes to which a vector may be cut; empty with `may_cut`: all."""
    may_cut: bool = False

    @property
    def normalises(self) -> bool:
        return Normalise in self.stages

    def size(self, hidden_size: int) -> int:
        """Numbers in a vector of a model with this many numbers per token."""
        return next((one.outputs for one in self.stages[::-1] if isinstance(one, Dense)), self.pooled(hidden_size))

    def pooled(self, hidden_size: int) -> int:
        return hidden_size * len(self.pooling)


def is_part(name: str) -> bool:
    """Whether a file of a model belongs to its recipe."""
    folder, _, file = name.partition("/")
    return name in NAMES or (bool(MODULE_FOLDER.fullmatch(folder)) and file in ("config.json", WEIGHTS_FILE))


def is_vector_model(folder: Path) -> bool:
    """Whether the files of sentence-transformers are beside the model."""
    return (folder / MODULES_FILE).is_file()


def read_recipe(folder: Path, config: Mapping[str, Any]) -> Recipe:
    """config: the model's config.json.

    Raises:
        InvalidModel: a file is malformed.
        FatalError: UNSUPPORTED_ARCHITECTURE for what is not computed here; names the file.
    """
    told = _told(folder / PROMPTS_FILE)
    pooling, stages = _modules(folder) if is_vector_model(folder) else (("mean",), ())
    sizes = config.get("matryoshka_dimensions") or []
    if not isinstance(sizes, list) or not all(isinstance(size, int) and 0 < size <= MAX_SIZE for size in sizes):
        raise InvalidModel(f"{folder / 'config.json'}: matryoshka_dimensions must be a list of sizes, got {sizes!r}")
    prompts = told.get("prompts") or {}
    if not isinstance(prompts, Mapping) or not all(isinstance(one, str) for pair in prompts.items() for one in pair):
        raise InvalidModel(f"{folder / PROMPTS_FILE}: prompts must be an object of texts")
    default = told.get("default_prompt_name")
    if default is not None and default not in prompts:
        raise InvalidModel(f"{folder / PROMPTS_FILE}: default_prompt_name {default!r} is none of the prompts")
    similarity = told.get("similarity_fn_name") or "cosine"
    if similarity not in SIMILARITIES:
        raise _unsupported(folder / PROMPTS_FILE, f"similarity_fn_name {similarity!r}", SIMILARITIES)
    lengths = [_told(folder / name) for name in LENGTH_FILES]
    limits = [one.get("max_seq_length") for one in lengths]
    limits.append(_told(folder / "tokenizer_config.json").get("model_max_length"))
    return Recipe(
        pooling=pooling,
        stages=stages,
        activation=_of_scores(folder, config),
        prompts=prompts,
        default_prompt="" if default is None else prompts[default],
        similarity=similarity,
        max_tokens=min((one for one in limits if isinstance(one, int) and 0 < one < UNLIMITED), default=0),
        lowers=any(one.get("do_lower_case") is True for one in lengths),
        sizes=tuple(sizes),
        may_cut=bool(sizes) or config.get("is_matryoshka") is True,
    )


def _modules(folder: Path) -> tuple[tuple[Pooling, ...], tuple[Dense | type[Normalise], ...]]:
    path = folder / MODULES_FILE
    try:
        modules = msgspec.json.decode(path.read_bytes())
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, OSError) as error:
        raise InvalidModel(f"{path} cannot be read: {error}") from error
    if not isinstance(modules, list) or not 2 <= len(modules) <= MAX_MODULES:
        raise InvalidModel(
            f"{path}: must be a list of 2 to {MAX_MODULES} modules, the first ones a model and its pooling"
        )
    kinds = [_kind(path, one) for one in modules]
    if [kind for kind, _ in kinds[:2]] != ["Transformer", "Pooling"] or kinds[0][1]:
        names = " and ".join(kind for kind, _ in kinds[:2])
        raise _unsupported(
            path, f"modules that begin with {names}", ("Transformer, in the model's own folder, and Pooling",)
        )
    stages: list[Dense | type[Normalise]] = []
    for kind, place in kinds[2:]:
        if kind == "Normalize":
            stages.append(Normalise)
        elif kind == "Dense":
            stages.append(_dense(folder, place))
        elif kind != "Dropout":  # which does nothing but in a training
            raise _unsupported(path, f"the module {kind}", ("Transformer", "Pooling", "Dense", "Normalize"))
    return _pooling(folder, kinds[1][1]), tuple(stages)


def _kind(path: Path, module: Any) -> tuple[str, str]:
    match module:
        case {"type": str(kind), "path": str(place)}:
            pass
        case _:
            raise InvalidModel(f"{path}: each module must have a type and a path")
    if place and not MODULE_FOLDER.fullmatch(place):
        raise InvalidModel(f"{path}: {place!r} is not the folder of a module, such as 1_Pooling")
    return kind.rpartition(".")[2], place


def _pooling(folder: Path, place: str) -> tuple[Pooling, ...]:
    path = folder / place / "config.json"
    told = _told(path)
    given = told.get("pooling_mode") or [mode for key, mode in OLDER_POOLING.items() if told.get(key) is True]
    modes = [given] if isinstance(given, str) else given or ["mean"]
    if not isinstance(modes, list):
        raise InvalidModel(f"{path}: pooling_mode must be a name or a list of names, got {given!r}")
    for mode in modes:
        if mode not in POOLING:
            raise _unsupported(path, f"the pooling {mode!r}", POOLING)
    if told.get("include_prompt") is False:
        raise _unsupported(path, "include_prompt false", ("true",))
    return tuple(modes)


def _dense(folder: Path, place: str) -> Dense:
    path = folder / place / "config.json"
    told = _told(path)
    inputs, outputs = (told.get(name) for name in ("in_features", "out_features"))
    if not (isinstance(inputs, int) and isinstance(outputs, int) and 0 < min(inputs, outputs) <= MAX_SIZE):
        raise InvalidModel(f"{path}: in_features and out_features must be sizes, got {inputs!r} and {outputs!r}")
    if told.get("use_residual"):
        raise _unsupported(path, "use_residual true", ("false",))
    for name in ("module_input_name", "module_output_name"):
        if told.get(name) not in (None, "sentence_embedding"):
            raise _unsupported(path, f"{name} {told[name]!r}", ("sentence_embedding",))
    return Dense(
        place, inputs, outputs, told.get("bias") is not False, _activation(path, told.get("activation_function"))
    )


def _of_scores(folder: Path, config: Mapping[str, Any]) -> Activation:
    newer = config.get("sentence_transformers")
    given = newer.get("activation_fn") if isinstance(newer, Mapping) else None
    return _activation(folder / "config.json", given or config.get("sbert_ce_default_activation_function"), "Sigmoid")


def _activation(path: Path, given: Any, default: Activation = "Tanh") -> Activation:
    name = default if given is None else str(given).rpartition(".")[2]
    for one in ACTIVATIONS:
        if name == one:
            return one
    raise _unsupported(path, f"the activation {given!r}", ACTIVATIONS)


def _told(path: Path) -> Mapping[str, Any]:
    """Empty for a file that is not there."""
    return read_object(path, "")[1] if path.is_file() else {}


def _unsupported(path: Path, what: str, supported: tuple[str, ...]) -> FatalError:
    return FatalError(
        ExitCode.UNSUPPORTED_ARCHITECTURE, f"{path}: {what} is not supported; supported: {', '.join(supported)}"
    )
