"""pydantic-ai: an agent that runs a tool, whole and streamed, over chats and Responses."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

ASKED: list[str] = []


def weather(city: str) -> str:
    """The weather"""
    ASKED.append(city)
    return "rain"


async def tools(models: list[Any]) -> None:
    for model in models:
        agent = Agent(model, tools=[weather], retries=0)
        assert (await agent.run("Will it rain in Oslo?")).output == "It rains."
        async with agent.run_stream("Will it rain in Oslo?") as stream:
            assert await stream.get_output() == "It rains."
    assert ["Oslo"] * 2 * len(models) == ASKED


url, name, part = sys.argv[1:]
provider = OpenAIProvider(base_url=url, api_key="any")
asyncio.run(
    {"tools": tools}[part]([OpenAIChatModel(name, provider=provider), OpenAIResponsesModel(name, provider=provider)])
)
