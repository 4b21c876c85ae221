"""A store in S3: complete entries of a local store, uploaded once and downloaded by many.

    PREFIX/KEY/CONTENT/NAME        the files of an entry; CONTENT is a hash of their names and contents
    PREFIX/KEY/.manifest.json      written last, and only if there is none: it makes the entry complete
    PREFIX/KEY/.used               empty, replaced when the entry is used
    PREFIX/KEY/.note               what is told about an entry after it is complete; may be replaced

Called by `fetching` and the commands, and for compiled artifacts. Nothing is loaded from here: a download ends in a
local store, with each file checked against the manifest. It knows neither models nor sources.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from boto3.s3.transfer import TransferConfig, create_transfer_manager
from botocore.exceptions import ClientError
from s3transfer.subscribers import BaseSubscriber

from neuron_runtime.console import say
from neuron_runtime.uris import S3Model, store_address
from neuron_runtime.weights.disk import read_blocks
from neuron_runtime.weights.hashing import FileHash
from neuron_runtime.weights.s3 import S3Place, S3Source
from neuron_runtime.weights.source import Attempts, Check, Listing, Source, SourceFile, read_all
from neuron_runtime.weights.store import (
    ABANDONED_SECONDS,
    DAY_SECONDS,
    KEY,
    MANIFEST,
    MAX_MANIFEST_BYTES,
    MODELS,
    Damaged,
    Entry,
    EntryKind,
    ListedEntry,
    Manifest,
    Progress,
    Pruned,
    Store,
    StoredFile,
    check_key,
    check_manifest,
    parse_manifest,
)
from neuron_runtime.weights.transfer import TOOLS, Amount, Tools, copying

RIGHTS = (
    "listing the bucket, and reading, writing and deleting its objects (s3:ListBucket, s3:GetObject, s3:PutObject, "
    "s3:DeleteObject; the first two suffice to serve)"
)
USED, NOTE = ".used", ".note"
PART_BYTES = 64 * 2**20
"""The size of each part of an upload in parts."""
NUM_UPLOADS = 8
"""Parts that are uploaded at the same time."""
NUM_ATTEMPTS = 5
"""The client library tries each part so often."""
NUM_READERS = 4
"""Files that are read at the same time before an upload, or asked for."""
MAX_DELETED = 1000
"""Objects that S3 deletes in one request."""


class RemoteFile(StoredFile, frozen=True):
    crc32: str
    """Hexadecimal. S3 states it of each object, so that a replaced one is found without a download."""


class RemoteManifest(Manifest, frozen=True, kw_only=True):
    files: tuple[RemoteFile, ...]

    @property
    def content(self) -> str:
        """Entries of other contents never share an object, so two uploaders cannot mix theirs."""
        lines = (f"{file.sha256} {file.bytes} {file.name}\n" for file in sorted(self.files, key=lambda file: file.name))
        return hashlib.sha256("".join(lines).encode()).hexdigest()[:32]

    @property
    def local(self) -> Manifest:
        """The manifest of a copy in a local store."""
        files = tuple(StoredFile(file.name, file.bytes, file.sha256) for file in self.files)
        return Manifest(rule=self.rule, digest=self.digest, uri=self.uri, created=self.created, files=files)


@dataclass(frozen=True)
class RemoteObject:
    """An object below the folder of a key. `name` is relative to it."""

    key: str
    name: str
    num_bytes: int
    etag: str
    written: float
    """Seconds since 1970."""


@dataclass(frozen=True)
class RemoteEntry:
    """A complete entry of a remote store: its manifest, and each file as it is listed now."""

    key: str
    uri: str
    """The URI of the folder with its files."""
    manifest: RemoteManifest
    files: Mapping[str, SourceFile]


class RemoteStore:
    """One prefix of a bucket, `s3://bucket/prefix`. Raises InvalidConfig at `field` if the URI is none."""

    def __init__(
        self,
        uri: str,
        field: str = "--weights-store",
        *,
        kind: EntryKind = MODELS,
        tools: Tools = TOOLS,
    ) -> None:
        self._model = store_address(uri, field)
        self.address = str(self._model)
        self.kind = kind
        self._tools = tools
        self._place = S3Place(self._model, rights=RIGHTS, missing=kind.missing)
        self._attempts = Attempts(self._place, tools.sleep)

    def uri_of(self, key: str) -> str:
        return f"{self.address}/{key}"

    def find(self, key: str) -> RemoteEntry | None:
        """The complete entry of a key; None if there is none.

        Raises Damaged if its manifest is malformed, or an object is missing or has another size.
        """
        check_key(key)
        manifest = self._manifest(key)
        if manifest is None:
            return None
        by_name = {item.name: item for item in self.objects(f"{key}/{manifest.content}/")}
        files = {}
        for file in manifest.files:
            item = by_name.get(f"{manifest.content}/{file.name}")
            if item is None:
                raise Damaged(self.uri_of(key), f"{file.name} is missing", self.kind)
            if item.num_bytes != file.bytes:
                raise Damaged(
                    self.uri_of(key), f"{file.name} has {item.num_bytes:,} bytes instead of {file.bytes:,}", self.kind
                )
            files[file.name] = SourceFile(file.name, file.bytes, version=item.etag)
        return RemoteEntry(key, f"{self.uri_of(key)}/{manifest.content}", manifest, files)

    def intact(self, key: str) -> RemoteEntry | None:
        """As `find`, but a damaged entry is removed, also one with an object of which S3 states another checksum."""
        try:
            entry = self.find(key)
            if entry is not None:
                self._check_stated(entry)
                self._attempts(partial(self._mark, key))
        except Damaged as error:
            say(f"{error.what}: replacing it")
            self.discard(key)
            return None
        return entry

    def download(
        self,
        key: str,
        store: Store,
        report: Callable[[Amount], None],
        *,
        into: str = "",
        wanted: Callable[[str], bool] = lambda name: True,
    ) -> Entry | None:
        """The entry as one of a local store; None if there is no such entry. Resumes as any download does.

        Args:
            into: the key of the local entry, if it is another one.
            wanted: the names of the files to download.

        Raises:
            Damaged: as `find`.
            FatalError: CHECKSUM_MISMATCH, STORAGE_FULL, WEIGHTS_UNAUTHORIZED or the kind's `missing`.
            SourceUnreachable: the store does not respond.
        """
        entry = self.find(key)
        if entry is None:
            return None
        with contextlib.suppress(*self._place.failures):  # who may only read the store cannot note it
            self._mark(key)
        into = into or key
        manifest = entry.manifest.local
        check_manifest(manifest, self.uri_of(key), self.kind)
        store.prepare()
        with store.lock(into, self.uri_of(key)) as work:
            if sound := store.sound(into, replace=True):
                return sound
            files = tuple(file for file in manifest.files if wanted(file.name))
            listing = Listing(entry.manifest.content, entry.files)
            with copying(self._attempts_of(entry), listing, work, self._tools) as copy:
                copy([file.name for file in files], report)
            return store.publish(into, work, msgspec.structs.replace(manifest, files=files))

    def upload(self, entry: Entry, report: Callable[[Amount], None]) -> None:
        """Add an entry of a local store, unless there is an intact one, whose files were chosen by the same rule or a
        later one. Objects that a killed upload left are used.

        Raises:
            Damaged: the local entry differs from its manifest.
            FatalError: WEIGHTS_UNAUTHORIZED or the kind's `missing`.
            SourceUnreachable: the store does not respond.
        """
        key = entry.key
        if stored := self.intact(key):
            if stored.manifest.rule >= entry.manifest.rule:
                return
            self.discard(key)
        with ThreadPoolExecutor(NUM_READERS, thread_name_prefix="checksum") as pool:
            files = tuple(pool.map(lambda file: _summed(entry.folder, file, self.kind), entry.manifest.files))
        of = entry.manifest
        manifest = RemoteManifest(rule=of.rule, digest=of.digest, uri=of.uri, created=of.created, files=files)
        self._attempts(partial(self._mark, key))  # or `prune` might take what a killed upload left for abandoned
        folder = f"{key}/{manifest.content}"
        present = {item.name: item for item in self.objects(f"{folder}/")}
        left = [
            file
            for file in files
            if (item := present.get(f"{manifest.content}/{file.name}")) is None
            or item.num_bytes != file.bytes
            or self._stated(folder, file) != file.crc32
        ]
        self._send(entry.folder, folder, left, manifest.num_bytes, report)
        if self._publish(key, manifest):
            return
        rival = self._manifest(key)
        if rival is None or rival.content != manifest.content:
            say(f"{self.uri_of(key)}: another process stored it first")
            self.delete(f"{folder}/{file.name}" for file in files)

    def note(self, key: str) -> bytes:
        """What is told about an entry; empty: nothing."""
        return self._attempts(partial(self._read, f"{key}/{NOTE}")) or b""

    def write_note(self, key: str, raw: bytes) -> None:
        self._attempts(lambda: self._place.client.put_object(**self._place.at(f"{key}/{NOTE}"), Body=raw))

    def discard(self, key: str) -> None:
        """Remove an entry. From the first request on, nobody finds it."""
        check_key(key)
        self.delete([f"{key}/{MANIFEST}"])
        self.delete([f"{key}/{item.name}" for item in self.objects(f"{key}/")])

    def objects(self, folder: str) -> Iterator[RemoteObject]:
        """All objects below a folder of the store."""
        pages: list[Any] = self._attempts(
            lambda: list(
                self._place.client.get_paginator("list_objects_v2").paginate(
                    Bucket=self._model.bucket, Prefix=self._model.key(folder)
                )
            )
        )
        for item in [item for page in pages for item in page.get("Contents", [])]:
            key, _, name = item["Key"].removeprefix(self._model.key("")).partition("/")
            yield RemoteObject(key, name, item["Size"], item["ETag"].strip('"'), item["LastModified"].timestamp())

    def delete(self, names: Iterable[str]) -> None:
        """Delete objects, if they exist. Names are relative to the store."""
        keys = [{"Key": self._model.key(name)} for name in names]
        for begin in range(0, len(keys), MAX_DELETED):
            self._attempts(partial(self._delete, keys[begin : begin + MAX_DELETED]))

    def _delete(self, keys: list[dict[str, str]]) -> None:
        answer = self._place.client.delete_objects(Bucket=self._model.bucket, Delete={"Objects": keys, "Quiet": True})
        if errors := answer.get("Errors"):
            raise ClientError({"Error": errors[0]}, "DeleteObjects")

    def rows(self) -> Iterator[ListedEntry]:
        """Everything in it, with the time of the last write if an entry is not complete."""
        for key, items in self._folders().items():
            num_bytes, written = sum(item.num_bytes for item in items), max(item.written for item in items)
            used = _used(items)
            if used is None:
                yield ListedEntry(key, "partial", num_bytes, written)
                continue
            try:
                entry = self.find(key)
            except Damaged as error:
                yield ListedEntry(key, "damaged", num_bytes, used, problem=error.reason)
                continue
            if entry is not None:
                yield ListedEntry(key, "complete", entry.manifest.num_bytes, used, entry.manifest.uri)

    def verify(self, progress: Progress) -> Iterator[tuple[str, list[str]]]:
        """Each complete entry, and what is wrong with the contents of its files, which are all read."""
        for key, items in self._folders().items():
            if _used(items) is None:
                continue
            try:
                entry = self.find(key)
                if entry is not None:  # otherwise deleted meanwhile
                    yield key, self._compare(entry, progress(key, entry.manifest.num_bytes))
            except Damaged as error:
                yield key, [error.reason]

    def prune(
        self, keep: Iterable[str], unused_seconds: float, *, dry_run: bool, now: Callable[[], float] = time.time
    ) -> Iterator[Pruned]:
        """As of a local store: mark entries as used, delete those that are unused, and abandoned uploads."""
        kept = {key.partition("-")[0] for key in keep}
        folders = self._folders()
        for key, items in folders.items():
            if key.partition("-")[0] in kept and _used(items) is not None and not dry_run:
                self._attempts(partial(self._mark, key))
        for key, items in folders.items():
            num_bytes, used = sum(item.num_bytes for item in items), _used(items)
            if used is None:
                # Files of an entry that nobody finds.
                if now() - max(item.written for item in items) >= ABANDONED_SECONDS:
                    if not dry_run:
                        self.delete(f"{key}/{item.name}" for item in items)
                    yield Pruned(key, num_bytes, "abandoned upload")
                continue
            if key.partition("-")[0] in kept or now() - used < unused_seconds:
                continue
            if not dry_run:
                # Somebody may have found it since.
                used_since = _used(self.objects(f"{key}/"))
                if used_since is None or now() - used_since < unused_seconds:
                    continue
                self.discard(key)
            yield Pruned(key, num_bytes, f"unused for {(now() - used) / DAY_SECONDS:.0f} days")

    def _folders(self) -> dict[str, list[RemoteObject]]:
        folders: dict[str, list[RemoteObject]] = {}
        for item in self.objects(""):
            if KEY.fullmatch(item.key):
                folders.setdefault(item.key, []).append(item)
        return folders

    def _compare(self, entry: RemoteEntry, progress: Callable[[int], None]) -> list[str]:
        """What is wrong with the contents of the files of an entry."""
        attempts, listing = self._attempts_of(entry), Listing(entry.manifest.content, entry.files)
        source, chunk_bytes = attempts.source, self._tools.limits.chunk_bytes

        def difference(name: str) -> str:
            file = entry.files[name]
            contents = FileHash(file.num_bytes, source.check(listing, file))
            for begin in range(0, file.num_bytes, chunk_bytes):
                end = min(begin + chunk_bytes, file.num_bytes)
                contents.update(attempts(partial(read_all, source, listing, file, begin, end)))
                progress(end - begin)
            return contents.difference()

        with ThreadPoolExecutor(NUM_READERS, thread_name_prefix="verify") as pool:
            compared = zip(entry.files, pool.map(difference, entry.files), strict=True)
            return [f"{name}: {what}" for name, what in compared if what]

    def _attempts_of(self, entry: RemoteEntry) -> Attempts[Source]:
        model = S3Model(self._model.bucket, self._model.key(f"{entry.key}/{entry.manifest.content}"))
        return Attempts(_EntrySource(self._place, model, entry, self.kind), self._tools.sleep)

    def _mark(self, key: str) -> None:
        """Note that an entry is used now. Makes one attempt and raises the errors of the client library."""
        self._place.client.put_object(**self._place.at(f"{key}/{USED}"), Body=b"")

    def _manifest(self, key: str) -> RemoteManifest | None:
        raw = self._attempts(partial(self._read, f"{key}/{MANIFEST}"))
        return None if raw is None else parse_manifest(raw, RemoteManifest, self.uri_of(key), self.kind)

    def _read(self, name: str) -> bytes | None:
        """A small object. Makes one attempt and raises the errors of the client library."""
        try:
            answer = self._place.client.get_object(**self._place.at(name))
        except self._place.client.exceptions.NoSuchKey:
            return None
        raw: bytes = answer["Body"].read(MAX_MANIFEST_BYTES)
        return raw

    def _publish(self, key: str, manifest: RemoteManifest) -> bool:
        """Write the manifest; False if the key has one."""

        def put() -> bool:
            try:
                self._place.client.put_object(
                    **self._place.at(f"{key}/{MANIFEST}"),
                    Body=msgspec.json.format(msgspec.json.encode(manifest)),
                    ContentType="application/json",
                    IfNoneMatch="*",
                )
            except ClientError as error:
                if error.response.get("ResponseMetadata", {}).get("HTTPStatusCode") == 412:
                    return False
                raise
            return True

        return self._attempts(put)

    def _check_stated(self, entry: RemoteEntry) -> None:
        folder = f"{entry.key}/{entry.manifest.content}"
        with ThreadPoolExecutor(NUM_READERS, thread_name_prefix="stated") as pool:
            answers = pool.map(partial(self._stated, folder), entry.manifest.files)
            for file, stated in zip(entry.manifest.files, answers, strict=True):
                if stated not in ("", file.crc32):
                    message = f"the CRC-32 of {file.name} is {stated}, the manifest has {file.crc32}"
                    raise Damaged(self.uri_of(entry.key), message, self.kind)

    def _stated(self, folder: str, file: RemoteFile) -> str:
        """The CRC-32 that S3 states of an object, "" if it states none of the whole object."""
        head = self._attempts(
            lambda: self._place.client.head_object(**self._place.at(f"{folder}/{file.name}"), ChecksumMode="ENABLED")
        )
        text = head.get("ChecksumCRC32", "")
        return "" if not text or "-" in text else base64.b64decode(text).hex()

    def _send(
        self, source: Path, folder: str, files: list[RemoteFile], total_bytes: int, report: Callable[[Amount], None]
    ) -> None:
        place = S3Place(self._model, rights=RIGHTS, missing=self.kind.missing, num_attempts=NUM_ATTEMPTS)
        config = TransferConfig(
            multipart_threshold=PART_BYTES,
            multipart_chunksize=PART_BYTES,
            max_concurrency=NUM_UPLOADS,
            use_threads=True,
        )
        present_bytes = total_bytes - sum(file.bytes for file in files)

        def send() -> None:
            sent = _Sent(present_bytes)
            with create_transfer_manager(place.client, config) as manager:
                futures = [
                    manager.upload(
                        str(source / file.name),
                        self._model.bucket,
                        self._model.key(f"{folder}/{file.name}"),
                        extra_args={"ChecksumCRC32": base64.b64encode(bytes.fromhex(file.crc32)).decode()},
                        subscribers=[sent],
                    )
                    for file in files
                ]
                num_ended = 0
                while num_ended < len(futures):
                    if sent.ended.acquire(timeout=1.0):
                        num_ended += 1
                        # The first failure ends the manager, which cancels the others.
                        for future in futures:
                            if future.done():
                                future.result()
                    else:
                        report(Amount(sent.num_bytes, total_bytes, sent.num_bytes))

        # The library repeats parts; this repeats an upload that failed for good, once.
        Attempts(place, self._tools.sleep, pauses=(1.0,))(send)
        report(Amount(total_bytes, total_bytes, total_bytes))


class _EntrySource(S3Source):
    """The files of one entry, as a `Source`."""

    def __init__(self, place: S3Place, model: S3Model, entry: RemoteEntry, kind: EntryKind) -> None:
        super().__init__(model, place.client, missing=kind.missing)
        self.uri = f"{place.uri}/{entry.key}"
        self._sums = {file.name: file.sha256 for file in entry.manifest.files}

    def check(self, listing: Listing, file: SourceFile) -> Check | None:
        return Check("sha256", self._sums[file.name])


class _Sent(BaseSubscriber):  # type: ignore[misc]
    """Counts what the transfer manager has sent, and the files that are done."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self._lock = threading.Lock()
        self.ended = threading.Semaphore(0)

    def on_progress(self, bytes_transferred: int, **more: Any) -> None:
        with self._lock:
            self.num_bytes += bytes_transferred  # negative if a part is repeated

    def on_done(self, **more: Any) -> None:
        self.ended.release()


def _summed(folder: Path, file: StoredFile, kind: EntryKind) -> RemoteFile:
    """The file with its CRC-32, after its sha256 was compared."""
    sha256, crc32, num_bytes = hashlib.sha256(), 0, 0
    try:
        for block in read_blocks(folder / file.name, 0, file.bytes + 1, bytearray(2**20)):
            sha256.update(block)
            crc32 = zlib.crc32(block, crc32)
            num_bytes += len(block)
    except OSError as error:
        raise Damaged(folder, f"{file.name}: {error.strerror}", kind) from error
    if (num_bytes, sha256.hexdigest()) != (file.bytes, file.sha256):
        raise Damaged(folder, f"{file.name} differs from the manifest", kind)
    return RemoteFile(file.name, file.bytes, file.sha256, f"{crc32:08x}")


def _used(items: Iterable[RemoteObject]) -> float | None:
    """When a complete entry was last used; None if there is no manifest."""
    times = {item.name: item.written for item in items}
    return max(times[MANIFEST], times.get(USED, 0.0)) if MANIFEST in times else None
