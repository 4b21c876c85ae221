"""`neuron-runtime bench simulate`: predicts the capacity of a deployment, in virtual time.

Runs our policy and those of other engines on traffic and a device that the flags describe, and compares them. Every
start of `neuron-runtime` reads these flags, so the module is cheap to import.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import asdict
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from neuron_runtime.bench.device import Device, add_device_arguments, device_of, value_of
from neuron_runtime.bench.planned import shapes_of_plan
from neuron_runtime.bench.traffic import Traffic, conversations
from neuron_runtime.console import say
from neuron_runtime.errors import InvalidConfig
from neuron_runtime.flags import write_json

if TYPE_CHECKING:
    from neuron_runtime.bench.simulated_tables import Speeds
    from neuron_runtime.bench.simulation import Outcome, Policy

SPANS = {
    "--short-prompt": ((50, 500), "tokens of a short prompt, minimum and maximum"),
    "--long-prompt": ((1500, 3500), "tokens of a long prompt"),
    "--answer": ((50, 400), "tokens of an answer"),
    "--follow-up": ((10, 100), "tokens that a follow-up question adds"),
}

WARM_UP_SECONDS = 30.0

GROUP_SECONDS, RANK_SECONDS = 150e-6, 25e-6
"""The leader's CPU time per step of 64 rows, measured with 2 to 12 ranks on one machine (`bench.group`)."""

REPORT_VERSION = 1

POLICY_NAMES = ["prefill-first", "vllm-neuron"]
"""The keys of `simulation.POLICIES`, which brings the engine."""


def add_commands(bench: argparse.ArgumentParser) -> None:
    commands = bench.add_subparsers(dest="bench", required=True, metavar="COMMAND")
    meaning = "capacity of a deployment, in virtual time, without a device"
    parser = commands.add_parser("simulate", help=meaning, description=f"{meaning[0].upper()}{meaning[1:]}.")
    add_arguments(parser)
    bench.set_defaults(run=run, record=None)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    traffic = parser.add_argument_group("traffic")
    number = partial(add_number, traffic)
    number("--rate", [1.5], "R", "requests per second; several rates are compared", positive=True)
    number("--seconds", 300.0, "S", "seconds of measured traffic", positive=True)
    meaning = "traffic before the measurement (30 plus twice the pauses of a conversation)"
    number("--warm-up-seconds", None, "S", meaning, kind=float, least=0)
    number("--seed", 0, "N", "seed of the traffic")
    for flag, ((low, high), meaning) in SPANS.items():
        traffic.add_argument(
            flag, type=int, nargs=2, default=[low, high], metavar=("MIN", "MAX"), help=f"{meaning} ({low} {high})"
        )
    number("--long-share", 0.1, "X", "share of conversations that start with a long prompt")
    number("--turns", 1.0, "X", "mean number of requests per conversation", least=1)
    number("--think-seconds", 10.0, "X", "mean time between an answer and the follow-up", least=0)
    number("--system-prompt", 0, "N", "tokens of a prefix of all prompts", least=0)
    device = parser.add_argument_group("device")
    add_device_arguments(device)
    add_number(device, "--host-milliseconds", 0.0, "MS", "host work before each step", least=0)
    meaning = "processes of one replica, whose steps the leader sends and confirms; several numbers are compared"
    add_number(device, "--ranks", [1], "N", meaning, least=1)
    policy = parser.add_argument_group("policy and targets")
    meaning = "draft tokens of a request per step at most, where they pay; also with --acceptance"
    add_number(policy, "--drafts", 0, "N", meaning, least=0)
    meaning = "share of draft tokens that are right, behind right ones; several are compared"
    add_number(policy, "--acceptance", [0.7], "X", meaning, least=0)
    meaning = "time of a model that makes drafts, relative to the model's; one number, or one for each --acceptance"
    add_number(policy, "--draft-cost", [0.0], "X", meaning, least=0)
    policy.add_argument(
        "--policy",
        nargs="+",
        choices=POLICY_NAMES,
        default=POLICY_NAMES[:1],
        help="policies to compare ours with (%(default)s)",
    )
    number = partial(add_number, policy)
    number("--max-consecutive-prefills", 1, "N", "consecutive prefill steps while requests decode", least=1)
    number("--ttft-target", 2000.0, "MS", "maximum time to first token of a good request", positive=True)
    number("--gap-target", 250.0, "MS", "maximum gap between tokens of a good request", positive=True)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write figures and distributions as JSON")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="also draw a plot: .png, .svg or .pdf")


