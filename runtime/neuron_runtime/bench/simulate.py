"""`neuron-runtime bench simulate`: predicts the capacity of a deployment, in virtual time.

Builds traffic and a device from the flags, runs our policy and a prefill-first policy, and compares them. Uses
`traffic`, `device`, `simulation` and, for the report, `simulated_tables`.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import asdict
from typing import TYPE_CHECKING

from neuron_runtime.bench.device import Device, add_device_arguments, device_of, value_of
from neuron_runtime.bench.report import Report, check_outputs, deliver
from neuron_runtime.bench.traffic import Traffic, conversations
from neuron_runtime.console import say
from neuron_runtime.errors import InvalidConfig

if TYPE_CHECKING:
    from neuron_runtime.bench.simulation import Outcome

SPANS = {
    "--short-prompt": ((50, 500), "tokens of a short prompt, minimum and maximum"),
    "--long-prompt": ((1500, 3500), "tokens of a long prompt"),
    "--answer": ((50, 400), "tokens of an answer"),
    "--follow-up": ((10, 100), "tokens that a follow-up question adds"),
}

WARM_UP_SECONDS = 30.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    traffic = parser.add_argument_group("traffic")
    traffic.add_argument(
        "--rate",
        type=float,
        nargs="+",
        default=[1.5],
        metavar="R",
        help="requests per second; several rates are compared (1.5)",
    )
    traffic.add_argument(
        "--seconds", type=float, default=300.0, metavar="S", help="seconds of measured traffic (%(default)s)"
    )
    traffic.add_argument(
        "--warm-up-seconds",
        type=float,
        metavar="S",
        help="traffic before the measurement (30 plus twice the pauses of a conversation)",
    )
    traffic.add_argument("--seed", type=int, default=0, metavar="N", help="seed of the traffic (%(default)s)")
    for flag, ((low, high), meaning) in SPANS.items():
        traffic.add_argument(
            flag, type=int, nargs=2, default=[low, high], metavar=("MIN", "MAX"), help=f"{meaning} ({low} {high})"
        )
    for flag, default, meaning in (
        ("--long-share", 0.1, "share of conversations that start with a long prompt"),
        ("--turns", 1.0, "mean number of requests per conversation"),
        ("--think-seconds", 10.0, "mean time between an answer and the follow-up"),
    ):
        traffic.add_argument(flag, type=float, default=default, metavar="X", help=f"{meaning} (%(default)s)")
    traffic.add_argument(
        "--system-prompt", type=int, default=0, metavar="N", help="tokens of a prefix of all prompts (%(default)s)"
    )
    device = parser.add_argument_group("device")
    add_device_arguments(device)
    device.add_argument(
        "--host-milliseconds", type=float, default=0.0, metavar="MS", help="host work before each step (%(default)s)"
    )
    policy = parser.add_argument_group("policy and targets")
    policy.add_argument(
        "--max-consecutive-prefills",
        type=int,
        default=1,
        metavar="N",
        help="consecutive prefill steps while requests decode (%(default)s)",
    )
    policy.add_argument(
        "--ttft-target",
        type=float,
        default=2000.0,
        metavar="MS",
        help="maximum time to first token of a good request (%(default)s)",
    )
    policy.add_argument(
        "--gap-target",
        type=float,
        default=250.0,
        metavar="MS",
        help="maximum gap between tokens of a good request (%(default)s)",
    )


def run(options: argparse.Namespace) -> None:
    from neuron_runtime.bench import simulated_tables  # noqa: PLC0415 - brings the engine

    check_outputs(options)
    check_numbers(options)
    device = device_of(options)
    runs = [simulated_tables.Run(rate, outcomes_at(rate, options, device)) for rate in options.rate]
    targets = simulated_tables.Targets(options.ttft_target / 1000, options.gap_target / 1000)
    left_out = {"command", "bench", "run", "measure", "record", "json", "plot"}
    settings = {name: value for name, value in vars(options).items() if name not in left_out}
    report = Report(
        "bench simulate",
        {**settings, "device": dict(device.settings), "limits": asdict(device.limits)},
        tuple(table for one in runs for table in simulated_tables.tables(one, targets)),
        data={"runs": [simulated_tables.curves(one, targets) for one in runs]},
        draw=lambda figure: simulated_tables.draw(figure, runs, targets),
        size_inches=(14.0, 8.4 if len(runs) > 1 else 4.8),
    )
    deliver(report, options)


def outcomes_at(rate: float, options: argparse.Namespace, device: Device) -> list[Outcome]:
    """The same traffic under both policies."""
    from neuron_runtime.bench.simulation import PREFILL_FIRST, Policy, Simulation  # noqa: PLC0415 - brings the engine

    traffic = Traffic(
        rate=rate,
        short_prompt=tuple(options.short_prompt),
        long_prompt=tuple(options.long_prompt),
        long_share=options.long_share,
        answer=tuple(options.answer),
        turns=options.turns,
        follow_up=tuple(options.follow_up),
        think_seconds=options.think_seconds,
        system_tokens=options.system_prompt,
    )
    warm_up = options.warm_up_seconds
    if warm_up is None:
        warm_up = WARM_UP_SECONDS + 2 * (options.turns - 1) * options.think_seconds
    outcomes = []
    for policy in (Policy("ours", options.max_consecutive_prefills), PREFILL_FIRST):
        began = time.monotonic()
        simulation = Simulation(
            conversations(traffic, options.seed, device.limits.max_model_length),
            device.limits,
            device.times,
            policy,
            warm_up_seconds=warm_up,
            seconds=options.seconds,
            host_seconds_per_step=options.host_milliseconds / 1000,
        )
        outcomes.append(simulation.run())
        if not outcomes[-1].requests:
            message = f"no request arrived within {options.seconds:g} s at {rate:g} requests/s: increase it"
            raise InvalidConfig("--seconds", message)
        say(f"{rate:g} requests/s, {policy.name}: simulated in {time.monotonic() - began:.1f} s")
    return outcomes


def check_numbers(options: argparse.Namespace) -> None:
    """Raises InvalidConfig, naming the flag."""
    for flag, least in (
        ("--warm-up-seconds", 0),
        ("--turns", 1),
        ("--think-seconds", 0),
        ("--system-prompt", 0),
        ("--host-milliseconds", 0),
        ("--max-consecutive-prefills", 1),
    ):
        value = value_of(options, flag)
        if value is not None and not value >= least:
            raise InvalidConfig(flag, f"must be at least {least}, got {value:g}")
    for flag, values in (
        ("--rate", options.rate),
        ("--seconds", [options.seconds]),
        ("--ttft-target", [options.ttft_target]),
        ("--gap-target", [options.gap_target]),
    ):
        if not min(values) > 0:
            raise InvalidConfig(flag, f"must be positive, got {min(values):g}")
    if not 0 <= options.long_share <= 1:
        raise InvalidConfig("--long-share", f"must be from 0 to 1, got {options.long_share:g}")
    for flag in SPANS:
        low, high = value_of(options, flag)
        if not 1 <= low <= high:
            raise InvalidConfig(flag, f"must be MIN MAX with 1 <= MIN <= MAX, got {low} {high}")
