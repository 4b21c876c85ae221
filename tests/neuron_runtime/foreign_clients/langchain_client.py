"""LangChain: `bind_tools`, `with_structured_output` by each of its methods, and pictures, whole and streamed."""

from __future__ import annotations

import sys
from typing import Any, Literal

from langchain_core.messages import AIMessageChunk, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel

HOW_WARM = "How warm is it in Oslo?"


class Report(BaseModel):
    """A report of the weather"""

    city: Literal["Oslo", "Bergen"]
    degrees: int


class Loose(BaseModel):
    """What the model says if nothing but JSON is asked for"""

    city: str
    degrees: str


@tool
def weather(city: str) -> str:
    """The weather"""
    return f"rain in {city}"


def tools(model: ChatOpenAI) -> None:
    bound = model.bind_tools([weather])
    history = [HumanMessage("Will it rain in Oslo?")]
    answer = bound.invoke(history)
    (call,) = answer.tool_calls
    assert (call["name"], call["args"]) == ("weather", {"city": "Oslo"}), call
    result = weather.invoke(call)
    assert isinstance(result, ToolMessage)
    history += [answer, result]
    assert bound.invoke(history).content == "It rains."
    whole = AIMessageChunk("")
    for chunk in bound.stream(history[:1]):
        whole += chunk
    assert [call["args"] for call in whole.tool_calls] == [{"city": "Oslo"}], whole


def structured(model: ChatOpenAI) -> None:
    report, loose = Report(city="Oslo", degrees=7), Loose(city="Oslo in Norway", degrees="7 C")
    asked: list[tuple[Any, dict[str, Any], Any]] = [
        (Report, {"method": "json_schema"}, report),
        (Report, {"method": "json_schema", "strict": True}, report),
        (Report.model_json_schema(), {"method": "json_schema"}, report.model_dump()),
        (Report, {"method": "function_calling"}, report),
        (Loose, {"method": "json_mode"}, loose),
    ]
    for schema, how, expected in asked:
        kept = model.with_structured_output(schema, **how)
        assert kept.invoke(HOW_WARM) == expected, how
        *_, streamed = kept.stream(HOW_WARM)
        assert streamed == expected, how


def pictures(model: ChatOpenAI) -> None:
    """In OpenAI's form and in LangChain's own."""
    asked = {"type": "text", "text": "What color?"}
    in_openais = {"type": "image_url", "image_url": {"url": RED}}
    own = {"type": "image", "base64": BLUE.partition(",")[2], "mime_type": "image/png"}
    for shown, color in ((in_openais, "red"), (own, "blue")):
        answer = model.invoke([HumanMessage([asked, shown])])
        assert answer.text == color, answer
        assert answer.usage_metadata
        assert answer.usage_metadata["input_tokens"] == int(NUM_TOKENS), answer
    both = [HumanMessage([asked, in_openais, own])]
    assert "".join(chunk.text for chunk in model.stream(both)) == "red, blue"


url, name, RED, BLUE, NUM_TOKENS = sys.argv[1:]
for part in (tools, structured, pictures):
    part(ChatOpenAI(base_url=url, api_key="any", model=name, max_retries=0))
pictures(ChatOpenAI(base_url=url, api_key="any", model=name, max_retries=0, use_responses_api=True))
