"""What a chat template takes, found by rendering probes: roles, forms of content, calls of tools.

Called once for each template that is loaded; `requests.chats` gives messages the form that the result names. It does
not read the source, because a template may name what it does not handle.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Messages = Sequence[Mapping[str, Any]]
Render = Callable[[Messages, Any], str]
"""Messages and tools to the prompt; empty if the template refuses them."""
Situation = Literal["alone", "first", "later"]
"""Where instructions are: in a chat of nothing else, before all other messages, or behind others."""

INSTRUCTING = {"system": "developer", "developer": "system"}
"""The roles of instructions, each with the one to take its place."""


@dataclass(frozen=True)
class Shapes:
    """What one template takes."""

    tools: bool
    """Whether it shows tools to the model."""
    fills_tools: bool
    """Whether it shows them only with a description and properties, which may be empty."""
    no_tools: Any
    """What it takes in place of tools where there are none, but calls."""
    parts: frozenset[str]
    """Roles of which it shows every part of the content."""
    only_parts: frozenset[str]
    """Roles whose content must be a list, which then has one part with the whole text."""
    roles: Mapping[bool, Mapping[Situation, Mapping[str, str]]]
    """The roles as which it shows instructions, by whether the chat has tools."""
    joined: frozenset[str]
    """The roles of which it does not show two messages in a row."""
    calls: bool
    """Whether it shows earlier calls."""
    answers_results: bool
    """Whether it shows a message of the user behind a result only if there was an answer, be it empty, to the last."""
    short_ids: bool
    """Whether ids of calls must have nine letters and digits."""
    empty_content: str | None
    """The content of a message that has calls and no text."""
    argument_objects: bool
    """Whether the arguments of an earlier call may be an object; otherwise they are its JSON."""
    argument_texts: bool
    """Whether it shows arguments that are no object too."""
    splits_calls: bool
    """Whether it shows the calls of a message only if there is one."""
    text_of_calls: Literal["beside", "before", "once"] | None
    """Where it shows the text of a message with calls: in the same message, in one before, or in the one answer without
    calls that there may be to a message of the user."""
    reasoning: Sequence[str]
    """The names that it has for reasoning."""

    def content(self, role: str, content: str | Sequence[str | None], picture: str = "") -> str | list[dict[str, str]]:
        """A text or the texts of parts in the form that it takes. A part without a text is a picture.

        picture: what stands for one in a text.
        """
        if (
            not isinstance(content, str)
            and content
            and (role in self.parts or (role in self.only_parts and None in content))
        ):
            return [_PICTURE if text is None else _part(text) for text in content]
        text = content if isinstance(content, str) else "\n".join(picture if one is None else one for one in content)
        return [_part(text)] if role in self.only_parts else text

    def call_id(self, given: str | None) -> str | None:
        """The id of a call in the form that it takes, the same for the call and its result."""
        if not self.short_ids or re.fullmatch("[A-Za-z0-9]{9}", given or ""):
            return given
        return hashlib.sha256((given or "").encode(errors="replace")).hexdigest()[: len(_ID)]


def shapes_of(render: Render, names_developer: bool) -> Shapes:
    """Try a template.

    Args:
        names_developer: its source names the role. One that shows any role does not know each of them.
    """
    fills_tools = _TOOL_NAME not in render([_ASKED], [_BARE_TOOL])
    tool = _TOOL if fills_tools else _BARE_TOOL
    knows_tools = _TOOL_NAME in render([_ASKED], [tool])
    offers = (None, [tool]) if knows_tools else (None,)
    offer = offers[-1]
    ways = [(empty, as_object) for empty in (None, "") for as_object in (True, False)]
    empty, as_object = max(ways, key=lambda way: _score_of_call(render, offer, *way))
    call, other_call = (_called(key, empty, as_object) for key in _KEYS)
    (first_call,) = call["tool_calls"]

    forms = _forms_by_role(render, call, offers)
    only_parts = frozenset(role for role, taken in forms.items() if "part" in taken and "text" not in taken)

    def written(role: str, text: str) -> dict[str, Any]:
        return {"role": role, "content": [_part(text)] if role in only_parts else text}

    def shows(messages: Messages, *texts: str) -> bool:
        return _shown(render(messages, offer), texts)

    def role_of(asked: str, tools: Any, before: Messages, rests: Iterable[tuple[Messages, Messages]]) -> str:
        """The role as which it shows the instructions between all of these messages; the user's if it shows none."""
        known = (role for role in (asked, INSTRUCTING[asked]) if role != "developer" or names_developer)
        texts = [_TEXT, *([_LEAD] if before else [])]
        return next(
            (
                role
                for role in known
                if all(
                    _shown(render([*before, *some, written(role, _TEXT), *others], tools), texts)
                    for some, others in rests
                )
            ),
            "user",
        )

    def roles(tools: Any) -> Mapping[Situation, Mapping[str, str]]:
        first = [*_FIRST, ([], [_ASKED, call, _RESULT])] if tools and shows_calls else _FIRST
        alone, leading = ({role: role_of(role, tools, [], at) for role in INSTRUCTING} for at in (_ALONE, first))
        pair = [written(role, text) for role, text in zip(leading.values(), _TEXTS, strict=True)]
        if not _shown(render([*pair, _ASKED], tools), _TEXTS):
            leading = dict.fromkeys(leading, leading["system"])
        lead = [] if leading["system"] == "user" else [written(leading["system"], _LEAD)]
        return {
            "alone": alone,
            "first": leading,
            "later": {role: role_of(role, tools, lead, _LATER) for role in INSTRUCTING},
        }

    def keeps_apart(role: str) -> bool:
        before, after = _NEIGHBOURS[role]
        pair = [written(role, text) for text in _TEXTS]
        return all(_shown(render([*before, *pair, *after], tools), _TEXTS) for tools in offers)

    shows_calls = shows([_ASKED, call, _RESULT], _KEYS[0])
    names = ["reasoning_content", "reasoning"]
    names += [name for name in ("thinking",) if shows([_ASKED, {**call, name: _TEXT}, _RESULT], _TEXT)]
    text_beside = {**call, **written("assistant", _TEXT), **dict.fromkeys(names, "a")}
    text_before, asks_again, both = written("assistant", _TEXT), [_ANSWER, _ASKED], (_TEXT, _KEYS[0])
    called = [_ASKED, call, _RESULT]
    ways_of_text: Mapping[Any, Sequence[Messages]] = {
        "beside": [[_ASKED, text_beside, _RESULT, *after] for after in ([], asks_again)],
        "before": [[_ASKED, text_before, call, _RESULT, *after] for after in ([], asks_again)],
        "once": [[_ASKED, text_before, call, _RESULT], [_ASKED, call, _RESULT, text_before, _ASKED]],
    }
    long_id = {**call, "tool_calls": [{**first_call, "id": _LONG_ID}]}
    broken = {**call, "tool_calls": [{**first_call, "function": {"name": _TOOL_NAME, "arguments": _TEXT}}]}
    both_calls = {**call, "tool_calls": [first_call, *other_call["tool_calls"]]}
    return Shapes(
        tools=knows_tools,
        fills_tools=fills_tools,
        no_tools=None if render([_ASKED, call, _RESULT], None) or not render([_ASKED, call, _RESULT], []) else [],
        parts=frozenset(role for role, taken in forms.items() if "parts" in taken),
        only_parts=only_parts,
        roles={False: roles(None), True: roles(offer)},
        joined=frozenset(role for role in _NEIGHBOURS if not keeps_apart(role)),
        calls=shows_calls,
        answers_results=not shows([*called, written("user", _TEXT)], *both)
        and shows([*called, written("assistant", ""), written("user", _TEXT)], *both),
        short_ids=shows_calls and not shows([_ASKED, long_id, {**_RESULT, "tool_call_id": _LONG_ID}], _KEYS[0]),
        empty_content=empty,
        argument_objects=as_object,
        argument_texts=shows([_ASKED, broken, _RESULT], _TEXT),
        splits_calls=shows([_ASKED, call, _RESULT, other_call, _RESULT], *_KEYS)
        and not shows([_ASKED, both_calls, _RESULT, _RESULT], *_KEYS),
        text_of_calls=next(
            (way for way, chats in ways_of_text.items() if all(shows(one, *both) for one in chats)), None
        ),
        reasoning=names,
    )


