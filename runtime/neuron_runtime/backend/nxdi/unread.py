"""Weights of a checkpoint that no module reads: NxD Inference drops them with a warning, and computes without them.

Called by whoever lets it read a checkpoint: `loader`, and `graphs` where the artifact gets the weights. The warning
comes each time, since the library also drops what it has copied under another name.
"""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from neuron_runtime.backend.nxdi.models import is_private
from neuron_runtime.backend.nxdi.settings import Settings
from neuron_runtime.checkpoint import HEAD, InvalidModel, named, read_checkpoint
from neuron_runtime.console import say

WARNING = "Removing redundant keys from checkpoint: "

_COPIES = (
    (re.compile(r"\.(q_proj|k_proj|v_proj|Wqkv)\.(?=\w+$)"), r".qkv_proj.\1."),
    (re.compile(r"\.o_proj\.(?=\w+$)"), ".o_proj.o_proj."),
)
"""Where the library copies a weight to, which it drops then."""
_HARMLESS = re.compile(
    rf"(^|\.)(rotary_emb\.inv_freq|{re.escape(HEAD)})$|(^|\.)(vision_tower|vision_model|multi_modal_projector)\."
)
"""Buffers that follow from config.json, a tied head (`check_tied_head` compares it), and what text does not need."""


_COPIED_BY = {"qwen3": re.compile(r"\.self_attn\.[qk]_norm\.weight$")}
"""What the class of an application copies by itself, and does not delete as others do."""


def unread(dropped: Collection[str], checkpoint: Collection[str], application: str) -> list[str]:
    """The tensors of a checkpoint that were lost.

    dropped: names that the library gives them, which end as those of the checkpoint do, and names of its own.
    """
    copied, lost = _COPIED_BY.get(application, _HARMLESS), set()
    for name in dropped:
        if not (_HARMLESS.search(name) or copied.search(name) or _is_copied(name, dropped)):
            lost.add(name)
    return [name for name in sorted(checkpoint) if any(_ends(name, lost))]


def _is_copied(name: str, dropped: Collection[str]) -> bool:
    copies = [pattern.sub(copy, name) for pattern, copy in _COPIES if pattern.search(name)]
    return any(copy not in dropped for copy in copies)


def _ends(name: str, lost: Collection[str]) -> Iterator[bool]:
    """Whether a name, without any number of its first parts, is among the lost ones."""
    while name:
        yield name in lost
        name = name.partition(".")[2]


@contextmanager
def all_weights_read(model_dir: Path, settings: Settings) -> Iterator[None]:
    """Within it, reading a checkpoint whose weights the library drops is an error. What the settings allow to be left
    out, and what an application leaves out that is not of the library, is only said.

    Raises:
        InvalidModel: names the tensors.
    """

    def show(message: Warning | str, *where: Any, **others: Any) -> None:
        text = str(message)
        if not text.startswith(WARNING):
            shown(message, *where, **others)
            return
        dropped, tensors = set(ast.literal_eval(text.removeprefix(WARNING))), read_checkpoint(model_dir).tensors
        lost = unread(dropped, tensors, settings.application)
        allowed = ["*"] if is_private(settings.application) else settings.unread_weights
        if missed := [name for name in lost if not any(fnmatchcase(name, one) for one in allowed)]:
            raise InvalidModel(
                f"{model_dir}: NxD Inference does not read the tensors {named(missed)}, so its tokens would be wrong: "
                "remove them if the model was made without them; or name them in overrideNeuronConfig.unread_weights "
                "if its tokens are right all the same"
            )
        if lost:
            say(f"warning: the application class does not read {named(lost)}")

    with warnings.catch_warnings():
        warnings.filterwarnings("always", re.escape(WARNING))
        shown, warnings.showwarning = warnings.showwarning, show
        yield
