"""Tables and curves of simulated traffic at one or several rates, for several policies.

Called by `bench simulate`. Pure functions of `simulation.Outcome`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from neuron_runtime.backend.simulated.device import Shape
from neuron_runtime.bench.report import Line, Table, percentile
from neuron_runtime.bench.simulation import Outcome

MAX_CURVE_POINTS = 300
"""Points of a distribution in the JSON."""


@dataclass(frozen=True, slots=True)
class Targets:
    """Maximum time to first token and maximum gap between tokens of a good request, in seconds."""

    ttft: float
    gap: float


@dataclass(frozen=True, slots=True)
class Run:
    """The outcomes of the policies at one rate, ours first."""

    rate: float
    outcomes: Sequence[Outcome]


@dataclass(frozen=True, slots=True)
class Speeds:
    """Tokens per second by number of requests that are answered at a time (rows) and by policy (columns)."""

    policies: Sequence[str]
    rows: Sequence[int]
    tokens_per_second: Sequence[Sequence[float]]


def busy_table(speeds: Speeds) -> Table:
    lines = zip(speeds.rows, speeds.tokens_per_second, strict=True)
    return Table(
        "Speed by requests at a time",
        tuple(Line(f"{rows} request{'s' * (rows > 1)}", tuple(values), "tokens/s") for rows, values in lines),
        tuple(speeds.policies),
    )


def tables(run: Run, targets: Targets, planned: Sequence[Shape] = ()) -> list[Table]:
    """planned: sizes to show even if no step had them."""
    columns = tuple(outcome.policy.name for outcome in run.outcomes)
    return [
        Table(f"Simulated traffic, {run.rate:g} requests/s", _figures(run.outcomes, targets), columns),
        Table(f"Compiled sizes, {run.rate:g} requests/s", _shapes(run.outcomes, planned), columns),
    ]


def _figures(outcomes: Sequence[Outcome], targets: Targets) -> tuple[Line, ...]:
    ttft = [sorted(one.ttft for one in outcome.requests) for outcome in outcomes]
    long = [sorted(one.ttft for one in outcome.requests if one.long) for outcome in outcomes]
    gaps = [sorted(outcome.gaps) for outcome in outcomes]
    good = [outcome.num_good(targets.ttft, targets.gap) for outcome in outcomes]
    within = f"first token within {targets.ttft * 1000:g} ms, every gap within {targets.gap * 1000:g} ms"

    def milliseconds(name: str, values: Sequence[float | None], note: str = "") -> Line:
        return Line(name, tuple(None if value is None else value * 1000 for value in values), "ms", note=note)

    def each(name: str, values: Sequence[float | int], unit: str, note: str = "") -> Line:
        return Line(name, tuple(values), unit, note=note)

    per_row = [outcome.tokens_per_row for outcome in outcomes]
    drafts = [each("tokens of a row with drafts", per_row, "")] if any(per_row) else []
    return (
        milliseconds("time to first token, p50", [percentile(values, 0.5) for values in ttft]),
        milliseconds("time to first token, p99", [percentile(values, 0.99) for values in ttft]),
        milliseconds("  of long prompts, p99", [percentile(values, 0.99) for values in long]),
        milliseconds("gap between tokens, p50", [percentile(values, 0.5) for values in gaps]),
        milliseconds("gap between tokens, p99", [percentile(values, 0.99) for values in gaps]),
        milliseconds("gap between tokens, worst", [values[-1] if values else None for values in gaps]),
        milliseconds(
            "  bound by the engine", [o.gap_bound for o in outcomes], "neuron_serving_stream_gap_bound_seconds"
        ),
        each("good requests", [n / len(o.requests) * 100 for n, o in zip(good, outcomes, strict=True)], "%", within),
        each("goodput", [o.goodput(targets.ttft, targets.gap) for o in outcomes], "requests/s"),
        each("throughput", [o.num_tokens / o.seconds for o in outcomes], "tokens/s"),
        each("prompt tokens from the cache", [o.cached_share * 100 for o in outcomes], "%"),
        each("requests waiting, mean", [o.mean_queue for o in outcomes], "", "for a row"),
        each("requests waiting, max", [max(count for _, count in o.queue) for o in outcomes], ""),
        *drafts,
        each("preemptions", [o.num_preemptions for o in outcomes], ""),
        each("device busy", [o.busy_share * 100 for o in outcomes], "%"),
        each("padding", [_padding(o) * 100 for o in outcomes], "%", "of device time, see the compiled sizes"),
    )


def _padding(outcome: Outcome) -> float:
    uses = outcome.shapes.values()
    return sum(use.seconds * use.padded_share for use in uses) / sum(use.seconds for use in uses)


def _shapes(outcomes: Sequence[Outcome], planned: Sequence[Shape]) -> tuple[Line, ...]:
    """Share of padding per compiled size; of a decode step over so many positions also the share without a token."""
    rows = []
    for shape in sorted({*planned, *(shape for outcome in outcomes for shape in outcome.shapes)}):
        uses = [outcome.shapes.get(shape) for outcome in outcomes]
        shares = tuple(None if use is None else use.padded_share * 100 for use in uses)
        counts = " and ".join(str(use.num_steps if use else 0) for use in uses)
        rows.append(Line(_name_of(shape), shares, "% padding", note=f"in {counts} steps"))
        if any(use and use.num_positions for use in uses):
            empty = tuple(None if use is None else use.empty_share * 100 for use in uses)
            rows.append(Line("  positions without a token", empty, "%"))
    return tuple(rows)


def _name_of(shape: Shape) -> str:
    phase, size, *more = shape
    if phase == "verify":
        return f"verification of drafts, {size} rows"
    if phase == "decode":
        return f"decode, {size} rows" + "".join(f" of {length} positions" for length in more)
    return f"prefill, {size} tokens" + "".join(f" after {prefix}" for prefix in more if prefix)


def curves(run: Run, targets: Targets) -> dict[str, Any]:
    """Data for the JSON: distributions as quantiles, the queue as changes."""
    return {
        "rate": run.rate,
        "policies": [
            {
                "name": outcome.policy.name,
                "num_requests": len(outcome.requests),
                "num_good": outcome.num_good(targets.ttft, targets.gap),
                "seconds": outcome.seconds,
                "ttft_seconds": _quantiles(one.ttft for one in outcome.requests),
                "gap_seconds": _quantiles(outcome.gaps),
                "queue": outcome.queue[:: -(-len(outcome.queue) // MAX_CURVE_POINTS)],
                "shapes": [
                    {
                        "phase": phase,
                        "size": size,
                        **{"length" if phase == "decode" else "prefix": one for one in more},
                        "steps": use.num_steps,
                        "used": use.num_used,
                        "padded": use.num_padded,
                    }
                    for (phase, size, *more), use in sorted(outcome.shapes.items())
                ],
            }
            for outcome in run.outcomes
        ],
    }


def _quantiles(values: Any) -> list[float]:
    """At most MAX_CURVE_POINTS quantiles, from minimum to maximum."""
    ordered = sorted(values)
    count = min(MAX_CURVE_POINTS, len(ordered))
    return [ordered[round(at * (len(ordered) - 1) / max(count - 1, 1))] for at in range(count)]
