"""What templates take is found by rendering, for each role, and chats are given to them in that form."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from helpers.tool_templates import TEMPLATES, WEATHER
from neuron_runtime.apis.openai.body import ChatBody
from neuron_runtime.apis.openai.body import chat_of as chat_of_openai
from neuron_runtime.apis.responses.body import ResponsesBody
from neuron_runtime.apis.responses.body import chat_of as chat_of_responses
from neuron_runtime.requests.chats import chat_text
from neuron_runtime.requests.conversion import typed
from neuron_runtime.text.chat_template import ChatTemplate

TOOLS = "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}"
CALLS = "{% for c in m.tool_calls or [] %}[{{ c.function.name }} {{ c.function.arguments | tojson }}]{% endfor %}"
PLAIN = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
LOOP = "{% for part in m.content %}{{ part.text }}{% endfor %}"
EITHER = "{% if m.content is string %}{{ m.content }}{% else %}" + LOOP + "{% endif %}"
ASKED = {"role": "user", "content": "U"}


def rendered(template: str, messages: Sequence[Mapping[str, Any]], **fields: Any) -> str:
    return chat_text(ChatTemplate(template, {}), chat_of_openai(typed({"messages": messages, **fields}, ChatBody)))


def parts(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


def calls(*names: str) -> dict[str, Any]:
    functions = [{"name": name, "arguments": "{}"} for name in names]
    listed = [{"id": f"{one['name'] * 9}", "type": "function", "function": one} for one in functions]
    return {"role": "assistant", "content": None, "tool_calls": listed}


def result(name: str, content: Any = "R") -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": name * 9, "content": content}


NOT_NULL = {
    "membership": "{% if '</think>' in m.content %}?{% else %}{{ m.content }}{% endif %}",
    "index": "{% if m.content is string %}{{ m.content }}{% else %}{{ m.content[0].text }}{% endif %}",
    "length": "{% if m.content | length %}{{ m.content }}{% endif %}",
    "concatenation": "{{ m.content + '' }}",
    "printed": "{{ m.content }}",
    "list": LOOP,
}
NOT_EMPTY = "{% if m.tool_calls and m.content is not none %}{{ raise_exception('null only') }}{% endif %}"


def of_assistant(form: str) -> str:
    other = "{% if m.role == 'assistant' %}" + form + CALLS + "{% else %}{{ m.content }}{% endif %}"
    return TOOLS + "{% for m in messages %}<{{ m.role }}>" + other + "{% endfor %}"


@pytest.mark.parametrize("form", [*NOT_NULL.values(), NOT_EMPTY], ids=[*NOT_NULL, "null only"])
def test_the_servers_own_answer_with_calls_may_be_sent_back(form: str) -> None:
    expected = "<user>U<assistant>[f {}]<tool>R"
    template = of_assistant(form)
    messages = [ASKED, calls("f"), result("f")]
    assert rendered(template, messages) == expected
    assert rendered(template, [ASKED, {**calls("f"), "content": ""}, result("f")]) == expected
    items = [
        {"role": "user", "content": "U"},
        {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "a", "output": "R"},
    ]
    body = typed({"input": items}, ResponsesBody)
    assert chat_text(ChatTemplate(template, {}), chat_of_responses(body)) == expected


@pytest.mark.parametrize("name", TEMPLATES)
def test_every_family_shows_calls_without_a_text(name: str) -> None:
    text = rendered(TEMPLATES[name], [ASKED, calls("f", "g"), result("f", "R1"), result("g", "R2")], tools=[WEATHER])
    assert text.index("R1") < text.index("R2")
    assert "None" not in text.replace("NoneType", "")


@pytest.mark.parametrize("role", ["system", "developer", "user", "assistant", "tool"])
@pytest.mark.parametrize(
    "only", ["{{ m.content[0].text }}", "{{ m.content | trim }}", "{{ m.content | tojson }}", "{{ m.content + '' }}"]
)
def test_no_part_is_lost_where_one_role_takes_texts_only(role: str, only: str) -> None:
    form = "{% if m.content is string %}{{ m.content }}{% else %}" + only + "{% endif %}"
    template = (
        TOOLS
        + "{% for m in messages %}<{{ m.role }}>{% if m.role == '"
        + role
        + "' %}"
        + form
        + "{% else %}"
        + EITHER
        + "{% endif %}"
        + CALLS
        + "{% endfor %}{# developer #}"
    )
    messages: list[dict[str, Any]] = [{"role": role, "content": parts("AA", "BB")}, ASKED]
    if role == "assistant":
        messages.insert(0, ASKED)
    if role == "tool":
        messages = [ASKED, calls("f"), result("f", parts("AA", "BB"))]
    assert f"<{role}>AA\nBB" in rendered(template, messages)
    other = "user" if role != "user" else "system"
    assert f"<{other}>AABB" in rendered(template, [{"role": other, "content": parts("AA", "BB")}, ASKED])


def test_a_text_is_one_part_where_only_lists_are_shown() -> None:
    template = "{% for m in messages %}<{{ m.role }}>" + LOOP + "{% endfor %}"
    assert rendered(template, [ASKED, {"role": "assistant", "content": "A"}]) == "<user>U<assistant>A"


def test_parts_are_one_part_where_only_the_first_is_shown() -> None:
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content[0].text }}{% endfor %}"
    assert rendered(template, [{"role": "user", "content": parts("A", "B")}, ASKED]) == "<user>A\nB<user>U"


@pytest.mark.parametrize("source", ["{{ messages | tojson }}", "{{ raise_exception('never') }}"])
def test_a_template_that_shows_no_form_gets_texts(source: str) -> None:
    shapes = ChatTemplate(source, {}).shapes
    assert not shapes.parts | shapes.only_parts


def shown_if(condition: str) -> str:
    return (
        "{% for m in messages %}{% if m.role in ('user', 'assistant') or "
        + condition
        + " %}<{{ m.role }}>{{ m.content }}{% endif %}{% endfor %}"
    )


DEVELOPER, SYSTEM = {"role": "developer", "content": "D"}, {"role": "system", "content": "S"}
ANSWER = {"role": "assistant", "content": "A"}


@pytest.mark.parametrize(
    ("template", "messages", "expected"),
    [
        (PLAIN, [DEVELOPER, ASKED], "<system>D<user>U"),
        (PLAIN + "{# developer #}", [DEVELOPER, ASKED], "<developer>D<user>U"),
        (shown_if("m.role == 'system'") + "{# developer #}", [DEVELOPER, ASKED], "<system>D<user>U"),
        (shown_if("m.role == 'developer'"), [SYSTEM, ASKED], "<developer>S<user>U"),
        (shown_if("m.role == 'developer'"), [SYSTEM, DEVELOPER, ASKED], "<developer>S<developer>D<user>U"),
        (shown_if("false"), [SYSTEM, DEVELOPER, ASKED], "<user>S<user>D<user>U"),
        (shown_if("loop.first"), [SYSTEM, DEVELOPER, ASKED], "<system>S\nD<user>U"),
        (shown_if("loop.first"), [SYSTEM, ASKED, ANSWER, DEVELOPER], "<system>S<user>U<assistant>A<user>D"),
        (PLAIN, [SYSTEM, DEVELOPER, ASKED, SYSTEM], "<system>S<system>D<user>U<system>S"),
        (PLAIN.replace("{{ m.content", "{{ raise_exception('no ' + m.role) if m.role == 'system' else m.content"),
         [ASKED, SYSTEM], "<user>U<user>S"),
    ],
)  # fmt: skip
def test_instructions_never_vanish(template: str, messages: list[dict[str, Any]], expected: str) -> None:
    assert rendered(template, messages) == expected


ONE_CALL = (
    TOOLS + "{% for m in messages %}<{{ m.role }}>{% if m.tool_calls %}"
    "{% if m.tool_calls | length != 1 %}{{ raise_exception('one call at a time') }}{% endif %}"
    "[{{ m.tool_calls[0].function.name }} {{ m.tool_calls[0].function.arguments | tojson }}]"
    "{% else %}{{ m.content }}{% endif %}{% endfor %}"
)


@pytest.mark.parametrize("template", [ONE_CALL, ONE_CALL.replace("!= 1", "== 0")], ids=["refused", "lost"])
def test_calls_of_one_answer_are_shown_one_by_one_where_only_one_is_taken(template: str) -> None:
    messages = [ASKED, calls("f", "g"), result("g", "G"), result("f", "F"), result("x", "X"), ASKED]
    shown = "<user>U<assistant>[f {}]<tool>F<assistant>[g {}]<tool>G<tool>X<user>U"
    assert rendered(template, messages) == shown


def test_calls_of_one_answer_stay_together_where_all_are_shown() -> None:
    messages = [ASKED, calls("f", "g"), result("g", "G"), result("f", "F")]
    assert rendered(of_assistant(""), messages) == "<user>U<assistant>[f {}][g {}]<tool>G<tool>F"
