"""The runtime's error tree: one class for each party that must act, with the details that it needs.

Raised at the rim (server, config, loaders, backends), caught by the server (status codes) and by `__main__` (exit
codes).

    ServingError
    ├── InvalidRequest        client: 400 with the field (404 for an unknown model, 413 for a large body)
    ├── Unauthorized          client: 401 with WWW-Authenticate
    ├── Overloaded            client, later: 429 with Retry-After
    ├── Draining              load balancer: 503, Connection: close
    ├── BackendFailed         platform: 503, not ready
    │   ├── AdapterNotReady   client, later: 503 for this adapter alone
    │   └── FormBroken        platform: 503, although the engine is ready
    └── FatalError            the process exits with `exit_code`; the record has reason and message
        └── InvalidConfig     deployer: exit 2 with the field, before the port opens
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import IntEnum


class ExitCode(IntEnum):
    """Exit codes shared with the operator; `reason` is the reason in its conditions."""

    INVALID_ENGINE_CONFIG = 2
    MODEL_NOT_FOUND = 10
    WEIGHTS_UNAUTHORIZED = 11
    UNSUPPORTED_ARCHITECTURE = 12
    INVALID_MODEL = 13
    CHECKSUM_MISMATCH = 14
    STORAGE_FULL = 15
    WEIGHTS_MISSING = 16
    CONVERSION_FAILED = 17
    ARTIFACT_MISSING = 20
    COMPILE_FAILED = 21
    COMPILE_OUT_OF_MEMORY = 22
    DEVICE_HELD = 30
    DEVICE_OUT_OF_MEMORY = 31
    DEVICE_FAILED = 32
    DEVICE_FAILED_NODE = 33
    DRIVER_INCOMPATIBLE = 34
    DEVICES_NOT_ADJACENT = 35
    TOPOLOGY_IMPOSSIBLE = 36
    GROUP_MEMBER_LOST = 40
    GROUP_DISAGREES = 41
    RESTART_BUDGET_EXHAUSTED = 50
    RANK_TOO_HIGH = 60
    TARGETS_NOT_SERVED = 61
    ADAPTER_MISMATCH = 62
    ADAPTER_NOT_SUPPORTED = 63
    INVALID_ADAPTER = 64

    @property
    def reason(self) -> str:
        return _SHARED_REASONS.get(self) or "".join(word.title() for word in self.name.split("_"))


# Codes that differ for restart policies but have the same reason in conditions.
_SHARED_REASONS = {
    ExitCode.DEVICE_FAILED_NODE: "DeviceFailed",
    ExitCode.GROUP_MEMBER_LOST: "GroupIncomplete",
    ExitCode.GROUP_DISAGREES: "GroupIncomplete",
}


MAX_PROBLEMS = 10
"""An error that says everything that is wrong at once names at most this many problems."""


def joined(problems: Sequence[str]) -> str:
    """Several problems in one line."""
    more = len(problems) - MAX_PROBLEMS
    return "; ".join(problems[:MAX_PROBLEMS]) + (f"; and {more} more" if more > 0 else "")


class ServingError(Exception):
    """Base of every error that this package raises on purpose. `str(error)` is one sentence for the user."""

    code: str | None = None
    """Machine-readable; `code` of an OpenAI error object."""


class InvalidRequest(ServingError):
    """The request is invalid; `field` is the JSON path of the wrong value, None for the body itself."""

    def __init__(self, message: str, field: str | None = None, status: int = 400, code: str | None = None) -> None:
        super().__init__(message)
        self.parts: tuple[str, ...] = (message,)
        """The problems, if it has several."""
        self.field = field
        self.status = status
        self.code = code

    @classmethod
    def at(cls, field: str, problem: str, code: str | None = None) -> InvalidRequest:
        """The error about a field, whose name begins the message."""
        return cls(f"`{field}` {problem}", field, code=code)

    @classmethod
    def together(cls, errors: Sequence[InvalidRequest]) -> InvalidRequest:
        """One error for all of these; the field is that of the first."""
        made = cls(joined([str(error) for error in errors]), field=errors[0].field)
        made.parts = tuple(map(str, errors))
        return made


class Unauthorized(ServingError):
    """The request has no valid API key; `presented` is whether it has a key at all. Never contains the key."""

    code = "invalid_api_key"

    def __init__(self, presented: bool) -> None:
        super().__init__(
            "invalid API key: ask the administrator of this server for a key"
            if presented
            else "an API key is required: send `Authorization: Bearer KEY`"
        )
        self.presented = presented


class Overloaded(ServingError):
    """The queue is full; the client may retry after `retry_after_seconds`."""

    code = "overloaded"

    def __init__(self, message: str, retry_after_seconds: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_seconds = retry_after_seconds


class Draining(ServingError):
    """The process is shutting down and admits no requests."""

    code = "draining"


class BackendFailed(ServingError):
    """The device (or the process that owned it) failed while this request was in flight."""

    code = "not_ready"


class AdapterNotReady(BackendFailed):
    """The adapter that the request asks for is not loaded yet, or cannot be."""

    code = "adapter_not_ready"


class FormBroken(BackendFailed):
    """The backend sampled a token that the form of an answer does not allow."""

    code = "form_broken"


class FatalError(ServingError):
    """The process cannot continue; it exits with `exit_code` and writes a record."""

    def __init__(self, exit_code: ExitCode, message: str) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class InvalidConfig(FatalError):
    """The deployer's configuration is wrong at `field` (a JSON path), and maybe at others."""

    def __init__(self, field: str, message: str, *others: tuple[str, str]) -> None:
        """others: further fields and messages."""
        self.parts = ((field, message), *others)
        super().__init__(ExitCode.INVALID_ENGINE_CONFIG, joined([f"{name}: {what}" for name, what in self.parts]))
        self.field = field


class ConfigProblems:
    """Collects what independent checks find, to report everything at once."""

    def __init__(self) -> None:
        self._parts: list[tuple[str, str]] = []

    def add(self, field: str, message: str) -> None:
        self._parts.append((field, message))

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """The block ends at its first InvalidConfig, which is kept."""
        try:
            yield
        except InvalidConfig as error:
            self._parts += error.parts

    def check(self) -> None:
        """Raises InvalidConfig if anything was found."""
        if self._parts:
            raise InvalidConfig(*self._parts[0], *self._parts[1:])
