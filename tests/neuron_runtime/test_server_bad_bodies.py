"""Bodies with random bad values in tools, messages, forms, pictures and texts for vectors: 200 or 400, never a 5xx or a
hang."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from PIL import Image

from helpers.front_end import LIMITS, serving
from helpers.hostile_pictures import hostile_url
from helpers.picture_models import PIXTRAL, picture, write_picture_model
from helpers.serve_command import ENGINE, FRONT_END, PATIENCE_SECONDS, serve
from helpers.tool_templates import SEARCH, SEEING, WEATHER
from neuron_runtime.config import MediaOptions

pytestmark = pytest.mark.asyncio(loop_scope="module")

_FORMAT = {"type": "json_schema", "json_schema": {"name": "f", "schema": {"type": "object"}, "strict": True}}
_CALL = {"id": "abcdefghi", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
_ENCODED = base64.b64encode(picture()).decode()
URL = f"data:image/png;base64,{_ENCODED}"
_SHOWN = {"type": "image_url", "image_url": {"url": URL, "detail": "auto"}}
_SHOWN_TO_RESPONSES = {"type": "input_image", "image_url": URL, "detail": "auto", "file_id": None}
_BLOCK = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": _ENCODED}}
GOOD: dict[str, Any] = {
    "messages": [
        {"role": "system", "content": "a"},
        {"role": "user", "content": [{"type": "text", "text": "b"}, _SHOWN]},
        {"role": "assistant", "content": None, "tool_calls": [_CALL, {**_CALL, "id": "b"}]},
        {"role": "tool", "tool_call_id": "abcdefghi", "content": "c"},
        {"role": "tool", "tool_call_id": "b", "content": [{"type": "text", "text": "d"}, _SHOWN]},
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
        {"role": "user", "content": [{"type": "input_text", "text": "a"}, _SHOWN_TO_RESPONSES]},
        {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": "b"}]},
        {"type": "function_call", "call_id": "c", "name": "weather", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": [_SHOWN_TO_RESPONSES]},
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
        {"role": "user", "content": [{"type": "text", "text": "a"}, _BLOCK]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "b", "signature": ""},
                {"type": "tool_use", "id": "c", "name": "weather", "input": {"city": "Oslo"}},
            ],
        },
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": "c", "content": [_BLOCK], "is_error": False}],
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
    lambda dice: dice.choice(("[IMG]", "[IMG][IMG_END]", "[IMG_BREAK]" * 100)),
    lambda dice: [_SHOWN] * dice.randrange(12),
    lambda dice: dice.choice((_SHOWN, _SHOWN_TO_RESPONSES, _BLOCK, {**_SHOWN, "image_url": URL}, URL)),
    lambda dice: {"type": dice.choice(("url", "file", "base64")), "url": hostile_url(dice), "data": hostile_url(dice)},
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
        shown = [(one, at) for one, at in places(body) if isinstance(one[at], str) and one[at].endswith(_ENCODED)]
        match dice.randrange(8 if shown else 5):
            case 0:
                container[key] = copied(dice.choice(NOTHING if limit else NOTHING + TOKENS))
            case 1:
                container[key] = copied(dice.choice(HOSTILE)(dice))
            case 2:
                other, at = dice.choice(found)
                container[key] = copied(other.get(at) if isinstance(other, dict) else other[at])
            case 5 | 6 | 7:
                container, key = dice.choice(shown)
                url = hostile_url(dice)
                container[key] = url if container[key] == URL or dice.randrange(4) == 0 else url.partition(",")[2]
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


MEDIA = MediaOptions(max_image_bytes=200_000, max_pixels=200_000, allowed_hosts=("localhost",))


@pytest.mark.parametrize(
    "count", [200, pytest.param(20_000, marks=[pytest.mark.long, pytest.mark.timeout(3600)])], ids=str
)
async def test_no_body_makes_the_server_fail(tmp_path: Path, count: int) -> None:
    folder = write_picture_model(tmp_path / "model", replace(PIXTRAL, template=SEEING), max_length=2048)
    limits = replace(LIMITS, max_model_length=2048, max_step_tokens=2048, num_blocks=256, max_pictures=4)
    async with serving(folder, limits=limits, vocabulary_size=400, media=MEDIA) as served:
        found = await send(served.http, count, seed=count, routes=ROUTES)
        print(dict(found))
        assert sum(found[path, 400] for path in BODIES) > count // 3
        assert all(found[path, 200] and found[path, 400] for path in BODIES)
        plain = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2}
        assert (await served.http.post("/v1/chat/completions", json=plain)).status_code == 200


LONG = [pytest.mark.long, pytest.mark.timeout(3600)]


def model_with_weights(folder: Path) -> Path:
    """One that sees pictures, with random weights."""
    from helpers.torch_pictures import FAMILIES, MISTRAL, seeing_model  # which import torch

    write_picture_model(folder, replace(PIXTRAL, template=SEEING), max_length=2048)
    config = json.loads((folder / "config.json").read_text())
    tokens = json.loads((folder / "tokenizer.json").read_text())["added_tokens"]
    (image,) = (one["id"] for one in tokens if one["content"] == "[IMG]")
    vision = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    family = FAMILIES["Pixtral"]
    sizes = {
        "image_token_index": image,
        "text_config": {**MISTRAL, "vocab_size": config["vocab_size"], "max_position_embeddings": 2048},
        "vision_config": {**config["vision_config"], **vision, "head_dim": 16},
    }
    return seeing_model(folder, family._replace(config={**family.config, **sizes}, patch=4))


def large_picture() -> str:
    """A JPEG of as many pixels as a server decodes."""
    file = io.BytesIO()
    Image.effect_noise((256, 256), 50).resize((8192, 4096)).convert("RGB").save(file, "JPEG", quality=50)
    return f"data:image/jpeg;base64,{base64.b64encode(file.getvalue()).decode()}"


def peak_bytes(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) << 10


@pytest.mark.parametrize("count", [pytest.param(10_000, marks=LONG)])
async def test_no_picture_makes_a_server_fail_or_its_streams_stall(tmp_path: Path, count: int) -> None:
    """Every so many bodies, a picture as large as may be; the streams get tokens while it is decoded and resized."""
    model = model_with_weights(tmp_path / "model")
    flags = ("--port", "0", "--allowed-media-domains", "localhost", "--max-num-seqs", "8")
    with serve(str(model), *flags) as command:
        url, at_once = command.until_ready(), 4
        pids = [command.child(name) for name in (FRONT_END, ENGINE)]
        # A server may close a connection that is idle, while a request is under way.
        limits = httpx.Limits(max_connections=None, keepalive_expiry=1.0)
        async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_SECONDS, limits=limits) as http:
            large = chat_with(large_picture())
            before = (await http.post("/v1/chat/completions", json=large)).json()
            peaks = [peak_bytes(pid) for pid in pids]
            num_tokens, left, sent_all = Counter[int](), list[int](), asyncio.Event()

            async def stream(number: int) -> None:
                asked = {"prompt": "a", "max_tokens": 1500, "ignore_eos": True, "stream": True}
                while not sent_all.is_set():
                    async with http.stream("POST", "/v1/completions", json=asked) as answer:
                        async for line in answer.aiter_lines():
                            num_tokens[number] += line.startswith("data: {")
                            if sent_all.is_set():
                                return

            async def show_large() -> None:
                while not sent_all.is_set():
                    before = dict(num_tokens)
                    answer = await http.post("/v1/chat/completions", json=large)
                    assert answer.status_code == 200, answer.text
                    left.append(min(num_tokens[number] - before[number] for number in before))
                    await asyncio.sleep(1)

            streams = [asyncio.create_task(stream(number)) for number in range(2)]
            while len(num_tokens) < len(streams):
                await asyncio.sleep(0.01)
            shows = asyncio.create_task(show_large())
            seeds = range(count, count + at_once)
            founds = await asyncio.gather(*(send(http, count // at_once, seed, ROUTES) for seed in seeds))
            sent_all.set()
            await asyncio.gather(shows, *streams)
            found = sum(founds, Counter[tuple[str, int]]())
            grown = [peak_bytes(pid) - peak for pid, peak in zip(pids, peaks, strict=True)]
            print(dict(found), sorted(left), dict(num_tokens), [size >> 20 for size in grown])
            assert all(found[path, 200] and found[path, 400] for path in BODIES)
            assert min(left) > 0
            assert max(grown) < 1 << 30
            after = (await http.post("/v1/chat/completions", json=large)).json()
            assert after["choices"] == before["choices"]
            assert pids == [command.child(name) for name in (FRONT_END, ENGINE)]


def chat_with(url: str) -> dict[str, Any]:
    shown = {"type": "image_url", "image_url": {"url": url}}
    return {"messages": [{"role": "user", "content": [shown]}], "max_tokens": 4, "temperature": 0}


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
