"""The flags of a simulated device, and the step times and limits that they amount to.

Used by `bench simulate`. The flags are those of a served simulated model in another spelling, so what cannot be is
refused by the same rules, in the name of the flag.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from neuron_runtime.backend.simulated.options import (
    DEFAULT_MAX_LENGTH,
    DEFAULT_MAX_SEQUENCES,
    PATH,
    limits_of,
    read_options,
    step_times,
)
from neuron_runtime.backend.simulated.step_times import PUBLISHED, StepTimes
from neuron_runtime.bench.traffic import VOCABULARY_SIZE
from neuron_runtime.config import CONFIG_VERSION, EngineLimits, ModelSource, RuntimeConfig, Switch
from neuron_runtime.core import BackendLimits
from neuron_runtime.errors import InvalidConfig

DEFAULT_STEP_TIMES = "llama-3.1-8b-trn2-tp4"
SMALLEST_BUCKET = 128
EVERY_SIZE = [0]
"""What `--decode-buckets` and `--prefill-buckets` are given for a device without compiled sizes."""

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
"""Flags by the setting of `overrideNeuronConfig` that they stand for."""

LIMITS = {
    "maxModelLength": ("--max-model-len", "tokens of prompt and answer together (of the published times, or 4096)"),
    "maxSequences": ("--max-num-seqs", "requests that run at a time (of the published times, or 32)"),
    "maxStepTokens": (
        "--max-num-batched-tokens",
        "tokens of one step, so of a chunk (512; the model's length for whole)",
    ),
    "blockSize": ("--block-size", "tokens of a KV block (16)"),
    "numBlocks": ("--num-gpu-blocks-override", "KV blocks (room for all requests at full length)"),
}
"""Flags, and what they mean, by the limit of the configuration document that they stand for."""


SWITCH: Mapping[bool | None, Switch] = {None: "auto", True: "enabled", False: "disabled"}


@dataclass(frozen=True, slots=True)
class Device:
    times: StepTimes
    limits: BackendLimits
    settings: Mapping[str, Any]
    """What the times were made of, for the report."""


def add_device_arguments(device: argparse._ArgumentGroup) -> None:
    names = ", ".join(PUBLISHED)
    device.add_argument("--step-times", metavar="NAME", help=f"published times: {names} (default: the first)")
    device.add_argument(
        "--step-milliseconds", type=float, metavar="MS", help="every step takes this, instead of published times"
    )
    for phase, unit, default in (
        ("decode", "rows", "all requests that run at a time"),
        ("prefill", "tokens", f"powers of two from {SMALLEST_BUCKET}"),
    ):
        device.add_argument(
            f"--{phase}-milliseconds",
            type=_point,
            nargs="+",
            metavar=f"{unit.upper()}:MS",
            help=f"{phase} times of your own, in ascending order of {unit}",
        )
        device.add_argument(
            f"--{phase}-buckets",
            type=int,
            nargs="+",
            metavar="N",
            help=f"compiled numbers of {unit}, 0: every number ({default})",
        )
    device.add_argument(
        "--prefill",
        choices=("whole", "chunks", "mixed"),
        default="whole",
        help="prompts whole, in chunks between decode steps, or in chunks beside decoding rows (%(default)s)",
    )
    device.add_argument(
        "--token-feedback",
        choices=("device", "host"),
        default="device",
        help="where a step gets the tokens of the step before (%(default)s)",
    )
    device.add_argument("--layout", choices=("slots", "blocks"), help="KV cache (slots for whole prompts, else blocks)")
    for flag, meaning in LIMITS.values():
        device.add_argument(flag, type=int, metavar="N", help=meaning)
    device.add_argument(
        "--enable-prefix-caching",
        action=argparse.BooleanOptionalAction,
        help="share blocks of prompts that begin alike (on with blocks)",
    )


def device_of(options: argparse.Namespace) -> Device:
    """The device of the flags. Raises InvalidConfig, naming the flag."""
    for flag, _ in LIMITS.values():
        if (value := value_of(options, flag)) is not None and value < 1:
            raise InvalidConfig(flag, f"must be at least 1, got {value}")
    given = {key: value for key, flag in SETTINGS.items() if (value := value_of(options, flag)) is not None}
    given |= {key: [] for key in ("decodeBuckets", "prefillBuckets") if given.get(key) == EVERY_SIZE}
    if not {"stepMilliseconds", "decodeMilliseconds", "prefillMilliseconds"} & given.keys():
        given.setdefault("stepTimes", DEFAULT_STEP_TIMES)
    published = PUBLISHED.get(given.get("stepTimes", ""))
    rows = options.max_num_seqs or (published.max_rows if published else DEFAULT_MAX_SEQUENCES)
    length = options.max_model_len or (published.max_model_length if published else DEFAULT_MAX_LENGTH)
    wanted = EngineLimits(
        max_model_length=length,
        max_sequences=rows,
        max_step_tokens=options.max_num_batched_tokens or 0,
        block_size=options.block_size or 0,
        num_blocks=options.num_gpu_blocks_override or 0,
    )
    config = RuntimeConfig(
        version=CONFIG_VERSION,
        model=ModelSource(uri="file:///"),
        served_names=("simulated",),
        layout=options.layout or "auto",
        prefix_caching=SWITCH[options.enable_prefix_caching],
        limits=wanted,
    )
    try:
        settings = read_options(given)
        limits = limits_of(config, settings, vocabulary_size=VOCABULARY_SIZE, longest=length)
        given.setdefault("decodeBuckets", [rows])
        given.setdefault("prefillBuckets", powers_of_two(limits.longest_prefill))
        times = step_times(read_options(given))
    except InvalidConfig as error:
        raise _naming(error) from error
    return Device(times, limits, given)


def powers_of_two(largest: int) -> list[int]:
    """Compiled sizes as the Neuron SDK chooses them: powers of two from SMALLEST_BUCKET, and the largest."""
    sizes = []
    size = SMALLEST_BUCKET
    while size < largest:
        sizes.append(size)
        size *= 2
    return [*sizes, largest]


def value_of(options: argparse.Namespace, flag: str) -> Any:
    """What was given for a flag, or its default."""
    return getattr(options, flag.removeprefix("--").replace("-", "_"))


def _naming(error: InvalidConfig) -> InvalidConfig:
    """The same in the name of the flag."""
    names = {f"{PATH}.{key}": flag for key, flag in SETTINGS.items()}
    names |= {f"$.limits.{key}": flag for key, (flag, _) in LIMITS.items()}
    names |= {"$.layout": "--layout", "$.prefixCaching": "--enable-prefix-caching"}
    path = error.field.partition("[")[0]
    return InvalidConfig(names.get(path, error.field), str(error).partition(": ")[2])


def _point(value: str) -> tuple[int, float]:
    size, _, milliseconds = value.partition(":")
    try:
        return int(size), float(milliseconds)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{value!r} is not SIZE:MILLISECONDS, such as 64:12.5") from error
