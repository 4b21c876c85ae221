"""Which files of a listing make a model or an adapter: small ones by name, and the weights that its index names. Pure.

Called by whoever copies files from a source. Names from outside are checked here, before anything touches the disk.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase

from neuron_runtime import recipes
from neuron_runtime.adapters.peft import CONFIG_FILE, TEXT_FILES
from neuron_runtime.adapters.peft import WEIGHTS_FILE as ADAPTER_WEIGHTS_FILE
from neuron_runtime.checkpoint import (
    GRAPHS_CONFIG_FILE,
    GRAPHS_FILE,
    INDEX_FILE,
    QUANTIZATION_FILE,
    TEMPLATES_FOLDER,
    WEIGHTS_FILE,
    is_shard,
    shard_files,
)

SMALL_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.json",
    "*.jinja",
    INDEX_FILE,
    GRAPHS_CONFIG_FILE,
    QUANTIZATION_FILE,
)
"""Files of a model besides its weights, as patterns of names in the root of a repository or prefix."""

OUTLINED = ("config.json", "tokenizer_config.json", INDEX_FILE, GRAPHS_CONFIG_FILE, QUANTIZATION_FILE)

WEIGHTS_SUFFIX = ".safetensors"
MAX_NAME_BYTES = 255


def is_plain(name: str) -> bool:
    """Whether this is the name of a visible file in the root: no path, nothing that a file system cannot store."""
    return (
        name == os.path.basename(name)
        and not name.startswith(".")
        and name.isprintable()
        and 0 < len(os.fsencode(name)) <= MAX_NAME_BYTES
    )


def is_small_folder(name: str) -> bool:
    """Whether a folder may have small files of a model."""
    return name == TEMPLATES_FOLDER or recipes.MODULE_FOLDER.fullmatch(name) is not None


def is_small(name: str) -> bool:
    folder, _, template = name.partition("/")
    if folder == TEMPLATES_FOLDER:
        return is_plain(template) and template.endswith(".jinja")
    return (is_plain(name) and any(fnmatchcase(name, pattern) for pattern in SMALL_FILES)) or recipes.is_part(name)


def is_weights(name: str) -> bool:
    return is_plain(name) and name.endswith(WEIGHTS_SUFFIX)


def is_part(name: str) -> bool:
    """Whether a model may need the file."""
    return is_small(name) or is_weights(name) or name == GRAPHS_FILE or is_shard(name)


def was_part(name: str) -> bool:
    """As `is_part`, for versions of this program that read neither of these files."""
    return is_part(name) and name != QUANTIZATION_FILE and not recipes.is_part(name)


def is_outlined(name: str) -> bool:
    """Whether the facts about a model are in the file, beside the headers of its weights."""
    return name in OUTLINED or recipes.is_part(name)


def is_adapter_part(name: str) -> bool:
    """Whether an adapter needs the file. Its folder may have a vocabulary, states of the training and more."""
    return is_small_adapter_part(name) or name == ADAPTER_WEIGHTS_FILE


def is_small_adapter_part(name: str) -> bool:
    return name == CONFIG_FILE or name in TEXT_FILES


def graph_files(names: Iterable[str]) -> list[str]:
    """Compiled graphs that lie beside the weights."""
    return [GRAPHS_FILE] if {GRAPHS_FILE, GRAPHS_CONFIG_FILE} <= set(names) else []


def weight_files(names: Iterable[str], weight_map: Mapping[str, str]) -> list[str]:
    """The weights of the model, by the same rule as `read_checkpoint`; empty if there are none. Those of compiled
    graphs are taken only if there are no others.

    weight_map: tensor to file, from the index; empty without an index.
    """
    names = set(names)
    listed = set(filter(is_weights, names))
    if WEIGHTS_FILE in listed:
        return [WEIGHTS_FILE]
    return sorted(listed & set(weight_map.values())) if weight_map else shard_files(names)
