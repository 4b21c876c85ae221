"""What a chat template takes, found by rendering probes: roles, forms of content, calls of tools.

Called once for each template that is loaded; `requests.chats` gives messages the form that the result names. It does
not read the source, because a template may name what it does not handle.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Messages = Sequence[Mapping[str, Any]]
Render = Callable[[Messages, Any], str]
"""Messages and tools to the prompt; empty if the template refuses them."""


@dataclass(frozen=True)
class Shapes:
    """What one template takes."""

    tools: bool
    """It shows tools to the model."""
    parts: frozenset[str]
    """Roles of which it shows every part of the content."""
    only_parts: frozenset[str]
    """Roles whose content must be a list, which then has one part with the whole text."""
    first_roles: Mapping[str, str]
    """The roles as which it shows instructions (`system`, `developer`) before all other messages."""
    later_roles: Mapping[str, str]
    """The same behind other messages."""
    joins_instructions: bool
    """Whether it shows only one of several instructions before all other messages."""
    empty_content: str | None
    """The content of a message that has calls and no text."""
    argument_objects: bool
    """The arguments of an earlier call may be an object; otherwise they are its JSON."""
    splits_calls: bool
    """It shows the calls of a message only if there is one."""

    def content(self, role: str, content: str | list[str]) -> str | list[dict[str, str]]:
        """A text or the texts of parts in the form that it takes."""
        if isinstance(content, list) and content and role in self.parts:
            return [_part(text) for text in content]
        text = content if isinstance(content, str) else "\n".join(content)
        return [_part(text)] if role in self.only_parts else text


def shapes_of(render: Render, names_developer: bool) -> Shapes:
    """Try a template.

    Args:
        names_developer: its source names the role. One that shows any role does not know each of them.
    """
    knows_tools = _TOOL_NAME in render([_ASKED], [_TOOL])
    offers = (None, [_TOOL]) if knows_tools else (None,)
    ways = [(empty, as_object) for empty in (None, "") for as_object in (True, False)]
    empty, as_object = max(ways, key=lambda way: _score_of_call(render, offers[-1], *way))
    call, other_call = (_called(key, empty, as_object) for key in _KEYS)
    both_calls = {**call, "tool_calls": [*call["tool_calls"], *other_call["tool_calls"]]}

    def forms(role: str, place: _Place) -> set[str]:
        """The forms of content that are shown there, with and without tools; empty if none is."""
        tried = [_forms(render, role, place, tools) for tools in offers]
        return _common(tried) if any(tried) else set()

    def role_of(asked: str, place: _Place, *others: str) -> str:
        known = (role for role in (asked, *others) if role != "developer" or names_developer)
        return next((role for role in known if forms(role, place)), "system")

    places: Mapping[str, Sequence[_Place]] = {
        "system": (_FIRST, _LATER),
        "developer": (_FIRST, _LATER),
        "user": (([], []), ([_ASKED, _ANSWER], [])),
        "assistant": (([_ASKED], []), ([_ASKED], [_ASKED])),
        "tool": (([_ASKED, call], []), ([_ASKED, call], [_ANSWER, _ASKED])),
    }
    content = {role: _common(forms(role, place) for place in at) for role, at in places.items()}
    first_roles = {asked: role_of(asked, _FIRST, other, "user") for asked, other in _INSTRUCTING.items()}
    two = [{"role": role, "content": text} for role, text in zip(first_roles.values(), _TEXTS, strict=True)]
    two_parts = [{**one, "content": [_part(one["content"])]} for one in two]
    return Shapes(
        tools=knows_tools,
        parts=frozenset(role for role, taken in content.items() if "parts" in taken),
        only_parts=frozenset(role for role, taken in content.items() if "part" in taken and "text" not in taken),
        first_roles=first_roles,
        later_roles={asked: role_of(asked, _LATER, other, "user") for asked, other in _INSTRUCTING.items()},
        joins_instructions=not any(_shown(render([*one, _ASKED], None), _TEXTS) for one in (two, two_parts)),
        empty_content=empty,
        argument_objects=as_object,
        splits_calls=_shown(render([_ASKED, call, _RESULT, other_call, _RESULT], offers[-1]), _KEYS)
        and not _shown(render([_ASKED, both_calls, _RESULT, _RESULT], offers[-1]), _KEYS),
    )


_Place = tuple[Messages, Messages]
"""The messages before and after the one that is tried."""

_INSTRUCTING = {"system": "developer", "developer": "system"}
"""The roles of instructions, each with the one to take its place."""
_TEXTS = ("neuron-probe", "neuron-second")
_KEYS = ("neuron-key", "neuron-other")
_PRINTED = "neuron-printed"
"""A member of each part; a prompt that has it shows how Python or JSON writes the part."""
_ID = "abcdefghi"
_TOOL_NAME = "neuron-tool"
_TOOL = {
    "type": "function",
    "function": {"name": _TOOL_NAME, "description": "a", "parameters": {"type": "object", "properties": {}}},
}
_ASKED = {"role": "user", "content": "a"}
_ANSWER = {"role": "assistant", "content": "a"}
_RESULT = {"role": "tool", "tool_call_id": _ID, "content": "a"}
_FIRST: _Place = ([], [_ASKED])
_LATER: _Place = ([_ASKED, _ANSWER], [_ASKED])


def _part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


_CONTENTS = {
    "text": " ".join(_TEXTS),
    "part": [_part(" ".join(_TEXTS)) | {_PRINTED: ""}],
    "parts": [_part(text) | {_PRINTED: ""} for text in _TEXTS],
}


def _forms(render: Render, role: str, place: _Place, tools: Any) -> set[str]:
    before, after = place
    message = {"role": role} | ({"tool_call_id": _ID} if role == "tool" else {})
    return {
        form
        for form, content in _CONTENTS.items()
        if _shown(render([*before, {**message, "content": content}, *after], tools), _TEXTS)
    }


def _common(tried: Iterable[set[str]]) -> set[str]:
    """The forms that are shown wherever any is; texts if none is anywhere."""
    shown = [forms for forms in tried if forms]
    return set.intersection(*shown) if shown else {"text"}


def _shown(prompt: str, texts: Iterable[str]) -> bool:
    return all(text in prompt for text in texts) and _PRINTED not in prompt


def _called(key: str, empty: str | None, as_object: bool) -> dict[str, Any]:
    arguments: Any = {key: 1} if as_object else json.dumps({key: 1})
    function = {"name": _TOOL_NAME, "arguments": arguments}
    return {
        "role": "assistant",
        "content": empty,
        "tool_calls": [{"id": _ID, "type": "function", "function": function}],
    }


def _score_of_call(render: Render, tools: Any, empty: str | None, as_object: bool) -> int:
    """How well a call is shown as the last message and before others: its arguments as JSON, or at all, and no content
    where there is none."""
    call, key = _called(_KEYS[0], empty, as_object), _KEYS[0]
    num_before = render([_ASKED], tools).count("None")
    prompts = [render([_ASKED, call, *after], tools) for after in ((), (_RESULT,), (_RESULT, _ANSWER, _ASKED))]
    return sum((key in one) + (f'"{key}"' in one) for one in prompts if one.count("None") <= num_before)
