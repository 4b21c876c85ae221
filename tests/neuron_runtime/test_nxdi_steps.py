"""What the NxD Inference backend passes to `forward()`, when, and what it makes of the answer or of an error."""

from __future__ import annotations

import threading
import time
from random import Random
from typing import Any

import pytest
import torch

from helpers.guides import mask_of
from helpers.nxdi_tokens import TokenApplication, next_token, settings_of
from neuron_runtime.backend.neuron.device import DeviceThread, device_parameters
from neuron_runtime.backend.neuron.step_graphs import Decode
from neuron_runtime.backend.nxdi.backend import NxdiBackend
from neuron_runtime.backend.nxdi.buckets import all_graphs, decode_graph, limits_of, prefill_graph, span_that_takes
from neuron_runtime.backend_protocol import IllegalBatch
from neuron_runtime.core import KNOWN, NO_TOKEN, Added, Batch, GraphUse, Late, Request, Rows, Sampling, StepOutput
from neuron_runtime.engine.loop import Engine
from neuron_runtime.errors import ExitCode, FatalError

GREEDY = Sampling(temperature=0.0, max_tokens=8)


def backend_of(**changes: Any) -> tuple[NxdiBackend, TokenApplication]:
    settings = settings_of(**changes)
    application = TokenApplication(settings)
    return NxdiBackend(application, settings, limits_of(settings, 600.0)), application


def prompt(step: int, slot: int, *tokens: int, sampling: Sampling = GREEDY, **changes: Any) -> Batch:
    """A step that computes the prompt of a new sequence, with slots or in blocks 0, 1, ..."""
    added = Added(slot, tokens, len(tokens), sampling, changes.pop("blocks", (slot,)))
    rows = Rows((slot,), (0,), (len(tokens),), (NO_TOKEN,), (KNOWN,), (True,))
    return Batch(step, changes.pop("rows", rows), 1, added=(added,), **changes)


def decode(step: int, *rows: tuple[int, int, int], **changes: Any) -> Batch:
    """Rows of (slot, position, token)."""
    slots, positions, tokens = zip(*rows, strict=True)
    count = len(rows)
    return Batch(step, Rows(slots, positions, (1,) * count, tokens, (KNOWN,) * count, (True,) * count), **changes)


def run(backend: NxdiBackend, batch: Batch, late: Late | None = None) -> StepOutput:
    backend.launch(batch)
    backend.sample(batch.step, late)
    return backend.collect(batch.step)


def serve(backend: NxdiBackend, *requests: Request) -> dict[str, list[int]]:
    engine = Engine(backend)
    tokens: dict[str, list[int]] = {one.request_id: [] for one in requests}
    for one in requests:
        engine.add(one)
    while engine.has_work:
        for event in engine.step():
            tokens[event.request_id] += event.token_ids
    return tokens


# Time


class SlowApplication(TokenApplication):
    """Answers only when it is allowed to."""

    def __init__(self, **changes: Any) -> None:
        super().__init__(settings_of(**changes))
        self.entered, self.allowed = threading.Semaphore(0), threading.Semaphore(0)

    def __call__(self, **given: torch.Tensor) -> Any:
        self.entered.release()
        assert self.allowed.acquire(timeout=10)
        return super().__call__(**given)


def test_the_next_step_is_launched_while_forward_blocks_and_gets_its_token_from_the_step_before() -> None:
    application = SlowApplication()
    backend = NxdiBackend(application, application.settings, limits_of(application.settings, 600.0))
    backend.launch(prompt(0, 0, 5, 6, 7))
    backend.sample(0, None)
    assert application.entered.acquire(timeout=10)
    backend.launch(Batch(1, Rows((0,), (0,), (1,), (NO_TOKEN,), (0,), (True,))))
    backend.sample(1, None)
    assert not application.calls, "the first step still runs, and the second one is ready"
    application.allowed.release(2)
    # Nobody collects the first step: the second one needs nothing from the engine.
    assert application.entered.acquire(timeout=10)
    ((first,),), ((second,),) = backend.collect(0).token_ids, backend.collect(1).token_ids
    assert application.calls[1]["input_ids"][0].tolist() == [first]
    assert application.calls[1]["position_ids"][0].tolist() == [3]
    assert second == next_token((5, 6, 7, first), (1.0, 1.0, 1.0), 997)
    backend.close()
    backend.close()


