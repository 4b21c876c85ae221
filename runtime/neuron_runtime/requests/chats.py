"""A chat in the form that admission gets from every API, and its text by the model's chat template.

The bodies of `apis` become a `Chat`; `admission` renders it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from neuron_runtime.errors import InvalidRequest
from neuron_runtime.requests.options import ChatOptions
from neuron_runtime.requests.parameters import Names
from neuron_runtime.requests.tools import NO_TOOLS, EarlierCall, Function, callable_functions, for_template
from neuron_runtime.text.chat_template import ChatTemplate, TemplateRefused
from neuron_runtime.text.template_shapes import Shapes


@dataclass(frozen=True)
class ChatTurn:
    """A message of a chat."""

    role: str
    content: str | list[str] | None
    """A text, or the texts of its parts; None only where the assistant wrote none."""
    at: str
    """The client's path of the message."""
    name: str | None = None
    reasoning: str | None = None
    calls: Sequence[EarlierCall] = ()
    call_id: str | None = None
    """With role `tool`: id of the call that this is the result of."""
    tools_at: str = ""
    """The client's path of the calls, or of what makes it a result, if that is not the message itself."""


@dataclass(frozen=True)
class Chat:
    turns: Sequence[ChatTurn]
    options: ChatOptions = field(default_factory=ChatOptions)
    names: Names = field(default_factory=Names)
    tools: Sequence[Function] = ()
    variables: Mapping[str, Any] = field(default_factory=dict)
    """For the template."""
    opens_answer: bool = True
    """The template starts an answer."""
    continues: bool = False
    """The answer continues the last turn, which calls no tools, instead."""

    @cached_property
    def functions(self) -> list[Function]:
        """The functions that the answer may call. Raises InvalidRequest."""
        return callable_functions(self.tools, self.options.tool_choice, self.names)

    @property
    def has_tools(self) -> bool:
        """Whether there are tools to call, calls or results. Raises InvalidRequest."""
        return bool(self.functions) or any(turn.calls or turn.role == "tool" for turn in self.turns)


def chat_text(template: ChatTemplate | None, chat: Chat) -> str:
    """The prompt text, including the template's own BOS. Raises InvalidRequest."""
    name = chat.names["messages"]
    if template is None:
        message = "this model has no chat template: send a prompt to /v1/completions instead"
        raise InvalidRequest(message, field=name)
    if not chat.turns:
        raise InvalidRequest.at(name, "must not be empty")
    variables = dict(chat.variables)
    if chat.functions:
        if not template.shapes.tools:
            raise InvalidRequest(f"`tools`: {NO_TOOLS}", field="tools")
        variables["tools"] = for_template(chat.functions)
    names = {call.id: call.name for turn in chat.turns for call in turn.calls}
    messages = [_plain(turn, template.shapes, names) for turn in _as_taken(chat.turns, template.shapes)]
    try:
        if chat.continues:
            return template.render_open(messages, variables)
        return template.render(messages, chat.opens_answer, variables)
    except TemplateRefused as error:
        message = f"the model's chat template does not accept these messages: {error}"
        raise InvalidRequest(message, field=name) from error


def _as_taken(turns: Sequence[ChatTurn], shapes: Shapes) -> list[ChatTurn]:
    """The turns with the roles and in the number that the template shows."""
    taken = list[ChatTurn]()
    waiting = list(turns)
    while waiting:
        turn = waiting.pop(0)
        leads = all(one.role in shapes.first_roles for one in taken)
        if leads and taken and shapes.joins_instructions and turn.role in shapes.first_roles:
            taken[-1] = replace(taken[-1], content=[*_texts(taken[-1]), *_texts(turn)])
        elif len(turn.calls) > 1 and shapes.splits_calls:
            num_results = next((at for at, one in enumerate(waiting) if one.role != "tool"), len(waiting))
            taken += _one_by_one(turn, waiting[:num_results])
            del waiting[:num_results]
        else:
            roles = shapes.first_roles if leads else shapes.later_roles
            taken.append(replace(turn, role=roles.get(turn.role, turn.role)))
    return taken


def _one_by_one(turn: ChatTurn, results: Sequence[ChatTurn]) -> Iterator[ChatTurn]:
    """A turn for each call, with its results behind it; the others come last."""
    rest = list(results)
    for call in turn.calls:
        yield replace(turn, calls=[call])
        turn = replace(turn, content=None, reasoning=None)
        yield from (one for one in rest if one.call_id == call.id)
        rest = [one for one in rest if one.call_id != call.id]
    yield from rest


def _plain(turn: ChatTurn, shapes: Shapes, names: Mapping[str | None, str]) -> dict[str, Any]:
    """A message as templates expect it. Raises InvalidRequest.

    names: the called function by id of the call.
    """
    if (turn.calls or turn.role == "tool") and not shapes.tools:
        raise InvalidRequest(f"`{turn.at}`: {NO_TOOLS}", field=turn.tools_at or turn.at)
    plain: dict[str, Any] = {"role": turn.role, "content": shapes.content(turn.role, turn.content or "")}
    if turn.calls:
        plain["tool_calls"] = [call.plain(as_object=shapes.argument_objects) for call in turn.calls]
        plain["content"] = plain["content"] if turn.content else shapes.empty_content
    name = turn.name
    if turn.role == "tool":
        name = names.get(turn.call_id) if name is None else name
        plain |= {} if turn.call_id is None else {"tool_call_id": turn.call_id}
    if turn.reasoning is not None:
        plain |= {"reasoning_content": turn.reasoning, "reasoning": turn.reasoning}
    return plain if name is None else {**plain, "name": name}


def _texts(turn: ChatTurn) -> Sequence[str]:
    return [turn.content] if isinstance(turn.content, str) else turn.content or []
