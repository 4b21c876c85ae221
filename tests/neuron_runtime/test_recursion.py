"""Rules of a grammar that end with themselves allow the same texts as loops, however many items follow."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence

import pytest
from llguidance import LLMatcher, LLTokenizer
from llguidance.gbnf_to_lark import any_to_lark

from neuron_runtime.core import Form
from neuron_runtime.grammars.checker import allocated
from neuron_runtime.grammars.language import compiled, grammar_of
from neuron_runtime.grammars.recursion import with_loops

BYTES = LLTokenizer("byte")
LISTS = {
    "lark": ('start: list ";"\nlist: item list | item\nitem: /[a-z]+/ ","\n', b"abc,"),
    "optional": ('start: item ("," start)?\nitem: /[a-z]+/\n', b"abc,"),
    "gbnf": ('root ::= item ("," root)?\nitem ::= [a-z]+', b"abc,"),
    "spaces of gbnf": ('root ::= ws "x"\nws ::= ([ \\t\\n] ws)?', b" \n"),
    "by way of another": ('start: item tail\ntail: "," start | ""\nitem: /[a-z]+/\n', b"abc,"),
    "gbnf, by way of others": ('root ::= item rest\nrest ::= ("," more)?\nmore ::= root\nitem ::= [a-z]+', b"abc,"),
    "several": ('start: "a" start | "b" ["c" start | "d" [start]]  // comment | start\n   | "e"\n', b"abcbda"),
}


def matcher(lark: str) -> LLMatcher:
    return compiled(LLMatcher.grammar_from_lark(lark), BYTES, 5000)


def same_texts(one: LLMatcher, other: LLMatcher, depth: int) -> int:
    """How many texts of at most `depth` bytes both allow, as they do all or none."""
    masks = one.compute_bitmask(), other.compute_bitmask()
    assert one.is_accepting() == other.is_accepting()
    allowed = int.from_bytes(masks[0], "little") & ~(1 << BYTES.eos_token)
    assert allowed == int.from_bytes(masks[1], "little") & ~(1 << BYTES.eos_token)
    number = int(one.is_accepting())
    for byte in range(256):
        if allowed >> byte & 1 and depth:
            pair = one.deep_copy(), other.deep_copy()
            assert [each.consume_token(byte) for each in pair] == [True, True]
            number += same_texts(*pair, depth - 1)
    return number


def parts(dice: random.Random, depth: int) -> str:
    simple = ['"a"', '"b"', "/[ab]/", "t", '""', '"a".."b"']
    if depth and dice.random() < 0.4:
        inner = " | ".join(sequence(dice, depth - 1) for _ in range(dice.randint(1, 2)))
        return dice.choice(["({})", "({})?", "[{}]"]).format(inner)
    return dice.choice(simple)


def sequence(dice: random.Random, depth: int) -> str:
    """It may end with the rule `s`, or have it where another part follows."""
    items = [parts(dice, depth) for _ in range(dice.randint(0, 2))]
    if dice.random() < 0.1:
        items += ["s", '"c"']
    return " ".join([*items, *([dice.choice(["s", "s", "s?", "(s)", "[s]"])] if dice.random() < 0.5 else [])])


@pytest.mark.parametrize("seed", range(60))
def test_a_rule_that_ends_with_itself_allows_the_same_texts_as_a_loop(seed: int) -> None:
    dice = random.Random(seed)
    rule = "\n    | ".join(sequence(dice, 2) for _ in range(dice.randint(2, 4)))
    grammar = f's: {rule}\n    | "c" s\n    | "d"\nt: "b" | "a" t\nstart: s\n'
    looped = with_loops(grammar)
    assert ")*" in looped
    assert same_texts(matcher(grammar), matcher(looped), 4) >= 3, looped


@pytest.mark.parametrize("seed", range(40))
def test_rules_that_end_with_each_other_allow_the_same_texts_as_loops(seed: int) -> None:
    dice = random.Random(seed)

    def rule(names: Sequence[str]) -> str:
        ends = ("{}", "{}?", "({})", "[{}]")
        tails = [f"{parts(dice, 1)} {dice.choice(ends).format(name)}" for name in dice.sample(names, 2)]
        return " | ".join([*tails, sequence(dice, 1), '"d"'])

    rules = "\n".join(f"{name}: {rule(('s', 'u', 'v'))}" for name in ("s", "u", "v"))
    grammar = f'{rules}\nt: "b" | "a" t\nstart: "c" s | u "c" v\n'
    looped = with_loops(grammar)
    assert ")*" in looped
    assert same_texts(matcher(grammar), matcher(looped), 4) >= 3, looped


def test_a_circle_whose_loops_would_be_long_stays_and_so_does_one_of_many_rules() -> None:
    names = [f"r{number}" for number in range(12)]
    dense = "\n".join(f"{name}: " + " | ".join(f'"{name}{of}" {of}' for of in names) + ' | "x"' for name in names)
    assert len(with_loops(f"start: r0\n{dense}\n")) < 40 * len(dense)
    ring = "".join(f's{number}: "a" s{(number + 1) % 40} | "b"\n' for number in range(40))
    assert with_loops(f"start: s0\n{ring}") == f"start: s0\n{ring}"


def test_thousands_of_rules_that_end_with_the_same_one_are_read_in_less_than_a_second() -> None:
    names = [f"r{number}" for number in range(4000)]
    rules = "".join(f'{name}: "{name};" start\n' for name in names)
    began = time.process_time()
    with_loops(f'start: {" | ".join(names)} | "."\n{rules}')
    assert time.process_time() - began < 1


@pytest.mark.parametrize("again", ["?", "*", "+", "{2}"])
def test_an_optional_group_in_brackets_may_be_repeated(again: str) -> None:
    grammar = f'start: "a" ["b" | "c"]{again} start | "d" ["b"]{again} | ["a" start]{again} "c"\n'
    looped = with_loops(grammar)
    assert ")*" in looped
    assert same_texts(matcher(grammar), matcher(looped), 4) >= 3, looped


@pytest.mark.parametrize(
    "grammar",
    [
        'start: "(" start ")" | "x"\n',
        'start[max_tokens=3]: "a" start | "b"\n',
        'start: "a" start -> again | "b" -> over\n',
        'start: "a" start\n',
        'start: start | "a"\n',
        'start: start "a" | "a"\n',
        'start: ("a" start)+ | "b"\n',
        'start: "a start" | /b|start/ // start: "a" start | "b"\n',
        'start: x\nx: "a" y\ny: "b" z\nz: "c" | "(" x ")"\n',
        'start: "a" | %json {\n  "enum": ["b", "| start"]\n}\n',
        '%ignore /\\s+/\nstart: "a" "b"\n',
        "start: " + "(" * 51 + '"a" start' + ")" * 51 + ' | "b"\n',
    ],
)
def test_other_rules_stay_as_they_are(grammar: str) -> None:
    assert with_loops(grammar) == grammar


@pytest.mark.parametrize("name", LISTS)
def test_a_list_that_is_recursive_to_the_right_has_no_limit_of_items_and_hardly_grows(name: str) -> None:
    text, item = LISTS[name]
    answer = compiled(grammar_of(Form("grammar", text)), BYTES, 5000)
    before = allocated()
    for _ in range(4000):
        assert answer.consume_tokens(list(item)), answer.get_error()
    answer.compute_bitmask()
    assert not answer.is_error(), answer.get_error()
    assert allocated() - before < 8 << 20


def test_a_grammar_grows_no_more_than_twice_however_its_brackets_are_nested() -> None:
    nested = 'start: "a" ' + '("b" | "c" ' * 60 + "start" + ")" * 60 + ' | "d"\n'
    assert len(with_loops(any_to_lark(nested))) < 5 * len(nested)