def test_jobs_of_a_device_run_one_by_one_and_their_errors_come_in_their_place() -> None:
    allowed = threading.Semaphore(0)

    def run_job(number: int) -> int:
        assert allowed.acquire(timeout=10)
        return 12 // number

    thread = DeviceThread(run_job)
    for number in (3, 0, 4):
        thread.put(number)
    allowed.release(3)
    assert thread.get() == 4
    with pytest.raises(ZeroDivisionError):
        thread.get()
    assert thread.get() == 3
    thread.close()
    thread.close()


def test_closing_waits_for_the_job_that_runs_and_drops_the_next() -> None:
    ran = []

    def run_job(number: int) -> None:
        while not thread._closed:
            time.sleep(0.001)
        ran.append(number)

    thread = DeviceThread(run_job)
    thread.put(1)
    thread.put(2)
    while thread._jobs.qsize() > 1:
        time.sleep(0.001)
    thread.close()
    assert ran == [1]


# Arguments


def test_a_prompt_takes_one_call_of_its_own_width() -> None:
    backend, application = backend_of()
    output = run(backend, prompt(0, 2, *range(20)))
    (call,) = application.calls
    assert call["input_ids"].tolist() == [list(range(20))]
    assert call["position_ids"].tolist() == [list(range(20))]
    assert call["seq_ids"].tolist() == [2]
    assert call["sampling_params"].tolist() == [[1.0, 1.0, 1.0]]
    assert output.graphs == (GraphUse("prefill_32", 20, 32),)


@pytest.mark.parametrize("layout", ["slots", "blocks"])
def test_a_prompt_of_one_token_fills_the_smallest_graph_with_positions_of_0(layout: str) -> None:
    backend, application = backend_of(layout=layout)
    output = run(backend, prompt(0, 0, 9))
    (call,) = application.calls
    assert call["position_ids"].tolist() == [[0] * 16]
    assert output.graphs == (GraphUse("prefill_16", 1, 16),)
    assert output.token_ids == ((next_token((9,), (1.0, 1.0, 1.0), 997),),)


def test_a_decode_call_holds_every_line_and_free_ones_repeat_the_first_row() -> None:
    backend, application = backend_of()
    for step, slot in enumerate((1, 3)):
        run(backend, prompt(step, slot, 1, 2, slot))
    # In whatever order the rows come, results are in theirs.
    output = run(backend, decode(2, (3, 3, 33), (1, 3, 11)))
    call = application.calls[-1]
    assert call["seq_ids"].tolist() == [0, 1, 2, 3]
    assert call["input_ids"].flatten().tolist() == [33, 11, 33, 33]
    expected = [next_token((1, 2, slot, token), (1.0, 1.0, 1.0), 997) for slot, token in ((3, 33), (1, 11))]
    assert [token for (token,) in output.token_ids] == expected


def test_a_smaller_graph_of_rows_serves_the_lowest_lines() -> None:
    backend, application = backend_of(row_buckets=(1, 2))
    run(backend, prompt(0, 0, 1, 2))
    run(backend, prompt(1, 1, 3, 4))
    assert run(backend, decode(2, (0, 2, 5), (1, 2, 6))).graphs == (GraphUse("decode_2x32", 2, 2),)
    assert application.calls[-1]["seq_ids"].tolist() == [0, 1]
    assert run(backend, decode(3, (1, 3, 8), released=(0,))).graphs == (GraphUse("decode_2x32", 1, 2),)
    run(backend, prompt(4, 0, 3, 4, released=(1,)))
    assert run(backend, decode(5, (0, 2, 9))).graphs == (GraphUse("decode_1x32", 1, 1),)


def test_a_segment_passes_the_prompt_from_its_beginning_and_the_slots_of_new_tokens() -> None:
    backend, application = backend_of(layout="blocks")
    tokens, blocks = tuple(range(40)), (7, 3, 9, 1, 4)
    added = Added(0, tokens, 40, GREEDY, blocks)
    first = Rows((0,), (0,), (32,), (NO_TOKEN,), (KNOWN,), (False,))
    assert run(backend, Batch(0, first, 1, added=(added,))).token_ids == ((),)
    second = Rows((0,), (0,), (8,), (NO_TOKEN,), (0,), (True,))
    backend.launch(batch := Batch(1, second, 1))
    assert backend.graph(batch) == "prefill_16_after_64"
    backend.sample(1, None)
    output = backend.collect(1)
    call = application.calls[-1]
    assert call["input_ids"].tolist() == [list(tokens)]
    assert call["slot_mapping"].tolist() == [[4 * 8 + offset for offset in range(8)]]
    assert call["block_table"].tolist() == [list(blocks)]
    assert (call["full_context_lens"].tolist(), call["computed_context_lens"].tolist()) == ([[40]], [[32]])
    assert output.token_ids == ((next_token(tokens, (1.0, 1.0, 1.0), 997),),)
    assert output.graphs == (GraphUse("prefill_16_after_64", 8, 16),)


