"""Conversions at the HTTP border: bytes to typed bodies, and errors to the error objects of the API that was called."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from neuron_runtime.apis.anthropic.errors import ANTHROPIC
from neuron_runtime.apis.failures import ErrorFormat, Failure, failure_of
from neuron_runtime.apis.openai.errors import OPENAI
from neuron_runtime.errors import InvalidRequest, ServingError
from neuron_runtime.requests.conversion import Body, typed

if TYPE_CHECKING:
    from neuron_runtime.server.exchange import Exchange

MESSAGES_PATH = "/v1/messages"


def parse_body(raw: bytes, body_type: type[Body]) -> Body:
    """Raises InvalidRequest with the field, or without one if the body itself is not a JSON object."""
    try:
        fields = msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}") from error
    except RecursionError as error:
        raise InvalidRequest("the body is nested too deeply") from error
    if not isinstance(fields, dict):
        raise InvalidRequest("the body must be a JSON object")
    return typed(fields, body_type)


def error_format(path: str) -> ErrorFormat:
    """The format of the API that this path belongs to."""
    return ANTHROPIC if path == MESSAGES_PATH or path.startswith(f"{MESSAGES_PATH}/") else OPENAI


def error_answer(error: ServingError, exchange: Exchange) -> tuple[int, bytes, dict[str, str]]:
    """Status, body and headers of the response for an error."""
    return failure_answer(failure_of(error), exchange)


def failure_answer(failure: Failure, exchange: Exchange) -> tuple[int, bytes, dict[str, str]]:
    """The same for a failure."""
    chosen = error_format(exchange.path)
    return chosen.status(failure.status), chosen.body(failure, exchange.request_id), dict(failure.headers)
