"""OpenAI's client against the server; responses are validated with its types, which are generated from the schema.

Every response and every chunk of a stream is validated strictly. Fields beyond the schema are vLLM's and listed here.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import openai
import pytest
import pytest_asyncio
from openai import AsyncOpenAI
from openai.types import Completion, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from pydantic import BaseModel

from helpers import strict_backend
from helpers.front_end import LIMITS, MODEL, Serving, make_model, serving
from neuron_runtime.config import TextOptions
from neuron_runtime.core import Request
from neuron_runtime.errors import FatalError
from neuron_runtime.requests.texts import load_text
from neuron_runtime.text.tokenizer import Tokenizer, load_tokenizer

CHAT: Any = [{"role": "user", "content": "What is a device?"}]
PROMPT = "naïve ☃ a core"
ASK: dict[str, Any] = {"model": MODEL, "temperature": 0, "max_tokens": 24, "extra_body": {"ignore_eos": True}}

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def tokenizer(model_dir: Path) -> Tokenizer:
    return load_tokenizer(model_dir)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(model_dir: Path) -> AsyncIterator[Serving]:
    async with serving(model_dir) as one:
        yield one


def client_of(served: Serving) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=f"{served.http.base_url}/v1", api_key="any", max_retries=0)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(served: Serving) -> AsyncIterator[AsyncOpenAI]:
    async with client_of(served) as one:
        yield one


def beyond(read: BaseModel, path: str = "") -> set[str]:
    """Fields that are not in the schema."""
    found = {f"{path}{name}" for name in read.model_extra or {}}
    for name in type(read).model_fields:
        value = getattr(read, name)
        for one in value if isinstance(value, list) else [value]:
            if isinstance(one, BaseModel):
                found |= beyond(one, f"{path}{name}.")
    return found


def missing(read: BaseModel, path: str = "") -> set[str]:
    """Fields of the schema missing in the response."""
    found = {f"{path}{name}" for name in type(read).model_fields if name not in read.model_fields_set}
    for name in read.model_fields_set & type(read).model_fields.keys():
        value = getattr(read, name)
        for one in value if isinstance(value, list) else [value]:
            if isinstance(one, BaseModel):
                found |= missing(one, f"{path}{name}.")
    return found


def nothing_to_say(*, chats: bool) -> set[str]:
    """Fields of the schema that this server never sends."""
    details = ("audio_tokens", "image_tokens", "text_tokens", "cache_write_tokens")
    usage = {"completion_tokens_details", *(f"prompt_tokens_details.{name}" for name in details)}
    never = {"system_fingerprint", *(f"usage.{name}" for name in usage)}
    message = {f"choices.message.{name}" for name in ("annotations", "audio", "function_call", "tool_calls")}
    return never | message | {"service_tier", "metadata", "moderation"} if chats else never


def text_of(answer: Any) -> str:
    return answer.text if isinstance(answer.text, str) else str(answer.text())


async def complete(client: AsyncOpenAI, **asked: Any) -> Completion:
    """A whole completion, validated strictly."""
    raw = text_of(await client.completions.with_raw_response.create(**{"prompt": PROMPT, **ASK, **asked}))
    # The first token of an echoed prompt has no logprob, which the schema does not allow.
    read = Completion.model_validate_json(raw.replace("[null,", "["), strict=True)
    assert missing(read) == nothing_to_say(chats=False)
    return Completion.construct(**json.loads(raw))


async def streamed(client: AsyncOpenAI, **asked: Any) -> list[dict[str, Any]]:
    """The chunks of a completion; each matches the schema except that only the last one has a finish reason."""
    stream = await client.completions.create(**{"prompt": PROMPT, **ASK, **asked, "stream": True})
    parts = [json.loads(part.model_dump_json(exclude_unset=True)) async for part in stream]
    for part in parts:
        for choice in part["choices"]:
            ended = {**choice, "finish_reason": choice["finish_reason"] or "stop"}
            raw = json.dumps({**part, "choices": [ended]}).replace("[null, ", "[")
            Completion.model_validate_json(raw, strict=True)
    return parts


async def chat(client: AsyncOpenAI, **asked: Any) -> ChatCompletion:
    """A whole chat completion, validated strictly."""
    raw = text_of(await client.chat.completions.with_raw_response.create(**{"messages": CHAT, **ASK, **asked}))
    read = ChatCompletion.model_validate_json(raw, strict=True)
    assert missing(read) - {"usage.completion_tokens_details.accepted_prediction_tokens"} <= nothing_to_say(
        chats=True
    ) | {f"usage.completion_tokens_details.{name}" for name in NO_DETAILS}
    return read


NO_DETAILS = ("accepted_prediction_tokens", "rejected_prediction_tokens", "audio_tokens", "text_tokens")


async def chat_streamed(client: AsyncOpenAI, **asked: Any) -> list[ChatCompletionChunk]:
    """The chunks of a chat completion, each validated strictly."""
    stream = await client.chat.completions.create(**{"messages": CHAT, **ASK, **asked, "stream": True})
    raws = [part.model_dump_json(exclude_unset=True) async for part in stream]
    return [ChatCompletionChunk.model_validate_json(raw, strict=True) for raw in raws]


def extra(**fields: Any) -> dict[str, Any]:
    """Fields that are not in OpenAI's API."""
    return {**ASK["extra_body"], **fields}


