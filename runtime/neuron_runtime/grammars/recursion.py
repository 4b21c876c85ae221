"""Rules of a Lark grammar that end with themselves or with each other, written as loops.

Called by `language`, in the process of the checker. llguidance keeps an item of its parser for each rule that is open,
so `list: item list | item` grows with every item, its masks become slower, and then it gives up; `list: item* item`
allows the same texts and does not grow. What is not understood here stays, as do circles of rules whose loops would be
long.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from heapq import nsmallest
from itertools import chain

_TOKEN = re.compile(
    r"""(?P<blank>[ \t\r]+ | //[^\n]* | \#[^\n]*)
    | (?P<line>\n)
    | (?P<text>"(?:\\.|[^"\\\n])*"i? | /(?:\\.|[^/\\])+/[imslux]* | <[^<>\s]+>)
    | (?P<name>@?[!?]?[a-zA-Z_][a-zA-Z0-9_-]*)
    | (?P<count>\{[0-9, ]*\} | ~\s*[0-9]+(?:\.\.[0-9]+)?)
    | (?P<mark>\.\. | . )""",
    re.VERBOSE | re.DOTALL,
)


_MAX_DEPTH = 50
"""Brackets within brackets. A rule that is deeper stays as it is, however deep this process may recurse."""


_MAX_CIRCLE = 8
"""Rules that are followed from one, from end to end. A circle through more stays."""
_MAX_TEXT = 5_000
"""Characters of a loop through several rules, which may double with each of them."""
_MAX_ADDED = 100_000
"""Characters of all loops through several rules, so that a large grammar takes no longer to compile."""


class _NotUnderstood(Exception):
    """The rule stays as it is."""


@dataclass(frozen=True, slots=True)
class _Token:
    kind: str
    text: str
    start: int


@dataclass(frozen=True, slots=True)
class _Item:
    """One part of a sequence: `text` as it is written, or the alternatives in a group."""

    text: str
    group: Sequence[Sequence[_Item]] = ()
    is_optional: bool = False


@dataclass(frozen=True, slots=True)
class _Rule:
    start: int
    """Of its text, behind the colon."""
    end: int
    alternatives: Sequence[Sequence[_Item]]


Tails = dict[str, list[str]]
"""By rule at the end of a sequence: what comes before it. Empty texts: nothing."""


def with_loops(grammar: str) -> str:
    """The grammar, which allows the same texts as before."""
    rules = dict[str, _Rule]()
    for statement in _statements(grammar):
        name, last = statement[0].text.lstrip("!?"), statement[-1]
        if len(statement) > 2 and statement[0].kind == "name" and statement[1].text == ":" and name[0] not in "@%":
            with contextlib.suppress(_NotUnderstood):
                alternatives = _Parser(statement[2:]).alternatives("")
                rules[name] = _Rule(statement[1].start + 1, last.start + len(last.text), alternatives)
    tails = {name: _tails(name, {*_last(rule.alternatives)} & rules.keys()) for name, rule in rules.items()}
    followed = {name: _followed(name, tails) for name in rules}
    parts, end, room, too_long = [], 0, _MAX_ADDED, set[frozenset[str]]()
    for name, rule in rules.items():
        circle = frozenset((name, *(one for one in followed[name] if name in followed[one])))
        if circle in too_long or name not in followed[name]:
            continue
        loop = _loop(name, {one: _split(circle, rules[one].alternatives) for one in circle})
        room -= len(loop) if len(circle) > 1 else 0
        if loop and (room > 0 or len(circle) == 1):
            parts += [grammar[end : rule.start], f" {loop}"]
            end = rule.end
        else:
            too_long.add(circle)
    return "".join((*parts, grammar[end:]))


def _last(alternatives: Sequence[Sequence[_Item]]) -> Iterator[str]:
    for sequence in alternatives:
        if sequence:
            yield sequence[-1].text
            yield from _last(sequence[-1].group)


def _tails(name: str, found: Set[str]) -> Sequence[str]:
    """The rules with which this one may end, itself first. More than twice the largest circle are never followed."""
    return nsmallest(2 * _MAX_CIRCLE, found, key=lambda one: (one != name, one))


def _followed(name: str, tails: Mapping[str, Sequence[str]]) -> Sequence[str]:
    """The rules with which this one may end, and with which these may; only so many."""
    found = list(tails[name])
    for one in found:
        if len(found) >= _MAX_CIRCLE:
            break
        found += sorted({*tails[one]} - {*found})
    return found[:_MAX_CIRCLE]


def _statements(grammar: str) -> Iterator[list[_Token]]:
    """Each rule or directive; the line after one goes on with it if it begins with `|`, or if a bracket is open."""
    statement, depth, is_over = list[_Token](), 0, False
    for match in _TOKEN.finditer(grammar):
        kind = match.lastgroup or ""
        if kind == "line":
            is_over = depth <= 0
        elif kind != "blank":
            token = _Token(kind, match[0], match.start())
            if is_over and token.text != "|" and statement:
                yield statement
                statement, depth = [], 0
            is_over = False
            depth += (token.text in "([{") - (token.text in ")]}")
            statement.append(token)
    if statement:
        yield statement


class _Parser:
    def __init__(self, tokens: Sequence[_Token]) -> None:
        self._tokens = list(reversed(tokens))
        self._depth = 0

    def alternatives(self, closing: str) -> Sequence[Sequence[_Item]]:
        """Up to the bracket, which is taken, or to the end. Raises _NotUnderstood."""
        found: list[list[_Item]] = [[]]
        while self._tokens and self._tokens[-1].text != closing:
            if self._tokens[-1].text == "|":
                self._tokens.pop()
                found.append([])
            else:
                found[-1].append(self._item())
        if closing and not self._tokens:
            raise _NotUnderstood
        if closing:
            self._tokens.pop()
        return found

    def _item(self) -> _Item:
        token = self._tokens.pop()
        if token.text in ("(", "["):
            self._depth += 1
            if self._depth > _MAX_DEPTH:
                raise _NotUnderstood
            closing = {"(": ")", "[": "]"}[token.text]
            group = self.alternatives(closing)
            self._depth -= 1
            # In its own brackets, because `(...)?` must not be repeated.
            item = _Item(f"{token.text}{_written(group)}{closing}", group, is_optional=token.text == "[")
        elif token.kind in ("text", "name"):
            item = _Item(token.text)
            if self._tokens and self._tokens[-1].text == "..":
                item = _Item(item.text + self._tokens.pop().text + (self._tokens.pop().text if self._tokens else ""))
        else:
            raise _NotUnderstood
        while self._tokens and (self._tokens[-1].text in ("*", "+", "?") or self._tokens[-1].kind == "count"):
            repeat = self._tokens.pop().text
            is_optional = repeat == "?" and (not item.group or item.text.endswith(")"))
            item = _Item(item.text + repeat, item.group or [[item]] if is_optional else (), is_optional)
        return item


def _written(alternatives: Sequence[Sequence[_Item]]) -> str:
    return _either([" ".join(item.text for item in sequence) for sequence in alternatives])


def _loop(name: str, circle: dict[str, tuple[Tails, list[str]]]) -> str:
    """The text of a rule that ends with itself and can end otherwise; else empty. The other rules of the circle are
    put in where something ends with them, one after another."""
    for other in sorted(circle.keys() - {name}):
        tails, ends = circle.pop(other)
        again = _repeated(tails.pop(other, []))
        for of_tails, of_ends in circle.values():
            if before := of_tails.pop(other, None):
                head = _joined(_grouped(before), again)
                for target, texts in tails.items():
                    of_tails.setdefault(target, []).append(_joined(head, _grouped(texts)))
                if ends:
                    of_ends.append(_joined(head, _grouped(ends)))
        if sum(len(text) for of, ends in circle.values() for text in chain(ends, *of.values())) > _MAX_TEXT:
            return ""
    tails, ends = circle[name]
    again = _repeated(tails.get(name, []))
    return f"{again} ({_either(ends)})" if again and ends else ""


def _repeated(texts: Sequence[str]) -> str:
    texts = [one for one in texts if one]
    return f"({_either(texts)})*" if texts else ""


def _grouped(texts: Sequence[str]) -> str:
    return texts[0] if len(texts) == 1 else f"({_either(texts)})"


def _joined(*texts: str) -> str:
    return " ".join(filter(None, texts))


def _split(names: Set[str], alternatives: Sequence[Sequence[_Item]]) -> tuple[Tails, list[str]]:
    """What comes before each of these rules at the end, and the alternatives that end otherwise."""
    tails, ends = Tails(), list[str]()
    for sequence in alternatives:
        last = sequence[-1] if sequence else _Item("")
        if last.text in names:
            more, others = {last.text: [""]}, list[str]()
        elif last.group and (split := _split(names, last.group))[0]:
            more, others = split[0], [*split[1], *([""] if last.is_optional else [])]
        else:
            more, others = {}, [last.text]
        before = " ".join(item.text for item in sequence[:-1])
        for found, texts in (*((tails.setdefault(name, []), of) for name, of in more.items()), (ends, others)):
            if len(texts) == 1 or not before:
                found += [f"{before} {text}".strip() for text in texts]
            elif texts:
                found.append(f"{before} ({_either(texts)})")
    return tails, ends


def _either(texts: Sequence[str]) -> str:
    return " | ".join(text or '""' for text in texts)
