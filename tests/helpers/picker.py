"""A small endpoint picker: sends each request to the server whose cache has most of its prompt.

It knows the caches from the servers' events, and the tokens of a prompt from a server's render route, as llm-d's picker
does; it speaks Envoy's external processing. It is for one client at a time, and for tests only.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from concurrent import futures
from dataclasses import dataclass, field
from typing import Any

import grpc
import httpx
import msgspec
import zmq

from cluster.rig.cache import Cache
from cluster.rig.stubs import ensure_stubs, import_stubs
from helpers.engine_driver import CacheReader
from helpers.envoy import DESTINATION, FOLDER
from neuron_runtime.engine.cache_events import EventBatch

SERVICE = "envoy.service.ext_proc.v3.ExternalProcessor"


@dataclass(frozen=True)
class Picked:
    address: str
    predicted: int
    """Tokens of the prompt that the server should find in its cache."""


@dataclass
class Picker:
    """`sockets`: subscribers to the events of each server, by its address."""

    sockets: Mapping[str, zmq.Socket[bytes]]
    picked: list[Picked] = field(default_factory=list)
    readers: dict[str, CacheReader] = field(default_factory=dict)

    def follow(self) -> None:
        """Everything that has arrived."""
        for address, one in self.sockets.items():
            reader = self.readers.setdefault(address, CacheReader())
            while one.poll(0):
                _, _, payload = one.recv_multipart()
                reader.read(msgspec.msgpack.decode(payload, type=EventBatch).events)

    def tokens(self, body: bytes) -> list[int]:
        """Of a prompt: any server says them."""
        url = f"http://{next(iter(self.sockets))}/v1/completions/render"
        (rendered,) = httpx.post(url, content=body, headers={"content-type": "application/json"}, timeout=60).json()
        return list(rendered["token_ids"])

    def pick(self, body: bytes) -> Picked:
        """The server with the longest prefix; of several the one that got the fewest requests."""
        self.follow()
        tokens = self.tokens(body)
        load = [one.address for one in self.picked]
        best = max(self.sockets, key=lambda one: (self.readers[one].hits(tokens), -load.count(one)))
        self.picked.append(Picked(best, self.readers[best].hits(tokens)))
        return self.picked[-1]


@contextlib.contextmanager
def serving(picker: Picker) -> Iterator[int]:
    """The port on which it answers Envoy."""
    messages, _ = import_stubs(ensure_stubs(Cache.default(), FOLDER, ("ext_proc",)), "ext_proc")

    def refusal(status: int, words: str) -> Any:
        body = json.dumps({"error": {"message": words}}).encode()
        immediate = messages.ImmediateResponse(status=messages.HttpStatus(code=status), body=body)
        return messages.ProcessingResponse(immediate_response=immediate)

    def process(requests: Iterator[Any], _: grpc.ServicerContext) -> Iterator[Any]:
        """The head is answered once the body is there, since the server is picked by it."""
        body = b""
        for request in requests:
            if request.WhichOneof("request") == "request_headers" and request.request_headers.end_of_stream:
                yield refusal(404, "only requests with a body have an endpoint")
                return
            if request.WhichOneof("request") == "request_body":
                body += request.request_body.body
                if request.request_body.end_of_stream:
                    break
        picked = picker.pick(body)
        named = messages.HeaderValue(key=DESTINATION, raw_value=picked.address.encode())
        mutation = messages.HeaderMutation(set_headers=[messages.HeaderValueOption(header=named)])
        head = messages.HeadersResponse(response=messages.CommonResponse(header_mutation=mutation))
        yield messages.ProcessingResponse(request_headers=head)
        passed = messages.BodyMutation(streamed_response=messages.StreamedBodyResponse(body=body, end_of_stream=True))
        whole = messages.BodyResponse(response=messages.CommonResponse(body_mutation=passed))
        yield messages.ProcessingResponse(request_body=whole)

    handler = grpc.stream_stream_rpc_method_handler(
        process,
        request_deserializer=messages.ProcessingRequest.FromString,
        response_serializer=messages.ProcessingResponse.SerializeToString,
    )
    server = grpc.server(futures.ThreadPoolExecutor(1))
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, {"Process": handler}),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield port
    finally:
        server.stop(None).wait()
