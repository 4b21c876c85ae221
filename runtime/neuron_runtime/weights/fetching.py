"""Brings a model or an adapter to this machine: into a store from where it is loaded, or only its outline for
inspection.

Called by `fetch`, by the engine process and `LLM` before they load (`materialize`), by the manager of adapters, and by
`inspection` (`outline`). It combines a source, a transfer and a store. It does not import torch and does not check
architectures. `Parts` are what a model and an adapter differ in.
"""

from __future__ import annotations

import contextlib
import math
import os
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from neuron_runtime.adapters import peft as adapters
from neuron_runtime.backend_protocol import ProgressCallback
from neuron_runtime.checkpoint import (
    CONFIG_FILE,
    GRAPHS_FILE,
    INDEX_FILE,
    MAX_HEADER_BYTES,
    MAX_JSON_BYTES,
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
from neuron_runtime.console import say
from neuron_runtime.errors import ExitCode, FatalError, InvalidConfig, ServingError
from neuron_runtime.record import AdapterFacts
from neuron_runtime.uris import FolderModel, HubModel, ImageModel, ModelInPlace, S3Model, parse_uri
from neuron_runtime.weights.selection import (
    graph_files,
    is_adapter_part,
    is_outlined,
    is_part,
    is_plain,
    is_small,
    is_small_adapter_part,
    was_part,
    weight_files,
)
from neuron_runtime.weights.source import RETRY_SECONDS, Attempts, Listing, Source, read_all
from neuron_runtime.weights.store import KEY, MODELS, Entry, EntryKind, Manifest, Store, StoredFile
from neuron_runtime.weights.transfer import TOOLS, Amount, Tools, copying

if TYPE_CHECKING:
    from neuron_runtime.weights.remote import RemoteEntry, RemoteStore

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
class Parts:
    """Which files of a source are fetched, and what they must be.

    Args:
        config: the file without which a folder has none.
        is_outlined: whether a file is in its outline, whole.
        is_small: whether a file is copied first.
        is_part: whether it may be copied at all.
        is_pinned: whether the digest of a source without commits is over it.
        was_pinned: the same of digests that earlier versions of this program have pinned.
        large: what is copied last, of all names at the source, when the small files are in a folder.
        max_header_bytes: of a file of tensors.
        check_small, check: what reads a folder with the small files, with all; what is wrong is a FatalError.
        measure: digest and bytes of what stays in place.
        suffixes: of the keys of entries that have them, the last one of what is made.
        rule: number of the rule by which files are chosen: entries of a lower one may lack some.
        wanted: the lowest rule of entries that are used without a look at their source.
        lacking: what entries of a lower rule may lack, in words.
        is_large: whether an entry that may lack files is compared with its source before it is copied again.
    """

    config: str
    is_outlined: Callable[[str], bool]
    is_small: Callable[[str], bool]
    is_part: Callable[[str], bool]
    is_pinned: Callable[[str], bool]
    large: Callable[[Path, Collection[str]], list[str]]
    max_header_bytes: int
    check_small: Callable[[Path], object]
    check: Callable[[Path], object]
    measure: Callable[[Path], tuple[str, int]]
    suffixes: tuple[str, ...]
    was_pinned: Callable[[str], bool] = lambda name: False
    rule: int = 1
    wanted: int = 1
    lacking: str = ""
    is_large: bool = False

    def may_lack(self, entry: Entry | RemoteEntry) -> bool:
        """Whether the entry may lack files that are needed."""
        return entry.manifest.rule < self.wanted

    def lacks(self, entry: Entry | RemoteEntry, listing: Listing) -> bool:
        """Whether it is copied again: it lacks some that its source has."""
        if not (self.is_large and self.may_lack(entry)):
            return self.may_lack(entry)
        return not {*filter(self.is_small, listing.files)} <= {file.name for file in entry.manifest.files}


def _model_files(folder: Path, names: Collection[str]) -> list[str]:
    weights = weight_files(names, {} if WEIGHTS_FILE in names else _weight_map(folder))
    if not weights and INDEX_FILE not in names:
        # What is there is known before anything of it is copied.
        raise InvalidModel(f"{folder / INDEX_FILE} is missing: {advice_without_safetensors(names)}")
    return weights + graph_files(names)


def _measure_model(folder: Path) -> tuple[str, int]:
    checkpoint = read_checkpoint(folder)
    return checkpoint.digest, sum((folder / file).stat().st_size for file in checkpoint.files)


def _adapter_files(folder: Path, names: Collection[str]) -> list[str]:
    adapters.check_names(folder, names)
    return [adapters.WEIGHTS_FILE]


def _measure_adapter(folder: Path) -> tuple[str, int]:
    adapter = adapters.open_adapter(folder)
    return adapter.digest(), adapter.num_bytes


MODEL = Parts(
    config=CONFIG_FILE,
    is_outlined=is_outlined,
    is_small=is_small,
    is_part=is_part,
    is_pinned=is_part,
    was_pinned=was_part,
    large=_model_files,
    max_header_bytes=MAX_HEADER_BYTES,
    check_small=read_config,
    check=read_checkpoint,
    measure=_measure_model,
    suffixes=("",),
    rule=2,  # the first one took no files of sentence-transformers; models that generate text need none
    lacking="the files of sentence-transformers, if it has some",
    is_large=True,
)
TEXT = replace(
    MODEL,
    is_part=is_small,
    large=lambda folder, names: [],
    check=read_config,
    measure=lambda folder: ("", 0),
    suffixes=("", "-text"),
)
"""A model without its weights."""
ADAPTER = Parts(
    config=adapters.CONFIG_FILE,
    is_outlined=lambda name: name == adapters.CONFIG_FILE,
    is_small=is_small_adapter_part,
    is_part=is_adapter_part,
    is_pinned=is_adapter_part,
    was_pinned=lambda name: name in (adapters.CONFIG_FILE, adapters.WEIGHTS_FILE),
    large=_adapter_files,
    max_header_bytes=adapters.MAX_HEADER_BYTES,
    check_small=adapters.read_config,
    check=adapters.open_adapter,
    measure=_measure_adapter,
    suffixes=("-adapter",),
    rule=2,  # the first one took no files of chats and defaults
    wanted=2,
    lacking="its chat template and defaults",
)


def with_recipe(parts: Parts) -> Parts:
    """The same, where what makes vectors of the model's output must not be missing."""
    return replace(parts, wanted=parts.rule)


@dataclass(frozen=True)
class Fetched:
    """A model or an adapter in its place: a folder, or the address of a remote store's entry. `read_bytes`: from its
    source, now; 0 if it was there already."""

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
    parts: Parts = MODEL,
    check: SmallCheck = no_check,
    tools: Tools = TOOLS,
) -> Fetched:
    """The model, or other parts, as a complete entry of the store, copied from its source unless it is there. Folders
    stay in place. An entry that may lack files is copied again, and stays as it is if that fails.

    Args:
        digest: what the model must be; the digest of what the source has now if empty.
        source: default: the one of the URI, with credentials from the environment.
        remote: another store, from which an entry is copied before its source is asked.
        on_miss: whether a model that is in neither store is copied from its source, or is an error.
        parts: what is fetched: MODEL, TEXT or ADAPTER.
        check: called before weights are copied from the source.

    Raises:
        InvalidConfig: the URI is malformed.
        FatalError: that of `check`; MODEL_NOT_FOUND, WEIGHTS_UNAUTHORIZED, INVALID_MODEL, CHECKSUM_MISMATCH,
            WEIGHTS_MISSING or STORAGE_FULL, or the store cannot be written.
        SourceUnreachable: the source or the other store does not respond.
    """
    model = parse_uri(uri)
    if isinstance(model, ModelInPlace):
        return _in_place(uri, folder_of(model, parts.config), digest, parts, check)

    def found(digest: str) -> Entry | None:
        if entry := stored(digest, store, remote, report, parts):
            return entry
        if on_miss == "fail":
            places = f"{store.folder}" if remote is None else f"{store.folder} or {remote.address}"
            flag = " --adapter" if parts is ADAPTER else ""
            raise FatalError(
                ExitCode.WEIGHTS_MISSING,
                f"{uri} with digest {digest} is not in {places}; fetch it there: neuron-runtime fetch {uri} "
                f"{store.folder if remote is None else remote.address} --digest {digest}{flag}",
            )
        return None

    def copied(pauses: tuple[float, ...]) -> Fetched:
        attempts = Attempts(source or open_source(model, parts), tools.sleep, pauses)
        listing = _listing(attempts, digest)
        if not digest and (entry := found(listing.digest)) and not parts.may_lack(entry):
            return _fetched(entry, check)
        key = listing.digest + parts.suffixes[-1]
        store.prepare()
        with store.lock(key, uri) as work:
            entry = store.sound(key, replace=True)
            if entry and not parts.lacks(entry, listing):
                return _fetched(entry, check)
            manifest, read_bytes = _copy(attempts, listing, work, report, parts=parts, check=check, tools=tools)
            if entry:
                store.discard(key)
            return _fetched(store.publish(key, work, manifest), check, read_bytes)

    entry = found(digest) if KEY.fullmatch(digest) else None
    if entry is None:
        return copied(RETRY_SECONDS)
    if on_miss == "fetch" and parts.may_lack(entry):
        try:
            return copied(())
        except ServingError as error:
            say(f"{uri}: an earlier version of this program fetched it without {parts.lacking}: {error}")
    return _fetched(entry, check)


