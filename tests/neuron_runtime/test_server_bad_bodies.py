"""Bodies with random bad values in tools, messages with calls, forms, and texts for vectors and scores: 200 or 400,
never a 5xx or a hang."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from helpers.chat_model import write_chat_model
from helpers.front_end import LIMITS, serving
from helpers.serve_command import PATIENCE_SECONDS, serve
from helpers.tool_templates import HERMES, SEARCH, WEATHER
from neuron_runtime.config import TextOptions

pytestmark = pytest.mark.asyncio(loop_scope="module")

_FORMAT = {"type": "json_schema", "json_schema": {"name": "f", "schema": {"type": "object"}, "strict": True}}
_CALL = {"id": "abcdefghi", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
GOOD: dict[str, Any] = {
    "messages": [
        {"role": "system", "content": "a"},
        {"role": "user", "content": [{"type": "text", "text": "b"}]},
        {"role": "assistant", "content": None, "tool_calls": [_CALL, {**_CALL, "id": "b"}]},
        {"role": "tool", "tool_call_id": "abcdefghi", "content": "c"},
        {"role": "tool", "tool_call_id": "b", "content": [{"type": "text", "text": "d"}]},
    ],
    "tools": [WEATHER, {**SEARCH, "function": {**SEARCH["function"], "strict": True}}],
    "tool_choice": {"type": "function", "function": {"name": "weather"}},
    "parallel_tool_calls": False,
    "response_format": _FORMAT,
    "structured_outputs": {"regex": "a+"},
    "guided_json": {"type": "object", "properties": {"a": {"$ref": "#/$defs/a"}}, "$defs": {"a": {"type": "null"}}},
    "continue_final_message": True,
    "add_generation_prompt": False,
    "chat_template_kwargs": {"tools": [SEARCH]},
    "stream": True,
    "n": 2,
}
PARAMETERS = WEATHER["function"]["parameters"]
RESPONSES: dict[str, Any] = {
    "input": [
        {"role": "user", "content": [{"type": "input_text", "text": "a"}]},
        {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": "b"}]},
        {"type": "function_call", "call_id": "c", "name": "weather", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "rain"},
    ],
    "instructions": "d",
    "tools": [{"type": "function", "name": "weather", "parameters": PARAMETERS, "strict": True}],
    "tool_choice": {"type": "function", "name": "weather"},
    "parallel_tool_calls": False,
    "text": {"format": {"type": "json_schema", "name": "f", "schema": {"type": "object"}, "strict": True}},
    "reasoning": {"effort": "low", "summary": "auto"},
    "include": ["message.output_text.logprobs"],
    "top_logprobs": 2,
    "store": False,
    "previous_response_id": None,
    "truncation": "disabled",
    "metadata": {"a": "b"},
    "stream": True,
}
MESSAGES: dict[str, Any] = {
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "a"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "b", "signature": ""},
                {"type": "tool_use", "id": "c", "name": "weather", "input": {"city": "Oslo"}},
            ],
        },
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": "c", "content": "rain", "is_error": False}],
        },
    ],
    "system": [{"type": "text", "text": "d"}],
    "tools": [{"name": "weather", "input_schema": PARAMETERS, "strict": True}],
    "tool_choice": {"type": "tool", "name": "weather", "disable_parallel_tool_use": True},
    "thinking": {"type": "disabled"},
    "stop_sequences": ["e"],
    "metadata": {"user_id": "f"},
    "stream": True,
}
BODIES: dict[str, tuple[dict[str, Any], str, str]] = {
    "/v1/chat/completions": (GOOD, "messages", "max_tokens"),
    "/tokenize": (GOOD, "messages", "max_tokens"),
    "/v1/responses": (RESPONSES, "input", "max_output_tokens"),
    "/v1/messages": (MESSAGES, "messages", "max_tokens"),
    "/v1/messages/count_tokens": (MESSAGES, "messages", "max_tokens"),
}
"""By route: a good body, the field that it must have, and the one that limits the answer."""
_OPTIONS: dict[str, Any] = {"truncate_prompt_tokens": 16, "priority": 1}
_RANKED: dict[str, Any] = {
    "query": "a",
    "documents": ["b", {"text": "c"}],
    "top_n": 1,
    "return_documents": True,
    **_OPTIONS,
}
_SCORED: dict[str, Any] = {"text_1": "a", "text_2": ["b", "c"], "queries": ["d"], "documents": "e", **_OPTIONS}
VECTORS: dict[str, tuple[dict[str, Any], str, str]] = {
    "/v1/embeddings": (
        {
            "input": ["a", "b"],
            "encoding_format": "base64",
            "dimensions": 128,
            "prompt_name": "query",
            "input_type": "search_query",
            "add_special_tokens": True,
            "user": "f",
            **_OPTIONS,
        },
        "input",
        "",
    ),
    **dict.fromkeys(("/rerank", "/v1/rerank", "/v2/rerank"), (_RANKED, "query", "")),
    **dict.fromkeys(("/score", "/v1/score"), (_SCORED, "text_1", "")),
}
"""The same of a server whose answers need no limit."""
MODEL = Path(__file__).parents[2] / "examples" / "embedding-model"
TOKENS: list[Any] = [[1, 2], [[1, 2], [3]], [2**40], [-1], [[]], [1, "a"], ["a", 1], ["a"] * 3000, [[5] * 300]]
ROUTES = ("/v1/chat/completions",) * 5 + ("/v1/responses",) * 3 + ("/v1/messages",) * 2 + tuple(BODIES)
NOTHING: list[Any] = [
    None,
    True,
    False,
    0,
    -1,
    1.5,
    2**70,
    "",
    "x",
    "none",
    "auto",
    "required",
    [],
    {},
    [None],
    {"a": 1},
]
HOSTILE: list[Callable[[random.Random], Any]] = [
    lambda dice: json.loads("[" * 400 + "]" * 400),
    lambda dice: json.loads('{"a":' * 300 + "1" + "}" * 300),
    lambda dice: "é\u0000\ud7ff{%" * dice.randrange(1, 40),
    lambda dice: "a" * dice.randrange(1, 5000),
    lambda dice: {"type": "function", "function": {"name": dice.choice(("weather", "a b", "", "x" * 200))}},
    lambda dice: {"type": dice.choice(("object", "array", "nope", 5)), "properties": dice.choice(NOTHING)},
    lambda dice: {"$ref": dice.choice(("#", "#/$defs/x", "https://a.b/c", "#/properties/a", 5))},
    lambda dice: {"type": dice.choice(("text", "json_object", "json_schema", "structural_tag", "x"))},
    lambda dice: {dice.choice(("regex", "grammar", "json")): dice.choice(("(", "a{9999}", "start: start", '{"type"'))},
]


def places(value: Any, depth: int = 20) -> list[tuple[Any, Any]]:
    """Each container within a value down to a depth, with each of its keys."""
    keys = list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    if depth == 0:
        return []
    return [place for key in keys for place in ((value, key), *places(value[key], depth - 1))]


def copied(value: Any) -> Any:
    """As `copy.deepcopy`, which recurses too much for the deepest values."""
    return json.loads(json.dumps(value))


def bad_body(dice: random.Random, path: str) -> dict[str, Any]:
    good, needed, limit = (BODIES | VECTORS)[path]
    body = copied({name: value for name, value in good.items() if name == needed or dice.random() < 0.4})
    for _ in range(dice.randrange(1, 4)):
        found = places(body) or [(body, "x")]
        container, key = dice.choice(found)
        match dice.randrange(5):
            case 0:
                container[key] = copied(dice.choice(NOTHING if limit else NOTHING + TOKENS))
            case 1:
                container[key] = copied(dice.choice(HOSTILE)(dice))
            case 2:
                other, at = dice.choice(found)
                container[key] = copied(other.get(at) if isinstance(other, dict) else other[at])
            case 3:
                container.pop(key, None) if isinstance(container, dict) else container.pop(key)
            case _ if isinstance(container, dict):
                container[dice.choice(("x", "type", "function", "name", "role", "$ref"))] = copied(dice.choice(NOTHING))
    return body | {limit: 2, "temperature": 0} if limit else body


async def send(http: httpx.AsyncClient, count: int, seed: int, routes: Sequence[str]) -> Counter[tuple[str, int]]:
    """Bodies that got each status, by route."""
    dice, found = random.Random(seed), Counter[tuple[str, int]]()
    for number in range(count):
        path = dice.choice(routes)
        raw = json.dumps(bad_body(dice, path))
        answer = await http.post(path, content=raw, headers={"content-type": "application/json"})
        assert answer.status_code in (200, 400), (number, path, raw, answer.text)
        if answer.status_code == 400:
            assert answer.json()["error"]["message"], (number, path, raw)
        found[path, answer.status_code] += 1
    return found


@pytest.mark.parametrize(
    "count", [200, pytest.param(20_000, marks=[pytest.mark.long, pytest.mark.timeout(3600)])], ids=str
)
async def test_no_body_makes_the_server_fail(tmp_path: Path, count: int) -> None:
    folder = write_chat_model(tmp_path / "model", max_length=2048)
    limits = replace(LIMITS, max_model_length=2048, max_step_tokens=2048, num_blocks=256)
    async with serving(folder, limits=limits, text=TextOptions(chat_template=HERMES)) as served:
        found = await send(served.http, count, seed=count, routes=ROUTES)
        print(dict(found))
        assert sum(found[path, 400] for path in BODIES) > count // 3
        assert all(found[path, 200] and found[path, 400] for path in BODIES)
        plain = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2}
        assert (await served.http.post("/v1/chat/completions", json=plain)).status_code == 200


LONG = [pytest.mark.long, pytest.mark.timeout(3600)]


@pytest.mark.parametrize(
    ("task", "count"),
    [("embed", 300), pytest.param("embed", 10_000, marks=LONG), pytest.param("rerank", 10_000, marks=LONG)],
)
async def test_no_body_for_vectors_or_scores_makes_the_server_fail(tmp_path: Path, task: str, count: int) -> None:
    folder = MODEL
    if task == "rerank":
        from helpers.vector_models import vector_model  # which imports torch

        folder = vector_model(tmp_path / "model", labels=1)
    routes = [path for path in VECTORS if task == "embed" or path != "/v1/embeddings"]
    with serve(str(folder), "--port", "0", "--task", task) as command:
        async with httpx.AsyncClient(base_url=command.until_ready(), timeout=PATIENCE_SECONDS) as http:
            plain = {"text_1": "What is a slot?", "text_2": ["a line", "a car"]}
            before = (await http.post("/score", json=plain)).json()["data"]
            found = await send(http, count, seed=count, routes=routes)
            print(dict(found))
            assert sum(found[path, 400] for path in routes) > count // 3
            assert all(found[path, 200] and found[path, 400] for path in routes)
            assert (await http.post("/score", json=plain)).json()["data"] == before
