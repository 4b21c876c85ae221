"""Brings a model to this machine: into a store from where it is loaded, or only its outline for inspection.

Called by `fetch`, by the engine process and `LLM` before they load (`materialize`), and by `inspection` (`outline`).
It combines a source, a transfer and a store. It does not import torch and does not check architectures.
"""

from __future__ import annotations

import contextlib
import math
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from neuron_runtime.backend_protocol import ProgressCallback
from neuron_runtime.checkpoint import (
    CONFIG_FILE,
    GRAPHS_CONFIG_FILE,
    INDEX_FILE,
    TEMPLATES_FOLDER,
    WEIGHTS_FILE,
    InvalidModel,
    advice_without_safetensors,
    check_folder,
    header_length,
    is_shard,
    parse_index,
    read_checkpoint,
    read_config,
)
from neuron_runtime.config import ModelSource
from neuron_runtime.errors import ExitCode, FatalError, InvalidConfig
from neuron_runtime.uris import FolderModel, HubModel, ImageModel, ModelInPlace, S3Model, parse_uri
from neuron_runtime.weights.selection import (
    graph_files,
    is_part,
    is_plain,
    is_small,
    weight_files,
)
from neuron_runtime.weights.source import Attempts, Listing, Source, read_all
from neuron_runtime.weights.store import KEY, MODELS, Entry, EntryKind, Manifest, Store, StoredFile
from neuron_runtime.weights.transfer import TOOLS, Amount, Tools, copying

if TYPE_CHECKING:
    from neuron_runtime.weights.remote import RemoteStore

CLAIMS_DIR_VARIABLE = "NEURON_SERVING_CLAIMS_DIR"
DEFAULT_CLAIMS_DIR = Path("/mnt/claims")
"""The volume of `pvc://claim/path` is mounted at `claim` in this folder."""
IMAGE_DIR_VARIABLE = "NEURON_SERVING_IMAGE_DIR"
DEFAULT_IMAGE_DIR = Path("/mnt/images/model")
"""The image of `oci://image` is mounted here."""

FIRST_HEADER_BYTES = 200_000
"""Enough for the header of most safetensors files, so that one request suffices."""
NUM_HEADERS = 4
"""Headers that are read at the same time."""

OnMiss = Literal["fetch", "fail"]

SmallCheck = Callable[[Path], None]
"""Refuses a model by its small files, by raising FatalError."""


def no_check(folder: Path) -> None:
    """Accepts every model."""


@dataclass(frozen=True)
class Fetched:
    """A model in its place: a folder, or the address of a remote store's entry. `read_bytes`: from its source, now; 0
    if it was there already."""

    address: str
    digest: str
    num_bytes: int
    read_bytes: int = 0

    @property
    def folder(self) -> Path:
        """The address of a model on this machine."""
        return Path(self.address)


def fetch(
    uri: str,
    store: Store,
    report: Callable[[Amount], None],
    digest: str = "",
    source: Source | None = None,
    *,
    remote: RemoteStore | None = None,
    on_miss: OnMiss = "fetch",
    with_weights: bool = True,
    check: SmallCheck = no_check,
    tools: Tools = TOOLS,
) -> Fetched:
    """The model as a complete entry of the store, copied from its source unless it is there. Folders stay in place.

    Args:
        digest: what the model must be; the digest of what the source has now if empty.
        source: default: the one of the URI, with credentials from the environment.
        remote: another store, from which an entry is copied before its source is asked.
        on_miss: whether a model that is in neither store is copied from its source, or is an error.
        with_weights: False for the small files alone.
        check: called before weights are copied from the source.

    Raises:
        InvalidConfig: the URI is malformed.
        FatalError: that of `check`; MODEL_NOT_FOUND, WEIGHTS_UNAUTHORIZED, INVALID_MODEL, CHECKSUM_MISMATCH,
            WEIGHTS_MISSING or STORAGE_FULL, or the store cannot be written.
        SourceUnreachable: the source or the other store does not respond.
    """
    model = parse_uri(uri)
    if isinstance(model, ModelInPlace):
        return _in_place(uri, folder_of(model), digest, with_weights, check)
    suffix = "" if with_weights else "-text"

    def stored(digest: str) -> Entry | None:
        for key in dict.fromkeys((digest, digest + suffix)):
            if entry := store.sound(key):
                return entry
        if remote is not None:
            is_needed = is_part if with_weights else is_small
            if entry := remote.download(digest, store, report, into=digest + suffix, wanted=is_needed):
                return entry
        if on_miss == "fail":
            places = f"{store.folder}" if remote is None else f"{store.folder} or {remote.address}"
            raise FatalError(
                ExitCode.WEIGHTS_MISSING,
                f"{uri} with digest {digest} is not in {places}; fetch it there: "
                f"neuron-runtime fetch {uri} {store.folder if remote is None else remote.address} --digest {digest}",
            )
        return None

    if KEY.fullmatch(digest) and (entry := stored(digest)):
        return _fetched(entry, check)
    attempts = Attempts(source or open_source(model), tools.sleep)
    listing = _listing(attempts, digest)
    if not digest and (entry := stored(listing.digest)):
        return _fetched(entry, check)
    key = listing.digest + suffix
    store.prepare()
    with store.lock(key, uri) as work:
        if entry := store.sound(key, replace=True):
            return _fetched(entry, check)
        manifest, read_bytes = _copy(
            attempts, listing, work, report, with_weights=with_weights, check=check, tools=tools
        )
        return _fetched(store.publish(key, work, manifest), check, read_bytes)


