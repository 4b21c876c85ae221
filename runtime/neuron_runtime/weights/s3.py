"""Models in S3 or a store that speaks its protocol, as a `Source`, through boto3; `remote` shares the connection.

Credentials, region and address come from the environment as boto3 reads it: AWS_* variables, a shared file, a service
account (web identity, EKS pod identity), the machine's role; without any, requests are anonymous. A model is the
objects directly below a prefix; deeper ones are ignored.
"""

from __future__ import annotations

import base64
import hashlib
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from typing import Any

import boto3
from botocore import UNSIGNED
from botocore.config import Config
from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    ConnectionError,  # noqa: A004 - of the library
    CredentialRetrievalError,
    HTTPClientError,
    IncompleteReadError,
    MetadataRetrievalError,
    NoCredentialsError,
    PartialCredentialsError,
    ProfileNotFound,
    TokenRetrievalError,
)
from urllib3.exceptions import HTTPError

from neuron_runtime.errors import ExitCode, FatalError, InvalidConfig
from neuron_runtime.uris import S3Model
from neuron_runtime.weights.selection import is_part, is_small_folder
from neuron_runtime.weights.source import (
    BLOCK_BYTES,
    RETRIED_STATUSES,
    TIMEOUT_SECONDS,
    Check,
    Listing,
    SourceFile,
    chain,
    changed,
    check_range,
    one_line,
    without_secrets,
)

CONNECT_SECONDS = 10.0
MAX_CONNECTIONS = 64
DEFAULT_REGION = "us-east-1"
"""Any region will do for stores other than AWS's; AWS redirects to the region of a bucket."""

_CREDENTIALS = (
    NoCredentialsError, PartialCredentialsError, CredentialRetrievalError, ProfileNotFound, TokenRetrievalError,
)  # fmt: skip
_WRONG_REGION = frozenset({
    "PermanentRedirect", "TemporaryRedirect", "AuthorizationHeaderMalformed", "IllegalLocationConstraintException",
})  # fmt: skip
_REFUSED = frozenset({
    "AccessDenied", "AllAccessDisabled", "AccountProblem", "ExpiredToken", "ExpiredTokenException",
    "InvalidAccessKeyId", "InvalidIdentityToken", "InvalidToken", "RequestTimeTooSkewed", "SignatureDoesNotMatch",
    "TokenRefreshRequired", "UnauthorizedAccess",
})  # fmt: skip
_UNREADABLE = {
    "InvalidObjectState": "an object is archived; restore it to a storage class that can be read at once",
    "NoSuchBucket": "the bucket does not exist; check the spelling",
}
_TEMPORARY = (ConnectionError, HTTPClientError, IncompleteReadError, MetadataRetrievalError)
READ_RIGHTS = "listing the bucket and reading its objects (s3:ListBucket, s3:GetObject)"

# Checksums that the standard library computes, the cheapest first, as the sha256 of a file is computed anyway.
_CHECKSUMS = {"ChecksumSHA256": "sha256", "ChecksumCRC32": "crc32", "ChecksumSHA1": "sha1"}


