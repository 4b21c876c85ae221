"""Splits the output of models that call tools into text and calls, piece by piece.

`text.choice_text` feeds one `ToolCallSplitter` per stream, after stop strings and reasoning. `TOOL_PARSERS` has one
format per family of models. The splitter does not judge arguments: they are what the model wrote.

A format is a generator that reads a `_Text`. It yields text, a `_Name` and `_Arguments`, and `MORE` where it must wait
for what the model writes next. Every decision depends on the text alone, never on how it was split into pieces.
"""

from __future__ import annotations

import ast
import json
import re
import secrets
import string
import warnings
from collections.abc import Callable, Collection, Generator, Iterable, Iterator
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, Final

from neuron_runtime.text.stop_strings import num_possible_start_characters


@dataclass(frozen=True, slots=True)
class CallPiece:
    """A part of one call; the arguments of all its parts make one JSON text."""

    index: int
    arguments: str
    id: str = ""
    """Set in the first part of a call only, like `name`."""
    name: str = ""


def whole_calls(pieces: Iterable[CallPiece]) -> list[CallPiece]:
    """Each call as one piece."""
    parts: dict[int, list[CallPiece]] = {}
    for piece in pieces:
        parts.setdefault(piece.index, []).append(piece)
    return [replace(one[0], arguments="".join(part.arguments for part in one)) for one in parts.values()]


class _Wait(Enum):
    MORE = "more"


MORE: Final = _Wait.MORE
"""The reader needs more text."""


@dataclass(frozen=True, slots=True)
class _Name:
    """A call begins."""

    name: str


@dataclass(frozen=True, slots=True)
class _Arguments:
    """Arguments of the call that began last."""

    text: str


_Event = str | _Name | _Arguments | _Wait
_Events = Iterator[_Event]


class _NotACall(Exception):
    """The text that was read is no call."""


class _Text:
    """The text that has arrived and was not read yet.

    names: the tools of the request.
    """

    def __init__(self, names: Collection[str]) -> None:
        self.names = names
        self.rest = ""
        self.ended = False
        """No more text will arrive."""
        self._taken: list[str] | None = None

    def take(self, count: int) -> str:
        """The next characters, which must have arrived."""
        text, self.rest = self.rest[:count], self.rest[count:]
        if self._taken is not None:
            self._taken.append(text)
        return text

    def begin(self) -> None:
        """Remember what is taken from here on."""
        self._taken = []

    def commit(self) -> None:
        """Forget it: it is a call."""
        self._taken = None

    @property
    def committed(self) -> bool:
        return self._taken is None

    def undo(self) -> None:
        """Put back what was not committed."""
        self.rest, self._taken = "".join((*(self._taken or ()), self.rest)), None

    def drop_rest(self) -> None:
        """At the end of the text, drop what is left of a call that was cut."""
        if self.ended:
            self.rest = ""

    def skip_spaces(self) -> Iterator[_Wait]:
        """Wait for something else than a space, and drop the spaces."""
        while True:
            self.take(len(self.rest) - len(self.rest.lstrip()))
            if self.rest or self.ended:
                return
            yield MORE

    def has(self, mark: str) -> Generator[_Wait, None, bool]:
        """Take a mark, if it is next."""
        while len(self.rest) < len(mark) and mark.startswith(self.rest) and not self.ended:
            yield MORE
        if not self.rest.startswith(mark):
            return False
        self.take(len(mark))
        return True

    def expect(self, mark: str) -> Iterator[_Wait]:
        """Take a mark after spaces. Raises _NotACall."""
        yield from self.skip_spaces()
        if not (yield from self.has(mark)):
            raise _NotACall

    def before(self, *marks: str) -> Generator[_Wait, None, str]:
        """Take the text before the first of these marks, which stays. Raises _NotACall at the end of the text."""
        parts: list[str] = []
        while True:
            if positions := [at for mark in marks if (at := self.rest.find(mark)) >= 0]:
                return "".join((*parts, self.take(min(positions))))
            if self.ended:
                raise _NotACall
            parts.append(self.take(len(self.rest) - num_possible_start_characters(self.rest, marks)))
            yield MORE


# --- Values ---

_IN_STRING = re.compile(r"""["'\\]""")
_JSON, _PYTHON = re.compile(r'["{}\[\]]'), re.compile(r"""["'()\[\]{}]""")
_AFTER_SCALAR = re.compile(r"[\s,\]}]")


def _value(text: _Text) -> Iterator[str | _Wait]:
    """The text of a JSON value, as it arrives. Raises _NotACall if the text ended."""
    yield from text.skip_spaces()
    if text.rest[:1] in ('"', "{", "["):
        yield from _nested(text, _JSON)
        return
    while not (end := _AFTER_SCALAR.search(text.rest)):
        if text.ended:
            raise _NotACall
        yield MORE
    yield text.take(end.start())


