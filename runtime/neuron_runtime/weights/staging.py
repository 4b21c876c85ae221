"""The chunks of an unfinished fetch, kept in a remote store, so that another machine resumes it where it stopped.

    PREFIX/KEY/.partial/BEGIN-END-CRC32/NAME      bytes BEGIN to END of a file

`fetching.supply` hands a `Staging` to the fetch, whose journal it follows, and to the upload, which puts files together
from the chunks instead of sending them again. Nothing is loaded from here: a resumed file is compared with its source's
checksum like any other. Files of one chunk are left out: to read one again costs no more than a chunk in flight.
"""

from __future__ import annotations

import logging
import re
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from queue import Queue
from typing import TYPE_CHECKING, Self

from neuron_runtime.console import bytes_text, say
from neuron_runtime.weights.disk import make_folder, writing
from neuron_runtime.weights.journal import Claim, Journal
from neuron_runtime.weights.selection import is_part
from neuron_runtime.weights.source import SourceFile
from neuron_runtime.weights.transfer import Amount

if TYPE_CHECKING:
    from neuron_runtime.weights.remote import RemoteStore

logger = logging.getLogger(__name__)

FOLDER = ".partial"
NUM_SENDERS = 8
"""Chunks that are sent at the same time, or read."""
MIN_PART_BYTES = 5 * 2**20
"""Of each part of an object but the last, as S3 demands it."""
MAX_PARTS = 10_000
"""Of an object in S3."""

_NAME = re.compile(FOLDER.replace(".", r"\.") + r"/(\d{1,18})-(\d{1,18})-([0-9a-f]{8})/([^/]+)")


