"""Model sources: reads the outline of the model at a URI without its weights, or downloads it to a local folder.

Called by `inspection` (`outline`: small files whole, only the headers of the weights) and by the engine process before
it loads (`materialize`). It does not import torch, does not check architectures and never prints a token. `_verdict`
decides what each failure means to the user.

Contract with the hub: https://huggingface.co/docs/hub/api, through the huggingface_hub library, which reads the usual
environment (HF_ENDPOINT, HF_TOKEN, proxies).
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import TypeVar

from huggingface_hub import HfApi, get_token, hf_hub_download, hf_hub_url
from huggingface_hub.errors import EntryNotFoundError, GatedRepoError, HfHubHTTPError, RevisionNotFoundError
from huggingface_hub.utils import build_hf_headers, disable_progress_bars, get_session, hf_raise_for_status  # type: ignore[attr-defined]

from neuron_runtime.backend.base import ProgressCallback
from neuron_runtime.checkpoint import INDEX_FILE, WEIGHTS_FILE, header_length, parse_index, read_checkpoint, read_config
from neuron_runtime.config import ModelSource
from neuron_runtime.console import say
from neuron_runtime.errors import ExitCode, FatalError, InvalidConfig, ServingError
from neuron_runtime.uris import FolderModel, HubModel, parse_uri

T = TypeVar("T")

SMALL_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.json",
    "*.jinja",
    INDEX_FILE,
)
"""Files of a model besides its weights, as patterns of names in the repository's root."""

DEFAULT_ENDPOINT = "https://huggingface.co"
NUM_TRANSFERS = 4
FIRST_HEADER_BYTES = 200_000
"""Enough for the header of most safetensors files, so that one request suffices."""
TIMEOUT_SECONDS = 30.0
RETRY_SECONDS = (1.0, 2.0, 4.0, 8.0)
"""Pauses between attempts; there is one more attempt than pauses."""
RETRIED_STATUSES = frozenset({408, 425, 429, *range(500, 600)})
COMPLETE_MARK = ".complete"

# Every failure of the library and of its HTTP client, which differs between releases of the library.
_HUB_FAILURES: tuple[type[BaseException], ...] = (*HfHubHTTPError.__bases__, EntryNotFoundError, OSError)


class HubUnreachable(ServingError):
    """The hub did not respond or is temporarily unavailable. A retry may succeed, so there is no named exit code."""


@dataclass(frozen=True)
class Listing:
    """One commit of a repository: names and sizes of the files in its root."""

    commit: str
    files: dict[str, int]