def add_number(
    parser: argparse._ActionsContainer,
    flag: str,
    default: float | list[int] | list[float] | None,
    metavar: str,
    meaning: str,
    *,
    kind: type[int] | type[float] | None = None,
    positive: bool = False,
    least: float | None = None,
) -> None:
    """A flag that takes a number and refuses one outside the range.

    Args:
        default: also in the help, unless it is None; a list: the flag takes several numbers.
        kind: type of the numbers; None: that of the default.
    """
    defaults = default if isinstance(default, list) else [default]
    number = kind or (int if isinstance(defaults[0], int) else float)

    def read(text: str) -> float:
        value = number(text)
        if positive and not value > 0:
            raise argparse.ArgumentTypeError(f"must be positive, got {text}")
        if least is not None and not value >= least:
            raise argparse.ArgumentTypeError(f"must be at least {least}, got {text}")
        return value

    read.__name__ = number.__name__  # argparse names it where the text is no number
    shown = "" if default is None else f" ({' '.join(map(str, defaults))})"
    nargs = "+" if isinstance(default, list) else None
    parser.add_argument(flag, type=read, nargs=nargs, default=default, metavar=metavar, help=meaning + shown)


def run(options: argparse.Namespace) -> None:
    from neuron_runtime.bench import plot, simulated_tables  # noqa: PLC0415 - bring the engine

    if options.plot is not None:
        plot.check_plot(options.plot)
    _check(options)
    device = device_of(options)
    shapes = [] if device.plan is None else shapes_of_plan(device.plan)
    _check_policies(options, device)
    runs = [simulated_tables.Run(rate, outcomes_at(rate, options, device)) for rate in options.rate]
    targets = simulated_tables.Targets(options.ttft_target / 1000, options.gap_target / 1000)
    tables = [table for one in runs for table in simulated_tables.tables(one, targets, shapes)]
    speeds = speeds_of(options, device)
    if speeds is not None:
        tables.append(simulated_tables.busy_table(speeds))
    print("\n\n".join(table.text() for table in tables))
    if options.json is not None:
        left_out = {"command", "bench", "run", "record", "json", "plot", "plan"}
        settings = {name: value for name, value in vars(options).items() if name not in left_out}
        document = {
            "version": REPORT_VERSION,
            "command": "bench simulate",
            "versions": {"neuron-serving": version("neuron-serving")},
            "options": {**settings, "device": dict(device.settings), "limits": asdict(device.limits)},
            "tables": [table.plain() for table in tables],
            "data": {"runs": [simulated_tables.curves(one, targets) for one in runs]},
        }
        write_json(options.json, document)
    if options.plot is not None:
        plot.draw(options.plot, runs, targets, speeds)


def group_seconds(num_ranks: int) -> float:
    """Time that the leader of a group spends on each step for the others; none with one rank."""
    return GROUP_SECONDS + num_ranks * RANK_SECONDS if num_ranks > 1 else 0.0


def drafting_policies(options: argparse.Namespace) -> list[Policy]:
    """Ours with drafts, for each share of right ones and what their model costs."""
    from neuron_runtime.bench.simulation import Policy  # noqa: PLC0415 - brings the engine

    if not options.drafts:
        return []
    most, shares, costs = options.max_consecutive_prefills, options.acceptance, options.draft_cost
    return [
        Policy(
            f"drafts, {share:.0%} right{f', cost {cost:g}' if cost else ''}",
            most,
            num_drafts=options.drafts,
            acceptance=share,
            draft_cost=cost,
        )
        for share, cost in zip(shares, costs * len(shares) if len(costs) == 1 else costs, strict=True)
    ]