class Staging:
    """What is staged for one key of a store. `send` hands chunks to threads of its own, until the block ends."""

    def __init__(self, remote: RemoteStore, key: str) -> None:
        self._remote = remote
        self._key = key
        self._chunks: dict[str, dict[int, Claim]] = defaultdict(dict)
        """In the store, by file and first byte."""
        self._dropped: set[str] = set()
        self._queue: Queue[tuple[Claim, Path] | None] = Queue()
        """None ends the senders."""
        self._room = threading.Semaphore(NUM_SENDERS + 1)
        """Without any, the fetch waits."""
        self._is_over = False
        self._error: Exception | None = None
        # Daemons: a silent store must not delay the end of the process.
        self._senders = [
            threading.Thread(target=self._send_all, name=f"stage-{number}", daemon=True)
            for number in range(NUM_SENDERS)
        ]

    def __enter__(self) -> Self:
        for sender in self._senders:
            sender.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._is_over = True  # readers of a fetch that broke off may still hand in chunks
        self._queue.put(None)
        if self._dropped:
            for sender in self._senders:
                sender.join()
            self._remote.delete([self._object(claim) for claim in self._listed() if claim.name in self._dropped])

    def follow(
        self, journal: Journal, folder: Path, files: Mapping[str, SourceFile], report: Callable[[Amount], None]
    ) -> StagedJournal:
        """The journal of a fetch into `folder`, where every staged chunk of `files` is written and claimed now.

        Raises:
            FatalError: STORAGE_FULL, or the store refuses.
            SourceUnreachable: the store does not respond.
        """
        found = [claim for claim in self._listed() if _belongs(claim, files)]
        if found:
            num_bytes = sum(claim.end - claim.begin for claim in found)
            place = self._remote.uri_of(self._key)
            say(f"resuming with {bytes_text(num_bytes)} that an interrupted fetch left in {place}")
            self._restore(found, journal, folder, num_bytes, report)
        return StagedJournal(self, journal, folder, files)

    def _listed(self) -> Iterable[Claim]:
        for item in self._remote.objects(f"{self._key}/{FOLDER}/"):
            if (parts := _NAME.fullmatch(item.name)) and is_part(parts[4]):
                claim = Claim(parts[4], int(parts[1]), int(parts[2]), int(parts[3], 16))
                if item.num_bytes == claim.end - claim.begin:
                    yield claim

    def _restore(
        self, found: list[Claim], journal: Journal, folder: Path, num_bytes: int, report: Callable[[Amount], None]
    ) -> None:
        with writing(folder):
            make_folder(folder)
        done = 0
        with ThreadPoolExecutor(NUM_SENDERS, thread_name_prefix="restore") as pool:
            copies = {
                pool.submit(self._remote.copy_into, self._object(claim), folder / claim.name, claim.begin): claim
                for claim in found
            }
            try:
                for copy in as_completed(copies):
                    claim = copies[copy]
                    if copy.result() == claim.crc32:
                        self._chunks[claim.name][claim.begin] = claim
                        journal.add(claim)
                    done += claim.end - claim.begin
                    report(Amount(done, num_bytes, 0))
            finally:
                pool.shutdown(cancel_futures=True)

    def send(self, claim: Claim, path: Path) -> None:
        """Send a chunk of a file soon. Raises what was raised when an earlier one was sent."""
        self._room.acquire()
        self._queue.put((claim, path))
        self._check()

    def _send_all(self) -> None:
        while (item := self._queue.get()) is not None:
            claim, path = item
            try:
                if not (self._is_over or self._error or claim.name in self._dropped):
                    self._remote.send_range(self._object(claim), path, claim.begin, claim.end, claim.crc32)
                    self._chunks[claim.name][claim.begin] = claim
            except FileNotFoundError:
                logger.debug("%s was dropped", path)
            except Exception as error:  # noqa: BLE001 - raised again by `send` and `settle`
                self._error = self._error or error
            finally:
                self._room.release()
                self._queue.task_done()
        self._queue.put(None)  # for the next one

    def settle(self) -> None:
        """Wait until everything is sent. Raises as `send`."""
        self._queue.join()
        self._check()

    def _check(self) -> None:
        if self._error is not None:
            raise self._error

    def drop(self, name: str) -> None:
        """Forget the chunks of a file, at the latest when the block ends."""
        self._dropped.add(name)
        self._chunks.pop(name, None)

    def parts(self, name: str, num_bytes: int) -> list[str]:
        """The objects that S3 can put together to the file; none if some are missing or too small for it."""
        claims = [claim for _, claim in sorted(self._chunks.get(name, {}).items())]
        ends = [0, *(claim.end for claim in claims)]
        fits = ends[-1] == num_bytes and all(claim.begin == end for claim, end in zip(claims, ends, strict=False))
        is_large = all(claim.end - claim.begin >= MIN_PART_BYTES for claim in claims[:-1])
        return [self._object(claim) for claim in claims] if fits and is_large and len(claims) <= MAX_PARTS else []

    def clear(self) -> None:
        """Delete what is staged, by whomever."""
        self._remote.delete([f"{self._key}/{item.name}" for item in self._remote.objects(f"{self._key}/{FOLDER}/")])

    def _object(self, claim: Claim) -> str:
        return f"{self._key}/{FOLDER}/{claim.begin}-{claim.end}-{claim.crc32:08x}/{claim.name}"


@dataclass(frozen=True)
class StagedJournal:
    """A journal, of which each claim is sent to a store with its bytes."""

    staging: Staging
    journal: Journal
    folder: Path
    files: Mapping[str, SourceFile]

    @property
    def claims(self) -> Mapping[tuple[str, int], Claim]:
        return self.journal.claims

    def add(self, claim: Claim) -> None:
        self.journal.add(claim)
        if claim.end - claim.begin < self.files[claim.name].num_bytes:
            self.staging.send(claim, self.folder / claim.name)

    def drop(self, name: str) -> None:
        self.journal.drop(name)
        self.staging.drop(name)


def _belongs(claim: Claim, files: Mapping[str, SourceFile]) -> bool:
    return claim.name in files and claim.begin < claim.end <= files[claim.name].num_bytes
