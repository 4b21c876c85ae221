"""Chat templates render as transformers renders them, refuse in words, and cannot reach out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from helpers.chat_model import BOS, CHAT_TEMPLATE, write_chat_model
from neuron_runtime.errors import FatalError
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
def test_what_a_template_cannot_do_is_refused_in_its_own_words(source: str, says: str) -> None:
    with pytest.raises(TemplateRefused, match=says):
        ChatTemplate(source, {}).render(MESSAGES)


def test_a_template_that_is_none_names_the_line(tmp_path: Path) -> None:
    write_chat_model(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("ok\n{% for %}")
    with pytest.raises(FatalError, match="line 2"):
        load_tokenizer(tmp_path)


def test_a_template_file_wins_over_the_entry_of_the_tokenizers_settings(tmp_path: Path) -> None:
    write_chat_model(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("from the file")
    template = load_tokenizer(tmp_path).chat_template
    assert template is not None
    assert template.render(MESSAGES) == "from the file"


def test_of_several_named_templates_the_default_is_taken(tmp_path: Path) -> None:
    write_chat_model(tmp_path)
    path = tmp_path / "tokenizer_config.json"
    settings: dict[str, Any] = json.loads(path.read_text())
    settings["chat_template"] = [{"name": "tool_use", "template": "x"}, {"name": "default", "template": "y"}]
    path.write_text(json.dumps(settings))
    template = load_tokenizer(tmp_path).chat_template
    assert template is not None
    assert template.render(MESSAGES) == "y"
