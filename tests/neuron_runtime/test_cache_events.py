"""Events of the prefix cache as gateways read them: decoded by position from real sockets. That who follows them knows
what the cache has is checked after each step of `test_engine_property.py`."""

from __future__ import annotations

import json
import socket
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
import zmq

from helpers.engine_driver import CacheReader, picture
from helpers.ports import free_ports
from helpers.serve_command import serve
from neuron_runtime.cache_event_config import cache_events
from neuron_runtime.config import CacheEventOptions, parse_config
from neuron_runtime.engine.cache_events import BlockRemoved, BlockStored, CacheEvents, EventBatch
from neuron_runtime.errors import InvalidConfig
from neuron_runtime.processes.cache_publisher import END_OF_REPLAY, CachePublisher

MODEL = str(Path(__file__).parents[2] / "examples" / "demo-model")
KEYS = [bytes([number]) * 32 for number in range(1, 6)]
HASHES = [int.from_bytes(key[:8], "big") for key in KEYS]
WAIT_MILLISECONDS = 20_000


def recorded() -> CacheEvents:
    events = CacheEvents(2)
    events.take()
    return events


def decoded(payload: bytes) -> Any:
    """As a reader in another language has it: lists by position."""
    return msgspec.msgpack.decode(payload)


def test_stored_blocks_are_told_by_position_with_their_parent() -> None:
    events = recorded()
    events.stored(KEYS, [1, 2, 4], list(range(10)), "", "")
    batch = decoded(msgspec.msgpack.encode(EventBatch(1.5, events.take())))
    assert batch == [
        1.5,
        [
            ["BlockStored", HASHES[1:3], HASHES[0], [2, 3, 4, 5], 2, None, "GPU", None, None],
            ["BlockStored", [HASHES[4]], HASHES[3], [8, 9], 2, None, "GPU", None, None],
        ],
        None,
    ]


def test_an_adapter_is_told_by_the_name_that_clients_ask_for_and_a_salt_in_the_first_block() -> None:
    events = recorded()
    events.adapter_names["digest"] = "support-de"
    events.stored(KEYS, [0, 1], [1, 2, 3, 4], "digest", "tenant\ud800")
    (stored,) = events.take()
    assert isinstance(stored, BlockStored)
    assert (stored.parent_block_hash, stored.lora_name) == (None, "support-de")
    assert stored.extra_keys == (("tenant?",), None)
    assert decoded(msgspec.msgpack.encode(stored))[8] == [["tenant?"], None]


def test_a_picture_is_told_with_each_block_that_has_some_of_it() -> None:
    events = recorded()
    events.stored(KEYS, [0, 1, 2, 3], list(range(8)), "", "salt", pictures=(picture("cat", 1, 3), picture("dog", 5, 1)))
    events.stored(KEYS, [3], list(range(8)), "", "salt", pictures=(picture("cat", 1, 3),))
    stored, without = (decoded(msgspec.msgpack.encode(one)) for one in events.take())
    cat, dog = (picture(name, 0, 1).digest for name in ("cat", "dog"))
    assert stored[8] == [[[cat, 1], "salt"], [[cat, -1]], [[dog, 1]], None]
    assert without[8] is None


def test_removed_blocks_are_told_in_order_with_the_stored_ones() -> None:
    events = recorded()
    events.removed(KEYS[3])
    events.removed(KEYS[4])
    events.stored(KEYS, [0], [1, 2], "", "")
    events.removed(KEYS[0])
    first, second, third = events.take()
    assert (first, third) == (BlockRemoved((HASHES[3], HASHES[4])), BlockRemoved((HASHES[0],)))
    assert isinstance(second, BlockStored)
    assert decoded(msgspec.msgpack.encode(first)) == ["BlockRemoved", [HASHES[3], HASHES[4]], "GPU"]


ANY_PORT = "tcp://127.0.0.1:*"


def test_a_reader_that_missed_batches_gets_those_that_are_kept() -> None:
    options = CacheEventOptions(endpoint=ANY_PORT, replay_endpoint=ANY_PORT, topic="kv@pod@model", num_kept=3)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    with closing(CachePublisher(options, "model")) as publisher, context, context.socket(zmq.DEALER) as reader:
        for number in range(5):
            publisher.publish((BlockRemoved((number,)),))
        publisher.publish(())
        assert publisher.replays is not None
        reader.connect(publisher.replays.last_endpoint)
        for first, expected in ((0, [2, 3, 4]), (4, [4]), (9, [])):
            reader.send_multipart((b"", first.to_bytes(8, "big")))
            assert publisher.replays.poll(WAIT_MILLISECONDS)
            publisher.answer_replays()
            found = []
            while (answer := reader.recv_multipart())[2] != END_OF_REPLAY:
                assert answer[:2] == [b"", b"kv@pod@model"]
                found.append(int.from_bytes(answer[2], "big"))
                assert decoded(answer[3])[1] == [["BlockRemoved", [found[-1]], "GPU"]]
            assert (found, answer[3]) == (expected, b"")


