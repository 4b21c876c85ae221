"""Weights of a checkpoint that no module reads: NeuronxDistributed, below several libraries, drops them with a warning,
and the library computes without them.

Called by the backends of these libraries where they let one read a checkpoint. Which of the dropped names are lost is
theirs to say.
"""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

from neuron_runtime.checkpoint import HEAD, InvalidModel, named, read_checkpoint
from neuron_runtime.console import say
from neuron_runtime.errors import InvalidConfig

UNREAD = "unread_weights"
"""A key of `overrideNeuronConfig` that no library gets: names of tensors, with wildcards, that may stay unread."""
WARNING = "Removing redundant keys from checkpoint: "
HARMLESS = re.compile(
    rf"(^|\.)(rotary_emb\.inv_freq|{re.escape(HEAD)})$|(^|\.)(vision_tower|vision_model|multi_modal_projector)\."
)
"""Buffers that follow from config.json, a tied head (`check_tied_head` compares it), and what text does not need."""

Lost = Callable[[Collection[str]], set[str]]
"""From all names that were dropped, in the library's words, to those that were not read."""


def read_unread(value: Any, at: str) -> tuple[str, ...]:
    """The value of `UNREAD`. Raises InvalidConfig."""
    if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
        raise InvalidConfig(at, f"must be a list of names of tensors, got {value!r}")
    return tuple(value)


def tensors_of(lost: Collection[str], checkpoint: Collection[str]) -> list[str]:
    """The tensors of a checkpoint that are among the lost names, which end as theirs do."""
    return [name for name in sorted(checkpoint) if any(_ends(name, lost))]


def _ends(name: str, lost: Collection[str]) -> Iterator[bool]:
    """Whether a name, without any number of its first parts, is among the lost ones."""
    while name:
        yield name in lost
        name = name.partition(".")[2]


class Reading(NamedTuple):
    """A checkpoint that a library reads."""

    folder: Path
    lost: Lost
    prefix: str = ""
    """What the library puts before its names, where it reads several."""


@contextmanager
def all_weights_read(readings: Sequence[Reading], library: str, allowed: Sequence[str]) -> Iterator[None]:
    """Within it, reading a checkpoint whose weights the library drops is an error. What is allowed is only said.

    Raises:
        InvalidModel: names the tensors.
    """

    def show(message: Warning | str, *where: Any, **others: Any) -> None:
        text = str(message)
        if not text.startswith(WARNING):
            shown(message, *where, **others)
            return
        dropped = set(ast.literal_eval(text.removeprefix(WARNING)))
        for folder, lost, prefix in readings:
            check(folder, lost({name.removeprefix(prefix) for name in dropped if name.startswith(prefix)}))

    def check(folder: Path, lost: Collection[str]) -> None:
        unread = tensors_of(lost, read_checkpoint(folder).tensors)
        if missed := [name for name in unread if not any(fnmatchcase(name, one) for one in allowed)]:
            raise InvalidModel(
                f"{folder}: {library} does not read the tensors {named(missed)}, so its tokens would be wrong: "
                f"remove them if the model was made without them; or name them in overrideNeuronConfig.{UNREAD} "
                "if its tokens are right all the same"
            )
        if unread:
            say(f"warning: the application class does not read {named(unread)}")

    with warnings.catch_warnings():
        warnings.filterwarnings("always", re.escape(WARNING))
        shown, warnings.showwarning = warnings.showwarning, show
        yield