def stored(
    digest: str, store: Store, remote: RemoteStore | None, report: Callable[[Amount], None], parts: Parts = MODEL
) -> Entry | None:
    """The entry of a digest, from another store if this one lacks it; None if that does, too. Raises as `fetch`."""
    keys = [digest + suffix for suffix in parts.suffixes]
    for key in keys:
        if entry := store.sound(key):
            return entry
    if remote is None:
        return None
    return remote.download(keys[0], store, report, into=keys[-1], wanted=parts.is_part)


def supply(
    uri: str,
    remote: RemoteStore,
    scratch: Store,
    report: Callable[[Amount], None],
    report_upload: Callable[[Amount], None],
    *,
    digest: str = "",
    parts: Parts = MODEL,
) -> Fetched:
    """The model as a complete entry of a remote store, by way of a local one. Arguments and errors as of `fetch`.

    Nothing is read from the source if the remote store has the digest. A damaged entry is replaced.
    """
    model = parse_uri(uri)
    if isinstance(model, ModelInPlace):
        raise InvalidConfig("URI", f"{uri} is read in place; only what a hub or S3 has is copied to a store")
    source, suffix = open_source(model, parts), parts.suffixes[-1]
    if not digest:
        digest = Attempts(source)(source.listing).digest
    present = remote.intact(digest + suffix) if KEY.fullmatch(digest) else None
    if present and not _must_be_copied(present, Attempts(source, pauses=()), digest, parts):
        return Fetched(remote.uri_of(present.key), digest, present.manifest.num_bytes)
    supplied = fetch(uri, scratch, report, digest, source, parts=parts)
    key = supplied.digest + suffix
    if entry := scratch.find(key):
        remote.upload(entry, report_upload)
    return Fetched(remote.uri_of(key), supplied.digest, supplied.num_bytes, supplied.read_bytes)


