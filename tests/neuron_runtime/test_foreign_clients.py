"""Clients of other makers against the server: agents call a tool and answer with its result, forms are read, pictures
are seen.

Each client is a program in `foreign_clients/`, which fails if it does not understand the server. The model is scripted:
asked whether it rains, it calls `weather` if it sees tools, and says that it rains after a result, or without tools.
Asked how warm it is, it says JSON that does not fit, among other text; where a form does not allow that, it says the
next of it that is allowed. Shown pictures, it says their colors.
"""

from __future__ import annotations

import base64
import re
import zlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from cluster.rig.needs import NotPossibleHere
from helpers import foreign_clients, strict_backend
from helpers.chat_model import USER_START
from helpers.front_end import LIMITS, MODEL, Serving, serving
from helpers.picture_models import PIXTRAL, picture, write_picture_model
from helpers.scripts import next_of, script
from helpers.strict_backend import FEATURES
from helpers.tool_templates import SEEING, WEATHER
from neuron_runtime.config import MediaOptions
from neuron_runtime.pictures.reader import load_reader
from neuron_runtime.pictures.sources import PictureAt
from neuron_runtime.text.tokenizer import load_tokenizer

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.slow,
    pytest.mark.timeout(900),  # the first one may install
]

CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}</tool_call>'
TEXT = "It rains."
WARM = 'Sure: {"city": "Oslo in Norway", "degrees": "7 C"} Bye.'
PICTURES = {color: base64.b64encode(picture(color=color)).decode() for color in ("red", "blue")}
COLORS = {color: f"data:image/png;base64,{encoded}" for color, encoded in PICTURES.items()}
WARM_CALL = 'Sure: [{"name": "%s", "arguments": {"city": "Oslo in Norway", "degrees": "7 C"}}] Bye.'


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Serving]:
    sees = replace(PIXTRAL, template=SEEING)
    folder = write_picture_model(tmp_path_factory.mktemp("model"), sees, max_length=8192)
    tokenizer = load_tokenizer(folder)
    reader = load_reader(folder, tokenizer, MediaOptions(), len(COLORS))
    assert reader is not None
    read = reader.read([PictureAt(url, color) for color, url in COLORS.items()])
    colors = {FEATURES - zlib.crc32(f"{one.digest} 0".encode()): one.at for one in read}
    """By what the cache has where a picture begins."""

    def ids(text: str) -> tuple[int, ...]:
        return tuple(tokenizer.encode(text, add_special_tokens=False))

    (start,), result = ids(USER_START), ids("tool\n")
    call, text, warm = (script(tokenizer, said) for said in (CALL, TEXT, WARM))

    def next_token(context: Sequence[int], sampling: Any, position: int, **more: Any) -> int:
        starts = [at for at, token in enumerate(context) if token == start]
        sees_tools = starts[0] > 1
        if seen := [colors[token] for token in context if token in colors]:
            said = script(tokenizer, ", ".join(seen))
        elif "How warm" in tokenizer.decode(context[starts[-2] :]):
            tool = re.search(r'"name": "(.*?)"', tokenizer.decode(context[: starts[0]]))
            said = script(tokenizer, WARM_CALL % tool[1]) if tool else warm
        else:
            last = tuple(context[starts[-2] + 1 :][: len(result)])
            said = call if sees_tools and last != result else text
        return next_of(said, context, sampling, position, **more)

    limits = replace(LIMITS, max_model_length=8192, max_step_tokens=8192, num_blocks=1024, max_pictures=4)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(strict_backend, "next_token", next_token)
        async with serving(folder, limits=limits, vocabulary_size=400) as one:
            yield one


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def num_tokens(served: Serving) -> int:
    """Of a question with a picture."""
    shown = {"type": "image_url", "image_url": {"url": COLORS["red"]}}
    content = [{"type": "text", "text": "What color?"}, shown]
    counted = await served.http.post("/tokenize", json={"messages": [{"role": "user", "content": content}]})
    return int(counted.json()["count"])


@pytest.mark.parametrize(
    "client",
    [
        "instructor_client.py",
        "langchain_client.py",
        "litellm_client.py",
        pytest.param("llama_index_client.py", marks=pytest.mark.long),
        "openai_node.mjs",
        "pydantic_ai_client.py",
        "vercel_ai.mjs",
    ],
)
async def test_a_client_understands_calls_of_tools_and_answers_of_a_form_and_shows_pictures(
    served: Serving, num_tokens: int, client: str, tmp_path: Path
) -> None:
    url = f"{str(served.http.base_url).rstrip('/')}/v1"
    try:
        await foreign_clients.run(client, url, MODEL, *COLORS.values(), str(num_tokens), folder=tmp_path)
    except NotPossibleHere as reason:
        # Nothing else of the project needs Node or its registry, so they may be missing even in CI.
        (pytest.xfail if client.endswith(".mjs") else pytest.skip)(str(reason))


async def test_the_default_chat_of_open_webui_is_answered(served: Serving) -> None:
    """As its backend forwards what its page sends: a stream with tools, ids of the page left out."""
    body = {
        "stream": True,
        "model": MODEL,
        "messages": [{"role": "user", "content": "Will it rain?"}],
        "tools": [WEATHER],
        "stream_options": {"include_usage": True},
    }
    answer = await served.http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200
    assert '"finish_reason":"tool_calls"' in answer.text
    assert answer.text.endswith("data: [DONE]\n\n")
