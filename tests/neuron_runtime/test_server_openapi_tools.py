"""Tools on the published document: a schema fuzzer finds no contradiction, and a generated client works."""

from __future__ import annotations

import asyncio
import json
import re
import sys
from collections.abc import AsyncIterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from helpers.front_end import MODEL, Serving, make_model, serving

BIN = Path(sys.executable).parent


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(model_dir: Path) -> AsyncIterator[Serving]:
    async with serving(model_dir) as one:
        yield one


pytestmark = pytest.mark.asyncio(loop_scope="module")


async def output(folder: Path, *command: str | Path) -> str:
    """The output of a command, which must succeed."""
    process = await asyncio.create_subprocess_exec(
        *command, cwd=folder, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    printed = (await process.communicate())[0].decode()
    assert process.returncode == 0, printed
    return printed


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("phases", "num_examples"), [("fuzzing", 3), pytest.param("coverage,fuzzing", 50, marks=pytest.mark.long)]
)
async def test_a_schema_fuzzer_finds_no_undeclared_response(
    served: Serving, tmp_path: Path, phases: str, num_examples: int
) -> None:
    # Schemas do not express every rule, so a valid body may still get a 400. /invocations takes the bodies of the
    # completions and the chats, and would take as long as both together.
    printed = await output(
        tmp_path,
        *(BIN / "schemathesis", "run", f"{served.http.base_url}/openapi.json", "--no-color"),
        *("--generation-deterministic", f"--max-examples={num_examples}", f"--phases={phases}"),
        *("--exclude-checks=positive_data_acceptance", "--request-timeout=60", "--exclude-path=/invocations"),
    )
    paths = (await served.http.get("/openapi.json")).json()["paths"]
    num_operations = sum(len(methods) for path, methods in paths.items() if path != "/invocations")
    assert f"Tested: {num_operations}" in printed
    generated = re.search(r"(\d+) generated", printed)
    assert generated is not None
    assert int(generated[1]) > 2 * num_operations, printed
    assert (await served.http.get("/health")).status_code == 200


async def test_a_client_generated_from_the_document_works(
    served: Serving, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "openapi.json").write_bytes((await served.http.get("/openapi.json")).content)
    # The generated client is not formatted.
    (tmp_path / "config.json").write_text(json.dumps({"post_hooks": []}))
    printed = await output(
        tmp_path,
        *(BIN / "openapi-python-client", "generate", "--path=openapi.json", "--output-path=neuron_client"),
        *("--meta=none", "--config=config.json", "--fail-on-warning"),
    )
    assert "WARNING" not in printed
    monkeypatch.syspath_prepend(tmp_path)
    models = import_module("neuron_client.models")
    async with import_module("neuron_client").Client(base_url=str(served.http.base_url)) as client:

        async def ask(operation: str, *path: str, **arguments: Any) -> Any:
            return await import_module(f"neuron_client.api.{operation}").asyncio(*path, client=client, **arguments)

        message = models.Message(role=models.MessageRole.USER, content="What is a device?")
        chat = await ask(
            "openai.chat_completions", body=models.ChatBody(messages=[message], max_tokens=5, temperature=0)
        )
        assert chat.usage.completion_tokens <= 5
        assert chat.choices[0].message.role == "assistant"
        body = models.CompletionBody(prompt="a core", max_tokens=5, n=2, logprobs=1)
        completion = await ask("openai.completions", body=body)
        assert [choice.index for choice in completion.choices] == [0, 1]
        assert len(completion.choices[0].logprobs.tokens) == len(completion.choices[0].logprobs.token_logprobs)
        tokens = await ask("tokens.tokenize", body=models.TokenizeBody(prompt="a core"))
        assert tokens.count == len(tokens.tokens)
        text = await ask("tokens.detokenize", body=models.DetokenizeBody(tokens=tokens.tokens))
        assert text.prompt.endswith("a core")
        assert [model.id for model in (await ask("openai.models")).data] == [MODEL, "alias"]
        assert (await ask("openai.model", MODEL)).max_model_len == 256
        assert (await ask("server.health")).status == "ok"
        refused = await ask("openai.completions", body=models.CompletionBody(prompt="a core", model="other"))
        assert refused.error.code == "model_not_found"
