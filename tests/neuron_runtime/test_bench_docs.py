"""docs/benchmarks.md says what the code does: its tables are held equal here."""

from __future__ import annotations

import re
from pathlib import Path

from neuron_runtime.backend.simulated.options import Options
from neuron_runtime.backend.simulated.step_times import PUBLISHED

PAGE = (Path(__file__).parents[2] / "docs" / "benchmarks.md").read_text()


def table(title: str) -> list[list[str]]:
    """Rows of the first table below a heading, without its head."""
    lines = PAGE.partition(f"# {title}\n")[2].splitlines()
    begin = next(at for at, line in enumerate(lines) if line.startswith("|"))
    end = next((at for at, line in enumerate(lines) if at > begin and not line.startswith("|")), len(lines))
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines[begin + 2 : end]]


def test_every_setting_of_the_simulated_backend_is_documented_and_no_other() -> None:
    assert [row[0] for row in table("A served model without a device")] == [
        f"`{name}`" for name in Options.__struct_encode_fields__
    ]


def test_the_published_step_times_are_those_of_the_code() -> None:
    def points(curve: tuple[tuple[int, float], ...]) -> str:
        return ", ".join(f"{milliseconds:g} at {size}" for size, milliseconds in curve)

    assert table("Published step times") == [
        [f"`{one.name}`", points(one.decode), points(one.prefill), one.source] for one in PUBLISHED.values()
    ]
