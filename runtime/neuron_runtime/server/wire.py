"""Conversions at the HTTP border: bytes to typed bodies, and errors to the error objects of the API that was called."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
from starlette.responses import Response

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


def error_response(error: ServingError, exchange: Exchange) -> Response:
    """The response for an error, which becomes the outcome of the exchange."""
    exchange.error = error
    return failure_response(failure_of(error), exchange)


def failure_response(failure: Failure, exchange: Exchange) -> Response:
    chosen = error_format(exchange.path)
    body = chosen.body(failure, exchange.request_id)
    return Response(body, chosen.status(failure.status), failure.headers, media_type="application/json")