def joined(parts: list[dict[str, Any]], index: int = 0) -> dict[str, Any]:
    """The choice assembled from the chunks of a completion."""
    whole: dict[str, Any] = {"text": "", "finish_reason": None, "logprobs": None, "token_ids": []}
    for choice in (one for part in parts for one in part["choices"] if one["index"] == index):
        whole["text"] += choice["text"]
        whole["finish_reason"] = choice["finish_reason"] or whole["finish_reason"]
        whole["token_ids"] += choice.get("token_ids") or []
        for name, values in (choice["logprobs"] or {}).items():
            whole["logprobs"] = whole["logprobs"] or {}
            whole["logprobs"][name] = whole["logprobs"].get(name, []) + values
    return whole


def same_logprobs(one: Any, other: Any) -> bool:
    return bool(json.loads(one.model_dump_json()) == other)


# Common fields


async def test_a_completion_matches_the_schema(client: AsyncOpenAI, tokenizer: Tokenizer) -> None:
    whole = await complete(client)
    assert beyond(whole) == {"choices.stop_reason"}
    assert whole.usage is not None
    assert whole.usage.prompt_tokens == len(tokenizer.encode(PROMPT))
    parts = await streamed(client, stream_options={"include_usage": True})
    assert (joined(parts)["text"], joined(parts)["finish_reason"]) == (whole.choices[0].text, "length")
    assert [part["usage"] for part in parts[:-1]] == [None] * (len(parts) - 1)
    assert parts[-1]["choices"] == []
    assert Completion.construct(**parts[-1]).usage == whole.usage
    assert {part["id"] for part in parts} == {parts[0]["id"]}


async def test_a_chat_completion_matches_the_schema(client: AsyncOpenAI) -> None:
    whole = await chat(client)
    assert beyond(whole) == {"choices.stop_reason"}
    parts = await chat_streamed(client, stream_options={"include_usage": True})
    assert (parts[0].choices[0].delta.role, parts[0].choices[0].delta.content) == ("assistant", "")
    stated = "".join(choice.delta.content or "" for part in parts for choice in part.choices)
    assert stated == whole.choices[0].message.content
    ends = [choice.finish_reason for part in parts for choice in part.choices]
    assert (ends[-1], set(ends[:-1])) == ("length", {None})
    assert parts[-1].usage == whole.usage
    assert {name for part in parts for name in beyond(part)} == {"choices.stop_reason"}


