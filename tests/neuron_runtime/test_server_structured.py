"""Structured output over HTTP: every field that asks for a form, whole and streamed, and what a wrong form gets."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any, Literal

import httpx
import pydantic
import pytest
import pytest_asyncio
from openai import AsyncOpenAI

from helpers.front_end import LIMITS, MODEL, Serving, make_model, serving
from neuron_runtime.requests.forms import MAX_FORM_CHARACTERS, MAX_FORM_CHOICES, MAX_FORM_DEPTH

COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
CHAT: Any = [{"role": "user", "content": "What is a device?"}]
BODIES: dict[str, dict[str, Any]] = {COMPLETIONS: {"prompt": "a core"}, CHATS: {"messages": CHAT}}

KIND = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["device", "core"]},
        "count": {"type": "integer", "minimum": 1, "maximum": 64},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 3}, "maxItems": 2},
    },
    "required": ["kind", "count", "tags"],
    "additionalProperties": False,
}
AN_OBJECT = r"\{.*\}"
TAGS = {"structures": [{"begin": "<a>", "schema": {"enum": [1, 2]}, "end": "</a>"}], "triggers": ["<a"]}

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Serving]:
    limits = replace(LIMITS, max_rows=4, sampling="DeviceWithLogits")
    async with serving(make_model(tmp_path_factory.mktemp("model")), limits=limits, max_queued=20) as one:
        yield one


async def post(served: Serving, path: str = COMPLETIONS, **fields: Any) -> httpx.Response:
    return await served.http.post(path, json={"max_tokens": 200, "seed": 3, **BODIES[path], **fields})


def texts(answer: httpx.Response) -> list[str]:
    """The texts of an answer, each of which ended by itself."""
    assert answer.status_code == 200, answer.text
    choices = answer.json()["choices"]
    assert {choice["finish_reason"] for choice in choices} == {"stop"}
    return [choice["text"] if "text" in choice else choice["message"]["content"] for choice in choices]


FIELDS: list[tuple[dict[str, Any], str]] = [
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "kind", "schema": KIND}}}, AN_OBJECT),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "k", "strict": True, "schema": KIND}}},
        AN_OBJECT,
    ),
    ({"structured_outputs": {"json": KIND}}, AN_OBJECT),
    ({"structured_outputs": {"json": json.dumps(KIND)}}, AN_OBJECT),
    ({"structured_outputs": {"regex": "[ab]{3,5}"}}, "[ab]{3,5}"),
    ({"structured_outputs": {"choice": ["a core", "a node"]}}, "a core|a node"),
    ({"structured_outputs": {"grammar": 'start: ("x" | "y") "z"'}}, "xz|yz"),
    ({"structured_outputs": {"grammar": 'root ::= ("x" | "y") "z"'}}, "xz|yz"),
    ({"guided_json": KIND}, AN_OBJECT),
    ({"guided_regex": "[ab]{3,5}"}, "[ab]{3,5}"),
    ({"guided_choice": ["a core", "a node"]}, "a core|a node"),
    ({"guided_grammar": 'start: ("x" | "y") "z"'}, "xz|yz"),
]


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(("fields", "pattern"), FIELDS)
async def test_an_answer_has_the_form_that_a_field_asks_for(
    served: Serving, path: str, fields: dict[str, Any], pattern: str
) -> None:
    (text,) = texts(await post(served, path, **fields))
    assert re.fullmatch(pattern, text, re.DOTALL), text
    if pattern is AN_OBJECT:
        said = json.loads(text)
        assert set(said) == {"kind", "count", "tags"}
        assert said["count"] in range(1, 65)


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "json_object"}},
        {"structured_outputs": {"json_object": True}},
        {"structured_outputs": {"structural_tag": TAGS}},
        {"response_format": {"type": "structural_tag", **TAGS}},
    ],
)
async def test_an_answer_without_bounds_is_cut_within_its_form(served: Serving, fields: dict[str, Any]) -> None:
    answer = (await post(served, CHATS, max_tokens=30, **fields)).json()
    (choice,) = answer["choices"]
    assert choice["finish_reason"] in {"length", "stop"}
    if "<a" not in json.dumps(fields):
        assert choice["message"]["content"].startswith("{")
    for inside in re.findall("<a>(.*?)</a>", choice["message"]["content"]):
        assert inside in "12"


async def test_a_streamed_answer_is_the_whole_one(served: Serving) -> None:
    asked = {"structured_outputs": {"json": KIND}}
    (whole,) = texts(await post(served, CHATS, **asked))
    streamed = await post(served, CHATS, stream=True, **asked)
    events = [json.loads(line[6:]) for line in streamed.text.splitlines() if line.startswith("data: {")]
    assert "".join(event["choices"][0]["delta"].get("content") or "" for event in events) == whole
    assert events[-1]["choices"][0]["finish_reason"] == "stop"


async def test_choices_seeds_penalties_and_logprobs_go_with_a_form(served: Serving) -> None:
    penalties = {"presence_penalty": 1.0, "frequency_penalty": 0.5, "repetition_penalty": 1.2, "logit_bias": {"70": 1}}
    asked = {"guided_regex": "[a-z]{8}", "n": 4, "logprobs": 2, "temperature": 1.0, **penalties}
    first, again = [await post(served, **asked) for _ in range(2)]
    assert texts(first) == texts(again)
    assert len(set(texts(first))) > 1
    assert all(re.fullmatch("[a-z]{8}", text) for text in texts(first))
    for choice in first.json()["choices"]:
        assert "".join(choice["logprobs"]["tokens"]).startswith(choice["text"])


async def test_rows_with_and_without_a_form_share_steps(served: Serving) -> None:
    free = {"max_tokens": 40, "ignore_eos": True}
    alone = (await post(served, **free)).json()["choices"][0]["text"]
    answers = await asyncio.gather(
        post(served, **free),
        post(served, guided_regex="[a-z]{20}"),
        post(served, CHATS, guided_choice=["a core"]),
        post(served, guided_json=KIND),
    )
    assert answers[0].json()["choices"][0]["text"] == alone
    assert re.fullmatch("[a-z]{20}", texts(answers[1])[0])
    assert texts(answers[2]) == ["a core"]
    assert json.loads(texts(answers[3])[0])["count"] in range(1, 65)


class Kind(pydantic.BaseModel):
    kind: Literal["device", "core"]
    count: int = pydantic.Field(ge=1, le=64)


async def test_openais_client_parses_an_answer_into_a_class(served: Serving) -> None:
    async with AsyncOpenAI(base_url=f"{served.http.base_url}/v1", api_key="any", max_retries=0) as client:
        answer = await client.chat.completions.parse(model=MODEL, messages=CHAT, response_format=Kind, max_tokens=200)
    assert isinstance(answer.choices[0].message.parsed, Kind)


# Refusals

DEEP: Any = {}
for _ in range(MAX_FORM_DEPTH):
    DEEP = {"anyOf": [DEEP]}


@pytest.mark.parametrize(
    ("fields", "field", "says"),
    [
        ({"response_format": {"type": "json_schema"}}, "response_format", "`response_format.json_schema` is required"),
        ({"response_format": {"type": "yaml"}}, "response_format.type", "must be one of `json_object`, `json_schema`"),
        ({"response_format": {"type": "structural_tag"}}, "response_format", "Expected"),
        ({"guided_json": {"type": "strange"}}, "guided_json", "cannot be compiled"),
        ({"guided_json": "{"}, "guided_json", "is not JSON"),
        ({"guided_json": DEEP}, "guided_json", f"at most {MAX_FORM_DEPTH} levels deep, got {2 * MAX_FORM_DEPTH + 1}"),
        ({"guided_regex": "("}, "guided_regex", "cannot be compiled"),
        ({"guided_regex": "a" * (MAX_FORM_CHARACTERS + 1)}, "guided_regex", f"at most {MAX_FORM_CHARACTERS} char"),
        ({"guided_choice": []}, "guided_choice", f"1 to {MAX_FORM_CHOICES} texts, got 0"),
        ({"guided_choice": ["a"] * (MAX_FORM_CHOICES + 1)}, "guided_choice", f"1 to {MAX_FORM_CHOICES} texts"),
        ({"structured_outputs": {}}, "structured_outputs", "names no form"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs.choice", "two forms of one"),
        ({"structured_outputs": {"regex": "a"}, "guided_regex": "a"}, "guided_regex", "two forms of one answer"),
        ({"structured_outputs": {"structural_tag": {**TAGS, "triggers": ["<b"]}}}, None, "none of the triggers"),
        ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos", "contradicts `guided_regex`"),
        ({"guided_regex": "a", "min_tokens": 3}, "min_tokens", "contradicts `guided_regex`"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_wrong_form_is_refused_by_its_field(
    served: Serving, fields: dict[str, Any], field: str | None, says: str, stream: bool
) -> None:
    answer = await post(served, stream=stream, **fields)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == (field or "structured_outputs.structural_tag")
    assert says in error["message"]


async def test_a_hostile_form_is_refused_while_others_are_answered(served: Serving) -> None:
    hostile = asyncio.create_task(post(served, guided_json={"type": "integer", "multipleOf": 99999989}))
    assert texts(await post(served, guided_choice=["a node"])) == ["a node"]
    error = (await hostile).json()["error"]
    assert error["param"] == "guided_json"
    assert "is too complex" in error["message"]
    assert served.engine.error is None


async def test_a_request_that_leaves_while_its_form_is_compiled_leaves_nothing(served: Serving) -> None:
    with pytest.raises(httpx.ReadTimeout):
        await served.http.post(
            COMPLETIONS,
            json={"prompt": "a", "guided_json": {"type": "integer", "multipleOf": 99999971}},
            timeout=httpx.Timeout(60, read=0.2),
        )
    await served.until_metric("vllm:num_requests_waiting", 0)
    assert texts(await post(served, guided_choice=["a node"])) == ["a node"]
