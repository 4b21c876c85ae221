"""The wire of a group: what it carries, who may speak, and that every rank does what rank 0 does."""

from __future__ import annotations

import dataclasses
import threading
from pathlib import Path
from random import Random

import pytest
import zmq
from msgspec.structs import replace

from helpers.engine_driver import VOCABULARY_SIZE, Guesses, RecordingBackend, Run, alone, even_only, request
from helpers.groups import group_of, tcp_layout
from helpers.guides import RuleGuides
from helpers.ports import free_ports
from helpers.random_loads import some_limits, some_requests
from neuron_runtime.core import BackendLimits, Batch, Late, Rows, Sampling, StepOutput
from neuron_runtime.distributed import wire
from neuron_runtime.distributed.wire import Ack, Keys, Launch, Sample
from neuron_runtime.engine.cache_events import CacheEvents
from neuron_runtime.engine.loop import Engine
from neuron_runtime.errors import ExitCode, FatalError

LIMITS = BackendLimits(
    max_rows=4,
    max_model_length=40,
    max_step_tokens=16,
    block_size=4,
    num_blocks=40,
    max_prefill_rows=2,
    shares_prefixes=True,
    steps_in_flight=2,
    token_feedback="device",
    vocabulary_size=VOCABULARY_SIZE,
)


def test_every_field_of_a_batch_arrives_as_it_was() -> None:
    engine = Engine(backend := RecordingBackend(LIMITS))
    for name, sampling in (("a", {}), ("b", {"temperature": 0.7, "seed": 2**62 - 1, "stop_token_ids": frozenset({3})})):
        engine.add(request(name, 13, **sampling))  # type: ignore[arg-type]
    while engine.has_work:
        engine.step()
    for batch in backend.batches:
        assert wire.decode_step(wire.encode(Launch(5, batch))) == Launch(5, batch)
    everything = Sampling(
        top_p=0.1 + 0.2,
        logit_bias=((3, -1e-300),),
        allowed_token_ids=(1, 2),
        bad_words=((1,), (2, 3)),
        logprobs=0,
        prompt_logprobs=2,
    )
    added = replace(backend.batches[0].added[0], sampling=everything, adapter=3)
    batch = Batch(
        step=2**40,
        num_prefills=1,
        rows=Rows((1,), (2,), (3,), (4,), (0,), (False,)),
        added=(added,),
        appended_blocks=((1, 2),),
        released=(7,),
    )
    assert wire.decode_step(wire.encode(Launch(0, batch))) == Launch(0, batch)


def test_what_may_be_sampled_arrives_as_it_was() -> None:
    late = Late((1, 3), memoryview(bytes(range(16))), num_positions=2)
    assert wire.decode_step(wire.encode(Sample(0, 4, late))) == Sample(0, 4, late)


@pytest.mark.parametrize("size", [2, 4])
def test_every_rank_repeats_the_calls_of_rank_0(size: int) -> None:
    seeds = range(8)
    for seed in seeds:
        random = Random(seed)
        limits = some_limits(random)
        with group_of(lambda limits=limits: RecordingBackend(limits), size) as group:  # type: ignore[misc]
            backend = group.leader._backend
            assert isinstance(backend, RecordingBackend)
            guides, guesses = RuleGuides(even_only, VOCABULARY_SIZE), Guesses(limits)
            events = CacheEvents(limits.block_size)
            engine = Engine(group.leader, guides=guides, drafting=guesses, cache_events=events)
            run = Run(engine, backend, guesses, events, late=even_only)
            requests = list(some_requests(random, limits))
            run.add(*requests)
            run.finish()
            run.check_tokens(requests, even_only)
            group.finish()
            for member in group.members:
                assert isinstance(member.backend, RecordingBackend)
                assert (member.backend.calls, member.backend.batches) == (backend.calls, backend.batches), seed


def test_a_group_speaks_over_tcp_too() -> None:
    with (
        free_ports() as port,
        group_of(lambda: RecordingBackend(LIMITS), 3, lambda run_dir: tcp_layout(run_dir, 3, port)) as group,
    ):
        engine = Engine(group.leader)
        asked = request("a", 9)
        engine.add(asked)
        tokens: list[int] = []
        while engine.has_work:
            for event in engine.step():
                tokens += event.token_ids
        assert tuple(tokens) == alone(asked)[0]
        group.finish()


class Apart(RecordingBackend):
    """Its node lacks an adapter."""

    def read_adapter(self, folder: Path) -> str:
        if folder.name == "lacking":
            raise FatalError(ExitCode.INVALID_ADAPTER, f"{folder} is not there")
        return super().read_adapter(folder)


def test_an_adapter_that_one_node_cannot_read_is_refused_and_the_group_goes_on() -> None:
    backends = iter([RecordingBackend, RecordingBackend, Apart])
    limits = dataclasses.replace(LIMITS, max_adapters=1, max_loaded_adapters=1, max_adapter_rank=8)
    with (
        free_ports() as port,
        group_of(lambda: next(backends)(limits), 3, lambda run_dir: tcp_layout(run_dir, 3, port)) as group,
    ):
        engine = Engine(group.leader)
        for name in ("lacking", "found"):
            engine.load_adapter(name, Path(name))
        told: dict[str, str] = {}
        tokens: list[int] = []
        asked = dataclasses.replace(request("a", 9), adapter="found")
        while len(told) < 2:
            engine.step()
            told |= dict(engine.take_adapter_news())
        assert told == {"found": "", "lacking": "rank 2 (node 2): lacking is not there"}
        engine.add(asked)
        while engine.has_work:
            tokens += [token for event in engine.step() for token in event.token_ids]
        assert len(tokens) == asked.sampling.max_tokens
        group.finish()
        for one in (group.leader._backend, *(member.backend for member in group.members)):
            assert isinstance(one, RecordingBackend)
            assert [call for call, _ in one.calls].count("add") == 1


