"""Adapters in the engine: which place each has on the device (`Places`), and which are in memory (`LoadedAdapters`).

The scheduler asks `Places` who may start, the engine's loop `LoadedAdapters` whether an adapter is there. Both know
adapters by their digests alone; neither reads files nor touches the device, which the backend does.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any

from neuron_runtime.backend_protocol import AdapterBackend
from neuron_runtime.engine.sequence import Sequence
from neuron_runtime.errors import AdapterNotReady, InvalidRequest
from neuron_runtime.reading_threads import ReadingThreads


class Places:
    """The places 1 to `num_places` of the device, each with an adapter or none; 0 stands for the base model.

    A place without users keeps its adapter until another one needs it: the one that was left longest ago goes first.
    """

    def __init__(self, num_places: int) -> None:
        self.changes: list[tuple[int, str]] = []
        """(place, digest) of the next batch."""
        self._digest = [""] * (num_places + 1)
        self._place_of: dict[str, int] = {}
        self._num_users = [0] * (num_places + 1)
        self._idle: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, num_places + 1))
        """Places without users, the one that was left longest ago first."""

    @property
    def exist(self) -> bool:
        return len(self._digest) > 1

    @property
    def in_use(self) -> list[str]:
        """The adapters of sequences that have a slot."""
        return [digest for digest, place in self._place_of.items() if self._num_users[place]]

    def startable(self, waiting: Iterable[Sequence], most: int) -> list[Sequence]:
        """The first sequences, at most so many, for whose adapters there are places; sets the place of each.

        A sequence whose adapter has no place is passed by later ones. So that it does not wait for ever, it claims the
        place with the fewest users, whose adapter no later sequence may start with: the place gets free.
        """
        claimed: dict[int, str] = {}
        found: list[Sequence] = []
        for sequence in waiting:
            if len(found) == most:
                break
            digest = sequence.request.adapter
            place = self._place_for(digest, claimed) if digest else 0
            if digest and claimed.setdefault(place, digest) != digest:
                continue
            if digest and self._digest[place] != digest and self._num_users[place]:
                continue
            sequence.place = place
            found.append(sequence)
        return found

    def take(self, sequence: Sequence) -> None:
        """The sequence gets a slot, with the place that `startable` has set."""
        place, digest = sequence.place, sequence.request.adapter
        if not place:
            return
        if self._digest[place] != digest:
            assert not self._num_users[place]
            self.vacate(self._digest[place])
            self._digest[place], self._place_of[digest] = digest, place
            self.changes.append((place, digest))
        self._num_users[place] += 1
        self._idle.pop(place, None)

    def give_back(self, sequence: Sequence) -> None:
        """No step has a row of the sequence any more."""
        place, sequence.place = sequence.place, 0
        if place:
            self._num_users[place] -= 1
            if not self._num_users[place]:
                self._idle[place] = None

    def vacate(self, digest: str) -> bool:
        """Nobody may start with what the place has; False if a sequence uses it."""
        place = self._place_of.get(digest)
        if place is None:
            return True
        if self._num_users[place]:
            return False
        del self._place_of[digest]
        self._digest[place] = ""
        self._idle.move_to_end(place, last=False)
        return True

    def _place_for(self, digest: str, claimed: dict[int, str]) -> int:
        """The place that has the adapter, or that is claimed for it, or that it claims; one of another, if all are
        claimed."""
        known = self._place_of.get(digest)
        if known is not None and claimed.get(known, digest) == digest:
            return known
        own = next((place for place, claimer in claimed.items() if claimer == digest), None)
        if own is not None:
            return own
        if known is not None:
            return known  # an earlier sequence waits for it
        free = (place for place in self._idle if place not in claimed)
        busy = (place for place in range(1, len(self._digest)) if place not in claimed)
        return next(free, min(busy, key=self._num_users.__getitem__, default=next(iter(claimed), 0)))


class LoadedAdapters:
    """The adapters that requests may use: known by their folders, and the most recently used of them in memory.

    Reads run on a thread, one after the other. Beyond `max_loaded_adapters` the adapter that was used longest ago goes.
    While running requests still use it, later ones wait until it was read again, so that no request waits for ever.

    check: whether a folder still has the adapter with a digest; raises if not. Called on the thread.
    """

    def __init__(self, backend: AdapterBackend, places: Places, check: Callable[[str, Path], None]) -> None:
        self._backend = backend
        self._check = check
        self._places = places
        self._max_loaded = backend.limits.max_loaded_adapters
        self._folders: dict[str, Path] = {}
        """Known adapters."""
        self._loaded: OrderedDict[str, None] = OrderedDict()
        """In memory, least recently used first; also those that were dropped and are still in use."""
        self._num_users: Counter[str] = Counter()
        """Requests in the scheduler, by adapter."""
        self._reads: dict[str, Future[Any] | None] = {}
        """In order. Only the first has begun, so that no more than one waits in memory for room."""
        self._leaving = ""
        """The adapter that makes room for the first of `_reads`."""
        self._failed: dict[str, str] = {}
        """Why known adapters cannot be loaded."""
        self._untold: set[str] = set()
        """Adapters that are to be loaded, or were and cannot be again, and whose outcome is news."""
        self._news: list[tuple[str, str]] = []
        self._thread = ReadingThreads(1, "adapters")

    @property
    def is_reading(self) -> bool:
        return bool(self._reads)

    def load(self, digest: str, folder: Path) -> None:
        """Make an adapter known; `take_news` tells how it went, also if it was known before."""
        self._folders[digest] = folder
        self._failed.pop(digest, None)
        self._untold.add(digest)
        if digest in self._loaded:
            self._tell(digest)
        self._read(digest)

    def drop(self, digest: str) -> None:
        """No further request may use it; running ones go on."""
        self._folders.pop(digest, None)
        self._failed.pop(digest, None)
        self._untold.discard(digest)
        if digest in self._reads and self._reads[digest] is None:
            del self._reads[digest]
        self._news = [one for one in self._news if one[0] != digest]

    def take_news(self) -> list[tuple[str, str]]:
        """Each adapter that was to be loaded and is, with an empty text, or that cannot be, with the reason. One that
        made room for others may be loaded at first, and not when it is needed again."""
        news, self._news = self._news, []
        return news

    def check(self, digest: str) -> None:
        """Raises InvalidRequest if no request may use it."""
        if digest not in self._folders:
            raise _refusal("was unloaded")
        if digest in self._failed:
            raise _refusal(f"cannot be loaded: {self._failed[digest]}")

    def enter(self, digest: str) -> bool:
        """A request may go to the scheduler; False: not yet, the adapter is read first. Raises as `check`."""
        self.check(digest)
        if digest not in self._loaded or digest == self._leaving:
            self._read(digest)
            return False
        self._loaded.move_to_end(digest)
        self._num_users[digest] += 1
        return True

    def leave(self, digest: str) -> None:
        """A request that has entered has ended."""
        self._num_users[digest] -= 1

    def turn(self, patience_seconds: float = 0.0) -> None:
        """Give the backend what was read, as far as there is room, and take from it what was dropped.

        patience_seconds: wait so long for a read, if one is running.
        """
        if patience_seconds and (read := self._first_read()) is not None:
            wait([read], patience_seconds)
        for digest in [one for one in self._loaded if one not in self._folders]:
            self._forget(digest)
        if len(self._loaded) < self._max_loaded:
            self._leaving = ""
        while self._reads and self._take(next(iter(self._reads))):
            pass
        if not self._reads:
            self._leaving = ""

    def close(self) -> None:
        self._thread.close()

    def _read(self, digest: str) -> None:
        if digest not in self._reads and (digest not in self._loaded or digest == self._leaving):
            self._reads[digest] = None
            self._first_read()

    def _first_read(self) -> Future[Any] | None:
        """Begins, if it has not."""
        digest = next(iter(self._reads), None)
        if digest is None:
            return None
        read = self._reads[digest]
        if read is None:
            read = self._reads[digest] = self._thread.submit(self._read_folder, digest, self._folders[digest])
        return read

    def _read_folder(self, digest: str, folder: Path) -> tuple[Path, Any]:
        """With the folder: meanwhile another one may be told, of an adapter with the same weights."""
        weights = self._backend.read_adapter(folder)
        # Afterwards: a file that is written meanwhile is not the one that was checked. Cached prefixes are of that one.
        self._check(digest, folder)
        return folder, weights

    def _take(self, digest: str) -> bool:
        """The first of the reads; False: it is not done, or there is no room yet."""
        read = self._first_read()
        if read is None or not read.done():
            return False
        if digest in self._folders:
            if error := read.exception():
                # Of a file, which a user has written or taken away: nothing was given to the device.
                self._failed[digest] = str(error) or type(error).__name__
                self._untold.add(digest)
            elif digest not in self._loaded or digest == self._leaving:
                if not self._has_room():
                    return False
                self._backend.add_adapter(digest, *read.result())
                self._loaded[digest] = None
            self._tell(digest)
        del self._reads[digest]
        self._first_read()
        return True

    def _tell(self, digest: str) -> None:
        if digest in self._untold:
            self._untold.remove(digest)
            self._news.append((digest, self._failed.get(digest, "")))

    def _has_room(self) -> bool:
        """Whether one more fits, maybe after one has left."""
        if len(self._loaded) < self._max_loaded:
            return True
        if not self._leaving:
            unused = (one for one in self._loaded if not self._num_users[one])
            self._leaving = next(unused, next(iter(self._loaded)))
        return self._forget(self._leaving)

    def _forget(self, digest: str) -> bool:
        """Take it out of memory; False: a request or a step in flight uses it."""
        if self._num_users[digest] > 0 or not self._places.vacate(digest):
            return False
        del self._loaded[digest], self._num_users[digest]
        if digest == self._leaving:
            self._leaving = ""
        self._backend.remove_adapter(digest)
        return True


def _refusal(what: str) -> InvalidRequest:
    """Whoever knows the names of adapters tells clients what has become of theirs."""
    return InvalidRequest(f"the adapter {what}", field="model", status=503, code=AdapterNotReady.code)