def _nested(text: _Text, marks: re.Pattern[str]) -> Iterator[str | _Wait]:
    """The text of a string, or of brackets with what is in them, as it arrives. Raises _NotACall if the text ended.

    marks: the quotation marks and brackets; outside of strings, nothing else is looked at.
    """
    depth, quote, at = 0, "", 0
    while True:
        match = (_IN_STRING if quote else marks).search(text.rest, at)
        if match is None or (match[0] == "\\" and match.end() == len(text.rest)):
            yield text.take(len(text.rest) if match is None else match.start())
            if text.ended:
                raise _NotACall
            at = 0
            yield MORE
            continue
        at, character = match.end(), match[0]
        if character == "\\":
            at += 1
        elif quote or character in "\"'":
            quote = "" if quote == character else quote or character
        else:
            depth += 1 if character in "([{" else -1
        if depth <= 0 and not quote:
            yield text.take(at)
            return


def _collect(parts: Iterable[str | _Wait]) -> Generator[_Wait, None, str]:
    """All text of a value."""
    values = []
    for part in parts:
        if part is MORE:
            yield MORE
        else:
            values.append(part)
    return "".join(values)


def _string(raw: str) -> str:
    """Raises _NotACall."""
    try:
        value = json.loads(raw, strict=False)
    except (ValueError, RecursionError) as error:
        raise _NotACall from error
    if not isinstance(value, str) or not value:
        raise _NotACall
    return value


def _arguments(text: _Text) -> _Events:
    """Arguments as they arrive: an object; or a string that has one; nothing else is an argument."""
    yield from text.skip_spaces()
    if text.rest.startswith("{"):
        for part in _value(text):
            yield part if part is MORE else _Arguments(part)
        return
    yield _Arguments(_unusual((yield from _collect(_value(text)))))


def _unusual(raw: str) -> str:
    try:
        return _string(raw)
    except _NotACall:
        return "{}" if raw in ("null", '""') else raw


def _call(text: _Text, name: str, *, only_known: bool) -> Iterator[_Name]:
    """Raises _NotACall for an unknown tool, if only known ones make a call."""
    if only_known and name not in text.names:
        raise _NotACall
    text.commit()
    yield _Name(name)


def _call_object(text: _Text, *, only_known: bool = False) -> _Events:
    """`{"name": "f", "arguments": {...}}`, with any order and further members. Raises _NotACall."""
    yield from text.expect("{")
    named, held, argued = False, "", False
    while True:
        yield from text.skip_spaces()
        if (yield from text.has("}")):
            break
        key = _string((yield from _collect(_value(text))))
        yield from text.expect(":")
        if key == "name":
            name = _string((yield from _collect(_value(text))))
            if not named:
                yield from _call(text, name, only_known=only_known)
                yield _Arguments(held)
            named = True
        elif key in ("arguments", "parameters") and not argued:
            argued = True
            for event in _arguments(text):
                if isinstance(event, _Arguments) and not named:
                    held += event.text
                else:
                    yield event
        else:
            yield from _collect(_value(text))
        yield from text.skip_spaces()
        if not (yield from text.has(",")):
            yield from text.expect("}")
            break
    if not named:
        raise _NotACall
    if not argued:
        yield _Arguments("{}")


def _another(text: _Text, *marks: str) -> Generator[_Wait, None, bool]:
    """Whether another object follows: behind one of these marks, which it takes, or only spaces."""
    yield from text.skip_spaces()
    for mark in marks:
        if (yield from text.has(mark)):
            return True
    return text.rest.startswith("{")


# --- Formats ---


def _answer(text: _Text, mark: str) -> Generator[_Event, None, int]:
    """Text up to a mark; returns the length of the mark with the spaces before it, 0 if the text ended."""
    while True:
        content, found, _ = text.rest.partition(mark)
        if found:
            sure = content.rstrip()
            yield text.take(len(sure))
            return len(content) - len(sure) + len(mark)
        if text.ended:
            yield text.take(len(text.rest))
            return 0
        yield text.take(len(content[: len(content) - num_possible_start_characters(content, (mark,))].rstrip()))
        yield MORE


def _marked(mark: str, calls: Callable[[_Text], _Events]) -> Callable[[_Text], _Events]:
    """A format whose calls begin with a mark, anywhere in the text."""

    def read(text: _Text) -> _Events:
        while count := (yield from _answer(text, mark)):
            text.begin()
            text.take(count)
            try:
                yield from calls(text)
            except _NotACall:
                if not text.committed:
                    text.undo()
                    # The mark is passed over as text. What ends before it is a call is text as a whole.
                    yield text.take(len(text.rest) if text.ended else count)
                    continue
                text.drop_rest()
            yield from text.skip_spaces()

    return read


