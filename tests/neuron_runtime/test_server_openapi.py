"""The published API: the document is complete and correct, and its page needs no other server."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from jsonschema import Draft202012Validator

from helpers.front_end import Serving, make_model, serving
from neuron_runtime.apis.openai.body import ChatBody, CompletionBody
from neuron_runtime.config import TextOptions
from neuron_runtime.not_built import Surface, rows
from neuron_runtime.requests.parameters import parameters_of

MESSAGES = [{"role": "user", "content": "What is a device?"}]
DETAILS: dict[str, Any] = {"max_tokens": 6, "n": 2, "return_token_ids": True}
CHAT = {"messages": MESSAGES, **DETAILS, "logprobs": True, "top_logprobs": 2}
COMPLETION = {"prompt": ["a core", "a node"], **DETAILS, "logprobs": 2, "echo": True}
STREAM = {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
BODIES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 3}),
    ("/v1/chat/completions", CHAT | {"prompt_logprobs": 1}),
    ("/v1/completions", {"prompt": "a core", "stop": "e"}),
    ("/v1/completions", COMPLETION | {"prompt_logprobs": 1}),
    ("/v1/messages", {"messages": MESSAGES, "max_tokens": 3}),
    ("/v1/responses", {"input": "What?", "max_output_tokens": 3, "include": ["message.output_text.logprobs"]}),
    ("/v1/messages/count_tokens", {"messages": MESSAGES}),
    ("/tokenize", {"prompt": "a core", "return_token_strs": True}),
    ("/tokenize", {"messages": MESSAGES}),
    ("/v1/completions/render", {"prompt": ["a core", "a device"]}),
    ("/v1/chat/completions/render", {"messages": MESSAGES, "cache_salt": "tenant"}),
    ("/detokenize", {"tokens": [1, 2, 3]}),
)
STREAMS = (
    ("/v1/chat/completions", {"messages": MESSAGES, "stream": True}),
    ("/v1/chat/completions", CHAT | STREAM),
    ("/v1/completions", {"prompt": "a core", "stream": True}),
    ("/v1/messages", {"messages": MESSAGES, "max_tokens": 3, "stream": True}),
    ("/v1/responses", {"input": "What?", "max_output_tokens": 3, "stream": True}),
    ("/v1/completions", COMPLETION | STREAM),
)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(model_dir: Path) -> AsyncIterator[Serving]:
    async with serving(model_dir) as one:
        yield one


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def document(served: Serving) -> dict[str, Any]:
    answer = await served.http.get("/openapi.json")
    assert answer.status_code == 200
    found: dict[str, Any] = answer.json()
    return found


pytestmark = pytest.mark.asyncio(loop_scope="module")


def operations(document: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            yield method, path, operation


def check(document: dict[str, Any], media: dict[str, Any], value: object) -> None:
    """Asserts that the value has exactly the fields of the schema."""
    schemas = json.loads(json.dumps(document["components"]["schemas"]))
    for schema in schemas.values():
        schema["additionalProperties"] = False
    Draft202012Validator({**media["schema"], "components": {"schemas": schemas}}).validate(value)


def event_media(document: dict[str, Any], path: str) -> dict[str, Any]:
    """Schema of the JSON in an event's data."""
    content = document["paths"][path]["post"]["responses"]["200"]["content"]
    properties = content["text/event-stream"]["schema"]["properties"]
    if "event" in properties:
        return {"schema": properties["data"]["contentSchema"]}
    data, end = properties["data"]["anyOf"]
    assert end == {"const": "[DONE]"}
    return {"schema": data["contentSchema"]}


async def test_the_document_is_openapi_3_1_with_valid_json_schemas(document: dict[str, Any]) -> None:
    assert re.fullmatch(r"3\.1\.\d+", document["openapi"])
    for schema in document["components"]["schemas"].values():
        Draft202012Validator.check_schema(schema)
    refs = set(re.findall(r'"\$ref": "(.*?)"', json.dumps(document)))
    assert refs == {f"#/components/schemas/{name}" for name in document["components"]["schemas"]}


async def test_every_operation_has_a_summary_a_tag_and_a_schema_for_each_status(document: dict[str, Any]) -> None:
    ids = [operation["operationId"] for _, _, operation in operations(document)]
    assert len(ids) == len(set(ids))
    for method, path, operation in operations(document):
        assert operation["summary"], path
        assert operation["tags"], path
        for status, response in operation["responses"].items():
            assert response["description"], (path, status)
            assert all(media["schema"] for media in response["content"].values()), (path, status)
        assert ("requestBody" in operation) == (method == "post")
        assert "422" not in operation["responses"]


async def test_every_schema_and_every_field_has_a_description(document: dict[str, Any]) -> None:
    for name, schema in document["components"]["schemas"].items():
        assert schema["description"], name
        for field, found in schema["properties"].items():
            assert found["description"], (name, field)


async def test_documented_ranges_and_defaults_are_those_of_the_checks(document: dict[str, Any]) -> None:
    for body in (ChatBody, CompletionBody):
        fields = document["components"]["schemas"][body.__name__]["properties"]
        for name, row in parameters_of(body).items():
            least = fields[name].get("minimum")
            assert (least, fields[name].get("maximum")) == (row.lowest, row.highest), name
            if row.default is not None:
                reported = fields[name]["description"] if row.setting else json.dumps(fields[name]["default"])
                assert reported.endswith(json.dumps(row.default)), name


