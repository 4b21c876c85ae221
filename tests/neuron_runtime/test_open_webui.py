"""The real Open WebUI against the real server: adapters are models that its users choose."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from helpers.open_webui import open_webui
from helpers.serve_command import serve

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(900)]  # it may install

DEMO = Path(__file__).parents[2] / "examples" / "demo-model"
QUESTION = "What is a slot?"
ANSWERS = {
    "demo": "A slot is the cache line of one running sequence.",
    "pirate": "A slot is the cache line of one running sequence. Arr, matey!",
}


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    flags = ("--port", "0", "--served-model-name", "demo", "--enable-lora", "--lora-modules", f"pirate={DEMO}/pirate")
    with (
        serve(str(DEMO), *flags) as command,
        open_webui(f"{command.until_ready()}/v1", tmp_path_factory.mktemp("open-webui")) as client,
    ):
        yield client


def test_open_webui_lists_adapters_beside_their_model(page: httpx.Client) -> None:
    listed = page.get("/api/models").raise_for_status().json()["data"]
    assert {one["id"]: one["parent"] for one in listed} == {"demo": None, "pirate": "demo"}


@pytest.mark.parametrize("model", ANSWERS)
def test_a_chat_of_open_webui_is_streamed_by_the_model_that_its_user_chose(page: httpx.Client, model: str) -> None:
    body = {"model": model, "stream": True, "messages": [{"role": "user", "content": QUESTION}]}
    with page.stream("POST", "/api/chat/completions", json=body) as answer:
        told = [line.removeprefix("data: ") for line in answer.iter_lines() if line.startswith("data: ")]
    assert told[-1] == "[DONE]"
    chunks = [json.loads(one) for one in told[:-1]]
    pieces = [choice["delta"].get("content") or "" for chunk in chunks for choice in chunk.get("choices", [])]
    assert "".join(pieces) == ANSWERS[model]
    assert len(list(filter(None, pieces))) > 1
