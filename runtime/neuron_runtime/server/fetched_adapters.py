"""The adapters that a server has fetched into its store, so that this does not only grow.

The front end adds what it brings, and has removed what nothing needs any more. What somebody else has put into the
store stays, because others may serve it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from neuron_runtime.console import say
from neuron_runtime.errors import FatalError
from neuron_runtime.weights.store import Store

UNUSED_SECONDS = 3600.0
"""So long a version stays that nobody has used: it may be listed again."""


class FetchedAdapters:
    def __init__(self, folder: Path) -> None:
        self._store = Store(folder)
        self._keys: set[str] = set()

    @contextmanager
    def noting(self) -> Iterator[None]:
        """What appears in the store within the body was fetched, also if it is refused then. Other threads may do the
        same meanwhile."""
        before = self._present()
        try:
            yield
        finally:
            self._keys |= self._present() - before

    def prune(self, in_use: Iterable[Path]) -> None:
        """Delete what was fetched and is in none of these folders, nor was for a while. Never raises."""
        if not self._keys:
            return
        keep = [folder.name for folder in in_use if folder.parent == self._store.folder]
        try:
            for gone in self._store.prune(keep, UNUSED_SECONDS, dry_run=False, among=self._keys):
                say(f"{self._store.folder / gone.name}: deleted, because it is not used any more")
                self._keys.discard(gone.name)
        except (FatalError, OSError) as error:
            say(f"unused adapters stay: {error}")

    def _present(self) -> set[str]:
        try:
            return {name for name in os.listdir(self._store.folder) if name.endswith("-adapter")}
        except OSError:
            return set()
