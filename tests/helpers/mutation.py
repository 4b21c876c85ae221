"""Changes one decision of a function, identified by a name in it, and restores the function afterwards.

A mutant has a place (`module:Class.method`) and an operator below with the name that the code mentions (an attribute,
a parameter or a called function). Formatting and the rest of the function do not matter. A name that occurs nowhere or
in several places is an error, so a mutant cannot silently become a no-op.
"""

from __future__ import annotations

import ast
import importlib
import inspect
from collections.abc import Callable, Iterator
from types import CodeType, FunctionType
from typing import Any

import pytest

Operator = Callable[[ast.AST], None]
"""Changes the tree of a function in place."""


def mutate(monkeypatch: pytest.MonkeyPatch, where: str, operator: Operator) -> None:
    """Replaces the code of the function at `where` by its mutant until the test ends."""
    module_name, _, qualified = where.partition(":")
    module = importlib.import_module(module_name)
    function: Any = module
    for name in qualified.split("."):
        function = inspect.getattr_static(function, name)
    function = inspect.unwrap(function)
    assert isinstance(function, FunctionType), where
    tree = ast.parse(inspect.getsource(module))
    operator(_definition(tree, qualified.split(".")))
    compiled = compile(ast.fix_missing_locations(tree), str(module.__file__), "exec")
    monkeypatch.setattr(function, "__code__", _code(compiled, qualified))


def forced(name: str, value: bool, nth: int | None = None) -> Operator:
    """The smallest condition that mentions the name is always true."""
    return lambda tree: _change(tree, _conditions(tree), name, lambda node: ast.Constant(value), nth)


def without(name: str, nth: int | None = None) -> Operator:
    """The simple statement that mentions the name does nothing."""
    return lambda tree: _change(tree, _statements(tree), name, lambda node: ast.Pass(), nth)


def valued(name: str, value: int) -> Operator:
    """The attribute has this number as its value."""
    return lambda tree: _change(tree, _nodes(tree, ast.Attribute), name, lambda node: ast.Constant(value))


def left_out(name: str, nth: int | None = None) -> Operator:
    """Removes the smallest operand, slice bound or string part that mentions the name."""

    def change(tree: ast.AST) -> None:
        operand = _smallest([node for _, node in _operands(tree)], name, nth)
        (parent,) = (parent for parent, node in _operands(tree) if node is operand)
        match parent:
            case ast.BinOp(left=left, right=right):
                _put(tree, parent, right if operand is left else left)
            case ast.Slice():
                parent.lower, parent.upper = (None if b is operand else b for b in (parent.lower, parent.upper))
            case ast.BoolOp(values=operands) | ast.JoinedStr(values=operands) | ast.Call(args=operands):
                operands.remove(operand)
                if len(operands) == 1:
                    _put(tree, parent, operands[0])

    return change


def unwrapped(name: str) -> Operator:
    """Replaces the call by its first argument."""
    return _calls(name, lambda call: call.args[0])


def appended(name: str) -> Operator:
    """`name(items, item)` appends the item instead of inserting it in order."""
    return _calls(name, lambda call: ast.Call(ast.Attribute(call.args[0], "append", ast.Load()), [call.args[1]], []))


def concatenated(name: str) -> Operator:
    """`name(first, second)` concatenates instead of merging."""
    return _calls(name, lambda call: ast.List([ast.Starred(part, ast.Load()) for part in call.args], ast.Load()))


def called_instead(name: str, other: str) -> Operator:
    """Another function is called with the same arguments."""
    return _calls(name, lambda call: ast.Call(ast.Name(other, ast.Load()), call.args, call.keywords))


def flag_flipped(name: str) -> Operator:
    """Negates the call's only keyword argument, a constant."""

    def flip(call: ast.Call) -> ast.Call:
        (keyword,) = call.keywords
        assert isinstance(keyword.value, ast.Constant)
        return ast.Call(call.func, call.args, [ast.keyword(keyword.arg, ast.Constant(not keyword.value.value))])

    return _calls(name, flip)


def not_removed(name: str = "pop") -> Operator:
    """`items.pop(key)` no longer removes the item."""

    def look_up(call: ast.Call) -> ast.Subscript:
        assert isinstance(call.func, ast.Attribute)
        return ast.Subscript(call.func.value, call.args[0], ast.Load())

    return _calls(name, look_up)


