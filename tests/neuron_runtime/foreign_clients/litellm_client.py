"""LiteLLM: tools, structured output and pictures through its translation of OpenAI's API, whole and streamed."""

from __future__ import annotations

import json
import sys
from typing import Any, Literal

import litellm
from pydantic import BaseModel

ASKED: Any = [{"role": "user", "content": "Will it rain in Oslo?"}]
HOW_WARM: Any = [{"role": "user", "content": "How warm is it in Oslo?"}]
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [{"type": "function", "function": {"name": "weather", "description": "The weather", "parameters": PARAMETERS}}]


class Report(BaseModel):
    city: Literal["Oslo", "Bergen"]
    degrees: int


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


def structured(**to: Any) -> None:
    named = {"name": "report", "schema": Report.model_json_schema(), "strict": True}
    for form in (Report, {"type": "json_schema", "json_schema": named}):
        answer = litellm.completion(messages=HOW_WARM, response_format=form, **to).choices[0].message.content
        assert json.loads(answer) == {"city": "Oslo", "degrees": 7}, answer
        chunks = list(litellm.completion(messages=HOW_WARM, response_format=form, stream=True, **to))
        assert litellm.stream_chunk_builder(chunks, messages=HOW_WARM).choices[0].message.content == answer
    loose = litellm.completion(messages=HOW_WARM, response_format={"type": "json_object"}, **to)
    assert json.loads(loose.choices[0].message.content) == {"city": "Oslo in Norway", "degrees": "7 C"}, loose


def pictures(**to: Any) -> None:
    red, blue = ({"type": "image_url", "image_url": {"url": one}} for one in (RED, BLUE))
    asked = {"type": "text", "text": "What color?"}
    for shown, color in ((red, "red"), (blue, "blue")):
        answer = litellm.completion(messages=[{"role": "user", "content": [asked, shown]}], **to)
        assert answer.choices[0].message.content == color, answer
        assert answer.usage.prompt_tokens == int(NUM_TOKENS), answer
    both: Any = [{"role": "user", "content": [asked, red, blue]}]
    chunks = list(litellm.completion(messages=both, stream=True, **to))
    assert litellm.stream_chunk_builder(chunks, messages=both).choices[0].message.content == "red, blue"


url, name, RED, BLUE, NUM_TOKENS = sys.argv[1:]
for provider in ("openai", "hosted_vllm"):
    for part in (tools, structured, pictures):
        part(model=f"{provider}/{name}", api_base=url, api_key="any", num_retries=0)
# By Anthropic's API.
pictures(model=f"anthropic/{name}", api_base=url.removesuffix("/v1"), api_key="any", num_retries=0)
