"""Vectors and scores by the clients of retrieval: LangChain, LlamaIndex and Cohere.

Arguments: the address of a server that embeds and the name of its model, the same of one that scores, a question, the
text that answers it, one that does not, and in which order the second model ranks the two, as a list.
"""

from __future__ import annotations

import json
import math
import sys
from operator import mul

import cohere
from langchain_core.vectorstores import InMemoryVectorStore
from langchain_openai import OpenAIEmbeddings
from llama_index.core.base.embeddings.base import similarity
from llama_index.embeddings.openai_like import OpenAILikeEmbedding

embed_url, embeds, score_url, scores, QUESTION, RIGHT, WRONG, ranked_as = sys.argv[1:]
TEXTS, ORDER = [WRONG, RIGHT], json.loads(ranked_as)
found: dict[str, list[float]] = {}


def cosine(one: list[float], other: list[float]) -> float:
    return sum(map(mul, one, other)) / math.hypot(*one) / math.hypot(*other)


# It sends token ids unless told not to, and asks for vectors in base64.
for checks_length in (False, True):
    langchain = OpenAIEmbeddings(
        base_url=embed_url, api_key="any", model=embeds, max_retries=0, check_embedding_ctx_length=checks_length
    )
    if not checks_length:
        found["langchain"] = langchain.embed_query(RIGHT)
        store = InMemoryVectorStore.from_texts(TEXTS, langchain)
        assert [one.page_content for one in store.similarity_search(QUESTION, k=1)] == [RIGHT]
        assert len(langchain.embed_documents(TEXTS)) == 2

llama_index = OpenAILikeEmbedding(model_name=embeds, api_base=embed_url, api_key="any", max_retries=0)
asked, texts = llama_index.get_query_embedding(QUESTION), llama_index.get_text_embedding_batch(TEXTS)
assert similarity(asked, texts[1]) > similarity(asked, texts[0])
found["llama-index"] = texts[1]

for name, vector in found.items():
    assert cosine(vector, found["langchain"]) > 0.9999, name

with cohere.Client(api_key="any", base_url=score_url.removesuffix("/v1")) as client:
    answered = client.rerank(model=scores, query=QUESTION, documents=TEXTS, top_n=1)
    assert [one.index for one in answered.results] == ORDER[:1], answered
with cohere.ClientV2(api_key="any", base_url=score_url.removesuffix("/v1")) as client:
    answered = client.rerank(model=scores, query=QUESTION, documents=TEXTS)
    assert [one.index for one in answered.results] == ORDER, answered
