"""The perplexity of a model on a short text, computed by the torch backend: how much worse a converted one predicts.

Called by `converting`. Memory and time are bounded: a layer is read when it is computed, and of larger models it says
why there is no figure.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from neuron_runtime.backend.torch.architecture import DecoderConfig, decoder_config
from neuron_runtime.backend.torch.cache import KVCache, StepRows
from neuron_runtime.backend.torch.choices import stored_dtype
from neuron_runtime.backend.torch.decoder import Layer
from neuron_runtime.backend.torch.loader import DTYPES, load_decoder
from neuron_runtime.backend.torch.naming import as_named
from neuron_runtime.checkpoint import Checkpoint
from neuron_runtime.console import bytes_text
from neuron_runtime.host import FreeMemory
from neuron_runtime.text.tokenizer import load_tokenizer

MIN_TOKENS, MAX_TOKENS = 16, 256
MAX_PARAMETERS = 20 * 10**9
"""Of larger models the text takes too long on a CPU."""
VOCABULARY_COPIES, LAYER_COPIES, LOGITS_COPIES = 3, 3, 3
"""In memory at once: embedding and head, and one as it is packed; two layers, and one as it is packed; logits, their
logarithms and what is in between."""
MOST = math.log(1e9)
"""Of a token's loss, on average: beyond it a model predicts nothing."""

TEXT = """\
The old lighthouse stood at the end of a long stone pier. Every evening, before the sun went down, the keeper climbed
the stairs, cleaned the glass, and lit the lamp. From the village one could see the beam turn slowly over the water.
Ships that came from the north knew by the light that the harbour was near, and that the rocks were close to the coast.
In winter the sea was rough, and the waves broke over the pier, so that nobody could walk to the door for days. Then
the keeper lived on bread, cheese and tea, and wrote letters to his sister in the city. He told her about the birds
that rested on the railing, about the wind, and about a book that he had read three times. When the first warm days
came, the children ran along the pier with small boats made of wood. "How many steps does the tower have?" they asked.
"One hundred and twelve," he answered, "and I have counted them more often than you have eaten breakfast." Later, the
lamp was replaced by an electric one. A computer turns it on, measures the wind, and sends the numbers to an office two
hundred kilometres away. The keeper is retired now, but on Sundays he still walks to the tower, because someone has to
tell visitors how it was when light was work.
"""


class Unmeasured(Exception):
    """Why there is no perplexity."""


def unmeasured(checkpoint: Checkpoint, free: FreeMemory) -> str:
    """Why the perplexity of a model, given unconverted, is not computed here; "": it is."""
    if checkpoint.num_parameters > MAX_PARAMETERS:
        return f"{checkpoint.num_parameters:,} parameters take too long"
    model = decoder_config(checkpoint.config)
    width = DTYPES[stored_dtype(as_named(checkpoint, model))].itemsize
    needed = memory_of(model, checkpoint.num_parameters, width)
    if needed > free.available:
        return f"it takes {bytes_text(needed)} of memory, {bytes_text(free.available)} are free"
    return ""


def memory_of(model: DecoderConfig, num_parameters: int, dtype_bytes: int) -> int:
    """Bytes that it takes beside torch itself. The operator requests as much, see `render/resources.py` there."""
    vocabulary = model.vocabulary_size * model.hidden_size
    layer = (num_parameters - vocabulary * (1 if model.tied_embeddings else 2)) // model.num_layers
    logits = MAX_TOKENS * model.vocabulary_size * torch.float32.itemsize
    return dtype_bytes * (VOCABULARY_COPIES * vocabulary + LAYER_COPIES * layer) + LOGITS_COPIES * logits


class OneLayer(Sequence[Layer]):
    """The layers of a model, of which the one that was asked for last is in memory."""

    def __init__(self, read: Callable[[int], Layer], count: int) -> None:
        self._read, self._count = read, count
        self._number = -1
        self._layer: Layer | None = None

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, number: Any) -> Any:
        if number >= self._count:
            raise IndexError(number)
        if number != self._number:
            self._layer = None
            self._number, self._layer = number, self._read(number)
        return self._layer


@torch.inference_mode()
def perplexity(checkpoint: Checkpoint, folder: Path) -> float:
    """Of a checked checkpoint, on TEXT. folder: with the tokenizer. Raises Unmeasured, or FatalError without one."""
    model = decoder_config(checkpoint.config)
    checkpoint = as_named(checkpoint, model)
    length = min(MAX_TOKENS, model.max_position_embeddings)
    ids = [one for one in load_tokenizer(folder).encode(TEXT) if one < model.vocabulary_size][:length]
    if len(ids) < MIN_TOKENS:
        raise Unmeasured(f"the text has {len(ids)} tokens of this model")
    dtype = DTYPES[stored_dtype(checkpoint)]
    decoder = load_decoder(checkpoint, model, dtype, lambda stage, share: None, keep=OneLayer)
    cache = KVCache.empty(model.windows, (1, model.num_kv_heads, len(ids), model.head_dim), dtype)
    zero = np.zeros(1, np.int64)
    rows = StepRows(start=zero, num_tokens=zero + len(ids), lines=zero.reshape(1, 1))
    tokens = torch.tensor(ids)
    logits = decoder.logits(decoder.forward(tokens, cache.plan(rows)))
    loss = float(torch.nn.functional.cross_entropy(logits[:-1], tokens[1:]))
    if not 0 <= loss < MOST:
        raise Unmeasured(f"the model predicts nothing: its loss is {loss:.3g} per token")
    return math.exp(loss)
