"""The worker of the engine process: messages of the front end in, one message per step out, over a border of lists."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from helpers.engine_driver import request
from helpers.strict_backend import StrictBackend, neuron_limits
from helpers.torch_models import runtime_config
from neuron_runtime.core import BackendLimits, Batch, PrefillBucket
from neuron_runtime.engine.backends import warn_of_limits
from neuron_runtime.engine.loop import Engine
from neuron_runtime.engine.messages import (
    AdapterNews,
    Add,
    DropAdapter,
    FromEngine,
    Joined,
    LoadAdapter,
    Step,
    ToEngine,
)
from neuron_runtime.errors import ExitCode, FatalError
from neuron_runtime.processes import engine as process
from neuron_runtime.processes.engine import Border, Worker
from neuron_runtime.processes.lifeline import Deadline


@pytest.mark.parametrize(
    ("length", "configured", "says"),
    [
        (127, 127, "only 127 tokens: so it is configured (maxModelLength)"),
        (16, 0, "only 16 tokens: the model or the free memory allow no more (maxModelLength)"),
        (128, 128, ""),
    ],
)
def test_a_very_short_model_length_is_reported(
    length: int, configured: int, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    config = runtime_config(max_model_length=configured)
    warn_of_limits(config, neuron_limits(max_model_length=length))
    assert capsys.readouterr().err == (
        f"neuron-runtime: warning: prompt and answer together may have {says}\n" if says else ""
    )


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (
            {"chunks_prefill": False},
            "refused, and of requests that may grow longer (256 by default) blocks suffice for 3 at once",
        ),
        ({"chunks_prefill": False, "num_blocks": 64}, "longer prompts are refused (buckets.context"),
        ({"max_prefill_start": 100}, "warning: at most 128 of the model's 256 tokens can be prefilled"),
        ({}, ""),
    ],
)
def test_what_a_short_prefill_costs_is_reported(
    changes: dict[str, Any], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    buckets = (PrefillBucket(32, 32), PrefillBucket(64, 64))
    limits = BackendLimits(
        max_rows=4, max_model_length=256, max_step_tokens=128, num_blocks=50, prefill_buckets=buckets
    )
    warn_of_limits(runtime_config(), replace(limits, **changes))
    stated = capsys.readouterr().err
    assert says in stated
    assert bool(says) == bool(stated)


class Lists:
    """A border whose inbox the test fills, one list per turn."""

    def __init__(self) -> None:
        self.mail: list[ToEngine] = []
        self.sent: list[FromEngine] = []

    def receive(self, wait: bool) -> list[ToEngine]:
        mail, self.mail = self.mail, []
        return mail

    def send(self, message: FromEngine) -> None:
        self.sent.append(message)

    @property
    def refused(self) -> list[str]:
        return [one.request_id for step in self.sent if isinstance(step, Step) for one in step.refused]

    def resend_model(self) -> None:
        pass


@pytest.fixture
def deadline(tmp_path: Path) -> Iterator[Deadline]:
    with Deadline(tmp_path / "deadline") as made:
        yield made


def test_requests_of_a_replaced_front_end_are_dropped_whether_they_arrive_before_or_after_its_successor(
    deadline: Deadline,
) -> None:
    engine, border = Engine(StrictBackend(neuron_limits())), Lists()
    worker = Worker(engine, cast(Any, border), deadline)
    border.mail = [Add(request("8", 3)), Joined(first_number=100), Add(request("9", 3)), Add(request("100", 3))]
    worker.turn()
    border.mail = [Add(request("10", 3)), Add(request("101", 3))]
    worker.turn()
    assert sorted(engine.request_ids) == ["100", "101"]


def test_refusals_are_sent_before_the_step_and_only_once(deadline: Deadline) -> None:
    border = Lists()
    refused_at_launch: list[list[str]] = []

    class Watching(StrictBackend):
        def launch(self, batch: Batch) -> None:
            refused_at_launch.append(border.refused)
            super().launch(batch)

    worker = Worker(Engine(Watching(neuron_limits(max_rows=1)), max_queued_requests=1), cast(Any, border), deadline)
    border.mail = [Add(request(f"{number}", 3)) for number in range(3)]
    worker.turn()
    assert refused_at_launch[0] == ["2"]
    assert border.refused == ["2"]


def test_the_outcome_of_each_load_of_an_adapter_is_sent(deadline: Deadline) -> None:
    class OneIsBroken(StrictBackend):
        def read_adapter(self, folder: Path) -> str:
            if folder.name == "broken":
                raise FatalError(ExitCode.INVALID_MODEL, "no such tensor")
            return super().read_adapter(folder)

    limits = replace(neuron_limits(), max_adapters=1, max_loaded_adapters=2, max_adapter_rank=8)
    engine, border = Engine(OneIsBroken(limits)), Lists()
    worker = Worker(engine, cast(Any, border), deadline)
    border.mail = [LoadAdapter("x", "fine"), LoadAdapter("y", "broken"), DropAdapter("unknown")]
    worker.turn()
    while engine.is_reading:
        worker.turn()
    news = [message for message in border.sent if isinstance(message, AdapterNews)]
    assert news == [AdapterNews("x"), AdapterNews("y", "no such tensor")]
    border.mail, border.sent = [LoadAdapter("x", "fine")], []  # for a front end that replaces another one
    worker.turn()
    worker.turn()
    assert AdapterNews("x") in border.sent
    engine.close()


def test_an_idle_engine_shows_that_it_lives(deadline: Deadline, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "IDLE_MILLISECONDS", 1)
    late: list[float] = []

    def stopping() -> bool:
        late.append(deadline.late_seconds)
        deadline.set(-1.0)
        return len(late) > 3

    with tempfile.TemporaryDirectory(prefix="nr-") as folder:
        border = Border(Path(folder), 1)
        Worker(Engine(StrictBackend(neuron_limits())), border, deadline).run(stopping)
        border.close()
    assert late == [0, 0, 0, 0]
    # What follows has no deadline.
    assert deadline.overdue_seconds == 0
