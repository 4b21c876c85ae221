"""Counters, gauges and histograms with cheap updates, which the library writes at a scrape.

Used by `metrics`, which declares the metrics. A front end updates them for every streamed token, so an increment is an
addition and an observation a bisection, several times cheaper than with the library's objects.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Literal, TypeVar

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

Labels = tuple[str, ...]
Source = Literal["front_end", "engine", "step"]
Made = TypeVar("Made")


@dataclass(frozen=True, slots=True, eq=False)
class Family:
    """Declaration of a metric.

    name: as in the exposition; counters end with `_total`.
    labels: names in addition to those of all series of the process.
    bounds: upper bounds of a histogram's buckets, ascending, without infinity.
    source: `front_end`: the front end counts; `engine` and `step`: the engine sends the numbers, per message or per
        step.
    read: extracts the number from the engine's message, see `Metrics.step`.
    use: purpose for users, in docs/metrics.md.
    """

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    text: str
    labels: Labels = ()
    bounds: tuple[float, ...] = ()
    source: Source = "front_end"
    read: Callable[[Any], float] | None = None
    use: str = ""


Reading = tuple[Family, Labels, float]
"""The present value of one series."""


class Number:
    """One counter or gauge."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0.0

    def add(self, more: float) -> None:
        self.value += more

    def write(self, metric: Any, labels: Labels) -> None:
        """Add it to the library's metric."""
        metric.add_metric(labels, self.value)


class Distribution:
    """One histogram: the number of observations per bucket, and their sum."""

    __slots__ = ("_bounds", "_counts", "_sum")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self._counts[bisect_left(self._bounds, value)] += times
        self._sum += value * times

    def write(self, metric: Any, labels: Labels) -> None:
        bounds = (*map(floatToGoString, self._bounds), "+Inf")
        metric.add_metric(labels, list(zip(bounds, accumulate(self._counts), strict=True)), self._sum)


_METRICS = {"counter": CounterMetricFamily, "gauge": GaugeMetricFamily, "histogram": HistogramMetricFamily}


class Book(Collector):
    """The series of one process, created on first use. All of them also have the labels `common`."""

    def __init__(self, families: Iterable[Family], common: Mapping[str, str]) -> None:
        self._common = common
        self._series: dict[Family, dict[Labels, Any]] = {family: {} for family in families}

    def number(self, family: Family, *labels: str) -> Number:
        return self._one(family, labels, Number)

    def distribution(self, family: Family, *labels: str) -> Distribution:
        return self._one(family, labels, lambda: Distribution(family.bounds))

    def forget(self, family: Family) -> None:
        self._series[family].clear()

    def collect(self) -> Iterator[Any]:
        for family, series in self._series.items():
            metric = _METRICS[family.kind](family.name, family.text, labels=(*self._common, *family.labels))
            for labels, one in series.items():
                one.write(metric, (*self._common.values(), *labels))
            yield metric

    def _one(self, family: Family, labels: Labels, make: Callable[[], Made]) -> Made:
        series = self._series[family]
        if labels not in series:
            assert len(labels) == len(family.labels), f"{family.name} has the labels {family.labels}"
            series[labels] = make()
        made: Made = series[labels]
        return made
