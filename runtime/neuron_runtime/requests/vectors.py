"""Admission of texts that become vectors, and of pairs of texts that get scores. Stop 2 of such a request.

Called by the routes and by the offline class, as `admission` is: every length and count is checked here. What vectors
are cut to and compared by is the client's side of a vector, so it is here too. No I/O, no clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from neuron_runtime.core import Sampling, Task
from neuron_runtime.errors import InvalidRequest
from neuron_runtime.recipes import Recipe, Similarity
from neuron_runtime.requests.admission import Admission, Ask
from neuron_runtime.requests.parameters import Parameter
from neuron_runtime.requests.prompts import PromptField, context_length_exceeded, each_prompt
from neuron_runtime.requests.token_ids import check_characters

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Numbers = npt.NDArray[np.float32]

NO_TOKENS = Sampling(max_tokens=0)
"""What a request for a vector samples."""
INPUT_TYPES = {"query": ("query",), "document": ("document", "passage", "corpus")}
"""Names of prompts that models have for these kinds of texts, as sentence-transformers looks for them."""
KINDS = {
    "search_query": "query",
    "query": "query",
    "search_document": "document",
    "document": "document",
    "passage": "document",
}
PATHS: dict[Task, str] = {"generate": "/v1/chat/completions", "embed": "/v1/embeddings", "rerank": "/v1/rerank"}


class VectorOptions(msgspec.Struct, kw_only=True):
    """Options of all requests for vectors and scores."""

    model: Annotated[str | None, "One of the served names. Default: the served model"] = None
    truncate_prompt_tokens: Annotated[
        int | None, "Cut longer texts to this many tokens; -1: to the model's length. Default: they are refused"
    ] = None
    priority: Annotated[
        int | None, "Lower numbers are served first", Parameter(lowest=-(2**31), highest=2**31 - 1, default=0)
    ] = None


@dataclass(frozen=True)
class Kind:
    """Which of the model's prompts is written before a text, and what the client calls the field that says so."""

    prompt_name: str | None = None
    input_type: str | None = None


def check_task(served: Task, wanted: Sequence[Task]) -> None:
    """Raises InvalidRequest if a route is none of the served model's task."""
    if served not in wanted:
        message = (
            f"this server's task is `{served}`: use {PATHS[served]}. This route needs the task {' or '.join(wanted)}"
        )
        raise InvalidRequest(message, field="model", code="wrong_task")


def recipe_of(admission: Admission) -> Recipe:
    recipe = admission.all.text.recipe
    assert recipe is not None, "checked by `check_task`"
    return recipe


def texts_ask(
    admission: Admission,
    texts: PromptField,
    options: VectorOptions,
    kind: Kind,
    name: str,
    *,
    adds_special_tokens: bool = True,
) -> Ask:
    """Each text, or list of token ids, becomes a vector. Raises InvalidRequest."""
    contents = list(each_prompt(texts, admission.all.options.max_inputs, name))
    several = not isinstance(texts, str) and not (texts and isinstance(texts[0], int))
    named = [f"{name}[{at}]" if several else name for at in range(len(contents))]
    return _ask(
        admission,
        _tokens(admission, contents, named, options, kind, adds_special_tokens=adds_special_tokens),
        options,
        name,
    )


def compared_ask(
    admission: Admission,
    queries: Sequence[str],
    documents: Sequence[str],
    options: VectorOptions,
    names: tuple[str, str],
) -> Ask:
    """Each query is compared with its document: one for all, or one for each. Raises InvalidRequest."""
    of_queries, of_documents = names
    most = admission.all.options.max_inputs
    for name, texts in zip(names, (queries, documents), strict=True):
        if not texts:
            raise InvalidRequest.at(name, "must not be empty")
        if len(texts) > most:
            raise InvalidRequest.at(name, f"must have at most {most} texts, got {len(texts)}")
    if len(queries) not in (1, len(documents)):
        message = f"has {len(queries)} texts for {len(documents)} of `{of_documents}`: one, or as many are needed"
        raise InvalidRequest.at(of_queries, message)
    at_queries = [f"{of_queries}[{at}]" if len(queries) > 1 else of_queries for at in range(len(queries))]
    at_documents = [f"{of_documents}[{at}]" for at in range(len(documents))]
    if admission.all.task == "embed":
        found = _tokens(admission, queries, at_queries, options, Kind(input_type="query"))
        found += _tokens(admission, documents, at_documents, options, Kind(input_type="document"))
        return _ask(admission, found, options, of_documents)
    cut = admission.prompts.cut(options.truncate_prompt_tokens, None)
    each_query = list(queries) * (len(documents) if len(queries) == 1 else 1)
    pairs = zip(each_query, documents, at_documents, strict=True)
    found, seconds = [], []
    newest = dict[str, Any]()
    for query, document, name in pairs:
        ids, second_at = _pair(admission, (query, document), cut, name, newest)
        found.append(ids)
        seconds.append(second_at)
    return _ask(admission, found, options, of_documents, tuple(seconds))


