"""The table of sampling modes against a running server: each parameter, neutral and set, in each mode, over HTTP."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from helpers.chat_model import write_chat_model
from helpers.front_end import LIMITS, Serving, serving
from helpers.tool_templates import HERMES, tool
from neuron_runtime.apis.openai.body import ChatBody, CompletionBody
from neuron_runtime.config import TextOptions
from neuron_runtime.core import SAMPLING_MODES
from neuron_runtime.not_built import is_neutral
from neuron_runtime.requests.parameters import Where, parameters_of

ROWS = parameters_of(ChatBody) | parameters_of(CompletionBody)
PARAMETERS = {name: row for name, row in ROWS.items() if row.acts}
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"

ASKING: dict[str, Any] = {
    "temperature": 0.5,
    "top_k": 5,
    "top_p": 0.5,
    "min_p": 0.1,
    "seed": 0,
    "repetition_penalty": 1.1,
    "presence_penalty": -0.5,
    "frequency_penalty": 0.5,
    "logit_bias": {"5": 1.0},
    "allowed_token_ids": [5, 6],
    "bad_words": ["device"],
    "min_tokens": 1,
    "logprobs": 0,
    "top_logprobs": 2,
    "prompt_logprobs": 0,
    "max_tokens": 3,
    "max_completion_tokens": 3,
    "n": 2,
    "response_format": {"type": "json_object"},
    "structured_outputs": {"regex": "[a-c]+"},
    "guided_json": {"type": "object"},
    "guided_regex": "[a-c]+",
    "guided_choice": ["a core"],
    "guided_grammar": 'start: "a"',
    "tool_choice": "required",
    "stop": ["x"],
    "stop_token_ids": [5],
    "ignore_eos": True,
    "include_stop_str_in_output": True,
    "echo": True,
}
"""A value with an effect for every parameter of the table."""

IN_CHATS = ("top_logprobs", "max_completion_tokens", "tool_choice")

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chat_model(tmp_path_factory.mktemp("model"), max_length=1024)


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=SAMPLING_MODES)
async def served(model_dir: Path, request: pytest.FixtureRequest) -> AsyncIterator[Serving]:
    limits = replace(LIMITS, max_model_length=1024, max_step_tokens=1024, num_blocks=256, sampling=request.param)
    limits = replace(limits, reports_prompt_logprobs=request.param == "Host")
    if request.param != "Host":
        limits = replace(limits, max_top_k=8, top_p_keeps_crossing=False)
    async with serving(model_dir, limits=limits, text=TextOptions(chat_template=HERMES)) as one:
        yield one


async def ask(served: Serving, name: str, value: Any) -> tuple[int, dict[str, Any]]:
    body: dict[str, Any] = {"max_tokens": 2, name: value}
    if name in IN_CHATS:
        path = CHAT
        body = {"messages": [{"role": "user", "content": "a core"}], **body}
        if name == "top_logprobs":
            body["logprobs"] = bool(value)
        elif name == "tool_choice":
            body |= {"tools": [tool("f")]} if value == "required" else {}
        else:
            del body["max_tokens"]
    else:
        path, body = COMPLETIONS, {"prompt": "a core", **body}
    answer = await served.http.post(path, json=body)
    return answer.status_code, answer.json()


async def test_every_parameter_of_the_table_is_requested() -> None:
    assert set(ASKING) == set(PARAMETERS)
    for name, value in ASKING.items():
        assert not is_neutral(value, PARAMETERS[name].neutral)


@pytest.mark.parametrize("name", PARAMETERS)
async def test_the_server_accepts_and_refuses_as_the_table_declares(served: Serving, name: str) -> None:
    mode, parameter = served.backend.limits.sampling, PARAMETERS[name]
    for neutral in (None, *parameter.neutral):
        status, answer = await ask(served, name, neutral)
        assert status == 200, answer
    status, answer = await ask(served, name, ASKING[name])
    if parameter.where(mode) is not Where.REFUSED:
        assert status == 200, answer
        return
    assert status == 400
    error = answer["error"]
    # Chat requests logprobs with two fields; either one stands for both.
    assert error["param"] in ({name} if name != "top_logprobs" else {"logprobs", "top_logprobs"})
    assert f"is not supported with {mode} sampling" in error["message"]
    for other in SAMPLING_MODES:
        assert (f"`{other}`" in error["message"]) == (parameter.where(other) is not Where.REFUSED)


async def test_a_top_k_beyond_the_device_is_served_where_the_host_can_sample(served: Serving) -> None:
    limits = served.backend.limits
    (model,) = (await served.http.get("/v1/models")).json()["data"][:1]
    device = limits.sampling != "Host"
    assert model["sampling"] == {
        "mode": limits.sampling,
        "max_top_k": 8 if device else 0,
        "top_p_keeps_crossing": not device,
    }
    for top_k in (8, 9, 10**6):
        status, answer = await ask(served, "top_k", top_k)
        if limits.sampling == "Device" and top_k > 8:
            assert (status, answer["error"]["param"]) == (400, "top_k")
            assert "at most 8 with Device sampling" in answer["error"]["message"]
            assert "needs `DeviceWithLogits` or `Host`" in answer["error"]["message"]
        else:
            assert status == 200, answer


async def test_an_engine_still_serves_after_many_refusals(served: Serving) -> None:
    status, answer = await ask(served, "temperature", 0)
    assert status == 200
    assert answer["usage"]["completion_tokens"] == 2


async def test_a_device_that_is_greedy_alone_refuses_a_temperature_and_has_0_for_a_default(model_dir: Path) -> None:
    limits = replace(LIMITS, max_model_length=1024, max_step_tokens=1024, num_blocks=256, sampling="Device")
    async with serving(model_dir, limits=replace(limits, greedy_only=True)) as one:
        status, body = await ask(one, "temperature", 0.7)
        assert status == 400
        assert "`temperature` must be 0, because the device verifies drafts" in body["error"]["message"]
        for neutral in (0, 0.0, None):
            status, _ = await ask(one, "temperature", neutral)
            assert status == 200
        status, _ = await ask(one, "top_p", 0.5)
        assert status == 200
