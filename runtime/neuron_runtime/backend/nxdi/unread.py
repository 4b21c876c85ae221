"""Which of the weights that NxD Inference drops were lost: it also drops what it has copied under another name.

Called by whoever lets it read a checkpoint: `loader`, and `graphs` where the artifact gets the weights.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path

from neuron_runtime.backend.neuron import unread
from neuron_runtime.backend.neuron.unread import HARMLESS
from neuron_runtime.backend.nxdi.models import is_private
from neuron_runtime.backend.nxdi.quantized import named_by_checkpoint
from neuron_runtime.backend.nxdi.settings import Settings
from neuron_runtime.quantization import UNREAD

EMBEDDING = "embed_tokens.weight"
"""Every text reads it, and no encoder does."""
OF_ENCODER = ("vision_", "blocks.", "merger.", "deepstack_merger_list.", "patch_embed.", "pos_embed.")
"""How names of an encoder begin."""
_COPIES = (
    (re.compile(r"\.(q_proj|k_proj|v_proj|Wqkv)\.(?=\w+$)"), r".qkv_proj.\1."),
    (re.compile(r"\.o_proj\.(?=\w+$)"), ".o_proj.o_proj."),
)
"""Where the library copies a weight to, which it drops then."""
_COPIED_BY = {"qwen3": re.compile(r"\.self_attn\.[qk]_norm\.weight$")}
"""What the class of an application copies by itself, and does not delete as others do."""


def all_weights_read(
    model_dir: Path, settings: Settings, draft_dir: Path | None = None
) -> AbstractContextManager[None]:
    """See `neuron.unread`. What an application leaves out that is not of the library is only said."""
    allowed = ["*"] if is_private(settings.application) else settings.unread_weights
    readings = [unread.Reading(model_dir, partial(_lost, application=settings.application))]
    if settings.vision is not None:
        readings = [one._replace(lost=partial(_lost_of_text, lost=one.lost)) for one in readings]
    if settings.draft is not None and draft_dir is not None:
        lost = partial(_lost, application=settings.draft.application)
        readings = [readings[0]._replace(prefix="target_model."), unread.Reading(draft_dir, lost, "draft_model.")]
    return unread.all_weights_read(readings, "NxD Inference", allowed)


def _lost(dropped: Collection[str], *, application: str) -> set[str]:
    harmless = (HARMLESS, UNREAD, _COPIED_BY.get(application, HARMLESS))
    return named_by_checkpoint(
        name for name in dropped if not (any(pattern.search(name) for pattern in harmless) or _is_copied(name, dropped))
    )


def _lost_of_text(dropped: Collection[str], *, lost: unread.Lost) -> set[str]:
    """The same where a second program, of an encoder, drops all of the text, and this one all of the encoder. Whether
    that one reads all of its own is not told by names, which it changes."""
    if any(name.endswith(EMBEDDING) for name in dropped):
        return set()
    return lost([name for name in dropped if not name.startswith(OF_ENCODER)])


def _is_copied(name: str, dropped: Collection[str]) -> bool:
    copies = [pattern.sub(copy, name) for pattern, copy in _COPIES if pattern.search(name)]
    return any(copy not in dropped for copy in copies)