def unsliced(name: str, nth: int | None = None) -> Operator:
    """The statement that mentions the name uses the whole sequence instead of a slice."""

    def change(tree: ast.AST) -> None:
        statement = _smallest(_statements(tree), name, nth)
        for node in _nodes(statement, ast.Subscript):
            _put(tree, node, node.value)  # type: ignore[attr-defined]

    return change


def skipped_if_short(name: str) -> Operator:
    """`left -= ... name(...) ...` in a loop: an amount larger than the rest is skipped."""

    def skip(node: ast.AST) -> ast.AST:
        assert isinstance(node, ast.AugAssign)
        left, amount = ast.unparse(node.target), ast.unparse(node.value)
        return ast.parse(f"if {left} >= (amount := {amount}):\n  {left} -= amount\nelse:\n  continue").body[0]

    return lambda tree: _change(tree, _nodes(tree, ast.AugAssign), name, skip)


# Finding and putting


def _definition(tree: ast.AST, names: list[str]) -> ast.AST:
    for name in names:
        (tree,) = (node for node in ast.iter_child_nodes(tree) if getattr(node, "name", None) == name)
    return tree


def _code(code: CodeType, qualified: str) -> CodeType:
    inner = [const for const in code.co_consts if isinstance(const, CodeType)]
    (found,) = (one for one in inner if f"{qualified}.".startswith(f"{one.co_qualname}."))
    return found if found.co_qualname == qualified else _code(found, qualified)


def _nodes(tree: ast.AST, kind: Any) -> list[ast.AST]:
    return [node for node in ast.walk(tree) if isinstance(node, kind)]


def _conditions(tree: ast.AST) -> list[ast.AST]:
    """Conditions and filters, and the operands of `and`, `or` and `not`."""
    found: list[ast.AST] = []
    for node in ast.walk(tree):
        match node:
            case ast.If(test=test) | ast.IfExp(test=test) | ast.UnaryOp(op=ast.Not(), operand=test):
                found.append(test)
            case ast.comprehension(ifs=tests) | ast.BoolOp(values=tests):
                found += tests
    return found


def _statements(tree: ast.AST) -> list[ast.AST]:
    return _nodes(tree, ast.Assign | ast.AugAssign | ast.AnnAssign | ast.Expr | ast.Delete | ast.Return)


def _operands(tree: ast.AST) -> Iterator[tuple[ast.AST, ast.AST]]:
    for node in ast.walk(tree):
        match node:
            case ast.BoolOp(values=found) | ast.JoinedStr(values=found) | ast.Call(ast.Name("min" | "max"), found):
                yield from ((node, one) for one in found)
            case ast.BinOp(left, _, right):
                yield from ((node, left), (node, right))
            case ast.Slice(lower, upper):
                yield from ((node, bound) for bound in (lower, upper) if bound)


def _calls(name: str, new: Callable[[ast.Call], ast.AST]) -> Operator:
    def change(tree: ast.AST) -> None:
        (call,) = (n for n in ast.walk(tree) if isinstance(n, ast.Call) and name in (_name(n.func),))
        _put(tree, call, new(call))

    return change


def _change(
    tree: ast.AST, places: list[ast.AST], name: str, new: Callable[[ast.AST], ast.AST], nth: int | None = None
) -> None:
    place = _smallest(places, name, nth)
    _put(tree, place, new(place))


def _smallest(places: list[ast.AST], name: str, nth: int | None = None) -> Any:
    """The only place that mentions the name, or the n-th; the innermost of nested places."""
    found = [place for place in places if any(_name(node) == name for node in ast.walk(place))]
    found = [one for one in found if not any(node in found for node in ast.walk(one) if node is not one)]
    found.sort(key=lambda one: (one.lineno, one.col_offset))  # type: ignore[attr-defined]
    if nth is None:
        assert len(found) == 1, f"{len(found)} places mention {name}: {[ast.unparse(one) for one in found]}"
    return found[nth or 0]


def _name(node: ast.AST) -> str | None:
    return getattr(node, "attr", None) or getattr(node, "id", None)


def _put(tree: ast.AST, old: ast.AST, new: ast.AST) -> None:
    for parent in ast.walk(tree):
        for at, value in ast.iter_fields(parent):
            if value is old:
                setattr(parent, at, new)
            elif isinstance(value, list) and old in value:
                value[value.index(old)] = new
