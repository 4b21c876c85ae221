"""Renders the messages of a chat with the model's chat template. Called by `admission`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from neuron_runtime.errors import InvalidRequest
from neuron_runtime.not_built import Surface, refuse, rows
from neuron_runtime.requests.bodies import ChatBody, Message, TokenizeBody
from neuron_runtime.text.chat_template import ChatTemplate, TemplateRefused

_NOT_BUILT = [row.name for row in rows(Surface.MESSAGE)]


def chat_text(template: ChatTemplate | None, messages: Sequence[Message], body: ChatBody | TokenizeBody) -> str:
    """The prompt text, including the template's own BOS. Raises InvalidRequest."""
    if template is None:
        message = "this model has no chat template: send a prompt to /v1/completions instead"
        raise InvalidRequest(message, field="messages")
    if not messages:
        raise InvalidRequest("`messages` must not be empty", field="messages")
    plain = [_plain(message, f"messages[{at}]", template) for at, message in enumerate(messages)]
    variables = dict(body.chat_template_kwargs or {})
    if isinstance(body, ChatBody) and body.reasoning_effort is not None:
        variables.setdefault("reasoning_effort", body.reasoning_effort)
    if body.continue_final_message and body.add_generation_prompt:
        message = "`continue_final_message` and `add_generation_prompt` cannot be combined: leave out one of them"
        raise InvalidRequest(message, field="continue_final_message")
    try:
        if body.continue_final_message:
            return template.render_open(plain, variables)
        return template.render(plain, body.add_generation_prompt is not False, variables)
    except TemplateRefused as error:
        message = f"the model's chat template does not accept these messages: {error}"
        raise InvalidRequest(message, field="messages") from error


def _plain(message: Message, at: str, template: ChatTemplate) -> dict[str, Any]:
    """A message as templates expect it. Raises InvalidRequest for unsupported fields."""
    for name in _NOT_BUILT:
        value = getattr(message, name)
        if value is not None:
            refuse(Surface.MESSAGE, name, value, at=f"{at}.{name}")
    refuse(Surface.ROLE, message.role, message.role, at=f"{at}.role")
    role = "system" if message.role == "developer" and not template.knows_developer else message.role
    plain: dict[str, Any] = {"role": role, "content": _content(message, at, template)}
    reasoning = message.reasoning_content if message.reasoning is None else message.reasoning
    if reasoning is not None:
        plain |= {"reasoning_content": reasoning, "reasoning": reasoning}
    return plain if message.name is None else {**plain, "name": message.name}


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