def _unmarked(calls: Callable[[_Text], _Events]) -> Callable[[_Text], _Events]:
    """A format whose calls are the whole answer; what does not begin with one is text."""

    def read(text: _Text) -> _Events:
        text.begin()
        try:
            yield from calls(text)
            yield from text.skip_spaces()
        except _NotACall:
            if text.committed:
                text.drop_rest()
            text.undo()
        while True:
            yield text.take(len(text.rest))
            if text.ended:
                return
            yield MORE

    return read


def _hermes(text: _Text) -> _Events:
    """Some models write several calls in one block, also as a list."""
    try:
        yield from text.skip_spaces()
        yield from text.has("[")
        yield from _call_object(text)
        while (yield from _another(text, ",")):
            yield from _call_object(text)
    except _NotACall:
        if not text.committed:
            raise
    yield from text.before("</tool_call>")
    yield from text.has("</tool_call>")


_PYTHON_TAG = "<|python_tag|>"


def _llama_json(text: _Text) -> _Events:
    yield from text.skip_spaces()
    if (yield from text.has(_PYTHON_TAG)):
        yield from text.skip_spaces()
    in_list = yield from text.has("[")
    while True:
        yield from _call_object(text, only_known=True)
        text.begin()
        if not (yield from _another(text, ";", ",", _PYTHON_TAG)):
            break
    if in_list:
        yield from text.expect("]")


def _forced(text: _Text) -> _Events:
    yield from text.expect("[")
    while True:
        yield from _call_object(text)
        yield from text.skip_spaces()
        if not (yield from text.has(",")):
            yield from text.expect("]")
            return


def _mistral(text: _Text) -> _Events:
    yield from text.skip_spaces()
    if text.rest.startswith("["):
        yield from _forced(text)
        return
    name = (yield from text.before("{")).partition("[")[0].strip()
    if not name or any(character.isspace() for character in name):
        raise _NotACall
    yield from _call(text, name, only_known=False)
    yield from _arguments(text)


_CALLS_END, _CALL, _SEPARATOR, _CALL_END = (
    f"<｜tool▁{name}｜>" for name in ("calls▁end", "call▁begin", "sep", "call▁end")
)


def _deepseek(*, has_type: bool) -> Callable[[_Text], _Events]:
    """has_type: calls are `type, separator, name, fenced arguments`; otherwise `name, separator, arguments`."""

    def read(text: _Text) -> _Events:
        yield from text.skip_spaces()
        while (yield from text.has(_CALL)):
            name = yield from text.before(_SEPARATOR)
            yield from text.has(_SEPARATOR)
            if has_type:
                name = yield from text.before("```json", "{")
                yield from text.has("```json")
            if not name.strip():
                raise _NotACall
            yield from _call(text, name.strip(), only_known=False)
            yield from _arguments(text)
            yield from text.before(_CALL_END)
            yield from text.has(_CALL_END)
            yield from text.skip_spaces()
        # Without a call the marks are text.
        if not text.committed or not (yield from text.has(_CALLS_END)):
            raise _NotACall

    return read


def _pythonic(text: _Text) -> _Events:
    yield from text.skip_spaces()
    if (yield from text.has("<|python_start|>")):
        yield from text.skip_spaces()
    yield from text.expect("[")
    calls = []
    while True:
        # The other characters show early that a list is no call.
        name = (yield from text.before("(", "[", "]", "{", ",", '"', "'")).strip()
        if name not in text.names or not text.rest.startswith("("):
            raise _NotACall
        calls.append((name, _keywords((yield from _collect(_nested(text, _PYTHON))))))
        yield from text.skip_spaces()
        if not (yield from text.has(",")):
            yield from text.expect("]")
            break
    text.commit()
    for name, arguments in calls:
        yield _Name(name)
        yield _Arguments(arguments)
    yield from text.skip_spaces()
    yield from text.has("<|python_end|>")


_PYTHON_WORDS = {"true": True, "false": False, "null": None}


def _keywords(parentheses: str) -> str:
    """The JSON of keyword arguments. Raises _NotACall."""
    try:
        with warnings.catch_warnings():
            # Python warns about escapes such as "\d", which models write.
            warnings.simplefilter("ignore")
            call = ast.parse(f"f{parentheses}", mode="eval").body
            if not isinstance(call, ast.Call) or call.args or not all(one.arg for one in call.keywords):
                raise _NotACall
            arguments = {str(one.arg): _literal(one.value) for one in call.keywords}
            return json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError) as error:
        raise _NotACall from error


