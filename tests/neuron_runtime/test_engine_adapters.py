"""Adapters in the engine: places on the device, memory beyond them, and requests that wait for one of both."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from helpers.engine_driver import Run, request, serve, start
from neuron_runtime.core import BackendLimits, Request
from neuron_runtime.errors import ExitCode, FatalError, InvalidRequest

LIMITS = BackendLimits(
    max_rows=4,
    max_model_length=64,
    max_step_tokens=32,
    max_prefill_rows=4,
    block_size=4,
    num_blocks=64,
    max_adapters=2,
    max_loaded_adapters=3,
    max_adapter_rank=8,
)
DEVICE = replace(LIMITS, sampling="Device", steps_in_flight=2, token_feedback="device")


def asked(name: str, adapter: str, max_tokens: int = 8, priority: int = 0) -> Request:
    return replace(request(name, 5, max_tokens, priority), adapter=adapter)


def running(run: Run) -> set[str]:
    return {one.request.request_id for one in run.scheduler.running}


@pytest.mark.parametrize("limits", [LIMITS, DEVICE])
def test_rows_of_several_adapters_and_of_none_share_a_step(limits: BackendLimits) -> None:
    run = serve(limits, asked("a", "x"), asked("b", "y"), asked("c", ""), asked("d", "x"))
    widest = max(run.backend.batches, key=lambda batch: len(batch.rows))
    assert len(widest.rows) == 4
    assert [batch.adapters for batch in run.backend.batches if batch.adapters] == [((1, "x"), (2, "y"))]


def test_a_request_without_a_place_lets_others_pass() -> None:
    run = start(LIMITS)
    run.add(asked("a", "x", 20), asked("b", "y", 20), asked("held", "z", 2), asked("base", "", 4), asked("also x", "x"))
    run.step()
    assert running(run) == {"a", "b", "base", "also x"}
    run.finish()
    run.check_tokens([])


def test_a_held_request_starts_although_others_of_the_placed_adapters_keep_coming() -> None:
    run = start(replace(LIMITS, max_rows=3))
    run.add(asked("x0", "x", 8), asked("y0", "y", 8), asked("held", "z", 2))
    for number in range(1, 40):
        run.add(asked(f"x{number}", "x", 8), asked(f"y{number}", "y", 8))
        run.step()
        if "held" in run.reasons:
            break
    assert "held" in run.reasons
    assert number < 30
    run.finish()


def test_the_place_that_was_left_longest_ago_is_given_away() -> None:
    run = start(LIMITS)
    for name, adapter in (("a", "x"), ("b", "y"), ("c", "x"), ("d", "z")):
        run.add(asked(name, adapter, 2))
        run.finish()
    assert [batch.adapters for batch in run.backend.batches if batch.adapters] == [
        ((1, "x"),),
        ((2, "y"),),
        ((2, "z"),),
    ]


def test_adapters_beyond_those_in_memory_are_read_again() -> None:
    run = start(LIMITS)
    names = [f"adapter {number}" for number in range(6)]
    for name in names:
        run.load(name)
    assert [digest for digest, failure in run.engine.take_adapter_news() if not failure] == names
    assert len(run.backend._adapters) == 3
    everything = [asked(f"{name} {turn}", name, 3) for turn in range(2) for name in names]
    run.add(*everything)
    run.finish()
    run.check_tokens(everything)


def test_weights_that_have_two_names_in_two_folders_are_loaded_from_the_one_that_was_read() -> None:
    run = start(LIMITS, reads_at_once=False)
    for folder in ("one", "other"):
        run.engine.load_adapter("x", Path(folder))
    news: list[tuple[str, str]] = []
    while not news:
        news += run.engine.take_adapter_news()
    assert news == [("x", "")]


def test_a_request_waits_while_its_adapter_is_read_and_others_go_on() -> None:
    slow, may_end = start(LIMITS, reads_at_once=False), Event()
    read = slow.backend.read_adapter

    def wait_and_read(folder: Path) -> str:
        assert may_end.wait(60)
        return read(folder)

    slow.backend.read_adapter = wait_and_read  # type: ignore[method-assign]
    slow.add(asked("held", "x", 2), asked("base", "", 6))
    while "base" not in slow.reasons:
        slow.step()
    assert not slow.tokens["held"]
    assert slow.engine.stats.waiting_adapters == ("x",)
    may_end.set()
    slow.finish()
    slow.check_tokens([asked("held", "x", 2)])
    slow.engine.close()


@pytest.mark.parametrize("error", [FatalError(ExitCode.INVALID_MODEL, "no such tensor"), OSError("no such tensor")])
def test_an_adapter_that_cannot_be_read_ends_its_requests_alone(error: Exception) -> None:
    run = start(LIMITS)

    def fail(folder: Path) -> Any:
        raise error

    run.backend.read_adapter = fail  # type: ignore[method-assign]
    run.add(asked("base", ""))
    run.add(asked("bad", "x"))
    run.finish()
    [(name, refusal)] = run.engine.take_refused()
    assert (name, str(refusal)) == ("bad", "the adapter cannot be loaded: no such tensor")
    assert run.engine.take_adapter_news() == [("x", "no such tensor")]
    run.check_tokens([asked("base", "")])


def test_an_adapter_whose_files_have_changed_is_not_read_again() -> None:
    changed: set[str] = set()

    def check(digest: str, folder: Path) -> None:
        if digest in changed:
            raise FatalError(ExitCode.CHECKSUM_MISMATCH, "has changed")

    run = start(LIMITS)
    assert run.engine._adapters is not None
    run.engine._adapters._check = check
    first = [asked(f"first {name}", name, 2) for name in "wxyz"]
    run.add(*first)
    run.finish()
    run.check_tokens(first)
    run.engine.take_adapter_news()
    changed |= set("wxyz") - run.backend._adapters
    [gone] = changed
    run.add(asked("again", gone))
    run.finish()
    [(name, refusal)] = run.engine.take_refused()
    assert (name, str(refusal)) == ("again", "the adapter cannot be loaded: has changed")
    assert run.engine.take_adapter_news() == [(gone, "has changed")]


def test_a_dropped_adapter_serves_its_running_requests_and_no_further_one() -> None:
    run = start(LIMITS)
    run.add(asked("a", "x", 8))
    run.step()
    run.engine.drop_adapter("x")
    with pytest.raises(InvalidRequest, match="unloaded"):
        run.engine.add(asked("b", "x"))
    run.finish()
    run.check_tokens([asked("a", "x", 8)])
    assert run.engine.take_adapter_news() == []
    assert not run.backend._adapters


def test_an_adapter_is_loaded_again_after_it_was_dropped() -> None:
    run = start(LIMITS)
    run.add(asked("a", "x", 8))
    run.step()
    run.engine.drop_adapter("x")
    run.engine.load_adapter("x", Path("x"))
    run.add(asked("b", "x", 8))
    run.finish()
    run.check_tokens([asked("a", "x", 8), asked("b", "x", 8)])


def test_a_server_without_adapters_refuses_them() -> None:
    run = start(replace(LIMITS, max_adapters=0, max_loaded_adapters=0, max_adapter_rank=0))
    with pytest.raises(InvalidRequest, match="serves no adapters"):
        run.engine.add(asked("a", "x"))
    with pytest.raises(InvalidRequest, match="serves no adapters"):
        run.engine.load_adapter("x", Path("x"))
    run.engine.drop_adapter("x")
    assert run.engine.take_adapter_news() == []


def test_the_statistics_name_the_adapters_of_running_and_of_waiting_requests() -> None:
    run = start(LIMITS)
    run.add(asked("a", "x", 20), asked("b", "y", 20), asked("c", "z", 2))
    run.step()
    assert run.engine.stats.running_adapters == ("x", "y")
    assert run.engine.stats.waiting_adapters == ("z",)
    run.finish()
    assert run.engine.stats.running_adapters == ()


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_adapters": 2, "max_loaded_adapters": 1},
        {"max_adapters": 2, "max_adapter_rank": 0},
        {"max_adapters": 0},
    ],
)
def test_limits_of_adapters_fit_each_other(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="max_adapters needs"):
        replace(LIMITS, **wrong)  # type: ignore[arg-type]


def test_an_adapter_that_was_to_make_room_stays_if_room_is_found_without_it() -> None:
    run = start(LIMITS)
    run.add(*(asked(name, name, 6) for name in ("x", "y")), asked("z", "z", 20))
    run.step()
    run.load("w")  # "x" is to make room for it
    run.engine.take_adapter_news()
    run.engine.drop_adapter("z")
    run.engine.drop_adapter("w")
    run.finish()
    run.add(asked("again", "x", 4))
    run.finish()
    run.check_tokens([asked("again", "x", 4)])
    assert [name for name, _ in run.backend.calls].count("add") == 3


def test_an_adapter_that_cannot_be_read_again_is_news() -> None:
    run = start(LIMITS)
    for name in ("x", "y", "z", "w"):
        run.load(name)
        run.engine.take_adapter_news()

    def fail(folder: Path) -> Any:
        raise FatalError(ExitCode.INVALID_ADAPTER, "the disk is gone")

    run.backend.read_adapter = fail  # type: ignore[method-assign]
    run.add(asked("a", "x"))
    run.finish()
    assert run.engine.take_adapter_news() == [("x", "the disk is gone")]


def test_of_adapters_that_wait_for_room_only_one_is_in_memory() -> None:
    run = start(LIMITS)
    read, folders = run.backend.read_adapter, list[Path]()

    def count_and_read(folder: Path) -> str:
        folders.append(folder)
        return read(folder)

    run.backend.read_adapter = count_and_read  # type: ignore[method-assign]
    waiting = [asked(name, name, 20) for name in ("x", "y", "z", "u", "v", "w")]
    run.add(*waiting[:3])
    run.step()
    run.add(*waiting[3:])
    run.step()
    assert len(folders) == 4
    run.engine.drop_adapter("w")
    run.finish()
    assert [name for name, _ in run.engine.take_refused()] == ["w"]
    run.check_tokens(waiting[:5])
