"""Vectors and scores of the torch backend: equal to sentence-transformers' own, for each family and kind of pooling."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.vector_models import vector_model, write
from neuron_runtime import LLM, PoolingParams
from neuron_runtime.config import ServerOptions
from neuron_runtime.errors import FatalError, InvalidConfig, InvalidRequest
from neuron_runtime.text.tokenizer import load_tokenizer

TEXTS = [
    "a",
    "hello there",
    "what is a token of a text",
    "hello there",
    "x y z",
    "some longer words follow one another",
]


def reference(folder: Path, kind: str = "SentenceTransformer") -> Any:
    """A model of sentence-transformers. Importing the library takes seconds in each process that collects tests."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import sentence_transformers
    return getattr(sentence_transformers, kind)(str(folder), device="cpu")


def loaded(folder: Path, task: str = "embed", **more: Any) -> LLM:
    return LLM(str(folder), task=task, device="cpu", **more)


def vectors(llm: LLM, texts: list[str], **params: Any) -> np.ndarray[Any, Any]:
    outputs = llm.embed(texts, pooling_params=PoolingParams(**params), use_tqdm=False)
    return np.array([one.outputs.embedding for one in outputs])


def cosines(ours: np.ndarray[Any, Any], theirs: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    lengths = np.linalg.norm(ours, axis=1) * np.linalg.norm(theirs, axis=1)
    return np.asarray((ours * theirs).sum(axis=1) / lengths)


MODELS: dict[str, dict[str, Any]] = {
    "BERT, mean": {},
    "BERT, its first token, not normalised": {"pooling": "cls", "normalises": False},
    "BERT, several poolings and a layer": {"pooling": ["max", "mean_sqrt_len_tokens"], "dense": 24},
    "BERT, GELU by tanh": {"hidden_act": "gelu_new"},
    "XLM-RoBERTa": {"family": "xlm-roberta", "pooling": "cls"},
    "a decoder, its last token": {"family": "qwen3", "pooling": "lasttoken"},
    "a decoder with a window": {"family": "mistral", "pooling": "lasttoken"},
}


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_vectors_are_those_of_sentence_transformers(model: dict[str, Any], tmp_path: Path) -> None:
    folder = vector_model(tmp_path, **model)
    theirs = reference(folder).encode(TEXTS)
    with loaded(folder) as llm:
        ours = vectors(llm, TEXTS)
    assert ours.shape == theirs.shape
    assert np.abs(cosines(ours, theirs) - 1).max() < 1e-5
    assert np.allclose(ours, theirs, atol=1e-5)


def test_a_model_without_modules_is_read_as_sentence_transformers_reads_it(tmp_path: Path) -> None:
    folder = vector_model(tmp_path, normalises=False)
    (folder / "modules.json").unlink()
    theirs = reference(folder).encode(TEXTS)
    with loaded(folder) as llm:
        assert np.allclose(vectors(llm, TEXTS), theirs, atol=1e-5)


PAIRS = [("what is it", "a b c"), ("what is it", "it is what it is"), ("q", "some longer words")]


@pytest.mark.parametrize("family", ["bert", "xlm-roberta", "qwen3"])
@pytest.mark.parametrize("activation", [None, "torch.nn.modules.linear.Identity"])
def test_scores_are_those_of_a_cross_encoder(family: str, activation: str | None, tmp_path: Path) -> None:
    more = {"sentence_transformers": {"activation_fn": activation}} if activation else {}
    folder = vector_model(tmp_path, family, labels=1, **more)
    theirs = reference(folder, "CrossEncoder").predict(PAIRS)
    with loaded(folder, "rerank") as llm:
        outputs = llm.score([query for query, _ in PAIRS], [document for _, document in PAIRS], use_tqdm=False)
    assert np.allclose([one.outputs.score for one in outputs], theirs, atol=1e-5)


def test_the_longer_text_of_a_pair_is_cut_as_transformers_cuts_it(tmp_path: Path) -> None:
    folder = vector_model(tmp_path, labels=1)
    pairs = [("a b c", "d " * 90), ("e " * 90, "f " * 90), ("g " * 90, "h")]
    theirs = reference(folder, "CrossEncoder").predict(pairs)
    with loaded(folder, "rerank") as llm:
        queries, documents = ([pair[at] for pair in pairs] for at in (0, 1))
        ours = llm.score(queries, documents, truncate_prompt_tokens=-1, use_tqdm=False)
        with pytest.raises(InvalidRequest, match=r"`data_2\[0\]` and its query have .* set `truncate_prompt_tokens`"):
            llm.score(queries, documents, use_tqdm=False)
    assert np.allclose([one.outputs.score for one in ours], theirs, atol=1e-5)


def test_a_query_is_encoded_once_for_all_its_documents(tmp_path: Path) -> None:
    made = load_tokenizer(vector_model(tmp_path, labels=1))
    query, documents = "a b c d e", ["f", "g h", "i " * 9, ""]
    newest = dict[str, Any]()
    made.encode_pair(query, "", None, newest)
    encoded = newest[query]
    for cut in (None, 2, 6, 9, None):
        for document in documents:
            assert made.encode_pair(query, document, cut, newest) == made.encode_pair(query, document, cut)
    assert newest[query] is encoded
    assert made.encode_pair("a", "b", None, newest) == made.encode_pair("a", "b")
    assert list(newest) == ["a"]


def test_a_pair_without_a_token_is_refused_before_it_is_computed(tmp_path: Path) -> None:
    folder = vector_model(tmp_path, "qwen3", labels=1)
    file = folder / "tokenizer.json"
    write(file, {**json.loads(file.read_bytes()), "post_processor": None})
    with loaded(folder, "rerank") as llm:
        with pytest.raises(InvalidRequest, match=r"`data_2\[1\]` has no tokens: at least one is required"):
            llm.score("", ["a", " "], use_tqdm=False)
        [found] = llm.score("a", "b", use_tqdm=False)
    assert len(found.prompt_token_ids) == 2


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    folder = vector_model(tmp_path_factory.mktemp("model"), is_matryoshka=True)
    write(folder / "config_sentence_transformers.json", {"prompts": {"query": "find "}, "default_prompt_name": "query"})
    with loaded(folder, max_num_seqs=3, max_num_batched_tokens=64) as made:
        yield made


@settings(max_examples=10, deadline=None)
@given(st.lists(st.text("abc ", min_size=1, max_size=40).filter(str.strip), min_size=1, max_size=9), st.randoms())
def test_a_vector_depends_on_its_text_alone(llm: LLM, texts: list[str], order: Any) -> None:
    mixed = order.sample(texts, len(texts))
    alone = {text: vectors(llm, [text])[0] for text in set(texts)}
    assert np.allclose(vectors(llm, mixed), [alone[text] for text in mixed], atol=1e-6)


def test_a_cut_vector_has_the_length_of_a_whole_one(llm: LLM) -> None:
    whole, cut = vectors(llm, TEXTS), vectors(llm, TEXTS, dimensions=8)
    expected = whole[:, :8] / np.linalg.norm(whole[:, :8], axis=1, keepdims=True)
    assert np.allclose(cut, expected, atol=1e-6)
    with pytest.raises(InvalidRequest, match="`dimensions` must be from 1 to 32, got 33"):
        vectors(llm, TEXTS, dimensions=33)


def test_the_default_prompt_is_written_before_a_text(llm: LLM) -> None:
    [found] = llm.embed("a", use_tqdm=False)
    assert len(found.prompt_token_ids) == len("find") + len("a") + 2


def test_texts_are_scored_by_their_vectors_where_a_model_has_no_head(llm: LLM) -> None:
    same, other = llm.score("hello there", ["hello there", "x y z"], use_tqdm=False)
    assert same.outputs.score == pytest.approx(1.0)
    assert other.outputs.score < same.outputs.score


def test_a_caller_in_python_has_as_many_texts_as_he_likes(llm: LLM) -> None:
    assert llm.embed([], use_tqdm=False) == []
    most = ServerOptions().max_inputs
    assert len(llm.score("a", ["b"] * (most + 1), use_tqdm=False)) == most + 1


def test_a_text_that_is_too_long_is_refused_unless_it_may_be_cut(llm: LLM) -> None:
    long = "a " * 100
    with pytest.raises(InvalidRequest, match=r"maximum context length is 64 tokens.* 106 tokens"):
        vectors(llm, [long])
    assert np.allclose(vectors(llm, [long], truncate_prompt_tokens=9), vectors(llm, ["a " * 3]), atol=1e-6)


@pytest.mark.parametrize(
    ("file", "value", "complaint"),
    [
        ("1_Pooling/config.json", {"pooling_mode": "weightedmean"}, "the pooling 'weightedmean' is not supported"),
        ("1_Pooling/config.json", {"include_prompt": False}, "include_prompt false is not supported"),
        ("config_sentence_transformers.json", {"similarity_fn_name": "own"}, "similarity_fn_name 'own'"),
        ("config_sentence_transformers.json", {"prompts": {"a": 1}}, "prompts must be an object of texts"),
        ("modules.json", [{"type": "x.CLIPModel", "path": ""}] * 2, "modules that begin with CLIPModel and CLIPModel"),
        ("modules.json", [{"type": "x.Transformer", "path": "../.."}] * 2, "is not the folder of a module"),
        ("modules.json", {}, "must be a list of 2 to 16 modules"),
    ],
)
def test_what_is_not_computed_is_refused_by_name(file: str, value: Any, complaint: str, tmp_path: Path) -> None:
    folder = vector_model(tmp_path)
    write(folder / file, value)
    with pytest.raises(FatalError, match=complaint):
        loaded(folder)


@pytest.mark.parametrize(
    ("model", "task", "complaint"),
    [
        ({}, "rerank", "BertModel has no head that scores pairs of texts: set embed"),
        ({}, "generate", "BertModel generates no text: set embed"),
        ({"labels": 1}, "embed", "BertForSequenceClassification scores pairs of texts: set rerank"),
    ],
)
def test_a_task_that_a_model_cannot_have_is_refused_with_a_cure(
    model: dict[str, Any], task: str, complaint: str, tmp_path: Path
) -> None:
    folder = vector_model(tmp_path, **model)
    with pytest.raises(InvalidConfig, match=complaint):
        loaded(folder, task)


def test_other_backends_name_the_one_that_computes_vectors(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match="the simulated backend does not compute 'embed': use the backend torch"):
        LLM(str(tmp_path), task="embed", backend="simulated")
