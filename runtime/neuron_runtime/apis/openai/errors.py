"""OpenAI's error object, the body of every error that no other API has its own object for."""

from __future__ import annotations

from typing import Annotated

import msgspec

from neuron_runtime.apis.failures import ErrorFormat, Failure


class Error(msgspec.Struct):
    """An error of a request or of the server."""

    message: Annotated[str, "What happened and what to do."]
    type: Annotated[str, "Kind of the error, e.g. `invalid_request_error`."]
    param: Annotated[str | None, "The invalid field."]
    code: Annotated[str | None, "Machine-readable reason, e.g. `context_length_exceeded`."]


class ErrorObject(msgspec.Struct):
    """OpenAI's error object, the body of every error."""

    error: Annotated[Error, "The error."]


def _openai_body(failure: Failure, request_id: str) -> bytes:
    return msgspec.json.encode(ErrorObject(Error(failure.message, failure.kind, failure.param, failure.code)))


OPENAI = ErrorFormat(ErrorObject, _openai_body)
