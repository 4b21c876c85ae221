"""The second model in graphs that make their own drafts: where it lies, and what an application with it answers.

Called by whoever derives settings, compiles or loads. It computes nothing: NxD Inference has both models in each graph.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from neuron_runtime.backend.nxdi.settings import DraftFiles
from neuron_runtime.checkpoint import read_checkpoint, read_config
from neuron_runtime.config import RuntimeConfig
from neuron_runtime.core import NO_TOKEN
from neuron_runtime.errors import InvalidConfig
from neuron_runtime.uris import FolderModel, parse_uri


def draft_folder(config: RuntimeConfig) -> Path | None:
    """The folder of the draft model; None if the configuration has none. Raises InvalidConfig if it is elsewhere."""
    uri = config.speculation.model.uri
    if not uri:
        return None
    found = parse_uri(uri, "$.speculation.model.uri")
    if not isinstance(found, FolderModel):
        message = f"{uri} is not on this machine: fetch it, and name its folder"
        raise InvalidConfig("$.speculation.model.uri", message)
    return found.folder


def draft_files(config: RuntimeConfig) -> DraftFiles | None:
    """What is known of it. Raises InvalidConfig as `draft_folder`, and InvalidModel."""
    folder = draft_folder(config)
    if folder is None:
        return None
    tensors = read_checkpoint(folder).tensors if config.speculation.method == "Eagle" else {}
    shapes = {name.removeprefix("model."): tuple(one.shape) for name, one in tensors.items()}
    return DraftFiles(config=read_config(folder), shapes=shapes)


def accepting(application: Callable[..., Any]) -> Callable[..., Any]:
    """An application that makes drafts, with `tokens` as `neuron.device.Application` has them."""

    import torch  # noqa: PLC0415 - takes seconds, which `inspect` does not have

    def call(**arguments: Any) -> Any:
        accepted, _, _, following = application(**arguments).fused_outputs
        positions = arguments["position_ids"]
        # A prompt has one. What fills the places behind them differs between releases, and may be a token.
        count = following - positions if positions.shape[1] == 1 else 1
        place = torch.arange(accepted.shape[1])
        return SimpleNamespace(tokens=torch.where(place < count, accepted.long(), NO_TOKEN), logits=None)

    return call
