"""Every answer that ends by itself is valid: schemas of each keyword of JSON Schema's public test suite, answered.

The integer backend draws tokens nearly at random, so answers visit corners that a model avoids; the demo model runs on
torch. Schemas that the compiler does not know are refused, which is an outcome too; `-s` prints the shares.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from helpers.chat_model import EOS, byte_level_tokenizer
from helpers.strict_backend import StrictBackend
from neuron_runtime import LLM, SamplingParams
from neuron_runtime.core import BackendLimits, FinishReason, Form, Request, Sampling
from neuron_runtime.engine.loop import Engine
from neuron_runtime.errors import InvalidRequest
from neuron_runtime.grammars.guides import GrammarGuides
from neuron_runtime.text.tokenizer import Tokenizer

MODEL = Path(__file__).parents[2] / "examples" / "demo-model"
NUM_SEEDS = 2
NUM_LONG_SEEDS = 12

TEXT = {"type": "string", "maxLength": 3}
SMALL = {"type": "integer", "minimum": 0, "maximum": 9}
QUOTED = 'say "hi"\n'
DAY = {"type": "string", "format": "date"}

SCHEMAS: tuple[Mapping[str, Any], ...] = (
    *({"type": kind} for kind in ("null", "boolean", "integer", "number", "string", "array", "object")),
    {"type": ["integer", "null"]},
    {},
    {"const": {"a": [1, None, "x\n\"y\""]}},
    {"const": 1.5},
    {"enum": [1, "one", [1], {"one": 1}, None, True]},
    {"enum": ["é", "東京", "\\", "a\tb"]},
    *({"type": "integer", **ends} for ends in ({"minimum": -3, "maximum": 12}, {"exclusiveMinimum": 7, "maximum": 10})),
    {"type": "number", "minimum": 0.5, "maximum": 2.25},
    {"type": "number", "minimum": 0, "exclusiveMaximum": 1},
    {"type": "integer", "multipleOf": 7, "minimum": 0, "maximum": 100},
    {"type": "number", "multipleOf": 0.5, "minimum": 0, "maximum": 4},
    {"type": "string", "minLength": 2, "maxLength": 4},
    {"type": "string", "pattern": "^[a-f]{2,4}$"},
    {"type": "string", "pattern": "b+", "maxLength": 6},
    *({"type": "string", "format": name} for name in ("date", "time", "date-time", "ipv4", "ipv6", "uuid", "email")),
    {"type": "array", "items": SMALL, "minItems": 1, "maxItems": 3},
    {"type": "array", "prefixItems": [SMALL, TEXT], "items": False},
    {"type": "array", "prefixItems": [{"const": "a"}], "items": SMALL, "maxItems": 4},
    {"type": "array", "items": SMALL, "uniqueItems": True, "maxItems": 3},
    {"type": "array", "contains": {"const": 5}, "maxItems": 3},
    {"type": "object", "properties": {"a": SMALL, "b": TEXT}, "required": ["b"], "additionalProperties": False},
    {"type": "object", "properties": {"a": SMALL, "b": TEXT, "c": {"type": "null"}}, "additionalProperties": False},
    {"type": "object", "properties": {"a": SMALL}, "required": ["a", "z"], "additionalProperties": SMALL},
    {"type": "object", "additionalProperties": TEXT, "maxProperties": 2},
    {"type": "object", "minProperties": 1, "maxProperties": 2, "additionalProperties": SMALL},
    {"type": "object", "patternProperties": {"^n[a-z]$": SMALL, "^t[a-z]$": TEXT}, "additionalProperties": False},
    {"type": "object", "propertyNames": {"pattern": "^[ab]$"}, "additionalProperties": SMALL},
    {"type": "object", "properties": {QUOTED: SMALL}, "required": [QUOTED], "additionalProperties": False},
    {"type": "object", "properties": {"a": {"type": "object", "properties": {"b": DAY}, "required": ["b"],
     "additionalProperties": False}}, "required": ["a"], "additionalProperties": False},
    {"anyOf": [SMALL, {"type": "null"}, {"type": "string", "enum": ["x"]}]},
    {"anyOf": [{"type": "array", "items": SMALL, "maxItems": 2}, {"type": "object", "maxProperties": 0}]},
    {"oneOf": [{"type": "integer", "maximum": 3, "minimum": 0}, {"type": "boolean"}]},
    {"oneOf": [{"type": "integer", "multipleOf": 2}, {"type": "integer", "multipleOf": 3}]},
    {"allOf": [{"type": "integer", "minimum": 2}, {"maximum": 8}]},
    {"allOf": [{"properties": {"a": SMALL}, "required": ["a"]}, {"properties": {"b": TEXT}, "required": ["b"]}],
     "type": "object"},
    {"not": {"type": "string"}},
    {"type": "integer", "not": {"const": 3}},
    {"if": {"const": 1}, "then": {"type": "integer"}, "else": {"type": "string"}},
    {"type": "object", "dependentRequired": {"a": ["b"]}, "additionalProperties": SMALL},
    {"type": "object", "dependentSchemas": {"a": {"required": ["b"]}}, "additionalProperties": SMALL},
    {"type": "object", "properties": {"a": SMALL}, "unevaluatedProperties": False},
    {"$defs": {"leaf": SMALL}, "type": "array", "items": {"$ref": "#/$defs/leaf"}, "maxItems": 3},
    {"$defs": {"tree": {"type": "object", "properties": {"v": SMALL, "l": {"$ref": "#/$defs/tree"}}, "required": ["v"],
     "additionalProperties": False}}, "$ref": "#/$defs/tree"},
    {"$defs": {"a": {"type": "integer", "minimum": 4}}, "$ref": "#/$defs/a", "maximum": 6},
    {"definitions": {"a b/c": TEXT}, "$ref": "#/definitions/a%20b~1c"},
    {"$anchor": "top", "type": "object", "properties": {"next": {"$ref": "#top"}}, "additionalProperties": False},
    {"title": "t", "description": "d", "default": 1, "examples": [2], "deprecated": True, **SMALL},
    {"type": "integer", "minimum": 5, "maximum": 3},
    {"minimum": 3},
    {"maxLength": 2},
    {"required": ["a"]},
    {"items": SMALL},
)  # fmt: skip


class Tally:
    """Outcomes of answers; fails for one that ended and is not valid."""

    def __init__(self) -> None:
        self.outcomes: Counter[str] = Counter()
        self.texts: Counter[str] = Counter()
        """Texts of answers that ended."""

    def ended(self, schema: Mapping[str, Any], text: str) -> None:
        self.texts[text] += 1
        Draft202012Validator(schema).validate(json.loads(text))
        self.outcomes["valid"] += 1


@pytest.fixture
def tally() -> Iterator[Tally]:
    tally = Tally()
    yield tally
    print(dict(tally.outcomes))
    assert tally.outcomes["valid"]


def answer_on_integers(num_seeds: int, tally: Tally, *, num_blocks: int = 128) -> Engine:
    tokenizer = Tokenizer(byte_level_tokenizer())
    end = tokenizer._fast.token_to_id(EOS)
    limits = BackendLimits(max_rows=8, max_model_length=256, max_step_tokens=64, block_size=16, num_blocks=num_blocks)
    guides = GrammarGuides(lambda: tokenizer, tokenizer.vocabulary_size)
    engine = Engine(
        StrictBackend(limits, vocabulary_size=tokenizer.vocabulary_size), guides=guides, max_queued_requests=10**6
    )
    asked = {f"{at}/{seed}": schema for at, schema in enumerate(SCHEMAS) for seed in range(num_seeds)}
    texts: dict[str, list[int]] = {name: [] for name in asked}
    try:
        for name, schema in asked.items():
            form = Form("json_schema", json.dumps(schema), field="response_format")
            sampling = Sampling(
                max_tokens=200, seed=seed_of(name), form=form, stop_token_ids=frozenset({end}), seeded=True
            )
            engine.add(Request(name, (1, 2, 3), sampling))
        while engine.has_work:
            for event in engine.step():
                texts[event.request_id] += event.token_ids
                if event.finish_reason is FinishReason.STOP:
                    tally.ended(asked[event.request_id], tokenizer.decode(texts[event.request_id]))
                elif event.finish_reason is FinishReason.LENGTH:
                    assert len(texts[event.request_id]) == sampling.max_tokens, "no limit of a form cuts it"
                    tally.outcomes["cut"] += 1
            tally.outcomes["refused"] += len(engine.take_refused())
    finally:
        guides.close()
    assert tally.outcomes.total() == len(asked)
    return engine


def seed_of(name: str) -> int:
    return sum(map(ord, name)) * 7919


def answer_with_the_demo_model(schemas: tuple[Mapping[str, Any], ...], tally: Tally) -> None:
    with LLM(str(MODEL), max_num_seqs=4, max_model_len=256) as llm:
        for schema in schemas:
            form = {"type": "json_schema", "json_schema": {"schema": schema}}
            params = SamplingParams(temperature=1.0, seed=1, max_tokens=60, response_format=form)
            try:
                (output,) = llm.generate("A device is", params, use_tqdm=False)
            except InvalidRequest:
                tally.outcomes["refused"] += 1
                continue
            if output.outputs[0].finish_reason == "stop":
                tally.ended(schema, output.outputs[0].text)
            else:
                tally.outcomes["cut"] += 1


def test_answers_of_the_integer_backend_are_valid(tally: Tally) -> None:
    answer_on_integers(NUM_SEEDS, tally)


def test_answers_that_are_preempted_are_valid_and_the_same(tally: Tally) -> None:
    engine = answer_on_integers(1, tally, num_blocks=18)
    assert engine.stats.num_preemptions_total > 3
    undisturbed = Tally()
    answer_on_integers(1, undisturbed)
    assert tally.texts == undisturbed.texts


def test_answers_of_the_demo_model_are_valid(tally: Tally) -> None:
    answer_with_the_demo_model(SCHEMAS[::9], tally)


@pytest.mark.long
def test_many_answers_of_the_integer_backend_are_valid(tally: Tally) -> None:
    answer_on_integers(NUM_LONG_SEEDS, tally)


@pytest.mark.long
def test_answers_of_the_demo_model_are_valid_for_all_schemas(tally: Tally) -> None:
    answer_with_the_demo_model(SCHEMAS, tally)
