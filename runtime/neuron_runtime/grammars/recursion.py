"""Rules of a Lark grammar that end with themselves, written as loops.

Called by `language`, in the process of the checker. llguidance keeps an item of its parser for each rule that is open,
so `list: item list | item` grows with every item, its masks become slower, and then it gives up; `list: item* item`
allows the same texts and does not grow. Rules that end with themselves by way of another one stay, as does what is not
understood here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

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


def with_loops(grammar: str) -> str:
    """The grammar, which allows the same texts as before."""
    parts, end = [], 0
    for statement in _statements(grammar):
        name, start, stop = statement[0].text.lstrip("!?"), statement[0].start, statement[-1]
        if len(statement) > 2 and statement[0].kind == "name" and statement[1].text == ":" and name[0] not in "@%":
            try:
                loop = _loop(name, _Parser(statement[2:]).alternatives(""))
            except _NotUnderstood:
                continue
            if loop:
                parts += [grammar[end:start], f"{statement[0].text}: {loop}"]
                end = stop.start + len(stop.text)
    return "".join((*parts, grammar[end:]))


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
            group = self.alternatives({"(": ")", "[": "]"}[token.text])
            self._depth -= 1
            item = _Item(f"({_written(group)})", group)
            item = _Item(f"{item.text}?", group, is_optional=True) if token.text == "[" else item
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


def _loop(name: str, alternatives: Sequence[Sequence[_Item]]) -> str:
    """The rule's text, if it ends with itself and can end otherwise; else empty."""
    again, ends = _split(name, alternatives)
    again = [one for one in again if one]
    return f"({_either(again)})* ({_either(ends)})" if again and ends else ""


def _split(name: str, alternatives: Sequence[Sequence[_Item]]) -> tuple[list[str], list[str]]:
    """What comes before the rule itself at the end, and the alternatives that end otherwise. Empty texts: nothing."""
    again, ends = list[str](), list[str]()
    for sequence in alternatives:
        last = sequence[-1] if sequence else _Item("")
        if last.text == name:
            more, others = [""], list[str]()
        elif last.group and (split := _split(name, last.group))[0]:
            more, others = split[0], [*split[1], *([""] if last.is_optional else [])]
        else:
            more, others = [], [last.text]
        before = " ".join(item.text for item in sequence[:-1])
        for found, texts in ((again, more), (ends, others)):
            if len(texts) == 1 or not before:
                found += [f"{before} {text}".strip() for text in texts]
            elif texts:
                found.append(f"{before} ({_either(texts)})")
    return again, ends


def _either(texts: Sequence[str]) -> str:
    return " | ".join(text or '""' for text in texts)
