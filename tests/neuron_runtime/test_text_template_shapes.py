"""What templates take is found by rendering, for each role, and chats are given to them in that form."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from helpers.tool_templates import TEMPLATES, WEATHER
from neuron_runtime.apis.openai.body import ChatBody
from neuron_runtime.apis.openai.body import chat_of as chat_of_openai
from neuron_runtime.apis.responses.body import ResponsesBody
from neuron_runtime.apis.responses.body import chat_of as chat_of_responses
from neuron_runtime.errors import InvalidRequest
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


ALTERNATING = (
    "{% for m in messages %}{% if m.role not in (('user', 'tool'), ('assistant',))[loop.index0 % 2] %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}<{{ m.role }}>{{ m.content }}"
    "{% for c in m.tool_calls or [] %}[{{ c.function.name }}]{% endfor %}{% endfor %}"
)
LAST_SYSTEM = (
    "{% for m in messages if m.role == 'system' %}{% if loop.last %}<system>{{ m.content }}{% endif %}{% endfor %}"
    "{% for m in messages if m.role != 'system' %}<{{ m.role }}>{{ m.content }}{% endfor %}"
)
WITH_THE_QUESTION = (
    "{% set led = messages[0].role == 'system' %}{% for m in messages[1 if led else 0:] %}<{{ m.role }}>"
    "{% if led and loop.first %}{{ messages[0].content }}: {% endif %}{{ m.content }}{% endfor %}"
)
ONE_LEAD = (
    "{% set led = messages[0].role in ('system', 'developer') %}{% if led %}<lead>{{ messages[0].content }}{% endif %}"
    "{% for m in messages[1 if led else 0:] if m.role in ('user', 'assistant') %}<{{ m.role }}>{{ m.content }}"
    "{% endfor %}"
)


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
        (ALTERNATING, [SYSTEM, DEVELOPER, ASKED], "<user>S\nD\nU"),
        (ALTERNATING, [SYSTEM, ASKED, ASKED, ANSWER, ANSWER, SYSTEM], "<user>S\nU\nU<assistant>A\nA<user>S"),
        (ALTERNATING, [{"role": "system", "content": ""}, {"role": "user", "content": parts("U", "V")}], "<user>U\nV"),
        (LAST_SYSTEM, [SYSTEM, ASKED, SYSTEM, ANSWER, ASKED], "<system>S<user>U<user>S<assistant>A<user>U"),
        (LAST_SYSTEM, [SYSTEM, DEVELOPER, ASKED], "<system>S\nD<user>U"),
        (WITH_THE_QUESTION, [SYSTEM, ASKED], "<user>S: U"),
        (WITH_THE_QUESTION, [SYSTEM, DEVELOPER], "<user>S<user>D"),
        (ONE_LEAD, [SYSTEM, DEVELOPER, ASKED], "<lead>S\nD<user>U"),
        (ONE_LEAD, [DEVELOPER, ASKED], "<lead>D<user>U"),
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


BEFORE_THE_LAST = (
    TOOLS + "{% set led = messages[0].role == 'system' %}{% for m in messages[1 if led else 0:] %}<{{ m.role }}>"
    "{% if led and loop.last and m.role == 'user' %}{{ messages[0].content }}: {% endif %}{{ m.content }}"
    + CALLS
    + "{% endfor %}"
)


def test_instructions_do_not_vanish_while_tools_are_called() -> None:
    calling = [SYSTEM, ASKED, {**calls("f"), "content": ""}, result("f")]
    assert rendered(BEFORE_THE_LAST, [SYSTEM, ASKED]) == "<user>S: U"
    assert rendered(BEFORE_THE_LAST, calling) == "<user>S<user>U<assistant>[f {}]<tool>R"


CALLS_OR_TEXT = "{% if m.tool_calls %}" + CALLS + "{% else %}{{ m.content }}{% endif %}"
TEXT_OR_CALLS = "{% if m.content %}{{ m.content }}{% else %}" + CALLS + "{% endif %}"
OF_ALL = TOOLS + "{% for m in messages %}<{{ m.role }}>"


@pytest.mark.parametrize("form", [CALLS_OR_TEXT, TEXT_OR_CALLS])
def test_a_text_with_calls_is_shown_before_them_where_the_template_shows_one_of_both(form: str) -> None:
    wrote = {**calls("f", "g"), "content": "T", "reasoning": "W"}
    template = OF_ALL + form + "{{ m.reasoning }}{% endfor %}"
    messages = [ASKED, wrote, result("f"), result("g"), ANSWER, ASKED]
    shown = "<user>U<assistant>T<assistant>[f {}][g {}]W<tool>R<tool>R<assistant>A<user>U"
    assert rendered(template, messages) == shown
    assert rendered(template, [ASKED, {**wrote, "content": "\n"}]) == "<user>U<assistant>[f {}][g {}]W"


ONE_ANSWER = (
    OF_ALL + "{% set answers = messages | rejectattr('role', 'equalto', 'tool') | rejectattr('tool_calls') | list %}"
    "{% if loop.first and answers | selectattr('role', 'equalto', 'assistant') | list | length > 1 %}"
    "{{ raise_exception('one answer') }}{% endif %}" + CALLS_OR_TEXT + "{% endfor %}"
)


def test_texts_with_calls_are_one_answer_where_the_template_takes_only_one() -> None:
    first, second = ({**calls(name), "content": f"T{name}"} for name in "fg")
    calling = [ASKED, first, result("f"), second, result("g")]
    shown = "<user>U%s<assistant>[f {}]<tool>R<assistant>[g {}]<tool>R"
    assert rendered(ONE_ANSWER, calling) == shown % "<assistant>Tf\nTg"
    assert rendered(ONE_ANSWER, [*calling, ASKED]) == shown % "<assistant>Tf\nTg" + "<user>U"
    assert rendered(ONE_ANSWER, [*calling, ANSWER, ASKED]) == shown % "" + "<assistant>Tf\nTg\nA<user>U"


def test_an_empty_answer_is_between_a_result_and_a_message_of_the_user_where_the_template_refuses_that() -> None:
    refusing = (
        "{% for m in messages | rejectattr('role', 'equalto', 'tool') | rejectattr('tool_calls') %}"
        "{% if m.role != ('user', 'assistant')[loop.index0 % 2] %}{{ raise_exception('roles must alternate') }}"
        "{% endif %}{% endfor %}" + OF_ALL + CALLS_OR_TEXT + "{% endfor %}"
    )
    messages = [ASKED, calls("f"), result("f"), ASKED, ASKED]
    assert rendered(refusing, messages) == "<user>U<assistant>[f {}]<tool>R<assistant><user>U\nU"
    wrote = {**calls("f"), "content": "T"}
    shown = "<user>U<assistant>T<assistant>[f {}]<tool>R<user>U"
    assert rendered(refusing, [ASKED, wrote, result("f"), ASKED]) == shown
    assert rendered(of_assistant(""), messages) == "<user>U<assistant>[f {}]<tool>R<user>U<user>U"


def test_calls_and_tools_without_a_type_are_functions() -> None:
    answer = calls("f")
    answer["tool_calls"][0]["type"] = None
    tools = [{**WEATHER, "type": None}]
    assert rendered(of_assistant(""), [ASKED, answer], tools=tools).endswith("<user>U<assistant>[f {}]")


def one_after_another(form: str) -> str:
    return ALTERNATING.replace("{{ m.content }}", form).replace("{% for m", TOOLS + "{% for m", 1)


DEAF, GUARDED = "{{ m.content }}", "{% for k, v in c.function.arguments.items() %}{{ k }}={{ v }}{% endfor %}"
BROKEN = calls("f")
BROKEN["tool_calls"][0]["function"]["arguments"] = '{"a": '
TYPED = {"type": "object", "properties": {"a": {"type": "string"}, "b": {}}}


@pytest.mark.parametrize(
    ("template", "messages", "fields", "field", "says"),
    [
        (one_after_another(CALLS_OR_TEXT), [ASKED, {**calls("f"), "content": "T"}, result("f")], {}, "messages[1]",
         "a text beside calls: .*, or leave one of them out"),
        (OF_ALL + DEAF + "{% endfor %}", [ASKED, calls("f"), result("f")], {}, "messages[1].tool_calls",
         "calls of tools: .*, or leave them out"),
        (OF_ALL + "{% for c in m.tool_calls or [] %}" + GUARDED + "{% endfor %}{{ m.content }}{% endfor %}",
         [ASKED, BROKEN], {}, "messages[1].tool_calls", "arguments that are no JSON object: .*send objects"),
        ("{% for t in tools or [] %}{{ t.function.name }}{% for k, v in t.function.parameters.properties.items() %}"
         "{{ k + v.type }}{% endfor %}{% endfor %}", [ASKED],
         {"tools": [WEATHER, {"function": {"name": "f", "parameters": TYPED}}]}, "tools[1]", "`f`: .*simplify"),
    ],
)  # fmt: skip
def test_what_cannot_be_shown_is_refused_by_name(
    template: str, messages: list[dict[str, Any]], fields: dict[str, Any], field: str, says: str
) -> None:
    with pytest.raises(InvalidRequest, match=says) as refused:
        rendered(template, messages, **fields)
    assert refused.value.field == field


def test_tools_have_a_description_and_properties_where_the_template_needs_them() -> None:
    template = (
        "{% for t in tools or [] %}{% set f = t.function %}"
        "{{ f.name + f.description + f.parameters.properties.items() | list | string }}{% endfor %}"
    )
    bare = {"function": {"name": "f", "parameters": {"type": "object"}}}
    assert rendered(template, [ASKED], tools=[bare]) == "f[]"
    assert rendered("{{ tools | tojson }}", [ASKED], tools=[bare]).count("properties") == 0


def test_a_template_that_counts_tools_gets_an_empty_list_for_calls_without_tools() -> None:
    template = "{{ tools | length }}" + OF_ALL + CALLS_OR_TEXT + "{% endfor %}"
    assert rendered(template, [ASKED, calls("f"), result("f")]) == "0<user>U<assistant>[f {}]<tool>R"
    assert rendered(of_assistant(""), [ASKED, calls("f"), result("f")]) == "<user>U<assistant>[f {}]<tool>R"


def test_ids_have_nine_letters_and_digits_where_the_template_refuses_others() -> None:
    form = "{% for c in m.tool_calls or [] %}[{{ c.id }}]{% endfor %}[{{ m.tool_call_id }}]"
    checked = "{% if m.tool_call_id and m.tool_call_id | length != 9 %}{{ raise_exception('nine') }}{% endif %}" + form
    template = OF_ALL + checked + CALLS + "{% endfor %}"
    other = "call_2jmj7l5rSw0yVb"
    answer = calls("f", "g")
    answer["tool_calls"][0]["id"] = other
    messages = [ASKED, answer, result("g"), {"role": "tool", "tool_call_id": other, "content": "R"}]
    given, kept = re.findall(r"\[(\w{9})\]", rendered(template, messages))[:2]
    assert (kept, rendered(template, messages).count(given)) == ("ggggggggg", 2)
    assert other in rendered(OF_ALL + form + CALLS + "{% endfor %}", messages)


def test_reasoning_has_the_name_that_the_template_shows() -> None:
    template = OF_ALL + CALLS + "{{ m.thinking }}{{ m.content or '' }}{% endfor %}"
    assert "<assistant>[f {}]W<tool>" in rendered(template, [ASKED, {**calls("f"), "reasoning": "W"}, result("f")])


def picture() -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": "data:"}}


SEEN = "{% for p in m.content %}{{ p.text if p.type == 'text' else '[IMG]' }}{% endfor %}"
EITHER_SEEN = "{% if m.content is string %}{{ m.content }}{% else %}" + SEEN + "{% endif %}"
TURNS = (
    "{% set rest = messages[1:] if messages[0].role == 'system' else messages %}{% for m in rest %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('turns') }}{% endif %}"
)
FIRST_PART = "{{ m.content if m.content is string else m.content[0].text }}"
SEEING = {
    "instructions as a text, with the last question": (
        TURNS + "<{{ m.role }}>{% if loop.last and messages[0].role == 'system' %}{{ messages[0].content + '|' }}"
        "{% endif %}" + EITHER_SEEN + "{% endfor %}",
        "<user>A [IMG] B<assistant>C<user>[IMG][IMG]D<assistant>E<user>S|F[IMG]",
    ),
    "the first part of the instructions, with the first question": (
        TURNS
        + "<{{ m.role }}>{% if loop.first and messages[0].role == 'system' %}"
        + FIRST_PART.replace("m.", "messages[0].")
        + "|{% endif %}"
        + EITHER_SEEN.replace("p.text", "p.text | trim")
        + "{% endfor %}",
        "<user>S|A[IMG]B<assistant>C<user>[IMG][IMG]D<assistant>E<user>F[IMG]",
    ),
    "two parts in the order of their types": (
        "{% for m in messages %}<{{ m.role }}>{% if m.role != 'user' %}" + FIRST_PART + "{% elif m.content is string %}"
        "{{ m.content }}{% else %}{% set two = m.content | length == 2 %}"
        "{% for p in (m.content | sort(attribute='type') if two else m.content) %}"
        "{{ p.text if p.type == 'text' else '[IMG]' }}{% endfor %}{% endif %}{% endfor %}",
        "<system>S<user>A [IMG] B<assistant>C<user>[IMG][IMG]D<assistant>E<user>[IMG]F",
    ),
    "parts by their keys": (
        "{% for m in messages %}<{{ m.role }}>"
        + EITHER_SEEN.replace("p.type == 'text'", "'text' in p and 'image' not in p and p.type != 'image'")
        + "{% endfor %}",
        "<system>S<user>A [IMG] B<assistant>C<user>[IMG][IMG]D<assistant>E<user>F[IMG]",
    ),
    "texts": (PLAIN, "<system>S<user>A \n[IMG]\n B<assistant>C<user>[IMG]\n[IMG]\nD<assistant>E<user>F\n[IMG]"),
}


@pytest.mark.parametrize("what", SEEING)
def test_pictures_are_shown_where_they_stand(what: str) -> None:
    """As published templates of models that see pictures show them."""
    template, expected = SEEING[what]
    messages = [
        {"role": "system", "content": "S"},
        {"role": "user", "content": [*parts("A "), picture(), *parts(" B")]},
        {"role": "assistant", "content": "C"},
        {"role": "user", "content": [picture(), picture(), *parts("D")]},
        {"role": "assistant", "content": parts("E")},
        {"role": "user", "content": [*parts("F"), picture()]},
    ]
    chat = chat_of_openai(typed({"messages": messages}, ChatBody))
    assert chat_text(ChatTemplate(template, {}), chat, "[IMG]") == expected


def test_a_picture_of_a_result_is_shown_in_its_text_where_results_are_json() -> None:
    template = (
        TOOLS + "{% for m in messages %}<{{ m.role }}>{% if m.role == 'tool' %}{{ m.content | tojson }}{% else %}"
    )
    template += EITHER_SEEN + CALLS + "{% endif %}{% endfor %}"
    messages = [{"role": "user", "content": [picture()]}, {**calls("f"), "content": ""}]
    messages.append(result("f", [*parts("R"), picture()]))
    chat = chat_of_openai(typed({"messages": messages}, ChatBody))
    assert chat_text(ChatTemplate(template, {}), chat, "[IMG]") == '<user>[IMG]<assistant>[f {}]<tool>"R\\n[IMG]"'
