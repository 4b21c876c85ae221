"""`neuron-runtime plan-buckets MODEL`: lists the graphs that a model would be compiled to, with estimates of padding,
memory and compile time. Needs no device and compiles nothing; reads config.json alone.
"""

from __future__ import annotations

import argparse
from collections import Counter
from pathlib import Path

from neuron_runtime import record
from neuron_runtime.arguments import FLAG_NAMES, naming
from neuron_runtime.artifacts.loading import with_local_draft
from neuron_runtime.commands.compile_model import is_compiled
from neuron_runtime.commands.serve import add_model, add_model_flags, configuration
from neuron_runtime.console import StageLines
from neuron_runtime.engine.backends import planning_package
from neuron_runtime.errors import InvalidConfig
from neuron_runtime.flags import write_json
from neuron_runtime.local_settings import add_weights_flags
from neuron_runtime.weights.fetching import described


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    parser.add_argument(
        "--prompt-lengths",
        type=Path,
        metavar="FILE",
        help="Choose context buckets for these prompts: a file with one number of tokens per line, for example from an "
        "access log (every order of magnitude equally likely)",
    )
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="Also write the plan to a file, which `bench simulate --plan` reads"
    )
    add_weights_flags(parser)
    record.add_flag(parser)
    add_model_flags(parser, is_compiled)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    lengths = read_lengths(options.prompt_lengths) if options.prompt_lengths else ()
    with naming(FLAG_NAMES if options.config is None else {}):
        config = configuration(options, check=planning_package)
        package = planning_package(config)
        config = with_local_draft(config, StageLines(), options.weights_dir, options.weights_store)
        with described(config.model, options.weights_dir, options.weights_store, with_weights=False) as (folder, _):
            plan = package.plan(config, folder, lengths)
    for line in plan.lines():
        print(line)
    if options.json is not None:
        write_json(options.json, plan.document())


def read_lengths(path: Path) -> tuple[tuple[int, float], ...]:
    """The distribution of the numbers in a file. Raises InvalidConfig naming the line."""
    try:
        lines = path.read_text().split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidConfig("--prompt-lengths", f"cannot read {path}: {error}") from error
    counts: Counter[int] = Counter()
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        if not line.strip().isdecimal() or not int(line):
            message = f"line {number} of {path} must be a positive number of tokens, got {line.strip()[:40]!r}"
            raise InvalidConfig("--prompt-lengths", message)
        counts[int(line)] += 1
    if not counts:
        raise InvalidConfig("--prompt-lengths", f"{path} has no numbers")
    return tuple((length, count / counts.total()) for length, count in sorted(counts.items()))
