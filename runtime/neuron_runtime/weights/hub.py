"""Models at a Hugging Face hub, as a `Source`.

Contract: https://huggingface.co/docs/hub/api, through the huggingface_hub library, which reads the usual environment
(HF_ENDPOINT, HF_TOKEN, proxies). Its own downloads are not used: they read a file in one stream and set no limit on an
answer that drips. Never prints a token or a signed address.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from huggingface_hub import HfApi, get_hf_file_metadata, get_token, hf_hub_url
from huggingface_hub.errors import EntryNotFoundError, GatedRepoError, HfHubHTTPError, RevisionNotFoundError
from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status  # type: ignore[attr-defined]

from neuron_runtime.errors import ExitCode, FatalError, InvalidConfig
from neuron_runtime.uris import HubModel
from neuron_runtime.weights.source import (
    BLOCK_BYTES,
    RETRIED_STATUSES,
    TIMEOUT_SECONDS,
    BrokenAnswer,
    Check,
    Listing,
    SourceFile,
    chain,
    changed,
    check_range,
    one_line,
    without_secrets,
)

_COMMIT = re.compile(r"[0-9a-f]{40,64}")
_NO_LISTING = "the answer is no listing of a model; is HF_ENDPOINT the URL of a hub?"
DEFAULT_ENDPOINT = "https://huggingface.co"

# Every failure of the library and of its HTTP client, which differs between releases of the library.
_FAILURES: tuple[type[BaseException], ...] = (*HfHubHTTPError.__bases__, EntryNotFoundError, OSError)


class _StaleAddress(BrokenAnswer):
    """The signed address of a file has expired; the next attempt asks the hub for a new one."""


@dataclass(frozen=True)
class HubSource:
    """One model at a hub. The digest is the commit."""

    model: HubModel
    endpoint: str = DEFAULT_ENDPOINT
    token: str | None = field(default=None, repr=False)
    _addresses: dict[str, str] = field(default_factory=dict, repr=False)
    """Signed addresses of large files: one redirect by the hub serves many reads."""

    advice = "HF_ENDPOINT, proxy settings and, in a cluster, network policies"
    failures = _FAILURES

    @classmethod
    def from_environment(cls, model: HubModel) -> HubSource:
        """Raises InvalidConfig if HF_ENDPOINT is no URL."""
        endpoint = (os.environ.get("HF_ENDPOINT") or DEFAULT_ENDPOINT).rstrip("/")
        try:
            parts = urlsplit(endpoint)
            is_url = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
        except ValueError:
            is_url = False
        if not is_url:
            raise InvalidConfig("HF_ENDPOINT", f"{without_secrets(endpoint)!r} is no URL; write https://HOST")
        return cls(model, endpoint, get_token())

    @property
    def uri(self) -> str:
        return str(self.model)

    @property
    def place(self) -> str:
        return without_secrets(self.endpoint)

    def listing(self, digest: str = "") -> Listing:
        api = HfApi(endpoint=self.endpoint, token=self.token or False)
        try:
            info = api.model_info(
                self.model.repository,
                revision=digest or self.model.revision,
                files_metadata=True,
                timeout=TIMEOUT_SECONDS,
            )
            if not _COMMIT.fullmatch(commit := str(info.sha)):
                raise BrokenAnswer(f"{_NO_LISTING} (no commit)")
            files = [_file(one, self._size(one, commit)) for one in info.siblings or []]
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            # The library does not check the answer: that of a login page or of a proxy fails anywhere.
            raise BrokenAnswer(f"{_NO_LISTING} ({type(error).__name__})") from None
        return Listing(commit, {file.name: file for file in files})

    def _size(self, sibling: Any, commit: str) -> int:
        """Bytes of a file. A mirror may list files without their sizes; then it is asked for each."""
        if sibling.size is not None:
            return sibling.size  # type: ignore[no-any-return]
        url = hf_hub_url(self.model.repository, sibling.rfilename, revision=commit, endpoint=self.endpoint)
        size = get_hf_file_metadata(url, token=self.token or False, timeout=TIMEOUT_SECONDS).size
        if size is None:
            raise BrokenAnswer(f"it tells no size of {sibling.rfilename}, neither in its listing nor when asked")
        return size

    def check(self, listing: Listing, file: SourceFile) -> Check | None:
        return file.check

    @contextmanager
    def read(self, listing: Listing, file: SourceFile, begin: int, end: int) -> Iterator[Iterator[bytes]]:
        url = hf_hub_url(self.model.repository, file.name, revision=listing.digest, endpoint=self.endpoint)
        ranged = {"Range": f"bytes={begin}-{end - 1}", "Accept-Encoding": "identity"}
        address = self._addresses.get(file.name)
        headers = ranged if address else {**build_hf_headers(token=self.token or False), **ranged}
        with _opened(address or url, headers) as (response, blocks):
            status: int = response.status_code
            if address and 400 <= status < 500 and status not in RETRIED_STATUSES:
                self._addresses.pop(file.name, None)
                raise _StaleAddress(f"the address of {file.name} has expired ({status})")
            hf_raise_for_status(response)
            received = response.headers
            check_range(
                status, received.get("Content-Range", ""), received.get("Content-Encoding", ""), begin, file.num_bytes
            )
            final = str(response.url)
            if urlsplit(final).netloc != urlsplit(url).netloc:
                self._addresses[file.name] = final
            yield blocks

    def verdict(self, error: BaseException) -> FatalError | None:
        refused = next((e for e in chain(error) if isinstance(e, HfHubHTTPError) and e.response is not None), None)
        if refused is None:
            return None
        status = refused.response.status_code
        if status in RETRIED_STATUSES:
            return None
        where = f"{self.model} at {self.place}"
        give_token = "provide a token that may read it (HF_TOKEN; credentialsSecretRef in a manifest)"
        if self.token is None:
            give_token += "; no token was given: a Secret has it as HF_TOKEN, or under the key that the manifest names"
        match refused:
            case GatedRepoError():
                message = f"{where} is gated: accept its terms on its page, then {give_token}"
                return FatalError(ExitCode.WEIGHTS_UNAUTHORIZED, message)
            case RevisionNotFoundError():
                message = f"{where} has no revision {self.model.revision!r}; name a branch, a tag or a commit"
                return FatalError(ExitCode.MODEL_NOT_FOUND, message)
            case EntryNotFoundError():
                return FatalError(ExitCode.MODEL_NOT_FOUND, f"{where} no longer has a file that it listed; try again")
        if status == 404 or (status == 401 and self.token is None):
            # A hub returns the same 401 to anonymous callers for private and for missing repositories.
            message = f"{where} does not exist or is private; check the spelling, or {give_token}"
            return FatalError(ExitCode.MODEL_NOT_FOUND, message)
        if status in (401, 403):
            return FatalError(
                ExitCode.WEIGHTS_UNAUTHORIZED, f"{where}: the hub refused the token ({status}); {give_token}"
            )
        if status == 416:
            return changed(self.uri, "a file")
        return FatalError(ExitCode.MODEL_NOT_FOUND, f"{where}: the hub answered {status}: {one_line(refused)}")


def _file(sibling: Any, num_bytes: int) -> SourceFile:
    """A file with the digest that the hub has of it: of its contents if it is large, else of its git blob."""
    name, lfs = sibling.rfilename, sibling.lfs
    if not (isinstance(name, str) and isinstance(num_bytes, int) and num_bytes >= 0):
        raise ValueError("a file without name or size")
    check: Check | None = None
    if lfs is not None:
        check = Check("sha256", lfs.sha256)
    elif sibling.blob_id:
        check = Check("git", sibling.blob_id)
    return SourceFile(name, num_bytes, check=check)


@contextmanager
def _opened(url: str, headers: dict[str, str]) -> Iterator[tuple[Any, Iterator[bytes]]]:
    """The response and the blocks of its body, by the library's HTTP client: httpx, or requests in older releases."""
    session: Any = get_session()
    if callable(session.stream):
        with session.stream("GET", url, headers=headers, timeout=TIMEOUT_SECONDS) as response:
            if response.status_code >= 400:
                response.read()
            yield response, response.iter_raw()
        return
    with session.get(url, headers=headers, timeout=TIMEOUT_SECONDS, stream=True) as response:
        yield response, response.iter_content(BLOCK_BYTES)
