"""Pictures in requests over HTTP, on the strict backend: every API, limits, refusals, and streams beside them."""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio

from helpers.front_end import LIMITS, Serving, serving
from helpers.picture_models import picture, write_picture_model

SEES = replace(LIMITS, max_pictures=3)


def data_url(raw: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(raw).decode()}"


def image(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def chat(*parts: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(parts)}], "max_tokens": 4, "temperature": 0, **more}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_picture_model(tmp_path_factory.mktemp("pixtral"))


@pytest_asyncio.fixture
async def served(model: Path) -> AsyncIterator[Serving]:
    async with serving(model, limits=SEES, vocabulary_size=400) as one:
        yield one


async def asked(served: Serving, body: dict[str, Any], path: str = "/v1/chat/completions") -> httpx.Response:
    return await served.http.post(path, json=body)


async def test_a_chat_with_a_picture_is_answered_and_the_picture_counts_as_tokens(served: Serving) -> None:
    words = await asked(served, chat(text("What is this? ")))
    seen = await asked(served, chat(text("What is this? "), image(data_url(picture()))))
    assert seen.status_code == 200, seen.text
    # 24 x 16 pixels in patches of 4: four rows of six, each with a mark behind it.
    assert seen.json()["usage"]["prompt_tokens"] == words.json()["usage"]["prompt_tokens"] + 4 * (6 + 1)
