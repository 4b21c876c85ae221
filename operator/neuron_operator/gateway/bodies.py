"""What the gateway reads of bodies: model and beginning of the prompt of a request, usage of an answer. Pure.

Everything else passes through as bytes: fields that the gateway does not know are the servers' affair.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import blake2b
from itertools import islice

import msgspec

from neuron_operator.gateway.errors import invalid

TAIL_BYTES = 16_384
"""The usage stands at the end of an answer, whether it is streamed or not."""
MAX_MESSAGES_BYTES = 2 * 2**20
"""Of a longer list only the beginning counts: small messages take several times their size in memory."""
MAX_PLACES = 16
BYTES_PER_TOKEN = 4
"""An estimate, for answers without usage."""

Raw = msgspec.Raw


class _Body(msgspec.Struct):
    model: str | None = None
    system: Raw = Raw()
    instructions: Raw = Raw()
    prompt: Raw = Raw()
    messages: Raw = Raw()
    input: Raw = Raw()


class _Message(msgspec.Struct):
    role: str = ""
    content: Raw = Raw()


class _Named(msgspec.Struct):
    model: Raw


_body = msgspec.json.Decoder(_Body)
_messages = msgspec.json.Decoder(list[_Message])
_named = msgspec.json.Decoder(_Named)


@dataclass(frozen=True, slots=True)
class Peeked:
    """What the gateway needs to know of a request."""

    model: str
    affinity: int
    """Equal for requests whose prompts begin alike."""


def peek(raw: bytes, prefix_characters: int) -> Peeked:
    """Raises Refusal if the body is not a JSON object that names a model."""
    raw = raw.removeprefix(codecs.BOM_UTF8)
    try:
        body = _body.decode(raw)
        parts = list(_beginnings(body))
    except msgspec.ValidationError as error:
        if "`$.model`" in str(error):
            raise invalid("`model` must be a string", param="model") from error
        raise invalid("the body must be a JSON object") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise invalid(f"the body is not valid JSON: {error}") from error
    except RecursionError as error:
        raise invalid("the body is nested too deeply") from error
    if not body.model:
        raise invalid("`model` is required: GET /v1/models lists the models", param="model")
    digest = blake2b(digest_size=8)
    for part in parts or (memoryview(raw),):
        digest.update(part[:prefix_characters])
    return Peeked(body.model, int.from_bytes(digest.digest(), "big"))


def _beginnings(body: _Body) -> Iterable[memoryview]:
    """What stands at the beginning of the prompt, and does not change when a chat goes on: the messages up to the first
    one of the user. As they are written: a client writes the same text in the same way."""
    for raw in (body.system, body.instructions):
        if view := memoryview(raw):
            yield view
    for raw in (body.messages, body.input):
        view = memoryview(raw)
        if view and view[0] == ord("[") and len(view) <= MAX_MESSAGES_BYTES:
            try:
                messages = _messages.decode(raw)
            except msgspec.ValidationError:  # a list of texts or of tokens; or wrong, which the server says
                yield view
                continue
            for message in messages:
                yield memoryview(message.content)
                if message.role == "user":
                    break
        elif view:
            yield view
    if view := memoryview(body.prompt):
        yield view


def with_model(raw: bytes, name: str) -> bytes:
    """The body with another model, for clients that write `namespace/name`: the server knows the name alone. Everything
    else stays as it is. Raises Refusal."""
    given, wanted = bytes(_named.decode(raw.removeprefix(codecs.BOM_UTF8)).model), msgspec.json.encode(name)
    places = re.finditer(rb'"model"\s*:\s*(' + re.escape(given) + rb")", raw)
    for place in islice(places, MAX_PLACES):  # other objects in the body may say the same
        made = raw[: place.start(1)] + wanted + raw[place.end(1) :]
        if bytes(_named.decode(made.removeprefix(codecs.BOM_UTF8)).model) == wanted:
            return made
    raise invalid("`model` with a namespace must be written without escapes, and once", param="model")


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of one answer."""

    prompt: int
    output: int
    is_estimated: bool = False

    @property
    def total(self) -> int:
        return self.prompt + self.output


_COUNT = re.compile(
    rb'"(prompt_tokens|input_tokens|completion_tokens|output_tokens|total_tokens|cache_read_input_tokens)"\s*:\s*(\d+)'
)
_USAGE_BYTES = 600


def usage_of(tail: bytes) -> Usage | None:
    """The usage at the end of an answer. In a text of the model its quotation marks would be escaped."""
    at = tail.rfind(b'"usage":')
    while at >= 0:
        found: dict[bytes, int] = {}
        for match in _COUNT.finditer(tail[at : at + _USAGE_BYTES]):
            found.setdefault(match[1], int(match[2]))
        if found:
            cached = found.get(b"cache_read_input_tokens", 0)
            prompt = found.get(b"prompt_tokens", found.get(b"input_tokens", 0) + cached)
            output = found.get(b"completion_tokens", found.get(b"output_tokens"))
            if output is None:  # of embeddings
                output = max(0, found.get(b"total_tokens", prompt) - prompt)
            return Usage(prompt, output)
        at = tail.rfind(b'"usage":', 0, at)  # it was null
    return None


def estimated(request_bytes: int, num_chunks: int) -> Usage:
    """Of a stream without usage: a chunk has one token or more."""
    return Usage(request_bytes // BYTES_PER_TOKEN, num_chunks, is_estimated=True)
