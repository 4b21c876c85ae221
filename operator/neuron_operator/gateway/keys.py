"""API keys: who may ask for which models, and for how many tokens a minute. Read from a mounted Secret.

Only digests are kept, and look-ups are by digest: the time they take says nothing about a key. A file that becomes
invalid leaves the previous keys valid.
"""

from __future__ import annotations

import hashlib
import logging
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import msgspec
import yaml
from msgspec import Meta

from neuron_operator.gateway.config import InvalidConfig, Part
from neuron_operator.gateway.errors import Refusal, limited
from neuron_operator.gateway.models import Target

logger = logging.getLogger(__name__)

MAX_FILE_BYTES = 1024 * 1024
MINUTE = 60.0


class KeyEntry(Part, frozen=True):
    """One key as the file has it: exactly one of `key` and `keySha256`."""

    name: Annotated[str, Meta(pattern=r"^[A-Za-z0-9._@/-]{1,63}$")]
    """In log and metrics."""
    key: Annotated[str, Meta(pattern=r"^[\x21-\x7e]{16,512}$")] = ""
    key_sha256: Annotated[str, Meta(pattern=r"^[0-9a-f]{64}$")] = ""
    models: tuple[str, ...] = ()
    """Names as clients write them, or `namespace/name`; empty: all."""
    tokens_per_minute: Annotated[int, Meta(ge=0)] = 0
    """0: without a limit."""


class ApiKey:
    """A key and what it has left. The tokens of an answer are known at its end: a request is admitted while some are
    left, and its answer may use more than those."""

    def __init__(self, entry: KeyEntry, gateways: int, now: float) -> None:
        self.entry = entry
        self.name = entry.name
        self.models = frozenset(entry.models)
        self.per_second = entry.tokens_per_minute / gateways / MINUTE
        self.left = self.per_second * MINUTE
        self._filled_at = now

    def may_use(self, target: Target) -> bool:
        return not self.models or target.name in self.models or target.qualified in self.models

    def seconds_until_free(self, now: float) -> float:
        if not self.per_second:
            return 0.0
        self._fill(now)
        return 0.0 if self.left > 0 else (1 - self.left) / self.per_second

    def use(self, tokens: int, now: float) -> None:
        if self.per_second:
            self._fill(now)
            self.left -= tokens

    def take_over(self, earlier: ApiKey) -> None:
        """The same key in another version of the file."""
        if earlier.per_second == self.per_second:
            self.left, self._filled_at = earlier.left, earlier._filled_at

    def _fill(self, now: float) -> None:
        self.left = min(self.per_second * MINUTE, self.left + (now - self._filled_at) * self.per_second)
        self._filled_at = now


def parse(raw: bytes, source: str) -> dict[bytes, KeyEntry]:
    """By digest. Raises InvalidConfig, whose message has no key."""
    if len(raw) > MAX_FILE_BYTES:
        raise InvalidConfig(f"{source} is longer than {MAX_FILE_BYTES} bytes")
    try:
        document = yaml.safe_load(raw)
    except (yaml.YAMLError, ValueError, LookupError, AttributeError, RecursionError):  # not all are its own
        raise InvalidConfig(f"{source} is not YAML or JSON") from None
    try:
        entries = msgspec.convert(document, list[KeyEntry])
    except msgspec.ValidationError as error:
        raise InvalidConfig(f"{source}: {error}") from None
    found: dict[bytes, KeyEntry] = {}
    for number, entry in enumerate(entries, 1):
        if bool(entry.key) == bool(entry.key_sha256):
            raise InvalidConfig(f"{source}: entry {number} must have one of key and keySha256")
        found[_digest(entry.key.encode()) if entry.key else bytes.fromhex(entry.key_sha256)] = entry
    if len(found) < len(entries):
        raise InvalidConfig(f"{source}: two entries have the same key")
    return found


class Keys:
    """The keys of a file; without one every request is admitted."""

    def __init__(self, file: str, gateways: int, now: float) -> None:
        """Raises InvalidConfig if the file cannot be read."""
        self._file = Path(file) if file else None
        self._gateways = gateways
        self._seen: object = None
        self._keys: dict[bytes, ApiKey] = {}
        if self._file is not None:
            try:
                self._read(now)
            except OSError as error:
                raise InvalidConfig(f"cannot read {self._file}: {error.strerror}") from error

    @property
    def are_set(self) -> bool:
        return self._file is not None

    def of(self, headers: Mapping[bytes, bytes]) -> ApiKey | None:
        """Raises Refusal without a valid key, if keys are set."""
        if self._file is None:
            return None
        scheme, _, token = headers.get(b"authorization", b"").partition(b" ")
        # Anthropic's clients send their key in a header of its own.
        presented = token.strip() if scheme.lower() == b"bearer" else headers.get(b"x-api-key", b"")
        key = self._keys.get(_digest(presented)) if presented else None
        if key is None:
            message = "invalid API key" if presented else "an API key is required: send `Authorization: Bearer KEY`"
            raise Refusal(401, "authentication_error", message, code="invalid_api_key", challenge=True)
        return key

    def check(self, key: ApiKey | None, target: Target, now: float) -> None:
        """Raises Refusal if the key may not ask for this model, or not now."""
        if key is None:
            return
        if not key.may_use(target):
            message = f"this API key may not use `{target.name}`"
            raise Refusal(403, "permission_error", message, code="model_not_allowed", param="model")
        if seconds := key.seconds_until_free(now):
            message = f"this API key has used its {key.per_second * MINUTE * self._gateways:.0f} tokens per minute"
            raise limited(message, "tokens_per_minute", math.ceil(seconds))

    def reload(self, now: float) -> None:
        """Read the file again if it has changed."""
        if self._file is None:
            return
        try:
            if _signature(os.stat(self._file)) != self._seen:
                self._read(now)
                logger.info("%s has changed: %d API keys are valid now", self._file, len(self._keys))
        except OSError as error:  # tried again, and said once
            if self._seen is not None:
                self._seen = None
                logger.warning("%s; the previous API keys stay valid", error)
        except InvalidConfig as error:
            logger.warning("%s; the previous API keys stay valid", error)

    def _read(self, now: float) -> None:
        """Raises OSError, and InvalidConfig once for each version of the file: reading a long one takes a second."""
        assert self._file is not None
        with self._file.open("rb") as file:
            self._seen = _signature(os.fstat(file.fileno()))
            raw = file.read(MAX_FILE_BYTES + 1)
        keys = {}
        for digest, entry in parse(raw, str(self._file)).items():
            earlier = self._keys.get(digest)
            if earlier is not None and earlier.entry == entry:
                keys[digest] = earlier  # requests that run are still counted
                continue
            key = keys[digest] = ApiKey(entry, self._gateways, now)
            if earlier is not None:
                key.take_over(earlier)
        self._keys = keys


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _signature(status: os.stat_result) -> object:
    return status.st_dev, status.st_ino, status.st_mtime_ns, status.st_size
