"""Models for benchmarks: random weights of a given shape and a tokenizer in which every id is text, cached on disk.

Called by the suite for models of the form `random:SHAPE`, so that benchmarks need no download. The output
is noise, but the cost is that of a trained model of the same shape. A folder is named by the hash of its inputs and
created atomically.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import string
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from neuron_runtime.arguments import default_weights_dir
from neuron_runtime.errors import InvalidConfig
from neuron_runtime.flags import model_uri

PREFIX = "random:"

SHAPES: dict[str, dict[str, Any]] = {
    "139M": {
        "hidden_size": 768,
        "num_layers": 12,
        "num_heads": 12,
        "num_kv_heads": 4,
        "intermediate_size": 2560,
        "vocabulary_size": 32_000,
        "max_position_embeddings": 4096,
        "dtype": "bfloat16",
    },
    "4M": {
        "hidden_size": 192,
        "num_layers": 8,
        "num_heads": 6,
        "num_kv_heads": 2,
        "intermediate_size": 512,
        "vocabulary_size": 4096,
        "max_position_embeddings": 4096,
        "dtype": "float32",
        "tie_word_embeddings": True,
    },
}
"""Arguments of `random_model.model_config` by name."""

RECIPE = 1
"""Increase it when the files written for a shape change."""

CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }} {% endfor %}"


def model_folder_or_uri(model: str, cache_dir: Path | None = None) -> str:
    """The MODEL argument of `serve` for the model of a benchmark; creates random models if needed.

    Raises:
        InvalidConfig: the shape is unknown.
    """
    if not model.startswith(PREFIX):
        return model_uri(model)
    name = model.removeprefix(PREFIX)
    if name not in SHAPES:
        raise InvalidConfig("MODEL", f"must be one of {', '.join(PREFIX + one for one in SHAPES)}; got {model}")
    return random_model(name, cache_dir).as_uri()


def random_model(shape: str, cache_dir: Path | None = None) -> Path:
    """The folder of the random model of a shape, written on first use.

    cache_dir: parent of such folders; None: next to the downloaded weights.
    """
    from helpers.random_model import model_config, write_random_model

    config = model_config(**SHAPES[shape])
    made_from = json.dumps([RECIPE, CHAT_TEMPLATE, config], sort_keys=True).encode()
    parent = default_weights_dir().parent / "random-models" if cache_dir is None else cache_dir
    folder = parent / f"{shape}-{hashlib.sha256(made_from).hexdigest()[:16]}"
    if folder.is_dir():
        return folder
    parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=parent) as made:
        with ThreadPoolExecutor(1) as thread:
            # OpenMP workers exit with this thread; see `device_thread` of the torch backend.
            thread.submit(write_random_model, Path(made, "model"), config).result()
        _write_tokenizer(Path(made, "model"), config["vocab_size"])
        try:
            Path(made, "model").rename(folder)
        except OSError:
            if not folder.is_dir():
                raise
    return folder


def _write_tokenizer(folder: Path, size: int) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    vocabulary, merges = byte_level_vocabulary(size)
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": CHAT_TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")


def byte_level_vocabulary(size: int) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Bytes, then two and three letters with and without a leading space: `size` entries and their merges."""
    from tokenizers import pre_tokenizers

    letters = string.ascii_lowercase
    space = pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str(" ")[0][0]
    pairs = [(a, b) for a in (space, *letters) for b in letters]
    longer = [(a + b, c) for (a, b), c in itertools.product(pairs, letters)]
    longest = [(a + b, c) for (a, b), c in itertools.product(longer, letters)]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = (pairs + longer + longest)[: size - len(alphabet)]
    tokens = alphabet + [a + b for a, b in merges]
    if len(tokens) != size:
        raise ValueError(f"the vocabulary size must be from {len(alphabet)} to {len(tokens)}, got {size}")
    return {token: number for number, token in enumerate(tokens)}, merges