def supply(
    uri: str,
    remote: RemoteStore,
    scratch: Store,
    report: Callable[[Amount], None],
    report_upload: Callable[[Amount], None],
    *,
    digest: str = "",
) -> Fetched:
    """The model as a complete entry of a remote store, by way of a local one. Arguments and errors as of `fetch`.

    Nothing is read from the source if the remote store has the digest. A damaged entry is replaced.
    """
    model = parse_uri(uri)
    if isinstance(model, ModelInPlace):
        raise InvalidConfig("URI", f"{uri} is read in place; only models of a hub or of S3 are copied to a store")
    source = open_source(model)
    if not digest:
        digest = Attempts(source)(source.listing).digest
    if KEY.fullmatch(digest) and (present := remote.intact(digest)):
        return Fetched(remote.uri_of(digest), digest, present.manifest.num_bytes)
    supplied = fetch(uri, scratch, report, digest, source)
    if entry := scratch.find(supplied.digest):
        remote.upload(entry, report_upload)
    return Fetched(remote.uri_of(supplied.digest), supplied.digest, supplied.num_bytes, supplied.read_bytes)


def materialize(
    model: ModelSource,
    weights_dir: Path,
    progress: ProgressCallback,
    source: Source | None = None,
    *,
    weights_store: str = "",
    on_miss: OnMiss = "fetch",
    with_weights: bool = True,
    check: SmallCheck = no_check,
    tools: Tools = TOOLS,
) -> Path:
    """The local folder of the model, brought into the store at `weights_dir` if needed. Errors as of `fetch`.

    weights_store: address of a remote store, "" for none.
    """
    stage = f"fetching {model.uri}"
    shown = False

    def report(amount: Amount) -> None:
        nonlocal shown
        shown = True
        progress(stage, min(0.999, amount.done_bytes / max(1, amount.total_bytes)))

    entry = fetch(
        model.uri,
        Store(weights_dir),
        report,
        model.digest,
        source,
        remote=open_remote(weights_store) if weights_store else None,
        on_miss=on_miss,
        with_weights=with_weights,
        check=check,
        tools=tools,
    )
    if shown:
        progress(stage, 1.0)
    return entry.folder


def open_remote(uri: str, field: str = "--weights-store", kind: EntryKind = MODELS) -> RemoteStore:
    """The store in S3 at this address. Raises InvalidConfig at `field` if it is none."""
    from neuron_runtime.weights.remote import RemoteStore  # noqa: PLC0415  (brings a client library)

    return RemoteStore(uri, field, kind=kind)


