#!/usr/bin/env python3
"""A tour of an agent: asks a model, runs the tools that it calls, sends it their results and prints its answer.

    neuron-operator local -f examples/neuronmodel-local.yaml    # in another terminal
    python examples/agent.py
    python examples/agent.py --stream "Is chat ready?"

It needs the package `openai`. The demo model has learned these two tools; other models call tools of any name.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable
from typing import Any

import openai

QUESTIONS = ("Which models are there?", "Is demo ready?", "Is chat ready?", "What is a slot?")
MAX_ROUNDS = 5
"""Of calls for one question: a model may call for ever."""


def list_models(client: openai.OpenAI) -> list[str]:
    """The models that the server serves."""
    return [model.id for model in client.models.list()]


def describe_model(client: openai.OpenAI, name: str) -> dict[str, str]:
    """The state of one model."""
    return {"name": name, "state": "Ready" if name in list_models(client) else "NotFound"}


FUNCTIONS: dict[str, Callable[..., Any]] = {"list_models": list_models, "describe_model": describe_model}


def tool(name: str, /, **properties: Any) -> dict[str, Any]:
    """As OpenAI's API describes it; `strict`: the arguments of a call always fit."""
    parameters = {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }
    function = {
        "name": name,
        "description": FUNCTIONS[name].__doc__,
        "parameters": parameters,
        "strict": True,
    }
    return {"type": "function", "function": function}


TOOLS: Any = [tool("list_models"), tool("describe_model", name={"type": "string"})]


def answer(client: openai.OpenAI, model: str, messages: list[Any], *, streamed: bool) -> Any:
    """The model's next message; its text is printed."""
    if not streamed:
        message = client.chat.completions.create(model=model, messages=messages, tools=TOOLS).choices[0].message
        print(message.content or "", end="")
        return message
    with client.chat.completions.stream(model=model, messages=messages, tools=TOOLS) as events:
        for event in events:
            if event.type == "content.delta":
                print(event.delta, end="", flush=True)
        return events.get_final_completion().choices[0].message


def ask(client: openai.OpenAI, model: str, question: str, *, streamed: bool) -> None:
    print(f"> {question}")
    messages: list[Any] = [{"role": "user", "content": question}]
    for _ in range(MAX_ROUNDS):
        message = answer(client, model, messages, streamed=streamed)
        if not message.tool_calls:
            break
        messages.append(message)
        for call in message.tool_calls:
            result = json.dumps(FUNCTIONS[call.function.name](client, **json.loads(call.function.arguments)))
            print(f"  {call.function.name}({call.function.arguments}) = {result}")
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    print("\n")


def main() -> int:
    parser = argparse.ArgumentParser(description="Ask a model that may call two tools.")
    parser.add_argument("questions", nargs="*", default=QUESTIONS, metavar="QUESTION")
    parser.add_argument("--base-url", default="http://127.0.0.1:8000/v1", help="of an OpenAI API (%(default)s)")
    parser.add_argument("--model", help="its name (by default the first that the server lists)")
    parser.add_argument("--stream", action="store_true", help="print answers while they are written")
    args = parser.parse_args()
    client = openai.OpenAI(base_url=args.base_url, api_key=os.environ.get("OPENAI_API_KEY", "none"))
    try:
        model = args.model or list_models(client)[0]
        for question in args.questions:
            ask(client, model, question, streamed=args.stream)
    except openai.APIError as error:
        print(f"{args.base_url}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
