"""A chat in the form that admission gets from every API, and its text by the model's chat template.

The bodies of `apis` become a `Chat`; `admission` renders it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from neuron_runtime.errors import InvalidRequest
from neuron_runtime.pictures.sources import PictureAt
from neuron_runtime.requests.options import ChatOptions
from neuron_runtime.requests.parameters import Names
from neuron_runtime.requests.tools import NO_TOOLS, EarlierCall, Function, callable_functions, for_template
from neuron_runtime.text.chat_template import ChatTemplate, TemplateRefused
from neuron_runtime.text.template_shapes import INSTRUCTING, Shapes, Situation

SEEN = ("user", "tool")
"""The roles whose messages may have pictures."""


@dataclass(frozen=True)
class ChatTurn:
    """A message of a chat."""

    role: str
    content: str | Sequence[str | PictureAt] | None
    """A text, or its parts: texts and, with a role of `SEEN`, pictures; None only where the assistant wrote none."""
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
    def pictures(self) -> list[PictureAt]:
        """In the order of the chat."""
        return _pictures(self.turns)

    @cached_property
    def functions(self) -> list[Function]:
        """The functions that the answer may call. Raises InvalidRequest."""
        return callable_functions(self.tools, self.options.tool_choice, self.names)

    @property
    def has_tools(self) -> bool:
        """Whether there are tools to call, calls or results. Raises InvalidRequest."""
        return bool(self.functions) or any(turn.calls or turn.role == "tool" for turn in self.turns)


def chat_text(template: ChatTemplate | None, chat: Chat, picture: str = "") -> str:
    """The prompt text, including the template's own BOS. Raises InvalidRequest.

    picture: what stands for a picture in a text, for templates that take only texts.
    """
    name = chat.names["messages"]
    if template is None:
        message = "this model has no chat template: send a prompt to /v1/completions instead"
        raise InvalidRequest(message, field=name)
    if not chat.turns:
        raise InvalidRequest.at(name, "must not be empty")
    shapes = template.shapes
    variables = dict(chat.variables)
    if chat.functions:
        if not shapes.tools:
            raise InvalidRequest(f"`tools`: {NO_TOOLS}", field="tools")
        variables["tools"] = for_template(chat.functions, filled=shapes.fills_tools)
    elif chat.has_tools:
        variables["tools"] = shapes.no_tools
    names = {call.id: call.name for turn in chat.turns for call in turn.calls}
    messages = [_plain(turn, shapes, names, picture) for turn in _as_taken(chat, shapes)]
    try:
        if chat.continues:
            if isinstance(last := (chat.turns[-1].content or ("",))[-1], PictureAt):
                raise InvalidRequest.at(last.at, "ends the message that the answer continues: put a text behind it")
            return template.render_open(messages, variables)
        return template.render(messages, chat.opens_answer, variables)
    except TemplateRefused as error:
        _check_tools(template, chat)
        message = f"the model's chat template does not accept these messages: {error}"
        raise InvalidRequest(message, field=name) from error


def pictures_shown(template: ChatTemplate, chat: Chat) -> list[PictureAt]:
    """In the order of the prompt, where a result may stand behind its call. Raises InvalidRequest."""
    return _pictures(_as_taken(chat, template.shapes)) if len(chat.pictures) > 1 else chat.pictures


def _pictures(turns: Sequence[ChatTurn]) -> list[PictureAt]:
    contents = (turn.content or () for turn in turns if not isinstance(turn.content, str))
    return [part for content in contents for part in content if isinstance(part, PictureAt)]


def _check_tools(template: ChatTemplate, chat: Chat) -> None:
    """Raises InvalidRequest if the template refuses one of the tools, whatever the messages are."""
    question = [{"role": "user", "content": template.shapes.content("user", "a")}]
    for at, function in enumerate(chat.functions):
        tools = for_template([function], filled=template.shapes.fills_tools)
        try:
            template.render(question, variables={**chat.variables, "tools": tools})
        except TemplateRefused as error:
            message = (
                f"`tools[{at}]`: the model's chat template does not accept the schema of `{function.name}`: {error}: "
                "simplify it, or leave the tool out"
            )
            raise InvalidRequest(message, field=f"tools[{at}]") from error


def _as_taken(chat: Chat, shapes: Shapes) -> list[ChatTurn]:
    """The turns with the roles and in the number that the template shows. Raises InvalidRequest."""
    taken = list[ChatTurn]()
    waiting = list(_with_one_text(chat.turns) if shapes.text_of_calls == "once" else chat.turns)
    roles = shapes.roles[chat.has_tools]
    situation: Situation = "first" if any(turn.role not in INSTRUCTING for turn in waiting) else "alone"
    while waiting:
        turn = waiting.pop(0)
        if turn.role not in INSTRUCTING:
            situation = "later"
        turn = replace(turn, role=roles[situation].get(turn.role, turn.role))
        if turn.calls and shapes.text_of_calls == "before":
            if _has_text(turn):
                _add(taken, replace(turn, calls=(), reasoning=None), shapes)
            turn = replace(turn, content=None)
        if len(turn.calls) > 1 and shapes.splits_calls:
            num_results = next((at for at, one in enumerate(waiting) if one.role != "tool"), len(waiting))
            taken += _one_by_one(turn, waiting[:num_results])
            del waiting[:num_results]
        else:
            _add(taken, turn, shapes)
    return taken


def _add(taken: list[ChatTurn], turn: ChatTurn, shapes: Shapes) -> None:
    """Add a turn, to the last one if the template does not show both, and with an answer before it where it needs
    one."""
    last = taken[-1] if taken else None
    if last and turn.role == last.role and turn.role in shapes.joined and not (last.calls or turn.calls):
        reasoning = "\n".join(one.reasoning for one in (last, turn) if one.reasoning)
        taken[-1] = replace(last, content=[*_texts(last), *_texts(turn)], reasoning=reasoning or None)
        return
    if shapes.answers_results and last and last.role == "tool" and turn.role == "user":
        speakers = [one.role for one in taken if one.role != "tool" and not one.calls]
        if speakers[-1:] == ["user"]:
            taken.append(ChatTurn("assistant", "", turn.at))
    taken.append(turn)


def _with_one_text(turns: Sequence[ChatTurn]) -> Iterator[ChatTurn]:
    """The turns, where the texts that the assistant wrote with calls are with its next answer without any, or, if none
    follows, in one turn before the first of these calls."""
    calling, texts = list[ChatTurn](), list[str | PictureAt]()
    for turn in turns:
        if turn.calls or (turn.role == "tool" and calling):
            texts += _texts(turn) if turn.calls and _has_text(turn) else ()
            calling.append(replace(turn, content=None) if turn.calls else turn)
        elif turn.role == "assistant" and texts:
            yield from (*calling, replace(turn, content=[*texts, *_texts(turn)]))
            calling, texts = [], []
        else:
            yield from (*_called_behind(texts, calling), turn)
            calling, texts = [], []
    yield from _called_behind(texts, calling)


def _called_behind(texts: list[str | PictureAt], calling: Sequence[ChatTurn]) -> Sequence[ChatTurn]:
    return [replace(calling[0], content=texts, calls=(), reasoning=None), *calling] if texts else calling


def _one_by_one(turn: ChatTurn, results: Sequence[ChatTurn]) -> Iterator[ChatTurn]:
    """A turn for each call, with its results behind it; the others come last."""
    rest = list(results)
    for call in turn.calls:
        yield replace(turn, calls=[call])
        turn = replace(turn, content=None, reasoning=None)
        yield from (one for one in rest if one.call_id == call.id)
        rest = [one for one in rest if one.call_id != call.id]
    yield from rest


def _plain(turn: ChatTurn, shapes: Shapes, names: Mapping[str | None, str], picture: str) -> dict[str, Any]:
    """A message as templates expect it. Raises InvalidRequest.

    names: the called function by id of the call.
    """
    tools_at = turn.tools_at or turn.at
    if turn.calls or turn.role == "tool":
        if not shapes.tools:
            raise InvalidRequest(f"`{turn.at}`: {NO_TOOLS}", field=tools_at)
        if not shapes.calls:
            raise _not_shown(tools_at, "calls of tools", "leave them out")
        if turn.calls and shapes.text_of_calls is None and _has_text(turn):
            raise _not_shown(turn.at, "a text beside calls", "leave one of them out")
    content: str | Sequence[str | PictureAt] = turn.content or ""
    texts = content if isinstance(content, str) else [None if isinstance(one, PictureAt) else one for one in content]
    plain: dict[str, Any] = {"role": turn.role, "content": shapes.content(turn.role, texts, picture)}
    if turn.calls:
        calls = [replace(call, id=shapes.call_id(call.id)) for call in turn.calls]
        plain["tool_calls"] = [call.plain(as_object=shapes.argument_objects) for call in calls]
        plain["content"] = plain["content"] if turn.content else shapes.empty_content
        arguments = [call["function"]["arguments"] for call in plain["tool_calls"]]
        if shapes.argument_objects and not shapes.argument_texts and any(isinstance(one, str) for one in arguments):
            raise _not_shown(tools_at, "arguments that are no JSON object", "send objects")
    name = turn.name
    if turn.role == "tool":
        name = names.get(turn.call_id) if name is None else name
        call_id = shapes.call_id(turn.call_id)
        plain |= {} if call_id is None else {"tool_call_id": call_id}
    if turn.reasoning is not None:
        plain |= dict.fromkeys(shapes.reasoning, turn.reasoning)
    return plain if name is None else {**plain, "name": name}


def _not_shown(at: str, what: str, cure: str) -> InvalidRequest:
    message = f"`{at}`: the model's chat template does not show {what}: serve the model with one that does, or {cure}"
    return InvalidRequest(message, field=at)


def _has_text(turn: ChatTurn) -> bool:
    return any(not isinstance(text, str) or text.strip() for text in _texts(turn))


def _texts(turn: ChatTurn) -> Sequence[str | PictureAt]:
    """The texts that have characters, and the pictures."""
    return [text for text in ([turn.content] if isinstance(turn.content, str) else turn.content or []) if text]