def test_padding_rows_over_blocks_keep_nothing_and_each_sequence_has_a_number_of_its_own() -> None:
    backend, application = backend_of(layout="blocks")
    run(backend, prompt(0, 0, 1, 2, blocks=(5,)))
    run(backend, prompt(1, 1, 3, 4, blocks=(6,)))
    run(backend, decode(2, (0, 2, 8), (1, 2, 9)))
    call = application.calls[-1]
    assert call["slot_mapping"].flatten().tolist() == [5 * 8 + 2, 6 * 8 + 2, -1, -1]
    before = call["seq_ids"].tolist()
    run(backend, prompt(3, 0, 1, 2, blocks=(5,), released=(0,)))
    run(backend, decode(4, (0, 2, 8), (1, 3, 9)))
    after = application.calls[-1]["seq_ids"].tolist()
    assert after[1] == before[1]
    assert after[0] not in before, "asynchronous graphs tell sequences apart by their numbers"


def test_a_row_has_the_parameters_of_its_own_request_in_a_fresh_tensor() -> None:
    backend, application = backend_of()
    drawn = Sampling(temperature=0.5, top_k=7, top_p=0.25)
    run(backend, prompt(0, 0, 1, 2, sampling=drawn))
    run(backend, prompt(1, 2, 1, 2, sampling=GREEDY))
    # The application has overwritten the tensors of both calls.
    run(backend, decode(2, (2, 2, 4), (0, 2, 3)))
    assert [call["sampling_params"].tolist() for call in application.calls] == [
        [[7.0, 0.25, 0.5]],
        [[1.0, 1.0, 1.0]],
        [[7.0, 0.25, 0.5], [1.0, 1.0, 1.0], [1.0, 1.0, 1.0], [1.0, 1.0, 1.0]],
    ]


@pytest.mark.parametrize(
    ("sampling", "parameters"),
    [
        (Sampling(temperature=0.0, top_k=5), (1.0, 1.0, 1.0)),
        (Sampling(temperature=1e-9, top_p=0.5), (1.0, 1.0, 1.0)),
        (Sampling(temperature=0.7), (256.0, 1.0, 0.7)),
        (Sampling(temperature=0.7, top_k=1000), (256.0, 1.0, 0.7)),
        (Sampling(temperature=2.0, top_k=3, top_p=0.1), (3.0, 0.1, 2.0)),
    ],
)
def test_parameters_are_those_that_the_device_understands(
    sampling: Sampling, parameters: tuple[float, float, float]
) -> None:
    assert device_parameters(sampling, 256) == parameters


def test_parameters_stay_positive_and_finite_as_float32() -> None:
    found = torch.tensor(device_parameters(Sampling(temperature=1e300, top_p=1e-300), 256))
    assert bool((found > 0).all() & found.isfinite().all())


def many_steps(layout: str, *, follows: bool) -> tuple[list[dict[str, torch.Tensor]], list[StepOutput]]:
    """Two sequences decode over the ends of blocks and of a graph, while another slot is released.

    follows: rows refer to the step before; otherwise they name their positions and tokens.
    """
    backend, application = backend_of(layout=layout)
    blocks = layout == "blocks"
    run(backend, prompt(0, 0, 1, 2, 3, blocks=(5,) if blocks else (0,)))
    run(backend, prompt(1, 1, *range(21), blocks=(6, 7, 8) if blocks else (1,)))
    if blocks:
        added = Added(2, tuple(range(40)), 40, GREEDY, (9, 10, 11, 12, 13))
        chunk = Rows((2,), (0,), (32,), (NO_TOKEN,), (KNOWN,), (False,))
        run(backend, Batch(2, chunk, 1, added=(added,)))
    outputs = [run(backend, decode(3, (0, 3, 70), (1, 21, 71)))]
    lengths, free = [4, 22], iter(range(14, 32))
    for step in range(4, 24):
        appended = tuple((slot, next(free)) for slot in (0, 1) if blocks and lengths[slot] % 8 == 0)
        changes: dict[str, Any] = {"appended_blocks": appended, "released": (2,) if blocks and step == 10 else ()}
        if follows:
            rows = Rows((0, 1), (0, 0), (1, 1), (NO_TOKEN,) * 2, (0, 1), (True, True))
            batch = Batch(step, rows, **changes)
        else:
            (first,), (second,) = outputs[-1].token_ids
            batch = decode(step, (0, lengths[0], first), (1, lengths[1], second), **changes)
        outputs.append(run(backend, batch))
        lengths = [length + 1 for length in lengths]
    assert len(set(application.graphs[-20:])) == 2
    return application.calls, outputs