class Hub:
    """A Hugging Face hub. Retries temporary failures; `_verdict` decides what is permanent.

    Raises from every method:
        FatalError: MODEL_NOT_FOUND, WEIGHTS_UNAUTHORIZED or STORAGE_FULL.
        HubUnreachable: the last attempt failed, too.
    """

    def __init__(self, endpoint: str, token: str | None, sleep: Callable[[float], None] = time.sleep) -> None:
        self.endpoint = endpoint.rstrip("/")
        self._token = token
        self._sleep = sleep
        disable_progress_bars()

    @classmethod
    def from_environment(cls) -> Hub:
        return cls(os.environ.get("HF_ENDPOINT") or DEFAULT_ENDPOINT, get_token())

    def listing(self, model: HubModel) -> Listing:
        """The current commit of the model's revision, and its files."""
        api = HfApi(endpoint=self.endpoint, token=self._token or False)
        info = self._attempt(
            model,
            lambda: api.model_info(
                model.repository, revision=model.revision, files_metadata=True, timeout=TIMEOUT_SECONDS
            ),
        )
        if not info.sha:
            raise HubUnreachable(f"{self.endpoint} returned no commit for {model}; is HF_ENDPOINT the URL of a hub?")
        siblings = info.siblings or []
        return Listing(
            commit=info.sha, files={s.rfilename: s.size or 0 for s in siblings if _is_plain_name(s.rfilename)}
        )

    def fetch(self, model: HubModel, commit: str, name: str, folder: Path) -> Path:
        """Download one file into the folder, resuming an earlier attempt."""
        return Path(
            self._attempt(
                model,
                lambda: hf_hub_download(
                    model.repository,
                    name,
                    revision=commit,
                    local_dir=folder,
                    endpoint=self.endpoint,
                    token=self._token or False,
                    etag_timeout=TIMEOUT_SECONDS,
                ),
            )
        )

    def read_start(self, model: HubModel, commit: str, name: str, num_bytes: int) -> bytes:
        """The first bytes of a file; fewer if it is shorter."""
        url = hf_hub_url(model.repository, name, revision=commit, endpoint=self.endpoint)
        headers = {
            **build_hf_headers(token=self._token or False),
            "Range": f"bytes=0-{num_bytes - 1}",
            "Accept-Encoding": "identity",
        }

        def get() -> bytes:
            response = get_session().get(url, headers=headers, timeout=TIMEOUT_SECONDS)
            hf_raise_for_status(response)
            return bytes(response.content[:num_bytes])

        return self._attempt(model, get)

    def _attempt(self, model: HubModel, call: Callable[[], T]) -> T:
        for pause in (*RETRY_SECONDS, None):
            try:
                return call()
            except _HUB_FAILURES as error:
                final = self._verdict(model, error)
                if final is not None:
                    raise final from error
                reason = _one_line(_root(error))
                if pause is None:
                    raise HubUnreachable(
                        f"{self.endpoint} cannot be reached for {model} after {len(RETRY_SECONDS) + 1} attempts "
                        f"({reason}); check HF_ENDPOINT, proxy settings and, in a cluster, network policies"
                    ) from error
                say(f"{self.endpoint} failed ({reason}); retrying in {pause:.0f} s")
                self._sleep(pause)
        raise AssertionError("unreachable: the last attempt returns or raises")

    def _verdict(self, model: HubModel, error: BaseException) -> FatalError | None:
        """The error to report for a failure; None if a retry may succeed."""
        causes = list(_chain(error))
        if any(isinstance(e, OSError) and e.errno in (errno.ENOSPC, errno.EDQUOT) for e in causes):
            return FatalError(ExitCode.STORAGE_FULL, f"{model}: the disk is full; provide more space for the weights")
        refused = next((e for e in causes if isinstance(e, HfHubHTTPError) and e.response is not None), None)
        if refused is None:
            return None
        status = refused.response.status_code
        if status in RETRIED_STATUSES:
            return None
        where = f"{model} at {self.endpoint}"
        give_token = "provide a token that may read it (HF_TOKEN; model.credentialsSecretRef in a NeuronModel)"
        match refused:
            case GatedRepoError():
                message = f"{where} is gated: accept its terms on its page, then {give_token}"
                return FatalError(ExitCode.WEIGHTS_UNAUTHORIZED, message)
            case RevisionNotFoundError():
                message = f"{where} has no revision {model.revision!r}; name a branch, a tag or a commit"
                return FatalError(ExitCode.MODEL_NOT_FOUND, message)
            case EntryNotFoundError():
                return FatalError(ExitCode.MODEL_NOT_FOUND, f"{where} no longer has a file that it listed; try again")
        if status == 404 or (status == 401 and self._token is None):
            # A hub returns the same 401 to anonymous callers for private and for missing repositories.
            message = f"{where} does not exist or is private; check the spelling, or {give_token}"
            return FatalError(ExitCode.MODEL_NOT_FOUND, message)
        if status in (401, 403):
            return FatalError(
                ExitCode.WEIGHTS_UNAUTHORIZED, f"{where}: the hub refused the token ({status}); {give_token}"
            )
        return FatalError(ExitCode.MODEL_NOT_FOUND, f"{where}: the hub answered {status}: {_one_line(refused)}")


