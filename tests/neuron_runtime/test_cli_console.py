"""Progress lines on the console: each stage once, with its seconds; amounts of bytes."""

from __future__ import annotations

import pytest

from neuron_runtime.console import CLEAR_LINE, AmountLine, StageLines


def shown(*calls: tuple[float, str, float]) -> list[str]:
    """Lines for calls of (time, stage, share)."""
    lines: list[str] = []
    now = [0.0]
    stages = StageLines(lines.append, lambda: now[0])
    for at, stage, share in calls:
        now[0] = at
        stages(stage, share)
    return lines


def test_a_stage_is_printed_once_when_it_ends() -> None:
    assert shown((0.0, "load", 0.0), (1.0, "load", 0.5), (2.5, "load", 1.0)) == ["load: 2.5 s"]


def test_a_stage_ends_when_the_next_one_starts() -> None:
    assert shown((0.0, "start", 0.0), (3.0, "load", 0.0), (4.0, "load", 1.0)) == ["start: 3.0 s", "load: 1.0 s"]


def test_a_long_stage_prints_its_progress_every_few_seconds() -> None:
    lines = shown(*((float(at), "fetch", at / 20) for at in range(21)))
    assert lines == ["fetch: 25% after 5 s", "fetch: 50% after 10 s", "fetch: 75% after 15 s", "fetch: 20.0 s"]


def test_a_long_stage_of_unknown_length_prints_its_time() -> None:
    assert shown((0.0, "compile", 0.0), (6.0, "compile", 0.0), (7.0, "compile", 1.0)) == [
        "compile: 6 s so far",
        "compile: 7.0 s",
    ]


def amounts(*calls: tuple[float, int], capsys: pytest.CaptureFixture[str], terminal: bool) -> str:
    """Output for calls of (time, bytes done) of 100 MiB."""
    now = [0.0]
    line = AmountLine("model", terminal, lambda: now[0])
    for at, num_mib in calls:
        now[0] = at
        line(num_mib * 2**20, 100 * 2**20)
    return capsys.readouterr().err


def test_bytes_rate_and_time_left_are_printed_soon_and_every_ten_seconds(capsys: pytest.CaptureFixture[str]) -> None:
    printed = amounts(*((float(at), 2 * at) for at in range(25)), capsys=capsys, terminal=False)
    assert printed == (
        "neuron-runtime: model: 2.00 MiB of 100.00 MiB (2%), 2.00 MiB/s, 49 s left\n"
        "neuron-runtime: model: 22.00 MiB of 100.00 MiB (22%), 2.00 MiB/s, 39 s left\n"
        "neuron-runtime: model: 42.00 MiB of 100.00 MiB (42%), 2.00 MiB/s, 29 s left\n"
    )


def test_a_terminal_shows_one_line_that_is_redrawn_every_second(capsys: pytest.CaptureFixture[str]) -> None:
    printed = amounts((0.1, 0), (1.0, 0), (1.5, 5), (2.0, 10), capsys=capsys, terminal=True)
    assert printed == (
        f"{CLEAR_LINE}neuron-runtime: model: 0 bytes of 100.00 MiB (0%)"
        f"{CLEAR_LINE}neuron-runtime: model: 10.00 MiB of 100.00 MiB (10%), 5.26 MiB/s, 17 s left"
    )
