"""What a configuration leaves open and the checkpoint alone decides, the same on every machine.

Called by the loader and the memory arithmetic, and by `graphs.py`, which must not import torch.
"""

from __future__ import annotations

from neuron_runtime.checkpoint import Checkpoint, InvalidModel
from neuron_runtime.config import RuntimeConfig, uses_blocks
from neuron_runtime.dtypes import BY_STORED, COMPUTED_STORED

DEFAULT_BLOCK_SIZE = 16
SHARE_OF_MEMORY = 0.9
"""Share of free memory for weights, scratch and cache; the rest is for other processes."""
EMBEDDINGS = ("model.embed_tokens.weight", "embeddings.word_embeddings.weight")
"""Of decoders and of encoders."""


def dtype_of(config: RuntimeConfig, checkpoint: Checkpoint) -> str:
    """The dtype to compute in; `auto` means the stored one. Raises InvalidModel."""
    return stored_dtype(checkpoint) if config.dtype == "auto" else config.dtype


def stored_dtype(checkpoint: Checkpoint) -> str:
    """The dtype in which the embedding is stored. Raises InvalidModel."""
    name = next((one for one in EMBEDDINGS if one in checkpoint.tensors), EMBEDDINGS[0])
    embedding = checkpoint.tensors.get(name)
    if embedding is None or embedding.dtype not in COMPUTED_STORED:
        stored = "missing" if embedding is None else embedding.dtype
        raise InvalidModel(
            f"{checkpoint.folder}: tensor {name} must have dtype {', '.join(COMPUTED_STORED)}; it is {stored}"
        )
    return BY_STORED[embedding.dtype].name


def block_size_of(config: RuntimeConfig) -> int:
    """Tokens per block; 0 for the slot layout. Raises InvalidConfig if settings contradict each other."""
    return (config.limits.block_size or DEFAULT_BLOCK_SIZE) if uses_blocks(config) else 0
