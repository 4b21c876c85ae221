"""`neuron-runtime bench host`: what a step costs the host, and how busy the device is meanwhile, without a device.

See `host_cost` for what is measured. The table of figures takes its rows from here.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from neuron_runtime.bench.report import Report, Row, Table, at_least, at_most, check_outputs, deliver, machine_line
from neuron_runtime.errors import InvalidConfig

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from neuron_runtime.bench.host_cost import HostCost

FEEDBACKS: tuple[Literal["device", "host"], ...] = ("device", "host")
ROWS = (64, 256)
NUM_ROUNDS = 8

BUSY_TARGETS = {("device", 64): 0.99, ("device", 256): 0.97, ("host", 64): 0.96, ("host", 256): 0.90}
STEP_TARGETS = {64: 0.5, 256: 1.5}
"""Milliseconds by rows."""
STEP_AIMS = {64: 0.25, 256: 0.8}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rows", type=int, nargs="+", default=list(ROWS), metavar="N", help="rows of a step (64 256)")
    parser.add_argument(
        "--rounds",
        type=int,
        default=NUM_ROUNDS,
        metavar="N",
        help="rounds of 100 steps, the quietest counts (%(default)s)",
    )


def run(options: argparse.Namespace) -> None:
    check_outputs(options)
    for flag, values in (("--rows", options.rows), ("--rounds", [options.rounds])):
        if min(values) < 1:
            raise InvalidConfig(flag, f"must be at least 1, got {min(values)}")
    costs = measure_all(options.rows, options.rounds)
    table = Table(f"Host time per step, {machine_line()}", figures(costs))
    report = Report(
        "bench host",
        {"rows": options.rows, "rounds": options.rounds},
        (table,),
        draw=lambda figure: draw(figure, costs),
        size_inches=(10.0, 4.5),
    )
    deliver(report, options)


def measure_all(rows: Sequence[int] = ROWS, num_rounds: int = NUM_ROUNDS) -> list[HostCost]:
    """One measurement for each kind of feedback and number of rows."""
    from neuron_runtime.bench.host_cost import measure  # noqa: PLC0415 - brings the engine

    return [measure(count, feedback, num_rounds=num_rounds) for feedback in FEEDBACKS for count in rows]


def figures(costs: Sequence[HostCost]) -> tuple[Row, ...]:
    """As rows of a table."""
    busy = [
        Row(
            f"device busy, {cost.rows} rows, {cost.feedback} feedback",
            (cost.busy_share * 100,),
            "%",
            None if (target := BUSY_TARGETS.get((cost.feedback, cost.rows))) is None else at_least(target * 100),
            "steps of 8 ms, clock of CPU seconds",
            cost.load,
        )
        for cost in costs
    ]
    spent = [
        Row(
            f"host time per step, {cost.rows} rows, {cost.feedback} feedback",
            (cost.step_seconds * 1000,),
            "ms",
            None if (target := STEP_TARGETS.get(cost.rows)) is None else at_most(target),
            _step_note(cost),
            cost.load,
        )
        for cost in costs
    ]
    return (*busy, *spent)


def _step_note(cost: HostCost) -> str:
    aim = f"aim {STEP_AIMS[cost.rows]}; " if cost.rows in STEP_AIMS else ""
    return f"{aim}median {cost.median_step_seconds * 1000:.3f}; message {cost.message_seconds * 1000:.3f} more"


def draw(figure: Figure, costs: Sequence[HostCost]) -> None:
    names = [f"{cost.rows} rows\n{cost.feedback}" for cost in costs]
    left, right = figure.subplots(1, 2)
    bottom = [0.0] * len(costs)
    for label, seconds in (
        ("schedule and apply", [cost.step_seconds - cost.backend_seconds for cost in costs]),
        ("simulated backend", [cost.backend_seconds for cost in costs]),
        ("message to the front end", [cost.message_seconds for cost in costs]),
    ):
        left.bar(names, [value * 1000 for value in seconds], bottom=bottom, label=label, width=0.6)
        bottom = [low + value * 1000 for low, value in zip(bottom, seconds, strict=True)]
    right.plot(names, [cost.busy_share * 100 for cost in costs], "o", color="tab:green", label="measured", markersize=9)
    for panel, targets in (
        (left, [STEP_TARGETS.get(cost.rows) for cost in costs]),
        (right, [BUSY_TARGETS.get((cost.feedback, cost.rows)) for cost in costs]),
    ):
        scale = 100 if panel is right else 1
        lines = [(at, target * scale) for at, target in enumerate(targets) if target is not None]
        if lines:
            places, values = zip(*lines, strict=True)
            begin, end = [at - 0.35 for at in places], [at + 0.35 for at in places]
            panel.hlines(values, begin, end, color="black", label="target")
        panel.grid(axis="y", alpha=0.3)
        panel.set_axisbelow(True)
        panel.set_xlabel("rows of a step, who feeds tokens back")
    left.set_title("Host time per step")
    left.set_ylabel("CPU milliseconds")
    right.set_title("Device busy, steps of 8 ms")
    right.set_ylabel("% of the time")
    right.margins(x=0.15)
    left.legend(loc="upper center", bbox_to_anchor=(0.5, -0.25), ncols=2, frameon=False)
    right.legend(loc="upper center", bbox_to_anchor=(0.5, -0.25), ncols=2, frameon=False)
