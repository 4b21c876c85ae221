"""Two real servers behind the real Envoy, whose endpoint picker follows the events of their caches.

That is what gateways do with an InferencePool and llm-d's precise prefix routing; the picker is one of the tests.
"""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
import zmq

from cluster.rig.machine import wait_until
from cluster.rig.needs import NotPossibleHere
from helpers import envoy, picker
from helpers.picker import Picker
from helpers.ports import free_ports
from helpers.serve_command import serve

pytestmark = pytest.mark.slow

MODEL = str(Path(__file__).parents[2] / "examples" / "demo-model")
BLOCK = 8
FLAGS = ("--backend", "simulated", "--port", "0", "--enable-prefix-caching", "--block-size", str(BLOCK))


@contextlib.contextmanager
def gateway(folder: Path, count: int) -> Iterator[tuple[str, Picker]]:
    """An Envoy in front of so many servers, and its picker."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    with contextlib.ExitStack() as stack:
        stack.enter_context(context)
        port = stack.enter_context(free_ports(count))
        sockets = []
        for number in range(count):  # before the servers start: the first event says that a cache is empty
            sockets.append(stack.enter_context(context.socket(zmq.SUB)))
            sockets[-1].subscribe(b"kv@")
            sockets[-1].connect(f"tcp://127.0.0.1:{port + number}")
        events = [{"enable_kv_cache_events": True, "endpoint": f"tcp://*:{port + number}"} for number in range(count)]
        commands = [serve(MODEL, *FLAGS, "--kv-events-config", json.dumps(one)) for one in events]
        with ThreadPoolExecutor(count) as starting:
            servers = list(starting.map(stack.enter_context, commands))
        addresses = [one.until_ready().removeprefix("http://") for one in servers]
        made = Picker(dict(zip(addresses, sockets, strict=True)))
        answering = stack.enter_context(picker.serving(made))
        try:
            yield stack.enter_context(envoy.running(folder, answering)), made
        except NotPossibleHere as error:
            pytest.skip(str(error))


def ask(url: str, prompt: str, **fields: object) -> httpx.Response:
    body = {"model": "demo-model", "prompt": prompt, "max_tokens": 8, "ignore_eos": True, **fields}
    return httpx.post(f"{url}/v1/completions", json=body, timeout=60)


def test_requests_go_to_the_server_whose_cache_has_their_prefix_and_hit_as_foretold(tmp_path: Path) -> None:
    first = "A user applies a six-line manifest, and the operator finds out what the model is. "
    second = "Each pod runs a server that batches its requests from step to step. "
    prompts = [first * 2, second * 2, first * 3, second * 2, second * 3, first * 2 + second, first]
    of_first = [0, 2, 5, 6]
    with gateway(tmp_path, 2) as (url, chosen):
        counted, usages = [], Counter[str]()
        for prompt in prompts:
            answer = ask(url, prompt)
            assert answer.status_code == 200, answer.text
            usage = answer.json()["usage"]
            counted.append(usage["prompt_tokens_details"]["cached_tokens"])
            address, whole = chosen.picked[-1].address, (usage["prompt_tokens"] - 1) // BLOCK * BLOCK
            usages[address] += 1
            tokens = chosen.tokens(json.dumps({"model": "demo-model", "prompt": prompt}).encode())

            def is_told(address: str = address, whole: int = whole, tokens: list[int] = tokens) -> bool:
                chosen.follow()
                return chosen.readers[address].hits(tokens) == whole

            wait_until("the picker knows what the cache has now", is_told)

        assert [one.predicted for one in chosen.picked] == counted
        assert [count > 0 for count in counted] == [False, False, True, True, True, True, True]
        servers = [one.address for one in chosen.picked]
        assert {servers[number] for number in of_first} == {servers[0]}
        assert {server for number, server in enumerate(servers) if number not in of_first} == {servers[1]}
        for address, count in usages.items():
            text = httpx.get(f"http://{address}/metrics", timeout=60).text
            lines = (line for line in text.splitlines() if line.startswith("vllm:request_success_total{"))
            assert sum(float(line.rpartition(" ")[2]) for line in lines) == count

        stream = ask(url, first, stream=True).text
        assert stream.count("data: ") > 1
        assert stream.rstrip().endswith("data: [DONE]")
        assert httpx.get(f"{url}/v1/models", timeout=60).status_code == 404