@contextlib.contextmanager
def outline(uri: str, scratch: Path, digest: str = "") -> Iterator[tuple[Path, str | None]]:
    """A folder that `read_checkpoint` can read like the model's, and its digest (None for a local folder).

    Of a remote model, which must have the given digest, config.json, the index and the headers of the weights are
    copied to `scratch`; every other byte is a hole, so file sizes are right and all checks apply. Errors raised in the
    body name the URI instead of the scratch folder. Raises as `fetch`, except storage errors.
    """
    model = parse_uri(uri, "URI")
    if isinstance(model, ModelInPlace):
        yield folder_of(model), None
        return
    attempts = Attempts(open_source(model))
    listing = _listing(attempts, digest)
    with _naming(scratch, uri):
        _draw(attempts, listing, scratch)
        yield scratch, listing.digest


@contextlib.contextmanager
def described(
    model: ModelSource, weights_dir: Path, weights_store: str = "", *, with_weights: bool = True
) -> Iterator[tuple[Path, str]]:
    """A folder that `read_checkpoint` can read like the model's, without a fetch, and the model's digest.

    It is the model where it lies, or its outline from a store or its source. Raises as `outline`.

    with_weights: False for a model of which only config.json is read.
    """
    source = parse_uri(model.uri)
    if isinstance(source, ModelInPlace):
        in_place = _in_place(model.uri, folder_of(source), model.digest, with_weights, no_check)
        yield in_place.folder, in_place.digest
        return
    uri, digest = model.uri, model.digest
    if KEY.fullmatch(digest):
        if entry := Store(weights_dir).sound(digest):
            yield entry.folder, digest
            return
        if weights_store and (stored := open_remote(weights_store).find(digest)):
            # The files of an entry lie below one prefix, as those of any model in S3.
            uri, digest = stored.uri, ""
    with (
        tempfile.TemporaryDirectory(prefix="neuron-serving-outline-") as scratch,
        outline(uri, Path(scratch), digest) as (folder, found_digest),
    ):
        yield folder, model.digest or found_digest or ""


def open_source(model: HubModel | S3Model) -> Source:
    """The source of a remote model, with address and credentials from the environment."""
    if isinstance(model, HubModel):
        from neuron_runtime.weights.hub import HubSource  # noqa: PLC0415  (one of two client libraries is needed)

        return HubSource.from_environment(model)
    from neuron_runtime.weights.s3 import S3Source  # noqa: PLC0415

    return S3Source(model)


def folder_of(model: ModelInPlace) -> Path:
    """Where a model that is read in place lies. Raises FatalError if its volume is not there or the path leaves it."""
    if isinstance(model, FolderModel):
        return model.folder
    if isinstance(model, ImageModel):
        what, variable = "image", IMAGE_DIR_VARIABLE
        root = Path(os.environ.get(variable) or DEFAULT_IMAGE_DIR)
    else:
        what, variable = "volume", CLAIMS_DIR_VARIABLE
        root = Path(os.environ.get(variable) or DEFAULT_CLAIMS_DIR) / model.claim
    if not root.is_dir():
        message = f"{model}: the {what} is not mounted at {root}; mount it there, or set {variable}"
        raise FatalError(ExitCode.MODEL_NOT_FOUND, message)
    folder = root / model.path
    if not _is_below(folder, root):
        raise FatalError(ExitCode.INVALID_MODEL, f"{model}: the path leaves the {what} by a symbolic link")
    check_folder(folder)
    for path in (*folder.iterdir(), *folder.glob(f"{TEMPLATES_FOLDER}/*")):
        if not _is_below(path, root):
            raise FatalError(ExitCode.INVALID_MODEL, f"{model}: {path.name} leaves the {what} by a symbolic link")
    return folder


def _is_below(path: Path, root: Path) -> bool:
    """Whether its links stay in the folder. Unlike `Path.resolve`, it takes a loop of links."""
    return Path(os.path.realpath(path)).is_relative_to(os.path.realpath(root))


def _listing(attempts: Attempts[Source], digest: str) -> Listing:
    """The files of a model. Raises FatalError with CHECKSUM_MISMATCH if the source has another digest."""
    source = attempts.source
    listing = attempts(lambda: source.listing(digest))
    if digest and listing.digest != digest:
        raise FatalError(
            ExitCode.CHECKSUM_MISMATCH,
            f"{source.uri} has digest {listing.digest} at {source.place}, but {digest} is pinned; pin the current "
            "model (in a NeuronModel: set the refresh annotation)",
        )
    return listing