def _pair(
    admission: Admission, pair: tuple[str, str], cut: int | None, name: str, newest: dict[str, Any]
) -> tuple[tuple[int, ...], int]:
    query, document = pair
    for text in pair:
        check_characters(text, name)
    if recipe_of(admission).lowers:
        query, document = query.lower(), document.lower()
    limits, tokenizer = admission.limits, admission.tokenizer
    most = limits.max_model_length * tokenizer.longest_token_characters
    if cut is None and len(query) + len(document) > most:
        problem = f"`{name}` and its query have {len(query) + len(document)} characters: shorten them"
        raise context_length_exceeded(limits, f"{problem}, or set `truncate_prompt_tokens`", name)
    ids, second_at = tokenizer.encode_pair(query[: 2 * most], document[: 2 * most], cut, newest)
    if len(ids) > limits.max_new_tokens(0):
        problem = f"`{name}` and its query have {len(ids)} tokens: shorten them, or set `truncate_prompt_tokens`"
        raise context_length_exceeded(limits, problem, name)
    admission.prompts.check(ids, name)
    return ids, second_at


def _tokens(
    admission: Admission,
    contents: Sequence[str | list[int]],
    names: Sequence[str],
    options: VectorOptions,
    kind: Kind,
    *,
    adds_special_tokens: bool = True,
) -> list[tuple[int, ...]]:
    recipe, prompts = recipe_of(admission), admission.prompts
    before, cut = _prompt(recipe, kind), prompts.cut(options.truncate_prompt_tokens, None)

    def prepared(content: str | list[int]) -> str | list[int]:
        if not isinstance(content, str):
            return content
        return (before + content).lower() if recipe.lowers else before + content

    return [
        prompts.checked(prepared(content), adds_special_tokens, cut, name).token_ids
        for content, name in zip(contents, names, strict=True)
    ]


def _prompt(recipe: Recipe, kind: Kind) -> str:
    """Raises InvalidRequest."""
    if kind.prompt_name is not None:
        if kind.prompt_name not in recipe.prompts:
            known = ", ".join(sorted(recipe.prompts)) or "none"
            raise InvalidRequest.at("prompt_name", f"is none of this model's prompts ({known})")
        return recipe.prompts[kind.prompt_name]
    if kind.input_type is None:
        return recipe.default_prompt
    names = INPUT_TYPES[KINDS[kind.input_type]] if kind.input_type in KINDS else (kind.input_type,)
    return next((recipe.prompts[name] for name in names if name in recipe.prompts), recipe.default_prompt)


def _ask(
    admission: Admission,
    token_ids: Sequence[tuple[int, ...]],
    options: VectorOptions,
    name: str,
    second_at: tuple[int, ...] = (),
) -> Ask:
    limited = admission.all
    most = admission.limits.max_rows + limited.max_queued_requests
    if len(token_ids) > most:
        message = f"has {len(token_ids)} texts, but at most {most} may wait: send fewer at a time"
        raise InvalidRequest.at(name, message)
    num_tokens = sum(map(len, token_ids))
    if len(token_ids) > 1 and num_tokens > limited.max_queued_tokens:
        message = f"has {num_tokens} tokens, but at most {limited.max_queued_tokens} may wait: send fewer at a time"
        raise InvalidRequest.at(name, message)
    return Ask(
        prompts=tuple(token_ids),
        sampling=(NO_TOKENS,) * len(token_ids),
        target=admission.target,
        second_at=second_at,
        priority=options.priority or 0,
    )


def check_dimensions(admission: Admission, dimensions: int | None) -> None:
    """Raises InvalidRequest if vectors cannot be cut to so many numbers."""
    recipe, size = recipe_of(admission), admission.limits.vector_size
    if dimensions in (None, size):
        return
    if not recipe.may_cut:
        message = f"must be {size}: the model's vectors cannot be cut (its config.json has no `is_matryoshka`)"
        raise InvalidRequest.at("dimensions", message)
    if recipe.sizes and dimensions not in recipe.sizes:
        raise InvalidRequest.at("dimensions", f"must be one of {', '.join(map(str, recipe.sizes))}, got {dimensions}")
    if not 1 <= (dimensions or 0) <= size:
        raise InvalidRequest.at("dimensions", f"must be from 1 to {size}, got {dimensions}")


def cut_to(vectors: Sequence[bytes], dimensions: int | None, recipe: Recipe) -> Numbers:
    """Vectors as numbers, `[vectors, size]`. A vector that the model normalises has its length after the cut too."""
    import numpy as np  # noqa: PLC0415 - the front end of a model that generates has no use for it

    rows: Numbers = np.frombuffer(b"".join(vectors), dtype=np.float32).reshape(len(vectors), -1)
    if dimensions is None or dimensions == rows.shape[1]:
        return rows
    rows = rows[:, :dimensions]
    return rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), TINY) if recipe.normalises else rows.copy()


def similarities(queries: Numbers, documents: Numbers, by: Similarity) -> list[float]:
    """Of each pair of a query, which may be one for all, and a document; larger ones are more alike."""
    import numpy as np  # noqa: PLC0415 - as above

    match by:
        case "dot":
            alike = (queries * documents).sum(axis=1)
        case "cosine":
            lengths = np.linalg.norm(queries, axis=1) * np.linalg.norm(documents, axis=1)
            alike = (queries * documents).sum(axis=1) / np.maximum(lengths, TINY)
        case "euclidean":
            alike = -np.linalg.norm(queries - documents, axis=1)
        case "manhattan":
            alike = -np.abs(queries - documents).sum(axis=1)
    return [float(one) for one in alike]


TINY = 1e-12
"""A vector of zeros stays one."""
