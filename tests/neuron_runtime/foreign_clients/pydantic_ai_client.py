"""pydantic-ai: an agent that runs a tool, each way to structured output, and pictures, over chats and Responses."""

from __future__ import annotations

import asyncio
import base64
import sys
from typing import Any, Literal

from pydantic import BaseModel
from pydantic_ai import Agent, BinaryContent, ImageUrl, NativeOutput, PromptedOutput, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

ASKED: list[str] = []


class Report(BaseModel):
    """A report of the weather"""

    city: Literal["Oslo", "Bergen"]
    degrees: int


class Loose(BaseModel):
    """What the model says if nothing but JSON is asked for"""

    city: str
    degrees: str


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


async def structured(models: list[Any]) -> None:
    report, loose = Report(city="Oslo", degrees=7), Loose(city="Oslo in Norway", degrees="7 C")
    for model in models:
        for output, expected in (
            (ToolOutput(Report), report),
            (ToolOutput(Report, strict=True), report),
            (NativeOutput(Report), report),
            (PromptedOutput(Loose), loose),
        ):
            agent = Agent(model, output_type=output, retries=0)
            whole = (await agent.run("How warm is it in Oslo?")).output
            assert whole == expected, (output, whole)
            async with agent.run_stream("How warm is it in Oslo?") as stream:
                streamed = await stream.get_output()
            assert streamed == expected, (output, streamed)


async def pictures(models: list[Any]) -> None:
    """Of the user, and returned by a tool."""
    red, blue, num_tokens = sys.argv[3:]
    in_bytes = BinaryContent(base64.b64decode(blue.partition(",")[2]), media_type="image/png")
    for model in models:
        agent = Agent(model, retries=0)
        for shown, color in ((ImageUrl(red), "red"), (in_bytes, "blue")):
            answer = await agent.run(["What color?", shown])
            assert answer.output == color, answer
            assert answer.usage.input_tokens == int(num_tokens), answer

        def weather(city: str) -> BinaryContent:
            """The weather"""
            return in_bytes

        assert (await Agent(model, tools=[weather], retries=0).run("What color?")).output == "blue"


async def main(url: str, name: str) -> None:
    provider = OpenAIProvider(base_url=url, api_key="any")
    models = [OpenAIChatModel(name, provider=provider), OpenAIResponsesModel(name, provider=provider)]
    for part in (tools, structured, pictures):
        await part(models)


asyncio.run(main(*sys.argv[1:3]))