async def test_request_schemas_have_every_field_with_its_default(document: dict[str, Any]) -> None:
    for body in (ChatBody, CompletionBody):
        schema = document["components"]["schemas"][body.__name__]
        assert set(schema["properties"]) == set(body.__struct_fields__)
        assert all(
            "default" in schema["properties"][name] for name in body.__struct_fields__ if name not in schema["required"]
        )
        assert set(schema["x-not-supported"]) == {row.name for row in rows(Surface.BODY) if row.has_effect}


@pytest.mark.parametrize(("path", "body"), BODIES)
async def test_an_answer_has_exactly_the_fields_of_its_schema(
    served: Serving, document: dict[str, Any], path: str, body: dict[str, Any]
) -> None:
    answer = await served.http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    check(document, document["paths"][path]["post"]["responses"]["200"]["content"]["application/json"], answer.json())


@pytest.mark.parametrize(("path", "body"), STREAMS)
async def test_an_event_has_exactly_the_fields_of_its_schema(
    served: Serving, document: dict[str, Any], path: str, body: dict[str, Any]
) -> None:
    answer = await served.http.post(path, json=body)
    events = [event.partition("data: ")[2] for event in answer.text.split("\n\n") if event]
    if not answer.text.startswith("event: "):
        assert events.pop() == "[DONE]"
    assert events
    for event in events:
        check(document, event_media(document, path), json.loads(event))


async def test_every_example_body_is_served(served: Serving, document: dict[str, Any]) -> None:
    for method, path, operation in operations(document):
        # Those of adapters need one on the disk, those of vectors another task.
        if method == "post" and not path.endswith("load_lora_adapter") and operation["tags"] != ["vectors"]:
            body = operation["requestBody"]["content"]["application/json"]["example"]
            answer = await served.http.post(path, json=body)
            assert answer.status_code == 200, (path, answer.text)


@pytest.mark.parametrize(
    "path", ["/v1/models", "/v1/models/alias", "/version", "/health", "/live", "/ping", "/load", "/server_info"]
)
async def test_responses_without_a_body_match_the_document(
    served: Serving, document: dict[str, Any], path: str
) -> None:
    answer = await served.http.get(path)
    operation = document["paths"][path.replace("alias", "{model}")]["get"]
    check(document, operation["responses"]["200"]["content"]["application/json"], answer.json())


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/v1/completions", {}, 400),
        ("/v1/completions", {"prompt": "a", "model": "other"}, 404),
        ("/v1/chat/completions", {"messages": 1}, 400),
        ("/v1/responses", {}, 400),
        ("/v1/messages", {"messages": 1}, 400),
        ("/v1/messages", {"messages": MESSAGES, "model": "other"}, 404),
        ("/v1/messages/count_tokens", {}, 400),
        ("/tokenize", {}, 400),
        ("/detokenize", {"tokens": [-1]}, 400),
    ],
)
async def test_an_error_matches_its_schema(
    served: Serving, document: dict[str, Any], path: str, body: dict[str, Any], status: int
) -> None:
    answer = await served.http.post(path, json=body)
    assert answer.status_code == status
    operation = document["paths"][path]["post"]
    check(document, operation["responses"][str(status)]["content"]["application/json"], answer.json())


async def test_the_not_ready_health_response_matches_its_schema(model_dir: Path, document: dict[str, Any]) -> None:
    async with serving(model_dir, ready=False) as starting:
        for path, status in (("/health", 503), ("/v1/models", 200)):
            answer = await starting.http.get(path)
            assert answer.status_code == status
            response = document["paths"][path]["get"]["responses"][str(status)]
            check(document, response["content"]["application/json"], answer.json())


@pytest.mark.parametrize("stream", [False, True])
async def test_a_reasoning_response_matches_its_schema(model_dir: Path, document: dict[str, Any], stream: bool) -> None:
    async with serving(model_dir, text=TextOptions(reasoning_parser="deepseek_r1")) as thinking:
        body = {"messages": MESSAGES, "stream": stream, "temperature": 0, "ignore_eos": True, "max_tokens": 20}
        answer = await thinking.http.post("/v1/chat/completions", json=body)
    assert '"reasoning"' in answer.text
    content = document["paths"]["/v1/chat/completions"]["post"]["responses"]["200"]["content"]
    if not stream:
        check(document, content["application/json"], answer.json())
        return
    for event in answer.text.split("\n\n")[:-2]:
        check(document, event_media(document, "/v1/chat/completions"), json.loads(event.removeprefix("data: ")))


async def test_the_docs_page_loads_no_foreign_resources(served: Serving) -> None:
    page = (await served.http.get("/docs")).text
    loaded = re.findall(r'(?:src|href)="(.*?)"', page)
    assert len(loaded) == 3
    assert "://" not in page
    for path in loaded:
        assert (await served.http.get(path)).status_code == 200, path


async def test_the_document_declares_api_keys_when_required(
    model_dir: Path, document: dict[str, Any], tmp_path: Path
) -> None:
    (tmp_path / "keys").write_text("secret")
    async with serving(model_dir, api_key_file=tmp_path / "keys") as guarded:
        found = (await guarded.http.get("/openapi.json")).json()
        needing = {path for _, path, operation in operations(found) if "security" in operation}
        for _, path, operation in operations(found):
            assert ("401" in operation["responses"]) == (path in needing)
            method = "POST" if "requestBody" in operation else "GET"
            asked = await guarded.http.request(method, path)
            assert (asked.status_code == 401) == (path in needing), path
            if path in needing:
                check(found, operation["responses"]["401"]["content"]["application/json"], asked.json())
    assert needing
    assert "securitySchemes" not in document["components"]
