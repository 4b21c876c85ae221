"""Writes vectors and scores as the answers of their APIs, and makes scores of vectors where a model has none.

Called by `server.responding` when all texts of a request have their vectors. No I/O.
"""

from __future__ import annotations

import base64
import secrets
import time
from collections.abc import Sequence

import msgspec
import orjson

from neuron_runtime.apis.generation import Generation, Piece
from neuron_runtime.apis.vectors.body import EmbeddingsBody, RerankBody, ScoreBody, text_of
from neuron_runtime.apis.vectors.objects import Ranked, RankedDocument, Ranking, Score, ScoreList, VectorUsage
from neuron_runtime.errors import ServingError
from neuron_runtime.recipes import Recipe
from neuron_runtime.requests.vectors import cut_to, similarities


class VectorWriter:
    """What the answers have in common. Nothing is streamed."""

    def __init__(self, model: str, generation: Generation, recipe: Recipe) -> None:
        self._model, self._generation, self._recipe = model, generation, recipe

    def pieces(self, pieces: list[Piece]) -> bytes:
        return b""

    def end(self) -> bytes:
        return b""

    def failure(self, error: ServingError) -> bytes:
        return b""

    @property
    def _usage(self) -> VectorUsage:
        count = self._generation.ask.num_prompt_tokens
        return VectorUsage(count, count)


class EmbeddingsWriter(VectorWriter):
    def __init__(self, model: str, generation: Generation, recipe: Recipe, body: EmbeddingsBody) -> None:
        super().__init__(model, generation, recipe)
        self._body = body

    def whole(self, answers: Sequence[Piece]) -> bytes:
        vectors = cut_to([answer.vector for answer in answers], self._body.dimensions, self._recipe)
        in_base64 = self._body.encoding_format == "base64"
        data = [
            {
                "object": "embedding",
                "index": index,
                "embedding": base64.b64encode(one.tobytes()).decode() if in_base64 else one,
            }
            for index, one in enumerate(vectors)
        ]
        answer = {
            "id": f"embd-{secrets.token_hex(16)}",
            "object": "list",
            "created": int(time.time()),
            "model": self._model,
            "data": data,
            "usage": msgspec.to_builtins(self._usage),
        }
        # It writes float32 with no more digits than they have.
        return orjson.dumps(answer, option=orjson.OPT_SERIALIZE_NUMPY)


class RerankWriter(VectorWriter):
    def __init__(self, model: str, generation: Generation, recipe: Recipe, body: RerankBody) -> None:
        super().__init__(model, generation, recipe)
        self._body = body

    def whole(self, answers: Sequence[Piece]) -> bytes:
        documents, shows = self._body.documents, self._body.return_documents is not False
        scores = scores_of(answers, len(documents), self._recipe)
        order = sorted(range(len(scores)), key=lambda index: -scores[index])[: self._body.top_n]
        results = [Ranked(index=index, relevance_score=scores[index]) for index in order]
        if shows:
            for one in results:
                one.document = RankedDocument(text_of(documents[one.index]))
        name = f"rerank-{secrets.token_hex(16)}"
        return msgspec.json.encode(Ranking(id=name, model=self._model, usage=self._usage, results=results))


class ScoreWriter(VectorWriter):
    def __init__(self, model: str, generation: Generation, recipe: Recipe, body: ScoreBody) -> None:
        super().__init__(model, generation, recipe)
        documents = body.documents if body.text_2 is None else body.text_2
        self._num_pairs = 1 if isinstance(documents, str) else len(documents or ())

    def whole(self, answers: Sequence[Piece]) -> bytes:
        scores = scores_of(answers, self._num_pairs, self._recipe)
        return msgspec.json.encode(
            ScoreList(
                id=f"score-{secrets.token_hex(16)}",
                created=int(time.time()),
                model=self._model,
                data=[Score(index=index, score=score) for index, score in enumerate(scores)],
                usage=self._usage,
            )
        )


def scores_of(answers: Sequence[Piece], num_pairs: int, recipe: Recipe) -> list[float]:
    """The score of each pair: what the model gave, or how alike the vectors of its texts are."""
    vectors = cut_to([answer.vector for answer in answers], None, recipe)
    if len(answers) == num_pairs:
        return [float(one) for one in vectors[:, 0]]
    num_queries = len(answers) - num_pairs
    return similarities(vectors[:num_queries], vectors[num_queries:], recipe.similarity)
