"""Answers of the routes for vectors and scores. The writers create them; `server.openapi` publishes them."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import UNSET, UnsetType

from neuron_runtime.apis.objects import Count, Created, ModelName, RequestId


class VectorUsage(msgspec.Struct):
    """Token counts."""

    prompt_tokens: Annotated[Count, "Tokens of all texts, with special ones and the model's prompts."]
    total_tokens: Annotated[Count, "The same."]


class Embedding(msgspec.Struct, kw_only=True):
    """The vector of a text."""

    object: Annotated[Literal["embedding"], "The kind of object."] = "embedding"
    index: Annotated[Count, "Index of the text."]
    embedding: Annotated[list[float] | str, "The vector; with `encoding_format` `base64`, its bytes."]


class EmbeddingList(msgspec.Struct, kw_only=True):
    """The vectors of all texts, in their order."""

    id: RequestId
    object: Annotated[Literal["list"], "The kind of object."] = "list"
    created: Created
    model: ModelName
    data: Annotated[list[Embedding], "One entry per text."]
    usage: Annotated[VectorUsage, "Token counts."]


class RankedDocument(msgspec.Struct):
    """A document of the request."""

    text: Annotated[str, "Its text."]


class Ranked(msgspec.Struct, kw_only=True):
    """A document with its score."""

    index: Annotated[Count, "Index of the document in the request."]
    document: Annotated[RankedDocument | UnsetType, "Unless `return_documents` is false."] = UNSET
    relevance_score: Annotated[float, "Higher for what is more relevant."]


class Ranking(msgspec.Struct, kw_only=True):
    """Documents, the most relevant first."""

    id: RequestId
    model: ModelName
    usage: Annotated[VectorUsage, "Token counts."]
    results: Annotated[list[Ranked], "`top_n` of them."]


class Score(msgspec.Struct, kw_only=True):
    """The score of a pair."""

    index: Annotated[Count, "Index of the pair."]
    object: Annotated[Literal["score"], "The kind of object."] = "score"
    score: Annotated[float, "Higher for texts that belong together."]


class ScoreList(msgspec.Struct, kw_only=True):
    """The scores of all pairs, in their order."""

    id: RequestId
    object: Annotated[Literal["list"], "The kind of object."] = "list"
    created: Created
    model: ModelName
    data: Annotated[list[Score], "One entry per pair."]
    usage: Annotated[VectorUsage, "Token counts."]
