"""LangChain: `bind_tools`, whole and streamed, and the results of calls in the history."""

from __future__ import annotations

import sys

from langchain_core.messages import AIMessageChunk, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI


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


url, name, part = sys.argv[1:]
{"tools": tools}[part](ChatOpenAI(base_url=url, api_key="any", model=name, max_retries=0))