def _must_be_copied(entry: RemoteEntry, attempts: Attempts[Source], digest: str, parts: Parts) -> bool:
    """Whether it lacks files; one that merely may lack some stays as it is where its source cannot be asked."""
    if not (parts.is_large and parts.may_lack(entry)):
        return parts.may_lack(entry)
    try:
        return parts.lacks(entry, _listing(attempts, digest))
    except ServingError as error:
        say(f"{entry.key}: an earlier version of this program fetched it without {parts.lacking}: {error}")
        return False


def fetch_adapter(
    uri: str,
    store: Store,
    report: Callable[[Amount], None],
    digest: str = "",
    *,
    model_config: Mapping[str, Any],
    rules: adapters.AdapterRules,
    remote: RemoteStore | None = None,
    on_miss: OnMiss = "fetch",
    tools: Tools = TOOLS,
) -> tuple[Fetched, AdapterFacts]:
    """An adapter that fits the model with this config.json, in its place. Arguments as of `fetch`.

    It is checked by its headers before more of it is copied, so that what does not fit takes no space.

    Raises FatalError as `fetch` and `adapters.read_adapter`, or SourceUnreachable.
    """
    with adapters.reading():
        is_stored = KEY.fullmatch(digest) and store.sound(digest + ADAPTER.suffixes[-1]) is not None
        if on_miss == "fetch" and not is_stored:
            with (
                tempfile.TemporaryDirectory(prefix="neuron-serving-outline-") as scratch,
                outline(uri, Path(scratch), digest, ADAPTER) as (folder, found),
                naming(folder, uri),
            ):
                adapters.check_adapter(folder, model_config, rules)
                digest = digest or found or ""
        fetched = fetch(uri, store, report, digest, remote=remote, on_miss=on_miss, parts=ADAPTER, tools=tools)
        with naming(fetched.folder, uri):
            return fetched, adapters.read_adapter(fetched.folder, model_config, rules)


