"""The routes for vectors and scores, over HTTP: answers, limits, refusals, and clients that leave."""

from __future__ import annotations

import asyncio
import base64
from array import array
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import AsyncOpenAI

from helpers.front_end import Serving, make_model, serving, vector_of
from neuron_runtime.config import ServerOptions
from neuron_runtime.core import BackendLimits, Task

SIZE = 8
LIMITS = BackendLimits(
    max_rows=2,
    max_model_length=32,
    max_step_tokens=32,
    max_prefill_rows=2,
    layout="slots",
    block_size=32,
    num_blocks=2,
    chunks_prefill=False,
    vector_size=SIZE,
)
OPTIONS = ServerOptions(access_log=False, max_inputs=5)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
async def served(model_dir: Path) -> AsyncIterator[Serving]:
    async with serving(model_dir, limits=LIMITS, task="embed", options=OPTIONS, max_queued=6) as running:
        yield running


async def post(served: Serving, path: str, **body: Any) -> httpx.Response:
    return await served.http.post(path, json=body)


async def test_openai_s_client_gets_a_vector_of_each_text(served: Serving) -> None:
    client = AsyncOpenAI(base_url=f"{served.http.base_url}/v1", api_key="none", http_client=served.http)
    ids = [[5, 6, 7], [1], [9, 9]]
    answer = await client.embeddings.create(model="alias", input=ids)
    assert [one.embedding for one in answer.data] == [array("f", vector_of(one, SIZE)).tolist() for one in ids]
    assert [one.index for one in answer.data] == [0, 1, 2]
    assert (answer.usage.prompt_tokens, answer.usage.total_tokens) == (6, 6)
    assert await served.metric("vllm:prompt_tokens_total") == 6
    assert await served.metric("vllm:request_success_total", finished_reason="stop") == 3


@pytest.mark.parametrize("text", ["one text", ["one text"]])
async def test_a_text_and_a_list_with_it_get_the_same(served: Serving, text: Any) -> None:
    numbers = (await post(served, "/v1/embeddings", input=text)).json()["data"][0]["embedding"]
    encoded = (await post(served, "/v1/embeddings", input=text, encoding_format="base64")).json()["data"][0]
    assert numbers == array("f", base64.b64decode(encoded["embedding"])).tolist()


async def test_documents_come_in_the_order_of_their_similarity(served: Serving) -> None:
    body = {"query": "find the query", "documents": ["xyz", {"text": "find the query"}, "find"]}
    for path in ("/rerank", "/v1/rerank", "/v2/rerank"):
        results = (await post(served, path, **body, top_n=2)).json()["results"]
        assert [one["index"] for one in results] == [1, 2]
        assert results[0]["document"] == {"text": "find the query"}
        assert results[0]["relevance_score"] == pytest.approx(1.0)
    bare = (await post(served, "/rerank", **body, return_documents=False)).json()["results"]
    assert [sorted(one) for one in bare] == [["index", "relevance_score"]] * 3


async def test_pairs_are_scored_one_with_all_or_one_by_one(served: Serving) -> None:
    alike = (await post(served, "/score", text_1="same", text_2=["same", "other"])).json()
    assert [one["index"] for one in alike["data"]] == [0, 1]
    assert alike["data"][0]["score"] == pytest.approx(1.0)
    paired = (await post(served, "/v1/score", queries=["same", "x"], documents=["same", "x"])).json()
    assert [one["score"] for one in paired["data"]] == [pytest.approx(1.0)] * 2


