"""The rows of engines: what each says is about fields that exist, and nobody else knows an engine by its name."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import get_args

import neuron_operator
from neuron_operator.api import engines
from neuron_operator.api.engines import ENGINES
from neuron_operator.api.fields import fields_of, supporting, walk
from neuron_operator.api.model import Accelerator, Engine, ModelSource, Spec

SOURCES = Path(neuron_operator.__file__).parent


def test_every_engine_can_be_named_in_a_manifest() -> None:
    backend = next(one for one in fields_of(Engine) if one.key == "backend")
    assert ENGINES.keys() <= set(get_args(backend.unwrapped[0]))
    types = next(one for one in fields_of(Accelerator) if one.key == "type")
    assert engines.DEFAULTS.keys() == set(get_args(types.unwrapped[0]))
    assert set(engines.DEFAULTS.values()) <= ENGINES.keys()


def test_an_engine_honours_only_fields_that_others_refuse() -> None:
    declared = {
        f"{path}={one.about}" if one.about else path
        for path, field, _ in walk(Spec(model=ModelSource(uri="")), "spec", supporting)
        for one in field.supports
        if one.of is None
    }
    for engine in ENGINES.values():
        assert {f"spec.{path}" for path in engine.fields} <= declared


def names_compared(tree: ast.AST) -> set[str]:
    """Texts on which the code decides: in comparisons, patterns, and as keys."""
    found: set[str] = set()
    for node in ast.walk(tree):
        parts: list[ast.AST | None] = []
        match node:
            case ast.Compare():
                parts = [node.left, *node.comparators]
            case ast.Dict():
                parts = list(node.keys)
            case ast.MatchValue():
                parts = [node.value]
            case ast.Subscript(slice=ast.Constant()):
                parts = [node.slice]
        several = (ast.Tuple, ast.List, ast.Set)
        options = [each for part in parts for each in (part.elts if isinstance(part, several) else [part])]
        texts = (option for option in options if isinstance(option, ast.Constant))
        found |= {one.value for one in texts if isinstance(one.value, str)}
    return found


def test_nobody_else_knows_an_engine_by_its_name() -> None:
    backend = next(one for one in fields_of(Engine) if one.key == "backend")
    every = set(get_args(backend.unwrapped[0]))
    assert names_compared(ast.parse('x = 1 if backend == "torch" else {"nxdi": 2}[y]')) & every == {"torch", "nxdi"}
    for path in SOURCES.rglob("*.py"):
        if SOURCES / "api" / "engines" not in path.parents:
            known = names_compared(ast.parse(path.read_text(encoding="utf-8"))) & every
            assert not known, f"{path.relative_to(SOURCES)} decides by the name of an engine: {known}"