def materialize(
    model: ModelSource,
    weights_dir: Path,
    progress: ProgressCallback,
    source: Source | None = None,
    *,
    weights_store: str = "",
    on_miss: OnMiss = "fetch",
    with_weights: bool = True,
    has_recipe: bool = False,
    check: SmallCheck = no_check,
    tools: Tools = TOOLS,
) -> Path:
    """The local folder of the model, brought into the store at `weights_dir` if needed. Errors as of `fetch`.

    Args:
        weights_store: address of a remote store, "" for none.
        has_recipe: whether the files of sentence-transformers are read, too.
    """
    stage = f"fetching {model.uri}"
    shown = False

    def report(amount: Amount) -> None:
        nonlocal shown
        shown = True
        progress(stage, min(0.999, amount.done_bytes / max(1, amount.total_bytes)))

    store, remote = Store(weights_dir), open_remote(weights_store) if weights_store else None
    parts = MODEL if with_weights else TEXT
    parts = with_recipe(parts) if has_recipe else parts
    if model.converted:
        converted = stored(model.converted, store, remote, report, parts)
        if converted is None:
            raise _not_converted(model, remote.address if remote else store.address)
        entry = _fetched(converted, check)
    else:
        entry = fetch(
            model.uri,
            store,
            report,
            model.digest,
            source,
            remote=remote,
            on_miss=on_miss,
            parts=parts,
            check=check,
            tools=tools,
        )
    if shown:
        progress(stage, 1.0)
    return entry.folder


def _not_converted(model: ModelSource, address: str) -> FatalError:
    return FatalError(
        ExitCode.WEIGHTS_MISSING,
        f"{model.uri} with converted weights, digest {model.converted}, is not in {address}; convert it there: "
        f"neuron-runtime convert {model.uri} {address}",
    )


def open_remote(uri: str, field: str = "--weights-store", kind: EntryKind = MODELS) -> RemoteStore:
    """The store in S3 at this address. Raises InvalidConfig at `field` if it is none."""
    from neuron_runtime.weights.remote import RemoteStore  # noqa: PLC0415  (brings a client library)

    return RemoteStore(uri, field, kind=kind)


@contextlib.contextmanager
def outline(uri: str, scratch: Path, digest: str = "", parts: Parts = MODEL) -> Iterator[tuple[Path, str | None]]:
    """A folder that `read_checkpoint` can read like the model's, and its digest (None for a local folder).

    Of a remote model, which must have the given digest, the configuration, the index and the headers of the weights are
    copied to `scratch`; every other byte is a hole, so file sizes are right and all checks apply. Errors raised in the
    body name the URI instead of the scratch folder. Raises as `fetch`, except storage errors.
    """
    model = parse_uri(uri, "URI")
    if isinstance(model, ModelInPlace):
        yield folder_of(model, parts.config), None
        return
    attempts = Attempts(open_source(model, parts))
    listing = _listing(attempts, digest)
    with naming(scratch, uri):
        _draw(attempts, listing, scratch, parts)
        yield scratch, listing.digest


@contextlib.contextmanager
def described(
    model: ModelSource, weights_dir: Path, weights_store: str = "", *, with_weights: bool = True
) -> Iterator[tuple[Path, str]]:
    """A folder that `read_checkpoint` can read like the model's, without a fetch, and the model's digest.

    It is the model where it lies, or its outline from a store or its source. Raises as `outline`.

    with_weights: False for a model of which only config.json is read.
    """
    if model.converted:
        with _described_converted(model, weights_dir, weights_store) as folder:
            yield folder, model.converted
        return
    source = parse_uri(model.uri)
    if isinstance(source, ModelInPlace):
        parts = MODEL if with_weights else TEXT
        in_place = _in_place(model.uri, folder_of(source), model.digest, parts, no_check)
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


@contextlib.contextmanager
def _described_converted(model: ModelSource, weights_dir: Path, weights_store: str) -> Iterator[Path]:
    if entry := Store(weights_dir).sound(model.converted):
        yield entry.folder
        return
    remote = weights_store and open_remote(weights_store).find(model.converted)
    if not remote:
        raise _not_converted(model, weights_store or str(weights_dir))
    with (
        tempfile.TemporaryDirectory(prefix="neuron-serving-outline-") as scratch,
        outline(remote.uri, Path(scratch)) as (folder, _),
    ):
        yield folder


