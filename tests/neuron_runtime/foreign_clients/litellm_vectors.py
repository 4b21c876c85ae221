"""Vectors and scores by LiteLLM, in the words of each provider; see `vectors_client.py` for the arguments."""

from __future__ import annotations

import json
import sys
from operator import mul

import litellm

embed_url, embeds, score_url, scores, QUESTION, RIGHT, WRONG, ranked_as = sys.argv[1:]
TEXTS, ORDER = [WRONG, RIGHT], json.loads(ranked_as)

for provider in ("openai", "hosted_vllm"):
    to = {"model": f"{provider}/{embeds}", "api_base": embed_url, "api_key": "any"}
    answer = litellm.embedding(input=[QUESTION, *TEXTS], **to)
    asked, wrong, right = (one["embedding"] for one in answer.data)
    assert sum(map(mul, asked, right)) > sum(map(mul, asked, wrong)), provider
    assert answer.usage.prompt_tokens > 2, answer.usage

for provider in ("hosted_vllm", "jina_ai", "cohere"):
    # Each writes the path of its own service, unless the address has it.
    base = score_url if provider == "hosted_vllm" else f"{score_url}/rerank"
    ranked = litellm.rerank(
        model=f"{provider}/{scores}", query=QUESTION, documents=TEXTS, top_n=2, api_base=base, api_key="any"
    )
    assert [one["index"] for one in ranked.results] == ORDER, (provider, ranked)