def materialize(
    source: ModelSource,
    weights_dir: Path,
    progress: ProgressCallback,
    hub: Hub | None = None,
    free_bytes: Callable[[Path], int] = lambda folder: shutil.disk_usage(folder).free,
    *,
    with_weights: bool = True,
) -> Path:
    """The local folder of the model, downloaded below `weights_dir` if needed.

    A pinned digest must match: that commit is downloaded, or a local folder must have that digest. Without weights
    a local folder is not checked, and only the small files of a hub model are downloaded.

    Raises:
        InvalidConfig: the URI is malformed, or weights_dir cannot be written.
        FatalError: MODEL_NOT_FOUND, WEIGHTS_UNAUTHORIZED, INVALID_MODEL, CHECKSUM_MISMATCH or STORAGE_FULL.
        HubUnreachable: the hub does not respond.
    """
    match parse_uri(source.uri):
        case FolderModel(folder):
            if not with_weights:
                read_config(folder)
                return folder
            digest = read_checkpoint(folder).digest
            if source.digest and digest != source.digest:
                raise FatalError(
                    ExitCode.CHECKSUM_MISMATCH,
                    f"{source.uri} has digest {digest}, but {source.digest} is pinned; serve the inspected image, "
                    "or set the refresh annotation to pin the current model",
                )
            return folder
        case HubModel() as model:
            hub = hub or Hub.from_environment()
            return _download(
                model, source.digest, weights_dir, progress, hub=hub, free_bytes=free_bytes, with_weights=with_weights
            )


def _download(
    model: HubModel,
    digest: str,
    weights_dir: Path,
    progress: ProgressCallback,
    *,
    hub: Hub,
    free_bytes: Callable[[Path], int],
    with_weights: bool,
) -> Path:
    name = model.repository.replace("/", "--")
    if digest and (weights_dir / f"{name}--{digest}" / COMPLETE_MARK).exists():
        return weights_dir / f"{name}--{digest}"
    pinned = HubModel(model.repository, digest or model.revision)
    listing = hub.listing(pinned)
    if digest and listing.commit != digest:
        message = f"{pinned} is commit {listing.commit} at {hub.endpoint}; a pinned digest must be a commit"
        raise FatalError(ExitCode.CHECKSUM_MISMATCH, message)
    folder = weights_dir / f"{name}--{listing.commit}"
    if (folder / COMPLETE_MARK).exists():
        return folder
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidConfig("--weights-dir", f"{weights_dir} cannot be written: {error.strerror}") from error

    small = [file for file in listing.files if _is_small(file)]
    stage = f"downloading {model} ({listing.commit[:12]})"
    with _naming(folder, model):
        for file in small:
            hub.fetch(pinned, listing.commit, file, folder)
        if not with_weights:
            # Not marked as complete: a later call with weights resumes here.
            read_config(folder)
            return folder
        weights = _weight_files(listing, folder)
        wanted = {file: listing.files[file] for file in (*small, *weights)}
        needed = sum(wanted.values()) - _bytes_below(folder)
        if (free := free_bytes(folder)) < needed:
            raise FatalError(
                ExitCode.STORAGE_FULL,
                f"{model} needs {needed:,} more bytes in {weights_dir}, but {free:,} are free; provide more space",
            )
        total = max(1, sum(wanted.values()))
        _all_done(
            (partial(hub.fetch, pinned, listing.commit, file, folder) for file in weights),
            lambda: progress(stage, min(0.999, _bytes_below(folder) / total)),
        )
        for file, num_bytes in wanted.items():
            if (actual := (folder / file).stat().st_size) != num_bytes:
                message = f"{model}: {file} has {actual:,} bytes, but the hub lists {num_bytes:,}; download it again"
                raise FatalError(ExitCode.CHECKSUM_MISMATCH, message)
        read_checkpoint(folder)
    shutil.rmtree(folder / ".cache", ignore_errors=True)
    (folder / COMPLETE_MARK).touch()
    progress(stage, 1.0)
    return folder


