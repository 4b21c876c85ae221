"""The real Open WebUI against real servers: adapters are models that its users choose, pictures are shown to a model,
and what it has stored is found by our vectors."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from helpers.open_webui import open_webui
from helpers.serve_command import serve

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(900)]  # it may install

EXAMPLES = Path(__file__).parents[2] / "examples"
DEMO = EXAMPLES / "demo-model"
EXPECTED: dict[str, str] = json.loads((DEMO / "expected.json").read_text(encoding="utf-8"))
PICTURE = EXAMPLES / "vision-model" / "shapes.png"
SERVED = {
    DEMO: ("--served-model-name", "demo", "--enable-lora", "--lora-modules", f"pirate={DEMO}/pirate"),
    EXAMPLES / "vision-model": ("--served-model-name", "vision"),
    EXAMPLES / "embedding-model": ("--served-model-name", "vectors", "--task", "embed"),
}
QUESTION = "What is a slot?"
ANSWERS = {
    "demo": "A slot is the cache line of one running sequence.",
    "pirate": "A slot is the cache line of one running sequence. Arr, matey!",
}


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    # torch makes this folder as soon as a vision tower is imported.
    kept = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path_factory.mktemp("inductor"))}
    with ExitStack() as running:
        commands = [
            running.enter_context(serve(str(one), "--port", "0", *flags, environment=kept))
            for one, flags in SERVED.items()
        ]
        *chats, vectors = (f"{command.until_ready()}/v1" for command in commands)
        yield running.enter_context(open_webui(chats, vectors, tmp_path_factory.mktemp("open-webui")))


def told(page: httpx.Client, model: str, content: Any) -> list[str]:
    """The pieces of a streamed answer."""
    body = {"model": model, "stream": True, "messages": [{"role": "user", "content": content}]}
    with page.stream("POST", "/api/chat/completions", json=body) as answer:
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line.startswith("data: ")]
    assert lines[-1:] == ["[DONE]"]
    chunks = [json.loads(one) for one in lines[:-1]]
    return [choice["delta"].get("content") or "" for chunk in chunks for choice in chunk.get("choices", [])]


def test_open_webui_lists_adapters_beside_their_model(page: httpx.Client) -> None:
    listed = page.get("/api/models").raise_for_status().json()["data"]
    assert {one["id"]: one["parent"] for one in listed} == {"demo": None, "pirate": "demo", "vision": None}


@pytest.mark.parametrize("model", ANSWERS)
def test_a_chat_of_open_webui_is_streamed_by_the_model_that_its_user_chose(page: httpx.Client, model: str) -> None:
    pieces = told(page, model, QUESTION)
    assert "".join(pieces) == ANSWERS[model]
    assert len(list(filter(None, pieces))) > 1


@pytest.mark.parametrize("uploaded", [True, False])
def test_a_picture_in_a_chat_of_open_webui_is_seen_by_the_model(page: httpx.Client, *, uploaded: bool) -> None:
    """Its page uploads a picture first and names the file; others send its bytes."""
    if uploaded:
        files = {"file": ("shapes.png", PICTURE.read_bytes(), "image/png")}
        url = page.post("/api/v1/files/", params={"process": False}, files=files).raise_for_status().json()["id"]
    else:
        url = f"data:image/png;base64,{base64.b64encode(PICTURE.read_bytes()).decode()}"
    shown = {"type": "image_url", "image_url": {"url": url}}
    pieces = told(page, "vision", [{"type": "text", "text": "What is in the picture?"}, shown])
    assert "".join(pieces) == "A red circle and two blue squares."


def test_open_webui_finds_texts_by_our_vectors(page: httpx.Client) -> None:
    asked = (QUESTION, "What is a bucket?", "What is a lease?")
    text = "\n\n".join(f"# {number}\n\n{EXPECTED[question]}" for number, question in enumerate(asked))
    kept = page.post("/api/v1/retrieval/process/text", json={"name": "terms", "content": text}).raise_for_status()
    for question in asked:
        query = {"collection_name": kept.json()["collection_name"], "query": question, "k": 1}
        ((found,),) = page.post("/api/v1/retrieval/query/doc", json=query).raise_for_status().json()["documents"]
        assert EXPECTED[question] in found
        assert sum(EXPECTED[other] in found for other in asked) == 1