_TEXTS = ("neuron-probe", "neuron-second")
_TEXT, _LEAD = _TEXTS
_KEYS = ("neuron-key", "neuron-other")
_PRINTED = "neuron-printed"
"""A member of each part; a prompt that has it shows how Python or JSON writes the part."""
_ID = "abcdefghi"
_LONG_ID = "call_abcdefghijklmnopqrstuvwx"
_TOOL_NAME = "neuron-tool"
_BARE_TOOL = {"type": "function", "function": {"name": _TOOL_NAME, "parameters": {"type": "object"}}}
_TOOL = {
    "type": "function",
    "function": {"name": _TOOL_NAME, "description": "", "parameters": {"type": "object", "properties": {}}},
}
_ASKED = {"role": "user", "content": "a"}
_ANSWER = {"role": "assistant", "content": "a"}
_RESULT = {"role": "tool", "tool_call_id": _ID, "name": _TOOL_NAME, "content": "a"}

_Places = Sequence[tuple[Messages, Messages]]
"""The messages before and after the one that is tried."""
_ALONE: _Places = [([], [])]
_FIRST: _Places = [([], [_ASKED]), ([], [_ASKED, _ANSWER, _ASKED])]
_LATER: _Places = [
    ([_ASKED, _ANSWER], [_ASKED]),
    ([_ASKED, _ANSWER, _ASKED], []),
    ([_ASKED], [_ANSWER, _ASKED]),
]
_NEIGHBOURS: Mapping[str, tuple[Messages, Messages]] = {
    "system": ([], [_ASKED]),
    "developer": ([], [_ASKED]),
    "user": ([_ASKED, _ANSWER], []),
    "assistant": ([_ASKED], [_ASKED]),
}
"""The messages around two in a row."""