def _in_place(uri: str, folder: Path, digest: str, with_weights: bool, check: SmallCheck) -> Fetched:
    read_config(folder)
    check(folder)
    if not with_weights:
        return Fetched(str(folder), digest, 0)
    checkpoint = read_checkpoint(folder)
    if digest and checkpoint.digest != digest:
        raise FatalError(
            ExitCode.CHECKSUM_MISMATCH,
            f"{uri} has digest {checkpoint.digest}, but {digest} is pinned; serve what was inspected, or set the "
            "refresh annotation to pin the current model",
        )
    num_bytes = sum((folder / file).stat().st_size for file in checkpoint.files)
    return Fetched(str(folder), checkpoint.digest, num_bytes)


def _fetched(entry: Entry, check: SmallCheck, read_bytes: int = 0) -> Fetched:
    check(entry.folder)
    return Fetched(str(entry.folder), entry.manifest.digest, entry.manifest.num_bytes, read_bytes)


def _copy(
    attempts: Attempts[Source],
    listing: Listing,
    work: Path,
    report: Callable[[Amount], None],
    *,
    with_weights: bool,
    check: SmallCheck,
    tools: Tools,
) -> tuple[Manifest, int]:
    """Copy the files of a model, the small ones first: the index among them names the others."""
    folder, uri = work / "files", attempts.source.uri
    with copying(attempts, listing, work, tools) as copy:
        sums, read_bytes = copy(sorted(filter(is_small, listing.files)), lambda amount: None)
        with _naming(folder, uri):
            read_config(folder)
            check(folder)
            weights = weight_files(listing.files, _weight_map(folder)) if with_weights else []
            if with_weights and not weights and INDEX_FILE not in listing.files:
                # What is there is known before anything of it is copied.
                advice = advice_without_safetensors(listing.files.keys())
                raise InvalidModel(f"{folder / INDEX_FILE} is missing: {advice}")
        if with_weights:
            more, more_bytes = copy(weights + graph_files(listing.files), report)
            sums, read_bytes = sums | more, read_bytes + more_bytes
            with _naming(folder, uri):
                read_checkpoint(folder)
    files = tuple(StoredFile(name, listing.files[name].num_bytes, sums[name]) for name in sorted(sums))
    return Manifest(digest=listing.digest, uri=uri, created=time.time(), files=files), read_bytes


def _weight_map(folder: Path) -> dict[str, str]:
    path = folder / INDEX_FILE
    return parse_index(path.read_bytes(), path) if path.exists() else {}


def _draw(attempts: Attempts[Source], listing: Listing, scratch: Path) -> None:
    def start(name: str, num_bytes: float = math.inf) -> bytes:
        file = listing.files[name]
        end = int(min(num_bytes, file.num_bytes))
        return attempts(partial(read_all, attempts.source, listing, file, 0, end)) if end else b""

    names = [name for name in listing.files if is_plain(name) or is_shard(name)]
    for name in names:
        (scratch / name).parent.mkdir(exist_ok=True)
        with (scratch / name).open("wb") as file:
            file.truncate(listing.files[name].num_bytes)
    for name in {CONFIG_FILE, INDEX_FILE, GRAPHS_CONFIG_FILE} & set(names):
        (scratch / name).write_bytes(start(name))

    def copy_header(name: str) -> None:
        file = listing.files[name]
        raw = start(name, FIRST_HEADER_BYTES)
        end = 8 + header_length(raw[:8], file.num_bytes, scratch / name)
        if end > len(raw):
            raw = start(name, end)
        with (scratch / name).open("wb") as copy:
            copy.write(raw[:end])
            copy.truncate(file.num_bytes)

    weights = weight_files(listing.files, {} if WEIGHTS_FILE in listing.files else _weight_map(scratch))
    with ThreadPoolExecutor(NUM_HEADERS, thread_name_prefix="header") as pool:
        for done in [pool.submit(copy_header, name) for name in weights]:
            done.result()


@contextlib.contextmanager
def _naming(folder: Path, uri: str) -> Iterator[None]:
    """Replace `folder` by the model's URI in error messages: users do not know the folder."""
    try:
        yield
    except FatalError as error:
        if str(folder) not in str(error):
            raise
        raise FatalError(error.exit_code, str(error).replace(str(folder), uri)) from error