@pytest.mark.parametrize(
    ("path", "body", "field", "message"),
    [
        ("/v1/embeddings", {"input": ["a"] * 6}, "input", "must have at most 5 texts, got 6"),
        ("/v1/embeddings", {"input": ["a", "b" * 40]}, "input[1]", "maximum context length is 32 tokens"),
        ("/v1/embeddings", {"input": []}, "input", "must not be empty"),
        ("/v1/embeddings", {"input": [[]]}, "input[0]", "has no tokens"),
        ("/v1/embeddings", {"input": [[1], [10**6]]}, "input[1]", "is not a token id of this model"),
        (
            "/v1/embeddings",
            {"input": "a", "dimensions": 4},
            "dimensions",
            "must be 8: the model's vectors cannot be cut",
        ),
        ("/v1/embeddings", {"input": "a", "dimensions": 0}, "dimensions", "must be at least 1, got 0"),
        ("/v1/embeddings", {"input": "a", "encoding_format": "int8"}, "encoding_format", "int8"),
        ("/v1/embeddings", {"input": "a", "prompt_name": "query"}, "prompt_name", "none of this model's prompts"),
        ("/v1/embeddings", {"input": {"text": "a"}}, "input", "input"),
        ("/rerank", {"query": "a", "documents": []}, "documents", "must not be empty"),
        ("/rerank", {"query": "a", "documents": ["a"] * 6}, "documents", "must have at most 5 texts, got 6"),
        ("/rerank", {"query": "a", "documents": ["a", "b" * 40]}, "documents[1]", "maximum context length"),
        ("/rerank", {"query": "a", "documents": ["a"], "top_n": -1}, "top_n", "must be at least 0, got -1"),
        ("/score", {"text_1": ["a", "b"], "text_2": ["a"]}, "text_1", "has 2 texts for 1 of `text_2`"),
        ("/score", {"text_1": "a"}, "text_2", "exactly one of `text_2` and `documents` is required"),
        ("/v1/chat/completions", {"messages": []}, "model", "this server's task is `embed`: use /v1/embeddings"),
        ("/v1/messages", {"messages": []}, "model", "this server's task is `embed`"),
        ("/invocations", {"prompt": "a"}, "model", "this server's task is `embed`"),
    ],
)
async def test_a_body_that_is_not_served_names_the_field(
    served: Serving, path: str, body: dict[str, Any], field: str, message: str
) -> None:
    answer = await post(served, path, **body)
    error = answer.json()["error"]
    assert answer.status_code == 400
    assert message in error["message"]
    assert error.get("param", field) == field


@pytest.mark.parametrize(("task", "path"), [("generate", "/v1/embeddings"), ("rerank", "/v1/embeddings")])
async def test_vectors_are_refused_where_another_task_is_served(model_dir: Path, task: Task, path: str) -> None:
    limits = {"limits": LIMITS} if task != "generate" else {}
    async with serving(model_dir, task=task, **limits) as running:
        answer = await post(running, path, input="a")
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "wrong_task")
        assert f"this server's task is `{task}`" in answer.json()["error"]["message"]


async def test_texts_are_cut_on_request(served: Serving) -> None:
    ids = list(range(40))
    cut = await post(served, "/v1/embeddings", input=ids, truncate_prompt_tokens=-1)
    assert cut.json()["data"][0]["embedding"] == array("f", vector_of(ids[:32], SIZE)).tolist()


async def test_sagemaker_s_route_answers_as_the_others(served: Serving) -> None:
    assert (await post(served, "/invocations", input="a")).json()["data"][0]["object"] == "embedding"
    assert "results" in (await post(served, "/invocations", query="a", documents=["a"])).json()


async def computing(running: Serving) -> None:
    """Until a step waits for its permit."""
    while not running.backend.waiting:
        await asyncio.sleep(0.01)


async def test_a_full_queue_refuses_texts_until_later(model_dir: Path) -> None:
    async with serving(model_dir, limits=LIMITS, task="embed", options=OPTIONS, max_queued=1, paced=True) as running:
        first = asyncio.create_task(post(running, "/v1/embeddings", input=["a", "b", "c"]))
        await computing(running)
        refused = await post(running, "/v1/embeddings", input="d")
        assert refused.status_code == 429
        assert int(refused.headers["retry-after"]) >= 1
        too_many = await post(running, "/v1/embeddings", input=["a"] * 4)
        assert "has 4 texts, but at most 3 may wait" in too_many.json()["error"]["message"]
        assert (await running.answer(first)).status_code == 200


async def test_texts_of_a_client_that_leaves_are_not_computed(model_dir: Path) -> None:
    async with serving(model_dir, limits=LIMITS, task="embed", options=OPTIONS, max_queued=6, paced=True) as running:
        left = asyncio.create_task(post(running, "/v1/embeddings", input=["a", "b", "c", "d", "e"]))
        await computing(running)
        left.cancel()
        await running.until_metric("vllm:request_success_total", 5, finished_reason="abort")
        stays = asyncio.create_task(post(running, "/v1/embeddings", input=[[3]]))
        assert (await running.answer(stays)).json()["data"][0]["embedding"] == array("f", vector_of([3], SIZE)).tolist()
        assert running.backend.num_collected < 4
