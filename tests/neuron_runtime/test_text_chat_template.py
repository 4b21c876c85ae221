"""Chat templates render as in transformers, report errors, and are sandboxed."""

from __future__ import annotations

import gc
import itertools
import json
import weakref
from pathlib import Path
from typing import Any

import pytest

from helpers.chat_model import BOS, CHAT_TEMPLATE, write_chat_model
from neuron_runtime.errors import FatalError
from neuron_runtime.text import chat_template
from neuron_runtime.text.chat_template import ChatTemplate, TemplateRefused
from neuron_runtime.text.tokenizer import load_tokenizer

MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": " What is a <core>? \n"},
    {"role": "assistant", "content": "A part of a device – naïve? “no”"},
    {"role": "user", "content": "And a node?"},
]
TEMPLATES = {
    "plain": CHAT_TEMPLATE,
    "blocks": """
{%- for message in messages %}
    {% if loop.first and message.role == 'system' %}
    [{{ message.content }}]
    {% continue %}
    {% endif %}
    {{- '<' + message.role + '>' }}
    {{ message.content | trim | tojson }}
{% endfor %}
{% if add_generation_prompt %}GO{% endif %}
""",
    "generation": "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}|{% endfor %}",
    "state": "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{{ ns.n }}{% endfor %}"
    "{{ messages | map(attribute='role') | join(',') }}{{ tools is none }}{{ thinking | default('unset') }}",
    "json": "{{ messages | tojson(indent=2) }}{{ bos_token }}",
}


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_templates_render_as_transformers_renders_them(name: str, add_generation_prompt: bool, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    write_chat_model(tmp_path)
    theirs = AutoTokenizer.from_pretrained(str(tmp_path))
    rendered = theirs.apply_chat_template(
        MESSAGES,
        chat_template=TEMPLATES[name],
        tokenize=False,
        add_generation_prompt=add_generation_prompt,
        thinking="on",
    )
    ours = ChatTemplate(TEMPLATES[name], load_tokenizer(tmp_path).special_tokens)
    assert ours.render(MESSAGES, add_generation_prompt, {"thinking": "on"}) == rendered


def test_a_chat_has_exactly_one_bos(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write_chat_model(tmp_path))
    assert tokenizer.chat_template is not None
    ids = tokenizer.encode(tokenizer.chat_template.render(MESSAGES), add_special_tokens=False)
    bos = tokenizer.encode("")[0]
    assert (ids[0], ids.count(bos)) == (bos, 1)
    assert tokenizer.token(bos) == BOS


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[9].content }}", "no element 9"),
        ("{{ messages[0].content + 1 }}", "concatenate"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ 1 / 0 }}", "division"),
    ],
)
def test_a_template_error_is_refused_with_its_own_message(source: str, says: str) -> None:
    with pytest.raises(TemplateRefused, match=says):
        ChatTemplate(source, {}).render(MESSAGES)


def test_a_refusal_keeps_no_caller_alive() -> None:
    class Caller:
        def call(self) -> weakref.ref[Caller]:
            ChatTemplate("{{ raise_exception('no') }}", {})
            return weakref.ref(self)

    gc.disable()
    try:
        caller = Caller().call()
        assert caller() is None
    finally:
        gc.enable()