async def test_the_stream_assembled_by_the_client_is_the_whole_answer(client: AsyncOpenAI) -> None:
    free = (await chat(client)).choices[0].message.content or ""
    # The client treats a truncated answer as an error.
    asked: dict[str, Any] = {**ASK, "messages": CHAT, "logprobs": True, "top_logprobs": 2, "stop": [free[-3:]]}
    whole = await chat(client, **asked)
    async with client.chat.completions.stream(**asked, stream_options={"include_usage": True}) as stream:
        kinds = {event.type async for event in stream}
        final = await stream.get_final_completion()
    assert {"chunk", "content.delta", "content.done", "logprobs.content.delta", "logprobs.content.done"} <= kinds
    assert final.choices[0].message.content == whole.choices[0].message.content
    assert final.choices[0].finish_reason == "stop"
    assert final.choices[0].logprobs is not None
    assert whole.choices[0].logprobs is not None
    assert final.choices[0].logprobs.content == whole.choices[0].logprobs.content
    assert final.usage == whole.usage


async def test_several_prompts_and_answers_are_numbered(client: AsyncOpenAI) -> None:
    whole = await complete(client, prompt=["a core", "a node"], n=2)
    assert [choice.index for choice in whole.choices] == [0, 1, 2, 3]
    parts = await streamed(client, prompt=["a core", "a node"], n=2)
    assert [joined(parts, index)["text"] for index in range(4)] == [choice.text for choice in whole.choices]
    chats = await chat(client, n=2, temperature=1.0, seed=5)
    assert len({choice.message.content for choice in chats.choices}) == 2


async def test_the_model_list_matches_the_schema(client: AsyncOpenAI, served: Serving) -> None:
    raw = await served.http.get("/v1/models")
    assert raw.json()["object"] == "list"
    models = (await client.models.list()).data
    assert [model.id for model in models] == [MODEL, "alias"]
    for model in models:
        read = Model.model_validate_json(model.model_dump_json(exclude_unset=True), strict=True)
        assert beyond(read) == {"root", "parent", "max_model_len", "sampling"}
        assert read.root == MODEL  # type: ignore[attr-defined]
        assert read.max_model_len == LIMITS.max_model_length  # type: ignore[attr-defined]
        assert (await client.models.retrieve(model.id)).model_dump() == model.model_dump()
    with pytest.raises(openai.NotFoundError):
        await client.models.retrieve("other")


