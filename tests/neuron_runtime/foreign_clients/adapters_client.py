"""LiteLLM and LangChain: an adapter is listed beside its base model, and a chat that names it gets its answer."""

from __future__ import annotations

import sys
from typing import Any

import litellm
from langchain_openai import ChatOpenAI

url, question, plain, spoken = sys.argv[1:]
ASKED: Any = [{"role": "user", "content": question}]

listed = litellm.get_valid_models(
    check_provider_endpoint=True, custom_llm_provider="openai", api_key="any", api_base=url
)
assert listed == ["demo", "pirate"], listed
for name, text in (("demo", plain), ("pirate", spoken)):
    answer = litellm.completion(model=f"hosted_vllm/{name}", api_base=url, api_key="any", messages=ASKED, num_retries=0)
    assert answer.choices[0].message.content == text, answer
    chat = ChatOpenAI(base_url=url, api_key="any", model=name, max_retries=0)
    assert chat.invoke(question).content == text
    assert "".join(str(chunk.content) for chunk in chat.stream(question)) == text
