"""LiteLLM: tools through its translation of OpenAI's API, whole and streamed, and an agent's second turn."""

from __future__ import annotations

import json
import sys
from typing import Any

import litellm

ASKED: Any = [{"role": "user", "content": "Will it rain in Oslo?"}]
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [{"type": "function", "function": {"name": "weather", "description": "The weather", "parameters": PARAMETERS}}]


def tools(**to: Any) -> None:
    message = litellm.completion(messages=ASKED, tools=TOOLS, **to).choices[0].message
    (call,) = message.tool_calls
    assert json.loads(call.function.arguments) == {"city": "Oslo"}, call
    history = [*ASKED, message, {"role": "tool", "tool_call_id": call.id, "content": "rain"}]
    assert litellm.completion(messages=history, tools=TOOLS, **to).choices[0].message.content == "It rains."
    chunks = list(litellm.completion(messages=ASKED, tools=TOOLS, stream=True, **to))
    whole = litellm.stream_chunk_builder(chunks, messages=ASKED).choices[0]
    assert json.loads(whole.message.tool_calls[0].function.arguments) == {"city": "Oslo"}, whole
    assert whole.finish_reason == "tool_calls", whole


url, name, part = sys.argv[1:]
for provider in ("openai", "hosted_vllm"):
    {"tools": tools}[part](model=f"{provider}/{name}", api_base=url, api_key="any", num_retries=0)