_PICTURE = {"type": "image"}


def _part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


_CONTENTS = {
    "text": " ".join(_TEXTS),
    "part": [_part(" ".join(_TEXTS)) | {_PRINTED: ""}],
    "parts": [_part(text) | {_PRINTED: ""} for text in _TEXTS],
}


def _forms_by_role(render: Render, call: Mapping[str, Any], offers: Sequence[Any]) -> Mapping[str, set[str]]:
    """The forms of content that are shown wherever any is, with and without tools; texts if none is anywhere."""
    calling = {"tool_calls": call["tool_calls"]}
    tried: Mapping[str, Sequence[tuple[Messages, Mapping[str, Any], Messages]]] = {
        "system": [([], {}, [_ASKED]), ([_ASKED, _ANSWER], {}, [_ASKED])],
        "developer": [([], {}, [_ASKED]), ([_ASKED, _ANSWER], {}, [_ASKED])],
        "user": [([], {}, []), ([_ASKED, _ANSWER], {}, [])],
        "assistant": [([_ASKED], {}, []), ([_ASKED], {}, [_ASKED]), ([_ASKED], calling, [_RESULT])],
        "tool": [([_ASKED, call], _RESULT, []), ([_ASKED, call], _RESULT, [_ANSWER, _ASKED])],
    }
    found = dict[str, set[str]]()
    for role, places in tried.items():
        shown = [
            {
                form
                for form, content in _CONTENTS.items()
                if _shown(render([*before, {**fields, "role": role, "content": content}, *after], tools), _TEXTS)
            }
            for before, fields, after in places
            for tools in offers
        ]
        shown = [forms for forms in shown if forms]
        found[role] = set.intersection(*shown) if shown else {"text"}
    return found


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
