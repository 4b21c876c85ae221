"""Builds the FastAPI application with `/openapi.json` and `/docs` from one declaration per route.

`server.app` declares its routes with the Structs of requests and responses, from which schemas, defaults and ranges are
derived. FastAPI does the routing and assembles the document. It does not parse or check bodies: a handler gets the
request and returns the response, so that every error is an OpenAI error object.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from types import UnionType
from typing import Any, get_args, get_type_hints

import msgspec
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from fastapi.routing import APIRoute
from fastapi_offline import FastAPIOffline
from starlette.requests import Request
from starlette.responses import Response

from neuron_runtime.apis.failures import ErrorFormat
from neuron_runtime.not_built import Surface, rows
from neuron_runtime.requests.parameters import Parameter, parameters_of
from neuron_runtime.server.auth import needs_key
from neuron_runtime.server.wire import error_format

Struct = type[msgspec.Struct] | UnionType
"""One type, or one of several."""
Handler = Callable[[Request], Awaitable[Response]]

KIND = "The kind of object."
KEY_SCHEME = "apiKey"
DESCRIPTION = """\
OpenAI's API with vLLM's additions. Fields of these APIs that are not supported yet get an error that names the field;
unknown fields are ignored. Null means the default. Every response has the header `x-request-id`, copied from the
request if it has one."""

ERRORS: Mapping[int, str] = {
    400: "The body is not a JSON object, or a field is invalid or not supported.",
    401: "The API key is missing or invalid.",
    403: "Requests may not change the adapters of this server.",
    404: "The model does not exist.",
    408: "The body arrived too slowly.",
    413: "The body is too large.",
    415: "The body is compressed.",
    529: "The model is not ready, or is shutting down. The header `Retry-After` has the seconds until a retry.",
    429: "Too many requests or prompt tokens are waiting. The header `Retry-After` has the seconds until a retry.",
    503: "The model is not ready, or is shutting down. The header `Retry-After` has the seconds until a retry.",
}
BODY_ERRORS = (400, 404, 408, 413, 415, 429, 503)
"""Error statuses of requests with a body."""


@dataclass(frozen=True)
class Operation:
    """One route."""

    tag: str
    path: str
    handler: Handler
    summary: str
    answer: Struct | str
    """The response with status 200; a media type if it is not JSON."""
    body: Struct | None = None
    example: Mapping[str, Any] | None = None
    """Example of the body."""
    event: Struct | None = None
    """The data of each server-sent event, if the response can be streamed."""
    failures: Mapping[int, Struct] | None = None
    """Responses with other statuses, in addition to the errors of requests with a body."""
    parameters: Mapping[str, str] | None = None
    """Path parameters with their descriptions."""
    name: str = ""
    """Of an operation that another path has too; empty: that of the handler."""
    lists: bool = False
    """The response is a list of answers."""


class Route(APIRoute):
    """A route whose handler reads the request and creates the response itself."""

    def get_route_handler(self) -> Callable[[Request], Any]:
        return self.endpoint


def application(operations: Sequence[Operation], exception_handlers: Mapping[Any, Any], has_keys: bool) -> FastAPI:
    """has_keys: whether clients must send an API key."""
    app: FastAPI = FastAPIOffline(
        title="neuron-serving",
        version=version("neuron-serving"),
        description=DESCRIPTION,
        exception_handlers=exception_handlers,
        generate_unique_id_function=lambda route: route.name,
        redoc_url=None,
        static_url="/docs/static",
    )
    app.router.route_class = Route
    for operation in operations:
        app.add_api_route(
            operation.path,
            operation.handler,
            name=operation.name or None,
            methods=["POST"] if operation.body else ["GET", "HEAD"],
            tags=[operation.tag],
            summary=operation.summary,
            response_class=Response,
            responses=_responses(operation, has_keys),
            openapi_extra=_extra(operation, has_keys),
        )
    app.openapi = functools.cache(functools.partial(_document, app, operations, has_keys))  # type: ignore[method-assign]
    return app


def _document(app: FastAPI, operations: Sequence[Operation], has_keys: bool) -> dict[str, Any]:
    routes = [_documented(route) for route in app.routes if isinstance(route, Route)]
    document = get_openapi(title=app.title, version=app.version, description=app.description, routes=routes)
    structs = {one for operation in operations for one in _structs(operation)}
    _, schemas = msgspec.json.schema_components(
        sorted(structs, key=lambda one: one.__name__), ref_template="#/components/schemas/{name}"
    )
    for struct in _reachable(structs):
        for name, row in parameters_of(struct).items():
            schemas[struct.__name__]["properties"][name] |= _schema(row)
        if struct.__struct_config__.tag_field is not None:
            schemas[struct.__name__]["properties"][struct.__struct_config__.tag_field]["description"] = KIND
    for operation in operations:
        for struct in _members(operation.body):
            surface = getattr(struct, "surface", Surface.BODY)
            refused = {row.name: list(row.neutral) for row in rows(surface) if row.has_effect}
            schemas[struct.__name__]["x-not-supported"] = refused
    document["components"] = {"schemas": _with_items(schemas)}
    if has_keys:
        document["components"]["securitySchemes"] = {KEY_SCHEME: {"type": "http", "scheme": "bearer"}}
    return document


def _schema(row: Parameter) -> dict[str, Any]:
    """Description, default and range of a field. Null means the default."""
    ends = {"minimum": row.lowest, "maximum": row.highest}
    schema = {"description": row.description, "default": row.default, **ends}
    if row.setting and row.default is not None:
        # A generated client may send the published default, which would override the model's.
        text = f"{row.description}. Default: the model's, else {row.default}"
        schema |= {"description": text, "default": None}
    return {key: value for key, value in schema.items() if value is not None}


def _with_items(schema: Any) -> Any:
    """Add `items` to arrays of any type: msgspec omits it, and client generators require it."""
    if isinstance(schema, list):
        return [_with_items(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    items: dict[str, Any] = {"items": {}} if schema.get("type") == "array" else {}
    return items | {key: _with_items(value) for key, value in schema.items()}


def _documented(route: Route) -> Route:
    """A copy without HEAD, which every GET route supports."""
    route = copy.copy(route)
    route.methods = (route.methods or set()) - {"HEAD"}
    return route


def _members(kind: Struct | str | None) -> tuple[type[msgspec.Struct], ...]:
    """The types of a union; one type by itself; none for what is not JSON."""
    if isinstance(kind, UnionType):
        return get_args(kind)
    return (kind,) if isinstance(kind, type) else ()


def _structs(operation: Operation) -> set[type[msgspec.Struct]]:
    structs = {operation.body, operation.event, operation.answer, *_failures(operation, True).values()}
    return {one for kind in structs for one in _members(kind)}


def _reachable(kinds: Iterable[Any]) -> set[type[msgspec.Struct]]:
    """These Structs, and all in the types of their fields."""
    reachable, waiting = set[type[msgspec.Struct]](), list(kinds)
    while waiting:
        kind = waiting.pop()
        if not isinstance(kind, type):
            waiting += get_args(kind)
        elif issubclass(kind, msgspec.Struct) and kind not in reachable:
            reachable.add(kind)
            waiting += get_type_hints(kind).values()
    return reachable


def _failures(operation: Operation, has_keys: bool) -> dict[int, Struct]:
    failures = dict(operation.failures or {})
    statuses: tuple[int, ...] = () if operation.body is None else BODY_ERRORS
    if has_keys and needs_key(operation.path):
        statuses += (401,)
    chosen = error_format(operation.path)
    return dict(sorted((failures | {chosen.status(status): chosen.struct for status in statuses}).items()))


def _responses(operation: Operation, has_keys: bool) -> dict[int | str, dict[str, Any]]:
    content = _content(operation.answer)
    if operation.lists:
        content = {kind: {"schema": {"type": "array", "items": one["schema"]}} for kind, one in content.items()}
    if operation.event is not None:
        content["text/event-stream"] = {"schema": _event(operation.event, error_format(operation.path))}
    failures = _failures(operation, has_keys).items()
    return {
        200: {"description": "The answer.", "content": content},
        **{status: {"description": ERRORS[status], "content": _content(struct)} for status, struct in failures},
    }


def _extra(operation: Operation, has_keys: bool) -> dict[str, Any]:
    extra: dict[str, Any] = {}
    if operation.parameters is not None:
        extra["parameters"] = [
            {"name": name, "in": "path", "required": True, "description": description, "schema": {"type": "string"}}
            for name, description in operation.parameters.items()
        ]
    if operation.body is not None:
        media = {"schema": _reference(operation.body), "example": operation.example}
        extra["requestBody"] = {"required": True, "content": {"application/json": media}}
    if has_keys and needs_key(operation.path):
        extra["security"] = [{KEY_SCHEME: []}]
    return extra


def _event(struct: Struct, errors: ErrorFormat) -> dict[str, Any]:
    """One event of a stream, which may end with an error object. Events have names, or the last one is `[DONE]`."""
    structs = _members(struct)
    references = [_reference(one) for one in dict.fromkeys((*structs, errors.struct))]
    data: dict[str, Any] = {
        "type": "string",
        "contentMediaType": "application/json",
        "contentSchema": {"anyOf": references},
    }
    if all(one.__struct_config__.tag for one in structs):
        return {
            "type": "object",
            "properties": {"event": {"type": "string"}, "data": data},
            "required": ["event", "data"],
        }
    return {"type": "object", "properties": {"data": {"anyOf": [data, {"const": "[DONE]"}]}}, "required": ["data"]}


def _content(kind: Struct | str) -> dict[str, Any]:
    if isinstance(kind, str):
        return {kind: {"schema": {"type": "string"}}}
    return {"application/json": {"schema": _reference(kind)}}


def _reference(kind: Struct) -> dict[str, Any]:
    references = [{"$ref": f"#/components/schemas/{struct.__name__}"} for struct in _members(kind)]
    return references[0] if len(references) == 1 else {"anyOf": references}
