"""The bench of the NxD Inference backend measures host work per step and the idle share of the device."""

from __future__ import annotations

import pytest

from bench import nxdi

pytestmark = pytest.mark.long


def test_the_device_idles_less_when_it_runs_a_step_ahead() -> None:
    alone, ahead = (
        nxdi.measure(4, "slots", asynchronous=asynchronous, num_rounds=2, round_steps=20)
        for asynchronous in (False, True)
    )
    assert 0.0 <= ahead.idle_share < alone.idle_share < 0.5
    for cost in (alone, ahead):
        assert 0.0 < cost.simulated_seconds < cost.step_seconds
        assert cost.thread_seconds > 0.0
    assert [row.unit for row in nxdi.figures([alone, ahead])] == ["ms", "%", "%"]
