"""docs/benchmarks.md lists every flag and setting with defaults, and the rows that the example command prints."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from neuron_runtime.backend.simulated.device import ShapeUse
from neuron_runtime.backend.simulated.options import Options
from neuron_runtime.bench import simulated_tables
from neuron_runtime.bench.simulated_tables import Run, Targets
from neuron_runtime.bench.simulation import PREFILL_FIRST, Outcome, Timed
from neuron_runtime.commands.command_line import build_parser

PAGE = (Path(__file__).parents[2] / "docs" / "benchmarks.md").read_text()


def table(title: str) -> list[list[str]]:
    """Rows of the first table below a heading, without its header."""
    lines = PAGE.partition(f"# {title}\n")[2].splitlines()
    begin = next(at for at, line in enumerate(lines) if line.startswith("|"))
    end = next((at for at, line in enumerate(lines) if at > begin and not line.startswith("|")), len(lines))
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines[begin + 2 : end]]


def test_the_docs_list_exactly_the_settings_of_the_simulated_backend() -> None:
    assert [row[0] for row in table("A served model without a device")] == [
        f"`{name}`" for name in Options.__struct_encode_fields__
    ]


def simulate_parser() -> argparse.ArgumentParser:
    parser = build_parser()
    for name in ("bench", "simulate"):
        commands = next(a for a in parser._actions if isinstance(a, argparse._SubParsersAction))
        parser = commands.choices[name]
    return parser


def test_the_docs_list_exactly_the_flags_of_simulate_with_defaults() -> None:
    documented = {
        flag: row for row in table("Flags of bench simulate") for flag in re.findall(r"`(--?[a-z-]+)`", row[0])
    }
    actions = {option: action for action in simulate_parser()._actions for option in action.option_strings}
    assert sorted(documented) == sorted(actions)
    for flag, action in actions.items():
        defaults = action.default if isinstance(action.default, list) else [action.default]
        if defaults[0] not in (None, argparse.SUPPRESS, False):
            assert " ".join(
                f"{value:g}" if isinstance(value, float) else str(value) for value in defaults
            ) in documented[flag][2].replace("`", ""), flag


def test_the_example_has_the_rows_that_the_command_prints() -> None:
    fence = "`" * 3
    shown = PAGE.partition("### Example\n")[2].partition(f"{fence}\nSimulated traffic")[2].partition(fence)[0]
    names = [re.split(r"  +", line.strip())[0] for line in shown.splitlines()]
    asked = Timed(0.0, False, 10, first=1.0, last=2.0)
    use = ShapeUse(num_steps=1, num_used=1, num_padded=1, seconds=1.0)
    run = Outcome(
        policy=PREFILL_FIRST, seconds=1.0, requests=[asked], gaps=[0.1], queue=[(0.0, 0)], num_tokens=1,
        busy_share=1.0, shapes={("decode", 32): use}, num_preemptions=0, gap_bound=None,
    )  # fmt: skip
    for made in simulated_tables.tables(Run(5.0, [run]), Targets(2.0, 0.25)):
        assert [row.name.strip() for row in made.rows if row.name.strip() not in names] == []
