"""Chat templates that show tools as the families do, in a few lines, and answers in their formats."""

from __future__ import annotations

from typing import Any

_CHAT = (
    "{{ bos_token }}%s{%% for m in messages %%}<|start|>{{ m.role }}\n"
    "{%% if m.content %%}{{ m.content }}{%% endif %%}"
    "{%% if m.tool_calls %%}{%% for c in m.tool_calls %%}{%% set f = c.function %%}%s{%% endfor %%}{%% endif %%}"
    "<|end|>\n"
    "{%% endfor %%}{%% if add_generation_prompt %%}<|start|>assistant\n{%% endif %%}"
)
_SHOWN = "{% if tools %}{% for t in tools %}{{ t | tojson }}\n{% endfor %}{% endif %}"

_MARKED = '\n<tool_call>\n{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}\n</tool_call>'
HERMES = _CHAT % (_SHOWN, _MARKED)
SEEING = HERMES.replace(
    "{{ m.content }}",
    "{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}"
    "{{ p.text if p.type == 'text' else '[IMG]' }}{% endfor %}{% endif %}",
)
"""The same of a model that sees pictures."""
LLAMA = _CHAT % (_SHOWN + "{# ipython #}", '{"name": "{{ f.name }}", "parameters": {{ f.arguments | tojson }}}')
MISTRAL = _CHAT % (
    "{% for m in messages %}{% for c in m.tool_calls or [] %}{% if c.id | length != 9 %}"
    "{{ raise_exception('ids have nine characters') }}{% endif %}{% endfor %}{% endfor %}" + _SHOWN,
    '[TOOL_CALLS] [{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}]',
)
PYTHONIC = _CHAT % (_SHOWN + "{# [func_name1(a=1)] #}", "[{{ f.name }}({{ f.arguments | tojson }})]")
DEEPSEEK_V3 = _CHAT % (
    _SHOWN + "{% set fence = '```json' %}",
    "<｜tool▁calls▁begin｜>{{ 'function<｜tool▁sep｜>' + f.name + '\n' + fence + '\n' + f.arguments + '\n```' }}",
)
DEEPSEEK_V31 = _CHAT % (_SHOWN, "<｜tool▁calls▁begin｜>{{ f.name + '<｜tool▁sep｜>' + f.arguments }}")

TEMPLATES = {
    "deepseek_v3": DEEPSEEK_V3,
    "deepseek_v31": DEEPSEEK_V31,
    "hermes": HERMES,
    "llama3_json": LLAMA,
    "mistral": MISTRAL,
    "pythonic": PYTHONIC,
}

_DEEPSEEK = "<｜tool▁calls▁begin｜>%s<｜tool▁calls▁end｜>"
_TYPED = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>%s\n```json\n%s\n```<｜tool▁call▁end｜>"
_UNTYPED = "<｜tool▁call▁begin｜>%s<｜tool▁sep｜>%s<｜tool▁call▁end｜>"

FIRST, SECOND = '{"city": "Köln }</tool_call>", "days": [1, {"a": null}]}', '{"q": "\\"x\\\\"}'
ANSWERS = {
    "deepseek_v3": _DEEPSEEK % (_TYPED % ("weather", FIRST) + "\n" + _TYPED % ("search", SECOND)),
    "deepseek_v31": _DEEPSEEK % (_UNTYPED % ("weather", FIRST) + _UNTYPED % ("search", SECOND)),
    "hermes": f'<tool_call>\n{{"name": "weather", "arguments": {FIRST}}}\n</tool_call>\n'
    f'<tool_call>\n{{"arguments": {SECOND}, "name": "search"}}\n</tool_call>',
    "llama3_json": f'{{"name": "weather", "parameters": {FIRST}}}; {{"name": "search", "parameters": {SECOND}}}',
    "mistral": f'[TOOL_CALLS] [{{"name": "weather", "arguments": {FIRST}}}, '
    f'{{"name": "search", "arguments": {SECOND}}}]',
    "pythonic": "[weather(city='Köln }</tool_call>', days=[1, {\"a\": None}]), search(q='\"x\\\\')]",
}
"""The same two calls."""


def tool(name: str, /, **properties: Any) -> dict[str, Any]:
    """A function with these properties, all required."""
    parameters = {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }
    return {"type": "function", "function": {"name": name, "description": f"Does {name}.", "parameters": parameters}}


WEATHER = tool("weather", city={"type": "string"})
SEARCH = tool("search", q={"type": "string"})