@pytest.mark.parametrize("layout", ["slots", "blocks"])
def test_rows_that_repeat_make_the_same_calls_as_rows_that_name_their_positions(layout: str) -> None:
    (calls, outputs), (plain, expected) = many_steps(layout, follows=True), many_steps(layout, follows=False)
    for call, other in zip(calls, plain, strict=True):
        assert {name: tensor.tolist() for name, tensor in call.items()} == {
            name: tensor.tolist() for name, tensor in other.items()
        }
    assert [(one.token_ids, one.graphs) for one in outputs] == [(one.token_ids, one.graphs) for one in expected]


def test_rows_that_repeat_need_blocks_and_lines_all_the_same() -> None:
    for layout, fed, blocks in (("slots", 62, (0,)), ("blocks", 22, (3, 4, 5))):
        backend, _ = backend_of(layout=layout)
        run(backend, prompt(0, 0, *range(fed), blocks=blocks))
        again = Rows((0,), (0,), (1,), (NO_TOKEN,), (0,), (True,))
        run(backend, decode(1, (0, fed, 7)))
        run(backend, Batch(2, again))
        with pytest.raises(IllegalBatch, match=f"step 3 .*{fed + 2}"):
            backend.launch(Batch(3, again))


def test_rows_that_repeat_cannot_keep_a_slot_that_is_released() -> None:
    backend, _ = backend_of()
    run(backend, prompt(0, 0, 1, 2))
    again = Rows((0,), (0,), (1,), (NO_TOKEN,), (0,), (True,))
    for step in (1, 2):
        run(backend, Batch(step, again))
    with pytest.raises(IllegalBatch, match="step 3 row 0 feeds positions 4 to 5 of slot 0"):
        backend.launch(Batch(3, again, released=(0,)))


# Graphs


def test_a_prompt_must_be_shorter_than_its_bucket_unless_that_is_the_largest() -> None:
    settings = settings_of()
    found = [prefill_graph(settings, 0, end).tokens for end in (15, 16, 31, 32, 63, 64)]
    assert found == [16, 32, 32, 64, 64, 64]
    with pytest.raises(ValueError, match="65 exceeds the largest bucket, 64"):
        prefill_graph(settings, 0, 65)


def test_a_decode_step_takes_the_first_longer_graph_with_row_buckets_an_equal_one_too() -> None:
    assert [decode_graph(settings_of(), 4, position).length for position in (31, 32, 63)] == [32, 64, 64]
    by_rows = settings_of(row_buckets=(1, 2))
    assert decode_graph(by_rows, 1, 32) == Decode(1, 32)
    assert decode_graph(by_rows, 3, 33) == Decode(4, 64)
    ahead = settings_of(asynchronous=True)
    assert [decode_graph(ahead, 4, position).length for position in (29, 30, 31, 32)] == [32, 64, 64, 64]


def test_free_places_of_a_prefill_take_cached_tokens_and_so_need_a_shorter_prefix() -> None:
    settings = settings_of(
        layout="blocks", context_buckets=(128, 512), prefix_buckets=(0, 512, 2048), max_model_length=4096
    )
    cases = {(0, 128): (128, 0), (100, 128): (128, 0), (512, 640): (128, 512), (600, 700): (128, 2048)}
    cases |= {(520, 600): (128, 512), (300, 400): (512, 0), (2000, 2512): (512, 2048)}
    assert {case: tuple(prefill_graph(settings, *case)) for case in cases} == cases
    with pytest.raises(ValueError, match="largest bucket, 2048"):
        prefill_graph(settings, 2100, 2612)


def test_a_call_is_found_for_every_graph_that_some_prompt_takes() -> None:
    random = Random(0)
    for _ in range(60):
        length = random.choice((384, 512, 768))
        settings = settings_of(
            layout="blocks",
            context_buckets=tuple(sorted({*random.choices((64, 128, 192, 256, 320, 384), k=2), min(length, 512)})),
            prefix_buckets=(0, *sorted({*random.choices((128, 192, 256, 512), k=1), length})),
            max_model_length=length,
        )
        calls = [(start, end) for end in range(32, length + 1, 32) for start in (*range(0, end, 32), end - 1)]
        taken = {prefill_graph(settings, *call) for call in calls if call[1] - call[0] <= settings.context_buckets[-1]}
        found = {graph: span_that_takes(settings, graph) for graph in taken}
        assert None not in found.values(), (settings, found)
        assert {graph: prefill_graph(settings, *call) for graph, call in found.items() if call} == {
            graph: graph for graph in taken
        }


