"""The torch backend behind the protocol, driven by explicit batches: mirror, overlap, late masks, illegal batches."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file

from helpers.guides import mask_of
from helpers.torch_models import load_backend, random_model, reference, reference_logits
from neuron_runtime.backend.host_sampling.drawing import NotFinite
from neuron_runtime.backend.torch.backend import TorchBackend
from neuron_runtime.backend_protocol import IllegalBatch
from neuron_runtime.checkpoint import InvalidModel
from neuron_runtime.core import KNOWN, NO_TOKEN, Added, Batch, Late, Rows, Sampling, StepKind, StepOutput
from neuron_runtime.errors import ExitCode

GREEDY = Sampling(temperature=0.0)
PROMPT = tuple(range(40, 53))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(params=["slots", "blocks"])
def backend(request: pytest.FixtureRequest, folder: Path) -> Iterator[TorchBackend]:
    backend = load_backend(folder, layout=request.param, max_sequences=4, max_model_length=64)
    yield backend
    backend.close()


def rows(*given: tuple[int, int, int, bool], token: int = NO_TOKEN, after: int = KNOWN) -> Rows:
    """Rows of (slot, start, num_tokens, samples); token and after apply to the first row only."""
    slot, start, num_tokens, samples = zip(*given, strict=True)
    rest = len(given) - 1
    return Rows(
        slot, start, num_tokens, (token, *(NO_TOKEN,) * rest), (after, *(KNOWN,) * rest), tuple(map(bool, samples))
    )


def added(backend: TorchBackend, slot: int, tokens: tuple[int, ...] = PROMPT, **changes: Any) -> Added:
    per_slot = backend.limits.max_model_length // backend.limits.block_size
    blocks = tuple(range(slot * per_slot, (slot + 1) * per_slot))
    return msgspec.structs.replace(Added(slot, tokens, len(tokens), GREEDY, blocks), **changes)


def run(backend: TorchBackend, step: int, rows: Rows, late: Late | None = None, **delta: Any) -> StepOutput:
    backend.launch(Batch(step=step, rows=rows, num_prefills=len(rows), **delta))
    backend.sample(step, late)
    return backend.collect(step)


def greedy(folder: Path, tokens: tuple[int, ...], count: int) -> tuple[int, ...]:
    model = reference(folder)
    for _ in range(count):
        tokens += (int(reference_logits(model, tokens)[-1].argmax()),)
    return tokens[-count:]


def test_a_row_reads_the_token_of_the_step_in_flight_before_it_is_collected(
    backend: TorchBackend, folder: Path
) -> None:
    prefill = Batch(0, rows((1, 0, 5, False)), 1, added=(added(backend, 1),))
    steps = [prefill, Batch(1, rows((1, 0, 8, True), after=0), 1)]
    steps += [Batch(n, rows((1, 0, 1, True), after=0)) for n in range(2, 5)]
    for batch in steps:
        backend.launch(batch)
        backend.sample(batch.step, None)
    outputs = [backend.collect(batch.step) for batch in steps]
    assert outputs[0].token_ids == ((),)
    assert tuple(output.token_ids[0][0] for output in outputs[1:]) == greedy(folder, PROMPT, 4)
    assert all(output.device_seconds > 0 for output in outputs)


def test_the_caller_schedules_while_the_device_works(backend: TorchBackend) -> None:
    gate = threading.Event()
    backend._thread.submit(gate.wait)
    backend.launch(Batch(0, rows((0, 0, 13, True)), 1, added=(added(backend, 0),)))
    backend.sample(0, None)
    backend.launch(Batch(1, rows((0, 0, 1, True), after=0)))
    backend.sample(1, None)
    gate.set()
    assert len(backend.collect(0).token_ids[0]) == len(backend.collect(1).token_ids[0]) == 1


def test_a_token_named_by_the_row_overrides_the_sampled_one(backend: TorchBackend, folder: Path) -> None:
    run(backend, 0, rows((0, 0, 13, True)), added=(added(backend, 0),))
    output = run(backend, 1, rows((0, 13, 1, True), token=99))
    assert output.token_ids[0] == greedy(folder, (*PROMPT, 99), 1)


def test_a_preempted_sequence_resumes_elsewhere_with_the_same_draws(backend: TorchBackend) -> None:
    drawing = Sampling(temperature=1.0, seed=5)
    first = run(backend, 0, rows((0, 0, 13, True)), added=(added(backend, 0, sampling=drawing),)).token_ids[0]
    second = run(backend, 1, rows((0, 13, 1, True))).token_ids[0]
    again = added(backend, 3, (*PROMPT, *first), num_prompt_tokens=len(PROMPT), sampling=drawing)
    resumed = run(backend, 2, rows((3, 0, 14, True)), released=(0,), added=(again,)).token_ids[0]
    assert resumed == second


def test_the_last_position_of_the_model_is_usable(backend: TorchBackend) -> None:
    tokens = tuple(range(64))
    output = run(backend, 0, rows((2, 0, 64, True)), added=(added(backend, 2, tokens),))
    assert len(output.token_ids[0]) == 1


def test_late_masks_apply_to_their_row_only(backend: TorchBackend, folder: Path) -> None:
    both = (added(backend, 0), added(backend, 1))
    late = Late((1,), mask_of((3, 4), 512))
    output = run(backend, 0, rows((0, 0, 13, True), (1, 0, 13, True)), late, added=both)
    assert output.token_ids[0] == greedy(folder, PROMPT, 1)
    assert output.token_ids[1][0] in (3, 4)
    # The row feeds the token chosen with the mask next.
    after = run(backend, 1, rows((1, 13, 1, True)))
    assert after.token_ids[0] == greedy(folder, (*PROMPT, output.token_ids[1][0]), 1)


def test_logprobs_are_returned_for_requesting_rows_only(backend: TorchBackend, folder: Path) -> None:
    asks = replace(GREEDY, logprobs=3)
    both = (added(backend, 0), added(backend, 1, sampling=asks))
    output = run(backend, 0, rows((0, 0, 13, True), (1, 0, 13, True)), added=both)
    expected = reference_logits(reference(folder), PROMPT)[-1].log_softmax(-1)
    none, (found,) = output.logprobs
    assert none == ()
    assert found.logprob == pytest.approx(expected.max().item(), abs=1e-4)
    assert [token for token, _ in found.top] == expected.topk(3).indices.tolist()
    assert run(backend, 1, rows((0, 13, 1, True))).logprobs == ()


def test_a_second_sequence_uses_shared_prefix_blocks(folder: Path) -> None:
    backend = load_backend(folder, layout="blocks", block_size=8, max_model_length=64)
    other = (*PROMPT[:8], 7, 6, 5)
    run(backend, 0, rows((0, 0, 13, True)), added=(added(backend, 0, blocks=(5, 2)),))
    output = run(backend, 1, rows((1, 8, 3, True)), added=(added(backend, 1, other, blocks=(5, 9)),))
    assert output.token_ids[0] == greedy(folder, other, 1)
    backend.close()


def test_a_row_beyond_the_blocks_of_its_slot_is_refused(folder: Path) -> None:
    backend = load_backend(folder, layout="blocks", block_size=8, max_model_length=64)
    run(backend, 0, rows((0, 0, 13, True)), added=(added(backend, 0, blocks=(5, 2)),))
    run(backend, 1, rows((0, 13, 1, True)))
    run(backend, 2, rows((0, 14, 1, True)))
    with pytest.raises(IllegalBatch, match="in 2 blocks"):
        run(backend, 3, rows((0, 16, 1, True), token=1))
    backend.close()


def test_warm_up_leaves_no_trace(backend: TorchBackend, folder: Path) -> None:
    seen: list[float] = []
    times = backend.warm_up(lambda what, share: seen.append(share))
    assert (seen[0], seen[-1]) == (0.0, 1.0)
    assert [(batch.kind, len(batch.rows)) for batch, _ in times] == [(StepKind.PREFILL, 1), (StepKind.DECODE, 1)]
    assert all(seconds > 0 for _, seconds in times)
    output = run(backend, 0, rows((0, 0, 13, True)), added=(added(backend, 0),))
    assert output.token_ids[0] == greedy(folder, PROMPT, 1)


ILLEGAL: dict[str, tuple[Rows, dict[str, Any], str]] = {
    "a free slot": (rows((2, 0, 1, True)), {}, "of slot 2"),
    "tokens nobody knows": (rows((0, 13, 2, True)), {}, "which has 14 tokens"),
    "no tokens": (rows((0, 13, 0, True)), {}, "positions 13 to 13"),
    "beyond its blocks": (rows((0, 64, 1, True), token=3), {}, "positions 64 to 65"),
    "waiting for another slot's row": (rows((1, 0, 1, True), after=0), {}, "waits for a row of another slot"),
    "waiting for a row that is not": (rows((0, 0, 1, True), after=4), {}, "waits for a row of another slot"),
    "releasing a free slot": (rows((0, 13, 1, True)), {"released": (3,)}, "releases slot 3"),
    "a block that is not": (rows((0, 13, 1, True)), {"appended_blocks": ((0, 10_000),)}, "gives block 10000"),
}


@pytest.mark.parametrize("case", ILLEGAL)
def test_an_illegal_batch_is_refused_with_the_fault(case: str, backend: TorchBackend) -> None:
    bad_rows, delta, message = ILLEGAL[case]
    run(backend, 0, rows((0, 0, 13, True)), added=(added(backend, 0),))
    with pytest.raises(IllegalBatch, match=message):
        run(backend, 1, bad_rows, **delta)


def test_adding_to_an_occupied_slot_or_too_many_tokens_is_refused(backend: TorchBackend) -> None:
    run(backend, 0, rows((0, 0, 13, True)), added=(added(backend, 0),))
    with pytest.raises(IllegalBatch, match="at slot 0, which is taken"):
        run(backend, 1, rows((0, 0, 13, True)), added=(added(backend, 0),))
    with pytest.raises(IllegalBatch, match="adds 65 tokens"):
        run(backend, 2, rows((1, 0, 13, True)), added=(added(backend, 1, tuple(range(65))),))


def test_an_error_on_the_device_thread_is_raised_at_collect(
    backend: TorchBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*arguments: Any) -> torch.Tensor:
        raise MemoryError("no scratch")

    monkeypatch.setattr(backend._decoder, "forward", fails)
    backend.launch(Batch(0, rows((0, 0, 13, True)), 1, added=(added(backend, 0),)))
    backend.sample(0, None)
    with pytest.raises(MemoryError, match="no scratch"):
        backend.collect(0)


def spoil(folder: Path, tensor: str, rows: slice) -> Path:
    """NaN in some rows of a weight."""
    tensors = load_file(folder / "model.safetensors")
    tensors[tensor][rows] = torch.nan
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(), Sampling(top_k=5), Sampling(top_p=0.5)])
def test_a_row_with_nan_logits_fails_naming_its_request(sampling: Sampling, tmp_path: Path) -> None:
    spoil(random_model(tmp_path), "model.embed_tokens.weight", slice(PROMPT[4], PROMPT[4] + 1))
    backend = load_backend(tmp_path, layout="slots", max_sequences=4, max_model_length=64)
    backend.warm_up(lambda what, share: None)
    run(backend, 0, rows((0, 0, 3, True)), added=(added(backend, 0, (1, 2, 3), sampling=sampling),))
    with pytest.raises(NotFinite, match="1 of the requests") as caught:
        run(backend, 1, rows((0, 3, 1, True), (1, 0, 13, True)), added=(added(backend, 1, sampling=sampling),))
    assert caught.value.exit_code is ExitCode.DEVICE_FAILED
    backend.close()


def test_a_model_that_computes_only_nan_is_invalid(tmp_path: Path) -> None:
    backend = load_backend(spoil(random_model(tmp_path), "model.norm.weight", slice(3, 4)))
    with pytest.raises(InvalidModel, match="not finite"):
        backend.warm_up(lambda what, share: None)
    backend.close()