def test_an_invalid_template_is_reported_with_its_line(tmp_path: Path) -> None:
    write_chat_model(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("ok\n{% for %}")
    with pytest.raises(FatalError, match="line 2"):
        load_tokenizer(tmp_path)


def test_a_template_file_overrides_the_tokenizer_config(tmp_path: Path) -> None:
    write_chat_model(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("from the file")
    template = load_tokenizer(tmp_path).chat_template
    assert template is not None
    assert template.render(MESSAGES) == "from the file"


NAMED = {"tool_use": "x", "default": "y", "rag": "z"}


def named(folder: Path, templates: dict[str, str], *, as_files: bool) -> tuple[str, str]:
    """The templates of plain chats and of chats with tools of a model that has these."""
    write_chat_model(folder)
    path = folder / "tokenizer_config.json"
    settings: dict[str, Any] = json.loads(path.read_text())
    listed = {} if as_files else templates
    settings["chat_template"] = [{"name": name, "template": source} for name, source in listed.items()]
    path.write_text(json.dumps(settings))
    for name, source in templates.items() if as_files else ():
        more = folder if name == "default" else folder / "additional_chat_templates"
        more.mkdir(exist_ok=True)
        (more / f"{'chat_template' if name == 'default' else name}.jinja").write_text(source)
    tokenizer = load_tokenizer(folder)
    assert tokenizer.chat_template
    assert tokenizer.tool_template
    return tokenizer.chat_template.source, tokenizer.tool_template.source


@pytest.mark.parametrize("as_files", [True, False])
def test_chats_with_tools_have_the_template_of_that_name(as_files: bool, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    assert named(tmp_path, NAMED, as_files=as_files) == ("y", "x")
    theirs = AutoTokenizer.from_pretrained(str(tmp_path))
    for tools, source in ((None, "y"), ([{"type": "function", "function": {"name": "f"}}], "x")):
        assert theirs.apply_chat_template(MESSAGES, tools=tools, tokenize=False) == source


@pytest.mark.parametrize("as_files", [True, False])
@pytest.mark.parametrize("name", NAMED)
def test_the_only_named_template_is_that_of_all_chats(name: str, as_files: bool, tmp_path: Path) -> None:
    assert named(tmp_path, {name: "only"}, as_files=as_files) == ("only", "only")


def test_a_template_of_a_processor_is_taken_where_there_is_no_other(tmp_path: Path) -> None:
    write_chat_model(tmp_path)
    path = tmp_path / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": None}))
    (tmp_path / "chat_template.json").write_text('{"chat_template": "p"}')
    template = load_tokenizer(tmp_path).chat_template
    assert template
    assert template.source == "p"


TRIMS = "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}</s>\n{% endfor %}"
KEEPS = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</s>\n{% endfor %}"
PARTS = (
    "{% for m in messages %}<{{ m.role }}>{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{{ part.text }}{% endfor %}{% endif %}</s>\n{% endfor %}"
)


@pytest.mark.parametrize("source", [TRIMS, KEEPS, PARTS])
@pytest.mark.parametrize("ending", ["A node", "A node ", " A node\n", "A node </s> ", ""])
def test_a_continued_message_is_left_open_as_in_transformers(source: str, ending: str, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    write_chat_model(tmp_path)
    messages = [*MESSAGES, {"role": "assistant", "content": ending}]
    theirs = AutoTokenizer.from_pretrained(str(tmp_path)).apply_chat_template(
        messages, chat_template=source, tokenize=False, continue_final_message=True
    )
    assert ChatTemplate(source, {}).render_open(messages) == theirs


def test_the_last_text_part_is_left_open() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b "}]
    assert ChatTemplate(PARTS, {}).render_open([{"role": "assistant", "content": parts}]) == "<assistant>ab "


def test_a_template_that_drops_the_last_message_cannot_continue_it() -> None:
    source = "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}"
    with pytest.raises(TemplateRefused, match="cannot be continued"):
        ChatTemplate(source, {}).render_open([{"role": "assistant", "content": "a"}])


@pytest.mark.parametrize(
    ("limit", "value", "words"),
    [("MAX_CHARACTERS", 10_000, "more than 10000 characters"), ("MAX_SECONDS", 0.05, "more than 0.05 s")],
)
def test_a_prompt_is_bounded_in_size_and_time(
    limit: str, value: float, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    endless = "{% for i in range(99999) %}{% for j in range(99999) %}.{% endfor %}{% endfor %}"
    template = ChatTemplate("{% if messages[0].content == 'more' %}" + endless + "{% endif %}", {})
    monkeypatch.setattr(chat_template, limit, value)
    with pytest.raises(TemplateRefused, match=words):
        template.render([{"role": "user", "content": "more"}])
    assert template.render([{"role": "user", "content": "less"}]) == ""
    # One that is so whatever the chat is, is none.
    with pytest.raises(ValueError, match=words):
        ChatTemplate(endless, {})


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{% for i in range(9999) %}{% for j in range(9999) %}{% endfor %}{% endfor %}", "more than 0.05 s"),
        ("{% for i in range(9999) %}{% for j in range(9999) if j < 0 %}.{% endfor %}{% endfor %}", "more than 0.05 s"),
        ("{% macro m(n) %}{% if n %}{% set x = m(n - 1) ~ m(n - 1) %}{% endif %}{% endmacro %}{{ m(40) }}", "0.05 s"),
        ("{{ 10 ** (10 ** 9) }}", "number of more than 65536 bits"),
        (
            "{% set n = namespace(x=3) %}{% for i in range(99) %}{% set n.x = n.x * n.x %}{% endfor %}",
            "number of more than 65536 bits",
        ),
        ("{{ 'ab' * 10 ** 10 }}", "repeats something 10000000000 times"),
        ("{{ 10 ** 10 * [1] }}", "repeats something 10000000000 times"),
    ],
)
def test_a_template_that_computes_long_without_writing_is_ended(
    source: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat_template, "MAX_SECONDS", 0.05)
    with pytest.raises(ValueError, match=words):
        ChatTemplate(source, {})


def test_a_template_is_tried_in_bounded_time(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = itertools.count()
    monkeypatch.setattr(chat_template.time, "thread_time", lambda: next(clock))
    monkeypatch.setattr(chat_template, "MAX_SECONDS", 10)
    with pytest.raises(ValueError, match="takes more than 10 s"):
        ChatTemplate("{{ messages | length }}", {})


def test_small_products_and_loops_are_computed_as_ever() -> None:
    source = "{% for i in range(5) if i is odd %}{{ loop.index }}{{ '-' * i }}{{ i ** 2 }}{{ 2.5 * i }}{% endfor %}"
    assert ChatTemplate(source, {}).render([]) == "1-12.52---97.5"