def test_nodes_with_other_adapters_in_a_folder_do_not_serve_it() -> None:
    digests = iter(["one", "another"])
    with group_of(lambda: RecordingBackend(LIMITS), 2, digest_of=lambda folder: next(digests)) as group:
        with pytest.raises(FatalError, match="rank 1: it has another adapter there") as error:
            group.leader.read_adapter(Path("adapter"))
        assert error.value.exit_code is ExitCode.INVALID_ADAPTER
        group.finish()


class Busy(RecordingBackend):
    """It adds nothing until it may."""

    may_add = threading.Event()

    def add_adapter(self, digest: str, folder: Path, weights: str) -> None:
        assert self.may_add.wait(60)
        super().add_adapter(digest, folder, weights)


def test_adapters_are_read_ahead_of_a_busy_member_and_each_is_added_as_what_was_read() -> None:
    backends = iter([RecordingBackend, Busy])
    limits = dataclasses.replace(LIMITS, max_adapters=1, max_loaded_adapters=3, max_adapter_rank=8)
    with group_of(lambda: next(backends)(limits), 2) as group:
        for name in ("a", "b", "never", "c"):
            weights = group.leader.read_adapter(Path(name))
            if name != "never":
                group.leader.add_adapter(name, Path(name), weights)
        Busy.may_add.set()
        engine = Engine(group.leader)
        engine.add(request("x", 3))
        while engine.has_work:
            engine.step()
        group.finish()


class Liar(RecordingBackend):
    """From the third step on it samples other tokens."""

    def collect(self, step: int) -> StepOutput:
        output = super().collect(step)
        if step < 2:
            return output
        wrong = tuple(tuple(token + 1 for token in row) for row in output.token_ids)
        return replace(output, token_ids=wrong)


def test_tokens_that_differ_on_one_rank_are_never_released() -> None:
    backends = iter([RecordingBackend, RecordingBackend, Liar])
    with group_of(lambda: next(backends)(LIMITS), 3) as group:
        engine = Engine(group.leader)
        asked = request("a", 5)
        engine.add(asked)
        tokens: list[int] = []

        def run() -> None:
            while engine.has_work:
                for event in engine.step():
                    tokens.extend(event.token_ids)

        with pytest.raises(FatalError, match=r"rank 2: sampled other tokens in step 2") as error:
            run()
        assert error.value.exit_code == ExitCode.GROUP_DISAGREES
        assert tuple(tokens) == alone(asked)[0][:2]
        group.control.finish(error.value)
        for member in group.members:
            assert member.ends.wait().exit_code == ExitCode.GROUP_DISAGREES


def test_a_lost_step_ends_the_group() -> None:
    with group_of(lambda: RecordingBackend(LIMITS), 2) as group:
        group.channel._number += 1
        group.channel.send(wire.Collect, 0)
        (member,) = group.members
        member.thread.join(60)
        (error,) = member.raised
        assert isinstance(error, FatalError)
        assert error.exit_code == ExitCode.GROUP_MEMBER_LOST
        assert str(error) == "1 messages of rank 0 were lost before message 1"


@pytest.mark.parametrize(
    ("frame", "message"),
    [
        (b"", "not a frame of a group"),
        (b"\x80\x04K\x01.", "not a frame of a group"),
        (bytes([0xC7, 9]) + b"\x90", "protocol version 9 instead of 3"),
        (bytes([0xC7, 3]) + b"\xff" * 9, "cannot be read"),
        (wire.encode(Ack(1, "g", 2, b"")), "cannot be read"),
    ],
)
def test_a_frame_of_anything_else_is_refused(frame: bytes, message: str) -> None:
    with pytest.raises(wire.BadFrame, match=message):
        wire.decode_to_leader(frame)


def test_who_lacks_the_secret_is_not_heard() -> None:
    with (
        free_ports() as port,
        group_of(lambda: RecordingBackend(LIMITS), 2, lambda run_dir: tcp_layout(run_dir, 2, port)) as group,
    ):
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        stranger = wire.make_socket(context, zmq.DEALER, wire.MAX_MESSAGE_BYTES)
        refused = stranger.get_monitor_socket(
            zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_DISCONNECTED
        )
        Keys(b"another secret of at least 32 bytes").unlock(stranger)
        stranger.identity = b"1"
        stranger.connect(f"tcp://127.0.0.1:{port}")
        stranger.send(wire.encode(wire.Farewell(1, group.control.group, 31, "end")))
        assert refused.poll(60_000), "the leader keeps the connection of a stranger"
        assert group.control.failure is None
        stranger.disable_monitor()
        context.destroy(linger=0)
        group.finish()
