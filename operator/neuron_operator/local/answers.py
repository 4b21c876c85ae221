"""Streams one answer of a model over HTTP and times its tokens, or says how one asks a model that answers with numbers.
Called by `local` and by the kubectl plugin.

It knows OpenAI's API only; connections and addresses are the caller's.
"""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import aiohttp
import msgspec

from neuron_operator.read.objects import dig, items, name_of, text, whole

MAX_ERROR = 500
"""Characters of a server's error that are shown."""


class AnswerRefused(Exception):
    """The server answered with an error, or ended the stream with one."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"HTTP {status}: {message}" if status else message)
        self.status = status


@dataclass(frozen=True)
class Answer:
    """A whole answer. Seconds count from the request."""

    text: str
    num_tokens: int
    first_seconds: float
    """To the first piece of text."""
    last_seconds: float
    """To the last piece of text."""


async def stream(
    session: aiohttp.ClientSession,
    url: str,
    body: Mapping[str, Any],
    on_text: Callable[[str], None] = lambda piece: None,
) -> Answer:
    """Asks for a streamed answer of the chat completions at `url` and passes on each piece of its text.

    Raises AnswerRefused, or aiohttp.ClientError if the connection breaks.
    """
    asked = {**body, "stream": True, "stream_options": {"include_usage": True}}
    began = time.monotonic()
    pieces: list[str] = []
    moments: list[float] = []
    usage: Mapping[str, Any] = {}
    async with session.post(url, json=asked) as response:
        if response.status != 200:
            raise AnswerRefused(response.status, error_message(await response.read()))
        async for line in response.content:
            if not line.startswith(b"data: {"):
                continue
            event = msgspec.json.decode(line.removeprefix(b"data: "))
            if event.get("error"):
                raise AnswerRefused(0, text(event, "error", "message"))
            usage = event.get("usage") or usage
            for choice in items(event, "choices"):
                piece = text(choice, "delta", "content")
                if piece:
                    moments.append(time.monotonic() - began)
                    pieces.append(piece)
                    on_text(piece)
    ended = time.monotonic() - began
    return Answer(
        text="".join(pieces),
        num_tokens=whole(usage.get("completion_tokens")),
        first_seconds=moments[0] if moments else ended,
        last_seconds=moments[-1] if moments else ended,
    )


_ASKED: Mapping[str, tuple[str, Callable[[str], Mapping[str, Any]]]] = {
    "Embed": ("/v1/embeddings", lambda asked: {"input": asked}),
    "Rerank": ("/v1/rerank", lambda asked: {"query": asked, "documents": ["one text", "another text"]}),
}
"""Route and body, by the task of models that answer with numbers."""


def served_name(model: Any) -> str:
    """What clients call a NeuronModel."""
    served = dig(model, "spec", "model", "servedNames")
    return str(served[0]) if served else name_of(model)


def task_of(model: Any) -> str:
    """Of a NeuronModel, if it answers with numbers; else empty."""
    task = text(model, "spec", "serving", "task")
    return task if task in _ASKED else ""


def command_for(task: str, url: str, model: str, asked: str) -> str:
    """A line for a shell that asks such a model. url: of the server."""
    route, body = _ASKED[task]
    content = json.dumps({"model": model, **body(asked)}, ensure_ascii=False)
    return f"curl -s {url}{route} -H 'Content-Type: application/json' -d {shlex.quote(content)}"


def error_message(content: bytes) -> str:
    """What an error says: OpenAI's object, a Status of the API server, or any text."""
    try:
        document = msgspec.json.decode(content)
    except msgspec.DecodeError:
        document = None
    said = text(document, "error", "message") or text(document, "message") or content.decode(errors="replace")
    return " ".join(said.split())[:MAX_ERROR]
