"""A form in the language of llguidance: Lark, or JSON with several grammars.

Called by `checker`, in a process of its own, because a hostile form may keep any of this busy for ever. Pure.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any
from urllib.parse import quote

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, StructTag
from llguidance.gbnf_to_lark import any_to_lark

from neuron_runtime.core import Form
from neuron_runtime.grammars.recursion import with_loops
from neuron_runtime.grammars.schemas import Schema, readable

STEP_MAX_ITEMS = 100_000
"""Of the parser, for one mask: some 5 ms. With the library's own 50,000, answers with 400 optional properties fail on
their way."""


def grammar_of(form: Form) -> str:
    """What llguidance compiles.

    Raises:
        ValueError: the form cannot be written as a grammar; says why.
    """
    grammar = _WRITERS[form.kind](form.text)
    try:
        first, *others = json.loads(grammar)["grammars"]
    except ValueError:
        first, others = {"lark_grammar": grammar}, []
    top = {"name": "answer", "lark_grammar": _TOP + _start(form)}
    return json.dumps({"grammars": [top, {**first, "name": "form"}, *others]})


def parts_of(form: Form) -> dict[str, Form]:
    """The named schemas of a form, each as a form of its own, to say which of them is wrong."""
    value = json.loads(form.text) if form.kind in ("json_schema", "structural_tag") else None
    if not isinstance(value, dict):
        return {}
    if form.kind == "structural_tag":
        return {one["begin"]: Form("json_schema", json.dumps(one.get("schema"))) for one in value["structures"]}
    parts = value.get("$defs")
    places = [f"#/$defs/{_pointed(name)}" for name in parts] if isinstance(parts, dict) else []
    return {place: Form("json_schema", json.dumps({"$defs": parts, "$ref": place})) for place in places}


def _pointed(name: str) -> str:
    """A name within a reference."""
    return quote(name.replace("~", "~0").replace("/", "~1"))


def compiled(grammar: str, tokenizer: LLTokenizer, max_states: int) -> LLMatcher:
    """A grammar at the beginning of an answer, with its first mask, which does most of the work.

    max_states: of its automaton. The library gives up when a mask would need more.

    Raises:
        ValueError: llguidance does not take the grammar; says why.
    """
    limits = LLParserLimits(
        max_lexer_states=max_states,
        step_max_items=STEP_MAX_ITEMS,
        precompute_large_lexemes=False,  # nothing is paid before it is needed
        verbose_errors=False,
    )
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=limits)
    if not matcher.is_error():
        matcher.compute_bitmask()
    if matcher.is_error():
        error = matcher.get_error()
        raise ValueError("no text fits it" if error.startswith("NoExtensionBias") else error)
    return matcher


def _json(text: str) -> str:
    return LLMatcher.grammar_from_json_schema(_schema(json.loads(text)), overrides={"whitespace_pattern": _SPACE})


def _schema(schema: Schema | None) -> dict[str, Any]:
    """Raises ValueError for the schema that nothing fits."""
    plain = readable(schema)
    if plain is False:
        raise ValueError("nothing fits the schema `false`")
    return plain if isinstance(plain, dict) else {}


_SPACE = r"(\r?\n[ \t]{0,40}| )?"
"""Between the parts of JSON: one space, or a line with its indentation. Small models would write spaces for ever."""


def _choice(text: str) -> str:
    """One word of the grammar: as words of their own, thousands would meet the library's limit of alternatives."""
    choices: list[str] = json.loads(text)
    spelled = " | ".join(_quoted(one) for one in choices if one)
    start = "start: CHOICE" + (" |" if "" in choices else "") if spelled else 'start: ""'
    return LLMatcher.grammar_from_lark(start + (f"\nCHOICE: {spelled}" if spelled else ""))


def _lark(text: str) -> str:
    return LLMatcher.grammar_from_lark(with_loops(any_to_lark(text)))


def _structural_tag(text: str) -> str:
    """Free text with tags: behind a trigger the text must be one of the tags that begin with it."""
    form: dict[str, Any] = json.loads(text)
    tags = []
    for one in form["structures"]:
        trigger = next((word for word in form["triggers"] if one["begin"].startswith(word)), None)
        if trigger is None:
            raise ValueError(f"the tag {one['begin']!r} begins with none of the triggers")
        schema = _schema(one.get("schema")) | {"x-guidance": {"whitespace_pattern": _SPACE}}
        tags.append(StructTag(trigger=trigger, begin=one["begin"], grammar=schema, end=one["end"]))
    return LLMatcher.grammar_from_lark(StructTag.to_grammar(tags, assume_special=False))


_WRITERS: dict[str, Callable[[str], str]] = {
    "json_schema": _json,
    "regex": LLMatcher.grammar_from_regex,
    "choice": _choice,
    "grammar": _lark,
    "structural_tag": _structural_tag,
}


_TOP = '%llguidance {"no_forcing": true}\n'
"""Otherwise the library spells out all text that has no alternative before the first mask: for a{1000}{1000}{1000} in
hours."""


def _start(form: Form) -> str:
    if not form.behind:
        return "start: @form\n"
    opening, mark = (re.escape(one).replace("/", "\\/") for one in (form.opening, form.behind))
    return (
        f"start: {'reasoning?' if opening else 'reasoning'} @form\n"
        "reasoning: thoughts SPACE?\n"
        f"thoughts[lazy]: /{opening}(.|\\n)*{mark}/\n"
        "SPACE: /[ \\n]+/\n"
    )


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