class S3Place:
    """What lies below one s3:// URI, as boto3 reaches it: a client, and what its failures mean.

    Args:
        rights: what the credentials must permit.
        missing: the exit code if the store or an object does not exist.
        num_attempts: of one request, by the library.
    """

    advice = "AWS_ENDPOINT_URL, AWS_REGION, proxy settings and, in a cluster, network policies"
    failures: tuple[type[BaseException], ...] = (BotoCoreError, ClientError, HTTPError, OSError)

    def __init__(
        self,
        model: S3Model,
        client: Any = None,
        *,
        rights: str = READ_RIGHTS,
        missing: ExitCode = ExitCode.MODEL_NOT_FOUND,
        num_attempts: int = 1,
    ) -> None:
        self.uri = str(model)
        self.model = model
        self._rights = rights
        self._missing = missing
        self._anonymous = False
        self.client = self._connected(num_attempts) if client is None else client

    def _connected(self, num_attempts: int) -> Any:
        try:
            session = boto3.session.Session(region_name=os.environ.get("AWS_REGION"))
            self._anonymous = session.get_credentials() is None
        except BotoCoreError as error:
            raise FatalError(ExitCode.WEIGHTS_UNAUTHORIZED, f"{self.uri}: {one_line(error)}; {self._give}") from error
        config = Config(
            connect_timeout=CONNECT_SECONDS,
            read_timeout=TIMEOUT_SECONDS,
            retries={"total_max_attempts": num_attempts, "mode": "standard"},
            max_pool_connections=MAX_CONNECTIONS,
            response_checksum_validation="when_required",  # parts of objects have none
            **({"signature_version": UNSIGNED} if self._anonymous else {}),
        )
        try:
            return session.client("s3", region_name=session.region_name or DEFAULT_REGION, config=config)
        except (BotoCoreError, ValueError) as error:
            raise InvalidConfig("AWS_*", f"{one_line(error)}; correct the environment") from error

    def at(self, name: str) -> dict[str, str]:
        """An object below the URI, as arguments of the client."""
        return {"Bucket": self.model.bucket, "Key": self.model.key(name)}

    @property
    def place(self) -> str:
        return without_secrets(str(self.client.meta.endpoint_url))

    @property
    def _give(self) -> str:
        return (
            f"provide AWS credentials that permit {self._rights}: AWS_* variables (credentialsSecretRef in a "
            "manifest), or the role of the service account"
        )

    def verdict(self, error: BaseException) -> FatalError | None:
        where = f"{self.uri} at {self.place}"
        if isinstance(error, _CREDENTIALS):
            return FatalError(ExitCode.WEIGHTS_UNAUTHORIZED, f"{self.uri}: {one_line(error)}; {self._give}")
        refused = next((cause for cause in chain(error) if isinstance(cause, ClientError)), None)
        if refused is None:
            if isinstance(error, BotoCoreError) and not isinstance(error, _TEMPORARY):
                return InvalidConfig("AWS_*", f"{one_line(error)}; correct the environment")
            return None
        status = refused.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
        code = str(refused.response.get("Error", {}).get("Code", ""))
        if code in _WRONG_REGION or status in (301, 307):
            headers = refused.response.get("ResponseMetadata", {}).get("HTTPHeaders", {})
            region = headers.get("x-amz-bucket-region") or refused.response.get("Error", {}).get("Region")
            used = self.client.meta.region_name
            cure = f"set AWS_REGION={region}" if region else "set AWS_REGION to the region of the bucket"
            return FatalError(self._missing, f"{where}: the bucket is not in region {used}; {cure}")
        if status == 412 or code in ("PreconditionFailed", "InvalidRange"):
            return changed(self.uri, "an object")
        if code in _UNREADABLE:
            return FatalError(self._missing, f"{where}: {_UNREADABLE[code]}")
        if code == "NotImplemented":
            return InvalidConfig("AWS_ENDPOINT_URL", f"{where}: the store lacks a feature of S3: {one_line(refused)}")
        if code in _REFUSED or status in (401, 403):
            with_what = "anonymous access" if self._anonymous else "these credentials"
            message = f"{where}: the store refused {with_what} ({code or status}); {self._give}"
            return FatalError(ExitCode.WEIGHTS_UNAUTHORIZED, message)
        if code in ("NoSuchKey", "404"):
            return FatalError(self._missing, f"{where} no longer has an object that it listed; try again")
        if status in RETRIED_STATUSES or code in ("SlowDown", "RequestTimeout", "InternalError"):
            return None
        return FatalError(self._missing, f"{where}: the store answered {status}: {one_line(refused)}")