def speeds_of(options: argparse.Namespace, device: Device) -> Speeds | None:
    """Speeds of all numbers of requests that are powers of two, without drafts and with them; None without drafts."""
    from neuron_runtime.bench.simulated_tables import Speeds  # noqa: PLC0415 - brings the engine
    from neuron_runtime.bench.simulation import Policy, busy_speed  # noqa: PLC0415 - brings the engine

    if not options.drafts:
        return None
    policies = [Policy("no drafts", options.max_consecutive_prefills), *drafting_policies(options)]
    most = device.limits.max_rows
    rows = [*(2**n for n in range(most.bit_length()) if 2**n < most), most]
    host = options.host_milliseconds / 1000 + group_seconds(options.ranks[0])
    speeds = [
        [busy_speed(device.limits, device.times, one, number, host_seconds=host, plan=device.plan) for one in policies]
        for number in rows
    ]
    return Speeds([one.name for one in policies], rows, speeds)


def outcomes_at(rate: float, options: argparse.Namespace, device: Device) -> list[Outcome]:
    """The same traffic under each policy, ours first."""
    from neuron_runtime.bench.simulation import POLICIES, Policy, Simulation  # noqa: PLC0415 - brings the engine

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
    ours = [
        (Policy("ours" if at == 0 else f"{ranks} ranks", options.max_consecutive_prefills), ranks)
        for at, ranks in enumerate(options.ranks)
    ]
    others = [(POLICIES[name], options.ranks[0]) for name in options.policy]
    ours += [(policy, options.ranks[0]) for policy in drafting_policies(options)]
    for policy, ranks in (*ours, *others):
        began = time.monotonic()
        simulation = Simulation(
            conversations(traffic, options.seed, device.limits.max_model_length),
            device.limits,
            device.times,
            policy,
            warm_up_seconds=warm_up,
            seconds=options.seconds,
            host_seconds_per_step=options.host_milliseconds / 1000 + group_seconds(ranks),
            plan=device.plan,
        )
        outcomes.append(simulation.run())
        if not outcomes[-1].requests:
            message = f"no request arrived within {options.seconds:g} s at {rate:g} requests/s: increase it"
            raise InvalidConfig("--seconds", message)
        say(f"{rate:g} requests/s, {policy.name}: simulated in {time.monotonic() - began:.1f} s")
    return outcomes


def _check_policies(options: argparse.Namespace, device: Device) -> None:
    if device.plan is not None and options.drafts > device.plan.max_drafts:
        most = device.plan.max_drafts
        message = (
            f"is {options.drafts}, but the graphs of --plan {options.plan} verify {most}: plan --speculative-config"
        )
        raise InvalidConfig("--drafts", message)
    longest, length = device.limits.longest_prefill, device.limits.longest_sequence - 1
    if device.plan is not None and "vllm-neuron" in options.policy and longest < length:
        message = (
            f"vllm-neuron computes prompts whole, of up to {length} tokens, but the largest prefill of --plan "
            f"{options.plan} computes {longest}: leave it out, or plan whole prompts (--chunked-prefill disabled)"
        )
        raise InvalidConfig("--policy", message)


def _check(options: argparse.Namespace) -> None:
    for flag, path in (("--json", options.json), ("--plot", options.plot)):
        if path is not None and not path.absolute().parent.is_dir():
            raise InvalidConfig(flag, f"folder {path.parent} does not exist: create it first")
    for share in options.acceptance:
        if share > 1:
            raise InvalidConfig("--acceptance", f"must be from 0 to 1, got {share:g}")
    if len(options.draft_cost) not in (1, len(options.acceptance)):
        message = f"must be one number, or as many as --acceptance has ({len(options.acceptance)})"
        raise InvalidConfig("--draft-cost", f"{message}, got {len(options.draft_cost)}")
    if not 0 <= options.long_share <= 1:
        raise InvalidConfig("--long-share", f"must be from 0 to 1, got {options.long_share:g}")
    for flag in SPANS:
        low, high = value_of(options, flag)
        if not 1 <= low <= high:
            raise InvalidConfig(flag, f"must be MIN MAX with 1 <= MIN <= MAX, got {low} {high}")
