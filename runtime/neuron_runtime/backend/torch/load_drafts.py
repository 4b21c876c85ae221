"""Finds, checks and reads what makes drafts on the device: a second model, or an EAGLE head.

Called by the loader: before memory is shared out, and on the device thread once the model is there. Each rank has all
of it: it is small, and so no more than the drafts is exchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch

from neuron_runtime.backend.torch import eagle_head
from neuron_runtime.backend.torch.architecture import DecoderConfig, decoder_config, tensor_shapes
from neuron_runtime.backend.torch.cache import KVCache
from neuron_runtime.backend.torch.decoder import Decoder, read_weights
from neuron_runtime.backend.torch.draft_model import Network, SecondModel
from neuron_runtime.backend.torch.eagle import URI, head_shapes, read_eagle
from neuron_runtime.backend.torch.eagle_head import EagleHead
from neuron_runtime.backend.torch.naming import as_named
from neuron_runtime.backend.torch.sizing import DraftNeeds, needs_of_head, needs_of_model
from neuron_runtime.backend.torch.weights import WeightReader
from neuron_runtime.backend_protocol import ProgressCallback
from neuron_runtime.checkpoint import Checkpoint, check_tensors, check_tied_head, read_whole_checkpoint
from neuron_runtime.config import Speculation
from neuron_runtime.core import BackendLimits
from neuron_runtime.errors import InvalidConfig
from neuron_runtime.quantization import Quantization
from neuron_runtime.uris import FolderModel, parse_uri

Load = Callable[[Decoder, BackendLimits, WeightReader], Network]
"""With this rank's part of the model."""


class FoundDrafts(NamedTuple):
    checkpoint: Checkpoint
    shapes: Mapping[str, tuple[int, ...]]
    quantization: Quantization | None
    needs: DraftNeeds
    load: Load

    def read(self, model: Decoder, limits: BackendLimits, dtype: torch.dtype, progress: ProgressCallback) -> Network:
        def report(stage: str, share: float) -> None:
            progress(f"{stage} of the draft model", share)

        with torch.inference_mode():
            return self.load(
                model,
                limits,
                WeightReader(self.checkpoint, self.shapes, dtype, report, {}, quantization=self.quantization),
            )


def find_drafts(speculation: Speculation, model: DecoderConfig) -> FoundDrafts | None:
    """What the configuration names, which is on this machine; None if drafts need no second checkpoint.

    Raises FatalError if it is wrong, and InvalidConfig if it is for another model.
    """
    if not speculation.model.uri:
        return None
    found = parse_uri(speculation.model.uri)
    if not isinstance(found, FolderModel):
        raise ValueError(f"{speculation.model.uri} is not on this machine")
    return _FINDERS[speculation.method](read_whole_checkpoint(found.folder), model)


def _second_model(checkpoint: Checkpoint, model: DecoderConfig) -> FoundDrafts:
    draft = decoder_config(checkpoint.config)
    checkpoint = as_named(checkpoint, draft)
    shapes = tensor_shapes(draft)
    check_tensors(checkpoint, shapes, draft.quantization)
    check_tied_head(checkpoint)
    if draft.vocabulary_size != model.vocabulary_size:
        message = f"it has {draft.vocabulary_size} tokens, and the model {model.vocabulary_size}: they must be the same"
        raise InvalidConfig(URI, message)

    def load(model: Decoder, limits: BackendLimits, reader: WeightReader) -> Network:
        decoder = Decoder(draft, read_weights(draft, reader))
        shape = (limits.num_blocks, draft.num_kv_heads, limits.block_size, draft.head_dim)
        return SecondModel(decoder, KVCache.empty(draft.windows, shape, decoder.weights.embedding.dtype))

    return FoundDrafts(checkpoint, shapes, draft.quantization, needs_of_model(draft), load)


def _eagle_head(checkpoint: Checkpoint, model: DecoderConfig) -> FoundDrafts:
    eagle, checkpoint = read_eagle(checkpoint, model)
    shapes = head_shapes(eagle, model)
    needs = needs_of_head(shapes.values(), eagle.elements_per_token)

    def load(model: Decoder, limits: BackendLimits, reader: WeightReader) -> Network:
        weights = eagle_head.read_weights(eagle, checkpoint, reader, model)
        return EagleHead(eagle, weights, model, limits.num_blocks, limits.block_size)

    return FoundDrafts(checkpoint, shapes, None, needs, load)


_FINDERS = {"Draft": _second_model, "Eagle": _eagle_head}
"""By method."""