def _all_done(calls: Iterable[Callable[[], object]], while_waiting: Callable[[], None]) -> None:
    """Make calls concurrently; raises the first failure and cancels calls that have not started."""
    with ThreadPoolExecutor(NUM_TRANSFERS, thread_name_prefix="transfer") as pool:
        pending = {pool.submit(call) for call in calls}
        try:
            while pending:
                done, pending = wait(pending, timeout=1.0, return_when=FIRST_EXCEPTION)
                for future in done:
                    future.result()
                while_waiting()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


@contextlib.contextmanager
def outline(uri: str, scratch: Path, hub: Hub | None = None) -> Iterator[tuple[Path, str | None]]:
    """A folder that `read_checkpoint` can read like the model's, and its commit (None for a local folder).

    For a hub model, config.json, the index and the headers of the weights are downloaded to `scratch`; every other
    byte is a hole, so file sizes are right and all checks apply. Errors raised in the body name the URI instead of the
    scratch folder.

    Raises: as `materialize`, except storage errors.
    """
    match parse_uri(uri, "URI"):
        case FolderModel(folder):
            yield folder, None
        case HubModel() as model:
            hub = hub or Hub.from_environment()
            listing = hub.listing(model)
            with _naming(scratch, model):
                _draw(hub, model, listing, scratch)
                yield scratch, listing.commit


def _draw(hub: Hub, model: HubModel, listing: Listing, scratch: Path) -> None:
    for name, num_bytes in listing.files.items():
        with (scratch / name).open("wb") as file:
            file.truncate(num_bytes)
    for name in (n for n in ("config.json", INDEX_FILE) if n in listing.files):
        (scratch / name).write_bytes(hub.read_start(model, listing.commit, name, listing.files[name]))

    def copy_header(name: str) -> None:
        num_file_bytes = listing.files[name]
        start = hub.read_start(model, listing.commit, name, FIRST_HEADER_BYTES)
        end = 8 + header_length(start[:8], num_file_bytes, scratch / name)
        if end > len(start):
            start = hub.read_start(model, listing.commit, name, end)
        with (scratch / name).open("r+b") as file:
            file.write(start[:end])

    _all_done((partial(copy_header, name) for name in _weight_files(listing, scratch)), lambda: None)


def _weight_files(listing: Listing, folder: Path) -> list[str]:
    """The safetensors files of the model, by the same rule as `read_checkpoint`; empty if there are none."""
    if WEIGHTS_FILE in listing.files:
        return [WEIGHTS_FILE]
    if INDEX_FILE not in listing.files:
        return []
    named = set(parse_index((folder / INDEX_FILE).read_bytes(), folder / INDEX_FILE).values())
    return sorted(named & listing.files.keys())


@contextlib.contextmanager
def _naming(folder: Path, model: HubModel) -> Iterator[None]:
    """Replace `folder` by the model's URI in error messages: users do not know the folder."""
    try:
        yield
    except FatalError as error:
        if str(folder) not in str(error):
            raise
        raise FatalError(error.exit_code, str(error).replace(str(folder), str(model))) from error


def _is_small(name: str) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in SMALL_FILES)


def _is_plain_name(name: str) -> bool:
    return name == os.path.basename(name) and name not in ("", ".", "..")


def _bytes_below(folder: Path) -> int:
    """Bytes on disk, including unfinished downloads; a file renamed during the walk counts as 0."""
    total = 0
    for base, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                total += os.stat(os.path.join(base, name)).st_size
    return total


def _chain(error: BaseException) -> Iterator[BaseException]:
    current: BaseException | None = error
    while current is not None:
        yield current
        current = current.__cause__ or current.__context__


def _root(error: BaseException) -> BaseException:
    """The root cause: the library wraps "connection refused" in advice about caches."""
    causes = list(_chain(error))
    return next((e for e in causes if isinstance(e, HfHubHTTPError)), causes[-1])


def _one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".strip().partition("\n")[0][:300]
