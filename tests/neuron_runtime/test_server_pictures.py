"""Pictures in requests over HTTP, on the strict backend: every API, limits, refusals, and the way to the engine."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest
import pytest_asyncio

from helpers.front_end import LIMITS, MODEL, Serving, serving
from helpers.picture_models import picture, write_picture_model
from helpers.tool_templates import SEEING, WEATHER
from neuron_runtime.config import MediaOptions, TextOptions
from neuron_runtime.engine.pixel_files import FOLDER
from neuron_runtime.pictures.reader import MAX_READ_BYTES

SEES = replace(LIMITS, max_pictures=3)
SMALL = MediaOptions(max_image_bytes=10_000, max_pixels=10_000, allowed_hosts=("pictures.example",))
AT = "messages[0].content[1].image_url"
NUM_TOKENS = 4 * (6 + 1)
"""Of 24 x 16 pixels in patches of 4: four rows of six, each with a mark behind it."""


def encoded(raw: bytes) -> str:
    return base64.b64encode(raw).decode()


def data_url(raw: bytes) -> str:
    return f"data:image/png;base64,{encoded(raw)}"


def image(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def chat(*parts: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(parts)}], "max_tokens": 4, "temperature": 0, **more}


RED, BLUE = data_url(picture()), data_url(picture(color="blue"))
ASKED = text("What is this? ")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_picture_model(tmp_path_factory.mktemp("pixtral"))


@pytest_asyncio.fixture
async def served(model: Path) -> AsyncIterator[Serving]:
    async with serving(model, limits=SEES, vocabulary_size=400, media=SMALL) as one:
        yield one


async def asked(served: Serving, body: dict[str, Any], path: str = "/v1/chat/completions") -> httpx.Response:
    return await served.http.post(path, json=body)


async def answer_of(served: Serving, *parts: dict[str, Any]) -> tuple[int, str]:
    response = await asked(served, chat(*parts))
    assert response.status_code == 200, response.text
    (choice,) = response.json()["choices"]
    return response.json()["usage"]["prompt_tokens"], choice["message"]["content"]


async def test_a_picture_counts_as_tokens_and_changes_the_answer(served: Serving) -> None:
    words, _ = await answer_of(served, ASKED)
    seen, red = await answer_of(served, ASKED, image(RED))
    assert seen == words + NUM_TOKENS
    assert (seen, red) == await answer_of(served, ASKED, image(RED))
    assert red != (await answer_of(served, ASKED, image(BLUE)))[1]


async def test_every_answer_to_a_chat_sees_its_pictures_and_no_file_stays(served: Serving) -> None:
    response = await asked(served, chat(ASKED, image(RED), image(BLUE), n=2))
    first, second = (one["message"]["content"] for one in response.json()["choices"])
    assert first == second
    assert not list((served.run_dir / FOLDER).iterdir())
    assert served.front_end.pixel_files.num_bytes == 0


async def test_the_apis_see_the_same_picture(served: Serving) -> None:
    tokens, _ = await answer_of(served, ASKED, image(RED))
    parts = [{"type": "input_text", "text": ASKED["text"]}, {"type": "input_image", "image_url": RED}]
    response = await asked(
        served, {"input": [{"role": "user", "content": parts}], "max_output_tokens": 4}, "/v1/responses"
    )
    assert response.json()["usage"]["input_tokens"] == tokens
    source = {"type": "base64", "media_type": "image/png", "data": encoded(picture())}
    messages = {"messages": [{"role": "user", "content": [ASKED, {"type": "image", "source": source}]}]}
    response = await asked(served, {**messages, "max_tokens": 4}, "/v1/messages")
    assert response.json()["usage"]["input_tokens"] == tokens
    counted = await asked(served, messages, "/v1/messages/count_tokens")
    assert counted.json() == {"input_tokens": tokens}
    tokenized = await asked(served, {"messages": chat(ASKED, image(RED))["messages"]}, "/tokenize")
    assert tokenized.json()["count"] == tokens


REFUSED = {
    "no base64": ("data:image/png;base64,!!!", "is not base64", "invalid_image"),
    "no data": ("data:image/png,abc", "base64", "invalid_image"),
    "no scheme": ("picture.png", "must be a `data:` or `https:` URL", "invalid_image_url"),
    "http": ("http://pictures.example/a.png", "must be a `data:` or `https:` URL", "invalid_image_url"),
    "a file": ("file:///etc/passwd", "must be a `data:` or `https:` URL", "invalid_image_url"),
    "another host": ("https://other.example/a.png", "allowedHosts", "invalid_image_url"),
    "an address": ("https://169.254.169.254/latest", "allowedHosts", "invalid_image_url"),
    "no picture": (data_url(b"<svg/>"), "must be a JPEG, PNG, WebP or GIF", "invalid_image"),
    "a part of one": (data_url(picture()[:40]), "is a broken PNG picture", "invalid_image"),
    "too many bytes": (data_url(picture(kind="PNG") + bytes(10_000)), "at most 10000 bytes", "image_too_large"),
    "too many pixels": (data_url(picture(101, 100)), "101 x 100 pixels, max 10000", "image_too_large"),
}


@pytest.mark.parametrize("what", REFUSED)
async def test_a_picture_that_cannot_be_read_is_refused_with_its_place(served: Serving, what: str) -> None:
    url, problem, code = REFUSED[what]
    response = await asked(served, chat(ASKED, image(url)))
    error = response.json()["error"]
    assert (response.status_code, error["param"], error["code"]) == (400, AT, code)
    assert problem in error["message"]


async def test_pictures_are_counted(model: Path) -> None:
    limits = replace(SEES, shares_prefixes=True)
    async with serving(model, limits=limits, vocabulary_size=400, media=SMALL) as served:
        for _ in range(2):
            await answer_of(served, image(RED), text("What is this? " * 4))
        for source in ("local_compute", "local_cache_hit"):
            assert await served.metric("neuron_serving_pictures_total", source=source) == 1
        assert await served.metric("neuron_serving_picture_seconds_count") == 2
        await asked(served, chat(image(REFUSED["too many pixels"][0])))
        assert await served.metric("neuron_serving_picture_seconds_count") == 2
        assert await served.metric("neuron_serving_requests_refused_total", reason="image_too_large") == 1


async def test_more_pictures_than_the_backend_takes_are_refused(served: Serving) -> None:
    response = await asked(served, chat(*[image(RED)] * 4))
    assert response.status_code == 400
    assert "`messages[0].content[3].image_url` is one picture too many: at most 3" in response.text


@pytest.mark.parametrize("parts", [[text("[IMG]")], [text("[IMG] and"), image(RED)]])
async def test_a_placeholder_in_the_text_of_a_client_is_no_picture(served: Serving, parts: list[Any]) -> None:
    response = await asked(served, chat(*parts))
    assert response.status_code == 400
    assert "[IMG], which stands for a picture" in response.json()["error"]["message"]


NO_PICTURE = {"type": "image", "source": {"type": "file", "file_id": "a"}}
OF_A_FILE = {"type": "input_image", "file_id": "a"}
USED = {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "weather", "input": {}}]}
NOT_SHOWN = {
    "by the system": ("/v1/chat/completions", {"role": "system", "content": [image(RED)]}, "[0].content[0].type"),
    "by an answer": ("/v1/chat/completions", {"role": "assistant", "content": [image(RED)]}, "[0].content[0].type"),
    "a file": ("/v1/responses", {"role": "user", "content": [OF_A_FILE]}, "[0].content[0].file_id"),
    "a file of a result": (
        "/v1/responses",
        {"type": "function_call_output", "call_id": "a", "output": [OF_A_FILE]},
        "[0].output[0].file_id",
    ),
    "a block": ("/v1/messages", {"role": "user", "content": [NO_PICTURE]}, "[0].content[0].source.type"),
    "a block of a result": (
        "/v1/messages",
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": [NO_PICTURE]}]},
        "[0].content[0].content[0].source.type",
    ),
}


async def test_what_shows_no_picture_is_refused_with_its_place(served: Serving) -> None:
    for path, shown, at in NOT_SHOWN.values():
        name = "input" if path == "/v1/responses" else "messages"
        response = await asked(served, {name: [shown], "max_tokens": 4}, path)
        assert response.status_code == 400
        assert f"`{name}{at}`" in response.json()["error"]["message"]


ONE_CALL = (
    "{% for m in messages if m.tool_calls and m.tool_calls | length > 1 %}{{ raise_exception('one') }}{% endfor %}"
)


@pytest_asyncio.fixture
async def calls_tools(model: Path) -> AsyncIterator[Serving]:
    """A template as those of Llama, which show one call of a message."""
    text = TextOptions(chat_template=ONE_CALL + SEEING)
    limits = replace(SEES, max_model_length=1024, max_step_tokens=1024, num_blocks=128)
    async with serving(model, limits=limits, vocabulary_size=400, text=text) as one:
        yield one


async def test_clients_show_what_tools_return(calls_tools: Serving) -> None:
    """OpenAI's and Anthropic's, in each API; a model sees the same by all of them."""
    url, found = str(calls_tools.http.base_url), list[tuple[int, str]]()
    async with (
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0) as client,
        anthropic.AsyncAnthropic(base_url=url, api_key="any", max_retries=0) as other,
    ):
        for raw in (picture(), picture(color="blue")):
            seen = set[tuple[int, str]]()
            history: Any = [{"role": "user", "content": "a"}]
            call = {"id": "abcdefghi", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
            result = {"role": "tool", "tool_call_id": "abcdefghi", "content": [ASKED, image(data_url(raw))]}
            messages = [*history, {"role": "assistant", "content": None, "tool_calls": [call]}, result]
            common: Any = {"model": MODEL, "temperature": 0}
            chatted = await client.chat.completions.create(messages=messages, max_tokens=8, tools=[WEATHER], **common)
            assert chatted.usage
            seen.add((chatted.usage.prompt_tokens, chatted.choices[0].message.content or ""))
            output = [
                {"type": "input_text", "text": ASKED["text"]},
                {"type": "input_image", "image_url": data_url(raw), "detail": "auto"},
            ]
            items = [
                {"type": "function_call", "call_id": "a", "name": "weather", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "a", "output": output},
            ]
            tool: Any = {"type": "function", **WEATHER["function"], "strict": None}
            responded = await client.responses.create(
                input=[*history, *items], max_output_tokens=8, tools=[tool], **common
            )
            assert responded.usage
            seen.add((responded.usage.input_tokens, responded.output_text))
            source = {"type": "base64", "media_type": "image/png", "data": encoded(raw)}
            blocks = [
                {"type": "tool_result", "tool_use_id": "a", "content": [ASKED, {"type": "image", "source": source}]}
            ]
            function = WEATHER["function"]
            described: Any = {
                "name": function["name"],
                "description": function["description"],
                "input_schema": function["parameters"],
            }
            message = await other.messages.create(
                messages=[*history, USED, {"role": "user", "content": blocks}],
                max_tokens=8,
                tools=[described],
                model=MODEL,
                extra_body={"temperature": 0},
            )
            seen.add((message.usage.input_tokens, "".join(one.text for one in message.content if one.type == "text")))
            assert len(seen) == 1
            found += seen
    (red_tokens, red), (blue_tokens, blue) = found
    assert red_tokens == blue_tokens
    assert red != blue


async def test_pictures_of_results_stay_with_their_calls(calls_tools: Serving) -> None:
    """The template shows each result behind its call, in whatever order a client sends them."""
    function = {"name": "weather", "arguments": "{}"}
    calls = [{"id": one * 9, "type": "function", "function": function} for one in "ab"]
    red, blue = (
        {"role": "tool", "tool_call_id": name * 9, "content": [image(url)]} for name, url in (("a", RED), ("b", BLUE))
    )
    swapped = ({**red, "content": blue["content"]}, {**blue, "content": red["content"]})
    answers = []
    for results in ((red, blue), (blue, red), swapped):
        messages = [{"role": "user", "content": "a"}, {"role": "assistant", "tool_calls": calls}, *results]
        response = await asked(calls_tools, {"messages": messages, "max_tokens": 8, "temperature": 0})
        answers.append(response.json()["choices"][0]["message"]["content"])
    assert answers[0] == answers[1]
    assert answers[0] != answers[2]


async def test_a_model_that_sees_nothing_says_so(model: Path) -> None:
    async with serving(model, vocabulary_size=400) as blind:
        response = await asked(blind, chat(ASKED, image(RED)))
        assert response.status_code == 400
        assert f"`{AT}` is a picture, and this server sees none" in response.text


async def test_pictures_beyond_the_memory_for_them_get_429(served: Serving) -> None:
    files = served.front_end.pixel_files
    files.num_bytes = files._max_bytes - 1
    response = await asked(served, chat(ASKED, image(RED)))
    assert response.status_code == 429
    assert response.headers["retry-after"] == "1"


async def test_pixels_are_held_in_a_file_alone_while_a_request_runs(model: Path) -> None:
    async with serving(model, limits=SEES, vocabulary_size=400, media=SMALL, paced=True) as served:
        waiting = asyncio.create_task(asked(served, chat(ASKED, image(RED))))
        files, room = served.front_end.pixel_files, served.front_end.pixel_room
        async with asyncio.timeout(20):
            while not files.num_bytes or room.num_bytes:
                await asyncio.sleep(0.01)
        room.num_bytes = MAX_READ_BYTES - 1
        refused = await asked(served, chat(ASKED, image(BLUE)))
        assert refused.status_code == 429
        assert "fill the memory to read them" in refused.text
        assert not waiting.done()
        served.permit(100)
        assert (await waiting).status_code == 200
        assert room.num_bytes == MAX_READ_BYTES - 1


async def test_an_engine_that_starts_again_sees_pictures(served: Serving) -> None:
    before = await answer_of(served, ASKED, image(RED))
    await served.replace_engine("gone")
    await served.until(lambda: served.front_end.client.ready)
    assert before == await answer_of(served, ASKED, image(RED))


async def test_a_fetch_that_hangs_delays_nobody(served: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    admissions = served.front_end.admissions()
    assert admissions.pictures is not None
    loop, hangs, gone = asyncio.get_running_loop(), asyncio.Event(), asyncio.Event()

    def hanging(url: str, at: str, max_bytes: int) -> bytes:
        loop.call_soon_threadsafe(hangs.set)
        asyncio.run_coroutine_threadsafe(gone.wait(), loop).result()
        return picture()

    object.__setattr__(admissions.pictures, "fetch", hanging)
    waiting = asyncio.create_task(asked(served, chat(ASKED, image("https://pictures.example/a.png"))))
    await hangs.wait()
    await answer_of(served, ASKED)
    await answer_of(served, ASKED, image(RED))
    assert not waiting.done()
    gone.set()
    assert (await waiting).status_code == 200
