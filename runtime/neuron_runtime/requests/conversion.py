"""Converts named values from an HTTP body or a Python caller to a typed body, or raises an InvalidRequest.

Stop 1 of a request. The types are the bodies of `apis` and the options of `requests`; `admission` then checks what
depends on the model.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import msgspec

from neuron_runtime.errors import InvalidRequest
from neuron_runtime.not_built import Surface, refuse
from neuron_runtime.requests.parameters import parameters_of
from neuron_runtime.validation import explain, problems

Body = TypeVar("Body", bound=msgspec.Struct)


def typed(fields: Mapping[str, Any], body_type: type[Body], *, ignores_unknown: bool = True) -> Body:
    """Convert named values from an HTTP body or a Python caller to a typed body, and check their ranges.

    Args:
        ignores_unknown: ignore unknown fields, as OpenAI's clients expect; otherwise refuse them.

    Raises:
        InvalidRequest: says everything that is wrong, and names the first field.
    """
    rows = parameters_of(body_type)
    surface: Surface = getattr(body_type, "surface", Surface.BODY)
    elsewhere: Callable[[str, Any], bool] = getattr(body_type, "elsewhere", lambda name, value: False)
    known = {name: _whole(value) for name, value in fields.items() if name in rows}
    wrong: list[InvalidRequest] = []
    for name, value in fields.items():
        if name not in rows:
            try:
                is_known = refuse(surface, name, value, others=fields) or elsewhere(name, value)
                if not is_known and not ignores_unknown:
                    raise InvalidRequest(f"unknown field `{name}`", field=name)
            except InvalidRequest as error:
                wrong.append(error)
    body, mistyped = None, set[str]()
    try:
        body = msgspec.convert(known, body_type, str_keys=True)
    except InvalidRequest as error:
        wrong.append(error)
    except (msgspec.ValidationError, RecursionError) as error:
        places = list(problems(known, body_type)) or [explain(error, body_type)]
        wrong += [_as_request_error(path, message) for path, message in places]
        mistyped = {name for path, _ in places for name in _KEY.findall(path)[:1]}
    for name, value in known.items():
        if name not in mistyped:
            try:
                rows[name].check(name, value)
            except InvalidRequest as error:
                wrong.append(error)
    if wrong or body is None:
        raise InvalidRequest.together(wrong) if len(wrong) > 1 else wrong[0]
    return body


def _whole(value: Any) -> Any:
    """4.0 as 4: some languages have one kind of number."""
    is_whole = isinstance(value, float) and value.is_integer() and abs(value) <= MAX_WHOLE
    return int(value) if is_whole else value


MAX_WHOLE = 2**53
"""Beyond it a float does not say which whole number it is."""
_KEY = re.compile(r"[^.\[]+")


def _as_request_error(path: str, message: str) -> InvalidRequest:
    field = path.removeprefix(".").removesuffix("[...]")
    missing = message.partition("missing required field `")[2].rstrip("`")
    if missing:
        field = f"{field}.{missing}" if field else missing
    return InvalidRequest(f"`{field}`: {message}" if field else message, field=field or None)
