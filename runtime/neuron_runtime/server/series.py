"""Counters, gauges and histograms with cheap updates, and their numbers as the library's objects.

Used by `metrics`, which declares the metrics. A front end updates them for every streamed token, so an increment is an
addition and an observation a bisection, several times cheaper than the library's objects. The numbers of a process are
plain data from which a successor can continue.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Literal, TypeVar

import msgspec
from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

Labels = tuple[str, ...]
Source = Literal["front_end", "engine", "step", "scrape"]
Made = TypeVar("Made")


@dataclass(frozen=True, slots=True, eq=False)
class Family:
    """Declaration of a metric.

    name: as in the exposition; counters end with `_total`.
    labels: names in addition to those of all series of the process.
    bounds: upper bounds of a histogram's buckets, ascending, without infinity.
    source: `front_end`: the front end counts; `engine` and `step`: the engine sends the numbers, per message or per
        step; `scrape`: the values of other processes, read anew at every scrape.
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

    def export(self) -> tuple[float, ...]:
        return (self.value,)

    def restore(self, numbers: tuple[float, ...]) -> None:
        (self.value,) = numbers


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

    def export(self) -> tuple[float, ...]:
        return (self._sum, *self._counts)

    def restore(self, numbers: tuple[float, ...]) -> None:
        self._sum = numbers[0]
        self._counts = [int(count) for count in numbers[1:]]


class Exported(msgspec.Struct, frozen=True, array_like=True):
    """All numbers of one process, from which its successor continues.

    series: (metric, label values, numbers); the numbers of a counter or gauge are its value, those of a histogram its
        sum and the count of every bucket.
    """

    series: tuple[tuple[str, Labels, tuple[float, ...]], ...]


class Book:
    """The series of one process, created on first use."""

    def __init__(self, families: Iterable[Family]) -> None:
        self._families = {family.name: family for family in families}
        self._series: dict[tuple[str, Labels], Any] = {}

    def number(self, family: Family, *labels: str) -> Number:
        return self._one(family, labels, Number)

    def distribution(self, family: Family, *labels: str) -> Distribution:
        return self._one(family, labels, lambda: Distribution(family.bounds))

    def forget(self, family: Family) -> None:
        """Remove its series."""
        for key in [key for key in self._series if key[0] == family.name]:
            del self._series[key]

    def export(self) -> Exported:
        return Exported(tuple((*key, one.export()) for key, one in self._series.items()))

    def restore(self, exported: Exported) -> None:
        """Replace the numbers by those of another process. Ignores unknown metrics."""
        for name, labels, numbers in exported.series:
            family = self._families.get(name)
            if family is not None:
                one = self.distribution(family, *labels) if family.bounds else self.number(family, *labels)
                one.restore(numbers)

    def registry(self, exported: Exported, labels: dict[str, str]) -> CollectorRegistry:
        """The numbers, each series with the additional `labels`, for a writer of the library."""
        registry = CollectorRegistry()
        registry.register(_Numbers(self._families, exported, labels))
        return registry

    def _one(self, family: Family, labels: Labels, make: Callable[[], Made]) -> Made:
        assert len(labels) == len(family.labels), f"{family.name} has the labels {family.labels}"
        key = (family.name, labels)
        if key not in self._series:
            self._series[key] = make()
        made: Made = self._series[key]
        return made


class _Numbers(Collector):
    def __init__(self, families: dict[str, Family], exported: Exported, labels: dict[str, str]) -> None:
        self._families = families
        self._exported = exported
        self._labels = labels

    def collect(self) -> Iterator[Any]:
        by_family: dict[str, dict[Labels, tuple[float, ...]]] = {name: {} for name in self._families}
        for name, labels, numbers in self._exported.series:
            by_family[name][labels] = numbers
        for name, family in self._families.items():
            yield self._family(family, by_family[name])

    def _family(self, family: Family, series: dict[Labels, tuple[float, ...]]) -> Any:
        names = (*self._labels, *family.labels)
        make = {"counter": CounterMetricFamily, "gauge": GaugeMetricFamily, "histogram": HistogramMetricFamily}
        made: Any = make[family.kind](family.name, family.text, labels=names)
        for labels, numbers in series.items():
            values = (*self._labels.values(), *labels)
            if family.kind == "histogram":
                total, *counts = numbers
                bounds = (*map(floatToGoString, family.bounds), "+Inf")
                made.add_metric(values, list(zip(bounds, accumulate(counts), strict=True)), total)
            else:
                made.add_metric(values, numbers[0])
        return made