class S3Source(S3Place):
    """The objects below one prefix.

    Args:
        is_pinned: the digest is a hash of the names, sizes and ETags of these files.
        was_pinned: the same of digests that an earlier version of this program has pinned.
    """

    def __init__(
        self,
        model: S3Model,
        client: Any = None,
        *,
        is_pinned: Callable[[str], bool] = is_part,
        was_pinned: Callable[[str], bool] = lambda name: False,
        **more: Any,
    ) -> None:
        super().__init__(model, client, **more)
        self._is_pinned = is_pinned
        self._was_pinned = was_pinned

    def listing(self, digest: str = "") -> Listing:
        prefix = self.model.key("")
        files: dict[str, SourceFile] = {}
        pages = list(self._pages(prefix))
        for inner in [one["Prefix"] for page in pages for one in page.get("CommonPrefixes", [])]:
            if is_small_folder(inner.removeprefix(prefix).removesuffix("/")):
                pages += self._pages(inner)
        for page in pages:
            for item in page.get("Contents", []):
                name = item["Key"].removeprefix(prefix)
                files[name] = SourceFile(name, item["Size"], version=item["ETag"].strip('"'))
        files.pop("", None)  # the mark of a folder
        if not files:
            raise FatalError(
                ExitCode.MODEL_NOT_FOUND, f"{self.uri} at {self.place}: no object is below this prefix; check the URI"
            )
        now, before = (
            _digest(files[name] for name in sorted(filter(pinned, files)))
            for pinned in (self._is_pinned, self._was_pinned)
        )
        return Listing(before if digest == before else now, files)

    def _pages(self, prefix: str) -> Iterable[Mapping[str, Any]]:
        """What is directly below a prefix."""
        pages: Iterable[Mapping[str, Any]] = self.client.get_paginator("list_objects_v2").paginate(
            Bucket=self.model.bucket, Prefix=prefix, Delimiter="/"
        )
        return pages

    def check(self, listing: Listing, file: SourceFile) -> Check | None:
        """From the attributes of the object. None for an encrypted upload without a checksum of its own."""
        head = self._head(file, ChecksumMode="ENABLED")
        stated: list[tuple[str, str]] = []
        """Algorithm and value; `-N` follows one that is over N parts."""
        for key, algorithm in _CHECKSUMS.items():
            text, dash, num_parts = str(head.get(key, "")).partition("-")
            if text:
                stated.append((algorithm, base64.b64decode(text).hex() + dash + num_parts))
        if head.get("ServerSideEncryption", "AES256") == "AES256" and "SSECustomerAlgorithm" not in head:
            stated.append(("md5", file.version))  # otherwise the ETag is no hash
        part_bytes = 0
        for algorithm, value in stated:
            text, _, num_parts = value.partition("-")
            if not _is_hash(algorithm, text):
                continue
            if not num_parts:
                return Check(algorithm, text)
            part_bytes = part_bytes or self._head(file, PartNumber=1).get("ContentLength", 0)
            if part_bytes and str(-(-file.num_bytes // part_bytes)) == num_parts:
                return Check(algorithm, text, part_bytes)  # parts of the same size
        return None

    @contextmanager
    def read(self, listing: Listing, file: SourceFile, begin: int, end: int) -> Iterator[Iterator[bytes]]:
        answer = self.client.get_object(
            **self.at(file.name), Range=f"bytes={begin}-{end - 1}", IfMatch=f'"{file.version}"'
        )
        with closing(answer["Body"]) as body:
            status = answer["ResponseMetadata"]["HTTPStatusCode"]
            check_range(status, answer.get("ContentRange", ""), "", begin, file.num_bytes)
            yield body.iter_chunks(BLOCK_BYTES)

    def _head(self, file: SourceFile, **more: Any) -> Mapping[str, Any]:
        head: Mapping[str, Any] = self.client.head_object(**self.at(file.name), IfMatch=f'"{file.version}"', **more)
        return head


def _digest(files: Iterable[SourceFile]) -> str:
    digest = hashlib.sha256(b"s3 1\n")
    for file in files:
        digest.update(f"{len(file.name.encode())} {file.name} {file.num_bytes} {file.version}\n".encode())
    return digest.hexdigest()


def _is_hash(algorithm: str, text: str) -> bool:
    num_bytes = 4 if algorithm == "crc32" else hashlib.new(algorithm, usedforsecurity=False).digest_size
    return re.fullmatch(rf"[0-9a-f]{{{2 * num_bytes}}}", text) is not None
