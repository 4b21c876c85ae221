"""Forms of answers compiled by llguidance: which tokens may follow, whose end, and what hostile forms meet."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from llguidance import LLTokenizer
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import models

from helpers.chat_model import END, byte_level_tokenizer, metaspace_tokenizer
from helpers.strict_backend import tokens_of
from neuron_runtime.core import FORM_BYTES, Form, Request, Sampling
from neuron_runtime.engine.guides import Guide
from neuron_runtime.errors import InvalidRequest
from neuron_runtime.grammars.answers import FULL, Answer, Grammar
from neuron_runtime.grammars.checker import Checker, allocated
from neuron_runtime.grammars.guides import ENTRY_BYTES, NUM_THREADS, GrammarGuide, GrammarGuides
from neuron_runtime.requests.forms import MAX_FORM_CHOICES
from neuron_runtime.text.tokenizer import Tokenizer

PATIENCE = 60.0
MIB = 2**20
ENDS = (2, 5)
"""Two tokens that end an answer; the second one would be text."""


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(byte_level_tokenizer())


@pytest.fixture(scope="module")
def guides(tokenizer: Tokenizer) -> Iterator[GrammarGuides]:
    made = GrammarGuides(lambda: tokenizer, tokenizer.vocabulary_size)
    yield made
    made.close()


def request(form: Form, ends: Sequence[int] = ENDS) -> Request:
    return Request("r", (1,), Sampling(form=form, stop_token_ids=frozenset(ends)))


def guide_of(guides: GrammarGuides, form: Form) -> Guide:
    return guides.prepare(request(form)).result(PATIENCE)


def allowed(guides: GrammarGuides, guide: Guide) -> set[int]:
    """The tokens that may follow; none if the guide has failed."""
    masks = guides.masks([guide])
    return set() if masks.failed else set(tokens_of(masks.bits, len(masks.bits) * 8))


def accepts(guides: GrammarGuides, form: Form, tokenizer: Tokenizer, text: str) -> bool:
    """Whether the text may be written token by token, and the answer may end behind it."""
    guide = guide_of(guides, form)
    for token in tokenizer.encode(text, add_special_tokens=False):
        if token not in allowed(guides, guide):
            return False
        guide.advance((token,))
    return set(ENDS) <= allowed(guides, guide)


def schema(**fields: Any) -> Form:
    return Form("json_schema", json.dumps(fields), field="response_format")


PERSON = schema(
    type="object",
    properties={"name": {"type": "string"}, "age": {"type": "integer", "minimum": 0}},
    required=["name", "age"],
    additionalProperties=False,
)
ANY_OBJECT = schema(type="object")
MANY_CHOICES = json.dumps([f"choice {number}" for number in range(MAX_FORM_CHOICES)])
TAGS = {
    "structures": [{"begin": "<call=a>", "end": "</call>", "schema": {"type": "integer"}}],
    "triggers": ["<call="],
}


@pytest.mark.parametrize(
    ("form", "right", "wrong"),
    [
        (Form("json_schema", "true"), ["7", '"a"', "[{}]"], ["a", ""]),
        (ANY_OBJECT, ['{"a": [1, {"b": null}]}', "{}"], ["[]", '{"a": 1', "text", ""]),
        (
            PERSON,
            ['{"name": "東京", "age": 7}'],
            ['{"name": "x"}', '{"name": "x", "age": -1}', '{"age": 7, "name": 1}'],
        ),
        (Form("regex", "[ab]{2,3}c?"), ["ab", "abac"], ["a", "abcc", "x"]),
        (
            Form("choice", '["a core", "a \\"node\\"\\n", "a core, too"]'),
            ["a core", 'a "node"\n', "a core, too"],
            ["a"],
        ),
        (Form("choice", '["", "a core"]'), ["", "a core"], ["a"]),
        (Form("choice", '[""]'), [""], ["a"]),
        (Form("choice", MANY_CHOICES), ["choice 0", f"choice {MAX_FORM_CHOICES - 1}"], ["choice", "choice x"]),
        (Form("grammar", 'start: "a" NUMBER\nNUMBER: /[0-9]+/'), ["a12"], ["a", "12"]),
        (Form("grammar", 'root ::= "yes" | "no" root'), ["yes", "nonoyes"], ["no"]),
        (Form("structural_tag", json.dumps(TAGS)), ["free", "x <call=a>12</call> y"], ["<call=a>x</call>", "<call=b>"]),
    ],
)
def test_an_answer_keeps_to_its_form(
    guides: GrammarGuides, tokenizer: Tokenizer, form: Form, right: list[str], wrong: list[str]
) -> None:
    assert [text for text in right if not accepts(guides, form, tokenizer, text)] == []
    assert [text for text in wrong if accepts(guides, form, tokenizer, text)] == []


SMALL = {"type": "integer"}
LITERALS = {"propertyNames": {"enum": ["a", "b"]}, "additionalProperties": SMALL}


@pytest.mark.parametrize(
    ("fields", "right", "wrong"),
    [
        ({"propertyNames": {"type": "string"}, "additionalProperties": SMALL}, ['{"x": 1}'], ['{"x": ""}']),
        (LITERALS, ['{"a": 1, "b": 2}', "{}"], ['{"c": 1}', '{"a": "x"}']),
        ({"propertyNames": {"pattern": "^a+$"}}, ['{"aa": 1}'], ['{"b": 1}']),
        ({"properties": {"a": {"not": {}}, "b": {"type": "null"}}}, ['{"b": null}', "{}"], ['{"a": 1}']),
        ({"properties": {"a": LITERALS}}, ['{"a": {"b": 1}}'], ['{"a": {"c": 1}}']),
        ({"unevaluatedProperties": True, "dependentRequired": {}, "dependentSchemas": {}}, ["{}"], ["[]"]),
    ],
)
def test_an_object_keeps_to_keywords_that_can_be_written_otherwise(
    guides: GrammarGuides, tokenizer: Tokenizer, fields: dict[str, Any], right: list[str], wrong: list[str]
) -> None:
    form = schema(type="object", **fields)
    assert [text for text in right if not accepts(guides, form, tokenizer, text)] == []
    assert [text for text in wrong if accepts(guides, form, tokenizer, text)] == []


@pytest.mark.parametrize(
    ("fields", "right", "wrong"),
    [
        ({"type": "string", "minLength": 2.0, "maxLength": 3.0}, ['"ab"', '"abc"'], ['"a"', '"abcd"']),
        ({"type": "string", "minLength": 2, "maxLength": 3}, ['"éé"', '"東京都"', '"😀😀"'], ['"é"', '"東"', '"😀"']),
        ({"type": "string", "maxLength": 2}, ['"東京"', '"😀😀"'], ['"東京都"', '"😀😀😀"']),
        ({"type": "array", "minItems": 1.0, "maxItems": 2.0}, ["[1]", "[1, 2]"], ["[]", "[1, 2, 3]"]),
    ],
)
def test_lengths_are_counted_in_characters_and_may_be_written_as_any_whole_number(
    guides: GrammarGuides, tokenizer: Tokenizer, fields: dict[str, Any], right: list[str], wrong: list[str]
) -> None:
    form = schema(**fields)
    assert [text for text in right if not accepts(guides, form, tokenizer, text)] == []
    assert [text for text in wrong if accepts(guides, form, tokenizer, text)] == []


@pytest.mark.parametrize("name", ["password", "uuid4", "uri-reference", "regex", "binary"])
def test_a_format_that_only_describes_a_text_allows_any(guides: GrammarGuides, tokenizer: Tokenizer, name: str) -> None:
    form = schema(type="array", items={"type": "string", "format": name, "pattern": "^a"}, uniqueItems=False)
    assert accepts(guides, form, tokenizer, '["ab", "ab"]')
    assert not accepts(guides, form, tokenizer, '["b"]')


def test_a_value_that_looks_like_a_keyword_stays(guides: GrammarGuides, tokenizer: Tokenizer) -> None:
    form = schema(properties={"format": {"const": {"format": "x", "uniqueItems": False}}}, required=["format"])
    assert accepts(guides, form, tokenizer, '{"format": {"format": "x", "uniqueItems": false}}')
    assert not accepts(guides, form, tokenizer, '{"format": {}}')


def test_spaces_in_json_are_bounded(guides: GrammarGuides, tokenizer: Tokenizer) -> None:
    form = schema(type="object", **{"x-guidance": {"whitespace_pattern": " *"}})
    right = ['{"a":[1,2]}', '{ "a" : [ 1 , 2 ] }', '{\n    "a": [\n\t1\r\n    ]\n}']
    assert [text for text in right if not accepts(guides, form, tokenizer, text)] == []
    assert not accepts(guides, form, tokenizer, '{  "a":1}')
    assert not accepts(guides, form, tokenizer, '{\n\n"a":1}')


def test_spaces_in_the_json_of_a_tag_are_bounded(guides: GrammarGuides, tokenizer: Tokenizer) -> None:
    schema = {"type": "array", "items": {"type": "integer"}, "x-guidance": {"whitespace_pattern": " *"}}
    tag = {"begin": "<a>", "end": "</a>", "schema": schema}
    form = Form("structural_tag", json.dumps({"structures": [tag], "triggers": ["<a"]}), field="response_format")
    assert accepts(guides, form, tokenizer, "x <a>[ 1, 2 ]</a>")
    assert not accepts(guides, form, tokenizer, "x <a>[  1]</a>")


def test_a_vocabulary_with_spaces_in_its_words_keeps_to_a_form() -> None:
    tokenizer = Tokenizer(metaspace_tokenizer())
    guides = GrammarGuides(lambda: tokenizer, 0)
    try:
        form = Form("regex", "a( device| core)+ ☃?")
        assert accepts(guides, form, tokenizer, "a device core ☃") is False, "a word may not begin with a space"
        guide = guide_of(guides, form)
        words = [next(t for t in allowed(guides, guide) if tokenizer.token_bytes(t) == b"a")]
        guide.advance(words)
        spelled = {tokenizer.token_bytes(token) for token in allowed(guides, guide)}
        assert b" " in spelled
        assert all(b" device".startswith(one) or b" core".startswith(one) for one in spelled)
    finally:
        guides.close()


def test_only_the_end_tokens_of_the_request_end_a_complete_answer(guides: GrammarGuides, tokenizer: Tokenizer) -> None:
    form = Form("choice", '["a"]')
    (letter,) = tokenizer.encode("a", add_special_tokens=False)
    both = [guides.prepare(request(form, ends)).result(PATIENCE) for ends in ((2,), (3, 10**6))]
    assert [allowed(guides, guide) for guide in both] == [{letter}, {letter}]
    for guide in both:
        guide.advance((letter,))
    assert [allowed(guides, guide) for guide in both] == [{2}, {3}]


def test_special_tokens_are_never_part_of_an_answer(guides: GrammarGuides, tokenizer: Tokenizer) -> None:
    guide = guide_of(guides, Form("regex", "(.|\n)*"))
    special = {token for token in range(tokenizer.vocabulary_size) if tokenizer.is_special(token)}
    assert allowed(guides, guide) & special == {2}
    assert not accepts(guides, Form("regex", "(.|\n)*"), tokenizer, END)


def test_answers_of_one_form_do_not_disturb_each_other(guides: GrammarGuides, tokenizer: Tokenizer) -> None:
    form = Form("choice", '["ab", "cd"]')
    first, second = guide_of(guides, form), guide_of(guides, form)
    first.advance(tokenizer.encode("a", add_special_tokens=False))
    second.advance(tokenizer.encode("c", add_special_tokens=False))
    masks = guides.masks([second, first])
    half = len(masks.bits) // 2
    found = [tokens_of(masks.bits[at : at + half], half * 8) for at in (0, half)]
    assert [[tokenizer.token_bytes(token) for token in tokens] for tokens in found] == [[b"d"], [b"b"]]


@pytest.mark.parametrize(
    ("opening", "right", "wrong"),
    [
        ("", ["hm {} <think> </think>{}", "</think> \n{}"], ["{}", "hm</think>", "</think>x"]),
        ("<think>", ["{}", "<think>hm\n</think>\n\n{}"], ["hm</think>{}", "<think>{}"]),
    ],
)
def test_reasoning_comes_before_the_form(
    guides: GrammarGuides, tokenizer: Tokenizer, opening: str, right: list[str], wrong: list[str]
) -> None:
    form = Form("json_schema", '{"type":"object"}', behind="</think>", opening=opening)
    assert [text for text in right if not accepts(guides, form, tokenizer, text)] == []
    assert [text for text in wrong if accepts(guides, form, tokenizer, text)] == []


def test_a_token_that_does_not_fit_fails_the_guide_alone(guides: GrammarGuides, tokenizer: Tokenizer) -> None:
    form = Form("choice", '["ab"]')
    lost, kept = guide_of(guides, form), guide_of(guides, form)
    lost.advance(tokenizer.encode("x", add_special_tokens=False))
    masks = guides.masks([lost, kept])
    assert list(masks.failed) == [0]


def test_guides_follow_answers_by_any_number_of_tokens(guides: GrammarGuides, tokenizer: Tokenizer) -> None:
    form = Form("regex", "[a-c]{3}|[x-z]{4}")
    first, second = guide_of(guides, form), guide_of(guides, form)
    a, x = (tokenizer.encode(one, add_special_tokens=False) for one in ("a", "x"))
    first.advance(a * 3)
    second.advance(x)
    second.advance(x)
    masks = guides.masks([first, second])
    half = len(masks.bits) // 2
    may_follow = [set(tokens_of(masks.bits[at : at + half], half * 8)) for at in (0, half)]
    assert may_follow[0] == set(ENDS)
    assert {tokenizer.token_bytes(token) for token in may_follow[1]} >= {b"x", b"y", b"z"}
    assert not may_follow[1] & set(ENDS)


def test_a_complete_answer_whose_end_the_model_has_not_fails(guides: GrammarGuides, tokenizer: Tokenizer) -> None:
    guide = guides.prepare(request(Form("choice", '["a"]'), (10**6,))).result(PATIENCE)
    guide.advance(tokenizer.encode("a", add_special_tokens=False))
    assert list(guides.masks([guide]).failed) == [0]


@pytest.mark.parametrize("pattern", ["za", "az", "(ab){3}[x-z]a"])
def test_a_form_whose_text_the_vocabulary_cannot_spell_is_refused(pattern: str) -> None:
    plain = Tokenizer(FastTokenizer(models.WordLevel({"a": 0, "ab": 1}, unk_token="a")))
    guides = GrammarGuides(lambda: plain, 0)
    try:
        assert "cannot be compiled" in str(refusal(guides, Form("regex", pattern, field="guided_regex")))
    finally:
        guides.close()


# Drafts


def encoded(tokenizer: Tokenizer, text: str) -> tuple[int, ...]:
    return tuple(tokenizer.encode(text, add_special_tokens=False))


@pytest.mark.parametrize("num_before", [0, 3])
def test_masks_behind_drafts_are_those_of_advancing_by_them(
    guides: GrammarGuides, tokenizer: Tokenizer, num_before: int
) -> None:
    texts = ['{"name": "Ada", "age": 36}', '{"age": 1', '{"name": "a very long name', "{"]
    answers = [encoded(tokenizer, text) for text in texts]
    drafts = [answer[num_before : num_before + 2 * at] for at, answer in enumerate(answers)]
    drafts[0] = answers[0][num_before:]  # behind the last of them, the answer may end
    drafted, plain = ([guide_of(guides, ANY_OBJECT) for _ in texts] for _ in range(2))
    for both in (drafted, plain):
        for guide, answer in zip(both, answers, strict=True):
            guide.advance(answer[:num_before])
    for _ in range(2):  # nothing is left of drafts
        masks = guides.masks(drafted, drafts)
        assert masks.num_positions == 1 + len(drafts[0])
        assert not masks.failed
        found = np.frombuffer(masks.bits, dtype=np.uint8).reshape(len(texts), masks.num_positions, -1)
        for place in range(masks.num_positions):
            for at in range(len(texts)):
                behind = guide_of(guides, ANY_OBJECT)
                behind.advance((*answers[at][:num_before], *drafts[at][:place]))
                there = place <= len(drafts[at])
                assert bytes(found[at, place]) == (
                    bytes(guides.masks([behind]).bits) if there else b"\xff" * found.shape[2]
                )
    assert guides.masks(drafted) == guides.masks(plain)


def test_drafts_that_leave_the_form_are_not_kept(guides: GrammarGuides, tokenizer: Tokenizer) -> None:
    guide = guide_of(guides, Form("choice", '["hello world", "hello you"]'))
    you, zoo = encoded(tokenizer, "hello you"), encoded(tokenizer, "hello zoo")
    common = next(at for at, (one, other) in enumerate(zip(you, zoo, strict=False)) if one != other)
    assert guide.num_kept(you) == len(you)
    assert guide.num_kept(zoo) >= common
    assert guide.num_kept((*you, ENDS[0], you[0])) == len(you)
    assert guide.num_kept((10**6,)) == guide.num_kept(()) == 0
    guide.advance(you[:2])
    assert guide.num_kept(you) < len(you)
    assert guide.num_kept(you[2:]) == len(you) - 2
    guide.advance(you[2:])
    assert guide.num_kept(you[:1]) == 0
    assert allowed(guides, guide) == set(ENDS)


def test_what_must_follow_is_told_as_tokens(guides: GrammarGuides, tokenizer: Tokenizer) -> None:
    guide = guide_of(guides, Form("choice", '["the same words first, then this", "the same words first, then that"]'))
    forced = guide.forced(100)
    text = b"".join(tokenizer.token_bytes(token) for token in forced)
    assert text
    assert b"the same words first, then th".startswith(text)
    assert guide.forced(2) == forced[:2]
    assert guide.num_kept(forced) == len(forced)
    guide.advance(forced)
    assert guide.forced(100) == ()
    assert guide_of(guides, Form("regex", "[a-z]+")).forced(100) == ()


def test_a_guide_that_has_failed_keeps_no_drafts(guides: GrammarGuides, tokenizer: Tokenizer) -> None:
    lost, kept = (guide_of(guides, Form("choice", '["ab"]')) for _ in range(2))
    lost.advance(encoded(tokenizer, "x"))
    assert (lost.num_kept(encoded(tokenizer, "a")), lost.forced(9)) == (0, ())
    for drafts in ([(), encoded(tokenizer, "a")], [encoded(tokenizer, "a"), ()]):
        masks = guides.masks([lost, kept], drafts)
        assert list(masks.failed) == [0]


def test_masks_behind_drafts_go_on_where_the_automaton_of_a_form_is_full(
    guides: GrammarGuides, tokenizer: Tokenizer
) -> None:
    form, dice = Form("regex", "(a|b)*a(a|b){20}"), random.Random(0)
    letters = encoded(tokenizer, "ab")
    for _ in range(8):
        answer = guide_of(guides, form)
        for _ in range(200):
            drafts = dice.choices(letters, k=4)
            kept = drafts[: answer.num_kept(drafts)]  # none behind the place where it is full
            assert not guides.masks([answer], [kept]).failed
            answer.advance(drafts)


@pytest.mark.parametrize(
    ("pattern", "num_states"), [("(a|b)*a(a|b){20}", 200), ("(a|b)*a(a|b){20}", 300), ("[ab]{150}", 5000)]
)
def test_an_answer_that_cannot_go_on_is_as_long_with_drafts_as_without(
    guides: GrammarGuides, tokenizer: Tokenizer, pattern: str, num_states: int
) -> None:
    """At the limit of its work, and where it is complete but the model has no token for its end."""
    text = random.Random(0).choices(encoded(tokenizer, "ab"), k=400)
    made = guide_of(guides, Form("regex", pattern))
    assert isinstance(made, GrammarGuide)
    of_model = made.answer.grammar
    lengths, num_right = [], 0
    for most in (0, 1, 4):
        guide = GrammarGuide(Answer(Grammar(of_model.text, of_model.tokenizer, num_states)), end_token_ids=())
        known, ahead = 0, text[:0]
        while not (masks := guides.masks([guide], [ahead])).failed:
            guide.advance(text[known : known + masks.num_positions])
            known, num_right = known + masks.num_positions, num_right + masks.num_positions - 1
            ahead = text[known : known + most]
            ahead = ahead[: guide.num_kept(ahead)]
        lengths.append(known)
    assert len(set(lengths)) == 1
    assert num_right > 50


def test_no_guides_have_no_masks(guides: GrammarGuides) -> None:
    guide_of(guides, Form("choice", '["a"]'))
    assert len(guides.masks([]).bits) == 0


# Refusals


def refusal(guides: GrammarGuides, form: Form) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        guide_of(guides, form)
    return caught.value


@pytest.mark.parametrize(
    ("form", "says"),
    [
        (Form("regex", "(", field="guided_regex"), "unclosed group"),
        (Form("regex", "(?=a)b", field="guided_regex"), "look-around"),
        (Form("grammar", "start: nothing", field="structured_outputs.grammar"), 'unknown name: "nothing"'),
        (Form("grammar", 'start: "a', field="structured_outputs.grammar"), ""),
        (Form("json_schema", "false", field="response_format"), "nothing fits the schema"),
        (
            Form(
                "structural_tag",
                json.dumps({"structures": [{"begin": "<a>", "end": "", "schema": False}], "triggers": ["<a"]}),
                field="response_format",
            ),
            "nothing fits the schema",
        ),
        (schema(type="strange"), "strange"),
        (schema(**{"$defs": {"a": {}, "b/c": {"uniqueItems": True}}, "$ref": "#/$defs/b~1c"}), "#/$defs/b~1c: Unimpl"),
        (schema(type="array", uniqueItems=0), "uniqueItems"),
        (schema(items={"minLength": 5000.0}), "minLength: 5000 is more than 4096, which no answer would reach"),
        (schema(items={"minLength": 4097}), "minLength: 4097 is more than 4096, which no answer would reach"),
        (schema(type="object", properties={}, propertyNames={"enum": ["a"]}), "propertyNames"),
        (schema(**{"$ref": "#"}), "no text fits it"),
        (schema(**{"not": {"type": "string"}}), "not"),
        (schema(**{"$ref": "http://127.0.0.1:1/schema"}), "does not fetch"),
        (schema(**{"$ref": "file:///etc/passwd"}), "does not fetch"),
    ],
)
def test_a_form_that_cannot_be_compiled_is_refused_by_its_field(guides: GrammarGuides, form: Form, says: str) -> None:
    error = refusal(guides, form)
    assert error.field == form.field
    assert f"`{form.field}` cannot be compiled: " in str(error)
    assert says in str(error)
    assert len(str(error)) < 1200


LINKED = {f"d{i}": {"properties": {"a": {"$ref": f"#/$defs/d{i + 1}"}}} for i in range(5000)} | {"d5000": {}}


@pytest.mark.parametrize(
    ("form", "says"),
    [
        (schema(type="integer", multipleOf=99999989), "it cannot be compiled in 2 s"),
        (schema(**{"$defs": LINKED, "$ref": "#/$defs/d0"}), "cannot be compiled"),
        (Form("grammar", "start: " + "(" * 50000 + '"a"' + ")" * 50000, field="guided_grammar"), "cannot be compiled"),
        (Form("grammar", "root ::= " + "(" * 9000 + '"a"' + ")" * 9000, field="guided_grammar"), "cannot be compiled"),
        (Form("grammar", "start: @answer", field="guided_grammar"), "cannot be compiled"),
    ],
    ids=["work", "depth", "lark", "gbnf", "itself"],
)
def test_a_form_whose_compilation_would_never_end_is_refused_and_others_are_served(
    guides: GrammarGuides, tokenizer: Tokenizer, form: Form, says: str
) -> None:
    assert says in str(refusal(guides, form))
    assert accepts(guides, Form("choice", json.dumps([f"after {form.kind}"])), tokenizer, f"after {form.kind}")


@pytest.mark.parametrize(
    ("form", "says"),
    [
        (schema(type="object", properties={f"p{at}": {"type": "string"} for at in range(1200)}), "max is 2000"),
        (Form("grammar", "start: " + " | ".join(f'"x{at}"' for at in range(3000)), field="guided_grammar"), "max is"),
        (Form("grammar", 'start: s\ns: s s | "a" | "b"', field="guided_grammar"), "too complex"),
    ],
    ids=["properties", "alternatives", "ambiguous"],
)
def test_a_form_that_would_fail_in_the_middle_of_an_answer_is_refused(
    guides: GrammarGuides, form: Form, says: str
) -> None:
    assert says in str(refusal(guides, form))


@pytest.mark.parametrize(
    "form",
    [
        Form("regex", "a{1000}{1000}{1000}"),
        Form("grammar", '%llguidance {"no_forcing": false}\nstart: /a{1000}{1000}{1000}/\n'),
        schema(type="string", minLength=4096),
        schema(type="array", minItems=10**6, items={"type": "integer"}),
    ],
)
def test_a_form_of_a_very_long_answer_is_served_token_by_token(guides: GrammarGuides, form: Form) -> None:
    guide = guide_of(guides, form)
    for _ in range(5):
        may_follow = allowed(guides, guide)
        assert may_follow
        guide.advance((min(may_follow),))


def test_answers_go_on_where_they_have_filled_the_automaton_of_their_form(
    guides: GrammarGuides, tokenizer: Tokenizer
) -> None:
    form, dice = Form("regex", "(a|b)*a(a|b){20}"), random.Random(0)
    letters = tokenizer.encode("ab", add_special_tokens=False)
    for _ in range(8):
        answers = [guide_of(guides, form) for _ in range(2)]
        for _ in range(800):
            assert not guides.masks(answers).failed
            for answer in answers:
                answer.advance((dice.choice(letters),))


def test_forms_are_compiled_once_and_beyond_their_memory_the_least_used_is_forgotten(tokenizer: Tokenizer) -> None:
    guides = GrammarGuides(lambda: tokenizer, tokenizer.vocabulary_size, max_bytes=(NUM_THREADS + 2) * FORM_BYTES + MIB)
    try:
        first, *others = (Form("choice", json.dumps([name])) for name in ("first", "second", "third", "fourth"))
        again = request(first)
        guide_of(guides, first)
        named = Form(first.kind, first.text, field="guided_choice")
        assert guides.prepare(request(named)).done(), "the field's name makes no other form"
        for form in others:
            guide_of(guides, form)
            assert guides.prepare(again).done(), "a known form needs no thread"
        assert [guides.prepare(request(form)).done() for form in (first, *reversed(others))] == [
            True,
            True,
            True,
            False,
        ]
    finally:
        guides.close()


def test_a_form_waits_until_others_have_no_answers_where_their_memory_is_full(tokenizer: Tokenizer) -> None:
    guides = GrammarGuides(lambda: tokenizer, tokenizer.vocabulary_size, max_bytes=NUM_THREADS * FORM_BYTES)
    try:
        forms = [Form("choice", json.dumps([name])) for name in ("first", "second")]
        answers = [guide_of(guides, forms[0])]
        waiting = guides.prepare(request(forms[1]))
        with pytest.raises(TimeoutError):
            waiting.result(0.3)
        assert allowed(guides, answers[0])
        answers.clear()
        assert allowed(guides, waiting.result(PATIENCE))
    finally:
        guides.close()


def test_refused_forms_count_too(tokenizer: Tokenizer) -> None:
    guides = GrammarGuides(
        lambda: tokenizer, tokenizer.vocabulary_size, max_bytes=NUM_THREADS * FORM_BYTES + 10 * ENTRY_BYTES
    )
    try:
        for number in range(30):
            refusal(guides, Form("regex", f"({number}", field="guided_regex"))
        guide_of(guides, Form("choice", '["a"]'))
        assert len(guides._grammars) <= 12
    finally:
        guides.close()


def test_a_refusal_names_the_field_of_each_request(guides: GrammarGuides) -> None:
    for field in ("guided_regex", "structured_outputs.regex"):
        assert refusal(guides, Form("regex", ")", field=field)).field == field


def test_closing_ends_compilations_that_run() -> None:
    tokenizer = Tokenizer(byte_level_tokenizer())
    guides = GrammarGuides(lambda: tokenizer, 0)
    asked = [guides.prepare(request(schema(type="integer", multipleOf=99999989 + n))) for n in range(4)]
    guides.close()
    assert all(one.done() for one in asked)


def test_a_compilation_that_is_ended_before_its_process_has_started_ends() -> None:
    checker = Checker(FORM_BYTES)
    checker.interrupt()
    with pytest.raises(InvalidRequest, match="cannot be compiled"):
        checker.checked(Form("choice", '["a"]'))


PATTERNS = "\n".join(f"A{at}: /[a-z]*{chr(97 + at % 26)}[a-z]{{{at % 40 + 5}}}/" for at in range(60))


@pytest.mark.parametrize(
    "form",
    [
        Form("regex", "[\\p{L}\\p{N} ]{1,500}"),
        Form("grammar", 'start: "x" (' + " | ".join(f"A{at}" for at in range(60)) + ")\n" + PATTERNS),
        Form("grammar", "start: /[0-9]{1000}/ (" + " | ".join(f"A{at}" for at in range(60)) + ")\n" + PATTERNS),
    ],
    ids=["many states", "large states", "states that are large behind a thousand others"],
)
def test_a_form_with_a_full_automaton_takes_no_more_memory_than_is_counted(form: Form) -> None:
    checker = Checker(FORM_BYTES)
    try:
        checked = checker.checked(form)
    finally:
        checker.close()
    before, dice = allocated(), random.Random(0)
    grammar = Grammar(checked.grammar, LLTokenizer("byte"), checked.max_states)
    error = ""
    while FULL not in error:
        matcher = Answer(grammar).matcher
        while may_follow := tokens_of(memoryview(matcher.compute_bitmask()), 256):
            matcher.consume_token(dice.choice(may_follow))
        error = matcher.get_error()
    assert MIB < allocated() - before < FORM_BYTES