def test_all_that_is_kept_reaches_a_reader() -> None:
    options = CacheEventOptions(endpoint=ANY_PORT, replay_endpoint=ANY_PORT, num_kept=20_000)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    with closing(CachePublisher(options, "model")) as publisher, context, context.socket(zmq.DEALER) as reader:
        for number in range(options.num_kept):
            publisher.publish((BlockRemoved((number,) * 64),))
        assert publisher.replays is not None
        reader.rcvhwm = 10
        reader.connect(publisher.replays.last_endpoint)
        reader.send_multipart((b"", bytes(8)))
        assert publisher.replays.poll(WAIT_MILLISECONDS)
        publisher.answer_replays()
        numbers = [reader.recv_multipart()[2] for _ in range(options.num_kept + 1)]
        assert numbers == [*(number.to_bytes(8, "big") for number in range(options.num_kept)), END_OF_REPLAY]


def test_events_without_a_prefix_cache_are_refused_before_a_model_is_loaded() -> None:
    document: dict[str, Any] = {"version": 1, "model": {"uri": "file:///m"}, "servedNames": ["m"], "backend": "torch"}
    document["cacheEvents"] = {"endpoint": ANY_PORT}
    assert parse_config(msgspec.json.encode(document)).cache_events.endpoint == ANY_PORT
    for without in ({"prefixCaching": "disabled"}, {"layout": "slots"}):
        with pytest.raises(InvalidConfig, match=r"cacheEvents.endpoint: there is no prefix cache"):
            parse_config(msgspec.json.encode({**document, **without}))


def test_what_is_no_number_gets_no_answer() -> None:
    options = CacheEventOptions(endpoint=ANY_PORT, replay_endpoint=ANY_PORT)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    with closing(CachePublisher(options, "model")) as publisher, context, context.socket(zmq.DEALER) as reader:
        assert publisher.replays is not None
        reader.connect(publisher.replays.last_endpoint)
        reader.send_multipart((b"", b"GET / HTTP/1.1"))
        reader.send_multipart((b"", bytes(8)))
        while not reader.poll(10):
            publisher.answer_replays()
        assert reader.recv_multipart()[2] == END_OF_REPLAY


def test_an_address_that_is_taken_is_refused_by_its_field() -> None:
    with socket.create_server(("", 0)) as taken:
        options = CacheEventOptions(endpoint=f"tcp://*:{taken.getsockname()[1]}")
        with pytest.raises(InvalidConfig, match=r"cacheEvents.endpoint: tcp://\*:\d+: Address"):
            CachePublisher(options, "model")


def test_the_flag_has_the_keys_of_vllm() -> None:
    assert cache_events('{"enable_kv_cache_events": true, "publisher": "zmq", "topic": "t", "hwm": 10}') == {
        "endpoint": "tcp://*:5557",
        "topic": "t",
    }
    assert cache_events({"enable_kv_cache_events": False, "endpoint": "tcp://*:1"}) == {}
    with pytest.raises(InvalidConfig, match="`endpiont`: is no key of it"):
        cache_events({"enable_kv_cache_events": True, "endpiont": "x"})


@pytest.mark.slow
def test_a_reader_of_a_real_server_foretells_its_cache_hits() -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    with free_ports() as port, context, context.socket(zmq.SUB) as subscriber:
        flags = json.dumps({"enable_kv_cache_events": True, "endpoint": f"tcp://*:{port}"})
        subscriber.subscribe(b"kv@")
        subscriber.connect(f"tcp://127.0.0.1:{port}")
        options = ("--enable-prefix-caching", "--block-size", "8", "--kv-events-config", flags)
        with serve(MODEL, "--backend", "simulated", "--port", "0", *options) as command:
            url = command.until_ready()
            reader = CacheReader()
            prompt = "A user applies a six-line manifest, and the operator finds out what the model is. "
            body = {"model": "demo-model", "prompt": prompt * 2, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
            foretold, counted = [], []
            for text in (prompt * 2, prompt * 2, prompt * 3, "Other words. " * 9, prompt):
                body["prompt"] = text
                (rendered,) = httpx.post(f"{url}/v1/completions/render", json=body, timeout=60).json()
                tokens = rendered["token_ids"]
                foretold.append(reader.hits(tokens))
                usage = httpx.post(f"{url}/v1/completions", json=body, timeout=60).json()["usage"]
                counted.append(usage["prompt_tokens_details"]["cached_tokens"])
                _follow(subscriber, reader)
            assert foretold == counted
            assert counted[1] > 0


def _follow(subscriber: zmq.Socket[bytes], reader: CacheReader) -> None:
    """Everything that was published until now: the last message comes before the answer, or at once after it."""
    time.sleep(0.3)
    while subscriber.poll(200):
        topic, _, payload = subscriber.recv_multipart()
        assert topic.startswith(b"kv@")
        assert topic.endswith(b"@demo-model")
        reader.read(msgspec.msgpack.decode(payload, type=EventBatch).events)