def _literal(node: ast.expr) -> Any:
    """As `ast.literal_eval`, with JSON's words. Raises ValueError, TypeError."""
    match node:
        case ast.Name(id=word) if word in _PYTHON_WORDS:
            return _PYTHON_WORDS[word]
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_literal(item) for item in items]
        case ast.Dict(keys=keys, values=values):
            return {str(_literal(key)): _literal(value) for key, value in zip(keys, values, strict=True) if key}
    return ast.literal_eval(node)


@dataclass(frozen=True)
class CallTag:
    """What stands around the arguments of a call, where text that no call begins with is free."""

    mark: str
    name: str
    """Behind the mark, with `%s` for the function's name in JSON."""
    end: str


@dataclass(frozen=True)
class ToolFormat:
    """How a family of models writes calls."""

    read: Callable[[_Text], _Events]
    signs: tuple[str, ...]
    """A chat template that has all of these regular expressions is one of the family."""
    marks: frozenset[str] = frozenset()
    """Tokens that the format needs; a tokenizer may hide them as special."""
    short_ids: bool = False
    """The templates of the family accept only ids of nine letters and digits."""
    tag: CallTag | None = None
    """With which arguments are kept to strict schemas; None: calls have no mark of their own, or several forms."""


_DEEPSEEK_MARK = "<｜tool▁calls▁begin｜>"
_DEEPSEEK_MARKS = frozenset({_DEEPSEEK_MARK, _CALLS_END, _CALL, _SEPARATOR, _CALL_END})

TOOL_PARSERS = {
    "deepseek_v3": ToolFormat(
        _marked(_DEEPSEEK_MARK, _deepseek(has_type=True)), (_DEEPSEEK_MARK, "```json"), _DEEPSEEK_MARKS
    ),
    "deepseek_v31": ToolFormat(_marked(_DEEPSEEK_MARK, _deepseek(has_type=False)), (_DEEPSEEK_MARK,), _DEEPSEEK_MARKS),
    # Qwen3-Coder and GLM have the same mark and no JSON behind it.
    "hermes": ToolFormat(
        _marked("<tool_call>", _hermes),
        ("<tool_call>", r'"arguments\\?"'),
        tag=CallTag("<tool_call>", '\n{"name": %s, "arguments": ', "}\n</tool_call>"),
    ),
    "mistral": ToolFormat(
        _marked("[TOOL_CALLS]", _mistral),
        (r"\[TOOL_CALLS\]",),
        frozenset({"[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"}),
        short_ids=True,
    ),
    "pythonic": ToolFormat(_unmarked(_pythonic), (r"\[func_name1\(",)),
    "llama3_json": ToolFormat(_unmarked(_llama_json), (r'"parameters\\?": ', "ipython")),
}
"""By name in vLLM; the first whose signs a template has is chosen."""

FORCED = ToolFormat(_unmarked(_forced), ())
"""The list of calls that a forced answer consists of."""


def recognized(template: str) -> ToolFormat | None:
    """The format of the calls in the source of a chat template."""
    return next((one for one in TOOL_PARSERS.values() if all(re.search(sign, template) for sign in one.signs)), None)


class ToolCallSplitter:
    """Splits a stream of text into text and calls.

    Args:
        names: the tools of the request; formats without marks take only their names for calls.
        one_call: drop calls after the first.
    """

    def __init__(self, form: ToolFormat, names: Collection[str], *, one_call: bool = False) -> None:
        self._text = _Text(names)
        self._events = form.read(self._text)
        self._make_id = _short_id if form.short_ids else _long_id
        self._last = 0 if one_call else None
        self.num_calls = 0
        """Calls that have begun."""

    def feed(self, text: str) -> tuple[str, list[CallPiece]]:
        """Add text; returns (text, parts of calls) as far as they can be told apart."""
        self._text.rest += text
        return self._read()

    def flush(self) -> tuple[str, list[CallPiece]]:
        """What was held back, at the end of the stream."""
        self._text.ended = True
        return self._read()

    def _read(self) -> tuple[str, list[CallPiece]]:
        texts, pieces = [], list[CallPiece]()
        for event in self._events:
            if event is MORE:
                break
            if isinstance(event, str):
                texts.append(event)
                continue
            if isinstance(event, _Name):
                self.num_calls += 1
            index = self.num_calls - 1
            if self._last is not None and index > self._last:
                continue
            if isinstance(event, _Name):
                pieces.append(CallPiece(index, "", self._make_id(), event.name))
            elif event.text:
                pieces.append(CallPiece(index, event.text))
        return "".join(texts), pieces


def _long_id() -> str:
    return f"call_{secrets.token_hex(12)}"


def _short_id() -> str:
    return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))
