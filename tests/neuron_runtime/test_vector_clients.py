"""Clients of other makers against servers of vectors and of scores, each a program in `foreign_clients/`."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from cluster.rig.needs import NotPossibleHere
from helpers import foreign_clients
from helpers.serve_command import serve

EXAMPLES = Path(__file__).parents[2] / "examples"
QUESTION = "How do I serve a model on my laptop?"
RIGHT = "Run neuron-operator local -f FILE: it serves a manifest on this machine without a cluster."
WRONG = "A step is one run of the model over a batch."
PAGE = """# Rooms

The kitchen is closed on Mondays, because nobody cooks then. On other days it opens at noon and closes at ten.

# Devices

A slot is the cache line of one running sequence. A sequence holds as many blocks as its tokens need.

```
code that is no paragraph, however long it may be, and that nobody should find in an answer of any kind
```
"""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),  # the first one may install
]


def write_scorer(folder: Path) -> Path:
    """A cross-encoder with the shape and the tokens of the embedding model, and random weights."""
    import torch
    from transformers import AutoTokenizer, BertConfig, BertForSequenceClassification

    torch.manual_seed(1)
    config = BertConfig.from_pretrained(EXAMPLES / "embedding-model", num_labels=1)
    BertForSequenceClassification(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(EXAMPLES / "embedding-model").save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def embed_url() -> Iterator[str]:
    flags = ("--port", "0", "--task", "embed", "--served-model-name", "vectors")
    with serve(str(EXAMPLES / "embedding-model"), *flags) as command:
        yield f"{command.until_ready()}/v1"


@pytest.fixture(scope="module")
def score_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = write_scorer(tmp_path_factory.mktemp("scorer"))
    with serve(str(folder), "--port", "0", "--task", "rerank", "--served-model-name", "scores") as command:
        yield f"{command.until_ready()}/v1"


async def run(client: str, *arguments: str, folder: Path) -> None:
    try:
        await foreign_clients.run(client, *arguments, folder=folder)
    except NotPossibleHere as reason:
        # Nothing else of the project needs Node or its registry, so they may be missing even in CI.
        (pytest.xfail if client.endswith(".mjs") else pytest.skip)(str(reason))


@pytest.mark.parametrize("client", ["vectors_client.py", pytest.param("litellm_vectors.py", marks=pytest.mark.long)])
async def test_clients_of_retrieval_understand_vectors_and_scores(
    client: str, embed_url: str, score_url: str, tmp_path: Path
) -> None:
    ranked = ask(f"{score_url}/rerank", model="scores", query=QUESTION, documents=[WRONG, RIGHT])
    order = json.dumps([one["index"] for one in ranked["results"]])
    arguments = (embed_url, "vectors", score_url, "scores", QUESTION, RIGHT, WRONG, order)
    await run(client, *arguments, folder=tmp_path)


async def test_openais_client_for_node_understands_vectors(embed_url: str, tmp_path: Path) -> None:
    await run("openai_vectors.mjs", embed_url, "vectors", QUESTION, RIGHT, WRONG, folder=tmp_path)


def test_openais_client_gets_the_same_vectors_in_each_form(embed_url: str) -> None:
    with openai.OpenAI(base_url=embed_url, api_key="any", max_retries=0) as client:
        in_base64 = client.embeddings.create(model="vectors", input=[RIGHT, WRONG])
        in_numbers = client.embeddings.create(model="vectors", input=[RIGHT, WRONG], encoding_format="float")
        for one, other in zip(in_base64.data, in_numbers.data, strict=True):
            assert one.embedding == pytest.approx(other.embedding, abs=1e-6)
            assert len(one.embedding) == 128
        with pytest.raises(openai.BadRequestError, match="this server's task is `embed`: use /v1/embeddings"):
            client.chat.completions.create(model="vectors", messages=[{"role": "user", "content": "a"}])


def test_scores_are_understood_in_the_forms_of_cohere_jina_and_vllm(score_url: str) -> None:
    texts = [WRONG, RIGHT, QUESTION]
    asked = {"model": "scores", "query": QUESTION, "documents": texts}
    root = score_url.removesuffix("/v1")
    ranked = ask(f"{score_url}/rerank", **asked)["results"]
    scores = {one["index"]: one["relevance_score"] for one in ranked}
    assert sorted(scores) == [0, 1, 2]
    assert [*scores.values()] == sorted(scores.values(), reverse=True)
    for url in (f"{root}/rerank", f"{root}/v2/rerank"):
        assert ask(url, **asked)["results"] == ranked
    assert ask(f"{score_url}/rerank", **asked, top_n=1)["results"] == ranked[:1]
    # Jina's clients wrap texts, and take them back.
    wrapped = ask(f"{score_url}/rerank", **{**asked, "documents": [{"text": one} for one in texts]})["results"]
    assert [one["document"]["text"] for one in wrapped] == [texts[one["index"]] for one in ranked]
    scored = ask(f"{root}/score", model="scores", text_1=QUESTION, text_2=texts)["data"]
    assert {one["index"]: one["score"] for one in scored} == pytest.approx(scores, abs=1e-6)


@pytest.mark.long  # by default, test_example_rag.py tries only how the example fails
def test_the_tour_of_retrieval_finds_the_paragraph_that_answers_a_question(embed_url: str, tmp_path: Path) -> None:
    """`examples/rag.py`, as people run it."""
    page = tmp_path / "page.md"
    page.write_text(PAGE, encoding="utf-8")
    with serve(str(EXAMPLES / "demo-model"), "--port", "0", "--served-model-name", "demo") as chat:
        urls = ("--base-url", f"{chat.until_ready()}/v1", "--embed-url", embed_url)
        ended = tour(
            *urls, "--count", "1", "--pages", str(page), "--", "What is a slot?", "When does the kitchen close?"
        )
        assert ended.returncode == 0, ended.stderr
        lines = ended.stdout.splitlines()
        assert lines[0] == "2 paragraphs of 1 pages, 128 numbers each"
        found = {line: lines[at + 1] for at, line in enumerate(lines) if line.startswith("> ")}
        assert "page.md  Devices: A slot is the cache line" in found["> What is a slot?"]
        assert "page.md  Rooms: The kitchen is closed" in found["> When does the kitchen close?"]
        assert "A slot is the cache line of one running sequence." in lines
        wrong = tour(*urls[:2], "--embed-url", urls[1], "--pages", str(page))
        assert (wrong.returncode, wrong.stdout) == (1, "")
        assert "this server's task is `generate`: use /v1/chat/completions" in wrong.stderr


def tour(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(EXAMPLES / "rag.py"), *arguments]
    return subprocess.run(command, check=False, capture_output=True, text=True, timeout=240)


def ask(url: str, **body: Any) -> Any:
    answer = httpx.post(url, json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.json()
