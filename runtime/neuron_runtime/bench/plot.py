"""The plot of `bench simulate`: waits and gaps at the best rate, and good requests over all rates.

Called with the flag `--plot`. It needs matplotlib, which is an extra.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from neuron_runtime.bench.simulated_tables import Run, Speeds, Targets
from neuron_runtime.errors import InvalidConfig

if TYPE_CHECKING:
    from matplotlib.axes import Axes

STYLES: tuple[dict[str, Any], ...] = (
    {"color": "tab:blue", "linewidth": 1.5, "zorder": 3},
    {"color": "tab:orange", "linewidth": 5, "alpha": 0.6, "zorder": 2},
    {"color": "tab:green", "linewidth": 9, "alpha": 0.4, "zorder": 1},
    *({"color": f"tab:{color}", "linewidth": 1.5} for color in ("red", "purple", "brown", "pink", "gray")),
)
"""How the policies are drawn: the first is thin, above the wide ones, so that all show where they are equal."""


def check_plot(path: Path) -> None:
    """Before a long run. Raises InvalidConfig."""
    if path.suffix not in (".png", ".svg", ".pdf"):
        raise InvalidConfig("--plot", f"{path.name} must end in .png, .svg or .pdf")
    if find_spec("matplotlib") is None:
        raise InvalidConfig("--plot", "plots need matplotlib: pip install matplotlib")


def draw(path: Path, runs: Sequence[Run], targets: Targets, speeds: Speeds | None = None) -> None:
    """speeds: with and without drafts. Raises InvalidConfig if the file cannot be written."""
    from matplotlib.figure import Figure  # noqa: PLC0415 - an extra

    best = max(runs, key=lambda run: _goodput(run, targets)[0])
    figure = Figure(figsize=(14.0 if speeds is None else 18.0, 4.8), layout="constrained")
    first, gaps, over_rates, *more = figure.subplots(1, 3 if speeds is None else 4)
    _draw_tail(first, [[one.ttft for one in outcome.requests] for outcome in best.outcomes], targets.ttft)
    first.set(title=f"Time to first token, {best.rate:g} requests/s", xlabel="seconds", ylabel="% of requests, longer")
    _draw_tail(gaps, [outcome.gaps for outcome in best.outcomes], targets.gap)
    gaps.set(title=f"Gap between tokens, {best.rate:g} requests/s", xlabel="seconds", ylabel="% of gaps, longer")
    ordered = sorted(runs, key=lambda run: run.rate)
    rates = [run.rate for run in ordered]
    for number, outcome in enumerate(best.outcomes):
        goodputs = [_goodput(run, targets)[number] for run in ordered]
        over_rates.plot(rates, goodputs, marker="o", label=outcome.policy.name, **STYLES[number])
    over_rates.plot(rates, rates, color="black", linestyle=":", label="request rate")
    over_rates.set(title="Good requests", xlabel="requests/s", ylabel="good requests/s", ylim=(0, None))
    over_rates.legend()
    if speeds is not None:
        draw_speeds(more[0], speeds)
    for panel in figure.axes:
        panel.grid(alpha=0.3)
    try:
        figure.savefig(path, dpi=150)
    except OSError as error:
        raise InvalidConfig("--plot", f"cannot write {path}: {error.strerror}") from error


def draw_speeds(panel: Axes, speeds: Speeds) -> None:
    """Tokens per second over the requests that are answered at a time."""
    for number, name in enumerate(speeds.policies):
        panel.plot(speeds.rows, [values[number] for values in speeds.tokens_per_second], marker="o", label=name)
    panel.set(title="Speed", xlabel="requests at a time", ylabel="tokens/s", xscale="log", yscale="log")
    panel.set_xticks(speeds.rows, map(str, speeds.rows), minor=False)
    panel.legend()


def _goodput(run: Run, targets: Targets) -> list[float]:
    return [outcome.goodput(targets.ttft, targets.gap) for outcome in run.outcomes]


def _draw_tail(panel: Axes, values: Sequence[Sequence[float]], target: float) -> None:
    """The share of values that are longer than each, because users notice the tail; of each policy."""
    for style, some in zip(STYLES, values, strict=False):
        ordered = sorted(some)
        longer = [(len(ordered) - number) / len(ordered) * 100 for number in range(len(ordered))]
        panel.step(ordered, longer, where="post", **style)
    panel.axvline(target, color="gray", linestyle="--")
    panel.set(xscale="log", yscale="log")
