"""Renders the messages of a chat with the model's chat template. Called by `admission`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from neuron_runtime.errors import InvalidRequest
from neuron_runtime.not_built import Surface, refuse, rows
from neuron_runtime.requests.bodies import ChatBody, Function, Message, TokenizeBody
from neuron_runtime.requests.tools import NO_TOOLS, calls_for_template, check_template_knows, for_template
from neuron_runtime.text.chat_template import ChatTemplate, TemplateRefused

_NOT_BUILT = [row.name for row in rows(Surface.MESSAGE)]


def chat_text(
    template: ChatTemplate | None,
    messages: Sequence[Message],
    body: ChatBody | TokenizeBody,
    functions: Sequence[Function] = (),
) -> str:
    """The prompt text, including the template's own BOS. Raises InvalidRequest.

    functions: those that the model may call.
    """
    if template is None:
        message = "this model has no chat template: send a prompt to /v1/completions instead"
        raise InvalidRequest(message, field="messages")
    if not messages:
        raise InvalidRequest("`messages` must not be empty", field="messages")
    check_template_knows(template, functions)
    names = {call.id: call.function.name for one in messages for call in one.tool_calls or () if call.function}
    plain = [_plain(message, f"messages[{at}]", template, names) for at, message in enumerate(messages)]
    variables = dict(body.chat_template_kwargs or {})
    if functions:
        variables["tools"] = for_template(functions)
    if isinstance(body, ChatBody) and body.reasoning_effort is not None:
        variables.setdefault("reasoning_effort", body.reasoning_effort)
    if body.continue_final_message and body.add_generation_prompt:
        message = "`continue_final_message` and `add_generation_prompt` cannot be combined: leave out one of them"
        raise InvalidRequest(message, field="continue_final_message")
    try:
        if body.continue_final_message:
            if messages[-1].tool_calls:
                message = "`continue_final_message` cannot continue a message with `tool_calls`"
                raise InvalidRequest(message, field="continue_final_message")
            return template.render_open(plain, variables)
        return template.render(plain, body.add_generation_prompt is not False, variables)
    except TemplateRefused as error:
        message = f"the model's chat template does not accept these messages: {error}"
        raise InvalidRequest(message, field="messages") from error


def _plain(message: Message, at: str, template: ChatTemplate, names: Mapping[str | None, str]) -> dict[str, Any]:
    """A message as templates expect it. Raises InvalidRequest for unsupported fields.

    names: the called function by id of the call.
    """
    for field in _NOT_BUILT:
        value = getattr(message, field)
        if value is not None:
            refuse(Surface.MESSAGE, field, value, at=f"{at}.{field}")
    refuse(Surface.ROLE, message.role, message.role, at=f"{at}.role")
    calls = calls_for_template(message, at, template)
    if (calls or message.role == "tool") and not template.knows_tools:
        raise InvalidRequest(f"`{at}`: {NO_TOOLS}", field=f"{at}.tool_calls" if calls else f"{at}.role")
    role = "system" if message.role == "developer" and not template.knows_developer else message.role
    silent = calls and message.content is None
    plain: dict[str, Any] = {"role": role, "content": None if silent else _content(message, at, template)}
    if calls:
        plain["tool_calls"] = calls
    name = message.name
    if message.role == "tool":
        name = names.get(message.tool_call_id) if name is None else name
        plain |= {} if message.tool_call_id is None else {"tool_call_id": message.tool_call_id}
    reasoning = message.reasoning_content if message.reasoning is None else message.reasoning
    if reasoning is not None:
        plain |= {"reasoning_content": reasoning, "reasoning": reasoning}
    return plain if name is None else {**plain, "name": name}


def _content(message: Message, at: str, template: ChatTemplate) -> str | list[dict[str, str]]:
    """The content in the form that the template handles: a string or a list of parts."""
    content = message.content
    if content is None:
        if message.role != "assistant":
            raise InvalidRequest(f"`{at}.content` is missing", field=f"{at}.content")
        content = ""
    if isinstance(content, str):
        return content if template.takes_text else [{"type": "text", "text": content}]
    texts = []
    for number, part in enumerate(content):
        where = f"{at}.content[{number}]"
        if part.type != "text":
            message_text = f"`{where}.type` must be `text`, got `{part.type}`: other types are not supported yet"
            raise InvalidRequest(message_text, field=f"{where}.type")
        if part.text is None:
            raise InvalidRequest(f"`{where}.text` is missing", field=f"{where}.text")
        texts.append(part.text)
    if template.takes_parts and texts:
        return [{"type": "text", "text": text} for text in texts]
    return "\n".join(texts)
