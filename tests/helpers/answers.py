"""What programs of other makers print for an input, kept in the cache: one that takes seconds to start, and that prints
the same for the same input, runs only when its release or its input has changed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from cluster.rig.cache import Cache, content_key


def answer(name: str, ask: Callable[[], str], *asked: str | Path) -> str:
    """What `ask` returns; `asked` is all that it depends on. An exception of `ask` is raised and nothing is kept."""

    def build(folder: Path) -> None:
        (folder / "answer").write_text(ask(), encoding="utf-8")

    entry = Cache.default().entry("answers", name, content_key(*asked), build)
    return (entry / "answer").read_text(encoding="utf-8")
