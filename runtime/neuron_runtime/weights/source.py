"""The border to places that models come from: what a source lists, how it is read, and what its failures mean.

`hub` and `s3` implement `Source`; `transfer` and `fetching` use it. A source makes single attempts; `Attempts` repeats
them. It knows neither the local disk nor which files of a model are needed.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from neuron_runtime.console import say
from neuron_runtime.errors import ExitCode, FatalError, ServingError

T = TypeVar("T")
P = TypeVar("P", bound="Place")

BLOCK_BYTES = 2**18
"""The most that a source returns at once."""
TIMEOUT_SECONDS = 30.0
"""Longest silence of a source."""
RETRY_SECONDS = (1.0, 2.0, 3.0, 4.0)
"""Pauses between attempts; there is one more attempt than pauses."""
RETRIED_STATUSES = frozenset({408, 425, 429, *range(500, 600)})


_USER = re.compile(r"(?<=:)//[^\s/@]*@")
_QUERY = re.compile(r"(?<=\S)\?[^\s'\")]*=[^\s'\")]*")


class SourceUnreachable(ServingError):
    """The source did not respond or is temporarily unavailable. A retry may succeed, so there is no named exit code."""


class BrokenAnswer(OSError):
    """The source answered with other bytes than those requested. A retry may succeed."""


@dataclass(frozen=True, slots=True)
class Check:
    """What a source says about the contents of a file.

    algorithm: `sha256`, `sha1`, `md5`, `crc32`, or `git` (the id of a git blob).
    value: hexadecimal.
    part_bytes: if not 0, the value is the hash of the hashes of parts of this size, as S3 computes it.
    """

    algorithm: str
    value: str
    part_bytes: int = 0


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A file as listed. `version` makes reads conditional where the source can replace a file (S3's ETag)."""

    name: str
    num_bytes: int
    version: str = ""
    check: Check | None = None


@dataclass(frozen=True)
class Listing:
    """The plain files of a model at one moment. `digest` is the same for the same contents and pins them."""

    digest: str
    files: Mapping[str, SourceFile]


class Place(Protocol):
    """A place that is reached over a network."""

    @property
    def uri(self) -> str:
        """What is read or written there, without credentials."""

    @property
    def place(self) -> str:
        """The server, as users know it: an address."""

    @property
    def advice(self) -> str:
        """What to check if the place does not respond."""

    @property
    def failures(self) -> tuple[type[BaseException], ...]:
        """Every failure of the client library."""

    def verdict(self, error: BaseException) -> FatalError | None:
        """The error to report for a failure; None if a retry may succeed."""


class Source(Place, Protocol):
    """One model at one place. Every method makes one attempt and raises the errors of its client library."""

    def listing(self, digest: str = "") -> Listing:
        """The files now, or those of a pinned digest where the place keeps older versions."""

    def check(self, listing: Listing, file: SourceFile) -> Check | None:
        """What the contents of the file must hash to, if the source knows."""

    def read(self, listing: Listing, file: SourceFile, begin: int, end: int) -> AbstractContextManager[Iterator[bytes]]:
        """Bytes `begin` to `end` of the listed version, in blocks of at most BLOCK_BYTES.

        They may end early; the caller counts them. Another version of the file is an error.
        """


@dataclass
class Attempts(Generic[P]):
    """Repeats calls to a place within bounded time. Prints one line per pause and kind of failure, for all threads."""

    source: P
    sleep: Callable[[float], None] = time.sleep
    pauses: tuple[float, ...] = RETRY_SECONDS
    _said: set[str] = field(default_factory=set)

    def __call__(self, call: Callable[[], T], num_done: Callable[[], int] = lambda: 0) -> T:
        """The result of the call, which is repeated after temporary failures.

        Args:
            num_done: a count of progress. The pauses begin anew if an attempt advances it.

        Raises:
            FatalError: the source refuses for good.
            SourceUnreachable: the last attempt failed, too.
        """
        pauses, done = iter(self.pauses), num_done()
        while True:
            try:
                return call()
            except self.source.failures as error:
                final = self.source.verdict(error)
                if final is not None:
                    # Without the library's errors: in a traceback they say the same twice more.
                    raise final from None
                if num_done() > done:
                    pauses, done = iter(self.pauses), num_done()
                pause, reason = next(pauses, None), one_line(root(error))
                if pause is None:
                    raise SourceUnreachable(
                        f"{self.source.place} cannot be read for {self.source.uri} after {len(self.pauses) + 1} "
                        f"attempts ({reason}); check {self.source.advice}"
                    ) from None
                kind = f"{type(root(error)).__name__} {pause}"
                if kind not in self._said:
                    self._said.add(kind)
                    say(f"{self.source.place} failed ({reason}); retrying in {pause:.0f} s")
                self.sleep(pause)


def read_all(source: Source, listing: Listing, file: SourceFile, begin: int, end: int) -> bytes:
    """All bytes of a range, by one attempt. Raises BrokenAnswer if the source sends fewer."""
    raw = bytearray()
    with source.read(listing, file, begin, end) as blocks:
        for block in blocks:
            raw += block
            if len(raw) >= end - begin:
                break  # maybe more than requested
    if len(raw) < end - begin:
        raise BrokenAnswer(f"{file.name}: the answer ended {end - begin - len(raw):,} bytes early")
    return bytes(raw[: end - begin])


def changed(uri: str, name: str) -> FatalError:
    """The error for a file that was replaced after it was listed."""
    return FatalError(
        ExitCode.CHECKSUM_MISMATCH, f"{uri}: {name} was replaced while the model was fetched; fetch it again"
    )


def check_range(status: int, content_range: str, encoding: str, begin: int, num_bytes: int) -> None:
    """Check the head of the answer to a request for bytes from `begin` of a file of `num_bytes`.

    Raises BrokenAnswer if the body is not these bytes of this file.
    """
    if encoding not in ("", "identity"):
        raise BrokenAnswer(f"the answer has Content-Encoding {encoding}, which was not asked for")
    if status == 200 and begin == 0:
        return  # whole files are read from their start only
    if status != 206 or not content_range.startswith(f"bytes {begin}-"):
        raise BrokenAnswer(f"a request for bytes from {begin} was answered with {status} and {content_range!r}")
    total = content_range.rpartition("/")[2]
    if total not in ("*", str(num_bytes)):
        raise BrokenAnswer(f"the file has {total} bytes, but {num_bytes} were listed")


def chain(error: BaseException) -> Iterator[BaseException]:
    current: BaseException | None = error
    while current is not None:
        yield current
        current = current.__cause__ or (None if current.__suppress_context__ else current.__context__)


def root(error: BaseException) -> BaseException:
    """The root cause: libraries wrap "connection refused" several times."""
    causes = list(chain(error))
    return next((e for e in causes if hasattr(e, "response")), causes[-1])


def one_line(error: BaseException) -> str:
    """The error as one line, without secrets."""
    return without_secrets(f"{type(error).__name__}: {error}".strip().partition("\n")[0])[:300]


def without_secrets(text: str) -> str:
    """The text without users, passwords and queries of addresses; signatures are in queries."""
    return _QUERY.sub("", _USER.sub("//***@", text))
