"""Bodies of the routes for vectors (OpenAI's embeddings) and for scores (Cohere's and Jina's rerank, vLLM's score), and
what they are to admission.

Each field is declared once. Called by the routes and by the offline class.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from neuron_runtime.config import ServerOptions
from neuron_runtime.errors import InvalidRequest
from neuron_runtime.requests.admission import Admission, Ask
from neuron_runtime.requests.parameters import Parameter
from neuron_runtime.requests.prompts import PromptField
from neuron_runtime.requests.vectors import Kind, VectorOptions, check_dimensions, compared_ask, texts_ask

MOST = f"at most {ServerOptions().max_inputs}"


class EmbeddingsBody(VectorOptions, kw_only=True):
    """Texts that become vectors."""

    input: Annotated[PromptField, f"A text, a list of texts, a list of token ids, or a list of such lists; {MOST}"]
    dimensions: Annotated[
        int | None, "Numbers of a vector, fewer than it has, where the model allows it", Parameter(lowest=1)
    ] = None
    encoding_format: Annotated[
        Literal["float", "base64"] | None,
        "`base64`: little-endian float32 numbers",
        Parameter(neutral=("float",), default="float"),
    ] = None
    prompt_name: Annotated[
        str | None, "One of the model's prompts (`config_sentence_transformers.json`), written before each text"
    ] = None
    input_type: Annotated[
        str | None,
        "What the texts are, as in Cohere's API: `search_query` or `search_document`; the model's prompt for it, if it "
        "has one, is written before each",
    ] = None
    add_special_tokens: Annotated[
        bool | None, "Add the tokenizer's special tokens", Parameter(neutral=(True,), default=True)
    ] = None


class TextDocument(msgspec.Struct, frozen=True):
    """A document."""

    text: Annotated[str, "The text"]


Document = str | TextDocument


class RerankBody(VectorOptions, kw_only=True):
    """A query, and documents that are put in the order of their relevance."""

    query: Annotated[str, "The query"]
    documents: Annotated[list[Document], f"Texts, or objects with a `text`; {MOST}"]
    top_n: Annotated[int | None, "Number of results. Default: all documents", Parameter(lowest=0)] = None
    return_documents: Annotated[
        bool | None, "Return the documents with their scores", Parameter(neutral=(True,), default=True)
    ] = None


class ScoreBody(VectorOptions, kw_only=True):
    """Pairs of texts that get scores."""

    text_1: Annotated[str | list[str] | None, "The first text of each pair; one may stand for all"] = None
    text_2: Annotated[str | list[str] | None, f"The second text of each pair; {MOST}"] = None
    queries: Annotated[str | list[str] | None, "Newer name of `text_1`"] = None
    documents: Annotated[str | list[str] | None, "Newer name of `text_2`"] = None


def admitted_embeddings(admission: Admission, body: EmbeddingsBody) -> Ask:
    """Raises InvalidRequest."""
    check_dimensions(admission, body.dimensions)
    return texts_ask(
        admission,
        body.input,
        body,
        Kind(body.prompt_name, body.input_type),
        "input",
        adds_special_tokens=body.add_special_tokens is not False,
    )


def admitted_rerank(admission: Admission, body: RerankBody) -> Ask:
    """Raises InvalidRequest."""
    return compared_ask(admission, [body.query], list(map(text_of, body.documents)), body, ("query", "documents"))


def admitted_score(admission: Admission, body: ScoreBody) -> Ask:
    """Raises InvalidRequest."""
    queries, of_queries = _either(body, "text_1", "queries")
    documents, of_documents = _either(body, "text_2", "documents")
    return compared_ask(admission, queries, documents, body, (of_queries, of_documents))


def text_of(document: Document) -> str:
    return document if isinstance(document, str) else document.text


def _either(body: ScoreBody, *names: str) -> tuple[list[str], str]:
    given = [name for name in names if getattr(body, name) is not None]
    if len(given) != 1:
        raise InvalidRequest(f"exactly one of `{'` and `'.join(names)}` is required", field=names[0])
    texts = getattr(body, given[0])
    return [texts] if isinstance(texts, str) else texts, given[0]
