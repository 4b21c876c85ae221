"""The flags of a simulated device, and the step times and limits derived from them.

Used by `bench simulate`. The flags correspond to the settings of a served simulated model, so the same rules check
them; errors name the flag.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from neuron_runtime.arguments import BY_ARGUMENT, FLAG_NAMES, config_of, naming
from neuron_runtime.backend.simulated.options import (
    DEFAULT_BLOCK_SIZE,
    DEFAULT_MAX_LENGTH,
    DEFAULT_MAX_SEQUENCES,
    DEFAULT_MAX_STEP_TOKENS,
    limits_of,
    read_options,
    step_times,
)
from neuron_runtime.backend.simulated.step_times import PUBLISHED, StepTimes
from neuron_runtime.bench.planned import flags_of_plan, limits_of_plan, settings_of_plan
from neuron_runtime.bench.traffic import VOCABULARY_SIZE
from neuron_runtime.core import BackendLimits, TokenFeedback
from neuron_runtime.errors import ConfigProblems, InvalidConfig
from neuron_runtime.flags import add_flags

if TYPE_CHECKING:
    from neuron_runtime.backend.nxdi.settings import Settings

DEFAULT_STEP_TIMES = "llama-3.1-8b-trn2-tp4"
SMALLEST_BUCKET = 128
EVERY_SIZE = [0]
"""Value of `--decode-buckets` and `--prefill-buckets` for a device without compiled sizes."""

SETTINGS = {
    "stepTimes": "--step-times",
    "stepMilliseconds": "--step-milliseconds",
    "decodeMilliseconds": "--decode-milliseconds",
    "prefillMilliseconds": "--prefill-milliseconds",
    "decodeBuckets": "--decode-buckets",
    "prefillBuckets": "--prefill-buckets",
    "prefill": "--prefill",
    "tokenFeedback": "--token-feedback",
}
"""Flags by setting of `overrideNeuronConfig`."""

OF_TIMES = ("stepTimes", "stepMilliseconds", "decodeMilliseconds", "prefillMilliseconds")
"""Those that a plan leaves open."""

ENGINE_DEFAULTS = {
    "layout": "slots for whole prompts, else blocks",
    "enable_prefix_caching": "on with layout blocks",
    "max_model_len": f"that of the published times, or {DEFAULT_MAX_LENGTH}",
    "max_num_seqs": f"that of the published times, or {DEFAULT_MAX_SEQUENCES}",
    "max_num_batched_tokens": f"{DEFAULT_MAX_STEP_TOKENS}; for whole prompts the longest one",
    "block_size": str(DEFAULT_BLOCK_SIZE),
    "num_gpu_blocks_override": "room for all requests at full length",
}
"""Flags of `serve` that also apply to the device, with their defaults."""


@dataclass(frozen=True, slots=True)
class Device:
    times: StepTimes
    limits: BackendLimits
    settings: Mapping[str, Any]
    """Source of the times, for the report."""
    plan: Settings | None = None
    """The plan of the graphs; None: those of the times."""


def add_device_arguments(device: argparse._ArgumentGroup) -> None:
    meaning = "graphs, rows, lengths and layout of a plan that `plan-buckets --json` wrote"
    device.add_argument("--plan", type=Path, metavar="FILE", help=meaning)
    names = ", ".join(PUBLISHED)
    device.add_argument("--step-times", metavar="NAME", help=f"published times: {names} (default: the first)")
    device.add_argument(
        "--step-milliseconds", type=float, metavar="MS", help="duration of every step, instead of published times"
    )
    for phase, unit, default in (
        ("decode", "rows", "the maximum number of running requests"),
        ("prefill", "tokens", f"powers of two from {SMALLEST_BUCKET}"),
    ):
        device.add_argument(
            f"--{phase}-milliseconds",
            type=_point,
            nargs="+",
            metavar=f"{unit.upper()}:MS",
            help=f"measured {phase} times, in ascending order of {unit}",
        )
        device.add_argument(
            f"--{phase}-buckets",
            type=int,
            nargs="+",
            metavar="N",
            help=f"compiled numbers of {unit}; 0: every number ({default})",
        )
    device.add_argument(
        "--prefill",
        choices=("whole", "chunks", "mixed"),
        help="prefill whole prompts, chunks between decode steps, or chunks in decode steps (whole)",
    )
    device.add_argument(
        "--token-feedback",
        choices=get_args(TokenFeedback),
        help="where a step gets the tokens of the previous step (device)",
    )
    add_flags(device, (BY_ARGUMENT[name] for name in ENGINE_DEFAULTS), ENGINE_DEFAULTS)


def device_of(options: argparse.Namespace) -> Device:
    """The device that the flags describe. Raises InvalidConfig with the flag."""
    settings = {key: value for key, flag in SETTINGS.items() if (value := value_of(options, flag)) is not None}
    settings |= {key: [] for key in ("decodeBuckets", "prefillBuckets") if settings.get(key) == EVERY_SIZE}
    if not settings.keys() & OF_TIMES:
        settings.setdefault("stepTimes", DEFAULT_STEP_TIMES)
    if options.plan is not None:
        return _planned(options, settings)
    settings = {"prefill": "whole", "tokenFeedback": "device"} | settings
    published = PUBLISHED.get(settings.get("stepTimes", ""))
    rows = options.max_num_seqs or (published.max_rows if published else DEFAULT_MAX_SEQUENCES)
    length = options.max_model_len or (published.max_model_length if published else DEFAULT_MAX_LENGTH)
    engine = {name: value for name in ENGINE_DEFAULTS if (value := getattr(options, name)) is not None}
    engine |= {"max_num_seqs": rows, "max_model_len": length}
    with naming(FLAG_NAMES | {f"overrideNeuronConfig.{key}": flag for key, flag in SETTINGS.items()}):
        config = config_of("file:///simulated", engine)
        limits = limits_of(config, read_options(settings), vocabulary_size=VOCABULARY_SIZE, longest=length)
        settings.setdefault("decodeBuckets", [rows])
        settings.setdefault("prefillBuckets", powers_of_two(limits.longest_prefill))
        simulated = read_options(settings)
        limits = limits_of(config, simulated, vocabulary_size=VOCABULARY_SIZE, longest=length)
        if limits.longest_prompt < limits.longest_sequence - 1:
            fits, needed = limits.longest_prompt, limits.longest_sequence - 1
            problem = f"the largest must fit a prompt of {needed} tokens, not of {fits}"
            raise InvalidConfig("$.overrideNeuronConfig.prefillBuckets", problem)
        times = step_times(simulated)
    return Device(times, limits, settings)


def _planned(options: argparse.Namespace, settings: Mapping[str, Any]) -> Device:
    """A device with the graphs of a plan. Other flags may repeat what it says."""
    plan = settings_of_plan(options.plan)
    limits = replace(limits_of_plan(plan), vocabulary_size=VOCABULARY_SIZE)
    problems = ConfigProblems()
    for flag, planned in flags_of_plan(plan, limits).items():
        value = value_of(options, flag)
        with problems.collecting():
            if value is not None and value != planned:
                raise InvalidConfig(
                    flag, f"is {_shown(value)}, but --plan {options.plan} has {_shown(planned)}: leave out one of them"
                )
    with problems.collecting():
        if limits.longest_prompt < limits.longest_sequence - 1:
            fits, needed = limits.longest_prompt, limits.longest_sequence - 1
            raise InvalidConfig(
                "--plan", f"its largest prefill must fit a prompt of {needed} tokens, not of {fits}: plan larger ones"
            )
    with problems.collecting(), naming({f"overrideNeuronConfig.{key}": flag for key, flag in SETTINGS.items()}):
        times = {key: value for key, value in settings.items() if key in OF_TIMES}
        steps = step_times(read_options(times))
    problems.check()
    return Device(steps, limits, {**times, "plan": str(options.plan)}, plan)


def _shown(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)


def powers_of_two(largest: int) -> list[int]:
    """Compiled sizes as the Neuron SDK chooses them: powers of two from SMALLEST_BUCKET, and the largest."""
    sizes = []
    size = SMALLEST_BUCKET
    while size < largest:
        sizes.append(size)
        size *= 2
    return [*sizes, largest]


def value_of(options: argparse.Namespace, flag: str) -> Any:
    return getattr(options, flag.removeprefix("--").replace("-", "_"))


def _point(value: str) -> tuple[int, float]:
    size, _, milliseconds = value.partition(":")
    try:
        return int(size), float(milliseconds)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{value!r} is not SIZE:MILLISECONDS, such as 64:12.5") from error