def open_source(model: HubModel | S3Model, parts: Parts = MODEL) -> Source:
    """The source of a remote model, with address and credentials from the environment."""
    if isinstance(model, HubModel):
        from neuron_runtime.weights.hub import HubSource  # noqa: PLC0415  (one of two client libraries is needed)

        return HubSource.from_environment(model)
    from neuron_runtime.weights.s3 import S3Source  # noqa: PLC0415

    return S3Source(model, is_pinned=parts.is_pinned, was_pinned=parts.was_pinned)


def folder_of(model: ModelInPlace, config: str = CONFIG_FILE) -> Path:
    """Where a model that is read in place lies. Raises FatalError if its volume is not there or the path leaves it.

    config: the file that the folder must have, for an error.
    """
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
    check_folder(folder, config)
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


def _in_place(uri: str, folder: Path, digest: str, parts: Parts, check: SmallCheck) -> Fetched:
    parts.check_small(folder)
    check(folder)
    found, num_bytes = parts.measure(folder)
    if digest and found and found != digest:
        raise FatalError(
            ExitCode.CHECKSUM_MISMATCH,
            f"{uri} has digest {found}, but {digest} is pinned; serve what was inspected, or set the "
            "refresh annotation to pin what is there now",
        )
    return Fetched(str(folder), found or digest, num_bytes)


def _fetched(entry: Entry, check: SmallCheck, read_bytes: int = 0) -> Fetched:
    check(entry.folder)
    return Fetched(str(entry.folder), entry.manifest.digest, entry.manifest.num_bytes, read_bytes)


def _copy(
    attempts: Attempts[Source],
    listing: Listing,
    work: Path,
    report: Callable[[Amount], None],
    *,
    parts: Parts,
    check: SmallCheck,
    tools: Tools,
) -> tuple[Manifest, int]:
    """Copy the files of a model, the small ones first: the index among them names the others."""
    folder, uri = work / "files", attempts.source.uri
    with copying(attempts, listing, work, tools) as copy:
        sums, read_bytes = copy(sorted(filter(parts.is_small, listing.files)), lambda amount: None)
        with naming(folder, uri):
            parts.check_small(folder)
            check(folder)
            large = parts.large(folder, listing.files.keys())
        more, more_bytes = copy(large, report)
        sums, read_bytes = sums | more, read_bytes + more_bytes
        with naming(folder, uri):
            parts.check(folder)
    files = tuple(StoredFile(name, listing.files[name].num_bytes, sums[name]) for name in sorted(sums))
    manifest = Manifest(rule=parts.rule, digest=listing.digest, uri=uri, created=time.time(), files=files)
    return manifest, read_bytes


def _weight_map(folder: Path) -> dict[str, str]:
    path = folder / INDEX_FILE
    return parse_index(path.read_bytes(), path) if path.exists() else {}


def _draw(attempts: Attempts[Source], listing: Listing, scratch: Path, parts: Parts) -> None:
    def start(name: str, num_bytes: float = math.inf) -> bytes:
        file = listing.files[name]
        end = int(min(num_bytes, file.num_bytes))
        return attempts(partial(read_all, attempts.source, listing, file, 0, end)) if end else b""

    names = [name for name in listing.files if is_plain(name) or is_shard(name) or parts.is_outlined(name)]
    for name in names:
        (scratch / name).parent.mkdir(exist_ok=True)
        with (scratch / name).open("wb") as file:
            file.truncate(listing.files[name].num_bytes)
    for name in filter(parts.is_outlined, names):
        with (scratch / name).open("r+b") as small:
            small.write(start(name, MAX_JSON_BYTES))  # a larger one is refused by its size

    def copy_header(name: str) -> None:
        file = listing.files[name]
        raw = start(name, FIRST_HEADER_BYTES)
        end = 8 + header_length(raw[:8], file.num_bytes, scratch / name, parts.max_header_bytes)
        if end > len(raw):
            raw = start(name, end)
        with (scratch / name).open("wb") as copy:
            copy.write(raw[:end])
            copy.truncate(file.num_bytes)

    weights = [name for name in parts.large(scratch, listing.files.keys()) if name != GRAPHS_FILE]
    with ThreadPoolExecutor(NUM_HEADERS, thread_name_prefix="header") as pool:
        for done in [pool.submit(copy_header, name) for name in weights]:
            done.result()


@contextlib.contextmanager
def naming(folder: Path, uri: str) -> Iterator[None]:
    """Replace `folder` by the model's URI in error messages: users do not know the folder."""
    try:
        yield
    except FatalError as error:
        if str(folder) not in str(error):
            raise
        raise FatalError(error.exit_code, str(error).replace(str(folder), uri)) from error
