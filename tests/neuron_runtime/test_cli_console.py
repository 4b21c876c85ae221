"""Progress lines on the console: each stage once, with its seconds."""

from __future__ import annotations

from neuron_runtime.console import StageLines


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
