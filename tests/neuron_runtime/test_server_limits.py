"""Limits of one request: every refusal names the field and the limit."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from helpers.front_end import Serving, make_model, serving
from neuron_runtime.commands.command_line import build_parser, main
from neuron_runtime.commands.serve import configuration
from neuron_runtime.config import RuntimeConfig, ServerOptions, parse_config
from neuron_runtime.errors import ExitCode, InvalidConfig

pytestmark = pytest.mark.asyncio(loop_scope="module")

CHAT = [{"role": "user", "content": "hi"}]
LIMITS = ServerOptions(access_log=False, max_body_bytes=1000, max_output_tokens=7, max_prompts=3, max_choices=4)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(model_dir: Path) -> AsyncIterator[Serving]:
    async with serving(model_dir, options=LIMITS) as one:
        yield one


@pytest.mark.parametrize(
    ("path", "body", "field", "says"),
    [
        (
            "/v1/completions",
            {"prompt": "a", "max_tokens": 8},
            "max_tokens",
            "`max_tokens` must be at most 7 on this server, got 8",
        ),
        ("/v1/chat/completions", {"messages": CHAT, "max_tokens": 8}, "max_tokens", "at most 7"),
        ("/v1/chat/completions", {"messages": CHAT, "max_completion_tokens": 8}, "max_completion_tokens", "at most 7"),
        ("/v1/completions", {"prompt": ["a"] * 4}, "prompt", "`prompt` must have at most 3 prompts, got 4"),
        ("/v1/completions", {"prompt": [[5]] * 4}, "prompt", "at most 3 prompts"),
        ("/v1/completions", {"prompt": ["a"] * 3, "n": 2}, "n", "prompts times `n` must be at most 4, got 6"),
        ("/v1/chat/completions", {"messages": CHAT, "n": 5}, "n", "at most 4"),
    ],
)
async def test_requests_beyond_the_limits_are_refused(
    served: Serving, path: str, body: dict[str, Any], field: str, says: str
) -> None:
    answer = await served.http.post(path, json=body)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == field
    assert says in error["message"]


@pytest.mark.parametrize(
    ("path", "body", "num_tokens"),
    [
        ("/v1/completions", {"prompt": ["a", "b"], "n": 2, "max_tokens": 7}, 4 * 7),
        ("/v1/completions", {"prompt": "a"}, 7),
        ("/v1/chat/completions", {"messages": CHAT}, 7),
        ("/v1/completions", {"prompt": list(range(5, 105)), "max_tokens": 1}, 1),
    ],
)
async def test_requests_at_the_limits_are_served_and_the_default_length_is_the_limit(
    served: Serving, path: str, body: dict[str, Any], num_tokens: int
) -> None:
    answer = await served.http.post(path, json=body | {"ignore_eos": True})
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["completion_tokens"] == num_tokens


async def test_a_body_over_the_limit_is_refused_and_the_connection_closes(served: Serving) -> None:
    for size, status in ((1000, 400), (1001, 413), (4001, 413)):
        answer = await served.http.post("/v1/completions", content=b" " * size)
        assert answer.status_code == status
    assert answer.json()["error"]["message"] == "the body has more than 1000 bytes"
    assert answer.headers["connection"] == "close"


async def test_a_compressed_body_is_refused_naming_its_encoding(served: Serving) -> None:
    body = b'{"prompt": "a"}'
    for encoding, status in (("identity", 200), ("gzip", 415), ("br, gzip", 415)):
        answer = await served.http.post("/v1/completions", content=body, headers={"content-encoding": encoding})
        assert answer.status_code == status
    assert "br, gzip" in answer.json()["error"]["message"]
    assert answer.json()["error"]["code"] == "body_encoded"


async def test_a_body_without_declared_length_is_counted(served: Serving) -> None:
    url = served.http.base_url
    reader, writer = await asyncio.open_connection(url.host, url.port)
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    writer.write(head + (b"3e8\r\n" + b" " * 1000 + b"\r\n") * 6)
    reported, _, body = (await reader.read()).partition(b"\r\n\r\n")
    writer.close()
    assert reported.startswith(b"HTTP/1.1 413 ")
    assert json.loads(body)["error"]["code"] == "body_too_large"


def configured(*flags: str) -> RuntimeConfig:
    return configuration(build_parser().parse_args(["serve", "org/m", *flags]))


async def test_flags_become_options_of_the_document() -> None:
    assert configured().server == ServerOptions()
    flags = "--max-body-bytes 1 --max-output-tokens 2 --max-prompts 3 --max-choices 4 --max-log-len 5 --log-prompts"
    assert configured(*flags.split(), "--no-access-log").server == ServerOptions(
        access_log=False,
        log_prompts=True,
        max_logged_characters=5,
        max_body_bytes=1,
        max_output_tokens=2,
        max_prompts=3,
        max_choices=4,
    )
    assert configured("--disable-uvicorn-access-log").server.access_log is False
    assert configured("--access-log").server.access_log is True
    for origins in ('["https://a.example", "http://b:1"]', "https://a.example"):
        assert configured("--allowed-origins", origins).server.allowed_origins[0] == "https://a.example"


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--max-choices", "0"], "--max-choices ($.server.maxChoices): Expected `int` >= 1, got 0"),
        (["--max-output-tokens", "-1"], "--max-output-tokens ($.server.maxOutputTokens): Expected `int` >= 0, got -1"),
        (
            ["--allowed-origins", "chat.example"],
            "--allowed-origins ($.server.allowedOrigins): 'chat.example' is not an origin",
        ),
        (["--allowed-origins", "[https://a]"], "'[https://a]' is not an origin: write `https://host`"),
        (["--allowed-origins", '["https://a/b"]'], "'https://a/b' is not an origin"),
        (
            ["--otlp-traces-endpoint", "collector"],
            "--otlp-traces-endpoint ($.server.otlpTracesEndpoint): must be a URL",
        ),
    ],
)
async def test_an_invalid_option_is_named_by_its_flag(
    flags: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", "org/m", *flags]) == ExitCode.INVALID_ENGINE_CONFIG
    assert says in capsys.readouterr().err


async def test_an_unknown_option_of_the_document_is_named() -> None:
    document = {"version": 1, "model": {"uri": "hf://a/b"}, "servedNames": ["b"], "server": {"apiKey": "sk-1"}}
    with pytest.raises(InvalidConfig, match=r"\$\.server: .*apiKey") as refusal:
        parse_config(json.dumps(document).encode())
    assert "sk-1" not in str(refusal.value)