async def test_errors_raise_the_exceptions_of_the_client_with_field_and_code(client: AsyncOpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as wrong:
        await client.completions.create(**{**ASK, "prompt": PROMPT, "temperature": -1})
    assert (wrong.value.param, wrong.value.type) == ("temperature", "invalid_request_error")
    with pytest.raises(openai.NotFoundError) as unknown:
        await client.chat.completions.create(**{**ASK, "messages": CHAT, "model": "other"})
    assert (unknown.value.param, unknown.value.code) == ("model", "model_not_found")
    with pytest.raises(openai.BadRequestError) as tools:
        await client.chat.completions.create(**{**ASK, "messages": CHAT, "tools": [{"type": "function"}]})
    assert tools.value.param == "tools[0].function"


async def test_unknown_fields_are_ignored(client: AsyncOpenAI) -> None:
    plain = await complete(client)
    more = await complete(
        client,
        extra_body=extra(colour="red", stream_options={"x": 1, "include_usage": None}) | {"stream_options": None},
    )
    assert more.choices == plain.choices
    messages: Any = [{**CHAT[0], "mood": "good", "content": [{"type": "text", "text": "a", "cache_control": {}}]}]
    assert (await chat(client, messages=messages)).choices


# Log-probabilities


@pytest.mark.parametrize("alternatives", [0, 1, 5])
async def test_a_completion_returns_token_logprobs(
    client: AsyncOpenAI, tokenizer: Tokenizer, alternatives: int
) -> None:
    whole = await complete(client, logprobs=alternatives, extra_body=extra(return_token_ids=True))
    choice = whole.choices[0]
    reported: Any = choice.logprobs
    assert whole.usage is not None
    ids = choice.token_ids  # type: ignore[attr-defined]
    assert len(ids) == len(reported.tokens) == whole.usage.completion_tokens == 24
    for at, token_id in enumerate(ids):
        raw = tokenizer.token_bytes(token_id)
        try:
            assert reported.tokens[at] == raw.decode()
            if not tokenizer.is_special(token_id):
                assert choice.text[reported.text_offset[at] :].startswith(raw.decode())
        except UnicodeDecodeError:
            assert reported.tokens[at] == "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
        top = reported.top_logprobs[at]
        assert top[reported.tokens[at]] == reported.token_logprobs[at]
        assert len(top) in {max(alternatives, 1), alternatives + 1}
    assert reported.text_offset == sorted(reported.text_offset)
    parts = await streamed(client, logprobs=alternatives, extra_body=extra(return_token_ids=True))
    assert joined(parts)["token_ids"] == ids
    assert same_logprobs(reported, joined(parts)["logprobs"])
    plain = await complete(client)
    assert plain.choices[0].text == choice.text


@pytest.mark.parametrize("alternatives", [0, 3])
async def test_a_chat_returns_token_logprobs_and_bytes(client: AsyncOpenAI, alternatives: int) -> None:
    whole = await chat(client, logprobs=True, top_logprobs=alternatives, extra_body=extra(skip_special_tokens=False))
    choice = whole.choices[0]
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    assert whole.usage is not None
    assert len(choice.logprobs.content) == whole.usage.completion_tokens
    stated = b"".join(bytes(token.bytes or ()) for token in choice.logprobs.content)
    assert stated.decode(errors="replace") == choice.message.content
    for token in choice.logprobs.content:
        assert token.token == bytes(token.bytes or ()).decode(errors="replace")
        assert len(token.top_logprobs) == alternatives
        values = [one.logprob for one in token.top_logprobs]
        assert values == sorted(values, reverse=True)
    parts = await chat_streamed(
        client, logprobs=True, top_logprobs=alternatives, extra_body=extra(skip_special_tokens=False)
    )
    streams = [c.logprobs.content for part in parts for c in part.choices if c.logprobs and c.logprobs.content]
    assert [token for tokens in streams for token in tokens] == choice.logprobs.content


async def test_without_top_logprobs_a_chat_returns_only_chosen_tokens(client: AsyncOpenAI) -> None:
    whole = await chat(client, logprobs=True)
    assert whole.choices[0].logprobs is not None
    assert all(token.top_logprobs == [] for token in whole.choices[0].logprobs.content or ())


@pytest.mark.parametrize("included", [False, True])
async def test_tokens_after_a_stop_string_are_not_returned(client: AsyncOpenAI, included: bool) -> None:
    free = (await complete(client)).choices[0].text
    stop = free[9:12]
    more = extra(return_token_ids=True, include_stop_str_in_output=included)
    whole = await complete(client, stop=[stop], logprobs=1, extra_body=more)
    choice = whole.choices[0]
    at = free.index(stop)
    assert (choice.text, choice.finish_reason) == (free[: at + len(stop) if included else at], "stop")
    assert choice.stop_reason == stop  # type: ignore[attr-defined]
    assert choice.logprobs is not None
    assert choice.logprobs.tokens
    assert whole.usage is not None
    ids = choice.token_ids  # type: ignore[attr-defined]
    assert len(choice.logprobs.tokens) == len(ids) == whole.usage.completion_tokens < 24
    parts = await streamed(client, stop=[stop], logprobs=1, extra_body=more)
    assert joined(parts) | {"logprobs": None} == {
        "text": choice.text, "finish_reason": "stop", "logprobs": None, "token_ids": ids,
    }  # fmt: skip
    assert same_logprobs(choice.logprobs, joined(parts)["logprobs"])


async def test_tokens_after_the_stop_string_in_the_same_step_are_not_returned(model_dir: Path) -> None:
    async with serving(model_dir, limits=replace(LIMITS, max_drafts=3)) as served, client_of(served) as client:
        free = (await complete(client)).choices[0].text
        for at in range(6, 12):
            whole = await complete(
                client, stop=[free[at : at + 2]], logprobs=0, extra_body=extra(return_token_ids=True)
            )
            choice = whole.choices[0]
            assert choice.text == free[: free.index(free[at : at + 2])]
            assert whole.usage is not None
            assert choice.logprobs is not None
            ids = choice.token_ids  # type: ignore[attr-defined]
            assert whole.usage.completion_tokens == len(ids) == len(choice.logprobs.tokens or ())


async def test_a_stop_token_has_logprobs_and_no_text(client: AsyncOpenAI, tokenizer: Tokenizer) -> None:
    free = await complete(client, extra_body=extra(return_token_ids=True))
    ids = free.choices[0].token_ids  # type: ignore[attr-defined]
    stop = next(one for one in ids[6:] if one not in ids[:6])
    more = extra(return_token_ids=True, stop_token_ids=[stop])
    choice = (await complete(client, logprobs=0, extra_body=more)).choices[0]
    end = ids.index(stop) + 1
    assert (choice.token_ids, choice.stop_reason) == (ids[:end], stop)  # type: ignore[attr-defined]
    assert choice.logprobs is not None
    assert len(choice.logprobs.tokens or ()) == len(choice.logprobs.text_offset or ()) == end
    assert joined(await streamed(client, extra_body=more))["token_ids"] == ids[:end]


async def test_tokens_can_be_returned_as_ids(client: AsyncOpenAI) -> None:
    more = extra(return_token_ids=True, return_tokens_as_token_ids=True)
    choice = (await complete(client, logprobs=2, extra_body=more)).choices[0]
    assert choice.logprobs is not None
    names = [f"token_id:{token_id}" for token_id in choice.token_ids]  # type: ignore[attr-defined]
    assert choice.logprobs.tokens == names
    assert all(name in top for name, top in zip(names, choice.logprobs.top_logprobs or (), strict=True))
    stated = await chat(client, logprobs=True, extra_body=more)
    assert stated.choices[0].logprobs is not None
    reported = stated.choices[0].logprobs.content or []
    ids = stated.choices[0].token_ids  # type: ignore[attr-defined]
    assert [token.token for token in reported] == [f"token_id:{token_id}" for token_id in ids]


# Echoed prompts


async def test_an_echo_starts_with_the_prompt(client: AsyncOpenAI, tokenizer: Tokenizer) -> None:
    plain = (await complete(client)).choices[0].text
    for prompt in (PROMPT, list(tokenizer.encode(PROMPT))):
        whole = await complete(client, prompt=prompt, echo=True)
        assert whole.choices[0].text == PROMPT + plain
        assert joined(await streamed(client, prompt=prompt, echo=True))["text"] == PROMPT + plain
    many = await complete(client, prompt=["a core", "a node"], n=2, echo=True)
    assert [choice.text[:6] for choice in many.choices] == ["a core", "a core", "a node", "a node"]


@pytest.mark.parametrize("as_ids", [False, True])
@pytest.mark.parametrize("max_tokens", [0, 4])
async def test_an_echo_returns_prompt_logprobs_too(
    client: AsyncOpenAI, tokenizer: Tokenizer, as_ids: bool, max_tokens: int
) -> None:
    ids = tokenizer.encode(PROMPT)
    asked = {"prompt": list(ids) if as_ids else PROMPT, "echo": True, "logprobs": 2, "max_tokens": max_tokens}
    whole = await complete(client, **asked)
    choice = whole.choices[0]
    assert whole.usage is not None
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (len(ids), max_tokens)
    assert choice.finish_reason == "length"
    reported: Any = choice.logprobs
    assert len(reported.tokens) == len(reported.text_offset) == len(reported.token_logprobs) == len(ids) + max_tokens
    assert (reported.token_logprobs[0], reported.top_logprobs[0]) == (None, None)
    assert all(isinstance(value, float) for value in reported.token_logprobs[1:])
    for at in range(1, len(ids)):
        before = b"".join(map(tokenizer.token_bytes, ids[1:at]))
        assert reported.text_offset[at] == len(before.decode(errors="ignore"))
    if max_tokens:
        assert reported.text_offset[len(ids)] == len(PROMPT)
    else:
        assert choice.text == PROMPT
    assert joined(await streamed(client, **asked)) | {"logprobs": None} == {
        "text": choice.text, "finish_reason": "length", "logprobs": None, "token_ids": [],
    }  # fmt: skip
    assert joined(await streamed(client, **asked))["logprobs"] == json.loads(reported.model_dump_json())


async def test_prompt_logprobs_have_the_form_of_vllm(client: AsyncOpenAI, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(PROMPT)
    whole = await complete(client, n=2, extra_body=extra(prompt_logprobs=2, return_token_ids=True))
    for choice in whole.choices:
        check_prompt_logprobs(choice.prompt_logprobs, ids, tokenizer)  # type: ignore[attr-defined]
        assert choice.prompt_token_ids == list(ids)  # type: ignore[attr-defined]
    stated = await chat(client, extra_body=extra(prompt_logprobs=2, return_token_ids=True))
    asked = stated.prompt_token_ids  # type: ignore[attr-defined]
    assert stated.usage is not None
    assert len(asked) == stated.usage.prompt_tokens
    check_prompt_logprobs(stated.prompt_logprobs, asked, tokenizer)  # type: ignore[attr-defined]
    assert beyond(stated) == {"choices.stop_reason", "choices.token_ids", "prompt_logprobs", "prompt_token_ids"}


@pytest.mark.parametrize("more", [{}, {"echo": True}, {"echo": True, "logprobs": 0}])
async def test_prompt_logprobs_are_computed_once_unless_every_answer_echoes(
    client: AsyncOpenAI,
    served: Serving,
    tokenizer: Tokenizer,
    monkeypatch: pytest.MonkeyPatch,
    more: dict[str, Any],
) -> None:
    asked: list[tuple[int, int | None]] = []
    add = served.engine.engine.add

    def seen(request: Request) -> None:
        asked.append((request.sampling.choice, request.sampling.prompt_logprobs))
        add(request)

    monkeypatch.setattr(served.engine.engine, "add", seen)
    prompts = [PROMPT, "a node"]
    whole = await complete(client, prompt=prompts, n=2, extra_body=extra(prompt_logprobs=2), **more)
    assert asked == 2 * [(0, 2), (1, 2 if "logprobs" in more else None)]
    for index, choice in enumerate(whole.choices):
        ids = tokenizer.encode(prompts[index // 2])
        check_prompt_logprobs(choice.prompt_logprobs, ids, tokenizer)  # type: ignore[attr-defined]


def check_prompt_logprobs(reported: Any, ids: Any, tokenizer: Tokenizer) -> None:
    assert len(reported) == len(ids)
    assert reported[0] is None
    for token_id, entry in zip(ids[1:], reported[1:], strict=True):
        own = entry[str(token_id)]
        assert set(own) == {"logprob", "rank", "decoded_token"}
        assert own["decoded_token"] == tokenizer.token_bytes(token_id).decode(errors="replace")
        assert own["rank"] >= 1
        assert 2 <= len(entry) <= 3


async def test_prompt_token_ids_are_sent_with_the_first_chunk_only(client: AsyncOpenAI, tokenizer: Tokenizer) -> None:
    parts = await streamed(client, extra_body=extra(return_token_ids=True))
    reported = [choice.get("prompt_token_ids") for part in parts for choice in part["choices"]]
    assert reported == [list(tokenizer.encode(PROMPT)), *[None] * (len(reported) - 1)]
    chats = await chat_streamed(client, extra_body=extra(return_token_ids=True))
    beside = [(part.model_extra or {}).get("prompt_token_ids") for part in chats]
    assert beside[0]
    assert set(map(str, beside[1:])) == {"None"}


async def test_a_prompt_is_truncated_at_its_start(client: AsyncOpenAI, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(PROMPT)
    for prompt, kept in ((PROMPT, [ids[0], *ids[-3:]]), (list(ids), list(ids[-4:]))):
        more = extra(truncate_prompt_tokens=4, return_token_ids=True)
        cut = await complete(client, prompt=prompt, extra_body=more)
        assert cut.choices[0].prompt_token_ids == kept  # type: ignore[attr-defined]
        whole = await complete(client, prompt=kept)
        assert cut.choices[0].text == whole.choices[0].text
    long = "a core holds " * 400
    fits = await complete(client, prompt=long, extra_body=extra(truncate_prompt_tokens=-1))
    assert fits.usage is not None
    assert fits.usage.prompt_tokens == LIMITS.max_model_length - 24
    repeated = await complete(client, prompt=long, echo=True, extra_body=extra(truncate_prompt_tokens=3))
    assert repeated.choices[0].text.startswith(tokenizer.decode(tokenizer.encode(long)[-2:]))
    chats = await chat(client, messages=[{"role": "user", "content": long}], extra_body=extra(truncate_prompt_tokens=9))
    assert chats.usage is not None
    assert chats.usage.prompt_tokens == 9


# Chats


async def test_developer_messages_parts_and_reasoning_are_converted_for_the_template(
    served: Serving, client: AsyncOpenAI
) -> None:
    async def tokens(*messages: Any, **asked: Any) -> list[int]:
        answer = await served.http.post("/tokenize", json={"messages": messages, **asked})
        assert answer.status_code == 200, answer.text
        found: list[int] = answer.json()["tokens"]
        return found

    user = {"role": "user", "content": "a\nb"}
    parts = {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}
    assert await tokens(parts) == await tokens(user)
    developer, system = ({"role": role, "content": "Be brief."} for role in ("developer", "system"))
    assert await tokens(developer, user) == await tokens(system, user)
    earlier = (await chat(client)).choices[0].message.model_dump()
    assert (await chat(client, messages=[*CHAT, earlier, *CHAT])).choices


async def test_the_last_message_can_be_continued_over_http(
    served: Serving, client: AsyncOpenAI, tokenizer: Tokenizer
) -> None:
    begun: Any = [*CHAT, {"role": "assistant", "content": "A device holds"}]
    more = extra(continue_final_message=True, return_token_ids=True)
    for asked in (more, {**more, "add_generation_prompt": False}):
        stated = await chat(client, messages=begun, extra_body=asked)
        prompt = tokenizer.decode(stated.prompt_token_ids, skip_special_tokens=False)  # type: ignore[attr-defined]
        assert prompt.endswith("<|start|>assistant\nA device holds")
        assert prompt.count("<|begin|>") == 1
    open_ended = {"messages": begun, "continue_final_message": True}
    reported = (await served.http.post("/tokenize", json=open_ended)).json()["tokens"]
    assert reported == stated.prompt_token_ids  # type: ignore[attr-defined]


async def test_both_names_of_the_token_limit_may_be_equal(client: AsyncOpenAI) -> None:
    stated = await chat(client, max_tokens=5, max_completion_tokens=5)
    assert stated.usage is not None
    assert stated.usage.completion_tokens == 5


# Reasoning models


THINKS = (
    "{{ bos_token }}{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n"
    "{% if opened is defined %}<think>\n{% elif enable_thinking is defined and not enable_thinking %}"
    "<think>\n\n</think>\n\n{% endif %}{% endif %}{{ '' if reasoning_effort is undefined else reasoning_effort }}"
)


@pytest.fixture
def says(monkeypatch: pytest.MonkeyPatch, tokenizer: Tokenizer) -> Callable[[str], None]:
    """Makes the model generate the given text."""

    def say(text: str) -> None:
        ids = (*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id)
        monkeypatch.setattr(
            strict_backend, "next_token", lambda context, sampling, position, **_: ids[position % len(ids)]
        )

    return say


async def thinking(model_dir: Path, parser: Any = "qwen3") -> Any:
    return serving(model_dir, text=TextOptions(reasoning_parser=parser, chat_template=THINKS))


@pytest.mark.parametrize(
    ("text", "variables", "thought", "content"),
    [
        ("<think>\na ☃ core</think>\n\na naïve node", {}, "\na ☃ core", "\n\na naïve node"),
        ("a core</think>a node", {"opened": True}, "a core", "a node"),
        ("a node", {"enable_thinking": False}, None, "a node"),
        ("a node", {}, None, "a node"),
        ("<think>a core that", {}, "a core that", None),
    ],
)
async def test_reasoning_is_returned_beside_the_content(
    model_dir: Path,
    says: Callable[[str], None],
    *,
    text: str,
    variables: Any,
    thought: str | None,
    content: str | None,
) -> None:
    says(text)
    async with await thinking(model_dir) as served, client_of(served) as client:
        ask: dict[str, Any] = {"max_tokens": 40, "extra_body": {"chat_template_kwargs": variables}}
        whole = await chat(client, **ask, logprobs=True)
        message = whole.choices[0].message
        assert (message.reasoning, message.reasoning_content, message.content) == (thought, thought, content)  # type: ignore[attr-defined]
        assert whole.usage is not None
        assert whole.usage.completion_tokens_details is not None
        counted = whole.usage.completion_tokens_details.reasoning_tokens or 0
        assert (counted > 0) == (thought is not None)
        assert counted <= whole.usage.completion_tokens
        parts = await chat_streamed(client, **ask, logprobs=True, stream_options={"include_usage": True})
        deltas = [choice.delta for part in parts for choice in part.choices]
        assert "".join(delta.content or "" for delta in deltas) == (content or "")
        extras = [delta.model_extra or {} for delta in deltas]
        assert "".join(one.get("reasoning") or "" for one in extras) == (thought or "")
        assert "".join(one.get("reasoning_content") or "" for one in extras) == (thought or "")
        assert parts[-1].usage == whole.usage
        assert whole.choices[0].logprobs is not None
        assert len(whole.choices[0].logprobs.content or ()) == whole.usage.completion_tokens


async def test_reasoning_is_streamed_as_it_arrives(model_dir: Path, says: Callable[[str], None]) -> None:
    says("<think>a ☃ core holds</think>a node")
    options = TextOptions(reasoning_parser="qwen3", chat_template=THINKS)
    async with serving(model_dir, text=options, paced=True) as served, client_of(served) as client:
        asked = asyncio.create_task(chat_streamed(client, max_tokens=40, extra_body={}))
        await served.answer_token_by_token(asked)
        deltas = [choice.delta for part in asked.result() for choice in part.choices]
        assert (deltas[0].role, deltas[0].content) == ("assistant", "")
        thoughts = [(delta.model_extra or {}).get("reasoning") for delta in deltas]
        again = [(delta.model_extra or {}).get("reasoning_content") for delta in deltas]
        assert thoughts == again
        assert "".join(filter(None, thoughts)) == "a ☃ core holds"
        assert len(list(filter(None, thoughts))) > 2
        assert "".join(delta.content or "" for delta in deltas) == "a node"
        # Only one of them: some clients stop at the first that they find.
        assert not any(thought and delta.content for thought, delta in zip(thoughts, deltas, strict=True))


async def test_reasoning_can_be_omitted_and_its_effort_reaches_the_template(
    model_dir: Path, says: Callable[[str], None]
) -> None:
    says("<think>a core</think>a node")
    async with await thinking(model_dir, "deepseek_r1") as served, client_of(served) as client:
        shown = await chat(client, reasoning_effort="low", extra_body={"return_token_ids": True})
        hidden = await chat(client, extra_body={"include_reasoning": False})
        assert shown.choices[0].message.content == hidden.choices[0].message.content == "a node"
        assert beyond(hidden) == {"choices.stop_reason"}
        assert shown.usage is not None
        assert hidden.usage is not None
        assert shown.usage.completion_tokens == hidden.usage.completion_tokens
        reported = load_tokenizer(model_dir).decode(shown.prompt_token_ids)  # type: ignore[attr-defined]
        assert reported.endswith("low")
        parts = await chat_streamed(client, extra_body={"include_reasoning": False})
        assert not [delta for part in parts for delta in beyond(part) if "reasoning" in delta]


async def test_a_parser_whose_markers_the_tokenizer_hides_is_refused_at_start(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model")
    path = folder / "tokenizer_config.json"
    entry = {"400": {"content": "<think>", "special": True}}
    path.write_text(json.dumps(json.loads(path.read_text()) | {"added_tokens_decoder": entry}))
    with pytest.raises(FatalError, match=r"text\.reasoningParser: <think> is a special token"):
        load_text(folder, TextOptions(reasoning_parser="qwen3"))