@pytest.mark.parametrize("changes", [{}, {"row_buckets": (1, 2)}, {"layout": "blocks"}, {"asynchronous": True}])
def test_warm_up_times_every_graph_that_a_call_can_take(changes: dict[str, Any]) -> None:
    backend, application = backend_of(**changes)
    times = backend.warm_up(lambda stage, share: None)
    named = [backend.graph(batch) for batch, _ in times]
    compiled = {graph.name for graph in all_graphs(application.settings)}
    assert set(named) == set(application.graphs) == compiled
    assert len(named) == len(set(named))
    requests = [Request(f"r{i}", (1, 2, i), Sampling(temperature=0.0, max_tokens=6)) for i in range(5)]
    expected = serve(backend_of(**changes)[0], *requests)
    assert serve(backend, *requests) == expected, "a warm-up leaves no trace"


# The host's part


def test_with_logits_the_host_samples_only_rows_that_the_device_cannot() -> None:
    backend, _ = backend_of(sampling="DeviceWithLogits")
    wants = Sampling(temperature=0.0, logprobs=2)
    run(backend, prompt(0, 0, 1, 2))
    first = run(backend, prompt(1, 1, 3, 4, sampling=wants))
    # The application's logits and its tokens differ, which shows who sampled.
    assert first.token_ids == ((next_token((3, 4), (), 997),),)
    both = run(backend, decode(2, (0, 2, 5), (1, 2, 6)))
    assert both.token_ids == (
        (next_token((1, 2, 5), (1.0, 1.0, 1.0), 997),),
        (next_token((3, 4, 6), (), 997),),
    )
    assert [len(found) for found in both.logprobs] == [0, 1]
    assert both.logprobs[1][0].token_id == both.token_ids[1][0]
    masked = run(backend, decode(3, (0, 3, 5), (1, 3, 6)), Late((1,), mask_of((77,), 997)))
    assert masked.token_ids[1] == (77,)


def test_a_restriction_of_tokens_needs_logits() -> None:
    backend, _ = backend_of()
    backend.launch(prompt(0, 0, 1, 2))
    with pytest.raises(IllegalBatch, match="step 0 restricts tokens"):
        backend.sample(0, Late((0,), mask_of((5,), 997)))


# Errors


def test_nothing_runs_after_an_exception_of_forward() -> None:
    backend, application = backend_of()
    application.fails_at = 1
    run(backend, prompt(0, 0, 1, 2))
    backend.launch(decode(1, (0, 2, 5)))
    backend.sample(1, None)
    backend.launch(Batch(2, Rows((0,), (0,), (1,), (NO_TOKEN,), (0,), (True,))))
    backend.sample(2, None)
    for step in (1, 2):
        with pytest.raises(FatalError, match="NRT_EXEC_NC_BUSY") as caught:
            backend.collect(step)
        assert caught.value.exit_code == ExitCode.DEVICE_FAILED
    assert len(application.calls) == 2


def test_a_token_outside_the_vocabulary_is_a_failure_of_the_device() -> None:
    backend, application = backend_of()
    application._output = lambda contexts, parameters: type("Output", (), {"tokens": torch.tensor([5000])})()  # type: ignore[method-assign]
    backend.launch(prompt(0, 0, 1, 2))
    backend.sample(0, None)
    with pytest.raises(FatalError, match="token 5000"):
        backend.collect(0)


ILLEGAL = {
    "would overwrite slot 1": decode(9, (0, 2, 5)),
    "adds a sequence at slot 0, which is taken": prompt(9, 0, 1),
    "releases slot 3, which is free": decode(9, (0, 2, 5), (1, 2, 5), released=(3,)),
    "feeds positions 2 to 3 of slot 3": decode(9, (0, 2, 5), (1, 2, 5), (3, 2, 5)),
    "feeds positions 64 to 65": decode(9, (0, 64, 5), (1, 2, 5)),
    "waits for a row of another slot": Batch(9, Rows((0, 1), (0, 0), (1, 1), (NO_TOKEN,) * 2, (0, 0), (True,) * 2)),
}


@pytest.mark.parametrize("fault", ILLEGAL)
def test_an_illegal_batch_is_refused_before_the_device_sees_it(fault: str) -> None:
    backend, application = backend_of()
    run(backend, prompt(0, 0, 1, 2))
    run(backend, prompt(1, 1, 3, 4))
    with pytest.raises(IllegalBatch, match=fault):
        backend.launch(ILLEGAL[fault])
    assert len(application.calls) == 2
