"""Tables, curves and plots of simulated traffic at one or several rates, for several policies.

Called by `bench simulate`. Pure functions of `simulation.Outcome`.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from neuron_runtime.backend.simulated.device import Shape
from neuron_runtime.bench.report import Line, Table, percentile
from neuron_runtime.bench.simulation import Outcome

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

MAX_CURVE_POINTS = 300
"""Points of a distribution in the JSON."""
STYLES: tuple[dict[str, Any], ...] = (
    {"color": "tab:blue", "linewidth": 1.5, "zorder": 3},
    {"color": "tab:orange", "linewidth": 5, "alpha": 0.6, "zorder": 2},
    {"color": "tab:green", "linewidth": 9, "alpha": 0.4, "zorder": 1},
)
"""Line widths of the policies: the first is thin, above the wide ones, so that all show where they are equal."""
NUM_QUEUE_SPANS = 60
"""Spans of the plot of waiting requests, which shows means."""


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


# Plots


def _shown(value: float | None) -> float:
    """NaN for missing values, which plots leave out."""
    return math.nan if value is None else value


def draw(figure: Figure, runs: Sequence[Run], targets: Targets) -> None:
    """Distributions at the rate with our highest goodput; with several rates, a second row of panels over the rate."""
    best = max(runs, key=lambda run: run.outcomes[0].goodput(targets.ttft, targets.gap))
    panels = figure.subplots(2 if len(runs) > 1 else 1, 3, squeeze=False)
    _draw_ttft(panels[0][0], best, targets.ttft)
    _draw_gaps(panels[0][1], best, targets.gap)
    _draw_queue(panels[0][2], best)
    title = f"Simulated traffic, {best.rate:g} requests/s"
    figure.suptitle(f"Above: {title[0].lower()}{title[1:]}. Below: over the rate" if len(runs) > 1 else title)
    if len(runs) > 1:
        _draw_over_rates(panels[1], runs, targets)
    handles, labels = panels[0][1].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)


def _draw_ttft(panel: Axes, run: Run, target: float) -> None:
    for style, outcome in zip(STYLES, run.outcomes, strict=False):
        values = sorted(one.ttft for one in outcome.requests)
        panel.step(values, [(at + 1) / len(values) * 100 for at in range(len(values))], where="post", **style)
    panel.axvline(target, color="gray", linestyle="--")
    panel.set_xscale("log")
    _plain_numbers(panel.xaxis)
    panel.set(title="Time to first token", xlabel="seconds", ylabel="% of requests within")


def _draw_gaps(panel: Axes, run: Run, target: float) -> None:
    """Complementary distribution, because users notice the tail."""
    for style, outcome in zip(STYLES, run.outcomes, strict=False):
        values = sorted(gap * 1000 for gap in outcome.gaps)
        distinct = sorted(set(values))
        longer = [(len(values) - bisect_right(values, value)) / len(values) * 100 for value in distinct]
        panel.step([distinct[0], *distinct], [100.0, *longer], where="post", label=outcome.policy.name, **style)
    panel.axvline(target * 1000, color="gray", linestyle="--", label="target")
    panel.set_xscale("log")
    _plain_numbers(panel.xaxis)
    panel.set_yscale("log")
    _plain_numbers(panel.yaxis, (1.0,))
    panel.set(title="Gap between tokens", xlabel="milliseconds", ylabel="% of gaps, longer")


def _draw_queue(panel: Axes, run: Run) -> None:
    for style, outcome in zip(STYLES, run.outcomes, strict=False):
        edges = [outcome.seconds * at / NUM_QUEUE_SPANS for at in range(NUM_QUEUE_SPANS + 1)]
        panel.stairs(_means(outcome.queue, edges), edges, baseline=None, **style)
    panel.set(title="Requests waiting for a row", xlabel="seconds", ylabel="requests, means over time")
    panel.set_ylim(bottom=0)


def _means(changes: Sequence[tuple[float, int]], edges: Sequence[float]) -> list[float]:
    """Means over time between consecutive edges of a number that changes at these moments, the first one at 0."""
    moments = sorted({*edges, *(moment for moment, _ in changes)})
    starts = [moment for moment, _ in changes]
    sums = [0.0] * (len(edges) - 1)
    for begin, end in pairwise(moments):
        span = bisect_right(edges, begin) - 1
        if span < len(sums):
            sums[span] += changes[bisect_right(starts, begin) - 1][1] * (end - begin)
    return [total / (after - before) for total, (before, after) in zip(sums, pairwise(edges), strict=True)]


def _draw_over_rates(panels: Sequence[Axes], runs: Sequence[Run], targets: Targets) -> None:
    ordered = sorted(runs, key=lambda run: run.rate)
    rates = [run.rate for run in ordered]
    for number, style in enumerate(STYLES[: len(ordered[0].outcomes)]):
        outcomes = [run.outcomes[number] for run in ordered]
        ttft = [_shown(percentile([one.ttft for one in outcome.requests], 0.99)) for outcome in outcomes]
        worst = [_shown(max(outcome.gaps, default=None)) * 1000 for outcome in outcomes]
        gaps = [_shown(percentile(outcome.gaps, 0.99)) * 1000 for outcome in outcomes]
        marked = {**style, "marker": "os^"[number], "markersize": style["linewidth"] + 4}
        panels[0].plot(rates, ttft, **marked)
        panels[1].plot(rates, worst, **marked)
        panels[1].plot(rates, gaps, **marked, linestyle=":", fillstyle="none")
        panels[2].plot(rates, [o.goodput(targets.ttft, targets.gap) for o in outcomes], **marked)
    panels[0].axhline(targets.ttft, color="gray", linestyle="--")
    panels[1].axhline(targets.gap * 1000, color="gray", linestyle="--")
    panels[2].plot(rates, rates, color="black", linestyle=":", linewidth=1, zorder=0)
    panels[0].set(title="Time to first token, p99", ylabel="seconds", yscale="log")
    panels[1].set(title="Gap between tokens, worst (dotted: p99)", ylabel="milliseconds", yscale="log")
    _plain_numbers(panels[0].yaxis)
    _plain_numbers(panels[1].yaxis)
    panels[2].set(title="Goodput (dotted: request rate)", ylabel="good requests/s")
    panels[2].set_ylim(bottom=0)
    for panel in panels:
        panel.set_xlabel("requests/s")
        panel.set_xticks(rates)


def _plain_numbers(axis: Axis, steps: tuple[float, ...] = (1.0, 2.0, 5.0)) -> None:
    """Label a logarithmic axis with plain numbers instead of powers of ten."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator  # noqa: PLC0415 - an extra

    axis.set_major_locator(LogLocator(subs=steps))
    axis.set_major_formatter(FuncFormatter(lambda value, place: f"{value:g}"))
    axis.set_minor_locator(NullLocator())
