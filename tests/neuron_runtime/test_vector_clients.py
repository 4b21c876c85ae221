"""Clients of other makers against servers of vectors and of scores, each a program in `foreign_clients/`."""

from __future__ import annotations

import json
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


async def test_clients_of_retrieval_understand_vectors_and_scores(
    embed_url: str, score_url: str, tmp_path: Path
) -> None:
    ranked = ask(f"{score_url}/rerank", model="scores", query=QUESTION, documents=[WRONG, RIGHT])
    order = json.dumps([one["index"] for one in ranked["results"]])
    arguments = (embed_url, "vectors", score_url, "scores", QUESTION, RIGHT, WRONG, order)
    await run("vectors_client.py", *arguments, folder=tmp_path)


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


def ask(url: str, **body: Any) -> Any:
    answer = httpx.post(url, json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.json()
