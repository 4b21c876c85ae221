"""Anthropic's error object and its kinds of errors."""

from __future__ import annotations

from typing import Annotated

import msgspec

from neuron_runtime.apis.failures import ErrorFormat, Failure


class MessagesError(msgspec.Struct):
    """An error of a request or of the server."""

    type: Annotated[str, "Kind of the error, e.g. `invalid_request_error`."]
    message: Annotated[str, "What happened and what to do."]


class MessagesErrorObject(msgspec.Struct, tag="error", kw_only=True):
    """Anthropic's error object."""

    error: Annotated[MessagesError, "The error."]
    request_id: Annotated[str | None, "As in the header `x-request-id`."]


def _anthropic_body(failure: Failure, request_id: str) -> bytes:
    error = MessagesError(_KINDS.get(failure.status, failure.kind), failure.message)
    return msgspec.json.encode(MessagesErrorObject(error=error, request_id=request_id or None))


_KINDS = {408: "timeout_error", 413: "request_too_large", 500: "api_error", 503: "overloaded_error"}
"""Those that are not OpenAI's, by status."""
ANTHROPIC = ErrorFormat(MessagesErrorObject, _anthropic_body, {503: 529})
"""Its clients expect 529 from a service that is busy or restarts, and try again."""
